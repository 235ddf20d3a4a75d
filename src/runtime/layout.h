// Layouts that the copy engine reads, and copies into them of tensors that have another one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fovea/fovea.hpp"
#include "runtime/device.h"

namespace fovea::runtime {

// What is in the way of reading the tensor (i0, i1, i2, column) by the copy engine, as a clause: a
// 16-byte aligned address, contiguous columns and steps that are positive multiples of 16 bytes are
// needed. Empty when nothing is. Dimensions of extent 1 have no step.
std::string copy_engine_objection(const Tensor& tensor);

// The same tensor dense, its rows padded to a multiple of 16 bytes, at `data`; and its bytes.
Tensor dense_rows(const Tensor& tensor, void* data);
std::size_t dense_rows_bytes(const Tensor& tensor);

// A kernel that copies a tensor of the device into dense_rows() of itself. Its device must outlive
// it.
class CopyKernel {
 public:
  CopyKernel(Device& device, std::size_t element_bytes);

  void run(const Tensor& from, const Tensor& to, Stream stream) const;

 private:
  Device& device_;
  std::shared_ptr<Kernel> kernel_;
};

}  // namespace fovea::runtime
