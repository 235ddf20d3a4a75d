// The work list of the forward kernels: from the index of a tile to its rows and keys.
//
// Functions take the kernel's configuration as a template argument C of either chip's type and read
// what both have: tile_k, bound_left, bound_right, ragged, and core::rows_of(C). Packed heads,
// split keys and sources of keys other than the copy engine are features that a configuration may
// lack.
#pragma once

#include "core/config_sm100.h"
#include "core/mask.h"
#include "device/ptx.h"

namespace fovea::device {

using core::FwdConfig;
using core::FwdParams;
using core::Source;

template <auto C>
__forceinline__ constexpr bool is_packed() {
  if constexpr (requires { C.packed; }) return C.packed;
  return false;
}

template <auto C>
__forceinline__ constexpr bool is_split() {
  if constexpr (requires { C.split; }) return C.split;
  return false;
}

template <auto C>
__forceinline__ constexpr bool has_tail() {
  if constexpr (requires { C.tail; }) return C.tail;
  return false;
}

// Blocks of tile_k keys that some rows visit (core/mask.h): [begin, full_begin) and [full_end, end)
// are touched by a mask, and keys outside [key_begin, key_end) are seen by none of the rows.
struct KeySpan {
  int32 key_begin, key_end;
  int32 begin, full_begin, full_end, end;

  __forceinline__ int32 count() const { return end - begin; }
};

// Queries from q_begin on, of one head (packed: of the heads of one group) of one sequence, and the
// keys they visit.
struct FwdTile : KeySpan {
  int32 head, head_kv;  // packed: head is the first of the group
  int32 sequence;
  int32 split;             // which part of the keys; in a tail counted through all tiles, or -1
  int32 batch_q, batch_k;  // coordinates in q and out, k and v
  int32 row_q, row_k;      // first row of the sequence there
  int32 capacity_q, length_q, length_k;
  int32 q_begin;

  int32 last;  // nonzero behind the last tile

  __forceinline__ bool exists() const { return q_begin < capacity_q; }
};

template <auto C>
__forceinline__ void find_sequence(FwdTile& tile, const FwdParams& params, int32 b) {
  tile.sequence = tile.batch_q = tile.batch_k = b;
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

// What some rows of a tile see of its blocks; the tile's own span where they see nothing. As
// find_span(), without its lower end, and with as few instructions as it takes between two tiles.
template <auto C>
__forceinline__ KeySpan span_inside(const FwdTile& tile, const FwdParams& params, int32 q_begin,
                                    int32 rows) {
  KeySpan span = tile;
  if constexpr (C.bound_right) {
    const int32 first = q_begin + tile.length_k - tile.length_q;
    const int32 last = min(first + rows, tile.length_k) - 1;
    const auto inside = [&](int32 key) { return min(max(key, 0), tile.length_k); };
    const int32 end = inside(last + params.window_right + 1);
    const int32 begin = C.bound_left ? inside(first - params.window_left) : 0;
    if (first > last || begin >= end) return span;
    const auto blocks = [](int32 keys) {
      return static_cast<int32>(static_cast<uint32>(keys) / static_cast<uint32>(C.tile_k));
    };
    span.end = blocks(end + C.tile_k - 1);
    span.full_end = blocks(inside(first + params.window_right + 1));
    const int32 all_begin = C.bound_left ? inside(last - params.window_left) : 0;
    span.full_begin = blocks(all_begin + C.tile_k - 1);
    if (span.full_begin >= span.full_end) span.full_begin = span.full_end = tile.begin;
  }
  return span;
}

// Leaves of a span the blocks of one part. Parts of a short span may be empty.
template <auto C>
__forceinline__ KeySpan part_of(KeySpan span, int32 part, int32 parts) {
  const auto cut = [&](int64 index) {
    return span.begin + static_cast<int32>(span.count() * index / parts);
  };
  const int32 begin = cut(part);
  const int32 end = cut(part + 1);
  const auto inside = [&](int32 block) { return min(max(block, begin), end); };
  span.full_begin = inside(span.full_begin);
  span.full_end = inside(span.full_end);
  span.key_begin = max(span.key_begin, begin * C.tile_k);
  span.key_end = min(span.key_end, end * C.tile_k);
  span.begin = begin;
  span.end = end;
  return span;
}

template <auto C>
__forceinline__ int32 queries_per_tile(const FwdParams& params) {
  return is_packed<C>() ? params.queries_per_tile : core::rows_of(C);
}

// CTAs of a cluster take the rows of one tile together: they stand in it one behind the other.
template <auto C>
__forceinline__ constexpr int32 cluster_size() {
  if constexpr (requires { C.cta_pair; }) return C.cta_pair ? 2 : 1;
  return 1;
}

// Tiles of `section` (batch, head) pairs are dealt together, so that their keys stay in L2; within
// a section the last rows, which see most keys under a causal mask, come first. Parts of the same
// rows follow each other.
template <auto C>
__forceinline__ FwdTile find_tile(const FwdParams& params, int32 index) {
  FwdTile tile;
  tile.split = 0;
  if constexpr (is_split<C>()) {
    tile.split = index % params.splits;
    index /= params.splits;
  }
  if constexpr (has_tail<C>()) {
    tile.split = -1;
    if (index >= params.tail_begin) {
      tile.split = index - params.tail_begin;
      index = params.tail_begin + tile.split / params.tail_parts;
    }
  }
  const int32 heads = is_packed<C>() ? params.heads_q / params.group_size : params.heads_q;
  const int32 pairs = params.batch * heads;
  const int32 section = index / (params.section * params.q_blocks);
  const int32 first = section * params.section;
  const int32 width = min(params.section, pairs - first);
  const int32 rest = index - first * params.q_blocks;
  const int32 block = params.q_blocks - 1 - rest / width;
  const int32 pair = first + rest % width;
  const int32 b = pair / heads;
  const int32 head = pair - b * heads;
  tile.head = is_packed<C>() ? head * params.group_size : head;
  tile.head_kv = is_packed<C>() ? head : head / params.group_size;
  tile.last = 0;
  const int32 queries = queries_per_tile<C>(params) * cluster_size<C>();
  tile.q_begin = block * queries;
  find_sequence<C>(tile, params, b);
  KeySpan span = find_span<C>(tile, params, tile.q_begin, queries);
  if constexpr (is_split<C>()) span = part_of<C>(span, tile.split, params.splits);
  if constexpr (has_tail<C>()) {
    if (tile.split >= 0) {
      span = part_of<C>(span, tile.split % params.tail_parts, params.tail_parts);
    }
  }
  static_cast<KeySpan&>(tile) = span;
  return tile;
}

// Rows behind the last sequence, which see no keys, may be more than the blocks of a sequence: a
// tile of theirs stands for every q_blocks-th from it on. Moves it to the next; false behind the
// last.
template <auto C>
__forceinline__ bool next_unused(FwdTile& tile, const FwdParams& params) {
  if (!C.ragged || tile.count() > 0) return false;
  tile.q_begin += params.q_blocks * queries_per_tile<C>(params) * cluster_size<C>();
  return tile.exists();
}

// The tile that this CTA, or its cluster of so many, takes in round r when tiles are dealt in
// advance. Rounds alternate in direction, so that a CTA with a long tile in one has a short one in
// the next.
__forceinline__ int32 tile_index(int32 round, int32 cluster = 1) {
  const int32 width = static_cast<int32>(gridDim.x) / cluster;
  const int32 place = static_cast<int32>(blockIdx.x) / cluster;
  return round * width + (round % 2 == 0 ? place : width - 1 - place);
}

// The tile that comes in round r: the first by place, further ones from a counter that all CTAs
// share, or, without one, as dealt in advance. By one thread, or by a whole warp, whose first lane
// asks for all.
template <bool by_warp>
__forceinline__ int32 next_tile_index(const FwdParams& params, int32 round) {
  if (params.scheduler == nullptr || round == 0) return tile_index(round);
  uint32 ticket = 0;
  if (!by_warp || lane_index() == 0) ticket = atomicAdd(params.scheduler, 1u);
  if constexpr (by_warp) ticket = __shfl_sync(0xffffffffu, ticket, 0);
  return static_cast<int32>(gridDim.x + ticket);
}

// By one thread of each CTA behind its last tile. The last CTA to ask leaves the counters as the
// first one found them.
__forceinline__ void leave_scheduler(const FwdParams& params) {
  if (atomicAdd(params.scheduler + 1, 1u) == gridDim.x - 1) {
    params.scheduler[0] = params.scheduler[1] = 0;
  }
}

// Of a block in pages, which is copied in pieces of so many keys of one page: the key with which
// the piece at `offset` begins. Where no key of it is seen, the nearest piece with one is copied in
// its place, since its page may not exist.
template <auto C>
__forceinline__ int32 first_of_piece(const KeySpan& span, int32 block, int32 offset, int32 keys) {
  const int32 first = span.key_begin / keys * keys;
  const int32 last = (span.key_end - 1) / keys * keys;
  return min(max(block * C.tile_k + offset, first), last);
}

// What a row of a tile stands for; a query beyond every capacity is none.
struct FwdRow {
  int32 query, head;
};

template <auto C>
__forceinline__ FwdRow find_row(const FwdParams& params, const FwdTile& tile, int32 row) {
  if constexpr (is_packed<C>()) {
    const int32 query = row / params.group_size;
    if (query >= params.queries_per_tile) return {1 << 30, tile.head};
    return {tile.q_begin + query, tile.head + row - query * params.group_size};
  }
  return {tile.q_begin + row, tile.head};
}

// The row of a key in k or v.
template <auto C>
__forceinline__ const uint16* key_row(const FwdParams& params, const core::Rows& rows,
                                      const FwdTile& tile, int32 key) {
  int64 batch = tile.batch_k;
  int64 row = tile.row_k + key;
  if constexpr (C.source != Source::tma) {
    if (params.block_table != nullptr) {
      const core::KeyPlace at = core::page_of(params, tile.sequence, key);
      batch = at.page;
      row = at.row;
    }
  }
  return rows.data + batch * rows.stride[0] + row * rows.stride[1] + tile.head_kv * rows.stride[2];
}

}  // namespace fovea::device
