// Reported faults of kind K1: rows that see nothing, what LSE means, and partial results.
// Each test is named after the case it restates.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const auto zero = [](Index, Index, Index, Index) { return 0.0; };
const auto one = [](Index, Index, Index, Index) { return 1.0; };

// For every entry point, split count and softmax policy.
template <typename Check>
void for_every_path(CaseSpec spec, Index sq, Index sk, const Check& check) {
  for (const Entry entry : every_entry) {
    for (const std::int32_t splits : {0, 1, 3}) {
      for (const Softmax softmax : every_softmax) {
        CaseSpec s = with_entry(spec, entry, sq, sk);
        s.num_splits = splits;
        s.softmax = softmax;
        SCOPED_TRACE(describe(s));
        check(s);
      }
    }
  }
}

TEST(Reported, B01KeylessRowsAreZeroWithLseMinusInfinity) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    CaseSpec spec{.name = "B01", .batch = 1, .hq = 1, .hkv = 1, .dtype = dtype, .causal = true};
    for_every_path(spec, 6, 2, [](const CaseSpec& s) {
      Call call(s);
      call.fill_q(zero);
      call.fill_k(zero);
      call.fill_v(one);
      call.poison_unseen();
      call.run();
      call.expect_memory_respected();
      call.expect_matches_oracle();
      constexpr double lse[] = {-infinity, -infinity, -infinity, -infinity, 0.0, 0.6931472};
      for (Index i = 0; i < 6; ++i) {
        for (Index d = 0; d < s.d; ++d) ASSERT_EQ(call.out_at(0, i, 0, d), i < 4 ? 0.0 : 1.0);
        if (i < 4) {
          EXPECT_EQ(call.lse_at(0, 0, i), -infinity);
        } else {
          EXPECT_NEAR(call.lse_at(0, 0, i), lse[i], 1e-6);
        }
      }
    });
  }
}

TEST(Reported, B01NoKeysAtAll) {
  CaseSpec spec{.name = "B01_none", .batch = 1, .hq = 2, .hkv = 1, .dtype = DType::bf16};
  for (const bool causal : {false, true}) {
    spec.causal = causal;
    for_every_path(spec, 6, 0, [](const CaseSpec& s) {
      Call call(s);
      call.run();
      call.expect_memory_respected();
      for (const double x : call.out.values()) ASSERT_EQ(x, 0.0);
      for (const double x : call.lse.values()) ASSERT_EQ(x, -infinity);
    });
  }
}

// Split-KV is the attention-side merge: parts without keys are neutral, whatever lies in them.
TEST(Reported, B02EmptyPartsOfASplitAreNeutral) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Index sq : {1, 40}) {
      for (const std::int32_t splits : {1, 2, 4, 8, 16}) {
        CaseSpec spec{.name = "B02",
                      .batch = 3,
                      .sq = sq,
                      .dtype = dtype,
                      .entry = Entry::paged,
                      .lengths_k = {1000, 0, 1},
                      .window_left = 10,
                      .window_right = 0,
                      .num_splits = splits};
        check_case(spec);
      }
    }
  }
}

TEST(Reported, B04MaskedRowsAgreeAcrossMasks) {
  Random random(5);
  std::vector<double> data;
  for (int i = 0; i < 3 * 64; ++i) data.push_back(random.uniform());
  const auto fill = [&data](Call& call, Index rows_before_second) {
    const auto value = [&](int which) {
      return [&, which](Index b, Index i, Index, Index d) {
        const Index row = b * rows_before_second + i;
        return data[static_cast<std::size_t>(which * 64 + row * 8 + d)];
      };
    };
    call.fill_q(value(0));
    call.fill_k(value(1));
    call.fill_v(value(2));
  };
  CaseSpec spec{.name = "B04", .batch = 1, .hq = 1, .hkv = 1, .sq = 8, .sk = 8, .d = 8};
  CaseSpec masked = spec;
  masked.mask = Mask::random;
  CaseSpec biased = spec;
  biased.bias = Bias::full;
  CaseSpec ragged = spec;
  ragged.batch = 2;
  ragged.entry = Entry::varlen;
  ragged.lengths_q = {4, 4};
  ragged.lengths_k = {4, 0};
  Call a(masked);
  Call b(biased);
  Call c(ragged);
  a.mask.fill([](Index, Index, Index i, Index j) { return i < 4 && j < 4 ? 1.0 : 0.0; });
  b.bias.fill([](Index, Index, Index i, Index j) { return i < 4 && j < 4 ? 0.0 : -HUGE_VAL; });
  for (Call* call : {&a, &b, &c}) {
    SCOPED_TRACE(describe(call->spec));
    fill(*call, 4);
    call->poison_unseen();
    call->run();
    call->expect_memory_respected();
    call->expect_matches_oracle();
  }
  for (Index i = 0; i < 8; ++i) {
    const Index sequence = i / 4;
    for (Index d = 0; d < 8; ++d) {
      EXPECT_EQ(a.out_at(0, i, 0, d), b.out_at(0, i, 0, d));
      EXPECT_NEAR(a.out_at(0, i, 0, d), c.out_at(sequence, i % 4, 0, d), 1e-6);
      EXPECT_TRUE(i < 4 || a.out_at(0, i, 0, d) == 0.0) << "row " << i;
    }
    if (i >= 4) {
      EXPECT_EQ(a.lse_at(0, 0, i), -infinity);
      EXPECT_EQ(b.lse_at(0, 0, i), -infinity);
      EXPECT_EQ(c.lse_at(1, 0, i - 4), -infinity);
    }
  }
}

TEST(Reported, B06KeylessRowsWithASink) {
  for (const Index sk : {0, 2}) {
    CaseSpec spec{.name = "B06",
                  .batch = 1,
                  .hq = 2,
                  .hkv = 2,
                  .dtype = DType::bf16,
                  .causal = true,
                  .sink = true};
    for_every_path(spec, 6, sk, [sk](const CaseSpec& s) {
      Call call(s);
      const auto sink = [](Index, Index, Index, Index h) { return h == 0 ? 0.5 : -1.0; };
      call.sink.fill(sink);
      call.poison_unseen();
      call.run();
      call.expect_memory_respected();
      call.expect_matches_oracle();
      for (Index h = 0; h < 2; ++h) {
        for (Index i = 0; i < 6 - sk; ++i) {
          EXPECT_EQ(call.lse_at(0, h, i), sink(0, 0, 0, h));
          for (Index d = 0; d < s.d; ++d) ASSERT_EQ(call.out_at(0, i, h, d), 0.0);
        }
      }
    });
  }
}

TEST(Reported, B06ASinkOfMinusInfinityIsNone) {
  for (const Index sk : {0, 70}) {
    CaseSpec spec{.name = "B06_none", .batch = 1, .sink = true};
    for_every_path(spec, 5, sk, [](const CaseSpec& s) {
      Call with(s);
      with.sink.fill([](Index, Index, Index, Index) { return -HUGE_VAL; });
      with.run();
      with.expect_matches_oracle();
      CaseSpec bare = s;
      bare.sink = false;
      Call without(bare);
      without.run();
      EXPECT_TRUE(same_bits(with.out.bytes(), without.out.bytes()));
      EXPECT_TRUE(same_bits(with.lse.bytes(), without.lse.bytes()));
    });
  }
}

TEST(Reported, B09LseIsTheNaturalLogarithm) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    CaseSpec spec{.name = "B09", .batch = 1, .hq = 1, .hkv = 1, .dtype = dtype};
    for_every_path(spec, 2, 8, [](const CaseSpec& s) {
      Call call(s);
      call.fill_q(zero);
      call.run();
      EXPECT_NEAR(call.lse_at(0, 0, 0), 2.0794415, 1e-5);
      EXPECT_NEAR(call.lse_at(0, 0, 1), 2.0794415, 1e-5);
    });
  }
  // Scale and softcap are inside, and the layout is (batch, head, row).
  CaseSpec spec{.name = "B09_layout", .batch = 3, .hq = 3, .hkv = 1, .sq = 4, .sk = 9};
  spec.softcap = 2.0f;
  spec.scale = 0.7f;
  for (const Entry entry : every_entry) check_case(with_entry(spec, entry, 4, 9));
}

}  // namespace
}  // namespace fovea::test
