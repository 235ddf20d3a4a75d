// Number formats at the program's edge: files and random data to what a problem computes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fovea/fovea.hpp"

namespace fovea::tools {

// Converts count contiguous elements, rounding to nearest even. `from` may have any alignment, `to`
// has that of its type.
void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
             std::int64_t count);

}  // namespace fovea::tools
