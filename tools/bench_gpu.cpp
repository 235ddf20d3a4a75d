#include "tools/bench_gpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "fovea/device.hpp"
#include "tools/console.h"
#include "tools/measure.h"
#include "tools/visible.h"
#include "tools/workload.h"

namespace fovea::tools {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds pause{5};   // before a launch of a chip at rest
constexpr double busy_ms = 250.0;  // a chip that is kept busy is measured over so long
constexpr int default_repeat = 7;

struct Times {
  double cool_ms = 0.0;
  double warm_ms = 0.0;
  Statistics statistics;
};

// A problem in device memory, with the inputs of the host's workload, and its gradients.
class DeviceWorkload {
 public:
  DeviceWorkload(const Workload& workload, Device device)
      : problem_(workload.problem), gradients_(workload.gradients) {
    problem_.memory = Memory::device;
    for (Tensor* tensor : {&problem_.q, &problem_.k, &problem_.v, &problem_.out, &problem_.lse,
                           &problem_.sink, &problem_.alibi, &gradients_.dout, &gradients_.dq,
                           &gradients_.dk, &gradients_.dv, &gradients_.dsink}) {
      if (!tensor->present) continue;
      const auto [n0, n1, n2, n3] = tensor->shape;
      const std::size_t bytes =
          static_cast<std::size_t>(n0 * n1 * n2 * n3) * size_bytes(tensor->dtype);
      DeviceMemory& memory = memories_.emplace_back(device, bytes);
      memory.upload(tensor->data, bytes);
      tensor->data = memory.data();
    }
  }

  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] const Gradients& gradients() const { return gradients_; }

 private:
  Problem problem_;
  Gradients gradients_;
  std::vector<DeviceMemory> memories_;
};

// Of a launch, which has run once to warm up.
Times time_launches(const std::function<void()>& launch, Device device, int repeat) {
  Times times;
  DeviceTimer timer(device);
  std::vector<double> cool;
  for (int i = 0; i < (repeat > 0 ? repeat : default_repeat); ++i) {
    std::this_thread::sleep_for(pause);
    timer.start();
    launch();
    timer.stop();
    cool.push_back(timer.milliseconds());
  }
  times.cool_ms = median(cool);
  // The first half brings the chip to the temperature and clock that the second is measured at.
  const int runs = std::max(1, static_cast<int>(busy_ms / std::max(times.cool_ms, 1e-3)));
  for (int i = 0; i < runs; ++i) launch();
  timer.start();
  for (int i = 0; i < runs; ++i) launch();
  timer.stop();
  times.warm_ms = timer.milliseconds() / runs;
  return times;
}

Times time_plan(const Plan& chosen, const Problem& problem, Device device, int repeat) {
  Statistics statistics;
  chosen.run(problem, {}, &statistics);  // warms up and waits
  Times times = time_launches([&] { chosen.run(problem, {}); }, device, repeat);
  times.statistics = statistics;
  return times;
}

Times time_backward(const BackwardPlan& chosen, const DeviceWorkload& there, Device device,
                    int repeat) {
  const auto launch = [&] { chosen.run(there.problem(), there.gradients(), {}); };
  launch();
  return time_launches(launch, device, repeat);
}

// One line of a table: a problem with a configuration and a softmax policy.
struct Line {
  std::string shape;
  std::string problem;
  std::string configuration;
  std::string remark;
  std::optional<double> model_ms;
  double flops = 0.0;
  Times times;
  std::string fault = {};  // why it did not run
};

class Bench {
 public:
  Bench(int repeat, bool quiet) : repeat_(repeat), quiet_(quiet) {}

  // Gradients of what the forward pass left in device memory.
  void run_backward(const BenchCase& entry, GpuBench what) {
    Workload workload = make_workload(entry.shape, entry.options, true);
    fill_inputs(workload, 1);
    add_gradients(workload, 1);
    const Device device = entry.options.run.device;
    const DeviceWorkload there(workload, device);
    if (info_.name.empty()) info_ = device_info(device);
    attention(there.problem(), entry.options.run);
    std::vector<std::string> list{entry.options.run.configuration};
    if (what == GpuBench::sweep)
      list = backward_configurations(there.problem(), there.gradients(), info_.arch);
    for (const std::string& configuration : list) {
      Line line{shape_string(entry.shape),
                describe(entry.options) + " backward",
                configuration,
                list.size() > 1 && configuration == list.front() ? "chosen" : "",
                std::nullopt,
                backward_flop_count(workload.problem),
                {}};
      Options options = entry.options.run;
      options.own_workspace = true;
      options.configuration = configuration;
      try {
        line.times = time_backward(plan_backward(there.problem(), there.gradients(), options),
                                   there, device, repeat_);
      } catch (const Error&) {
        throw;
      } catch (const std::exception& fault) {  // one that does not compile without spilling
        line.fault = fault.what();
      }
      lines_.push_back(line);
    }
  }

  void run(const BenchCase& entry, GpuBench what) {
    Workload workload = make_workload(entry.shape, entry.options);
    fill_inputs(workload, 1);
    const Device device = entry.options.run.device;
    const DeviceWorkload there(workload, device);
    if (info_.name.empty()) info_ = device_info(device);
    const double flops = flop_count(workload.problem);
    const auto add = [&](const std::string& configuration, const std::string& remark,
                         Softmax softmax, std::optional<double> model_ms) {
      Line line{shape_string(entry.shape),
                describe(entry.options),
                configuration,
                remark,
                model_ms,
                flops,
                {}};
      Options options = entry.options.run;
      options.own_workspace = true;
      options.configuration = configuration;
      options.softmax = softmax;
      try {
        line.times = time_plan(plan(there.problem(), options), there.problem(), device, repeat_);
      } catch (const Error&) {
        throw;
      } catch (const std::exception& fault) {  // one that does not compile without spilling
        line.fault = fault.what();
      }
      lines_.push_back(line);
    };
    const Softmax softmax = entry.options.run.softmax;
    switch (what) {
      case GpuBench::choice: add("", "", softmax, std::nullopt); break;
      case GpuBench::sweep:
        for (const Configuration& c :
             configurations(there.problem(), entry.options.run, info_.name)) {
          if (c.refusal.empty()) add(c.text, c.chosen ? "chosen" : c.binding, softmax, c.model_ms);
        }
        break;
      case GpuBench::ablate: {
        const std::vector<std::string> list =
            ablations(there.problem(), entry.options.run, info_.name);
        for (const std::string& c : list) {
          add(c, c == list.front() ? "as chosen" : difference(list.front(), c), softmax,
              std::nullopt);
        }
        for (const Softmax policy : {Softmax::online, Softmax::conditional, Softmax::sum_guard}) {
          add("", fmt::format("softmax {}", name(policy)), policy, std::nullopt);
        }
        break;
      }
    }
  }

  void print() const {
    if (quiet_) return;
    fmt::print("{}, {} multiprocessors; cool: 5 ms before each launch; warm: back to back\n",
               info_.name, info_.multiprocessors);
    Table table({"b,hq,hkv,sq,sk,d", "problem", "cool ms", "TFLOPS", "of peak", "warm ms", "TFLOPS",
                 "model ms", "repaired", "retaken", "configuration", ""});
    for (const Line& line : lines_) {
      if (!line.fault.empty()) {
        table.add({line.shape, line.problem, "", "", "", "", "", "", "", "", line.configuration,
                   line.fault.substr(0, 60)});
        continue;
      }
      table.add({line.shape, line.problem, fmt::format("{:.4f}", line.times.cool_ms),
                 fmt::format("{:.0f}", tflops(line, line.times.cool_ms)),
                 info_.peak_tflops_16bit > 0.0
                     ? fmt::format("{:.1f} %", 100.0 * tflops(line, line.times.cool_ms) /
                                                   info_.peak_tflops_16bit)
                     : "",
                 fmt::format("{:.4f}", line.times.warm_ms),
                 fmt::format("{:.0f}", tflops(line, line.times.warm_ms)),
                 line.model_ms ? fmt::format("{:.4f}", *line.model_ms) : "",
                 fmt::format("{}", line.times.statistics.repairs),
                 fmt::format("{}", line.times.statistics.recomputed_tiles), line.configuration,
                 line.remark});
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
        row["cool_ms"] = line.times.cool_ms;
        row["warm_ms"] = line.times.warm_ms;
        row["cool_tflops"] = tflops(line, line.times.cool_ms);
        row["warm_tflops"] = tflops(line, line.times.warm_ms);
        row["repairs"] = line.times.statistics.repairs;
        row["recomputed_tiles"] = line.times.statistics.recomputed_tiles;
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
  static double tflops(const Line& line, double ms) { return line.flops / ms * 1e-9; }

  // The field in which two lists of "name=value" differ.
  static std::string difference(const std::string& from, const std::string& to) {
    const auto at = std::ranges::mismatch(from, to);
    const auto position = static_cast<std::size_t>(at.in2 - to.begin());
    const std::size_t begin = to.rfind(',', position) + 1;  // 0 when there is none before
    return to.substr(begin, to.find(',', position) - begin);
  }

  int repeat_;
  bool quiet_;
  DeviceInfo info_;
  std::vector<Line> lines_;
};

}  // namespace

Json bench_gpu(const std::vector<BenchCase>& cases, GpuBench what, bool backward, int repeat,
               bool quiet) {
  Progress progress(static_cast<std::int64_t>(cases.size()), quiet);
  Bench bench(repeat, quiet);
  for (const BenchCase& entry : cases) {
    progress.step(shape_string(entry.shape) + " " + describe(entry.options));
    if (backward) {
      bench.run_backward(entry, what);
    } else {
      bench.run(entry, what);
    }
  }
  progress.clear();
  bench.print();
  return bench.json();
}

}  // namespace fovea::tools
