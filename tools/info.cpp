// fovea info: the version, and what this machine offers.
#include <fmt/format.h>

#include <cstdint>
#include <fstream>
#include <utility>

#include "tools/cpu_peak.h"
#include "tools/json_output.h"
#include "tools/problem_options.h"
#include "tools/program.h"
#include "tools/text.h"

namespace fovea::tools {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string row; std::getline(file, row);) {
    const std::size_t colon = row.find(':');
    if (colon == std::string::npos || !row.starts_with("model name")) continue;
    const std::size_t begin = row.find_first_not_of(' ', colon + 1);
    return begin == std::string::npos ? std::string() : one_line(row.substr(begin));
  }
  return "unknown";
}

// A device, and whether a problem can be planned for it: the library's own answer.
std::string availability(Device device) {
  const std::uint16_t data[64] = {};
  std::uint16_t out[64] = {};
  Problem problem;
  problem.q = bshd(data, DType::bf16, 1, 1, 1, 64);
  problem.k = problem.q;
  problem.v = problem.q;
  problem.out = bshd(out, DType::bf16, 1, 1, 1, 64);
  try {
    return plan(problem, {.device = device}).device() == device ? "available" : "not available";
  } catch (const std::exception& error) {
    return one_line(error.what());
  }
}

class InfoCommand : public Command {
 public:
  explicit InfoCommand(CLI::App* app) : Command(app) { add_common_options(*app, options_); }

  int execute() override {
    JsonOutput json(options_.json);
    const std::string model = cpu_model();
    const std::string instructions(cpu_instruction_set());
    const int threads = thread_count(options_.run.threads);
    std::string text =
        fmt::format("fovea {}\nCPU: {}\ninstruction set: {}\nthreads: {}\ndevices:\n", version(),
                    model, instructions, threads);
    Json devices = Json::object();
    for (const Device device : {Device::cpu, Device::cuda, Device::emulated_sm90a,
                                Device::emulated_sm100a, Device::emulated_sm103a}) {
      const std::string answer = availability(device);
      devices[std::string(fovea::name(device))] = answer;
      text += fmt::format("  {:<17} {}\n", fovea::name(device), answer);
    }
    if (!options_.quiet && !json.on_standard_output()) fmt::print("{}", text);
    json.write({{"command", "info"},
                {"version", version()},
                {"cpu", model},
                {"instruction_set", instructions},
                {"threads", threads},
                {"devices", devices}});
    return exit_good;
  }

 private:
  ProblemOptions options_;
};

}  // namespace

std::unique_ptr<Command> add_info(CLI::App& program) {
  return std::make_unique<InfoCommand>(
      program.add_subcommand("info", "Show the version, the CPU and the devices"));
}

}  // namespace fovea::tools
