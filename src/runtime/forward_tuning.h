// Configurations of the forward kernels set by hand, and the model's opinion of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "model/roofline.h"
#include "runtime/forward_gpu.h"

namespace fovea::runtime {

// Sets fields by "name=value,...": numbers, and 0 or 1 for switches. Throws Error for a name that
// the configuration lacks, and for a result that the chip has no room for.
void override_forward(ForwardConfig& config, std::string_view text);

// The fields that override_forward() takes, as it takes them, without switches that change nothing
// beside the others.
std::string forward_fields(const ForwardConfig& config);

// What speaks against a configuration before it is compiled: shared memory and registers. Empty
// when nothing does.
std::string forward_objection(const ForwardConfig& config);

model::ForwardShape forward_shape(const ForwardConfig& config);

// The tiles and stages to choose from, with everything else as in `chosen`.
std::vector<ForwardConfig> forward_candidates(const ForwardConfig& chosen);

// Of `chosen`, what needs fewer registers, the fastest first: for features that ptxas cannot fit
// beside the chosen tile.
std::vector<ForwardConfig> leaner_forwards(const ForwardConfig& chosen);

// `chosen`, and each switch of its schedule turned over in turn.
std::vector<ForwardConfig> forward_ablations(const ForwardConfig& chosen);

}  // namespace fovea::runtime
