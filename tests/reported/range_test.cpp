// Reported faults of kinds K2, K3 and K11: extreme logits, garbage outside the problem, precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/reference.h"
#include "tests/call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

auto constant(double value) {
  return [value](Index, Index, Index, Index) { return value; };
}

// Many queries take the packed path of the CPU engine, one query the streamed one.
constexpr Index few_and_many[] = {1, 50};

TEST(Reported, B10LogitsBelowEveryFiniteSentinel) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Softmax softmax : every_softmax) {
      for (const Index sq : few_and_many) {
        CaseSpec spec{.name = "B10",
                      .batch = 1,
                      .hq = 1,
                      .hkv = 1,
                      .sq = sq,
                      .sk = 4,
                      .d = 128,
                      .dtype = dtype,
                      .softmax = softmax};
        SCOPED_TRACE(describe(spec));
        Call call(spec);
        call.fill_q([](Index, Index, Index, Index d) { return d == 0 ? 250.0 : 0.0; });
        call.fill_k([](Index, Index j, Index, Index d) {
          return d == 0 ? -1000.0 - 8.0 * static_cast<double>(j) : 0.0;
        });
        call.fill_v([](Index, Index j, Index, Index) { return static_cast<double>(j + 1); });
        call.run();
        for (Index i = 0; i < sq; ++i) {
          EXPECT_EQ(call.out_at(0, i, 0, 5), 1.0);
          EXPECT_NEAR(call.lse_at(0, 0, i), -22097.087, 0.005);
        }
        call.expect_matches_oracle();
      }
    }
  }
}

// The same at any level of the logits, both signs, for rows longer than a tile. The scale is no
// power of two, so that every way of computing has to round its product.
TEST(Reported, B10AnyLevelOfTheLogits) {
  for (const double level : {-1e6, -1e5, -1e4, -200.0, -100.0, 100.0, 200.0, 1e4, 1e5, 1e6}) {
    for (const Softmax softmax : every_softmax) {
      for (const Index sq : few_and_many) {
        CaseSpec spec{.name = "B10_level",
                      .batch = 1,
                      .hq = 1,
                      .hkv = 1,
                      .sq = sq,
                      .sk = 300,
                      .d = 8,
                      .scale = 0.3f,
                      .softmax = softmax};
        SCOPED_TRACE(describe(spec) + " level=" + std::to_string(level));
        Call call(spec);
        call.fill_q([](Index, Index, Index, Index d) { return d == 0 ? 1.0 : 0.0; });
        Random random(10);
        call.fill_k([&](Index, Index, Index, Index) { return (level + random.normal()) / 0.3; });
        call.run();
        // A logit is rounded once at its own size, in whatever unit it is kept: that alone may move
        // a weight by 2^-24 * |level|.
        const core::Problem p = to_core(call.problem);
        const auto exact = cpu::reference_forward(p);
        const auto naive = cpu::naive_forward(p);
        const double moved = std::abs(level) * 0x1p-24;
        Floor floor = out_floor(DType::f32, DType::f32, exact.out);
        floor.absolute += moved * largest_magnitude(exact.out);
        floor.whole += moved * moved;
        EXPECT_TRUE(close_to(call.out.values(), exact.out, naive.out, floor)) << "out";
        EXPECT_TRUE(close_to(call.lse.values(), exact.lse, naive.lse, lse_floor())) << "lse";
      }
    }
  }
}

TEST(Reported, B12WindowHidesWholeEarlyBlocks) {
  for (const Softmax softmax : every_softmax) {
    for (const int expressed : {0, 1, 2}) {  // as window, as bias, as mask
      CaseSpec spec{.name = "B12",
                    .batch = 1,
                    .hq = 1,
                    .hkv = 1,
                    .sq = 640,
                    .sk = 640,
                    .d = 4,
                    .softmax = softmax};
      if (expressed == 0) {
        spec.window_left = 9;
        spec.window_right = 0;
      }
      if (expressed == 1) spec.bias = Bias::full;
      if (expressed == 2) spec.mask = Mask::random;
      SCOPED_TRACE(describe(spec));
      Call call(spec);
      call.fill_q(constant(1.0));
      call.fill_k(constant(1.0));
      call.fill_v(constant(1.0));
      const auto inside = [](Index i, Index j) { return j <= i && j >= i - 9; };
      if (expressed == 1) {
        call.bias.fill(
            [&](Index, Index, Index i, Index j) { return inside(i, j) ? 0.0 : -HUGE_VAL; });
      }
      if (expressed == 2) {
        call.mask.fill([&](Index, Index, Index i, Index j) { return inside(i, j) ? 1.0 : 0.0; });
      }
      call.run();
      for (Index i = 0; i < 640; ++i) {
        ASSERT_NEAR(call.out_at(0, i, 0, 0), 1.0, 1e-6) << i;
        ASSERT_NEAR(call.lse_at(0, 0, i),
                    2 + std::log(std::min<double>(static_cast<double>(i) + 1, 10)), 1e-5)
            << i;
      }
    }
  }
}

// Whole blocks hidden in front, inside and behind, in every arrangement of eight blocks.
TEST(Reported, B12AnyPatternOfHiddenBlocks) {
  for (const Softmax softmax : every_softmax) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      CaseSpec spec{.name = "B12_blocks",
                    .batch = 1,
                    .hq = 1,
                    .hkv = 1,
                    .sq = 256,
                    .sk = 512,
                    .d = 16,
                    .dtype = dtype,
                    .mask = Mask::random,
                    .softmax = softmax};
      SCOPED_TRACE(describe(spec));
      Call call(spec);
      // Row i sees block b if bit b of i is set: row 0 sees nothing, row 255 everything.
      call.mask.fill(
          [](Index, Index, Index i, Index j) { return ((i >> (j / 64)) & 1) != 0 ? 1.0 : 0.0; });
      call.poison_unseen();
      call.run();
      call.expect_matches_oracle();
    }
  }
}

TEST(Reported, B13HugeInputsWithATrivialSoftmax) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const double c : {66560.0, 98304.0, 120832.0}) {
      for (const Index sk : {1, 3, 200}) {
        for (const Index sq : few_and_many) {
          for (const Softmax softmax : every_softmax) {
            CaseSpec spec{.name = "B13",
                          .batch = 1,
                          .hq = 1,
                          .hkv = 1,
                          .sq = sq,
                          .sk = sk,
                          .dtype = dtype,
                          .softmax = softmax};
            SCOPED_TRACE(describe(spec));
            Call call(spec);
            call.fill_q(constant(c));
            call.fill_k(constant(c));
            call.fill_v(constant(c));
            call.run();
            const double lse = 8 * c * c;
            for (Index i = 0; i < sq; ++i) {
              // fp32 sums of sk products: exact for one key, otherwise to rounding.
              EXPECT_NEAR(call.out_at(0, i, 0, 0), c,
                          sk == 1 || dtype == DType::bf16 ? 0.0 : c * 1e-6);
              EXPECT_NEAR(call.lse_at(0, 0, i), lse, 1e-6 * lse);
            }
          }
        }
      }
    }
  }
}

// The forward half of B14: padding columns of the last tile must not count where real logits are
// far from zero, on either side.
TEST(Reported, B14PaddingOfTheLastTileIsHidden) {
  for (const Index length : {64, 100, 129, 192, 320}) {
    for (const double level : {-960.0, 960.0}) {
      for (const bool causal : {false, true}) {
        CaseSpec spec{.name = "B14",
                      .batch = 1,
                      .hq = 1,
                      .hkv = 1,
                      .sq = length,
                      .sk = length,
                      .dtype = DType::bf16,
                      .causal = causal};
        SCOPED_TRACE(describe(spec));
        Call call(spec);
        Random random(15);
        call.fill_q(
            [&](Index, Index, Index, Index d) { return d == 0 ? 1.0 : 0.1 * random.normal(); });
        call.fill_k(
            [&](Index, Index, Index, Index d) { return d == 0 ? level : 0.1 * random.normal(); });
        call.run();
        call.expect_matches_oracle();
      }
    }
  }
}

TEST(Reported, B16UnusedCacheSlotsAreNeverUsed) {
  for (const Entry entry :
       {Entry::seqused, Entry::varlen_holes, Entry::paged, Entry::varlen_paged}) {
    for (const double garbage : {nan, infinity, -infinity, 1e30}) {
      for (const std::int32_t splits : {0, 1, 3}) {
        CaseSpec spec = with_entry(
            {.name = "B16", .batch = 2, .hq = 1, .hkv = 1, .dtype = DType::f16}, entry, 1, 3);
        spec.lengths_k = {1, 3};
        spec.num_splits = splits;
        SCOPED_TRACE(describe(spec));
        Call call(spec);
        call.q.fill(constant(garbage));
        call.k.fill(constant(garbage));
        call.v.fill(constant(garbage));
        call.fill_q(constant(0.5));
        call.fill_k(constant(0.5));
        call.fill_v(constant(1.0));
        call.run();
        call.expect_memory_respected();
        for (Index b = 0; b < 2; ++b) {
          for (Index d = 0; d < 64; ++d) ASSERT_EQ(call.out_at(b, 0, 0, d), 1.0);
        }
        EXPECT_NEAR(call.lse_at(0, 0, 0), 2.0, 1e-6);
        EXPECT_NEAR(call.lse_at(1, 0, 0), 3.0986123, 1e-5);
        call.expect_matches_oracle();
      }
    }
  }
}

TEST(Reported, B18HiddenKeysAreSelectedAwayNotAdded) {
  for (const Index sq : {2, 50}) {
    for (const int hidden_by : {0, 1, 2}) {  // mask, bias of -infinity, length
      for (const double garbage : {nan, 1e30, infinity, -infinity}) {
        for (const bool in_k : {true, false}) {
          CaseSpec spec{.name = "B18", .batch = 1, .hq = 1, .hkv = 1, .sq = sq, .sk = 2, .d = 4};
          if (hidden_by == 0) spec.mask = Mask::random;
          if (hidden_by == 1) spec.bias = Bias::full;
          if (hidden_by == 2) spec.entry = Entry::seqused;
          if (hidden_by == 2) spec.lengths_k = {1};
          SCOPED_TRACE(describe(spec));
          Call call(spec);
          const auto value = [](Index, Index i, Index, Index d) {
            return static_cast<double>(4 * (i % 2) + d);
          };
          call.fill_q(value);
          call.fill_k(value);
          call.fill_v(value);
          for (Index d = 0; d < 4; ++d) (in_k ? call.k : call.v).set(0, 1, 0, d, garbage);
          if (hidden_by == 0) {
            call.mask.fill([](Index, Index, Index, Index j) { return j == 0 ? 1.0 : 0.0; });
          }
          if (hidden_by == 1) {
            call.bias.fill([](Index, Index, Index, Index j) { return j == 0 ? 0.0 : -HUGE_VAL; });
          }
          call.run();
          for (Index i = 0; i < sq; ++i) {
            for (Index d = 0; d < 4; ++d) {
              ASSERT_EQ(call.out_at(0, i, 0, d), static_cast<double>(d)) << "row " << i;
            }
          }
          call.expect_matches_oracle();
        }
      }
    }
  }
}

// The other side of containment: what a row does see reaches it, and no other row. A NaN in K makes
// the whole row NaN, one in V its column; the rows that do not see the key stay exact.
TEST(Reported, B18NanReachesExactlyTheRowsThatSeeIt) {
  for (const Entry entry : {Entry::dense, Entry::paged}) {
    for (const Index sq : {2, 130}) {
      for (const Index place : {0, 60, 149}) {
        for (const bool in_k : {true, false}) {
          for (const bool masked : {false, true}) {
            for (const Softmax softmax : every_softmax) {
              CaseSpec spec = with_entry({.name = "B18_visible",
                                          .batch = 2,
                                          .d = 24,
                                          .dtype = DType::bf16,
                                          .causal = true,
                                          .softmax = softmax},
                                         entry, sq, 150);
              spec.mask = masked ? Mask::random : Mask::none;
              SCOPED_TRACE(describe(spec) + " key " + std::to_string(place));
              Call call(spec);
              if (in_k) {
                call.set_k(1, place, 0, 3, nan);
              } else {
                call.set_v(1, place, 0, 3, nan);
              }
              call.run();
              call.expect_memory_respected();
              call.expect_matches_oracle();
            }
          }
        }
      }
    }
  }
}

// The forward half of B19.
TEST(Reported, B19SlackRowsOfOutputsAreDefined) {
  for (const Entry entry :
       {Entry::varlen, Entry::varlen_holes, Entry::seqused, Entry::varlen_paged}) {
    CaseSpec spec =
        with_entry({.name = "B19", .batch = 2, .d = 32, .dtype = DType::bf16}, entry, 5, 5);
    spec.lengths_q = {4, 5};
    spec.lengths_k = {4, 5};
    SCOPED_TRACE(describe(spec));
    Call call(spec);
    call.run();
    call.expect_memory_respected();
    call.expect_matches_oracle();
    Index undefined = 0;
    for (const double x : call.out.values()) undefined += std::isnan(x) ? 1 : 0;
    for (const double x : call.lse.values()) undefined += std::isnan(x) ? 1 : 0;
    EXPECT_EQ(undefined, 0);
  }
}

TEST(Reported, B62Fp32ProductsKeepTheirBits) {
  for (const Softmax softmax : every_softmax) {
    for (const Index sq : few_and_many) {
      CaseSpec spec{.name = "B62",
                    .batch = 1,
                    .hq = 1,
                    .hkv = 1,
                    .sq = sq,
                    .sk = 1,
                    .scale = 1.0f,
                    .softmax = softmax};
      SCOPED_TRACE(describe(spec));
      Call call(spec);
      const auto fine = constant(1.0 + 0x1p-12);
      call.fill_q(fine);
      call.fill_k(constant(1.0));
      call.fill_v(fine);
      call.run();
      for (Index i = 0; i < sq; ++i) {
        // ln(2) * log2(e) is not 1 in fp32: the sum is exact, the unit costs one rounding.
        EXPECT_NEAR(call.lse_at(0, 0, i), 64.015625, 1e-5);
        EXPECT_EQ(call.out_at(0, i, 0, 0), 1.000244140625);
      }
    }
  }
  CaseSpec spec{.name = "B62_random", .batch = 1, .sq = 256, .sk = 256};
  Call call(spec);
  call.run();
  const auto exact = cpu::reference_forward(to_core(call.problem));
  EXPECT_LT(largest_error(call.out.values(), exact.out) / largest_magnitude(exact.out), 1e-5);
}

}  // namespace
}  // namespace fovea::test
