// How long the emulator takes for one CTA of the forward kernel: 128 queries, 8 blocks of 128 keys,
// head dimension 128, bf16. CPU time of one launch on one core, the best of twenty: printed, not
// asserted, since the machine may be busy. Values are all one, so every result is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <vector>

#include "core/numeric.h"
#include "runtime/device.h"
#include "runtime/forward_gpu.h"
#include "runtime/jit.h"

namespace fovea::tests {
namespace {

constexpr core::int32 queries = 128, keys = 1024, head_dim = 128;

double cpu_milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

void describe(core::View& view, core::int64 rows) {
  const core::int64 stride[4] = {rows * head_dim, head_dim, head_dim, 1};
  std::copy(std::begin(stride), std::end(stride), view.stride);
  view.dtype = core::DType::bf16;
}

core::Problem problem() {
  core::Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.seqlen_q = queries;
  p.seqlen_k = keys;
  p.head_dim = p.head_dim_v = head_dim;
  p.softmax_scale = 0.0883883f;
  describe(p.q, queries);
  describe(p.k, keys);
  describe(p.v, keys);
  describe(p.out, queries);
  return p;
}

void place(runtime::Device& device, core::View& view, std::uint64_t address,
           const std::vector<core::uint16>& values) {
  device.copy_to_device(address, values.data(), 2 * values.size());
  view.data = reinterpret_cast<void*>(address);
}

std::vector<core::uint16> waves(std::size_t count) {
  std::vector<core::uint16> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = core::float_to_bf16(static_cast<float>(std::sin(0.37 * static_cast<double>(i))));
  }
  return values;
}

double best_launch(bool checks) {
  runtime::EmulationOptions options;
  options.checks = checks;
  const auto device = runtime::open_device("emulated:sm_90a", options);
  core::Problem p = problem();
  core::FwdConfig config = runtime::choose_forward_sm90(p, core::SoftmaxPolicy::sum_guard);
  config.warpgroups = 2;
  config.tile_k = 128;
  config.stages = 2;
  config.split = false;
  const runtime::ForwardKernel kernel(*device, config);
  constexpr std::uint64_t q_bytes = 2 * queries * head_dim, k_bytes = 2 * keys * head_dim;
  const runtime::DeviceBuffer memory(*device, 2 * q_bytes + 2 * k_bytes);
  const runtime::DeviceBuffer scheduler(*device, 8);
  const core::uint16 one = core::float_to_bf16(1.0f);
  place(*device, p.q, memory.address(), waves(q_bytes / 2));
  place(*device, p.k, memory.address() + q_bytes, waves(k_bytes / 2));
  place(*device, p.v, memory.address() + q_bytes + k_bytes,
        std::vector<core::uint16>(k_bytes / 2, one));
  p.out.data = reinterpret_cast<void*>(memory.address() + q_bytes + 2 * k_bytes);
  runtime::ForwardCall call;
  call.problem = p;
  call.scheduler = scheduler.address();
  double best = 1e30;
  for (int i = 0; i < 20; ++i) {
    device->fill(scheduler.address(), 0, 8);
    const double begin = cpu_milliseconds();
    kernel.run(call);
    best = std::min(best, cpu_milliseconds() - begin);
  }
  std::vector<core::uint16> out(q_bytes / 2);
  device->copy_to_host(out.data(), memory.address() + q_bytes + 2 * k_bytes, q_bytes);
  device->synchronize();
  EXPECT_EQ(out, std::vector<core::uint16>(out.size(), one));
  return best;
}

TEST(EmulatorSpeed, OneCtaOfAttention) {
  const double off = best_launch(false), on = best_launch(true);
  std::printf("checks off %.1f ms, on %.1f ms\n", off, on);
}

}  // namespace
}  // namespace fovea::tests
