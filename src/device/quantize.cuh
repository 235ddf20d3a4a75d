// Quantisation to 8 bits (core/fp8.h): q and k rotated, v transposed, with a scale for 32 rows.
//
// What binds is memory: for 16-bit inputs 3 bytes an element, once. A CTA takes 32 rows of a head
// (v: 128); four threads take a row, each every fourth piece of 8 columns:
//
//   column    0..7   8..15  16..23  24..31 | 32..39 ...
//   thread     t0     t1      t2      t3   |   t0   ...
//
// so that loads are whole sectors and, of the butterflies of the Hadamard transform, only those
// over 8 and 16 columns cross threads: two shuffles an element. The order of additions is that of
// core::hadamard(), and the CPU's codes are these to the bit.
//
// Arithmetic is next: at full bandwidth a multiprocessor has 20 issue slots for 32 elements of q.
// Rotation takes 10 of them (signs of packed pairs 1, five levels of additions, two of shuffle and
// multiply-add), widening, maximum, scaling and conversion 4. CTAs of 32 rows let some load while
// others compute.
#pragma once

#include "core/fp8.h"
#include "device/ptx.h"

namespace fovea::device {

using core::DType;
using core::infinity;
using core::KeyScale;
using core::QuantizeConfig;
using core::QuantizeParams;
using core::QuantizePass;
using core::scale_block;

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

template <DType dtype>
__forceinline__ void widen(float* x, const void* from, uint32 signs) {
  if constexpr (dtype == DType::f32) {
#pragma unroll
    for (int32 i = 0; i < 8; i += 4) {
      const float4 part = static_cast<const float4*>(from)[i / 4];
      x[i] = part.x;
      x[i + 1] = part.y;
      x[i + 2] = part.z;
      x[i + 3] = part.w;
    }
    flip(x, signs);
  } else if constexpr (core::size_bytes(dtype) == 2) {
    const uint4 part = *static_cast<const uint4*>(from);
    uint32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
      words[i] ^= (signs << i) & 0x80008000u;
      if constexpr (dtype == DType::bf16) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        const float2 pair = unpack_f16x2(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  } else {
    const uint2 part = *static_cast<const uint2*>(from);
    const uint32 words[2] = {part.x, part.y};
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
      const auto codes = static_cast<uint16>(words[i / 2] >> (16 * (i % 2)));
      const float2 pair =
          unpack_f16x2(dtype == DType::e4m3 ? unpack_e4m3x2(codes) : unpack_e5m2x2(codes));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
    flip(x, signs);
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

template <QuantizeConfig C>
struct Quantize {
  static constexpr int32 pieces = C.columns / 32;  // of 8 columns, of a thread
  static constexpr int32 count = 8 * pieces;
  static constexpr int32 rows = core::quantize_rows(C);
  static constexpr int32 blocks = rows / scale_block;
  // A row of codes in shared memory, in words; whole rounds of the banks.
  static constexpr int32 pitch = (C.columns / 4 + 31) / 32 * 32;

  struct Shared {
    uint32 largest[blocks][4];                     // of each warp
    uint32 codes[C.transpose ? rows * pitch : 1];  // [row][column / 4], place()
  };

  const QuantizeParams& params;
  Shared& shared;
  float x[count];

  int32 head, batch;
  int32 sequence;
  int32 block;      // of 32 rows, of the batch and head
  int64 row;        // of the batch, this thread's
  bool real_block;  // belongs to a sequence
  bool real_row;    // likewise
  bool used_row;    // and counts

  __forceinline__ static int32 thread() { return static_cast<int32>(threadIdx.x) % 4; }
  __forceinline__ static int32 row_of_cta() { return static_cast<int32>(threadIdx.x) / 4; }
  __forceinline__ static int32 block_of_cta() { return row_of_cta() / scale_block; }

  // Packed sequences begin with blocks of their own: find the one that this block is of.
  __forceinline__ void find_rows() {
    const int32 tile = static_cast<int32>(blockIdx.x) / params.heads;
    head = static_cast<int32>(blockIdx.x) - tile * params.heads;
    batch = static_cast<int32>(blockIdx.y);
    block = tile * blocks + block_of_cta();
    sequence = batch;
    int64 begin = 0;
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
    const int64 block_row = begin + static_cast<int64>(block - first) * scale_block;
    real_block = block_row < end && block < params.blocks;
    row = block_row + row_of_cta() % scale_block;
    real_row = real_block && row < end;
    used_row = real_row;
    if (real_row && params.seqused != nullptr) used_row = row - begin < params.seqused[sequence];
  }

  // Of the row's first element.
  __forceinline__ int64 offset_of_row() const {
    int64 batch_of = batch;
    int64 row_of = row;
    if constexpr (C.paged) {
      if (used_row) {
        const int32 page = static_cast<int32>(row) / params.page_size;
        batch_of = params.block_table[sequence * params.block_table_stride + page];
        row_of = row - static_cast<int64>(page) * params.page_size;
      }
    }
    return batch_of * params.stride[0] + row_of * params.stride[1] + head * params.stride[2];
  }

  __forceinline__ void load() {
    constexpr int64 size = core::size_bytes(C.dtype);
    const int64 offset = offset_of_row();
    const uint8* from = static_cast<const uint8*>(params.x) + offset * size;
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
      const int32 column = 32 * j + 8 * thread();
#pragma unroll
      for (int32 e = 0; e < 8; ++e) x[8 * j + e] = 0.0f;
      const uint32 signs = C.rotate ? params.signs.word[j] << (4 * thread()) : 0u;
      if constexpr (C.vectors) {
        if (used_row && column < params.columns) {
          widen<C.dtype>(x + 8 * j, from + column * size, signs);
        }
      } else {
#pragma unroll
        for (int32 e = 0; e < 8; ++e) {
          if (used_row && column + e < params.columns) {
            const float value =
                core::load_element(params.x, C.dtype, offset + (column + e) * params.stride[3]);
            x[8 * j + e] = flipped(value, signs, e);
          }
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

  static constexpr float norm =
      C.rotate ? core::rotation_norm(core::rotation_block(C.columns)) : 1.0f;

  // Of the 32 rows, as bits; elements that are not finite become NaN and do not count.
  __forceinline__ uint32 largest_of_block() {
    float largest = 0.0f;
#pragma unroll
    for (int32 i = 0; i < count; ++i) largest = fmaxf(largest, fabsf(x[i]));  // passes over NaN
    if (__any_sync(0xffffffffu, largest == infinity)) {
      largest = 0.0f;
#pragma unroll
      for (int32 i = 0; i < count; ++i) {
        x[i] = fabsf(x[i]) < infinity ? x[i] : __uint_as_float(0x7fc00000u);
        largest = fmaxf(largest, fabsf(x[i]));
      }
    }
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest * norm));
    const int32 warp = static_cast<int32>(threadIdx.x) / 32;
    shared.largest[warp / 4][warp % 4] = bits;
    __syncthreads();
    const uint32* of = shared.largest[block_of_cta()];
    return max(max(of[0], of[1]), max(of[2], of[3]));
  }

  __forceinline__ float find_scale() {
    uint32 bits = 0;
    if constexpr (C.pass == QuantizePass::apply) {
      // Infinities become NaN here, too.
      largest_of_block();
      bits = params.largest[sequence * params.largest_stride[0] + head * params.largest_stride[1]];
    } else {
      bits = largest_of_block();
    }
    return core::block_scale(__uint_as_float(bits), C.to);
  }

  // The scale that the elements have already.
  __forceinline__ float given_scale() const {
    if constexpr (!C.scaled) return 1.0f;
    return params
        .scale[sequence * params.scale_stride[0] +
               head / params.scale_heads * params.scale_stride[1] + block * params.scale_stride[2]];
  }

  __forceinline__ void store_scale(float shift) {
    const bool writes = static_cast<int32>(threadIdx.x) % (4 * scale_block) == 0;
    if (!writes || block >= params.blocks) return;
    const float scale = real_block ? shift * given_scale() : 1.0f;
    const int64 place = (static_cast<int64>(batch) * params.heads + head) * params.blocks + block;
    // Blocks between packed sequences may be read, but not used.
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

  __forceinline__ static uint32 pack(float x0, float x1, float x2, float x3) {
    if constexpr (C.to == DType::e4m3) return pack_e4m3x4(x0, x1, x2, x3);
    return pack_e5m2x2(x0, x1) | static_cast<uint32>(pack_e5m2x2(x2, x3)) << 16;
  }

  __forceinline__ uint2 convert(int32 j, float by) const {
    const float* y = x + 8 * j;
    return {pack(y[0] * by, y[1] * by, y[2] * by, y[3] * by),
            pack(y[4] * by, y[5] * by, y[6] * by, y[7] * by)};
  }

  __forceinline__ void store_rows(float by) {
    if (!real_row) return;
    uint8* to = params.codes +
                ((batch * params.rows + row) * params.heads + head) * params.code_columns +
                8 * thread();
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
      if (32 * j + 8 * thread() >= params.code_columns) break;
      *reinterpret_cast<uint2*>(to + 32 * j) = convert(j, by);
    }
  }

  // Word of (row, column / 4) in shared memory: rows 16 apart, which are read together, and rows 1
  // apart, which are written together, use different banks.
  __forceinline__ static int32 place(int32 r, int32 word) {
    return r * pitch + (word ^ (4 * (r / 16) ^ 8 * (r % 4)));
  }

  __forceinline__ void store_columns(float by) {
#pragma unroll
    for (int32 j = 0; j < pieces; ++j) {
      *reinterpret_cast<uint2*>(&shared.codes[place(row_of_cta(), 8 * j + 2 * thread())]) =
          convert(j, by);
    }
    __syncthreads();
    // 16 keys of 4 columns at a time; eight threads side by side fill a line.
    constexpr int32 chunks = rows / 16;
    const int64 keys = static_cast<int64>(params.blocks) * scale_block;
    const int32 first_block = block - block_of_cta();
    for (int32 i = static_cast<int32>(threadIdx.x); i < C.columns / 4 * chunks;
         i += core::quantize_threads(C)) {
      const int32 chunk = i / 4 % chunks;
      const int32 word = i / (4 * chunks) * 4 + i % 4;
      uint32 out[4][4];  // [column][word of 4 keys]
#pragma unroll
      for (int32 q = 0; q < 4; ++q) {
        uint32 key[4];
#pragma unroll
        for (int32 e = 0; e < 4; ++e) {
          key[e] = shared.codes[place(16 * chunk + core::value_key(4 * q + e), word)];
        }
        const uint32 a = permute_bytes<0x5140>(key[0], key[1]);
        const uint32 b = permute_bytes<0x5140>(key[2], key[3]);
        const uint32 c = permute_bytes<0x7362>(key[0], key[1]);
        const uint32 d = permute_bytes<0x7362>(key[2], key[3]);
        out[0][q] = permute_bytes<0x5410>(a, b);
        out[1][q] = permute_bytes<0x7632>(a, b);
        out[2][q] = permute_bytes<0x5410>(c, d);
        out[3][q] = permute_bytes<0x7632>(c, d);
      }
      if (first_block + chunk / 2 >= params.blocks) continue;
      uint8* to = params.codes +
                  (static_cast<int64>(batch) * params.heads + head) * params.columns * keys +
                  static_cast<int64>(first_block) * scale_block + 16 * chunk;
#pragma unroll
      for (int32 e = 0; e < 4; ++e) {
        const int32 column = 4 * word + e;
        if (column >= params.columns) continue;
        *reinterpret_cast<uint4*>(to + column * keys) = {out[e][0], out[e][1], out[e][2],
                                                         out[e][3]};
      }
    }
  }

  __forceinline__ void run() {
    find_rows();
    if constexpr (C.pass == QuantizePass::scales) {
      store_scale(1.0f);
      store_slack();
      return;
    }
    load();
    if constexpr (C.rotate) rotate();
    if constexpr (C.pass == QuantizePass::measure) {
      const uint32 bits = largest_of_block();
      if (static_cast<int32>(threadIdx.x) % (4 * scale_block) == 0 && real_block) {
        atomicMax(
            params.largest + sequence * params.largest_stride[0] + head * params.largest_stride[1],
            bits);
      }
    } else {
      const float scale = find_scale();
      store_scale(scale);
      store_slack();
      // One rounding: the scale is a power of two.
      const float by = norm * (1.0f / scale);
      if constexpr (C.transpose) {
        store_columns(by);
      } else {
        store_rows(by);
      }
    }
  }
};

template <QuantizeConfig C>
__device__ void quantize(const QuantizeParams& params) {
  extern __shared__ __align__(16) uint8 shared_memory[];
  using Shared = typename Quantize<C>::Shared;
  static_assert(sizeof(Shared) <= core::quantize_shared_bytes(C));
  Quantize<C>{params, *reinterpret_cast<Shared*>(shared_memory)}.run();
}

}  // namespace fovea::device
