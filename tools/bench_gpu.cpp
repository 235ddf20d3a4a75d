#include "tools/bench_gpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <thread>

#include "fovea/device.hpp"
#include "tools/console.h"
#include "tools/measure.h"
#include "tools/visible.h"
#include "tools/workload.h"

namespace fovea::tools {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds pause{5};  // before a launch of a chip at rest
constexpr int default_rounds = 9;
constexpr double heating_ms = 250.0;  // brings the chip to the temperature and clock of steady work
constexpr double busy_ms = 60.0;      // of each candidate, a round of a chip that is kept busy
constexpr int busy_rounds = 3;

// A problem in device memory, with the inputs that the host's has, and its gradients.
class DeviceWorkload {
 public:
  DeviceWorkload(const Problem& problem, const Gradients& gradients, Device device)
      : problem_(problem), gradients_(gradients) {
    problem_.memory = Memory::device;
    for (Tensor* tensor :
         {&problem_.q, &problem_.k, &problem_.v, &problem_.out, &problem_.lse, &problem_.sink,
          &problem_.alibi, &problem_.q_scale, &problem_.key_scale, &gradients_.dout, &gradients_.dq,
          &gradients_.dk, &gradients_.dv, &gradients_.dsink}) {
      if (!tensor->present) continue;
      const auto [n0, n1, n2, n3] = tensor->shape;
      tensor->data =
          upload(device, tensor->data,
                 static_cast<std::size_t>(n0 * n1 * n2 * n3) * size_bytes(tensor->dtype));
    }
    for (std::span<const std::int32_t>* list : {&problem_.seqused_k, &problem_.block_table}) {
      if (list->empty()) continue;
      const std::byte* const there = upload(device, list->data(), list->size_bytes());
      *list = {reinterpret_cast<const std::int32_t*>(there), list->size()};
    }
  }

  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] const Gradients& gradients() const { return gradients_; }

 private:
  std::byte* upload(Device device, const void* data, std::size_t bytes) {
    DeviceMemory& memory = memories_.emplace_back(device, bytes);
    memory.upload(data, bytes);
    return memory.data();
  }

  Problem problem_;
  Gradients gradients_;
  std::vector<DeviceMemory> memories_;
};

// Times of one candidate, a round each.
struct Times {
  std::vector<double> cool_ms, warm_ms;
};

// Launches of several candidates, which have run once to warm up. They take turns, since the chip
// warms up by 5 % within seconds: measured one after the other, the first would win. Device time:
// no launch waits for the host.
std::vector<Times> time_in_turns(const std::vector<std::function<void()>>& launches, Device device,
                                 int rounds) {
  std::vector<Times> times(launches.size());
  DeviceTimer timer(device);
  const auto repeat = [&](std::size_t which, double ms) {
    const int count =
        std::max(1, static_cast<int>(ms / std::max(median(times[which].cool_ms), 1e-3)));
    for (int i = 0; i < count; ++i) launches[which]();
    return count;
  };
  for (int round = 0; round < (rounds > 0 ? rounds : default_rounds); ++round) {
    for (std::size_t i = 0; i < launches.size(); ++i) {
      std::this_thread::sleep_for(pause);
      timer.give_head_start();
      timer.start();
      launches[i]();
      timer.stop();
      times[i].cool_ms.push_back(timer.milliseconds());
    }
  }
  for (int round = 0; round < busy_rounds; ++round) {
    for (std::size_t i = 0; i < launches.size(); ++i) {
      repeat(i, round == 0 && i == 0 ? heating_ms : busy_ms / 3);
      timer.start();
      const int count = repeat(i, busy_ms);
      timer.stop();
      times[i].warm_ms.push_back(timer.milliseconds() / count);
    }
  }
  return times;
}

// How many times as fast as `base`, in the median round.
double speed_ratio(const std::vector<double>& base, const std::vector<double>& ms) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ms.size(); ++i) ratios.push_back(base[i] / ms[i]);
  return median(ratios);
}

// One line of a table: a problem with a configuration and a softmax policy.
struct Line {
  std::string shape;
  std::string problem;
  std::string configuration;
  std::string remark;
  std::optional<double> model_ms;
  double flops = 0.0;
  double cool_ms = 0.0;
  double warm_ms = 0.0;
  double cool_ratio = 1.0;  // to the case's first line, what a plan takes
  double warm_ratio = 1.0;
  Statistics statistics;
  std::string fault;  // why it did not run
};

class Bench {
 public:
  explicit Bench(const GpuBenchOptions& options) : options_(options) {}

  // Gradients of what the forward pass left in device memory.
  void run_backward(const BenchCase& entry) {
    Workload workload = make_workload(entry.shape, entry.options, true);
    fill_inputs(workload, 1);
    add_gradients(workload, 1);
    const DeviceWorkload there = begin(entry, workload.problem, workload.gradients);
    attention(there.problem(), entry.options.run);
    std::vector<std::string> list{entry.options.run.configuration};
    if (options_.what == GpuBench::sweep)
      list = backward_configurations(there.problem(), there.gradients(), info_.arch);
    list.insert(list.end(), options_.others.begin(), options_.others.end());
    Options options = entry.options.run;
    for (const std::string& configuration : list) {
      Line line = line_of(entry, backward_flop_count(workload.problem));
      line.problem += " backward";
      line.configuration = options.configuration = configuration;
      line.remark = list.size() > 1 && configuration == list.front() ? "chosen" : "";
      add(line, options, [&](const Options& own, Statistics&) -> std::function<void()> {
        const BackwardPlan chosen = plan_backward(there.problem(), there.gradients(), own);
        return [chosen, &there] { chosen.run(there.problem(), there.gradients(), {}); };
      });
    }
    time_case(options.device);
  }

  void run(const BenchCase& entry) {
    Workload workload = make_workload(entry.shape, entry.options);
    fill_inputs(workload, 1);
    std::optional<QuantizedPages> pages = pages_of(entry, workload);
    if (pages) pages->fill();
    const DeviceWorkload there = begin(entry, pages ? pages->problem() : workload.problem, {});
    const auto candidate = [&](const std::string& configuration, const std::string& remark,
                               Softmax softmax, std::optional<double> model_ms) {
      Line line = line_of(entry, flop_count(workload.problem));
      Options options = entry.options.run;
      line.configuration = options.configuration = configuration;
      line.remark = remark;
      line.model_ms = model_ms;
      options.softmax = softmax;
      add(line, options, [&](const Options& own, Statistics& statistics) -> std::function<void()> {
        const Plan chosen = plan(there.problem(), own);
        chosen.run(there.problem(), {}, &statistics);
        return [chosen, &there] { chosen.run(there.problem(), {}); };
      });
    };
    const Options& options = entry.options.run;
    switch (options_.what) {
      case GpuBench::choice:
        candidate(options.configuration, "", options.softmax, std::nullopt);
        break;
      case GpuBench::sweep: {
        std::vector<Configuration> list = configurations(there.problem(), options, info_.name);
        std::stable_partition(list.begin(), list.end(),
                              [](const Configuration& c) { return c.chosen; });
        for (const Configuration& c : list) {
          if (!c.refusal.empty()) continue;
          candidate(c.text, c.chosen ? "chosen" : c.binding, options.softmax, c.model_ms);
        }
        break;
      }
      case GpuBench::ablate: {
        const std::vector<std::string> list = ablations(there.problem(), options, info_.name);
        for (const std::string& c : list) {
          candidate(c, c == list.front() ? "as chosen" : difference(list.front(), c),
                    options.softmax, std::nullopt);
        }
        for (const Softmax policy : {Softmax::online, Softmax::conditional, Softmax::sum_guard}) {
          candidate("", fmt::format("softmax {}", name(policy)), policy, std::nullopt);
        }
        break;
      }
    }
    for (const std::string& other : options_.others) {
      candidate(other, "", options.softmax, std::nullopt);
    }
    time_case(options.device);
  }

  void print() const {
    if (options_.quiet) return;
    fmt::print(
        "{}, {} multiprocessors; device time; cool: 5 ms before each launch; warm: back to "
        "back; x: speed over the first line's, both in turns\n",
        info_.name, info_.multiprocessors);
    Table table({"b,hq,hkv,sq,sk,d", "problem", "cool ms", "TFLOPS", "of peak", "x", "warm ms",
                 "TFLOPS", "x", "model ms", "repaired", "retaken", "", "configuration"});
    for (const Line& line : lines_) {
      if (!line.fault.empty()) {
        table.add({line.shape, line.problem, "", "", "", "", "", "", "", "", "", "", line.remark,
                   line.fault.substr(0, 100)});
        continue;
      }
      table.add({line.shape, line.problem, fmt::format("{:.4f}", line.cool_ms),
                 fmt::format("{:.0f}", tflops(line, line.cool_ms)),
                 info_.peak_tflops_16bit > 0.0
                     ? fmt::format("{:.1f} %",
                                   100.0 * tflops(line, line.cool_ms) / info_.peak_tflops_16bit)
                     : "",
                 fmt::format("{:.3f}", line.cool_ratio), fmt::format("{:.4f}", line.warm_ms),
                 fmt::format("{:.0f}", tflops(line, line.warm_ms)),
                 fmt::format("{:.3f}", line.warm_ratio),
                 line.model_ms ? fmt::format("{:.4f}", *line.model_ms) : "",
                 fmt::format("{}", line.statistics.repairs),
                 fmt::format("{}", line.statistics.recomputed_tiles), line.remark,
                 line.configuration});
    }
    fmt::print("{}", table.text());
  }

  [[nodiscard]] Json json() const {
    Json rows = Json::array();
    for (const Line& line : lines_) {
      Json row = {{"shape", line.shape},
                  {"problem", line.problem},
                  {"configuration", line.configuration},
                  {"remark", line.remark}};
      if (line.fault.empty()) {
        row["cool_ms"] = line.cool_ms;
        row["warm_ms"] = line.warm_ms;
        row["cool_tflops"] = tflops(line, line.cool_ms);
        row["warm_tflops"] = tflops(line, line.warm_ms);
        row["cool_ratio"] = line.cool_ratio;
        row["warm_ratio"] = line.warm_ratio;
        row["repairs"] = line.statistics.repairs;
        row["recomputed_tiles"] = line.statistics.recomputed_tiles;
      } else {
        row["fault"] = line.fault;
      }
      if (line.model_ms) row["model_ms"] = *line.model_ms;
      rows.push_back(row);
    }
    return {{"command", "bench"},
            {"version", version()},
            {"gpu", info_.name},
            {"peak_tflops", info_.peak_tflops_16bit},
            {"results", rows}};
  }

 private:
  using Prepare = std::function<std::function<void()>(const Options&, Statistics&)>;

  static double tflops(const Line& line, double ms) { return line.flops / ms * 1e-9; }

  DeviceWorkload begin(const BenchCase& entry, const Problem& problem, const Gradients& gradients) {
    const Device device = entry.options.run.device;
    if (info_.name.empty()) info_ = device_info(device);
    candidates_.clear();
    launches_.clear();
    return {problem, gradients, device};
  }

  static Line line_of(const BenchCase& entry, double flops) {
    Line line;
    line.shape = shape_string(entry.shape);
    line.problem = describe(entry.options);
    line.flops = flops;
    return line;
  }

  // A candidate of the case: compiled, and run once.
  void add(Line line, Options options, const Prepare& prepare) {
    options.own_workspace = true;
    try {
      const std::function<void()> launch = prepare(options, line.statistics);
      launch();
      launches_.push_back(launch);
      candidates_.push_back(lines_.size());
    } catch (const Error&) {
      throw;
    } catch (const std::exception& fault) {  // one that does not compile without spilling
      line.fault = fault.what();
    }
    lines_.push_back(std::move(line));
  }

  // Of the candidates added since begin(), whose memory is still there.
  void time_case(Device device) {
    synchronize(device);
    const std::vector<Times> times = time_in_turns(launches_, device, options_.rounds);
    for (std::size_t i = 0; i < times.size(); ++i) {
      Line& line = lines_[candidates_[i]];
      line.cool_ms = median(times[i].cool_ms);
      line.warm_ms = median(times[i].warm_ms);
      line.cool_ratio = speed_ratio(times.front().cool_ms, times[i].cool_ms);
      line.warm_ratio = speed_ratio(times.front().warm_ms, times[i].warm_ms);
    }
    launches_.clear();
  }

  // The field in which two lists of "name=value" differ.
  static std::string difference(const std::string& from, const std::string& to) {
    const auto at = std::ranges::mismatch(from, to);
    const auto position = static_cast<std::size_t>(at.in2 - to.begin());
    const std::size_t begin = to.rfind(',', position) + 1;  // 0 when there is none before
    return to.substr(begin, to.find(',', position) - begin);
  }

  GpuBenchOptions options_;
  DeviceInfo info_;
  std::vector<Line> lines_;
  // Of the case that is being measured: launches, and the lines they belong to.
  std::vector<std::function<void()>> launches_;
  std::vector<std::size_t> candidates_;
};

}  // namespace

std::optional<QuantizedPages> pages_of(const BenchCase& entry, Workload& workload) {
  if (!entry.beforehand) return std::nullopt;
  return std::make_optional<QuantizedPages>(workload, *entry.beforehand,
                                            entry.options.quantized_page_size, 1);
}

Json bench_gpu(const std::vector<BenchCase>& cases, const GpuBenchOptions& options) {
  Progress progress(static_cast<std::int64_t>(cases.size()), options.quiet);
  Bench bench(options);
  for (const BenchCase& entry : cases) {
    progress.step(shape_string(entry.shape) + " " + describe(entry.options));
    if (options.backward) {
      bench.run_backward(entry);
    } else {
      bench.run(entry);
    }
  }
  progress.clear();
  bench.print();
  return bench.json();
}

}  // namespace fovea::tools
