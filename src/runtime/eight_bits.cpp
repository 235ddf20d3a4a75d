#include "runtime/eight_bits.h"

#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {

namespace {

void check_tables(const Rotary& rotary) {
  require(rotary.cos.present == rotary.sin.present,
          "rotary.cos and rotary.sin belong together; give both or none");
  if (!rotary.cos.present) return;
  const std::pair<std::string_view, const Tensor*> tables[] = {{"rotary.cos", &rotary.cos},
                                                               {"rotary.sin", &rotary.sin}};
  for (const auto& [name, table] : tables) {
    check_view(name, *table);
    require(table->dtype == DType::f32 || table->dtype == DType::bf16 || table->dtype == DType::f16,
            name, " has dtype ", table->dtype, "; it must be f32, bf16 or f16");
    require(
        table->shape[0] == 1 && table->shape[1] == 1 && table->shape[2] > 0 && table->shape[3] > 0,
        name, " has shape (", table->shape[0], ", ", table->shape[1], ", ", table->shape[2], ", ",
        table->shape[3], "); it must be (1, 1, positions, pairs)");
  }
  require(rotary.cos.shape == rotary.sin.shape && rotary.cos.dtype == rotary.sin.dtype,
          "rotary.sin must have the shape and dtype of rotary.cos");
  require(rotary.first_position >= 0 && rotary.first_position < rotary.cos.shape[2],
          "rotary.first_position is ", rotary.first_position, "; it must lie in 0..",
          rotary.cos.shape[2] - 1, ", the rows of rotary.cos");
}

}  // namespace

void check_quantization(const Quantization& q) {
  require(core::is_eight_bit(static_cast<core::DType>(q.dtype)), "quantization.dtype is ", q.dtype,
          "; it must be e4m3, e5m2 or s8");
  require(q.scales <= Fp8Scales::block, "quantization.scales is ", static_cast<int>(q.scales),
          ", which is no fovea::Fp8Scales");
  check_tables(q.rotary);
}

void check_rotary(const Rotary& rotary, const core::Problem& p) {
  if (!rotary.cos.present) return;
  require(!core::is_eight_bit(p.q.dtype),
          "rotary.cos is given but q is in 8 bits; what is turned must be f32, bf16 or f16");
  const std::int64_t pairs = rotary.cos.shape[3];
  require(2 * pairs <= p.head_dim, "rotary.cos has ", pairs,
          " columns, which turn more than the head dimension ", p.head_dim);
  const std::int64_t last = rotary.first_position + p.seqlen_k;
  require(last <= rotary.cos.shape[2], "rotary.cos has ", rotary.cos.shape[2],
          " rows but the last key may stand at position ", last - 1);
  require(p.is_varlen_q() || p.is_varlen_k() || p.seqlen_q <= p.seqlen_k, "q has ", p.seqlen_q,
          " rows but k ", p.seqlen_k,
          "; a rotary embedding puts the last query beside the last key, so there may be no more");
}

void check_eight_bits(const EightBits& eight_bits) {
  check_quantization(eight_bits.quantization);
  require(eight_bits.promote_keys >= 0, "options.eight_bits.promote_keys is ",
          eight_bits.promote_keys, "; it must be positive, or 0 for one accumulator");
}

core::QuantizeOptions quantize_options(const Quantization& q) {
  core::QuantizeOptions options{static_cast<core::ScaleGranularity>(q.scales), q.rotate, q.seed,
                                static_cast<core::DType>(q.dtype)};
  const Rotary& rotary = q.rotary;
  if (!rotary.cos.present) return options;
  options.rotary = {rotary.interleaved ? core::RotaryPairs::neighbours : core::RotaryPairs::halves,
                    static_cast<core::int32>(rotary.cos.shape[3]),
                    rotary.cos.shape[2],
                    rotary.first_position,
                    to_view(rotary.cos),
                    to_view(rotary.sin)};
  return options;
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
