// fovea::trace(): a forward kernel of a tracing configuration, run on copies of a problem.
#include <algorithm>
#include <deque>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "fovea/fovea.hpp"
#include "fovea/kernels.hpp"
#include "model/timeline.h"
#include "runtime/device.h"
#include "runtime/forward_gpu.h"
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

runtime::ForwardConfig tracing_config(const core::Problem& p, const Options& options,
                                      const runtime::DeviceProperties& chip) {
  const std::vector<std::string> reasons = runtime::forward_supports(p, chip.arch);
  if (!reasons.empty()) throw Unsupported("the forward kernel: " + reasons.front());
  runtime::ForwardConfig config =
      runtime::choose_forward(p, policy_of(options.softmax), chip.arch, chip.sm_count);
  std::visit([](auto& of_chip) { of_chip.trace = true; }, config);
  return config;
}

}  // namespace

std::string trace(const Problem& problem, const Options& options, int cta) {
  if (options.device != Device::cuda && options.device != Device::emulated_sm90a &&
      options.device != Device::emulated_sm100a) {
    throw Error("device is " + std::string(name(options.device)) +
                ", but a timeline needs cuda, emulated:sm_90a or emulated:sm_100a");
  }
  const bool emulated = options.device != Device::cuda;
  const std::unique_ptr<runtime::Device> device = runtime::open_device(name(options.device));
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
  if (cta < 0 || static_cast<std::uint32_t>(cta) >= tiles.ctas) {
    throw Error("cta is " + std::to_string(cta) + ", but the launch has " +
                std::to_string(tiles.ctas));
  }
  call.scheduler = copies.zeros(2 * sizeof(core::uint32));
  const std::size_t workspace =
      runtime::forward_workspace_bytes(call.problem, config, device->properties().sm_count);
  if (workspace > 0) call.workspace = copies.zeros(workspace);
  std::vector<core::uint64> events(std::size_t{core::trace_roles} * events_per_role);
  const std::size_t bytes = events.size() * sizeof(core::uint64);
  const runtime::DeviceAddress written = copies.zeros(bytes);
  call.trace = {reinterpret_cast<core::uint64*>(written), events_per_role, cta};

  const int launches = emulated ? 1 : 5;  // the first ones fill caches and raise clocks
  for (int i = 0; i < launches; ++i) {
    device->fill(written, 0, bytes);
    kernel.run(call);
  }
  device->copy_to_host(events.data(), written, bytes);
  device->synchronize();
  const bool hopper = std::holds_alternative<core::FwdConfig>(config);
  const std::string title = std::string(hopper ? "fwd_sm90" : "fwd_sm100") + " on " +
                            device->properties().name + ", CTA " + std::to_string(cta);
  return model::trace_json(
      {title, emulated ? "the launch's warp instructions" : "the multiprocessor's cycles",
       events_per_role, events,
       hopper ? std::span<const std::string_view>(roles_sm90) : std::span(roles_sm100)});
}

}  // namespace fovea
