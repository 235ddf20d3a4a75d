// C = A B^T on Blackwell: one warp copies, one thread multiplies into tensor memory, one warp owns
// its allocation, and four warps bring the sums out.
//
// Per tile of 128 x 128 x 64: 256 cycles of the tensor cores at 8192 FLOP a cycle (dense bf16), 32
// KB by TMA. The product is one thread's work and its sums hold no registers: that is what changed
// since Hopper.
#include "device/pipeline.h"
#include "device/tcgen05.h"
#include "device/tma.h"
#include "examples/gemm/gemm.h"

namespace fovea::examples {

using namespace device;

inline constexpr int panel_columns = 64;  // 128 bytes of bf16: one row of the swizzle

// ---- Plan: shared memory, tensor memory, barriers
// ---------------------------------------------------

template <GemmConfig C>
struct Plan {
  alignas(1024) uint16 a[C.stages][C.tile_m * C.tile_k];  // [row][k], swizzled
  alignas(1024) uint16 b[C.stages][C.tile_n * C.tile_k];  // [column][k], swizzled
  alignas(
      1024) uint16 c[C.tile_n / panel_columns][C.tile_m * panel_columns];  // [panel][row][column]
  Ring<C.stages> ring;   // full: 1 producer and the bytes; free: 1 commit
  Barrier sum_full;      // 1 commit
  uint32 tensor_memory;  // where the allocation lies

  static_assert(C.tile_m == 128, "one row of the tile per lane of tensor memory");
  static_assert(C.tile_n == 64 || C.tile_n == 128 || C.tile_n == 256);
  static_assert(C.tile_k == panel_columns);
  static constexpr uint32 stage_bytes = (C.tile_m + C.tile_n) * C.tile_k * 2;
  // Columns 0 .. tile_n - 1: the sums, row r in lane r, one fp32 cell each.
  static constexpr uint32 tensor_columns = C.tile_n;
};

// ---- Roles
// --------------------------------------------------------------------------------------------

// One thread: keeps the ring full.
template <GemmConfig C>
__device__ void load(Plan<C>& plan, const GemmParams& params, int32 row, int32 column) {
  const CachePolicy policy = cache_policy_normal();
  RingState<C.stages> state;
  for (int32 k = 0; k < params.k; k += C.tile_k) {
    plan.ring.wait_free(state);
    // Boxes that reach past the tensor are filled with zeros and count in full.
    plan.ring.expect(state, Plan<C>::stage_bytes);
    Barrier& full = plan.ring.full[state.stage];
    tma_load(shared_address(plan.a[state.stage]), &params.a, full, {k, row}, policy);
    tma_load(shared_address(plan.b[state.stage]), &params.b, full, {k, column}, policy);
    state.advance();
  }
}

// One thread: sum [128 x tile_n] += a [128 x 64] b^T [64 x tile_n], stage by stage.
template <GemmConfig C>
__device__ void multiply(Plan<C>& plan, TensorAddress sum, int32 k_end) {
  constexpr uint32 group_of_8_rows =
      8 * 128;  // bytes; leading is not used by swizzled K-major tiles
  constexpr uint32 instruction =
      tcgen05_instruction({.a = TensorType::bf16, .b = TensorType::bf16, .m = 128, .n = C.tile_n});
  RingState<C.stages> state;
  for (int32 k = 0; k < k_end; k += C.tile_k) {
    plan.ring.wait_full(state);
    tcgen05_fence_after();
    const SharedAddress a = shared_address(plan.a[state.stage]);
    const SharedAddress b = shared_address(plan.b[state.stage]);
    const uint64 a_tile = tcgen05_descriptor(Swizzle::b128, a.value, 0, group_of_8_rows);
    const uint64 b_tile = tcgen05_descriptor(Swizzle::b128, b.value, 0, group_of_8_rows);
#pragma unroll
    for (int step = 0; step < C.tile_k / 16; ++step) {
      tcgen05_mma_f16_ss_cta1(sum, descriptor_advance(a_tile, 32 * step),
                              descriptor_advance(b_tile, 32 * step), instruction,
                              k > 0 || step > 0);
    }
    tcgen05_commit(plan.ring.free[state.stage]);  // once the products have read the stage
    state.advance();
  }
  tcgen05_commit(plan.sum_full);
}

// Four warps, lane by lane of tensor memory: sums to bf16, to shared memory, to C.
template <GemmConfig C>
__device__ void store(Plan<C>& plan, const GemmParams& params, TensorAddress sum, int32 row,
                      int32 column) {
  const int32 quarter = warp_index() % 4;  // the lanes this warp can reach
  const int32 tile_row = 32 * quarter + lane_index();
  const SharedAddress c = shared_address(plan.c);
  mbarrier_wait(plan.sum_full, 0);
  tcgen05_fence_after();
#pragma unroll
  for (int first = 0; first < C.tile_n; first += 32) {
    uint32 words[32];
    tcgen05_load_32x32b_x32(words, sum.lane(32 * quarter) + first);
    tcgen05_wait_load();
#pragma unroll
    for (int i = 0; i < 32; i += 8) {  // 8 elements are 16 bytes
      uint32 packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packed[j] =
            pack_bf16x2(__uint_as_float(words[i + 2 * j]), __uint_as_float(words[i + 2 * j + 1]));
      }
      const uint32 offset = panel_offset(Swizzle::b128, C.tile_m, tile_row, 2 * (first + i));
      store_shared_x4(c + offset, make_uint4(packed[0], packed[1], packed[2], packed[3]));
    }
  }
  tcgen05_fence_before();  // the loads are done when the owner frees the columns
  // The copy engine reads what threads wrote: each writer fences, then all meet, then one sends.
  fence_proxy_async_shared();
  named_barrier_sync<1, 128>();
  if (quarter == 0 && lane_index() == 0) {
    for (int panel = 0; panel < C.tile_n / panel_columns; ++panel) {
      tma_store(&params.c, shared_address(plan.c[panel]), {column + panel * panel_columns, row});
    }
    bulk_commit();
    bulk_wait_read<0>();  // shared memory must outlive the copy
  }
}

// ---- Kernel: 256 threads, grid (rows / tile_m, columns / tile_n)
// ---------------------------------------

template <GemmConfig C>
__device__ void gemm(const GemmParams& params) {
  extern __shared__ __align__(1024) uint8 shared_memory[];
  Plan<C>& plan = *reinterpret_cast<Plan<C>*>(shared_memory);
  const int32 row = static_cast<int32>(blockIdx.x) * C.tile_m;
  const int32 column = static_cast<int32>(blockIdx.y) * C.tile_n;
  const int32 warp = warp_index();

  if (warp == 2) {
    tcgen05_allocate<1>(&plan.tensor_memory, Plan<C>::tensor_columns);
    tcgen05_allocated_all<1>();
  }
  if (threadIdx.x == 0) {
    plan.ring.init(1, 1);
    mbarrier_init(plan.sum_full, 1);
    fence_mbarrier_init();
  }
  tcgen05_fence_before();
  __syncthreads();
  tcgen05_fence_after();
  const TensorAddress sum{plan.tensor_memory};

  if (warp == 0) {
    if (elect_one()) load<C>(plan, params, row, column);
  } else if (warp == 1) {
    if (elect_one()) multiply<C>(plan, sum, params.k);
  } else if (warp >= 4) {
    store<C>(plan, params, sum, row, column);
  }
  __syncwarp();
  __syncthreads();
  if (warp == 2) {
    tcgen05_fence_after();
    tcgen05_free<1>(sum, Plan<C>::tensor_columns);
  }
}

}  // namespace fovea::examples
