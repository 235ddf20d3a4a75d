#include "tests/cases.h"

#include <gtest/gtest.h>

#include <set>

namespace fovea::test {
namespace {

class Cases : public ::testing::TestWithParam<CaseSpec> {};

TEST_P(Cases, MatchesTheOracle) {
  try {
    check_case(GetParam());
  } catch (const Unsupported& fault) {
    // The CPU engine is the rung of the ladder that does everything; others may decline, in words.
    if (test_device() == Device::cpu) FAIL() << describe(GetParam()) << ": " << fault.what();
    GTEST_SKIP() << fault.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, Cases, ::testing::ValuesIn(all_cases()),
                         [](const auto& instance) { return instance.param.name; });
INSTANTIATE_TEST_SUITE_P(EightBits, Cases, ::testing::ValuesIn(eight_bit_cases()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fovea::test
