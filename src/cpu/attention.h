// The CPU engine's interface to runtime/: exact attention, forward, on validated problems.
#pragma once

#include <cstddef>
#include <string>

#include "core/softmax.h"
#include "core/types.h"

namespace fovea::cpu {

// What the forward pass is specialised and sized on. Made by configure(), executed by forward().
struct ForwardConfig {
  int threads = 1;
  core::SoftmaxPolicy softmax = core::SoftmaxPolicy::sum_guard;
  bool few_rows = false;           // decode: stream K and V once, without packing them
  bool bf16_products = false;      // both products through bf16 dot-product instructions
  core::int64 block_q = 0;         // packed query rows per tile and KV head, at most
  core::int64 strip_q = 0;         // of these, rows whose scores are in flight at once
  core::int32 heads_per_tile = 1;  // KV heads; more than one only with few rows
  core::int64 block_k = 0;         // keys per tile
  core::int64 splits = 1;          // parts of the key range (split-KV)
  core::int64 pack_slots = 0;     // key blocks packed ahead and shared by tiles; 0: each tile packs
  core::int64 tile_capacity = 0;  // upper bound on the number of tiles
  std::size_t thread_workspace_bytes = 0;  // scratch of one thread
  std::size_t workspace_bytes = 0;         // of the whole call
};

struct ForwardStatistics {
  core::int64 tiles_full = 0;
  core::int64 tiles_partial = 0;
  core::int64 rescales = 0;
  core::int64 repairs = 0;
  core::int64 recomputed_tiles = 0;
  core::int64 splits = 1;
};

// threads = 0 takes the OpenMP default. The config holds for every problem with these shapes and
// options, whatever its pointers, strides and lengths (seqlen_q, seqlen_k and total_q bound them).
ForwardConfig configure_forward(const core::Problem& problem, int threads,
                                core::SoftmaxPolicy softmax);

// Computes every element of out and lse. workspace has config.workspace_bytes bytes of any
// alignment. Allocates nothing, throws nothing.
void forward(const core::Problem& problem, const ForwardConfig& config, std::byte* workspace,
             ForwardStatistics& statistics);

// Name of the instruction set in use, e.g. "AVX-512 with BF16".
const char* instruction_set();

}  // namespace fovea::cpu
