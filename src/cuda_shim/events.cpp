#include "cuda_shim/events.h"

#include "cuda_shim/status.h"

namespace fovea::cuda_shim {

float elapsed_ms(const Event& begin, const Event& end) {
  if (!begin.recorded || !end.recorded) {
    throw Failure(Status::invalid_handle, "the time between events of which one was not recorded.");
  }
  return std::chrono::duration<float, std::milli>(end.at - begin.at).count();
}

}  // namespace fovea::cuda_shim
