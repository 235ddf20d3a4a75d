// C = A B^T with tcgen05, bf16 in, f32 out: one accumulator of 128 (or, with a pair of CTAs, 256)
// rows and 128 columns in tensor memory; warp 0 loads, warp 1 multiplies, warps 4 to 7 store. Two
// tiles per CTA, so that the accumulator is handed back and forth.
#include "tests/ptx/kernels/ptx.h"

constexpr int kStages = 3, kDepth = 64, kColumns = 128;

template <int kGroup>
struct alignas(1024) Shared {
  u16 a[kStages][128 * kDepth];
  u16 b[kStages][kColumns / kGroup * kDepth];
  u64 full[kStages], empty[kStages], accumulator_full, accumulator_empty;
  u32 tensor_address;
};

template <int kGroup>
DEVICE void multiply(u32 d, u64 a, u64 b, u32 shape, int accumulate) {
  if constexpr (kGroup == 1)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, "
        "%3, p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(shape), "r"(accumulate)
        : "memory");
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, "
        "%3, p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(shape), "r"(accumulate)
        : "memory");
}
template <int kGroup>
DEVICE void commit(u64* barrier) {
  if constexpr (kGroup == 1)
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
            shared_address(barrier))
        : "memory");
  else
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%0], %1;" ::"r"(shared_address(barrier)),
        "h"(static_cast<u16>(3))
        : "memory");
}
DEVICE void load_32(u32 address, u32 (&r)[32]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
      "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, [%32];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15]), "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]),
        "=r"(r[21]), "=r"(r[22]), "=r"(r[23]), "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]),
        "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
      : "r"(address));
}

template <int kGroup>
DEVICE void gemm(const TensorMap* map_a, const TensorMap* map_b, float* c, int steps, int ld) {
  extern __shared__ unsigned char raw[];
  using S = Shared<kGroup>;
  S& s = *reinterpret_cast<S*>(raw);
  const u32 rank = kGroup == 2 ? cluster_rank() : 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&s.full[i], kGroup);
      barrier_init(&s.empty[i], 1);
    }
    barrier_init(&s.accumulator_full, 1);
    barrier_init(&s.accumulator_empty, 128 * kGroup);
    barrier_init_fence();
  }
  if (warp == 2) {
    if constexpr (kGroup == 1) {
      asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 128;" ::"r"(
                       shared_address(&s.tensor_address))
                   : "memory");
      asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    } else {
      asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 128;" ::"r"(
                       shared_address(&s.tensor_address))
                   : "memory");
      asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }
  }
  if constexpr (kGroup == 2)
    cluster_sync();
  else
    __syncthreads();
  const u32 tensor = s.tensor_address;
  const int row0 = blockIdx.x * 128;
  constexpr u32 kShape =
      1u << 4 | 1u << 7 | 1u << 10 | (kColumns / 8) << 17 | (128 * kGroup / 16) << 24;
  if (warp == 0 && elect()) {
    int stage = 0, phase = 1;
#pragma unroll 1
    for (int tile = 0; tile < 2; tile++)
#pragma unroll 1
      for (int k = 0; k < steps; k++) {
        barrier_wait_cluster(&s.empty[stage], phase);
        const u32 bytes = (128 + kColumns / kGroup) * kDepth * 2;
        if constexpr (kGroup == 1) {
          barrier_expect(&s.full[stage], bytes);
          tma_load(s.a[stage], map_a, &s.full[stage], k * kDepth, row0);
          tma_load(s.b[stage], map_b, &s.full[stage], k * kDepth, tile * kColumns);
        } else {
          asm volatile(
              "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(
                  shared_address(&s.full[stage]) & 0xfeffffffu),
              "r"(bytes)
              : "memory");
          tma_load_pair(s.a[stage], map_a, &s.full[stage], k * kDepth, row0);
          tma_load_pair(s.b[stage], map_b, &s.full[stage], k * kDepth,
                        tile * kColumns + rank * (kColumns / 2));
        }
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
  } else if (warp == 1 && rank == 0 && elect()) {
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int tile = 0; tile < 2; tile++) {
      barrier_wait_cluster(&s.accumulator_empty, tile & 1 ^ 1);
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#pragma unroll 1
      for (int k = 0; k < steps; k++) {
        barrier_wait_cluster(&s.full[stage], phase);
        for (int i = 0; i < kDepth / 16; i++)
          multiply<kGroup>(tensor, blackwell_descriptor(s.a[stage] + i * 16, 16),
                           blackwell_descriptor(s.b[stage] + i * 16, 16), kShape, k + i > 0);
        commit<kGroup>(&s.empty[stage]);
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
      commit<kGroup>(&s.accumulator_full);
    }
  } else if (warp >= 4) {
#pragma unroll 1
    for (int tile = 0; tile < 2; tile++) {
      barrier_wait_cluster(&s.accumulator_full, tile);
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
      for (int x = 0; x < kColumns / 32; x++) {
        u32 r[32];
        load_32(tensor + ((warp % 4 * 32) << 16) + x * 32, r);
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        float* to =
            c + static_cast<u64>(row0 + warp % 4 * 32 + lane) * ld + tile * kColumns + x * 32;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          asm volatile("" : "+r"(r[i]), "+r"(r[i + 1]), "+r"(r[i + 2]), "+r"(r[i + 3]));
          *reinterpret_cast<uint4*>(to + i) = make_uint4(r[i], r[i + 1], r[i + 2], r[i + 3]);
        }
      }
      asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
      if constexpr (kGroup == 1)
        barrier_arrive(&s.accumulator_empty);
      else
        barrier_arrive_leader(&s.accumulator_empty);
    }
  }
  __syncwarp();
  if constexpr (kGroup == 2)
    cluster_sync();
  else
    __syncthreads();
  if (warp == 2) {
    if constexpr (kGroup == 1)
      asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 128;" ::"r"(tensor));
    else
      asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 128;" ::"r"(tensor));
  }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    gemm_single(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                float* c, int steps, int ld) {
  gemm<1>(&map_a, &map_b, c, steps, ld);
}
extern "C" __global__ void __launch_bounds__(256, 1) __cluster_dims__(2, 1, 1)
    gemm_pair(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
              float* c, int steps, int ld) {
  gemm<2>(&map_a, &map_b, c, steps, ld);
}
