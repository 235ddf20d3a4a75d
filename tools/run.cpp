// fovea run: attention on tensors from files.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <optional>
#include <utility>

#include "tools/accuracy.h"
#include "tools/console.h"
#include "tools/cpu_peak.h"
#include "tools/json_output.h"
#include "tools/measure.h"
#include "tools/npy.h"
#include "tools/program.h"
#include "tools/tensor_files.h"
#include "tools/text.h"
#include "tools/visible.h"

namespace fovea::tools {
namespace {

constexpr std::int64_t max_repeat = 1'000'000;

struct Outcome {
  std::string input;
  std::vector<std::int64_t> shape_q, shape_k;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  Timing timing;
  double flops_per_second = 0.0;
  std::optional<Distance> distance;
  bool passed = true;
};

ElementType element_type(DType dtype) {
  switch (dtype) {
    case DType::bf16: return ElementType::bf16;
    case DType::f16: return ElementType::f16;
    case DType::e4m3: return ElementType::e4m3;
    case DType::e5m2: return ElementType::e5m2;
    default: return ElementType::f32;
  }
}

// The memory of a result, which has no gaps.
std::span<const std::byte> bytes_of(const Tensor& tensor) {
  const auto [n0, n1, n2, n3] = tensor.shape;
  return {static_cast<const std::byte*>(tensor.data),
          static_cast<std::size_t>(n0 * n1 * n2 * n3) * size_bytes(tensor.dtype)};
}

void write_npy(OutputFile& file, const Tensor& tensor, std::span<const std::int64_t> shape) {
  const std::string header = npy_header(element_type(tensor.dtype), shape);
  file.write({std::as_bytes(std::span(header)), bytes_of(tensor)});
}

class RunCommand : public Command {
 public:
  explicit RunCommand(CLI::App* app) : Command(app) {
    app->add_option("--input", inputs_, ".safetensors files with tensors q, k and v")
        ->type_name("FILE");
    for (const char* const tensor : {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"}) {
      std::string flag = fmt::format("--{}", tensor);
      for (char& c : flag) c = c == '_' ? '-' : c;
      app->add_option(flag, arrays_.emplace_back(tensor, std::string()).second,
                      fmt::format("{} in a .npy file", tensor))
          ->type_name("FILE");
    }
    app->add_option("--out", out_, "Where to write the result, a .npy file")->type_name("FILE");
    app->add_option("--lse", lse_, "Where to write the log-sum-exp, a .npy file")
        ->type_name("FILE");
    add_text_option(
        *app, "--out-dtype",
        [this](const std::string& text) { out_dtype_ = parse_dtype("--out-dtype", text); },
        "Precision of the result; by default f32")
        ->type_name("TYPE");
    app->add_option("--expected", expected_,
                    "Compare with this tensor of the input, or this .npy file")
        ->type_name("NAME|FILE");
    add_text_option(
        *app, "--tolerance",
        [this](const std::string& text) { tolerance_ = parse_real("--tolerance", text); },
        "Fail with status 1 when the error exceeds T")
        ->type_name("T");
    add_text_option(
        *app, "--repeat",
        [this](const std::string& text) {
          repeat_ = static_cast<int>(parse_integer("--repeat", text, 1, max_repeat));
        },
        "Time N runs after one to warm up, and print their median")
        ->type_name("N");
    app->add_flag("--peak", peak_, "Measure the CPU's peak, and print the share of it")
        ->disable_flag_override();
    add_problem_options(*app, options_);
  }

  int execute() override;

 private:
  void check_usage() const;
  [[nodiscard]] TensorFiles load(std::size_t index) const;
  Outcome run_one(const TensorFiles& files, OutputFile* out, OutputFile* lse) const;
  void compare(const TensorFiles& files, const Workload& workload, Outcome& outcome) const;
  void print(const std::vector<Outcome>& outcomes, const CpuPeaks& peaks) const;
  [[nodiscard]] Json to_json(const std::vector<Outcome>& outcomes, const CpuPeaks& peaks) const;

  ProblemOptions options_;
  std::vector<std::string> inputs_;
  std::list<std::pair<std::string, std::string>> arrays_;  // name, path; CLI11 keeps references
  std::string out_, lse_, expected_;
  DType out_dtype_ = DType::f32;
  std::optional<float> tolerance_;
  int repeat_ = 0;
  bool peak_ = false;
};

void RunCommand::check_usage() const {
  int given = 0;
  for (const auto& [tensor, path] : arrays_) {
    if (!path.empty() && (tensor == "q" || tensor == "k" || tensor == "v")) ++given;
  }
  if (inputs_.empty() && given != 3) {
    throw Error("run needs --input FILE, or all of --q, --k and --v");
  }
  if (!inputs_.empty() && given != 0) {
    throw Error("--input and --q, --k, --v exclude each other; give one of both");
  }
  if (inputs_.size() > 1 && (!out_.empty() || !lse_.empty())) {
    throw Error(fmt::format("--out and --lse take the result of one --input, {} are given",
                            inputs_.size()));
  }
  if (!out_.empty() && out_ == lse_) throw Error("--out and --lse name the same file");
  if (tolerance_ && expected_.empty()) {
    throw Error("--tolerance needs --expected, the values to compare with");
  }
  if (tolerance_ && !(*tolerance_ >= 0.0f)) {
    throw Error(fmt::format("--tolerance is {}; a number from 0 on is needed", *tolerance_));
  }
}

TensorFiles RunCommand::load(std::size_t index) const {
  TensorFiles files;
  if (!inputs_.empty()) files.add_safetensors(inputs_[index]);
  for (const auto& [tensor, path] : arrays_) {
    if (!path.empty()) files.add_npy(tensor, path);
  }
  return files;
}

void RunCommand::compare(const TensorFiles& files, const Workload& workload,
                         Outcome& outcome) const {
  TensorFiles other;
  const bool in_file = expected_.ends_with(".npy");
  if (in_file) other.add_npy("expected", expected_);
  const Array& expected = in_file ? other.get("expected") : files.get(expected_);
  const std::vector<std::int64_t> shape = out_shape(files, workload);
  if (expected.shape != shape) {
    throw Error(fmt::format("{} has shape {}, the result {}", printable(expected_, 80),
                            shape_text(expected.shape), shape_text(shape)));
  }
  Array result{element_type(workload.problem.out.dtype), shape, bytes_of(workload.problem.out)};
  outcome.distance = distance(to_doubles("out", result), to_doubles(expected_, expected));
  outcome.passed = outcome.distance->different == 0 &&
                   (!tolerance_ || outcome.distance->max_error <= *tolerance_);
}

Outcome RunCommand::run_one(const TensorFiles& files, OutputFile* out, OutputFile* lse) const {
  const Workload workload = load_workload(files, options_, out_dtype_, lse != nullptr);
  const Problem& problem = workload.problem;
  const Plan chosen = plan(problem, options_.run);
  std::vector<std::byte> workspace(chosen.workspace_bytes());
  Outcome outcome;
  outcome.shape_q = files.get("q").shape;
  outcome.shape_k = files.get("k").shape;
  outcome.dtype = problem.q.dtype;
  outcome.device = chosen.device();
  if (repeat_ > 0) {
    outcome.timing = measure(repeat_, [&](int) { chosen.run(problem, workspace); });
  } else {
    outcome.timing = measure_once([&] { chosen.run(problem, workspace); });
  }
  outcome.flops_per_second = flop_count(problem) / outcome.timing.median_seconds;
  if (!expected_.empty()) compare(files, workload, outcome);
  if (out != nullptr) write_npy(*out, problem.out, out_shape(files, workload));
  if (lse != nullptr) write_npy(*lse, problem.lse, lse_shape(files, workload));
  if (out != nullptr) out->commit();
  if (lse != nullptr) lse->commit();
  return outcome;
}

void RunCommand::print(const std::vector<Outcome>& outcomes, const CpuPeaks& peaks) const {
  std::vector<std::string> header = {"input", "q", "k", "dtype", "time", "GFLOP/s"};
  if (peak_) header.emplace_back("of peak");
  if (!expected_.empty()) header.emplace_back("max error");
  Table table(header);
  for (const Outcome& o : outcomes) {
    std::vector<std::string> row = {one_line(o.input),
                                    shape_text(o.shape_q),
                                    shape_text(o.shape_k),
                                    std::string(fovea::name(o.dtype)),
                                    duration_text(o.timing.median_seconds),
                                    fmt::format("{:.1f}", o.flops_per_second * 1e-9)};
    if (peak_)
      row.push_back(fmt::format("{:.1f} %", 100.0 * o.flops_per_second / peaks.of(o.dtype)));
    if (o.distance) {
      row.push_back(o.distance->different > 0 ? fmt::format("{} not finite", o.distance->different)
                                              : fmt::format("{:.2e}", o.distance->max_error));
    }
    table.add(row);
  }
  if (outcomes.size() > 1 || peak_) {
    fmt::print("{}", table.text());
    if (peak_) {
      fmt::print("peak measured: {:.1f} GFLOP/s fp32{}\n", peaks.f32 * 1e-9,
                 peaks.bf16 > 0.0 ? fmt::format(", {:.1f} bf16", peaks.bf16 * 1e-9) : "");
    }
    return;
  }
  const Outcome& o = outcomes.front();
  std::string error;
  if (o.distance && o.distance->different > 0) {
    error = fmt::format(", {} values differ from {} in being finite", o.distance->different,
                        one_line(expected_));
  } else if (o.distance) {
    error =
        fmt::format(", max error {:.2e} against {}", o.distance->max_error, one_line(expected_));
  }
  fmt::print("q {} k {} {} on {}: {}, {:.1f} GFLOP/s{}\n", shape_text(o.shape_q),
             shape_text(o.shape_k), fovea::name(o.dtype), fovea::name(o.device),
             duration_text(o.timing.median_seconds), o.flops_per_second * 1e-9, error);
}

Json RunCommand::to_json(const std::vector<Outcome>& outcomes, const CpuPeaks& peaks) const {
  Json results = Json::array();
  for (const Outcome& o : outcomes) {
    Json result = {{"input", o.input},
                   {"shape_q", o.shape_q},
                   {"shape_k", o.shape_k},
                   {"dtype", fovea::name(o.dtype)},
                   {"device", fovea::name(o.device)},
                   {"runs", o.timing.runs},
                   {"median_seconds", o.timing.median_seconds},
                   {"gflops", o.flops_per_second * 1e-9}};
    if (peak_) result["share_of_peak"] = o.flops_per_second / peaks.of(o.dtype);
    if (o.distance) {
      result["max_error"] = o.distance->max_error;
      result["cosine"] = o.distance->cosine;
      result["different_specials"] = o.distance->different;
      result["passed"] = o.passed;
    }
    results.push_back(result);
  }
  Json document = {{"command", "run"},
                   {"problem", describe(options_)},
                   {"threads", thread_count(options_.run.threads)},
                   {"results", results}};
  if (peak_) {
    document["peak_gflops"] = {{"f32", peaks.f32 * 1e-9}, {"bf16", peaks.bf16 * 1e-9}};
  }
  return document;
}

int RunCommand::execute() {
  check_usage();
  JsonOutput json(options_.json);
  std::optional<OutputFile> out;
  std::optional<OutputFile> lse;
  if (!out_.empty()) out.emplace(out_);
  if (!lse_.empty()) lse.emplace(lse_);
  const std::size_t count = std::max<std::size_t>(inputs_.size(), 1);
  Progress progress(static_cast<std::int64_t>(count) + (peak_ ? 1 : 0), options_.quiet);
  std::vector<Outcome> outcomes;
  for (std::size_t i = 0; i < count; ++i) {
    progress.step(inputs_.empty() ? "run" : one_line(inputs_[i]));
    outcomes.push_back(run_one(load(i), out ? &*out : nullptr, lse ? &*lse : nullptr));
    outcomes.back().input = inputs_.empty() ? "--q --k --v" : inputs_[i];
  }
  CpuPeaks peaks;
  if (peak_) {
    progress.step("peak of the CPU");
    peaks = measure_peaks(options_.run.threads);
  }
  progress.clear();
  if (!options_.quiet && !json.on_standard_output()) print(outcomes, peaks);
  json.write(to_json(outcomes, peaks));
  const bool passed =
      std::all_of(outcomes.begin(), outcomes.end(), [](const Outcome& o) { return o.passed; });
  if (!passed) {
    fmt::print(stderr, "fovea: the result differs from {} by more than the tolerance\n",
               one_line(expected_));
  }
  return passed ? exit_good : exit_check_failed;
}

}  // namespace

std::unique_ptr<Command> add_run(CLI::App& program) {
  return std::make_unique<RunCommand>(
      program.add_subcommand("run", "Compute attention on tensors from files"));
}

}  // namespace fovea::tools
