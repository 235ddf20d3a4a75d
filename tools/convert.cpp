#include "tools/convert.h"

#include <algorithm>
#include <cstring>

#include "core/numeric.h"

namespace fovea::tools {
namespace {

// Elements that are copied to an aligned place at a time.
constexpr std::int64_t block = 4096;

void convert_block(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
                   std::int64_t count) {
  alignas(float) std::byte aligned[block * sizeof(float)];
  std::memcpy(aligned, from, static_cast<std::size_t>(count) * size_bytes(from_dtype));
  const auto source = static_cast<core::DType>(from_dtype);
  const auto target = static_cast<core::DType>(to_dtype);
  for (std::int64_t i = 0; i < count; ++i) {
    core::store_element(to, target, i, core::load_element(aligned, source, i));
  }
}

}  // namespace

void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
             std::int64_t count) {
  const auto from_bytes = static_cast<std::int64_t>(size_bytes(from_dtype));
  const auto to_bytes = static_cast<std::int64_t>(size_bytes(to_dtype));
  if (from_dtype == to_dtype) {
    if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count * from_bytes));
    return;
  }
#pragma omp parallel for schedule(static) if (count > 8 * block)
  for (std::int64_t begin = 0; begin < count; begin += block) {
    convert_block(from + begin * from_bytes, from_dtype, to + begin * to_bytes, to_dtype,
                  std::min(block, count - begin));
  }
}

}  // namespace fovea::tools
