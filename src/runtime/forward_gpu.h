// The forward pass on a GPU: problem -> configuration -> kernel text -> launch, over the device
// seam.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.h"
#include "core/types.h"
#include "runtime/device.h"
#include "runtime/jit.h"

namespace fovea::runtime {

// Why the kernels of `arch` do not compute the problem, as clauses that say what would help; none
// when they do. Pointers count by their alignment only.
std::vector<std::string> forward_supports(const core::Problem& problem, std::string_view arch);

// A configuration for a problem that forward_supports() accepts.
core::FwdConfig choose_forward(const core::Problem& problem, core::SoftmaxPolicy softmax);

// The configuration as a C++ expression.
std::string forward_expression(const core::FwdConfig& config);

// The translation unit of a configuration.
std::string forward_text(const core::FwdConfig& config);

// What a launch needs. Every pointer of the problem, lengths included, is an address of the device,
// and the problem fits the configuration.
struct ForwardCall {
  core::Problem problem;
  core::int64 total_k = 0;  // rows of k and v in all (varlen only)
  // Eight bytes, zero before the first launch and after every one, for one launch at a time: hands
  // out tiles as CTAs become free. 0: tiles are dealt in advance, which leaves CTAs idle where
  // their lengths differ (masks, ragged sequences).
  DeviceAddress scheduler = 0;
  // Two 64-bit counts to add to, of sum_guard: rows repaired, rows of a tile taken again. 0: none.
  DeviceAddress counters = 0;
};

// What a launch takes.
struct ForwardTiles {
  std::uint32_t threads = 0;  // of a CTA
  std::uint32_t ctas = 0;     // 0: nothing to compute
};

// Everything in `params` but the tensor maps. Throws Error where there are too many tiles.
ForwardTiles fill_forward_params(core::FwdParams& params, const ForwardCall& call,
                                 const core::FwdConfig& config, const DeviceProperties& chip);

// A compiled and loaded forward kernel. Its device must outlive it.
class ForwardKernel {
 public:
  // Throws CompileError, Unsupported (no compiler) or DeviceError.
  ForwardKernel(Device& device, const core::FwdConfig& config, Jit& jit = default_jit());

  // Puts one launch into the stream.
  void run(const ForwardCall& call, Stream stream = {}) const;

  const core::FwdConfig& config() const { return config_; }
  const CompileResult& compiled() const { return compiled_; }

 private:
  Device& device_;
  core::FwdConfig config_;
  CompileResult compiled_;
  std::shared_ptr<Kernel> kernel_;
};

}  // namespace fovea::runtime
