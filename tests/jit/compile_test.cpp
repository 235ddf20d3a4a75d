// Everything that kernels include compiles for every chip, down to machine code, without spills and
// without advisories; and every wrapper is really called, so that ptxas sees its instruction.
#include <gtest/gtest.h>

#include <cstdio>

#include "device/files.h"
#include "runtime/jit.h"
#include "runtime/source.h"

namespace fovea::tests {
namespace {

using core::DType;
using runtime::CompileError;
using runtime::CompileRequest;
using runtime::CompileResult;

constexpr const char* archs[] = {"sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_103f"};

bool is_blackwell(const std::string& arch) { return arch != "sm_90a"; }

class CompileTest : public testing::TestWithParam<const char*> {
 protected:
  // Compiles, strictly, and prints what ptxas says and how long it took.
  void compile(const std::string& what, const std::string& text) {
    CompileRequest request;
    request.text = text;
    request.arch = GetParam();
    try {
      const CompileResult result = runtime::default_jit().compile(request);
      ASSERT_EQ(result.image->report.kernels.size(), 1u);
      const runtime::KernelResources& kernel = result.image->report.kernels[0];
      EXPECT_EQ(kernel.spill_store_bytes + kernel.spill_load_bytes, 0);
      std::printf("%-8s %-20s %3d registers, %4d bytes of stack, %2d barriers, %6.1f ms\n",
                  GetParam(), what.c_str(), kernel.registers, kernel.stack_bytes, kernel.barriers,
                  1e3 * result.seconds);
    } catch (const CompileError& fault) {
      ADD_FAILURE() << what << " for " << GetParam() << ": " << fault.what() << "\n" << fault.log();
    }
  }
};

TEST_P(CompileTest, EachHeaderAlone) {
  // The front end sees the same text for every member of a family.
  const std::string arch = GetParam();
  if (arch != "sm_90a" && arch != "sm_100a") GTEST_SKIP() << "as sm_100a";
  int headers = 0;
  for (const device::File& file : device::files()) {
    if (!file.name.ends_with(".h")) continue;
    ++headers;
    compile(std::string(file.name),
            "#include \"" + std::string(file.name) + "\"\nextern \"C\" __global__ void k() {}");
  }
  EXPECT_GE(headers, 14);
}

// The mathematics of core/ runs on the device as it stands.
TEST_P(CompileTest, CoreOnTheDevice) {
  compile("core", R"(
    #include "core/config.h"
    #include "core/dropout.h"
    #include "core/mask.h"
    #include "core/numeric.h"
    #include "core/softmax.h"
    #include "core/tiles.h"
    #include "core/types.h"
    using namespace fovea::core;
    extern "C" __global__ void k(const __grid_constant__ Problem p, float* out, const void* in) {
      const int i = threadIdx.x;
      const float x = load_element(in, DType::bf16, i) + load_element(in, DType::e4m3, i) +
                      load_element(in, DType::e5m2, i) + load_element(in, DType::f16, i);
      store_element(out, DType::e4m3, i, x);
      store_element(out, DType::e5m2, i, x);
      store_element(out, DType::f16, i, x);
      store_element(out, DType::bf16, i, x);
      const Sequence s = sequence_at(p, blockIdx.x);
      const BlockRange blocks = block_range(p.window, s.length_q, s.length_k, i, i + 64, 128);
      const KeyRange part = split_range(key_range(p.window, s.length_q, s.length_k, i), 3, 1, 128);
      const PackedRow row = packed_row(i, p.group_size(), 1);
      const Merge merge = merge_parts(x, out[i]);
      const bool seen = allowed(p.window, s.length_q, s.length_k, row.query, blocks.begin);
      out[0] = seen ? merge.lse : infinity;
      out[1] = exp2_polynomial<3>(x) + exp2_polynomial<4>(x) + exp2_polynomial<6>(x);
      out[5] = natural_log(x);
      out[2] = dropout_keeps(p.dropout, 1, 2, i, part.begin) ? weighted(merge.weight_a, x) : 0.0f;
      out[3] = row_lse({x, x}) + raise_reference(x, x, rescale_threshold_log2).factor_log2;
      out[4] = key_offset(p, p.k, s, 0, i, 0) + guard_exponent(x) + row_block(i, 3, 1).begin;
    })");
}

constexpr const char* common_calls = R"(
  #include "device/pipeline.h"
  #include "device/ptx.h"
  #include "device/tile.h"
  #include "device/tma.h"
  namespace fovea::device {
  struct Params { TensorMap map; float* out; uint32* words; int c[5]; };
  struct Plan {
    alignas(1024) uint8 tile[16384];
    Ring<3> ring;
    Barrier barrier;
  };
  inline void common(Plan& plan, const Params& p) {
    const SharedAddress tile = shared_address(plan.tile);
    if (elect_one()) {
      plan.ring.init(1, 2);
      mbarrier_init(plan.barrier, 1);
      fence_mbarrier_init();
      tma_prefetch_map(&p.map);
    }
    cluster_arrive_relaxed();
    cluster_wait();
    RingState<3> state;
    plan.ring.wait_free(state);
    plan.ring.expect(state, 128);
    plan.ring.wait_full(state);
    plan.ring.release(state);
    state.advance();
    Barrier& barrier = plan.barrier;
    mbarrier_expect_bytes(barrier, 64);
    mbarrier_arrive_after_copies(barrier);
    const ClusterAddress peer = map_to_rank(shared_address(&barrier), cluster_rank() ^ 1);
    mbarrier_arrive_remote(peer);
    mbarrier_arrive_expect_bytes_remote(peer, 16);
    mbarrier_wait_cluster(barrier, 0);
    tma_load(tile, &p.map, barrier, {p.c[0], p.c[1]}, cache_policy_normal());
    tma_load(tile, &p.map, barrier, {p.c[0], p.c[1], p.c[2], p.c[3]}, cache_policy_evict_first());
    tma_load(tile, &p.map, barrier, {p.c[0], p.c[1], p.c[2], p.c[3], p.c[4]},
             cache_policy_evict_last());
    tma_load_multicast(tile, &p.map, barrier, {p.c[0], p.c[1]}, 3,
                           cache_policy_evict_last());
    tma_load_multicast(tile, &p.map, barrier, {p.c[0], p.c[1], p.c[2], p.c[3]}, 3,
                           cache_policy_evict_last());
    tma_load_multicast(tile, &p.map, barrier, {p.c[0], p.c[1], p.c[2], p.c[3], p.c[4]}, 3,
                           cache_policy_evict_last());
    tma_store(&p.map, tile, {p.c[0], p.c[1]});
    tma_store(&p.map, tile, {p.c[0], p.c[1], p.c[2], p.c[3]});
    tma_store(&p.map, tile, {p.c[0], p.c[1], p.c[2], p.c[3], p.c[4]});
    tma_reduce_add(&p.map, tile, {p.c[0], p.c[1]});
    tma_reduce_add(&p.map, tile, {p.c[0], p.c[1], p.c[2], p.c[3]});
    tma_reduce_add(&p.map, tile, {p.c[0], p.c[1], p.c[2], p.c[3], p.c[4]});
    bulk_load(tile, p.out, 64, barrier);
    bulk_copy_remote(map_to_rank(tile, 1), tile + 64, 64, peer);
    bulk_store(p.out, tile, 64);
    bulk_reduce_add(p.out, tile, 64);
    bulk_commit();
    bulk_wait_read<1>();
    bulk_wait<0>();
    named_barrier_arrive<3, 64>();
    named_barrier_sync<4, 64>();
    fence_proxy_async_shared();
    fence_proxy_async_global();
    fence_gpu();
    grid_dependency_wait();
    grid_launch_dependents();
    cluster_arrive();
    cluster_wait();
    uint32 m[4];
    load_matrix_x4(m, tile);
    store_matrix_x4(tile, m[0], m[1], m[2], m[3]);
    load_matrix_x4_transposed(m, tile + 512);
    store_matrix_x4_transposed(tile + 512, m[0], m[1], m[2], m[3]);
    store_shared_x4(tile + 16 * lane_index(), load_shared_x4(tile));
    store_async_x4(map_to_rank(tile, 1), load_shared_x4(tile), peer);
    copy_async_16(tile, p.out, 12);
    copy_async_commit();
    copy_async_wait<0>();
    reduce_add_x4(p.out, make_float4(1, 2, 3, 4));
    const float x = p.out[threadIdx.x];
    p.out[1] = exp2_approximate(x) + log2_approximate(x);
    p.out[2] = reciprocal_approximate(x) + tanh_approximate(x);
    p.words[0] = pack_bf16x2(x, 1) + pack_f16x2(x, 2) + pack_e4m3x2(x, 3) + pack_e5m2x2(x, 4);
    p.words[1] = unpack_e4m3x2(p.words[2]) + unpack_e5m2x2(p.words[3]);
    p.words[4] = warp_index() + global_timer();
    mbarrier_invalidate(barrier);
  }
)";

std::string entry_text(const std::string& body) {
  return R"(
  extern "C" __global__ void __launch_bounds__(384, 1) k(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8 shared_memory[];
    Plan& plan = *reinterpret_cast<Plan*>(shared_memory);
    common(plan, p);
)" + body +
         "\n  }\n  }  // namespace fovea::device\n";
}

TEST_P(CompileTest, EveryWrapper) {
  if (is_blackwell(GetParam())) {
    compile("every wrapper", std::string(common_calls) + entry_text(R"(
      const ClusterAddress even = {shared_address(&plan.barrier).value & 0xfeffffffu};
      const SharedAddress tile = shared_address(plan.tile);
      tma_load_pair(tile, &p.map, even, {p.c[0], p.c[1]},
                    cache_policy_evict_last());
      tma_load_pair(tile, &p.map, even, {p.c[0], p.c[1], p.c[2], p.c[3]},
                    cache_policy_evict_last());
      tma_load_pair(tile, &p.map, even, {p.c[0], p.c[1], p.c[2], p.c[3], p.c[4]},
                    cache_policy_evict_last());
      const float x = p.out[0];
      const float2 a = fma_f32x2(make_float2(x, x), make_float2(x, 1), add_f32x2({x, 2}, {x, 3}));
      p.out[2] = max3(a.x, a.y, multiply_f32x2(a, {x, x}).x);
      launch_control_try_cancel(tile, shared_address(&plan.barrier));
      launch_control_try_cancel_all(tile, shared_address(&plan.barrier));
      const uint4 answer = load_shared_x4(tile);
      uint32 first = 0;
      const bool granted = launch_control_granted(answer.x | (uint64)answer.y << 32,
                                                  answer.z | (uint64)answer.w << 32, first);
      p.words[4] = granted ? first : 0;)"));
  } else {
    compile("every wrapper", std::string(common_calls) + entry_text(""));
    compile("setmaxnreg", std::string(common_calls) + entry_text(R"(
      if (warp_index() < 4) registers_shrink<40>(); else registers_grow<232>();
      p.out[threadIdx.x] = 1.0f;)"));
  }
}

// All operand kinds of one shape: kinds of text, not sizes, are what can be wrong.
TEST_P(CompileTest, EveryWgmmaText) {
  if (is_blackwell(GetParam())) GTEST_SKIP() << "wgmma is Hopper's";
  std::vector<runtime::WgmmaShape> shapes;
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const bool b_mn : {false, true}) {
      shapes.push_back({64, type, type, true, false, b_mn});
      for (const bool a_mn : {false, true}) shapes.push_back({64, type, type, false, a_mn, b_mn});
    }
  }
  for (const DType a : {DType::e4m3, DType::e5m2}) {
    for (const DType b : {DType::e4m3, DType::e5m2}) {
      shapes.push_back({64, a, b, false, false, false});
      shapes.push_back({64, a, b, true, false, false});
    }
  }
  for (const int n : {8, 96, 176, 256}) shapes.push_back({.n = n});
  for (const runtime::WgmmaShape& shape : shapes) {
    const std::string name = runtime::wgmma_name(shape);
    const std::string n = std::to_string(shape.n / 2);
    compile(name,
            "#include \"device/wgmma.h\"\nnamespace fovea::device {\n" +
                runtime::wgmma_text(shape) + R"(
      extern "C" __global__ void __launch_bounds__(128) k(float* p, uint64 a_descriptor, uint64 b) {
        float d[)" +
                n + R"(];
        for (int i = 0; i < )" +
                n + R"(; ++i) d[i] = p[i * 128 + threadIdx.x];
        )" +
                (shape.a_in_registers
                     ? "uint32 a[4]; for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(p[i]); "
                       "wgmma_hold(a);"
                     : "const uint64 a = a_descriptor;") +
                R"(
        wgmma_hold(d);
        wgmma_fence();
        )" + name +
                R"((d, a, b, true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(d);
        for (int i = 0; i < )" +
                n + R"(; ++i) p[i * 128 + threadIdx.x] = d[i];
      }
      })");
  }
}

TEST_P(CompileTest, EveryTcgen05Text) {
  if (!is_blackwell(GetParam())) GTEST_SKIP() << "tcgen05 is Blackwell's";
  for (const int cta_group : {1, 2}) {
    std::string texts;
    std::string calls;
    for (const bool eight_bit : {false, true}) {
      for (const bool in_tensor_memory : {false, true}) {
        const runtime::Tcgen05Mma product{eight_bit, in_tensor_memory, cta_group};
        texts += runtime::tcgen05_mma_text(product);
        calls += runtime::tcgen05_mma_name(product) +
                 (in_tensor_memory ? "(base, base + 64, b, instruction, true);\n"
                                   : "(base, a, b, instruction, false);\n");
      }
    }
    calls += cta_group == 1 ? "tcgen05_commit(done);\n" : "tcgen05_commit_pair(done, 3);\n";
    for (int words = 1; words <= 128; words *= 2) {
      const std::string n = std::to_string(words);
      texts += runtime::tcgen05_load_text(words) + runtime::tcgen05_store_text(words);
      calls += "{ uint32 words[" + n + "]; tcgen05_load_32x32b_x" + n +
               "(words, base.lane(32)); tcgen05_wait_load(); tcgen05_store_32x32b_x" + n +
               "(base + 8, words); tcgen05_wait_store(); }\n";
    }
    const std::string group = "<" + std::to_string(cta_group) + ">";
    compile("tcgen05 cta_group " + std::to_string(cta_group),
            "#include \"device/tcgen05.h\"\nnamespace fovea::device {\n" + texts + R"(
      extern "C" __global__ void __launch_bounds__(128) k(uint64 a, uint64 b, uint32 instruction) {
        __shared__ uint32 address;
        __shared__ Barrier done;
        tcgen05_allocate)" +
                group + R"((&address, 512);
        tcgen05_allocated_all)" +
                group + R"(();
        tcgen05_fence_before();
        __syncthreads();
        tcgen05_fence_after();
        const TensorAddress base{address};
        )" + calls +
                R"(
        tcgen05_free)" +
                group + R"((base, 512);
      }
      })");
  }
}

INSTANTIATE_TEST_SUITE_P(Archs, CompileTest, testing::ValuesIn(archs),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
}  // namespace fovea::tests
