// Reported faults of kind K10: page tables and splitting along the keys.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

const auto zero = [](Index, Index, Index, Index) { return 0.0; };

void expect_refused(Call& call) {
  EXPECT_THROW(fovea::attention(call.problem, {.device = test_device()}), Error);
  for (const double x : call.out.values()) ASSERT_TRUE(std::isnan(x)) << "something was written";
}

TEST(Reported, B53LengthsAndPagesBeyondTheTable) {
  CaseSpec spec{.name = "B53", .batch = 1, .entry = Entry::paged, .lengths_k = {32}};
  Call call(spec);
  const std::vector<std::int32_t> good(call.problem.block_table.begin(),
                                       call.problem.block_table.begin() + 2);
  const auto pages = static_cast<std::int32_t>(call.k.shape()[0]);
  call.problem.block_table_columns = 2;
  call.problem.block_table = good;
  const std::vector<std::int32_t> too_long{33};
  const std::vector<std::int32_t> full{32};
  call.problem.seqused_k = too_long;
  expect_refused(call);
  call.problem.seqused_k = full;
  for (const std::int32_t page : {-1, pages, 1 << 30}) {
    const std::vector<std::int32_t> bad{good[0], page};
    call.problem.block_table = bad;
    expect_refused(call);
  }
  call.problem.block_table = good;
  call.run();
  call.expect_memory_respected();
  call.expect_matches_oracle();
  // The same entry beyond the used range is not looked at.
  const std::vector<std::int32_t> shorter{16};
  const std::vector<std::int32_t> garbage{good[0], 1 << 30};
  call.problem.seqused_k = shorter;
  call.problem.block_table = garbage;
  call.run();
  call.expect_matches_oracle();
}

TEST(Reported, B55SplitsUseTheTrueLength) {
  for (const Entry entry : {Entry::seqused, Entry::paged}) {
    for (const Index hkv : {8, 16}) {
      for (const Index sq : {1, 5, 196}) {
        for (const std::int32_t splits : {0, 1, 2, 3, 4, 8, 16}) {
          CaseSpec spec{.name = "B55",
                        .batch = 1,
                        .hq = 16,
                        .hkv = hkv,
                        .sq = sq,
                        .sk = 512,
                        .d = 16,
                        .dtype = DType::f16,
                        .entry = entry,
                        .lengths_q = {sq},
                        .lengths_k = {452},
                        .num_splits = splits};
          SCOPED_TRACE(describe(spec));
          Call call(spec);
          call.fill_q(zero);
          call.fill_v([](Index, Index j, Index, Index) { return static_cast<double>(j) / 512; });
          call.run();
          call.expect_memory_respected();
          // Half a unit of fp16 at this value.
          EXPECT_NEAR(call.out_at(0, 0, 3, 7), 225.5 / 512, 0x1p-13);
          EXPECT_NEAR(call.out_at(0, sq - 1, 15, 0), 225.5 / 512, 0x1p-13);
          EXPECT_NEAR(call.lse_at(0, 9, sq - 1), std::log(452.0), 1e-5);
        }
      }
    }
  }
}

TEST(Reported, B57PageSizeIsOnlyAddressing) {
  for (const bool windowed : {false, true}) {
    for (const Index sq : {1, 20}) {
      CaseSpec spec{.name = "B57",
                    .batch = 3,
                    .hq = 6,
                    .sq = sq,
                    .sk = 300,
                    .dtype = DType::bf16,
                    .entry = Entry::seqused,
                    .lengths_q = {sq, sq, sq},
                    .lengths_k = {1, 37, 300},
                    .window_left = windowed ? 20 : -1,
                    .window_right = windowed ? 0 : -1};
      Call dense(spec);
      dense.run();
      dense.expect_matches_oracle();
      for (const Index page_size : {1, 2, 16, 48, 64, 96, 128, 256, 512}) {
        spec.entry = Entry::paged;
        spec.page_size = page_size;
        SCOPED_TRACE(describe(spec));
        Call paged(spec);
        paged.fill_q([&](Index b, Index i, Index h, Index d) { return dense.q.at(b, i, h, d); });
        paged.fill_k([&](Index b, Index j, Index h, Index d) { return dense.k.at(b, j, h, d); });
        paged.fill_v([&](Index b, Index j, Index h, Index d) { return dense.v.at(b, j, h, d); });
        paged.run();
        paged.expect_memory_respected();
        paged.expect_matches_oracle();  // that of the same numbers laid out densely
      }
    }
  }
}

TEST(Reported, B57RequestsMayShareAPage) {
  CaseSpec spec{.name = "B57_shared",
                .batch = 2,
                .hq = 6,
                .sq = 3,
                .dtype = DType::bf16,
                .entry = Entry::paged,
                .lengths_k = {40, 300}};
  Call call(spec);
  std::vector<std::int32_t> table(call.problem.block_table.begin(), call.problem.block_table.end());
  table[static_cast<std::size_t>(call.problem.block_table_columns)] = table[0];
  call.problem.block_table = table;
  call.run();
  call.expect_memory_respected();
  call.expect_matches_oracle();
}

TEST(Reported, B58TheSinkCountsOnceWhateverTheSplit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Index sq : {1, 30}) {
      for (const bool windowed : {false, true}) {
        for (const std::int32_t splits : {0, 1, 2, 4, 8}) {
          for (const Entry entry : every_entry) {
            CaseSpec spec{.name = "B58",
                          .batch = 1,
                          .hq = 1,
                          .hkv = 1,
                          .dtype = dtype,
                          .sink = true,
                          .num_splits = splits};
            spec.window_left = windowed ? 63 : -1;
            spec.window_right = windowed ? 0 : -1;
            spec = with_entry(spec, entry, sq, 256);
            SCOPED_TRACE(describe(spec));
            const double keys = windowed ? 64 : 256;
            Call call(spec);
            call.fill_q(zero);
            call.fill_v([](Index, Index, Index, Index) { return 1.0; });
            call.sink.fill([keys](Index, Index, Index, Index) { return std::log(keys); });
            call.run();
            EXPECT_NEAR(call.out_at(0, sq - 1, 0, 0), 0.5, 1e-6);
            EXPECT_NEAR(call.lse_at(0, 0, sq - 1), std::log(2 * keys), 1e-5);
            call.expect_matches_oracle();
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
