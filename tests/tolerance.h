// The one rule for how close a result must be to the fp64 reference.
//
//   specials   NaN and infinities agree by position; a value where the reference has none fails
//   maximum    |x - reference| <= 2 * (largest error of the naive run in the same precision) +
//   floor whole      1 - cosine similarity <= 2 * (that of the naive run) + floor
//
// The naive run (cpu/reference.h) does what a framework without a fused kernel does, so its error
// is what the number format costs. It can be zero by luck on a small tensor; the floors say what an
// honest computation may still lose there:
//
//   out   1e-5 + half a unit in the last place of the coarser of the two formats (inputs, out),
//   taken
//         at the largest output: one rounding
//   lse   1e-5 + two units of fp32 at the value itself: its products and sum are fp32 for every
//   input but 8-bit ones, which get 2^-8
//   gradients  as out, with three times the naive error
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "fovea/fovea.hpp"

namespace fovea::test {

inline constexpr double absolute_floor = 1e-5;

// Distance between 1 and the next number of a format.
constexpr double unit(DType dtype) {
  switch (dtype) {
    case DType::f32: return 0x1p-23;
    case DType::f16: return 0x1p-10;
    case DType::bf16: return 0x1p-7;
    case DType::s8:
    case DType::e4m3: return 0x1p-3;
    case DType::e5m2: return 0x1p-2;
    case DType::boolean: return 0.0;
  }
  return 0.0;
}

// Largest |x - reference| over positions where both are finite.
inline double largest_error(const std::vector<double>& x, const std::vector<double>& reference) {
  double error = 0.0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    if (std::isfinite(x[i]) && std::isfinite(reference[i])) {
      error = std::max(error, std::abs(x[i] - reference[i]));
    }
  }
  return error;
}

inline double largest_magnitude(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

// 1 - 2 <x, y> / (<x, x> + <y, y>): zero only for equal tensors, unlike the plain cosine also when
// one is a multiple of the other.
inline double dissimilarity(const std::vector<double>& x, const std::vector<double>& y) {
  double distance = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (!std::isfinite(x[i]) || !std::isfinite(y[i])) continue;
    distance += (x[i] - y[i]) * (x[i] - y[i]);
    size += x[i] * x[i] + y[i] * y[i];
  }
  return size > 0.0 ? distance / size : 0.0;
}

inline bool same_special(double x, double reference) {
  if (std::isnan(reference)) return std::isnan(x);
  if (std::isinf(reference)) return x == reference;
  return std::isfinite(x);
}

struct Floor {
  double absolute = absolute_floor;
  double relative = 0.0;  // at the element itself
  double whole = 0.0;     // of the dissimilarity
  double naive = 2.0;     // how many errors of the naive run are accepted
};

inline Floor out_floor(DType inputs, DType out, const std::vector<double>& reference) {
  const double step = 0.5 * std::max(unit(inputs), unit(out));
  return {absolute_floor + step * largest_magnitude(reference), 0.0, 1e-10 + step * step};
}

// Gradients chain more products: three times the naive error.
inline Floor gradient_floor(DType inputs, DType gradient, const std::vector<double>& reference) {
  Floor floor = out_floor(inputs, gradient, reference);
  floor.naive = 3.0;
  return floor;
}

// Products of 8-bit numbers are summed with 13 bits behind the largest (docs/kernels/fp8.md).
inline Floor lse_floor(DType inputs = DType::f32) {
  const bool narrow = inputs == DType::e4m3 || inputs == DType::e5m2;
  return {narrow ? 0x1p-8 : absolute_floor, 2 * unit(DType::f32), narrow ? 1e-6 : 1e-10};
}

inline ::testing::AssertionResult close_to(const std::vector<double>& x,
                                           const std::vector<double>& reference,
                                           const std::vector<double>& naive, const Floor& floor) {
  if (x.size() != reference.size() || naive.size() != reference.size()) {
    return ::testing::AssertionFailure() << x.size() << " elements instead of " << reference.size();
  }
  const double naive_error = largest_error(naive, reference);
  std::size_t worst = 0;
  double worst_excess = 0.0;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    double excess = 0.0;
    if (!same_special(x[i], reference[i])) {
      excess = HUGE_VAL;
    } else if (std::isfinite(reference[i])) {
      excess = std::abs(x[i] - reference[i]) - (floor.naive * naive_error + floor.absolute +
                                                floor.relative * std::abs(reference[i]));
    }
    if (excess > 0.0) ++wrong;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  if (wrong > 0) {
    return ::testing::AssertionFailure()
           << wrong << " of " << reference.size() << " elements are off; the worst, " << worst
           << ", is " << x[worst] << " instead of " << reference[worst]
           << " (largest error of the naive run: " << naive_error << ")";
  }
  const double whole = dissimilarity(x, reference);
  const double allowed = floor.naive * floor.naive * dissimilarity(naive, reference) + floor.whole;
  if (!(whole <= allowed)) {
    return ::testing::AssertionFailure()
           << "dissimilarity " << whole << " of the whole tensor exceeds " << allowed;
  }
  return ::testing::AssertionSuccess();
}

// Where repeatability to the bit is promised.
inline ::testing::AssertionResult same_bits(const std::vector<std::byte>& a,
                                            const std::vector<std::byte>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " bytes against " << b.size();
  }
  const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin());
  if (x == a.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "bytes differ from offset " << x - a.begin() << " on";
}

}  // namespace fovea::test
