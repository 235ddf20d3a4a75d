// Quantised pages in front of the 8-bit kernels: whether they are gathered, and the kernel that
// does.
#pragma once

#include <memory>
#include <string>

#include "core/fp8.h"
#include "runtime/device.h"
#include "runtime/quantize_gpu.h"

namespace fovea::runtime {

// Pages of whole blocks lie where Hopper's kernel can read them piece by piece, which costs a share
// of its time; a copy costs the bytes of the keys.
struct Gathering {
  bool gathers = false;
  std::string why;  // a clause, for Plan::explain()
};

// Of a problem with quantised pages, for the configuration that would read them in place.
Gathering gathering_of(const core::Problem& problem, const core::FwdConfig& in_place);

// The problem with its pages become sequences of seqlen_k keys.
core::Problem gathered(core::Problem problem);

// The translation unit of the kernel.
std::string gather_text();

class GatherKernel {
 public:
  explicit GatherKernel(Device& device);

  // k, v and key_scale of the problem's pages, to the places of `to`, of gathered(problem).
  void run(const core::Problem& problem, const Fp8Operands& to, Stream stream) const;

 private:
  Device& device_;
  std::shared_ptr<Kernel> kernel_;
};

}  // namespace fovea::runtime
