// Runs the test kernels on the emulator and compares with double precision.
#pragma once

#include <string>

#include "emulator.h"

namespace fovea::emulator::testing {

std::string read_text(const std::string& path);  // relative to this folder

struct KernelResult {
  Report report;
  double max_error = 0;  // relative to 1 + |exact|
  bool correct = false;
};

enum class Kernel { gemm_sm90, gemm_single, gemm_pair, attention_sm90, attention_sm100 };

std::string kernel_path(Kernel kernel);
std::string kernel_entry(Kernel kernel);
// Throws Error when the text is not a module or the launch is refused.
KernelResult run_kernel(Kernel kernel, const std::string& ptx, const Schedule& schedule);

}  // namespace fovea::emulator::testing
