// Reported faults of kinds K12 and K13: repeatability, dropout, options that are accepted and then
// ignored.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/dropout.h"
#include "cpu/reference.h"
#include "tests/call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

// The forward half of B63.
TEST(Reported, B63DeterministicMeansBitwise) {
  for (const Entry entry : {Entry::dense, Entry::varlen}) {
    for (const auto& [left, causal] :
         {std::pair<Index, bool>{-1, false}, {-1, true}, {100, true}}) {
      CaseSpec spec{.name = "B63", .batch = 3, .hq = 8, .hkv = 2, .dtype = DType::bf16};
      spec = with_entry(spec, entry, 200, 200);
      if (entry == Entry::varlen) spec.lengths_q = spec.lengths_k = {400, 24, 1};
      spec.window_left = left;
      spec.causal = causal;
      SCOPED_TRACE(describe(spec));
      Call call(spec);
      call.problem.deterministic = true;
      call.run();
      call.expect_matches_oracle();
      const auto out = call.out.bytes();
      const auto lse = call.lse.bytes();
      for (int repetition = 0; repetition < 5; ++repetition) {
        call.run();
        EXPECT_TRUE(same_bits(call.out.bytes(), out));
        EXPECT_TRUE(same_bits(call.lse.bytes(), lse));
      }
    }
  }
}

CaseSpec dropout_spec() {
  return {.name = "B65", .batch = 2, .hq = 4, .hkv = 4, .sq = 64, .sk = 64, .dropout = 0.5f};
}

// q = 0 and v = identity: out[i, j] * 64 * (1 - p) is the keep mask itself.
void show_mask(Call& call) {
  call.fill_q([](Index, Index, Index, Index) { return 0.0; });
  call.fill_v([](Index, Index j, Index, Index d) { return j == d ? 1.0 : 0.0; });
  call.run();
  call.expect_memory_respected();
}

TEST(Reported, B65TheDropoutMaskIsAFunctionOfPosition) {
  for (const Entry entry : every_entry) {
    for (const std::int32_t splits : {0, 1, 3}) {
      CaseSpec spec = with_entry(dropout_spec(), entry, 64, 64);
      spec.num_splits = splits;
      SCOPED_TRACE(describe(spec));
      Call call(spec);
      show_mask(call);
      const Dropout& dropout = call.problem.dropout;
      const core::Dropout expected{dropout.probability, dropout.seed, dropout.offset};
      int kept = 0;
      for (Index b = 0; b < 2; ++b) {
        for (Index h = 0; h < 4; ++h) {
          for (Index i = 0; i < 64; ++i) {
            for (Index j = 0; j < 64; ++j) {
              const bool keep = core::dropout_keeps(expected, b, h, i, j);
              ASSERT_EQ(call.out_at(b, i, h, j), keep ? 1.0 / 32 : 0.0);
              kept += keep ? 1 : 0;
            }
            ASSERT_NEAR(call.lse_at(b, h, i), std::log(64.0), 1e-5) << "lse is without dropout";
          }
        }
      }
      EXPECT_NEAR(kept / 32768.0, 0.5, 0.0111);
    }
  }
}

TEST(Reported, B65SeedAndOffsetChangeTheMaskAndRepeatIt) {
  Call call(dropout_spec());
  show_mask(call);
  const auto first = call.out.bytes();
  ++call.problem.dropout.offset;
  show_mask(call);
  const auto next = call.out.bytes();
  EXPECT_FALSE(same_bits(next, first));
  --call.problem.dropout.offset;
  ++call.problem.dropout.seed;
  show_mask(call);
  EXPECT_FALSE(same_bits(call.out.bytes(), first));
  EXPECT_FALSE(same_bits(call.out.bytes(), next));
  --call.problem.dropout.seed;
  show_mask(call);
  EXPECT_TRUE(same_bits(call.out.bytes(), first));
}

TEST(Reported, B65NoDropoutIsNoDropout) {
  CaseSpec spec = dropout_spec();
  spec.dropout = 0.0f;
  Call without(spec);
  without.run();
  Call zero(spec);
  zero.problem.dropout = {0.0f, 99, 99};
  zero.run();
  EXPECT_TRUE(same_bits(zero.out.bytes(), without.out.bytes()));
  for (const float probability : {-0.1f, 1.0f, 1.5f, std::nanf(""), HUGE_VALF}) {
    Call wrong(spec);
    wrong.problem.dropout.probability = probability;
    EXPECT_THROW(fovea::attention(wrong.problem, {.device = test_device()}), Error) << probability;
  }
}

struct Option {
  const char* name;
  std::function<void(CaseSpec&)> set;
};

void expect_option_counts(const Option& option, CaseSpec spec) {
  Call off(spec);
  option.set(spec);
  SCOPED_TRACE(describe(spec));
  Call on(spec);
  on.fill_q([&](Index, Index i, Index h, Index d) { return off.q.at(0, i, h, d); });
  if (spec.sink) on.sink.fill([](Index, Index, Index, Index) { return 20.0; });
  if (spec.bias != Bias::none) {
    on.bias.fill(
        [](Index, Index, Index i, Index j) { return static_cast<double>((i * 7 + j * 5) % 16); });
  }
  off.run();
  on.run();
  on.expect_memory_respected();
  on.expect_matches_oracle();
  // A causal decode step sees everything: there, on is off.
  if (spec.lengths_q[0] == 1 && spec.causal) return;
  EXPECT_GT(largest_error(on.out.values(), off.out.values()), 1e-3) << option.name;
}

// Every option changes the result through every entry point, to what the definition says.
TEST(Reported, B71NoOptionIsIgnored) {
  const Option options[] = {
      {"scale", [](CaseSpec& s) { s.scale = 0.02f; }},
      {"scale_zero", [](CaseSpec& s) { s.scale = 0.0f; }},
      {"softcap", [](CaseSpec& s) { s.softcap = 5.0f; }},
      {"window_3_0", [](CaseSpec& s) { s.window_left = 3, s.window_right = 0; }},
      {"window_0_0", [](CaseSpec& s) { s.window_left = 0, s.window_right = 0; }},
      {"window_left", [](CaseSpec& s) { s.window_left = 1; }},
      {"sink", [](CaseSpec& s) { s.sink = true; }},
      {"alibi", [](CaseSpec& s) { s.alibi = true; }},
      {"causal", [](CaseSpec& s) { s.causal = true; }},
      {"dropout", [](CaseSpec& s) { s.dropout = 0.3f; }},
      {"mask", [](CaseSpec& s) { s.mask = Mask::random; }},
      {"bias", [](CaseSpec& s) { s.bias = Bias::full; }},
  };
  for (const Option& option : options) {
    for (const Entry entry : every_entry) {
      for (const Index sq : {1, 16}) {
        CaseSpec spec = with_entry({.name = "B71", .batch = 1, .logits = 8.0}, entry, sq, 16);
        expect_option_counts(option, spec);
        spec.layout = Layout::fused;
        spec.num_splits = 2;
        expect_option_counts(option, spec);
      }
    }
  }
}

TEST(Reported, B71ValuesThatMeanOffAreOff) {
  for (const Entry entry : every_entry) {
    CaseSpec spec = with_entry({.name = "B71_off", .batch = 1}, entry, 16, 16);
    Call plain(spec);
    plain.run();
    Call explicit_off(spec);
    explicit_off.problem.softcap = 0.0f;
    explicit_off.problem.softmax_scale = 0.125f;  // the default of head_dim 64
    explicit_off.problem.window_left = -1;
    explicit_off.run();
    EXPECT_TRUE(same_bits(explicit_off.out.bytes(), plain.out.bytes()));
    EXPECT_TRUE(same_bits(explicit_off.lse.bytes(), plain.lse.bytes()));
  }
}

}  // namespace
}  // namespace fovea::test
