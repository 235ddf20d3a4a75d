// Numbers of GPUs that the cost models use. Rates are per multiprocessor and cycle.
#pragma once

#include <span>
#include <string_view>

namespace fovea::model {

struct Gpu {
  std::string_view name;  // "h200"
  std::string_view arch;  // "sm_90a"
  int sm_count;
  // Under a kernel that keeps the tensor cores busy: power, not the highest clock, decides.
  double clock_ghz;
  double tensor_flops;  // products of 16-bit numbers with fp32 sums
  double exponentials;  // ex2 of the special function unit
  double fma_lanes;     // of fp32 multiply-adds; a packed instruction takes two for each lane
  double alu_lanes;     // of integers, conversions, minima and maxima
  double warp_instructions;
  double shared_bytes;
  double l2_bytes;
  double memory_bytes_per_second;
  double peak_tflops_16bit;  // of the data sheet, dense
  std::string_view sources;
};

std::span<const Gpu> gpus();

// By its short name, or by a driver's: "NVIDIA H200" is h200. Null for others.
const Gpu* find_gpu(std::string_view name);

}  // namespace fovea::model
