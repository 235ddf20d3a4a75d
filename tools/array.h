// Arrays as they come out of a file: an element type, a shape, and bytes that something else owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::tools {

// The element types that the readers tell apart. `other` is a type that a file may hold beside the
// tensors that matter (its bytes are not interpreted).
enum class ElementType : std::uint8_t {
  f32,
  f16,
  bf16,
  f64,
  e4m3,
  e5m2,
  i32,
  i64,
  i8,
  u8,
  boolean,
  other
};

[[nodiscard]] std::string_view name(ElementType type);
// Bytes of one element; 0 for `other`.
[[nodiscard]] std::size_t size_bytes(ElementType type);

struct Array {
  ElementType type = ElementType::other;
  std::vector<std::int64_t> shape;   // row-major; empty: a scalar
  std::span<const std::byte> bytes;  // little-endian, of any alignment

  [[nodiscard]] std::int64_t rank() const { return static_cast<std::int64_t>(shape.size()); }
  [[nodiscard]] std::int64_t elements() const;
};

// "(1, 148, 12, 32)", the way numpy writes it.
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);

// Product of a shape, or -1 when a dimension is negative or the bytes do not fit 63 bits.
[[nodiscard]] std::int64_t checked_elements(std::span<const std::int64_t> shape,
                                            std::size_t element_bytes);

}  // namespace fovea::tools
