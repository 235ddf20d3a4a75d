// C = A B^T, bf16 in and out: 128x128 tiles, TMA into a ring of 3 stages, two consumer warpgroups
// of 64 rows with wgmma, stmatrix and a TMA store. Two tiles per CTA, one after the other.
#include "tests/ptx/kernels/ptx.h"

constexpr int kStages = 3, kDepth = 64;

struct alignas(1024) Shared {
  u16 a[kStages][128 * kDepth];
  u16 b[kStages][128 * kDepth];
  u16 c[2][2][64 * 64];  // [warpgroup][column half]
  u64 full[kStages], empty[kStages];
};

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)

DEVICE void multiply(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%"
      "25,%26,%27,"
      "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,"
      "%51,%52,%53,"
      "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, 0; }"
      : R16(0), R16(16), R16(32), R16(48)
      : "l"(a), "l"(b), "r"(accumulate));
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
         const __grid_constant__ TensorMap map_c, int steps) {
  extern __shared__ unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 2);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x / 32 == 8 && elect()) {
      int stage = 0, phase = 1;
#pragma unroll 1
      for (int tile = 0; tile < 2; tile++)
#pragma unroll 1
        for (int k = 0; k < steps; k++) {
          barrier_wait(&s.empty[stage], phase);
          barrier_expect(&s.full[stage], 2 * 128 * kDepth * 2);
          tma_load(s.a[stage], &map_a, &s.full[stage], k * kDepth, blockIdx.x * 128);
          tma_load(s.b[stage], &map_b, &s.full[stage], k * kDepth, tile * 128);
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  int stage = 0, phase = 0;
#pragma unroll 1
  for (int tile = 0; tile < 2; tile++) {
    float d[64];
#pragma unroll
    for (int i = 0; i < 64; i++) d[i] = 0;
#pragma unroll 1
    for (int k = 0; k < steps; k++) {
      barrier_wait(&s.full[stage], phase);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < kDepth / 16; i++)
        multiply(d, hopper_descriptor(s.a[stage] + group * 64 * 64 + i * 16, 16),
                 hopper_descriptor(s.b[stage] + i * 16, 16), 1);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i])::"memory");
      if (threadIdx.x % 128 == 0) barrier_arrive(&s.empty[stage]);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    // The store of the previous tile must have read its staging buffer.
    if (threadIdx.x % 128 == 0) bulk_wait_read();
    if (group == 0)
      named_sync<1, 128>();
    else
      named_sync<2, 128>();
#pragma unroll
    for (int x = 0; x < 8; x++) {
      const int row = warp * 16 + lane % 16, column = x % 4 * 16 + lane / 16 * 8;
      u32 offset = row * 128 + column * 2;
      offset ^= (offset >> 7 & 7) << 4;
      stmatrix4(reinterpret_cast<char*>(s.c[group][x / 4]) + offset,
                pack_bf16(d[8 * x], d[8 * x + 1]), pack_bf16(d[8 * x + 2], d[8 * x + 3]),
                pack_bf16(d[8 * x + 4], d[8 * x + 5]), pack_bf16(d[8 * x + 6], d[8 * x + 7]));
    }
    proxy_fence();
    if (group == 0)
      named_sync<1, 128>();
    else
      named_sync<2, 128>();
    if (threadIdx.x % 128 == 0) {
      for (int half = 0; half < 2; half++)
        tma_store(&map_c, s.c[group][half], tile * 128 + half * 64, blockIdx.x * 128 + group * 64);
      bulk_commit();
    }
  }
  if (threadIdx.x % 128 == 0) bulk_wait_read();
}
