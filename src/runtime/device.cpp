#include "runtime/device.h"

#include <charconv>

#include "fovea/fovea.hpp"

namespace fovea::runtime {

namespace {

std::uint64_t size_bytes(MapType type) {
  switch (type) {
    case MapType::u8: return 1;
    case MapType::u16:
    case MapType::f16:
    case MapType::bf16: return 2;
    case MapType::u32:
    case MapType::s32:
    case MapType::f32: return 4;
  }
  return 1;
}

[[noreturn]] void refuse(const std::string& what, std::uint64_t value, const std::string& right) {
  throw Error("tensor map " + what + " is " + std::to_string(value) + ", but must be " + right);
}

}  // namespace

void check_tensor_map(const TensorMapSpec& spec) {
  constexpr std::uint64_t address_limit = std::uint64_t{1} << 32;
  constexpr std::uint64_t stride_limit = std::uint64_t{1} << 40;
  if (spec.rank < 1 || spec.rank > 5) {
    throw Error("tensor map rank is " + std::to_string(spec.rank) + ", but must be 1 to 5");
  }
  if (spec.address == 0 || spec.address % 16 != 0) {
    refuse("address", spec.address, "a nonzero multiple of 16");
  }
  const std::uint64_t inner_bytes = spec.box[0] * size_bytes(spec.type);
  for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
    const std::string at = "[" + std::to_string(i) + "]";
    if (spec.extent[i] == 0 || spec.extent[i] > address_limit) {
      refuse("extent" + at, spec.extent[i], "1 to 2^32");
    }
    if (spec.box[i] == 0 || spec.box[i] > 256) refuse("box" + at, spec.box[i], "1 to 256");
    if (i > 0 && (spec.stride_bytes[i] % 16 != 0 || spec.stride_bytes[i] >= stride_limit)) {
      refuse("stride_bytes" + at, spec.stride_bytes[i], "a multiple of 16 below 2^40");
    }
  }
  std::uint64_t box_bytes = inner_bytes;
  for (std::size_t i = 1; i < static_cast<std::size_t>(spec.rank); ++i) box_bytes *= spec.box[i];
  constexpr std::uint64_t box_limit = 228 * 1024;
  if (box_bytes > box_limit) {
    refuse("box bytes", box_bytes, "at most " + std::to_string(box_limit));
  }
  if (inner_bytes % 16 != 0) refuse("inner box bytes", inner_bytes, "a multiple of 16");
  constexpr std::uint64_t widths[] = {0, 32, 64, 128};
  const std::uint64_t width = widths[static_cast<int>(spec.swizzle)];
  if (width != 0 && inner_bytes > width) {
    refuse("inner box bytes", inner_bytes, "at most the swizzle's " + std::to_string(width));
  }
}

std::unique_ptr<Device> open_device(std::string_view name, const EmulationOptions& options) {
  constexpr std::string_view emulated = "emulated:";
  constexpr std::string_view cuda = "cuda:";
  if (name.starts_with(emulated)) {
    return open_emulated_device(name.substr(emulated.size()), options);
  }
  if (name == "cuda") return open_cuda_device(0);
  if (name.starts_with(cuda)) {
    int ordinal = -1;
    const char* end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + cuda.size(), end, ordinal);
    if (parsed.ec == std::errc() && parsed.ptr == end && ordinal >= 0) {
      return open_cuda_device(ordinal);
    }
  }
  throw Error("device is '" + std::string(name) +
              "', but must be cuda, cuda:N, emulated:sm_90a or emulated:sm_100a");
}

}  // namespace fovea::runtime
