// What host and kernels exchange: tensor maps, what a kernel is specialised on, its parameters, and
// what a specialisation costs in shared memory and registers.
#pragma once

#include "core/softmax.h"
#include "core/trace.h"
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

// How q, k and v reach shared memory.
enum class Source : uint8 {
  tma,    // by the copy engine, k and v in one piece
  paged,  // by the copy engine, k and v page by page
  gather  // by threads, row by row: any strides and alignment, any page size
};

// What the forward kernels are specialised on (device/fwd_sm90.cuh). A value of this struct is a
// template argument, so every field is structural and has a default.
struct FwdConfig {
  DType dtype = DType::bf16;      // of q, k and v: bf16 or f16; core/fp8.h: 8 bits
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
  bool ragged = false;       // cu_seqlens, seqused or a block table are given
  bool has_sink = false;
  Source source = Source::tma;
  bool chunked = true;  // gather: rows are whole 16-byte chunks at 16-byte aligned addresses
  bool packed = false;  // the query heads that share a key/value head are rows of one tile
  bool split = false;   // tiles are parts of the keys; they leave out and lse of a part, in fp32
  bool tail = false;    // the last tiles may be parts of the keys, merged by who computes the last
  bool has_alibi = false;
  bool has_bias = false;
  DType bias_dtype = DType::f32;
  bool has_mask = false;
  bool has_dropout = false;
  bool tma_out = true;          // out has out_dtype == dtype and strides that the copy engine takes
  bool out_apart = true;        // out is staged in memory of its own, not in that of q
  bool out_direct = false;      // out is not staged: threads store it, 16 bytes at a time
  bool persistent = true;       // CTAs take tile after tile
  bool ping_pong = true;        // warpgroups take turns at issuing products
  bool overlap = true;          // scores of a tile and weights x values of the one before in flight
  bool short_first = true;      // rows that see half of their first block take that half alone
  bool looks_ahead = false;     // the next tile is found, and q fetched into the L2, under a tile
  bool reads_once = false;      // no other tile reads its keys: the L2 need not keep them
  bool q_in_registers = false;  // 8 bits: q is read from shared memory once a tile, not a block
  int32 promote = 0;    // fp8: key tiles summed by the tensor cores alone (core/fp8.h); 0: all
  int32 page_keys = 0;  // fp8, paged: keys of a copy, which divide page and tile: 32, 64 or 128
  bool trace = false;   // one CTA writes a timeline
  bool operator==(const FwdConfig&) const = default;
};

constexpr int32 round_up(int32 value, int32 multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline constexpr int32 panel_columns = 64;  // 16-bit elements in a row of the 128-byte swizzle

constexpr int32 panels(int32 columns) { return (columns + panel_columns - 1) / panel_columns; }
constexpr bool is_windowed(const FwdConfig& c) { return c.bound_left || c.bound_right; }
// Scores change by position, after the transform and in log2 units.
constexpr bool modifies_scores(const FwdConfig& c) {
  return c.has_alibi || c.has_bias || c.has_mask;
}
// A row may see less of a block than another row does, or drop some of what it sees.
constexpr bool rows_differ(const FwdConfig& c) {
  return is_windowed(c) || c.has_bias || c.has_mask || c.has_dropout;
}
// Tiles of which the last may be computed in parts: equally long, of whole rows.
constexpr bool may_have_tail(const FwdConfig& c) {
  return c.persistent && !c.packed && !c.split && !c.ragged && !rows_differ(c) &&
         size_bytes(c.dtype) == 2;
}
// The loading warp has registers for two tiles where it is one thread and tiles are of whole rows.
constexpr bool may_look_ahead(const FwdConfig& c) {
  return c.persistent && c.source == Source::tma && !c.packed && !c.split && !c.ragged &&
         size_bytes(c.dtype) == 2;
}
// Whether 64 rows of a tile may see no more than half of a block of which other rows see more.
constexpr bool begins_short(const FwdConfig& c) {
  return c.short_first && c.bound_right && c.tile_k == 128 && !c.packed && !modifies_scores(c) &&
         size_bytes(c.dtype) == 2;
}
// First scores of a tile are issued without a turn, and weights are converted while the vote on
// them is counted. At d = 128 that gains half a hundredth where sequences are short; at d = 64 it
// loses two to six (docs/kernels/fwd_sm90.md).
constexpr bool is_eager(const FwdConfig& c) { return c.head_dim == 128 && c.head_dim_v == 128; }
constexpr DType stored_dtype(const FwdConfig& c) { return c.split ? DType::f32 : c.out_dtype; }
constexpr int32 rows_of(const FwdConfig& c) { return 64 * c.warpgroups; }
// Parts of q that come, and are given back, each by itself: the rows of a warpgroup, so that one
// need not wait for the others between two tiles.
constexpr int32 query_parts(const FwdConfig& c) {
  return c.source == Source::tma && !c.packed && size_bytes(c.dtype) == 2 ? c.warpgroups : 1;
}
constexpr int32 query_box_rows(const FwdConfig& c) { return rows_of(c) / query_parts(c); }
constexpr int32 out_box_rows(const FwdConfig&) { return 16; }
// What a thread leaves of a part of a tile in a tail: out, and reference and sum of its two rows.
constexpr int32 part_floats(const FwdConfig& c) { return c.head_dim_v / 2 + 4; }
constexpr int32 threads_of(const FwdConfig& c) { return 128 * (c.warpgroups + 1); }
constexpr int32 ctas_of(const FwdConfig&) { return 1; }  // that share keys
constexpr int32 key_rows_of(const FwdConfig& c) { return c.tile_k; }
constexpr int32 value_rows_of(const FwdConfig& c) { return key_rows_of(c); }

// Whether q's memory holds nothing but queries.
constexpr bool q_apart(const FwdConfig& c) { return c.out_apart || c.out_direct || !c.tma_out; }

// Dynamic shared memory: q, the rings of k and v, out where it is apart, barriers.
constexpr int32 shared_bytes(const FwdConfig& c) {
  const int32 row_bytes = 2 * panel_columns;
  const int32 q = rows_of(c) * panels(c.head_dim) * row_bytes;
  const int32 step = c.tile_k * (panels(c.head_dim) + panels(c.head_dim_v)) * row_bytes;
  const int32 out = c.out_apart ? rows_of(c) * panels(c.head_dim_v) * row_bytes : 1024;
  return q + c.stages * step + out + 1024;
}

inline constexpr int32 shared_limit_bytes = 232448;  // of a CTA on compute capability 9.0

// Whether warpgroups give registers to one another: beside one that computes, the launch gives
// every thread as many as it can name.
constexpr bool divides_registers(const FwdConfig& c) { return c.warpgroups > 1; }
// Registers that setmaxnreg leaves to each thread; the pool is what the launch takes at entry.
// Threads that find rows of their own (gather) or lanes that find pages need more than one thread
// that drives the copy engine.
constexpr int32 producer_registers(const FwdConfig& c) {
  if (c.source == Source::gather) return 56;
  if (c.warpgroups == 3) return 32;
  return c.source == Source::paged ? 40 : 24;
}
constexpr int32 consumer_registers(const FwdConfig& c) {
  if (c.warpgroups == 3) return c.source == Source::gather ? 152 : 160;
  return c.source == Source::gather ? 224 : c.source == Source::paged ? 232 : 240;
}

// Registers of a computing thread that hold a tile of 16 bits: scores, weights, output.
constexpr int32 tile_registers(const FwdConfig& c) {
  return c.tile_k / 2 + c.tile_k / 4 + c.head_dim_v / 2;
}

// A tensor of 16-bit elements as threads read it.
struct Rows {
  const uint16* data = nullptr;
  int64 stride[4] = {};  // batch or page, row, head, column; elements
};

// The parameter of the forward kernels. Boxes of the maps, all with the 128-byte swizzle and
// dimensions (head_dim, row, head, batch): q {64, query_box_rows}, k and v {64, tile_k},
// out {64, 16}.
// Pages are the batch of k and v, in boxes {64, page_box}. Packed q has dimensions (head_dim, head
// of the group, row, key/value head, batch) and boxes {64, group_size, queries_per_tile}.
struct FwdParams {
  TensorMap q, k, v, out_map;

  Rows q_rows, k_rows, v_rows;  // the same again, for gather and for the rare slow paths
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

  TraceBuffer trace;  // of a configuration that traces

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
  int32 tiles = 0;     // in all

  int32 queries_per_tile = 0;  // rows_of, or as many as fit with all heads of a group

  // Split keys: out and lse lie this many elements apart from part to part. The lse of a row that
  // no query uses is +infinity, for the combining kernel to tell it from a row without keys.
  int32 splits = 1;
  int64 out_split_stride = 0;
  int64 lse_split_stride = 0;

  // A tail: from tail_begin on, tail_parts in a row are the parts of one tile. Each warp leaves its
  // rows of a part in tail_results (fwd_sm90.cuh: Compute::part_at) and counts itself in one of
  // tail_arrivals, which are zero before and after a launch.
  int32 tail_begin = 0;
  int32 tail_parts = 1;
  float* tail_results = nullptr;
  uint32* tail_arrivals = nullptr;

  const int32* block_table = nullptr;  // of a sequence, [key / page_size]
  int64 block_table_stride = 0;
  int32 page_size = 0;
  int32 page_box = 0;  // rows that one copy takes from a page; divides page_size and tile_k

  const void* bias = nullptr;
  int64 bias_stride[4] = {};  // batch, head, query, key
  const uint8* mask = nullptr;
  int64 mask_stride[4] = {};
  const float* alibi = nullptr;
  int64 alibi_stride[2] = {};  // batch, head

  uint32 dropout_threshold = 0;  // core/dropout.h
  uint32 dropout_key[2] = {};
  float keep_scale = 1.0f;  // 1 / (1 - probability)
};

// The parameter of device/combine.cuh. Parts lie one behind the other, each as
// out (batch, row, head, column) and lse (batch, row, head), dense.
struct CombineParams {
  const float* part_out = nullptr;
  const float* part_lse = nullptr;
  int32 splits = 0;
  int64 batch = 0;
  int64 rows = 0;
  int32 heads = 0;
  int32 head_dim_v = 0;

  void* out = nullptr;
  int64 out_stride[4] = {};     // batch, row, head, column
  float* lse = nullptr;         // may be absent
  int64 lse_stride[3] = {};     // batch, head, row
  const float* sink = nullptr;  // may be absent
  int64 sink_stride = 0;
};

inline constexpr int32 combine_threads = 64;

// The parameter of device/copy.cuh: a tensor (i0, i1, i2, column) of any strides, in elements, to
// dense rows of `padded` elements, a multiple of 16 bytes.
struct CopyParams {
  const void* from = nullptr;
  void* to = nullptr;
  int64 extent[4] = {};
  int64 stride[4] = {};
  int64 padded = 0;
};

inline constexpr int32 copy_threads = 256;

// The parameter of device/spin.cuh, which one warp runs.
struct SpinParams {
  uint64 nanoseconds = 0;
};

inline constexpr int32 spin_threads = 32;

}  // namespace fovea::core
