// What a plan of the backward pass holds, and the devices it chooses from.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/types.h"
#include "cpu/backward.h"
#include "fovea/fovea.hpp"
#include "runtime/gradients.h"
#include "runtime/plan.h"

namespace fovea {

struct BackwardPlan::Choice {
  Plan::Choice problem;  // its device, its problem and signature as planned, and the refusals
  std::array<Tensor, gradient_arguments.size()> signature;  // shapes and dtypes as planned
  cpu::BackwardConfig cpu;
  std::size_t workspace_bytes = 0;
};

}  // namespace fovea
