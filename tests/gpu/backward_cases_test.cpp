// The one case list through the backward pass on a GPU. FOVEA_TEST_DEVICE=cuda runs every case on a
// GPU. Otherwise a sample runs on each emulated chip with its checks on, in two orders of
// asynchronous work: gradients must match the oracle in both, and agree to the bit where they are
// asked to be deterministic. FOVEA_TEST_SEED takes another sample, FOVEA_TEST_SAMPLE a larger one.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/backward_call.h"
#include "tests/cases.h"
#include "tests/gpu/sample.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

bool on_cuda() { return test_device() == Device::cuda; }

struct DeviceCase {
  Device device;
  CaseSpec spec;
};

std::ostream& operator<<(std::ostream& out, const DeviceCase& c) { return out << c.spec.name; }

// Of the case list, what the kernels take by their documentation.
bool is_documented(Device device, const CaseSpec& s) {
  const bool same = !s.out_dtype || *s.out_dtype == s.dtype;
  const bool narrow =
      device == Device::emulated_sm100a ? s.d <= 192 && s.dv <= 128 : s.d <= 256 && s.dv <= 256;
  return s.dtype != DType::f32 && same && narrow && !is_paged(s);
}

std::vector<DeviceCase> selected(Device device) {
  std::vector<CaseSpec> able[2];  // the random mixtures, where features meet, and all others
  for (const CaseSpec& spec : all_cases()) {
    if (!is_documented(device, spec) || (!on_cuda() && cost(spec) > 6 * 128 * 256)) continue;
    able[spec.name.starts_with("mixture") ? 0 : 1].push_back(spec);
  }
  // Each case is some kernels of its own to compile, a few seconds; the sample bounds the whole.
  const std::uint64_t sample =
      on_cuda() ? able[0].size() + able[1].size() : from_environment("FOVEA_TEST_SAMPLE", 8);
  Random random(from_environment("FOVEA_TEST_SEED", 1) + static_cast<std::uint64_t>(device));
  std::vector<DeviceCase> chosen;
  while (chosen.size() < sample && able[0].size() + able[1].size() > 0) {
    std::vector<CaseSpec>& turn = able[chosen.size() % 2];
    std::vector<CaseSpec>& list = turn.empty() ? able[1 - chosen.size() % 2] : turn;
    const auto at = list.begin() + random.below(static_cast<Index>(list.size()));
    chosen.push_back({device, *at});
    list.erase(at);
  }
  return chosen;
}

class GpuBackwardCases : public ::testing::TestWithParam<DeviceCase> {};

TEST_P(GpuBackwardCases, MatchesTheOracle) {
  using Order = runtime::EmulationOptions::Order;
  const CaseSpec& spec = GetParam().spec;
  SCOPED_TRACE(describe(spec));
  // Every other case has a gradient of lse, every third one is deterministic, or wide.
  const std::size_t mark = std::hash<std::string>()(spec.name);
  BackwardCall backward(spec, {.dlse = mark % 2 == 0, .wide = mark % 3 == 0});
  backward.call.device = Device::cpu;
  backward.device = GetParam().device;
  backward.call.problem.deterministic = mark % 3 == 1;
  backward.call.poison_unseen();
  emulate(Order::lazy, 0);
  backward.run();
  backward.expect_memory_respected();
  backward.expect_matches_oracle();
  const std::vector<std::byte> bytes = backward.bytes();
  emulate(Order::random, spec.name.size());
  backward.run_backward();
  backward.expect_matches_oracle();
  if (backward.call.problem.deterministic) {
    EXPECT_TRUE(same_bits(backward.bytes(), bytes)) << "gradients of a second run";
  }
}

INSTANTIATE_TEST_SUITE_P(Some, GpuBackwardCases,
                         ::testing::ValuesIn(selected(on_cuda() ? Device::cuda
                                                                : Device::emulated_sm90a)),
                         [](const auto& instance) { return instance.param.spec.name; });
INSTANTIATE_TEST_SUITE_P(Blackwell, GpuBackwardCases,
                         ::testing::ValuesIn(on_cuda() ? std::vector<DeviceCase>{}
                                                       : selected(Device::emulated_sm100a)),
                         [](const auto& instance) { return instance.param.spec.name; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GpuBackwardCases);

// plan_backward() takes every case but those that the documentation excepts, and says why not.
TEST(GpuBackwardRefusals, AreTheDocumentedOnes) {
  if (on_cuda()) GTEST_SKIP() << "plans for the emulated chip";
  for (const Device device : {Device::emulated_sm90a, Device::emulated_sm100a}) {
    for (const CaseSpec& spec : all_cases()) {
      if (is_documented(device, spec) || cost(spec) > 6 * 128 * 128) continue;
      SCOPED_TRACE(describe(spec));
      BackwardCall backward(spec);
      backward.call.device = Device::cpu;
      Options options;
      options.device = device;
      EXPECT_THROW(
          static_cast<void>(plan_backward(backward.call.problem, backward.gradients, options)),
          Unsupported);
    }
  }
}

// The message of the Error with which a configuration by hand is refused.
std::string fault(const std::string& configuration, Index head_dim, bool deterministic) {
  CaseSpec spec{.name = "by_hand", .batch = 1, .sq = 8, .sk = 8, .d = head_dim};
  spec.dtype = DType::bf16;
  BackwardCall backward(spec);
  backward.call.problem.deterministic = deterministic;
  Options options;
  options.device = Device::emulated_sm90a;
  options.configuration = configuration;
  try {
    static_cast<void>(plan_backward(backward.call.problem, backward.gradients, options));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(GpuBackwardConfiguration, FaultsSayWhatIsRight) {
  EXPECT_EQ(fault("tiles=1", 128, false),
            "configuration names 'tiles'; this kernel has split_products, dq_apart");
  EXPECT_EQ(fault("dq_apart=2", 128, false),
            "configuration gives dq_apart the value '2'; it must be 0 or 1");
  EXPECT_EQ(fault("split_products=0", 192, false),
            "configuration is split_products=0, but head dimensions of 192 and 192 need "
            "split_products=1");
  EXPECT_EQ(
      fault("split_products=1,dq_apart=1", 64, false),
      "configuration is split_products=1,dq_apart=1, but dq_apart=1 needs split_products=0, head "
      "dimensions up to 64 and scores that nothing modifies");
}

}  // namespace
}  // namespace fovea::test
