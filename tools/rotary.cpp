#include "tools/rotary.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>

#include "tools/convert.h"

namespace fovea::tools {
namespace {

std::int64_t at(const Tensor& t, std::int64_t i0, std::int64_t i1, std::int64_t i2,
                std::int64_t i3) {
  return i0 * t.stride[0] + i1 * t.stride[1] + i2 * t.stride[2] + i3 * t.stride[3];
}

// The same tensor in f32, its rows one after the other.
Tensor widened(const Tensor& tensor, std::vector<float>& values) {
  const std::array<std::int64_t, 4> shape = tensor.shape;
  values.resize(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
  const auto* from = static_cast<const std::byte*>(tensor.data);
  auto* to = reinterpret_cast<std::byte*>(values.data());
  const auto size = static_cast<std::int64_t>(size_bytes(tensor.dtype));
  for (std::int64_t i0 = 0; i0 < shape[0]; ++i0) {
    for (std::int64_t i1 = 0; i1 < shape[1]; ++i1) {
      for (std::int64_t i2 = 0; i2 < shape[2]; ++i2) {
        // Random data has contiguous columns.
        convert(from + at(tensor, i0, i1, i2, 0) * size, tensor.dtype, to, DType::f32, shape[3]);
        to += shape[3] * static_cast<std::int64_t>(sizeof(float));
      }
    }
  }
  return contiguous(values.data(), DType::f32, shape);
}

// Turns all heads of a row, which stands at a position.
void turn(const Tensor& x, std::int64_t i0, std::int64_t i1, const Rotary& rotary,
          std::int64_t position) {
  const std::int64_t place = std::clamp<std::int64_t>(position, 0, rotary.cos.shape[2] - 1);
  const std::int64_t pairs = rotary.cos.shape[3];
  auto* values = static_cast<float*>(x.data);
  for (std::int64_t head = 0; head < x.shape[2]; ++head) {
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      const double cos = static_cast<const float*>(rotary.cos.data)[place * pairs + pair];
      const double sin = static_cast<const float*>(rotary.sin.data)[place * pairs + pair];
      float& a = values[at(x, i0, i1, head, rotary.interleaved ? 2 * pair : pair)];
      float& b = values[at(x, i0, i1, head, rotary.interleaved ? 2 * pair + 1 : pair + pairs)];
      const double one = a;
      const double two = b;
      a = static_cast<float>(one * cos - two * sin);
      b = static_cast<float>(one * sin + two * cos);
    }
  }
}

struct Rows {
  std::int64_t first = 0;  // among packed ones
  std::int64_t count = 0;
};

Rows rows_of(std::span<const std::int32_t> cu_seqlens, std::int64_t dense, std::int64_t b) {
  const auto i = static_cast<std::size_t>(b);
  if (cu_seqlens.empty()) return {0, dense};
  return {cu_seqlens[i], cu_seqlens[i + 1] - cu_seqlens[i]};
}

}  // namespace

RotaryTables::RotaryTables(const ProblemOptions& options, std::int64_t positions,
                           std::int64_t head_dim)
    : positions_(std::max<std::int64_t>(positions, 1)),
      pairs_(options.rotary_columns / 2),
      interleaved_(options.rotary_interleaved) {
  if (pairs_ == 0) return;
  if (options.rotary_columns > head_dim) {
    throw Error(fmt::format("--rotary has {} columns, which turn more than the head dimension {}",
                            options.rotary_columns, head_dim));
  }
  std::vector<double> wavelengths;
  for (std::int64_t pair = 0; pair < pairs_; ++pair) {
    const double share = static_cast<double>(pair) / static_cast<double>(pairs_);
    wavelengths.push_back(std::pow(double{options.rotary_base}, share));
  }
  for (std::int64_t position = 0; position < positions_; ++position) {
    for (const double wavelength : wavelengths) {
      const double angle = static_cast<double>(position) / wavelength;
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  const Device device = options.run.device;
  if (device == Device::automatic || device == Device::cpu) return;
  std::vector<float> both = cos_;
  both.insert(both.end(), sin_.begin(), sin_.end());
  memory_.emplace(device, both.size() * sizeof(float));
  memory_->upload(both.data(), both.size() * sizeof(float));
}

Rotary RotaryTables::tables(const float* cos, const float* sin) const {
  const std::array<std::int64_t, 4> shape{1, 1, positions_, pairs_};
  return {contiguous(cos, DType::f32, shape), contiguous(sin, DType::f32, shape), interleaved_, 0};
}

Options RotaryTables::on_device(const Options& options) const {
  Options result = options;
  if (pairs_ == 0) return result;
  if (!memory_) {
    result.eight_bits->quantization.rotary = tables(cos_.data(), sin_.data());
  } else {
    const auto* there = reinterpret_cast<const float*>(memory_->data());
    result.eight_bits->quantization.rotary = tables(there, there + cos_.size());
  }
  return result;
}

Quantization RotaryTables::on_host(const Quantization& quantization) const {
  Quantization result = quantization;
  if (pairs_ > 0) result.rotary = tables(cos_.data(), sin_.data());
  return result;
}

Turned turned(const Problem& problem, const Rotary& rotary) {
  Turned result;
  result.problem = problem;
  Problem& p = result.problem;
  p.q = widened(problem.q, result.q);
  p.k = widened(problem.k, result.k);
  p.v = widened(problem.v, result.v);
  p.out = widened(problem.out, result.out);
  const bool paged = !p.block_table.empty();
  const auto batch = !p.cu_seqlens_q.empty() ? std::ssize(p.cu_seqlens_q) - 1 : problem.q.shape[0];
  for (std::int64_t b = 0; b < batch; ++b) {
    const Rows queries = rows_of(p.cu_seqlens_q, p.q.shape[1], b);
    const Rows keys = paged ? Rows{0, p.seqused_k[static_cast<std::size_t>(b)]}
                            : rows_of(p.cu_seqlens_k, p.k.shape[1], b);
    for (std::int64_t i = 0; i < queries.count; ++i) {
      turn(p.q, p.cu_seqlens_q.empty() ? b : 0, queries.first + i, rotary,
           keys.count - queries.count + i);
    }
    for (std::int64_t j = 0; j < keys.count; ++j) {
      const std::int64_t page_size = p.k.shape[1];
      const std::int64_t row =
          paged ? p.block_table[static_cast<std::size_t>(b * p.block_table_columns + j / page_size)]
          : p.cu_seqlens_k.empty() ? b
                                   : 0;
      turn(p.k, row, paged ? j % page_size : keys.first + j, rotary, j);
    }
  }
  return result;
}

}  // namespace fovea::tools
