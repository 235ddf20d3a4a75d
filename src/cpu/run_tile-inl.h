// Picks the tile's form from the configuration. Included once per instruction set (see
// forward_tile.cpp).

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

// The exponential is as precise as the dtype needs: degree 4 is 2.9e-6 relative.
inline void run_tile(const core::Problem& problem, const ForwardConfig& config,
                     const core::Tile& tile, const TileScratch& scratch, const Packs& packs,
                     const Partials& partials, ForwardStatistics& statistics) {
  const auto run = [&](auto&& rows) { rows.run(packs, partials); };
  if (config.few_rows) {
    using Staged = Float32Stream<LoadF32>;
#if HWY_TARGET == HWY_AVX3
    if (config.bf16_products && bf16_streams(problem)) {
      return run(
          StreamedTile<Bf16Stream, Bf16Stream, 4>(problem, config, tile, scratch, statistics));
    }
#endif
    switch (problem.q.dtype) {
      case core::DType::bf16:
        return run(StreamedTile<Float32Stream<LoadBf16>, Staged, 4>(problem, config, tile, scratch,
                                                                    statistics));
      case core::DType::f16:
        return run(StreamedTile<Float32Stream<LoadF16>, Staged, 4>(problem, config, tile, scratch,
                                                                   statistics));
      default:
        return run(StreamedTile<Staged, Staged, 6>(problem, config, tile, scratch, statistics));
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

inline void run_pack(const core::Problem& problem, const ForwardConfig& config, int64 batch,
                     int64 block, float* staging, float* slot, int64 slots_apart) {
  const core::Sequence sequence = core::sequence_at(problem, batch);
  const int64 first_key = block * config.block_k;
  const int64 count = core::min64(config.block_k, sequence.length_k - first_key);
  // Keys in panels, the heads of a panel after each other: memory's order where the heads of a key
  // lie side by side.
  for (int64 key = 0; key < count; key += panel_width) {
    const KeyPart part{first_key, count, key, core::min64(count, key + panel_width)};
    for (int64 head = 0; head < problem.heads_kv; ++head) {
      const KeyRows keys{problem, problem.k, sequence, batch, head};
      const KeyRows values{problem, problem.v, sequence, batch, head};
      float* const packed_keys = slot + head * slots_apart;
      float* const packed_values = packed_keys + Packs::key_floats(problem, config);
#if HWY_TARGET == HWY_AVX3
      if (config.bf16_products) {
        pack<Bf16Products>(keys, values, part, staging, packed_keys, packed_values);
        continue;
      }
#endif
      pack<Float32Products>(keys, values, part, staging, packed_keys, packed_values);
    }
  }
}

inline const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
