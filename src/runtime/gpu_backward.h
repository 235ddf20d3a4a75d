// The plan of the backward pass on a GPU, real or emulated, around the kernels of backward_gpu.h:
// copies of tensors that the copy engine cannot read, the workspace, and problems in host memory.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "fovea/fovea.hpp"
#include "runtime/backward_gpu.h"
#include "runtime/device.h"
#include "runtime/layout.h"

namespace fovea::runtime {

// A problem and its gradients, as given and as backends take them.
struct BackwardRequest {
  const Problem& problem;
  const Gradients& gradients;
  const core::Problem& validated;
  const core::Gradients& validated_gradients;
};

// Reasons against the request in device memory, as clauses that say what would help.
std::vector<std::string> gpu_backward_supports(const BackwardRequest& request,
                                               std::string_view arch);

// For a request that gpu_backward_supports() accepts.
class GpuBackwardPlan {
 public:
  GpuBackwardPlan(Device& device, const BackwardRequest& request, bool own_workspace,
                  std::string_view by_hand);

  // Bytes that run() wants from its caller, in device memory.
  std::size_t workspace_bytes() const { return own_.address() != 0 ? 0 : total_bytes_; }

  // Device memory alone: puts kernels into the problem's stream and returns. Throws Error where a
  // tensor that the copy engine could read when planned has a layout that it cannot.
  void run(const BackwardRequest& request, std::span<std::byte> workspace) const;

  std::string explain() const;
  Device& device() const { return device_; }

 private:
  void check_addresses(const BackwardRequest& request) const;

  Device& device_;
  std::shared_ptr<const BackwardKernels> kernels_;
  std::shared_ptr<const CopyKernel> copy_kernel_;
  bool copies_[4] = {};  // q, k, v, dout
  std::size_t copy_offsets_[4] = {};
  std::size_t total_bytes_ = 0;
  DeviceBuffer own_;
};

// The gradients as they will lie in device memory, for planning: their addresses stand for aligned
// ones.
Gradients staged_layout(const Gradients& gradients);

// Runs a plan made for the staged layouts of a problem in host memory. Writes nothing but the
// elements of the gradients. Allocates device memory and waits for the device.
void run_staged(const GpuBackwardPlan& plan, const Problem& problem, const Gradients& gradients,
                const core::Problem& validated);

}  // namespace fovea::runtime
