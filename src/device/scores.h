// Arithmetic on scores and weights that the attention kernels share.
#pragma once

#include "core/config.h"
#include "device/ptx.h"

namespace fovea::device {

using core::DType;
using core::infinity;
using core::ScoreTransform;
using core::SoftmaxPolicy;

// Over the four lanes that hold a row of a warpgroup's accumulator.
__forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <DType dtype>
__forceinline__ uint32 pack(float low, float high) {
  return dtype == DType::bf16 ? pack_bf16x2(low, high) : pack_f16x2(low, high);
}

// One 16-bit number, and two from a register, low half first.
template <DType dtype>
__forceinline__ float widen(uint16 bits) {
  return dtype == DType::bf16 ? __uint_as_float(static_cast<uint32>(bits) << 16) : widen_f16(bits);
}

template <DType dtype>
__forceinline__ float2 unpack(uint32 packed) {
  if constexpr (dtype == DType::bf16) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    return {widen_f16(static_cast<uint16>(packed)), widen_f16(static_cast<uint16>(packed >> 16))};
  }
}

// Two codes of 8 bits as two fp16 numbers.
template <DType dtype>
__forceinline__ uint32 unpack_codes(uint32 codes) {
  const uint16 pair = static_cast<uint16>(codes);
  if constexpr (dtype == DType::s8) return unpack_s8x2(pair);
  return dtype == DType::e4m3 ? unpack_e4m3x2(pair) : unpack_e5m2x2(pair);
}

// A power of two, up to 1 and above 4 `by`: references of shifted integers are its multiples.
__forceinline__ float fineness(float by) {
  const float kept = fminf(fmaxf(by, 0x1p-20f), 0x1p-3f);
  return 8.0f * __uint_as_float(__float_as_uint(kept) & 0x7f800000u);
}

// One number of a tensor in memory.
template <DType dtype>
__forceinline__ float load_float(const void* data, int64 index) {
  if constexpr (dtype == DType::f32) return static_cast<const float*>(data)[index];
  const uint16 bits = static_cast<const uint16*>(data)[index];
  return widen<dtype>(bits);
}

// tanh by the exponential: exact to fp32 rounding of its argument, unlike tanh.approx (2^-11).
__forceinline__ float tanh_accurate(float x) {
  const float e = exp2_approximate(x * (2.0f * core::log2_e));
  return fmaf(-2.0f, reciprocal_approximate(e + 1.0f), 1.0f);
}

}  // namespace fovea::device
