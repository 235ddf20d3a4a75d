// Reported faults of the backward pass, of kinds K1 to K7 and K12. Each test is named after the
// case it restates.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/backward_call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

constexpr Entry unpaged[] = {Entry::dense, Entry::seqused, Entry::varlen, Entry::varlen_holes};
const auto zero = [](Index, Index, Index, Index) { return 0.0; };

void expect_zero_row(const HostTensor& tensor, Index batch, Index row) {
  for (Index h = 0; h < tensor.shape()[2]; ++h) {
    for (Index d = 0; d < tensor.shape()[3]; ++d) ASSERT_EQ(tensor.at(batch, row, h, d), 0.0);
  }
}

TEST(Reported, B05EmptyRowsLeaveTheGradientsOfOthersAlone) {
  CaseSpec spec{
      .name = "B05", .batch = 1, .hq = 1, .hkv = 1, .sq = 4, .sk = 2, .d = 8, .causal = true};
  BackwardCall whole(spec);
  whole.call.poison_unseen();
  whole.run();
  whole.expect_matches_oracle();
  expect_zero_row(whole.dq, 0, 0);
  expect_zero_row(whole.dq, 0, 1);
  spec.sq = 2;
  BackwardCall part(spec);
  const auto lower = [](const HostTensor& from) {
    return [&from](Index b, Index i, Index h, Index d) { return from.at(b, i + 2, h, d); };
  };
  const auto same = [](const HostTensor& from) {
    return [&from](Index b, Index j, Index h, Index d) { return from.at(b, j, h, d); };
  };
  part.call.fill_q(lower(whole.call.q));
  part.call.fill_k(same(whole.call.k));
  part.call.fill_v(same(whole.call.v));
  part.dout.fill(lower(whole.dout));
  part.run();
  EXPECT_TRUE(same_bits(part.dk.bytes(), whole.dk.bytes())) << "dk";
  EXPECT_TRUE(same_bits(part.dv.bytes(), whole.dv.bytes())) << "dv";
}

// Logits near -120: a padded column with score 0 would overflow.
TEST(Reported, B14PaddedColumnsDoNotOverflow) {
  for (const Index length : {64, 100, 129, 192, 320}) {
    for (const bool causal : {false, true}) {
      CaseSpec spec{.name = "B14",
                    .batch = 1,
                    .hq = 1,
                    .hkv = 1,
                    .sq = length,
                    .sk = length,
                    .dtype = DType::bf16,
                    .causal = causal};
      BackwardCall backward(spec);
      Random random(15);
      backward.call.fill_q(
          [&](Index, Index, Index, Index d) { return d == 0 ? 1.0 : 0.1 * random.normal(); });
      backward.call.fill_k(
          [&](Index, Index, Index, Index d) { return d == 0 ? -960.0 : 0.1 * random.normal(); });
      backward.run();
      backward.expect_matches_oracle();
      for (const double x : backward.dq.values()) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

TEST(Reported, B18GarbageInHiddenKeysReachesNoGradient) {
  for (const double garbage : {static_cast<double>(NAN), 1e30, HUGE_VAL}) {
    for (const Entry entry : unpaged) {
      CaseSpec spec{.name = "B18", .batch = 1, .hq = 1, .hkv = 1, .d = 4, .mask = Mask::per_key};
      BackwardCall backward(with_entry(spec, entry, 2, 2));
      Call& call = backward.call;
      call.mask.set(0, 0, 0, 0, 1.0);
      call.mask.set(0, 0, 0, 1, 0.0);
      for (Index d = 0; d < 4; ++d) {
        call.set_k(0, 1, 0, d, garbage);
        call.set_v(0, 1, 0, d, garbage);
      }
      backward.run();
      backward.expect_matches_oracle();
      const Call::Place hidden = call.row_k(0, 1);
      expect_zero_row(backward.dk, hidden.batch, hidden.row);
      expect_zero_row(backward.dv, hidden.batch, hidden.row);
      for (const double x : backward.dq.values()) ASSERT_EQ(x, 0.0);  // one key: constant softmax
    }
  }
}

TEST(Reported, B19SlackRowsGetZero) {
  for (const Entry entry : {Entry::varlen, Entry::varlen_holes}) {
    const CaseSpec spec{.name = "B19",
                        .batch = 2,
                        .d = 32,
                        .dtype = DType::bf16,
                        .entry = entry,
                        .lengths_q = {4, 5},
                        .lengths_k = {4, 5}};
    BackwardCall backward(spec);
    backward.run();
    backward.expect_matches_oracle();  // every element, those of slack rows too
    expect_zero_row(backward.dq, 0, backward.dq.shape()[1] - 1);
    expect_zero_row(backward.dk, 0, backward.dk.shape()[1] - 1);
    expect_zero_row(backward.dv, 0, backward.dv.shape()[1] - 1);
  }
}

TEST(Reported, B26FewKeysAgainstManyQueries) {
  const CaseSpec spec{.name = "B26",
                      .batch = 3,
                      .d = 32,
                      .dtype = DType::f16,
                      .entry = Entry::varlen,
                      .lengths_q = {70, 30, 100},
                      .lengths_k = {1, 1, 2},
                      .causal = true,
                      .logits = 9.0};
  BackwardCall backward(spec, {.plain_dout = true});
  backward.run();
  backward.expect_matches_oracle();
  // One key: the softmax is constant, and its value's gradient is dout of the one row that sees it.
  for (const Index b : {0, 1}) {
    for (Index i = 0; i < backward.call.length_q(b); ++i) {
      const Call::Place place = backward.call.row_q(b, i);
      expect_zero_row(backward.dq, place.batch, place.row);
    }
    const Call::Place key = backward.call.row_k(b, 0);
    for (Index h = 0; h < 2; ++h) {
      for (Index d = 0; d < 32; ++d) EXPECT_EQ(backward.dv.at(key.batch, key.row, h, d), 1.0);
    }
  }
}

TEST(Reported, B27EmptyTensorsHaveGradientsOfZero) {
  struct Extents {
    Index batch, sq, sk;
  };
  for (const auto& [batch, sq, sk] : {Extents{2, 3, 0}, {2, 0, 4}, {0, 3, 4}, {2, 0, 0}}) {
    for (const Entry entry : {Entry::dense, Entry::varlen}) {
      for (const std::int32_t splits : {0, 3}) {
        CaseSpec spec{.name = "B27",
                      .batch = batch,
                      .hq = 4,
                      .hkv = 4,
                      .dtype = DType::bf16,
                      .causal = splits == 0,
                      .num_splits = splits};
        spec = with_entry(spec, entry, sq, sk);
        SCOPED_TRACE(describe(spec));
        BackwardCall backward(spec);
        backward.run();
        for (const HostTensor* tensor : {&backward.dq, &backward.dk, &backward.dv}) {
          for (const double x : tensor->values()) ASSERT_EQ(x, 0.0);
        }
      }
    }
  }
}

TEST(Reported, B28SequencesWithoutQueriesOrKeys) {
  for (const Index d : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      CaseSpec spec{.name = "B28",
                    .batch = 4,
                    .hq = 4,
                    .hkv = 1,
                    .d = d,
                    .dtype = DType::bf16,
                    .entry = Entry::varlen,
                    .lengths_q = {0, 5, 4, 0},
                    .lengths_k = {7, 5, 4, 9},
                    .causal = causal};
      BackwardCall backward(spec);
      backward.run();
      backward.expect_matches_oracle();
      for (const Index row : {0, 6, 16, 24}) {
        expect_zero_row(backward.dk, 0, row);
        expect_zero_row(backward.dv, 0, row);
      }
    }
  }
}

TEST(Reported, B34SoftcapAndItsSlope) {
  const CaseSpec spec{
      .name = "B34", .batch = 1, .hq = 1, .hkv = 1, .sq = 1, .sk = 4, .softcap = 10.0f};
  BackwardCall backward(spec);
  const auto first_channel = [](double factor) {
    return [factor](Index, Index j, Index, Index d) {
      return d == 0 ? factor * static_cast<double>(j) : 0.0;
    };
  };
  backward.call.fill_q([](Index, Index, Index, Index d) { return d == 0 ? 8.0 : 0.0; });
  backward.call.fill_k(first_channel(8.0));
  backward.call.fill_v(first_channel(1.0));
  backward.dout.fill([](Index, Index, Index, Index d) { return d == 0 ? 1.0 : 0.0; });
  backward.run();
  EXPECT_NEAR(backward.call.out_at(0, 0, 0, 0), 2.6073842, 1e-6);
  EXPECT_NEAR(backward.dq.at(0, 0, 0, 0), -0.0614230, 1e-6);
  constexpr double dk[] = {-8.827e-5, -0.0232839, -0.0311488, 0.0080528};
  for (Index j = 0; j < 4; ++j) EXPECT_NEAR(backward.dk.at(0, j, 0, 0), dk[j], 2e-7);
}

TEST(Reported, B36GradientOfTheReturnedLse) {
  const CaseSpec spec{.name = "B36", .batch = 1, .hq = 1, .hkv = 1, .sq = 1, .sk = 5, .d = 4};
  BackwardCall backward(spec, {.dlse = true});
  backward.call.fill_q(zero);
  backward.dout.fill(zero);
  backward.dlse.fill([](Index, Index, Index, Index) { return 1.0; });
  backward.run();
  for (Index d = 0; d < 4; ++d) {
    double mean = 0.0;
    for (Index j = 0; j < 5; ++j) mean += backward.call.k.at(0, j, 0, d) / 5.0;
    EXPECT_NEAR(backward.dq.at(0, 0, 0, d), 0.5 * mean, 1e-6);
  }
  for (const double x : backward.dk.values()) EXPECT_EQ(x, 0.0);
  for (const double x : backward.dv.values()) EXPECT_EQ(x, 0.0);
}

TEST(Reported, B37GradientOfTheSink) {
  for (const bool with_lse : {false, true}) {
    const CaseSpec spec{
        .name = "B37", .batch = 1, .hq = 1, .hkv = 1, .sq = 2, .sk = 3, .d = 4, .sink = true};
    BackwardCall backward(spec, {.dlse = with_lse});
    backward.call.fill_q(zero);
    backward.call.fill_v(
        [](Index, Index j, Index, Index d) { return d == 0 ? static_cast<double>(j) : 0.0; });
    backward.call.sink.fill(zero);
    backward.dout.fill([](Index, Index, Index, Index d) { return d == 0 ? 1.0 : 0.0; });
    if (with_lse) backward.dlse.fill([](Index, Index, Index, Index) { return 1.0; });
    backward.run();
    EXPECT_NEAR(backward.dsink.at(0, 0, 0, 0), with_lse ? 0.125 : -0.375, 1e-6);
  }
}

// B39, B41: every layout of dout and of the gradients gives the bits of the contiguous call.
TEST(Reported, B39LayoutsOfDout) {
  CaseSpec spec{.name = "B39",
                .batch = 2,
                .hq = 4,
                .hkv = 1,
                .sq = 32,
                .sk = 32,
                .d = 128,
                .dtype = DType::f16};
  BackwardCall contiguous(spec);
  contiguous.run();
  for (const Layout layout :
       {Layout::bhsd, Layout::padded, Layout::strided, Layout::transposed, Layout::reversed}) {
    spec.layout = layout;
    BackwardCall other(spec);
    const auto copy = [](HostTensor& to, const HostTensor& from) {
      to.fill([&](Index a, Index b, Index c, Index d) { return from.at(a, b, c, d); });
    };
    copy(other.call.q, contiguous.call.q);
    copy(other.call.k, contiguous.call.k);
    copy(other.call.v, contiguous.call.v);
    copy(other.dout, contiguous.dout);
    other.run();
    EXPECT_TRUE(same_bits(other.bytes(), contiguous.bytes())) << static_cast<int>(layout);
  }
}

TEST(Reported, B42OneNumberForAllOfDout) {
  const CaseSpec spec{
      .name = "B42", .batch = 1, .sq = 5, .sk = 5, .d = 8, .dtype = DType::bf16, .causal = true};
  BackwardCall plain(spec, {.plain_dout = true});
  plain.run();
  BackwardCall filled(spec);
  filled.dout.fill([](Index, Index, Index, Index) { return 1.0; });
  filled.run();
  EXPECT_TRUE(same_bits(plain.bytes(), filled.bytes()));
}

TEST(Reported, B48HeadDimsBetweenTiles) {
  for (const Index d : {8, 40, 72, 80, 104, 136}) {
    for (const bool causal : {false, true}) {
      for (const Entry entry : {Entry::dense, Entry::varlen}) {
        const CaseSpec spec{
            .name = "B48", .batch = 1, .d = d, .dtype = DType::bf16, .causal = causal};
        check_backward_case(with_entry(spec, entry, 160, 160));
      }
    }
  }
}

TEST(Reported, B62GradientsInFullPrecision) {
  const CaseSpec spec{.name = "B62", .batch = 1, .hq = 1, .hkv = 1, .sq = 256, .sk = 256};
  BackwardCall backward(spec);
  backward.run();
  backward.expect_matches_oracle();  // 3 times the error of fp32 products
}

// The same bits in every run; the parts of a head are fixed, so that threads may not matter.
TEST(Reported, B63GradientsRepeatToTheBit) {
  for (const Index left : {Index{-1}, Index{100}}) {
    CaseSpec spec{.name = "B63",
                  .batch = 3,
                  .hq = 8,
                  .hkv = 2,
                  .dtype = DType::bf16,
                  .entry = Entry::varlen,
                  .lengths_q = {300, 24, 1},
                  .lengths_k = {300, 24, 1},
                  .causal = true,
                  .window_left = left,
                  .sink = true,
                  .bias = Bias::per_head,
                  .num_splits = 2};
    BackwardCall backward(spec);
    backward.run();
    const std::vector<std::byte> bytes = backward.bytes();
    for (const int threads : {1, 2, 3, 1}) {
      backward.threads = threads;
      backward.run_backward();
      EXPECT_TRUE(same_bits(backward.bytes(), bytes)) << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace fovea::test
