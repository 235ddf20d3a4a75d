// Streams and events. Work is done when it is asked for, so a stream is only its properties and an
// event is a moment of the host's clock.
#pragma once

#include <chrono>

namespace fovea::cuda_shim {

struct Stream {
  unsigned flags = 0;
  int priority = 0;
};

struct Event {
  std::chrono::steady_clock::time_point at{};
  bool recorded = false;
};

// Milliseconds from one to the other; throws Failure when one was never recorded.
float elapsed_ms(const Event& begin, const Event& end);

}  // namespace fovea::cuda_shim
