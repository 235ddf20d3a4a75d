// Eight-bit attention on a GPU: quantised operands in device memory (core/fp8.h), the kernels that
// write them, and the forward kernel that attends to them.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/fp8.h"
#include "runtime/device.h"
#include "runtime/forward_gpu.h"
#include "runtime/jit.h"
#include "runtime/quantize_gpu.h"

namespace fovea::runtime {

// Why the fp8 kernel of `arch` does not compute the problem, as clauses that say what would help.
// The dtype, address and layout of q, k and v do not count: they are quantised first.
// codes: of q and k.
std::vector<std::string> forward_fp8_supports(const core::Problem& problem, std::string_view arch,
                                              core::DType codes = core::DType::e4m3);

// A configuration for a problem that forward_fp8_supports() accepts on `arch`, its pages gathered.
// promote_keys: how many keys Hopper's tensor cores may sum by themselves; 0: all of them.
// Blackwell's sum in fp32.
ForwardConfig choose_forward_fp8(const core::Problem& problem, core::SoftmaxPolicy softmax,
                                 std::string_view arch, core::int64 promote_keys,
                                 core::DType codes = core::DType::e4m3);
core::FwdConfig choose_forward_fp8_sm90(const core::Problem& problem, core::SoftmaxPolicy softmax,
                                        core::int64 promote_keys, core::DType codes);
core::Fwd100Config choose_forward_fp8_sm100(const core::Problem& problem,
                                            core::SoftmaxPolicy softmax, std::string_view arch,
                                            core::DType codes);

// The translation unit of a configuration.
std::string forward_fp8_text(const ForwardConfig& config);

// A compiled and loaded fp8 forward kernel. Its device must outlive it.
class ForwardFp8Kernel {
 public:
  // Throws CompileError, also where ptxas spills unless that is tolerated, Unsupported (no
  // compiler) or DeviceError.
  ForwardFp8Kernel(Device& device, const ForwardConfig& config, Jit& jit = default_jit(),
                   bool tolerates_spills = false);

  // Puts one launch into the stream. The call's views of q, k and v are not used.
  void run(const ForwardCall& call, const Fp8Operands& operands, Stream stream = {}) const;

  const ForwardConfig& config() const { return config_; }
  const CompileResult& compiled() const { return compiled_; }

 private:
  template <typename Config>
  void launch(const Config& config, const ForwardCall& call, const Fp8Operands& operands,
              Stream stream) const;

  Device& device_;
  ForwardConfig config_;
  CompileResult compiled_;
  std::shared_ptr<Kernel> kernel_;
};

}  // namespace fovea::runtime
