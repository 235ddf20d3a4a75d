#include "tests/device_call.h"

#include <algorithm>
#include <utility>

#include "runtime/problem.h"

namespace fovea::test {
namespace {

constexpr std::ptrdiff_t guard_elements = 16;  // fewer than lie around every HostTensor

runtime::DeviceAddress address_of(const void* pointer) {
  return reinterpret_cast<runtime::DeviceAddress>(pointer);
}

// Bytes from the first element to the lowest and to behind the highest.
std::pair<std::ptrdiff_t, std::ptrdiff_t> reach(const Tensor& tensor) {
  Index low = 0;
  Index high = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    if (tensor.shape[i] <= 0) return {0, 0};
    const Index step = (tensor.shape[i] - 1) * tensor.stride[i];
    (step < 0 ? low : high) += step;
  }
  const auto element = static_cast<Index>(size_bytes(tensor.dtype));
  return {(low - guard_elements) * element, (high + 1 + guard_elements) * element};
}

}  // namespace

DeviceCall::DeviceCall(Call& call, Device device)
    : problem(call.problem), call_(call), device_(runtime::shared_device(device)) {
  call.out.poison();
  if (call.lse.present()) call.lse.poison();
  problem.memory = Memory::device;
  const core::Problem lengths = to_core(call.problem);
  if (!problem.cu_seqlens_q.empty()) problem.max_seqlen_q = lengths.seqlen_q;
  if (!problem.cu_seqlens_k.empty()) problem.max_seqlen_k = lengths.seqlen_k;
  for (const Argument& argument : arguments) {
    const Tensor& host = call.problem.*argument.tensor;
    if (!host.present) continue;
    const auto [low, high] = reach(host);
    (problem.*argument.tensor).data = place(host.data, low, high);
    if (!argument.is_output) continue;
    outputs_.push_back(
        {static_cast<std::byte*>(host.data) + low, static_cast<std::size_t>(high - low),
         address_of((problem.*argument.tensor).data) + static_cast<runtime::DeviceAddress>(low)});
  }
  for (const auto list : {&Problem::cu_seqlens_q, &Problem::cu_seqlens_k, &Problem::seqused_q,
                          &Problem::seqused_k, &Problem::block_table}) {
    const std::span<const std::int32_t> host = call.problem.*list;
    if (host.empty()) continue;
    const void* there = place(host.data(), 0, static_cast<std::ptrdiff_t>(host.size_bytes()));
    problem.*list = {static_cast<const std::int32_t*>(there), host.size()};
  }
}

void* DeviceCall::place(const void* data, std::ptrdiff_t low, std::ptrdiff_t high) {
  constexpr runtime::DeviceAddress granule = 256;
  const auto bytes = static_cast<std::size_t>(high - low);
  const runtime::DeviceBuffer& buffer = buffers_.emplace_back(device_, bytes + granule);
  const auto* begin = static_cast<const std::byte*>(data) + low;
  const runtime::DeviceAddress address = buffer.address() + address_of(begin) % granule;
  device_.copy_to_device(address, begin, bytes);
  device_.synchronize();
  return reinterpret_cast<void*>(address - static_cast<runtime::DeviceAddress>(low));
}

void DeviceCall::run(const Plan& plan, Statistics* statistics) {
  const std::size_t bytes = plan.workspace_bytes();
  const runtime::DeviceBuffer workspace(device_, bytes);
  device_.fill(workspace.address(), 0xff, bytes);
  device_.synchronize();
  plan.run(problem, {reinterpret_cast<std::byte*>(workspace.address()), bytes}, statistics);
  device_.synchronize();
}

void DeviceCall::fetch() {
  for (const Mirror& output : outputs_) {
    device_.copy_to_host(output.host, output.address, output.bytes);
  }
  device_.synchronize();
}

}  // namespace fovea::test
