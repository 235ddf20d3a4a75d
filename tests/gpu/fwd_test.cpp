// The forward kernel against the fp64 oracle: shapes that end inside tiles, every mask, lengths,
// and logits that leave the softmax's fast path. On the emulated Hopper chip, each case in another
// order of asynchronous work; FOVEA_TEST_DEVICES=cuda runs it on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "runtime/forward_gpu.h"
#include "runtime/forward_tuning.h"
#include "tests/gpu/kernel_call.h"
#include "tests/jit/jit_support.h"
#include "tests/support.h"
#include "tests/tolerance.h"

namespace fovea::tests {
namespace {

using core::int32;
using core::int64;
using core::SoftmaxPolicy;
using core::uint16;
using runtime::Device;

struct ForwardCase {
  std::string name = {};
  int64 batch = 1;
  int32 heads_q = 2;
  int32 heads_kv = 2;
  int64 seqlen_q = 128;
  int64 seqlen_k = 256;
  int32 head_dim = 128;
  int32 head_dim_v = 128;
  core::Window window = {};
  float softcap = 0.0f;
  float scale = 0.0f;  // 0: 1 / sqrt(head_dim)
  bool sink = false;
  bool f16 = false;
  bool f32_out = false;
  // Logits grow by this much per 128 keys from either end to the middle: so they do in whichever
  // order keys are visited.
  float rise = 0.0f;
  float first = 0.0f;  // the logits of the first key, of the block that is visited last
  SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard;
  std::vector<int32> cu_seqlens_q = {};
  std::vector<int32> cu_seqlens_k = {};
  std::vector<int32> seqused_q = {};
  std::vector<int32> seqused_k = {};
  int64 slack = 0;                 // rows of q behind the last sequence
  std::string configuration = {};  // fields set by hand: Hopper's, and only run there
  bool dealt = false;              // no counter: tiles dealt in advance
  int sm_count = 0;                // of an emulated chip; 0: its own
  bool tail = false;               // the last tiles are computed in parts
};

std::ostream& operator<<(std::ostream& out, const ForwardCase& c) { return out << c.name; }

// Tensors in host memory, and the problem over them.
class ForwardCall {
 public:
  explicit ForwardCall(const ForwardCase& c) : spec(c), rows(CaseRows::of(c)) {
    const core::DType in = c.f16 ? core::DType::f16 : core::DType::bf16;
    problem = describe_problem(spec, rows, in, c.f32_out ? core::DType::f32 : in);
    problem.num_splits = 1;
    problem.softcap = c.softcap;
    fill();
  }

  std::size_t lse_count() const {
    return static_cast<std::size_t>(rows.batches * rows.q * spec.heads_q);
  }
  std::size_t out_count() const { return lse_count() * static_cast<std::size_t>(spec.head_dim_v); }

  ForwardCase spec;
  CaseRows rows;
  core::Problem problem;
  std::vector<uint16> q, k, v;
  std::vector<float> sink;

 private:
  // Rows of k and v that no sequence uses are NaN.
  void fill() {
    const ForwardCase& c = spec;
    test::Random random(1);
    const auto store = [&](std::vector<uint16>& values, double x) {
      const auto narrow = static_cast<float>(x);
      values.push_back(c.f16 ? core::float_to_f16(narrow) : core::float_to_bf16(narrow));
    };
    for (int64 i = 0; i < rows.batches * rows.q * c.heads_q * c.head_dim; ++i) {
      const bool chosen = (c.rise != 0.0f || c.first != 0.0f) && i % c.head_dim == 0;
      store(q, chosen ? 8.0 : random.normal());
    }
    const double step = c.rise / (8.0 * problem.softmax_scale);
    const double first = c.first / (8.0 * problem.softmax_scale);
    for (int64 b = 0; b < rows.batches; ++b) {
      for (int64 row = 0; row < rows.k; ++row) {
        const int64 block = std::min(row / 128, (rows.k - 1) / 128 - row / 128);  // from an end
        const bool used = c.seqused_k.empty() || row < c.seqused_k[static_cast<std::size_t>(b)];
        for (int32 h = 0; h < c.heads_kv; ++h) {
          for (int32 d = 0; d < c.head_dim; ++d) {
            double x = random.normal();
            if (c.rise != 0.0f && d == 0) x = step * static_cast<double>(block);
            if (c.first != 0.0f && d == 0) x = row == 0 ? first : 0.0;
            store(k, used ? x : std::numeric_limits<double>::quiet_NaN());
          }
          for (int32 d = 0; d < c.head_dim_v; ++d) {
            store(v, used ? random.normal() : std::numeric_limits<double>::quiet_NaN());
          }
        }
      }
    }
    for (int32 h = 0; h < c.heads_q; ++h) sink.push_back(static_cast<float>(random.normal()));
    problem.q.data = q.data();
    problem.k.data = k.data();
    problem.v.data = v.data();
    if (c.sink) problem.sink.data = sink.data();
  }
};

struct ForwardResult {
  std::vector<double> out;
  std::vector<double> lse;
  std::array<core::uint64, 2> counters{};  // rows repaired, rows taken again
};

ForwardResult run_on(Device& device, const ForwardCall& call) {
  const ForwardCase& c = call.spec;
  DeviceMemory memory(device);
  runtime::ForwardCall launch;
  core::Problem& p = launch.problem;
  p = call.problem;
  p.q.data = memory.upload(call.q);
  p.k.data = memory.upload(call.k);
  p.v.data = memory.upload(call.v);
  p.out.data = memory.output(p.out.dtype, call.out_count());
  p.lse.data = memory.output(p.lse.dtype, call.lse_count());
  if (c.sink) p.sink.data = memory.upload(call.sink);
  memory.upload_lengths(c, p);
  const std::vector<core::uint64> zeros(2);
  launch.counters = memory.upload_address(zeros);
  const runtime::DeviceAddress scheduler = memory.upload_address(zeros);
  launch.scheduler = c.dealt ? 0 : scheduler;

  EXPECT_TRUE(runtime::forward_supports(p, device.properties().arch).empty());
  const int sm_count = device.properties().sm_count;
  runtime::ForwardConfig config =
      runtime::choose_forward(p, c.softmax, device.properties().arch, sm_count);
  runtime::override_forward(config, c.configuration);
  const std::vector<core::uint32> arrivals(runtime::forward_arrivals(p, config, sm_count));
  const std::vector<float> workspace(runtime::forward_workspace_bytes(p, config, sm_count) / 4);
  if (c.tail) {
    EXPECT_FALSE(arrivals.empty());
    launch.arrivals = memory.upload_address(arrivals);
    launch.workspace = memory.upload_address(workspace);
  }
  const runtime::ForwardKernel kernel(device, config);
  kernel.run(launch);

  ForwardResult result;
  result.out = memory.read(p.out, call.out_count());
  result.lse = memory.read(p.lse, call.lse_count());
  const auto counts = memory.download<core::uint64>(launch.counters, 2);
  result.counters = {counts[0], counts[1]};
  EXPECT_EQ(memory.download<core::uint64>(scheduler, 1)[0], 0u);
  if (c.tail) {
    EXPECT_EQ(memory.download<core::uint32>(launch.arrivals, arrivals.size()), arrivals);
  }
  return result;
}

ForwardResult check_case(const ForwardCase& spec, runtime::EmulationOptions::Order order) {
  const ForwardCall call(spec);
  const cpu::ReferenceResult exact = cpu::reference_forward(call.problem);
  const cpu::ReferenceResult naive = cpu::naive_forward(call.problem);
  const DType in = spec.f16 ? DType::f16 : DType::bf16;
  ForwardResult result;
  for (const std::string& name : test_devices()) {
    SCOPED_TRACE(name);
    const auto device = runtime::open_device(
        name, {.order = order, .seed = 7, .checks = true, .sm_count = spec.sm_count});
    const bool is_hopper = device->properties().arch == "sm_90a";
    if (!spec.configuration.empty() && !is_hopper) continue;
    if (spec.tail && !is_hopper) continue;
    result = run_on(*device, call);
    EXPECT_TRUE(test::close_to(result.out, exact.out, naive.out,
                               test::out_floor(in, spec.f32_out ? DType::f32 : in, exact.out)));
    EXPECT_TRUE(test::close_to(result.lse, exact.lse, naive.lse, test::lse_floor()));
  }
  return result;
}

class Forward : public ::testing::TestWithParam<ForwardCase> {};

TEST_P(Forward, MatchesTheOracle) {
  // The order of asynchronous work goes round with the cases.
  static int turn = 0;
  check_case(GetParam(), static_cast<runtime::EmulationOptions::Order>(turn++ % 3));
}

const ForwardCase forward_cases[] = {
    {.name = "whole_tiles"},
    {.name = "odd_lengths", .seqlen_q = 100, .seqlen_k = 300},
    {.name = "d64",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 200,
     .seqlen_k = 520,
     .head_dim = 64,
     .head_dim_v = 64},
    {.name = "d256",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 150,
     .seqlen_k = 250,
     .head_dim = 256,
     .head_dim_v = 256},
    {.name = "d72", .seqlen_q = 140, .seqlen_k = 300, .head_dim = 72, .head_dim_v = 72},
    {.name = "d192_128", .seqlen_q = 140, .seqlen_k = 300, .head_dim = 192, .window = {-1, 0}},
    {.name = "causal", .seqlen_q = 300, .seqlen_k = 300, .window = {-1, 0}},
    {.name = "causal_more_queries", .seqlen_q = 400, .seqlen_k = 130, .window = {-1, 0}},
    // Warpgroups whose rows visit fewer blocks than the tile.
    {.name = "causal_d256",
     .seqlen_q = 300,
     .seqlen_k = 365,
     .head_dim = 256,
     .head_dim_v = 256,
     .window = {-1, 0},
     .sm_count = 2},
    {.name = "causal_three_warpgroups",
     .heads_kv = 1,
     .seqlen_q = 500,
     .seqlen_k = 450,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .configuration = "warpgroups=3,tile_k=64",
     .sm_count = 3},
    // Warpgroups whose rows see half of the first block: with some of its keys, with none of them,
    // and next to others that pass it by.
    {.name = "causal_half_of_a_block", .seqlen_q = 256, .seqlen_k = 256, .window = {-1, 0}},
    {.name = "causal_none_of_a_block", .seqlen_q = 128, .seqlen_k = 192, .window = {-1, 0}},
    {.name = "causal_half_d64",
     .heads_kv = 1,
     .seqlen_q = 500,
     .seqlen_k = 500,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .configuration = "warpgroups=3,tile_k=128",
     .sm_count = 3},
    {.name = "causal_gqa",
     .batch = 2,
     .heads_q = 4,
     .seqlen_q = 130,
     .seqlen_k = 513,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0}},
    {.name = "window", .seqlen_q = 500, .seqlen_k = 500, .window = {100, 20}},
    {.name = "window_left", .seqlen_q = 260, .seqlen_k = 700, .window = {64, 0}},
    {.name = "softcap", .seqlen_q = 200, .seqlen_k = 300, .softcap = 5.0f},
    {.name = "negative_scale", .seqlen_q = 200, .seqlen_k = 300, .scale = -0.1f},
    {.name = "sink", .seqlen_q = 200, .seqlen_k = 300, .window = {-1, 0}, .sink = true},
    {.name = "f16", .seqlen_q = 200, .seqlen_k = 400, .f16 = true},
    {.name = "f32_out", .seqlen_q = 200, .seqlen_k = 400, .f32_out = true},
    {.name = "no_keys", .seqlen_q = 100, .seqlen_k = 0},
    {.name = "one_query",
     .batch = 2,
     .heads_q = 4,
     .seqlen_q = 1,
     .seqlen_k = 700,
     .window = {-1, 0}},
    {.name = "varlen",
     .heads_kv = 1,
     .seqlen_q = 257,
     .seqlen_k = 322,
     .window = {-1, 0},
     .cu_seqlens_q = {0, 100, 100, 357, 400},
     .cu_seqlens_k = {0, 50, 178, 500, 500},
     .slack = 7},
    {.name = "more_rows_behind_than_in_sequences",
     .heads_kv = 1,
     .seqlen_q = 60,
     .seqlen_k = 90,
     .cu_seqlens_q = {0, 60, 100},
     .cu_seqlens_k = {0, 50, 140},
     .slack = 500},
    {.name = "seqused",
     .batch = 3,
     .seqlen_q = 200,
     .seqlen_k = 300,
     .window = {-1, 0},
     .seqused_q = {200, 0, 77},
     .seqused_k = {13, 300, 200}},
    {.name = "one_after_the_other",
     .seqlen_q = 200,
     .seqlen_k = 600,
     .window = {-1, 0},
     .configuration = "overlap=0,ping_pong=0",
     .dealt = true},
    // Tile after tile through one CTA, sequences without queries or keys between them.
    {.name = "tile_after_tile_varlen",
     .heads_q = 40,
     .heads_kv = 40,
     .seqlen_q = 200,
     .seqlen_k = 322,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {100, 30},
     .cu_seqlens_q = {0, 100, 100, 300, 301, 380, 440, 440, 560},
     .cu_seqlens_k = {0, 50, 178, 500, 500, 520, 660, 700, 700},
     .slack = 300},
    {.name = "tile_after_tile_rising",
     .batch = 3,
     .heads_q = 50,
     .heads_kv = 2,
     .seqlen_q = 130,
     .seqlen_k = 500,
     .rise = 100},
    {.name = "few_ctas_varlen",
     .heads_kv = 1,
     .seqlen_q = 257,
     .seqlen_k = 322,
     .window = {-1, 0},
     .cu_seqlens_q = {0, 100, 100, 357, 400},
     .cu_seqlens_k = {0, 50, 178, 500, 500},
     .slack = 7,
     .sm_count = 2},
    {.name = "few_ctas_d256",
     .heads_q = 4,
     .heads_kv = 4,
     .seqlen_k = 384,
     .head_dim = 256,
     .head_dim_v = 256,
     .sm_count = 2},
    {.name = "few_ctas_window",
     .seqlen_q = 500,
     .seqlen_k = 500,
     .window = {100, 20},
     .sm_count = 3},
    {.name = "few_ctas_seqused_rising",
     .batch = 3,
     .heads_q = 4,
     .seqlen_q = 200,
     .seqlen_k = 400,
     .window = {-1, 0},
     .rise = 100,
     .seqused_q = {200, 0, 77},
     .seqused_k = {13, 300, 400},
     .sm_count = 2},
    {.name = "online",
     .seqlen_q = 140,
     .seqlen_k = 700,
     .rise = 100,
     .softmax = SoftmaxPolicy::online},
    {.name = "conditional",
     .seqlen_q = 140,
     .seqlen_k = 700,
     .rise = 3,
     .softmax = SoftmaxPolicy::conditional},
};

INSTANTIATE_TEST_SUITE_P(Cases, Forward, ::testing::ValuesIn(forward_cases),
                         [](const auto& instance) { return instance.param.name; });

// Logits that leave the fast path, and proof that they did.
TEST(ForwardGuard, RepairsRowsThatGrowWithinReach) {
  const ForwardResult result =
      check_case({.name = "rise_10", .seqlen_q = 140, .seqlen_k = 900, .rise = 10},
                 runtime::EmulationOptions::Order::random);
  EXPECT_GT(result.counters[0], 0u);
}

TEST(ForwardGuard, TakesTilesAgainWhenSumsOverflow) {
  for (const float rise : {200.0f, 10000.0f}) {
    const ForwardResult result =
        check_case({.name = "rise", .seqlen_q = 140, .seqlen_k = 900, .rise = rise},
                   runtime::EmulationOptions::Order::lazy);
    EXPECT_GT(result.counters[1], 0u) << rise;
  }
}

// The one large logit comes in the block that is visited last.
TEST(ForwardGuard, TakesTheLastBlockAgain) {
  for (const int32 head_dim : {128, 256}) {
    ForwardCase spec{.name = "first", .heads_q = 5, .seqlen_q = 140, .seqlen_k = 300};
    spec.heads_kv = 1;
    spec.head_dim = spec.head_dim_v = head_dim;
    spec.sm_count = 3;
    spec.first = 3000.0f;
    const ForwardResult result = check_case(spec, runtime::EmulationOptions::Order::random);
    EXPECT_GT(result.counters[1], 0u) << head_dim;
  }
}

TEST(ForwardGuard, LeavesFallingLogitsAlone) {
  const ForwardResult result =
      check_case({.name = "fall", .seqlen_q = 140, .seqlen_k = 900, .rise = -50},
                 runtime::EmulationOptions::Order::eager);
  EXPECT_EQ(result.counters[0] + result.counters[1], 0u);
}

// Tiles whose keys several CTAs share. One chip has room for some of the tiles, the other for all.
const ForwardCase tail_cases[] = {
    {.name = "behind_whole_tiles",
     .heads_q = 5,
     .heads_kv = 5,
     .seqlen_q = 100,
     .seqlen_k = 1100,
     .sm_count = 4,
     .tail = true},
    {.name = "alone_rising",
     .seqlen_q = 200,
     .seqlen_k = 1500,
     .sink = true,
     .rise = 30,
     .tail = true},
    {.name = "d64_f32_out",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_k = 1400,
     .head_dim = 64,
     .head_dim_v = 64,
     .f32_out = true,
     .tail = true},
    {.name = "d256",
     .heads_q = 3,
     .heads_kv = 1,
     .seqlen_q = 128,
     .seqlen_k = 900,
     .head_dim = 256,
     .head_dim_v = 256,
     .sm_count = 2,
     .tail = true},
};

class ForwardTail : public ::testing::TestWithParam<ForwardCase> {};

TEST_P(ForwardTail, IsTheSameWhicheverPartEndsLast) {
  using Order = runtime::EmulationOptions::Order;
  const ForwardResult first = check_case(GetParam(), Order::eager);
  for (const Order order : {Order::lazy, Order::random}) {
    const ForwardResult again = check_case(GetParam(), order);
    EXPECT_EQ(first.out, again.out);
    EXPECT_EQ(first.lse, again.lse);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ForwardTail, ::testing::ValuesIn(tail_cases),
                         [](const auto& instance) { return instance.param.name; });

// 2048 tiles on 132 multiprocessors are 16 rounds however many of them take part, from 128 on.
TEST(ForwardLaunch, TakesWholeRoundsWhereTheyAreFewAndLong) {
  const auto ctas = [](int32 heads, int64 keys, int32 head_dim) {
    runtime::ForwardCall call;
    core::Problem& p = call.problem;
    p.batch = p.num_splits = 1;
    p.heads_q = p.heads_kv = heads;
    p.seqlen_q = p.seqlen_k = keys;
    p.head_dim = p.head_dim_v = head_dim;
    p.softmax_scale = 1.0f;
    for (core::View* view : {&p.q, &p.k, &p.v, &p.out}) {
      view->dtype = core::DType::bf16;
      const int64 row = int64{heads} * head_dim;
      const int64 stride[4] = {keys * row, row, head_dim, 1};
      std::copy(std::begin(stride), std::end(stride), view->stride);
    }
    call.workspace = call.arrivals = 16;
    runtime::DeviceProperties chip;
    chip.sm_count = 132;
    chip.l2_bytes = 50 << 20;
    const core::FwdConfig config =
        runtime::choose_forward_sm90(call.problem, SoftmaxPolicy::sum_guard, chip.sm_count);
    core::FwdParams params;
    return runtime::fill_forward_params(params, call, config, chip).ctas;
  };
  EXPECT_EQ(ctas(64, 4096, 256), 128u);
  EXPECT_EQ(ctas(4, 4096, 256), 128u);    // one round
  EXPECT_EQ(ctas(512, 512, 256), 132u);   // short tiles
  EXPECT_EQ(ctas(32, 8192, 256), 132u);   // with a tail
  EXPECT_EQ(ctas(1024, 512, 128), 132u);  // short tiles, many rounds
  EXPECT_EQ(ctas(100, 4096, 64), 132u);   // many rounds
}

TEST(ForwardRefusals, NameWhatWouldHelp) {
  core::Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.seqlen_q = p.seqlen_k = 8;
  p.head_dim = p.head_dim_v = 64;
  const auto refused = [&](std::string_view arch, const std::string& reason) {
    const std::vector<std::string> reasons = runtime::forward_supports(p, arch);
    return !reasons.empty() && reasons.front().find(reason) != std::string::npos;
  };
  EXPECT_TRUE(refused("sm_90a", "bf16 and f16"));  // the default dtype is f32
  p.q.dtype = p.k.dtype = p.v.dtype = core::DType::bf16;
  EXPECT_TRUE(refused("sm_120a", "sm_120a"));
  p.head_dim = 264;
  EXPECT_TRUE(refused("sm_90a", "up to 256"));
}

}  // namespace
}  // namespace fovea::tests
