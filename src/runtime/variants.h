// The kernels that calls need, listed before the calls: one problem for each way in which a
// configuration can differ, put through the same choice as a plan's.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fovea::runtime {

struct Variant {
  std::string name;        // unique
  std::string text;        // the translation unit; unique
  bool may_spill = false;  // is run although it spills a few registers
};

// What fovea::CompileKernels says of `all`. Throws Error for an unknown arch.
std::vector<Variant> kernel_variants(std::string_view arch, bool all);

}  // namespace fovea::runtime
