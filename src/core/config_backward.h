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
  int32 head_dim = 128;        // of q, k, v, rounded up: 64 or 128; what is missing reads as zero
  bool bound_right = false;    // causal, or a window's right bound
  bool bound_left = false;     // a window's left bound
  bool ragged = false;         // cu_seqlens or seqused are given
  bool deterministic = false;  // blocks of keys add to dq in the order of their keys
  // Blackwell's kernel (core/config_backward_sm100.h) instead of Hopper's; and of that alone:
  bool tensor_memory = false;
  bool pair = false;         // two CTAs drive each product, over 256 keys
  bool issue_order = false;  // counts on products being executed in the order of issue
  bool operator==(const BwdConfig&) const = default;
};

inline constexpr int32 backward_keys = 128;         // of a tile: 64 for each computing warpgroup
inline constexpr int32 backward_threads = 3 * 128;  // copying and adding warps, two warpgroups
inline constexpr int32 row_threads = 128;           // of the kernels in bwd_rows.cuh

// Query rows of a tile. Hopper: dS, dq and the pair of q and dout tiles then take the same room.
constexpr int32 rows_of(const BwdConfig& c) {
  return c.tensor_memory || c.head_dim == 64 ? 128 : 64;
}

// Sums of dq of a block of rows.
constexpr int32 dq_block_floats(const BwdConfig& c) { return rows_of(c) * c.head_dim; }

// Counters of turns for a block of rows.
constexpr int32 turn_counters(const BwdConfig& c) { return c.pair ? 2 : 1; }

// Under a causal mask every block of keys begins with rows that no later block sees: in turns, the
// last blocks come first, so that none waits to begin. Otherwise the longest blocks come first.
constexpr bool last_keys_first(const BwdConfig& c) { return c.deterministic && c.bound_right; }

// Hopper sums dq in units of 64 rows x 64 columns, in the order of a warpgroup's accumulator; a
// tile has two, side by side or one under the other.
inline constexpr int32 dq_units = 2;
inline constexpr int32 dq_unit_floats = 64 * 64;

// Dynamic shared memory: k and v, two stages of q, dout and dS, dq on its way out, rows, barriers.
constexpr int32 shared_bytes(const BwdConfig& c) {
  const int32 row_bytes = 2 * c.head_dim;
  return 2 * backward_keys * row_bytes + 4 * rows_of(c) * row_bytes +
         2 * backward_keys * rows_of(c) * 2 + dq_units * dq_unit_floats * 4 + 4 * rows_of(c) * 4 +
         1024;
}

// The parameter of the backward kernels. Boxes of the maps, all with the 128-byte swizzle and
// dimensions (head_dim, row, head, batch): q and dout {64, rows_of}, k and v {64, backward_keys}.
//
// Blocks of rows_of query rows are numbered over all sequences and heads (device/bwd_blocks.h);
// lse_log2 and delta hold one number for each of their rows, dq_sums dq_block_floats for each, in
// the order in which the chip's kernel finds them (device/bwd_rows.cuh, dq_place).
struct BwdParams {
  TensorMap q, k, v, dout_map;

  const uint16* out = nullptr;
  int64 out_stride[4] = {};  // batch, row, head, column; elements
  const uint16* dout = nullptr;
  int64 dout_stride[4] = {};
  const float* lse = nullptr;
  int64 lse_stride[3] = {};  // batch, head, row
  const float* dlse = nullptr;
  int64 dlse_stride[3] = {};

  float* lse_log2 = nullptr;  // scratch; infinity where a row sees nothing
  float* delta = nullptr;     // scratch: dout out - dlse
  float* dq_sums = nullptr;   // scratch
  uint32* turns = nullptr;    // scratch, deterministic: blocks of keys that have added to a block
                              // (pair: pairs of blocks, and one counter for each half of its rows)

  void* dq = nullptr;
  int64 dq_stride[4] = {};
  void* dk = nullptr;
  int64 dk_stride[4] = {};
  void* dv = nullptr;
  int64 dv_stride[4] = {};
  bool paired = false;  // 16-bit dk and dv: two neighbours of a row lie in an aligned word

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
  int32 section = 1;     // (sequence, KV head) pairs whose tiles are dealt together, longest first
};

}  // namespace fovea::core
