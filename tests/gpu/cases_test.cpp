// The one case list on a GPU through plan() and run(): from host memory, which is copied there, and
// from device memory, as an engine calls. FOVEA_TEST_DEVICE=cuda runs every case both ways on a
// GPU. Otherwise a sample runs on the emulated Hopper chip with its checks on, each case in two
// orders of asynchronous work that must agree to the bit; FOVEA_TEST_SEED takes another sample,
// FOVEA_TEST_SAMPLE a larger one.
#include "tests/cases.h"

#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "runtime/gpu.h"
#include "tests/device_call.h"
#include "tests/gpu/sample.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

bool on_cuda() { return test_device() == Device::cuda; }

Device gpu_device() {
  return test_device() == Device::cpu ? Device::emulated_sm90a : test_device();
}

std::string gpu_arch() {
  const std::string_view arch = runtime::emulated_arch(gpu_device());
  return arch.empty() ? runtime::shared_device(gpu_device()).properties().arch : std::string(arch);
}

bool in_eight_bits(const CaseSpec& spec) {
  return spec.dtype == DType::e4m3 || spec.dtype == DType::e5m2;
}

std::vector<std::string> reasons_against(const CaseSpec& spec) {
  const Call call(spec);
  Problem problem = call.problem;
  Options options;
  options.softmax = spec.softmax;
  return runtime::gpu_supports(problem, validate(problem), {gpu_arch(), options});
}

// Why no GPU computes a case that the CPU does: the head of the refusal, or null.
const char* exception(const CaseSpec& spec) {
  if (in_eight_bits(spec)) return gpu_arch() == "sm_90a" ? nullptr : "its 8-bit forward kernel is";
  if (spec.dtype == DType::f32) return "it computes bf16 and f16";
  return spec.d > 256 || spec.dv > 256 ? "it takes head dimensions up to" : nullptr;
}

// A sample of the cases of 16 bits or of 8.
std::vector<CaseSpec> selected(bool eight_bits, std::uint64_t sample) {
  std::vector<CaseSpec> able;
  for (const CaseSpec& spec : eight_bits ? eight_bit_cases() : all_cases()) {
    if (exception(spec) == nullptr) able.push_back(spec);
  }
  if (on_cuda()) return able;
  Random random(from_environment("FOVEA_TEST_SEED", 1));
  std::vector<CaseSpec> chosen;
  while (chosen.size() < sample && !able.empty()) {
    const auto at = able.begin() + random.below(static_cast<Index>(able.size()));
    if (cost(*at) <= 8 * 128 * 256) chosen.push_back(*at);
    able.erase(at);
  }
  return chosen;
}

using Order = runtime::EmulationOptions::Order;

void check_staged(Call& call) {
  emulate(Order::eager, 0);
  call.run();
  call.expect_memory_respected();
  call.expect_matches_oracle();
  const std::vector<std::byte> out = call.out.bytes();
  const std::vector<std::byte> lse = call.lse.bytes();
  emulate(Order::random, call.spec.name.size());
  call.run();
  EXPECT_TRUE(same_bits(call.out.bytes(), out)) << "out of a second run";
  EXPECT_TRUE(same_bits(call.lse.bytes(), lse)) << "lse of a second run";
}

void check_direct(Call& call) {
  DeviceCall there(call, call.device);
  Options options;
  options.device = call.device;
  options.softmax = call.spec.softmax;
  const Plan chosen = plan(there.problem, options);
  emulate(Order::lazy, 0);
  there.run(chosen);
  there.fetch();
  EXPECT_EQ(call.out.foreign_bytes_changed(), 0) << "beside out";
  EXPECT_EQ(call.lse.foreign_bytes_changed(), 0) << "beside lse";
  call.expect_matches_oracle();
  const std::vector<std::byte> out = call.out.bytes();
  emulate(Order::random, call.spec.name.size());
  there.run(chosen);
  there.fetch();
  EXPECT_TRUE(same_bits(call.out.bytes(), out)) << "out of a second run";
}

class GpuCases : public ::testing::TestWithParam<CaseSpec> {};

TEST_P(GpuCases, MatchesTheOracle) {
  const CaseSpec& spec = GetParam();
  SCOPED_TRACE(describe(spec));
  Call call(spec);
  call.device = gpu_device();
  call.poison_unseen();
  const bool direct = spec.name.back() % 2 == 0;
  if (on_cuda() || direct) check_direct(call);
  if (on_cuda() || !direct) check_staged(call);
}

// Each case is a kernel of its own to compile, a second or so; the sample bounds the whole. In 8
// bits there are three more.
INSTANTIATE_TEST_SUITE_P(Some, GpuCases,
                         ::testing::ValuesIn(selected(false,
                                                      from_environment("FOVEA_TEST_SAMPLE", 90))),
                         [](const auto& instance) { return instance.param.name; });
INSTANTIATE_TEST_SUITE_P(
    EightBits, GpuCases,
    ::testing::ValuesIn(selected(true, from_environment("FOVEA_TEST_SAMPLE_EIGHT_BITS", 10))),
    [](const auto& instance) { return instance.param.name; });

// The kernels take every case but those that the documentation excepts.
TEST(GpuRefusals, AreTheDocumentedOnes) {
  std::map<std::string, int> refused;
  int taken = 0;
  std::vector<CaseSpec> cases = all_cases();
  for (const CaseSpec& spec : eight_bit_cases()) cases.push_back(spec);
  for (const CaseSpec& spec : cases) {
    const std::vector<std::string> reasons = reasons_against(spec);
    if (reasons.empty()) ++taken;
    for (const std::string& reason : reasons) {
      const std::string head = reason.substr(0, reason.find(" but"));
      ++refused[head];
    }
    const char* const documented = exception(spec);
    EXPECT_EQ(reasons.empty(), documented == nullptr) << describe(spec);
    if (documented == nullptr || reasons.empty()) continue;
    EXPECT_TRUE(std::ranges::any_of(
        reasons, [&](const std::string& reason) { return reason.starts_with(documented); }))
        << describe(spec) << ": " << reasons.front();
  }
  std::cout << taken << " cases of the list are computed on " << gpu_arch() << "\n";
  for (const auto& [reason, count] : refused) std::cout << count << " refused: " << reason << "\n";
  EXPECT_GT(taken, 250);
}

}  // namespace
}  // namespace fovea::test
