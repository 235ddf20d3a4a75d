// The 8-bit forward kernel against fp64 on the very numbers it is given, under the tolerance that
// its CPU twin's error sets: masks, lengths, head dimensions, and logits that outgrow e4m3's range.
// On the emulated Hopper and Blackwell chips, each case in another order of asynchronous work;
// FOVEA_TEST_DEVICES=cuda runs it on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "cpu/forward_fp8.h"
#include "cpu/quantize.h"
#include "cpu/reference.h"
#include "runtime/forward_fp8.h"
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
using core::uint8;
using runtime::Device;

struct Fp8Case {
  std::string name = {};
  int64 batch = 1;
  int32 heads_q = 2;
  int32 heads_kv = 2;
  int64 seqlen_q = 128;
  int64 seqlen_k = 384;
  int32 head_dim = 128;
  int32 head_dim_v = 128;
  core::Window window = {};
  float softcap = 0.0f;
  float scale = 0.0f;  // 0: 1 / sqrt(head_dim)
  bool sink = false;
  core::DType out = core::DType::bf16;
  float rise = 0.0f;  // logits grow by this much per 128 keys, in the order that keys are visited
  float outlier = 0.0f;  // size of one element in 200 of q, k and v
  SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard;
  core::ScaleGranularity granularity = core::ScaleGranularity::block;
  bool rotate = true;
  core::DType codes = core::DType::e4m3;
  int64 promote_keys = 0;
  std::vector<int32> cu_seqlens_q = {};
  std::vector<int32> cu_seqlens_k = {};
  std::vector<int32> seqused_q = {};
  std::vector<int32> seqused_k = {};
  int64 slack = 0;      // rows of q behind the last sequence
  int32 page_size = 0;  // of k and v, in pages on the device: Hopper
  int32 tile_k = 0;     // Hopper; 0: as chosen
  int32 warpgroups = 0;
  bool ping_pong = false;
  std::optional<bool> q_in_registers = std::nullopt;
  int sm_count = 0;                               // of an emulated chip; 0: its own
  void (*change)(core::Fwd100Config&) = nullptr;  // Blackwell
};

std::ostream& operator<<(std::ostream& out, const Fp8Case& c) { return out << c.name; }

// A problem in fp32 on the host, its quantised operands, and what these stand for.
class Fp8Input {
 public:
  explicit Fp8Input(const Fp8Case& c) : spec(c), rows(CaseRows::of(c)) {
    problem = describe_problem(spec, rows, core::DType::f32, c.out);
    problem.softcap = c.softcap;
    fill();
    quantize();
    restore();
  }

  std::size_t lse_count() const {
    return static_cast<std::size_t>(rows.batches * rows.q * spec.heads_q);
  }
  std::size_t out_count() const { return lse_count() * static_cast<std::size_t>(spec.head_dim_v); }

  Fp8Case spec;
  CaseRows rows;
  core::Problem problem;   // as given
  core::Problem restored;  // codes x scales in place of q, k and v
  core::Fp8Layout layout;
  std::vector<uint8> q_codes, k_codes, v_codes;
  std::vector<float> q_scale;
  std::vector<core::KeyScale> key_scale;
  std::vector<float> sink;

  cpu::Fp8Operands operands() {
    return {q_codes.data(), k_codes.data(), v_codes.data(), q_scale.data(), key_scale.data()};
  }

 private:
  // Rows of k and v that no sequence uses are NaN.
  void fill() {
    const Fp8Case& c = spec;
    test::Random random(1);
    // Nearly normal, without the tails: where one weight outweighs its row, its rounding alone is
    // the error, and that is the twin's good or bad luck.
    const auto normal = [&] {
      double sum = -6.0;
      for (int i = 0; i < 12; ++i) sum += random.uniform();
      return sum;
    };
    const auto element = [&] {
      const double x = normal();
      return static_cast<float>(random.uniform() < 0.005 ? x * static_cast<double>(c.outlier) + x
                                                         : x);
    };
    for (int64 i = 0; i < rows.batches * rows.q * c.heads_q * c.head_dim; ++i) {
      q_.push_back(c.rise != 0.0f && i % c.head_dim == 0 ? 8.0f : element());
    }
    const float step = -c.rise / (8.0f * problem.softmax_scale);
    for (int64 b = 0; b < rows.batches; ++b) {
      for (int64 row = 0; row < rows.k; ++row) {
        const bool used = c.seqused_k.empty() || row < c.seqused_k[static_cast<std::size_t>(b)];
        constexpr float nan = std::numeric_limits<float>::quiet_NaN();
        for (int32 h = 0; h < c.heads_kv; ++h) {
          for (int32 d = 0; d < c.head_dim; ++d) {
            const float x =
                c.rise != 0.0f && d == 0 ? step * static_cast<float>(row / 128) : element();
            k_.push_back(used ? x : nan);
          }
          for (int32 d = 0; d < c.head_dim_v; ++d) v_.push_back(used ? element() : nan);
        }
      }
    }
    for (int32 h = 0; h < c.heads_q; ++h) sink.push_back(static_cast<float>(normal()));
    problem.q.data = q_.data();
    problem.k.data = k_.data();
    problem.v.data = v_.data();
    if (c.sink) problem.sink.data = sink.data();
  }

  void quantize() {
    layout = core::fp8_layout(problem);
    const auto size = [](int64 bytes) { return static_cast<std::size_t>(bytes); };
    // What is not written must not matter: NaN.
    q_codes.assign(size(layout.q_bytes), 0x7f);
    k_codes.assign(size(layout.k_bytes), 0x7f);
    v_codes.assign(size(layout.v_bytes), 0x7f);
    q_scale.assign(size(layout.q_scale_bytes) / sizeof(float), 1.0f);
    key_scale.resize(size(layout.key_scale_bytes) / sizeof(core::KeyScale));
    cpu::quantize(problem, {spec.granularity, spec.rotate, 7, spec.codes}, operands());
  }

  float value_of(uint8 code) const { return core::load_element(&code, spec.codes, 0); }

  // What the codes stand for, in fp32: exact where scales are powers of two, those of integers are
  // not.
  void restore() {
    restored = problem;
    restored.head_dim = layout.columns;
    const auto sequence_block = [](const int32* cu, int64 row, int64 sequences) {
      if (cu == nullptr) return row / core::scale_block;
      int64 s = 0;
      while (s + 1 < sequences && row >= cu[s + 1]) ++s;
      return core::block_offset(cu[s], static_cast<int32>(s)) + (row - cu[s]) / core::scale_block;
    };
    restored_q_.resize(q_codes.size());
    for (std::size_t i = 0; i < q_codes.size(); ++i) {
      const auto place = static_cast<int64>(i) / layout.columns;
      const int64 head = place % layout.heads_q;
      const int64 row = place / layout.heads_q % layout.rows_q;
      const int64 batch = place / layout.heads_q / layout.rows_q;
      const int64 block = sequence_block(problem.cu_seqlens_q, row, rows.sequences);
      restored_q_[i] =
          value_of(q_codes[i]) * q_scale[static_cast<std::size_t>(
                                     (batch * layout.heads_q + head) * layout.blocks_q + block)];
    }
    restored_k_.resize(k_codes.size());
    restored_v_.resize(static_cast<std::size_t>(rows.batches * rows.k * layout.heads_kv) *
                       static_cast<std::size_t>(layout.columns_v));
    for (int64 place = 0; place < rows.batches * rows.k * layout.heads_kv; ++place) {
      const int64 head = place % layout.heads_kv;
      const int64 row = place / layout.heads_kv % layout.rows_k;
      const int64 batch = place / layout.heads_kv / layout.rows_k;
      const int64 block = sequence_block(problem.cu_seqlens_k, row, rows.sequences);
      const int64 pair = batch * layout.heads_kv + head;
      const core::KeyScale& s = key_scale[static_cast<std::size_t>(pair * layout.blocks_k + block)];
      for (int32 c = 0; c < layout.columns; ++c) {
        const auto i = static_cast<std::size_t>(place * layout.columns + c);
        restored_k_[i] = value_of(k_codes[i]) * s.k;
      }
      int64 first = 0;
      if (problem.cu_seqlens_k != nullptr) {
        int64 sequence = 0;
        while (sequence + 1 < rows.sequences && row >= problem.cu_seqlens_k[sequence + 1]) {
          ++sequence;
        }
        first = problem.cu_seqlens_k[sequence];
      }
      const int64 key = row - first;
      const int64 slot = (block - key / core::scale_block) * core::scale_block + key / 16 * 16 +
                         core::value_slot(static_cast<int32>(key % 16));
      for (int32 c = 0; c < layout.columns_v; ++c) {
        const int64 at = (pair * layout.columns_v + c) * layout.blocks_k * core::scale_block + slot;
        restored_v_[static_cast<std::size_t>(place * layout.columns_v + c)] =
            core::load_element(v_codes.data(), core::value_type(spec.codes), at) / s.v_inverse;
      }
    }
    restored.q = rows_of_heads(rows.q, spec.heads_q, layout.columns, core::DType::f32);
    restored.k = rows_of_heads(rows.k, spec.heads_kv, layout.columns, core::DType::f32);
    restored.q.data = restored_q_.data();
    restored.k.data = restored_k_.data();
    restored.v.data = restored_v_.data();
  }

  std::vector<float> q_, k_, v_;
  std::vector<float> restored_q_, restored_k_, restored_v_;
};

struct Fp8Result {
  std::vector<double> out;
  std::vector<double> lse;
  std::array<core::uint64, 2> counters{};  // rows repaired, rows taken again
  std::string arch = {};
};

// The quantised keys of an input in pages of random order among some that nobody owns; entries of
// the table that nobody uses are garbage, and codes and scales behind a sequence's keys are NaN.
struct Pages {
  explicit Pages(const Fp8Input& input) {
    const Fp8Case& c = input.spec;
    const core::Fp8Layout& l = input.layout;
    const int64 size = c.page_size;
    lengths = c.seqused_k;
    if (lengths.empty()) {
      lengths.assign(static_cast<std::size_t>(c.batch), static_cast<int32>(c.seqlen_k));
    }
    columns = core::ceil_div(c.seqlen_k, size) + 1;
    std::vector<int32> order(static_cast<std::size_t>(c.batch * columns));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::minstd_rand(7));
    count = static_cast<int64>(order.size());
    k.assign(at(count * size * l.heads_kv * l.columns), 0x7f);
    v.assign(at(count * size * l.heads_kv * l.columns_v), 0x7f);
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    scales.assign(at(count * l.heads_kv * (size / core::scale_block)), {nan, nan, nan, nan});
    table.assign(order.size(), 1 << 30);
    for (int64 b = 0; b < c.batch; ++b) {
      for (int64 key = 0; key < lengths[at(b)]; ++key) {
        const int64 entry = b * columns + key / size;
        table[at(entry)] = order[at(entry)];
        for (int32 h = 0; h < l.heads_kv; ++h) copy_key(input, b, key, h, table[at(entry)]);
      }
    }
  }

  std::vector<uint8> k, v;
  std::vector<core::KeyScale> scales;
  std::vector<int32> table, lengths;
  int64 columns = 0;  // of the table
  int64 count = 0;

 private:
  static std::size_t at(int64 index) { return static_cast<std::size_t>(index); }

  void copy_key(const Fp8Input& input, int64 b, int64 key, int32 head, int64 page) {
    const core::Fp8Layout& l = input.layout;
    const int64 size = input.spec.page_size;
    const int64 row = key % size;
    std::copy_n(&input.k_codes[at(((b * l.rows_k + key) * l.heads_kv + head) * l.columns)],
                l.columns, &k[at(((page * size + row) * l.heads_kv + head) * l.columns)]);
    const auto slot = [](int64 place) {
      return place / 16 * 16 + core::value_slot(static_cast<int32>(place % 16));
    };
    const int64 pair = b * l.heads_kv + head;
    const int64 places = l.blocks_k * core::scale_block;
    for (int32 d = 0; d < l.columns_v; ++d) {
      v[at(((page * l.heads_kv + head) * l.columns_v + d) * size + slot(row))] =
          input.v_codes[at((pair * l.columns_v + d) * places + slot(key))];
    }
    scales[at((page * l.heads_kv + head) * (size / core::scale_block) + row / core::scale_block)] =
        input.key_scale[at(pair * l.blocks_k + key / core::scale_block)];
  }
};

void describe_pages(core::Problem& p, const Fp8Input& input) {
  p.page_size = input.spec.page_size;
  p.v_transposed = true;
  static constexpr int32 some = 0;
  p.seqused_k = &some;  // presence is what a configuration asks for
}

runtime::ForwardConfig config_of(const Fp8Case& c, const core::Problem& p, std::string_view arch) {
  runtime::ForwardConfig config =
      runtime::choose_forward_fp8(p, c.softmax, arch, c.promote_keys, c.codes);
  if (auto* hopper = std::get_if<core::FwdConfig>(&config)) {
    hopper->ping_pong = c.ping_pong;
    if (c.tile_k != 0) hopper->tile_k = c.tile_k;
    hopper->q_in_registers = c.q_in_registers.value_or(hopper->q_in_registers);
    if (c.warpgroups != 0) hopper->warpgroups = c.warpgroups;
    if (c.promote_keys != 0) {
      hopper->promote = std::max(1, static_cast<int32>(c.promote_keys) / hopper->tile_k);
    }
  } else if (c.change != nullptr) {
    c.change(std::get<core::Fwd100Config>(config));
  }
  return config;
}

// The CPU twin of a configuration: Blackwell's tensor cores add in fp32.
cpu::Fp8Method method_of(const Fp8Case& c, const runtime::ForwardConfig& config) {
  cpu::Fp8Method method{.codes = c.codes, .softmax = c.softmax};
  if (const auto* hopper = std::get_if<core::FwdConfig>(&config)) {
    method.tile_k = hopper->tile_k;
    method.promote = hopper->promote;
  } else {
    method.tile_k = std::get<core::Fwd100Config>(config).tile_k;
    method.accumulator_bits = 23;
  }
  return method;
}

Fp8Result run_on(Device& device, const Fp8Input& input) {
  const Fp8Case& c = input.spec;
  DeviceMemory memory(device);
  runtime::ForwardCall launch;
  core::Problem& p = launch.problem;
  p = input.problem;
  runtime::Fp8Operands operands{
      memory.upload_address(input.q_codes), memory.upload_address(input.k_codes),
      memory.upload_address(input.v_codes), memory.upload_address(input.q_scale),
      memory.upload_address(input.key_scale)};
  p.out.data = memory.output(p.out.dtype, input.out_count());
  p.lse.data = memory.output(p.lse.dtype, input.lse_count());
  if (c.sink) p.sink.data = memory.upload(input.sink);
  memory.upload_lengths(c, p);
  if (c.page_size > 0) {
    const Pages pages(input);
    describe_pages(p, input);
    operands.k = memory.upload_address(pages.k);
    operands.v = memory.upload_address(pages.v);
    operands.key_scale = memory.upload_address(pages.scales);
    p.seqused_k = memory.upload_list(pages.lengths);
    p.block_table = memory.upload_list(pages.table);
    p.block_table_stride = pages.columns;
    p.pages = pages.count;
  }
  const std::vector<core::uint64> zeros(2);
  launch.counters = memory.upload_address(zeros);
  launch.scheduler = memory.upload_address(zeros);

  EXPECT_TRUE(runtime::forward_fp8_supports(p, device.properties().arch, c.codes).empty());
  const runtime::ForwardFp8Kernel kernel(device, config_of(c, p, device.properties().arch));
  kernel.run(launch, operands);

  Fp8Result result;
  result.arch = device.properties().arch;
  result.out = memory.read(p.out, input.out_count());
  result.lse = memory.read(p.lse, input.lse_count());
  const auto counts = memory.download<core::uint64>(launch.counters, 2);
  result.counters = {counts[0], counts[1]};
  EXPECT_EQ(memory.download<core::uint64>(launch.scheduler, 1)[0], 0u);
  return result;
}

// What each device gave.
std::vector<Fp8Result> check_case(const Fp8Case& spec, runtime::EmulationOptions::Order order) {
  Fp8Input input(spec);
  const cpu::ReferenceResult exact = cpu::reference_forward(input.restored);
  const auto out_type = static_cast<DType>(spec.out);
  std::vector<Fp8Result> result;
  for (const std::string& name : test_devices()) {
    SCOPED_TRACE(name);
    const auto device = runtime::open_device(
        name, {.order = order, .seed = 7, .checks = true, .sm_count = spec.sm_count});
    const std::string arch = device->properties().arch;
    if (spec.codes == core::DType::s8 && arch != "sm_90a") {
      EXPECT_EQ(runtime::forward_fp8_supports(input.problem, arch, spec.codes).size(), 1u);
      continue;
    }
    core::Problem seen = input.problem;  // by the kernel
    if (spec.page_size > 0) {
      describe_pages(seen, input);
      // Elsewhere a plan gathers them in front of the kernel: fp8_plan_test.cpp.
      if (arch != "sm_90a") continue;
    }
    cpu::Fp8Statistics statistics;
    const cpu::ReferenceResult twin = cpu::forward_fp8(
        input.problem, input.operands(), method_of(spec, config_of(spec, seen, arch)), &statistics);
    EXPECT_EQ(statistics.saturated, 0);
    const Fp8Result now = run_on(*device, input);
    EXPECT_TRUE(test::close_to(now.out, exact.out, twin.out,
                               test::out_floor(out_type, out_type, exact.out)));
    EXPECT_TRUE(test::close_to(now.lse, exact.lse, twin.lse, {1e-4, 1e-5, 1e-9}));
    result.push_back(now);
  }
  return result;
}

class Fp8Forward : public ::testing::TestWithParam<Fp8Case> {};

TEST_P(Fp8Forward, MatchesTheOracle) {
  // The order of asynchronous work goes round with the cases.
  static int turn = 0;
  check_case(GetParam(), static_cast<runtime::EmulationOptions::Order>(turn++ % 3));
}

const Fp8Case fp8_cases[] = {
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
    {.name = "d80", .seqlen_q = 140, .seqlen_k = 300, .head_dim = 80, .head_dim_v = 80},
    {.name = "d192_128", .seqlen_q = 140, .seqlen_k = 300, .head_dim = 192, .window = {-1, 0}},
    {.name = "outliers", .seqlen_q = 140, .seqlen_k = 500, .outlier = 30},
    {.name = "outliers_unrotated",
     .seqlen_q = 140,
     .seqlen_k = 500,
     .outlier = 30,
     .granularity = core::ScaleGranularity::tensor,
     .rotate = false},
    {.name = "e5m2",
     .seqlen_q = 140,
     .seqlen_k = 300,
     .window = {-1, 0},
     .codes = core::DType::e5m2},
    {.name = "e5m2_rows_rise",
     .seqlen_q = 140,
     .seqlen_k = 900,
     .rise = 200,
     .codes = core::DType::e5m2},
    {.name = "s8", .seqlen_q = 140, .seqlen_k = 500, .outlier = 30, .codes = core::DType::s8},
    {.name = "s8_d64",
     .batch = 2,
     .heads_q = 4,
     .seqlen_q = 130,
     .seqlen_k = 513,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .codes = core::DType::s8},
    {.name = "s8_d256",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 150,
     .seqlen_k = 250,
     .head_dim = 256,
     .head_dim_v = 256,
     .codes = core::DType::s8},
    {.name = "s8_d80_softcap",
     .seqlen_q = 140,
     .seqlen_k = 300,
     .head_dim = 80,
     .head_dim_v = 80,
     .softcap = 5.0f,
     .codes = core::DType::s8},
    {.name = "s8_unrotated",
     .seqlen_q = 140,
     .seqlen_k = 300,
     .granularity = core::ScaleGranularity::head,
     .rotate = false,
     .codes = core::DType::s8},
    {.name = "s8_rows_rise",
     .seqlen_q = 140,
     .seqlen_k = 900,
     .rise = 200,
     .codes = core::DType::s8},
    {.name = "s8_promoted",
     .seqlen_q = 140,
     .seqlen_k = 900,
     .window = {300, 0},
     .sink = true,
     .codes = core::DType::s8,
     .promote_keys = 192},
    {.name = "s8_varlen",
     .heads_kv = 1,
     .seqlen_q = 257,
     .seqlen_k = 322,
     .window = {-1, 0},
     .codes = core::DType::s8,
     .cu_seqlens_q = {0, 100, 100, 357, 400},
     .cu_seqlens_k = {0, 50, 178, 500, 500},
     .slack = 700},
    {.name = "s8_seqused",
     .batch = 3,
     .seqlen_q = 200,
     .seqlen_k = 300,
     .window = {-1, 0},
     .codes = core::DType::s8,
     .seqused_q = {200, 0, 77},
     .seqused_k = {13, 300, 200}},
    {.name = "s8_online",
     .seqlen_q = 140,
     .seqlen_k = 700,
     .rise = 100,
     .softmax = SoftmaxPolicy::online,
     .codes = core::DType::s8},
    {.name = "promoted", .seqlen_q = 140, .seqlen_k = 900, .promote_keys = 256, .tile_k = 128},
    // Up to 64 columns weights are rounded before they are known to fit.
    {.name = "d64_rows_rise",
     .seqlen_q = 200,
     .seqlen_k = 900,
     .head_dim = 64,
     .head_dim_v = 64,
     .rise = 8},
    {.name = "d64_promoted_rows_rise",
     .seqlen_q = 200,
     .seqlen_k = 900,
     .head_dim = 64,
     .head_dim_v = 64,
     .rise = 200,
     .promote_keys = 256},
    {.name = "promoted_rows_rise",
     .seqlen_q = 140,
     .seqlen_k = 900,
     .rise = 8,
     .promote_keys = 192},
    // Sums in shared memory, which shrink there; q in registers, by which scores are taken again.
    {.name = "d256_promoted_rows_rise",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 140,
     .seqlen_k = 600,
     .head_dim = 256,
     .head_dim_v = 256,
     .rise = 8,
     .promote_keys = 128,
     .ping_pong = true,
     .q_in_registers = true},
    {.name = "d256_promoted_rows_jump",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 140,
     .seqlen_k = 600,
     .head_dim = 256,
     .head_dim_v = 256,
     .window = {-1, 0},
     .rise = 200,
     .promote_keys = 192,
     .q_in_registers = true},
    {.name = "d64_q_in_memory",
     .seqlen_q = 200,
     .seqlen_k = 500,
     .head_dim = 64,
     .head_dim_v = 64,
     .rise = 200,
     .q_in_registers = false},
    {.name = "q_in_registers",
     .seqlen_q = 200,
     .seqlen_k = 600,
     .window = {-1, 0},
     .rise = 200,
     .tile_k = 128,
     .warpgroups = 2,
     .q_in_registers = true},
    {.name = "s8_q_in_registers",
     .seqlen_q = 140,
     .seqlen_k = 600,
     .rise = 200,
     .codes = core::DType::s8,
     .tile_k = 128,
     .warpgroups = 2,
     .q_in_registers = true},
    {.name = "causal", .seqlen_q = 300, .seqlen_k = 300, .window = {-1, 0}},
    {.name = "causal_more_queries", .seqlen_q = 400, .seqlen_k = 130, .window = {-1, 0}},
    {.name = "causal_gqa",
     .batch = 2,
     .heads_q = 4,
     .seqlen_q = 130,
     .seqlen_k = 513,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0}},
    // Warpgroups whose rows end before others' let the last keys pass.
    {.name = "causal_d64",
     .seqlen_q = 400,
     .seqlen_k = 400,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0}},
    {.name = "window", .seqlen_q = 500, .seqlen_k = 500, .window = {100, 20}},
    {.name = "softcap", .seqlen_q = 200, .seqlen_k = 300, .softcap = 5.0f},
    {.name = "negative_scale", .seqlen_q = 200, .seqlen_k = 300, .scale = -0.1f},
    {.name = "sink", .seqlen_q = 200, .seqlen_k = 300, .window = {-1, 0}, .sink = true},
    {.name = "f16_out", .seqlen_q = 200, .seqlen_k = 400, .out = core::DType::f16},
    {.name = "f32_out", .seqlen_q = 200, .seqlen_k = 400, .out = core::DType::f32},
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
     .slack = 700},
    {.name = "seqused",
     .batch = 3,
     .seqlen_q = 200,
     .seqlen_k = 300,
     .window = {-1, 0},
     .seqused_q = {200, 0, 77},
     .seqused_k = {13, 300, 200}},
    // Some warps of a tile store their rows together, some each by itself, and sums were there.
    {.name = "d256_promoted_seqused",
     .batch = 2,
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 150,
     .seqlen_k = 250,
     .head_dim = 256,
     .head_dim_v = 256,
     .promote_keys = 96,
     .seqused_q = {150, 20},
     .seqused_k = {250, 130}},
    {.name = "pages_32_odd_lengths",
     .batch = 3,
     .seqlen_q = 100,
     .seqlen_k = 300,
     .seqused_k = {299, 0, 33},
     .page_size = 32},
    {.name = "pages_64_causal_gqa",
     .batch = 2,
     .heads_q = 4,
     .seqlen_q = 130,
     .seqlen_k = 513,
     .head_dim = 64,
     .head_dim_v = 64,
     .window = {-1, 0},
     .seqused_k = {513, 77},
     .page_size = 64},
    {.name = "pages_128_promoted",
     .seqlen_q = 140,
     .seqlen_k = 900,
     .promote_keys = 256,
     .page_size = 128},
    {.name = "pages_256_d256_window",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 150,
     .seqlen_k = 700,
     .head_dim = 256,
     .head_dim_v = 256,
     .window = {300, 20},
     .promote_keys = 96,
     .page_size = 256},
    {.name = "pages_96_d80_softcap",
     .seqlen_q = 140,
     .seqlen_k = 300,
     .head_dim = 80,
     .head_dim_v = 80,
     .softcap = 5.0f,
     .page_size = 96},
    {.name = "pages_s8",
     .batch = 2,
     .heads_q = 4,
     .seqlen_q = 130,
     .seqlen_k = 500,
     .window = {-1, 0},
     .codes = core::DType::s8,
     .promote_keys = 192,
     .seqused_q = {130, 1},
     .seqused_k = {500, 64},
     .page_size = 64},
    {.name = "pages_one_query",
     .batch = 2,
     .heads_q = 4,
     .seqlen_q = 1,
     .seqlen_k = 700,
     .window = {-1, 0},
     .promote_keys = 768,
     .seqused_k = {700, 415},
     .page_size = 64},
    {.name = "pages_rows_rise",
     .seqlen_q = 140,
     .seqlen_k = 900,
     .rise = 200,
     .seqused_k = {897},
     .page_size = 32},
    {.name = "pages_128_rows_rise",
     .heads_q = 1,
     .heads_kv = 1,
     .seqlen_q = 140,
     .seqlen_k = 900,
     .head_dim = 64,
     .head_dim_v = 64,
     .rise = 200,
     .page_size = 128},
    {.name = "three_warpgroups",
     .seqlen_q = 200,
     .seqlen_k = 600,
     .tile_k = 96,
     .warpgroups = 3,
     .ping_pong = true},
    {.name = "blackwell_alone",
     .seqlen_q = 300,
     .seqlen_k = 500,
     .change = [](core::Fwd100Config& c) { c.cta_pair = false; }},
    {.name = "blackwell_pair",
     .seqlen_q = 500,
     .seqlen_k = 500,
     .change = [](core::Fwd100Config& c) { c.cta_pair = true; }},
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

INSTANTIATE_TEST_SUITE_P(Cases, Fp8Forward, ::testing::ValuesIn(fp8_cases),
                         [](const auto& instance) { return instance.param.name; });

// Logits that leave the fast path, and proof that they did. Hopper visits the last keys first;
// Blackwell the first 128, and then the last.
TEST(Fp8Guard, RepairsRowsThatGrowWithinReach) {
  for (const Fp8Result& result :
       check_case({.name = "rise_8", .seqlen_q = 140, .seqlen_k = 900, .rise = 8},
                  runtime::EmulationOptions::Order::random)) {
    EXPECT_EQ(result.counters[0] > 0, result.arch == "sm_90a") << result.arch;
    EXPECT_EQ(result.counters[1], 0u) << result.arch;
  }
}

TEST(Fp8Guard, TakesTilesAgainWhenSumsOverflow) {
  for (const float rise : {200.0f, -8.0f, -200.0f}) {
    for (const Fp8Result& result :
         check_case({.name = "rise_200", .seqlen_q = 140, .seqlen_k = 896, .rise = rise},
                    runtime::EmulationOptions::Order::lazy)) {
      EXPECT_EQ(result.counters[1] > 0, (rise > 0.0f) == (result.arch == "sm_90a")) << result.arch;
    }
  }
}

// Sums of weights near fp32's end, which v's scale of some 2^-7 takes out again.
TEST(Fp8Guard, KeepsSumsInRange) {
  for (const float rise : {80.0f, 82.0f, 84.0f, 86.0f}) {
    check_case({.name = "rise_80",
                .seqlen_q = 140,
                .seqlen_k = 896,
                .rise = rise,
                .tile_k = 128,
                .warpgroups = 2},
               runtime::EmulationOptions::Order::lazy);
  }
}

// The block that is visited last is taken again, and the next tile's q waits for its place.
TEST(Fp8Guard, TakesTheLastBlockAgainTileAfterTile) {
  for (const int32 head_dim : {64, 128, 256}) {
    Fp8Case spec{.name = "last", .heads_q = 5, .heads_kv = 5, .seqlen_q = 140, .seqlen_k = 384};
    spec.head_dim = spec.head_dim_v = head_dim;
    spec.rise = 200.0f;
    spec.sm_count = 2;
    for (const Fp8Result& result : check_case(spec, runtime::EmulationOptions::Order::random)) {
      EXPECT_TRUE(result.arch != "sm_90a" || result.counters[1] > 0) << head_dim;
    }
  }
}

TEST(Fp8Guard, LeavesFallingLogitsAlone) {
  for (const float rise : {-50.0f, 50.0f}) {
    for (const Fp8Result& result :
         check_case({.name = "fall", .seqlen_q = 140, .seqlen_k = 900, .rise = rise},
                    runtime::EmulationOptions::Order::eager)) {
      if ((rise > 0.0f) == (result.arch == "sm_90a")) continue;
      EXPECT_EQ(result.counters[0] + result.counters[1], 0u) << result.arch;
    }
  }
}

// What one more tile of 128 keys costs 128 rows on Blackwell, from two lengths: the budget of
// docs/kernels/fwd_sm100.md. bench/blackwell_counts.py reads the line.
TEST(Fp8Counts, AreBlackwellsBudget) {
  nlohmann::json totals[2];
  constexpr core::uint64 heads = 1;
  constexpr core::uint64 query_tiles = 4;
  for (const int i : {0, 1}) {
    Fp8Input input(Fp8Case{.name = "counts",
                           .heads_q = heads,
                           .heads_kv = heads,
                           .seqlen_q = 128 * query_tiles,
                           .seqlen_k = 384 + 128 * i});
    const auto device = runtime::open_device("emulated:sm_100a", {.checks = false});
    run_on(*device, input);
    totals[i] = nlohmann::json::parse(device->report(true))["total"];
  }
  nlohmann::json each;
  for (const auto& [name, value] : totals[1].items()) {
    each[name] = (value.get<core::uint64>() - totals[0][name].get<core::uint64>()) / query_tiles;
  }
  constexpr core::uint64 scores = 128 * 128;
  EXPECT_EQ(each["tensor_flops_fp8"], 4 * scores * 128);
  EXPECT_EQ(each["mufu_lanes"], scores * (16 - 6) / 16);       // with an LSE: degree 4, 6 of 16
  EXPECT_EQ(each["shared_tensor_read_bytes"], 2 * 128 * 128);  // q, and a pair's halves of k and v
  EXPECT_EQ(each["tma_load_bytes"], 128 * 128 / 2 + 4 * 16 / 2);  // and scales
  std::printf("counts pair 128 e4m3 6/16 %s\n", each.dump().c_str());
}

}  // namespace
}  // namespace fovea::tests
