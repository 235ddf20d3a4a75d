// C = A B^T on Hopper: one warp copies, two warpgroups multiply, each 64 rows of the tile.
//
// Per tile of 128 x 128 x 64: 2 x 128 x 128 x 64 FLOP at 4096 a cycle (dense bf16) are 512 cycles
// of the tensor cores; 32 KB come in by TMA, 512 cycles at 64 bytes a cycle from L2; the tensor
// cores read A and B from shared memory, (64 + 128) x 64 x 2 bytes for each warpgroup, 384 cycles
// at 128 bytes a cycle. So the tile is bound by copy and product alike; 128 x 256 (--tile-n 256)
// needs 3/4 of the bytes per product.
#include "device/pipeline.h"
#include "device/tma.h"
#include "device/wgmma.h"
#include "examples/gemm/gemm.h"

namespace fovea::examples {

using namespace device;

inline constexpr int panel_columns = 64;  // 128 bytes of bf16: one row of the swizzle

// ---- Plan: shared memory, barriers, registers
// -------------------------------------------------------

template <GemmConfig C>
struct Plan {
  alignas(1024) uint16 a[C.stages][C.tile_m * C.tile_k];  // [row][k], swizzled
  alignas(1024) uint16 b[C.stages][C.tile_n * C.tile_k];  // [column][k], swizzled
  alignas(
      1024) uint16 c[C.tile_n / panel_columns][C.tile_m * panel_columns];  // [panel][row][column]
  Ring<C.stages> ring;  // full: 1 producer and the bytes; free: each consumer warp

  static_assert(C.tile_m == 128, "two warpgroups of 64 rows");
  static_assert(C.tile_k == panel_columns && C.tile_n % panel_columns == 0 && C.tile_n <= 256);
  static constexpr uint32 stage_bytes = (C.tile_m + C.tile_n) * C.tile_k * 2;
  static constexpr uint32 consumer_warps = 8;
  // 128 x 40 + 256 x 232 is what 384 threads have at entry, 168 each.
  static constexpr int producer_registers = 40;
  static constexpr int consumer_registers = 232;
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

// A warpgroup: sum [64 x tile_n] += a [64 x 64] b^T [64 x tile_n], stage by stage. gemm_product()
// is the wgmma of this tile_n, written in front of this text by the host.
template <GemmConfig C>
__device__ void multiply(Plan<C>& plan, float (&sum)[C.tile_n / 2], int32 warpgroup, int32 k_end) {
  constexpr uint32 group_of_8_rows =
      8 * 128;  // bytes; leading is not used by swizzled K-major tiles
  RingState<C.stages> state;
  int32 previous = 0;
  for (int32 k = 0; k < k_end; k += C.tile_k) {
    plan.ring.wait_full(state);
    const SharedAddress a = shared_address(&plan.a[state.stage][64 * warpgroup * C.tile_k]);
    const SharedAddress b = shared_address(plan.b[state.stage]);
    const uint64 a_tile = wgmma_descriptor(Swizzle::b128, a.value, 0, group_of_8_rows);
    const uint64 b_tile = wgmma_descriptor(Swizzle::b128, b.value, 0, group_of_8_rows);
    wgmma_hold(sum);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.tile_k / 16; ++step) {
      gemm_product(sum, descriptor_advance(a_tile, 32 * step),
                   descriptor_advance(b_tile, 32 * step), k > 0 || step > 0);
    }
    wgmma_commit();
    // The products of the stage before are done with its memory. Each warp speaks for itself:
    // waiting covers the waiting warp's own part of a product.
    wgmma_wait<1>();
    wgmma_hold(sum);
    if (k > 0 && lane_index() == 0) mbarrier_arrive(plan.ring.free[previous]);
    previous = state.stage;
    state.advance();
  }
  wgmma_wait<0>();
  wgmma_hold(sum);
}

// A warpgroup: its 64 rows to bf16, to shared memory, to C. The store clips at C's edges.
template <GemmConfig C>
__device__ void store(Plan<C>& plan, const GemmParams& params, const float (&sum)[C.tile_n / 2],
                      int32 warpgroup, int32 row, int32 column) {
  const int32 warp_row = 64 * warpgroup + 16 * (warp_index() % 4);
  const int32 lane = lane_index();
  const SharedAddress c = shared_address(plan.c);
#pragma unroll
  for (int j = 0; j < C.tile_n / 16; ++j) {  // 16 x 16 elements
    const uint32 offset = panel_offset(Swizzle::b128, C.tile_m, warp_row + StoreMatrixX4::row(lane),
                                       2 * (16 * j + StoreMatrixX4::col(lane)));
    store_matrix_x4(c + offset, pack_bf16x2(sum[8 * j], sum[8 * j + 1]),
                    pack_bf16x2(sum[8 * j + 2], sum[8 * j + 3]),
                    pack_bf16x2(sum[8 * j + 4], sum[8 * j + 5]),
                    pack_bf16x2(sum[8 * j + 6], sum[8 * j + 7]));
  }
  // The copy engine reads what threads wrote: each writer fences, then all meet, then one sends.
  fence_proxy_async_shared();
  if (warpgroup == 0) {
    named_barrier_sync<1, 128>();
  } else {
    named_barrier_sync<2, 128>();
  }
  if (warp_index() % 4 == 0 && lane == 0) {
    for (int panel = 0; panel < C.tile_n / panel_columns; ++panel) {
      tma_store(&params.c, shared_address(&plan.c[panel][64 * warpgroup * panel_columns]),
                {column + panel * panel_columns, row + 64 * warpgroup});
    }
    bulk_commit();
    bulk_wait_read<0>();  // shared memory must outlive the copy
  }
}

// ---- Kernel: 384 threads, grid (rows / tile_m, columns / tile_n)
// ---------------------------------------

template <GemmConfig C>
__device__ void gemm(const GemmParams& params) {
  extern __shared__ __align__(1024) uint8 shared_memory[];
  Plan<C>& plan = *reinterpret_cast<Plan<C>*>(shared_memory);
  const int32 row = static_cast<int32>(blockIdx.x) * C.tile_m;
  const int32 column = static_cast<int32>(blockIdx.y) * C.tile_n;

  if (threadIdx.x == 0) {
    plan.ring.init(1, Plan<C>::consumer_warps);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int32 warp = warp_index();
  if (warp < 4) {
    registers_shrink<Plan<C>::producer_registers>();
    if (warp == 0 && elect_one()) load<C>(plan, params, row, column);
  } else {
    registers_grow<Plan<C>::consumer_registers>();
    const int32 warpgroup = warp / 4 - 1;
    float sum[C.tile_n / 2];
    multiply<C>(plan, sum, warpgroup, params.k);
    store<C>(plan, params, sum, warpgroup, row, column);
  }
}

}  // namespace fovea::examples
