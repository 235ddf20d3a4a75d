// Every kind of variant of the Blackwell forward kernel that choose_forward() gives compiles to
// machine code for both chips: no spilled register, no advisory from ptxas.
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>
#include <string>
#include <tuple>

#include "runtime/forward_fp8.h"
#include "runtime/forward_gpu.h"

namespace fovea::tests {
namespace {

using core::DType;
using core::Fwd100Config;
using core::ScoreTransform;
using core::SoftmaxPolicy;

struct Variant {
  const char* name;
  DType dtype = DType::bf16;
  int head_dim = 128;
  int head_dim_v = 128;
  int seqlen_q = 1024;
  core::Window window = {};
  bool ragged = false;
  float softcap = 0.0f;
  bool sink = false;
  bool f32_out = false;
  bool lse = false;  // 8 bits; 16-bit variants have one
  SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard;
  bool issue_order = false;
  bool position = false;  // ALiBi, a bias and a mask
  float dropout = 0.0f;
  void (*change)(Fwd100Config&) = nullptr;
};

std::ostream& operator<<(std::ostream& out, const Variant& v) { return out << v.name; }

void alone(Fwd100Config& c) {
  c.cta_pair = false;
  c.stages = 3;
}
void launch_control(Fwd100Config& c) { c.launch_control = true; }

void split_pages(Fwd100Config& c) {
  c.source = core::Source::paged;
  c.packed = c.split = c.ragged = true;
  c.tma_out = false;
}

const Variant variants[] = {
    {.name = "d128"},
    {.name = "d128_alone", .change = alone},
    {.name = "d128_launch_control", .change = launch_control},
    {.name = "d128_causal_launch_control", .window = {-1, 0}, .change = launch_control},
    {.name = "d128_causal", .window = {-1, 0}},
    {.name = "d128_window_ragged_sink", .window = {100, 20}, .ragged = true, .sink = true},
    {.name = "d128_conditional", .softmax = SoftmaxPolicy::conditional},
    {.name = "d128_online_causal", .window = {-1, 0}, .softmax = SoftmaxPolicy::online},
    {.name = "d128_softcap", .softcap = 30.0f},
    {.name = "d128_softcap_window_ragged", .window = {100, 20}, .ragged = true, .softcap = 30.0f},
    {.name = "d128_one_query_tile", .seqlen_q = 1},
    {.name = "d128_issue_order", .issue_order = true},
    {.name = "d64", .head_dim = 64, .head_dim_v = 64},
    {.name = "d64_f16_causal_f32_out",
     .dtype = DType::f16,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .f32_out = true},
    {.name = "d96", .head_dim = 96, .head_dim_v = 96},
    {.name = "d192_128_causal", .head_dim = 192, .window = {-1, 0}},
    {.name = "d128_alibi_bias_mask", .window = {-1, 0}, .position = true},
    {.name = "d128_dropout", .dropout = 0.5f},
    {.name = "d128_packed_split_pages", .seqlen_q = 1, .change = split_pages},
    {.name = "d256_alibi_bias_mask", .head_dim = 256, .head_dim_v = 256, .position = true},
    {.name = "d256", .head_dim = 256, .head_dim_v = 256},
    {.name = "d256_window_ragged_softcap_sink",
     .head_dim = 256,
     .head_dim_v = 256,
     .window = {100, 20},
     .ragged = true,
     .softcap = 30.0f,
     .sink = true},
    {.name = "fp8_d128", .dtype = DType::e4m3},
    {.name = "fp8_d128_alone", .dtype = DType::e4m3, .change = alone},
    {.name = "fp8_d128_lse", .dtype = DType::e4m3, .lse = true},
    {.name = "fp8_d128_causal", .dtype = DType::e4m3, .window = {-1, 0}},
    {.name = "fp8_d128_window_ragged_sink",
     .dtype = DType::e5m2,
     .window = {100, 20},
     .ragged = true,
     .sink = true,
     .lse = true},
    {.name = "fp8_d128_conditional", .dtype = DType::e4m3, .softmax = SoftmaxPolicy::conditional},
    {.name = "fp8_d128_online_causal",
     .dtype = DType::e4m3,
     .window = {-1, 0},
     .softmax = SoftmaxPolicy::online},
    {.name = "fp8_d128_softcap_window_ragged",
     .dtype = DType::e4m3,
     .window = {100, 20},
     .ragged = true,
     .softcap = 30.0f},
    {.name = "fp8_d64_f32_out",
     .dtype = DType::e4m3,
     .head_dim = 64,
     .head_dim_v = 64,
     .f32_out = true},
    {.name = "fp8_d128_one_query_tile", .dtype = DType::e4m3, .seqlen_q = 1},
    {.name = "fp8_d192_128_causal", .dtype = DType::e4m3, .head_dim = 192, .window = {-1, 0}},
    {.name = "fp8_d256", .dtype = DType::e4m3, .head_dim = 256, .head_dim_v = 256},
    {.name = "fp8_d256_window_ragged_softcap_sink",
     .dtype = DType::e4m3,
     .head_dim = 256,
     .head_dim_v = 256,
     .window = {100, 20},
     .ragged = true,
     .softcap = 30.0f,
     .sink = true},
    {.name = "d256_conditional",
     .head_dim = 256,
     .head_dim_v = 256,
     .softmax = SoftmaxPolicy::conditional},
};

Fwd100Config configure(const Variant& v, const char* arch) {
  static const int lengths[] = {0, 1};
  static float anything[1];
  core::Problem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = 64;  // enough for keys to stay whole
  p.seqlen_q = v.seqlen_q;
  p.seqlen_k = 1024;
  p.head_dim = v.head_dim;
  p.head_dim_v = v.head_dim_v;
  p.window = v.window;
  p.softcap = v.softcap;
  p.q.dtype = p.k.dtype = p.v.dtype = v.dtype;
  const bool eight_bit = core::is_eight_bit(v.dtype);
  p.out.dtype = v.f32_out ? DType::f32 : eight_bit ? DType::bf16 : v.dtype;
  p.out.stride[3] = 1;
  if (v.lse || !eight_bit) p.lse.data = anything;
  if (v.ragged) p.seqused_k = lengths;
  if (v.sink) p.sink.data = anything;
  if (v.position) {
    p.alibi.data = p.bias.data = p.mask.data = anything;
    p.bias.dtype = v.dtype;
  }
  p.dropout.probability = v.dropout;
  Fwd100Config config = eight_bit ? runtime::choose_forward_fp8_sm100(p, v.softmax, arch, v.dtype)
                                  : runtime::choose_forward_sm100(p, v.softmax, arch);
  config.issue_order = v.issue_order;
  if (v.change != nullptr) v.change(config);
  return config;
}

class CompileForward100 : public testing::TestWithParam<std::tuple<const char*, Variant>> {};

TEST_P(CompileForward100, WithoutSpillsOrAdvisories) {
  const auto& [arch, variant] = GetParam();
  const Fwd100Config config = configure(variant, arch);
  runtime::CompileRequest request;
  request.text = runtime::forward_text(config);
  request.arch = arch;
  request.strict = true;  // a spill or an advisory is an error
  try {
    const runtime::CompileResult result = runtime::default_jit().compile(request);
    ASSERT_EQ(result.image->report.kernels.size(), 1u);
    std::printf("%d query tiles%s, %d stages, %.1f s\n", config.query_tiles,
                config.cta_pair ? " in a pair" : "", config.stages, result.seconds);
  } catch (const runtime::CompileError& fault) {
    ADD_FAILURE() << fault.what() << "\n" << fault.log();
  }
}

INSTANTIATE_TEST_SUITE_P(Chips, CompileForward100,
                         testing::Combine(testing::Values("sm_100a", "sm_103a"),
                                          testing::ValuesIn(variants)),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param)) + "_" +
                                  std::get<1>(tested.param).name;
                         });

}  // namespace
}  // namespace fovea::tests
