// Problems in host memory on a GPU: copied there densely, computed, and the results copied back.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "core/types.h"
#include "fovea/fovea.hpp"
#include "runtime/gpu.h"

namespace fovea::runtime {

// Device memory of one call, and the host memory that copies are in flight from. Streamed tensors
// are placed in rows that the copy engine reads, others without gaps.
class Stage {
 public:
  explicit Stage(Device& device) : device_(device) {}

  void* allocate(std::size_t bytes);
  Tensor place(const Tensor& tensor, bool streamed);   // without contents
  Tensor upload(const Tensor& tensor, bool streamed);  // with those of host memory
  void upload_lists(Problem& problem);                 // the lengths and the block table
  void download(const Tensor& from, const Tensor& to);

 private:
  Device& device_;
  std::deque<DeviceBuffer> buffers_;
  std::deque<std::vector<std::byte>> hosts_;
};

// A tensor as it will lie in device memory, at an address that stands for an aligned one; an absent
// one stays absent.
Tensor staged_tensor(const Tensor& tensor, bool streamed);

// The problem as it will lie in device memory, for planning: its addresses stand for aligned ones.
Problem staged_layout(const Problem& problem);

// Runs a plan made for staged_layout(). Writes nothing but the elements of out and lse, whatever
// their strides. Allocates device memory and waits for the device.
void run_staged(const GpuPlan& plan, const Problem& problem, const core::Problem& validated,
                Statistics* statistics);

}  // namespace fovea::runtime
