// Reported faults of kinds K7, K8 and K9: strides and alignment, extents beyond 16 bits, head dims
// and head ratios.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>

#include "tests/call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

const auto zero = [](Index, Index, Index, Index) { return 0.0; };

// B41: the last dimension not contiguous. B43: base and pitch aligned to nothing. The numbers are
// those of a contiguous copy to the bit: a layout is addressing, nothing else.
TEST(Reported, B41B43LayoutsGiveTheBitsOfAContiguousCopy) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const Index d : {16, 46, 64}) {
      for (const Index sq : {1, 9, 40}) {
        CaseSpec spec{.name = "B41",
                      .batch = 2,
                      .hq = 4,
                      .hkv = 2,
                      .sq = sq,
                      .sk = 40,
                      .d = d,
                      .dtype = dtype};
        Call contiguous(spec);
        contiguous.run();
        for (const Layout layout : {Layout::bhsd, Layout::padded, Layout::strided,
                                    Layout::transposed, Layout::reversed, Layout::fused}) {
          spec.layout = layout;
          SCOPED_TRACE(describe(spec));
          Call call(spec);
          call.run();
          call.expect_memory_respected();
          EXPECT_TRUE(same_bits(call.out.bytes(), contiguous.out.bytes()));
          EXPECT_TRUE(same_bits(call.lse.bytes(), contiguous.lse.bytes()));
        }
      }
    }
  }
}

// B42: zero strides. Expanded tensors behave like materialised ones.
TEST(Reported, B42ExpandedTensorsBehaveLikeMaterialisedOnes) {
  for (const Index sq : {1, 5, 40}) {
    CaseSpec spec{.name = "B42",
                  .batch = 3,
                  .hq = 4,
                  .hkv = 2,
                  .sq = sq,
                  .sk = 30,
                  .d = 8,
                  .dtype = DType::bf16,
                  .layout = Layout::expanded,
                  .causal = true};
    Call expanded(spec);
    expanded.run();
    expanded.expect_memory_respected();
    expanded.expect_matches_oracle();
    spec.layout = Layout::bshd;
    Call whole(spec);
    whole.fill_q([&](Index b, Index i, Index h, Index d) { return expanded.q.at(b, i, h, d); });
    whole.fill_k([&](Index b, Index j, Index h, Index d) { return expanded.k.at(b, j, h, d); });
    whole.fill_v([&](Index b, Index j, Index h, Index d) { return expanded.v.at(b, j, h, d); });
    whole.run();
    EXPECT_TRUE(same_bits(expanded.out.bytes(), whole.out.bytes())) << "sq " << sq;
    EXPECT_TRUE(same_bits(expanded.lse.bytes(), whole.lse.bytes())) << "sq " << sq;
  }
}

void check_beyond_16_bits(CaseSpec spec, Entry entry) {
  spec = with_entry(spec, entry, 1, 2);
  spec.dtype = DType::f16;
  SCOPED_TRACE(describe(spec));
  Call call(spec);
  call.fill_q(zero);
  call.fill_v([](Index b, Index, Index h, Index) { return static_cast<double>((b + h) % 97); });
  call.run();
  call.expect_memory_respected();
  Index wrong = 0;
  for (Index b = 0; b < spec.batch; ++b) {
    for (Index h = 0; h < spec.hq; ++h) {
      for (const Index d : {Index{0}, spec.d - 1}) {
        wrong += call.out_at(b, 0, h, d) == static_cast<double>((b + h) % 97) ? 0 : 1;
      }
      wrong += std::abs(call.lse_at(b, h, 0) - std::log(2.0)) < 1e-6 ? 0 : 1;
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Reported, B46BatchAndHeadsBeyond65535) {
  for (const std::int32_t splits : {0, 2}) {
    CaseSpec batches{
        .name = "B46", .batch = 65537, .hq = 1, .hkv = 1, .d = 16, .num_splits = splits};
    check_beyond_16_bits(batches, Entry::dense);
    check_beyond_16_bits(batches, Entry::varlen);
    CaseSpec heads{
        .name = "B46_heads", .batch = 1, .hq = 65537, .hkv = 65537, .d = 16, .num_splits = splits};
    check_beyond_16_bits(heads, Entry::dense);
  }
}

// The forward half of B48: head dims that are no multiple of a tile, with guard bands.
TEST(Reported, B48HeadDimsBetweenTiles) {
  for (const Index d : {8, 40, 72, 80, 104, 136}) {
    for (const bool causal : {false, true}) {
      for (const Entry entry : {Entry::dense, Entry::varlen}) {
        CaseSpec spec{.name = "B48", .batch = 1, .d = d, .dtype = DType::bf16, .causal = causal};
        check_case(with_entry(spec, entry, 160, 160));
      }
    }
  }
}

TEST(Reported, B49EveryHeadMeetsItsOwnKeyValueHead) {
  constexpr std::pair<Index, Index> heads[] = {{24, 2}, {10, 2}, {9, 3},  {7, 1},
                                               {28, 4}, {96, 8}, {71, 1}, {34, 2}};
  for (const auto& [hq, hkv] : heads) {
    for (const Index sq : {1, 5}) {
      for (const Entry entry : every_entry) {
        for (const std::int32_t splits : {0, 2}) {
          CaseSpec spec{.name = "B49",
                        .batch = 2,
                        .hq = hq,
                        .hkv = hkv,
                        .dtype = DType::bf16,
                        .num_splits = splits};
          spec = with_entry(spec, entry, sq, 33);
          SCOPED_TRACE(describe(spec));
          Call call(spec);
          call.fill_v([](Index, Index, Index h, Index) { return static_cast<double>(h); });
          call.run();
          call.expect_memory_respected();
          for (Index b = 0; b < 2; ++b) {
            for (Index h = 0; h < hq; ++h) {
              const auto own = static_cast<double>(h / (hq / hkv));
              ASSERT_EQ(call.out_at(b, sq - 1, h, 0), own) << "head " << h;
              ASSERT_EQ(call.out_at(b, 0, h, 63), own) << "head " << h;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
