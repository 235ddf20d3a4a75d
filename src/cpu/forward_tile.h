// One tile of the forward pass, compiled once per instruction set and dispatched at run time.
#pragma once

#include <cstddef>

#include "core/tiles.h"
#include "core/types.h"
#include "cpu/attention.h"

namespace fovea::cpu {

// The widest vector of any target, in floats: buffer rows are padded to it.
inline constexpr core::int64 max_lanes = 16;
inline constexpr core::int64 padded(core::int64 count, core::int64 multiple = max_lanes) {
  return core::ceil_div(count, multiple) * multiple;
}

// Few rows: the most keys ahead of the products for which memory is asked.
inline constexpr core::int64 most_keys_ahead = 64;

// A row block, and the keys of a block that any of its rows sees, from a vector's bound on; full:
// all rows see all keys of the block.
struct VisibleKeys {
  core::RowBlock rows{0, 0};
  core::KeyRange keys;
  bool full = false;
};

// The scratch of one thread. Rows of scores are one vector longer than the tile so that successive
// rows do not fall into the same cache set.
struct TileScratch {
  core::int64 score_stride = 0;
  core::int64 query_stride = 0;  // floats; bf16 products use half of each row
  core::int64 out_stride = 0;
  float* queries = nullptr;         // [block_q][query_stride]
  float* scores = nullptr;          // [block_q][score_stride], then the weights
  float* out = nullptr;             // [block_q][out_stride]
  float* sums = nullptr;            // [block_q][max_lanes]
  float* reference = nullptr;       // [block_q]
  VisibleKeys* visible = nullptr;   // [strip_q], of each block of rows
  float* keys = nullptr;            // packed K
  float* values = nullptr;          // packed V
  float* staging = nullptr;         // rows on their way into the packs
  const void** key_rows = nullptr;  // [block_k], few rows: where each row of K, then V, lies
};

// Lays the scratch out from base (64-byte aligned); returns the bytes it takes.
std::size_t layout_scratch(const core::Problem& problem, const ForwardConfig& config,
                           std::byte* base, TileScratch& scratch);

// Where a tile's result goes: into out and lse, or, when the keys are split, into partial results
// [row][split]: out_columns floats and an lse without the sink.
struct Partials {
  float* out = nullptr;  // null: not split
  float* lse = nullptr;
  core::int64 out_columns = 0;
};

// K and V packed ahead of the tiles, a slot for each (sequence, head, key block).
struct Packs {
  float* slots = nullptr;  // [pack_slots][slot_floats]: the keys, then the values

  static core::int64 key_floats(const core::Problem& problem, const ForwardConfig& config) {
    return config.block_k * padded(problem.head_dim);
  }
  static core::int64 slot_floats(const core::Problem& problem, const ForwardConfig& config) {
    return key_floats(problem, config) + config.block_k * padded(problem.head_dim_v);
  }
};

// Packs one block of keys of every head: the first into `slot`, each other slots_apart floats
// behind the one before. `staging` is that of a TileScratch.
void pack_block(const core::Problem& problem, const ForwardConfig& config, core::int64 batch,
                core::int64 block, float* staging, float* slot, core::int64 slots_apart);

void forward_tile(const core::Problem& problem, const ForwardConfig& config, const core::Tile& tile,
                  const TileScratch& scratch, const Packs& packs, const Partials& partials,
                  ForwardStatistics& statistics);

// Index of a packed row among all rows of the problem, for Partials.
core::int64 partial_row(const core::Problem& problem, const core::Sequence& sequence,
                        core::int64 query, core::int32 head);

bool has_bf16_products();

}  // namespace fovea::cpu
