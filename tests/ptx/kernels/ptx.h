// One function per instruction, for the test kernels of this folder only.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  char bytes[128];
};

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
DEVICE bool elect() {
  u32 p;
  asm volatile("{ .reg .pred P; elect.sync _|P, 0xffffffff; selp.b32 %0, 1, 0, P; }" : "=r"(p));
  return p != 0;
}
DEVICE u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void barrier_init(u64* b, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(n)
               : "memory");
}
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_expect(u64* b, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
      "r"(bytes)
      : "memory");
}
DEVICE void barrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(b))
               : "memory");
}
DEVICE void barrier_arrive_leader(u64* b) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   shared_address(b) & 0xfeffffffu)
               : "memory");
}
DEVICE void barrier_wait(u64* b, u32 parity) {
  asm volatile(
      "{ .reg .pred P; W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P, [%0], %1; @P bra "
      "D; bra W; D: }" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}
DEVICE void barrier_wait_cluster(u64* b, u32 parity) {
  asm volatile(
      "{ .reg .pred P; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [%0], %1; @P "
      "bra D; bra W; D: }" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}
DEVICE void tma_load(void* to, const TensorMap* map, u64* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2,%3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}
DEVICE void tma_load_pair(void* to, const TensorMap* map, u64* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::"
      "bytes [%0], [%1, {%2,%3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier) & 0xfeffffffu)
      : "memory");
}
DEVICE void tma_store(const TensorMap* map, const void* from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1,%2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(shared_address(from))
      : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int kId, int kThreads>
DEVICE void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
DEVICE u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE void stmatrix4(void* p, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(p)),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// K-major or MN-major operand in rows of 128 bytes, 128-byte swizzle.
DEVICE u64 hopper_descriptor(const void* p, u32 leading_bytes) {
  return static_cast<u64>((shared_address(p) & 0x3ffff) >> 4) |
         static_cast<u64>(leading_bytes >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 |
         1ull << 62;
}
DEVICE u64 blackwell_descriptor(const void* p, u32 leading_bytes) {
  return static_cast<u64>((shared_address(p) & 0x3ffff) >> 4) |
         static_cast<u64>(leading_bytes >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 |
         1ull << 46 | 2ull << 61;
}
