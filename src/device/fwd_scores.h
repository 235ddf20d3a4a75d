// What position does to scores and weights: ALiBi, an added bias, a boolean mask, dropout. Written
// for one row and one key at a time, for the fast path over fragments and the slow one over rows.
#pragma once

#include "core/dropout.h"
#include "core/numeric.h"
#include "device/fwd_tiles.h"
#include "device/scores.h"

namespace fovea::device {

// A raw product of q and k after scale or softcap; what is left to multiply by is score_scale().
template <auto C>
__forceinline__ float transformed(const FwdParams& params, float raw) {
  if constexpr (C.transform == ScoreTransform::scale) return raw * params.transform_in;
  if constexpr (C.transform == ScoreTransform::softcap) {
    return tanh_accurate(raw * params.transform_in) * params.transform_out;
  }
  return raw;
}

template <auto C>
__forceinline__ float score_scale(const FwdParams& params) {
  return C.transform == ScoreTransform::none ? params.scale_log2 : 1.0f;
}

// One query row as its scores see it.
template <auto C>
struct ScoreRow {
  static_assert(!core::modifies_scores(C) || C.transform != ScoreTransform::none,
                "what is added to scores is in log2 units");

  const FwdParams& params;
  int32 last_key;
  int32 position = 0;  // of the key on the bottom-right diagonal
  float slope = 0.0f;  // log2 units per key
  int64 bias = 0;      // offsets of key 0
  int64 mask = 0;

  // Rows that stand for no query read as the last one, and keys as the last key: what comes of them
  // is discarded, and nothing outside the tensors is read.
  __forceinline__ ScoreRow(const FwdParams& p, const FwdTile& tile, FwdRow row)
      : params(p), last_key(tile.length_k - 1) {
    const int64 query = min(row.query, tile.length_q - 1);
    if constexpr (C.has_alibi) {
      position = row.query + tile.length_k - tile.length_q;
      slope =
          core::log2_e * p.alibi[tile.sequence * p.alibi_stride[0] + row.head * p.alibi_stride[1]];
    }
    if constexpr (C.has_bias) {
      bias =
          tile.sequence * p.bias_stride[0] + row.head * p.bias_stride[1] + query * p.bias_stride[2];
    }
    if constexpr (C.has_mask) {
      mask =
          tile.sequence * p.mask_stride[0] + row.head * p.mask_stride[1] + query * p.mask_stride[2];
    }
  }

  // A transformed score with what position adds. A hidden one is -infinity whatever it was.
  __forceinline__ float modified(float score, int32 key) const {
    const int64 read = min(key, last_key);
    if constexpr (C.has_alibi) {
      score = fmaf(-slope, fabsf(static_cast<float>(position - key)), score);
    }
    if constexpr (C.has_bias) {
      const float added =
          load_float<C.bias_dtype>(params.bias, bias + read * params.bias_stride[3]);
      score = added == -infinity ? -infinity : fmaf(added, core::log2_e, score);
    }
    if constexpr (C.has_mask) {
      if (params.mask[mask + read * params.mask_stride[3]] == 0) score = -infinity;
    }
    return score;
  }
};

// Random words of four neighbouring columns of a row: core/dropout.h, its key mixed by the host.
__forceinline__ core::Philox4 dropout_words(const FwdParams& params, const FwdTile& tile,
                                            FwdRow row, int32 column_div_4) {
  return core::philox4x32({{static_cast<uint32>(column_div_4), static_cast<uint32>(row.query),
                            static_cast<uint32>(row.head), static_cast<uint32>(tile.sequence)}},
                          params.dropout_key[0], params.dropout_key[1]);
}

}  // namespace fovea::device
