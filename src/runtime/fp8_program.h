// Eight-bit attention as a kernel that plans choose: what the operands lack is made in front of the
// fp8 forward kernel.
#pragma once

#include "runtime/gpu.h"

namespace fovea::runtime {

namespace fp8_program {
std::vector<std::string> supports(const core::Problem& problem, const GpuTarget& target);
std::shared_ptr<const GpuProgram> prepare(const core::Problem& problem, Device& device,
                                          const Options& options);
}  // namespace fp8_program

inline constexpr GpuKernel fp8_kernel{"forward in 8 bits", true, fp8_program::supports,
                                      fp8_program::prepare};

}  // namespace fovea::runtime
