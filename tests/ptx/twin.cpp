// The twin test: the same tiny kernels and the Hopper test kernels on a GPU (through the driver,
// opened at run time) and on the emulator. Prints one table; exit status 1 when anything differs,
// 2 when there is no GPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <map>

#include "emulator/emulator.h"
#include "tests/ptx/cases.h"
#include "tests/ptx/kernel_runner.h"
#include "tests/ptx/programs.h"
#include "tests/ptx/twin_driver.h"

namespace fovea::emulator::testing {
namespace {

std::vector<std::uint64_t> emulate(const InstructionCase& item) {
  Machine machine(item.blackwell ? chip_b200() : chip_h200());
  const auto input = item.input_block();
  const std::uint64_t pointers[2] = {machine.allocate(input.size() * 8), machine.allocate(32 * 8)};
  machine.write(pointers[0], input.data(), input.size() * 8);
  LaunchConfig config;
  config.block.x = 32;
  machine.launch(Module::parse(item.ptx()), "test", config, std::as_bytes(std::span(pointers)));
  std::vector<std::uint64_t> output(32);
  machine.read(output.data(), pointers[1], output.size() * 8);
  return output;
}

struct Row {
  int forms = 0, samples = 0, equal = 0, within = 0, differ = 0;
};

void compare(Driver& driver, const InstructionCase& item, Row& row) {
  const std::vector<std::uint64_t> ours = emulate(item);
  const std::vector<std::uint64_t> theirs = driver.run_case(item.ptx(), item.input_block());
  ++row.forms;
  for (std::size_t i = 0; i < item.samples.size(); ++i) {
    ++row.samples;
    if (ours[i] == theirs[i]) {
      ++row.equal;
    } else if (item.samples[i].tolerance > 0 && item.mismatch(i, theirs[i]).empty()) {
      ++row.within;
    } else {
      ++row.differ;
      std::printf("%s:%d %s sample %zu: emulator %#llx, GPU %#llx\n", item.file.c_str(), item.line,
                  item.instruction.c_str(), i, static_cast<unsigned long long>(ours[i]),
                  static_cast<unsigned long long>(theirs[i]));
    }
  }
}

// Programs for Hopper without clusters, whose headers say what they write.
void compare_programs(Driver& driver, Row& row) {
  for (const std::string& file : program_files()) {
    const std::string ptx = read_text("programs/" + file);
    const auto header = header_of(ptx);
    if (header.count("expect") == 0 || header.count("chip") != 0 || header.count("cluster") != 0) {
      continue;
    }
    ++row.forms;
    const std::vector<std::uint32_t> expected = words_of(header.at("expect"));
    const std::vector<std::uint32_t> theirs =
        driver.run_program(ptx, number(header, "grid", 1), number(header, "block", 32));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ++row.samples;
      if (theirs[i] == expected[i]) {
        ++row.equal;
        continue;
      }
      if (row.differ++ < 20) {
        std::printf("%s word %zu: emulator %u, GPU %u\n", file.c_str(), i, expected[i], theirs[i]);
      }
    }
  }
}

// Whole kernels: how many outputs are equal to the bit, and how far the others are apart.
int compare_kernels(Driver& driver) {
  int wrong = 0;
  std::printf("%-28s %8s %8s %14s %14s\n", "kernel", "outputs", "equal", "largest step",
              "GPU vs double");
  for (const Kernel kernel : {Kernel::gemm_sm90, Kernel::attention_sm90}) {
    const std::string ptx = read_text(kernel_path(kernel));
    const KernelResult ours = run_kernel(kernel, ptx, Schedule{});
    const KernelResult theirs = run_kernel(kernel, ptx, driver);
    std::size_t equal = 0;
    double step = 0;
    for (std::size_t i = 0; i < ours.output.size(); ++i) {
      if (ours.output[i] == theirs.output[i]) ++equal;
      const double a = static_cast<double>(ours.output[i]);
      const double b = static_cast<double>(theirs.output[i]);
      step = std::max(step, std::fabs(a - b) / (1 + std::fabs(a)));
    }
    std::printf("%-28s %8zu %8zu %14.2e %14.2e\n", kernel_path(kernel).c_str(), ours.output.size(),
                equal, step, theirs.max_error);
    wrong += ours.correct && theirs.correct ? 0 : 1;
  }
  return wrong;
}

int run(const std::string& folder) {
  Driver driver;
  const std::string problem = driver.open();
  if (!problem.empty()) {
    std::fprintf(stderr, "%s\n", problem.c_str());
    return 2;
  }
  std::printf("GPU: %s\n", driver.name().c_str());
  std::map<std::string, Row> table;
  for (const char* file : {"integer.cases", "float.cases", "convert.cases"}) {
    for (const InstructionCase& item : read_cases(folder + "/instructions/" + file)) {
      if (!item.blackwell) compare(driver, item, table[file]);
    }
  }
  compare_programs(driver, table["programs"]);
  int differ = 0;
  std::printf("%-16s %6s %8s %8s %10s %8s\n", "file", "forms", "samples", "equal", "in bound",
              "differ");
  for (const auto& [file, row] : table) {
    std::printf("%-16s %6d %8d %8d %10d %8d\n", file.c_str(), row.forms, row.samples, row.equal,
                row.within, row.differ);
    differ += row.differ;
  }
  differ += compare_kernels(driver);
  return differ == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fovea::emulator::testing

int main() {
  try {
    return fovea::emulator::testing::run(FOVEA_PTX_TESTS);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
