// Whole kernels under every schedule: the right product, and not a single report.
#include <gtest/gtest.h>

#include "gemm_runner.h"

namespace fovea::emulator::testing {
namespace {

struct Case {
  GemmKernel kernel;
  Policy policy;
  std::uint64_t seed;
  bool in_order;
};

class Gemm : public ::testing::TestWithParam<Case> {};

TEST_P(Gemm, IsCorrectAndClean) {
  const Case& c = GetParam();
  Schedule schedule;
  schedule.policy = c.policy;
  schedule.seed = c.seed;
  schedule.in_order_tensor = c.in_order;
  const GemmResult result = run_gemm(c.kernel, read_text(gemm_path(c.kernel)), schedule);
  for (const Fault& fault : result.report.faults) ADD_FAILURE() << fault.text();
  EXPECT_TRUE(result.correct) << "largest relative error " << result.max_error;
  const Counters& total = result.report.total;
  EXPECT_EQ(total.tensor_flops_f16, 2u * 256 * 256 * 256);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const GemmKernel kernel :
       {GemmKernel::sm90, GemmKernel::sm100_single, GemmKernel::sm100_pair}) {
    cases.push_back({kernel, Policy::eager, 0, false});
    cases.push_back({kernel, Policy::lazy, 1, false});
    cases.push_back({kernel, Policy::lazy, 2, true});
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      cases.push_back({kernel, Policy::random, seed, false});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Schedules, Gemm, ::testing::ValuesIn(all_cases()));

TEST(Gemm, RepeatsExactlyWithTheSameSeed) {
  Schedule schedule;
  schedule.policy = Policy::random;
  schedule.seed = 7;
  const std::string ptx = read_text(gemm_path(GemmKernel::sm90));
  const GemmResult first = run_gemm(GemmKernel::sm90, ptx, schedule);
  const GemmResult second = run_gemm(GemmKernel::sm90, ptx, schedule);
  EXPECT_EQ(first.report.json(), second.report.json());
}

}  // namespace
}  // namespace fovea::emulator::testing
