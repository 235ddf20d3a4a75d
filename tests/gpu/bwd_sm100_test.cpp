// What is the Blackwell backward kernel's own: results that do not depend on the order of
// asynchronous work, what it may count on, what each unit does per tile beside Hopper's kernel, and
// whether the emulator notices when its synchronisation is broken. Emulated only.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/backward_gpu.h"
#include "tests/gpu/backward_bench.h"

namespace fovea::tests {
namespace {

using core::BwdConfig;
using core::int32;
using core::uint64;
using nlohmann::json;
using runtime::EmulationOptions;

GradientBits run(const BackwardInputs& inputs, const BwdConfig& config,
                 const EmulationOptions& options) {
  WatchedDevice device("emulated:sm_100a", options);
  return run_backward(device, inputs, config);
}

BwdConfig configure(const BackwardInputs& inputs, bool pair, std::string_view arch = "sm_100a") {
  BwdConfig config = runtime::choose_backward(inputs.problem, inputs.gradients, arch);
  config.pair = pair;
  return config;
}

// ---- Order of asynchronous work -----------------------------------------------------------------

struct SeedCase {
  const char* name;
  BackwardShape shape;
  bool pair = false;
};

class BackwardSeeds : public testing::TestWithParam<SeedCase> {};

TEST_P(BackwardSeeds, DoNotChangeABit) {
  const BackwardInputs inputs(GetParam().shape);
  const BwdConfig config = configure(inputs, GetParam().pair);
  using Order = EmulationOptions::Order;
  const GradientBits eager = run(inputs, config, {.ordered_sums = true});
  EXPECT_EQ(run(inputs, config, {.order = Order::lazy, .ordered_sums = true}), eager);
  for (uint64 seed = 1; seed <= 6; ++seed) {
    EXPECT_EQ(run(inputs, config, {.order = Order::random, .seed = seed, .ordered_sums = true}),
              eager)
        << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Forms, BackwardSeeds,
    testing::Values(SeedCase{"d64", {.head_dim = 64, .head_dim_v = 64}},
                    SeedCase{"d128", {.window = {-1, 0}}}, SeedCase{"pair", {}, true},
                    SeedCase{"pair_causal", {.seqlen_k = 520, .window = {-1, 0}}, true},
                    SeedCase{"d192", {.seqlen_k = 200, .head_dim = 192}}),
    [](const auto& tested) { return std::string(tested.param.name); });

// The fast form counts on products being executed in the order of issue. Where only the manual's
// order holds, it overwrites what another product reads.
TEST(BackwardIssueOrder, IsCountedOnOnlyWhereTheConfigurationSaysSo) {
  const BackwardInputs inputs({.seqlen_q = 300, .seqlen_k = 256});
  for (const bool pair : {false, true}) {
    BwdConfig config = configure(inputs, pair);
    EXPECT_FALSE(config.issue_order);
    const GradientBits safe = run(inputs, config, {});
    config.issue_order = true;
    const auto order = EmulationOptions::Order::random;
    EXPECT_EQ(run(inputs, config, {.order = order, .seed = 3, .in_order_tensor = true}), safe);
    EXPECT_THROW(run(inputs, config, {.order = order, .seed = 3}), runtime::DeviceError);
  }
}

// ---- Counts per tile ----------------------------------------------------------------------------

using Counts = std::map<std::string, double>;

// What 128 query rows more cost for each 128 keys; from two reports of the main kernel.
Counts difference(const json& more, const json& less, double tiles) {
  Counts counts;
  for (const auto& [name, count] : more["total"].items()) {
    counts[name] = (count.get<double>() - less["total"][name].get<double>()) / tiles;
  }
  return counts;
}

Counts count_tile(const std::string& arch, int32 head_dim, bool pair) {
  json reports[2];
  for (const int i : {0, 1}) {
    BackwardInputs inputs({.seqlen_q = 256 + 128 * i,
                           .seqlen_k = 256,
                           .head_dim = head_dim,
                           .head_dim_v = head_dim == 192 ? 128 : head_dim});
    inputs.problem.deterministic = false;
    WatchedDevice device("emulated:" + arch, {.checks = false});
    static_cast<void>(run_backward(device, inputs, configure(inputs, pair, arch)));
    reports[i] = device.largest;
  }
  return difference(reports[1], reports[0], 2.0);
}

// Bytes that the ports of shared memory move for products, dS, its exchange and dq; without copies
// into it and the two numbers of each row, as in the published sums. A broadcast read is not seen
// apart here, so dq and dS are counted where they are written; each dq is read once, by the engine.
double shared_bytes(const Counts& c) {
  return c.at("shared_tensor_read_bytes") + c.at("shared_write_bytes") + c.at("tma_store_bytes") +
         2.0 * c.at("dsmem_bytes");
}

// Shared memory in all, with the numbers that every thread reads; tensor memory without the
// accumulators, which are the same for the same products.
double bytes_of_both_memories(const Counts& c) {
  return shared_bytes(c) + c.at("shared_read_bytes") + c.at("tensor_memory_read_bytes") +
         c.at("tensor_memory_write_bytes") - c.at("accumulator_read_bytes") -
         c.at("accumulator_write_bytes");
}

// What CUTLASS's example 77 (commit 7107b05, built outside this repository) does for a tile, as
// bench/blackwell_counts.py --backward counts it, and by how much fovea may do more: dS^T, which dk
// reads in tensor memory here and in shared memory there.
struct Ceiling {
  const char* name;
  double (*count)(const Counts&);
  double example77;
  double more = 0.0;
};
constexpr double dscores_bytes = 2.0 * 128 * 128;
constexpr Ceiling ceilings[] = {
    {"tensor FLOP", [](const Counts& c) { return c.at("tensor_flops_f16"); }, 20971520},
    {"exponentials", [](const Counts& c) { return c.at("mufu_lanes"); }, 16384},
    {"FMA lanes", [](const Counts& c) { return c.at("fma_lanes"); }, 24832},
    {"ALU lanes", [](const Counts& c) { return c.at("alu_lanes"); }, 217719},
    {"warp instructions", [](const Counts& c) { return c.at("warp_instructions"); }, 10012},
    {"read by products", [](const Counts& c) { return c.at("shared_tensor_read_bytes"); }, 294912},
    {"written by threads", [](const Counts& c) { return c.at("shared_write_bytes"); }, 98304},
    {"read by threads", [](const Counts& c) { return c.at("shared_read_bytes"); }, 131072},
    {"read by bulk reductions", [](const Counts& c) { return c.at("tma_store_bytes"); }, 65536},
    {"products, dS, exchange, dq", shared_bytes, 458752},
    {"copies into shared memory",
     [](const Counts& c) { return c.at("tma_load_bytes") + c.at("cp_async_bytes"); }, 66560},
    {"dq into global memory",
     [](const Counts& c) { return c.at("tma_store_bytes") + 4.0 * c.at("atomics"); }, 65536},
    {"tensor memory, read", [](const Counts& c) { return c.at("tensor_memory_read_bytes"); },
     2654208, dscores_bytes},
    {"tensor memory, written", [](const Counts& c) { return c.at("tensor_memory_write_bytes"); },
     2654208, dscores_bytes},
    {"both memories", bytes_of_both_memories, 851968}};

void expect_no_more_than_example77(const Counts& counts) {
  for (const Ceiling& ceiling : ceilings) {
    EXPECT_LE(ceiling.count(counts), ceiling.example77 + ceiling.more) << ceiling.name;
  }
  // What is more there is less here, in the unit that binds.
  const double saved = 294912 - counts.at("shared_tensor_read_bytes");
  EXPECT_GE(saved, counts.at("tensor_memory_operand_bytes") - dscores_bytes);
}

// Rows of the table in docs/kernels/bwd_sm100.md. bench/blackwell_counts.py adds those of others.
TEST(BackwardCounts, KeepTheBudgetAndTheDistances) {
  const Counts one = count_tile("sm_100a", 128, false);
  const Counts pair = count_tile("sm_100a", 128, true);
  const Counts narrow = count_tile("sm_100a", 64, false);
  const Counts wide = count_tile("sm_100a", 192, false);
  const Counts hopper = count_tile("sm_90a", 128, false);
  const std::pair<const char*, const Counts*> columns[] = {{"d=128", &one},
                                                           {"d=128, pair", &pair},
                                                           {"d=64", &narrow},
                                                           {"192/128", &wide},
                                                           {"Hopper, d=128", &hopper}};
  for (const auto& [name, counts] : columns) {
    std::printf("counts %s\n", json{{"name", name}, {"counts", *counts}}.dump().c_str());
  }
  constexpr double flops = 10.0 * 128 * 128 * 128;
  EXPECT_EQ(one.at("tensor_flops_f16"), flops);
  EXPECT_EQ(pair.at("tensor_flops_f16"), flops);
  EXPECT_EQ(hopper.at("tensor_flops_f16"), flops);
  EXPECT_EQ(one.at("mufu_lanes"), 128.0 * 128);
  EXPECT_EQ(pair.at("mufu_lanes"), 128.0 * 128);
  // The budget: cycles of shared memory at 128 bytes each.
  EXPECT_EQ(one.at("shared_tensor_read_bytes"), 2048.0 * 128);
  EXPECT_EQ(pair.at("shared_tensor_read_bytes"), 1536.0 * 128);
  EXPECT_EQ(shared_bytes(one), 3072.0 * 128);
  EXPECT_EQ(shared_bytes(pair), 2432.0 * 128);
  EXPECT_EQ(shared_bytes(narrow), 1920.0 * 128);
  EXPECT_EQ(shared_bytes(wide), 4096.0 * 128);
  EXPECT_LE(shared_bytes(pair), 0.81 * shared_bytes(one));
  EXPECT_LE(shared_bytes(one), 0.6 * shared_bytes(hopper));
  expect_no_more_than_example77(one);
  expect_no_more_than_example77(pair);
  // Three quarters of dq go by bulk reduction, a quarter from registers.
  EXPECT_EQ(2.0 * pair.at("tma_store_bytes"), one.at("tma_store_bytes"));
  EXPECT_EQ(one.at("tma_store_bytes"), 0.75 * 128 * 128 * 4);
}

// ---- Fault injection ----------------------------------------------------------------------------

constexpr Explained harmless[] = {
    {"barrier: warp", "no lane falls a phase", "the emulator runs the lanes of a warp together"},
    {"barrier: warp", "before the aligned barrier",
     "the emulator joins the sides of a branch where they meet"},
    {"barrier: warp", "other arrivals follow the next",
     "what reads the tile also waits for rows, which this warp brings after it has met"},
    {"fence: proxy", "fence_proxy_async_shared();  // dq alone",
     "dq comes after dS, for which the computing warps have fenced all that they know"},
    {"wait: bulk", "if (!C.deterministic && adds) bulk_wait_read<0>();",
     "the emulator keeps the memory of a CTA that has ended"},
};

struct FaultCase {
  const char* name;
  bool pair, turns;
  BackwardShape shape;
};

class BackwardFaults : public testing::TestWithParam<FaultCase> {};

TEST_P(BackwardFaults, AreReported) {
  BackwardInputs inputs(GetParam().shape);
  inputs.problem.deterministic = GetParam().turns;
  const BackwardRun run{GetParam().shape};
  const BackwardFaultBench bench("emulated:sm_100a", configure(inputs, GetParam().pair), {&run, 1});
  // Every so many of them: all take minutes. FOVEA_TEST_SAMPLE=1 is all.
  const char* sample = std::getenv("FOVEA_TEST_SAMPLE");
  const std::size_t stride = sample != nullptr ? std::stoul(sample) : 9;
  const FaultTable::Row all = bench.break_kernel(stride, harmless).all();
  EXPECT_EQ(all.wrong_only, 0) << "a wrong result must not pass unreported";
  EXPECT_EQ(all.reported + all.explained, all.total);
  // Of a sample of few, one may be a good part.
  const int floor = stride == 1 ? 95 : 75;
  EXPECT_GE(100 * all.reported, floor * all.total);
}

// Rings go round; rows and keys end inside tiles, so that the clearing of them can be broken. In
// turns several tiles of keys add to a block of rows.
INSTANTIATE_TEST_SUITE_P(
    Forms, BackwardFaults,
    testing::Values(FaultCase{"one_cta_turns", false, true, {.seqlen_q = 440, .seqlen_k = 200}},
                    FaultCase{"one_cta", false, false, {.seqlen_q = 440, .seqlen_k = 100}},
                    FaultCase{"pair_turns", true, true, {.seqlen_q = 340, .seqlen_k = 300}},
                    FaultCase{"pair", true, false, {.seqlen_q = 440, .seqlen_k = 200}}),
    [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace fovea::tests
