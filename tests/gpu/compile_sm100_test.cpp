// Every kind of variant of the Blackwell forward kernel that choose_forward() gives compiles to
// machine code for both chips: no spilled register, no advisory from ptxas.
#include <gtest/gtest.h>

#include <cstdio>

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
  SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard;
  bool issue_order = false;
};

const Variant variants[] = {
    {.name = "d128"},
    {.name = "d128 causal", .window = {-1, 0}},
    {.name = "d128 window ragged sink", .window = {100, 20}, .ragged = true, .sink = true},
    {.name = "d128 conditional", .softmax = SoftmaxPolicy::conditional},
    {.name = "d128 online causal", .window = {-1, 0}, .softmax = SoftmaxPolicy::online},
    {.name = "d128 softcap", .softcap = 30.0f},
    {.name = "d128 softcap window ragged", .window = {100, 20}, .ragged = true, .softcap = 30.0f},
    {.name = "d128 one query tile", .seqlen_q = 1},
    {.name = "d128 issue order", .issue_order = true},
    {.name = "d64", .head_dim = 64, .head_dim_v = 64},
    {.name = "d64 f16 causal f32 out",
     .dtype = DType::f16,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .f32_out = true},
    {.name = "d96", .head_dim = 96, .head_dim_v = 96},
    {.name = "d192 128 causal", .head_dim = 192, .window = {-1, 0}},
    {.name = "d256", .head_dim = 256, .head_dim_v = 256},
    {.name = "d256 window ragged softcap sink",
     .head_dim = 256,
     .head_dim_v = 256,
     .window = {100, 20},
     .ragged = true,
     .softcap = 30.0f,
     .sink = true},
    {.name = "d256 conditional",
     .head_dim = 256,
     .head_dim_v = 256,
     .softmax = SoftmaxPolicy::conditional},
};

Fwd100Config configure(const Variant& v, const char* arch) {
  static const int lengths[] = {0, 1};
  static float anything[1];
  core::Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.seqlen_q = v.seqlen_q;
  p.seqlen_k = 1024;
  p.head_dim = v.head_dim;
  p.head_dim_v = v.head_dim_v;
  p.window = v.window;
  p.softcap = v.softcap;
  p.q.dtype = p.k.dtype = p.v.dtype = v.dtype;
  p.out.dtype = v.f32_out ? DType::f32 : v.dtype;
  p.out.stride[3] = 1;
  p.lse.data = anything;
  if (v.ragged) p.seqused_k = lengths;
  if (v.sink) p.sink.data = anything;
  Fwd100Config config = runtime::choose_forward_sm100(p, v.softmax, arch);
  config.issue_order = v.issue_order;
  return config;
}

class CompileForward100 : public testing::TestWithParam<const char*> {};

TEST_P(CompileForward100, WithoutSpillsOrAdvisories) {
  for (const Variant& v : variants) {
    const Fwd100Config config = configure(v, GetParam());
    runtime::CompileRequest request;
    request.text = runtime::forward_text(config);
    request.arch = GetParam();
    try {  // strict: a spill or an advisory is an error
      const runtime::CompileResult result = runtime::default_jit().compile(request);
      ASSERT_EQ(result.image->report.kernels.size(), 1u);
      const runtime::KernelResources& kernel = result.image->report.kernels[0];
      std::printf("%-8s %-34s %3d registers, %d query tiles, %d stages, %.1f s\n", GetParam(),
                  v.name, kernel.registers, config.query_tiles, config.stages, result.seconds);
    } catch (const runtime::CompileError& fault) {
      ADD_FAILURE() << v.name << " for " << GetParam() << ": " << fault.what() << "\n"
                    << fault.log();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Chips, CompileForward100, testing::Values("sm_100a", "sm_103a"),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
}  // namespace fovea::tests
