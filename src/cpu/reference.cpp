// Both oracles are one template over the rows of reference_row.h.
#include "cpu/reference.h"

#include <omp.h>

#include <algorithm>
#include <limits>

#include "cpu/reference_row.h"

namespace fovea::cpu {
namespace {

template <typename Real>
ReferenceResult compute(const core::Problem& p, int threads) {
  const int team = threads > 0 ? threads : omp_get_max_threads();
  const int64 batches = p.is_varlen_q() ? 1 : p.batch;
  const int64 rows = p.is_varlen_q() ? p.total_q : p.seqlen_q;
  ReferenceResult result;
  result.out.assign(index(batches * rows * p.heads_q * p.head_dim_v), 0.0);
  result.lse.assign(index(batches * rows * p.heads_q), -std::numeric_limits<double>::infinity());
  KeysAndValues<Real> keys;
  for (int64 b = 0; b < p.batch; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    if (s.length_q <= 0) continue;
    for (int32 head_kv = 0; head_kv < p.heads_kv; ++head_kv) {
      keys.gather(p, s, b, head_kv);
      const int64 group = p.group_size();
      const int64 packed_rows = s.length_q * group;
      const bool worth_a_team = packed_rows * s.length_k * p.head_dim > 65536;
#pragma omp parallel num_threads(team) if (worth_a_team)
      {
        Row<Real> row(p);
#pragma omp for schedule(dynamic, 4)
        for (int64 r = 0; r < packed_rows; ++r) {
          const int64 i = r / group;
          const int64 head = head_kv * group + r % group;
          row.compute(s, b, head, i, keys);
          const int64 place = s.batch_q * rows + s.row_q + i;
          std::copy(row.out.begin(), row.out.end(),
                    result.out.begin() + (place * p.heads_q + head) * p.head_dim_v);
          result.lse[index((s.batch_q * p.heads_q + head) * rows + s.row_q + i)] = row.lse;
        }
      }
    }
  }
  return result;
}

}  // namespace

ReferenceResult reference_forward(const core::Problem& problem, int threads) {
  return compute<double>(problem, threads);
}

ReferenceResult naive_forward(const core::Problem& problem, int threads) {
  return compute<float>(problem, threads);
}

}  // namespace fovea::cpu
