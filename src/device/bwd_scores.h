// What the backward pass makes of a raw product of a query and a key: the logit that the softmax
// takes, the derivative of it, and whether dropout kept the weight. One element at a time; C is any
// configuration with the fields has_softcap, has_alibi, has_bias, bias_dtype, has_mask and
// has_dropout. With x the logit, s its slope and D the dropout mask over its keep probability,
//
//   P = exp2(x - lse_log2)   dV = (P D)^T dO   dS = P (D dP - delta)   dQ = scale (dS s) K
#pragma once

#include "core/dropout.h"
#include "device/bwd_blocks.h"
#include "device/scores.h"

namespace fovea::device {

// Of one sequence and query head.
template <auto C>
struct BwdScores {
  const BwdParams& params;
  int32 sequence, head;
  int32 last_query, last_key, shift;
  float alibi = 0.0f;  // log2 units per key
  int64 bias = 0;      // offsets of query 0 and key 0
  int64 mask = 0;

  __forceinline__ BwdScores(const BwdParams& p, const BwdSequence& s, int32 query_head)
      : params(p),
        sequence(s.index),
        head(query_head),
        last_query(s.length_q - 1),
        last_key(s.length_k - 1),
        shift(s.length_k - s.length_q) {
    if constexpr (C.has_alibi) {
      alibi = core::log2_e * p.alibi[sequence * p.alibi_stride[0] + query_head * p.alibi_stride[1]];
    }
    if constexpr (C.has_bias) {
      bias = sequence * p.bias_stride[0] + query_head * p.bias_stride[1];
    }
    if constexpr (C.has_mask) {
      mask = sequence * p.mask_stride[0] + query_head * p.mask_stride[1];
    }
  }

  // x: the logit in log2 units, -infinity where bias or mask hide; y: its derivative by the scaled
  // product. What does not exist reads as the last query or key: nothing outside the tensors is
  // read, and what comes of it is discarded.
  __forceinline__ float2 score(float raw, int32 query, int32 key) const {
    float2 result{0.0f, 1.0f};
    if constexpr (C.has_softcap) {
      const float tangent = tanh_accurate(raw * params.softcap_in);
      result = {tangent * params.softcap_out, fmaf(-tangent, tangent, 1.0f)};
    } else {
      result.x = raw * params.scale_log2;
    }
    if constexpr (C.has_alibi) {
      result.x = fmaf(-alibi, fabsf(static_cast<float>(query + shift - key)), result.x);
    }
    if constexpr (C.has_bias) {
      const float added = bias_at(query, key);
      result.x = added == -infinity ? -infinity : fmaf(added, core::log2_e, result.x);
    }
    if constexpr (C.has_mask) {
      if (!mask_shows(query, key)) result.x = -infinity;
    }
    return result;
  }

  // Whether bias and mask let the query see the key.
  __forceinline__ bool shows(int32 query, int32 key) const {
    if constexpr (C.has_bias) {
      if (bias_at(query, key) == -infinity) return false;
    }
    if constexpr (C.has_mask) {
      if (!mask_shows(query, key)) return false;
    }
    return true;
  }

  // The random words of keys 4 i .. 4 i + 3 for a query; a weight is kept whose word is no less
  // than params.dropout_threshold.
  __forceinline__ core::Philox4 words(int32 query, int32 i) const {
    return core::philox4x32({{static_cast<uint32>(i), static_cast<uint32>(query),
                              static_cast<uint32>(head), static_cast<uint32>(sequence)}},
                            params.dropout_key[0], params.dropout_key[1]);
  }

 private:
  __forceinline__ float bias_at(int32 query, int32 key) const {
    return load_float<C.bias_dtype>(params.bias,
                                    bias + min(query, last_query) * params.bias_stride[2] +
                                        min(key, last_key) * params.bias_stride[3]);
  }
  __forceinline__ bool mask_shows(int32 query, int32 key) const {
    return params.mask[mask + min(query, last_query) * params.mask_stride[2] +
                       min(key, last_key) * params.mask_stride[3]] != 0;
  }
};

// Whether any query of any head of a group sees a key, bias and mask considered.
template <auto C>
__forceinline__ bool is_seen(const BwdParams& params, const BwdSequence& s, int32 head_kv,
                             int32 key) {
  const core::KeyRange rows = rows_that_see<C>(params, s, key, key + 1);
  for (int32 i = 0; i < params.group_size; ++i) {
    const BwdScores<C> of(params, s, head_kv * params.group_size + i);
#pragma unroll 1
    for (int32 query = static_cast<int32>(rows.begin); query < rows.end; ++query) {
      if (of.shows(query, key)) return true;
    }
  }
  return false;
}

// Whether a row of a tile in shared memory holds infinity or NaN; its panels lie so far apart.
template <auto C>
__forceinline__ bool is_special(SharedAddress row, int32 panels, uint32 panel_bytes) {
  constexpr uint32 exponents = C.dtype == DType::bf16 ? 0x7f807f80u : 0x7c007c00u;
  bool special = false;
#pragma unroll 1
  for (int32 i = 0; i < 8 * panels; ++i) {
    const uint4 v = load_shared_x4(row + i / 8 * panel_bytes + i % 8 * 16);
    const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int32 j = 0; j < 4; ++j) {
      const uint32 held = ~words[j] & exponents;
      special = special || (held & 0xffffu) == 0 || (held >> 16) == 0;
    }
  }
  return special;
}

}  // namespace fovea::device
