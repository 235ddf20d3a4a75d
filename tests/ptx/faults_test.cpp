// Fault injection: takes correct kernels, breaks one synchronising instruction at a time, and
// counts how many of the broken kernels are reported. Prints a table, and every fault that goes
// unnoticed.
#include "tests/faults.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/ptx/kernel_runner.h"

namespace fovea::emulator::testing {
namespace {

using tests::FaultOutcome;
using tests::FaultTable;
using tests::Mutant;
using tests::mutants_of;
using tests::name;

FaultOutcome outcome_of(Kernel kernel, const Mutant& mutant) {
  std::vector<Schedule> schedules(4);
  schedules[0].policy = Policy::lazy;
  schedules[0].seed = 1;
  schedules[1].policy = Policy::eager;
  for (std::size_t i = 2; i < schedules.size(); ++i) {
    schedules[i].policy = Policy::random;
    schedules[i].seed = i;
  }
  bool wrong = false;
  for (Schedule& schedule : schedules) {
    schedule.step_limit = 3'000'000;
    const KernelResult result = run_kernel(kernel, mutant.ptx, schedule);
    if (!result.report.faults.empty()) return FaultOutcome::reported;
    wrong = wrong || !result.correct;
  }
  if (wrong) return FaultOutcome::wrong;
  const KernelResult trapped = run_kernel(kernel, mutant.trapped, schedules[0]);
  return trapped.report.faults.empty() ? FaultOutcome::unreached : FaultOutcome::unnoticed;
}

TEST(FaultInjection, NearlyEveryBrokenKernelIsReported) {
  FaultTable table;
  for (const Kernel kernel : {Kernel::gemm_sm90, Kernel::gemm_single, Kernel::gemm_pair,
                              Kernel::attention_sm90, Kernel::attention_sm100}) {
    const std::string entry = kernel_entry(kernel);
    for (const Mutant& mutant : mutants_of(read_text(kernel_path(kernel)), entry)) {
      const FaultOutcome outcome = outcome_of(kernel, mutant);
      table.add(mutant.kind, outcome);
      if (outcome == FaultOutcome::reported) continue;
      std::printf("%s: %s, line %d [%s] %.110s\n", name(outcome), kernel_path(kernel).c_str(),
                  mutant.line, mutant.kind.c_str(), mutant.before.c_str());
    }
  }
  std::printf("%s", table.text().c_str());
  EXPECT_EQ(table.all().wrong_only, 0) << "a wrong result must not pass unreported";
  EXPECT_GE(100 * table.all().reported, 95 * table.all().total);
}

}  // namespace
}  // namespace fovea::emulator::testing
