// The one case list: every backend runs it, on the device that FOVEA_TEST_DEVICE names.
#pragma once

#include <vector>

#include "tests/call.h"

namespace fovea::test {

// A few hundred small cases: every class of head dim and length, every option alone and in random
// combinations, every layout and entry point. Names are unique and valid in a test's name.
[[nodiscard]] std::vector<CaseSpec> all_cases();

}  // namespace fovea::test
