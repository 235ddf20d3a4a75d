// Runs the test kernels on the emulator and compares with double precision.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "emulator/emulator.h"

namespace fovea::emulator::testing {

std::string read_text(const std::string& path);  // relative to this folder

// What a kernel needs of a device: the emulator, or a GPU.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::uint64_t allocate(std::size_t bytes) = 0;
  virtual void write(std::uint64_t address, const void* source, std::size_t bytes) = 0;
  virtual void read(void* destination, std::uint64_t address, std::size_t bytes) = 0;
  virtual TensorMap encode(const TensorMapSpec& spec) = 0;
  virtual Report launch(const std::string& ptx, const std::string& entry,
                        const LaunchConfig& config, std::span<const std::byte> parameters) = 0;
};

struct KernelResult {
  Report report;
  std::vector<float> output;
  double max_error = 0;  // relative to 1 + |exact|
  bool correct = false;
};

enum class Kernel { gemm_sm90, gemm_single, gemm_pair, attention_sm90, attention_sm100 };

std::string kernel_path(Kernel kernel);
std::string kernel_entry(Kernel kernel);
// Throws Error when the text is not a module or the launch is refused.
KernelResult run_kernel(Kernel kernel, const std::string& ptx, const Schedule& schedule);
KernelResult run_kernel(Kernel kernel, const std::string& ptx, Device& device);

}  // namespace fovea::emulator::testing
