// Attention in 8 bits on Hopper (device/fwd_fp8_sm90.cuh): two-level accumulation.
//
// Hopper's products of 8-bit floats add into accumulators of about 14 bits. A promoting kernel lets
// them sum over C.promote key tiles only and adds the parts up in fp32: in registers where a tile
// leaves room for them, else in shared memory.
#pragma once

#include "device/fwd_load_fp8_sm90.h"
#include "device/scores.h"
#include "device/wgmma.h"

namespace fovea::device {

// What was in a thread's share of the output before the last promotion.
template <FwdConfig C>
struct Fp8Sums {
  static constexpr int32 count = C.head_dim_v / 2;
  static constexpr bool in_registers = core::fp8_sums_in_registers(C);
  static constexpr bool in_memory = C.promote > 0 && !in_registers;
  // Sums in memory remember what they have to shrink by, where that is often. Else they shrink
  // there: registers are dearer.
  static constexpr bool remembers_factor = in_memory && C.softmax == SoftmaxPolicy::online;

  Fp8Plan<C>& plan;
  const int32 warpgroup;  // 0 based among the computing ones
  float total[in_registers ? count : 1];
  float factor[2];
  int32 until;    // key tiles that output still sums before it is promoted
  bool promoted;  // the sums in memory hold something

  // Sums in memory: four of this thread side by side, then those of the warpgroup's other threads.
  __forceinline__ SharedAddress place(int32 i) const {
    return shared_address(plan.apart) +
           static_cast<uint32>(warpgroup) * (4 * Fp8Plan<C>::apart_bytes) +
           (static_cast<uint32>(i / 4) * 128 + threadIdx.x % 128) * 16;
  }

  __forceinline__ void reset() {
    until = C.promote - (C.ping_pong ? C.promote / C.warpgroups * warpgroup : 0);
    promoted = false;
    factor[0] = factor[1] = 1.0f;
    if constexpr (in_registers) {
#pragma unroll
      for (int32 i = 0; i < count; ++i) total[i] = 0.0f;
    }
  }

  __forceinline__ void scale(const float (&by)[2]) {
    if constexpr (in_registers) {
#pragma unroll
      for (int32 i = 0; i < count; ++i) total[i] *= by[(i / 2) % 2];
    }
    if constexpr (remembers_factor) {
      factor[0] *= by[0];
      factor[1] *= by[1];
    } else if constexpr (in_memory) {
      if (promoted) scale_memory(by);
    }
  }

  __forceinline__ void scale_memory(const float (&by)[2]) const {
#pragma unroll 4
    for (int32 i = 0; i < count; i += 4) {
      const SharedAddress at = place(i);
      const uint4 bits = load_shared_x4(at);
      store_shared_x4(at, {__float_as_uint(__uint_as_float(bits.x) * by[0]),
                           __float_as_uint(__uint_as_float(bits.y) * by[0]),
                           __float_as_uint(__uint_as_float(bits.z) * by[1]),
                           __float_as_uint(__uint_as_float(bits.w) * by[1])});
    }
  }

  // What the sums hold is added to output.
  __forceinline__ void add_to(float (&output)[count]) const {
    if constexpr (in_registers) {
#pragma unroll
      for (int32 i = 0; i < count; ++i) output[i] += total[i];
    } else if constexpr (in_memory) {
      if (promoted) add_memory_to(output);
    }
  }

  __forceinline__ void add_memory_to(float (&output)[count]) const {
#pragma unroll
    for (int32 i = 0; i < count; i += 4) {
      const uint4 bits = load_shared_x4(place(i));
      output[i] = fmaf(__uint_as_float(bits.x), factor[0], output[i]);
      output[i + 1] = fmaf(__uint_as_float(bits.y), factor[0], output[i + 1]);
      output[i + 2] = fmaf(__uint_as_float(bits.z), factor[1], output[i + 2]);
      output[i + 3] = fmaf(__uint_as_float(bits.w), factor[1], output[i + 3]);
    }
  }

  // Every C.promote key tiles, while scores are computed, output moves into the sums and starts
  // from zero. Warpgroups in turns do so at different tiles, that one's way through shared memory
  // lies under the other's products.
  __forceinline__ void promote(float (&output)[count]) {
    until = C.promote;
    if constexpr (in_registers) {
#pragma unroll
      for (int32 i = 0; i < count; ++i) {
        total[i] += output[i];
        output[i] = 0.0f;
      }
    } else {
      if (promoted) add_memory_to(output);
      promoted = true;
#pragma unroll
      for (int32 i = 0; i < count; i += 4) {
        store_shared_x4(place(i), {__float_as_uint(output[i]), __float_as_uint(output[i + 1]),
                                   __float_as_uint(output[i + 2]), __float_as_uint(output[i + 3])});
        output[i] = output[i + 1] = output[i + 2] = output[i + 3] = 0.0f;
      }
      factor[0] = factor[1] = 1.0f;
    }
    wgmma_hold(output);  // zeros in registers now, not behind the next product's fence
  }

  __forceinline__ void promote_if_due(float (&output)[count]) {
    if constexpr (C.promote > 0) {
      if (until == 0) promote(output);
    }
  }

  __forceinline__ void count_tile() {
    if constexpr (C.promote > 0) --until;
  }
};

}  // namespace fovea::device
