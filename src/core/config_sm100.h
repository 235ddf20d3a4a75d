// What the forward kernel for Blackwell is specialised on (device/fwd_sm100.cuh), and what a
// specialisation costs. Fields that both chips' kernels have are named as in FwdConfig; parameters
// are FwdParams, with boxes of the maps q {64, 128}, k {64, key_rows_of}, v {64, tile_k}, out
// {64, 128}.
#pragma once

#include "core/config.h"

namespace fovea::core {

struct Fwd100Config {
  DType dtype = DType::bf16;      // of q, k and v: bf16 or f16
  DType out_dtype = DType::bf16;  // dtype or f32
  int32 head_dim = 128;           // the problem's, rounded up to 16; what is missing reads as zero
  int32 head_dim_v = 128;         // likewise, of v and out
  int32 query_tiles = 2;          // of 128 rows, in ping-pong; 1: two score tiles of keys instead
  int32 tile_k = 128;             // keys per step
  int32 stages = 3;               // of the ring that tiles of k and v share
  int32 first_part = 96;  // keys whose weights are handed over first: their product starts early
  int32 polynomial = 2;   // of 16 exponentials, so many by polynomial on the FMA units
  int32 polynomial_degree = 3;  // 3: as good as bf16 weights; 4: as an fp32 LSE, or fp16 weights
  SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard;
  ScoreTransform transform = ScoreTransform::none;
  bool bound_right = false;  // causal, or a window's right bound: keys end by row
  bool bound_left = false;   // a window's left bound: keys begin by row
  bool ragged = false;       // cu_seqlens, seqused or a block table are given
  bool has_sink = false;
  Source source = Source::tma;  // or paged
  bool packed = false;          // the query heads that share a key/value head are rows of one tile
  bool split = false;  // tiles are parts of the keys; they leave out and lse of a part, in fp32
  bool has_alibi = false;
  bool has_bias = false;
  DType bias_dtype = DType::f32;
  bool has_mask = false;
  bool has_dropout = false;
  bool tma_out = true;     // out has out_dtype == dtype and strides that the copy engine takes
  bool out_apart = true;   // out is staged in memory of its own, not in that of q
  bool persistent = true;  // CTAs take tile after tile
  // Counts on products being executed in the order of issue. The manual promises that only for
  // products into one accumulator; without it the next scores wait for the weights' product.
  bool issue_order = false;
  // Two CTAs share their products: each brings its own query tiles and half of each tile of keys
  // and values. For keys that all rows see (is_dense()), and head_dim_v a multiple of 128.
  bool cta_pair = false;
  // Further tiles come from the hardware's queue of CTAs that have not started, not from a counter.
  bool launch_control = false;
  // sm_103a: tensor memory gives the largest of the scores together with them.
  bool max_with_load = false;
  bool operator==(const Fwd100Config&) const = default;
};

inline constexpr int32 query_tile_rows = 128;  // lanes of tensor memory
inline constexpr int32 tensor_columns = 512;

constexpr bool is_windowed(const Fwd100Config& c) { return c.bound_left || c.bound_right; }
// As for FwdConfig.
constexpr bool modifies_scores(const Fwd100Config& c) {
  return c.has_alibi || c.has_bias || c.has_mask;
}
constexpr bool rows_differ(const Fwd100Config& c) {
  return is_windowed(c) || c.has_bias || c.has_mask || c.has_dropout;
}
constexpr DType stored_dtype(const Fwd100Config& c) { return c.split ? DType::f32 : c.out_dtype; }
constexpr int32 rows_of(const Fwd100Config& c) { return query_tile_rows * c.query_tiles; }
constexpr int32 ctas_of(const Fwd100Config& c) { return c.cta_pair ? 2 : 1; }
// Every row of a tile visits the same keys, in one piece.
constexpr bool is_dense(const Fwd100Config& c) {
  return !is_windowed(c) && !c.ragged && !c.packed && !c.split && c.source == Source::tma;
}
constexpr int32 query_box_rows(const Fwd100Config&) { return query_tile_rows; }
constexpr int32 out_box_rows(const Fwd100Config&) { return query_tile_rows; }
// A warpgroup of softmax for each query tile, one for corrections, and one of single warps.
constexpr int32 threads_of(const Fwd100Config& c) { return 128 * (c.query_tiles + 2); }

// The correction warps act at every tile; with sum_guard they only finish rows.
constexpr bool is_corrected(const Fwd100Config& c) { return c.softmax != SoftmaxPolicy::sum_guard; }

// Columns of tensor memory, 32 bits each, 128 rows in its lanes:
//
//   0        128      256                                      512
//   | scores | scores | output ............ | weights weights  |     if they fit; else
//   | weights| weights|                                              over half of the scores
constexpr int32 score_column(int32 slot) { return 128 * slot; }
constexpr int32 output_column(const Fwd100Config& c, int32 query_tile) {
  return 256 + query_tile * c.head_dim_v;
}
constexpr bool weights_apart(const Fwd100Config& c) {
  return output_column(c, c.query_tiles) + c.tile_k <= tensor_columns;
}
constexpr int32 weight_column(const Fwd100Config& c, int32 slot) {
  return weights_apart(c) ? tensor_columns - c.tile_k / 2 * (2 - slot) : score_column(slot);
}

// Dynamic shared memory: q, the ring, out where it is apart, then barriers, rows and tiles.
constexpr int32 shared_bytes_but_stages(const Fwd100Config& c) {
  const int32 panel = query_tile_rows * 2 * panel_columns;
  const int32 out = c.out_apart ? panels(c.head_dim_v) : 0;
  return c.query_tiles * (panels(c.head_dim) + out) * panel + 3072;
}
// What a CTA loads of a tile: of keys its rows, of values its columns.
constexpr int32 key_rows_of(const Fwd100Config& c) { return c.tile_k / ctas_of(c); }
constexpr int32 value_rows_of(const Fwd100Config& c) { return c.tile_k; }
constexpr int32 value_columns_of(const Fwd100Config& c) { return c.head_dim_v / ctas_of(c); }
constexpr int32 stage_bytes(const Fwd100Config& c) {
  const int32 keys = key_rows_of(c) * panels(c.head_dim);
  const int32 values = c.tile_k * panels(value_columns_of(c));
  return (keys > values ? keys : values) * 2 * panel_columns;
}
constexpr int32 shared_bytes(const Fwd100Config& c) {
  return shared_bytes_but_stages(c) + c.stages * stage_bytes(c);
}

// Registers that setmaxnreg leaves to each thread; together what the launch takes at entry.
constexpr int32 softmax_registers(const Fwd100Config& c) { return c.query_tiles == 2 ? 176 : 224; }
constexpr int32 correction_registers(const Fwd100Config& c) {
  return c.query_tiles == 2 ? 80 : 160;
}
constexpr int32 other_registers(const Fwd100Config& c) { return c.query_tiles == 2 ? 80 : 120; }

}  // namespace fovea::core
