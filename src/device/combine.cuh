// Merges the parts of a problem whose keys were split (core/softmax.h): one warp for each row.
// Memory binds: each part is read once, in runs of 128 bytes.
#pragma once

#include "core/softmax.h"
#include "device/scores.h"

namespace fovea::device {

using core::CombineParams;

__forceinline__ float merge_lanes(float lse) {
#pragma unroll
  for (int32 distance = 16; distance > 0; distance /= 2) {
    lse = core::merge_parts(lse, __shfl_xor_sync(0xffffffffu, lse, distance)).lse;
  }
  return lse;
}

template <DType out_dtype>
__forceinline__ void store_result(void* out, int64 offset, float value) {
  if constexpr (out_dtype == DType::f32) {
    static_cast<float*>(out)[offset] = value;
  } else {
    static_cast<uint16*>(out)[offset] = static_cast<uint16>(pack<out_dtype>(value, 0.0f) & 0xffffu);
  }
}

template <DType out_dtype>
__forceinline__ void combine_row(const CombineParams& p, int64 index) {
  const int32 lane = lane_index();
  const int32 head = static_cast<int32>(index % p.heads);
  const int64 row = index / p.heads % p.rows;
  const int64 batch = index / p.heads / p.rows;
  const int64 part_stride = p.batch * p.rows * p.heads;
  const float* part_lse = p.part_lse + index;
  const bool used = part_lse[0] != infinity;
  float lse = -infinity;
  if (used) {
    for (int32 part = lane; part < p.splits; part += 32) {
      lse = core::merge_parts(lse, part_lse[part * part_stride]).lse;
    }
    lse = merge_lanes(lse);
  }
  const float seen = lse;
  float share = 1.0f;
  if (used && p.sink != nullptr) {
    const core::Merge merged = core::merge_parts(seen, p.sink[head * p.sink_stride]);
    lse = merged.lse;
    share = merged.weight_a;
  }
  const int64 offset = batch * p.out_stride[0] + row * p.out_stride[1] + head * p.out_stride[2];
  for (int32 column = lane; column < p.head_dim_v; column += 32) {
    const float* values = p.part_out + index * p.head_dim_v + column;
    float sum = 0.0f;
    for (int32 part = 0; part < p.splits && seen != -infinity; ++part) {
      const float own = part_lse[part * part_stride];
      const float weight = own == -infinity ? 0.0f : exp2_approximate((own - seen) * core::log2_e);
      sum += core::weighted(weight, values[part * part_stride * p.head_dim_v]);
    }
    store_result<out_dtype>(p.out, offset + column * p.out_stride[3], core::weighted(share, sum));
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[batch * p.lse_stride[0] + head * p.lse_stride[1] + row * p.lse_stride[2]] = lse;
  }
}

template <DType out_dtype>
__device__ void combine(const CombineParams& params) {
  const int64 rows = params.batch * params.rows * params.heads;
  const int64 warps = static_cast<int64>(gridDim.x) * (core::combine_threads / 32);
  for (int64 i = static_cast<int64>(blockIdx.x) * (core::combine_threads / 32) + warp_index();
       i < rows; i += warps) {
    combine_row<out_dtype>(params, i);
  }
}

}  // namespace fovea::device
