// Quantisation to 8 bits (core/fp8.h): q and k rotated, v transposed, with a scale for 32 rows.
//
// What binds is memory: for 16-bit inputs 3 bytes an element, once. All loads of a thread are
// issued before the first is used, and CTAs are small, so that some load while others compute.
//
// Of q and k a CTA takes 32 rows of a head; four threads take a row, each every fourth piece of 8
// columns:
//
//   column    0..7   8..15  16..23  24..31 | 32..39 ...
//   thread     t0     t1      t2      t3   |   t0   ...
//
// so that loads are whole sectors and, of the butterflies of the Hadamard transform, only those
// over 8 and 16 columns cross threads: two shuffles an element. The order of additions is that of
// core::hadamard(), and the CPU's codes are these to the bit. Arithmetic is next: at full bandwidth
// a multiprocessor has 20 issue slots for 32 elements of q. Rotation takes 10 of them (signs of
// packed pairs 1, five levels of additions, two of shuffle and multiply-add), widening, maximum,
// scaling and conversion 4.
//
// Of v a CTA takes 128 rows, a thread two columns of 32 of them.
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
using core::scale_block;

inline constexpr uint32 infinite_bits = 0x7f800000u;

// ---- Eight elements -----------------------------------------------------------------------------

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

// ---- What rows and columns have in common -------------------------------------------------------

template <QuantizeConfig C>
struct QuantizeBlock {
  static constexpr int32 blocks = core::quantize_rows(C) / scale_block;    // of a CTA
  static constexpr int32 warps = core::quantize_threads(C) / 32 / blocks;  // of a block
  static constexpr float norm =
      C.rotate ? core::rotation_norm(core::rotation_block(C.columns)) : 1.0f;

  struct Shared {
    uint32 largest[blocks][warps];
  };

  const QuantizeParams& params;
  Shared& shared;

  int32 head, batch;
  int32 sequence;
  int32 block;      // of 32 rows, of the batch and head
  int64 begin;      // row of the batch with which the sequence begins
  int64 first_row;  // and the block
  int32 real_rows;  // of the block, that belong to the sequence
  int32 used_rows;  // and count

  __forceinline__ static int32 warp() { return static_cast<int32>(threadIdx.x) / 32; }
  __forceinline__ static int32 block_of_cta() { return warp() / warps; }
  __forceinline__ static int32 warp_of_block() { return warp() % warps; }

  // Packed sequences begin with blocks of their own: find the one that this block is of.
  __forceinline__ void find_block() {
    const auto heads = static_cast<uint32>(params.heads);
    const auto tile = static_cast<int32>(blockIdx.x / heads);
    head = static_cast<int32>(blockIdx.x % heads);
    batch = static_cast<int32>(blockIdx.y);
    block = tile * blocks + block_of_cta();
    sequence = batch;
    begin = 0;
    int64 end = params.rows;
    int32 first = 0;
    if (params.cu_seqlens != nullptr) {
      int32 low = 0;
      int32 high = params.sequences - 1;
      while (low < high) {  // the last sequence that begins at or before the block
        const int32 middle = (low + high + 1) / 2;
        if (core::block_offset(params.cu_seqlens[middle], middle) <= block) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      sequence = low;
      begin = params.cu_seqlens[low];
      end = params.cu_seqlens[low + 1];
      first = core::block_offset(static_cast<int32>(begin), low);
    }
    first_row = begin + static_cast<int64>(block - first) * scale_block;
    const auto rows_until = [&](int64 row) {
      const int64 rows = block < params.blocks ? row - first_row : 0;
      return static_cast<int32>(rows < 0 ? 0 : rows < scale_block ? rows : scale_block);
    };
    real_rows = rows_until(end);
    used_rows = real_rows;
    if (params.seqused != nullptr && real_rows > 0) {
      used_rows = min(real_rows, rows_until(begin + params.seqused[sequence]));
    }
  }

  // Of the first element of a row of the block, which has to be used.
  __forceinline__ int64 offset_of_row(int32 row_of_block) const {
    int64 batch_of = batch;
    int64 row = first_row + row_of_block;
    if constexpr (C.paged) {
      const auto size = static_cast<uint32>(params.page_size);
      const uint32 page = static_cast<uint32>(row) / size;
      batch_of = params.block_table[sequence * params.block_table_stride + page];
      row = static_cast<uint32>(row) - page * size;
    }
    return batch_of * params.stride[0] + row * params.stride[1] + head * params.stride[2];
  }

  // Of the largest magnitudes of threads, as bits.
  __forceinline__ uint32 largest_of_block(float largest) {
    uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest * norm));
    if constexpr (warps > 1) {
      shared.largest[block_of_cta()][warp_of_block()] = bits;
      __syncthreads();
#pragma unroll
      for (int32 i = 0; i < warps; ++i) bits = max(bits, shared.largest[block_of_cta()][i]);
    }
    return bits;
  }

  __forceinline__ void report(uint32 bits) {
    if (lane_index() != 0 || warp_of_block() != 0 || real_rows == 0) return;
    if (bits >= infinite_bits) return;
    atomicMax(
        params.largest + sequence * params.largest_stride[0] + head * params.largest_stride[1],
        bits);
  }

  __forceinline__ CodeScale code_scale(uint32 bits) const {
    if constexpr (C.dtype == DType::s8) return {1.0f, 1.0f};  // as they are
    if (C.pass == QuantizePass::apply && bits < infinite_bits) {
      bits = params.largest[sequence * params.largest_stride[0] + head * params.largest_stride[1]];
    }
    return core::code_scale(bits, C.to);
  }

  // The scale that the elements have already.
  __forceinline__ float given_scale() const {
    if constexpr (!C.scaled) return 1.0f;
    return params
        .scale[sequence * params.scale_stride[0] +
               head / params.scale_heads * params.scale_stride[1] + block * params.scale_stride[2]];
  }

  __forceinline__ void store_scale(float shift) {
    if (lane_index() != 0 || warp_of_block() != 0 || block >= params.blocks) return;
    // Blocks between packed sequences may be read, but not used.
    const float scale = real_rows > 0 ? shift * given_scale() : 1.0f;
    const int64 place = (static_cast<int64>(batch) * params.heads + head) * params.blocks + block;
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
    const bool mine = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < core::scale_block_slack;
    if (params.key_scale == nullptr || !mine) return;
    KeyScale* behind = params.key_scale +
                       static_cast<int64>(gridDim.y) * params.heads * params.blocks + threadIdx.x;
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
  static constexpr int32 pieces = C.columns / 32;  // of 8 columns, of a thread
  static constexpr int32 count = 8 * pieces;

  float x[count];

  __forceinline__ static int32 thread() { return static_cast<int32>(threadIdx.x) % 4; }
  __forceinline__ static int32 row() { return static_cast<int32>(threadIdx.x) / 4; }
  __forceinline__ bool used() const { return row() < this->used_rows; }

  __forceinline__ uint32 signs(int32 piece) const {
    return C.rotate ? params.signs.word[piece] << (4 * thread()) : 0u;
  }

  __forceinline__ void load() {
    if constexpr (C.vectors) {
      load_vectors();
    } else {
      load_elements();
    }
  }

  // All loads before the first use: so much is in flight at once.
  __forceinline__ void load_vectors() {
    constexpr int32 size = core::size_bytes(C.dtype);
    Eight<C.dtype> raw[pieces] = {};
    if (used()) {
      const uint8* from = static_cast<const uint8*>(params.x) + this->offset_of_row(row()) * size +
                          8 * size * thread();
#pragma unroll
      for (int32 j = 0; j < pieces; ++j) {
        if (32 * j + 8 * thread() < params.columns) raw[j].load(from + 32 * size * j);
      }
    }
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) raw[j].widen(x + 8 * j, signs(j));
  }

  __forceinline__ void load_elements() {
    const int64 offset = used() ? this->offset_of_row(row()) : 0;
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
      const int32 column = 32 * j + 8 * thread();
#pragma unroll
      for (int32 e = 0; e < 8; ++e) {
        x[8 * j + e] = 0.0f;
        if (used() && column + e < params.columns) {
          const float value =
              core::load_element(params.x, C.dtype, offset + (column + e) * params.stride[3]);
          x[8 * j + e] = flipped(value, signs(j), e);
        }
      }
    }
  }

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

  // Without the norm, and the signs, which loads have turned.
  __forceinline__ void rotate() {
    constexpr int32 block_columns = core::rotation_block(C.columns);
    butterfly_inside<1>();
    butterfly_inside<2>();
    butterfly_inside<4>();
    butterfly_across<1>();
    butterfly_across<2>();
    if constexpr (block_columns > 32) butterfly_inside<8>();
    if constexpr (block_columns > 64) butterfly_inside<16>();
    if constexpr (block_columns > 128) butterfly_inside<32>();
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

  __forceinline__ uint2 convert(int32 j, float by) const {
    const float* y = x + 8 * j;
    return {Base::pack(y[0], y[1], y[2], y[3], by), Base::pack(y[4], y[5], y[6], y[7], by)};
  }

  __forceinline__ void store_rows(float by) {
    if (row() >= this->real_rows) return;
    uint8* to =
        params.codes +
        ((this->batch * params.rows + this->first_row + row()) * params.heads + this->head) *
            params.code_columns +
        8 * thread();
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
      if (32 * j + 8 * thread() >= params.code_columns) break;
      *reinterpret_cast<uint2*>(to + 32 * j) = convert(j, by);
    }
  }

  __forceinline__ void run() {
    this->find_block();
    if constexpr (C.pass == QuantizePass::scales) {
      this->store_scale(1.0f);
      this->store_slack();
      return;
    }
    load();
    if constexpr (C.rotate) rotate();
    const uint32 bits = this->largest_of_block(largest());
    if constexpr (C.pass == QuantizePass::measure) {
      this->report(bits);
      return;
    }
    const CodeScale code = this->code_scale(bits);
    this->store_scale(code.scale);
    this->store_slack();
    // One rounding: the scale is a power of two, or the product is not rounded.
    store_rows(norm * code.by);
  }
};

// ---- Columns: v, transposed ---------------------------------------------------------------------
//
// A thread takes two columns of all 32 rows, so that what it writes of each is in its registers,
// and a warp reads 64 columns of a row at a time: no shared memory, and no barrier up to 64
// columns.

// Two elements of a row.
template <DType dtype>
struct Two {
  static constexpr int32 size = core::size_bytes(dtype);
  uint32 word[size == 4 ? 2 : 1];

  __forceinline__ void load(const void* from) {
    if constexpr (size == 4) {
      const uint2 both = *static_cast<const uint2*>(from);
      word[0] = both.x;
      word[1] = both.y;
    } else if constexpr (size == 2) {
      word[0] = *static_cast<const uint32*>(from);
    } else {
      word[0] = *static_cast<const uint16*>(from);
    }
  }

  __forceinline__ float2 widened() const {
    if constexpr (size == 4) {
      return {__uint_as_float(word[0]), __uint_as_float(word[1])};
    } else if constexpr (dtype == DType::bf16) {
      return {__uint_as_float(word[0] << 16), __uint_as_float(word[0] & 0xffff0000u)};
    } else if constexpr (dtype == DType::f16) {
      return unpack_f16x2(word[0]);
    } else {
      const auto codes = static_cast<uint16>(word[0]);
      return unpack_f16x2(unpack_codes<dtype>(codes));
    }
  }
};

template <QuantizeConfig C>
struct QuantizeColumns : QuantizeBlock<C> {
  using Base = QuantizeBlock<C>;
  using Base::params;
  using Raw = Two<C.vectors ? C.dtype : DType::f32>;

  Raw raw[scale_block];
  bool wild = false;  // some element of the warp is infinite

  __forceinline__ int32 column() const { return 64 * this->warp_of_block() + 2 * lane_index(); }

  // All loads before the first use.
  template <bool whole>
  __forceinline__ void load_vectors() {
    constexpr int32 size = core::size_bytes(C.dtype);
    const int64 step = params.stride[1] * size;
    const uint8* from = static_cast<const uint8*>(params.x) + column() * size;
    if constexpr (!C.paged) from += this->offset_of_row(0) * size;
#pragma unroll
    for (int32 r = 0; r < scale_block; ++r) {
      if (whole || r < this->used_rows) {
        raw[r].load(C.paged ? from + this->offset_of_row(r) * size : from);
      }
      from += C.paged ? 0 : step;
    }
  }

  __forceinline__ void load_elements() {
#pragma unroll
    for (int32 r = 0; r < scale_block; ++r) {
      if (r >= this->used_rows) continue;
      const int64 offset = this->offset_of_row(r);
#pragma unroll
      for (int32 e = 0; e < 2; ++e) {
        if (column() + e >= params.columns) continue;
        const float value =
            core::load_element(params.x, C.dtype, offset + (column() + e) * params.stride[3]);
        raw[r].word[e] = __float_as_uint(value);
      }
    }
  }

  __forceinline__ void load() {
#pragma unroll
    for (int32 r = 0; r < scale_block; ++r) raw[r] = {};
    if (column() >= params.columns) return;
    if constexpr (!C.vectors) {
      load_elements();
    } else if (this->used_rows == scale_block) {
      load_vectors<true>();
    } else if (this->used_rows > 0) {
      load_vectors<false>();
    }
  }

  __forceinline__ static float finite_or(float x, float otherwise) {
    return fabsf(x) < infinity ? x : otherwise;
  }

  // Of this thread; elements that are not finite do not count.
  __forceinline__ float largest() {
    float top = 0.0f;
#pragma unroll
    for (int32 r = 0; r < scale_block; ++r) {
      const float2 x = raw[r].widened();
      top = fmaxf(top, fmaxf(fabsf(x.x), fabsf(x.y)));  // passes over NaN
    }
    wild = __any_sync(0xffffffffu, top == infinity);
    if (wild) {
      top = 0.0f;
#pragma unroll
      for (int32 r = 0; r < scale_block; ++r) {
        const float2 x = raw[r].widened();
        top = fmaxf(top, fabsf(finite_or(x.x, 0.0f)));
        top = fmaxf(top, fabsf(finite_or(x.y, 0.0f)));
      }
    }
    return top;
  }

  template <bool wild>
  __forceinline__ void store_columns(float by) {
    const int64 keys = static_cast<int64>(params.blocks) * scale_block;
    uint8* to = params.codes +
                ((static_cast<int64>(this->batch) * params.heads + this->head) * params.columns +
                 column()) *
                    keys +
                static_cast<int64>(this->block) * scale_block;
#pragma unroll
    for (int32 chunk = 0; chunk < scale_block / 16; ++chunk) {
      uint32 out[2][4];  // [column][word of 4 keys]
#pragma unroll
      for (int32 q = 0; q < 4; ++q) {
        float2 x[4];
#pragma unroll
        for (int32 e = 0; e < 4; ++e) {
          x[e] = raw[16 * chunk + core::value_key(4 * q + e)].widened();
          if constexpr (wild) {
            const float nan = __uint_as_float(0x7fc00000u);
            x[e] = {finite_or(x[e].x, nan), finite_or(x[e].y, nan)};
          }
        }
        out[0][q] = Base::pack(x[0].x, x[1].x, x[2].x, x[3].x, by);
        out[1][q] = Base::pack(x[0].y, x[1].y, x[2].y, x[3].y, by);
      }
#pragma unroll
      for (int32 e = 0; e < 2; ++e) {
        if (column() + e >= params.columns) continue;
        *reinterpret_cast<uint4*>(to + e * keys + 16 * chunk) = {out[e][0], out[e][1], out[e][2],
                                                                 out[e][3]};
      }
    }
  }

  __forceinline__ void run() {
    this->find_block();
    load();
    const uint32 bits = this->largest_of_block(largest());
    if constexpr (C.pass == QuantizePass::measure) {
      this->report(bits);
      return;
    }
    const CodeScale code = this->code_scale(bits);
    this->store_scale(code.scale);
    this->store_slack();
    if (this->block >= params.blocks) return;
    const float by = code.by;
    if (wild) {
      store_columns<true>(by);
    } else {
      store_columns<false>(by);
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
