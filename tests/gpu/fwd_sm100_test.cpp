// What is the Blackwell forward kernel's own: results that do not depend on the order of
// asynchronous work, what it may count on, how often it rescales, how good its polynomial is, and
// what each unit does per tile, as docs/kernels/fwd_sm100.md says. Emulated only.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "runtime/forward_gpu.h"
#include "runtime/source.h"
#include "tests/jit/jit_support.h"
#include "tests/tolerance.h"
#include "tools/safetensors.h"

namespace fovea::tests {
namespace {

using core::Fwd100Config;
using core::int32;
using core::int64;
using core::SoftmaxPolicy;
using core::uint16;
using core::uint32;
using core::uint64;
using nlohmann::json;
using runtime::Device;
using runtime::DeviceBuffer;
using runtime::EmulationOptions;

struct Shape {
  int64 seqlen_q = 256;
  int64 seqlen_k = 512;
  int32 head_dim = 128;
  int32 head_dim_v = 128;
  core::Window window = {};
  int32 heads = 1;
};

// Normal inputs, bf16, one batch.
class Inputs {
 public:
  explicit Inputs(const Shape& shape) {
    core::Problem& p = problem;
    p.batch = 1;
    p.heads_q = p.heads_kv = shape.heads;
    p.seqlen_q = shape.seqlen_q;
    p.seqlen_k = shape.seqlen_k;
    p.head_dim = shape.head_dim;
    p.head_dim_v = shape.head_dim_v;
    p.window = shape.window;
    p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    const auto fill = [&](core::View& view, std::vector<uint16>& values, int64 rows,
                          int32 columns) {
      const int64 row = static_cast<int64>(columns) * shape.heads;
      for (int64 i = 0; i < rows * row; ++i) values.push_back(core::float_to_bf16(normal()));
      view = {values.data(), core::DType::bf16, {rows * row, row, columns, 1}};
    };
    fill(p.q, q, p.seqlen_q, p.head_dim);
    fill(p.k, k, p.seqlen_k, p.head_dim);
    fill(p.v, v, p.seqlen_k, p.head_dim_v);
    const int64 row = static_cast<int64>(p.head_dim_v) * shape.heads;
    p.out = {nullptr, core::DType::bf16, {p.seqlen_q * row, row, p.head_dim_v, 1}};
    p.lse = {lse_mark, core::DType::f32, {p.seqlen_q * shape.heads, p.seqlen_q, 1, 0}};
  }

  // Takes the numbers of a file, rounded to bf16; its shapes are those of the problem.
  void fill_from(const tools::Safetensors& layer) {
    const auto fill = [&](const char* name, std::vector<uint16>& values) {
      const std::span<const std::byte> bytes = layer.tensors.at(name).bytes;
      ASSERT_EQ(bytes.size(), 4 * values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        float value = 0.0f;
        std::memcpy(&value, bytes.data() + 4 * i, 4);
        values[i] = core::float_to_bf16(value);
      }
    };
    fill("q", q);
    fill("k", k);
    fill("v", v);
  }

  core::Problem problem;
  std::vector<uint16> q, k, v;

 private:
  float normal() {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(state_ >> 40) * 0x1p-24f;
    }
    return sum;
  }
  inline static float lse_mark[1] = {};
  uint64 state_ = 1;
};

struct Result {
  std::vector<uint16> out;
  std::vector<float> lse;
  std::array<uint64, 2> counters{};  // rows rescaled, rows taken again
  json report;
};

// Throws DeviceError for every fault that the emulator finds.
Result run(const Inputs& inputs, const Fwd100Config& config, const EmulationOptions& options = {},
           const char* arch = "emulated:sm_100a") {
  const auto device = runtime::open_device(arch, options);
  const auto upload = [&](const void* data, std::size_t bytes) {
    DeviceBuffer buffer(*device, bytes);
    if (data != nullptr) device->copy_to_device(buffer.address(), data, bytes);
    return buffer;
  };
  runtime::ForwardCall call;
  core::Problem& p = call.problem;
  p = inputs.problem;
  const auto rows = static_cast<std::size_t>(p.seqlen_q * p.heads_q);
  const auto outputs = rows * static_cast<std::size_t>(p.head_dim_v);
  const DeviceBuffer q = upload(inputs.q.data(), inputs.q.size() * 2);
  const DeviceBuffer k = upload(inputs.k.data(), inputs.k.size() * 2);
  const DeviceBuffer v = upload(inputs.v.data(), inputs.v.size() * 2);
  const DeviceBuffer out = upload(nullptr, outputs * 2);
  const DeviceBuffer lse = upload(nullptr, rows * 4);
  constexpr std::array<uint64, 3> zeros{};
  const DeviceBuffer counters = upload(zeros.data(), sizeof zeros);
  const auto point = [](core::View& view, const DeviceBuffer& buffer) {
    view.data = reinterpret_cast<void*>(buffer.address());
  };
  point(p.q, q);
  point(p.k, k);
  point(p.v, v);
  point(p.out, out);
  point(p.lse, lse);
  call.counters = counters.address();
  call.scheduler = counters.address() + 16;
  runtime::ForwardKernel(*device, config).run(call);
  Result result;
  result.out.resize(outputs);
  result.lse.resize(rows);
  device->copy_to_host(result.out.data(), out.address(), outputs * 2);
  device->copy_to_host(result.lse.data(), lse.address(), rows * 4);
  device->copy_to_host(result.counters.data(), counters.address(), 16);
  result.report = json::parse(device->report(true));
  return result;
}

Fwd100Config configure(const Inputs& inputs, SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard) {
  return runtime::choose_forward_sm100(inputs.problem, softmax, "sm_100a");
}

std::vector<double> widened(const std::vector<uint16>& values) {
  std::vector<double> wide;
  for (const uint16 bits : values) wide.push_back(static_cast<double>(core::bf16_to_float(bits)));
  return wide;
}

// ---- Order of asynchronous work -----------------------------------------------------------------

struct SeedCase {
  const char* name;
  Shape shape;
  SoftmaxPolicy softmax = SoftmaxPolicy::sum_guard;
  int32 query_tiles = 2;
  bool pair = false;  // of CTAs
  bool launch_control = false;

  Fwd100Config configure(const Inputs& inputs) const {
    Fwd100Config config = tests::configure(inputs, softmax);
    config.launch_control = launch_control;
    EXPECT_EQ(config.query_tiles, query_tiles);
    EXPECT_EQ(config.cta_pair, pair);
    return config;
  }
};

class Seeds : public testing::TestWithParam<SeedCase> {};

TEST_P(Seeds, DoNotChangeABit) {
  const SeedCase& c = GetParam();
  const Inputs inputs(c.shape);
  const Fwd100Config config = c.configure(inputs);
  const Result eager = run(inputs, config);
  const Result lazy = run(inputs, config, {.order = EmulationOptions::Order::lazy});
  EXPECT_EQ(lazy.out, eager.out);
  for (uint64 seed = 1; seed <= 12; ++seed) {
    const Result random =
        run(inputs, config, {.order = EmulationOptions::Order::random, .seed = seed});
    EXPECT_EQ(random.out, eager.out) << seed;
    EXPECT_EQ(random.lse, eager.lse) << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, Seeds,
    testing::Values(
        SeedCase{"guarded", {.seqlen_q = 300, .seqlen_k = 520, .window = {-1, 0}}},
        SeedCase{"conditional",
                 {.seqlen_q = 256, .seqlen_k = 640, .head_dim = 64, .head_dim_v = 64},
                 SoftmaxPolicy::conditional},
        SeedCase{"online", {.seqlen_q = 130, .seqlen_k = 384}, SoftmaxPolicy::online},
        SeedCase{"one_tile",
                 {.seqlen_q = 100, .seqlen_k = 500, .head_dim = 256, .head_dim_v = 256},
                 SoftmaxPolicy::sum_guard,
                 1},
        SeedCase{"one_tile_conditional",
                 {.seqlen_q = 100, .seqlen_k = 640},
                 SoftmaxPolicy::conditional,
                 1},
        SeedCase{"pair", {.seqlen_q = 400, .seqlen_k = 520}, SoftmaxPolicy::sum_guard, 2, true},
        SeedCase{"pair_conditional",
                 {.seqlen_q = 300, .seqlen_k = 520, .head_dim = 192},
                 SoftmaxPolicy::conditional,
                 2,
                 true},
        SeedCase{"pair_one_tile",
                 {.seqlen_q = 200, .seqlen_k = 300, .head_dim = 256, .head_dim_v = 256},
                 SoftmaxPolicy::sum_guard,
                 1,
                 true},
        SeedCase{"launch_control",
                 {.seqlen_q = 300, .seqlen_k = 300, .window = {-1, 0}, .heads = 2},
                 SoftmaxPolicy::sum_guard,
                 2,
                 false,
                 true},
        SeedCase{"pair_launch_control",
                 {.seqlen_q = 300, .seqlen_k = 200, .heads = 3},
                 SoftmaxPolicy::online,
                 2,
                 true,
                 true}),
    [](const auto& tested) { return std::string(tested.param.name); });

// The fast form counts on products being executed in the order of issue. Where only the manual's
// order holds, that is a race between a product that reads weights and the scores that follow.
TEST(IssueOrder, IsCountedOnOnlyWhereTheConfigurationSaysSo) {
  const Inputs inputs({});
  Fwd100Config config = configure(inputs);
  EXPECT_FALSE(config.issue_order);
  const Result safe = run(inputs, config);
  config.issue_order = true;
  for (const auto order : {EmulationOptions::Order::lazy, EmulationOptions::Order::random}) {
    const EmulationOptions promised{.order = order, .seed = 3, .in_order_tensor = true};
    EXPECT_EQ(run(inputs, config, promised).out, safe.out);
    EXPECT_THROW(run(inputs, config, {.order = order, .seed = 3}), runtime::DeviceError);
  }
}

// B300: the same results with the maximum that comes with the load.
TEST(BlackwellUltra, TakesTheMaximumWithTheLoad) {
  const Inputs inputs({.seqlen_q = 300, .seqlen_k = 400, .window = {-1, 0}});
  for (const SoftmaxPolicy policy : {SoftmaxPolicy::conditional, SoftmaxPolicy::sum_guard}) {
    Fwd100Config config = runtime::choose_forward_sm100(inputs.problem, policy, "sm_103a");
    EXPECT_TRUE(config.max_with_load);
    const Result with_load = run(inputs, config, {}, "emulated:sm_103a");
    config.max_with_load = false;
    const Result alone = run(inputs, config, {}, "emulated:sm_103a");
    EXPECT_EQ(with_load.out, alone.out);
    EXPECT_EQ(with_load.lse, alone.lse);
    EXPECT_LE(with_load.report["total"]["alu_lanes"].get<uint64>(),
              alone.report["total"]["alu_lanes"].get<uint64>() - 128 * 32);
  }
}

// ---- Tile after tile
// --------------------------------------------------------------------------------

// More tiles than the chip has multiprocessors: the counter hands the rest to whoever is free, on
// the emulator, which runs one CTA after the other, to the first.
class Persistent : public testing::TestWithParam<SeedCase> {};

TEST_P(Persistent, TakesTileAfterTile) {
  const SeedCase& c = GetParam();
  const Inputs inputs(c.shape);
  const Fwd100Config config = c.configure(inputs);
  const cpu::ReferenceResult exact = cpu::reference_forward(inputs.problem);
  const cpu::ReferenceResult naive = cpu::naive_forward(inputs.problem);
  const Result result = run(inputs, config, {.order = EmulationOptions::Order::random, .seed = 5});
  EXPECT_TRUE(test::close_to(widened(result.out), exact.out, naive.out,
                             test::out_floor(DType::bf16, DType::bf16, exact.out)));
  const std::vector<double> lse(result.lse.begin(), result.lse.end());
  EXPECT_TRUE(test::close_to(lse, exact.lse, naive.lse, test::lse_floor()));
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, Persistent,
    testing::Values(
        SeedCase{
            "guarded",
            {.seqlen_q = 140, .seqlen_k = 300, .head_dim = 64, .head_dim_v = 64, .heads = 153}},
        SeedCase{"windowed",
                 {.seqlen_q = 300,
                  .seqlen_k = 300,
                  .head_dim = 32,
                  .head_dim_v = 32,
                  .window = {60, 0},
                  .heads = 153}},
        SeedCase{
            "conditional",
            {.seqlen_q = 140, .seqlen_k = 300, .head_dim = 32, .head_dim_v = 128, .heads = 153},
            SoftmaxPolicy::conditional},
        SeedCase{"one_tile",
                 {.seqlen_q = 20, .seqlen_k = 400, .head_dim = 32, .head_dim_v = 32, .heads = 153},
                 SoftmaxPolicy::sum_guard,
                 1},
        SeedCase{"one_tile_conditional",
                 {.seqlen_q = 20, .seqlen_k = 400, .head_dim = 32, .head_dim_v = 32, .heads = 153},
                 SoftmaxPolicy::conditional,
                 1}),
    [](const auto& tested) { return std::string(tested.param.name); });

// ---- Rescaling ----------------------------------------------------------------------------------

TEST(Rescaling, IsRareWithAThresholdAndRarerWithTheGuard) {
  const Inputs inputs({.seqlen_q = 256, .seqlen_k = 2048});
  const cpu::ReferenceResult exact = cpu::reference_forward(inputs.problem);
  const cpu::ReferenceResult naive = cpu::naive_forward(inputs.problem);
  const EmulationOptions options{.checks = false};
  std::array<uint64, 3> rescaled{};
  for (const SoftmaxPolicy policy :
       {SoftmaxPolicy::online, SoftmaxPolicy::conditional, SoftmaxPolicy::sum_guard}) {
    Fwd100Config config = configure(inputs, policy);
    config.split = false;  // one part: every tile of keys has others before it
    const Result result = run(inputs, config, options);
    rescaled[static_cast<std::size_t>(policy)] = result.counters[0];
    EXPECT_TRUE(test::close_to(widened(result.out), exact.out, naive.out,
                               test::out_floor(DType::bf16, DType::bf16, exact.out)));
    const std::vector<double> lse(result.lse.begin(), result.lse.end());
    EXPECT_TRUE(test::close_to(lse, exact.lse, naive.lse, test::lse_floor()));
  }
  std::printf(
      "rows rescaled, 256 x 2048, normal inputs: online %llu, conditional %llu, guard %llu\n",
      rescaled[0], rescaled[1], rescaled[2]);
  EXPECT_GT(rescaled[0], 0u);
  EXPECT_LE(8 * rescaled[1], rescaled[0]);
  EXPECT_LE(8 * rescaled[2], rescaled[0]);
}

// q, k and v of the demo: all heads of the layers of a language model, on a paragraph of text.
TEST(Rescaling, IsRareOnRealText) {
  std::array<uint64, 3> rescaled{};
  for (int layer = 0; layer < 6; ++layer) {
    const std::string name = "../../examples/minilm/layer" + std::to_string(layer) + ".safetensors";
    const std::filesystem::path path =
        (std::filesystem::path(FOVEA_TEST_DATA) / name).lexically_normal();
    std::ifstream file(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)),
                            std::istreambuf_iterator<char>());
    const tools::Safetensors tensors =
        tools::parse_safetensors(std::as_bytes(std::span(bytes.data(), bytes.size())));
    const std::vector<std::int64_t>& shape = tensors.tensors.at("q").shape;
    Inputs inputs({.seqlen_q = shape[1],
                   .seqlen_k = shape[1],
                   .head_dim = static_cast<int32>(shape[3]),
                   .head_dim_v = static_cast<int32>(shape[3]),
                   .heads = static_cast<int32>(shape[2])});
    inputs.fill_from(tensors);
    for (const SoftmaxPolicy policy :
         {SoftmaxPolicy::online, SoftmaxPolicy::conditional, SoftmaxPolicy::sum_guard}) {
      const Fwd100Config config = configure(inputs, policy);
      const uint64 rows = run(inputs, config, {.checks = false}).counters[0];
      std::printf("layer %d %d: %llu\n", layer, static_cast<int>(policy),
                  static_cast<unsigned long long>(rows));
      rescaled[static_cast<std::size_t>(policy)] += rows;
    }
  }
  std::printf("rows rescaled, six layers of the demo: online %llu, conditional %llu, guard %llu\n",
              static_cast<unsigned long long>(rescaled[0]),
              static_cast<unsigned long long>(rescaled[1]),
              static_cast<unsigned long long>(rescaled[2]));
  EXPECT_GT(rescaled[0], 0u);
  EXPECT_LE(8 * rescaled[1], rescaled[0]);
  EXPECT_LE(8 * rescaled[2], rescaled[0]);
}

// ---- Counts per tile ----------------------------------------------------------------------------

// Counters of `warps` of a report, summed.
uint64 sum_of(const json& report, const char* name, std::size_t first, std::size_t last) {
  uint64 sum = 0;
  for (std::size_t w = first; w < last; ++w) sum += report["per_warp"][w][name].get<uint64>();
  return sum;
}

// What one more tile of 128 keys costs each of the query tiles.
struct TileCounts {
  uint64 tensor_flops, exponentials, fma, shared_tensor_bytes, softmax_reads, softmax_writes,
      load_bytes, correction_waits;
  json all;  // every counter of the report
};

TileCounts count_tile(const Shape& shape, SoftmaxPolicy softmax, int32 polynomial, bool pair) {
  TileCounts counts[2];
  const auto tiles = static_cast<uint64>(shape.seqlen_q / 128);
  for (const int i : {0, 1}) {
    Shape longer = shape;
    longer.seqlen_k = 384 + 128 * i;  // full tiles beyond the first
    const Inputs inputs(longer);
    Fwd100Config config = configure(inputs, softmax);
    config.polynomial = polynomial;
    EXPECT_EQ(config.cta_pair, pair);
    const json report = run(inputs, config, {.checks = false}).report;
    const auto softmax_warps = static_cast<std::size_t>(4 * config.query_tiles);
    const json& total = report["total"];
    counts[i] = {total["tensor_flops_f16"],
                 total["mufu_lanes"],
                 sum_of(report, "fma_lanes", 0, softmax_warps),
                 total["shared_tensor_read_bytes"],
                 sum_of(report, "tensor_memory_read_bytes", 0, softmax_warps),
                 sum_of(report, "tensor_memory_write_bytes", 0, softmax_warps),
                 total["tma_load_bytes"],
                 sum_of(report, "barrier_waits", softmax_warps, softmax_warps + 4),
                 total};
  }
  const auto each = [&](uint64 TileCounts::*field) {
    return (counts[1].*field - counts[0].*field) / tiles;
  };
  json all;
  for (const auto& [name, value] : counts[1].all.items()) {
    all[name] = (value.get<uint64>() - counts[0].all[name].get<uint64>()) / tiles;
  }
  return {each(&TileCounts::tensor_flops),
          each(&TileCounts::exponentials),
          each(&TileCounts::fma),
          each(&TileCounts::shared_tensor_bytes),
          each(&TileCounts::softmax_reads),
          each(&TileCounts::softmax_writes),
          each(&TileCounts::load_bytes),
          each(&TileCounts::correction_waits),
          all};
}

class Counts : public testing::TestWithParam<std::tuple<int, SoftmaxPolicy, int, bool>> {};

TEST_P(Counts, AreTheBudget) {
  const auto [head_dim, softmax, polynomial, pair] = GetParam();
  // 256 rows: two query tiles of a CTA, or one of each CTA of a pair, or 512, two of each.
  const Shape shape{.seqlen_q = pair && head_dim <= 128 ? 512 : 256,
                    .head_dim = head_dim,
                    .head_dim_v = head_dim};
  const TileCounts c = count_tile(shape, softmax, polynomial, pair);
  const auto d = static_cast<uint64>(head_dim);
  const auto share = static_cast<uint64>(polynomial);
  constexpr uint64 scores = 128 * 128;
  const bool guarded = softmax == SoftmaxPolicy::sum_guard;
  const uint64 query_tiles = d > 128 ? 1 : 2;
  const uint64 ctas = pair ? 2 : 1;
  EXPECT_EQ(c.tensor_flops, 4 * scores * d);
  // The other policies compute one factor a row, too.
  const uint64 exponentials = scores * (16 - share) / 16 + (guarded ? 0 : 128);
  EXPECT_EQ(c.exponentials, exponentials);
  // Packed in pairs: multiply-add and sum; a polynomial of degree 4 takes seven more.
  const uint64 fma = scores / 2 * 2 + scores / 2 * share * 7 / 16;
  EXPECT_GE(c.fma, fma);
  EXPECT_LE(c.fma, fma + 128 * 8);
  // Per 16 columns of depth 128 rows of q and of k; then v, its weights come from tensor memory.
  // A pair's keys and values are read once for both.
  EXPECT_EQ(c.shared_tensor_bytes, (128 * d + 2 * 128 * d / ctas) * 2);
  EXPECT_EQ(c.softmax_reads, (guarded ? 1 : 2) * scores * 4);
  EXPECT_EQ(c.softmax_writes, scores * 2);
  EXPECT_EQ(c.load_bytes, 2 * 128 * d * 2 / query_tiles / ctas);
  std::printf("%4d %-5s %-12s %2d/16 %10llu %8llu %8llu %8llu %8llu %8llu %8llu %8llu\n", head_dim,
              pair ? "pair" : "", guarded ? "sum_guard" : "conditional", polynomial, c.tensor_flops,
              c.exponentials, c.fma, c.shared_tensor_bytes, c.softmax_reads, c.softmax_writes,
              c.load_bytes, c.correction_waits);
  // Read by bench/blackwell_counts.py.
  std::printf("counts %s %d %s %d/16 %s\n", pair ? "pair" : "alone", head_dim,
              guarded ? "sum_guard" : "conditional", polynomial, c.all.dump().c_str());
  // Without a vote the correction warps have nothing to do.
  EXPECT_EQ(c.correction_waits == 0, guarded);
}

INSTANTIATE_TEST_SUITE_P(Budget, Counts,
                         testing::Values(std::tuple{128, SoftmaxPolicy::sum_guard, 2, false},
                                         std::tuple{128, SoftmaxPolicy::sum_guard, 2, true},
                                         std::tuple{128, SoftmaxPolicy::sum_guard, 0, true},
                                         std::tuple{128, SoftmaxPolicy::conditional, 2, false},
                                         std::tuple{64, SoftmaxPolicy::sum_guard, 7, false},
                                         std::tuple{256, SoftmaxPolicy::sum_guard, 0, true}));

// ---- Polynomial exponentials --------------------------------------------------------------------

TEST(Polynomial, IsWithinOneUnitOfTheSpecialFunctionUnit) {
  // Thread i of block b computes 2^x for x = start + step (256 b + i), both ways.
  const std::string text = R"(
    #include "device/fwd_sm100.cuh"
    namespace fovea::device {
    struct Params { float* out; float start, step; };
    extern "C" __global__ void fovea_kernel(const __grid_constant__ Params p) {
      constexpr core::Fwd100Config config{};
      const int i = blockIdx.x * 256 + threadIdx.x;
      const float x = p.start + p.step * i;
      const float2 e = Softmax100<config>::exp2_by_polynomial<true>(float2{x, x});
      p.out[2 * i] = e.x;
      p.out[2 * i + 1] = exp2_approximate(x);
    }
    })";
  const auto device = runtime::open_device("emulated:sm_100a");
  std::string instructions;
  for (const std::string& each : runtime::forward_instructions_sm100()) instructions += each;
  const auto kernel =
      build_kernel(*device, "#include \"device/tcgen05.h\"\nnamespace fovea::device {\n" +
                                instructions + "}\n" + text);
  constexpr int count = 1 << 16;
  const DeviceBuffer out(*device, count * 8);
  struct {
    uint64 out;
    float start, step;
  } params{out.address(), -30.0f, 38.0f / count};
  runtime::LaunchConfig launch;
  launch.grid.x = count / 256;
  launch.block.x = 256;
  device->launch(*kernel, launch, std::as_bytes(std::span(&params, 1)));
  std::vector<float> pairs(2 * count);
  device->copy_to_host(pairs.data(), out.address(), out.bytes());
  int equal = 0;
  double largest = 0.0;
  for (int i = 0; i < count; ++i) {
    const float polynomial = pairs[static_cast<std::size_t>(2 * i)];
    const float unit = pairs[static_cast<std::size_t>(2 * i + 1)];
    largest = std::max(largest, std::fabs(static_cast<double>(polynomial) / unit - 1.0));
    const int steps = core::float_to_bf16(polynomial) - core::float_to_bf16(unit);
    EXPECT_LE(std::abs(steps), 1) << i;
    equal += steps == 0 ? 1 : 0;
  }
  std::printf(
      "degree 3: largest relative error %.2e; %.2f %% equal in bf16, the rest one unit off\n",
      largest, 100.0 * equal / count);
  EXPECT_LT(largest, 1.1e-4);
  EXPECT_GE(equal, count * 98 / 100);
}

}  // namespace
}  // namespace fovea::tests
