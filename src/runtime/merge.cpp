// Attention over disjoint sets of keys, combined: out = sum of weight_i * out_i with
// weight_i = exp(lse_i - lse), lse = log of the sum of exp(lse_i). core/softmax.h has the same for
// two parts; taking all parts of a row against one maximum rounds once instead of once per part.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/numeric.h"
#include "core/softmax.h"
#include "core/types.h"
#include "fovea/fovea.hpp"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {
namespace {

using core::int64;

// Below this many multiplications a second thread costs more than it brings.
constexpr int64 parallel_work = 1 << 16;
constexpr int64 chunk = 256;  // columns of a row that are summed at a time

void check_dtype(std::string_view name, const Tensor& tensor) {
  require(tensor.dtype == DType::f32 || tensor.dtype == DType::bf16 || tensor.dtype == DType::f16,
          name, " has dtype ", tensor.dtype, "; it must be f32, bf16 or f16");
}

void check_part(std::string_view out_name, std::string_view lse_name, const Part& part,
                const std::array<std::int64_t, 4>& shape) {
  check_view(out_name, part.out);
  check_view(lse_name, part.lse);
  require(part.out.present, out_name, " is absent; every part and the result need one");
  check_dtype(out_name, part.out);
  require(part.out.shape == shape, out_name, " has shape ", Tuple{part.out.shape},
          " but result.out has ", Tuple{shape}, "; they must be equal");
  if (!part.lse.present) return;
  require(part.lse.dtype == DType::f32, lse_name, " has dtype ", part.lse.dtype,
          "; it must be f32");
  const std::array<std::int64_t, 4> lse_shape{shape[0], shape[2], shape[1], 1};
  require(part.lse.shape == lse_shape, lse_name, " has shape ", Tuple{part.lse.shape},
          "; it must be ", Tuple{lse_shape}, " (batch, heads, rows, 1), as its out has shape ",
          Tuple{shape});
}

// The same elements at the same places: each is read before it is written.
bool is_same(const Tensor& a, const Tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype) return false;
  for (std::size_t i = 0; i < 4; ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.stride[i] != b.stride[i])) return false;
  }
  return true;
}

void check_apart(std::string_view output_name, const Tensor& output, std::string_view input_name,
                 const Tensor& input, bool may_be_same) {
  require((may_be_same && is_same(output, input)) || !share_memory(output, input), output_name,
          " shares memory with ", input_name,
          may_be_same ? "; it must lie apart, or be the same tensor with the same strides"
                      : "; it must lie apart");
}

void check(std::span<const Part> parts, const Part& result, const Tensor& sink) {
  check_part("result.out", "result.lse", result, result.out.shape);
  require(!overlaps_itself(result.out), "result.out has strides ", Tuple{result.out.stride},
          ", which let elements share memory; every element of an output needs its own");
  require(!overlaps_itself(result.lse), "result.lse has strides ", Tuple{result.lse.stride},
          ", which let elements share memory; every element of an output needs its own");
  check_apart("result.out", result.out, "result.lse", result.lse, false);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string out_name = text("parts[", i, "].out");
    const std::string lse_name = text("parts[", i, "].lse");
    check_part(out_name, lse_name, parts[i], result.out.shape);
    require(parts[i].lse.present, lse_name, " is absent; merging weighs each part by its lse");
    check_apart("result.out", result.out, out_name, parts[i].out, true);
    check_apart("result.out", result.out, lse_name, parts[i].lse, false);
    check_apart("result.lse", result.lse, out_name, parts[i].out, false);
    check_apart("result.lse", result.lse, lse_name, parts[i].lse, true);
  }
  check_view("sink", sink);
  if (!sink.present) return;
  require(sink.dtype == DType::f32, "sink has dtype ", sink.dtype, "; it must be f32");
  const std::array<std::int64_t, 4> sink_shape{1, 1, 1, result.out.shape[2]};
  require(sink.shape == sink_shape, "sink has shape ", Tuple{sink.shape}, "; it must be ",
          Tuple{sink_shape}, ", one logit per head");
  check_apart("result.out", result.out, "sink", sink, false);
  check_apart("result.lse", result.lse, "sink", sink, false);
}

// Where a row stands: out at (batch, row, head), lse at (batch, head, row).
struct Row {
  int64 batch;
  int64 row;
  int64 head;
};

float lse_at(const Tensor& lse, const Row& at) {
  const core::View view = to_view(lse);
  return static_cast<const float*>(view.data)[view.offset(at.batch, at.head, at.row)];
}

// The maximum of a row's logarithms, and the sum of exponentials relative to it.
struct Total {
  float top = -core::infinity;  // NaN once a part has it
  float sum = 0.0f;

  // Zero for an empty part, exactly one for the only part.
  float weight(float lse) const {
    if (lse == -core::infinity) return 0.0f;
    return core::exp2_polynomial<6>((lse - top) * core::log2_e) / sum;
  }
  float lse() const { return top == -core::infinity ? top : top + core::natural_log(sum); }
};

Total total_of(std::span<const Part> parts, float sink, const Row& at) {
  Total total;
  const auto raise = [&total](float lse) {
    if (lse > total.top || core::is_nan(lse)) total.top = lse;
  };
  raise(sink);
  for (const Part& part : parts) raise(lse_at(part.lse, at));
  const auto add = [&total](float lse) {
    if (lse == -core::infinity) return;
    total.sum += core::exp2_polynomial<6>((lse - total.top) * core::log2_e);
  };
  add(sink);
  for (const Part& part : parts) add(lse_at(part.lse, at));
  return total;
}

// Calls body(load, store) with the conversions of the dtype and its storage type.
template <typename Body>
void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::bf16:
      return body([](core::uint16 bits) { return core::bf16_to_float(bits); },
                  [](float value) { return core::float_to_bf16(value); });
    case DType::f16:
      return body([](core::uint16 bits) { return core::f16_to_float(bits); },
                  [](float value) { return core::float_to_f16(value); });
    default: return body([](float value) { return value; }, [](float value) { return value; });
  }
}

// Columns [begin, begin + count) of the row, weighted and summed. The first summand is stored, not
// added to zero, so that a part of weight one comes back bit for bit (-0 stays -0).
void accumulate(const Tensor& out, const Row& at, int64 begin, int64 count, float weight,
                bool is_first, float* sums) {
  const core::View view = to_view(out);
  const int64 offset = view.offset(at.batch, at.row, at.head, begin);
  const int64 step = view.stride[3];
  with_dtype(out.dtype, [&](auto load, auto store) {
    using Stored = decltype(store(0.0f));
    const auto* source = static_cast<const Stored*>(view.data) + offset;
    if (is_first) {
      for (int64 i = 0; i < count; ++i) sums[i] = weight * load(source[i * step]);
    } else {
      for (int64 i = 0; i < count; ++i) sums[i] += weight * load(source[i * step]);
    }
  });
}

void write(const Tensor& out, const Row& at, int64 begin, int64 count, const float* sums) {
  const core::View view = to_view(out);
  const int64 offset = view.offset(at.batch, at.row, at.head, begin);
  const int64 step = view.stride[3];
  with_dtype(out.dtype, [&](auto, auto store) {
    using Stored = decltype(store(0.0f));
    auto* target = static_cast<Stored*>(view.data) + offset;
    for (int64 i = 0; i < count; ++i) target[i * step] = store(sums[i]);
  });
}

void merge_row(std::span<const Part> parts, const Part& result, float sink, const Row& at) {
  const Total total = total_of(parts, sink, at);
  const int64 columns = result.out.shape[3];
  std::array<float, chunk> sums;
  for (int64 begin = 0; begin < columns; begin += chunk) {
    const int64 count = std::min(chunk, columns - begin);
    bool is_first = true;
    for (const Part& part : parts) {
      const float weight = total.weight(lse_at(part.lse, at));
      if (weight == 0.0f) continue;  // whatever the part's out holds, NaN included
      accumulate(part.out, at, begin, count, weight, is_first, sums.data());
      is_first = false;
    }
    if (is_first) std::fill_n(sums.data(), count, 0.0f);
    write(result.out, at, begin, count, sums.data());
  }
  if (result.lse.present) {
    const core::View view = to_view(result.lse);
    static_cast<float*>(view.data)[view.offset(at.batch, at.head, at.row)] = total.lse();
  }
}

}  // namespace

void merge(std::span<const Part> parts, const Part& result, const Tensor& sink) {
  check(parts, result, sink);
  const int64 rows = result.out.shape[1];
  const int64 heads = result.out.shape[2];
  const int64 count = result.out.shape[0] * rows * heads;
  const core::View sinks = to_view(sink);
  [[maybe_unused]] const bool parallel =
      count * result.out.shape[3] * static_cast<int64>(parts.size()) > parallel_work;
#pragma omp parallel for schedule(static) if (parallel)
  for (int64 i = 0; i < count; ++i) {
    const Row at{i / (rows * heads), i / heads % rows, i % heads};
    const float logit =
        sinks ? static_cast<const float*>(sinks.data)[at.head * sinks.stride[3]] : -core::infinity;
    merge_row(parts, result, logit, at);
  }
}

}  // namespace fovea
