// The lengths of the sequences and the pages that hold their keys.
#pragma once

#include "fovea/fovea.hpp"

namespace fovea {

struct Extents {
  std::int64_t batch = 0;
  std::int64_t seqlen_q = 0;  // rows per sequence (dense), a bound on the longest (varlen)
  std::int64_t seqlen_k = 0;  // likewise, or what the block table can hold (paged)
};

[[nodiscard]] bool is_given(std::span<const std::int32_t> lengths);
[[nodiscard]] bool is_paged(const Problem& problem);

// Checks the sequence dimensions of q and k, cu_seqlens, seqused, max_seqlen and the block table;
// q and k must be views with elements in range. In device memory the number of lengths is checked,
// their values are not read. Throws Error.
[[nodiscard]] Extents check_lengths(const Problem& problem);

}  // namespace fovea
