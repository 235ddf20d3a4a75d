// Small programs, one to a file in programs/: what they write, or which fault they must be blamed
// for.
#include "tests/ptx/programs.h"

#include <gtest/gtest.h>

#include <sstream>

#include "emulator/emulator.h"
#include "tests/ptx/kernel_runner.h"

namespace fovea::emulator::testing {
namespace {

class Program : public ::testing::TestWithParam<std::string> {};

std::string unescaped(std::string text) {
  for (std::size_t at = 0; (at = text.find("\\n", at)) != std::string::npos;) {
    text.replace(at, 2, "\n");
  }
  return text;
}

// Pairs of a counter's name and its value, of all warps together.
void expect_counts(const std::string& pairs, const std::string& report) {
  std::stringstream stream(pairs);
  std::string name;
  for (std::string value; stream >> name >> value;) {
    const std::size_t at = report.find("\"" + name + "\": ", report.find("\"total\""));
    ASSERT_NE(at, std::string::npos) << name;
    EXPECT_EQ(std::stoull(report.substr(at + name.size() + 4)), std::stoull(value)) << name;
  }
}

void run(const std::string& ptx, const std::map<std::string, std::string>& header,
         const Schedule& schedule) {
  const auto chip = header.find("chip");
  Machine machine(find_chip(chip == header.end() ? "sm_90a" : chip->second));
  const std::uint64_t out = machine.allocate(4096 * 4);
  machine.fill(out, 0, 4096 * 4);
  LaunchConfig config;
  config.block.x = number(header, "block", 32);
  config.grid.x = number(header, "grid", 1);
  config.grid.y = number(header, "grid_y", 1);
  config.grid.z = number(header, "grid_z", 1);
  config.cluster.x = number(header, "cluster", 1);
  config.dynamic_shared_bytes = number(header, "shared", 0);
  const Report report = machine.launch(Module::parse(ptx), "test", config,
                                       std::as_bytes(std::span(&out, 1)), schedule);
  const auto fault = header.find("fault");
  if (fault != header.end()) {
    bool found = false;
    std::string all;
    const std::string kinds = " or " + fault->second + " or ";  // which it is depends on the order
    for (const Fault& f : report.faults) {
      found = found || kinds.find(" or " + std::string(name(f.kind)) + " or ") != std::string::npos;
      all += f.text() + "\n";
    }
    EXPECT_TRUE(found) << "expected a fault of kind '" << fault->second << "', got:\n" << all;
    return;
  }
  for (const Fault& f : report.faults) ADD_FAILURE() << f.text();
  const std::vector<std::uint32_t> expected = words_of(header.at("expect"));
  std::vector<std::uint32_t> words(expected.size());
  machine.read(words.data(), out, words.size() * 4);
  if (const auto output = header.find("output"); output != header.end()) {
    EXPECT_EQ(report.output, unescaped(output->second));
  }
  if (const auto counts = header.find("counts"); counts != header.end()) {
    expect_counts(counts->second, report.json());
  }
  int shown = 0;
  for (std::size_t i = 0; i < words.size() && shown < 4; ++i) {
    if (words[i] == expected[i]) continue;
    ADD_FAILURE() << "out[" << i << "] is " << words[i] << ", expected " << expected[i];
    ++shown;
  }
}

TEST_P(Program, DoesWhatItsHeaderSays) {
  const std::string ptx = read_text("programs/" + GetParam());
  const auto header = header_of(ptx);
  ASSERT_TRUE(header.count("expect") + header.count("fault") == 1) << GetParam();
  for (const Policy policy : {Policy::eager, Policy::lazy, Policy::random}) {
    for (std::uint64_t seed = 1; seed <= (policy == Policy::random ? 3u : 1u); ++seed) {
      Schedule schedule;
      schedule.policy = policy;
      schedule.seed = seed;
      schedule.in_order_tensor = header.count("tensor") != 0;
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(policy)) + " seed " +
                   std::to_string(seed));
      run(ptx, header, schedule);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Files, Program, ::testing::ValuesIn(program_files()),
                         [](const auto& item) {
                           std::string name = item.param.substr(0, item.param.find('.'));
                           return name;
                         });

}  // namespace
}  // namespace fovea::emulator::testing
