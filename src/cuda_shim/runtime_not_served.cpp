// What is not served still links, and says so when it is called.
#include "cuda_shim/runtime.h"

extern "C" {
#define NOT_SERVED(name) \
  int name() { return fovea::cuda_shim::not_served(#name); }
#include "cuda_shim/not_served.def"
#undef NOT_SERVED
}
