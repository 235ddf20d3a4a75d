// Strided views: where their elements lie, and whether they share memory.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/types.h"
#include "fovea/fovea.hpp"

namespace fovea {

inline constexpr std::int64_t max_extent = 2147483647;  // of a dimension: lengths are 32-bit

// Throws Error unless the tensor is a view that can be read: a known dtype, extents in
// 0..max_extent, data where there are elements, aligned to the element, and no address out of
// reach. An absent tensor passes if it does not carry data.
void check_view(std::string_view argument, const Tensor& tensor);

[[nodiscard]] bool has_elements(const Tensor& tensor);

// Do two different indices name the same element? Two tensors the same byte? Both take tensors that
// check_view() accepted, and decide exactly by a search over strides, which stays short for any
// layout whose strides nest or nearly do; should it not end soon, the answer is yes.
[[nodiscard]] bool overlaps_itself(const Tensor& tensor);
[[nodiscard]] bool share_memory(const Tensor& a, const Tensor& b);

// The tensor as a backend sees it. Dimensions of extent 1 get stride 0, which makes them broadcast.
[[nodiscard]] core::View to_view(const Tensor& tensor);

}  // namespace fovea
