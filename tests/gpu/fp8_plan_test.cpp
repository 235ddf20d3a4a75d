// Eight bits through the public interface: quantisation in front, quantise once and attend many
// times, in host memory and in that of a GPU; on the CPU and on the emulated chips.
// FOVEA_TEST_DEVICE=cuda takes a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/mask.h"
#include "fovea/fovea.h"
#include "fovea/fp8.hpp"
#include "tests/cases.h"
#include "tests/device_call.h"
#include "tests/sentence.h"

namespace fovea::test {
namespace {

std::vector<Device> gpu_devices() {
  if (test_device() != Device::cpu) return {test_device()};
  return {Device::emulated_sm90a, Device::emulated_sm100a};
}

CaseSpec spec_of(const std::string& name, Index d = 64) {
  CaseSpec spec;
  spec.name = name;
  spec.batch = 1;
  spec.hq = 2;
  spec.hkv = 1;
  spec.sq = 70;
  spec.sk = 150;
  spec.d = d;
  spec.dtype = DType::bf16;
  spec.causal = true;
  return spec;
}

double distance(const std::vector<double>& x, const std::vector<double>& y) {
  double squares = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) squares += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(squares / static_cast<double>(x.size()));
}

// Of 8 bits, as their twin computes them: neither worse nor, as 16 bits would be, far better.
void expect_eight_bits(const Call& call, const std::vector<double>& out,
                       const Quantization& quantization = {}) {
  const double error = distance(out, reference(call.problem).out);
  const double twin = distance(reference_fp8(call.problem, {.quantization = quantization}).out,
                               reference(call.problem).out);
  EXPECT_LE(error, 1.3 * twin + 1e-3);
  EXPECT_GE(error, 0.3 * twin) << "these are not 8 bits";
}

void run_plan(Call& call, const Options& options, const char* expected_in_explanation) {
  const Plan chosen = plan(call.problem, options);
  EXPECT_NE(chosen.explain().find(expected_in_explanation), std::string::npos) << chosen.explain();
  call.out.poison();
  std::vector<std::byte> workspace(chosen.workspace_bytes());
  chosen.run(call.problem, workspace);
}

std::string refusal_of(const Problem& problem, const Options& options) {
  try {
    static_cast<void>(plan(problem, options));
  } catch (const Error& refusal) {
    return refusal.what();
  }
  return "nothing";
}

TEST(Fp8Plan, QuantisesInFrontOnTheCpu) {
  for (const Fp8Scales scales : {Fp8Scales::tensor, Fp8Scales::head, Fp8Scales::block}) {
    Call call(spec_of("front_cpu", 80));
    const Quantization quantization{.scales = scales, .seed = 3};
    run_plan(call, {.device = Device::cpu, .eight_bits = EightBits{quantization}}, "of 8 bits");
    expect_eight_bits(call, call.out.values(), quantization);
  }
}

TEST(Fp8Plan, QuantisesInFrontOnAGpu) {
  for (const DType dtype : {DType::e4m3, DType::e5m2, DType::s8}) {
    for (const Device device : gpu_devices()) {
      Call call(spec_of("front_gpu"));
      const Quantization quantization{.dtype = dtype};
      if (dtype == DType::s8 && device == Device::emulated_sm100a) {
        const Options options{.device = device, .eight_bits = EightBits{quantization}};
        EXPECT_NE(refusal_of(call.problem, options).find("(s8) for q and k are Hopper's"),
                  std::string::npos);
        continue;
      }
      run_plan(call, {.device = device, .eight_bits = EightBits{quantization, 64}},
               "forward in 8 bits");
      expect_eight_bits(call, call.out.values(), quantization);
    }
  }
}

// Every operand in one piece of memory.
Quantized placed(Quantized to, std::vector<std::byte>& memory) {
  const auto each = [&](const auto& visit) {
    for (Tensor* t : {&to.q, &to.q_scale, &to.k, &to.v, &to.key_scale, &to.k_scale, &to.v_scale}) {
      if (t->present) visit(*t);
    }
  };
  std::size_t bytes = 64;
  const auto size = [](const Tensor& t) {
    return (static_cast<std::size_t>(t.shape[0] * t.stride[0]) * size_bytes(t.dtype) + 63) / 64 *
           64;
  };
  each([&](const Tensor& t) { bytes += size(t); });
  memory.assign(bytes, std::byte{0xff});
  std::byte* next = memory.data() + 64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  each([&](Tensor& t) {
    t.data = next;
    next += size(t);
  });
  return to;
}

// The same numbers whichever way the values lie and whoever computes.
TEST(Fp8Plan, QuantisesOnceAndAttendsManyTimes) {
  Call call(spec_of("once", 80));
  std::vector<std::vector<double>> outs;
  std::vector<Device> devices = gpu_devices();
  devices.push_back(Device::cpu);
  for (const ValueLayout values : {ValueLayout::transposed, ValueLayout::rows}) {
    const QuantizePlan quantizer = plan_quantize(call.problem, {}, values);
    EXPECT_EQ(quantizer.workspace_bytes(), 0u);
    std::vector<std::byte> memory;
    const Quantized operands = placed(quantizer.operands(), memory);
    Quantized keys = operands;
    keys.q.data = keys.q_scale.data = nullptr;
    quantizer.run(call.problem, keys, {});
    Quantized queries = quantizer.operands();
    queries.q.data = operands.q.data;
    queries.q_scale.data = operands.q_scale.data;
    quantizer.run(call.problem, queries, {});
    const Problem eight_bits = attend(call.problem, operands);
    const Reference exact = reference(eight_bits);
    for (const Device device : devices) {
      call.out.poison();
      attention(eight_bits, {.device = device});
      outs.push_back(call.out.values());
      expect_eight_bits(call, outs.back());
      EXPECT_LT(distance(outs.back(), exact.out), device == Device::cpu ? 4e-3 : 3e-2);
      EXPECT_EQ(call.out.foreign_bytes_changed(), 0);
    }
  }
  for (std::size_t i = 0; i < devices.size(); ++i) EXPECT_EQ(outs[i], outs[i + devices.size()]);
}

// Integers: q and k s8, v e4m3, and the error several times less than that of e4m3.
TEST(Fp8Plan, AttendsToIntegers) {
  Call call(spec_of("integers", 80));
  const QuantizePlan quantizer = plan_quantize(call.problem, {.dtype = DType::s8});
  std::vector<std::byte> memory;
  const Quantized operands = placed(quantizer.operands(), memory);
  EXPECT_EQ(operands.q.dtype, DType::s8);
  EXPECT_EQ(operands.v.dtype, DType::e4m3);
  quantizer.run(call.problem, operands, {});
  const Problem integers = attend(call.problem, operands);
  const Reference truth = reference(call.problem);
  for (const Device device : {Device::emulated_sm90a, Device::cpu}) {
    call.out.poison();
    attention(integers, {.device = device});
    EXPECT_LT(distance(call.out.values(), reference(integers).out),
              device == Device::cpu ? 4e-3 : 3e-2);
    expect_eight_bits(call, call.out.values(), {.dtype = DType::s8});
  }
  const auto lse_error = [&](DType dtype) {
    return distance(reference_fp8(call.problem, {.quantization = {.dtype = dtype}}).lse, truth.lse);
  };
  EXPECT_LT(2.0 * lse_error(DType::s8), lse_error(DType::e4m3));
  Problem mixed = integers;
  mixed.v.dtype = DType::e5m2;
  EXPECT_NE(refusal_of(mixed, {}).find("with q in s8 it must be e4m3"), std::string::npos);
}

// In device memory nothing stands in front of the kernel when all operands are as it reads them.
void read_in_place(Device gpu) {
  Call call(spec_of("in_place"));
  DeviceCall there(call, gpu);
  runtime::Device& device = runtime::shared_device(gpu);
  const Options options{.device = gpu};
  const QuantizePlan quantizer =
      plan_quantize(there.problem, {.scales = Fp8Scales::tensor}, ValueLayout::transposed, options);
  Quantized to = quantizer.operands();
  std::vector<runtime::DeviceBuffer> buffers;
  for (Tensor* t : {&to.q, &to.q_scale, &to.k, &to.v, &to.key_scale}) {
    buffers.emplace_back(
        device, static_cast<std::size_t>(t->shape[0] * t->stride[0]) * size_bytes(t->dtype));
    t->data = reinterpret_cast<void*>(buffers.back().address());
  }
  const std::size_t bytes = quantizer.workspace_bytes();
  const runtime::DeviceBuffer workspace(device, bytes);
  quantizer.run(there.problem, to, {reinterpret_cast<std::byte*>(workspace.address()), bytes});
  there.problem = attend(there.problem, to);
  const Plan chosen = plan(there.problem, options);
  EXPECT_NE(chosen.explain().find("q read in place, k read in place, v read in place (0 bytes)"),
            std::string::npos)
      << chosen.explain();
  there.run(chosen);
  there.fetch();
  expect_eight_bits(call, call.out.values(), {.scales = Fp8Scales::tensor});
}

TEST(Fp8Plan, ReadsQuantisedOperandsInPlace) {
  for (const Device gpu : gpu_devices()) read_in_place(gpu);
}

// A pool of pages in random order, some of which nobody owns; entries of the table behind a
// sequence's keys are garbage.
struct Cache {
  Cache(const Call& call, Index page_size) {
    Index used = 0;
    for (Index b = 0; b < call.spec.batch; ++b) {
      lengths.push_back(static_cast<std::int32_t>(call.length_k(b)));
      used += core::ceil_div(call.length_k(b), page_size);
      columns = std::max<Index>(columns, core::ceil_div(call.length_k(b), page_size) + 1);
    }
    pool = {used + 3, page_size};
    std::vector<std::int32_t> order(static_cast<std::size_t>(pool.pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::minstd_rand(5));
    auto next = order.begin();
    for (const std::int32_t length : lengths) {
      const Index count = core::ceil_div(Index{length}, page_size);
      table.insert(table.end(), next, next + count);
      table.insert(table.end(), static_cast<std::size_t>(columns - count), 1 << 30);
      next += count;
    }
  }

  // The whole cache, in place of the problem's keys.
  [[nodiscard]] Problem attended(Problem problem, const Quantized& codes) const {
    problem.cu_seqlens_k = {};
    problem.max_seqlen_k = 0;
    problem.seqused_k = lengths;
    problem.block_table = table;
    problem.block_table_columns = columns;
    return attend(problem, codes);
  }

  PagePool pool;
  Index columns = 0;
  std::vector<std::int32_t> table, lengths;
};

// Keys [begin, end) of each sequence, which lie densely.
Problem part_of(Problem problem, Index begin, Index end, std::vector<std::int32_t>& used,
                const Cache& cache) {
  used.clear();
  for (const std::int32_t length : cache.lengths) {
    used.push_back(static_cast<std::int32_t>(std::clamp(Index{length}, begin, end) - begin));
  }
  for (Tensor* t : {&problem.k, &problem.v}) {
    t->data = static_cast<std::byte*>(t->data) +
              begin * t->stride[1] * static_cast<Index>(size_bytes(t->dtype));
    t->shape[1] = end - begin;
  }
  problem.seqused_k = used;
  return problem;
}

// Keys go to pages: packed ones at once, others in two parts, the second from key 64 on.
Quantized paged_codes(const Call& call, const Cache& cache, const Quantization& quantization,
                      std::vector<std::byte>& memory) {
  const auto write = [&](const Problem& part, const std::vector<std::int32_t>& first, bool all) {
    const QuantizePlan quantizer = plan_quantize(part, quantization, cache.pool);
    EXPECT_EQ(quantizer.workspace_bytes(), 0u);
    Quantized to = quantizer.operands();
    if (memory.empty()) placed(to, memory);
    const std::vector<std::byte> before = memory;
    to = placed(to, memory);
    memory = before;
    if (!all) to.q.data = to.q_scale.data = nullptr;
    to.block_table = cache.table;
    to.block_table_columns = cache.columns;
    to.first_keys = first;
    quantizer.run(part, to, {});
    return to;
  };
  if (!call.problem.cu_seqlens_k.empty()) return write(call.problem, {}, true);
  std::vector<std::int32_t> used;
  const Index keys = call.problem.k.shape[1];
  write(part_of(call.problem, 0, std::min<Index>(keys, 64), used, cache), {}, false);
  const std::vector<std::int32_t> first(cache.lengths.size(), 64);
  return write(part_of(call.problem, std::min<Index>(keys, 64), keys, used, cache), first, true);
}

// The paged cases of the one list, quantised into pages of whole blocks.
std::vector<CaseSpec> paged_cases() {
  std::vector<CaseSpec> list;
  constexpr Index sizes[] = {32, 64, 96, 128, 256};
  for (CaseSpec s : eight_bit_cases()) {
    if (s.entry != Entry::paged && s.entry != Entry::varlen_paged) continue;
    s.entry = s.entry == Entry::paged ? Entry::seqused : Entry::varlen;
    s.page_size = sizes[list.size() % 5];
    s.layout = Layout::bshd;
    s.out_dtype = DType::bf16;
    s.dtype = DType::bf16;
    s.scales = Scales::none;
    s.batch = 3;
    list.push_back(s);
  }
  return list;
}

void expect_alike(const std::vector<double>& out, const Problem& problem, double twin) {
  EXPECT_LE(distance(out, reference(problem).out), 1.3 * twin + 2e-3);
}

// The output under the plan, whose explanation says `what`.
std::vector<double> output_of(Call& call, const Problem& problem, const Options& options,
                              const char* what) {
  const Plan chosen = plan(problem, options);
  EXPECT_NE(chosen.explain().find(what), std::string::npos) << chosen.explain();
  call.out.poison();
  std::vector<std::byte> workspace(chosen.workspace_bytes());
  chosen.run(problem, workspace);
  EXPECT_EQ(call.out.foreign_bytes_changed(), 0);
  return call.out.values();
}

// Pages of a call: read where they are and gathered, beside the same keys as they lie densely.
void expect_pages(Call& call, const Cache& cache, const Quantization& quantization, bool on_gpu) {
  std::vector<std::byte> memory, dense_memory;
  const Quantized paged = paged_codes(call, cache, quantization, memory);
  const Problem problem = cache.attended(call.problem, paged);
  const QuantizePlan quantizer = plan_quantize(call.problem, quantization);
  const Quantized codes = placed(quantizer.operands(), dense_memory);
  quantizer.run(call.problem, codes, {});
  const Problem dense = attend(call.problem, codes);
  const Options on_cpu{.device = Device::cpu};
  EXPECT_EQ(output_of(call, problem, on_cpu, "of 8 bits"),
            output_of(call, dense, on_cpu, "of 8 bits"));
  if (!on_gpu) return;
  const double twin = distance(reference_fp8(problem).out, reference(problem).out);
  Options options{.device = gpu_devices().front(), .softmax = call.spec.softmax};
  const char* const in_place = ", k read in place, v read in place";
  options.configuration = "gather=0";
  expect_alike(output_of(call, problem, options, in_place), problem, twin);
  options.configuration = "gather=1";
  const std::vector<double> gathered = output_of(call, problem, options, ", k copied, v copied");
  options.configuration = "";
  EXPECT_EQ(gathered, output_of(call, dense, options, in_place));
  if (gpu_devices().size() == 1 || quantization.dtype == DType::s8) return;
  options.device = gpu_devices().back();
  EXPECT_EQ(output_of(call, problem, options, "pages      gathered in front of every run: the"),
            output_of(call, dense, options, in_place));
}

// To the bit on the CPU, whose arithmetic does not know of pages. On Hopper, which reads pages
// where they are or gathers them, no worse than their twin; gathered they are the dense ones to the
// bit.
TEST(Fp8Pages, AreReadWhereTheyAreOrGathered) {
  constexpr DType codes[] = {DType::e4m3, DType::s8, DType::e5m2};
  const std::vector<CaseSpec> cases = paged_cases();
  ASSERT_GE(cases.size(), 10u);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Call call(cases[i]);
    SCOPED_TRACE(describe(call.spec) + " of pages " + std::to_string(call.spec.page_size));
    call.device = gpu_devices().front();
    const bool on_gpu = test_device() != Device::cpu || i % 3 != 1 || i <= 6;
    expect_pages(call, Cache(call, call.spec.page_size), {.dtype = codes[i % 3]}, on_gpu);
  }
}

struct ManyRows {
  Index rows = 1024;
  Index keys = 4096;
  Index d = 128;
  Index page_size = 64;
  bool causal = true;
  bool promoted = true;
  const char* configuration = "";
};

// Of a plan for two heads over one, whose pool holds 4096 keys. Addresses are those of nothing: a
// plan reads lengths and tables alone.
std::string explained(const ManyRows& c) {
  const Index pages = 4096 / c.page_size;
  const auto at = [](Index megabytes) { return reinterpret_cast<void*>(megabytes << 20); };
  Problem p;
  p.q = bshd(at(1), DType::e4m3, 1, c.rows, 2, c.d);
  p.out = bshd(at(100), DType::bf16, 1, c.rows, 2, c.d);
  p.k = bshd(at(200), DType::e4m3, pages, c.page_size, 1, c.d);
  p.v = contiguous(at(300), DType::e4m3, {pages, 1, c.d, c.page_size});
  p.key_scale = contiguous(at(400), DType::f32, {1, 1, 128 + 8, 4});
  const std::vector<std::int32_t> table(static_cast<std::size_t>(c.keys / c.page_size));
  const std::vector<std::int32_t> used{static_cast<std::int32_t>(c.keys)};
  p.block_table = table;
  p.block_table_columns = c.keys / c.page_size;
  p.seqused_k = used;
  p.causal = c.causal;
  Options options{.device = gpu_devices().front(), .configuration = c.configuration};
  options.eight_bits.emplace().promote_keys = c.promoted ? 768 : 0;
  return plan(p, options).explain();
}

// Few rows read pages where they are, many have them gathered, and what has no room is not.
TEST(Fp8Pages, AreGatheredWhereManyRowsReadThem) {
  const auto expect = [](const ManyRows& c, const std::string& what) {
    EXPECT_NE(explained(c).find(what), std::string::npos) << what << " is not in\n" << explained(c);
  };
  expect({},
         "pages      read in place: a key meets 1792 query rows, and a copy pays from 2048 on\n");
  const std::string gathered = "pages      gathered in front of every run: a key meets ";
  expect({.causal = false}, gathered + "2048 query rows, and a copy pays from 1536 on\n");
  expect({.rows = 1536}, gathered + "2496 query rows, and a copy pays from 2048 on\n");
  // k and v, scales of 128 blocks with 8 behind, and those of q.
  expect({.causal = false},
         ", k copied, v copied (" + std::to_string(2 * 4096 * 128 + 2304 + 256) + " bytes)");
  expect({.promoted = false}, "and a copy pays from 6144 on\n");
  expect({.d = 256}, "and a copy pays from 4096 on\n");
  expect({.d = 64}, "and a copy pays from 8192 on\n");
  expect({.rows = 4096, .d = 64, .page_size = 128}, "read in place: 128 keys of 64 columns");
  expect({.configuration = "stages=2,gather=1"},
         "pages      gathered in front of every run: as the configuration asks");
  for (const char* const value : {"2", "", "01"}) {
    const std::string configuration = std::string("gather=") + value + ",stages=2";
    expect_in(sentence_of([&] { explained({.configuration = configuration.c_str()}); }),
              std::string("gather the value '") + value + "'; it must be 0 or 1");
  }
  const Call dense(spec_of("dense"));
  EXPECT_NE(refusal_of(dense.problem, {.device = gpu_devices().front(),
                                       .configuration = "gather=1",
                                       .eight_bits = EightBits{}})
                .find("configuration names 'gather'"),
            std::string::npos);
  expect({.keys = 8192, .causal = false},
         "read in place: a copy would have room for 8192 keys, more than the pages hold;");
}

TEST(Fp8Pages, SayWhatDoesNotFit) {
  CaseSpec spec = spec_of("pages");
  spec.entry = Entry::seqused;
  spec.lengths_q = {70};
  spec.lengths_k = {130};
  Call call(spec);
  const Cache cache(call, 64);
  std::vector<std::byte> memory;
  const Quantized codes = paged_codes(call, cache, {}, memory);
  const Problem good = cache.attended(call.problem, codes);
  EXPECT_EQ(refusal_of(good, {}), "nothing");
  const auto refusal = [&](const auto& change) {
    Problem problem = good;
    change(problem);
    return refusal_of(problem, {});
  };
  const auto expect = [](const std::string& said, const char* what) {
    EXPECT_NE(said.find(what), std::string::npos) << said;
  };
  expect(refusal([](Problem& p) { p.k.shape[1] = p.v.shape[3] = 48; }),
         "k has a page size of 48 (its second extent); with key_scale it must be a multiple of 32");
  expect(refusal([](Problem& p) { p.v.shape[3] = 32; }), "v has shape");
  expect(refusal([](Problem& p) { p.key_scale.shape[2] -= 1; }), "key_scale has shape");
  expect(refusal([](Problem& p) { p.k.stride[1] += 8; }), "k has strides");
  expect(refusal([](Problem& p) { p.v.stride[0] += 8; }), "v has strides");
  expect(refusal([](Problem& p) { p.k.data = static_cast<std::byte*>(p.k.data) + 8; }),
         "k has data at address");

  const auto plan_refusal = [&](PagePool pool) {
    try {
      static_cast<void>(plan_quantize(call.problem, {}, pool));
    } catch (const Error& fault) {
      return std::string(fault.what());
    }
    return std::string("nothing");
  };
  expect(plan_refusal({4, 40}), "pool.page_size is 40; it must be a positive multiple of 32");
  expect(plan_refusal({0, 64}), "pool.pages is 0");
  const QuantizePlan quantizer = plan_quantize(call.problem, {}, cache.pool);
  const auto run_refusal = [&](const auto& change) {
    Quantized to = codes;
    to.q.data = to.q_scale.data = nullptr;
    to.first_keys = {};
    change(to);
    try {
      quantizer.run(call.problem, to, {});
    } catch (const Error& fault) {
      return std::string(fault.what());
    }
    return std::string("nothing");
  };
  const std::vector<std::int32_t> odd{33}, far{128}, bad{0, 99, 0, 0};
  EXPECT_EQ(run_refusal([](Quantized&) {}), "nothing");
  expect(run_refusal([&](Quantized& to) { to.first_keys = odd; }),
         "first_keys is 33 at entry 0; it must be a multiple of 32");
  expect(run_refusal([&](Quantized& to) { to.first_keys = far; }), "would end at 258");
  expect(run_refusal([&](Quantized& to) { to.block_table = bad; }),
         "block_table is 99 at row 0, column 1, but the pool has 6 pages");
  expect(run_refusal([&](Quantized& to) { to.block_table_columns = 3; }), "4 entries");
  Quantized dense = plan_quantize(call.problem, {}).operands();
  dense.first_keys = odd;
  try {
    plan_quantize(call.problem, {}).run(call.problem, dense, {});
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& fault) {
    expect(fault.what(), "first_keys is given but this plan writes no pages");
  }
}

// Cosines or sines of 160 positions, each pair with a frequency of its own.
class Angles {
 public:
  explicit Angles(Index pairs) : pairs_(pairs) {
    for (Index i = 0; i < 160 * pairs; ++i) {
      const double angle = static_cast<double>(i / pairs) / std::pow(100.0, angle_of(i % pairs));
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
  }

  Rotary rotary(bool interleaved, Index first) {
    return {contiguous(cos_.data(), DType::f32, {1, 1, 160, pairs_}),
            contiguous(sin_.data(), DType::f32, {1, 1, 160, pairs_}), interleaved, first};
  }

  // Rows of x stand at positions from `first` on.
  void turn(const Tensor& x, Index first, bool interleaved) const {
    for (Index row = 0; row < x.shape[1]; ++row) {
      for (Index head = 0; head < x.shape[2]; ++head) {
        for (Index i = 0; i < pairs_; ++i) {
          auto* const base = static_cast<float*>(x.data) + row * x.stride[1] + head * x.stride[2];
          float& a = base[(interleaved ? 2 * i : i) * x.stride[3]];
          float& b = base[(interleaved ? 2 * i + 1 : i + pairs_) * x.stride[3]];
          const auto at = static_cast<std::size_t>((first + row) * pairs_ + i);
          const double turned = double{a} * cos_[at] - double{b} * sin_[at];
          b = static_cast<float>(double{a} * sin_[at] + double{b} * cos_[at]);
          a = static_cast<float>(turned);
        }
      }
    }
  }

 private:
  double angle_of(Index pair) const {
    return static_cast<double>(pair) / static_cast<double>(pairs_);
  }

  Index pairs_;
  std::vector<float> cos_, sin_;
};

// The same as turning q and k before; the last of 70 queries stands beside the last of 150 keys.
TEST(Fp8Plan, TurnsQueriesAndKeysInFront) {
  for (const bool interleaved : {false, true}) {
    CaseSpec spec = spec_of("rotary", 80);
    spec.dtype = DType::f32;
    Call fused(spec);
    Call before(spec);
    Angles angles(24);
    Quantization quantization;
    const Options plain{.device = Device::cpu, .eight_bits = EightBits{quantization}};
    attention(before.problem, plain);
    const std::vector<double> unturned = before.out.values();
    angles.turn(before.problem.q, 83, interleaved);
    angles.turn(before.problem.k, 3, interleaved);
    attention(before.problem, plain);
    quantization.rotary = angles.rotary(interleaved, 3);
    attention(fused.problem, {.device = Device::cpu, .eight_bits = EightBits{quantization}});
    const double error = distance(before.out.values(), reference(before.problem).out);
    EXPECT_LE(distance(fused.out.values(), before.out.values()), 0.2 * error);
    EXPECT_GE(distance(fused.out.values(), unturned), 2.0 * error) << "nothing was turned";
  }
}

TEST(Fp8Plan, RefusesARotaryEmbeddingThatDoesNotFit) {
  Call call(spec_of("rotary", 64));
  Angles angles(32);
  const auto refusal = [&](const Rotary& rotary, Device device = Device::cpu) {
    Quantization quantization;
    quantization.rotary = rotary;
    return refusal_of(call.problem, {.device = device, .eight_bits = EightBits{quantization}});
  };
  EXPECT_EQ(refusal(angles.rotary(false, 10)), "nothing");
  EXPECT_NE(refusal(angles.rotary(false, 11)).find("the last key may stand at position 160"),
            std::string::npos);
  EXPECT_NE(refusal(Angles(33).rotary(true, 0)).find("33 columns, which turn more than"),
            std::string::npos);
  // Where keys go decides among pages.
  Quantization turned;
  turned.rotary = angles.rotary(false, 0);
  const QuantizePlan quantizer = plan_quantize(call.problem, turned, PagePool{6, 64});
  std::vector<std::byte> memory;
  Quantized to = placed(quantizer.operands(), memory);
  to.q.data = to.q_scale.data = nullptr;
  const std::vector<std::int32_t> table{0, 1, 2, 3, 4, 5}, first{32};
  to.block_table = table;
  to.block_table_columns = 6;
  quantizer.run(call.problem, to, {});
  to.first_keys = first;
  try {
    quantizer.run(call.problem, to, {});
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& fault) {
    EXPECT_NE(std::string(fault.what()).find("would stand at position 181, but rotary.cos has 160"),
              std::string::npos)
        << fault.what();
  }
  Rotary half = angles.rotary(false, 0);
  half.sin.present = false;
  EXPECT_NE(refusal(half).find("give both or none"), std::string::npos);
  for (const Device device : gpu_devices()) {
    EXPECT_NE(refusal(angles.rotary(false, 0), device).find("which is not memory of"),
              std::string::npos);
  }
}

TEST(Fp8Plan, SaysWhatItDoesNotDo) {
  CaseSpec spec = spec_of("refused");
  spec.alibi = true;
  Call call(spec);
  Options options{.eight_bits = EightBits{}};
  for (const Device device : gpu_devices()) {
    options.device = device;
    EXPECT_NE(refusal_of(call.problem, options).find("no ALiBi"), std::string::npos);
  }
  call.problem.alibi = {};
  options = {.device = Device::cpu, .eight_bits = EightBits{{.dtype = DType::bf16}}};
  EXPECT_NE(refusal_of(call.problem, options).find("quantization.dtype is bf16"),
            std::string::npos);
  Call wide(spec_of("wide", 320));
  options.eight_bits = EightBits{};
  EXPECT_NE(refusal_of(wide.problem, options).find("head dimensions up to 256"), std::string::npos);
  const float scale = 1.0f;
  call.problem.q_scale = contiguous(&scale, DType::f32, {1, 1, 1, 1});
  EXPECT_NE(refusal_of(call.problem, {}).find("q_scale is present but q, k and v are bf16"),
            std::string::npos);
}

TEST(Fp8Plan, TheCInterfaceQuantisesToo) {
  Call call(spec_of("c_interface"));
  const auto tensor = [](const Tensor& t) {
    fovea_tensor c =
        fovea_tensor_contiguous(t.data, static_cast<fovea_dtype>(t.dtype), t.shape.data());
    std::copy(t.stride.begin(), t.stride.end(), c.stride);
    return c;
  };
  fovea_problem problem;
  ASSERT_EQ(fovea_problem_init(&problem, sizeof problem), FOVEA_OK);
  problem.q = tensor(call.problem.q);
  problem.k = tensor(call.problem.k);
  problem.v = tensor(call.problem.v);
  problem.out = tensor(call.problem.out);
  problem.causal = 1;
  const fovea_quantization quantization = fovea_quantization_default();
  fovea_quantize_plan* plan = nullptr;
  ASSERT_EQ(
      fovea_quantize_plan_create(&problem, &quantization, FOVEA_VALUES_TRANSPOSED, nullptr, &plan),
      FOVEA_OK)
      << fovea_last_error();
  fovea_quantized to;
  ASSERT_EQ(fovea_quantize_plan_operands(plan, &to, sizeof to), FOVEA_OK);
  std::vector<std::vector<std::byte>> memory;
  for (fovea_tensor* t : {&to.q, &to.q_scale, &to.k, &to.v, &to.key_scale}) {
    memory.emplace_back(static_cast<std::size_t>(t->shape[0] * t->stride[0] * 4));
    t->data = memory.back().data();
  }
  EXPECT_EQ(fovea_quantize_plan_run(plan, &problem, &to, nullptr, 0), FOVEA_OK)
      << fovea_last_error();
  EXPECT_EQ(fovea_problem_attend(&problem, &to), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(fovea_attention(&problem, nullptr, nullptr), FOVEA_OK) << fovea_last_error();
  expect_eight_bits(call, call.out.values());
  fovea_quantize_plan_destroy(plan);

  // The same keys in pages.
  problem.q = tensor(call.problem.q);
  problem.k = tensor(call.problem.k);
  problem.v = tensor(call.problem.v);
  problem.q_scale.present = problem.key_scale.present = 0;
  problem.q_scale.data = problem.key_scale.data = nullptr;
  ASSERT_EQ(fovea_quantize_plan_create_pages(&problem, &quantization, 3, 64, nullptr, &plan),
            FOVEA_OK)
      << fovea_last_error();
  ASSERT_EQ(fovea_quantize_plan_operands(plan, &to, sizeof to), FOVEA_OK);
  for (fovea_tensor* t : {&to.q, &to.q_scale, &to.k, &to.v, &to.key_scale}) {
    memory.emplace_back(static_cast<std::size_t>(t->shape[0] * t->stride[0] * 4));
    t->data = memory.back().data();
  }
  const std::vector<std::int32_t> table{2, 0, 1};
  const std::int32_t keys = 150;
  to.block_table = {table.data(), 3};
  to.block_table_columns = 3;
  EXPECT_EQ(fovea_quantize_plan_run(plan, &problem, &to, nullptr, 0), FOVEA_OK)
      << fovea_last_error();
  problem.block_table = to.block_table;
  problem.block_table_columns = 3;
  problem.seqused_k = {&keys, 1};
  EXPECT_EQ(fovea_problem_attend(&problem, &to), FOVEA_OK) << fovea_last_error();
  call.out.poison();
  EXPECT_EQ(fovea_attention(&problem, nullptr, nullptr), FOVEA_OK) << fovea_last_error();
  expect_eight_bits(call, call.out.values());
  fovea_quantize_plan_destroy(plan);
  problem.block_table = problem.seqused_k = {nullptr, 0};
  problem.block_table_columns = 0;

  fovea_options options;
  ASSERT_EQ(fovea_options_init(&options, sizeof options), FOVEA_OK);
  options.eight_bits = 1;
  constexpr int wrong = 7;
  std::memcpy(&options.quantization.scales, &wrong, sizeof wrong);
  problem.q = tensor(call.problem.q);
  EXPECT_EQ(fovea_attention(&problem, &options, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(fovea_last_error(), "quantization.scales is 7"), nullptr)
      << fovea_last_error();
}

}  // namespace
}  // namespace fovea::test
