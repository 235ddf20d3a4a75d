// fovea check: random input, computed and compared with the definition in fp64.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "fovea/fp8.hpp"
#include "tools/accuracy.h"
#include "tools/console.h"
#include "tools/cpu_peak.h"
#include "tools/json_output.h"
#include "tools/program.h"
#include "tools/quantized_pages.h"
#include "tools/rotary.h"
#include "tools/text.h"
#include "tools/workload.h"

namespace fovea::tools {
namespace {

constexpr std::int64_t max_page_size = 1 << 20;

// Fills a result with NaN, so that an element that is never written fails the check.
void poison(const Tensor& tensor) {
  const std::int64_t count = tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * tensor.shape[3];
  if (count > 0) {
    std::memset(tensor.data, 0xff, static_cast<std::size_t>(count) * size_bytes(tensor.dtype));
  }
}

Json to_json(const Verdict& verdict) {
  return {{"max_error", verdict.found.max_error},
          {"naive_error", verdict.naive.max_error},
          {"bound", verdict.bound},
          {"cosine", verdict.found.cosine},
          {"largest", verdict.found.largest},
          {"different_specials", verdict.found.different},
          {"passed", verdict.passed}};
}

std::string line(std::string_view what, const Verdict& verdict) {
  std::string text = fmt::format(
      "{:<5} max error {:.2e}, naive in the same precision {:.2e}, bound {:.2e}, "
      "cosine {:.9f}\n",
      what, verdict.found.max_error, verdict.naive.max_error, verdict.bound, verdict.found.cosine);
  if (verdict.found.different > 0) {
    text += fmt::format(
        "{:<5} {} values are infinite or NaN where the definition is not, or the "
        "reverse\n",
        "", verdict.found.different);
  }
  return text;
}

class CheckCommand : public Command {
 public:
  explicit CheckCommand(CLI::App* app) : Command(app) {
    add_shape_option(*app, shape_);
    add_text_option(
        *app, "--seed", [this](const std::string& text) { seed_ = parse_unsigned("--seed", text); },
        "Seed of the random input")
        ->type_name("N");
    app->add_flag("--ragged", packing_.ragged,
                  "Packed sequences of random lengths, up to sq and sk (cu_seqlens)")
        ->disable_flag_override();
    add_text_option(
        *app, "--page-size",
        [this](const std::string& text) {
          packing_.page_size = parse_integer("--page-size", text, 1, max_page_size);
        },
        "K and V in pages of N rows, in random order")
        ->type_name("N");
    app->add_flag("--backward", backward_, "Check the gradients, too")->disable_flag_override();
    add_problem_options(*app, options_);
    add_rotary_options(*app, options_);
    add_quantized_pages_option(*app, options_);
  }

  int execute() override {
    JsonOutput json(options_.json);
    options_.dtype = options_.dtype.value_or(DType::f32);
    if (backward_ && options_.run.eight_bits) {
      throw Error(
          "--backward checks gradients of q, k and v as given; leave out --quantize, --rotary and "
          "--quantized-pages");
    }
    Workload workload = make_workload(shape_, options_, true, packing_, seed_);
    const Problem& problem = workload.problem;
    if (backward_) add_gradients(workload, seed_);
    // A table's row holds whole pages.
    const std::int64_t positions =
        std::max(shape_.seqlen_k, problem.block_table_columns * packing_.page_size);
    const RotaryTables rotary(options_, positions, shape_.head_dim);
    std::optional<QuantizedPages> pages;
    if (options_.quantized_page_size > 0) {
      pages.emplace(workload, rotary.on_host(options_.run.eight_bits->quantization),
                    options_.quantized_page_size, seed_);
    }
    // What is quantised beforehand is turned then.
    const Plan chosen = pages ? plan(pages->problem(), options_.run)
                              : plan(problem, rotary.on_device(options_.run));
    if (backward_) static_cast<void>(plan_backward(problem, workload.gradients, options_.run));
    Progress progress(backward_ ? 7 : 4, options_.quiet);
    progress.step("random input");
    fill_inputs(workload, seed_);
    if (pages) pages->fill();
    poison(problem.out);
    poison(problem.lse);
    progress.step("fovea");
    std::vector<std::byte> workspace(chosen.workspace_bytes());
    Statistics statistics;
    chosen.run(pages ? pages->problem() : problem, workspace, &statistics);
    progress.step("definition in fp64");
    const Reference exact = exact_of(problem, rotary);
    progress.step("naive in the same precision");
    const Reference naive = naive_of(problem, rotary);
    const std::vector<Named> gradients =
        backward_ ? check_gradients(workload, progress) : std::vector<Named>{};
    progress.clear();

    const DType precision =
        options_.run.eight_bits ? options_.run.eight_bits->quantization.dtype : problem.q.dtype;
    const Verdict out = judge_out(values_of(problem.out), naive.out, exact.out, precision);
    const Verdict lse = judge_lse(values_of(problem.lse), naive.lse, exact.lse);
    bool passed = out.passed && lse.passed;
    std::string gradient_lines;
    Json gradient_json = Json::object();
    for (const auto& [what, verdict] : gradients) {
      passed = passed && verdict.passed;
      gradient_lines += line(what, verdict);
      gradient_json[what] = to_json(verdict);
    }
    if (!options_.quiet && !json.on_standard_output()) {
      fmt::print("{} {} seed {} on {}\n{}{}{}{}\n", shape_string(shape_), description(), seed_,
                 fovea::name(chosen.device()), line("out", out), line("LSE", lse), gradient_lines,
                 passed ? "PASS" : "FAIL");
    }
    json.write({{"command", "check"},
                {"shape", shape_string(shape_)},
                {"problem", description()},
                {"seed", seed_},
                {"device", fovea::name(chosen.device())},
                {"out", to_json(out)},
                {"lse", to_json(lse)},
                {"gradients", gradient_json},
                {"statistics",
                 {{"tiles_full", statistics.tiles_full},
                  {"tiles_partial", statistics.tiles_partial},
                  {"rescales", statistics.rescales},
                  {"repairs", statistics.repairs},
                  {"recomputed_tiles", statistics.recomputed_tiles},
                  {"splits", statistics.splits}}},
                {"passed", passed}});
    return passed ? exit_good : exit_check_failed;
  }

 private:
  using Named = std::pair<std::string, Verdict>;

  [[nodiscard]] std::vector<Named> check_gradients(const Workload& workload,
                                                   Progress& progress) const {
    const Problem& problem = workload.problem;
    const Gradients& g = workload.gradients;
    for (const Tensor* tensor : {&g.dq, &g.dk, &g.dv, &g.dsink}) {
      if (tensor->present) poison(*tensor);
    }
    progress.step("fovea's gradients");
    attention_backward(problem, g, options_.run);
    progress.step("gradients by the definition in fp64");
    const int threads = options_.run.threads;
    const ReferenceGradients exact = reference_backward(problem, g, Precision::fp64, threads);
    progress.step("naive gradients in the same precision");
    const ReferenceGradients naive = reference_backward(problem, g, Precision::same, threads);
    std::vector<Named> verdicts;
    const auto judge = [&](const char* what, const Tensor& found, const std::vector<double>& same,
                           const std::vector<double>& truth) {
      if (!found.present) return;
      verdicts.emplace_back(what, judge_gradient(values_of(found), same, truth, problem.q.dtype));
    };
    judge("dq", g.dq, naive.dq, exact.dq);
    judge("dk", g.dk, naive.dk, exact.dk);
    judge("dv", g.dv, naive.dv, exact.dv);
    judge("dsink", g.dsink, naive.dsink, exact.dsink);
    return verdicts;
  }

  [[nodiscard]] Reference exact_of(const Problem& problem, const RotaryTables& rotary) const {
    const int threads = options_.run.threads;
    if (options_.rotary_columns == 0) return reference(problem, Precision::fp64, threads);
    const Turned of = turned(problem, rotary.on_host({}).rotary);
    return reference(of.problem, Precision::fp64, threads);
  }

  // What the precision costs: a run without a fused kernel, or, where 8 bits are asked for, the
  // element-by-element twin of the kernel that computes so.
  [[nodiscard]] Reference naive_of(const Problem& problem, const RotaryTables& rotary) const {
    if (!options_.run.eight_bits) {
      return reference(problem, Precision::same, options_.run.threads);
    }
    Fp8Arithmetic arithmetic;
    arithmetic.quantization = rotary.on_host(options_.run.eight_bits->quantization);
    arithmetic.promote_keys = options_.run.eight_bits->promote_keys;
    return reference_fp8(problem, arithmetic, options_.run.threads);
  }

  [[nodiscard]] std::string description() const {
    std::string text = describe(options_);
    if (packing_.ragged) text += " ragged";
    if (packing_.page_size > 0) text += fmt::format(" page size {}", packing_.page_size);
    return text;
  }

  ProblemOptions options_;
  Shape shape_;
  Packing packing_;
  std::uint64_t seed_ = 0;
  bool backward_ = false;
};

}  // namespace

std::unique_ptr<Command> add_check(CLI::App& program) {
  return std::make_unique<CheckCommand>(program.add_subcommand(
      "check", "Compare a result on random input with the definition in fp64"));
}

}  // namespace fovea::tools
