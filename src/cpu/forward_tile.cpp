// One tile of the forward pass: a block of packed query rows against its keys, block after block.
//
//   for each block of keys:
//     pack K, V (product-inl.h), unless they were packed ahead for all tiles
//     for each strip of rows, so many that Q, S, O and the packs stay in the second-level cache:
//       S = Q K^T       per panel of keys, per block of kernel_rows rows that sees it
//       P = softmax(S)  per row, in place      (softmax-inl.h)
//       O += P V        per panel of columns, per block of rows
//
// Cycle budget on a core with one 512-bit FMA per cycle, per row and 16 keys at head_dim 128: 128
// for each product, about 12 for the exponentials, about 2 for packing at 768 rows.
// With few rows (decode) K and V are not worth packing: stream-inl.h reads them in place.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward_tile.cpp"
// Targets that differ too little to be worth compiling for, and scalable vectors (see
// product-inl.h).
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include "cpu/forward_tile.h"

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <array>
#include <cstring>
#include <utility>

#include "core/dropout.h"
#include "core/softmax.h"
#include "core/tiles.h"

// These build on each other in this order.
// clang-format off
#include "cpu/product-inl.h"
#include "cpu/bf16_product-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/stream-inl.h"
#include "cpu/bf16_stream-inl.h"
#include "cpu/run_tile-inl.h"
// clang-format on

#if HWY_ONCE
namespace fovea::cpu {

HWY_EXPORT(run_tile);
HWY_EXPORT(run_pack);
HWY_EXPORT(target_name);

void forward_tile(const core::Problem& problem, const ForwardConfig& config, const core::Tile& tile,
                  const TileScratch& scratch, const Packs& packs, const Partials& partials,
                  ForwardStatistics& statistics) {
  HWY_DYNAMIC_DISPATCH(run_tile)(problem, config, tile, scratch, packs, partials, statistics);
}

void pack_block(const core::Problem& problem, const ForwardConfig& config, core::int64 batch,
                core::int64 block, float* staging, float* slot, core::int64 slots_apart) {
  HWY_DYNAMIC_DISPATCH(run_pack)(problem, config, batch, block, staging, slot, slots_apart);
}

bool has_bf16_products() {
#if HWY_ARCH_X86 && (HWY_TARGETS & HWY_AVX3)
  return (hwy::SupportedTargets() & HWY_AVX3) != 0 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

const char* instruction_set() {
  return has_bf16_products() ? "AVX-512 with BF16" : HWY_DYNAMIC_DISPATCH(target_name)();
}

core::int64 partial_row(const core::Problem& problem, const core::Sequence& sequence,
                        core::int64 query, core::int32 head) {
  const core::int64 rows = problem.is_varlen_q() ? problem.total_q : problem.seqlen_q;
  return (sequence.batch_q * rows + sequence.row_q + query) * problem.heads_q + head;
}

std::size_t layout_scratch(const core::Problem& problem, const ForwardConfig& config,
                           std::byte* base, TileScratch& scratch) {
  std::size_t offset = 0;
  const auto take = [&](core::int64 count, std::size_t element_bytes) {
    // Null when only the size is asked for, where adding to it would be undefined.
    std::byte* at = base == nullptr ? nullptr : base + offset;
    offset += (static_cast<std::size_t>(count) * element_bytes + 63) / 64 * 64;
    return at;
  };
  const auto floats = [&](core::int64 count) {
    return reinterpret_cast<float*>(take(count, sizeof(float)));
  };
  const core::int64 rows = config.block_q * config.heads_per_tile;
  const core::int64 strip = config.strip_q * config.heads_per_tile;
  scratch.query_stride = padded(problem.head_dim);
  scratch.score_stride = config.block_k + max_lanes;
  scratch.out_stride = padded(problem.head_dim_v);
  scratch.queries = floats(rows * scratch.query_stride);
  scratch.scores = floats(strip * scratch.score_stride);
  scratch.out = floats(rows * scratch.out_stride);
  scratch.sums = floats(rows * max_lanes);
  scratch.reference = floats(rows);
  scratch.visible = reinterpret_cast<VisibleKeys*>(take(strip, sizeof(VisibleKeys)));
  if (config.pack_slots == 0) {
    scratch.keys = floats(config.block_k * config.heads_per_tile * scratch.query_stride);
    scratch.values = floats(config.block_k * config.heads_per_tile * scratch.out_stride);
  }
  scratch.staging = floats(core::max64(4 * scratch.query_stride, 2 * scratch.out_stride));
  scratch.key_rows =
      reinterpret_cast<const void**>(take(config.block_k + most_keys_ahead + 8, sizeof(void*)));
  return offset;
}

}  // namespace fovea::cpu
#endif  // HWY_ONCE
