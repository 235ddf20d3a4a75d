// Reported faults of kinds K4, K5 and K6: where the diagonal is, what a bound means, empty and
// ragged batches, softcap.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const auto zero = [](Index, Index, Index, Index) { return 0.0; };
const auto position = [](Index, Index j, Index, Index) { return static_cast<double>(j); };

// With q = 0 every visible key weighs the same, so that out is the mean of the visible v_j = j.
// out and lse of each row must be as expected through every entry point, split and policy.
void expect_rows(const CaseSpec& spec, const std::vector<double>& out,
                 const std::vector<double>& keys_seen) {
  for (const Entry entry : every_entry) {
    for (const std::int32_t splits : {0, 1, 2}) {
      CaseSpec s = with_entry(spec, entry, spec.sq, spec.sk);
      s.num_splits = splits;
      s.softmax = every_softmax[static_cast<std::size_t>(entry) % 3];
      SCOPED_TRACE(describe(s));
      Call call(s);
      call.fill_q(zero);
      call.fill_v(position);
      call.poison_unseen();
      call.run();
      call.expect_memory_respected();
      call.expect_matches_oracle();
      for (Index i = 0; i < spec.sq; ++i) {
        const auto row = static_cast<std::size_t>(i);
        for (Index d = 0; d < spec.d; ++d) EXPECT_NEAR(call.out_at(0, i, 0, d), out[row], 1e-6);
        const double lse = call.lse_at(0, 0, i);
        if (keys_seen[row] == 0.0) {
          EXPECT_EQ(lse, -infinity) << "row " << i;
        } else {
          EXPECT_NEAR(lse, std::log(keys_seen[row]), 1e-6) << "row " << i;
        }
      }
    }
  }
}

CaseSpec small(const char* name, Index sq, Index sk) {
  return {.name = name, .batch = 1, .hq = 1, .hkv = 1, .sq = sq, .sk = sk, .d = 8};
}

TEST(Reported, B21CausalIsBottomRight) {
  const auto causal = [](Index sq, Index sk) {
    CaseSpec spec = small("B21", sq, sk);
    spec.causal = true;
    return spec;
  };
  expect_rows(causal(2, 5), {1.5, 2.0}, {4, 5});
  expect_rows(causal(5, 2), {0, 0, 0, 0, 0.5}, {0, 0, 0, 1, 2});
  expect_rows(causal(1, 5), {2.0}, {5});
  expect_rows(causal(5, 1), {0, 0, 0, 0, 0}, {0, 0, 0, 0, 1});
}

TEST(Reported, B23WindowBoundsAreInclusive) {
  CaseSpec spec = small("B23", 6, 6);
  spec.causal = true;
  spec.window_left = 2;
  spec.window_right = 0;
  expect_rows(spec, {0, 0.5, 1, 2, 3, 4}, {1, 2, 3, 3, 3, 3});
  spec.sq = 1;
  expect_rows(spec, {4}, {3});
  // Right bound, and both off the square.
  CaseSpec right = small("B23_right", 4, 6);
  right.window_left = 0;
  right.window_right = 1;
  expect_rows(right, {2.5, 3.5, 4.5, 5}, {2, 2, 2, 1});
}

TEST(Reported, B24MinusOneIsUnboundedOnEachSideAlone) {
  CaseSpec spec = small("B24", 6, 6);
  const std::vector<double> everything(6, 2.5);
  const std::vector<double> six(6, 6);
  const std::vector<double> triangle{0, 0.5, 1, 1.5, 2, 2.5};
  const std::vector<double> counts{1, 2, 3, 4, 5, 6};
  expect_rows(spec, everything, six);
  spec.window_right = 0;
  expect_rows(spec, triangle, counts);
  spec.causal = true;
  expect_rows(spec, triangle, counts);
  spec.window_right = -1;
  expect_rows(spec, triangle, counts);
  spec.causal = false;
  spec.window_left = 0;
  expect_rows(spec, {2.5, 3, 3.5, 4, 4.5, 5}, {6, 5, 4, 3, 2, 1});
  spec.window_right = 0;
  expect_rows(spec, {0, 1, 2, 3, 4, 5}, {1, 1, 1, 1, 1, 1});
  spec.window_right = 3;  // causal intersects, it does not widen
  spec.causal = true;
  expect_rows(spec, {0, 1, 2, 3, 4, 5}, {1, 1, 1, 1, 1, 1});
}

TEST(Reported, B24OtherNegativesAreRefused) {
  for (const auto& [left, right] : {std::pair<Index, Index>{3, -2}, {-1, -3}, {-2, 0}, {-3, 0}}) {
    Call call(small("B24_negative", 6, 6));
    call.problem.window_left = left;
    call.problem.window_right = right;
    EXPECT_THROW(fovea::attention(call.problem, {.device = test_device()}), Error);
    for (const double x : call.out.values()) ASSERT_TRUE(std::isnan(x)) << "something was written";
  }
}

// q = 0 leaves the bias alone: minus slope times the distance from the bottom-right diagonal.
TEST(Reported, AlibiIsTheDistanceFromTheDiagonal) {
  for (const auto& [sq, sk] : {std::pair<Index, Index>{3, 7}, {7, 3}, {40, 150}, {1, 70}}) {
    CaseSpec spec{.name = "alibi", .batch = 1, .hq = 1, .hkv = 1, .sq = sq, .sk = sk, .d = 8};
    spec.alibi = true;
    for (const Entry entry : every_entry) {
      const CaseSpec s = with_entry(spec, entry, sq, sk);
      SCOPED_TRACE(describe(s));
      Call call(s);
      call.fill_q(zero);
      call.fill_v(position);
      call.alibi.fill([](Index, Index, Index, Index) { return 0.25; });
      call.run();
      for (Index i = 0; i < sq; ++i) {
        double sum = 0;
        double mean = 0;
        for (Index j = 0; j < sk; ++j) {
          const double weight = std::exp(-0.25 * std::abs(static_cast<double>(i + sk - sq - j)));
          sum += weight;
          mean += weight * static_cast<double>(j);
        }
        EXPECT_NEAR(call.out_at(0, i, 0, 0), mean / sum, 1e-4);
        EXPECT_NEAR(call.lse_at(0, 0, i), std::log(sum), 1e-5);
      }
    }
  }
}

// The forward half of B26: long queries against very few keys.
TEST(Reported, B26LongQueriesMeetShortKeys) {
  CaseSpec spec{.name = "B26", .batch = 3, .d = 32, .dtype = DType::f16, .entry = Entry::varlen};
  spec.lengths_q = {70, 30, 100};
  spec.lengths_k = {1, 1, 2};
  spec.causal = true;
  spec.logits = 9.0;
  check_case(spec);
  Call call(spec);
  call.run();
  for (Index h = 0; h < 2; ++h) {
    for (Index d = 0; d < 32; ++d) {
      EXPECT_EQ(call.out_at(0, 69, h, d), call.v.at(0, 0, h, d));
      EXPECT_EQ(call.out_at(0, 68, h, d), 0.0);
    }
  }
}

TEST(Reported, B27EmptyExtentsAreValues) {
  constexpr Index shapes[][3] = {{2, 3, 0}, {2, 0, 4}, {0, 3, 4}, {2, 0, 0}, {0, 0, 0}};
  for (const auto& [batch, sq, sk] : shapes) {
    for (const Entry entry : every_entry) {
      if (batch == 0 && entry != Entry::dense && entry != Entry::varlen) continue;
      for (const bool causal : {false, true}) {
        for (const std::int32_t splits : {0, 3}) {
          CaseSpec spec{.name = "B27", .batch = batch, .hq = 4, .hkv = 4, .dtype = DType::bf16};
          spec.causal = causal;
          spec.num_splits = splits;
          check_case(with_entry(spec, entry, sq, sk));
        }
      }
    }
  }
}

// The forward half of B28.
TEST(Reported, B28SequencesWithoutQueriesOrKeys) {
  for (const Index d : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      for (const Entry entry : {Entry::varlen, Entry::varlen_holes, Entry::varlen_paged}) {
        CaseSpec spec{.name = "B28", .batch = 4, .hq = 4, .hkv = 1, .d = d, .dtype = DType::bf16};
        spec.entry = entry;
        spec.causal = causal;
        spec.lengths_q = {0, 5, 4, 0};
        spec.lengths_k = {7, 5, 4, 9};
        check_case(spec);
        std::swap(spec.lengths_q, spec.lengths_k);
        check_case(spec);
      }
    }
  }
}

TEST(Reported, B31RaggedCausalBatches) {
  CaseSpec spec{.name = "B31", .batch = 3, .dtype = DType::bf16, .entry = Entry::varlen};
  spec.causal = true;
  spec.lengths_q = spec.lengths_k = {130, 1, 65};
  check_case(spec);
  Random random(32);
  for (int i = 0; i < 40; ++i) {
    CaseSpec ragged{.name = "B31_" + std::to_string(i),
                    .batch = 1 + random.below(6),
                    .hq = 1,
                    .hkv = 1,
                    .d = 16};
    ragged.entry = every_entry[2 + random.below(4)];
    ragged.causal = random.below(3) != 0;
    ragged.window_left = random.below(3) == 0 ? random.below(100) : -1;
    for (Index b = 0; b < ragged.batch; ++b) {
      const bool none = random.below(6) == 0;
      ragged.lengths_q.push_back(none ? 0 : random.below(301));
      ragged.lengths_k.push_back(random.below(301));
    }
    if (ragged.entry == Entry::paged) ragged.sq = 40;
    if (ragged.entry == Entry::paged)
      ragged.lengths_q.assign(static_cast<std::size_t>(ragged.batch), 40);
    check_case(ragged);
  }
}

TEST(Reported, B32OneQueryAtMostAndEmptySequences) {
  CaseSpec spec{.name = "B32", .batch = 3, .hq = 9, .hkv = 3, .dtype = DType::bf16};
  spec.entry = Entry::varlen;
  spec.causal = true;
  spec.lengths_q = {1, 0, 1};
  spec.lengths_k = {3, 0, 5};
  check_case(spec);
  CaseSpec second{
      .name = "B32_second", .batch = 4, .hq = 21, .hkv = 7, .d = 120, .dtype = DType::bf16};
  second.entry = Entry::varlen;
  second.causal = true;
  second.lengths_q = second.lengths_k = {0, 0, 0, 1};
  check_case(second);
  for (const CaseSpec& s : {spec, second}) {
    Call call(s);
    call.problem.max_seqlen_q = 1;
    call.run();
    call.expect_memory_respected();
    call.expect_matches_oracle();
  }
}

// The forward half of B34.
TEST(Reported, B34SoftcapFormula) {
  for (const Softmax softmax : every_softmax) {
    for (const Index sq : {1, 20}) {
      CaseSpec spec{.name = "B34", .batch = 1, .hq = 1, .hkv = 1, .sq = sq, .sk = 4};
      spec.softcap = 10.0f;
      spec.softmax = softmax;
      SCOPED_TRACE(describe(spec));
      Call call(spec);
      call.fill_q([](Index, Index, Index, Index d) { return d == 0 ? 8.0 : 0.0; });
      call.fill_k([](Index, Index j, Index, Index d) {
        return d == 0 ? 8.0 * static_cast<double>(j) : 0.0;
      });
      call.fill_v(
          [](Index, Index j, Index, Index d) { return d == 0 ? static_cast<double>(j) : 0.0; });
      call.run();
      EXPECT_NEAR(call.out_at(0, 0, 0, 0), 2.6073842, 1e-5);
      EXPECT_EQ(call.out_at(0, 0, 0, 1), 0.0);
      EXPECT_NEAR(call.lse_at(0, 0, 0), 10.2934605, 1e-5);
      call.expect_matches_oracle();
    }
  }
}

// Hidden entries must not come back as -softcap, nor large logits as NaN.
TEST(Reported, B34SoftcapUnderAMask) {
  for (const double logits : {1.0, 100.0, 1e4}) {
    CaseSpec spec{.name = "B34_mask", .batch = 1, .sq = 70, .sk = 90};
    spec.softcap = 3.0f;
    spec.causal = true;
    spec.mask = Mask::empty_rows;
    spec.logits = logits;
    check_case(spec);
  }
}

}  // namespace
}  // namespace fovea::test
