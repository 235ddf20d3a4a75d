// Timelines of one CTA: what its roles were doing when. Written by device/trace.h, read by
// model/timeline.h.
#pragma once

#include "core/types.h"

namespace fovea::core {

// What a role does from its event to the next one. A loading role finds tiles, waits for free
// memory and copies; a computing one waits for tiles, for its turn and for the tensor cores. On
// Blackwell one role issues all products: it waits for keys and for weights.
enum class TracePhase : uint8 {
  none,  // it has ended
  tile,
  free,
  copy,
  query,
  turn,
  issue,
  scores,
  softmax,
  output,
  convert,
  store,
  keys,
  weights,
  correct,
  // Blackwell, backward: what the multiplying role waits for, and issues; what the others do.
  operands,
  issue_scores,
  issue_dp,
  issue_dv,
  issue_dk,
  issue_dq,
  dp,
  differentiate,
  dq,
  reduce,
  dscores,
  exchange
};

// The most that a kernel has. Hopper: 0 loads, the others compute. Blackwell, forward: load,
// multiply, two of softmax, correct, store; backward: load, multiply, two of compute, reduce,
// relay.
inline constexpr int32 trace_roles = 6;

// Where a launch writes: `capacity` words for each role, zero before it. An event is the clock of
// the multiprocessor, shifted left by eight, and the phase that begins.
struct TraceBuffer {
  uint64* events = nullptr;
  int32 capacity = 0;
  int32 cta = 0;  // the one that writes
};

constexpr uint64 trace_event(uint64 clock, TracePhase phase) {
  return clock << 8 | static_cast<uint64>(phase);
}
constexpr uint64 trace_clock(uint64 event) { return event >> 8; }
constexpr TracePhase trace_phase(uint64 event) { return static_cast<TracePhase>(event & 0xff); }

}  // namespace fovea::core
