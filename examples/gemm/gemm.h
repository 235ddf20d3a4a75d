// What host and kernels of the sample share: C = A B^T with A [m][k], B [n][k], C [m][n], all bf16
// and row-major, products summed in fp32.
#pragma once

#include "core/config.h"

namespace fovea::examples {

// One CTA computes a tile of C, 64 elements of k at a time, through a ring of stages.
struct GemmConfig {
  int tile_m = 128;
  int tile_n = 128;  // multiple of 64, at most 256
  int tile_k = 64;   // 128 bytes: one row of the 128-byte swizzle
  int stages = 4;
};

// Boxes of the maps: a {tile_k, tile_m}, b {tile_k, tile_n}, c {64, rows stored at a time}; all
// with the 128-byte swizzle.
struct GemmParams {
  core::TensorMap a;
  core::TensorMap b;
  core::TensorMap c;
  int k = 0;
};

}  // namespace fovea::examples
