// Picks the tile's form from the configuration. Included once per instruction set (see
// forward_tile.cpp).

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

// The exponential is as precise as the dtype needs: degree 4 is 2.9e-6 relative.
inline void run_tile(const core::Problem& problem, const ForwardConfig& config,
                     const core::Tile& tile, const TileScratch& scratch, const Partials& partials,
                     ForwardStatistics& statistics) {
  const auto run = [&](auto&& rows) { rows.run(partials); };
  if (config.few_rows) {
    switch (problem.q.dtype) {
      case core::DType::bf16:
        return run(StreamedTile<LoadBf16, 4>(problem, config, tile, scratch, statistics));
      case core::DType::f16:
        return run(StreamedTile<LoadF16, 4>(problem, config, tile, scratch, statistics));
      default: return run(StreamedTile<LoadF32, 6>(problem, config, tile, scratch, statistics));
    }
  }
#if HWY_TARGET == HWY_AVX3
  if (config.bf16_products) {
    return run(PackedTile<Bf16Products, 4>(problem, config, tile, scratch, statistics));
  }
#endif
  if (problem.q.dtype == core::DType::f32) {
    return run(PackedTile<Float32Products, 6>(problem, config, tile, scratch, statistics));
  }
  return run(PackedTile<Float32Products, 4>(problem, config, tile, scratch, statistics));
}

inline const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
