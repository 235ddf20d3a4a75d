// How much work a problem is: the (query, key) pairs that position leaves visible.
#pragma once

#include <cstdint>

#include "fovea/fovea.hpp"

namespace fovea::tools {

// Pairs over all sequences and query heads. Causal attention over as many queries as keys counts as
// half of the square, the field's convention; every other window is counted pair by pair. Bias and
// mask do not lower the count.
[[nodiscard]] double visible_pairs(const Problem& problem);

// Multiplications and additions of both products: 2 * pairs * (D + Dv).
[[nodiscard]] double flop_count(const Problem& problem);

// Of the backward pass's five products: 2 * pairs * (3 D + 2 Dv).
[[nodiscard]] double backward_flop_count(const Problem& problem);

}  // namespace fovea::tools
