// Small calls whose every part a test can spoil, and the same calls for the C interface.
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <span>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/fovea.hpp"
#include "tests/support.h"

namespace fovea::test {

enum class Kind { dense, varlen, paged };

// Two sequences, 4 query heads, 2 key/value heads, head_dim 8, 6 for v; all inputs filled, all
// optional tensors present, outputs poisoned.
//
//   dense   3 queries, 5 keys
//   varlen  2 + 3 queries of 6 rows, 4 + 5 keys of 10 rows: one row of slack each
//   paged   dense queries; 7 pages of 4 keys, 3 table columns, 5 and 9 keys used
struct SmallCall {
  explicit SmallCall(Kind kind = Kind::dense, DType dtype = DType::f32);

  // Entries that live as long as the call.
  std::span<const std::int32_t> keep(std::initializer_list<std::int32_t> entries);

  HostTensor q, k, v, out, lse, bias, mask, sink, alibi;
  std::deque<std::vector<std::int32_t>> entries;
  Problem problem;
};

[[nodiscard]] fovea_tensor to_c(const Tensor& tensor);
[[nodiscard]] fovea_problem to_c(const Problem& problem);

}  // namespace fovea::test
