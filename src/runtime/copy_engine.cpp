#include "runtime/copy_engine.h"

#include <algorithm>

namespace fovea::runtime {

using core::int32;
using core::int64;

bool suits_copy_engine(const core::View& view, const RowExtents& extents, int64 columns) {
  const auto address = reinterpret_cast<DeviceAddress>(view.data);
  if (address % 16 != 0 || core::size_bytes(view.dtype) != 2) return false;
  if (view.stride[3] != 1 && columns > 1) return false;
  for (int i = 0; i < 3; ++i) {
    if (extents.of[i] <= 1) continue;
    const int64 bytes = view.stride[i] * 2;
    if (bytes <= 0 || bytes % 16 != 0 || bytes >= int64{1} << 40) return false;
  }
  return true;
}

core::TensorMap encode_rows(Device& device, const core::View& view, const RowExtents& extents,
                            int64 columns, int32 box_rows) {
  constexpr std::size_t order[3] = {1, 2, 0};
  TensorMapSpec spec;
  spec.type = view.dtype == core::DType::bf16 ? MapType::bf16 : MapType::f16;
  spec.rank = 4;
  spec.address = reinterpret_cast<DeviceAddress>(view.data);
  spec.extent[0] = static_cast<std::uint64_t>(columns);
  for (std::size_t i = 0; i < 3; ++i) {
    const int64 extent = extents.of[order[i]];
    spec.extent[i + 1] = static_cast<std::uint64_t>(std::max<int64>(extent, 1));
    spec.stride_bytes[i + 1] =
        extent > 1 ? static_cast<std::uint64_t>(view.stride[order[i]]) * 2 : 16;
  }
  spec.box = {core::panel_columns, static_cast<std::uint32_t>(box_rows), 1, 1, 1};
  spec.swizzle = MapSwizzle::b128;
  return device.encode_tensor_map(spec);
}

}  // namespace fovea::runtime
