#include "runtime/eight_bits.h"

#include "runtime/text.h"

namespace fovea {

void check_quantization(const Quantization& q) {
  require(core::is_eight_bit(static_cast<core::DType>(q.dtype)), "quantization.dtype is ", q.dtype,
          "; it must be e4m3, e5m2 or s8");
  require(q.scales <= Fp8Scales::block, "quantization.scales is ", static_cast<int>(q.scales),
          ", which is no fovea::Fp8Scales");
}

void check_eight_bits(const EightBits& eight_bits) {
  check_quantization(eight_bits.quantization);
  require(eight_bits.promote_keys >= 0, "options.eight_bits.promote_keys is ",
          eight_bits.promote_keys, "; it must be positive, or 0 for one accumulator");
}

core::QuantizeOptions quantize_options(const Quantization& q) {
  return {static_cast<core::ScaleGranularity>(q.scales), q.rotate, q.seed,
          static_cast<core::DType>(q.dtype)};
}

std::vector<std::string> quantization_objections(const core::Problem& p) {
  std::vector<std::string> reasons;
  if (core::is_eight_bit(p.q.dtype)) return reasons;
  if (p.head_dim > max_head_dim_quantized || p.head_dim_v > max_head_dim_quantized) {
    reasons.push_back(text("it quantises head dimensions up to ", max_head_dim_quantized,
                           " but they are ", p.head_dim, " and ", p.head_dim_v));
  }
  return reasons;
}

}  // namespace fovea
