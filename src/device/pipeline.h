// A ring of stages between the warps that fill buffers and the warps that use them.
//
//   producer                                  consumer
//   ring.wait_free(state)                     ring.wait_full(state)
//   ring.expect(state, bytes)                 ... use stage state.stage ...
//   tma_load(..., ring.full[state.stage])     ring.release(state)
//   state.advance()                           state.advance()
//
// full[s] counts the producers and the bytes in flight; free[s] counts the consumers that let go.
// Both sides start with a fresh RingState: the producer waits for the parity before its own, which
// passes at once in the first round.
#pragma once

#include "device/mbarrier.h"
#include "device/tile.h"

namespace fovea::device {

//
// Where one side is in another CTA of the cluster, waits acquire what that CTA released.
template <int stages, bool of_cluster = false>
struct Ring {
  using State = RingState<stages>;

  Barrier full[stages];
  Barrier free[stages];

  // By one thread, before fence_mbarrier_init() and a barrier of the CTA (or cluster).
  __forceinline__ void init(uint32 producers, uint32 consumers) {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(full[stage], producers);
      mbarrier_init(free[stage], consumers);
    }
  }

  __forceinline__ void wait_free(const State& state) { wait(free[state.stage], state.parity ^ 1u); }

  // Whether wait_free() would pass at once.
  __forceinline__ bool is_free(const State& state) {
    return mbarrier_try_wait(free[state.stage], state.parity ^ 1u);
  }

  // The producer's arrival, with the bytes that copies will bring.
  __forceinline__ void expect(const State& state, uint32 bytes) {
    mbarrier_arrive_expect_bytes(full[state.stage], bytes);
  }

  __forceinline__ void wait_full(const State& state) { wait(full[state.stage], state.parity); }

  // Whether wait_full() would pass at once.
  __forceinline__ bool is_full(const State& state) {
    return mbarrier_test_wait(full[state.stage], state.parity);
  }

  __forceinline__ void release(const State& state) { mbarrier_arrive(free[state.stage]); }

  static __forceinline__ void wait(Barrier& barrier, uint32 parity) {
    if constexpr (of_cluster) {
      mbarrier_wait_cluster(barrier, parity);
    } else {
      mbarrier_wait(barrier, parity);
    }
  }
};

}  // namespace fovea::device
