// Blackwell's tensor cores and tensor memory (sm_100 and later): allocation, ordering, completion.
//
// Products and the moves between tensor memory and registers have one text per kind and width,
// written by runtime/source.cpp in front of the kernel that uses them:
//
//   tcgen05_mma_f16_ss_cta1(d, a_descriptor, b_descriptor, instruction, accumulate)
//   tcgen05_mma_f16_ts_cta1(d, a, b_descriptor, instruction, accumulate)    a in tensor memory
//   tcgen05_load_32x32b_x32(words, address), tcgen05_store_32x32b_x32(address, words)
//
// One thread issues products and commits; all 32 lanes of a warp move and allocate. Warp w reaches
// tensor-memory lanes 32 (w % 4) .. + 31 alone. cta_group 2 works on the tensor memory of a CTA
// pair.
#pragma once

#include "device/mbarrier.h"

namespace fovea::device {

// lane << 16 | column, in 32-bit cells: 128 lanes x 512 columns per CTA.
struct TensorAddress {
  uint32 value;
  __forceinline__ TensorAddress operator+(uint32 columns) const { return {value + columns}; }
  __forceinline__ TensorAddress lane(uint32 lanes) const { return {value + (lanes << 16)}; }
};

// tcgen05.alloc: blocks until `columns` (a power of two, 32 to 512) are free; the address is
// written to shared memory. For a pair one warp of each CTA allocates.
template <int cta_group>
__forceinline__ void tcgen05_allocate(uint32* address, uint32 columns) {
  if constexpr (cta_group == 1) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     shared_address(address).value),
                 "r"(columns)
                 : "memory");
  } else {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     shared_address(address).value),
                 "r"(columns)
                 : "memory");
  }
}

// tcgen05.dealloc: due before the CTA ends, by the warp that allocated.
template <int cta_group>
__forceinline__ void tcgen05_free(TensorAddress address, uint32 columns) {
  if constexpr (cta_group == 1) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address.value),
                 "r"(columns)
                 : "memory");
  } else {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address.value),
                 "r"(columns)
                 : "memory");
  }
}

// tcgen05.relinquish_alloc_permit: this CTA will not allocate again.
template <int cta_group>
__forceinline__ void tcgen05_allocated_all() {
  if constexpr (cta_group == 1) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  } else {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
  }
}

// tcgen05.commit: one arrival when all this thread's earlier tcgen05 products and copies are
// complete. Implies tcgen05_fence_before().
__forceinline__ void tcgen05_commit(Barrier& barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   shared_address(&barrier).value)
               : "memory");
}

// tcgen05.commit for a pair, arriving at this offset in every CTA whose bit is set in cta_mask.
__forceinline__ void tcgen05_commit_pair(Barrier& barrier, uint16 cta_mask) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0],"
      " %1;" ::"r"(shared_address(&barrier).value),
      "h"(cta_mask)
      : "memory");
}

// tcgen05.fence: what this thread did comes before the barrier operation that follows.
__forceinline__ void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// tcgen05.fence: what this thread does next comes after the barrier operation just passed.
__forceinline__ void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// tcgen05.wait::ld: this thread's loads are in their registers.
__forceinline__ void tcgen05_wait_load() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

// No instruction: what uses these registers stays behind the wait for the load that fills them.
template <int count>
__forceinline__ void tcgen05_hold(uint32 (&words)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// tcgen05.wait::st: this thread's stores are in tensor memory.
__forceinline__ void tcgen05_wait_store() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

}  // namespace fovea::device
