// fovea trace: the timeline of one CTA of a kernel.
#include <fmt/format.h>

#include <optional>
#include <span>
#include <string>

#include "fovea/kernels.hpp"
#include "tools/file.h"
#include "tools/program.h"
#include "tools/workload.h"

namespace fovea::tools {
namespace {

class TraceCommand : public Command {
 public:
  explicit TraceCommand(CLI::App* app) : Command(app) {
    add_shape_option(*app, shape_);
    app->add_option("--out", out_, "The timeline, for ui.perfetto.dev; - is standard output")
        ->type_name("FILE")
        ->required();
    app->add_option("--cta", cta_, "Which CTA of the launch")
        ->check(CLI::Range(0, 1 << 30))
        ->type_name("N")
        ->capture_default_str();
    app->add_flag("--backward", backward_, "Of the backward kernel")->disable_flag_override();
    add_problem_options(*app, options_);
  }

  int execute() override {
    std::optional<OutputFile> file;
    if (out_ != "-") file.emplace(out_);
    options_.dtype = options_.dtype.value_or(DType::bf16);
    Workload workload = make_workload(shape_, options_, backward_);
    fill_inputs(workload, 1);
    const std::string text =
        backward_ ? trace_gradients(workload) : trace(workload.problem, options_.run, cta_);
    if (file) {
      file->write({std::as_bytes(std::span(text))});
      file->commit();
    } else {
      fmt::print("{}", text);
    }
    return exit_good;
  }

 private:
  // out and lse come from the CPU.
  std::string trace_gradients(Workload& workload) const {
    Options forward;
    forward.threads = options_.run.threads;
    forward.device = Device::cpu;
    attention(workload.problem, forward);
    add_gradients(workload, 2);
    return trace_backward(workload.problem, workload.gradients, options_.run, cta_);
  }

  ProblemOptions options_;
  Shape shape_;
  std::string out_;
  int cta_ = 0;
  bool backward_ = false;
};

}  // namespace

std::unique_ptr<Command> add_trace(CLI::App& program) {
  return std::make_unique<TraceCommand>(
      program.add_subcommand("trace", "Write the timeline of one CTA of a GPU kernel"));
}

}  // namespace fovea::tools
