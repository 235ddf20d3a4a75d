// Runs the GEMM test kernels on the emulator and compares with a product in double precision.
#pragma once

#include <string>

#include "emulator.h"

namespace fovea::emulator::testing {

std::string read_text(const std::string& path);  // relative to this folder

struct GemmResult {
  Report report;
  double max_error = 0;  // against the exact product; outputs of bf16 kernels are rounded to bf16
  bool correct = false;
};

enum class GemmKernel { sm90, sm100_single, sm100_pair };

std::string gemm_path(GemmKernel kernel);
// Throws Error when the text is not a module or the launch is refused.
GemmResult run_gemm(GemmKernel kernel, const std::string& ptx, const Schedule& schedule);

}  // namespace fovea::emulator::testing
