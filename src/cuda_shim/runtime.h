// What the sources of the runtime's replacement share.
#pragma once

#include "cuda_shim/session.h"

namespace fovea::cuda_shim {

// cudaGetLastError() of this thread.
int& last_error();

// A call of the runtime: guarded() and the thread's last error.
template <typename Action>
int runtime_call(Action action) noexcept {
  const int code = static_cast<int>(guarded(action));
  if (code != 0) last_error() = code;
  return code;
}

// For what is not served: says so once per name.
int not_served(const char* name) noexcept;

}  // namespace fovea::cuda_shim
