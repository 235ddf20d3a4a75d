// The forward pass on a GPU: problem -> configuration -> kernel text -> launch, over the device
// seam.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/config.h"
#include "core/config_sm100.h"
#include "core/types.h"
#include "runtime/device.h"
#include "runtime/jit.h"

namespace fovea::runtime {

// Why the kernels of `arch` do not compute the problem, as clauses that say what would help; none
// when they do. Pointers count by their alignment only.
std::vector<std::string> forward_supports(const core::Problem& problem, std::string_view arch);

// Of the kernel for sm_90a, or of that for sm_100a and sm_103a.
using ForwardConfig = std::variant<core::FwdConfig, core::Fwd100Config>;

// A configuration for a problem that forward_supports() accepts on `arch`, for a device with so
// many multiprocessors.
ForwardConfig choose_forward(const core::Problem& problem, core::SoftmaxPolicy softmax,
                             std::string_view arch, int sm_count = 132);
core::FwdConfig choose_forward_sm90(const core::Problem& problem, core::SoftmaxPolicy softmax,
                                    int sm_count = 132);
core::Fwd100Config choose_forward_sm100(const core::Problem& problem, core::SoftmaxPolicy softmax,
                                        std::string_view arch, int sm_count = 148);

// Parts into which the keys are split where the configuration says that they are, and the device
// memory that the results of the parts take.
core::int32 forward_splits(const core::Problem& problem, const core::FwdConfig& config,
                           int sm_count);
core::int32 forward_splits(const core::Problem& problem, const core::Fwd100Config& config,
                           int sm_count);
std::size_t forward_workspace_bytes(const core::Problem& problem, const ForwardConfig& config,
                                    int sm_count);

// Words of ForwardCall::arrivals.
std::size_t forward_arrivals(const core::Problem& problem, const ForwardConfig& config,
                             int sm_count);

// The configuration as a C++ expression.
std::string forward_expression(const core::FwdConfig& config);
std::string forward_expression(const core::Fwd100Config& config);

// The translation unit of a configuration.
std::string forward_text(const core::FwdConfig& config);
std::string forward_text(const core::Fwd100Config& config);
// What device/fwd_sm100.cuh expects in front of it.
std::vector<std::string> forward_instructions_sm100();
std::string forward_text(const ForwardConfig& config);

// The translation unit of the kernel that merges the parts.
std::string combine_text(core::DType out_dtype);

// What a launch needs. Every pointer of the problem, lengths included, is an address of the device,
// and the problem fits the configuration.
struct ForwardCall {
  core::Problem problem;
  // Eight bytes, zero before the first launch and after every one, for one launch at a time: hands
  // out tiles as CTAs become free. 0: tiles are dealt in advance, which leaves CTAs idle where
  // their lengths differ (masks, ragged sequences).
  DeviceAddress scheduler = 0;
  // Of forward_workspace_bytes(), 16-byte aligned, for one launch at a time. 0 where that is 0.
  DeviceAddress workspace = 0;
  // forward_arrivals() words of 32 bits, as the scheduler's. 0: no tile is computed in parts.
  DeviceAddress arrivals = 0;
  // Two 64-bit counts to add to, of sum_guard: rows repaired, rows of a tile taken again. 0: none.
  DeviceAddress counters = 0;
  core::TraceBuffer trace = {};  // for a configuration that traces
};

// What a launch takes.
struct ForwardTiles {
  std::uint32_t threads = 0;  // of a CTA
  std::uint32_t ctas = 0;     // 0: nothing to compute
};

// Everything in `params` but the tensor maps. Throws Error where there are too many tiles.
template <typename Config>
ForwardTiles fill_forward_params(core::FwdParams& params, const ForwardCall& call,
                                 const Config& config, const DeviceProperties& chip);

// A compiled and loaded forward kernel. Its device must outlive it.
class ForwardKernel {
 public:
  // Throws CompileError, also where ptxas spills unless that is tolerated, Unsupported (no
  // compiler) or DeviceError.
  ForwardKernel(Device& device, const ForwardConfig& config, Jit& jit = default_jit(),
                bool tolerates_spills = false);

  // Puts one launch into the stream, two where keys are split.
  void run(const ForwardCall& call, Stream stream = {}) const;

  const ForwardConfig& config() const { return config_; }
  const CompileResult& compiled() const { return compiled_; }

 private:
  template <typename Config>
  void launch(const Config& config, const ForwardCall& call, Stream stream) const;
  template <typename Config>
  void encode_maps(core::FwdParams& params, const core::Problem& p, const Config& config) const;

  Device& device_;
  ForwardConfig config_;
  CompileResult compiled_;
  std::shared_ptr<Kernel> kernel_;
  std::shared_ptr<Kernel> combine_;  // null where keys are not split
};

}  // namespace fovea::runtime
