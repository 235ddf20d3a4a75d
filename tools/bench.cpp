// fovea bench: random input, timed, beside what this machine can do at most.
//
// Method: q, k and v are standard normal. A case runs once to warm up and then N times, or as often
// as fits in about a second; the median counts. Decoding reads its keys and values once, so they
// come from a ring of copies too large for the caches, and its yardstick is the measured read
// bandwidth. The peaks are measured in the same process, on the same number of threads, before the
// cases.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "tools/bench_gpu.h"
#include "tools/console.h"
#include "tools/cpu_peak.h"
#include "tools/json_output.h"
#include "tools/measure.h"
#include "tools/program.h"
#include "tools/rotary.h"
#include "tools/text.h"
#include "tools/visible.h"
#include "tools/workload.h"

namespace fovea::tools {
namespace {

constexpr std::int64_t max_repeat = 1'000'000;
constexpr std::int64_t decode_rows = 8;  // at most so many queries: reading K and V binds
constexpr std::int64_t max_copies = 64;

using Case = BenchCase;

struct Result {
  Case input;
  Timing timing;
  double flops_per_second = 0.0;
  double share_of_peak = 0.0;
  double kv_bytes_per_second = 0.0;  // decoding only
  double share_of_bandwidth = 0.0;
};

// K and V of a problem and copies of them, together larger than the caches when they have to be.
class KeyRing {
 public:
  KeyRing(const Problem& problem, bool cold) {
    const Tensor& k = problem.k;
    const Tensor& v = problem.v;
    bytes_ = bytes_of(k) + bytes_of(v);
    // A pool may have pages that no sequence reads.
    if (const std::size_t pages = problem.block_table.size(); pages > 0) {
      bytes_ *= static_cast<double>(pages) / static_cast<double>(k.shape[0]);
    }
    std::int64_t copies = 1;
    if (cold && bytes_ > 0.0) {
      copies =
          std::clamp<std::int64_t>(std::llround(std::ceil(cold_bytes() / bytes_)), 1, max_copies);
    }
    entries_.push_back({k, v});
    for (std::int64_t i = 1; i < copies; ++i) entries_.push_back({copy(k), copy(v)});
  }

  // The workload's problem with the i-th copy, starting over at the end.
  [[nodiscard]] Problem with(const Problem& problem, int i) const {
    Problem result = problem;
    const Entry& entry = entries_[static_cast<std::size_t>(i) % entries_.size()];
    result.k = entry.k;
    result.v = entry.v;
    return result;
  }

  // That a run reads.
  [[nodiscard]] double bytes() const { return bytes_; }

 private:
  struct Entry {
    Tensor k, v;
  };

  static double bytes_of(const Tensor& tensor) {
    return static_cast<double>(tensor.shape[0] * tensor.shape[1] * tensor.shape[2] *
                               tensor.shape[3]) *
           static_cast<double>(size_bytes(tensor.dtype));
  }

  Tensor copy(const Tensor& tensor) {
    const auto bytes = static_cast<std::size_t>(bytes_of(tensor));
    const Buffer& buffer = buffers_.emplace_back(bytes);
    std::memcpy(buffer.data(), tensor.data, bytes);
    Tensor result = tensor;
    result.data = buffer.data();
    return result;
  }

  std::vector<Buffer> buffers_;
  std::vector<Entry> entries_;
  double bytes_ = 0.0;
};

class BenchCommand : public Command {
 public:
  explicit BenchCommand(CLI::App* app);
  int execute() override;

 private:
  [[nodiscard]] std::vector<Case> cases() const;
  void add_case(std::vector<Case>& list, const Shape& shape, DType dtype, bool causal) const;
  void add_cpu_grid(std::vector<Case>& list, DType dtype) const;
  void add_paper_grid(std::vector<Case>& list, DType dtype) const;
  void add_decode_grid(std::vector<Case>& list, DType dtype) const;
  void add_own_grid(std::vector<Case>& list, DType dtype) const;
  [[nodiscard]] Result run_case(const Case& input, const CpuPeaks& peaks, double bandwidth) const;
  [[nodiscard]] Result run_backward_case(const Case& input, const CpuPeaks& peaks) const;
  // Decoding has no backward pass.
  [[nodiscard]] bool is_decode(const Shape& shape) const {
    return !backward_ && shape.seqlen_q <= decode_rows;
  }
  void print(const std::vector<Result>& results, const CpuPeaks& peaks, double bandwidth) const;
  [[nodiscard]] Json to_json(const std::vector<Result>& results, const CpuPeaks& peaks,
                             double bandwidth) const;
  // Cases that have a causal twin have it unless the command line decides on the mask.
  [[nodiscard]] std::vector<bool> masks() const {
    const bool decided =
        options_.causal || options_.window_left != -1 || options_.window_right != -1;
    return decided ? std::vector<bool>{options_.causal} : std::vector<bool>{false, true};
  }

  [[nodiscard]] bool is_gpu() const {
    return options_.run.device != Device::automatic && options_.run.device != Device::cpu;
  }
  void execute_on_gpu(JsonOutput& json) const;

  ProblemOptions options_;
  std::string grid_;
  std::vector<std::int64_t> head_dims_, seqlens_, queries_;
  std::int64_t batch_ = 1;
  std::vector<std::int64_t> heads_;
  int repeat_ = 0;
  bool sweep_ = false;
  bool ablate_ = false;
  bool backward_ = false;
  std::vector<std::string> beside_;
};

BenchCommand::BenchCommand(CLI::App* app) : Command(app) {
  const auto text = [app](const char* flag, const char* type, const char* help,
                          const std::function<void(const std::string&)>& read) {
    add_text_option(*app, flag, read, help)->type_name(type);
  };
  text("--grid", "GRID", "paper, decode or cpu (the default, unless --d or --seqs is given)",
       [this](const std::string& t) {
         if (t != "paper" && t != "decode" && t != "cpu") {
           throw Error(
               fmt::format("--grid is '{}'; paper, decode or cpu is needed", printable(t, 40)));
         }
         grid_ = t;
       });
  text("--d", "D,...", "Head dimensions",
       [this](const std::string& t) { head_dims_ = parse_extents("--d", t); });
  text("--seqs", "S,...", "Sequence lengths",
       [this](const std::string& t) { seqlens_ = parse_extents("--seqs", t); });
  text("--queries", "N,...", "Queries of a sequence, without --grid; by default as many as keys",
       [this](const std::string& t) { queries_ = parse_extents("--queries", t); });
  text("--heads", "HQ[,HKV]", "Heads of q, and of k and v, without --grid; by default 8",
       [this](const std::string& t) {
         heads_ = parse_extents("--heads", t);
         if (heads_.size() > 2) {
           throw Error(fmt::format("--heads is '{}'; HQ or HQ,HKV is needed", printable(t, 40)));
         }
       });
  text("--batch", "B", "Batch, without --grid; by default 1",
       [this](const std::string& t) { batch_ = parse_integer("--batch", t, 1, 1 << 20); });
  text("--repeat", "N",
       "Runs of each case; by default as many as fit in a second, at least 3; on a GPU 9",
       [this](const std::string& t) {
         repeat_ = static_cast<int>(parse_integer("--repeat", t, 1, max_repeat));
       });
  app->add_flag("--backward", backward_, "Time the backward pass, its FLOPs those of five products")
      ->disable_flag_override();
  app->add_flag("--sweep", sweep_, "On a GPU: every legal configuration, beside the model's time")
      ->disable_flag_override();
  app->add_flag("--ablate", ablate_,
                "On a GPU: each switch of the schedule turned over, and every softmax policy")
      ->disable_flag_override();
  text("--beside", "NAME=VALUE,.../...",
       "On a GPU: configurations, separated by slashes, to be timed beside the plan's choice",
       [this](const std::string& t) {
         for (const std::string_view part : split(t, '/')) beside_.emplace_back(part);
       });
  add_problem_options(*app, options_);
  add_rotary_options(*app, options_);
  add_quantized_pages_option(*app, options_);
}

void BenchCommand::add_case(std::vector<Case>& list, const Shape& shape, DType dtype,
                            bool causal) const {
  Case entry{shape, options_, std::nullopt};
  entry.options.dtype = dtype;
  entry.options.causal = causal;
  list.push_back(entry);
}

// The shapes of docs/performance.md: prefill, a head dimension and a number of queries that fit no
// tile, and decoding.
void BenchCommand::add_cpu_grid(std::vector<Case>& list, DType dtype) const {
  for (const bool causal : masks()) add_case(list, {1, 8, 8, 2048, 2048, 128, 128}, dtype, causal);
  const bool causal = options_.causal;
  for (const std::int64_t d : {64, 72, 80})
    add_case(list, {1, 8, 8, 2048, 2048, d, d}, dtype, causal);
  for (const std::int64_t rows : {63, 64})
    add_case(list, {1, 8, 8, rows, 2048, 128, 128}, dtype, causal);
  if (!backward_) add_case(list, {1, 32, 8, 1, 8192, 128, 128}, dtype, causal);
}

// FlashAttention's benchmark: hidden size 2048, 16384 tokens in all.
void BenchCommand::add_paper_grid(std::vector<Case>& list, DType dtype) const {
  const auto dims = head_dims_.empty() ? std::vector<std::int64_t>{64, 128, 256} : head_dims_;
  const auto lengths =
      seqlens_.empty() ? std::vector<std::int64_t>{512, 1024, 2048, 4096, 8192, 16384} : seqlens_;
  for (const std::int64_t d : dims) {
    for (const bool causal : masks()) {
      for (const std::int64_t s : lengths) {
        const std::int64_t heads = std::max<std::int64_t>(1, 2048 / d);
        const std::int64_t batch = std::max<std::int64_t>(1, 16384 / s);
        add_case(list, {batch, heads, heads, s, s, d, d}, dtype, causal);
      }
    }
  }
}

void BenchCommand::add_decode_grid(std::vector<Case>& list, DType dtype) const {
  const auto dims = head_dims_.empty() ? std::vector<std::int64_t>{128} : head_dims_;
  const auto lengths = seqlens_.empty() ? std::vector<std::int64_t>{1024, 8192, 65536} : seqlens_;
  for (const std::int64_t d : dims) {
    for (const std::int64_t s : lengths) {
      add_case(list, {1, 32, 8, 1, s, d, d}, dtype, options_.causal);
    }
  }
}

void BenchCommand::add_own_grid(std::vector<Case>& list, DType dtype) const {
  const auto dims = head_dims_.empty() ? std::vector<std::int64_t>{128} : head_dims_;
  const auto lengths = seqlens_.empty() ? std::vector<std::int64_t>{2048} : seqlens_;
  const std::int64_t heads_q = heads_.empty() ? 8 : heads_.front();
  const std::int64_t heads_kv = heads_.empty() ? 8 : heads_.back();
  for (const std::int64_t d : dims) {
    for (const std::int64_t s : lengths) {
      for (const std::int64_t rows : queries_.empty() ? std::vector{s} : queries_) {
        add_case(list, {batch_, heads_q, heads_kv, rows, s, d, d}, dtype, options_.causal);
      }
    }
  }
}

std::vector<Case> BenchCommand::cases() const {
  const bool sized = !heads_.empty() || batch_ != 1 || !queries_.empty();
  const bool own = !head_dims_.empty() || !seqlens_.empty() || sized;
  const std::string grid = !grid_.empty() ? grid_ : own ? "" : is_gpu() ? "paper" : "cpu";
  if (grid == "cpu" && own) {
    throw Error(
        "--grid cpu has fixed shapes; leave it out to use --d, --seqs, --queries, --heads or "
        "--batch");
  }
  if (!grid.empty() && sized) {
    throw Error(
        fmt::format("--grid {} sets batch, heads and queries; leave out --batch, --heads and "
                    "--queries",
                    grid));
  }
  std::vector<DType> dtypes = {options_.dtype.value_or(is_gpu() ? DType::bf16 : DType::f32)};
  if (grid == "cpu" && !options_.dtype) dtypes.push_back(DType::bf16);
  std::vector<Case> list;
  for (const DType dtype : dtypes) {
    if (grid == "cpu") add_cpu_grid(list, dtype);
    if (grid == "paper") add_paper_grid(list, dtype);
    if (grid == "decode") add_decode_grid(list, dtype);
    if (grid.empty()) add_own_grid(list, dtype);
  }
  return list;
}

// How each case is quantised: in every run, or, into pages, beforehand. Tables of a rotary
// embedding have the case's own length, and must outlive it.
std::vector<RotaryTables> add_quantization(std::vector<Case>& list) {
  std::vector<RotaryTables> tables;
  tables.reserve(list.size());
  for (Case& entry : list) {
    const RotaryTables& made =
        tables.emplace_back(entry.options, entry.shape.seqlen_k, entry.shape.head_dim);
    if (entry.options.quantized_page_size > 0) {
      entry.beforehand = made.on_host(entry.options.run.eight_bits->quantization);
    } else {
      entry.options.run = made.on_device(entry.options.run);
    }
  }
  return tables;
}

Result BenchCommand::run_case(const Case& input, const CpuPeaks& peaks, double bandwidth) const {
  Workload workload = make_workload(input.shape, input.options);
  std::optional<QuantizedPages> pages = pages_of(input, workload);
  const Problem& problem = pages ? pages->problem() : workload.problem;
  const Plan chosen = plan(problem, input.options.run);
  fill_inputs(workload, 1);
  if (pages) pages->fill();
  const bool decode = is_decode(input.shape);
  const KeyRing ring(problem, decode);
  std::vector<std::byte> workspace(chosen.workspace_bytes());
  Result result;
  result.input = input;
  result.timing = measure(repeat_, [&](int i) { chosen.run(ring.with(problem, i), workspace); });
  const double seconds = result.timing.median_seconds;
  result.flops_per_second = flop_count(workload.problem) / seconds;
  result.share_of_peak = result.flops_per_second / peaks.of(*input.options.dtype);
  if (decode) {
    result.kv_bytes_per_second = ring.bytes() / seconds;
    result.share_of_bandwidth = result.kv_bytes_per_second / bandwidth;
  }
  return result;
}

Result BenchCommand::run_backward_case(const Case& input, const CpuPeaks& peaks) const {
  Workload workload = make_workload(input.shape, input.options, true);
  fill_inputs(workload, 1);
  add_gradients(workload, 1);
  const Problem& problem = workload.problem;
  attention(problem, input.options.run);
  const BackwardPlan chosen = plan_backward(problem, workload.gradients, input.options.run);
  std::vector<std::byte> workspace(chosen.workspace_bytes());
  Result result;
  result.input = input;
  result.timing =
      measure(repeat_, [&](int) { chosen.run(problem, workload.gradients, workspace); });
  result.flops_per_second = backward_flop_count(problem) / result.timing.median_seconds;
  result.share_of_peak = result.flops_per_second / peaks.f32;
  return result;
}

void BenchCommand::print(const std::vector<Result>& results, const CpuPeaks& peaks,
                         double bandwidth) const {
  fmt::print("{} threads; measured peaks: {:.1f} GFLOP/s fp32{}{}\n",
             thread_count(options_.run.threads), peaks.f32 * 1e-9,
             peaks.bf16 > 0.0 ? fmt::format(", {:.1f} bf16", peaks.bf16 * 1e-9) : "",
             bandwidth > 0.0 ? fmt::format(", {:.1f} GB/s read", bandwidth * 1e-9) : "");
  const bool decode = bandwidth > 0.0;
  std::vector<std::string> header = {"b,hq,hkv,sq,sk,d", "problem", "time", "GFLOP/s", "of peak"};
  if (decode) header.insert(header.end(), {"KV GB/s", "of read"});
  Table table(header);
  for (const Result& r : results) {
    std::vector<std::string> row = {shape_string(r.input.shape), describe(r.input.options),
                                    duration_text(r.timing.median_seconds),
                                    fmt::format("{:.1f}", r.flops_per_second * 1e-9),
                                    fmt::format("{:.1f} %", 100.0 * r.share_of_peak)};
    if (decode) {
      const bool bound = r.kv_bytes_per_second > 0.0;
      row.push_back(bound ? fmt::format("{:.1f}", r.kv_bytes_per_second * 1e-9) : "");
      row.push_back(bound ? fmt::format("{:.1f} %", 100.0 * r.share_of_bandwidth) : "");
    }
    table.add(row);
  }
  fmt::print("{}", table.text());
}

Json BenchCommand::to_json(const std::vector<Result>& results, const CpuPeaks& peaks,
                           double bandwidth) const {
  Json rows = Json::array();
  for (const Result& r : results) {
    Json row = {{"shape", shape_string(r.input.shape)},
                {"problem", describe(r.input.options)},
                {"runs", r.timing.runs},
                {"median_seconds", r.timing.median_seconds},
                {"fastest_seconds", r.timing.fastest_seconds},
                {"gflops", r.flops_per_second * 1e-9},
                {"share_of_peak", r.share_of_peak}};
    if (r.kv_bytes_per_second > 0.0) {
      row["kv_gb_per_second"] = r.kv_bytes_per_second * 1e-9;
      row["share_of_read_bandwidth"] = r.share_of_bandwidth;
    }
    rows.push_back(row);
  }
  return {{"command", "bench"},
          {"version", version()},
          {"pass", backward_ ? "backward" : "forward"},
          {"instruction_set", cpu_instruction_set()},
          {"threads", thread_count(options_.run.threads)},
          {"peak_gflops", {{"f32", peaks.f32 * 1e-9}, {"bf16", peaks.bf16 * 1e-9}}},
          {"read_gb_per_second", bandwidth * 1e-9},
          {"results", rows}};
}

void BenchCommand::execute_on_gpu(JsonOutput& json) const {
  if (options_.run.device != Device::cuda) {
    throw Error(
        fmt::format("bench times a chip, and {} is emulated; use --device cuda, or explain "
                    "--gpu for what the model expects",
                    fovea::name(options_.run.device)));
  }
  if (backward_ && ablate_) {
    throw Error("--ablate is for the forward pass; with --backward, --sweep times every schedule");
  }
  if (sweep_ && ablate_) throw Error("--sweep and --ablate are two tables; give one of them");
  GpuBenchOptions options;
  options.what = sweep_ ? GpuBench::sweep : ablate_ ? GpuBench::ablate : GpuBench::choice;
  options.others = beside_;
  options.backward = backward_;
  options.rounds = repeat_;
  options.quiet = options_.quiet || json.on_standard_output();
  std::vector<Case> list = cases();
  const std::vector<RotaryTables> rotary = add_quantization(list);
  json.write(bench_gpu(list, options));
}

int BenchCommand::execute() {
  JsonOutput json(options_.json);
  if (backward_ && options_.run.eight_bits) {
    throw Error(
        "--backward times gradients of q, k and v as given; leave out --quantize, --rotary and "
        "--quantized-pages");
  }
  if (is_gpu()) {
    execute_on_gpu(json);
    return exit_good;
  }
  if (sweep_ || ablate_ || !beside_.empty()) {
    throw Error("--sweep, --ablate and --beside measure a GPU; add --device cuda");
  }
  std::vector<Case> list = cases();
  const std::vector<RotaryTables> rotary = add_quantization(list);
  // What is wrong with a case is said before the first one runs.
  for (const Case& entry : list) {
    Workload workload = make_workload(entry.shape, entry.options);
    const std::optional<QuantizedPages> pages = pages_of(entry, workload);
    static_cast<void>(plan(pages ? pages->problem() : workload.problem, entry.options.run));
  }
  const bool decode = std::any_of(list.begin(), list.end(),
                                  [this](const Case& entry) { return is_decode(entry.shape); });
  Progress progress(static_cast<std::int64_t>(list.size()) + 1, options_.quiet);
  progress.step("peaks of the CPU");
  const CpuPeaks peaks = measure_peaks(options_.run.threads);
  const double bandwidth = decode ? measure_read_bandwidth(options_.run.threads) : 0.0;
  std::vector<Result> results;
  for (const Case& entry : list) {
    progress.step(shape_string(entry.shape) + " " + describe(entry.options));
    results.push_back(backward_ ? run_backward_case(entry, peaks)
                                : run_case(entry, peaks, bandwidth));
  }
  progress.clear();
  if (!options_.quiet && !json.on_standard_output()) print(results, peaks, bandwidth);
  json.write(to_json(results, peaks, bandwidth));
  return exit_good;
}

}  // namespace

std::unique_ptr<Command> add_bench(CLI::App& program) {
  return std::make_unique<BenchCommand>(
      program.add_subcommand("bench", "Time random input beside this machine's measured peak"));
}

}  // namespace fovea::tools
