// Single PTX instructions that belong to no unit of their own: addresses, election, barriers
// between warps, clusters, fences, special functions, conversions, matrix moves and small copies.
//
// Rules of these wrappers: one function is one instruction, and its PTX is the text inside asm. The
// comment above names the section of the PTX ISA manual. What has an effect is `volatile` and
// clobbers "memory"; pure arithmetic is neither, so that the compiler may move and drop it. Address
// spaces are types. Named-barrier ids are template arguments: an id in a register makes ptxas
// reserve all 16.
//
// This text is compiled by NVRTC with every function on the device by default; it has no host form.
#pragma once

#include "core/types.h"

namespace fovea::device {

using core::int32;
using core::int64;
using core::uint16;
using core::uint32;
using core::uint64;
using core::uint8;

// Byte address in the .shared::cta window of this CTA; also valid as a .shared::cluster address of
// it.
struct SharedAddress {
  uint32 value;
  __forceinline__ SharedAddress operator+(uint32 bytes) const { return {value + bytes}; }
};

// Byte address in the shared memory of any CTA of the cluster.
struct ClusterAddress {
  uint32 value;
  __forceinline__ ClusterAddress operator+(uint32 bytes) const { return {value + bytes}; }
};

// 64-bit L2 eviction policy, made by createpolicy.
struct CachePolicy {
  uint64 value;
};

__forceinline__ SharedAddress shared_address(const void* pointer) {
  return {static_cast<uint32>(__cvta_generic_to_shared(pointer))};
}

// ---- Who am I
// -------------------------------------------------------------------------------------

// Index of the warp in the CTA, in a form that the compiler knows to be uniform across the warp.
__forceinline__ int32 warp_index() {
  return __shfl_sync(0xffffffffu, static_cast<int32>(threadIdx.x / 32), 0);
}

__forceinline__ int32 lane_index() { return static_cast<int32>(threadIdx.x % 32); }

// elect.sync: true in exactly one lane of a converged warp.
__forceinline__ bool elect_one() {
  uint32 elected;
  asm volatile(
      "{ .reg .pred leader;\n"
      "elect.sync _|leader, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, leader; }"
      : "=r"(elected));
  return elected != 0;
}

// Special register %cluster_ctarank.
__forceinline__ uint32 cluster_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Special register %globaltimer: nanoseconds, in coarse ticks.
__forceinline__ uint64 global_timer() {
  uint64 nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

// ---- Barriers between warps and CTAs ------------------------------------------------------------

// bar.sync (barrier.sync.aligned): waits until `threads` threads of the CTA have come to barrier
// `id`.
template <int id, int threads>
__forceinline__ void named_barrier_sync() {
  static_assert(id >= 0 && id < 16 && threads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

// bar.arrive (barrier.arrive.aligned): counts these threads as come, and goes on.
template <int id, int threads>
__forceinline__ void named_barrier_arrive() {
  static_assert(id >= 0 && id < 16 && threads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

// The same two for an id in a register. ptxas then reserves all 16 barriers, which costs nothing
// where a CTA has the multiprocessor to itself.
template <int threads>
__forceinline__ void named_barrier_sync(int32 id) {
  static_assert(threads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

template <int threads>
__forceinline__ void named_barrier_arrive(int32 id) {
  static_assert(threads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

// barrier.cluster.arrive, releasing this thread's writes to the cluster.
__forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// barrier.cluster.arrive.relaxed: for use after fence_mbarrier_init, which is the release.
__forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// barrier.cluster.wait
__forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mapa: the address of the same variable in CTA `rank` of the cluster.
__forceinline__ ClusterAddress map_to_rank(SharedAddress address, uint32 rank) {
  ClusterAddress mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped.value) : "r"(address.value), "r"(rank));
  return mapped;
}

// setmaxnreg.inc: waits until the CTA's pool can give each thread of the warpgroup `count`
// registers.
template <int count>
__forceinline__ void registers_grow() {
  static_assert(count >= 24 && count <= 256 && count % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// setmaxnreg.dec: gives registers above `count` back to the pool.
template <int count>
__forceinline__ void registers_shrink() {
  static_assert(count >= 24 && count <= 256 && count % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// griddepcontrol.wait: the grids this one depends on have finished and their writes are visible.
__forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents: grids that depend on this one may start.
__forceinline__ void grid_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Fences
// -----------------------------------------------------------------------------------------

// fence.proxy.async on shared memory: this thread's ordinary accesses come before later accesses of
// the copy engine and the tensor cores.
__forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.proxy.async on global memory.
__forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// fence.mbarrier_init: makes barriers just initialised visible to the cluster and the async proxy.
__forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// membar / fence.acq_rel at gpu scope.
__forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- Special functions and packed arithmetic
// ------------------------------------------------------

// ex2.approx: 2^x; denormals are flushed, -infinity gives +0.
__forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx
__forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx
__forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh.approx
__forceinline__ float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// add.f32x2 (sm_100 and later): two additions in one instruction.
__forceinline__ float2 add_f32x2(float2 a, float2 b) {
  uint64 sum;
  asm("add.rn.ftz.f32x2 %0, %1, %2;"
      : "=l"(sum)
      : "l"(__builtin_bit_cast(uint64, a)), "l"(__builtin_bit_cast(uint64, b)));
  return __builtin_bit_cast(float2, sum);
}

// mul.f32x2 (sm_100 and later)
__forceinline__ float2 multiply_f32x2(float2 a, float2 b) {
  uint64 product;
  asm("mul.rn.ftz.f32x2 %0, %1, %2;"
      : "=l"(product)
      : "l"(__builtin_bit_cast(uint64, a)), "l"(__builtin_bit_cast(uint64, b)));
  return __builtin_bit_cast(float2, product);
}

// fma.f32x2 (sm_100 and later): a * b + c
__forceinline__ float2 fma_f32x2(float2 a, float2 b, float2 c) {
  uint64 sum;
  asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;"
      : "=l"(sum)
      : "l"(__builtin_bit_cast(uint64, a)), "l"(__builtin_bit_cast(uint64, b)),
        "l"(__builtin_bit_cast(uint64, c)));
  return __builtin_bit_cast(float2, sum);
}

// max with three inputs (sm_100 and later)
__forceinline__ float max3(float a, float b, float c) {
  float largest;
  asm("max.ftz.f32 %0, %1, %2, %3;" : "=f"(largest) : "f"(a), "f"(b), "f"(c));
  return largest;
}

// max with three inputs (sm_100 and later) that gives NaN if any of them is one
__forceinline__ float max3_nan(float a, float b, float c) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(largest) : "f"(a), "f"(b), "f"(c));
  return largest;
}

// ---- Conversions; the manual's first source is the high half
// --------------------------------------

// cvt.rn.bf16x2.f32
__forceinline__ uint32 pack_bf16x2(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.rn.f16x2.f32
__forceinline__ uint32 pack_f16x2(float low, float high) {
  uint32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.f32.f16: exact
__forceinline__ float half_to_float(uint16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

// cvt.rn.satfinite.e4m3x2.f32
__forceinline__ uint16 pack_e4m3x2(float low, float high) {
  uint16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.rn.satfinite.e5m2x2.f32
__forceinline__ uint16 pack_e5m2x2(float low, float high) {
  uint16 packed;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.f32.f16 of both halves
__forceinline__ float2 unpack_f16x2(uint32 packed) {
  float2 wide;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high; }"
      : "=f"(wide.x), "=f"(wide.y)
      : "r"(packed));
  return wide;
}

// prmt: byte i of the result is the one that nibble i of `selector` names: 0..3 of a, 4..7 of b.
template <uint32 selector>
__forceinline__ uint32 permute_bytes(uint32 a, uint32 b) {
  uint32 mixed;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mixed) : "r"(a), "r"(b), "n"(selector));
  return mixed;
}

// max.NaN.f32: NaN where either is
__forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// cvt.rn.satfinite.e4m3x2.f32 twice, first in the lowest byte.
__forceinline__ uint32 pack_e4m3x4(float x0, float x1, float x2, float x3) {
  uint32 packed;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// cvt.rn.f16x2.e4m3x2: exact
__forceinline__ uint32 unpack_e4m3x2(uint16 packed) {
  uint32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
  return halves;
}

// Two signed bytes as fp16 numbers, exact: 1024 + (x + 128) has x + 128 in its low byte.
__forceinline__ uint32 unpack_s8x2(uint16 packed) {
  const uint32 biased = permute_bytes<0x4140>(uint32{packed} ^ 0x8080u, 0x64u);
  uint32 halves;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(biased), "r"(0x64806480u));
  return halves;
}

// cvt.rn.f16x2.e5m2x2: exact
__forceinline__ uint32 unpack_e5m2x2(uint16 packed) {
  uint32 halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(packed));
  return halves;
}

// cvt.f32.f16: exact
__forceinline__ float widen_f16(uint16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// mov: the same word in a register of its own, for while a product has the first one.
__forceinline__ uint32 register_copy(uint32 word) {
  uint32 copy;
  asm("mov.b32 %0, %1;" : "=r"(copy) : "r"(word));
  return copy;
}

// ---- Matrices between registers and shared memory
// ---------------------------------------------------

// ldmatrix: four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix
// l / 8, and receives the elements (l / 4, 2 (l % 4) + {0, 1}) of each.
__forceinline__ void load_matrix_x4(uint32 (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row.value)
               : "memory");
}

// ldmatrix.trans: each matrix transposed on the way.
__forceinline__ void load_matrix_x4_transposed(uint32 (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row.value)
               : "memory");
}

// stmatrix: the inverse of ldmatrix.
__forceinline__ void store_matrix_x4(SharedAddress row, uint32 m0, uint32 m1, uint32 m2,
                                     uint32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row.value),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// stmatrix.trans
__forceinline__ void store_matrix_x4_transposed(SharedAddress row, uint32 m0, uint32 m1, uint32 m2,
                                                uint32 m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row.value),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

// mma.m16n8k16, bf16: d += a b for one warp. d is laid out as 16 rows of WgmmaAccumulator (tile.h),
// a as 16 rows of WgmmaOperandA; lane l gives b of column l / 4 at k = 2 (l % 4) + {0, 1} and 8 on.
__forceinline__ void mma_bf16(float& d0, float& d1, float& d2, float& d3, const uint32 (&a)[4],
                              uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.m16n8k16, f16
__forceinline__ void mma_f16(float& d0, float& d1, float& d2, float& d3, const uint32 (&a)[4],
                             uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Thread copies
// --------------------------------------------------------------------------------

// ld.shared.v4
__forceinline__ uint4 load_shared_x4(SharedAddress address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address.value)
               : "memory");
  return v;
}

// st.shared.v4
__forceinline__ void store_shared_x4(SharedAddress address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address.value), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// st.async: four words into the shared memory of another CTA; its barrier counts the 16 bytes.
__forceinline__ void store_async_x4(ClusterAddress address, uint4 v, ClusterAddress barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address.value),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier.value)
      : "memory");
}

// cp.async.cg: 16 bytes, of which the first source_bytes are read and the rest are zero.
__forceinline__ void copy_async_16(SharedAddress target, const void* source, uint32 source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target.value), "l"(source),
               "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group
__forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: at most `pending` of this thread's groups are left.
template <int pending>
__forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// red.add.v4.f32: four sums in global memory, 16-byte aligned.
__forceinline__ void reduce_add_x4(float* address, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// ld.acquire.gpu: what was released by whoever wrote this word comes before what follows.
__forceinline__ uint32 load_acquire(const uint32* address) {
  uint32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// red.release.gpu: adds to a word, releasing what this thread has done before.
__forceinline__ void add_release(uint32* address, uint32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// ---- Cluster launch control (sm_100 and later)
// ----------------------------------------------------

// clusterlaunchcontrol.try_cancel: asks for the work of a CTA (or cluster) not yet launched. The
// 16-byte answer arrives in shared memory and counts 16 bytes on the barrier.
__forceinline__ void launch_control_try_cancel(SharedAddress answer, SharedAddress barrier) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], "
      "[%1];" ::"r"(answer.value),
      "r"(barrier.value)
      : "memory");
}

// The same with the answer, and its bytes, for every CTA of the cluster, at the same offsets.
__forceinline__ void launch_control_try_cancel_all(SharedAddress answer, SharedAddress barrier) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
      ".multicast::cluster::all.b128 [%0], [%1];" ::"r"(answer.value),
      "r"(barrier.value)
      : "memory");
}

// clusterlaunchcontrol.query_cancel: whether the answer grants work, and the x index of its first
// CTA (meaningless where it does not).
__forceinline__ bool launch_control_granted(uint64 low, uint64 high, uint32& first_cta_x) {
  uint32 granted;
  asm("{ .reg .pred granted;\n"
      ".reg .b128 answer;\n"
      "mov.b128 answer, {%2, %3};\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 granted, answer;\n"
      "selp.u32 %0, 1, 0, granted;\n"
      "mov.u32 %1, 0;\n"
      "@granted clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, answer; }"
      : "=r"(granted), "=r"(first_cta_x)
      : "l"(low), "l"(high));
  return granted != 0;
}

}  // namespace fovea::device
