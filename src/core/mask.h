// Which keys a query sees by position: the window around the bottom-right diagonal.
//
//   query row i of a sequence stands at position i + (length_k - length_q);
//   it sees keys j with  position - left <= j <= position + right  and 0 <= j < length_k.
//
// Causal is right = 0, a sliding window sets left, and -1 leaves a side unbounded. Everything that
// skips, splits or masks tiles goes through key_range() and block_range(); both are tested
// exhaustively against allowed().
#pragma once

#include "core/types.h"

namespace fovea::core {

constexpr int64 min64(int64 a, int64 b) { return a < b ? a : b; }
constexpr int64 max64(int64 a, int64 b) { return a > b ? a : b; }
constexpr int64 ceil_div(int64 a, int64 b) { return (a + b - 1) / b; }
constexpr int64 round_up(int64 a, int64 b) { return ceil_div(a, b) * b; }

// Folds the causal flag into the window: causal intersects, it never widens.
constexpr Window effective_window(Window window, bool causal) {
  if (causal) window.right = window.right < 0 ? 0 : min64(window.right, 0);
  return window;
}

constexpr bool allowed(Window window, int64 length_q, int64 length_k, int64 q, int64 k) {
  if (k < 0 || k >= length_k) return false;
  const int64 distance = k - (q + length_k - length_q);
  if (window.left >= 0 && distance < -window.left) return false;
  if (window.right >= 0 && distance > window.right) return false;
  return true;
}

// Half-open range of keys; empty when begin == end.
struct KeyRange {
  int64 begin = 0;
  int64 end = 0;
  constexpr bool empty() const { return begin >= end; }
};

// The keys that query row q sees: allowed() holds exactly on [begin, end).
constexpr KeyRange key_range(Window window, int64 length_q, int64 length_k, int64 q) {
  const int64 position = q + length_k - length_q;
  KeyRange range{0, length_k};
  // A bound beyond length_k + length_q reaches past every key; clamping it keeps the sums in range.
  const int64 reach = length_q + length_k;
  if (window.left >= 0) range.begin = max64(0, position - min64(window.left, reach));
  if (window.right >= 0) {
    range.end = min64(length_k, position + min64(window.right, reach) + 1);
  }
  if (range.begin >= range.end) return {0, 0};
  return range;
}

// Keys that any of the rows [q_begin, q_end) sees (a superset by the ends, exact at both ends).
constexpr KeyRange union_range(Window window, int64 length_q, int64 length_k, int64 q_begin,
                               int64 q_end) {
  // Rows at either end may see nothing: the first with keys and the last with keys bound the union.
  KeyRange range{0, 0};
  if (q_begin >= q_end || length_k <= 0) return range;
  const int64 shift = length_k - length_q;
  int64 first = q_begin;
  int64 last = q_end - 1;
  if (window.right >= 0) first = max64(first, -shift - min64(window.right, length_q + length_k));
  if (window.left >= 0) {
    last = min64(last, length_k - 1 - shift + min64(window.left, length_q + length_k));
  }
  if (first > last) return range;
  range.begin = key_range(window, length_q, length_k, first).begin;
  range.end = key_range(window, length_q, length_k, last).end;
  return range;
}

// Keys that all of the rows [q_begin, q_end) see.
constexpr KeyRange common_range(Window window, int64 length_q, int64 length_k, int64 q_begin,
                                int64 q_end) {
  if (q_begin >= q_end) return {0, 0};
  const KeyRange first = key_range(window, length_q, length_k, q_begin);
  const KeyRange last = key_range(window, length_q, length_k, q_end - 1);
  if (first.empty() || last.empty()) return {0, 0};
  const KeyRange range{max64(first.begin, last.begin), min64(first.end, last.end)};
  return range.empty() ? KeyRange{0, 0} : range;
}

// Blocks of block_k keys that the query rows [q_begin, q_end) visit:
//
//   [begin, full_begin)  touched by a mask     (partial)
//   [full_begin, full_end)  every element visible  (full)
//   [full_end, end)  touched by a mask     (partial)
//
// Blocks outside [begin, end) are empty for every row. A last block that length_k cuts is partial.
struct BlockRange {
  int64 begin = 0;
  int64 full_begin = 0;
  int64 full_end = 0;
  int64 end = 0;
};

constexpr BlockRange block_range(Window window, int64 length_q, int64 length_k, int64 q_begin,
                                 int64 q_end, int64 block_k) {
  BlockRange blocks;
  const KeyRange any = union_range(window, length_q, length_k, q_begin, q_end);
  if (any.empty()) return blocks;
  blocks.begin = any.begin / block_k;
  blocks.end = ceil_div(any.end, block_k);
  const KeyRange all = common_range(window, length_q, length_k, q_begin, q_end);
  blocks.full_begin = ceil_div(all.begin, block_k);
  blocks.full_end = all.end / block_k;
  if (all.empty() || blocks.full_begin >= blocks.full_end) {
    blocks.full_begin = blocks.full_end = blocks.end;
  }
  return blocks;
}

}  // namespace fovea::core
