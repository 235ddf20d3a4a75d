// Copies a strided tensor into rows that the copy engine takes: dense, each padded with zeros to a
// multiple of 16 bytes. What binds is memory: each thread writes 16 bytes, and reads them element
// by element, since nothing is known about the strides.
#pragma once

#include "core/config.h"
#include "device/ptx.h"

namespace fovea::device {

using core::CopyParams;

template <typename Element>
__device__ void copy_rows(const CopyParams& p) {
  constexpr int32 elements = 16 / static_cast<int32>(sizeof(Element));
  const int64 chunks = p.padded / elements;  // of a row
  const int64 count = p.extent[0] * p.extent[1] * p.extent[2] * chunks;
  const int64 step = static_cast<int64>(gridDim.x) * core::copy_threads;
  for (int64 i = static_cast<int64>(blockIdx.x) * core::copy_threads + threadIdx.x; i < count;
       i += step) {
    const int64 row = i / chunks;
    const int64 column = i % chunks * elements;
    const int64 i2 = row % p.extent[2];
    const int64 i1 = row / p.extent[2] % p.extent[1];
    const int64 i0 = row / p.extent[2] / p.extent[1];
    const auto* from = static_cast<const Element*>(p.from) + i0 * p.stride[0] + i1 * p.stride[1] +
                       i2 * p.stride[2];
    alignas(16) Element chunk[elements];
#pragma unroll
    for (int32 e = 0; e < elements; ++e) {
      chunk[e] = column + e < p.extent[3] ? from[(column + e) * p.stride[3]] : Element{};
    }
    *reinterpret_cast<uint4*>(static_cast<Element*>(p.to) + row * p.padded + column) =
        *reinterpret_cast<const uint4*>(chunk);
  }
}

}  // namespace fovea::device
