// The oracle of the gradients against finite differences of the oracle of the forward pass, and the
// faults of a caller's gradients.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/backward_call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

// The loss whose gradients are asked for: <dout, out> + <dlse, lse>.
double loss(const BackwardCall& call) {
  const Reference forward = reference(call.call.problem);
  const std::vector<double> dout = call.dout.values();
  double sum = 0.0;
  for (std::size_t i = 0; i < dout.size(); ++i) {
    if (std::isfinite(dout[i])) sum += dout[i] * forward.out[i];
  }
  if (!call.dlse.present()) return sum;
  const std::vector<double> dlse = call.dlse.values();
  for (std::size_t i = 0; i < dlse.size(); ++i) {
    if (std::isfinite(dlse[i]) && std::isfinite(forward.lse[i])) sum += dlse[i] * forward.lse[i];
  }
  return sum;
}

// Moves elements of an input by 2^-8 either way, which fp32 holds exactly enough.
void expect_differences(BackwardCall& call, HostTensor& input, const std::vector<double>& gradient,
                        const char* what) {
  constexpr double step = 0x1p-8;
  const auto& n = input.shape();
  std::size_t index = 0;
  Random random(3);
  for (Index a = 0; a < n[0]; ++a) {
    for (Index b = 0; b < n[1]; ++b) {
      for (Index c = 0; c < n[2]; ++c) {
        for (Index d = 0; d < n[3]; ++d, ++index) {
          const double value = input.at(a, b, c, d);
          if (!std::isfinite(value) || random.below(4) != 0) continue;
          input.set(a, b, c, d, value + step);
          const double high_value = input.at(a, b, c, d);
          const double high = loss(call);
          input.set(a, b, c, d, value - step);
          const double low_value = input.at(a, b, c, d);
          const double low = loss(call);
          input.set(a, b, c, d, value);
          const double difference = (high - low) / (high_value - low_value);
          EXPECT_NEAR(gradient[index], difference, 1e-4 * (1.0 + std::abs(difference)))
              << what << " element " << index;
        }
      }
    }
  }
}

void check_differences(const CaseSpec& spec) {
  SCOPED_TRACE(describe(spec));
  BackwardCall call(spec, {.dlse = true});
  const ReferenceGradients gradients = reference_backward(call.call.problem, call.gradients);
  expect_differences(call, call.call.q, gradients.dq, "dq");
  expect_differences(call, call.call.k, gradients.dk, "dk");
  expect_differences(call, call.call.v, gradients.dv, "dv");
  if (call.dsink.present()) expect_differences(call, call.call.sink, gradients.dsink, "dsink");
  if (call.dbias.present()) expect_differences(call, call.call.bias, gradients.dbias, "dbias");
}

CaseSpec small(const char* name) {
  return {.name = name, .batch = 2, .hq = 2, .hkv = 1, .sq = 3, .sk = 4, .d = 3, .dv = 2};
}

TEST(Gradients, AreFiniteDifferencesOfTheForwardPass) {
  check_differences(small("differences"));
  CaseSpec spec = small("differences_causal");
  spec.causal = true;
  spec.sq = 6;
  check_differences(spec);
  spec = small("differences_window");
  spec.window_left = 1;
  spec.window_right = 1;
  spec.sink = true;
  check_differences(spec);
  spec = small("differences_softcap");
  spec.softcap = 2.0f;
  spec.alibi = true;
  spec.scale = 0.7f;
  check_differences(spec);
  spec = small("differences_dropout");
  spec.dropout = 0.4f;
  check_differences(spec);
  spec = small("differences_ragged");
  spec.entry = Entry::varlen_holes;
  spec.lengths_q = {3, 1};
  spec.lengths_k = {2, 4};
  spec.mask = Mask::random;
  check_differences(spec);
}

TEST(Gradients, OfEveryFormOfBias) {
  for (const Bias bias : {Bias::full, Bias::per_key, Bias::per_head}) {
    CaseSpec spec = small("differences_bias");
    spec.bias = bias;
    spec.sink = true;
    spec.softcap = 3.0f;
    check_differences(spec);
  }
}

// Broadcasting over any set of dimensions, through the tiles, whatever the threads.
TEST(Gradients, BiasSumsOverWhatBroadcasts) {
  for (int set = 0; set < 16; ++set) {
    CaseSpec spec{.name = "broadcast", .batch = 2, .hq = 4, .hkv = 2, .sq = 30, .sk = 150, .d = 16};
    spec.bias = Bias::full;
    spec.num_splits = 2;
    BackwardCall call(spec);
    Shape shape = call.call.bias.shape();
    for (std::size_t i = 0; i < 4; ++i) {
      if ((set >> i & 1) != 0) shape[i] = 1;
    }
    Random random(7);
    call.call.bias = HostTensor(DType::f32, shape);
    call.call.bias.fill([&](Index, Index, Index, Index) { return random.normal(); });
    call.call.problem.bias = call.call.bias.tensor();
    call.dbias = HostTensor(DType::f32, shape);
    call.gradients.dbias = call.dbias.tensor();
    call.run();
    call.expect_matches_oracle();
    const std::vector<std::byte> bytes = call.bytes();
    call.threads = 3;
    call.run_backward();
    EXPECT_TRUE(same_bits(call.bytes(), bytes)) << "set " << set;
  }
}

// message of the Error that a change of the gradients provokes, or "".
std::string fault(const std::function<void(BackwardCall&)>& change) {
  BackwardCall call(
      {.name = "faults", .batch = 1, .sq = 4, .sk = 4, .d = 8, .dtype = DType::bf16, .sink = true});
  change(call);
  try {
    static_cast<void>(plan_backward(call.call.problem, call.gradients));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Gradients, FaultsNameTheArgumentItsValueAndWhatIsRight) {
  EXPECT_EQ(fault([](BackwardCall&) {}), "");
  EXPECT_EQ(fault([](BackwardCall& c) { c.call.problem.lse = {}; }),
            "lse is absent; the backward pass needs out and lse as the forward pass wrote them");
  EXPECT_EQ(fault([](BackwardCall& c) { c.gradients.dk = {}; }),
            "dk is absent; gradients need dout, dq, dk and dv");
  EXPECT_EQ(fault([](BackwardCall& c) { c.gradients.dq.shape[1] = 3; }),
            "dq has shape (1, 3, 2, 8) but q has (1, 4, 2, 8); they must be equal");
  EXPECT_EQ(fault([](BackwardCall& c) { c.gradients.dout.dtype = DType::f16; }),
            "dout has dtype f16; it must be bf16, that of out");
  EXPECT_EQ(fault([](BackwardCall& c) { c.gradients.dv.dtype = DType::f16; }),
            "dv has dtype f16; it must be bf16, as that of v, or f32");
  EXPECT_EQ(fault([](BackwardCall& c) { c.gradients.dbias = c.gradients.dsink; }),
            "dbias is present but the problem has no bias; leave it absent");
  EXPECT_EQ(fault([](BackwardCall& c) { c.gradients.dv = c.gradients.dk; }),
            "dk shares memory with dv; a gradient must lie apart from every other tensor");
  EXPECT_EQ(fault([](BackwardCall& c) { c.gradients.dq.data = c.call.problem.q.data; }),
            "dq shares memory with q; a gradient must lie apart from every other tensor");
  EXPECT_NE(fault([](BackwardCall& c) {
              c.gradients.dq.stride[0] = c.gradients.dq.stride[1] = 0;
            }).find("dq has strides"),
            std::string::npos);
}

TEST(Gradients, PlanIsForItsShapesAlone) {
  const CaseSpec spec{.name = "replan", .batch = 1, .sq = 4, .sk = 4, .d = 8, .sink = true};
  BackwardCall call(spec);
  const BackwardPlan plan = plan_backward(call.call.problem, call.gradients);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  Gradients without = call.gradients;
  without.dsink = {};
  EXPECT_THROW(plan.run(call.call.problem, without, workspace), Error);
  EXPECT_THROW(
      plan.run(call.call.problem, call.gradients, std::span(workspace).first(workspace.size() - 1)),
      Error);
  BackwardCall longer({.name = "replan", .batch = 1, .sq = 5, .sk = 4, .d = 8, .sink = true});
  EXPECT_THROW(plan.run(longer.call.problem, longer.gradients, workspace), Error);
}

}  // namespace
}  // namespace fovea::test
