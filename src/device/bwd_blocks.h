// Where the backward kernels find their rows: sequences, blocks of query rows, blocks of keys.
#pragma once

#include "core/config_backward.h"
#include "core/mask.h"
#include "device/ptx.h"

namespace fovea::device {

using core::BwdConfig;
using core::BwdParams;
using core::DType;

struct BwdSequence {
  int32 index;
  int32 batch_q, batch_k;  // coordinates in q and dout, k and v
  int32 row_q, row_k;      // first row of the sequence there
  int32 capacity_q, length_q, capacity_k, length_k;
};

// One sequence more than there are: rows behind the last one, which belong to nobody.
template <auto C>
__forceinline__ BwdSequence bwd_sequence(const BwdParams& params, int32 b) {
  BwdSequence s;
  s.index = s.batch_q = s.batch_k = b;
  s.row_q = s.row_k = 0;
  s.capacity_q = s.length_q = params.seqlen_q;
  s.capacity_k = s.length_k = params.seqlen_k;
  if constexpr (C.ragged) {
    const bool real = b < params.sequences;
    if (params.cu_seqlens_q != nullptr) {
      s.batch_q = 0;
      s.row_q = params.cu_seqlens_q[b];
      s.capacity_q = (real ? params.cu_seqlens_q[b + 1] : params.total_q) - s.row_q;
      s.length_q = s.capacity_q;
    } else if (!real) {
      s.capacity_q = 0;
    }
    if (params.cu_seqlens_k != nullptr) {
      s.batch_k = 0;
      s.row_k = params.cu_seqlens_k[b];
      s.capacity_k = (real ? params.cu_seqlens_k[b + 1] : params.total_k) - s.row_k;
      s.length_k = s.capacity_k;
    } else if (!real) {
      s.capacity_k = 0;
    }
    if (!real) {
      s.length_q = s.length_k = 0;
      return s;
    }
    if (params.seqused_q != nullptr) s.length_q = params.seqused_q[b];
    if (params.seqused_k != nullptr) s.length_k = params.seqused_k[b];
  }
  return s;
}

// Number of the first block of query rows of one head. Packed sequences begin blocks of their own:
// rows / rows_of + 1 blocks hold any of them.
template <auto C>
__forceinline__ int64 first_block(const BwdParams& params, const BwdSequence& s, int32 head) {
  constexpr int32 rows = core::rows_of(C);
  if (C.ragged && params.cu_seqlens_q != nullptr) {
    const int32 begin = s.row_q / rows + s.index;
    const int32 end = (s.row_q + s.capacity_q) / rows + s.index + 1;
    return static_cast<int64>(begin) * params.heads_q + static_cast<int64>(head) * (end - begin);
  }
  return (static_cast<int64>(s.index) * params.heads_q + head) * params.q_blocks;
}

// The query rows [begin, end) that see any of the keys [key_begin, key_end).
template <auto C>
__forceinline__ core::KeyRange rows_that_see(const BwdParams& params, const BwdSequence& s,
                                             int32 key_begin, int32 key_end) {
  core::KeyRange rows{0, key_begin < key_end ? s.length_q : 0};
  const int32 shift = s.length_k - s.length_q;
  if constexpr (C.bound_right) {
    rows.begin = max(0, key_begin - shift - params.window_right);
  }
  if constexpr (C.bound_left) {
    rows.end = core::min64(rows.end, static_cast<int64>(key_end) - shift + params.window_left);
  }
  return rows.begin < rows.end ? rows : core::KeyRange{0, 0};
}

// True if keys [key_begin, key_begin + keys) all exist and every one of the rows
// [q_begin, q_begin + rows), which exist too, sees them by its position.
template <auto C, int32 rows, int32 keys>
__forceinline__ bool sees_all(const BwdParams& params, const BwdSequence& s, int32 q_begin,
                              int32 key_begin) {
  const int32 q_last = q_begin + rows - 1;
  const int32 key_last = key_begin + keys - 1;
  const int32 shift = s.length_k - s.length_q;
  bool all = q_last < s.length_q && key_last < s.length_k;
  if constexpr (C.bound_right) all = all && key_last <= q_begin + shift + params.window_right;
  if constexpr (C.bound_left) all = all && key_begin >= q_last + shift - params.window_left;
  return all;
}

// Where lse_log2 and delta have the numbers of a query row.
template <auto C>
__forceinline__ int64 row_number(const BwdParams& params, const BwdSequence& s, int32 head,
                                 int32 query) {
  return first_block<C>(params, s, head) * core::rows_of(C) + query;
}

// Pairs (sequence, head) take turns within a section, so that what they share stays in L2; there,
// `count` blocks of each follow each other from the first on.
struct PairBlock {
  int32 pair;
  int32 block;
};
__forceinline__ PairBlock pair_block(int32 index, int32 pairs, int32 section, int32 count) {
  const int32 number = index / (section * count);
  const int32 first = number * section;
  const int32 width = min(section, pairs - first);
  const int32 rest = index - first * count;
  return {first + rest % width, rest / width};
}

}  // namespace fovea::device
