// What the forward kernel for Blackwell is specialised on (device/fwd_sm100.cuh), and what a
// specialisation costs. Fields that both chips' kernels have are named as in FwdConfig; parameters
// are FwdParams, with boxes of the maps q {64, 128}, k {64, key_rows_of}, v {64, tile_k}, out
// {64, 128}. In 8 bits they are FwdFp8Params, with operands as core/fp8.h describes them and boxes
// q {pattern, 128}, k {pattern, key_rows_of}, pattern = pattern_bytes(head_dim), v {tile_k,
// value_columns_of}.
#pragma once

#include "core/config.h"
#include "core/fp8.h"

namespace fovea::core {

struct Fwd100Config {
  DType dtype = DType::bf16;      // of q, k and v: bf16, f16, e4m3 or e5m2
  DType out_dtype = DType::bf16;  // dtype or f32; in 8 bits any
  int32 head_dim = 128;    // the problem's, rounded up to 16 (32 in 8 bits); the rest reads as zero
  int32 head_dim_v = 128;  // of v and out, rounded up to 16
  int32 query_tiles = 2;   // of 128 rows, in ping-pong; 1: two score tiles of keys instead
  int32 tile_k = 128;      // keys per step
  int32 stages = 3;        // of the ring that tiles of k and v share
  int32 first_part = 96;   // keys whose weights are handed over first: their product starts early
  int32 polynomial = 2;    // of 16 exponentials, so many by polynomial on the FMA units
  // 2: as good as 8-bit weights; 3: as bf16 ones; 4: as an fp32 LSE, or fp16 weights
  int32 polynomial_degree = 3;
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
  bool trace = false;  // one CTA writes a timeline
  bool operator==(const Fwd100Config&) const = default;
};

inline constexpr int32 query_tile_rows = 128;  // lanes of tensor memory
inline constexpr int32 tensor_columns = 512;

constexpr bool is_eight_bit(const Fwd100Config& c) { return is_eight_bit(c.dtype); }
constexpr bool is_windowed(const Fwd100Config& c) { return c.bound_left || c.bound_right; }
// As for FwdConfig.
constexpr bool modifies_scores(const Fwd100Config& c) {
  return c.has_alibi || c.has_bias || c.has_mask;
}
constexpr bool rows_differ(const Fwd100Config& c) {
  return is_windowed(c) || c.has_bias || c.has_mask || c.has_dropout;
}
// Rows whose result is not finite are computed again from what they alone see. In 8 bits they are
// not: a NaN in a value reaches all rows of the tiles that visit its block.
constexpr bool mends_rows(const Fwd100Config& c) { return rows_differ(c) && !is_eight_bit(c); }
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
//   | scores | scores | output ............ | weights weights  |     if they fit; else over half
//   | weights| weights|                                              of the scores (8 bits: a
//                                                                    quarter)
constexpr int32 score_column(int32 slot) { return 128 * slot; }
constexpr int32 output_column(const Fwd100Config& c, int32 query_tile) {
  return 256 + query_tile * c.head_dim_v;
}
constexpr int32 weight_columns(const Fwd100Config& c) {
  return c.tile_k / (is_eight_bit(c) ? 4 : 2);
}
constexpr bool weights_apart(const Fwd100Config& c) {
  return output_column(c, c.query_tiles) + 2 * weight_columns(c) <= tensor_columns;
}
constexpr int32 weight_column(const Fwd100Config& c, int32 slot) {
  return weights_apart(c) ? tensor_columns - weight_columns(c) * (2 - slot) : score_column(slot);
}

// What a CTA loads of a tile: of keys its rows, of values its columns.
constexpr int32 key_rows_of(const Fwd100Config& c) { return c.tile_k / ctas_of(c); }
constexpr int32 value_rows_of(const Fwd100Config& c) { return c.tile_k; }
constexpr int32 value_columns_of(const Fwd100Config& c) { return c.head_dim_v / ctas_of(c); }

// Bytes of a row of q and k in shared memory, in whole rows of their swizzle.
constexpr int32 pattern_of(const Fwd100Config& c) {
  return is_eight_bit(c) ? pattern_bytes(c.head_dim) : 2 * panel_columns;
}
constexpr int32 row_bytes_of(const Fwd100Config& c) {
  return is_eight_bit(c) ? c.head_dim : 2 * panel_columns * panels(c.head_dim);
}
constexpr int32 out_row_bytes_of(const Fwd100Config& c) {
  return 2 * panel_columns * panels(c.head_dim_v);
}
// 8 bits: scales of a tile of keys arrive on a barrier of their own, since they are read after the
// keys' stage has been released. Nobody releases their slot: it is written 8 tiles later, when the
// ring has let go of that tile's values, whose product needed all of its weights. Among the 2 x 8
// loads from keys to keys those values come third at the latest.
inline constexpr int32 key_scale_slots = 8;
inline constexpr int32 most_stages_fp8 = 2 * key_scale_slots - 3;
constexpr int32 key_scale_bytes(const Fwd100Config& c) {
  return c.tile_k / scale_block * int32{sizeof(KeyScale)};
}
// Dynamic shared memory: q, the ring, out where it is apart, then barriers, rows, tiles and scales.
constexpr int32 shared_bytes_but_stages(const Fwd100Config& c) {
  const int32 out = c.out_apart ? out_row_bytes_of(c) : 0;
  const int32 scales = is_eight_bit(c) ? 1024 : 0;
  return rows_of(c) * (row_bytes_of(c) + out) + 3072 + scales;
}
constexpr int32 stage_bytes(const Fwd100Config& c) {
  const int32 keys = key_rows_of(c) * row_bytes_of(c);
  const int32 values = is_eight_bit(c) ? c.tile_k * value_columns_of(c)
                                       : c.tile_k * 2 * panel_columns * panels(value_columns_of(c));
  return keys > values ? keys : values;
}
constexpr int32 shared_bytes(const Fwd100Config& c) {
  return shared_bytes_but_stages(c) + c.stages * stage_bytes(c);
}

// Registers that setmaxnreg leaves to each thread; together what the launch takes at entry. Two
// passes over the scores need more of them where keys have scales, or many exponentials go by
// polynomial.
constexpr bool softmax_is_tight(const Fwd100Config& c) {
  return c.query_tiles == 2 && is_corrected(c) && (is_eight_bit(c) || c.polynomial > 4);
}
constexpr int32 softmax_registers(const Fwd100Config& c) {
  return softmax_is_tight(c) ? 192 : c.query_tiles == 2 ? 176 : 224;
}
constexpr int32 correction_registers(const Fwd100Config& c) {
  return softmax_is_tight(c) ? 64 : c.query_tiles == 2 ? 80 : 160;
}
constexpr int32 other_registers(const Fwd100Config& c) {
  return softmax_is_tight(c) ? 64 : c.query_tiles == 2 ? 80 : 120;
}

}  // namespace fovea::core
