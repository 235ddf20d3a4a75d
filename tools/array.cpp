#include "tools/array.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

namespace fovea::tools {

std::string_view name(ElementType type) {
  switch (type) {
    case ElementType::f32: return "float32";
    case ElementType::f16: return "float16";
    case ElementType::bf16: return "bfloat16";
    case ElementType::f64: return "float64";
    case ElementType::e4m3: return "float8_e4m3";
    case ElementType::e5m2: return "float8_e5m2";
    case ElementType::i32: return "int32";
    case ElementType::i64: return "int64";
    case ElementType::i8: return "int8";
    case ElementType::u8: return "uint8";
    case ElementType::boolean: return "bool";
    case ElementType::other: break;
  }
  return "an unknown type";
}

std::size_t size_bytes(ElementType type) {
  switch (type) {
    case ElementType::f64:
    case ElementType::i64: return 8;
    case ElementType::f32:
    case ElementType::i32: return 4;
    case ElementType::f16:
    case ElementType::bf16: return 2;
    case ElementType::e4m3:
    case ElementType::e5m2:
    case ElementType::i8:
    case ElementType::u8:
    case ElementType::boolean: return 1;
    case ElementType::other: break;
  }
  return 0;
}

std::int64_t Array::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  if (shape.size() == 1) return fmt::format("({},)", shape[0]);
  return fmt::format("({})", fmt::join(shape, ", "));
}

std::int64_t checked_elements(std::span<const std::int64_t> shape, std::size_t element_bytes) {
  const auto limit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) /
                     static_cast<std::uint64_t>(std::max<std::size_t>(element_bytes, 1));
  // Zero extents do not excuse the others: (2^40, 2^40, 0) has strides that overflow all the same.
  std::uint64_t product = 1;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return -1;
    if (extent == 0) {
      empty = true;
      continue;
    }
    if (product > limit / static_cast<std::uint64_t>(extent)) return -1;
    product *= static_cast<std::uint64_t>(extent);
  }
  return empty ? 0 : static_cast<std::int64_t>(product);
}

}  // namespace fovea::tools
