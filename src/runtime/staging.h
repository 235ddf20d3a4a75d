// Problems in host memory on a GPU: copied there densely, computed, and the results copied back.
#pragma once

#include "core/types.h"
#include "fovea/fovea.hpp"
#include "runtime/gpu.h"

namespace fovea::runtime {

// The problem as it will lie in device memory, for planning: its addresses stand for aligned ones.
Problem staged_layout(const Problem& problem);

// Runs a plan made for staged_layout(). Writes nothing but the elements of out and lse, whatever
// their strides. Allocates device memory and waits for the device.
void run_staged(const GpuPlan& plan, const Problem& problem, const core::Problem& validated,
                Statistics* statistics);

}  // namespace fovea::runtime
