#include "model/hardware.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

namespace fovea::model {

namespace {

constexpr std::array<Gpu, 4> known{{
    {"h100", "sm_90a", 132, 1.66, 4096, 16, 128, 64, 4, 128, 64, 3.35e12, 989.4,
     "FlashAttention-3 paper, table 1 (132 multiprocessors, 128 B of shared memory, 3.35 TB/s); "
     "data sheet (989.4 TFLOPS = 132 x 4096 x 1.83 GHz); clock: that of the h200"},
    {"h200", "sm_90a", 132, 1.66, 4096, 16, 128, 64, 4, 128, 64, 4.8e12, 989.4,
     "data sheet (4.8 TB/s); exponentials measured, 15.99; clock: fitted to the times in "
     "docs/kernels/fwd_sm90.md, where tiles are counted in whole rounds; L2: 64 bytes a cycle, the "
     "rate of one multiprocessor's port"},
    {"b200", "sm_100a", 148, 1.85, 8192, 16, 128, 64, 4, 128, 64, 7.7e12, 2250.0,
     "FlashAttention-4 paper, section 2 (148 multiprocessors, 8192 FLOP, 16 exponentials, 128 B, "
     "1.85 GHz); device query (7.67 TB/s); not measured here"},
    {"b300", "sm_103a", 148, 1.85, 8192, 32, 128, 64, 4, 128, 64, 8.0e12, 2250.0,
     "FlashAttention-4 paper and NVIDIA's description of Blackwell Ultra (exponentials doubled); "
     "multiprocessors and clock taken from the b200, not confirmed; not measured here"},
}};

}  // namespace

std::span<const Gpu> gpus() { return known; }

const Gpu* find_gpu(std::string_view name) {
  std::string lower(name);
  std::ranges::transform(lower, lower.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const Gpu& gpu : known) {
    if (lower.find(gpu.name) != std::string::npos) return &gpu;
  }
  return nullptr;
}

}  // namespace fovea::model
