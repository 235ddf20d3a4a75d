// Whole kernels under every schedule: the right product, and not a single report.
#include <gtest/gtest.h>

#include "tests/ptx/kernel_runner.h"

namespace fovea::emulator::testing {
namespace {

struct Case {
  Kernel kernel;
  Policy policy;
  std::uint64_t seed;
  bool in_order;
};

class Kernels : public ::testing::TestWithParam<Case> {};

TEST_P(Kernels, IsCorrectAndClean) {
  const Case& c = GetParam();
  Schedule schedule;
  schedule.policy = c.policy;
  schedule.seed = c.seed;
  schedule.in_order_tensor = c.in_order;
  const KernelResult result = run_kernel(c.kernel, read_text(kernel_path(c.kernel)), schedule);
  for (const Fault& fault : result.report.faults) ADD_FAILURE() << fault.text();
  EXPECT_TRUE(result.correct) << "largest relative error " << result.max_error;
  const bool gemm = c.kernel != Kernel::attention_sm90 && c.kernel != Kernel::attention_sm100;
  const std::uint64_t flops = gemm ? 2u * 256 * 256 * 256 : 4u * 128 * 320 * 64;
  EXPECT_EQ(result.report.total.tensor_flops_f16, flops);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Kernel kernel : {Kernel::gemm_sm90, Kernel::gemm_single, Kernel::gemm_pair,
                              Kernel::attention_sm90, Kernel::attention_sm100}) {
    cases.push_back({kernel, Policy::eager, 0, false});
    cases.push_back({kernel, Policy::lazy, 1, false});
    cases.push_back({kernel, Policy::lazy, 2, true});
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      cases.push_back({kernel, Policy::random, seed, false});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Schedules, Kernels, ::testing::ValuesIn(all_cases()));

// Kernels that count on hardware leave the fences and waits of tensor memory out.
TEST(KernelRuns, NeedsNoTensorFencesInOrder) {
  for (const Kernel kernel : {Kernel::gemm_single, Kernel::gemm_pair, Kernel::attention_sm100}) {
    std::string ptx = read_text(kernel_path(kernel));
    for (const std::string without :
         {"tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;",
          "tcgen05.wait::ld.sync.aligned;"}) {
      std::size_t removed = 0;
      for (std::size_t at = 0; (at = ptx.find(without, at)) != std::string::npos; ++removed) {
        ptx.erase(at, without.size());
      }
      EXPECT_NE(removed, 0u) << without;
    }
    for (const Policy policy : {Policy::eager, Policy::lazy, Policy::random}) {
      Schedule schedule;
      schedule.policy = policy;
      schedule.seed = 3;
      schedule.in_order_tensor = true;
      const KernelResult result = run_kernel(kernel, ptx, schedule);
      for (const Fault& fault : result.report.faults) ADD_FAILURE() << fault.text();
      EXPECT_TRUE(result.correct) << "largest relative error " << result.max_error;
      schedule.in_order_tensor = false;
      EXPECT_FALSE(run_kernel(kernel, ptx, schedule).report.ok());
    }
  }
}

TEST(KernelRuns, RepeatsExactlyWithTheSameSeed) {
  Schedule schedule;
  schedule.policy = Policy::random;
  schedule.seed = 7;
  const std::string ptx = read_text(kernel_path(Kernel::gemm_sm90));
  const KernelResult first = run_kernel(Kernel::gemm_sm90, ptx, schedule);
  const KernelResult second = run_kernel(Kernel::gemm_sm90, ptx, schedule);
  EXPECT_EQ(first.report.json(), second.report.json());
}

}  // namespace
}  // namespace fovea::emulator::testing
