// Eight-bit attention: how q, k and v become e4m3 or e5m2, what their scales mean, and what the fp8
// forward kernels exchange with the host.
//
// Rows are quantised in blocks of 32 that share one scale, a power of two: value = code x scale.
// Since the formats are floating, a power of two costs no precision over an exact fit of the
// largest element, multiplying by it rounds nothing, and its logarithm is an integer. Codes that a
// caller brings may have any positive scale: their block is shifted by a power of two, which keeps
// every code, and has the product of both as its scale.
//
//   q codes   (batch, row, head, column)   columns padded with zeros to fp8_columns()
//   k codes   as q
//   v codes   (batch, head, column, key)   transposed, since 8-bit products contract along
//             contiguous memory only; keys padded to 32 and, within each 16, in the order that
//             the weights have in registers (value_key())
//   q scales  (batch, head, block)         float
//   key scales(batch, head, block)         KeyScale
//
// Packed sequences (varlen) are one batch. Blocks of 32 rows begin with each sequence, so sequence
// s, whose first row is r, has its first block at block_offset(r, s) and its first key of the
// transposed v at 32 times that.
//
// Pages of a multiple of 32 keys are the batch of k, v and key scales: whole blocks, read where
// they are. Which of them hold a sequence's keys, its block table says.
//
// Incoherent processing (FlashAttention-3, section 3.3; QuIP): q and k are multiplied by random
// signs and a Hadamard matrix, which cancels in q k^T and spreads outliers over all columns.
#pragma once

#include "core/config.h"
#include "core/mask.h"

namespace fovea::core {

inline constexpr int32 scale_block = 32;       // rows that share a scale
inline constexpr int32 scale_block_slack = 8;  // blocks readable behind the last: a tile's width

// Columns of the codes of q and k: whole steps of the 8-bit products.
constexpr int32 fp8_columns(int32 head_dim) { return round_up(head_dim, 32); }

constexpr int32 block_offset(int32 first_row, int32 sequence) {
  return first_row / scale_block + sequence;
}

// Which of 16 consecutive keys lies at place `slot` of the transposed v. A thread of a score
// accumulator holds keys 2q, 2q+1, 8+2q, 8+2q+1 of each 16; as operand A of the next product these
// are its places 4q .. 4q+3 (device/tile.h: WgmmaAccumulator, WgmmaOperandA8).
constexpr int32 value_key(int32 slot) { return 2 * (slot / 4) + slot % 2 + 8 * ((slot / 2) % 2); }
constexpr int32 value_slot(int32 key) { return 4 * ((key % 8) / 2) + key % 2 + 2 * (key / 8); }

// What an unmasked score of the block costs nothing extra: the scale of k goes into the factor of
// the exponential's multiply-add, that of v into its addend, 2^(t - m) s = 2^(t - m + log2 s), and
// is taken out of the row sum again.
struct alignas(16) KeyScale {
  float k = 1.0f;
  float v_log2 = 0.0f;
  float v_inverse = 1.0f;
  float v = 1.0f;
};

// Weights are rounded to e4m3, whose largest number is 448. With the reference at a row's true
// maximum the largest weight becomes 2^top: as high as it may be under an online maximum, which it
// never passes; lower where it may grow before a row is repaired.
constexpr float weight_top_log2(SoftmaxPolicy policy) {
  return policy == SoftmaxPolicy::online ? 8.0f : 3.0f;
}
// Conditional rescaling lets weights grow to 2^8.
inline constexpr float fp8_rescale_threshold_log2 = 5.0f;

// What shares a scale: everything, the rows of a (batch, KV head), or a block of 32 rows. The
// arrays of scales are the same; coarser ones repeat.
enum class ScaleGranularity : uint8 { tensor, head, block };

// Rotary embedding of q and k in front of their rotation: pairs of columns are turned by the angle
// of the row's position. Key 0 of a sequence stands at `first`, its last query where its last key
// does. Which columns are a pair: (c, c + pairs), or (2 c, 2 c + 1).
enum class RotaryPairs : uint8 { none, halves, neighbours };

struct Rotary {
  RotaryPairs pairing = RotaryPairs::none;
  int32 pairs = 0;
  int64 positions = 0;
  int64 first = 0;
  View cos, sin;  // strides of positions and pairs: 2 and 3

  constexpr explicit operator bool() const { return pairing != RotaryPairs::none; }
};

// The columns of pair c.
constexpr int32 rotary_column(RotaryPairs pairing, int32 pairs, int32 c, bool second) {
  return pairing == RotaryPairs::halves ? c + (second ? pairs : 0) : 2 * c + (second ? 1 : 0);
}

// For operands that are not in 8 bits: those that are keep their format and are not rotated.
struct QuantizeOptions {
  ScaleGranularity granularity = ScaleGranularity::block;
  bool rotate = true;  // q and k
  uint64 seed = 0;     // of the rotation's signs; the same for q and k
  DType to = DType::e4m3;
  Rotary rotary = {};
};

// Of q and k; v has value_type() of it.
constexpr DType code_type(DType operand, const QuantizeOptions& options) {
  return is_eight_bit(operand) ? operand : options.to;
}

// Where quantised keys go among pages: those of sequence b from its key first_keys[b], a multiple
// of 32, on (from 0 without a list). Lists lie where the quantiser computes.
struct PageTarget {
  const int32* block_table = nullptr;
  int64 block_table_stride = 0;
  const int32* first_keys = nullptr;
  int32 page_size = 0;  // a multiple of 32; 0: no pages

  constexpr explicit operator bool() const { return page_size > 0; }
  constexpr int64 first_key(int64 b) const { return first_keys != nullptr ? first_keys[b] : 0; }
};

// k and v are pages as a quantiser writes them.
constexpr bool has_quantized_pages(const Problem& p) { return p.is_paged() && p.v_transposed; }

// The pages of a problem as sequences of keys, which is how they lie in memory.
constexpr Problem pages_as_sequences(Problem p) {
  p.batch = p.pages;
  p.seqlen_k = p.page_size;
  p.block_table = p.seqused_k = nullptr;
  p.page_size = 0;
  return p;
}

// Element of a tensor of scales: sequence b, whose blocks begin with first_block, any row.
constexpr int64 scale_offset(const View& scale, int64 b, int64 head, int64 first_block, int64 row) {
  return scale.offset(b, head, first_block + row / scale_block);
}

constexpr int64 first_block_q(const Problem& p, const Sequence& s, int64 b) {
  return p.is_varlen_q() ? block_offset(static_cast<int32>(s.row_q), static_cast<int32>(b)) : 0;
}
constexpr int64 first_block_k(const Problem& p, const Sequence& s, int64 b) {
  return p.is_varlen_k() ? block_offset(static_cast<int32>(s.row_k), static_cast<int32>(b)) : 0;
}

// Element of the scales of k or v.
constexpr int64 key_scale_offset(const Problem& p, const View& scale, const Sequence& s, int64 b,
                                 int64 key, int64 head) {
  if (has_quantized_pages(p)) {
    const KeyPlace at = page_of(p, b, key);
    return scale_offset(scale, at.page, head, 0, at.row);
  }
  return scale_offset(scale, b, head, first_block_k(p, s, b), key);
}

// Element offset of a row of v, whose columns are v.stride[3] apart. Of a transposed v, "rows" of
// the view are places of keys.
constexpr int64 value_offset(const Problem& p, const Sequence& s, int64 b, int64 key, int64 head) {
  if (!p.v_transposed) return key_offset(p, p.v, s, b, key, head);
  const int64 place = key / 16 * 16 + value_slot(static_cast<int32>(key % 16));
  // Within a block of 16: in the page of the key.
  if (p.is_paged()) return key_offset(p, p.v, s, b, place, head);
  return p.v.offset(s.batch_k, first_block_k(p, s, b) * scale_block + place, head);
}

// ---- Extents ------------------------------------------------------------------------------------

// Extents of the quantised operands of a problem; each tensor is contiguous. Pages are gathered
// into sequences.
struct Fp8Layout {
  int64 batches_q = 0, batches_k = 0;  // 1 where sequences are packed
  int64 rows_q = 0, rows_k = 0;
  int32 heads_q = 0, heads_kv = 0;
  int32 columns = 0;                 // of q and k codes
  int32 columns_v = 0;               // head_dim_v
  int64 blocks_q = 0, blocks_k = 0;  // per batch and head
  int64 q_bytes = 0;                 // codes
  int64 k_bytes = 0, v_bytes = 0;
  int64 q_scale_bytes = 0;
  int64 key_scale_bytes = 0;  // with the slack that the kernel may read behind the last block
};

// Packed sequences begin with a block of their own.
constexpr int64 scale_blocks(int64 rows, int64 sequences, bool packed) {
  return packed ? rows / scale_block + sequences + 1 : ceil_div(rows, scale_block);
}

constexpr Fp8Layout fp8_layout(const Problem& p) {
  Fp8Layout l;
  l.batches_q = p.is_varlen_q() ? 1 : p.batch;
  l.batches_k = p.is_varlen_k() ? 1 : p.batch;
  l.rows_q = p.is_varlen_q() ? p.total_q : p.seqlen_q;
  l.rows_k = p.is_varlen_k() ? p.total_k : p.seqlen_k;
  l.heads_q = p.heads_q;
  l.heads_kv = p.heads_kv;
  l.columns = fp8_columns(p.head_dim);
  l.columns_v = p.head_dim_v;
  l.blocks_q = scale_blocks(l.rows_q, p.batch, p.is_varlen_q());
  l.blocks_k = scale_blocks(l.rows_k, p.batch, p.is_varlen_k());
  const int64 heads_q = l.batches_q * l.heads_q;
  const int64 heads_k = l.batches_k * l.heads_kv;
  l.q_bytes = heads_q * l.rows_q * l.columns;
  l.k_bytes = heads_k * l.rows_k * l.columns;
  l.v_bytes = heads_k * l.columns_v * l.blocks_k * scale_block;
  l.q_scale_bytes = heads_q * l.blocks_q * int64{sizeof(float)};
  l.key_scale_bytes = (heads_k * l.blocks_k + scale_block_slack) * int64{sizeof(KeyScale)};
  return l;
}

// ---- The quantising kernels ---------------------------------------------------------------------

// How a scale comes about: of each block at once, or, for coarser ones, from the largest magnitude
// that an earlier launch has found. scales: the codes stay where they are, and their scales alone
// are brought into the kernels' form.
enum class QuantizePass : uint8 { block, measure, apply, scales };

struct QuantizeConfig {
  DType dtype = DType::bf16;
  DType to = DType::e4m3;
  int32 columns = 128;     // of the codes: multiple of 32, at most 256
  bool rotate = true;      // q and k
  bool transpose = false;  // v
  bool vectors = true;     // rows are contiguous and aligned to 16 bytes (8 for 8-bit types)
  bool scaled = false;     // the elements have a scale already
  bool ragged = false;     // cu_seqlens or seqused are given
  bool paged = false;
  bool to_pages = false;                   // codes and key scales go to pages
  RotaryPairs rotary = RotaryPairs::none;  // of rows; vectors: of the tables, too
  int32 rotary_pairs = 0;
  DType rotary_dtype = DType::f32;  // of the tables
  QuantizePass pass = QuantizePass::block;
  bool operator==(const QuantizeConfig&) const = default;
};

// Rows that a CTA takes at a time. A block of 32 is all that has to know of each other;
// transposing, 128 threads make good use of registers.
constexpr int32 quantize_rows(const QuantizeConfig& c) {
  return !c.transpose || c.columns > 128 ? scale_block : (c.columns > 64 ? 2 : 4) * scale_block;
}
// Threads that take a row: as few as leave each 32 elements, since all but the first cost
// exchanges.
constexpr int32 quantize_lanes(const QuantizeConfig& c) { return c.columns <= 64 ? 2 : 4; }
// Transposing, a thread takes four columns of 16 rows.
constexpr int32 quantize_threads(const QuantizeConfig& c) {
  return c.transpose ? quantize_rows(c) / scale_block * round_up(c.columns, 64) / 2
                     : quantize_lanes(c) * quantize_rows(c);
}
// CTAs that share a multiprocessor: as many as registers allow, of which each of its four parts has
// 512 for every lane. A thread holds the elements of its rows in fp32 and those of the next as they
// lie in memory; transposing, 64 as they lie in memory.
constexpr int32 quantize_ctas(const QuantizeConfig& c) {
  const int32 size = c.vectors ? size_bytes(c.dtype) : 4;
  const int32 elements = c.transpose ? 64 : c.columns / quantize_lanes(c);
  const int32 widened = c.transpose ? 0 : elements;
  const int32 others = c.rotary != RotaryPairs::none ? 80
                       : c.paged || c.to_pages       ? 64
                       : !c.transpose || !c.vectors  ? 48
                       : size > 1                    ? 40
                                                     : 64;
  const int32 registers = round_up(widened + elements * size / 4 + others, 8);
  return static_cast<int32>(max64(512 / registers * 128 / quantize_threads(c), 1));
}

constexpr int32 quantize_shared_bytes(const QuantizeConfig& c) {
  return 2 * quantize_threads(c) / 32 * int32{sizeof(uint32)};
}

// Tables of the rotary embedding, and where rows stand in them.
struct RotaryParams {
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64 cos_stride[2] = {};  // position, pair
  int64 sin_stride[2] = {};
  int32 positions = 0;
  int32 first = 0;  // position of row 0 of a sequence; of queries among lengths: of its key 0
  bool aligned_to_keys = false;  // the last row stands where the sequence's last key does
  int32 seqlen_k = 0;
  const int32* cu_seqlens_k = nullptr;
  const int32* seqused_k = nullptr;
  const int32* first_keys = nullptr;  // PageTarget's
};

// One of q, k and v. The codes lie as at the top of this file says.
struct QuantizeParams {
  const void* x = nullptr;
  int64 stride[4] = {};  // batch, row, head, column; elements
  int64 rows = 0;        // of a batch
  int32 heads = 0;
  int32 columns = 0;       // of x
  int32 code_columns = 0;  // of codes as rows, a multiple of 8
  int32 blocks = 0;        // of a batch and head
  // What CTAs take one after the other: a head's rows of one tile, heads first, then tiles.
  int32 tiles = 0;  // of a batch and head
  int32 batches = 0;
  int32 step[3] = {};  // head, tile, batch: as far as there are CTAs
  int32 sequences = 0;
  const int32* cu_seqlens = nullptr;
  const int32* seqused = nullptr;  // rows behind them are neither read nor part of a scale
  const int32* block_table = nullptr;
  int64 block_table_stride = 0;
  int32 page_size = 0;
  const float* scale = nullptr;  // of the elements, where they have one
  int64 scale_stride[3] = {};    // sequence, head, block
  int32 scale_heads = 1;         // that share one
  RotationSigns signs;
  RotaryParams rotary;
  uint8* codes = nullptr;
  float* q_scale = nullptr;  // one of the two
  KeyScale* key_scale = nullptr;
  // Bits of the largest magnitudes, zero before the measuring launch.
  uint32* largest = nullptr;
  int64 largest_stride[2] = {};  // sequence, head; zeros: one for the whole tensor
  PageTarget target;             // to_pages
};

// ---- The gathering kernel -----------------------------------------------------------------------

// Pages of codes, which become the sequences of fp8_layout(). Strides in bytes; of scales in
// elements.
struct GatherParams {
  const uint8* k = nullptr;
  const uint8* v = nullptr;
  const KeyScale* key_scale = nullptr;
  int64 k_stride[3] = {};          // page, key, head
  int64 v_stride[3] = {};          // page, column, head
  int64 key_scale_stride[2] = {};  // page, head
  const int32* block_table = nullptr;
  int64 block_table_stride = 0;
  const int32* seqused = nullptr;
  int32 page_size = 0;
  int32 sequences = 0;
  int32 heads = 0;
  int32 columns = 0;    // of k codes
  int32 columns_v = 0;  // of v
  int32 keys = 0;       // that a sequence may have
  int32 blocks = 0;     // of them
  uint8* k_to = nullptr;
  uint8* v_to = nullptr;
  KeyScale* key_scale_to = nullptr;
};

inline constexpr int32 gather_threads = 256;
inline constexpr int32 gather_ctas = 4;  // of a multiprocessor, with 64 KB under way

// ---- The kernel's view --------------------------------------------------------------------------

// Widest swizzle whose rows divide a row of `bytes` bytes (a multiple of 32).
constexpr int32 pattern_bytes(int32 bytes) {
  return bytes % 128 == 0 ? 128 : bytes % 64 == 0 ? 64 : 32;
}

// Keys of a page that one copy brings: a row of a panel of v, a swizzle's pattern.
constexpr int32 fp8_page_keys(int32 page_size, int32 tile_k) {
  const int32 page = pattern_bytes(page_size);
  const int32 tile = pattern_bytes(tile_k);
  return page < tile ? page : tile;
}

// The parameter of the fp8 kernels. Boxes of the maps: q {pattern, rows_of}, k {pattern, tile_k}
// with pattern = pattern_bytes(head_dim), (head_dim, row, head, batch); v {pattern_bytes(tile_k),
// head_dim_v}, (key, column, head, batch); out as for 16 bits. k_rows is k. Pages are the batch of
// k, v and key scales, in boxes of page_keys keys.
struct FwdFp8Params : FwdParams {
  const float* q_scale = nullptr;
  int64 q_scale_stride[2] = {};  // batch, head
  const KeyScale* key_scale = nullptr;
  int64 key_scale_stride[2] = {};
};

// Whether a promoting kernel of two warpgroups, which have 240 registers a thread (232 beside a
// warp that finds pages), keeps its fp32 sums there, beside scores, weights and output; else they
// are in shared memory.
constexpr bool fp8_sums_in_registers(const FwdConfig& c) {
  return c.promote > 0 && c.warpgroups == 2 && c.dtype != DType::s8 &&
         c.transform == ScoreTransform::none &&
         c.tile_k / 2 + c.tile_k / 8 + c.head_dim_v <= consumer_registers(c) - 32;
}
// Bytes of the sums in shared memory (device/fwd_fp8_sm90.cuh).
constexpr int32 fp8_sum_bytes(const FwdConfig& c) {
  return c.promote > 0 && !fp8_sums_in_registers(c) ? rows_of(c) * c.head_dim_v * 4 : 0;
}

constexpr int32 fp8_shared_bytes(const FwdConfig& c) {
  const int32 q = rows_of(c) * c.head_dim;
  const int32 step = c.tile_k * (c.head_dim + c.head_dim_v);
  const int32 out = c.out_apart ? rows_of(c) * panels(c.head_dim_v) * 2 * panel_columns : 1024;
  const int32 sums = fp8_sum_bytes(c);
  const int32 scales = 2 * c.stages * (c.tile_k / scale_block) * int32{sizeof(KeyScale)};
  return q + c.stages * step + (out > sums ? out : sums) + scales + 2048;
}

}  // namespace fovea::core
