// What a specialisation of the backward kernel for Blackwell costs (device/bwd_sm100.cuh): columns
// of tensor memory, shared memory, registers. The specialisation itself is BwdConfig.
#pragma once

#include "core/config_backward.h"

namespace fovea::core {

// The head dimensions that a configuration has for a problem's: 64, 128, or 192 with values of 128.
constexpr HeadDims backward_head_dims_sm100(int32 head_dim, int32 head_dim_v) {
  if (head_dim > 128) return {192, 128};
  return head_dim > 64 || head_dim_v > 64 ? HeadDims{128, 128} : HeadDims{64, 64};
}

inline constexpr int32 backward_threads_sm100 = 4 * 128;

// First columns of the accumulators in tensor memory: 128 lanes, 512 columns of 32 bits. Scores and
// dP are transposed: a lane is a key, a column a query. A dash is an alias; what has to be over
// before the later one is written stands in Multiply100, at the product that writes it.
//
//   head_dim 64       | scores 128 | dP 128 | dv 64 | dk 64 | dq 64 |
//   head_dim 128      | scores 128 | dv 128 | dP 128 - dq | dk 128 |
//   the same, pair    | scores 128, its right half - dq | dv 128 | dP 128 | dk 128 |
//   head_dim 192      | dv 128 | dk 192 | scores 128, 64 - dP 128 - dq 192 over both |
//
// P lies in the left half of the scores, dS^T in the left half of dP (weight_column()).
struct BackwardColumns {
  int32 scores, dp, dv, dk, dq;
  int32 dq_width;
};

constexpr BackwardColumns backward_columns(const BwdConfig& c) {
  if (c.head_dim == 64)
    return {.scores = 0, .dp = 128, .dv = 256, .dk = 320, .dq = 384, .dq_width = 64};
  if (c.head_dim == 192) {
    return {.scores = 320, .dp = 384, .dv = 0, .dk = 128, .dq = 320, .dq_width = 192};
  }
  if (c.pair) return {.scores = 0, .dp = 256, .dv = 128, .dk = 384, .dq = 64, .dq_width = 64};
  return {.scores = 0, .dp = 256, .dv = 128, .dk = 384, .dq = 256, .dq_width = 128};
}

// Where queries 32 chunk + 0..31 of P or dS^T lie, two in a column, counted from the scores or dP.
// A warpgroup computes chunks w and w + 2 and puts them where its own chunk w has been read by
// then.
constexpr int32 weight_column(int32 chunk) { return 32 * (chunk % 2) + 16 * (chunk / 2); }

constexpr bool overlap(int32 a, int32 a_width, int32 b, int32 b_width) {
  return a < b + b_width && b < a + a_width;
}
constexpr bool dq_over_dp(const BwdConfig& c) {
  const BackwardColumns at = backward_columns(c);
  return overlap(at.dq, at.dq_width, at.dp, 128);
}
constexpr bool dq_over_scores(const BwdConfig& c) {
  const BackwardColumns at = backward_columns(c);
  return overlap(at.dq, at.dq_width, at.scores, 128);
}
constexpr bool dq_over_weights(const BwdConfig& c) {
  const BackwardColumns at = backward_columns(c);
  return overlap(at.dq, at.dq_width, at.scores, 64);
}
constexpr bool dp_over_scores(const BwdConfig& c) {
  const BackwardColumns at = backward_columns(c);
  return overlap(at.dp, 128, at.scores, 128);
}

// Stages of q tiles. In a pair, q for the scores and q for dk are two tiles of one stage each.
constexpr int32 query_stages(const BwdConfig& c) { return c.pair || c.head_dim == 192 ? 1 : 2; }

// Columns of dq that go to global memory at a time; two such units are on their way.
constexpr int32 dq_unit_columns(const BwdConfig& c) { return c.pair ? 16 : 32; }

// Of them, how many a tile adds from registers, past shared memory, which binds. In turns none
// does, so that one thread knows when all have been added.
constexpr int32 dq_direct_units(const BwdConfig& c) {
  return c.deterministic ? 0 : backward_columns(c).dq_width / dq_unit_columns(c) / 4;
}

// Dynamic shared memory. A pair holds what a product splits along its columns a second time: 256
// keys x half of the columns of k, 128 rows x half of those of q and dout; and dS for its peer.
constexpr int32 shared_bytes_sm100(const BwdConfig& c) {
  const int32 panel = 128 * 2 * panel_columns;  // 128 rows
  const int32 qk = c.head_dim / panel_columns;
  const int32 v = c.head_dim_v / panel_columns;
  const int32 dscores = 2 * panel;
  const int32 dq = 2 * dq_unit_columns(c) * 128 * 4;
  const int32 rest = 3072;  // rows, barriers
  if (c.pair) return (qk + v + qk + qk + v) * panel + dscores + panel + dq + rest;
  return (qk + v + query_stages(c) * qk + v) * panel + dscores + dq + rest;
}

// Registers that setmaxnreg leaves to each thread: two warpgroups compute, and the one that loads
// has to look for what bias and mask hide.
inline constexpr int32 backward_reduce_registers = 80;
constexpr int32 backward_other_registers(const BwdConfig& c) {
  return hides_anywhere(c) ? 112 : 80;
}
constexpr int32 backward_compute_registers(const BwdConfig& c) {
  return (512 - backward_reduce_registers - backward_other_registers(c)) / 2;
}

}  // namespace fovea::core
