// What the forward kernels for Hopper do alike with the registers of a tile, in 16 bits and in 8: a
// warp's 16 rows of 64, each thread with rows lane / 4 and lane / 4 + 8 (tile.h: WgmmaAccumulator).
// "half" is the one or the other row.
#pragma once

#include "device/fwd_tiles.h"
#include "device/scores.h"
#include "device/tile.h"
#include "device/tma.h"

namespace fovea::device {

// ---- Scores -------------------------------------------------------------------------------------

// Hides what a row does not see of the first keys of a block: selects, so that what was there
// reaches nothing. query(half) is the query that a row stands for.
template <FwdConfig C, int32 count, typename Query>
__forceinline__ void hide_unseen(float (&scores)[count], const FwdParams& params,
                                 const FwdTile& tile, int32 block, const Query& query) {
  int32 first[2];  // of the visible columns, seen from this thread's first column
  uint32 width[2];
#pragma unroll
  for (int32 half = 0; half < 2; ++half) {
    int32 begin = 0;
    int32 end = tile.length_k;
    if constexpr (core::is_windowed(C)) {
      const int32 position = query(half) + tile.length_k - tile.length_q;
      if constexpr (C.bound_left) begin = max(0, position - params.window_left);
      if constexpr (C.bound_right) end = min(end, position + params.window_right + 1);
    }
    const int32 origin = block * C.tile_k + 2 * (lane_index() % 4);
    first[half] = begin - origin;
    width[half] = static_cast<uint32>(max(0, end - begin));
  }
#pragma unroll
  for (int32 i = 0; i < count; ++i) {
    const int32 half = (i / 2) % 2;
    const int32 column = 8 * (i / 4) + i % 2;
    if (static_cast<uint32>(column - first[half]) >= width[half]) scores[i] = -core::infinity;
  }
}

// ---- Output -------------------------------------------------------------------------------------

// A warp's 16 rows into shared memory, panels of 64 columns of 16 bits, each [rows][64] with the
// 128-byte swizzle; first_row is the warp's.
template <FwdConfig C, int32 rows>
__forceinline__ void stage_rows(SharedAddress panels, const float (&output)[C.head_dim_v / 2],
                                int32 first_row) {
  const int32 lane = lane_index();
  const int32 row = first_row + StoreMatrixX4::row(lane);
#pragma unroll
  for (int32 j = 0; j < 4 * core::panels(C.head_dim_v); ++j) {
    uint32 words[4] = {};  // 16 columns each; zeros fill the last panel
    if (j < C.head_dim_v / 16) {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        words[i] = pack<C.out_dtype>(output[8 * j + 2 * i], output[8 * j + 2 * i + 1]);
      }
    }
    const uint32 offset =
        panel_offset(Swizzle::b128, rows, row, 2 * (16 * j + StoreMatrixX4::col(lane)));
    store_matrix_x4(panels + offset, words[0], words[1], words[2], words[3]);
  }
}

template <FwdConfig C>
__forceinline__ void store_element(void* out, int64 offset, float value) {
  if constexpr (core::stored_dtype(C) == core::DType::f32) {
    static_cast<float*>(out)[offset] = value;
  } else {
    static_cast<uint16*>(out)[offset] =
        static_cast<uint16>(pack<C.out_dtype>(value, 0.0f) & 0xffffu);
  }
}

// One row of a thread in chunks of 16 bytes, `base` being the offset of its first column, if it is
// `used`. The lanes of a quad hold two columns of every eight: a transposition of 4 x 4 words gives
// each eight neighbours of every 32.
template <FwdConfig C>
__forceinline__ void store_row_chunks(const FwdParams& params,
                                      const float (&output)[C.head_dim_v / 2], int32 half,
                                      int64 base, bool used) {
  const int32 lane = lane_index() % 4;
  const bool odd = lane % 2 != 0;
  const bool high = lane / 2 != 0;
  uint16* at = static_cast<uint16*>(params.out) + base + 8 * lane;
#pragma unroll
  for (int32 m = 0; m < C.head_dim_v / 32; ++m) {
    uint32 words[4];
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
      const int32 at_i = 4 * (4 * m + i) + 2 * half;
      words[i] = pack<C.out_dtype>(output[at_i], output[at_i + 1]);
    }
#pragma unroll
    for (int32 i = 0; i < 4; i += 2) {
      const uint32 got = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
      (odd ? words[i] : words[i + 1]) = got;
    }
#pragma unroll
    for (int32 i = 0; i < 2; ++i) {
      const uint32 got = __shfl_xor_sync(0xffffffffu, high ? words[i] : words[i + 2], 2);
      (high ? words[i] : words[i + 2]) = got;
    }
    if (used)
      *reinterpret_cast<uint4*>(at + 32 * m) = uint4{words[0], words[1], words[2], words[3]};
  }
}

// One row of a thread from registers, `base` being the offset of its first column: where rows end
// inside the tile, or out suits no copy engine.
template <FwdConfig C>
__forceinline__ void store_row(const FwdParams& params, const float (&output)[C.head_dim_v / 2],
                               int32 half, int64 base) {
#pragma unroll
  for (int32 j = 0; j < C.head_dim_v / 8; ++j) {
    const int32 column = 8 * j + 2 * (lane_index() % 4);
    const float low = output[4 * j + 2 * half];
    const float high = output[4 * j + 2 * half + 1];
    if constexpr (C.tma_out) {
      if (column < params.head_dim_v) {
        *reinterpret_cast<uint32*>(static_cast<uint16*>(params.out) + base + column) =
            pack<C.out_dtype>(low, high);
      }
    } else {
      const int64 step = params.out_stride[3];
      if (column < params.head_dim_v) store_element<C>(params.out, base + column * step, low);
      if (column + 1 < params.head_dim_v) {
        store_element<C>(params.out, base + (column + 1) * step, high);
      }
    }
  }
}

}  // namespace fovea::device
