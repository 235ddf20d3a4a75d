// What the 16 rows of a warp see of one block of keys, where a mask by position ends inside it: the
// 8-bit forward kernel for Hopper asks by groups of scale_block keys.
#pragma once

#include "core/fp8.h"
#include "device/fwd_tiles.h"

namespace fovea::device {

// Columns of the block. Each row of the warp sees at least [all_begin, all_end), and none anything
// outside [any_begin, any_end). Of this thread's two rows, seen from its first column:
// [begin[half], end[half]).
template <FwdConfig C>
struct Sight {
  int32 any_begin, all_begin, all_end, any_end;
  int32 begin[2], end[2];

  static constexpr int32 width = core::scale_block;
  static constexpr int32 count = width / 2;  // of this thread's scores in a group

  __forceinline__ bool sees(int32 group) const {
    return group * width < any_end && (group + 1) * width > any_begin;
  }
  __forceinline__ bool sees_all(int32 group) const {
    return group * width >= all_begin && (group + 1) * width <= all_end;
  }

  // Of one group of scores (tile.h: WgmmaAccumulator).
  __forceinline__ void hide_unseen(float (&scores)[C.tile_k / 2], int32 group) const {
#pragma unroll
    for (int32 i = group * count; i < (group + 1) * count; ++i) {
      const int32 half = (i / 2) % 2;
      const int32 column = 8 * (i / 4) + i % 2;
      const bool seen = (!C.bound_left || column >= begin[half]) && column < end[half];
      if (!seen) scores[i] = -core::infinity;
    }
  }
};

// warp_row is the warp's first row in the sequence.
template <FwdConfig C>
__forceinline__ Sight<C> find_sight(const FwdTile& tile, const FwdParams& params, int32 warp_row,
                                    int32 block) {
  const int32 origin = block * C.tile_k;
  const int32 shift = tile.length_k - tile.length_q;
  const auto begin_of = [&](int32 row) {
    return (C.bound_left ? max(0, row + shift - params.window_left) : 0) - origin;
  };
  const auto end_of = [&](int32 row) {
    return (C.bound_right ? min(tile.length_k, row + shift + params.window_right + 1)
                          : tile.length_k) -
           origin;
  };
  Sight<C> s{begin_of(warp_row), begin_of(warp_row + 15), end_of(warp_row), end_of(warp_row + 15)};
#pragma unroll
  for (int32 half = 0; half < 2; ++half) {
    const int32 row = warp_row + lane_index() / 4 + 8 * half;
    s.begin[half] = begin_of(row) - 2 * (lane_index() % 4);
    s.end[half] = end_of(row) - 2 * (lane_index() % 4);
  }
  return s;
}

}  // namespace fovea::device
