// Events of a timeline (core/trace.h). Where a configuration does not trace, nothing of this is in
// its code.
#pragma once

#include "core/trace.h"
#include "device/ptx.h"

namespace fovea::device {

using core::TracePhase;

// Special register %clock64: cycles of this multiprocessor, the same for all warps of a CTA.
__forceinline__ uint64 clock_cycles() {
  uint64 cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

// How many events each role has written: in shared memory, since registers are dear.
template <bool on>
struct TraceCounts {
  uint32 count[core::trace_roles];
};
template <>
struct TraceCounts<false> {};

// By one thread, before a barrier of the CTA.
template <bool on>
__forceinline__ void trace_begin(TraceCounts<on>& counts) {
  if constexpr (on) {
    for (uint32& count : counts.count) count = 0;
  }
}

// The role begins a phase; one thread of it is the scribe. Events beyond the capacity are lost.
template <bool on>
__forceinline__ void trace_mark(TraceCounts<on>& counts, const core::TraceBuffer& buffer,
                                int32 role, bool scribe, TracePhase phase) {
  if constexpr (on) {
    if (!scribe || static_cast<int32>(blockIdx.x) != buffer.cta) return;
    uint32& count = counts.count[role];
    if (count == static_cast<uint32>(buffer.capacity)) return;
    buffer.events[role * buffer.capacity + static_cast<int32>(count)] =
        core::trace_event(clock_cycles(), phase);
    ++count;
  }
}

}  // namespace fovea::device
