// Attention on Hopper with P in registers: S = Q K^T from shared memory, P = exp2(S) repacked as
// the A fragment of O += P V, V MN-major. No maximum is taken: the test keeps scores small. One
// warpgroup of 64 queries and one loading warp, 64 keys to a block, head dimension 64, f32 output.
#include "tests/ptx/kernels/ptx.h"

struct alignas(1024) Shared {
  u16 q[64 * 64], k[2][64 * 64], v[2][64 * 64];
  u64 q_full, full[2], empty[2];
};

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R32 R4(0), R4(4), R4(8), R4(12), R4(16), R4(20), R4(24), R4(28)
#define LIST32                                                                                   \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
  "25,%26,%27,%28,%29,%30,%31}"

DEVICE void scores(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " LIST32 ", %32, %33, p, 1, 1, 0, 0; }"
      : R32
      : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void output(float (&d)[32], const u32* p, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " LIST32
               ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : R32
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(b));
}
DEVICE void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wait_all(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i])::"memory");
}
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

extern "C" __global__ void __launch_bounds__(160, 1)
    attention(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
              const __grid_constant__ TensorMap map_v, float* out, int blocks, float scale_log2) {
  extern __shared__ unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    barrier_init(&s.q_full, 1);
    for (int i = 0; i < 2; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (elect()) {
      barrier_expect(&s.q_full, 64 * 64 * 2);
      tma_load(s.q, &map_q, &s.q_full, 0, blockIdx.x * 64);
#pragma unroll 1
      for (int j = 0; j < blocks; j++) {
        const int stage = j & 1;
        barrier_wait(&s.empty[stage], (j >> 1 & 1) ^ 1);
        barrier_expect(&s.full[stage], 2 * 64 * 64 * 2);
        tma_load(s.k[stage], &map_k, &s.full[stage], 0, j * 64);
        tma_load(s.v[stage], &map_v, &s.full[stage], 0, j * 64);
      }
    }
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float o[32], sum0 = 0, sum1 = 0;
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0;
  barrier_wait(&s.q_full, 0);
#pragma unroll 1
  for (int j = 0; j < blocks; j++) {
    const int stage = j & 1;
    barrier_wait(&s.full[stage], j >> 1 & 1);
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; i++) d[i] = 0;
    fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
      scores(d, hopper_descriptor(s.q + i * 16, 16), hopper_descriptor(s.k[stage] + i * 16, 16),
             i > 0);
    commit();
    wait_all(d);
    u32 p[16];
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float e0 = exp2_approx(d[i] * scale_log2), e1 = exp2_approx(d[i + 1] * scale_log2);
      const float e2 = exp2_approx(d[i + 2] * scale_log2), e3 = exp2_approx(d[i + 3] * scale_log2);
      sum0 += e0 + e1;
      sum1 += e2 + e3;
      p[i / 2] = pack_bf16(e0, e1);
      p[i / 2 + 1] = pack_bf16(e2, e3);
    }
    fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
      output(o, p + 4 * i, hopper_descriptor(s.v[stage] + i * 16 * 64, 8192));
    commit();
    wait_all(o);
    if (threadIdx.x == 0) barrier_arrive(&s.empty[stage]);
  }
  sum0 = 1.0f / quad_sum(sum0);
  sum1 = 1.0f / quad_sum(sum1);
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    float* to = out + (blockIdx.x * 64 + warp * 16 + lane / 4) * 64 + i / 4 * 8 + lane % 4 * 2;
    to[0] = o[i] * sum0;
    to[1] = o[i + 1] * sum0;
    to[8 * 64] = o[i + 2] * sum1;
    to[8 * 64 + 1] = o[i + 3] * sum1;
  }
}
