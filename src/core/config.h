// What host and kernels exchange besides plain numbers.
#pragma once

#include "core/types.h"

namespace fovea::core {

// A tensor map as a kernel parameter: opaque bytes, filled by Device::encode_tensor_map(). The copy
// engine wants it 64-byte aligned and in a __grid_constant__ parameter (or global memory).
struct alignas(64) TensorMap {
  uint64 opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace fovea::core
