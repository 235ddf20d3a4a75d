// The schedule of the backward kernels set by hand, for measurements.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/config_backward.h"

namespace fovea::runtime {

// Sets switches of the schedule by "name=0,name=1,..." Throws Error for a name that the kernel
// lacks and for a value that is neither.
void override_backward(core::BwdConfig& config, std::string_view text);

// The switches, as override_backward() takes them.
std::string backward_switches(const core::BwdConfig& config);

// What speaks against a configuration before it is compiled; empty when nothing does.
std::string backward_objection(const core::BwdConfig& config);

// `chosen`, and every other legal setting of its switches.
std::vector<core::BwdConfig> backward_variants(const core::BwdConfig& chosen);

}  // namespace fovea::runtime
