// Small programs, one to a file in programs/: what they write, or which fault they must be blamed
// for.
//
// Header lines of a file (all optional but one of `expect` and `fault`):
//   // chip: sm_90a      // block: 32     // grid: 1     // cluster: 1     // shared: 0
//   // expect: words of `out` in order, decimal or 0x..., "N*word" for repeats
//   // fault: kind       at least this kind is reported, under every schedule
// The kernel is test(.param .u64 out); out has 4096 zeroed words.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "emulator.h"
#include "kernel_runner.h"

namespace fovea::emulator::testing {
namespace {

std::map<std::string, std::string> header_of(const std::string& ptx) {
  std::map<std::string, std::string> header;
  std::stringstream stream(ptx);
  for (std::string line; std::getline(stream, line) && line.substr(0, 3) == "// ";) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    std::string& value = header[line.substr(3, colon - 3)];
    value += (value.empty() ? "" : " ") + line.substr(colon + 2);
  }
  return header;
}

std::uint32_t number(const std::map<std::string, std::string>& header, const char* key,
                     std::uint32_t otherwise) {
  const auto it = header.find(key);
  return it == header.end() ? otherwise
                            : static_cast<std::uint32_t>(std::stoul(it->second, nullptr, 0));
}

std::vector<std::uint32_t> words_of(const std::string& text) {
  std::vector<std::uint32_t> words;
  std::stringstream stream(text);
  for (std::string word; stream >> word;) {
    const std::size_t star = word.find('*');
    const unsigned long count = star == std::string::npos ? 1 : std::stoul(word);
    const std::string value = star == std::string::npos ? word : word.substr(star + 1);
    words.insert(words.end(), count, static_cast<std::uint32_t>(std::stoll(value, nullptr, 0)));
  }
  return words;
}

class Program : public ::testing::TestWithParam<std::string> {};

void run(const std::string& ptx, const std::map<std::string, std::string>& header,
         const Schedule& schedule) {
  const auto chip = header.find("chip");
  Machine machine(find_chip(chip == header.end() ? "sm_90a" : chip->second));
  const std::uint64_t out = machine.allocate(4096 * 4);
  machine.fill(out, 0, 4096 * 4);
  LaunchConfig config;
  config.block.x = number(header, "block", 32);
  config.grid.x = number(header, "grid", 1);
  config.cluster.x = number(header, "cluster", 1);
  config.dynamic_shared_bytes = number(header, "shared", 0);
  const Report report = machine.launch(Module::parse(ptx), "test", config,
                                       std::as_bytes(std::span(&out, 1)), schedule);
  const auto fault = header.find("fault");
  if (fault != header.end()) {
    bool found = false;
    std::string all;
    for (const Fault& f : report.faults) {
      found = found || name(f.kind) == fault->second;
      all += f.text() + "\n";
    }
    EXPECT_TRUE(found) << "expected a fault of kind '" << fault->second << "', got:\n" << all;
    return;
  }
  for (const Fault& f : report.faults) ADD_FAILURE() << f.text();
  const std::vector<std::uint32_t> expected = words_of(header.at("expect"));
  std::vector<std::uint32_t> words(expected.size());
  machine.read(words.data(), out, words.size() * 4);
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
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(policy)) + " seed " +
                   std::to_string(seed));
      run(ptx, header, schedule);
    }
  }
}

std::vector<std::string> files() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(FOVEA_PTX_TESTS) + "/programs")) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Files, Program, ::testing::ValuesIn(files()), [](const auto& item) {
  std::string name = item.param.substr(0, item.param.find('.'));
  return name;
});

}  // namespace
}  // namespace fovea::emulator::testing
