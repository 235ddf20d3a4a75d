#include "core/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support.h"

namespace fovea::core {
namespace {

// A part of one row: an output element and its log-sum-exp.
struct Part {
  float out;
  float lse;
};

Part merge(Part a, Part b) {
  const Merge m = merge_parts(a.lse, b.lse);
  return {weighted(m.weight_a, a.out) + weighted(m.weight_b, b.out), m.lse};
}

bool same_bits(Part a, Part b) {
  return bits_of(a.out) == bits_of(b.out) && bits_of(a.lse) == bits_of(b.lse);
}

TEST(CoreSoftmax, EmptyPartsAreNeutralWhateverTheyHold) {
  const float nan = std::nanf("");
  for (const float lse : {-80.25f, 0.0f, 3.0f, -1e30f, 1e30f, 88.0f}) {
    for (const float out : {3.0f, -2.0f, 1e38f, 0.0f}) {
      const Part part{out, lse};
      for (const float garbage : {0.0f, nan, infinity, -infinity, -5.0f}) {
        const Part empty{garbage, -infinity};
        EXPECT_TRUE(same_bits(merge(part, empty), part)) << out << " " << lse << " " << garbage;
        EXPECT_TRUE(same_bits(merge(empty, part), part)) << out << " " << lse << " " << garbage;
      }
    }
  }
  const Part nothing = merge({nan, -infinity}, {nan, -infinity});
  EXPECT_EQ(nothing.out, 0.0f);
  EXPECT_EQ(nothing.lse, -infinity);
}

TEST(CoreSoftmax, MergeIsCommutativeAndAssociative) {
  test::Random random(4);
  for (int i = 0; i < 20000; ++i) {
    Part part[3];
    for (Part& p : part) {
      p = {static_cast<float>(random.normal()), static_cast<float>(random.cauchy() * 5)};
      if (random.below(8) == 0) p.lse = -infinity;
    }
    EXPECT_TRUE(same_bits(merge(part[0], part[1]), merge(part[1], part[0])));
    const Part left = merge(merge(part[0], part[1]), part[2]);
    const Part right = merge(part[0], merge(part[1], part[2]));
    ASSERT_NEAR(left.out, right.out, 2e-6);
    if (left.lse == -infinity) {
      ASSERT_EQ(right.lse, -infinity);
    } else {
      ASSERT_NEAR(left.lse, right.lse, 1e-6 + 2e-7 * std::abs(left.lse));
    }
  }
}

TEST(CoreSoftmax, MergeAgreesWithDoublePrecision) {
  test::Random random(5);
  for (int i = 0; i < 20000; ++i) {
    const auto a = static_cast<float>(random.normal() * 20);
    const auto b = static_cast<float>(random.normal() * 20);
    const Merge m = merge_parts(a, b);
    const double top = std::max(a, b);
    const double sum = std::exp(a - top) + std::exp(b - top);
    ASSERT_NEAR(m.lse, top + std::log(sum), 5e-7 + 2e-7 * std::abs(top));
    // (a - b) * log2(e) is rounded at |a - b|, which costs the smaller weight relative precision.
    ASSERT_NEAR(m.weight_a, std::exp(a - top) / sum, 5e-7);
    ASSERT_NEAR(m.weight_a + m.weight_b, 1.0, 3e-7);
  }
}

TEST(CoreSoftmax, NanIsNotHidden) {
  const float nan = std::nanf("");
  EXPECT_TRUE(is_nan(merge_parts(nan, 1.0f).lse));
  EXPECT_TRUE(is_nan(merge_parts(1.0f, nan).lse));
  EXPECT_TRUE(is_nan(row_lse({0.0f, nan})));
  EXPECT_TRUE(is_nan(weighted(0.5f, nan)));
}

TEST(CoreSoftmax, GuardExponentBracketsTheSum) {
  test::Random random(6);
  for (int i = 0; i < 100000; ++i) {
    const auto sum = static_cast<float>(std::exp2(random.uniform() * 127.0));
    const int exponent = guard_exponent(sum);
    ASSERT_LE(std::ldexp(1.0, exponent), sum);
    ASSERT_GT(std::ldexp(1.0, exponent + 1), sum);
  }
  EXPECT_EQ(guard_exponent(256.0f), 8);
  EXPECT_EQ(guard_exponent(511.99997f), 8);
  EXPECT_EQ(guard_exponent(3.4028235e38f), 127);
}

TEST(CoreSoftmax, ReferenceRisesOnlyBeyondTheThreshold) {
  const float none = -infinity;
  EXPECT_EQ(raise_reference(none, none, 0.0f).reference, none);
  EXPECT_EQ(raise_reference(none, -3.0f, 8.0f).reference, -3.0f);
  EXPECT_EQ(raise_reference(2.0f, none, 0.0f).reference, 2.0f);
  EXPECT_EQ(raise_reference(2.0f, none, 0.0f).factor_log2, 0.0f);
  EXPECT_EQ(raise_reference(2.0f, 2.5f, 0.0f).reference, 2.5f);
  EXPECT_EQ(raise_reference(2.0f, 2.5f, 0.0f).factor_log2, -0.5f);
  EXPECT_EQ(raise_reference(2.0f, 10.0f, 8.0f).reference, 2.0f);
  EXPECT_EQ(raise_reference(2.0f, 10.5f, 8.0f).reference, 10.5f);
  EXPECT_EQ(raise_reference(2.0f, 10.5f, 8.0f).factor_log2, -8.5f);
  EXPECT_EQ(raise_reference(2.0f, 1.0f, 0.0f).reference, 2.0f);
}

// The row state carried over tiles by raise_reference() is the softmax, for any threshold.
TEST(CoreSoftmax, RowStateOverTilesIsTheSoftmax) {
  test::Random random(7);
  for (int i = 0; i < 2000; ++i) {
    const float threshold = i % 2 == 0 ? 0.0f : rescale_threshold_log2;
    RowState row;
    std::vector<double> seen;
    double top = -HUGE_VAL;
    for (int tile = 0; tile < 6; ++tile) {
      std::vector<float> logits(5);
      float tile_max = -infinity;
      for (float& t : logits) {
        t = random.below(4) == 0 ? -infinity : static_cast<float>(random.cauchy() * 10);
        tile_max = std::max(tile_max, t);
        if (t > -infinity) seen.push_back(t);
      }
      const Rescale rescale = raise_reference(row.reference, tile_max, threshold);
      if (rescale.factor_log2 < 0.0f) row.sum *= exp2_polynomial<6>(rescale.factor_log2);
      row.reference = rescale.reference;
      for (const float t : logits) {
        if (t > -infinity) row.sum += exp2_polynomial<6>(t - row.reference);
      }
      top = std::max(top, static_cast<double>(tile_max));
      if (top > -HUGE_VAL) {
        ASSERT_LE(row.reference, top);
        ASSERT_GE(row.reference, top - threshold);
      }
    }
    double sum = 0.0;
    for (const double t : seen) sum += std::exp2(t - top);
    const double lse = seen.empty() ? -HUGE_VAL : (top + std::log2(sum)) * std::log(2.0);
    if (seen.empty()) {
      ASSERT_EQ(row_lse(row), -infinity);
    } else {
      ASSERT_NEAR(row_lse(row), lse, 2e-6 + 2e-7 * std::abs(lse));
    }
  }
}

TEST(CoreSoftmax, LseOfAFinishedRow) {
  EXPECT_EQ(row_lse({}), -infinity);
  EXPECT_EQ(row_lse({0.0f, 1.0f}), 0.0f);
  EXPECT_NEAR(row_lse({3.0f, 1.0f}), 2.0794415, 1e-6);
  EXPECT_NEAR(row_lse({-1e5f, 8.0f}), -69312.639, 0.008);
}

}  // namespace
}  // namespace fovea::core
