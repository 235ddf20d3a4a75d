// Merges the parts of a problem whose keys were split (core/softmax.h): one warp for each row.
// Latency binds where rows are few, memory where they are many: the weights of all parts are found
// first, by a lane each, and then the values of several parts are in flight together, 16 bytes a
// lane where rows are whole chunks of that.
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

// Of the problem, and of each of its parts, which lie one behind the other.
__forceinline__ int64 row_count(const CombineParams& p) { return p.batch * p.rows * p.heads; }

// A row of the problem.
struct CombineRow {
  int64 index;  // among all
  int32 head;
  int64 row;
  int64 batch;

  __forceinline__ CombineRow(const CombineParams& p, int64 i)
      : index(i),
        head(static_cast<int32>(i % p.heads)),
        row(i / p.heads % p.rows),
        batch(i / p.heads / p.rows) {}
};

// `width` neighbouring columns of a part.
template <int32 width>
struct Columns {
  float value[width];

  static __forceinline__ Columns load(const float* at) {
    Columns c;
    if constexpr (width == 4) {
      const float4 four = *reinterpret_cast<const float4*>(at);
      c.value[0] = four.x;
      c.value[1] = four.y;
      c.value[2] = four.z;
      c.value[3] = four.w;
    } else {
      c.value[0] = *at;
    }
    return c;
  }
};

constexpr int32 parts_at_once = 8;  // whose values are in flight

// The weight of part `first` + lane, which the warp then reads part by part.
__forceinline__ float part_weight(const CombineParams& p, const float* part_lse, int32 part,
                                  float seen) {
  if (part >= p.splits) return 0.0f;
  const float own = part_lse[part * row_count(p)];
  return own == -infinity ? 0.0f : exp2_approximate((own - seen) * core::log2_e);
}

template <DType out_dtype, int32 width>
__forceinline__ void combine_columns(const CombineParams& p, const CombineRow& at, float seen,
                                     float share) {
  const int32 lane = lane_index();
  const int64 values_stride = row_count(p) * p.head_dim_v;
  const int64 offset =
      at.batch * p.out_stride[0] + at.row * p.out_stride[1] + at.head * p.out_stride[2];
  const int32 parts = seen == -infinity ? 0 : p.splits;
  for (int32 begin = 0; begin < p.head_dim_v; begin += 32 * width) {
    const int32 column = begin + lane * width;
    const bool inside = column < p.head_dim_v;
    const float* values = p.part_out + at.index * p.head_dim_v + (inside ? column : 0);
    float sum[width] = {};
    for (int32 first = 0; first < parts; first += 32) {
      const float weight = part_weight(p, p.part_lse + at.index, first + lane, seen);
      for (int32 part = first; part < min(first + 32, parts); part += parts_at_once) {
        Columns<width> found[parts_at_once];
#pragma unroll
        for (int32 i = 0; i < parts_at_once; ++i) {
          found[i] = Columns<width>::load(values + min(part + i, parts - 1) * values_stride);
        }
#pragma unroll
        for (int32 i = 0; i < parts_at_once; ++i) {
          // Zero behind the last part: lanes there stand for none.
          const float own = __shfl_sync(0xffffffffu, weight, (part - first + i) % 32);
#pragma unroll
          for (int32 j = 0; j < width; ++j) sum[j] += core::weighted(own, found[i].value[j]);
        }
      }
    }
    if (!inside) continue;
#pragma unroll
    for (int32 j = 0; j < width; ++j) {
      store_result<out_dtype>(p.out, offset + (column + j) * p.out_stride[3],
                              core::weighted(share, sum[j]));
    }
  }
}

template <DType out_dtype>
__forceinline__ void combine_row(const CombineParams& p, const CombineRow& at) {
  const int32 lane = lane_index();
  const int64 part_stride = row_count(p);
  const float* part_lse = p.part_lse + at.index;
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
    const core::Merge merged = core::merge_parts(seen, p.sink[at.head * p.sink_stride]);
    lse = merged.lse;
    share = merged.weight_a;
  }
  if (p.head_dim_v % 4 == 0) {
    combine_columns<out_dtype, 4>(p, at, seen, share);
  } else {
    combine_columns<out_dtype, 1>(p, at, seen, share);
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[at.batch * p.lse_stride[0] + at.head * p.lse_stride[1] + at.row * p.lse_stride[2]] = lse;
  }
}

template <DType out_dtype>
__device__ void combine(const CombineParams& params) {
  grid_dependency_wait();  // launched before the kernel of the parts ends
  const int64 rows = row_count(params);
  const int64 warps = static_cast<int64>(gridDim.x) * (core::combine_threads / 32);
  for (int64 i = static_cast<int64>(blockIdx.x) * (core::combine_threads / 32) + warp_index();
       i < rows; i += warps) {
    combine_row<out_dtype>(params, CombineRow(params, i));
  }
}

}  // namespace fovea::device
