// Plans: what is chosen and why, and what run() holds them to.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fovea/fovea.hpp"
#include "tests/runtime_setup.h"
#include "tests/sentence.h"
#include "tests/tolerance.h"

namespace {
thread_local long allocations = 0;
}  // namespace

// Every allocation of this program by operator new is counted. Not inlined, so that no compiler
// sees malloc() on one side of a pair and operator delete on the other.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace fovea::test {
namespace {

struct Prepared {
  explicit Prepared(const Problem& problem, const Options& options = {})
      : chosen(plan(problem, options)), workspace(chosen.workspace_bytes()) {}
  void run(const Problem& problem, Statistics* statistics = nullptr) {
    chosen.run(problem, workspace, statistics);
  }
  Plan chosen;
  std::vector<std::byte> workspace;
};

TEST(Plan, RunsAgainWithOtherPointersStridesAndDropoutSeed) {
  SmallCall first;
  Prepared prepared(first.problem);
  prepared.run(first.problem);
  SmallCall second;
  Placement heads_first;
  heads_first.order = {0, 2, 1, 3};
  heads_first.offset = 1;
  const HostTensor other(DType::f32, {2, 3, 4, 6}, heads_first);
  second.problem.out = other.tensor();
  second.problem.dropout.seed = 5;
  second.problem.dropout.offset = 6;
  prepared.run(second.problem);
  EXPECT_TRUE(same_bits(first.out.bytes(), other.bytes()));
  EXPECT_EQ(other.foreign_bytes_changed(), 0);
}

TEST(Plan, RunsWithOtherLengthsWithinItsBounds) {
  SmallCall call(Kind::varlen);
  call.problem.bias = call.problem.mask = {};
  call.problem.max_seqlen_q = 4;
  call.problem.max_seqlen_k = 6;
  Prepared prepared(call.problem);
  call.problem.cu_seqlens_q = call.keep({0, 4, 4});
  call.problem.cu_seqlens_k = call.keep({0, 3, 9});
  prepared.run(call.problem);
  const Reference exact = reference(call.problem);
  const Reference naive = reference(call.problem, Precision::same);
  EXPECT_TRUE(close_to(call.out.values(), exact.out, naive.out,
                       out_floor(DType::f32, DType::f32, exact.out)));
  EXPECT_TRUE(close_to(call.lse.values(), exact.lse, naive.lse, lse_floor()));
}

TEST(Plan, RunsWithOtherPagesAndLengths) {
  SmallCall call(Kind::paged);
  Prepared prepared(call.problem);
  call.problem.block_table = call.keep({3, 1, 4, -9, 6, 2});
  call.problem.seqused_k = call.keep({12, 0});
  prepared.run(call.problem);
  const Reference exact = reference(call.problem);
  const Reference naive = reference(call.problem, Precision::same);
  EXPECT_TRUE(close_to(call.out.values(), exact.out, naive.out,
                       out_floor(DType::f32, DType::f32, exact.out)));
  EXPECT_TRUE(close_to(call.lse.values(), exact.lse, naive.lse, lse_floor()));
}

struct Mismatch {
  const char* name;
  Kind kind;
  std::function<void(SmallCall&, Problem&)> change;  // after planning
  std::vector<std::string> fragments;
};

const Mismatch mismatches[] = {
    {"shape",
     Kind::dense,
     [](SmallCall&, Problem& p) {
       p.bias = p.mask = {};
       p.k.shape[1] = p.v.shape[1] = 4;
     },
     {"k has shape (2, 4, 2, 8) but the plan was made for (2, 5, 2, 8)"}},
    {"absent",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.sink = {}; },
     {"sink is absent but the plan was made with it"}},
    {"broadcast_bias",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.bias.shape[1] = 1; },
     {"bias has shape (2, 1, 3, 5)"}},
    {"causal",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.causal = true; },
     {"window_right (0 if causal) is 0 but the plan was made for -1"}},
    {"window",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.window_left = 2; },
     {"window_left is 2 but the plan was made for -1"}},
    {"scale",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softmax_scale = 0.25f; },
     {"softmax_scale is 0.25"}},
    {"softcap", Kind::dense, [](SmallCall&, Problem& p) { p.softcap = 30.0f; }, {"softcap is 30"}},
    {"dropout",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.dropout.probability = 0.5f; },
     {"dropout.probability is 0.5"}},
    {"num_splits",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.num_splits = 3; },
     {"num_splits is 3"}},
    {"deterministic",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.deterministic = true; },
     {"deterministic is 1"}},
    {"longer_queries",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.bias.shape[2] = p.mask.shape[2] = 1;
       p.cu_seqlens_q = c.keep({0, 0, 5});
     },
     {"bias has shape (2, 4, 1, 5)"}},
    {"fewer_sequences",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.bias.shape[0] = p.alibi.shape[0] = 1;
       p.cu_seqlens_q = c.keep({0, 3});
       p.cu_seqlens_k = c.keep({0, 5});
     },
     {"bias has shape (1, 4, 3, 5)"}},
    {"varlen_keys",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_q = c.keep({0, 3, 6});
       p.cu_seqlens_k = {};
       p.k.shape[0] = p.v.shape[0] = 2;
       p.k.shape[1] = p.v.shape[1] = 5;
     },
     {"k has shape (2, 5, 2, 8)"}},
};

TEST(Plan, RefusesAnotherProblemAndWritesNothing) {
  for (const Mismatch& mismatch : mismatches) {
    SCOPED_TRACE(mismatch.name);
    SmallCall call(mismatch.kind);
    const std::vector<std::byte> before = call.out.buffer();
    Prepared prepared(call.problem);
    mismatch.change(call, call.problem);
    const std::string sentence = sentence_of([&] { prepared.run(call.problem); });
    for (const std::string& fragment : mismatch.fragments) expect_in(sentence, fragment);
    EXPECT_TRUE(same_bits(call.out.buffer(), before));
  }
}

TEST(Plan, RefusesLongerSequencesThanItWasMadeFor) {
  SmallCall call(Kind::varlen);
  call.problem.bias = call.problem.mask = {};
  Prepared prepared(call.problem);
  Problem longer = call.problem;
  longer.cu_seqlens_q = call.keep({0, 1, 5});
  expect_in(sentence_of([&] { prepared.run(longer); }),
            "longest query sequence has 4 rows but the plan was made for at most 3");
  longer = call.problem;
  longer.cu_seqlens_k = call.keep({0, 3, 10});
  expect_in(sentence_of([&] { prepared.run(longer); }),
            "longest key sequence has 7 keys but the plan was made for at most 5");
  longer = call.problem;
  longer.cu_seqlens_q = call.keep({0, 3});
  longer.cu_seqlens_k = call.keep({0, 5});
  longer.alibi.shape[0] = 1;
  Problem planned = call.problem;
  planned.alibi.shape[0] = 1;
  Prepared two(planned);
  expect_in(sentence_of([&] { two.run(longer); }),
            "the number of sequences is 1 but the plan was made for 2");
}

TEST(Plan, RefusesASmallOrSharedWorkspace) {
  SmallCall call;
  const Plan chosen = plan(call.problem);
  const std::size_t needed = chosen.workspace_bytes();
  ASSERT_GT(needed, 0u);
  const std::vector<std::byte> before = call.out.buffer();
  std::vector<std::byte> workspace(needed);
  const auto small = std::span(workspace).first(needed - 1);
  expect_in(sentence_of([&] { chosen.run(call.problem, small); }),
            "workspace has " + std::to_string(needed - 1) + " bytes; it must have at least " +
                std::to_string(needed));
  expect_in(sentence_of([&] { chosen.run(call.problem, {}); }), "workspace has 0 bytes");
  EXPECT_TRUE(same_bits(call.out.buffer(), before));
  Problem inside = call.problem;
  std::vector<std::byte> both(needed + 4 * 144);
  inside.out.data = both.data() + needed / 8 * 4;
  expect_in(sentence_of([&] { chosen.run(inside, both); }), "workspace shares memory with out");
}

TEST(Plan, WorkspaceNeedsNoAlignment) {
  SmallCall call;
  const Plan chosen = plan(call.problem);
  attention(call.problem);
  const std::vector<std::byte> expected = call.out.bytes();
  call.out.poison();
  std::vector<std::byte> workspace(chosen.workspace_bytes() + 1);
  chosen.run(call.problem, std::span(workspace).subspan(1));
  EXPECT_TRUE(same_bits(call.out.bytes(), expected));
}

TEST(Plan, RunAllocatesNothing) {
  for (const Kind kind : {Kind::dense, Kind::varlen, Kind::paged}) {
    SmallCall call(kind);
    Prepared prepared(call.problem);
    prepared.run(call.problem);
    const long before = allocations;
    prepared.run(call.problem);
    EXPECT_EQ(allocations - before, 0);
  }
}

TEST(Plan, RunsInSeveralThreadsAtOnce) {
  SmallCall call;
  const Plan chosen = plan(call.problem);
  attention(call.problem);
  std::vector<HostTensor> outs;
  for (int i = 0; i < 4; ++i) outs.emplace_back(DType::f32, Shape{2, 3, 4, 6});
  std::vector<std::thread> threads;
  for (const HostTensor& out : outs) {
    threads.emplace_back([&call, &chosen, &out] {
      std::vector<float> lse(24);
      Problem problem = call.problem;
      problem.out = out.tensor();
      problem.lse.data = lse.data();
      std::vector<std::byte> workspace(chosen.workspace_bytes());
      for (int repeat = 0; repeat < 20; ++repeat) chosen.run(problem, workspace);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const HostTensor& out : outs) EXPECT_TRUE(same_bits(out.bytes(), call.out.bytes()));
}

TEST(Plan, FillsStatistics) {
  SmallCall call;
  Statistics statistics;
  statistics.tiles_full = -1;
  statistics.splits = -1;
  attention(call.problem, {}, &statistics);
  EXPECT_GE(statistics.tiles_full, 0);
  EXPECT_GT(statistics.tiles_full + statistics.tiles_partial, 0);
  EXPECT_EQ(statistics.splits, 1);
}

TEST(Plan, ExplainsTheChoiceAndTheOthers) {
  SmallCall call;
  Options options;
  options.threads = 2;
  options.softmax = Softmax::conditional;
  const Plan chosen = plan(call.problem, options);
  EXPECT_EQ(chosen.device(), Device::cpu);
  const std::string text = chosen.explain();
  for (const char* fragment :
       {"cpu", "2 threads", "keys", "splits", "conditional", "workspace",
        "not cuda: it was not asked for", "not emulated:sm_90a: it computes bf16"}) {
    expect_in(text, fragment);
  }
  expect_in(text, std::to_string(chosen.workspace_bytes()) + " bytes");
  expect_in(text, std::string(cpu_instruction_set()));
}

TEST(Plan, RefusesDevicesWithTheReasonAndWhatWouldWork) {
  SmallCall call;
  for (const Device device : {Device::cuda, Device::emulated_sm90a, Device::emulated_sm100a}) {
    Options options;
    options.device = device;
    EXPECT_THROW(static_cast<void>(plan(call.problem, options)), Unsupported);
    const std::string sentence =
        sentence_of([&] { static_cast<void>(plan(call.problem, options)); });
    expect_in(sentence, "device " + std::string(name(device)) + " does not compute this problem");
    // Here is no GPU, or one whose kernels decline fp32; the emulated ones decline it anyway.
    expect_in(sentence, device == Device::cuda ? "device" : "bf16 and f16");
    expect_in(sentence, "device cpu does");
  }
}

TEST(Plan, RefusesSplitKeysInEightBitsAndSaysWhatWouldWork) {
  SmallCall call(Kind::dense, DType::e4m3);
  const HostTensor out(DType::f32, {2, 3, 4, 6});
  call.problem.out = out.tensor();
  EXPECT_EQ(plan(call.problem).device(), Device::cpu);
  call.problem.num_splits = 2;
  Options options;
  options.device = Device::emulated_sm90a;
  EXPECT_THROW(static_cast<void>(plan(call.problem, options)), Unsupported);
  const std::string sentence = sentence_of([&] { static_cast<void>(plan(call.problem, options)); });
  expect_in(sentence, "does not split keys but num_splits is 2");
  expect_in(sentence, "device cpu does");
}

TEST(Plan, RefusesBadOptions) {
  SmallCall call;
  Options options;
  options.threads = -1;
  expect_in(sentence_of([&] { static_cast<void>(plan(call.problem, options)); }),
            "options.threads is -1");
  options.threads = 1025;
  expect_in(sentence_of([&] { static_cast<void>(plan(call.problem, options)); }),
            "options.threads is 1025");
  options = {};
  options.device = static_cast<Device>(77);
  expect_in(sentence_of([&] { static_cast<void>(plan(call.problem, options)); }),
            "options.device is 77");
  options = {};
  options.softmax = static_cast<Softmax>(9);
  expect_in(sentence_of([&] { static_cast<void>(plan(call.problem, options)); }),
            "options.softmax is 9");
}

TEST(Plan, MovedFromIsRefusedNotDereferenced) {
  SmallCall call;
  Plan first = plan(call.problem);
  const Plan second = std::move(first);
  EXPECT_GT(second.workspace_bytes(), 0u);
  // NOLINTNEXTLINE(bugprone-use-after-move): what happens then is the point
  expect_in(sentence_of([&] { static_cast<void>(first.workspace_bytes()); }), "plan is empty");
}

// Every option changes the result: none is dropped on the way to the backend.
TEST(Plan, EveryOptionReachesTheBackend) {
  const std::vector<std::pair<const char*, std::function<void(Problem&)>>> changes = {
      {"scale", [](Problem& p) { p.softmax_scale = 0.0f; }},
      {"causal", [](Problem& p) { p.causal = true; }},
      {"window_left", [](Problem& p) { p.window_left = 0; }},
      {"window_right", [](Problem& p) { p.window_right = 0; }},
      {"softcap", [](Problem& p) { p.softcap = 0.5f; }},
      {"dropout", [](Problem& p) { p.dropout.probability = 0.5f; }},
      {"bias", [](Problem& p) { p.bias = {}; }},
      {"mask", [](Problem& p) { p.mask = {}; }},
      {"sink", [](Problem& p) { p.sink = {}; }},
      {"alibi", [](Problem& p) { p.alibi = {}; }},
  };
  for (const Kind kind : {Kind::dense, Kind::varlen, Kind::paged}) {
    SmallCall call(kind);
    attention(call.problem);
    const std::vector<std::byte> before = call.out.bytes();
    for (const auto& [option, change] : changes) {
      SCOPED_TRACE(option);
      Problem problem = call.problem;
      change(problem);
      call.out.poison();
      attention(problem);
      EXPECT_FALSE(call.out.bytes() == before);
      const Reference exact = reference(problem);
      const Reference naive = reference(problem, Precision::same);
      EXPECT_TRUE(close_to(call.out.values(), exact.out, naive.out,
                           out_floor(DType::f32, DType::f32, exact.out)));
    }
  }
}

TEST(Version, IsThree) {
  const std::string text(version());
  int dots = 0;
  for (const char c : text) {
    if (c == '.') {
      ++dots;
    } else {
      EXPECT_TRUE(c >= '0' && c <= '9') << text;
    }
  }
  EXPECT_EQ(dots, 2) << text;
}

}  // namespace
}  // namespace fovea::test
