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

// Steps of codes (batch, row, head; of v batch, column, head) in bytes. Zeros: those of
// core::fp8_layout().
struct CodeSteps {
  core::int64 batch = 0;
  core::int64 row = 0;
  core::int64 head = 0;
};

// Where quantised operands lie: addresses of the device, multiples of 16.
struct Fp8Operands {
  DeviceAddress q = 0;
  DeviceAddress k = 0;
  DeviceAddress v = 0;
  DeviceAddress q_scale = 0;    // (batch, head, block)
  DeviceAddress key_scale = 0;  // likewise
  CodeSteps q_steps = {};
  CodeSteps k_steps = {};
  CodeSteps v_steps = {};
  core::PageTarget target = {};  // of a quantiser to pages: k, v and key_scale are those
};

// Codes as rows, v's too, each with a scale (batch, head, block).
struct RowOperands {
  DeviceAddress q = 0;
  DeviceAddress k = 0;
  DeviceAddress v = 0;
  DeviceAddress q_scale = 0;
  DeviceAddress k_scale = 0;
  DeviceAddress v_scale = 0;
};

// What a quantiser makes. scales: the codes of q (of k) stay where they are, their scales alone are
// brought into the kernels' form. none: nothing.
enum class Quantize : std::uint8_t { codes, scales, none };

struct QuantizeParts {
  Quantize q = Quantize::codes;
  Quantize k = Quantize::codes;
  Quantize v = Quantize::codes;
  bool transpose_v = true;
  bool to_pages = false;
};

// The translation unit of a configuration.
std::string quantize_text(const core::QuantizeConfig& config);

// Compiled and loaded kernels for the operands of problems of one kind. Their device must outlive
// them.
class Quantizer {
 public:
  // The problem's dtypes, head dimensions, alignments and strides decide the kernels; later
  // problems must agree in these. Throws CompileError, also for a kernel that spills registers
  // unless that is tolerated (slow, but right), Unsupported (no compiler) or DeviceError; Error
  // where tables of the rotary embedding are not memory of the device.
  Quantizer(Device& device, const core::Problem& problem, const core::QuantizeOptions& options,
            const QuantizeParts& parts = {}, bool tolerates_spills = false);

  // Whether the kernels that read 8 elements at once, or know of no lengths, if those were chosen,
  // can read this one.
  bool suits(const core::Problem& problem) const;

  // Device memory that run_q() and run_keys() need each, for scales coarser than a block.
  std::size_t scratch_bytes(const core::Problem& problem) const;

  // One launch each for q, k and v into the stream; with coarser scales two. Everything that the
  // forward kernel may read is written.
  void run_q(const ForwardCall& call, const Fp8Operands& operands, DeviceAddress scratch,
             Stream stream = {}) const;
  void run_keys(const ForwardCall& call, const Fp8Operands& operands, DeviceAddress scratch,
                Stream stream = {}) const;
  // Without transpose_v: those that have an address.
  void run_rows(const ForwardCall& call, const RowOperands& operands, DeviceAddress scratch,
                Stream stream = {}) const;

 private:
  struct Pass {
    core::QuantizeConfig config;
    Quantize what = Quantize::none;
    std::shared_ptr<Kernel> measure;  // of coarse scales
    std::shared_ptr<Kernel> write;
  };

  void check_tables() const;  // of the rotary embedding
  Pass build(const core::Problem& problem, const core::View& view, Quantize what, bool transpose,
             bool tolerates_spills) const;
  void run(const Pass& pass, core::QuantizeParams params, core::int64 batches,
           DeviceAddress scratch, Stream stream) const;

  Device& device_;
  core::QuantizeOptions options_;
  QuantizeParts parts_;
  Pass q_, k_, v_;
};

}  // namespace fovea::runtime
