#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/forward_fp8.h"
#include "cpu/quantize.h"
#include "fovea/fp8.hpp"
#include "runtime/eight_bits.h"
#include "runtime/problem.h"
#include "runtime/text.h"

namespace fovea {
namespace {

core::SoftmaxPolicy policy_of(Softmax softmax) {
  switch (softmax) {
    case Softmax::online: return core::SoftmaxPolicy::online;
    case Softmax::conditional: return core::SoftmaxPolicy::conditional;
    default: return core::SoftmaxPolicy::sum_guard;
  }
}

void check(const core::Problem& p) {
  const auto refuse = [](bool there, const char* what) {
    require(!there, what, " is given, which 8-bit attention does not take; leave it out");
  };
  refuse(static_cast<bool>(p.bias), "bias");
  refuse(static_cast<bool>(p.mask), "mask");
  refuse(static_cast<bool>(p.alibi), "alibi");
  refuse(p.dropout.probability > 0.0f, "dropout");
  require(p.head_dim <= 256 && p.head_dim_v <= 256, "head dimensions are ", p.head_dim, " and ",
          p.head_dim_v, "; 8-bit attention takes at most 256");
}

}  // namespace

Reference reference_fp8(const Problem& problem, const Fp8Arithmetic& a, int threads) {
  require(threads >= 0 && threads <= max_threads, "threads is ", threads, "; it must lie in 0..",
          max_threads, ", where 0 is the OpenMP default");
  require(a.tile_k > 0 && a.tile_k % 32 == 0 && a.tile_k <= 256, "tile_k is ", a.tile_k,
          "; it must be a multiple of 32 from 32 to 256");
  require(a.promote_keys >= 0, "promote_keys is ", a.promote_keys,
          "; it must be positive, or 0 for one accumulator");
  require(a.accumulator_bits >= 1 && a.accumulator_bits <= 23, "accumulator_bits is ",
          a.accumulator_bits, "; it must lie in 1..23");
  check_quantization(a.quantization);
  require_host_memory(problem, "the reference");
  const core::Problem p = validate(problem);
  check(p);
  check_rotary(a.quantization.rotary, p);
  const core::Fp8Layout l = core::fp8_layout(p);
  std::vector<core::uint8> codes(static_cast<std::size_t>(l.q_bytes + l.k_bytes + l.v_bytes));
  std::vector<float> q_scale(static_cast<std::size_t>(l.q_scale_bytes) / sizeof(float), 1.0f);
  std::vector<core::KeyScale> key_scale(static_cast<std::size_t>(l.key_scale_bytes) /
                                        sizeof(core::KeyScale));
  const cpu::Fp8Operands operands{codes.data(), codes.data() + l.q_bytes,
                                  codes.data() + l.q_bytes + l.k_bytes, q_scale.data(),
                                  key_scale.data()};
  const core::QuantizeOptions quantization = quantize_options(a.quantization);
  cpu::quantize(p, quantization, operands, threads);
  cpu::Fp8Method method;
  method.codes = core::code_type(p.q.dtype, quantization);
  method.softmax = policy_of(a.softmax);
  method.tile_k = a.tile_k;
  method.promote = static_cast<core::int32>(
      a.promote_keys == 0 ? 0 : std::max<std::int64_t>(1, a.promote_keys / a.tile_k));
  method.accumulator_bits = a.accumulator_bits;
  method.round_weights = a.round_weights;
  method.sum_rounded_weights = a.sum_rounded_weights;
  method.unfused = a.unfused;
  cpu::ReferenceResult result = cpu::forward_fp8(p, operands, method, nullptr, threads);
  return {std::move(result.out), std::move(result.lse)};
}

}  // namespace fovea
