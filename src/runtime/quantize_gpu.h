// Quantisation on a GPU: the kernels of device/quantize.cuh over the device seam.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/fp8.h"
#include "runtime/device.h"
#include "runtime/forward_gpu.h"
#include "runtime/jit.h"

namespace fovea::runtime {

// Where quantised operands lie (core::fp8_layout()): addresses of the device, multiples of 256.
struct Fp8Operands {
  DeviceAddress q = 0;
  DeviceAddress k = 0;
  DeviceAddress v = 0;
  DeviceAddress q_scale = 0;
  DeviceAddress key_scale = 0;
};

// The translation unit of a configuration.
std::string quantize_text(const core::QuantizeConfig& config);

// Compiled and loaded kernels for the operands of problems of one kind. Their device must outlive
// them.
class Quantizer {
 public:
  // The problem's dtypes, head dimensions, alignments and strides decide the kernels; later
  // problems must agree in these. Throws CompileError, Unsupported (no compiler) or DeviceError.
  Quantizer(Device& device, const core::Problem& problem, const core::QuantizeOptions& options,
            Jit& jit = default_jit());

  // Device memory that run_q() and run_keys() need each, for scales coarser than a block.
  std::size_t scratch_bytes(const core::Problem& problem) const;

  // One launch each for q, k and v into the stream; with coarser scales two. Everything that the
  // forward kernel may read is written.
  void run_q(const ForwardCall& call, const Fp8Operands& operands, DeviceAddress scratch,
             Stream stream = {}) const;
  void run_keys(const ForwardCall& call, const Fp8Operands& operands, DeviceAddress scratch,
                Stream stream = {}) const;

 private:
  struct Pass {
    core::QuantizeConfig config;
    std::shared_ptr<Kernel> measure;  // of coarse scales
    std::shared_ptr<Kernel> write;
  };

  Pass build(const core::View& view, core::int32 columns, bool transpose, Jit& jit) const;
  void run(const Pass& pass, core::QuantizeParams params, core::int64 batches,
           DeviceAddress scratch, Stream stream) const;

  Device& device_;
  core::QuantizeOptions options_;
  Pass q_, k_, v_;
};

}  // namespace fovea::runtime
