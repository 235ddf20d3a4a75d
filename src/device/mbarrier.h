// mbarrier objects: counters in shared memory on which threads and asynchronous copies arrive.
//
// A barrier counts the arrivals and the bytes still missing in the current phase. When both reach
// zero the phase completes, the counts are set up again and the phase bit flips. Waiting names the
// parity of the phase waited for: on a fresh barrier parity 0 blocks until the first phase
// completes and parity 1 passes at once.
#pragma once

#include "device/ptx.h"

namespace fovea::device {

struct alignas(8) Barrier {
  uint64 state;
};

// mbarrier.init. Follow the last one by fence_mbarrier_init() and a CTA or cluster barrier.
__forceinline__ void mbarrier_init(Barrier& barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier).value),
               "r"(arrivals)
               : "memory");
}

// mbarrier.inval: the memory may be used for something else.
__forceinline__ void mbarrier_invalidate(Barrier& barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier).value)
               : "memory");
}

// mbarrier.arrive: one arrival; releases this thread's earlier accesses to the CTA.
__forceinline__ void mbarrier_arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier).value)
               : "memory");
}

// mbarrier.arrive with release at cluster scope, on a barrier of any CTA of the cluster.
__forceinline__ void mbarrier_arrive_remote(ClusterAddress barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier.value)
               : "memory");
}

// The same with release at CTA scope, which orders what this thread has read, and products and
// copies that it has waited for, before copies that follow. Release at cluster scope is a fence of
// all memory: it waits for every store and reduction of the thread, some 700 cycles.
__forceinline__ void mbarrier_arrive_remote_read(ClusterAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}

// mbarrier.expect_tx: this phase also waits for `bytes` more.
__forceinline__ void mbarrier_expect_bytes(Barrier& barrier, uint32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(
                   shared_address(&barrier).value),
               "r"(bytes)
               : "memory");
}

// mbarrier.arrive.expect_tx: both at once.
__forceinline__ void mbarrier_arrive_expect_bytes(Barrier& barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(&barrier).value),
               "r"(bytes)
               : "memory");
}

// mbarrier.arrive.expect_tx on a barrier of any CTA of the cluster.
__forceinline__ void mbarrier_arrive_expect_bytes_remote(ClusterAddress barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(
                   barrier.value),
               "r"(bytes)
               : "memory");
}

// cp.async.mbarrier.arrive.noinc: one arrival once this thread's earlier cp.async have landed.
__forceinline__ void mbarrier_arrive_after_copies(Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier).value)
      : "memory");
}

// mbarrier.try_wait: whether the phase of this parity has completed; may sleep for a while that the
// hardware chooses before it says no.
__forceinline__ bool mbarrier_try_wait(Barrier& barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(shared_address(&barrier).value), "r"(parity)
      : "memory");
  return done != 0;
}

// mbarrier.test_wait: the same without sleeping.
__forceinline__ bool mbarrier_test_wait(Barrier& barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(shared_address(&barrier).value), "r"(parity)
      : "memory");
  return done != 0;
}

// mbarrier.try_wait that also acquires what other CTAs of the cluster released by arriving here.
__forceinline__ bool mbarrier_try_wait_cluster(Barrier& barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(shared_address(&barrier).value), "r"(parity)
      : "memory");
  return done != 0;
}

__forceinline__ void mbarrier_wait(Barrier& barrier, uint32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

__forceinline__ void mbarrier_wait_cluster(Barrier& barrier, uint32 parity) {
  while (!mbarrier_try_wait_cluster(barrier, parity)) {
  }
}

}  // namespace fovea::device
