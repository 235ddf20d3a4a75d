#include "tools/measure.h"

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace fovea::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double automatic_seconds = 1.0;
constexpr int fewest = 3;
constexpr int most = 1000;

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
}

Timing measure_once(const std::function<void()>& run) {
  const auto begin = Clock::now();
  run();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return {seconds, seconds, 1};
}

Timing measure(int repeat, const std::function<void(int)>& run) {
  run(0);
  std::vector<double> seconds;
  double total = 0.0;
  const auto enough = [&](int done) {
    if (repeat > 0) return done >= repeat;
    return done >= most || (done >= fewest && total >= automatic_seconds);
  };
  for (int i = 0; !enough(i); ++i) {
    const auto begin = Clock::now();
    run(i + 1);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    total += seconds.back();
  }
  return {median(seconds), *std::min_element(seconds.begin(), seconds.end()),
          static_cast<int>(seconds.size())};
}

}  // namespace fovea::tools
