// Fault injection into the forward kernels: waits, arrivals, fences and barriers broken once each,
// and run by the emulator. Of Hopper's all, of Blackwell's, in 16 and in 8 bits, a share drawn by a
// seed, or all (FOVEA_ALL_FAULTS=1). Prints a table, and every fault that goes unnoticed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/fp8.h"
#include "core/numeric.h"
#include "cpu/quantize.h"
#include "fovea/fovea.hpp"
#include "runtime/disk_cache.h"
#include "runtime/forward_fp8.h"
#include "runtime/forward_gpu.h"
#include "runtime/source.h"
#include "tests/explained.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using core::int64;
using runtime::DeviceBuffer;

constexpr core::int32 head_dim = 64;

// On a chip of one SM all tiles fall to one CTA, so that every ring goes round from tile to tile.
// Neither the last keys nor the last queries fill a block. First tiles of several blocks, then many
// tiles of a single one, then many of several, and then tiles of which two blocks have hidden keys:
// where only one has, a warpgroup that leaves out a wait is covered by the other's, in its turn.
struct Shape {
  core::int32 batch;
  int64 seqlen_q;
  int64 seqlen_k;
};
constexpr Shape shapes[] = {{1, 300, 300}, {5, 40, 40}, {2, 600, 600}, {1, 300, 332}};

core::Problem problem(const Shape& shape) {
  core::Problem p;
  p.batch = shape.batch;
  p.seqlen_q = shape.seqlen_q;
  p.seqlen_k = shape.seqlen_k;
  p.heads_q = p.heads_kv = 1;
  p.head_dim = p.head_dim_v = head_dim;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = core::DType::bf16;
  for (core::View* view : {&p.q, &p.k, &p.v, &p.out}) {
    const int64 rows = view == &p.k || view == &p.v ? shape.seqlen_k : shape.seqlen_q;
    const int64 stride[4] = {rows * head_dim, head_dim, head_dim, 1};
    std::copy(std::begin(stride), std::end(stride), view->stride);
  }
  p.softmax_scale = 0.5f;
  p.window.right = 0;
  return p;
}

// q, k and v of a shape, and what quantisation makes of them.
struct Input {
  core::Problem problem;
  std::vector<core::uint16> values[3];
  std::vector<core::uint8> q_codes, k_codes, v_codes;
  std::vector<float> q_scale;
  std::vector<core::KeyScale> key_scale;

  explicit Input(const Shape& shape) : problem(tests::problem(shape)) {
    core::View* const views[] = {&problem.q, &problem.k, &problem.v};
    for (std::size_t index = 0; index < 3; ++index) {
      const auto count = static_cast<std::size_t>(problem.batch * views[index]->stride[0]);
      values[index].resize(count);
      views[index]->data = values[index].data();
      std::mt19937_64 random(index);
      std::uniform_real_distribution<double> uniform(-1.0, 1.0);
      for (std::size_t i = 0; i < count; ++i) {
        // Later keys outgrow the first, so that outputs are rescaled.
        const double along = static_cast<double>(i) / static_cast<double>(count);
        const double size = index == 1 ? 1.0 + 4.0 * along : 1.0;
        values[index][i] = core::float_to_bf16(static_cast<float>(size * uniform(random)));
      }
    }
    const core::Fp8Layout layout = core::fp8_layout(problem);
    q_codes.resize(static_cast<std::size_t>(layout.q_bytes));
    k_codes.resize(static_cast<std::size_t>(layout.k_bytes));
    v_codes.resize(static_cast<std::size_t>(layout.v_bytes));
    q_scale.resize(static_cast<std::size_t>(layout.q_scale_bytes) / sizeof(float));
    key_scale.resize(static_cast<std::size_t>(layout.key_scale_bytes) / sizeof(core::KeyScale));
    cpu::quantize(
        problem, {core::ScaleGranularity::block, true, 7, core::DType::e4m3},
        {q_codes.data(), k_codes.data(), v_codes.data(), q_scale.data(), key_scale.data()});
  }

  std::size_t count() const {
    return static_cast<std::size_t>(problem.batch * problem.seqlen_q * head_dim);
  }
};

runtime::EmulationOptions on_one_sm(runtime::EmulationOptions::Order order, std::uint64_t seed) {
  runtime::EmulationOptions options;
  options.order = order;
  options.seed = seed;
  options.sm_count = 1;
  return options;
}

// A kernel, of 8 bits where its configuration says so, whose text is exchanged in the cache that
// it is loaded from.
class Bench {
  bool is_eight_bit() const {
    return std::visit([](const auto& c) { return core::is_eight_bit(c.dtype); }, config_);
  }

  template <typename Use>
  auto with_kernel(runtime::Device& device, const Use& use) const {
    runtime::Jit jit({folder_.path(), cache_bytes});
    return is_eight_bit() ? use(runtime::ForwardFp8Kernel(device, config_, jit))
                          : use(runtime::ForwardKernel(device, config_, jit));
  }

 public:
  Bench(const runtime::ForwardConfig& config, std::string device)
      : config_(config), device_(std::move(device)) {
    for (const Shape& shape : shapes) inputs_.emplace_back(shape);
    const auto opened = runtime::open_device(device_);
    original_ =
        with_kernel(*opened, [](const auto& kernel) { return kernel.compiled().image->bytes; });
    for (const auto& file : std::filesystem::directory_iterator(folder_.path())) {
      const std::string name = file.path().stem().string();
      key_ = name.substr(0, name.find('-'));
      compiler_ = name.substr(name.find('-') + 1);
    }
    for (std::size_t i = 0; i < std::size(shapes); ++i) {
      run(original_, i, on_one_sm(runtime::EmulationOptions::Order::eager, 0));
      expected_[i] = output_;
    }
  }

  const std::string& original() const { return original_; }
  std::string kernel_name() const {
    return runtime::kernel_name(is_eight_bit() ? runtime::forward_fp8_text(config_)
                                               : runtime::forward_text(config_));
  }
  bool right(std::size_t shape) const { return output_ == expected_[shape]; }

  // Whether the emulator has something to say.
  bool run(const std::string& ptx, std::size_t shape, const runtime::EmulationOptions& options) {
    const runtime::DiskCache cache(folder_.path(), cache_bytes);
    cache.store(key_, compiler_, {ptx, ""});
    const auto device = runtime::open_device(device_, options);
    const Input& input = inputs_[shape];
    std::vector<DeviceBuffer> memory;
    const auto upload = [&](const auto& list) {
      const std::size_t bytes = list.size() * sizeof(list[0]);
      memory.emplace_back(*device, bytes);
      device->copy_to_device(memory.back().address(), list.data(), bytes);
      return memory.back().address();
    };
    runtime::ForwardCall call;
    call.problem = input.problem;
    output_.assign(input.count(), 0);
    const runtime::DeviceAddress out = upload(output_);
    call.problem.out.data = reinterpret_cast<void*>(out);
    call.scheduler = upload(std::array<core::uint32, 2>{});
    runtime::Fp8Operands codes;
    if (is_eight_bit()) {
      codes = {upload(input.q_codes), upload(input.k_codes), upload(input.v_codes),
               upload(input.q_scale), upload(input.key_scale)};
    } else {
      call.problem.q.data = reinterpret_cast<void*>(upload(input.values[0]));
      call.problem.k.data = reinterpret_cast<void*>(upload(input.values[1]));
      call.problem.v.data = reinterpret_cast<void*>(upload(input.values[2]));
    }
    const auto launch = [&](const auto& kernel) {
      if constexpr (std::is_same_v<decltype(kernel), const runtime::ForwardFp8Kernel&>) {
        kernel.run(call, codes);
      } else {
        kernel.run(call);
      }
      return true;
    };
    try {
      with_kernel(*device, launch);
    } catch (const DeviceError&) {
      return true;
    }
    device->copy_to_host(output_.data(), out, 2 * output_.size());
    return false;
  }

 private:
  static constexpr std::uint64_t cache_bytes = std::uint64_t{1} << 30;
  TemporaryFolder folder_;
  runtime::ForwardConfig config_;
  std::string device_;
  std::vector<Input> inputs_;
  std::string original_, key_, compiler_;
  std::vector<core::uint16> output_;
  std::array<std::vector<core::uint16>, std::size(shapes)> expected_;
};

FaultOutcome outcome_of(Bench& bench, const Mutant& mutant) {
  using Order = runtime::EmulationOptions::Order;
  const runtime::EmulationOptions orders[] = {on_one_sm(Order::lazy, 1), on_one_sm(Order::eager, 1),
                                              on_one_sm(Order::random, 2),
                                              on_one_sm(Order::random, 3)};
  bool wrong = false, reached = false;
  for (std::size_t shape = 0; shape < std::size(shapes); ++shape) {
    for (const runtime::EmulationOptions& order : orders) {
      if (bench.run(mutant.ptx, shape, order)) return FaultOutcome::reported;
      wrong = wrong || !bench.right(shape);
    }
    reached = reached || bench.run(mutant.trapped, shape, orders[0]);
  }
  if (wrong) return FaultOutcome::wrong;
  return reached ? FaultOutcome::unnoticed : FaultOutcome::unreached;
}

constexpr Explained harmless[] = {
    {"barrier: warp", "before the aligned barrier",
     "the emulator joins the sides of a branch where they meet"},
    {"barrier: warp", "all lanes read it", "the emulator runs the lanes of a warp together"},
    {"barrier: warp", "arrive_for_products<C>(plan.output_ring[t].free[0])",
     "all lanes have met to stage that output"},
    {"barrier: warp", "if (has_output) {", "all lanes have met to stage that output"},
    {"barrier: warp", "arrive_warp(plan.row_ring[t].free[0])",
     "all lanes meet to stage the output before those rows are written again"},
    {"wait: mbarrier", "plan.out_ring[t].wait_free",
     "until the next tile of this place is staged, the number of the store is in use again"},
};

// Breaks the bench's kernel in every way, or in one of `share` drawn by a seed. Prints the table
// and what goes unnoticed.
FaultTable break_kernel(Bench& bench, std::uint64_t share) {
  FaultTable table;
  std::mt19937_64 random(7);
  for (const Mutant& mutant : mutants_of(bench.original(), bench.kernel_name())) {
    if (random() % share != 0) continue;
    const FaultOutcome outcome = outcome_of(bench, mutant);
    const char* reason = explanation(mutant, harmless);
    table.add(mutant.kind, outcome, reason != nullptr);
    if (outcome == FaultOutcome::reported) continue;
    std::printf("%s: line %d [%s] %s%s%s\n", name(outcome), mutant.line, mutant.kind.c_str(),
                mutant.where.c_str(), reason != nullptr ? ": " : "",
                reason != nullptr ? reason : "");
  }
  std::printf("%s", table.text().c_str());
  EXPECT_EQ(table.all().wrong_only, 0) << "a wrong result must not pass unreported";
  return table;
}

FaultTable::Row break_hopper(core::int32 tile_k) {
  core::FwdConfig config =
      runtime::choose_forward_sm90(problem(shapes[0]), core::SoftmaxPolicy::sum_guard);
  config.warpgroups = 2;
  config.tile_k = tile_k;
  config.stages = 2;  // so that the rings go round
  Bench bench(config, "emulated:sm_90a");
  return break_kernel(bench, 1).all();
}

// Of seven that go unnoticed five are no faults, and two are barriers inside a warp
// (docs/emulator.md says which).
TEST(ForwardFaults, NearlyEveryOneIsReported) {
  const FaultTable::Row all = break_hopper(64);
  EXPECT_GE(all.reported, all.total - 7);
}

// Blocks of 128 keys, of which one of two warpgroups takes the first half alone. One more goes
// unnoticed in further masked blocks, which few tiles have at that length.
TEST(ForwardFaults, NearlyEveryOneIsReportedWhereFirstBlocksAreHalved) {
  const FaultTable::Row all = break_hopper(128);
  EXPECT_GE(all.reported, all.total - 8);
}

// With q in registers, whose memory is given back at once. Five go unnoticed: the fence in front of
// a block's second product, twice, since nothing has been written behind the first one's; the wait
// for values of a block that hides none; a barrier inside a warp, whose lanes run together; and one
// where scores are taken again, which these keys do not lead to.
TEST(ForwardFaults, NearlyEveryOneIsReportedIn8Bits) {
  core::FwdConfig config = runtime::choose_forward_fp8_sm90(
      problem(shapes[0]), core::SoftmaxPolicy::sum_guard, 0, core::DType::e4m3);
  ASSERT_TRUE(config.q_in_registers);
  config.warpgroups = 2;
  config.tile_k = 64;
  config.stages = 2;
  Bench bench(config, "emulated:sm_90a");
  const FaultTable table = break_kernel(bench, 1);
  EXPECT_GE(table.all().reported, table.all().total - 5);
}

// Blackwell's kernel has three times as many such instructions: one in so many is broken, unless
// all are asked for.
void break_blackwell(const core::Fwd100Config& config, std::uint64_t share) {
  Bench bench(config, "emulated:sm_100a");
  const bool every = std::getenv("FOVEA_ALL_FAULTS") != nullptr;
  const FaultTable::Row all = break_kernel(bench, every ? 1 : share).all();
  EXPECT_EQ(all.reported + all.explained, all.total);
  EXPECT_GT(all.total, 10);
  // A draw of few may be less lucky.
  EXPECT_GE(100 * all.reported, (every ? 95 : 85) * all.total);
}

TEST(ForwardFaults, NearlyEveryOneIsReportedOnBlackwell) {
  core::Fwd100Config config = runtime::choose_forward_sm100(
      problem(shapes[0]), core::SoftmaxPolicy::conditional, "sm_100a");
  config.stages = 2;
  break_blackwell(config, 6);
}

core::Fwd100Config eight_bits(core::SoftmaxPolicy softmax) {
  core::Fwd100Config config =
      runtime::choose_forward_fp8_sm100(problem(shapes[0]), softmax, "sm_100a", core::DType::e4m3);
  config.stages = 2;
  return config;
}

TEST(ForwardFaults, NearlyEveryOneIsReportedOnBlackwellIn8Bits) {
  break_blackwell(eight_bits(core::SoftmaxPolicy::conditional), 12);
}

TEST(ForwardFaults, NearlyEveryOneIsReportedOnBlackwellIn8BitsGuarded) {
  break_blackwell(eight_bits(core::SoftmaxPolicy::sum_guard), 6);
}

}  // namespace
}  // namespace fovea::tests
