// What an engine relies on when it calls a GPU through plan() and run(): streams, graphs, threads,
// workspaces, sizes beyond what fits 16 bits, and faults told before anything is launched. On the
// emulated Hopper chip; FOVEA_TEST_DEVICE=cuda runs it on a GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <thread>
#include <vector>

#include "fovea/fovea.h"
#include "tests/device_call.h"
#include "tests/sentence.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

Device gpu() { return test_device() == Device::cpu ? Device::emulated_sm90a : test_device(); }

Options gpu_options() {
  Options options;
  options.device = gpu();
  return options;
}

CaseSpec bf16_case(const char* name) {
  CaseSpec spec;
  spec.name = name;
  spec.dtype = DType::bf16;
  spec.sk = 200;
  spec.causal = true;
  return spec;
}

TEST(GpuPlan, ChoosesTheGpuForDeviceMemoryByItself) {
  Call call(bf16_case("automatic"));
  DeviceCall there(call, gpu());
  if (gpu() == Device::cuda) {
    EXPECT_EQ(plan(there.problem).device(), Device::cuda);
  } else {
    const std::string sentence = sentence_of([&] { static_cast<void>(plan(there.problem)); });
    expect_in(sentence, "not cpu (it computes in host memory");
  }
  EXPECT_EQ(plan(call.problem).device(), Device::cpu);
}

TEST(GpuPlan, ExplainsItsKernel) {
  Call call(bf16_case("explain"));
  const std::string text = plan(call.problem, gpu_options()).explain();
  for (const char* fragment : {"kernel     forward", "tiles", "softmax    sum_guard", "workspace",
                               "memory     host", "not cpu: another device was asked for"}) {
    expect_in(text, fragment);
  }
}

TEST(GpuPlan, KeepsItsOwnWorkspace) {
  Call call(bf16_case("own"));
  DeviceCall there(call, gpu());
  Options options = gpu_options();
  options.own_workspace = true;
  const Plan chosen = plan(there.problem, options);
  EXPECT_EQ(chosen.workspace_bytes(), 0u);
  std::vector<std::byte> first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    there.run(chosen);
    there.fetch();
    if (repeat == 0) first = call.out.bytes();
    EXPECT_TRUE(same_bits(call.out.bytes(), first));
  }
  call.expect_matches_oracle();
  expect_in(sentence_of([&] { static_cast<void>(plan(call.problem, options)); }),
            "options.own_workspace is set but memory is host");
}

TEST(GpuPlan, CountsRepairsFromZeroInEveryRun) {
  CaseSpec spec = bf16_case("counts");
  spec.causal = false;
  spec.sk = 600;
  Call call(spec);
  // Logits that rise by 10 from key block to key block, in the order of visiting: the last first.
  call.fill_q([](Index, Index, Index, Index d) { return d == 0 ? 8.0 : 0.0; });
  call.fill_k([](Index, Index j, Index, Index d) {
    const Index block = j / 128;
    return d == 0 ? -10.0 * static_cast<double>(block) : 0.0;
  });
  DeviceCall there(call, gpu());
  Options options = gpu_options();
  options.softmax = Softmax::sum_guard;
  const Plan chosen = plan(there.problem, options);
  Statistics first;
  Statistics second;
  there.run(chosen, &first);
  there.run(chosen, &second);
  there.fetch();
  call.expect_matches_oracle();
  EXPECT_GT(first.repairs + first.recomputed_tiles, 0);
  EXPECT_EQ(first.repairs, second.repairs);
  EXPECT_EQ(first.recomputed_tiles, second.recomputed_tiles);
}

TEST(GpuPlan, SaysWhichAddressIsNotOfTheDevice) {
  Call call(bf16_case("address"));
  DeviceCall there(call, gpu());
  const Plan chosen = plan(there.problem, gpu_options());
  for (const auto& [name, tensor] : {std::pair{"q", &Problem::q}, std::pair{"v", &Problem::v},
                                     std::pair{"out", &Problem::out}}) {
    Problem problem = there.problem;
    problem.*tensor = call.problem.*tensor;
    const runtime::DeviceBuffer workspace(runtime::shared_device(gpu()), chosen.workspace_bytes());
    const std::string sentence = sentence_of([&] {
      chosen.run(problem, {reinterpret_cast<std::byte*>(workspace.address()), workspace.bytes()});
    });
    expect_in(sentence, std::string(name) + " has data at address");
    expect_in(sentence, "which is not memory of");
  }
}

TEST(GpuPlan, RefusesALayoutThatItWasNotMadeFor) {
  Call call(bf16_case("layout"));
  DeviceCall there(call, gpu());
  const Plan chosen = plan(there.problem, gpu_options());
  Problem problem = there.problem;
  problem.k.data = static_cast<std::byte*>(problem.k.data) + 2;
  const std::string sentence = sentence_of([&] {
    chosen.run(problem, {reinterpret_cast<std::byte*>(16), 1 << 20});
  });
  expect_in(sentence, "k is laid out in a way that the copy engine does not take");
  expect_in(sentence, "plan again");
}

TEST(GpuPlan, TakesTheLengthsOfDeviceMemoryAtTheirWord) {
  CaseSpec spec = bf16_case("lengths");
  spec.entry = Entry::varlen;
  spec.batch = 5;
  Call call(spec);
  DeviceCall there(call, gpu());
  // Without a bound on the lengths: every sequence may be as long as all of them.
  there.problem.max_seqlen_q = there.problem.max_seqlen_k = 0;
  there.run(plan(there.problem, gpu_options()));
  there.fetch();
  call.expect_matches_oracle();
  there.problem.max_seqlen_q = spec.sq;
  there.problem.max_seqlen_k = spec.sk;
  there.run(plan(there.problem, gpu_options()));
  there.fetch();
  call.expect_matches_oracle();
}

TEST(GpuPlan, RunsInSeveralThreadsAtOnce) {
  struct Worker {
    Call call;
    DeviceCall there;
    Plan chosen;
    runtime::DeviceBuffer workspace;
    runtime::Stream stream;
    explicit Worker(const CaseSpec& spec)
        : call(spec),
          there(call, gpu()),
          chosen(plan(there.problem, gpu_options())),
          workspace(runtime::shared_device(gpu()), chosen.workspace_bytes()),
          stream(runtime::shared_device(gpu()).create_stream()) {
      there.problem.stream = stream.handle;
    }
  };
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < 4; ++i) {
    CaseSpec spec = bf16_case(i % 2 == 0 ? "threads_even" : "threads_odd");
    spec.d = i % 2 == 0 ? 64 : 128;
    workers.push_back(std::make_unique<Worker>(spec));
  }
  std::vector<std::thread> threads;
  for (const auto& worker : workers) {
    threads.emplace_back([&worker = *worker] {
      for (int repeat = 0; repeat < 5; ++repeat) {
        worker.chosen.run(
            worker.there.problem,
            {reinterpret_cast<std::byte*>(worker.workspace.address()), worker.workspace.bytes()});
      }
      runtime::shared_device(gpu()).synchronize(worker.stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& worker : workers) {
    worker->there.fetch();
    worker->call.expect_matches_oracle();
    runtime::shared_device(gpu()).destroy(worker->stream);
  }
}

TEST(GpuSizes, MoreHeadsThan65535) {
  CaseSpec spec = bf16_case("many_heads");
  spec.batch = 1;
  spec.hq = 65600;
  spec.hkv = 1025;
  spec.sq = 1;
  spec.sk = 20;
  spec.d = 16;
  Call call(spec);
  call.device = gpu();
  call.run();
  call.expect_matches_oracle();
}

// Nearly all of the sequences are empty, on either side.
TEST(GpuSizes, MoreSequencesThan65535) {
  CaseSpec spec = bf16_case("many_sequences");
  spec.batch = 65600;
  spec.hq = spec.hkv = 1;
  spec.sq = spec.sk = 3;
  spec.d = 16;
  spec.entry = Entry::varlen;
  spec.lengths_q.assign(static_cast<std::size_t>(spec.batch), 0);
  spec.lengths_k.assign(static_cast<std::size_t>(spec.batch), 0);
  for (const std::size_t b : {std::size_t{0}, std::size_t{40000}, std::size_t{65599}}) {
    spec.lengths_q[b] = 3;
    spec.lengths_k[b] = b == 40000 ? 0 : 2;
  }
  Call call(spec);
  call.device = gpu();
  call.run();
  call.expect_matches_oracle();
}

TEST(GpuSizes, NothingAtAll) {
  CaseSpec spec = bf16_case("nothing");
  spec.batch = 2;
  spec.sq = 0;
  Call call(spec);
  call.device = gpu();
  call.run();
  call.expect_memory_respected();
  spec.sq = 5;
  spec.sk = 0;
  Call keyless(spec);
  keyless.device = gpu();
  keyless.run();
  keyless.expect_matches_oracle();
}

// Counting costs a wait for the stream; where it is not asked for, its words are not even cleared.
TEST(GpuPlan, CountsThroughTheCInterfaceOnlyWhenAsked) {
  Call call(bf16_case("counts"));
  DeviceCall there(call, gpu());
  runtime::Device& device = runtime::shared_device(gpu());
  fovea_problem problem;
  ASSERT_EQ(fovea_problem_init(&problem, sizeof problem), FOVEA_OK);
  const auto view = [](const Tensor& tensor) {
    fovea_tensor result{tensor.data, static_cast<fovea_dtype>(tensor.dtype), 1, {}, {}};
    std::ranges::copy(tensor.shape, result.shape);
    std::ranges::copy(tensor.stride, result.stride);
    return result;
  };
  problem.q = view(there.problem.q);
  problem.k = view(there.problem.k);
  problem.v = view(there.problem.v);
  problem.out = view(there.problem.out);
  problem.lse = view(there.problem.lse);
  problem.causal = 1;
  problem.memory = FOVEA_MEMORY_DEVICE;
  fovea_options options;
  ASSERT_EQ(fovea_options_init(&options, sizeof options), FOVEA_OK);
  options.device = static_cast<fovea_device>(gpu());
  fovea_plan* chosen = nullptr;
  ASSERT_EQ(fovea_plan_create(&problem, &options, &chosen), FOVEA_OK) << fovea_last_error();
  std::size_t bytes = 0;
  ASSERT_EQ(fovea_plan_workspace_bytes(chosen, &bytes), FOVEA_OK);
  const auto bytes_written = [&](fovea_statistics* statistics) {
    const runtime::DeviceBuffer workspace(device, bytes);
    device.fill(workspace.address(), 0xab, bytes);
    EXPECT_EQ(fovea_plan_run(chosen, &problem, reinterpret_cast<void*>(workspace.address()), bytes,
                             statistics),
              FOVEA_OK)
        << fovea_last_error();
    std::vector<std::uint8_t> after(bytes);
    device.synchronize();
    device.copy_to_host(after.data(), workspace.address(), bytes);
    device.synchronize();
    return std::ranges::count_if(after, [](std::uint8_t byte) { return byte != 0xab; });
  };
  fovea_statistics statistics;
  ASSERT_EQ(fovea_statistics_init(&statistics, sizeof statistics), FOVEA_OK);
  constexpr std::ptrdiff_t counter_bytes = 2 * sizeof(std::uint64_t);
  EXPECT_EQ(bytes_written(&statistics) - bytes_written(nullptr), counter_bytes);
  fovea_plan_destroy(chosen);
  there.fetch();
  call.expect_matches_oracle();
}

// The driver's functions for graphs, which the library itself does not use.
struct Graphs {
  int (*begin)(void* stream, int mode);
  int (*end)(void* stream, void** graph);
  int (*instantiate)(void** executable, void* graph, unsigned long long flags);
  int (*launch)(void* executable, void* stream);
  int (*retain)(void** context, int device);
  int (*set_current)(void* context);
};

Graphs graphs() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  Graphs g{};
  load(g.begin, "cuStreamBeginCapture_v2");
  load(g.end, "cuStreamEndCapture");
  load(g.instantiate, "cuGraphInstantiateWithFlags");
  load(g.launch, "cuGraphLaunch");
  load(g.retain, "cuDevicePrimaryCtxRetain");
  load(g.set_current, "cuCtxSetCurrent");
  return g;
}

// Capturing forbids allocation and waiting, so it proves that run() does neither; replaying after
// the input has changed proves that it is all in the stream.
TEST(GpuGraph, CapturesARunAndReplaysItOnNewInput) {
  if (gpu() != Device::cuda) GTEST_SKIP() << "only a GPU has graphs";
  // Instantiating works in the thread's current context; fovea makes its own current only in calls.
  runtime::shared_device(gpu());  // or the driver is not initialised yet
  const Graphs g = graphs();
  void* context = nullptr;
  ASSERT_EQ(g.retain(&context, 0), 0);
  ASSERT_EQ(g.set_current(context), 0);
  for (const Entry entry : {Entry::dense, Entry::varlen, Entry::paged}) {
    CaseSpec spec = bf16_case("graph");
    spec.entry = entry;
    spec.batch = 3;
    spec.sq = 300;
    spec.layout = entry == Entry::dense ? Layout::padded : Layout::bshd;  // copied first
    Call call(spec);
    DeviceCall there(call, gpu());
    runtime::Device& device = runtime::shared_device(gpu());
    const Plan chosen = plan(there.problem, gpu_options());
    const runtime::DeviceBuffer workspace(device, chosen.workspace_bytes());
    const runtime::Stream stream = device.create_stream();
    there.problem.stream = stream.handle;
    constexpr int mode_global = 0;
    ASSERT_EQ(g.begin(stream.handle, mode_global), 0);
    chosen.run(there.problem,
               {reinterpret_cast<std::byte*>(workspace.address()), workspace.bytes()});
    void* graph = nullptr;
    void* executable = nullptr;
    ASSERT_EQ(g.end(stream.handle, &graph), 0);
    ASSERT_EQ(g.instantiate(&executable, graph, 0), 0);
    there.fetch();
    const std::vector<double> untouched = call.out.values();
    EXPECT_TRUE(std::isnan(untouched.front())) << "capturing computed";
    for (int replay = 0; replay < 3; ++replay) {
      ASSERT_EQ(g.launch(executable, stream.handle), 0);
      device.synchronize(stream);
      there.fetch();
      call.expect_matches_oracle();
    }
    device.destroy(stream);
  }
}

}  // namespace
}  // namespace fovea::test
