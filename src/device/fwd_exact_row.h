// One row of the result by one warp, key by key, in fp32 and from global memory: for rows whose
// fast result is not finite. There weights of zero have met values that are NaN or infinite in keys
// that the row does not see, or drops; here such values are never read. Slow, and rare.
#pragma once

#include "device/fwd_scores.h"

namespace fovea::device {

__forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int32 distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// How a row's sum of 2^(t - reference) and its sink combine: total of 2^(t - top), sink included,
// and the factor that brings the row's own part to top.
struct RowTotal {
  float top, total, share;
};

template <auto C>
__forceinline__ RowTotal total_of(const FwdParams& params, int32 head, float reference, float sum) {
  RowTotal row{reference, sum, 1.0f};
  if constexpr (C.has_sink) {
    const float sink = params.sink[head * params.sink_stride] * core::log2_e;
    row.top = sink > reference ? sink : reference;
    const float base = row.top > -infinity ? row.top : 0.0f;
    row.share = exp2_approximate(reference - base);
    row.total = fmaf(sum, row.share, exp2_approximate(sink - base));
  }
  return row;
}

template <auto C>
struct ExactRow {
  static constexpr int32 query_slots = (C.head_dim + 31) / 32;
  static constexpr int32 output_slots = (C.head_dim_v + 31) / 32;

  const FwdParams& params;
  const FwdTile& tile;
  const FwdRow row;
  float output[output_slots] = {};  // columns lane, lane + 32, ...

  static __forceinline__ float element(const core::Rows& rows, const uint16* at, int32 column) {
    return load_float<C.dtype>(at, column * rows.stride[3]);
  }

  __forceinline__ float score(const float (&query)[query_slots], const ScoreRow<C>& place,
                              int32 key) const {
    const uint16* at = key_row<C>(params, params.k_rows, tile, key);
    float product = 0.0f;
#pragma unroll
    for (int32 i = 0; i < query_slots; ++i) {
      const int32 column = lane_index() + 32 * i;
      if (column < params.head_dim) {
        product = fmaf(query[i], element(params.k_rows, at, column), product);
      }
    }
    const float changed = transformed<C>(params, warp_sum(product));
    return place.modified(changed, key) * score_scale<C>(params);
  }

  __forceinline__ bool keeps(int32 key) const {
    if constexpr (C.has_dropout) {
      const core::Philox4 words = dropout_words(params, tile, row, key / 4);
      return words.word[key % 4] >= params.dropout_threshold;
    }
    return true;
  }

  __forceinline__ void run() {
    float query[query_slots] = {};
    const core::Rows& q = params.q_rows;
    const uint16* at = q.data + tile.batch_q * q.stride[0] +
                       (tile.row_q + row.query) * q.stride[1] + row.head * q.stride[2];
#pragma unroll
    for (int32 i = 0; i < query_slots; ++i) {
      const int32 column = lane_index() + 32 * i;
      if (column < params.head_dim) query[i] = element(q, at, column);
    }
    const ScoreRow<C> place(params, tile, row);
    const int32 position = row.query + tile.length_k - tile.length_q;
    int32 begin = tile.key_begin;
    int32 end = tile.key_end;
    if constexpr (C.bound_left) begin = max(begin, position - params.window_left);
    if constexpr (C.bound_right) end = min(end, position + params.window_right + 1);
    float reference = -infinity;
    float sum = 0.0f;
#pragma unroll 1
    for (int32 key = begin; key < end; ++key) {
      const float t = score(query, place, key);
      if (t == -infinity) continue;
      const float raised = fmaxf(reference, t);
      const float factor = reference > -infinity ? exp2_approximate(reference - raised) : 0.0f;
      float weight = exp2_approximate(t - raised);
      reference = raised;
      sum = fmaf(sum, factor, weight);
      if (!keeps(key)) weight = 0.0f;
      const uint16* value = key_row<C>(params, params.v_rows, tile, key);
#pragma unroll
      for (int32 i = 0; i < output_slots; ++i) {
        const int32 column = lane_index() + 32 * i;
        output[i] *= factor;
        if (weight != 0.0f && column < params.head_dim_v) {
          output[i] = fmaf(weight, element(params.v_rows, value, column), output[i]);
        }
      }
    }
    const RowTotal all = total_of<C>(params, row.head, reference, sum);
    const float factor =
        sum == 0.0f ? 0.0f : all.share * params.keep_scale * reciprocal_approximate(all.total);
#pragma unroll
    for (int32 i = 0; i < output_slots; ++i) output[i] *= factor;
  }
};

}  // namespace fovea::device
