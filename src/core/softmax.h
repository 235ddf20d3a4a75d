// The state of one softmax row while its keys pass by in tiles, and how partial rows combine.
//
// Logits here are in log2 units: t = score * softmax_scale * log2(e). A row keeps a reference m and
// the sum of 2^(t - m) over the keys seen; the output accumulator is on the same scale. Any finite
// m gives the same result up to rounding, as long as nothing overflows: that freedom is what the
// three policies use.
//
//   online       m is the maximum seen; every tile that exceeds it raises it and rescales the sums
//   conditional  m is raised only when the new maximum exceeds it by more than a threshold
//                (FlashAttention-4, section 3.2)
//   sum_guard    no maximum at all once a row has seen a key: exponentiate with the m known before;
//                every term is positive, so a partial sum bounds the largest of them, and only when
//                a partial sum passes the threshold is m raised, by a power of two, exactly
#pragma once

#include "core/numeric.h"
#include "core/types.h"

namespace fovea::core {

enum class SoftmaxPolicy : uint8 { online, conditional, sum_guard };

// 2^8: how far above the reference a weight may lie before the row is rescaled. fp32, bf16 and fp16
// keep their relative precision there.
inline constexpr float rescale_threshold_log2 = 8.0f;
inline constexpr float rescale_threshold = 256.0f;

struct RowState {
  float reference = -infinity;  // m; -infinity until a key is seen
  float sum = 0.0f;
};

// The reference after a tile with maximum tile_max, and the factor for what was summed before.
struct Rescale {
  float reference;
  float factor_log2;  // factor = 2^factor_log2 <= 1; zero means nothing to do
};

constexpr Rescale raise_reference(float reference, float tile_max, float threshold_log2) {
  if (!(tile_max > -infinity)) return {reference, 0.0f};       // nothing visible in the tile
  if (!(reference > -infinity)) return {tile_max, -infinity};  // first visible keys of the row
  if (!(tile_max > reference + threshold_log2)) return {reference, 0.0f};
  return {tile_max, reference - tile_max};
}

// The repair of sum_guard: the exponent of a partial sum beyond the threshold, 2^k <= sum <
// 2^(k+1).
constexpr int guard_exponent(float partial_sum) {
  return static_cast<int>(bits_of(partial_sum) >> 23) - 127;
}

// How two finished parts of a row combine: split-KV, ring attention, the sink (a part of zero
// output and lse = sink). A part is an output normalised by its own sum and its log-sum-exp
// (natural log). The neutral part is lse = -infinity, whatever its output holds: the other part
// comes back bit for bit, and weighted() selects instead of multiplying so that a NaN beside a zero
// weight is ignored.
struct Merge {
  float lse;
  float weight_a;
  float weight_b;
};

constexpr Merge merge_parts(float lse_a, float lse_b) {
  if (lse_b == -infinity) return {lse_a, lse_a == -infinity ? 0.0f : 1.0f, 0.0f};
  if (lse_a == -infinity) return {lse_b, 0.0f, 1.0f};
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float a = exp2_polynomial<6>((lse_a - top) * log2_e);
  const float b = exp2_polynomial<6>((lse_b - top) * log2_e);
  const float sum = a + b;
  return {top + natural_log(sum), a / sum, b / sum};
}

constexpr float weighted(float weight, float value) {
  return weight == 0.0f ? 0.0f : weight * value;
}

// Log-sum-exp (natural log) of a finished row; -infinity when it saw no key.
constexpr float row_lse(const RowState& row) {
  if (!(row.sum > 0.0f)) return is_nan(row.sum) ? row.sum : -infinity;
  return row.reference * ln_2 + natural_log(row.sum);
}

}  // namespace fovea::core
