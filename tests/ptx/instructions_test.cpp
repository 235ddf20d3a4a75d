// One tiny kernel per instruction form, with the results the manual defines.
#include <gtest/gtest.h>

#include "emulator/emulator.h"
#include "tests/ptx/cases.h"
#include "tests/ptx/kernel_runner.h"

namespace fovea::emulator::testing {
namespace {

struct Pointers {
  std::uint64_t in, out;
};

class InstructionFile : public ::testing::TestWithParam<const char*> {};

TEST_P(InstructionFile, GivesTheExpectedResults) {
  const auto cases = read_cases(std::string(FOVEA_PTX_TESTS) + "/instructions/" + GetParam());
  ASSERT_FALSE(cases.empty());
  for (const InstructionCase& item : cases) {
    Machine machine(item.blackwell ? chip_b200() : chip_h200());
    const auto input = item.input_block();
    const Pointers p{machine.allocate(input.size() * 8), machine.allocate(32 * 8)};
    machine.write(p.in, input.data(), input.size() * 8);
    LaunchConfig config;
    config.block.x = 32;
    try {
      const Report report = machine.launch(Module::parse(item.ptx()), "test", config,
                                           std::as_bytes(std::span(&p, 1)));
      for (const Fault& fault : report.faults)
        ADD_FAILURE() << item.instruction << ": " << fault.text();
    } catch (const Error& error) {
      ADD_FAILURE() << item.file << ":" << item.line << " " << item.instruction << ": "
                    << error.what();
      continue;
    }
    std::vector<std::uint64_t> output(32);
    machine.read(output.data(), p.out, output.size() * 8);
    for (std::size_t i = 0; i < item.samples.size(); ++i) {
      const std::string problem = item.mismatch(i, output[i]);
      if (!problem.empty()) ADD_FAILURE() << problem;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Files, InstructionFile,
                         ::testing::Values("integer.cases", "float.cases", "convert.cases"));

}  // namespace
}  // namespace fovea::emulator::testing
