// fovea explain: the configuration that a problem would get, and why.
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "fovea/device.hpp"
#include "tools/json_output.h"
#include "tools/program.h"
#include "tools/quantized_pages.h"
#include "tools/workload.h"

namespace fovea::tools {
namespace {

class ExplainCommand : public Command {
 public:
  explicit ExplainCommand(CLI::App* app) : Command(app) {
    add_shape_option(*app, shape_);
    app->add_option("--gpu", gpu_, "Ask for a chip that need not be here: h100, h200, b200 or b300")
        ->type_name("CHIP");
    add_problem_options(*app, options_);
    add_quantized_pages_option(*app, options_);
  }

  int execute() override {
    JsonOutput json(options_.json);
    options_.dtype = options_.dtype.value_or(gpu_.empty() ? DType::f32 : DType::bf16);
    Workload workload = make_workload(shape_, options_);
    std::optional<QuantizedPages> pages;
    if (options_.quantized_page_size > 0) {
      pages.emplace(workload, options_.run.eight_bits->quantization, options_.quantized_page_size,
                    0);
    }
    const Problem& problem = pages ? pages->problem() : workload.problem;
    if (!gpu_.empty()) {
      const std::string text = explain(problem, options_.run, gpu_);
      if (!options_.quiet && !json.on_standard_output()) fmt::print("{}", text);
      json.write({{"command", "explain"},
                  {"shape", shape_string(shape_)},
                  {"problem", describe(options_)},
                  {"gpu", gpu_},
                  {"explanation", text}});
      return exit_good;
    }
    const Plan chosen = plan(problem, options_.run);
    const std::string text = chosen.explain();
    if (!options_.quiet && !json.on_standard_output()) {
      fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
    }
    json.write({{"command", "explain"},
                {"shape", shape_string(shape_)},
                {"problem", describe(options_)},
                {"device", fovea::name(chosen.device())},
                {"workspace_bytes", chosen.workspace_bytes()},
                {"explanation", text}});
    return exit_good;
  }

 private:
  ProblemOptions options_;
  Shape shape_;
  std::string gpu_;
};

}  // namespace

std::unique_ptr<Command> add_explain(CLI::App& program) {
  return std::make_unique<ExplainCommand>(
      program.add_subcommand("explain", "Say which configuration a problem gets, and why"));
}

}  // namespace fovea::tools
