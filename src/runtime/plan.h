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

// What computes on a device. configure() completes a choice whose problem and device are set.
struct Engine {
  void (*configure)(Plan::Choice& choice, const Options& options);
  void (*run)(const Plan::Choice& choice, const core::Problem& problem, std::byte* workspace,
              Statistics& statistics);  // allocates nothing, throws nothing but DeviceError
  std::string (*explain)(const Plan::Choice& choice);
};

// A device that might compute a problem. supports() gives the reasons why it cannot, as clauses
// that say what would help; none means that it can. One that never can has no engine.
struct Candidate {
  Device device;
  std::vector<std::string> (*supports)(const core::Problem& problem);
  const Engine* engine;
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
  Device device = Device::automatic;
  const Engine* engine = nullptr;
  core::Problem problem;                           // as planned; its pointers are not used
  std::array<Tensor, arguments.size()> signature;  // shapes and dtypes as planned
  cpu::ForwardConfig cpu;
  std::size_t workspace_bytes = 0;
  std::vector<Refusal> refusals;
};

// Both throw Error: for options out of range; unless the problem is the planned one up to pointers,
// strides and lengths.
void check_options(const Options& options);
void check_matches(const Plan::Choice& planned, const Problem& problem,
                   const core::Problem& validated);

}  // namespace fovea
