#include "tests/gpu/backward_bench.h"

#include <cmath>
#include <cstdio>
#include <utility>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "runtime/backward_gpu.h"
#include "runtime/source.h"
#include "tests/support.h"

namespace fovea::tests {

using core::BwdConfig;
using core::int32;
using core::int64;
using core::uint16;
using runtime::Device;
using runtime::DeviceAddress;
using runtime::DeviceBuffer;
using runtime::EmulationOptions;

void WatchedDevice::launch(runtime::Kernel& kernel, const runtime::LaunchConfig& config,
                           std::span<const std::byte> parameters, runtime::Stream stream) {
  device_->launch(kernel, config, parameters, stream);
  nlohmann::json report = nlohmann::json::parse(device_->report(true));
  if (report["total"]["tensor_flops_f16"].get<core::uint64>() > 0) largest = std::move(report);
}

BackwardInputs::BackwardInputs(const BackwardShape& s) {
  test::Random random(7);
  const auto fill = [&](core::View& view, std::vector<uint16>& values, int64 rows, int32 width) {
    for (int64 i = 0; i < rows * s.heads * width; ++i) {
      values.push_back(core::float_to_bf16(static_cast<float>(random.normal())));
    }
    view = {values.data(), core::DType::bf16, {rows * s.heads * width, s.heads * width, width, 1}};
  };
  core::Problem& p = problem;
  p.batch = 1;
  p.heads_q = p.heads_kv = s.heads;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_k = s.seqlen_k;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.window = s.window;
  p.deterministic = true;
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  fill(p.q, q, s.seqlen_q, s.head_dim);
  fill(p.k, k, s.seqlen_k, s.head_dim);
  fill(p.v, v, s.seqlen_k, s.head_dim_v);
  fill(gradients.dout, dout, s.seqlen_q, s.head_dim_v);
  p.out = gradients.dout;
  p.lse = {nullptr, core::DType::f32, {s.heads * s.seqlen_q, s.seqlen_q, 1, 0}};
  gradients.dq = p.q;
  gradients.dk = p.k;
  gradients.dv = p.v;
  gradients.rows_k = s.seqlen_k;
  const cpu::ReferenceResult forward = cpu::reference_forward(p);
  for (const double x : forward.out) out.push_back(core::float_to_bf16(static_cast<float>(x)));
  lse.assign(forward.lse.begin(), forward.lse.end());
}

GradientBits run_backward(Device& device, const BackwardInputs& inputs, const BwdConfig& config) {
  std::vector<DeviceBuffer> buffers;
  const auto upload = [&](core::View& view, const auto& values) {
    buffers.emplace_back(device, values.size() * sizeof(values[0]));
    device.copy_to_device(buffers.back().address(), values.data(),
                          values.size() * sizeof(values[0]));
    view.data = reinterpret_cast<void*>(buffers.back().address());
  };
  runtime::BackwardCall call;
  call.problem = inputs.problem;
  call.gradients = inputs.gradients;
  upload(call.problem.q, inputs.q);
  upload(call.problem.k, inputs.k);
  upload(call.problem.v, inputs.v);
  upload(call.problem.out, inputs.out);
  upload(call.problem.lse, inputs.lse);
  upload(call.gradients.dout, inputs.dout);
  upload(call.gradients.dq, inputs.q);
  upload(call.gradients.dk, inputs.k);
  upload(call.gradients.dv, inputs.v);
  const std::size_t bytes = runtime::backward_workspace_bytes(call, config, device.properties());
  const DeviceBuffer workspace(device, bytes);
  call.workspace = workspace.address();
  runtime::BackwardKernels(device, config, call.gradients).run(call);
  GradientBits result{inputs.q, inputs.k, inputs.v};
  const core::View* views[3] = {&call.gradients.dq, &call.gradients.dk, &call.gradients.dv};
  for (std::size_t i = 0; i < 3; ++i) {
    device.copy_to_host(result[i].data(), reinterpret_cast<DeviceAddress>(views[i]->data),
                        result[i].size() * 2);
  }
  device.synchronize();
  return result;
}

BackwardFaultBench::BackwardFaultBench(std::string chip, const BwdConfig& config,
                                       std::span<const BackwardRun> runs)
    : chip_(std::move(chip)),
      config_(config),
      entry_(runtime::kernel_name(runtime::backward_text(config, runtime::BackwardPart::main))) {
  for (const BackwardRun& run : runs) {
    Run& of = runs_.emplace_back(Run{BackwardInputs(run.shape), run.sm_count, {}});
    of.inputs.problem.deterministic = config.deterministic;
    WatchedDevice device(chip_, {.sm_count = run.sm_count});
    device.change = [&](std::string image) {
      if (image.find(entry_ + "(") != std::string::npos) text_ = image;
      return image;
    };
    of.right = run_backward(device, of.inputs, config);
  }
  require_silence();
}

runtime::EmulationOptions BackwardFaultBench::options(const Run& run, Order order) const {
  return {
      .order = order, .seed = 2, .ordered_sums = config_.deterministic, .sm_count = run.sm_count};
}

// What is said of the kernel as it is would be said of every broken one, too.
void BackwardFaultBench::require_silence() const {
  for (const Run& run : runs_) {
    for (const Order order : orders) {
      WatchedDevice device(chip_, options(run, order));
      if (run_backward(device, run.inputs, config_) != run.right) {
        throw std::runtime_error("the gradients depend on the order of asynchronous work");
      }
    }
  }
}

// Runs a text in place of the main kernel's; true where the emulator has something to say.
bool BackwardFaultBench::objects(const Run& run, const std::string& text, Order order,
                                 GradientBits& result) const {
  WatchedDevice device(chip_, options(run, order));
  device.change = [&](std::string image) {
    return image.find(entry_ + "(") != std::string::npos ? text : image;
  };
  try {
    result = run_backward(device, run.inputs, config_);
  } catch (const runtime::DeviceError&) {
    return true;
  }
  return false;
}

FaultOutcome BackwardFaultBench::outcome_of(const Mutant& mutant) const {
  GradientBits result;
  bool wrong = false;
  bool reached = false;
  for (const Run& run : runs_) {
    for (const Order order : orders) {
      if (objects(run, mutant.ptx, order, result)) return FaultOutcome::reported;
      wrong = wrong || result != run.right;
    }
    reached = reached || objects(run, mutant.trapped, Order::lazy, result);
  }
  if (wrong) return FaultOutcome::wrong;
  return reached ? FaultOutcome::unnoticed : FaultOutcome::unreached;
}

FaultTable BackwardFaultBench::break_kernel(std::size_t stride,
                                            std::span<const Explained> harmless) const {
  const auto mutants = mutants_of(text_, entry_);
  FaultTable table;
  for (std::size_t i = stride / 3; i < mutants.size(); i += stride) {
    const FaultOutcome outcome = outcome_of(mutants[i]);
    const char* reason = explanation(mutants[i], harmless);
    table.add(mutants[i].kind, outcome, reason != nullptr);
    if (outcome == FaultOutcome::reported) continue;
    std::printf("%s: line %d [%s] %s%s%s\n", name(outcome), mutants[i].line,
                mutants[i].kind.c_str(), mutants[i].where.c_str(), reason != nullptr ? ": " : "",
                reason != nullptr ? reason : "");
  }
  std::printf("%zu in all; of these\n%s", mutants.size(), table.text().c_str());
  return table;
}

}  // namespace fovea::tests
