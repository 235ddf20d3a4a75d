// Injected faults that go unnoticed for a reason, named by what stands in the kernel's source.
#pragma once

#include <span>

#include "tests/faults.h"

namespace fovea::tests {

// A fault that does no harm, or that the emulator cannot see: its kind, what stands in the kernel's
// source around it, and why.
struct Explained {
  const char* kind;
  const char* source;
  const char* reason;
};
// The reason of the first that fits, or null.
const char* explanation(const Mutant& mutant, std::span<const Explained> list);

}  // namespace fovea::tests
