// One item of the backward pass: key blocks of one KV head, each against all rows that see it.
//
//   for each block of keys:
//     pack K^T, V^T and K (product-inl.h)
//     for each strip of rows, so many that all of this stays in the second-level cache:
//       S = Q K^T, dP = dO V^T       per block of kernel_rows rows and panel of keys
//       P = exp(S - lse), dS = P (dP - delta)    per row, in place
//       dV += P^T dO, dK += dS^T Q   per block of kernel_rows keys and panel of columns
//       dQ += dS K                   per block of rows and panel of columns
//
// No S x S memory, no atomics: dK and dV belong to the item, and each part of a split head has a dQ
// of its own.
//
// Cycle budget on a core with one 512-bit FMA per cycle, per row and 16 keys at head_dim 128: 640
// for the five products, about 20 for P and dS, about 4 for loading rows and packing.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward_tile.cpp"
// As in forward_tile.cpp.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include "cpu/backward_tile.h"

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
#include "cpu/softmax-inl.h"
#include "cpu/backward_tile-inl.h"
// clang-format on

#if HWY_ONCE
namespace fovea::cpu {

HWY_EXPORT(run_prepare_rows);
HWY_EXPORT(run_backward_item);
HWY_EXPORT(run_finish_rows);

void prepare_rows(const core::Problem& problem, const core::Gradients& gradients,
                  const BackwardConfig& config, const BackwardItem& item,
                  const BackwardScratch& scratch, const BackwardShared& shared) {
  HWY_DYNAMIC_DISPATCH(run_prepare_rows)(problem, gradients, config, item, scratch, shared);
}

void backward_item(const core::Problem& problem, const core::Gradients& gradients,
                   const BackwardConfig& config, const BackwardItem& item,
                   const BackwardScratch& scratch, const BackwardShared& shared) {
  HWY_DYNAMIC_DISPATCH(run_backward_item)(problem, gradients, config, item, scratch, shared);
}

void finish_rows(const core::Problem& problem, const core::Gradients& gradients,
                 const BackwardConfig& config, const BackwardItem& item,
                 const BackwardScratch& scratch, const BackwardShared& shared) {
  HWY_DYNAMIC_DISPATCH(run_finish_rows)(problem, gradients, config, item, scratch, shared);
}

core::int64 first_row(const core::Problem& problem, const core::Sequence& sequence,
                      core::int32 head_kv) {
  const core::int64 first_query =
      problem.is_varlen_q() ? sequence.row_q : sequence.batch_q * problem.seqlen_q;
  return first_query * problem.heads_q + head_kv * problem.group_size() * sequence.length_q;
}

std::size_t layout_scratch(const core::Problem& problem, const BackwardConfig& config,
                           std::byte* base, BackwardScratch& scratch) {
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
  const core::int64 columns = padded(problem.head_dim);
  const core::int64 columns_v = padded(problem.head_dim_v);
  const core::int64 keys = padded(config.block_k, 2 * max_lanes);
  scratch.score_stride = keys + max_lanes;
  scratch.dkey_stride = columns;
  scratch.dvalue_stride = columns_v;
  scratch.weights = floats(config.strip_q * scratch.score_stride);
  scratch.dscores = floats(config.strip_q * scratch.score_stride);
  scratch.visible = reinterpret_cast<VisibleKeys*>(take(config.strip_q, sizeof(VisibleKeys)));
  scratch.transposed_keys = floats(keys * columns);
  scratch.transposed_values = floats(keys * columns_v);
  scratch.keys = floats(keys * columns);
  scratch.dkeys = floats(keys * scratch.dkey_stride);
  scratch.dvalues = floats(keys * scratch.dvalue_stride);
  scratch.slopes = floats(keys);
  scratch.kept = floats(keys);
  scratch.staging = floats(4 * core::max64(columns, columns_v));
  return offset;
}

}  // namespace fovea::cpu
#endif  // HWY_ONCE
