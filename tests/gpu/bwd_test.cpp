// The backward kernels against the fp64 oracle: shapes that end inside tiles, masks, lengths,
// groups of heads, and sums in turns. On the emulated chips, checks on, each case in another order
// of asynchronous work; FOVEA_TEST_DEVICES=cuda runs it on a GPU. On Blackwell both forms run, one
// CTA and pairs.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "runtime/backward_gpu.h"
#include "tests/gpu/kernel_call.h"
#include "tests/jit/jit_support.h"
#include "tests/support.h"
#include "tests/tolerance.h"

namespace fovea::tests {
namespace {

using core::int32;
using core::int64;
using core::uint16;
using runtime::Device;

struct BackwardCase {
  std::string name = {};
  int64 batch = 1;
  int32 heads_q = 2;
  int32 heads_kv = 2;
  int64 seqlen_q = 128;
  int64 seqlen_k = 256;
  int32 head_dim = 128;
  int32 head_dim_v = 128;
  core::Window window = {};
  float scale = 0.0f;  // 0: 1 / sqrt(head_dim)
  bool f16 = false;
  bool wide = false;
  bool sink = false;
  bool dlse = false;
  bool deterministic = false;
  std::vector<int32> cu_seqlens_q = {};
  std::vector<int32> cu_seqlens_k = {};
  std::vector<int32> seqused_q = {};
  std::vector<int32> seqused_k = {};
  int64 slack = 0;            // rows behind the last sequence
  std::string schedule = {};  // Hopper's, as Options::configuration has it
};

std::ostream& operator<<(std::ostream& out, const BackwardCase& c) { return out << c.name; }

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// A problem in host memory, with out and lse of the oracle; rows that no sequence uses are NaN.
class BackwardProblem {
 public:
  explicit BackwardProblem(const BackwardCase& c) : spec(c), rows(CaseRows::of(c, c.slack)) {
    const core::DType type = c.f16 ? core::DType::f16 : core::DType::bf16;
    problem = describe_problem(spec, rows, type, type);
    problem.deterministic = c.deterministic;
    gradients.dout = problem.out;
    gradients.dlse = problem.lse;
    gradients.dq = problem.q;
    gradients.dk = problem.k;
    gradients.dv = problem.v;
    for (core::View* view : {&gradients.dq, &gradients.dk, &gradients.dv}) {
      if (c.wide) view->dtype = core::DType::f32;
    }
    gradients.rows_k = rows.k;
    fill();
    run_forward();
  }

  BackwardCase spec;
  CaseRows rows;
  core::Problem problem;
  core::Gradients gradients;
  std::vector<uint16> q, k, v, out, dout;
  std::vector<float> lse, dlse, sink;

  std::size_t dq_count() const { return count(rows.q, spec.heads_q, spec.head_dim); }
  std::size_t dk_count() const { return count(rows.k, spec.heads_kv, spec.head_dim); }
  std::size_t dv_count() const { return count(rows.k, spec.heads_kv, spec.head_dim_v); }

 private:
  std::size_t count(int64 in_batch, int32 heads, int32 columns) const {
    return static_cast<std::size_t>(rows.batches * in_batch * heads * columns);
  }

  std::vector<bool> used_rows(bool of_queries) const {
    const int64 in_batch = of_queries ? rows.q : rows.k;
    std::vector<bool> used(static_cast<std::size_t>(rows.batches * in_batch), false);
    for (int64 b = 0; b < rows.sequences; ++b) {
      const core::Sequence s = core::sequence_at(problem, b);
      const int64 first =
          of_queries ? s.batch_q * in_batch + s.row_q : s.batch_k * in_batch + s.row_k;
      for (int64 i = 0; i < (of_queries ? s.length_q : s.length_k); ++i) {
        used[static_cast<std::size_t>(first + i)] = true;
      }
    }
    return used;
  }

  void fill() {
    test::Random random(41);
    const auto make = [&](int32 heads, int32 columns, bool of_queries) {
      const std::vector<bool> used = used_rows(of_queries);
      std::vector<uint16> values;
      for (const bool in_use : used) {
        for (int32 i = 0; i < heads * columns; ++i) {
          const auto x = in_use ? static_cast<float>(random.normal()) : nan;
          values.push_back(spec.f16 ? core::float_to_f16(x) : core::float_to_bf16(x));
        }
      }
      return values;
    };
    q = make(spec.heads_q, spec.head_dim, true);
    k = make(spec.heads_kv, spec.head_dim, false);
    v = make(spec.heads_kv, spec.head_dim_v, false);
    dout = make(spec.heads_q, spec.head_dim_v, true);
    for (int32 h = 0; h < spec.heads_q; ++h) sink.push_back(static_cast<float>(random.normal()));
    for (int64 i = 0; i < rows.batches * rows.q * spec.heads_q; ++i) {
      dlse.push_back(static_cast<float>(random.normal()));
    }
    problem.q.data = q.data();
    problem.k.data = k.data();
    problem.v.data = v.data();
    gradients.dout.data = dout.data();
    if (spec.sink) problem.sink.data = sink.data();
    if (spec.dlse) gradients.dlse.data = dlse.data();
  }

  void run_forward() {
    const cpu::ReferenceResult forward = cpu::reference_forward(problem);
    for (const double x : forward.out) {
      const auto narrow = static_cast<float>(x);
      out.push_back(spec.f16 ? core::float_to_f16(narrow) : core::float_to_bf16(narrow));
    }
    lse.assign(forward.lse.begin(), forward.lse.end());
    problem.out.data = out.data();
    problem.lse.data = lse.data();
  }
};

struct BackwardResult {
  std::vector<double> dq, dk, dv;
};

BackwardResult run_on(Device& device, const BackwardProblem& host, bool pair) {
  DeviceMemory memory(device);
  runtime::BackwardCall call;
  core::Problem& p = call.problem;
  core::Gradients& g = call.gradients;
  p = host.problem;
  g = host.gradients;
  p.q.data = memory.upload(host.q);
  p.k.data = memory.upload(host.k);
  p.v.data = memory.upload(host.v);
  p.out.data = memory.upload(host.out);
  p.lse.data = memory.upload(host.lse);
  if (p.sink) p.sink.data = memory.upload(host.sink);
  g.dout.data = memory.upload(host.dout);
  if (g.dlse) g.dlse.data = memory.upload(host.dlse);
  g.dq.data = memory.output(g.dq.dtype, host.dq_count());
  g.dk.data = memory.output(g.dk.dtype, host.dk_count());
  g.dv.data = memory.output(g.dv.dtype, host.dv_count());
  memory.upload_lengths(host.spec, p);

  const std::string arch = device.properties().arch;
  EXPECT_TRUE(runtime::backward_supports(p, g, arch).empty());
  core::BwdConfig config = runtime::choose_backward(p, g, arch, host.spec.schedule);
  if (config.tensor_memory) config.pair = pair;
  const std::size_t bytes = runtime::backward_workspace_bytes(call, config, device.properties());
  call.workspace = memory.upload_address(std::vector<unsigned char>(bytes, 0xff));
  const runtime::BackwardKernels kernels(device, config, g);
  kernels.run(call);
  return {memory.read(g.dq, host.dq_count()), memory.read(g.dk, host.dk_count()),
          memory.read(g.dv, host.dv_count())};
}

// A chip, and whether CTAs work in pairs there.
struct Form {
  std::string device;
  bool pair = false;
};

std::vector<Form> forms(const BackwardCase& c) {
  std::vector<Form> list;
  const int32 wider = std::max(c.head_dim, c.head_dim_v);
  for (const std::string& name : test_devices()) {
    const bool is_blackwell = name.starts_with("emulated:sm_10");
    if (is_blackwell && (c.head_dim > 192 || c.head_dim_v > 128)) continue;
    list.push_back({name});
    if (is_blackwell && wider > 64 && wider <= 128) list.push_back({name, true});
  }
  return list;
}

class Backward : public ::testing::TestWithParam<BackwardCase> {};

TEST_P(Backward, MatchesTheOracle) {
  static int turn = 0;  // the order of asynchronous work goes round with the cases
  const BackwardCase& spec = GetParam();
  const BackwardProblem host(spec);
  const cpu::ReferenceGradients exact = cpu::reference_backward(host.problem, host.gradients);
  const cpu::ReferenceGradients naive = cpu::naive_backward(host.problem, host.gradients);
  const DType in = spec.f16 ? DType::f16 : DType::bf16;
  const DType to = spec.wide ? DType::f32 : in;
  const auto order = static_cast<runtime::EmulationOptions::Order>(turn++ % 3);
  for (const Form& form : forms(spec)) {
    SCOPED_TRACE(form.device + (form.pair ? ", pairs" : ""));
    // Few multiprocessors, so that Hopper's CTAs take several blocks of keys.
    const int sm_count = form.device == "emulated:sm_90a" ? 1 + turn % 3 : 0;
    const auto device = runtime::open_device(
        form.device, {.order = order, .seed = 7, .checks = true, .sm_count = sm_count});
    // Schedules by hand are Hopper's.
    if (!spec.schedule.empty() && device->properties().arch != "sm_90a") continue;
    const BackwardResult found = run_on(*device, host, form.pair);
    const auto close = [&](const std::vector<double>& x, const std::vector<double>& truth,
                           const std::vector<double>& same) {
      return test::close_to(x, truth, same, test::gradient_floor(in, to, truth));
    };
    EXPECT_TRUE(close(found.dv, exact.dv, naive.dv)) << "dv";
    EXPECT_TRUE(close(found.dk, exact.dk, naive.dk)) << "dk";
    EXPECT_TRUE(close(found.dq, exact.dq, naive.dq)) << "dq";
  }
}

const BackwardCase backward_cases[] = {
    {.name = "one_tile", .heads_q = 1, .heads_kv = 1, .seqlen_q = 64, .seqlen_k = 128},
    {.name = "one_tile_d64",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 128,
     .seqlen_k = 128,
     .head_dim = 64,
     .head_dim_v = 64},
    {.name = "whole_tiles"},
    {.name = "odd_lengths", .seqlen_q = 100, .seqlen_k = 300, .dlse = true},
    {.name = "d64",
     .seqlen_q = 200,
     .seqlen_k = 300,
     .head_dim = 64,
     .head_dim_v = 64,
     .wide = true},
    {.name = "d72_f16",
     .seqlen_q = 140,
     .seqlen_k = 150,
     .head_dim = 72,
     .head_dim_v = 72,
     .f16 = true},
    {.name = "d40_24",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 70,
     .seqlen_k = 40,
     .head_dim = 40,
     .head_dim_v = 24},
    {.name = "causal", .seqlen_q = 300, .seqlen_k = 300, .window = {-1, 0}},
    {.name = "causal_more_queries", .seqlen_q = 400, .seqlen_k = 130, .window = {-1, 0}},
    {.name = "causal_more_keys",
     .seqlen_q = 130,
     .seqlen_k = 400,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0}},
    {.name = "window", .seqlen_q = 300, .seqlen_k = 350, .window = {70, 20}},
    {.name = "window_left_far", .seqlen_q = 40, .seqlen_k = 400, .window = {30, -1}},
    {.name = "groups",
     .batch = 2,
     .heads_q = 6,
     .heads_kv = 2,
     .seqlen_q = 130,
     .seqlen_k = 200,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0}},
    {.name = "negative_scale_sink", .seqlen_q = 90, .seqlen_k = 140, .scale = -0.1f, .sink = true},
    {.name = "packed",
     .seqlen_q = 200,
     .seqlen_k = 260,
     .window = {-1, 0},
     .cu_seqlens_q = {0, 0, 5, 205, 206, 206},
     .cu_seqlens_k = {0, 7, 12, 272, 272, 281},
     .slack = 300},
    {.name = "packed_d64",
     .heads_q = 4,
     .heads_kv = 1,
     .seqlen_q = 140,
     .seqlen_k = 140,
     .head_dim = 64,
     .head_dim_v = 64,
     .cu_seqlens_q = {0, 130, 131, 271},
     .cu_seqlens_k = {0, 130, 131, 271},
     .slack = 3},
    {.name = "used",
     .batch = 3,
     .heads_q = 2,
     .heads_kv = 1,
     .seqlen_q = 150,
     .seqlen_k = 200,
     .seqused_q = {150, 70, 0},
     .seqused_k = {1, 130, 200}},
    {.name = "d192_128", .seqlen_q = 150, .seqlen_k = 200, .head_dim = 192},
    {.name = "d160_80_causal_groups",
     .heads_q = 2,
     .heads_kv = 1,
     .seqlen_q = 260,
     .seqlen_k = 260,
     .head_dim = 160,
     .head_dim_v = 80,
     .window = {-1, 0},
     .f16 = true,
     .deterministic = true},
    {.name = "d256_causal",
     .seqlen_q = 300,
     .seqlen_k = 200,
     .head_dim = 256,
     .head_dim_v = 256,
     .window = {-1, 0}},
    {.name = "pairs_odd_d256",
     .heads_q = 4,
     .heads_kv = 2,
     .seqlen_q = 130,
     .seqlen_k = 190,
     .head_dim = 256,
     .head_dim_v = 256},
    {.name = "pairs_window_packed_in_turns",
     .heads_q = 2,
     .heads_kv = 1,
     .seqlen_q = 260,
     .seqlen_k = 260,
     .head_dim = 256,
     .head_dim_v = 128,
     .window = {60, 10},
     .deterministic = true,
     .cu_seqlens_q = {0, 260, 300, 300},
     .cu_seqlens_k = {0, 260, 260, 400},
     .slack = 3},
    {.name = "pairs_used_causal",
     .batch = 3,
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 150,
     .seqlen_k = 260,
     .head_dim = 200,
     .head_dim_v = 256,
     .window = {-1, 0},
     .f16 = true,
     .deterministic = true,
     .seqused_q = {150, 70, 0},
     .seqused_k = {1, 130, 260}},
    {.name = "in_turns", .seqlen_q = 200, .seqlen_k = 520, .deterministic = true},
    {.name = "in_turns_causal",
     .heads_q = 4,
     .heads_kv = 2,
     .seqlen_q = 300,
     .seqlen_k = 400,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .deterministic = true},
    {.name = "in_turns_window_packed",
     .seqlen_q = 260,
     .seqlen_k = 260,
     .window = {60, 10},
     .deterministic = true,
     .cu_seqlens_q = {0, 260, 300},
     .cu_seqlens_k = {0, 260, 400}},
    {.name = "one_rhythm_groups_causal",
     .heads_q = 4,
     .seqlen_q = 330,
     .seqlen_k = 300,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .deterministic = true,
     .schedule = "dq_apart=0"},
    {.name = "one_rhythm_packed",
     .heads_q = 4,
     .heads_kv = 1,
     .seqlen_q = 300,
     .seqlen_k = 300,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {100, 20},
     .cu_seqlens_q = {0, 130, 131, 431},
     .cu_seqlens_k = {0, 130, 131, 431},
     .slack = 3,
     .schedule = "dq_apart=0"},
    {.name = "apart_causal_d64",
     .heads_q = 2,
     .heads_kv = 1,
     .seqlen_q = 300,
     .seqlen_k = 170,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .schedule = "dq_apart=1"},
    {.name = "apart_groups_causal",
     .heads_q = 4,
     .heads_kv = 2,
     .seqlen_q = 330,
     .seqlen_k = 300,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .deterministic = true,
     .schedule = "dq_apart=1"},
    {.name = "apart_packed_window",
     .heads_q = 2,
     .seqlen_q = 300,
     .seqlen_k = 300,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {100, 20},
     .cu_seqlens_q = {0, 130, 131, 431},
     .cu_seqlens_k = {0, 130, 131, 431},
     .slack = 3,
     .schedule = "dq_apart=1"},
    {.name = "apart_d64_odd",
     .seqlen_q = 300,
     .seqlen_k = 270,
     .head_dim = 64,
     .head_dim_v = 64,
     .schedule = "dq_apart=1"},
    {.name = "split_d64",
     .seqlen_q = 150,
     .seqlen_k = 170,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .schedule = "split_products=1"},
};

INSTANTIATE_TEST_SUITE_P(All, Backward, ::testing::ValuesIn(backward_cases),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fovea::tests
