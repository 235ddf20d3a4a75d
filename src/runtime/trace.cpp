// fovea::trace() and trace_backward(): kernels of tracing configurations, run on copies of a
// problem.
#include <algorithm>
#include <deque>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "fovea/fovea.hpp"
#include "fovea/kernels.hpp"
#include "model/timeline.h"
#include "runtime/backward_gpu.h"
#include "runtime/device.h"
#include "runtime/forward_gpu.h"
#include "runtime/gradients.h"
#include "runtime/problem.h"

namespace fovea {

namespace {

using core::int64;

constexpr int events_per_role = 16384;

// Copies of host memory on a device, as long as they live.
class Copies {
 public:
  explicit Copies(runtime::Device& device) : device_(device) {}

  // The same elements in device memory, at the same strides.
  void move(core::View& view, const Tensor& tensor) {
    if (!view) return;
    int64 first = 0, last = 0;  // offsets of the outermost elements
    for (std::size_t i = 0; i < 4; ++i) {
      if (tensor.shape[i] == 0) return;
      const int64 reach = (tensor.shape[i] - 1) * tensor.stride[i];
      (reach < 0 ? first : last) += reach;
    }
    const auto element = static_cast<int64>(size_bytes(tensor.dtype));
    const auto* begin = static_cast<const std::byte*>(tensor.data) + first * element;
    const runtime::DeviceAddress to =
        copy(begin, static_cast<std::size_t>((last - first + 1) * element));
    view.data = reinterpret_cast<void*>(
        static_cast<std::uintptr_t>(to + static_cast<std::uint64_t>(-first * element)));
  }

  template <typename T>
  void move(const T*& values, std::size_t count) {
    if (values == nullptr) return;
    values = reinterpret_cast<const T*>(copy(values, count * sizeof(T)));
  }

  runtime::DeviceAddress zeros(std::size_t bytes) {
    buffers_.emplace_back(device_, bytes);
    device_.fill(buffers_.back().address(), 0, bytes);
    return buffers_.back().address();
  }

 private:
  runtime::DeviceAddress copy(const void* from, std::size_t bytes) {
    buffers_.emplace_back(device_, bytes);
    device_.copy_to_device(buffers_.back().address(), from, bytes);
    return buffers_.back().address();
  }

  runtime::Device& device_;
  std::deque<runtime::DeviceBuffer> buffers_;
};

core::Problem copy_to_device(const Problem& problem, Copies& copies) {
  require_host_memory(problem, "a trace");
  core::Problem p = validate(problem);
  copies.move(p.q, problem.q);
  copies.move(p.k, problem.k);
  copies.move(p.v, problem.v);
  copies.move(p.out, problem.out);
  copies.move(p.lse, problem.lse);
  copies.move(p.bias, problem.bias);
  copies.move(p.mask, problem.mask);
  copies.move(p.sink, problem.sink);
  copies.move(p.alibi, problem.alibi);
  copies.move(p.cu_seqlens_q, problem.cu_seqlens_q.size());
  copies.move(p.cu_seqlens_k, problem.cu_seqlens_k.size());
  copies.move(p.seqused_q, problem.seqused_q.size());
  copies.move(p.seqused_k, problem.seqused_k.size());
  copies.move(p.block_table, problem.block_table.size());
  return p;
}

core::SoftmaxPolicy policy_of(Softmax softmax) {
  switch (softmax) {
    case Softmax::online: return core::SoftmaxPolicy::online;
    case Softmax::conditional: return core::SoftmaxPolicy::conditional;
    default: return core::SoftmaxPolicy::sum_guard;
  }
}

constexpr std::string_view roles_sm90[] = {"load", "compute 0", "compute 1", "compute 2"};
constexpr std::string_view roles_sm100[] = {"load",      "multiply", "softmax 0",
                                            "softmax 1", "correct",  "store"};
constexpr std::string_view roles_backward_sm100[] = {"load",      "multiply", "compute 0",
                                                     "compute 1", "reduce",   "relay"};

runtime::ForwardConfig tracing_config(const core::Problem& p, const Options& options,
                                      const runtime::DeviceProperties& chip) {
  const std::vector<std::string> reasons = runtime::forward_supports(p, chip.arch);
  if (!reasons.empty()) throw Unsupported("the forward kernel: " + reasons.front());
  runtime::ForwardConfig config =
      runtime::choose_forward(p, policy_of(options.softmax), chip.arch, chip.sm_count);
  std::visit([](auto& of_chip) { of_chip.trace = true; }, config);
  return config;
}

std::unique_ptr<runtime::Device> open_traced(const Options& options) {
  const bool traces = options.device == Device::cuda || options.device == Device::emulated_sm90a ||
                      options.device == Device::emulated_sm100a ||
                      options.device == Device::emulated_sm103a;
  if (!traces) {
    throw Error("device is " + std::string(name(options.device)) +
                ", but a timeline needs cuda, emulated:sm_90a, emulated:sm_100a or "
                "emulated:sm_103a");
  }
  return runtime::open_device(name(options.device));
}

void check_cta(int cta, std::int64_t ctas) {
  if (cta < 0 || cta >= ctas) {
    throw Error("cta is " + std::to_string(cta) + ", but the launch has " + std::to_string(ctas));
  }
}

// The events of a launch of one CTA, as a document.
class Events {
 public:
  Events(runtime::Device& device, Copies& copies, int cta)
      : device_(device),
        words_(std::size_t{core::trace_roles} * events_per_role),
        written_(copies.zeros(bytes())),
        cta_(cta) {}

  core::TraceBuffer buffer() const {
    return {reinterpret_cast<core::uint64*>(written_), events_per_role, cta_};
  }

  // Of the last of several launches on a GPU: the first ones fill caches and raise clocks.
  template <typename Launch>
  void record(bool emulated, const Launch& launch) {
    for (int i = 0; i < (emulated ? 1 : 5); ++i) {
      device_.fill(written_, 0, bytes());
      launch();
    }
    device_.copy_to_host(words_.data(), written_, bytes());
    device_.synchronize();
    unit_ = emulated ? "the launch's warp instructions" : "the multiprocessor's cycles";
  }

  std::string document(std::string_view kernel, std::span<const std::string_view> roles) const {
    const std::string title =
        std::string(kernel) + " on " + device_.properties().name + ", CTA " + std::to_string(cta_);
    return model::trace_json({title, unit_, events_per_role, words_, roles});
  }

 private:
  std::size_t bytes() const { return words_.size() * sizeof(core::uint64); }

  runtime::Device& device_;
  std::vector<core::uint64> words_;
  runtime::DeviceAddress written_;
  int cta_;
  std::string_view unit_;
};

}  // namespace

std::string trace(const Problem& problem, const Options& options, int cta) {
  const std::unique_ptr<runtime::Device> device = open_traced(options);
  Copies copies(*device);
  runtime::ForwardCall call;
  call.problem = copy_to_device(problem, copies);
  const runtime::ForwardConfig config = tracing_config(call.problem, options, device->properties());
  const runtime::ForwardKernel kernel(*device, config);

  core::FwdParams params;
  const auto tiles = std::visit(
      [&](const auto& of_chip) {
        return runtime::fill_forward_params(params, call, of_chip, device->properties());
      },
      config);
  check_cta(cta, tiles.ctas);
  call.scheduler = copies.zeros(2 * sizeof(core::uint32));
  const std::size_t workspace =
      runtime::forward_workspace_bytes(call.problem, config, device->properties().sm_count);
  if (workspace > 0) call.workspace = copies.zeros(workspace);
  Events events(*device, copies, cta);
  call.trace = events.buffer();
  events.record(options.device != Device::cuda, [&] { kernel.run(call); });
  const bool hopper = std::holds_alternative<core::FwdConfig>(config);
  return events.document(
      hopper ? "fwd_sm90" : "fwd_sm100",
      hopper ? std::span<const std::string_view>(roles_sm90) : std::span(roles_sm100));
}

std::string trace_backward(const Problem& problem, const Gradients& gradients,
                           const Options& options, int cta) {
  const std::unique_ptr<runtime::Device> device = open_traced(options);
  const std::string arch = device->properties().arch;
  if (!runtime::is_blackwell(arch)) {
    throw Unsupported("the backward kernel for " + arch +
                      " writes no timeline, those for sm_100a and sm_103a do: take "
                      "emulated:sm_100a");
  }
  Copies copies(*device);
  runtime::BackwardCall call;
  call.problem = copy_to_device(problem, copies);
  call.gradients = validate(problem, gradients);
  for (const GradientArgument& argument : gradient_arguments) {
    copies.move(call.gradients.*argument.view, gradients.*argument.tensor);
  }
  const std::vector<std::string> reasons =
      runtime::backward_supports(call.problem, call.gradients, arch);
  if (!reasons.empty()) throw Unsupported("the backward kernel: " + reasons.front());
  core::BwdConfig config =
      runtime::choose_backward(call.problem, call.gradients, arch, options.configuration);
  config.trace = true;
  check_cta(cta, runtime::backward_ctas(call.problem, config));
  const runtime::BackwardKernels kernels(*device, config, call.gradients);
  call.workspace =
      copies.zeros(runtime::backward_workspace_bytes(call, config, device->properties()));
  Events events(*device, copies, cta);
  call.trace = events.buffer();
  events.record(options.device != Device::cuda, [&] { kernels.run(call); });
  return events.document("bwd_sm100", roles_backward_sm100);
}

}  // namespace fovea
