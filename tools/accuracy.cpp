#include "tools/accuracy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "tools/convert.h"

namespace fovea::tools {
namespace {

constexpr double error_factor = 2.0;
constexpr double gradient_error_factor = 3.0;
constexpr double error_floor = 1e-5;
constexpr double cosine_floor = 1e-6;

bool same_special(double value, double expected) {
  if (std::isnan(expected)) return std::isnan(value);
  return value == expected;
}

// Distance between 1 and the next number of a format.
double unit(DType dtype) {
  switch (dtype) {
    case DType::f32: return 0x1p-23;
    case DType::f16: return 0x1p-10;
    case DType::bf16: return 0x1p-7;
    case DType::e4m3: return 0x1p-3;
    case DType::e5m2: return 0x1p-2;
    case DType::boolean:
    case DType::s8: break;
  }
  return 0.0;
}

Verdict judge(std::span<const double> values, std::span<const double> naive,
              std::span<const double> exact, double relative_floor, double factor = error_factor) {
  Verdict verdict{distance(values, exact), distance(naive, exact)};
  const double floor = error_floor + relative_floor * verdict.found.largest;
  verdict.bound = factor * verdict.naive.max_error + floor;
  // An error below the floor has no direction: values near zero may point anywhere.
  const bool direction =
      verdict.found.max_error <= floor ||
      1.0 - verdict.found.cosine <= factor * (1.0 - verdict.naive.cosine) + cosine_floor;
  verdict.passed =
      verdict.found.max_error <= verdict.bound && verdict.found.different == 0 && direction;
  return verdict;
}

}  // namespace

Distance distance(std::span<const double> values, std::span<const double> expected) {
  Distance d;
  double dot = 0.0;
  double norm_values = 0.0;
  double norm_expected = 0.0;
  if (values.size() != expected.size()) {
    d.different = static_cast<std::int64_t>(std::max(values.size(), expected.size()));
    return d;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    const double y = expected[i];
    if (!std::isfinite(x) || !std::isfinite(y)) {
      if (!same_special(x, y)) ++d.different;
      continue;
    }
    d.max_error = std::max(d.max_error, std::abs(x - y));
    d.largest = std::max(d.largest, std::abs(y));
    dot += x * y;
    norm_values += x * x;
    norm_expected += y * y;
  }
  if (norm_values > 0.0 && norm_expected > 0.0) {
    d.cosine = dot / (std::sqrt(norm_values) * std::sqrt(norm_expected));
  } else if (norm_values != norm_expected) {
    d.cosine = 0.0;
  }
  return d;
}

Verdict judge_out(std::span<const double> values, std::span<const double> naive,
                  std::span<const double> exact, DType dtype) {
  return judge(values, naive, exact, 0.5 * unit(dtype));
}

Verdict judge_gradient(std::span<const double> values, std::span<const double> naive,
                       std::span<const double> exact, DType dtype) {
  return judge(values, naive, exact, 0.5 * unit(dtype), gradient_error_factor);
}

Verdict judge_lse(std::span<const double> values, std::span<const double> naive,
                  std::span<const double> exact) {
  return judge(values, naive, exact, 2.0 * unit(DType::f32));
}

std::vector<double> values_of(const Tensor& tensor) {
  const auto [n0, n1, n2, n3] = tensor.shape;
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(n0 * n1 * n2 * n3));
  std::vector<float> row(static_cast<std::size_t>(n3));
  const auto* const base = static_cast<const std::byte*>(tensor.data);
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(tensor.dtype));
  for (std::int64_t i = 0; i < n0; ++i) {
    for (std::int64_t j = 0; j < n1; ++j) {
      for (std::int64_t k = 0; k < n2; ++k) {
        const std::int64_t offset =
            i * tensor.stride[0] + j * tensor.stride[1] + k * tensor.stride[2];
        convert(base + offset * element_bytes, tensor.dtype,
                reinterpret_cast<std::byte*>(row.data()), DType::f32, n3);
        values.insert(values.end(), row.begin(), row.end());
      }
    }
  }
  return values;
}

}  // namespace fovea::tools
