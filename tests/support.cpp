#include "tests/support.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numbers>
#include <stdexcept>
#include <string_view>

#include "core/mask.h"
#include "core/numeric.h"

namespace fovea::test {
namespace {

constexpr std::byte poison_byte{0xff};
constexpr Index guard_elements = 64;  // more than the widest vector on either side

Index bytes_of(DType dtype) { return core::size_bytes(static_cast<core::DType>(dtype)); }

core::View to_core(const Tensor& tensor) {
  core::View view;
  if (!tensor.present) return view;
  view.data = tensor.data;
  view.dtype = static_cast<core::DType>(tensor.dtype);
  for (std::size_t i = 0; i < 4; ++i) view.stride[i] = tensor.shape[i] == 1 ? 0 : tensor.stride[i];
  return view;
}

Index longest(std::span<const std::int32_t> cu_seqlens) {
  Index result = 0;
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    result = std::max<Index>(result, cu_seqlens[i] - cu_seqlens[i - 1]);
  }
  return result;
}

const std::int32_t* pointer(std::span<const std::int32_t> values) {
  return values.empty() ? nullptr : values.data();
}

}  // namespace

HostTensor::HostTensor(DType dtype, Shape shape, const Placement& placement) {
  view_.dtype = dtype;
  view_.present = true;
  std::copy(shape.begin(), shape.end(), view_.shape.begin());
  Index step = placement.element_stride;
  for (int i = 3; i >= 0; --i) {
    const auto dimension = static_cast<std::size_t>(placement.order[static_cast<std::size_t>(i)]);
    const bool once = placement.broadcast[dimension];
    view_.stride[dimension] = once ? 0 : step;
    if (!once) step *= shape[dimension];
    if (i == 3) step += placement.row_padding;
  }
  const Index elements = step + placement.offset + 2 * guard_elements;
  buffer_ = std::make_shared<std::vector<std::byte>>(
      static_cast<std::size_t>(elements * bytes_of(dtype)), poison_byte);
  view_.data = buffer_->data() + (guard_elements + placement.offset) * bytes_of(dtype);
}

Index HostTensor::size() const {
  return present() ? view_.shape[0] * view_.shape[1] * view_.shape[2] * view_.shape[3] : 0;
}

Index HostTensor::offset(Index i0, Index i1, Index i2, Index i3) const {
  return i0 * view_.stride[0] + i1 * view_.stride[1] + i2 * view_.stride[2] + i3 * view_.stride[3];
}

double HostTensor::at(Index i0, Index i1, Index i2, Index i3) const {
  return core::load_element(view_.data, static_cast<core::DType>(view_.dtype),
                            offset(i0, i1, i2, i3));
}

void HostTensor::set(Index i0, Index i1, Index i2, Index i3, double value) {
  core::store_element(view_.data, static_cast<core::DType>(view_.dtype), offset(i0, i1, i2, i3),
                      static_cast<float>(value));
}

HostTensor HostTensor::slice(int dimension, Index begin, Index count) const {
  HostTensor part = *this;
  const auto i = static_cast<std::size_t>(dimension);
  part.view_.data =
      static_cast<std::byte*>(view_.data) + begin * view_.stride[i] * bytes_of(view_.dtype);
  part.view_.shape[i] = count;
  return part;
}

HostTensor HostTensor::reversed(int dimension) const {
  HostTensor result = *this;
  const auto i = static_cast<std::size_t>(dimension);
  const Index last = std::max<Index>(view_.shape[i] - 1, 0);
  result.view_.data =
      static_cast<std::byte*>(view_.data) + last * view_.stride[i] * bytes_of(view_.dtype);
  result.view_.stride[i] = -view_.stride[i];
  return result;
}

std::vector<double> HostTensor::values() const {
  std::vector<double> result;
  result.reserve(static_cast<std::size_t>(size()));
  const auto& n = view_.shape;
  for (Index a = 0; a < n[0]; ++a) {
    for (Index b = 0; b < n[1]; ++b) {
      for (Index c = 0; c < n[2]; ++c) {
        for (Index d = 0; d < n[3]; ++d) result.push_back(at(a, b, c, d));
      }
    }
  }
  return result;
}

std::vector<std::byte> HostTensor::bytes() const {
  std::vector<std::byte> result;
  const Index width = bytes_of(view_.dtype);
  const auto& n = view_.shape;
  for (Index a = 0; a < n[0]; ++a) {
    for (Index b = 0; b < n[1]; ++b) {
      for (Index c = 0; c < n[2]; ++c) {
        for (Index d = 0; d < n[3]; ++d) {
          const auto* element =
              static_cast<const std::byte*>(view_.data) + offset(a, b, c, d) * width;
          result.insert(result.end(), element, element + width);
        }
      }
    }
  }
  return result;
}

std::vector<std::byte> HostTensor::buffer() const {
  return present() ? *buffer_ : std::vector<std::byte>{};
}

Index HostTensor::foreign_bytes_changed() const {
  if (!present()) return 0;
  std::vector<std::byte> rest = *buffer_;
  const Index width = bytes_of(view_.dtype);
  const Index base = static_cast<const std::byte*>(view_.data) - buffer_->data();
  for_each([&](Index a, Index b, Index c, Index d) {
    const auto element = rest.begin() + base + offset(a, b, c, d) * width;
    std::fill(element, element + width, poison_byte);
  });
  return std::count_if(rest.begin(), rest.end(), [](std::byte x) { return x != poison_byte; });
}

void HostTensor::poison() { std::fill(buffer_->begin(), buffer_->end(), poison_byte); }

std::uint64_t Random::bits() {  // SplitMix64
  state_ += 0x9E3779B97F4A7C15ull;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

Index Random::below(Index limit) {
  return static_cast<Index>(bits() % static_cast<std::uint64_t>(limit));
}

double Random::normal() {  // Box and Muller
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

double Random::cauchy() { return std::tan(std::numbers::pi * (uniform() - 0.5)); }

Device test_device() {
  const char* text = std::getenv("FOVEA_TEST_DEVICE");
  const std::string_view device = text == nullptr ? "cpu" : text;
  if (device == "cpu") return Device::cpu;
  if (device == "cuda") return Device::cuda;
  if (device == "emulated:sm_90a") return Device::emulated_sm90a;
  if (device == "emulated:sm_100a") return Device::emulated_sm100a;
  if (device == "emulated:sm_103a") return Device::emulated_sm103a;
  throw std::invalid_argument(
      "FOVEA_TEST_DEVICE must be cpu, cuda or emulated:sm_90a, sm_100a or sm_103a");
}

core::Problem to_core(const Problem& problem) {
  core::Problem p;
  p.q = to_core(problem.q);
  p.k = to_core(problem.k);
  p.v = to_core(problem.v);
  p.out = to_core(problem.out);
  p.lse = to_core(problem.lse);
  p.bias = to_core(problem.bias);
  p.mask = to_core(problem.mask);
  p.sink = to_core(problem.sink);
  p.sink.stride[0] = problem.sink.stride[3];
  p.alibi = to_core(problem.alibi);
  for (const auto& [scale, view] :
       {std::pair{problem.q_scale, &p.q_scale}, std::pair{problem.k_scale, &p.k_scale},
        std::pair{problem.v_scale, &p.v_scale}}) {
    *view = to_core(scale);
    for (std::size_t i = 0; i < 3; ++i) view->stride[i] *= scale.shape[i] > 1 ? 1 : 0;
  }
  const bool of_kv_heads = problem.q_scale.shape[1] == problem.k.shape[2];
  p.q_scale_heads =
      of_kv_heads ? static_cast<core::int32>(problem.q.shape[2] / problem.k.shape[2]) : 1;

  p.cu_seqlens_q = pointer(problem.cu_seqlens_q);
  p.cu_seqlens_k = pointer(problem.cu_seqlens_k);
  p.seqused_q = pointer(problem.seqused_q);
  p.seqused_k = pointer(problem.seqused_k);
  p.block_table = pointer(problem.block_table);
  p.block_table_stride = problem.block_table_columns;
  const bool paged = problem.block_table_columns > 0;
  const bool varlen_q = !problem.cu_seqlens_q.empty();
  p.page_size = paged ? static_cast<core::int32>(problem.k.shape[1]) : 0;
  p.batch = varlen_q ? static_cast<Index>(problem.cu_seqlens_q.size()) - 1 : problem.q.shape[0];
  p.seqlen_q = varlen_q ? longest(problem.cu_seqlens_q) : problem.q.shape[1];
  p.total_q = varlen_q ? problem.q.shape[1] : 0;
  p.seqlen_k = problem.k.shape[1];
  if (!problem.cu_seqlens_k.empty()) p.seqlen_k = longest(problem.cu_seqlens_k);
  if (paged) p.seqlen_k = problem.block_table_columns * p.page_size;
  p.heads_q = static_cast<core::int32>(problem.q.shape[2]);
  p.heads_kv = static_cast<core::int32>(problem.k.shape[2]);
  p.head_dim = static_cast<core::int32>(problem.q.shape[3]);
  p.head_dim_v = static_cast<core::int32>(problem.v.shape[3]);

  const float head_dim = static_cast<float>(p.head_dim);
  p.softmax_scale = problem.softmax_scale.value_or(1.0f / std::sqrt(head_dim));
  p.softcap = problem.softcap;
  p.window = core::effective_window({problem.window_left, problem.window_right}, problem.causal);
  p.dropout = {problem.dropout.probability, problem.dropout.seed, problem.dropout.offset};
  p.num_splits = problem.num_splits;
  p.deterministic = problem.deterministic;
  return p;
}

}  // namespace fovea::test
