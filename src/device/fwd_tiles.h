// The work list of the forward kernels: from the index of a tile to its rows and keys.
//
// Functions take the kernel's configuration as a template argument C of either chip's type and read
// what both have: tile_k, bound_left, bound_right, ragged, and core::rows_of(C).
#pragma once

#include "core/config.h"
#include "core/mask.h"
#include "device/ptx.h"

namespace fovea::device {

using core::FwdParams;

// Blocks of tile_k keys that some rows visit (core/mask.h): [begin, full_begin) and [full_end, end)
// are touched by a mask, and keys outside [key_begin, key_end) are seen by none of the rows.
struct KeySpan {
  int32 key_begin, key_end;
  int32 begin, full_begin, full_end, end;

  __forceinline__ int32 count() const { return end - begin; }
};

// Rows [q_begin, q_begin + rows) of one head of one sequence, and the keys they visit.
struct FwdTile : KeySpan {
  int32 sequence;
  int32 head, head_kv;
  int32 batch_q, batch_k;  // coordinates in q and out, k and v
  int32 row_q, row_k;      // first row of the sequence there
  int32 capacity_q, length_q, length_k;
  int32 q_begin;

  int32 last;  // nonzero behind the last tile

  __forceinline__ bool exists() const { return q_begin < capacity_q; }
};

template <auto C>
__forceinline__ void find_sequence(FwdTile& tile, const FwdParams& params, int32 b) {
  tile.batch_q = tile.batch_k = b;
  tile.row_q = tile.row_k = 0;
  tile.capacity_q = tile.length_q = params.seqlen_q;
  tile.length_k = params.seqlen_k;
  if constexpr (C.ragged) {
    // One sequence more than there are: rows behind the last one, which belong to no query.
    const bool real = b < params.sequences;
    if (params.cu_seqlens_q != nullptr) {
      tile.batch_q = 0;
      tile.row_q = params.cu_seqlens_q[b];
      tile.capacity_q = (real ? params.cu_seqlens_q[b + 1] : params.total_q) - tile.row_q;
      tile.length_q = tile.capacity_q;
    }
    if (!real) {
      tile.length_q = tile.length_k = 0;
      return;
    }
    if (params.seqused_q != nullptr) tile.length_q = params.seqused_q[b];
    if (params.cu_seqlens_k != nullptr) {
      tile.batch_k = 0;
      tile.row_k = params.cu_seqlens_k[b];
      tile.length_k = params.cu_seqlens_k[b + 1] - tile.row_k;
    }
    if (params.seqused_k != nullptr) tile.length_k = params.seqused_k[b];
  }
}

// The keys that rows [q_begin, q_begin + rows) of the tile's sequence visit.
template <auto C>
__forceinline__ KeySpan find_span(const FwdTile& tile, const FwdParams& params, int32 q_begin,
                                  int32 rows) {
  const int32 q_end = min(q_begin + rows, tile.length_q);
  KeySpan span;
  span.key_begin = span.begin = span.full_begin = 0;
  span.key_end = q_begin < q_end ? tile.length_k : 0;
  span.end = (span.key_end + C.tile_k - 1) / C.tile_k;
  span.full_end = span.key_end / C.tile_k;
  if constexpr (core::is_windowed(C)) {
    const core::Window window{params.window_left, params.window_right};
    const core::KeyRange keys =
        core::union_range(window, tile.length_q, tile.length_k, q_begin, q_end);
    const core::BlockRange blocks =
        core::block_range(window, tile.length_q, tile.length_k, q_begin, q_end, C.tile_k);
    span.key_begin = static_cast<int32>(keys.begin);
    span.key_end = static_cast<int32>(keys.end);
    span.begin = static_cast<int32>(blocks.begin);
    span.full_begin = static_cast<int32>(blocks.full_begin);
    span.full_end = static_cast<int32>(blocks.full_end);
    span.end = static_cast<int32>(blocks.end);
    // No full block: all of them belong to the first masked loop.
    if (span.full_begin >= span.full_end) span.full_begin = span.full_end = span.begin;
  }
  return span;
}

// Tiles of `section` (batch, head) pairs are dealt together, so that their keys stay in L2; within
// a section the last rows, which see most keys under a causal mask, come first.
template <auto C>
__forceinline__ FwdTile find_tile(const FwdParams& params, int32 index) {
  const int32 pairs = params.batch * params.heads_q;
  const int32 section = index / (params.section * params.q_blocks);
  const int32 first = section * params.section;
  const int32 width = min(params.section, pairs - first);
  const int32 rest = index - first * params.q_blocks;
  const int32 block = params.q_blocks - 1 - rest / width;
  const int32 pair = first + rest % width;
  FwdTile tile;
  const int32 b = pair / params.heads_q;
  tile.sequence = b;
  tile.head = pair - b * params.heads_q;
  tile.head_kv = tile.head / params.group_size;
  tile.last = 0;
  tile.q_begin = block * core::rows_of(C);
  find_sequence<C>(tile, params, b);
  static_cast<KeySpan&>(tile) = find_span<C>(tile, params, tile.q_begin, core::rows_of(C));
  return tile;
}

// The tile that this CTA takes in round r when tiles are dealt in advance. Rounds alternate in
// direction, so that a CTA with a long tile in one has a short one in the next.
__forceinline__ int32 tile_index(int32 round) {
  const int32 width = static_cast<int32>(gridDim.x);
  const int32 place = static_cast<int32>(blockIdx.x);
  return round * width + (round % 2 == 0 ? place : width - 1 - place);
}

}  // namespace fovea::device
