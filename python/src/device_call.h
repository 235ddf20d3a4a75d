// Calls on tensors of a device: plans kept from call to call, workspaces from the caller's own
// allocator, and nothing that waits.
#pragma once

#include "fovea/fp8.hpp"
#include "python/call.h"

namespace fovea::python {

// allocate(n) is Python's: a tensor of n bytes on q's device, which the call's stream may use at
// once, and the next call's after it. It is asked where q's library gives none from C. The device
// is automatic, or an emulated one whose memory the tensors are in.
void attention_on_device(const Call& call, nb::handle allocate, Device device);
void attention_backward_on_device(const Call& call, const Gradients& gradients, nb::handle allocate,
                                  Device device);

// pool.pages = 0: dense or packed operands, values as `values` says.
[[nodiscard]] QuantizePlan quantize_plan_on_device(const Call& call,
                                                   const Quantization& quantization,
                                                   ValueLayout values, const PagePool& pool,
                                                   Device device);

// Seconds that Plan::run takes of the calling thread, of `repeat` runs.
[[nodiscard]] double seconds_of_launch(const Call& call, int repeat, nb::handle allocate);

}  // namespace fovea::python
