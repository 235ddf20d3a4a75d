// The one case list through the backward pass.
#include <gtest/gtest.h>

#include <string>

#include "tests/backward_call.h"
#include "tests/cases.h"

namespace fovea::test {
namespace {

class BackwardCases : public ::testing::TestWithParam<CaseSpec> {};

TEST_P(BackwardCases, MatchesTheOracle) {
  const CaseSpec& spec = GetParam();
  // Every other case has a gradient of lse, every third one wide gradients.
  const std::size_t mark = std::hash<std::string>()(spec.name);
  const GradientSpec gradients{.dlse = mark % 2 == 0, .wide = mark % 3 == 0};
  try {
    check_backward_case(spec, gradients);
    EXPECT_FALSE(is_paged(spec)) << "pages may be shared";
  } catch (const Unsupported& fault) {
    if (is_paged(spec)) {
      EXPECT_NE(std::string(fault.what()).find("paged"), std::string::npos) << fault.what();
      return;
    }
    if (test_device() == Device::cpu) FAIL() << describe(spec) << ": " << fault.what();
    GTEST_SKIP() << fault.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, BackwardCases, ::testing::ValuesIn(all_cases()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fovea::test
