// fovea compile: fills the kernel cache.
#include <fmt/format.h>

#include <chrono>
#include <string>
#include <vector>

#include "fovea/kernels.hpp"
#include "tools/json_output.h"
#include "tools/program.h"
#include "tools/text.h"

namespace fovea::tools {
namespace {

class CompileCommand : public Command {
 public:
  explicit CompileCommand(CLI::App* app) : Command(app) {
    app->add_option("--arch", archs_, "Chips to compile for: sm_90a, sm_100a, sm_103a")
        ->delimiter(',')
        ->type_name("ARCH,...")
        ->capture_default_str();
    app->add_flag("--all", which_.all, "Kernels for every feature, not only for the usual calls");
    app->add_option("--only", which_.only, "Those whose name holds TEXT")->type_name("TEXT");
    app->add_option("--every", which_.every, "Of these, one of so many: a sample")
        ->check(CLI::Range(1, 1024))
        ->type_name("N");
    app->add_option("--threads", which_.threads, "Kernels compiled at a time; 0 is one per core")
        ->check(CLI::Range(0, 1024))
        ->type_name("N");
    app->add_option("--json", json_, "Write the results as JSON; - is standard output")
        ->type_name("FILE");
  }

  int execute() override {
    JsonOutput json(json_);
    const bool shown = !json.on_standard_output();
    if (shown) {
      fmt::print("{:40} {:8} {:>8} {:>10} {:>7}\n", "kernel", "arch", "seconds", "registers",
                 "spills");
    }
    const auto start = std::chrono::steady_clock::now();
    Json rows = Json::array();
    int faults = 0;
    for (const std::string& arch : archs_) {
      which_.arch = arch;
      faults += compile_kernels(which_, [&](const CompiledKernel& kernel) {
        if (shown) show(kernel);
        rows.push_back({{"name", kernel.name},
                        {"arch", kernel.arch},
                        {"seconds", kernel.seconds},
                        {"cached", kernel.cached},
                        {"registers", kernel.registers},
                        {"spill_bytes", kernel.spill_bytes},
                        {"fault", kernel.fault}});
      });
    }
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (shown)
      fmt::print("{} kernels in {:.1f} s, {} faults\n", rows.size(), spent.count(), faults);
    json.write({{"command", "compile"}, {"kernels", rows}, {"seconds", spent.count()}});
    return faults == 0 ? exit_good : exit_check_failed;
  }

 private:
  static void show(const CompiledKernel& kernel) {
    if (!kernel.fault.empty()) {
      fmt::print("{:40} {:8} {}\n", kernel.name, kernel.arch, one_line(kernel.fault));
    } else {
      fmt::print("{:40} {:8} {:>8} {:>10} {:>7}\n", kernel.name, kernel.arch,
                 kernel.cached ? "cached" : fmt::format("{:.2f}", kernel.seconds), kernel.registers,
                 kernel.spill_bytes);
    }
    std::fflush(stdout);
  }

  CompileKernels which_;
  std::vector<std::string> archs_ = {"sm_90a"};
  std::string json_;
};

}  // namespace

std::unique_ptr<Command> add_compile(CLI::App& program) {
  return std::make_unique<CompileCommand>(
      program.add_subcommand("compile", "Compile GPU kernels into the cache, ahead of their use"));
}

}  // namespace fovea::tools
