// Merging parts: the empty part is neutral, one part comes back bit for bit, the sink counts once.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fovea/fovea.hpp"
#include "tests/support.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// (batch, rows, heads, columns)
struct HostPart {
  HostPart(DType dtype, Shape shape) : out(dtype, shape), lse(DType::f32, lse_shape(shape)) {}
  static Shape lse_shape(const Shape& shape) { return {shape[0], shape[2], shape[1], 1}; }
  [[nodiscard]] Part part() const { return {out.tensor(), lse.tensor()}; }
  HostTensor out;
  HostTensor lse;
};

HostPart constant(DType dtype, Shape shape, double out, double lse) {
  HostPart part(dtype, shape);
  part.out.fill([out](Index, Index, Index, Index) { return out; });
  part.lse.fill([lse](Index, Index, Index, Index) { return lse; });
  return part;
}

HostPart random_part(DType dtype, Shape shape, Random& random) {
  HostPart part(dtype, shape);
  part.out.fill([&](Index, Index, Index, Index) { return random.normal(); });
  part.lse.fill([&](Index, Index, Index, Index) { return 20 * random.normal(); });
  return part;
}

HostPart merged(const std::vector<HostPart>& parts, DType dtype, Shape shape,
                const Tensor& sink = {}) {
  std::vector<Part> views;
  for (const HostPart& part : parts) views.push_back(part.part());
  HostPart result(dtype, shape);
  merge(views, result.part(), sink);
  EXPECT_EQ(result.out.foreign_bytes_changed(), 0);
  EXPECT_EQ(result.lse.foreign_bytes_changed(), 0);
  return result;
}

void expect_same(const HostPart& a, const HostPart& b) {
  EXPECT_TRUE(same_bits(a.out.bytes(), b.out.bytes()));
  EXPECT_TRUE(same_bits(a.lse.bytes(), b.lse.bytes()));
}

TEST(Merge, EmptyPartsAreNeutralWhateverTheyHold) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Shape shape{1, 1, 1, 300};
    HostPart full(dtype, shape);
    full.lse.set(0, 0, 0, 0, -80.25);
    full.out.fill([](Index, Index, Index, Index d) {
      return d == 0 ? 3.0 : d == 1 ? -2.0 : d == 2 ? -0.0 : 0.1 * static_cast<double>(d);
    });
    for (const double held : {0.0, nan, inf}) {
      const HostPart a = constant(dtype, shape, held, -inf);
      const HostPart b = constant(dtype, shape, held, -inf);
      const HostPart zero = constant(dtype, shape, 0.0, -inf);
      expect_same(merged({a, b}, dtype, shape), zero);
      expect_same(merged({}, dtype, shape), zero);
      expect_same(merged({full}, dtype, shape), full);
      expect_same(merged({a, full}, dtype, shape), full);
      expect_same(merged({full, a}, dtype, shape), full);
      expect_same(merged({a, full, b}, dtype, shape), full);
    }
  }
}

TEST(Merge, MatchesDoublePrecision) {
  const Shape shape{2, 3, 4, 19};
  Random random(3);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    std::vector<HostPart> parts;
    for (int i = 0; i < 5; ++i) parts.push_back(random_part(dtype, shape, random));
    HostTensor sink(DType::f32, {1, 1, 1, 4});
    sink.fill([&](Index, Index, Index, Index) { return 20 * random.normal(); });
    const HostPart result = merged(parts, DType::f32, shape, sink.tensor());
    for (Index b = 0; b < shape[0]; ++b) {
      for (Index s = 0; s < shape[1]; ++s) {
        for (Index h = 0; h < shape[2]; ++h) {
          double top = sink.at(0, 0, 0, h);
          for (const HostPart& part : parts) top = std::max(top, part.lse.at(b, h, s, 0));
          double sum = std::exp(sink.at(0, 0, 0, h) - top);
          for (const HostPart& part : parts) sum += std::exp(part.lse.at(b, h, s, 0) - top);
          const double lse = top + std::log(sum);
          EXPECT_NEAR(result.lse.at(b, h, s, 0), lse, 1e-6 * std::abs(lse) + 1e-6);
          for (Index d = 0; d < shape[3]; ++d) {
            double out = 0;
            for (const HostPart& part : parts) {
              out += std::exp(part.lse.at(b, h, s, 0) - lse) * part.out.at(b, s, h, d);
            }
            EXPECT_NEAR(result.out.at(b, s, h, d), out, 4e-6);
          }
        }
      }
    }
  }
}

TEST(Merge, SinkCountsOnceForAnyNumberOfParts) {
  for (const int count : {1, 2, 4, 8}) {
    const Shape shape{1, 1, 1, 64};
    std::vector<HostPart> parts;
    for (int i = 0; i < count; ++i) {
      parts.push_back(constant(DType::f32, shape, 1.0, std::log(256.0 / count)));
    }
    parts.push_back(constant(DType::f32, shape, nan, -inf));
    const HostTensor sink = [] {
      HostTensor tensor(DType::f32, {1, 1, 1, 1});
      tensor.set(0, 0, 0, 0, std::log(256.0));
      return tensor;
    }();
    const HostPart result = merged(parts, DType::f32, shape, sink.tensor());
    EXPECT_NEAR(result.lse.at(0, 0, 0, 0), std::log(512.0), 1e-6);
    for (const double out : result.out.values()) EXPECT_NEAR(out, 0.5, 1e-6);
  }
}

TEST(Merge, SinkOfARowWithoutKeys) {
  const Shape shape{1, 2, 2, 3};
  const std::vector<HostPart> parts{constant(DType::f32, shape, nan, -inf)};
  HostTensor sink(DType::f32, {1, 1, 1, 2});
  sink.set(0, 0, 0, 0, 0.5);
  sink.set(0, 0, 0, 1, -inf);  // none
  const HostPart result = merged(parts, DType::f32, shape, sink.tensor());
  for (const double out : result.out.values()) EXPECT_EQ(out, 0.0);
  for (Index row = 0; row < 2; ++row) {
    EXPECT_EQ(result.lse.at(0, 0, row, 0), 0.5);
    EXPECT_EQ(result.lse.at(0, 1, row, 0), -inf);
  }
}

TEST(Merge, NaNIsNotHidden) {
  const Shape shape{1, 1, 1, 2};
  const HostPart good = constant(DType::f32, shape, 1.0, 0.0);
  const HostPart bad_out = constant(DType::f32, shape, nan, 0.0);
  const HostPart bad_lse = constant(DType::f32, shape, 1.0, nan);
  EXPECT_TRUE(std::isnan(merged({good, bad_out}, DType::f32, shape).out.at(0, 0, 0, 0)));
  for (const auto& parts :
       {std::vector{good, bad_lse}, std::vector{bad_lse, good}, std::vector{bad_lse}}) {
    const HostPart result = merged(parts, DType::f32, shape);
    EXPECT_TRUE(std::isnan(result.out.at(0, 0, 0, 0)));
    EXPECT_TRUE(std::isnan(result.lse.at(0, 0, 0, 0)));
  }
}

TEST(Merge, IntoOneOfTheParts) {
  const Shape shape{2, 3, 4, 300};
  Random random(4);
  const HostPart accumulator = random_part(DType::f32, shape, random);
  const HostPart other = random_part(DType::bf16, shape, random);
  const HostPart apart = merged({accumulator, other}, DType::f32, shape);
  const std::vector<Part> parts{accumulator.part(), other.part()};
  merge(parts, accumulator.part());
  expect_same(accumulator, apart);
}

TEST(Merge, AnyStridesAndManyRows) {
  const Shape shape{3, 40, 5, 70};
  Random random(5);
  const HostPart a = random_part(DType::f32, shape, random);
  const HostPart b = random_part(DType::f32, shape, random);
  const HostPart plain = merged({a, b}, DType::bf16, shape);
  Placement strided;
  strided.order = {3, 0, 2, 1};
  strided.row_padding = 3;
  HostPart c = a;
  c.out = HostTensor(DType::f32, shape, strided);
  c.out.fill([&](Index i, Index j, Index k, Index l) { return a.out.at(i, j, k, l); });
  HostPart result(DType::bf16, shape);
  result.out = HostTensor(DType::bf16, shape, strided);
  result.lse = HostTensor(DType::f32, HostPart::lse_shape(shape), strided);
  const std::vector<Part> parts{c.part(), b.part()};
  merge(parts, result.part());
  EXPECT_EQ(result.out.values(), plain.out.values());
  EXPECT_EQ(result.lse.values(), plain.lse.values());
  EXPECT_EQ(result.out.foreign_bytes_changed(), 0);
}

TEST(Merge, ResultMayDoWithoutLse) {
  const Shape shape{1, 2, 3, 4};
  Random random(6);
  const HostPart a = random_part(DType::f32, shape, random);
  const HostPart b = random_part(DType::f32, shape, random);
  const HostPart with = merged({a, b}, DType::f32, shape);
  const HostTensor out(DType::f32, shape);
  const std::vector<Part> parts{a.part(), b.part()};
  merge(parts, {out.tensor(), {}});
  EXPECT_TRUE(same_bits(out.bytes(), with.out.bytes()));
}

TEST(Merge, EmptyTensorsAreLegal) {
  const Shape shape{1, 0, 3, 4};
  const HostPart a(DType::f32, shape);
  const HostPart result(DType::f32, shape);
  const std::vector<Part> parts{a.part()};
  EXPECT_NO_THROW(merge(parts, result.part()));
}

// Parts of real attention over halves of the keys give the attention over all of them.
TEST(Merge, UnionOfSplitKeys) {
  const Index rows = 5;
  const Index keys = 37;
  const Index cut = 20;
  Random random(8);
  const auto filled = [&](Shape shape) {
    HostTensor tensor(DType::f32, shape);
    tensor.fill([&](Index, Index, Index, Index) { return random.normal(); });
    return tensor;
  };
  const HostTensor q = filled({2, rows, 4, 16});
  const HostTensor k = filled({2, keys, 2, 16});
  const HostTensor v = filled({2, keys, 2, 16});
  const HostTensor sink = filled({1, 1, 1, 4});
  const HostPart whole(DType::f32, {2, rows, 4, 16});
  const HostPart first(DType::f32, {2, rows, 4, 16});
  const HostPart second(DType::f32, {2, rows, 4, 16});
  Problem p;
  p.q = q.tensor();
  p.k = k.tensor();
  p.v = v.tensor();
  p.out = whole.out.tensor();
  p.lse = whole.lse.tensor();
  p.sink = sink.tensor();
  attention(p);
  const Reference exact = reference(p);
  const Reference naive = reference(p, Precision::same);
  p.sink = {};
  const auto part_of = [&](Index begin, Index count, const HostPart& part) {
    const HostTensor k_part = k.slice(1, begin, count);
    const HostTensor v_part = v.slice(1, begin, count);
    p.k = k_part.tensor();
    p.v = v_part.tensor();
    p.out = part.out.tensor();
    p.lse = part.lse.tensor();
    attention(p);
  };
  part_of(0, cut, first);
  part_of(cut, keys - cut, second);
  const HostPart result = merged({first, second}, DType::f32, {2, rows, 4, 16}, sink.tensor());
  EXPECT_TRUE(close_to(result.out.values(), exact.out, naive.out,
                       out_floor(DType::f32, DType::f32, exact.out)));
  EXPECT_TRUE(close_to(result.lse.values(), exact.lse, naive.lse, lse_floor()));
}

struct BadMerge {
  const char* name;
  std::function<void(std::vector<Part>&, Part&, Tensor&)> spoil;
  std::string fragment;
};

const BadMerge bad_merges[] = {
    {"no_result", [](auto&, Part& r, Tensor&) { r.out = {}; }, "result.out is absent"},
    {"no_out", [](auto& p, Part&, Tensor&) { p[1].out = {}; }, "parts[1].out is absent"},
    {"no_lse", [](auto& p, Part&, Tensor&) { p[1].lse = {}; }, "parts[1].lse is absent"},
    {"shape", [](auto& p, Part&, Tensor&) { p[0].out.shape[1] = 1; },
     "parts[0].out has shape (1, 1, 3, 4) but result.out has (1, 2, 3, 4)"},
    {"lse_shape",
     [](auto& p, Part&, Tensor&) {
       p[0].lse.shape = {1, 2, 3, 1};
     },
     "parts[0].lse has shape (1, 2, 3, 1); it must be (1, 3, 2, 1)"},
    {"dtype", [](auto& p, Part&, Tensor&) { p[0].out.dtype = DType::e4m3; },
     "parts[0].out has dtype e4m3"},
    {"lse_dtype", [](auto&, Part& r, Tensor&) { r.lse.dtype = DType::bf16; },
     "result.lse has dtype bf16"},
    {"null", [](auto& p, Part&, Tensor&) { p[1].out.data = nullptr; },
     "parts[1].out has null data"},
    {"sink_shape", [](auto&, Part&, Tensor& s) { s.shape[3] = 2; }, "sink has shape (1, 1, 1, 2)"},
    {"sink_dtype", [](auto&, Part&, Tensor& s) { s.dtype = DType::f16; }, "sink has dtype f16"},
    {"overlap", [](auto&, Part& r, Tensor&) { r.out.stride[2] = 0; }, "result.out has strides"},
    {"lse_overlap", [](auto&, Part& r, Tensor&) { r.lse.stride[2] = 0; }, "result.lse has strides"},
    {"shifted",
     [](auto& p, Part& r, Tensor&) {
       r.out = p[1].out;
       r.out.data = static_cast<float*>(r.out.data) + 4;
     },
     "result.out shares memory with parts[1].out"},
    {"other_strides",
     [](auto& p, Part& r, Tensor&) {
       r.out = p[1].out;
       r.out.stride = {24, 4, 8, 1};
     },
     "result.out shares memory with parts[1].out"},
    {"lse_in_out", [](auto&, Part& r, Tensor&) { r.lse.data = r.out.data; },
     "result.out shares memory with result.lse"},
};

TEST(Merge, RefusesBadInputAndWritesNothing) {
  for (const BadMerge& bad : bad_merges) {
    SCOPED_TRACE(bad.name);
    const Shape shape{1, 2, 3, 4};
    const std::vector<HostPart> parts{constant(DType::f32, shape, 1.0, 0.0),
                                      constant(DType::f32, shape, 2.0, 0.0)};
    HostTensor sink(DType::f32, {1, 1, 1, 3});
    sink.fill([](Index, Index, Index, Index) { return 0.0; });
    const HostPart result(DType::f32, shape);
    const std::vector<std::byte> before = result.out.buffer();
    const std::vector<std::byte> part_before = parts[1].out.buffer();
    std::vector<Part> views{parts[0].part(), parts[1].part()};
    Part target = result.part();
    Tensor logits = sink.tensor();
    bad.spoil(views, target, logits);
    std::string sentence = "nothing was thrown";
    try {
      merge(views, target, logits);
    } catch (const Error& error) {
      sentence = error.what();
    }
    EXPECT_NE(sentence.find(bad.fragment), std::string::npos) << sentence;
    EXPECT_TRUE(same_bits(result.out.buffer(), before));
    EXPECT_TRUE(same_bits(parts[1].out.buffer(), part_before));
  }
}

}  // namespace
}  // namespace fovea::test
