// Long sequences: the result, and that memory stays bounded.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>

#include "cpu/reference.h"
#include "tests/call.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

long peak_kibibytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

// Row i of a causal square is one query against the first i + 1 keys.
void expect_row_matches(const Call& call, Index i) {
  Problem row = call.problem;
  row.causal = false;
  row.q = call.q.slice(1, i, 1).tensor();
  row.k = call.k.slice(1, 0, i + 1).tensor();
  row.v = call.v.slice(1, 0, i + 1).tensor();
  row.out = call.out.slice(1, i, 1).tensor();
  const core::Problem p = to_core(row);
  const auto exact = cpu::reference_forward(p);
  const auto naive = cpu::naive_forward(p);
  EXPECT_TRUE(close_to(call.out.slice(1, i, 1).values(), exact.out, naive.out,
                       out_floor(call.q.dtype(), call.out.dtype(), exact.out)))
      << "row " << i;
  EXPECT_TRUE(close_to({call.lse_at(0, 0, i)}, exact.lse, naive.lse, lse_floor())) << "row " << i;
}

TEST(Long, Causal131072InBoundedMemory) {
  constexpr Index length = 131072;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CaseSpec spec{.name = "long",
                  .batch = 1,
                  .hq = 1,
                  .hkv = 1,
                  .sq = length,
                  .sk = length,
                  .dtype = dtype,
                  .causal = true};
    SCOPED_TRACE(describe(spec));
    Call call(spec);
    const Plan plan = fovea::plan(call.problem, {.device = test_device()});
    constexpr std::size_t limit_bytes = 64u << 20;
    EXPECT_LT(plan.workspace_bytes(), limit_bytes);
    std::vector<std::byte> workspace(plan.workspace_bytes());
    const long before = peak_kibibytes();
    plan.run(call.problem, workspace);
    EXPECT_LT(peak_kibibytes() - before, static_cast<long>(limit_bytes >> 10));
    for (const Index i : {Index{0}, Index{1}, Index{63}, Index{64}, Index{1000}, length / 2 - 1,
                          length / 2, length - 65, length - 1}) {
      expect_row_matches(call, i);
    }
    Index undefined = 0;
    for (const double x : call.out.values()) undefined += std::isfinite(x) ? 0 : 1;
    for (const double x : call.lse.values()) undefined += std::isfinite(x) ? 0 : 1;
    EXPECT_EQ(undefined, 0);
  }
}

// Decode against a long cache, split as the plan likes.
TEST(Long, DecodeAgainstALongCache) {
  for (const std::int32_t splits : {0, 1, 16}) {
    CaseSpec spec{.name = "long_decode",
                  .batch = 1,
                  .hq = 8,
                  .hkv = 2,
                  .sq = 1,
                  .sk = 200000,
                  .dtype = DType::bf16,
                  .entry = Entry::paged,
                  .page_size = 64,
                  .causal = true,
                  .num_splits = splits};
    SCOPED_TRACE(describe(spec));
    Call call(spec);
    call.run();
    call.expect_memory_respected();
    call.expect_matches_oracle();
  }
}

}  // namespace
}  // namespace fovea::test
