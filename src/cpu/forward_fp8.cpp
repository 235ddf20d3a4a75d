#include "cpu/forward_fp8.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/mask.h"
#include "core/numeric.h"

namespace fovea::cpu {
namespace {

using core::Fp8Layout;
using core::int32;
using core::int64;
using core::KeyScale;
using core::Problem;
using core::scale_block;
using core::SoftmaxPolicy;

constexpr float infinity = std::numeric_limits<float>::infinity();

std::size_t index(int64 value) { return static_cast<std::size_t>(value); }

float value_of(core::DType type, core::uint8 code) { return core::load_element(&code, type, 0); }

// The codes of one sequence and KV head as numbers.
struct Keys {
  std::vector<float> k;  // [key][column]
  std::vector<float> v;  // [key][column]
  const KeyScale* scales = nullptr;
  int64 count = 0;
};

Keys decode_keys(const Problem& p, const Fp8Layout& l, const Fp8Operands& o, core::DType codes,
                 const core::Sequence& s, int64 b, int64 head) {
  Keys keys;
  keys.count = s.length_k;
  const int64 first_block = core::first_block_k(p, s, b);
  const int64 place = s.batch_k * l.heads_kv + head;
  keys.scales = o.key_scale + place * l.blocks_k + first_block;
  keys.k.resize(index(s.length_k * l.columns));
  keys.v.resize(index(s.length_k * l.columns_v));
  const int64 pitch = l.blocks_k * scale_block;
  for (int64 key = 0; key < s.length_k; ++key) {
    const int64 row = s.batch_k * l.rows_k + s.row_k + key;
    for (int32 c = 0; c < l.columns; ++c) {
      keys.k[index(key * l.columns + c)] =
          value_of(codes, o.k[(row * l.heads_kv + head) * l.columns + c]);
    }
    const int64 slot =
        first_block * scale_block + key / 16 * 16 + core::value_slot(static_cast<int32>(key % 16));
    for (int32 c = 0; c < l.columns_v; ++c) {
      keys.v[index(key * l.columns_v + c)] =
          value_of(core::value_type(codes), o.v[(place * l.columns_v + c) * pitch + slot]);
    }
  }
  return keys;
}

// Sums as Hopper's 8-bit products do (measured: docs/kernels/fp8.md): of 32 products and the
// accumulator, each is cut off, toward zero, `bits` bits below the leading bit of the largest. What
// is left is added exactly and cut off the same way.
class Accumulator {
 public:
  explicit Accumulator(int32 bits) : bits_(bits) {}

  // sum += products; both [columns], products[32][columns].
  void add(float* sum, const std::vector<float>& products, int64 columns) {
    largest_.assign(sum, sum + columns);
    for (float& x : largest_) x = std::fabs(x);
    for (int64 i = 0; i < 32; ++i) {
      const float* row = products.data() + i * columns;
      for (int64 c = 0; c < columns; ++c) {
        largest_[index(c)] = std::max(largest_[index(c)], std::fabs(row[c]));
      }
    }
    units_.resize(index(columns));
    for (int64 c = 0; c < columns; ++c) units_[index(c)] = unit(largest_[index(c)]);
    for (int64 c = 0; c < columns; ++c) sum[c] = cut(sum[c], units_[index(c)]);
    for (int64 i = 0; i < 32; ++i) {
      const float* row = products.data() + i * columns;
      for (int64 c = 0; c < columns; ++c) sum[c] += cut(row[c], units_[index(c)]);
    }
    for (int64 c = 0; c < columns; ++c) sum[c] = cut(sum[c], unit(sum[c]));
  }

 private:
  // Of the last bit that is kept of a number of this size; tiny ones are left whole.
  [[nodiscard]] float unit(float size) const {
    const core::uint32 exponent = (core::bits_of(size) >> 23) & 0xffu;
    const auto below = static_cast<core::uint32>(bits_);
    return core::float_of((exponent > below ? exponent - below : 1u) << 23);
  }
  static float cut(float x, float unit) {
    if (!(std::fabs(x) < infinity)) return x;
    return static_cast<float>(static_cast<int32>(x / unit)) * unit;
  }

  int32 bits_;
  std::vector<float> largest_;
  std::vector<float> units_;
};

// One query row: the softmax of core/softmax.h over tiles of keys, from the last to the first.
class Row {
 public:
  Row(const Problem& p, const Fp8Layout& l, const Fp8Method& method, Fp8Statistics& statistics)
      : problem_(p),
        method_(method),
        columns_(l.columns),
        columns_v_(l.columns_v),
        statistics_(statistics),
        weights_(index(method.tile_k)),
        query_(index(l.columns)),
        products_(index(int64{32} * std::max(l.columns_v, 32))),
        accumulator_(method.accumulator_bits),
        part_(index(l.columns_v)),
        sums_(index(l.columns_v)) {}

  void compute(const Keys& keys, core::KeyRange visible, const core::uint8* codes, float q_scale,
               float sink) {
    for (int32 c = 0; c < columns_; ++c) query_[index(c)] = value_of(method_.codes, codes[c]);
    std::fill(part_.begin(), part_.end(), 0.0f);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    reference_ = -infinity;
    sum_ = 0.0f;
    int32 unpromoted = 0;
    float row_top = -infinity;
    if (method_.unfused) row_top = normalise(keys, visible, q_scale);
    if (!visible.empty()) {
      for (int64 tile = (visible.end - 1) / method_.tile_k; tile >= visible.begin / method_.tile_k;
           --tile) {
        score(keys, visible, tile, q_scale);
        const bool whole =
            tile * method_.tile_k >= visible.begin && (tile + 1) * method_.tile_k <= visible.end;
        if (method_.unfused) {
          weigh_normalised(keys, tile, row_top);
        } else {
          exponentiate(keys, tile, whole);
        }
        multiply(keys, tile);
        if (method_.promote > 0 && ++unpromoted == method_.promote) {
          promote();
          unpromoted = 0;
        }
      }
    }
    promote();
    finish(sink);
  }

  const std::vector<float>& out() const { return sums_; }
  float lse() const { return lse_; }

 private:
  static constexpr float top_of(SoftmaxPolicy policy) { return core::weight_top_log2(policy); }

  const KeyScale& scale_of(const Keys& keys, int64 key) const {
    return keys.scales[key / scale_block];
  }

  // Logits in log2 units, those of v's scale included, into weights_.
  void score(const Keys& keys, core::KeyRange visible, int64 tile, float q_scale) {
    const float scale = problem_.softmax_scale * core::log2_e;
    for (int64 i = 0; i < method_.tile_k; ++i) {
      const int64 key = tile * method_.tile_k + i;
      float& t = weights_[index(i)];
      t = -infinity;
      if (key < visible.begin || key >= visible.end) continue;
      const float* k = keys.k.data() + key * columns_;
      float dot = 0.0f;
      for (int32 step = 0; step < columns_; step += 32) {
        for (int32 c = 0; c < 32; ++c) products_[index(c)] = query_[index(step + c)] * k[step + c];
        if (method_.codes == core::DType::s8) {
          // Integers sum exactly.
          dot = std::accumulate(products_.begin(), products_.begin() + 32, dot);
        } else {
          accumulator_.add(&dot, products_, 1);
        }
      }
      const KeyScale& s = scale_of(keys, key);
      t = dot * (q_scale * s.k);
      if (problem_.softcap > 0.0f) {
        t = std::tanh(t * problem_.softmax_scale / problem_.softcap) * problem_.softcap *
            core::log2_e;
      } else {
        t *= scale;
      }
      t += s.v_log2;
    }
  }

  // The largest of a thread's share of the tile's weights, and of all weights.
  float largest_share() const {
    float shares[4] = {};
    for (int64 i = 0; i < method_.tile_k; ++i) shares[i % 8 / 2] += weights_[index(i)];
    return *std::max_element(std::begin(shares), std::end(shares));
  }

  void exponentiate(const Keys& keys, int64 tile, bool whole) {
    const bool guarded =
        method_.softmax == SoftmaxPolicy::sum_guard && whole && std::abs(reference_) < 2048.0f;
    const std::vector<float> logits = weights_;
    if (!guarded || !raise_guarded()) {
      weights_ = logits;
      raise_exactly();
    }
    for (int64 i = 0; i < method_.tile_k; ++i) {
      float& weight = weights_[index(i)];
      if (weight == 0.0f) continue;
      const KeyScale& s = scale_of(keys, tile * method_.tile_k + i);
      if (weight > core::e4m3_max) ++statistics_.saturated;
      const float rounded =
          method_.round_weights ? core::e4m3_to_float(core::float_to_e4m3(weight)) : weight;
      sum_ += (method_.sum_rounded_weights ? rounded : weight) * s.v_inverse;
      weight = rounded;
    }
  }

  // The maximum and the sum of the whole row; gives the maximum.
  float normalise(const Keys& keys, core::KeyRange visible, float q_scale) {
    float top = -infinity;
    row_sum_ = 0.0f;
    const int64 tiles = core::ceil_div(visible.end, method_.tile_k);
    for (const bool summing : {false, true}) {
      for (int64 tile = 0; tile < tiles; ++tile) {
        score(keys, visible, tile, q_scale);
        for (int64 i = 0; i < method_.tile_k; ++i) {
          const float t = weights_[index(i)];
          if (t == -infinity) continue;
          const float logit = t - scale_of(keys, tile * method_.tile_k + i).v_log2;
          if (summing) {
            row_sum_ += std::exp2(logit - top);
          } else {
            top = std::max(top, logit);
          }
        }
      }
    }
    return top;
  }

  // Weights of a sum of 1, rounded; v's scale is applied to the products.
  void weigh_normalised(const Keys& keys, int64 tile, float top) {
    for (int64 i = 0; i < method_.tile_k; ++i) {
      float& t = weights_[index(i)];
      if (t == -infinity) {
        t = 0.0f;
        continue;
      }
      const KeyScale& s = scale_of(keys, tile * method_.tile_k + i);
      const float weight = std::exp2(t - s.v_log2 - top) / row_sum_;
      const float rounded =
          method_.round_weights ? core::e4m3_to_float(core::float_to_e4m3(weight)) : weight;
      t = rounded / s.v_inverse;
    }
    sum_ = 1.0f;
    reference_ = top + std::log2(row_sum_) + top_of(method_.softmax);
  }

  void to_weights() {
    const float base = reference_ > -infinity ? top_of(method_.softmax) - reference_ : 0.0f;
    for (float& t : weights_) t = std::exp2(t + base);
  }

  void shrink(float factor) {
    sum_ *= factor;
    for (float& x : part_) x *= factor;
    for (float& x : sums_) x *= factor;
  }

  void raise_exactly() {
    const float top = *std::max_element(weights_.begin(), weights_.end());
    const core::Rescale raised = core::raise_reference(
        reference_, top,
        method_.softmax == SoftmaxPolicy::online ? 0.0f : core::fp8_rescale_threshold_log2);
    reference_ = raised.reference;
    shrink(std::exp2(raised.factor_log2));
    to_weights();
  }

  // False when a sum is infinite.
  bool raise_guarded() {
    to_weights();
    const float share = largest_share();
    if (!(share <= core::e4m3_max)) {
      if (share == infinity) return false;
      const float largest = *std::max_element(weights_.begin(), weights_.end());
      const int32 up = std::max(core::guard_exponent(largest) - 3, 1);
      const float factor = std::exp2(-static_cast<float>(up));
      reference_ += static_cast<float>(up);
      shrink(factor);
      for (float& weight : weights_) weight *= factor;
      ++statistics_.repairs;
    }
    return true;
  }

  void multiply(const Keys& keys, int64 tile) {
    for (int64 step = 0; step < method_.tile_k; step += 32) {
      const int64 first = tile * method_.tile_k + step;
      for (int64 i = 0; i < 32; ++i) {
        const float weight = weights_[index(step + i)];
        float* to = products_.data() + i * columns_v_;
        if (weight == 0.0f || first + i >= keys.count) {
          std::fill_n(to, columns_v_, 0.0f);
          continue;
        }
        const float* v = keys.v.data() + (first + i) * columns_v_;
        for (int32 c = 0; c < columns_v_; ++c) to[c] = weight * v[c];
      }
      accumulator_.add(part_.data(), products_, columns_v_);
    }
  }

  void promote() {
    for (std::size_t c = 0; c < part_.size(); ++c) {
      sums_[c] += part_[c];
      part_[c] = 0.0f;
    }
  }

  void finish(float sink) {
    const float top = reference_ - top_of(method_.softmax);
    float total = sum_;
    float share = 1.0f;
    float base = top;
    if (sink > -infinity) {
      base = std::max(top, sink * core::log2_e);
      share = std::exp2(top - base);
      total = sum_ * share + std::exp2(sink * core::log2_e - base);
    }
    lse_ = total == 0.0f ? -infinity : (base + std::log2(total)) * core::ln_2;
    for (float& x : sums_) x = sum_ == 0.0f ? 0.0f : x * share / total;
  }

  const Problem& problem_;
  const Fp8Method& method_;
  const int32 columns_;
  const int32 columns_v_;
  Fp8Statistics& statistics_;
  std::vector<float> weights_;
  std::vector<float> query_;
  std::vector<float> products_;
  Accumulator accumulator_;
  std::vector<float> part_;  // what a tensor-core accumulator holds
  std::vector<float> sums_;  // promoted
  float reference_ = -infinity;
  float sum_ = 0.0f;
  float lse_ = -infinity;
  float row_sum_ = 0.0f;  // unfused
};

float narrowed(core::DType type, float value) {
  switch (type) {
    case core::DType::bf16: return core::bf16_to_float(core::float_to_bf16(value));
    case core::DType::f16: return core::f16_to_float(core::float_to_f16(value));
    default: return value;
  }
}

}  // namespace

ReferenceResult forward_fp8(const Problem& p, const Fp8Operands& operands, const Fp8Method& method,
                            Fp8Statistics* statistics, int threads) {
  const int team = threads > 0 ? threads : omp_get_max_threads();
  const Fp8Layout l = core::fp8_layout(p);
  const int64 rows = l.rows_q;
  ReferenceResult result;
  result.out.assign(index(l.batches_q * rows * p.heads_q * p.head_dim_v), 0.0);
  result.lse.assign(index(l.batches_q * rows * p.heads_q),
                    -std::numeric_limits<double>::infinity());
  for (int64 b = 0; b < p.batch; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    const int64 first_block = core::first_block_q(p, s, b);
    for (int64 head_kv = 0; head_kv < p.heads_kv; ++head_kv) {
      const Keys keys = decode_keys(p, l, operands, method.codes, s, b, head_kv);
      const int64 group = p.group_size();
#pragma omp parallel num_threads(team)
      {
        Fp8Statistics mine;
        Row row(p, l, method, mine);
#pragma omp for schedule(dynamic, 4)
        for (int64 r = 0; r < s.length_q * group; ++r) {
          const int64 i = r / group;
          const int64 head = head_kv * group + r % group;
          const int64 place = s.batch_q * rows + s.row_q + i;
          const float q_scale = operands.q_scale[(s.batch_q * p.heads_q + head) * l.blocks_q +
                                                 first_block + i / scale_block];
          const float sink =
              p.sink ? core::load_element(p.sink.data, p.sink.dtype, head * p.sink.stride[0])
                     : -infinity;
          row.compute(keys, core::key_range(p.window, s.length_q, s.length_k, i),
                      operands.q + (place * p.heads_q + head) * l.columns, q_scale, sink);
          for (int64 c = 0; c < p.head_dim_v; ++c) {
            result.out[index((place * p.heads_q + head) * p.head_dim_v + c)] =
                static_cast<double>(narrowed(p.out.dtype, row.out()[index(c)]));
          }
          result.lse[index((s.batch_q * p.heads_q + head) * rows + s.row_q + i)] =
              static_cast<double>(row.lse());
        }
#pragma omp critical
        if (statistics != nullptr) {
          statistics->repairs += mine.repairs;
          statistics->saturated += mine.saturated;
        }
      }
    }
  }
  return result;
}

}  // namespace fovea::cpu
