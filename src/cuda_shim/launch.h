// What both interfaces say of a kernel and of its launch.
#pragma once

#include <span>

#include "cuda_shim/abi.h"
#include "cuda_shim/session.h"

namespace fovea::cuda_shim {

// Of the attributes the cluster's dimensions count; programmatic dependent launch, priorities and
// cooperation change nothing where launches run one after another.
emulator::LaunchConfig launch_config(abi::Dim3 grid, abi::Dim3 block, std::size_t shared_bytes,
                                     std::span<const abi::LaunchAttribute> attributes);

// Throws Failure for an attribute that is not known.
int function_attribute(Session& session, Kernel& kernel, int attribute);
void set_function_attribute(Session& session, Kernel& kernel, int attribute, int value);
void parameter_info(Session& session, Kernel& kernel, std::size_t index, std::size_t* offset,
                    std::size_t* bytes);
int resident_clusters(Session& session, Kernel& kernel, const emulator::LaunchConfig& config);
// Dynamic shared memory a CTA may have when `ctas` of them share an SM.
std::size_t shared_bytes_for(Session& session, Kernel& kernel, int ctas);

// cudaDevAttr and CUdevice_attribute: the value for the emulated chip, 0 for what it lacks.
int device_attribute(const Session& session, int attribute);

inline constexpr int kCudaVersion = 13000;
inline constexpr std::size_t kGlobalBytes = std::size_t{141} << 30;

}  // namespace fovea::cuda_shim
