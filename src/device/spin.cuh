// Holds up a stream: what the host puts behind this kernel meanwhile is there when it ends, so that
// a time measured between two events leaves out the host's way through a launch.
#pragma once

#include "core/config.h"
#include "device/ptx.h"

namespace fovea::device {

__forceinline__ void spin(const core::SpinParams& params) {
  const uint64 begin = global_timer();
  while (global_timer() - begin < params.nanoseconds) {
  }
}

}  // namespace fovea::device
