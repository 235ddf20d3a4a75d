// Fault injection: takes correct kernels, breaks one synchronising instruction at a time, and
// counts how many of the broken kernels are reported. Prints a table, and every fault that goes
// unnoticed.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "tests/ptx/kernel_runner.h"

namespace fovea::emulator::testing {
namespace {

struct Mutant {
  std::string kind;
  int line = 0;
  std::string before, ptx;
};

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// What removing the line would remove, or empty when it synchronises nothing.
std::string removal_kind(const std::string& line) {
  if (contains(line, "mbarrier.try_wait")) return "wait: mbarrier";
  if (contains(line, "mbarrier.arrive.expect_tx")) return "arrive: expect_tx";
  if (contains(line, "tcgen05.commit")) return "commit: tcgen05";
  if (contains(line, "mbarrier.arrive")) return "arrive: mbarrier";
  if (contains(line, "wgmma.wait_group")) return "wait: wgmma";
  if (contains(line, "wgmma.commit_group")) return "commit: wgmma";
  if (contains(line, "wgmma.fence")) return "fence: wgmma";
  if (contains(line, "fence.proxy.async")) return "fence: proxy";
  if (contains(line, "fence.mbarrier_init")) return "fence: mbarrier_init";
  if (contains(line, "tcgen05.fence::before")) return "fence: tcgen05 before";
  if (contains(line, "tcgen05.fence::after")) return "fence: tcgen05 after";
  if (contains(line, "tcgen05.wait")) return "wait: tcgen05";
  if (contains(line, "tcgen05.dealloc")) return "dealloc";
  if (contains(line, "cp.async.bulk.commit_group")) return "commit: bulk";
  if (contains(line, "cp.async.bulk.wait_group")) return "wait: bulk";
  if (contains(line, "bar.sync") || contains(line, "barrier.cluster.arrive") ||
      contains(line, "barrier.cluster.wait")) {
    return "barrier";
  }
  return {};
}

// "P, [%r1], %r2;" becomes a wait for the other parity.
std::string flipped(const std::string& line) {
  const std::size_t wait = line.find("mbarrier.try_wait");
  const std::size_t comma = line.find("], ", wait), end = line.find(';', wait);
  if (wait == std::string::npos || comma == std::string::npos) return {};
  const std::string parity = line.substr(comma + 3, end - comma - 3);
  const std::size_t open = line.find('{');
  return line.substr(0, open + 1) + " .reg .b32 Flipped; xor.b32 Flipped, " + parity + ", 1;" +
         line.substr(open + 1, comma + 3 - open - 1) + "Flipped" + line.substr(end);
}

std::vector<Mutant> mutants_of(const std::string& ptx, const std::string& entry) {
  const std::vector<std::string> lines = split_lines(ptx);
  std::vector<Mutant> mutants;
  bool inside = false;
  auto add = [&](const std::string& kind, std::size_t at, const std::string& replacement) {
    std::vector<std::string> copy = lines;
    copy[at] = replacement;
    mutants.push_back({kind, static_cast<int>(at) + 1, lines[at], joined(copy)});
  };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (contains(lines[i], ".entry")) inside = contains(lines[i], (entry + "(").c_str());
    if (!inside) continue;
    const std::string kind = removal_kind(lines[i]);
    if (kind.empty()) continue;
    add(kind, i, "");
    if (kind == "wait: mbarrier") add("parity", i, flipped(lines[i]));
    if (kind == "arrive: expect_tx") {
      const std::size_t comma = lines[i].rfind(", "), end = lines[i].rfind(';');
      const std::string bytes = lines[i].substr(comma + 2, end - comma - 2);
      for (const char* change : {"16", "-16"}) {
        add("transaction bytes", i,
            "{ .reg .b32 Bytes; add.s32 Bytes, " + bytes + ", " + change + "; " +
                lines[i].substr(0, comma + 2) + "Bytes; }");
      }
    }
  }
  return mutants;
}

struct Tally {
  int total = 0, detected = 0, wrong_only = 0;
};

bool detected(Kernel kernel, const Mutant& mutant, bool& wrong) {
  std::vector<Schedule> schedules(4);
  schedules[0].policy = Policy::lazy;
  schedules[0].seed = 1;
  schedules[1].policy = Policy::eager;
  for (std::size_t i = 2; i < schedules.size(); ++i) {
    schedules[i].policy = Policy::random;
    schedules[i].seed = i;
  }
  for (Schedule& schedule : schedules) {
    schedule.step_limit = 3'000'000;
    const KernelResult result = run_kernel(kernel, mutant.ptx, schedule);
    if (!result.report.faults.empty()) return true;
    wrong = wrong || !result.correct;
  }
  return false;
}

TEST(FaultInjection, NearlyEveryBrokenKernelIsReported) {
  std::map<std::string, Tally> table;
  Tally all;
  for (const Kernel kernel : {Kernel::gemm_sm90, Kernel::gemm_single, Kernel::gemm_pair,
                              Kernel::attention_sm90, Kernel::attention_sm100}) {
    const std::string entry = kernel_entry(kernel);
    for (const Mutant& mutant : mutants_of(read_text(kernel_path(kernel)), entry)) {
      bool wrong = false;
      const bool found = detected(kernel, mutant, wrong);
      for (Tally* tally : {&table[mutant.kind], &all}) {
        ++tally->total;
        tally->detected += found ? 1 : 0;
        tally->wrong_only += !found && wrong ? 1 : 0;
      }
      if (!found) {
        std::printf("not reported (%s): %s, line %d [%s] %.110s\n",
                    wrong ? "result wrong" : "result right", kernel_path(kernel).c_str(),
                    mutant.line, mutant.kind.c_str(), mutant.before.c_str());
      }
    }
  }
  std::printf("%-24s %8s %10s\n", "fault", "injected", "reported");
  for (const auto& [kind, tally] : table) {
    std::printf("%-24s %8d %10d\n", kind.c_str(), tally.total, tally.detected);
  }
  std::printf("%-24s %8d %10d  (%.1f %%)\n", "all", all.total, all.detected,
              100.0 * all.detected / all.total);
  EXPECT_EQ(all.wrong_only, 0) << "a wrong result must not pass unreported";
  EXPECT_GE(100 * all.detected, 95 * all.total);
}

}  // namespace
}  // namespace fovea::emulator::testing
