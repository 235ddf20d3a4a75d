// The one case list: every backend runs it, on the device that FOVEA_TEST_DEVICE names.
#pragma once

#include <vector>

#include "tests/call.h"

namespace fovea::test {

// A few hundred small cases: every class of head dim and length, every option alone and in random
// combinations, every layout and entry point. Names are unique and valid in a test's name.
[[nodiscard]] std::vector<CaseSpec> all_cases();

// Those of 8 bits, which have no gradients: codes with every kind of scales, through every entry
// point, in every layout.
[[nodiscard]] std::vector<CaseSpec> eight_bit_cases();

}  // namespace fovea::test
