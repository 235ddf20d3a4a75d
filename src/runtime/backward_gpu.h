// The backward pass on a GPU: problem -> configuration -> kernel texts -> launches, over the device
// seam. Three kernels follow each other in the stream: what is needed of each row, dk and dv with
// the sums of dq, and dq from its sums (device/bwd_rows.cuh, device/bwd_sm90.cuh,
// device/bwd_sm100.cuh); where they are asked for, also the gradients of the sinks and of the
// bias (device/bwd_bias.cuh).
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/config_backward.h"
#include "core/types.h"
#include "runtime/device.h"
#include "runtime/jit.h"

namespace fovea::runtime {

// Why the kernels of `arch` do not compute the gradients, as clauses that say what would help; none
// when they do. Pointers count by their alignment only.
std::vector<std::string> backward_supports(const core::Problem& problem,
                                           const core::Gradients& gradients, std::string_view arch);

// A configuration for gradients that backward_supports() accepts, with switches of its schedule set
// by hand (backward_tuning.h). Throws Error for those that it cannot have.
core::BwdConfig choose_backward(const core::Problem& problem, const core::Gradients& gradients,
                                std::string_view arch = "sm_90a", std::string_view by_hand = {});

// What differs in Blackwell's kernel (backward_sm100.cpp).
bool is_blackwell(std::string_view arch);
void choose_backward_sm100(core::BwdConfig& config, const core::Problem& problem);
std::vector<std::string> backward_products_sm100();

enum class BackwardPart { prepare, main, finish, sink, bias, bias_sum };
inline constexpr std::size_t backward_parts = 6;

// The translation unit of a part.
std::string backward_text(const core::BwdConfig& config, BackwardPart part);

// What a launch needs. Every pointer, lengths included, is an address of the device, and the
// problem fits the configuration.
struct BackwardCall {
  core::Problem problem;
  core::Gradients gradients;
  // backward_workspace_bytes() with any content, 256-byte aligned, in use until the stream has
  // passed.
  DeviceAddress workspace = 0;
  core::TraceBuffer trace = {};  // for a configuration that traces
};

std::size_t backward_workspace_bytes(const BackwardCall& call, const core::BwdConfig& config,
                                     const DeviceProperties& chip);

// CTAs of the main kernel.
std::int64_t backward_ctas(const core::Problem& problem, const core::BwdConfig& config);

// The compiled and loaded kernels. Their device must outlive them.
class BackwardKernels {
 public:
  // Throws CompileError, Unsupported (no compiler) or DeviceError.
  // The gradients that the problem has beside dq, dk and dv decide on the kernels of the last
  // parts.
  BackwardKernels(Device& device, const core::BwdConfig& config, const core::Gradients& gradients,
                  Jit& jit = default_jit());

  // Puts the launches into the stream.
  void run(const BackwardCall& call, Stream stream = {}) const;

  const core::BwdConfig& config() const { return config_; }

 private:
  void launch(BackwardPart part, std::uint32_t ctas, const core::BwdParams& params,
              Stream stream) const;
  [[nodiscard]] std::uint32_t main_ctas(std::uint32_t key_ctas) const;
  void launch_bias(const BackwardCall& call, const core::BwdParams& params, Stream stream) const;

  Device& device_;
  core::BwdConfig config_;
  std::array<std::shared_ptr<Kernel>, backward_parts> kernels_;
};

}  // namespace fovea::runtime
