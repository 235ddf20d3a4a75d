// Time of repeated runs.
#pragma once

#include <functional>
#include <vector>

namespace fovea::tools {

struct Timing {
  double median_seconds = 0.0;
  double fastest_seconds = 0.0;
  int runs = 0;
};

// Calls run(i) for i = 0, 1, ...; the first call warms up and is not counted. repeat = 0 takes as
// many as fit in about a second, at least 3 and at most 1000.
[[nodiscard]] Timing measure(int repeat, const std::function<void(int)>& run);

// One call, the first: with what a first call costs.
[[nodiscard]] Timing measure_once(const std::function<void()>& run);

[[nodiscard]] double median(std::vector<double> values);

}  // namespace fovea::tools
