// The backward kernels against the fp64 oracle: shapes that end inside tiles, masks, lengths,
// groups of heads, and sums in turns. On the emulated chips, checks on, each case in another order
// of asynchronous work; FOVEA_TEST_DEVICES=cuda runs it on a GPU. On Blackwell both forms run, one
// CTA and pairs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "runtime/backward_gpu.h"
#include "tests/jit/jit_support.h"
#include "tests/support.h"
#include "tests/tolerance.h"

namespace fovea::tests {
namespace {

using core::int32;
using core::int64;
using core::uint16;
using runtime::Device;
using runtime::DeviceBuffer;

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

void describe(core::View& view, int64 rows, int32 heads, int32 columns, core::DType type) {
  view.dtype = type;
  view.stride[0] = rows * heads * columns;
  view.stride[1] = static_cast<int64>(heads) * columns;
  view.stride[2] = columns;
  view.stride[3] = 1;
}

// A problem in host memory, in memory order (batch, row, head, column), with out and lse of the
// oracle; rows that no sequence uses are NaN.
class BackwardProblem {
 public:
  explicit BackwardProblem(const BackwardCase& c) : spec(c) {
    const bool packed = !c.cu_seqlens_q.empty();
    sequences_ = packed ? static_cast<int64>(c.cu_seqlens_q.size()) - 1 : c.batch;
    batches_ = packed ? 1 : c.batch;
    rows_q = packed ? c.cu_seqlens_q.back() + c.slack : c.seqlen_q;
    rows_k = packed ? c.cu_seqlens_k.back() + c.slack : c.seqlen_k;
    describe_problem(packed);
    fill();
    run_forward();
  }

  BackwardCase spec;
  core::Problem problem;
  core::Gradients gradients;
  int64 rows_q = 0;
  int64 rows_k = 0;
  std::vector<uint16> q, k, v, out, dout;
  std::vector<float> lse, dlse, sink;

  std::size_t dq_count() const { return count(rows_q, spec.heads_q, spec.head_dim); }
  std::size_t dk_count() const { return count(rows_k, spec.heads_kv, spec.head_dim); }
  std::size_t dv_count() const { return count(rows_k, spec.heads_kv, spec.head_dim_v); }

 private:
  std::size_t count(int64 rows, int32 heads, int32 columns) const {
    return static_cast<std::size_t>(batches_ * rows * heads * columns);
  }

  void describe_problem(bool packed) {
    const BackwardCase& c = spec;
    const core::DType type = c.f16 ? core::DType::f16 : core::DType::bf16;
    const core::DType wide = c.wide ? core::DType::f32 : type;
    core::Problem& p = problem;
    describe(p.q, rows_q, c.heads_q, c.head_dim, type);
    describe(p.k, rows_k, c.heads_kv, c.head_dim, type);
    describe(p.v, rows_k, c.heads_kv, c.head_dim_v, type);
    describe(p.out, rows_q, c.heads_q, c.head_dim_v, type);
    p.lse.stride[0] = c.heads_q * rows_q;
    p.lse.stride[1] = rows_q;
    p.lse.stride[2] = 1;
    p.sink.stride[0] = 1;
    gradients.dout = p.out;
    gradients.dlse = p.lse;
    gradients.dq = p.q;
    gradients.dk = p.k;
    gradients.dv = p.v;
    gradients.dq.dtype = gradients.dk.dtype = gradients.dv.dtype = wide;
    gradients.rows_k = rows_k;
    p.batch = sequences_;
    p.seqlen_q = c.seqlen_q;
    p.seqlen_k = c.seqlen_k;
    p.total_q = packed ? rows_q : 0;
    p.total_k = packed ? rows_k : 0;
    p.heads_q = c.heads_q;
    p.heads_kv = c.heads_kv;
    p.head_dim = c.head_dim;
    p.head_dim_v = c.head_dim_v;
    p.softmax_scale = c.scale != 0.0f ? c.scale : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    p.window = c.window;
    p.deterministic = c.deterministic;
    const auto lengths = [](const std::vector<int32>& list) {
      return list.empty() ? nullptr : list.data();
    };
    p.cu_seqlens_q = lengths(spec.cu_seqlens_q);
    p.cu_seqlens_k = lengths(spec.cu_seqlens_k);
    p.seqused_q = lengths(spec.seqused_q);
    p.seqused_k = lengths(spec.seqused_k);
  }

  std::vector<bool> used_rows(int64 rows, bool of_queries) const {
    std::vector<bool> used(static_cast<std::size_t>(batches_ * rows), false);
    for (int64 b = 0; b < sequences_; ++b) {
      const core::Sequence s = core::sequence_at(problem, b);
      const int64 first = of_queries ? s.batch_q * rows + s.row_q : s.batch_k * rows + s.row_k;
      for (int64 i = 0; i < (of_queries ? s.length_q : s.length_k); ++i) {
        used[static_cast<std::size_t>(first + i)] = true;
      }
    }
    return used;
  }

  void fill() {
    test::Random random(41);
    const auto make = [&](int64 rows, int32 heads, int32 columns, bool of_queries) {
      const std::vector<bool> used = used_rows(rows, of_queries);
      std::vector<uint16> values;
      for (const bool in_use : used) {
        for (int32 i = 0; i < heads * columns; ++i) {
          const auto x = in_use ? static_cast<float>(random.normal()) : nan;
          values.push_back(spec.f16 ? core::float_to_f16(x) : core::float_to_bf16(x));
        }
      }
      return values;
    };
    q = make(rows_q, spec.heads_q, spec.head_dim, true);
    k = make(rows_k, spec.heads_kv, spec.head_dim, false);
    v = make(rows_k, spec.heads_kv, spec.head_dim_v, false);
    dout = make(rows_q, spec.heads_q, spec.head_dim_v, true);
    for (int32 h = 0; h < spec.heads_q; ++h) sink.push_back(static_cast<float>(random.normal()));
    for (int64 i = 0; i < batches_ * rows_q * spec.heads_q; ++i) {
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

  int64 sequences_ = 0;
  int64 batches_ = 0;
};

struct BackwardResult {
  std::vector<double> dq, dk, dv;
};

// Device memory that goes when the call ends.
class Memory {
 public:
  explicit Memory(Device& device) : device_(device) {}

  template <typename T>
  T* upload(const std::vector<T>& values) {
    buffers_.emplace_back(device_, values.size() * sizeof(T));
    const runtime::DeviceAddress address = buffers_.back().address();
    if (!values.empty()) {
      device_.copy_to_device(address, values.data(), values.size() * sizeof(T));
    }
    return reinterpret_cast<T*>(address);
  }

  // Poisoned, with a guard behind it.
  void* output(std::size_t bytes) {
    return upload(std::vector<unsigned char>(bytes + guard_bytes, 0xff));
  }

  std::vector<double> read(const core::View& view, std::size_t elements) {
    const auto width = static_cast<std::size_t>(core::size_bytes(view.dtype));
    std::vector<unsigned char> bytes(elements * width + guard_bytes);
    device_.copy_to_host(bytes.data(), reinterpret_cast<runtime::DeviceAddress>(view.data),
                         bytes.size());
    device_.synchronize();
    std::vector<double> values;
    for (std::size_t i = 0; i < elements; ++i) {
      values.push_back(core::load_element(bytes.data(), view.dtype, static_cast<int64>(i)));
    }
    for (std::size_t i = elements * width; i < bytes.size(); ++i) EXPECT_EQ(bytes[i], 0xff);
    return values;
  }

 private:
  static constexpr std::size_t guard_bytes = 128;
  Device& device_;
  std::vector<DeviceBuffer> buffers_;
};

BackwardResult run_on(Device& device, const BackwardProblem& host, bool pair) {
  Memory memory(device);
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
  const std::size_t width = host.spec.wide ? 4 : 2;
  g.dq.data = memory.output(host.dq_count() * width);
  g.dk.data = memory.output(host.dk_count() * width);
  g.dv.data = memory.output(host.dv_count() * width);
  const auto lengths = [&](const std::vector<int32>& list) {
    return list.empty() ? nullptr : memory.upload(list);
  };
  p.cu_seqlens_q = lengths(host.spec.cu_seqlens_q);
  p.cu_seqlens_k = lengths(host.spec.cu_seqlens_k);
  p.seqused_q = lengths(host.spec.seqused_q);
  p.seqused_k = lengths(host.spec.seqused_k);

  const std::string arch = device.properties().arch;
  EXPECT_TRUE(runtime::backward_supports(p, g, arch).empty());
  core::BwdConfig config = runtime::choose_backward(p, g, arch, host.spec.schedule);
  config.pair = pair;
  const std::size_t bytes = runtime::backward_workspace_bytes(call, config, device.properties());
  call.workspace = reinterpret_cast<runtime::DeviceAddress>(
      memory.upload(std::vector<unsigned char>(bytes, 0xff)));
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
     .schedule = "split_columns=1"},
};

INSTANTIATE_TEST_SUITE_P(All, Backward, ::testing::ValuesIn(backward_cases),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fovea::tests
