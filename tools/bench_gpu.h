// fovea bench on a GPU: times by the device's own clock, of a chip at rest and of one kept busy,
// the configurations of a case in turns.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/json_output.h"
#include "tools/problem_options.h"
#include "tools/quantized_pages.h"

namespace fovea::tools {

struct BenchCase {
  Shape shape;
  ProblemOptions options;
  // Of a case whose keys and values lie in quantised pages: how they are brought there, before
  // anything is timed.
  std::optional<Quantization> beforehand;
};

// Of such a case, to be filled and taken in place of the workload's problem.
[[nodiscard]] std::optional<QuantizedPages> pages_of(const BenchCase& entry, Workload& workload);

enum class GpuBench : std::uint8_t {
  choice,  // what a plan takes
  sweep,   // every configuration that the chip has room for, beside the model's time
  ablate   // each switch of the schedule turned over, and every softmax policy
};

struct GpuBenchOptions {
  GpuBench what = GpuBench::choice;
  std::vector<std::string> others;  // configurations to be timed beside the choice
  bool backward = false;
  int rounds = 0;  // of launches with a pause before each; 0: nine
  bool quiet = false;
};

// Prints tables unless quiet, and gives the same as JSON. Backward has no switches to turn off one
// by one: its sweep is all of them.
[[nodiscard]] Json bench_gpu(const std::vector<BenchCase>& cases, const GpuBenchOptions& options);

}  // namespace fovea::tools
