// The forward pass on a GPU, real or emulated: which kernels there are, and the plan around one.
//
// A kernel joins by a GpuKernel in gpu_kernels(): its supports() says what it cannot do, its
// prepare() compiles it for a problem. Everything around is the same for all of them and lives in
// gpu.cpp: copies of tensors that the copy engine cannot read, the workspace, counters, and
// problems in host memory (staging.h).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "fovea/fovea.hpp"
#include "runtime/device.h"
#include "runtime/layout.h"
#include "runtime/problem.h"

namespace fovea::runtime {

// What a launch gets beside the problem, whose every pointer is an address of the device.
struct GpuCall {
  DeviceAddress zeroed = 0;    // GpuProgram::zeroed_bytes() of zeros, to be left as zeros
  DeviceAddress scratch = 0;   // GpuProgram::scratch_bytes(), 256-byte aligned, any contents
  DeviceAddress counters = 0;  // two 64-bit counts to add to: rows repaired, rows taken again; or 0
  Stream stream;
};

// A kernel, compiled and loaded for one problem up to its pointers, strides and lengths. Safe for
// several threads.
class GpuProgram {
 public:
  virtual ~GpuProgram() = default;
  virtual std::size_t zeroed_bytes() const { return 0; }
  virtual std::size_t scratch_bytes() const { return 0; }
  // Puts launches into the stream; allocates nothing, waits for nothing.
  virtual void run(const core::Problem& problem, const GpuCall& call) const = 0;
  // The choice in lines of "name       value", indented as Plan::explain() shows them.
  virtual std::string explain() const = 0;
};

// What a kernel is chosen for.
struct GpuTarget {
  std::string_view arch;
  const Options& options;
};

struct GpuKernel {
  std::string_view name;
  bool any_layout = false;  // of q, k and v; otherwise they are copied to where that pays
  // Reasons against the problem, as clauses that say what would help.
  std::vector<std::string> (*supports)(const core::Problem& problem, const GpuTarget& target);
  std::shared_ptr<const GpuProgram> (*prepare)(const core::Problem& problem, Device& device,
                                               const Options& options);
};

// In order of preference.
std::span<const GpuKernel> gpu_kernels();

// The reasons of the kernel that is nearest to computing the problem: none when one does.
std::vector<std::string> gpu_supports(const Problem& problem, const core::Problem& validated,
                                      const GpuTarget& target);

// A plan on a GPU for a problem that gpu_supports() accepts.
class GpuPlan {
 public:
  GpuPlan(Device& device, const Problem& problem, const core::Problem& validated,
          const Options& options);

  // Bytes that run() wants from its caller, in device memory.
  std::size_t workspace_bytes() const { return own_.address() != 0 ? 0 : total_bytes_; }

  // Memory::device alone. Throws Error where a tensor that the copy engine could read when planned
  // has a layout or an address that it cannot.
  void run(const Problem& problem, const core::Problem& validated, std::span<std::byte> workspace,
           Statistics* statistics) const;

  std::string explain() const;
  Device& device() const { return device_; }

 private:
  // One of q, k and v that is copied before the kernel runs, and where in the workspace.
  struct Copy {
    const Argument* argument;
    std::size_t offset;
  };

  void check_addresses(const Problem& problem) const;
  core::Problem placed(const Problem& problem, const core::Problem& validated,
                       DeviceAddress workspace) const;

  Device& device_;
  std::shared_ptr<const GpuProgram> program_;
  std::shared_ptr<const CopyKernel> copy_kernel_;
  std::string_view kernel_name_;
  std::vector<Copy> copies_;
  std::vector<const Argument*> engine_read_;  // what has to suit the copy engine at every run
  std::size_t counters_offset_ = 0;
  std::size_t scratch_offset_ = 0;
  std::size_t total_bytes_ = 0;
  DeviceBuffer own_;  // zeroed once; kernels leave zeros as zeros
};

}  // namespace fovea::runtime
