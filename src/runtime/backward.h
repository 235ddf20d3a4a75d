// What a plan of the backward pass holds, and the devices it chooses from.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "core/types.h"
#include "cpu/backward.h"
#include "fovea/fovea.hpp"
#include "runtime/gradients.h"
#include "runtime/plan.h"

namespace fovea::runtime {
class GpuBackwardPlan;
}

namespace fovea {

struct BackwardPlan::Choice {
  Plan::Choice problem;  // its device, its problem and signature as planned, and the refusals
  std::array<Tensor, gradient_arguments.size()> signature;  // shapes and dtypes as planned
  cpu::BackwardConfig cpu;                                  // on the CPU
  std::shared_ptr<const runtime::GpuBackwardPlan> gpu;      // on a GPU
  std::size_t workspace_bytes = 0;
};

}  // namespace fovea
