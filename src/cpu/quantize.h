// Quantisation to e4m3 on the CPU: the twin of device/quantize.cuh, equal to it in every bit.
#pragma once

#include "core/fp8.h"
#include "core/types.h"

namespace fovea::cpu {

// Where the operands of core::fp8_layout() go; what is null is left out.
struct Fp8Operands {
  core::uint8* q = nullptr;
  core::uint8* k = nullptr;
  core::uint8* v = nullptr;
  float* q_scale = nullptr;
  core::KeyScale* key_scale = nullptr;
};

// Quantises the problem's q, k and v, of any dtype and strides; rows that no sequence uses too. An
// element that is not finite becomes a NaN (with rotation: its row does) and takes no part in
// scales. Every byte of the operands is written but rows outside of all sequences.
void quantize(const core::Problem& problem, const core::QuantizeOptions& options,
              const Fp8Operands& operands);

}  // namespace fovea::cpu
