// Warpgroup matrix products (sm_90a): ordering. The product itself has one text per shape, because
// an asm string must be a literal; runtime/source.cpp writes the shapes a kernel needs in front of
// it:
//
//   wgmma_m64n128k16_f32_bf16_ss_kk(d, a_descriptor, b_descriptor, accumulate)
//
//   f32   accumulator, float (&d)[n / 2] per thread, laid out as WgmmaAccumulator in tile.h; s32,
//         int32 (&d)[n / 2], of s8
//   bf16  element type of a and b: bf16, f16 (k16), e4m3, e5m2 (k32; a and b types may differ:
//         e4m3_e5m2), s8 (k32)
//   ss    a from shared memory, by descriptor;  rs: from registers, uint32 (&a)[4], as
//         WgmmaOperandA
//   kk    majorness of a and b: k, or m for "MN-major" (16-bit types only)
//
// A product is asynchronous: from its issue until the wait_group that covers its commit, neither d
// nor an operand in registers may be touched.
#pragma once

#include "device/ptx.h"

namespace fovea::device {

// wgmma.fence: orders register and shared-memory accesses of the warpgroup before the products that
// follow. Needed before the first product and whenever registers have been written in between.
__forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: the products issued so far form a group.
__forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: at most `pending` of the latest groups are unfinished.
template <int pending>
__forceinline__ void wgmma_wait() {
  static_assert(pending >= 0 && pending < 8);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps what `rare` follows from in front of the next wait. ptxas moves arithmetic, and votes,
// across a wait: behind it exponentials run when the product has ended, instead of under it. It
// moves no store, and cannot know that this one hardly ever happens. NVRTC 12.8 to 13.0 need none;
// the store costs up to 1 % there, what 13.2 does without it up to 6 % (docs/kernels/fwd_sm90.md).
__forceinline__ void wgmma_keep_before_wait(bool rare, uint32& word) {
  constexpr int32 compiler = 100 * __CUDACC_VER_MAJOR__ + __CUDACC_VER_MINOR__;
  if constexpr (compiler > 1300) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %0, 0;\n"
        "@p st.shared.u32 [%1], %0;\n"
        "}" ::"r"(uint32{rare}),
        "r"(shared_address(&word).value)
        : "memory");
  }
}

// No instruction: stops the compiler from moving uses of these registers across this point. The
// compiler does not know that a product in flight still writes them.
template <int count>
__forceinline__ void wgmma_hold(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int count>
__forceinline__ void wgmma_hold(int32 (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int count>
__forceinline__ void wgmma_hold(uint32 (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

}  // namespace fovea::device
