// One row of attention by its definition, in double precision or in the problem's own: what the
// oracles of both passes share (reference.cpp, reference_backward.cpp). Nothing is tiled over keys
// and nothing is skipped by ranges: a key counts when core::allowed(), the mask and the bias say
// so, one element at a time.
//
// The keys of one (sequence, KV head) are gathered once into panels of 16 keys,
//
//   panel[k / 16][dim][k % 16]
//
// so that the inner loop runs over independent sums and vectorises without reordering any of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/dropout.h"
#include "core/fp8.h"
#include "core/mask.h"
#include "core/numeric.h"
#include "core/types.h"

namespace fovea::cpu {

using core::int32;
using core::int64;

inline constexpr int64 panel_keys = 16;

inline std::size_t index(int64 value) { return static_cast<std::size_t>(value); }

// What the codes of an 8-bit row are multiplied by.
inline float scale_at(const core::View& scale, int64 offset) {
  return scale ? static_cast<const float*>(scale.data)[offset] : 1.0f;
}

// The nearest value of an element type; f32 keeps its argument.
inline float rounded(core::DType type, float value) {
  switch (type) {
    case core::DType::f32:
    case core::DType::boolean: return value;
    case core::DType::bf16: return core::bf16_to_float(core::float_to_bf16(value));
    case core::DType::f16: return core::f16_to_float(core::float_to_f16(value));
    case core::DType::s8:  // what weights are beside integers
    case core::DType::e4m3: return core::e4m3_to_float(core::float_to_e4m3(value));
    case core::DType::e5m2: return core::e5m2_to_float(core::float_to_e5m2(value));
  }
  return value;
}

// K as panels and V row after row, of one sequence and KV head.
template <typename Real>
struct KeysAndValues {
  std::vector<Real> panels;
  std::vector<Real> values;

  void gather(const core::Problem& p, const core::Sequence& s, int64 b, int64 head_kv) {
    const int64 padded = core::ceil_div(s.length_k, panel_keys) * panel_keys;
    panels.assign(index(padded * p.head_dim), Real{0});
    values.resize(index(s.length_k * p.head_dim_v));
    for (int64 key = 0; key < s.length_k; ++key) {
      const int64 offset_k = core::key_offset(p, p.k, s, b, key, head_kv);
      Real* panel = panels.data() + (key / panel_keys) * p.head_dim * panel_keys + key % panel_keys;
      const Real scale_k =
          scale_at(p.k_scale, core::key_scale_offset(p, p.k_scale, s, b, key, head_kv));
      for (int64 d = 0; d < p.head_dim; ++d) {
        panel[d * panel_keys] =
            scale_k * core::load_element(p.k.data, p.k.dtype, offset_k + d * p.k.stride[3]);
      }
      const int64 offset_v = core::value_offset(p, s, b, key, head_kv);
      const Real scale_v =
          scale_at(p.v_scale, core::key_scale_offset(p, p.v_scale, s, b, key, head_kv));
      Real* value = values.data() + key * p.head_dim_v;
      for (int64 d = 0; d < p.head_dim_v; ++d) {
        value[d] = scale_v * core::load_element(p.v.data, p.v.dtype, offset_v + d * p.v.stride[3]);
      }
    }
  }
};

// Products of one query with the 16 keys of a panel.
template <typename Real>
void panel_products(const Real* query, const Real* panel, int64 head_dim, Real* products) {
  Real sum[panel_keys] = {};
  for (int64 d = 0; d < head_dim; ++d) {
    const Real x = query[d];
    const Real* column = panel + d * panel_keys;
    for (int64 k = 0; k < panel_keys; ++k) sum[k] += x * column[k];
  }
  for (int64 k = 0; k < panel_keys; ++k) products[k] = sum[k];
}

// One row of the score matrix and what becomes of it.
template <typename Real>
struct Row {
  static constexpr Real infinity = std::numeric_limits<Real>::infinity();

  const core::Problem& p;
  std::vector<Real> query;
  std::vector<Real> scores;   // padded to whole panels; only visible entries mean anything
  std::vector<char> visible;  // ditto
  std::vector<Real> slopes;   // ditto; with a softcap: the derivative of score by product
  std::vector<Real> out;
  Real lse = -infinity;
  Real top = -infinity;  // largest score or sink, as the weights take it
  Real sum = 0;          // of exp(score - top), and of the sink; 0 where nothing is seen

  explicit Row(const core::Problem& problem)
      : p(problem), query(index(problem.head_dim)), out(index(problem.head_dim_v)) {}

  void compute(const core::Sequence& s, int64 b, int64 head, int64 i,
               const KeysAndValues<Real>& keys) {
    const int64 offset = p.q.offset(s.batch_q, s.row_q + i, head);
    const Real scale = scale_at(p.q_scale, core::scale_offset(p.q_scale, b, head / p.q_scale_heads,
                                                              core::first_block_q(p, s, b), i));
    for (int64 d = 0; d < p.head_dim; ++d) {
      query[index(d)] = scale * core::load_element(p.q.data, p.q.dtype, offset + d * p.q.stride[3]);
    }
    find_visible(s, b, head, i);
    score(s, b, head, i, keys);
    const Real sink =
        p.sink ? core::load_element(p.sink.data, p.sink.dtype, head * p.sink.stride[0]) : -infinity;
    normalize(s.length_k, sink);
    lse = sum == Real{0} ? -infinity : top + std::log(sum);
    const bool narrow = std::is_same_v<Real, float> && p.q.dtype != core::DType::f32;
    if (narrow) {
      // A framework materialises the scores in the inputs' dtype before the softmax reads them.
      for (Real& score : scores) score = round_to(p.q.dtype, score);
      normalize(s.length_k, sink);
    }
    multiply_values(s, b, head, i, keys);
  }

  // The softmax at a visible key, before dropout.
  Real weight(int64 j) const { return std::exp(scores[index(j)] - top) / sum; }

  // The nearest value of a dtype for the run in the problem's own precision; nothing in fp64.
  static Real round_to(core::DType type, Real value) {
    if constexpr (std::is_same_v<Real, float>) {
      return rounded(type, value);
    } else {
      return value;
    }
  }

 private:
  void find_visible(const core::Sequence& s, int64 b, int64 head, int64 i) {
    const int64 padded = core::ceil_div(s.length_k, panel_keys) * panel_keys;
    scores.resize(index(padded));
    if (p.softcap > 0.0f) slopes.resize(index(padded));
    visible.assign(index(padded), 0);
    for (int64 j = 0; j < s.length_k; ++j) {
      bool seen = core::allowed(p.window, s.length_q, s.length_k, i, j);
      if (seen && p.mask) {
        seen = core::load_element(p.mask.data, p.mask.dtype, p.mask.offset(b, head, i, j)) != 0.0f;
      }
      if (seen && p.bias) seen = !(bias(b, head, i, j) == -core::infinity);
      visible[index(j)] = seen ? 1 : 0;
    }
  }

  float bias(int64 b, int64 head, int64 i, int64 j) const {
    return core::load_element(p.bias.data, p.bias.dtype, p.bias.offset(b, head, i, j));
  }

  void score(const core::Sequence& s, int64 b, int64 head, int64 i,
             const KeysAndValues<Real>& keys) {
    const Real scale = p.softmax_scale;
    const Real softcap = p.softcap;
    const Real slope =
        p.alibi ? core::load_element(p.alibi.data, p.alibi.dtype, p.alibi.offset(b, head, 0)) : 0;
    for (int64 begin = 0; begin < s.length_k; begin += panel_keys) {
      const char* seen = visible.data() + begin;
      if (std::none_of(seen, seen + panel_keys, [](char c) { return c != 0; })) continue;
      Real* score = scores.data() + begin;
      panel_products(query.data(), keys.panels.data() + begin * p.head_dim, p.head_dim, score);
      for (int64 k = 0; k < panel_keys; ++k) {
        if (seen[k] == 0) continue;
        Real value = score[k] * scale;
        if (softcap > 0) {
          const Real bent = std::tanh(value / softcap);
          value = softcap * bent;
          slopes[index(begin + k)] = Real{1} - bent * bent;
        }
        if (p.bias) value += bias(b, head, i, begin + k);
        if (p.alibi) {
          const int64 distance = i + s.length_k - s.length_q - (begin + k);
          value -= slope * static_cast<Real>(distance < 0 ? -distance : distance);
        }
        score[k] = value;
      }
    }
  }

  // Largest visible score, or NaN when any of them is: NaN in a visible element must come out.
  Real maximum(int64 length_k, Real sink) const {
    Real largest = sink;
    for (int64 j = 0; j < length_k; ++j) {
      if (visible[index(j)] == 0) continue;
      const Real value = scores[index(j)];
      if (std::isnan(value)) return value;
      largest = std::max(largest, value);
    }
    return largest;
  }

  // Sets top and sum from the scores.
  void normalize(int64 length_k, Real sink) {
    top = maximum(length_k, sink);
    sum = 0;
    if (!(top > -infinity || std::isnan(top))) return;
    if (sink > -infinity) sum = std::exp(sink - top);
    for (int64 j = 0; j < length_k; ++j) {
      if (visible[index(j)] != 0) sum += std::exp(scores[index(j)] - top);
    }
  }

  void multiply_values(const core::Sequence& s, int64 b, int64 head, int64 i,
                       const KeysAndValues<Real>& keys) {
    std::fill(out.begin(), out.end(), Real{0});
    const Real kept_scale = Real{1} / (Real{1} - static_cast<Real>(p.dropout.probability));
    for (int64 j = 0; j < s.length_k; ++j) {
      if (visible[index(j)] == 0) continue;
      Real kept = weight(j);
      if (p.dropout.probability > 0.0f) {
        if (!core::dropout_keeps(p.dropout, b, head, i, j)) continue;
        kept *= kept_scale;
      }
      kept = round_to(p.q.dtype, kept);
      const Real* value = keys.values.data() + j * p.head_dim_v;
      for (int64 d = 0; d < p.head_dim_v; ++d) out[index(d)] += kept * value[d];
    }
    for (Real& x : out) x = round_to(p.out.dtype, x);
  }
};

}  // namespace fovea::cpu
