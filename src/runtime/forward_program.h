// The forward kernels of forward_gpu.h as kernels that plans choose.
#pragma once

#include "runtime/gpu.h"

namespace fovea::runtime {

namespace forward_program {
std::vector<std::string> supports(const core::Problem& problem, const GpuTarget& target);
std::shared_ptr<const GpuProgram> prepare(const core::Problem& problem, Device& device,
                                          const Options& options);
}  // namespace forward_program

inline constexpr GpuKernel forward_kernel{"forward", false, forward_program::supports,
                                          forward_program::prepare};

}  // namespace fovea::runtime
