// The CPU engine's backward pass, on validated problems.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace fovea::cpu {

// What the backward pass is sized on. Made by configure_backward(), executed by backward().
struct BackwardConfig {
  int threads = 1;
  core::int64 block_k = 0;  // keys per tile
  core::int64 strip_q = 0;  // packed query rows per tile
  core::int64 splits = 1;   // parts of a head's key blocks that may run beside each other
  std::size_t thread_workspace_bytes = 0;  // scratch of one thread
  std::size_t workspace_bytes = 0;         // of the whole call
};

// threads = 0 takes the OpenMP default. The config holds for every problem with these shapes and
// options, whatever its pointers, strides and lengths (seqlen_q, seqlen_k and total_q bound them).
BackwardConfig configure_backward(const core::Problem& problem, const core::Gradients& gradients,
                                  int threads);

// Computes every element of the gradients, the same bits for the same config. workspace has
// config.workspace_bytes bytes of any alignment. Allocates nothing, throws nothing.
void backward(const core::Problem& problem, const core::Gradients& gradients,
              const BackwardConfig& config, std::byte* workspace);

}  // namespace fovea::cpu
