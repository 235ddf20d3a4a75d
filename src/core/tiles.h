// The work list: which piece of the problem one worker computes at a time.
//
// Packed GQA: the query heads that share a KV head form one matrix whose row r is query r / group
// of head  kv_head * group + r % group, so that K and V are read once per group. A tile is a range
// of packed rows against a range of keys; keys are split only when there are too few rows to occupy
// the workers (split-KV), and the parts are merged afterwards (core/softmax.h).
#pragma once

#include "core/mask.h"
#include "core/types.h"

namespace fovea::core {

struct PackedRow {
  int64 query;
  int32 head;
};

constexpr PackedRow packed_row(int64 row, int32 group_size, int32 head_kv) {
  return {row / group_size,
          head_kv * group_size + static_cast<int32>(row % static_cast<int64>(group_size))};
}

struct Tile {
  int32 batch = 0;
  int32 head_kv = 0;
  int32 head_count = 1;  // KV heads from head_kv on
  int64 row_begin = 0;   // packed rows of each of these heads
  int64 row_end = 0;
  int64 pack_slot = 0;  // where the head's first packed key block is, if K and V are packed ahead
  int32 split = 0;
  int32 cost = 0;       // relative work; sorts the list longest first
  int32 head_cost = 0;  // of the longest tile of the same head
};

// Rows are dealt evenly: 130 rows in blocks of at most 128 become 65 + 65, not 128 + 2.
struct RowBlock {
  int64 begin;
  int64 end;
};

constexpr RowBlock row_block(int64 rows, int64 block_count, int64 index) {
  return {rows * index / block_count, rows * (index + 1) / block_count};
}

// Keys of part `split` of `split_count`, cut at multiples of block_k so that every part but the
// last holds whole blocks. Parts may be empty.
constexpr KeyRange split_range(KeyRange keys, int64 split_count, int64 split, int64 block_k) {
  const int64 first = keys.begin / block_k;
  const int64 blocks = ceil_div(keys.end, block_k) - first;
  const int64 begin = (first + blocks * split / split_count) * block_k;
  const int64 end = (first + blocks * (split + 1) / split_count) * block_k;
  return {max64(keys.begin, begin), min64(keys.end, end)};
}

// Work of a tile in units of row x key, for ordering.
constexpr int64 tile_work(Window window, int64 length_q, int64 length_k, int64 q_begin,
                          int64 q_end) {
  const KeyRange keys = union_range(window, length_q, length_k, q_begin, q_end);
  return (q_end - q_begin) * (keys.end - keys.begin);
}

// How many of `pairs` heads with their tiles are dealt together where at most `fitting`, one or
// more and no more than there are, find room in a cache: the most from half of those on of which
// there is a whole number. Of a rest of pairs the longest tiles would begin last, and end last.
constexpr int64 section_of(int64 fitting, int64 pairs) {
  for (int64 section = fitting; 2 * section >= fitting; --section) {
    if (pairs % section == 0) return section;
  }
  return fitting;
}

}  // namespace fovea::core
