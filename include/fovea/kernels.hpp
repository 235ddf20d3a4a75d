// The GPU kernels as such: compiling them ahead of the calls that need them, and watching one run.
//
// A kernel is compiled when a plan first needs it, which takes about a second, and is kept in a
// cache on disk (docs/environment.md). Whoever installs fovea, or builds an image of a machine, may
// fill that cache before; a process that finds its kernels there needs no compiler.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "fovea/fovea.hpp"

namespace fovea {

// What became of one kernel.
struct CompiledKernel {
  std::string name;  // "fwd bf16 d128 causal"
  std::string arch;
  double seconds = 0.0;
  bool cached = false;  // it was in the cache already
  int registers = 0;    // per thread, at entry
  int spill_bytes = 0;
  std::string fault;  // why it did not compile or what ptxas complains of; empty when it is fit
};

struct CompileKernels {
  std::string arch = "sm_90a";  // sm_90a, sm_100a or sm_103a
  // Kernels for every feature; otherwise those of plain, causal and ragged calls in bf16 and f16
  // with the usual head dimensions.
  bool all = false;
  std::string only;  // those whose name holds this text; empty: all
  int every = 1;     // of these, one of so many, spread over the list: a sample
  int threads = 0;   // that compile; 0: one per core
};

// Compiles kernels into the cache and calls done(kernel) for each, one at a time, as they end. Safe
// beside other processes that do the same. Gives the number of kernels that have a fault. Throws
// Error for an unknown arch and for `every` below 1, Unsupported when there is no compiler.
int compile_kernels(const CompileKernels& which,
                    const std::function<void(const CompiledKernel&)>& done);

// Runs the forward kernel of a problem whose tensors lie in host memory, and gives the timeline of
// one CTA as a document in the JSON trace format, which ui.perfetto.dev shows: what the loading and
// each computing role waited for and did. On Device::cuda a nanosecond of the document is a cycle
// of the multiprocessor, in the last of several launches; on an emulated device it is a warp
// instruction of the whole launch, which shows an order and no durations. Nothing of the problem is
// written. Of the options, the device, cuda or an emulated one, and the softmax count; cta is one
// of the launch's, from 0. Throws Error, Unsupported for what the kernel does not compute and for
// kernels without a timeline, DeviceError.
[[nodiscard]] std::string trace(const Problem& problem, const Options& options, int cta = 0);

// The same of the backward kernel that sums dq, dk and dv, for the chips whose kernel has one:
// sm_100a and sm_103a. out and lse of the problem are read, as by attention_backward(). Of the
// options, the device and the configuration count.
[[nodiscard]] std::string trace_backward(const Problem& problem, const Gradients& gradients,
                                         const Options& options, int cta = 0);

}  // namespace fovea
