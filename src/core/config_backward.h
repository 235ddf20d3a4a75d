// What host and backward kernels exchange: what a kernel is specialised on, its parameters, and
// what a specialisation costs.
#pragma once

#include "core/config.h"

namespace fovea::core {

// What the backward kernels are specialised on (device/bwd_sm90.cuh, device/bwd_sm100.cuh,
// device/bwd_rows.cuh).
struct BwdConfig {
  DType dtype = DType::bf16;   // of q, k, v, out and dout: bf16 or f16
  bool wide = false;           // dq, dk and dv are f32
  int32 head_dim = 128;        // of q and k, rounded up to 64, 128, 192 or 256; what is missing
  int32 head_dim_v = 128;      // reads as zero. Likewise, of v and dout
  bool bound_right = false;    // causal, or a window's right bound
  bool bound_left = false;     // a window's left bound
  bool ragged = false;         // cu_seqlens or seqused are given
  bool deterministic = false;  // blocks of keys add to dq in the order of their keys
  bool has_softcap = false;
  bool has_alibi = false;
  bool has_bias = false;
  DType bias_dtype = DType::f32;
  bool has_mask = false;
  bool has_dropout = false;
  // Of Hopper's schedules: one warpgroup makes P and dv, the other dS and dk; see keys_of. Or dq is
  // multiplied by a warpgroup of its own, which copies and adds, too.
  bool split_products = false;
  bool dq_apart = false;
  // Two CTAs of a cluster work together. On Hopper each has keys of its own and half of the columns
  // of dq over the keys of both; on Blackwell both drive each product, over 256 keys.
  bool pair = false;
  // Blackwell's kernel (core/config_backward_sm100.h) instead of Hopper's; and of that alone:
  bool tensor_memory = false;
  bool issue_order = false;  // counts on products being executed in the order of issue
  bool trace = false;        // one CTA writes a timeline
  bool operator==(const BwdConfig&) const = default;
};

inline constexpr int32 backward_threads =
    3 * 128;                               // warps that copy, add and take turns; two warpgroups
inline constexpr int32 row_threads = 128;  // of the kernels in bwd_rows.cuh

// Each warpgroup has 64 keys, with their dk and dv; or, where registers are too few for that, both
// have the same 64 keys, one their dv and the other their dk.
constexpr int32 keys_of(const BwdConfig& c) { return c.split_products ? 64 : 128; }

// Query rows of a tile.
constexpr int32 rows_of(const BwdConfig& c) {
  return c.tensor_memory || (c.head_dim == 64 && !c.split_products) ? 128 : 64;
}

// Rows of the boxes in which q and dout come.
constexpr int32 query_box_rows(const BwdConfig& c) { return c.pair ? 64 : rows_of(c); }

// Sums of dq of a block of rows.
constexpr int32 dq_block_floats(const BwdConfig& c) { return rows_of(c) * c.head_dim; }

// Counters of turns for a block of rows.
constexpr int32 turn_counters(const BwdConfig& c) { return c.pair ? 2 : 1; }

// The head dimensions that a configuration has for a problem's.
struct HeadDims {
  int32 qk, v;
};
constexpr HeadDims backward_head_dims(int32 head_dim, int32 head_dim_v, bool split_products) {
  const int32 qk = round_up(head_dim, panel_columns);
  const int32 v = round_up(head_dim_v, panel_columns);
  if (split_products) return {qk, v};
  return {qk < v ? v : qk, qk < v ? v : qk};
}

// Some of the keys that position lets a row see may be hidden from it.
template <typename Config>
constexpr bool hides_anywhere(const Config& c) {
  return c.has_mask || c.has_bias;
}

// What a raw product meets beside the scale, or a weight beside the softmax.
template <typename Config>
constexpr bool modifies_backward(const Config& c) {
  return c.has_softcap || c.has_alibi || c.has_dropout || hides_anywhere(c);
}

// Whether 64 keys and all columns fit the registers of a warpgroup: what ptxas 13.0 compiles
// without spilling.
constexpr bool fits_whole_columns(const BwdConfig& c) {
  if (c.head_dim > 128 || c.head_dim_v > 128) return false;
  const bool plain = !modifies_backward(c);
  const int32 modifiers = c.has_softcap + c.has_alibi;
  const bool light = !c.has_dropout && !hides_anywhere(c) && modifiers == 1;
  return plain || (light && (c.has_softcap || c.head_dim > 64 || c.head_dim_v > 64));
}

// Whether a third warpgroup can have dq: 208 registers are then left to each of the others, enough
// at 64 columns where nothing modifies a score. At 128 it lost to the two of them in one rhythm.
constexpr bool fits_dq_apart(const BwdConfig& c) {
  return !c.split_products && !modifies_backward(c) && c.head_dim <= 64 && c.head_dim_v <= 64;
}

// Under a causal mask every block of keys begins with rows that no later block sees: in turns, the
// last blocks come first, so that none waits to begin. Otherwise the longest blocks come first.
constexpr bool last_keys_first(const BwdConfig& c) { return c.deterministic && c.bound_right; }

// Whether each block of keys begins at rows of its own and goes round, so that the multiprocessors
// do not all add to the same rows of dq at once: where what they add binds.
constexpr bool goes_round(const BwdConfig& c) {
  return c.split_products && !c.pair && !c.deterministic && !c.bound_right && !c.bound_left;
}

// Hopper sums dq in units of 64 rows x 64 columns, in the order of a warpgroup's accumulator. A
// tile of 64 rows has them side by side, one of 128 rows under each other.
inline constexpr int32 dq_unit_floats = 64 * 64;
constexpr int32 dq_units_of(const BwdConfig& c) {
  return rows_of(c) / 64 * (c.head_dim / panel_columns);
}
// Of them, how many a CTA multiplies, and buffers in which they wait to be added: one for each
// warpgroup at least.
constexpr int32 dq_units_of_cta(const BwdConfig& c) { return dq_units_of(c) / (c.pair ? 2 : 1); }
constexpr int32 dq_buffers(const BwdConfig& c) {
  return dq_units_of_cta(c) < 2 ? 2 : dq_units_of_cta(c);
}

// Whether Hopper's CTAs work in pairs: where what they add to dq would bind. A warpgroup then has
// one panel of its CTA's half of the columns.
constexpr bool fits_pair(const BwdConfig& c) { return c.split_products && c.head_dim == 256; }

// Stages of dS. A pair has no room for a second one.
constexpr int32 score_stages(const BwdConfig& c) { return c.pair ? 1 : 2; }

// What a pair holds beside: half of the columns of the other CTA's keys, and its dS.
constexpr int32 peer_bytes(const BwdConfig& c) {
  return c.pair ? keys_of(c) * c.head_dim + keys_of(c) * rows_of(c) * 2 : 0;
}

// Stages of dout; q has two.
constexpr int32 bytes_but_dout(const BwdConfig& c) {
  return 2 * keys_of(c) * (c.head_dim + c.head_dim_v) + 2 * rows_of(c) * 2 * c.head_dim +
         score_stages(c) * keys_of(c) * rows_of(c) * 2 + peer_bytes(c) +
         dq_buffers(c) * dq_unit_floats * 4 + 4 * rows_of(c) * 4 + 1024;
}
constexpr int32 dout_stages(const BwdConfig& c) {
  return bytes_but_dout(c) + 2 * rows_of(c) * 2 * c.head_dim_v <= shared_limit_bytes ? 2 : 1;
}

// Dynamic shared memory: k and v, stages of q and dout, dS, dq on its way out, rows, barriers.
constexpr int32 shared_bytes(const BwdConfig& c) {
  return bytes_but_dout(c) + dout_stages(c) * rows_of(c) * 2 * c.head_dim_v;
}

// The gradient of an additive bias, which is summed over the dimensions of extent 1. A CTA has a
// tile of its elements and one of `parts` equal parts of what is summed.
struct BiasGradient {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64 extent[4] = {};  // batch, head, query, key
  int64 stride[4] = {};
  int32 q_tiles = 0;  // tiles of the gradient along its queries and its keys
  int32 key_tiles = 0;
  int32 parts = 1;
  float* sums = nullptr;  // scratch, where there are several parts: [part][element in row order]
};

inline constexpr int32 bias_tile = 64;  // queries, and keys, of a tile
inline constexpr int32 bias_threads = 128;
inline constexpr int32 sink_threads = 256;

// The parameter of the backward kernels. Boxes of the maps, all with the 128-byte swizzle and
// dimensions (head_dim, row, head, batch): q and dout {64, query_box_rows}, k and v {64,
// keys_of}.
//
// Blocks of rows_of query rows are numbered over all sequences and heads (device/bwd_blocks.h);
// lse_log2 and delta hold one number for each of their rows, dq_sums dq_block_floats for each,
// in the order in which the chip's kernel finds them (device/bwd_rows.cuh).
struct BwdParams {
  TensorMap q, k, v, dout_map;

  Rows q_rows, k_rows, v_rows;  // the same again, for the gradient of the bias
  const uint16* out = nullptr;
  int64 out_stride[4] = {};  // batch, row, head, column; elements
  const uint16* dout = nullptr;
  int64 dout_stride[4] = {};
  const float* lse = nullptr;
  int64 lse_stride[3] = {};  // batch, head, row
  const float* dlse = nullptr;
  int64 dlse_stride[3] = {};

  float* lse_log2 = nullptr;    // scratch; infinity where a row sees nothing
  float* delta = nullptr;       // scratch: dout out - dlse
  float* dq_sums = nullptr;     // scratch
  uint32* scheduler = nullptr;  // scratch: blocks of keys dealt beyond the first of each CTA
  uint32* turns = nullptr;      // scratch, deterministic: blocks of keys that have added to a block
                            // (pair: pairs of blocks, and one counter for each half of its rows)

  void* dq = nullptr;
  int64 dq_stride[4] = {};
  void* dk = nullptr;
  int64 dk_stride[4] = {};
  void* dv = nullptr;
  int64 dv_stride[4] = {};
  bool paired = false;         // 16-bit dk and dv: two neighbours of a row lie in an aligned word
  bool dq_in_quads = false;    // likewise four, of dq
  bool out_in_octets = false;  // likewise eight, of out and dout
  bool dkv_in_words = false;   // as many of dk and dv as 16 bytes hold

  const int32* cu_seqlens_q = nullptr;
  const int32* cu_seqlens_k = nullptr;
  const int32* seqused_q = nullptr;
  const int32* seqused_k = nullptr;

  int32 batch = 0;  // sequences; one more where rows lie behind the last one
  int32 sequences = 0;
  int32 seqlen_q = 0;  // rows per sequence, or of the longest
  int32 seqlen_k = 0;
  int32 total_q = 0;  // rows in all (varlen)
  int32 total_k = 0;
  int32 heads_q = 0;
  int32 heads_kv = 0;
  int32 group_size = 1;
  int32 head_dim = 0;
  int32 head_dim_v = 0;
  int32 window_left = -1;
  int32 window_right = -1;

  float scale = 0.0f;       // of the scores, and of dq and dk
  float scale_log2 = 0.0f;  // the same in log2 units

  int32 q_blocks = 0;    // of the longest sequence
  int32 key_blocks = 0;  // of the longest sequence
  int32 tiles = 0;       // blocks of keys of all sequences and KV heads
  int32 section = 1;     // (sequence, KV head) pairs whose tiles are dealt together, longest first

  // What modifies scores, as in the forward pass; strides by (batch, head, query, key).
  float softcap_in = 0.0f;   // scale / softcap
  float softcap_out = 0.0f;  // softcap in log2 units
  const float* alibi = nullptr;
  int64 alibi_stride[2] = {};
  const void* bias = nullptr;
  int64 bias_stride[4] = {};
  const uint8* mask = nullptr;
  int64 mask_stride[4] = {};
  const float* sink = nullptr;
  int64 sink_stride = 0;
  uint32 dropout_threshold = 0;  // core/dropout.h
  uint32 dropout_key[2] = {};
  float keep_scale = 1.0f;  // 1 / (1 - probability)

  float* dsink = nullptr;  // of bwd_sink (device/bwd_rows.cuh)
  int64 dsink_stride = 0;
  BiasGradient dbias;  // of device/bwd_bias.cuh

  TraceBuffer trace;  // of a configuration that traces
};

}  // namespace fovea::core
