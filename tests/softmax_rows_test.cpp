// Hostile softmax rows for every policy, against fp64: logits that rise, fall, jump, creep and
// hide.
//
// With q = (1, 0, ...), k_j = (t_j, 0, ...) and scale = ln 2, the logits in log2 units are t_j.
// Where the shape must leave a policy's fast path, the statistics have to say that it did.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <string>

#include "tests/call.h"

namespace fovea::test {
namespace {

constexpr Index keys = 2048;

enum class Leaves { no, repair, recompute };  // the fast path of the sum guard

struct Shape {
  const char* name;
  std::function<double(Index j, Random& random)> logit;
  Leaves leaves = Leaves::no;
  double largest = 1e3;  // in magnitude: fp16 holds 65504
};

// Levels change no oftener than the longest block of keys that the engine takes, so that every
// change meets a reference from before it.
constexpr Index level_keys = 256;

double rising(Index j, double step, Random& random) {
  return static_cast<double>(j / level_keys) * step + random.normal();
}

const Shape shapes[] = {
    {"normal", [](Index, Random& r) { return 1.44 * r.normal(); }},
    {"rise_4", [](Index j, Random& r) { return rising(j, 4, r); }, Leaves::repair},
    {"rise_10", [](Index j, Random& r) { return rising(j, 10, r); }, Leaves::repair},
    {"rise_100", [](Index j, Random& r) { return rising(j, 100, r); }, Leaves::repair, 4e3},
    {"rise_1e4", [](Index j, Random& r) { return rising(j, 1e4, r); }, Leaves::recompute, 4e5},
    {"fall", [](Index j, Random&) { return -3.0 * static_cast<double>(j); }, Leaves::no, 7e3},
    {"spike_late", [](Index j, Random& r) { return j == 1777 ? 500.0 : r.normal(); },
     Leaves::recompute},
    {"spike_huge", [](Index j, Random& r) { return j == 1777 ? 1e5 : r.normal(); },
     Leaves::recompute, 1e5},
    {"spike_last", [](Index j, Random& r) { return j == keys - 1 ? 60.0 : r.normal(); },
     Leaves::repair},
    {"very_negative", [](Index, Random& r) { return r.normal() - 1e5; }, Leaves::no, 1e5},
    {"alternate",
     [](Index j, Random& r) { return ((j / level_keys) % 2 == 0 ? -200 : 200) + r.normal(); },
     Leaves::recompute},
    {"uniform", [](Index, Random&) { return 0.0; }},
    {"creep", [](Index j, Random&) { return 0.05 * static_cast<double>(j); }, Leaves::repair},
    {"edge_126", [](Index j, Random&) { return j < level_keys ? 0.0 : 126.5; }, Leaves::recompute},
    {"edge_128", [](Index j, Random&) { return j < level_keys ? 0.0 : 127.9; }, Leaves::recompute},
    {"edge_119", [](Index j, Random&) { return j < level_keys ? 0.0 : 115.0; }, Leaves::repair},
    {"two_levels", [](Index j, Random&) { return j % 2 == 0 ? -90.0 : 8.0; }},
    {"heavy", [](Index, Random& r) { return 20 * r.cauchy(); }, Leaves::no, 1e6},
};

// Rows with other signs and sizes share the tile, so that rows on and off the fast path meet.
double multiplier(Index i) {
  constexpr double multipliers[] = {1.0, -1.0, 0.5, 0.0, -0.25};
  return multipliers[i % 5];
}

struct Where {
  Index sq;
  DType dtype;
  bool first_hidden = false;
  std::int32_t splits = 1;
};

Statistics run_shape(const Shape& shape, Softmax softmax, const Where& where) {
  CaseSpec spec{.name = shape.name,
                .batch = 1,
                .hq = 1,
                .hkv = 1,
                .sq = where.sq,
                .sk = keys,
                .d = 8,
                .dv = 16,
                .dtype = where.dtype,
                .scale = std::numbers::ln2_v<float>,
                .mask = where.first_hidden ? Mask::per_key : Mask::none,
                .num_splits = where.splits,
                .softmax = softmax};
  SCOPED_TRACE(describe(spec));
  Call call(spec);
  Random random(11);
  call.fill_q([](Index, Index i, Index, Index d) { return d == 0 ? multiplier(i) : 0.0; });
  call.fill_k(
      [&](Index, Index j, Index, Index d) { return d == 0 ? shape.logit(j, random) : 0.0; });
  if (where.first_hidden) {
    call.mask.fill([](Index, Index, Index, Index j) { return j < level_keys + 44 ? 0.0 : 1.0; });
  }
  call.poison_unseen();
  const Statistics statistics = call.run();
  call.expect_memory_respected();
  call.expect_matches_oracle();
  return statistics;
}

class SoftmaxRows : public ::testing::TestWithParam<Softmax> {};

TEST_P(SoftmaxRows, MatchFp64) {
  for (const Shape& shape : shapes) {
    for (const Index sq : {1, 40}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        if (dtype == DType::f16 && shape.largest > 6e4) continue;
        run_shape(shape, GetParam(), {sq, dtype});
      }
      run_shape(shape, GetParam(), {sq, DType::f32, true});
      run_shape(shape, GetParam(), {sq, DType::f32, false, 4});
    }
  }
}

TEST_P(SoftmaxRows, SlowPathsAreTaken) {
  if (test_device() != Device::cpu) GTEST_SKIP() << "tiles of other devices differ";
  for (const Shape& shape : shapes) {
    for (const Index sq : {1, 40}) {
      const Statistics s = run_shape(shape, GetParam(), {sq, DType::f32});
      SCOPED_TRACE(std::string(shape.name) + " sq=" + std::to_string(sq));
      const bool guard = GetParam() == Softmax::sum_guard;
      EXPECT_TRUE(guard || s.repairs == 0);
      EXPECT_TRUE(guard || s.recomputed_tiles == 0);
      EXPECT_TRUE(!guard || shape.leaves != Leaves::repair || s.repairs > 0);
      EXPECT_TRUE(!guard || shape.leaves != Leaves::recompute || s.recomputed_tiles > 0);
      EXPECT_TRUE(guard || shape.leaves == Leaves::no || s.rescales > 0);
    }
  }
}

// Random normal scores are what the fast path is for.
TEST(SoftmaxRowsFastPath, NormalScoresNeverLeaveIt) {
  if (test_device() != Device::cpu) GTEST_SKIP() << "tiles of other devices differ";
  const Statistics guarded = run_shape(shapes[0], Softmax::sum_guard, {40, DType::f32});
  EXPECT_EQ(guarded.repairs, 0);
  EXPECT_EQ(guarded.recomputed_tiles, 0);
  const Statistics conditional = run_shape(shapes[0], Softmax::conditional, {40, DType::f32});
  EXPECT_EQ(conditional.rescales, 0);
  const Statistics online = run_shape(shapes[0], Softmax::online, {40, DType::f32});
  EXPECT_GT(online.rescales, 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, SoftmaxRows, ::testing::ValuesIn(every_softmax),
                         [](const auto& instance) { return std::string(name(instance.param)); });

}  // namespace
}  // namespace fovea::test
