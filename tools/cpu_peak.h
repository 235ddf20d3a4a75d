// What this machine can do at most, measured: the yardstick beside which results are printed.
#pragma once

#include "fovea/fovea.hpp"

namespace fovea::tools {

struct CpuPeaks {
  double f32 = 0.0;   // operations per second
  double bf16 = 0.0;  // 0 where the CPU has no bf16 dot products

  [[nodiscard]] double of(DType dtype) const {
    return dtype == DType::bf16 && bf16 > 0.0 ? bf16 : f32;
  }
};

// Independent fused multiply-adds in registers, and bf16 dot products with fp32 accumulation
// (AVX-512 BF16), on `threads` OpenMP threads at once: no memory access, nothing but the throughput
// of the vector units. A multiplication and an addition count as two operations.
[[nodiscard]] CpuPeaks measure_peaks(int threads);

// Bytes per second that `threads` threads read from a buffer far larger than the last-level cache.
[[nodiscard]] double measure_read_bandwidth(int threads);

// Bytes that make sure that a pass over them finds none of them in a cache.
[[nodiscard]] double cold_bytes();

// OpenMP threads that `requested` stands for; 0 takes the default.
[[nodiscard]] int thread_count(int requested);

}  // namespace fovea::tools
