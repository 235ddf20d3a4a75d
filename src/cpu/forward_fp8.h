// Eight-bit attention as the kernel of device/fwd_fp8_sm90.cuh computes it, on the CPU: for the
// accuracy laboratory and as the measure of the kernel's tests. Slow on purpose.
#pragma once

#include "core/fp8.h"
#include "cpu/quantize.h"
#include "cpu/reference.h"

namespace fovea::cpu {

struct Fp8Method {
  core::DType codes = core::DType::e4m3;  // of q and k; s8: v is e4m3
  core::SoftmaxPolicy softmax = core::SoftmaxPolicy::sum_guard;
  core::int32 tile_k = 192;
  // Key tiles whose products one tensor-core accumulator sums before it is added in fp32; 0: all.
  core::int32 promote = 0;
  // How many bits behind the leading one the tensor cores' accumulator keeps: 13 on Hopper, 23 is
  // fp32.
  core::int32 accumulator_bits = 13;
  bool round_weights = true;         // to e4m3
  bool sum_rounded_weights = false;  // the row sum is of rounded weights
  // Weights are divided by the whole row's sum before they are rounded, as an unfused computation
  // does, and so lie between 0 and 1. The softmax policy does not count.
  bool unfused = false;
};

struct Fp8Statistics {
  core::int64 repairs = 0;
  core::int64 saturated = 0;  // weights above 448 when they were rounded: never, by construction
};

// The problem's q, k and v are not used: their codes and scales are. Masks by position, softcap,
// sink and lengths as in the problem. threads = 0 takes the OpenMP default.
ReferenceResult forward_fp8(const core::Problem& problem, const Fp8Operands& operands,
                            const Fp8Method& method, Fp8Statistics* statistics = nullptr,
                            int threads = 0);

}  // namespace fovea::cpu
