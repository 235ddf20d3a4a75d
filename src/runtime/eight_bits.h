// Which problems are computed in 8 bits, and what their operands become.
#pragma once

#include <string>
#include <vector>

#include "core/fp8.h"
#include "fovea/fovea.hpp"

namespace fovea {

inline constexpr core::int32 max_head_dim_quantized = 256;  // of the rotation's signs

// Asked for, or the inputs are in 8 bits.
[[nodiscard]] inline bool in_eight_bits(const core::Problem& problem, const Options& options) {
  return options.eight_bits.has_value() || core::is_eight_bit(problem.q.dtype);
}

// Throw Error for values out of range.
void check_quantization(const Quantization& quantization);
void check_eight_bits(const EightBits& eight_bits);
// Throws Error for a rotary embedding that does not turn this problem's q and k.
void check_rotary(const Rotary& rotary, const core::Problem& problem);

[[nodiscard]] core::QuantizeOptions quantize_options(const Quantization& quantization);

// Why the problem's operands cannot be quantised, as clauses; none where they are in 8 bits.
[[nodiscard]] std::vector<std::string> quantization_objections(const core::Problem& problem);

}  // namespace fovea
