// fovea bench on a GPU: times by the device's own clock, of a chip at rest and of one kept busy,
// the configurations of a case in turns.
#pragma once

#include <vector>

#include "tools/json_output.h"
#include "tools/problem_options.h"

namespace fovea::tools {

struct BenchCase {
  Shape shape;
  ProblemOptions options;
};

enum class GpuBench : std::uint8_t {
  choice,  // what a plan takes
  sweep,   // every configuration that the chip has room for, beside the model's time
  ablate   // each switch of the schedule turned over, and every softmax policy
};

// Prints tables unless quiet, and gives the same as JSON. `repeat` rounds of launches with a pause
// before each, 0: nine. Backward has no switches to turn off one by one: its sweep is all of them.
[[nodiscard]] Json bench_gpu(const std::vector<BenchCase>& cases, GpuBench what, bool backward,
                             int repeat, bool quiet);

}  // namespace fovea::tools
