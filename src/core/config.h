// What host and kernels exchange: tensor maps, what a kernel is specialised on, its parameters, and
// what a specialisation costs in shared memory and registers.
#pragma once

#include "core/softmax.h"
#include "core/types.h"

namespace fovea::core {

// A tensor map as a kernel parameter: opaque bytes, filled by Device::encode_tensor_map(). The copy
// engine wants it 64-byte aligned and in a __grid_constant__ parameter (or global memory).
struct alignas(64) TensorMap {
  uint64 opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

// What happens to a raw score before the softmax.
enum class ScoreTransform : uint8 {
  none,   // the scale, if positive, is folded into the exponential's multiply-add
  scale,  // multiplied first: for scales that are zero or negative, whose order of size differs
  softcap
};

// What the forward kernels are specialised on (device/fwd_sm90.cuh). A value of this struct is a
// template argument, so every field is structural and has a default.
struct FwdConfig {
  DType dtype = DType::bf16;      // of q, k and v: bf16 or f16
  DType out_dtype = DType::bf16;  // dtype or f32
  int32 head_dim = 128;           // the problem's, rounded up to 16; what is missing reads as zero
  int32 head_dim_v = 128;         // likewise, of v and out
  int32 warpgroups = 2;           // that compute; 64 query rows each
  int32 tile_k = 128;             // keys per step, multiple of 16
  int32 stages = 2;               // of the ring of K tiles, and of that of V tiles
  SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard;
  ScoreTransform transform = ScoreTransform::none;
  bool bound_right = false;  // causal, or a window's right bound: keys end by row
  bool bound_left = false;   // a window's left bound: keys begin by row
  bool ragged = false;       // cu_seqlens or seqused are given
  bool has_sink = false;
  bool tma_out = true;     // out has out_dtype == dtype and strides that the copy engine takes
  bool out_apart = true;   // out is staged in memory of its own, not in that of q
  bool persistent = true;  // CTAs take tile after tile
  bool ping_pong = true;   // warpgroups take turns at issuing products
  bool overlap = true;     // scores of a tile and weights x values of the one before in flight
  int32 promote = 0;       // fp8: key tiles summed by the tensor cores alone (core/fp8.h); 0: all
  bool operator==(const FwdConfig&) const = default;
};

constexpr int32 round_up(int32 value, int32 multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline constexpr int32 panel_columns = 64;  // 16-bit elements in a row of the 128-byte swizzle

constexpr int32 panels(int32 columns) { return (columns + panel_columns - 1) / panel_columns; }
constexpr bool is_windowed(const FwdConfig& c) { return c.bound_left || c.bound_right; }
constexpr int32 rows_of(const FwdConfig& c) { return 64 * c.warpgroups; }
constexpr int32 query_box_rows(const FwdConfig& c) { return rows_of(c); }
constexpr int32 out_box_rows(const FwdConfig&) { return 64; }
constexpr int32 threads_of(const FwdConfig& c) { return 128 * (c.warpgroups + 1); }

// Dynamic shared memory: q, the rings of k and v, out where it is apart, barriers.
constexpr int32 shared_bytes(const FwdConfig& c) {
  const int32 row_bytes = 2 * panel_columns;
  const int32 q = rows_of(c) * panels(c.head_dim) * row_bytes;
  const int32 step = c.tile_k * (panels(c.head_dim) + panels(c.head_dim_v)) * row_bytes;
  const int32 out = c.out_apart ? rows_of(c) * panels(c.head_dim_v) * row_bytes : 1024;
  return q + c.stages * step + out + 1024;
}

inline constexpr int32 shared_limit_bytes = 232448;  // of a CTA on compute capability 9.0

// Registers that setmaxnreg leaves to each thread; the pool is what the launch takes at entry.
constexpr int32 producer_registers(const FwdConfig& c) { return c.warpgroups == 3 ? 32 : 24; }
constexpr int32 consumer_registers(const FwdConfig& c) { return c.warpgroups == 3 ? 160 : 240; }

// Registers of a computing thread that hold a tile: scores, weights, output.
constexpr int32 tile_registers(const FwdConfig& c) {
  return c.tile_k / 2 + c.tile_k / 4 + c.head_dim_v / 2;
}

// The parameter of the forward kernels. Boxes of the maps, all with the 128-byte swizzle and
// dimensions (head_dim, row, head, batch): q {64, rows_of}, k and v {64, tile_k}, out {64, 64}.
struct FwdParams {
  TensorMap q, k, v, out_map;

  const uint16* keys = nullptr;  // k again, for the rare tile whose scores are taken a second time
  int64 key_stride[3] = {};      // batch, row, head; elements
  void* out = nullptr;
  int64 out_stride[4] = {};  // batch, row, head, column
  float* lse = nullptr;
  int64 lse_stride[3] = {};  // batch, head, row
  const float* sink = nullptr;
  int64 sink_stride = 0;

  const int32* cu_seqlens_q = nullptr;
  const int32* cu_seqlens_k = nullptr;
  const int32* seqused_q = nullptr;
  const int32* seqused_k = nullptr;

  // Two counters, zero before and after a launch: the next tile, CTAs that found none. Absent:
  // tiles are dealt in rounds.
  uint32* scheduler = nullptr;

  // Repaired rows, and rows whose tile was taken a second time; may be absent.
  uint64* counters = nullptr;

  int32 batch = 0;  // sequences; one more where rows lie behind the last one
  int32 sequences = 0;
  int32 seqlen_q = 0;  // rows per sequence, or of the longest
  int32 seqlen_k = 0;
  int32 total_q = 0;  // rows of q in all (varlen)
  int32 heads_q = 0;
  int32 group_size = 1;
  int32 head_dim = 0;
  int32 head_dim_v = 0;
  int32 window_left = -1;
  int32 window_right = -1;

  float scale_log2 = 0.0f;     // of what the transform leaves: log2 units per score
  float transform_in = 0.0f;   // scale: log2 units per raw score; softcap: softmax_scale / softcap
  float transform_out = 0.0f;  // softcap: softcap * log2(e)

  int32 q_blocks = 0;  // of the longest sequence
  int32 section = 1;   // (batch, head) pairs whose tiles are dealt together, longest first
  int32 tiles = 0;     // q_blocks * heads_q * batch
};

}  // namespace fovea::core
