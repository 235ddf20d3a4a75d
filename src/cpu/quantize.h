// Quantisation to 8 bits on the CPU: the twin of device/quantize.cuh, equal to it in every bit
// where scales are powers of two.
#pragma once

#include <cstddef>

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
  core::PageTarget target = {};  // k, v and key_scale are pages: of these, used keys are written
};

// Quantises the problem's q, k and v, of any dtype and strides, paged or not. Rows that no sequence
// uses count as zeros. An element that is not finite becomes a NaN (with rotation: its row does)
// and takes no part in scales. Every byte of the operands is written but rows outside of all
// sequences. Allocates nothing. threads = 0 takes the OpenMP default.
void quantize(const core::Problem& problem, const core::QuantizeOptions& options,
              const Fp8Operands& operands, int threads = 0);

// The same with v in rows, as q and k, and scales of their own: (batch, head, block) each.
struct RowOperands {
  core::uint8* q = nullptr;
  core::uint8* k = nullptr;
  core::uint8* v = nullptr;
  float* q_scale = nullptr;
  float* k_scale = nullptr;
  float* v_scale = nullptr;
};
void quantize_rows(const core::Problem& problem, const core::QuantizeOptions& options,
                   const RowOperands& operands, int threads = 0);

// What the operands of an 8-bit problem, or those that quantize() would make of one, stand for: a
// problem in fp32, its q, k and v dense in `memory` of widened_bytes(), pages gathered, q and k of
// core::fp8_columns() columns. widened() only says where they lie; widen() fills them, allocating
// nothing.
std::size_t widened_bytes(const core::Problem& problem);
core::Problem widened(const core::Problem& problem, std::byte* memory);
void widen(const core::Problem& problem, const core::QuantizeOptions& options, std::byte* memory,
           int threads = 0);

}  // namespace fovea::cpu
