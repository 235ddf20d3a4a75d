// How far a result lies from the truth, and whether that is near enough.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/fovea.hpp"

namespace fovea::tools {

// Distance of values from expected ones. Where the expected value is an infinity or NaN the value
// has to be the same; a value that is not finite where a finite one is expected counts as different
// too.
struct Distance {
  double max_error = 0.0;      // over the pairs of finite values
  double cosine = 1.0;         // of the angle between the two as vectors
  double largest = 0.0;        // magnitude among the finite expected values
  std::int64_t different = 0;  // pairs that disagree about being finite
};

[[nodiscard]] Distance distance(std::span<const double> values, std::span<const double> expected);

// The rule of tests/tolerance.h: at most twice the error of a naive computation in the same
// precision, whose error can be zero by luck, and a floor.
struct Verdict {
  Distance found;
  Distance naive;
  double bound = 0.0;
  bool passed = false;
};

// The floor of out: 1e-5 and one rounding, half a unit in the last place of `dtype` at the largest
// value. That of lse, which is fp32 for all inputs: 1e-5 and two units of fp32.
[[nodiscard]] Verdict judge_out(std::span<const double> values, std::span<const double> naive,
                                std::span<const double> exact, DType dtype);
// A gradient, as out with three times the naive error.
[[nodiscard]] Verdict judge_gradient(std::span<const double> values, std::span<const double> naive,
                                     std::span<const double> exact, DType dtype);
[[nodiscard]] Verdict judge_lse(std::span<const double> values, std::span<const double> naive,
                                std::span<const double> exact);

// The elements of a tensor in row-major order of its shape, whatever its strides; the last
// dimension is contiguous.
[[nodiscard]] std::vector<double> values_of(const Tensor& tensor);

}  // namespace fovea::tools
