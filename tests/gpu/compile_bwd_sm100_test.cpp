// The backward kernel for Blackwell compiles to machine code for both chips: no spilled register,
// no advisory from ptxas.
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>
#include <string>
#include <tuple>

#include "runtime/backward_gpu.h"

namespace fovea::tests {
namespace {

using core::BwdConfig;
using core::DType;
using runtime::BackwardPart;

struct Variant {
  const char* name;
  BwdConfig config;
};

std::ostream& operator<<(std::ostream& out, const Variant& v) { return out << v.name; }

const Variant variants[] = {
    {"d64", {.head_dim = 64, .head_dim_v = 64}},
    {"d64_f16_causal_ragged_turns",
     {.dtype = DType::f16,
      .head_dim = 64,
      .head_dim_v = 64,
      .bound_right = true,
      .ragged = true,
      .deterministic = true}},
    {"d128", {}},
    {"d128_causal", {.bound_right = true}},
    {"d128_f16_window_ragged_wide_turns",
     {.dtype = DType::f16,
      .wide = true,
      .bound_right = true,
      .bound_left = true,
      .ragged = true,
      .deterministic = true}},
    {"d128_issue_order", {.issue_order = true}},
    {"d128_pair", {.pair = true}},
    {"d128_pair_causal", {.bound_right = true, .pair = true}},
    {"d128_pair_f16_window_ragged_wide_turns",
     {.dtype = DType::f16,
      .wide = true,
      .bound_right = true,
      .bound_left = true,
      .ragged = true,
      .deterministic = true,
      .pair = true}},
    {"d64_softcap_alibi",
     {.head_dim = 64, .head_dim_v = 64, .has_softcap = true, .has_alibi = true}},
    {"d128_pair_softcap_causal", {.bound_right = true, .has_softcap = true, .pair = true}},
    {"d128_bias_mask_dropout",
     {.has_bias = true, .bias_dtype = DType::bf16, .has_mask = true, .has_dropout = true}},
    {"d128_pair_everything",
     {.dtype = DType::f16,
      .bound_right = true,
      .bound_left = true,
      .ragged = true,
      .has_softcap = true,
      .has_alibi = true,
      .has_bias = true,
      .has_mask = true,
      .has_dropout = true,
      .pair = true}},
    {"d128_bias_turns", {.deterministic = true, .has_bias = true, .bias_dtype = DType::bf16}},
    {"d192_mask_turns", {.head_dim = 192, .deterministic = true, .has_mask = true}},
    {"d192", {.head_dim = 192}},
    {"d192_causal_ragged", {.head_dim = 192, .bound_right = true, .ragged = true}},
};

class CompileBackward100 : public testing::TestWithParam<std::tuple<const char*, Variant>> {};

TEST_P(CompileBackward100, WithoutSpillsOrAdvisories) {
  const auto& [arch, variant] = GetParam();
  BwdConfig config = variant.config;
  config.tensor_memory = true;
  for (const BackwardPart part :
       {BackwardPart::prepare, BackwardPart::main, BackwardPart::finish}) {
    runtime::CompileRequest request;
    request.text = runtime::backward_text(config, part);
    request.arch = arch;
    request.strict = true;  // a spill or an advisory is an error
    try {
      const runtime::CompileResult result = runtime::default_jit().compile(request);
      ASSERT_EQ(result.image->report.kernels.size(), 1u);
      std::printf("%d registers, %.1f s\n", result.image->report.kernels[0].registers,
                  result.seconds);
    } catch (const runtime::CompileError& fault) {
      ADD_FAILURE() << fault.what() << "\n" << fault.log();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Chips, CompileBackward100,
                         testing::Combine(testing::Values("sm_100a", "sm_103a"),
                                          testing::ValuesIn(variants)),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param)) + "_" +
                                  std::get<1>(tested.param).name;
                         });

}  // namespace
}  // namespace fovea::tests
