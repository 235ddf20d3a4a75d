#include "runtime/tensor.h"

#include <algorithm>
#include <limits>

#include "runtime/text.h"

namespace fovea {
namespace {

// Byte offsets stay below this, so that sums over a pair of tensors do not overflow.
constexpr std::int64_t max_reach_bytes = std::int64_t{1} << 60;

// Row-major strides of an absurd shape must not overflow before validation can refuse the shape.
std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

Tensor make(const void* data, DType dtype, const std::array<std::int64_t, 4>& shape,
            const std::array<std::int64_t, 4>& stride) {
  Tensor tensor;
  // A Tensor describes inputs and outputs alike; inputs are never written.
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.stride = stride;
  tensor.present = true;
  return tensor;
}

// Offsets in bytes from the data pointer: [low, high) holds every element.
struct Reach {
  std::int64_t low = 0;
  std::int64_t high = 0;
};

// False if an offset leaves +-max_reach_bytes.
bool reach_of(const Tensor& tensor, Reach& reach) {
  const auto element = static_cast<std::int64_t>(size_bytes(tensor.dtype));
  reach = {0, element};
  for (std::size_t i = 0; i < 4; ++i) {
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.stride[i], &bytes) ||
        __builtin_mul_overflow(bytes, element, &bytes) || bytes > max_reach_bytes ||
        bytes < -max_reach_bytes) {
      return false;
    }
    (bytes < 0 ? reach.low : reach.high) += bytes;
  }
  return reach.high <= max_reach_bytes && reach.low >= -max_reach_bytes;
}

// One unknown of  sum of stride * x = target:  low <= x <= high, stride > 0.
struct Term {
  std::int64_t stride = 0;
  std::int64_t low = 0;
  std::int64_t high = 0;
};

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// At most 4 dimensions and the bytes of an element, for two tensors.
class Terms {
 public:
  // Multiples of stride by 0..extent - 1, added (sign = 1) or subtracted (sign = -1).
  void add(std::int64_t stride, std::int64_t extent, int sign) {
    if (extent <= 1 || stride == 0) return;
    const bool up = (stride > 0) == (sign > 0);
    const std::int64_t last = extent - 1;
    const Term term{stride < 0 ? -stride : stride, up ? 0 : -last, up ? last : 0};
    for (std::size_t i = 0; i < count_; ++i) {
      if (terms_[i].stride == term.stride) {
        terms_[i].low += term.low;
        terms_[i].high += term.high;
        return;
      }
    }
    terms_[count_++] = term;
  }

  void add_difference(std::int64_t stride, std::int64_t extent) {
    terms_[count_++] = {stride < 0 ? -stride : stride, 1 - extent, extent - 1};
  }

  // Is there a solution (other than all zeros, if nonzero is asked for)?
  bool solvable(std::int64_t target, bool nonzero) {
    // Unused terms have stride 0 and end up behind the others.
    std::sort(terms_.begin(), terms_.end(),
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    steps_ = 10000;
    return solve(0, target, !nonzero);
  }

 private:
  bool solve(std::size_t index, std::int64_t target, bool accepted) {
    if (index == count_) return target == 0 && accepted;
    std::int64_t rest_low = 0;
    std::int64_t rest_high = 0;
    for (std::size_t i = index + 1; i < count_; ++i) {
      rest_low += terms_[i].stride * terms_[i].low;
      rest_high += terms_[i].stride * terms_[i].high;
    }
    const Term& term = terms_[index];
    const std::int64_t first = std::max(term.low, -floor_div(rest_high - target, term.stride));
    const std::int64_t last = std::min(term.high, floor_div(target - rest_low, term.stride));
    for (std::int64_t x = first; x <= last; ++x) {
      if (--steps_ < 0) return true;
      if (solve(index + 1, target - term.stride * x, accepted || x != 0)) return true;
    }
    return false;
  }

  std::array<Term, 10> terms_{};
  std::size_t count_ = 0;
  int steps_ = 0;
};

}  // namespace

std::string_view name(DType dtype) {
  constexpr std::array<std::string_view, 7> names{"f32",  "bf16",    "f16", "e4m3",
                                                  "e5m2", "boolean", "s8"};
  const auto index = static_cast<std::size_t>(dtype);
  return index < names.size() ? names[index] : "unknown";
}

std::size_t size_bytes(DType dtype) {
  static_assert(static_cast<int>(DType::s8) == static_cast<int>(core::DType::s8));
  return static_cast<std::size_t>(core::size_bytes(static_cast<core::DType>(dtype)));
}

Tensor contiguous(const void* data, DType dtype, std::array<std::int64_t, 4> shape) {
  std::array<std::int64_t, 4> stride{};
  std::int64_t next = 1;
  for (std::size_t i = 4; i-- > 0;) {
    stride[i] = next;
    next = saturating_product(next, shape[i]);
  }
  return make(data, dtype, shape, stride);
}

Tensor bshd(const void* data, DType dtype, std::int64_t batch, std::int64_t seqlen,
            std::int64_t heads, std::int64_t head_dim) {
  return contiguous(data, dtype, {batch, seqlen, heads, head_dim});
}

Tensor bhsd(const void* data, DType dtype, std::int64_t batch, std::int64_t seqlen,
            std::int64_t heads, std::int64_t head_dim) {
  Tensor tensor = contiguous(data, dtype, {batch, heads, seqlen, head_dim});
  std::swap(tensor.shape[1], tensor.shape[2]);
  std::swap(tensor.stride[1], tensor.stride[2]);
  return tensor;
}

Tensor packed(const void* data, DType dtype, std::int64_t total, std::int64_t heads,
              std::int64_t head_dim) {
  return contiguous(data, dtype, {1, total, heads, head_dim});
}

bool has_elements(const Tensor& tensor) {
  return tensor.present &&
         std::find(tensor.shape.begin(), tensor.shape.end(), 0) == tensor.shape.end();
}

void check_view(std::string_view argument, const Tensor& tensor) {
  if (!tensor.present) {
    require(tensor.data == nullptr, argument,
            " has data but is marked absent; set present, or leave data null to omit it");
    return;
  }
  require(tensor.dtype <= DType::s8, argument, " has dtype ", static_cast<int>(tensor.dtype),
          ", which is none of f32, bf16, f16, e4m3, e5m2, boolean and s8");
  for (const std::int64_t extent : tensor.shape) {
    require(extent >= 0 && extent <= max_extent, argument, " has shape ", Tuple{tensor.shape},
            ", but every extent must lie in 0..", max_extent);
  }
  if (!has_elements(tensor)) return;
  const std::size_t element = size_bytes(tensor.dtype);
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  require(address != 0, argument, " has null data but shape ", Tuple{tensor.shape},
          "; point data at its elements");
  require(address % element == 0, argument, " has data at address ", address, ", but ",
          tensor.dtype, " elements must be aligned to ", element, " bytes");
  Reach reach;
  require(reach_of(tensor, reach) && address >= static_cast<std::uintptr_t>(-reach.low) &&
              address <= std::numeric_limits<std::uintptr_t>::max() -
                             static_cast<std::uintptr_t>(reach.high),
          argument, " has strides ", Tuple{tensor.stride}, " for shape ", Tuple{tensor.shape},
          ", which leave the address space; strides count elements");
}

bool overlaps_itself(const Tensor& tensor) {
  if (!has_elements(tensor)) return false;
  Terms terms;
  for (std::size_t i = 0; i < 4; ++i) {
    if (tensor.shape[i] == 1) continue;
    if (tensor.stride[i] == 0) return true;
    terms.add_difference(tensor.stride[i], tensor.shape[i]);
  }
  return terms.solvable(0, true);
}

bool share_memory(const Tensor& a, const Tensor& b) {
  if (!has_elements(a) || !has_elements(b)) return false;
  Reach reach_a;
  Reach reach_b;
  reach_of(a, reach_a);
  reach_of(b, reach_b);
  const auto base_a = reinterpret_cast<std::uintptr_t>(a.data);
  const auto base_b = reinterpret_cast<std::uintptr_t>(b.data);
  const auto at = [](std::uintptr_t base, std::int64_t offset) {
    return base + static_cast<std::uintptr_t>(offset);
  };
  if (at(base_a, reach_a.high) <= at(base_b, reach_b.low) ||
      at(base_b, reach_b.high) <= at(base_a, reach_a.low)) {
    return false;
  }
  // A byte belongs to both: base_a + (terms of a) = base_b + (terms of b).
  Terms terms;
  for (const auto& [tensor, sign] : {std::pair{&a, 1}, std::pair{&b, -1}}) {
    const auto element = static_cast<std::int64_t>(size_bytes(tensor->dtype));
    terms.add(1, element, sign);
    for (std::size_t i = 0; i < 4; ++i) {
      terms.add(tensor->stride[i] * element, tensor->shape[i], sign);
    }
  }
  return terms.solvable(static_cast<std::int64_t>(base_b - base_a), false);
}

core::View to_view(const Tensor& tensor) {
  core::View view;
  if (!tensor.present) return view;
  view.data = tensor.data;
  view.dtype = static_cast<core::DType>(tensor.dtype);
  for (std::size_t i = 0; i < 4; ++i) {
    view.stride[i] = tensor.shape[i] == 1 ? 0 : tensor.stride[i];
  }
  return view;
}

}  // namespace fovea
