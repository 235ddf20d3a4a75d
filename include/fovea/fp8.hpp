// fovea in eight bits: e4m3 operands with a scale for every 32 rows, rotated so that outliers do
// not stretch them (docs/kernels/fp8.md).
#pragma once

#include <cstdint>

#include "fovea/fovea.hpp"

namespace fovea {

// What shares a scale: a whole tensor, the rows of one (sequence, head), or 32 rows of it.
enum class Fp8Scales : std::uint8_t { tensor, head, block };

// How q, k and v become e4m3.
struct Quantization {
  Fp8Scales scales = Fp8Scales::block;
  // q and k times random signs times a Hadamard matrix, which cancels in q k^T: FlashAttention-3's
  // incoherent processing. Head dimensions are padded to a multiple of 32 and rotated in blocks of
  // the largest power of two that divides that.
  bool rotate = true;
  std::uint64_t seed = 0;  // of the signs
};

// The arithmetic of an 8-bit kernel, to be studied on any machine.
struct Fp8Arithmetic {
  Quantization quantization;
  Softmax softmax = Softmax::automatic;
  std::int32_t tile_k = 192;  // keys of a step, a multiple of 32
  // Keys whose products one tensor-core accumulator sums before it is added up in fp32; 0: all.
  std::int64_t promote_keys = 0;
  // Bits that the accumulator keeps behind the leading one: 13 on Hopper, 23 is fp32.
  std::int32_t accumulator_bits = 13;
  bool round_weights = true;         // to e4m3
  bool sum_rounded_weights = false;  // the row sum is of rounded weights
  bool unfused =
      false;  // weights are normalised before they are rounded, as without a fused kernel
};

// What such a kernel makes of the problem, computed element by element on the CPU; slow on purpose.
// Results as those of reference(). Takes every dtype, masks by position, softcap, sink and lengths;
// throws Error for bias, mask tensors, ALiBi, dropout and pages, and for arithmetic that is none.
[[nodiscard]] Reference reference_fp8(const Problem& problem, const Fp8Arithmetic& arithmetic = {},
                                      int threads = 0);

}  // namespace fovea
