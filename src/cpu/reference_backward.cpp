// The gradients of attention by the chain rule, row after row, from the same rows as the forward
// oracle (reference_row.h). With P the softmax, D the dropout mask over its keep probability,
//
//   dV_j = sum_i P_ij D_ij dO_i          dP_ij = D_ij dO_i V_j
//   dS_ij = P_ij (dP_ij - delta_i)       delta_i = dO_i O_i - dLSE_i
//   dQ_i = scale sum_j dS_ij c_ij K_j    dK_j = scale sum_i dS_ij c_ij Q_i    c: slope of the
//   softcap dbias = dS                           dsink = -sum_i exp(sink - lse_i) delta_i
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "cpu/reference.h"
#include "cpu/reference_row.h"

namespace fovea::cpu {
namespace {

// Rows of one view, of one sequence and head, as panels of 16 and row after row.
template <typename Real>
struct Gathered {
  std::vector<Real> panels;
  std::vector<Real> rows;
  int64 columns = 0;

  void gather(const core::Problem& p, const core::View& view, const core::Sequence& s, int64 b,
              int64 head_kv, int64 width) {
    columns = width;
    panels.assign(index(core::round_up(s.length_k, panel_keys) * width), Real{0});
    rows.resize(index(s.length_k * width));
    for (int64 key = 0; key < s.length_k; ++key) {
      const int64 offset = core::key_offset(p, view, s, b, key, head_kv);
      Real* panel = panels.data() + (key / panel_keys) * width * panel_keys + key % panel_keys;
      for (int64 d = 0; d < width; ++d) {
        const Real value = core::load_element(view.data, view.dtype, offset + d * view.stride[3]);
        panel[d * panel_keys] = value;
        rows[index(key * width + d)] = value;
      }
    }
  }
};

// Adds factor * from to the columns of one row.
template <typename Real>
void add_scaled(std::vector<Real>& to, int64 row, int64 columns, Real factor, const Real* from) {
  Real* sum = to.data() + row * columns;
  for (int64 d = 0; d < columns; ++d) sum[d] += factor * from[d];
}

// The results while they are summed: of a whole tensor, or of the keys of one sequence and head.
template <typename Real>
struct Sums {
  std::vector<Real> dq, dk, dv, dsink, dbias;

  void add_keys(const Sums& other) {
    std::transform(dk.begin(), dk.end(), other.dk.begin(), dk.begin(), std::plus<>());
    std::transform(dv.begin(), dv.end(), other.dv.begin(), dv.begin(), std::plus<>());
  }
};

template <typename Real>
class BackwardRows {
 public:
  BackwardRows(const core::Problem& problem, const core::Gradients& gradients)
      : p_(problem),
        g_(gradients),
        row_(problem),
        dout_(index(problem.head_dim_v)),
        kept_scale_(Real{1} / (Real{1} - static_cast<Real>(problem.dropout.probability))) {}

  // Row i of a head. dK and dV go to `keys`; dQ and, one row at a time, the rest to `whole`.
  void compute(const core::Sequence& s, int64 b, int64 head, int64 i, int64 dq_row,
               const KeysAndValues<Real>& forward, const Gathered<Real>& k, const Gathered<Real>& v,
               Sums<Real>& keys, Sums<Real>& whole) {
    row_.compute(s, b, head, i, forward);
    const int64 dout_offset = g_.dout.offset(s.batch_q, s.row_q + i, head);
    Real delta = 0;
    for (int64 d = 0; d < p_.head_dim_v; ++d) {
      dout_[index(d)] =
          core::load_element(g_.dout.data, g_.dout.dtype, dout_offset + d * g_.dout.stride[3]);
      delta += dout_[index(d)] * row_.out[index(d)];
    }
    if (g_.dlse && row_.sum != Real{0}) {
      delta -= core::load_element(g_.dlse.data, g_.dlse.dtype,
                                  g_.dlse.offset(s.batch_q, head, s.row_q + i));
    }
    find_score_gradients(s, b, head, i, delta, v, keys);
    std::fill_n(whole.dq.data() + dq_row * p_.head_dim, p_.head_dim, Real{0});
    for (int64 j = 0; j < s.length_k; ++j) {
      if (row_.visible[index(j)] == 0) continue;
      const Real slope = p_.softcap > 0.0f ? row_.slopes[index(j)] : Real{1};
      const Real ds = round(dscores_[index(j)] * slope * static_cast<Real>(p_.softmax_scale));
      add_scaled(whole.dq, dq_row, p_.head_dim, ds, k.rows.data() + j * p_.head_dim);
      add_scaled(keys.dk, j, p_.head_dim, ds, row_.query.data());
    }
    if (!whole.dsink.empty() || !whole.dbias.empty()) {
#pragma omp critical(fovea_reference_backward)
      add_extras(s, b, head, i, delta, whole);
    }
  }

 private:
  Real round(Real value) const { return Row<Real>::round_to(p_.q.dtype, value); }

  // dscores_ = dS of the visible keys; adds the row's part of dV.
  void find_score_gradients(const core::Sequence& s, int64 b, int64 head, int64 i, Real delta,
                            const Gathered<Real>& v, Sums<Real>& keys) {
    dscores_.resize(index(core::round_up(s.length_k, panel_keys)));
    for (int64 begin = 0; begin < s.length_k; begin += panel_keys) {
      panel_products(dout_.data(), v.panels.data() + begin * p_.head_dim_v, p_.head_dim_v,
                     dscores_.data() + begin);
    }
    for (int64 j = 0; j < s.length_k; ++j) {
      if (row_.visible[index(j)] == 0) continue;
      const Real weight = row_.weight(j);
      Real kept = weight;
      Real dweight = round(dscores_[index(j)]);
      if (p_.dropout.probability > 0.0f) {
        const bool keeps = core::dropout_keeps(p_.dropout, b, head, i, j);
        kept = keeps ? kept * kept_scale_ : Real{0};
        dweight = keeps ? dweight * kept_scale_ : Real{0};
      }
      add_scaled(keys.dv, j, p_.head_dim_v, round(kept), dout_.data());
      dscores_[index(j)] = round(weight) * (dweight - delta);
    }
  }

  void add_extras(const core::Sequence& s, int64 b, int64 head, int64 i, Real delta,
                  Sums<Real>& whole) const {
    if (!whole.dsink.empty() && row_.sum != Real{0}) {
      const Real sink = core::load_element(p_.sink.data, p_.sink.dtype, head * p_.sink.stride[0]);
      // exp(sink - top) / sum by the same rule as the keys' weights.
      if (sink > -Row<Real>::infinity) {
        whole.dsink[index(head)] -= std::exp(sink - row_.top) / row_.sum * delta;
      }
    }
    if (whole.dbias.empty()) return;
    const int64* extent = g_.dbias_extent;
    const auto at = [&](int dimension, int64 coordinate) {
      return extent[dimension] == 1 ? 0 : coordinate;
    };
    const int64 row = (at(0, b) * extent[1] + at(1, head)) * extent[2] + at(2, i);
    for (int64 j = 0; j < s.length_k; ++j) {
      if (row_.visible[index(j)] == 0) continue;
      whole.dbias[index(row * extent[3] + at(3, j))] += dscores_[index(j)];
    }
  }

  const core::Problem& p_;
  const core::Gradients& g_;
  Row<Real> row_;
  std::vector<Real> dout_;
  std::vector<Real> dscores_;
  Real kept_scale_;
};

template <typename Real>
std::vector<double> finished(const std::vector<Real>& sums, core::DType type) {
  std::vector<double> result(sums.size());
  std::transform(sums.begin(), sums.end(), result.begin(),
                 [&](Real x) { return Row<Real>::round_to(type, x); });
  return result;
}

template <typename Real>
ReferenceGradients compute(const core::Problem& p, const core::Gradients& g, int threads) {
  const int team = threads > 0 ? threads : omp_get_max_threads();
  const int64 rows_q = p.is_varlen_q() ? p.total_q : p.seqlen_q;
  const int64 all_q = (p.is_varlen_q() ? 1 : p.batch) * rows_q * p.heads_q;
  const int64 all_k = (p.is_varlen_k() ? 1 : p.batch) * g.rows_k * p.heads_kv;
  const int64* extent = g.dbias_extent;
  Sums<Real> whole;
  whole.dq.assign(index(all_q * p.head_dim), Real{0});
  whole.dk.assign(index(all_k * p.head_dim), Real{0});
  whole.dv.assign(index(all_k * p.head_dim_v), Real{0});
  if (g.dsink) whole.dsink.assign(index(p.heads_q), Real{0});
  if (g.dbias) whole.dbias.assign(index(extent[0] * extent[1] * extent[2] * extent[3]), Real{0});
  KeysAndValues<Real> forward;
  Gathered<Real> k;
  Gathered<Real> v;
  for (int64 b = 0; b < p.batch; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    if (s.length_q <= 0) continue;
    for (int32 head_kv = 0; head_kv < p.heads_kv; ++head_kv) {
      forward.gather(p, s, b, head_kv);
      k.gather(p, p.k, s, b, head_kv, p.head_dim);
      v.gather(p, p.v, s, b, head_kv, p.head_dim_v);
      const int64 group = p.group_size();
      const int64 packed_rows = s.length_q * group;
      Sums<Real> none;
      none.dk.assign(index(s.length_k * p.head_dim), Real{0});
      none.dv.assign(index(s.length_k * p.head_dim_v), Real{0});
      std::vector<Sums<Real>> keys(index(team), none);
#pragma omp parallel num_threads(team) if (packed_rows * s.length_k * p.head_dim > 65536)
      {
        BackwardRows<Real> rows(p, g);
#pragma omp for schedule(static)
        for (int64 r = 0; r < packed_rows; ++r) {
          const int64 i = r / group;
          const int64 head = head_kv * group + r % group;
          const int64 place = (s.batch_q * rows_q + s.row_q + i) * p.heads_q + head;
          rows.compute(s, b, head, i, place, forward, k, v, keys[index(omp_get_thread_num())],
                       whole);
        }
      }
      for (int thread = 1; thread < team; ++thread) keys[0].add_keys(keys[index(thread)]);
      for (int64 j = 0; j < s.length_k; ++j) {
        const int64 place = (s.batch_k * g.rows_k + s.row_k + j) * p.heads_kv + head_kv;
        std::copy_n(keys[0].dk.begin() + j * p.head_dim, p.head_dim,
                    whole.dk.begin() + place * p.head_dim);
        std::copy_n(keys[0].dv.begin() + j * p.head_dim_v, p.head_dim_v,
                    whole.dv.begin() + place * p.head_dim_v);
      }
    }
  }
  return {finished(whole.dq, g.dq.dtype), finished(whole.dk, g.dk.dtype),
          finished(whole.dv, g.dv.dtype), finished(whole.dsink, core::DType::f32),
          finished(whole.dbias, g.dbias.dtype)};
}

}  // namespace

ReferenceGradients reference_backward(const core::Problem& problem,
                                      const core::Gradients& gradients, int threads) {
  return compute<double>(problem, gradients, threads);
}

ReferenceGradients naive_backward(const core::Problem& problem, const core::Gradients& gradients,
                                  int threads) {
  return compute<float>(problem, gradients, threads);
}

}  // namespace fovea::cpu
