// What a plan holds, and the devices it chooses from.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/fp8.h"
#include "core/types.h"
#include "cpu/attention.h"
#include "fovea/fovea.hpp"
#include "runtime/problem.h"

namespace fovea::runtime {
class GpuPlan;
}

namespace fovea {

// What Softmax::automatic stands for: docs/performance.md has the measurements.
[[nodiscard]] core::SoftmaxPolicy softmax_policy(Softmax softmax);
[[nodiscard]] std::string_view policy_name(core::SoftmaxPolicy policy);

// A problem as it was given, and as backends take it.
struct Request {
  const Problem& given;
  const core::Problem& validated;
  const Options& options;
};

// What computes on a device. configure() completes a choice whose problem and device are set.
// run() gets a problem that fits the choice; statistics may be null.
struct Engine {
  void (*configure)(Plan::Choice& choice, const Request& request);
  void (*run)(const Plan::Choice& choice, const Problem& given, const core::Problem& validated,
              std::span<std::byte> workspace, Statistics* statistics);
  std::string (*explain)(const Plan::Choice& choice);
};

// A device that might compute a problem. supports() gives the reasons why it cannot, as clauses
// that say what would help; none means that it can.
struct Candidate {
  Device device;
  std::vector<std::string> (*supports)(Device device, const Request& request);
  const Engine* engine;
  // Chosen without being asked for when the problem is in this memory; nullopt: never.
  std::optional<Memory> automatic_for;
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
  Memory memory = Memory::host;
  cpu::ForwardConfig cpu;                       // on the CPU
  core::QuantizeOptions quantize;               // there, of 8-bit problems
  std::size_t widened_bytes = 0;                // of their operands in fp32; 0: others
  std::shared_ptr<const runtime::GpuPlan> gpu;  // on a GPU
  std::size_t workspace_bytes = 0;
  std::vector<Refusal> refusals;
};

// Both throw Error: for options out of range; unless the problem is the planned one up to pointers,
// strides and lengths.
void check_options(const Options& options);
void check_matches(const Plan::Choice& planned, const Problem& problem,
                   const core::Problem& validated);

}  // namespace fovea
