// Quantisation to 8 bits (core/fp8.h): q and k rotated, v transposed, with a scale for 32 rows.
//
// What binds is memory: for 16-bit inputs 3 bytes an element, once. CTAs stay: each takes piece
// after piece, and loads the next while it computes, so that memory never waits for arithmetic nor
// for the start of a CTA.
//
// Of q and k a CTA takes 32 rows of a head; four threads take a row, each every fourth piece of 8
// columns (up to 64 columns two threads, each every second piece of 16):
//
//   column    0..7   8..15  16..23  24..31 | 32..39 ...
//   thread     t0     t1      t2      t3   |   t0   ...
//
// so that loads and stores are whole sectors and, of the butterflies of the Hadamard transform,
// only those over 8 and 16 columns cross threads: two shuffles an element, or one. The order of
// additions is that of core::hadamard(), and the CPU's codes are these to the bit. Arithmetic is
// next: at full bandwidth a multiprocessor has 20 issue slots for 32 elements of q. Rotation takes
// 10 of them (signs of packed pairs 1, five levels of additions, two of shuffle and multiply-add),
// widening, maximum, scaling and conversion 4.
//
// Of v a thread takes four columns of 16 rows; a CTA has 128 threads.
#pragma once

#include "core/fp8.h"
#include "device/ptx.h"

namespace fovea::device {

using core::CodeScale;
using core::DType;
using core::infinity;
using core::KeyScale;
using core::QuantizeConfig;
using core::QuantizeParams;
using core::QuantizePass;
using core::RotaryPairs;
using core::scale_block;

inline constexpr uint32 infinite_bits = 0x7f800000u;

// ---- Eight elements, and four
// -----------------------------------------------------------------------------

// The signs of the rotation: those of columns 2 i and 2 i + 1 are bits 15 - i and 31 - i
// (core::sign_bit).
__forceinline__ float flipped(float x, uint32 signs, int32 column) {
  const int32 shift = column / 2 + (column % 2 != 0 ? 0 : 16);
  return __uint_as_float(__float_as_uint(x) ^ ((signs << shift) & 0x80000000u));
}

__forceinline__ void flip(float* x, uint32 signs) {
#pragma unroll
  for (int32 e = 0; e < 8; ++e) x[e] = flipped(x[e], signs, e);
}

// Two codes as fp16 numbers, exact.
template <DType dtype>
__forceinline__ uint32 unpack_codes(uint16 codes) {
  if constexpr (dtype == DType::s8) return unpack_s8x2(codes);
  return dtype == DType::e4m3 ? unpack_e4m3x2(codes) : unpack_e5m2x2(codes);
}

// As they lie in memory.
template <DType dtype>
struct Eight {
  static constexpr int32 words = 2 * core::size_bytes(dtype);
  uint32 word[words];

  __forceinline__ void load(const void* from) {
    if constexpr (words == 2) {
      const uint2 part = *static_cast<const uint2*>(from);
      word[0] = part.x;
      word[1] = part.y;
    } else {
#pragma unroll
      for (int32 i = 0; i < words; i += 4) {
        const uint4 part = static_cast<const uint4*>(from)[i / 4];
        word[i] = part.x;
        word[i + 1] = part.y;
        word[i + 2] = part.z;
        word[i + 3] = part.w;
      }
    }
  }

  __forceinline__ void widen(float* x, uint32 signs) const {
    if constexpr (dtype == DType::f32) {
#pragma unroll
      for (int32 i = 0; i < 8; ++i) x[i] = __uint_as_float(word[i]);
      flip(x, signs);
    } else if constexpr (core::size_bytes(dtype) == 2) {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        const uint32 pair = word[i] ^ ((signs << i) & 0x80008000u);
        if constexpr (dtype == DType::bf16) {
          x[2 * i] = __uint_as_float(pair << 16);
          x[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
        } else {
          const float2 both = unpack_f16x2(pair);
          x[2 * i] = both.x;
          x[2 * i + 1] = both.y;
        }
      }
    } else {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        const auto codes = static_cast<uint16>(word[i / 2] >> (16 * (i % 2)));
        const float2 pair = unpack_f16x2(unpack_codes<dtype>(codes));
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
      flip(x, signs);
    }
  }
};

// Four elements of a row.
template <DType dtype>
struct Four {
  static constexpr int32 words = core::size_bytes(dtype);
  uint32 word[words];

  __forceinline__ void load(const void* from) {
    if constexpr (words == 4) {
      const uint4 all = *static_cast<const uint4*>(from);
      word[0] = all.x;
      word[1] = all.y;
      word[2] = all.z;
      word[3] = all.w;
    } else if constexpr (words == 2) {
      const uint2 all = *static_cast<const uint2*>(from);
      word[0] = all.x;
      word[1] = all.y;
    } else {
      word[0] = *static_cast<const uint32*>(from);
    }
  }

  // Elements 2 i and 2 i + 1 in 16 bits: bf16, or fp16.
  __forceinline__ uint32 pair(int32 i) const {
    if constexpr (words == 2) return word[i];
    const auto codes = static_cast<uint16>(word[0] >> (16 * i));
    return unpack_codes<dtype>(codes);
  }

  __forceinline__ float2 widened(int32 i) const {
    if constexpr (words == 4) {
      return {__uint_as_float(word[2 * i]), __uint_as_float(word[2 * i + 1])};
    } else {
      return widened_pair(pair(i));
    }
  }

  static __forceinline__ float2 widened_pair(uint32 pair) {
    if constexpr (dtype != DType::bf16) return unpack_f16x2(pair);
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};

// ---- What rows and columns have in common -------------------------------------------------------

// Where a CTA is: heads change first, so that CTAs at work lie close together in memory.
struct QuantizePlace {
  int32 head, tile, batch;

  static __forceinline__ QuantizePlace first(const QuantizeParams& params) {
    const auto heads = static_cast<uint32>(params.heads);
    const auto tiles = static_cast<uint32>(params.tiles);
    const uint32 row = blockIdx.x / heads;
    return {static_cast<int32>(blockIdx.x % heads), static_cast<int32>(row % tiles),
            static_cast<int32>(row / tiles)};
  }

  // gridDim.x pieces further; false behind the last.
  __forceinline__ bool advance(const QuantizeParams& params) {
    head += params.step[0];
    tile += params.step[1];
    batch += params.step[2];
    if (head >= params.heads) {
      head -= params.heads;
      ++tile;
    }
    if (tile >= params.tiles) {
      tile -= params.tiles;
      ++batch;
    }
    return batch < params.batches;
  }
};

// Rows that share a scale.
struct QuantizeRowBlock {
  int32 head, batch, sequence;
  int32 block;      // of the batch and head
  int64 first_row;  // of the batch
  int32 real_rows;  // that belong to the sequence
  int32 used_rows;  // and count
  int64 position;   // of the first, in tables of the rotary embedding
  // Where codes and scale go: the first row's place, and the block's.
  int64 to_batch, to_row;
  int32 to_block;
};

template <QuantizeConfig C>
struct QuantizeBlock {
  static constexpr int32 blocks = core::quantize_rows(C) / scale_block;    // of a CTA
  static constexpr int32 warps = core::quantize_threads(C) / 32 / blocks;  // of a block
  static constexpr float norm =
      C.rotate ? core::rotation_norm(core::rotation_block(C.columns)) : 1.0f;

  // Of one piece and the next, so that one barrier a piece is enough.
  struct Shared {
    uint32 largest[2][blocks][warps];
  };

  const QuantizeParams& params;
  Shared& shared;

  __forceinline__ static int32 warp() { return static_cast<int32>(threadIdx.x / 32); }
  __forceinline__ static int32 block_of_cta() { return warp() / warps; }
  __forceinline__ static int32 warp_of_block() { return warp() % warps; }

  __forceinline__ static int32 clamp_rows(int64 rows) {
    return static_cast<int32>(rows < 0 ? 0 : rows < scale_block ? rows : scale_block);
  }

  __forceinline__ QuantizeRowBlock find(const QuantizePlace& place) const {
    QuantizeRowBlock rows;
    rows.head = place.head;
    rows.batch = rows.sequence = place.batch;
    rows.block = place.tile * blocks + block_of_cta();
    rows.first_row = static_cast<int64>(rows.block) * scale_block;
    int64 begin = 0;  // of the sequence
    if constexpr (C.ragged) {
      begin = find_sequence(rows);
    } else {
      rows.real_rows = rows.used_rows = clamp_rows(params.rows - rows.first_row);
      rows.position = rows.first_row + params.rotary.first;
    }
    if constexpr (C.rotary != RotaryPairs::none) {
      const int32* const first = params.rotary.first_keys;
      if (first != nullptr && rows.used_rows > 0) rows.position += first[rows.sequence];
    }
    find_target(rows, begin);
    return rows;
  }

  // Of pages, the rows that are used alone are written, since others may have none.
  __forceinline__ void find_target(QuantizeRowBlock& rows, int64 begin) const {
    rows.to_batch = rows.batch;
    rows.to_row = rows.first_row;
    rows.to_block = rows.block;
    if constexpr (C.to_pages) {
      rows.real_rows = rows.used_rows;
      if (rows.used_rows == 0) return;
      const core::PageTarget& to = params.target;
      const auto key = static_cast<uint32>(to.first_key(rows.sequence) + rows.first_row - begin);
      const core::KeyPlace at = core::page_of(to, rows.sequence, key);
      rows.to_batch = at.page;
      const auto row = static_cast<uint32>(at.row);
      rows.to_row = row;
      rows.to_block = static_cast<int32>(row / scale_block);
    }
  }
  // Extents of where they go.
  __forceinline__ int64 to_rows() const {
    return C.to_pages ? params.target.page_size : params.rows;
  }
  __forceinline__ int32 to_blocks() const {
    return C.to_pages ? params.target.page_size / scale_block : params.blocks;
  }
  // Whether there is a place for the block: of a sequence's rows, or a gap between sequences.
  __forceinline__ bool has_place(const QuantizeRowBlock& rows) const {
    return C.to_pages ? rows.real_rows > 0 : rows.block < params.blocks;
  }

  // Packed sequences begin with blocks of their own: find the one that this block is of.
  // Gives the sequence's first row.
  __forceinline__ int64 find_sequence(QuantizeRowBlock& rows) const {
    int64 begin = 0;
    int64 end = params.rows;
    if (params.cu_seqlens != nullptr) {
      int32 low = 0;
      int32 high = params.sequences - 1;
      while (low < high) {  // the last sequence that begins at or before the block
        const int32 middle = (low + high + 1) / 2;
        if (core::block_offset(params.cu_seqlens[middle], middle) <= rows.block) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      rows.sequence = low;
      begin = params.cu_seqlens[low];
      end = params.cu_seqlens[low + 1];
      const int32 first = core::block_offset(static_cast<int32>(begin), low);
      rows.first_row = begin + static_cast<int64>(rows.block - first) * scale_block;
    }
    rows.real_rows = rows.block < params.blocks ? clamp_rows(end - rows.first_row) : 0;
    rows.used_rows = rows.real_rows;
    int64 length = end - begin;
    if (params.seqused != nullptr && rows.real_rows > 0) {
      length = params.seqused[rows.sequence];
      rows.used_rows = min(rows.real_rows, clamp_rows(begin + length - rows.first_row));
    }
    if constexpr (C.rotary != RotaryPairs::none) {
      rows.position = rows.first_row - begin + params.rotary.first;
      if (params.rotary.aligned_to_keys && rows.used_rows > 0) {
        rows.position += keys_of(rows.sequence) - length;
      }
    }
    return begin;
  }

  __forceinline__ int32 keys_of(int32 which) const {
    const core::RotaryParams& r = params.rotary;
    if (r.seqused_k != nullptr) return r.seqused_k[which];
    if (r.cu_seqlens_k != nullptr) return r.cu_seqlens_k[which + 1] - r.cu_seqlens_k[which];
    return r.seqlen_k;
  }

  // Of the first element of a row of the block, which has to be used.
  __forceinline__ int64 offset_of_row(const QuantizeRowBlock& rows, int32 row_of_block) const {
    int64 batch = rows.batch;
    int64 row = rows.first_row + row_of_block;
    if constexpr (C.paged) {
      const core::KeyPlace at = core::page_of(params, rows.sequence, static_cast<uint32>(row));
      batch = at.page;
      row = static_cast<uint32>(at.row);
    }
    return batch * params.stride[0] + row * params.stride[1] + rows.head * params.stride[2];
  }

  // Of the largest magnitudes of threads, as bits.
  __forceinline__ uint32 largest_of_block(float largest, int32 round) {
    uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest * norm));
    if constexpr (warps > 1) {
      uint32(&of_block)[warps] = shared.largest[round % 2][block_of_cta()];
      of_block[warp_of_block()] = bits;
      __syncthreads();
#pragma unroll
      for (int32 i = 0; i < warps; ++i) bits = max(bits, of_block[i]);
    }
    return bits;
  }

  __forceinline__ uint32* largest_of_head(const QuantizeRowBlock& rows) const {
    return params.largest + rows.sequence * params.largest_stride[0] +
           rows.head * params.largest_stride[1];
  }

  __forceinline__ void report(const QuantizeRowBlock& rows, uint32 bits) {
    if (lane_index() != 0 || warp_of_block() != 0 || rows.real_rows == 0) return;
    if (bits >= infinite_bits) return;
    atomicMax(largest_of_head(rows), bits);
  }

  __forceinline__ CodeScale code_scale(const QuantizeRowBlock& rows, uint32 bits) const {
    if constexpr (C.dtype == DType::s8) return {1.0f, 1.0f};  // as they are
    if (C.pass == QuantizePass::apply && bits < infinite_bits) bits = *largest_of_head(rows);
    return core::code_scale(bits, C.to);
  }

  // The scale that the elements have already.
  __forceinline__ float given_scale(const QuantizeRowBlock& rows) const {
    if constexpr (!C.scaled) return 1.0f;
    return params.scale[rows.sequence * params.scale_stride[0] +
                        rows.head / params.scale_heads * params.scale_stride[1] +
                        rows.block * params.scale_stride[2]];
  }

  __forceinline__ void store_scale(const QuantizeRowBlock& rows, float shift) {
    if (lane_index() != 0 || warp_of_block() != 0 || !has_place(rows)) return;
    // Blocks between packed sequences may be read, but not used.
    const float scale = rows.real_rows > 0 ? shift * given_scale(rows) : 1.0f;
    const int64 place =
        (static_cast<int64>(rows.to_batch) * params.heads + rows.head) * to_blocks() +
        rows.to_block;
    if (params.q_scale != nullptr) {
      params.q_scale[place] = scale;
    } else {
      store_key_scale(params.key_scale[place], scale);
    }
  }

  __forceinline__ static void store_key_scale(KeyScale& to, float scale) {
    if constexpr (C.transpose) {
      if constexpr (C.scaled) {
        to.v_log2 = log2_approximate(scale);
      } else {
        // A power of two: its logarithm and inverse are exact.
        const int32 exponent = static_cast<int32>(__float_as_uint(scale) >> 23) - 127;
        to.v_log2 = static_cast<float>(exponent);
      }
      to.v_inverse = 1.0f / scale;
      to.v = scale;
    } else {
      to.k = scale;
    }
  }

  // What the last block's readers may run into.
  __forceinline__ void store_slack() {
    const bool mine = blockIdx.x == 0 && threadIdx.x < core::scale_block_slack;
    if (C.to_pages || params.key_scale == nullptr || !mine) return;
    KeyScale* behind = params.key_scale +
                       static_cast<int64>(params.batches) * params.heads * params.blocks +
                       threadIdx.x;
    store_key_scale(*behind, 1.0f);
  }

  // Codes of what is scaled.
  __forceinline__ static uint32 pack(float x0, float x1, float x2, float x3, float by) {
    if constexpr (C.to == DType::s8) {
      const uint32 low = permute_bytes<0x0040>(rounded(x0, by), rounded(x1, by));
      const uint32 high = permute_bytes<0x0040>(rounded(x2, by), rounded(x3, by));
      return permute_bytes<0x5410>(low, high);
    }
    if constexpr (C.to == DType::e4m3) return pack_e4m3x4(x0 * by, x1 * by, x2 * by, x3 * by);
    return pack_e5m2x2(x0 * by, x1 * by) | static_cast<uint32>(pack_e5m2x2(x2 * by, x3 * by)) << 16;
  }

  // x * by as an integer, in the low byte: core::float_to_s8(), without a conversion.
  __forceinline__ static uint32 rounded(float x, float by) {
    return __float_as_uint(fmaf(x, by, core::integer_offset));
  }
};

// ---- Rows: q and k, and v where it stays row-major ----------------------------------------------

template <QuantizeConfig C>
struct QuantizeRows : QuantizeBlock<C> {
  using Base = QuantizeBlock<C>;
  using Base::norm, Base::params;
  static constexpr int32 lanes = core::quantize_lanes(C);
  static constexpr int32 unit = 32 / lanes;        // columns of a thread, of 32
  static constexpr int32 pieces = C.columns / 32;  // of so many, of a thread
  static constexpr int32 count = unit * pieces;
  // Elements where they are no vectors are fp32 at once.
  using Raw = Eight<C.vectors ? C.dtype : DType::f32>;

  Raw raw[pieces][unit / 8];  // of the next rows
  float x[count];             // of these

  __forceinline__ static int32 thread() { return static_cast<int32>(threadIdx.x % lanes); }
  __forceinline__ static int32 row() { return static_cast<int32>(threadIdx.x / lanes); }
  // First column of the g-th 8 of a piece.
  __forceinline__ static int32 column(int32 piece, int32 g) {
    return 32 * piece + unit * thread() + 8 * g;
  }

  __forceinline__ uint32 signs(int32 piece, int32 g) const {
    return C.rotate ? params.signs.word[piece] << (unit / 2 * thread() + 4 * g) : 0u;
  }

  __forceinline__ void load(const QuantizeRowBlock& rows) {
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
#pragma unroll
      for (int32 g = 0; g < unit / 8; ++g) raw[j][g] = {};
    }
    if (row() >= rows.used_rows) return;
    const int64 offset = this->offset_of_row(rows, row());
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
#pragma unroll
      for (int32 g = 0; g < unit / 8; ++g) {
        if (column(j, g) >= params.columns) continue;
        if constexpr (C.vectors) {
          constexpr int32 size = core::size_bytes(C.dtype);
          raw[j][g].load(static_cast<const uint8*>(params.x) + (offset + unit * thread()) * size +
                         (32 * j + 8 * g) * size);
        } else {
          load_elements(raw[j][g], offset, column(j, g), place_in_tables(rows));
        }
      }
    }
  }

  __forceinline__ void load_elements(Raw& to, int64 offset, int32 column, int64 position) {
#pragma unroll
    for (int32 e = 0; e < 8; ++e) {
      if (column + e >= params.columns) continue;
      const float value = C.rotary == RotaryPairs::none
                              ? element(offset, column + e)
                              : turned_element(offset, column + e, position);
      to.word[e] = __float_as_uint(value);
    }
  }

  __forceinline__ float element(int64 offset, int32 column) const {
    return core::load_element(params.x, C.dtype, offset + column * params.stride[3]);
  }

  __forceinline__ void widen() {
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
#pragma unroll
      for (int32 g = 0; g < unit / 8; ++g) {
        raw[j][g].widen(x + unit * j + 8 * g, turns_inside ? 0u : signs(j, g));
      }
    }
  }

  // -- Rotary embedding: each product but one is rounded, as the twin does

  // Vectors are turned in registers: a thread has both columns of a pair.
  static constexpr bool turns_inside = C.rotary != RotaryPairs::none && C.vectors;
  static_assert(!turns_inside || (C.rotary == RotaryPairs::halves ? C.rotary_pairs % 32 == 0
                                                                  : C.rotary_pairs % 4 == 0));

  __forceinline__ int64 place_in_tables(const QuantizeRowBlock& rows) const {
    if constexpr (C.rotary == RotaryPairs::none) return 0;
    const int64 position = rows.position + row();
    return position < 0 ? 0 : min(position, static_cast<int64>(params.rotary.positions - 1));
  }

  __forceinline__ float turned_element(int64 offset, int32 column, int64 position) const {
    constexpr int32 pairs = C.rotary_pairs;
    if (column >= 2 * pairs) return element(offset, column);
    const bool second = C.rotary == RotaryPairs::halves ? column >= pairs : column % 2 != 0;
    const int32 pair = C.rotary == RotaryPairs::halves ? column % pairs : column / 2;
    const core::RotaryParams& r = params.rotary;
    const float cos = core::load_element(r.cos, C.rotary_dtype,
                                         position * r.cos_stride[0] + pair * r.cos_stride[1]);
    const float sin = core::load_element(r.sin, C.rotary_dtype,
                                         position * r.sin_stride[0] + pair * r.sin_stride[1]);
    const float a = element(offset, core::rotary_column(C.rotary, pairs, pair, false));
    const float b = element(offset, core::rotary_column(C.rotary, pairs, pair, true));
    return second ? fmaf(a, sin, b * cos) : fmaf(a, cos, -(b * sin));
  }

  // Cosines and sines of four pairs.
  struct Angles {
    Four<C.rotary_dtype> cos, sin;

    __forceinline__ void turn(int32 i, float& a, float& b) const {
      const float2 both_cos = cos.widened(i / 2);
      const float2 both_sin = sin.widened(i / 2);
      const float c = i % 2 == 0 ? both_cos.x : both_cos.y;
      const float s = i % 2 == 0 ? both_sin.x : both_sin.y;
      const float first = a;
      a = fmaf(first, c, -(b * s));
      b = fmaf(first, s, b * c);
    }
  };

  __forceinline__ Angles angles(int64 position, int32 pair) const {
    constexpr int32 size = core::size_bytes(C.rotary_dtype);
    const core::RotaryParams& r = params.rotary;
    Angles of;
    of.cos.load(static_cast<const uint8*>(r.cos) + (position * r.cos_stride[0] + pair) * size);
    of.sin.load(static_cast<const uint8*>(r.sin) + (position * r.sin_stride[0] + pair) * size);
    return of;
  }

  // What widen() has left in x, and its signs.
  __forceinline__ void turn(const QuantizeRowBlock& rows) {
    if constexpr (!turns_inside) return;
    if (row() < rows.used_rows) {
      const int64 position = place_in_tables(rows);
      constexpr int32 apart = C.rotary == RotaryPairs::halves ? C.rotary_pairs / 32 : 0;
#pragma unroll
      for (int32 j = 0; j < (apart > 0 ? apart : pieces); ++j) {
#pragma unroll
        for (int32 h = 0; h<unit; h += apart> 0 ? 4 : 8) {
          float* const y = x + unit * j + h;
          const int32 first = 32 * j + unit * thread() + h;
          if constexpr (apart > 0) {
            const Angles of = angles(position, first);
#pragma unroll
            for (int32 i = 0; i < 4; ++i) of.turn(i, y[i], y[unit * apart + i]);
          } else if (first < 2 * C.rotary_pairs) {
            const Angles of = angles(position, first / 2);
#pragma unroll
            for (int32 i = 0; i < 4; ++i) of.turn(i, y[2 * i], y[2 * i + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
#pragma unroll
      for (int32 g = 0; g < unit / 8; ++g) flip(x + unit * j + 8 * g, signs(j, g));
    }
  }

  // -- The rotation

  template <int32 stride>
  __forceinline__ void butterfly_inside() {
#pragma unroll
    for (int32 i = 0; i < count; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i];
      const float b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }

  template <int32 threads>
  __forceinline__ void butterfly_across() {
    // A product with one rounds nothing: the sum and the difference in one instruction.
    const float sign = (thread() & threads) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int32 i = 0; i < count; ++i) {
      x[i] = fmaf(x[i], sign, __shfl_xor_sync(0xffffffffu, x[i], threads));
    }
  }

  // Without the norm, and the signs, which widening has turned.
  __forceinline__ void rotate() {
    constexpr int32 block_columns = core::rotation_block(C.columns);
    butterfly_inside<1>();
    butterfly_inside<2>();
    butterfly_inside<4>();
    if constexpr (unit == 16) butterfly_inside<8>();
    butterfly_across<1>();
    if constexpr (lanes == 4) butterfly_across<2>();
    if constexpr (block_columns > 32) butterfly_inside<unit>();
    if constexpr (block_columns > 64) butterfly_inside<2 * unit>();
    if constexpr (block_columns > 128) butterfly_inside<4 * unit>();
  }

  // Of this thread; elements that are not finite become NaN and do not count.
  // There are no integers for such: they are all that counts.
  __forceinline__ float largest() {
    float top = 0.0f;
    if constexpr (C.to == DType::s8) {
#pragma unroll
      for (int32 i = 0; i < count; ++i) top = max_or_nan(top, fabsf(x[i]));
      return top;
    }
#pragma unroll
    for (int32 i = 0; i < count; ++i) top = fmaxf(top, fabsf(x[i]));  // passes over NaN
    if (__any_sync(0xffffffffu, top == infinity)) {
      top = 0.0f;
#pragma unroll
      for (int32 i = 0; i < count; ++i) {
        x[i] = fabsf(x[i]) < infinity ? x[i] : __uint_as_float(0x7fc00000u);
        top = fmaxf(top, fabsf(x[i]));
      }
    }
    return top;
  }

  // Four codes.
  __forceinline__ uint32 convert(int32 first, float by) const {
    const float* y = x + first;
    return Base::pack(y[0], y[1], y[2], y[3], by);
  }

  __forceinline__ void store(const QuantizeRowBlock& rows, float by) {
    if (row() >= rows.real_rows) return;
    uint8* to =
        params.codes +
        ((rows.to_batch * this->to_rows() + rows.to_row + row()) * params.heads + rows.head) *
            params.code_columns +
        unit * thread();
    const bool whole = unit == 16 && params.code_columns % 16 == 0;
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
      const int32 i = unit * j;
      if (whole) {
        if (column(j, 0) >= params.code_columns) break;
        *reinterpret_cast<uint4*>(to + 32 * j) = {convert(i, by), convert(i + 4, by),
                                                  convert(i + 8, by), convert(i + 12, by)};
        continue;
      }
#pragma unroll
      for (int32 g = 0; g < unit / 8; ++g) {
        if (column(j, g) >= params.code_columns) break;
        *reinterpret_cast<uint2*>(to + 32 * j + 8 * g) = {convert(i + 8 * g, by),
                                                          convert(i + 8 * g + 4, by)};
      }
    }
  }

  // What widen() has left in x.
  __forceinline__ void quantize(const QuantizeRowBlock& rows, int32 round) {
    if constexpr (C.rotate) rotate();
    const uint32 bits = this->largest_of_block(largest(), round);
    if constexpr (C.pass == QuantizePass::measure) {
      this->report(rows, bits);
    } else {
      const CodeScale code = this->code_scale(rows, bits);
      this->store_scale(rows, code.scale);
      // One rounding: the scale is a power of two, or the product is not rounded.
      store(rows, norm * code.by);
    }
  }

  __forceinline__ void run() {
    QuantizePlace place = QuantizePlace::first(params);
    if constexpr (C.pass != QuantizePass::measure) this->store_slack();
    QuantizeRowBlock next = this->find(place);
    if constexpr (C.pass == QuantizePass::scales) {
      for (bool more = true; more; next = this->find(place)) {
        this->store_scale(next, 1.0f);
        more = place.advance(params);
      }
      return;
    }
    load(next);
#pragma unroll 1
    for (int32 round = 0;; ++round) {
      const QuantizeRowBlock rows = next;
      widen();
      const bool more = place.advance(params);
      if (more) {
        next = this->find(place);
        load(next);
      }
      turn(rows);
      quantize(rows, round);
      if (!more) break;
    }
  }
};

// ---- Columns: v, transposed ---------------------------------------------------------------------
//
// A thread takes four columns of 16 rows, so that what it writes of each, 16 keys in the order of
// value_key(), is in its registers; its neighbour has the other 16 rows of the block, and the two
// write a sector. A warp reads 64 columns of two rows at a time: no shared memory, and no barrier
// up to 64 columns.

template <QuantizeConfig C>
struct QuantizeColumns : QuantizeBlock<C> {
  using Base = QuantizeBlock<C>;
  using Base::params;
  static constexpr int32 keys = 16;  // of a thread
  using Raw = Four<C.vectors ? C.dtype : DType::f32>;

  Raw raw[keys];

  __forceinline__ int32 column() const { return 64 * this->warp_of_block() + lane_index() / 2 * 4; }
  __forceinline__ static int32 first_key() { return lane_index() % 2 * keys; }

  // All loads before the first use.
  template <bool whole>
  __forceinline__ void load_vectors(const QuantizeRowBlock& rows) {
    constexpr int32 size = core::size_bytes(C.dtype);
    const int64 step = params.stride[1] * size;
    const uint8* from = static_cast<const uint8*>(params.x) + column() * size;
    if constexpr (!C.paged) from += this->offset_of_row(rows, first_key()) * size;
#pragma unroll
    for (int32 r = 0; r < keys; ++r) {
      if (whole || first_key() + r < rows.used_rows) {
        raw[r].load(C.paged ? from + this->offset_of_row(rows, first_key() + r) * size : from);
      }
      from += C.paged ? 0 : step;
    }
  }

  __forceinline__ void load_elements(const QuantizeRowBlock& rows) {
#pragma unroll
    for (int32 r = 0; r < keys; ++r) {
      if (first_key() + r >= rows.used_rows) continue;
      const int64 offset = this->offset_of_row(rows, first_key() + r);
#pragma unroll
      for (int32 e = 0; e < 4; ++e) {
        if (column() + e >= params.columns) continue;
        const float value =
            core::load_element(params.x, C.dtype, offset + (column() + e) * params.stride[3]);
        raw[r].word[e] = __float_as_uint(value);
      }
    }
  }

  __forceinline__ void load(const QuantizeRowBlock& rows) {
    const bool real = column() < params.columns;
    if (C.vectors && real && rows.used_rows == scale_block) {
      load_vectors<true>(rows);
      return;
    }
#pragma unroll
    for (int32 r = 0; r < keys; ++r) raw[r] = {};
    if (!real || rows.used_rows == 0) return;
    if constexpr (C.vectors) {
      load_vectors<false>(rows);
    } else {
      load_elements(rows);
    }
  }

  __forceinline__ static float finite_or(float x, float otherwise) {
    return fabsf(x) < infinity ? x : otherwise;
  }

  // Magnitudes compare as their bits do. Widened elements are not asked: the compiler would keep
  // them for the conversion, in twice the registers.
  __forceinline__ float largest_bits() const {
    uint32 high = 0;
    uint32 low = 0;
#pragma unroll
    for (int32 r = 0; r < keys; ++r) {
#pragma unroll
      for (int32 i = 0; i < 2; ++i) {
        if constexpr (Raw::words == 4) {
          high = max(high, raw[r].word[2 * i] << 1);
          low = max(low, raw[r].word[2 * i + 1] << 1);
        } else {
          high = max(high, raw[r].pair(i) << 1);
          low = max(low, raw[r].pair(i) << 17);
        }
      }
    }
    if constexpr (Raw::words == 4) return __uint_as_float(max(high, low) >> 1);
    return Raw::widened_pair(max(high, low) >> 17).x;
  }

  // Of this thread; elements that are not finite do not count. wild: one of the warp is not.
  __forceinline__ float largest(bool& wild) const {
    float top = largest_bits();
    wild = __any_sync(0xffffffffu, !(top < infinity));
    if (wild) {
      top = 0.0f;
#pragma unroll
      for (int32 i = 0; i < 2 * keys; ++i) {
        const float2 x = raw[i / 2].widened(i % 2);
        top = fmaxf(top, fabsf(finite_or(x.x, 0.0f)));
        top = fmaxf(top, fabsf(finite_or(x.y, 0.0f)));
      }
    }
    return top;
  }

  template <bool wild>
  __forceinline__ void store(const QuantizeRowBlock& rows, float by) const {
    if (!this->has_place(rows)) return;
    const int64 all_keys = static_cast<int64>(this->to_blocks()) * scale_block;
    uint8* to = params.codes +
                ((static_cast<int64>(rows.to_batch) * params.heads + rows.head) * params.columns +
                 column()) *
                    all_keys +
                static_cast<int64>(rows.to_block) * scale_block + first_key();
#pragma unroll
    for (int32 pair = 0; pair < 2; ++pair) {
      uint32 codes[2][keys / 4];
#pragma unroll
      for (int32 q = 0; q < keys / 4; ++q) {
        float2 x[4];
#pragma unroll
        for (int32 e = 0; e < 4; ++e) {
          x[e] = raw[core::value_key(4 * q + e)].widened(pair);
          if constexpr (wild) {
            const float nan = __uint_as_float(0x7fc00000u);
            x[e] = {finite_or(x[e].x, nan), finite_or(x[e].y, nan)};
          }
        }
        codes[0][q] = Base::pack(x[0].x, x[1].x, x[2].x, x[3].x, by);
        codes[1][q] = Base::pack(x[0].y, x[1].y, x[2].y, x[3].y, by);
      }
#pragma unroll
      for (int32 e = 0; e < 2; ++e) {
        if (column() + 2 * pair + e >= params.columns) break;
        *reinterpret_cast<uint4*>(to + (2 * pair + e) * all_keys) = {codes[e][0], codes[e][1],
                                                                     codes[e][2], codes[e][3]};
      }
    }
  }

  __forceinline__ void quantize(const QuantizeRowBlock& rows, int32 round) {
    bool wild;
    const uint32 bits = this->largest_of_block(largest(wild), round);
    if constexpr (C.pass == QuantizePass::measure) {
      this->report(rows, bits);
      return;
    }
    const CodeScale code = this->code_scale(rows, bits);
    this->store_scale(rows, code.scale);
    if (wild) {
      store<true>(rows, code.by);
    } else {
      store<false>(rows, code.by);
    }
  }

  // Nothing is loaded ahead: it would take the registers of half the threads.
  __forceinline__ void run() {
    QuantizePlace place = QuantizePlace::first(params);
    if constexpr (C.pass != QuantizePass::measure) this->store_slack();
    bool more = true;
#pragma unroll 1
    for (int32 round = 0; more; ++round) {
      const QuantizeRowBlock rows = this->find(place);
      load(rows);
      quantize(rows, round);
      more = place.advance(params);
    }
  }
};

// ---- Kernel -------------------------------------------------------------------------------------

template <QuantizeConfig C>
__device__ void quantize(const QuantizeParams& params) {
  extern __shared__ __align__(16) uint8 shared_memory[];
  using Shared = typename QuantizeBlock<C>::Shared;
  static_assert(sizeof(Shared) <= core::quantize_shared_bytes(C));
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  if constexpr (C.transpose) {
    QuantizeColumns<C>{{params, shared}}.run();
  } else {
    QuantizeRows<C>{{params, shared}}.run();
  }
}

}  // namespace fovea::device
