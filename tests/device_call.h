// A call of the tests in memory of a GPU, real or emulated: the way of an engine that keeps its
// tensors there.
#pragma once

#include <deque>

#include "runtime/devices.h"
#include "tests/call.h"

namespace fovea::test {

// Every tensor with the bytes around it, at an address equal to the host's modulo 256, so that
// strides, alignment, poison and guards are those of the host tensors.
class DeviceCall {
 public:
  DeviceCall(Call& call, Device device);

  // Fills a workspace with garbage, puts the run into the stream and waits for it.
  void run(const Plan& plan, Statistics* statistics = nullptr);
  // Brings out and lse back into the call's tensors, the bytes around them included.
  void fetch();

  Problem problem;  // Memory::device

 private:
  struct Mirror {
    std::byte* host;
    std::size_t bytes;
    runtime::DeviceAddress address;
  };
  void* place(const void* data, std::ptrdiff_t low, std::ptrdiff_t high);

  Call& call_;
  runtime::Device& device_;
  std::deque<runtime::DeviceBuffer> buffers_;
  std::vector<Mirror> outputs_;
};

}  // namespace fovea::test
