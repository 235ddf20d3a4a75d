// What a plan holds, and the devices it chooses from.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "cpu/attention.h"
#include "fovea/fovea.hpp"
#include "runtime/problem.h"

namespace fovea {

// A device that might compute a problem. supports() gives the reasons why it cannot, as clauses
// that say what would help; none means that it can.
struct Candidate {
  Device device;
  std::vector<std::string> (*supports)(const core::Problem& problem);
  bool is_automatic;  // may be chosen without being asked for
};

// In order of preference.
[[nodiscard]] std::span<const Candidate> candidates();

// A device that was not chosen, and why.
struct Refusal {
  Device device;
  std::string reasons;
};

struct Plan::Choice {
  Device device = Device::cpu;
  core::Problem problem;                           // as planned; its pointers are not used
  std::array<Tensor, arguments.size()> signature;  // shapes and dtypes as planned
  cpu::ForwardConfig cpu;
  std::size_t workspace_bytes = 0;
  std::vector<Refusal> refusals;
};

}  // namespace fovea
