// The CPU engine's host side: sizes, the work list, threads, and what remains after the tiles
// (merging split keys, rows outside every sequence). The arithmetic is in forward_tile.cpp.
#include "cpu/attention.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/softmax.h"
#include "core/tiles.h"
#include "cpu/forward_tile.h"

namespace fovea::cpu {
namespace {

using core::int32;
using core::int64;

constexpr std::size_t alignment_bytes = 64;

std::size_t align_up(std::size_t bytes) {
  return (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

std::size_t second_level_cache_bytes() {
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? static_cast<std::size_t>(bytes) : std::size_t{512} * 1024;
}

// Packed rows of the longest sequence.
int64 longest_rows(const core::Problem& p) { return p.seqlen_q * p.group_size(); }

// Few rows take the KV heads of a key together where they lie side by side, so that memory is read
// in its own order.
constexpr int32 most_heads_per_tile = 64;

bool heads_side_by_side(const core::Problem& p) {
  return p.heads_kv > 1 && p.k.stride[2] < p.k.stride[1];
}

int32 choose_heads_per_tile(const core::Problem& p) {
  return heads_side_by_side(p) ? std::min(p.heads_kv, most_heads_per_tile) : 1;
}

// Up to how many rows reading K and V in place is faster than packing them: half as many where a
// head's rows are contiguous, twice as many where packing one head would skip through the pages of
// all of them. One number for both, so that a result's bits do not depend on the layout.
constexpr int64 most_streamed_rows = 24;

int64 head_groups(const core::Problem& p, const ForwardConfig& config) {
  return core::ceil_div(p.heads_kv, config.heads_per_tile);
}

int64 row_block_count(int64 rows, int64 block_q) { return core::ceil_div(rows, block_q); }

int64 bytes_of_keys(const core::Problem& p, int64 count) {
  return 4 * count * (padded(p.head_dim) + padded(p.head_dim_v));
}

// Keys per block: many, so that the work per row and block is worth its overhead, while both packs
// fit a quarter of the second-level cache.
int64 choose_block_k(const core::Problem& p) {
  const auto quarter = static_cast<int64>(second_level_cache_bytes() / 4);
  for (const int64 block : {256, 128}) {
    if (bytes_of_keys(p, block) <= quarter) return block;
  }
  return 64;
}

// Rows whose queries, scores and output stay, with K and V, in two fifths of the second-level
// cache: what streams through beside them takes its share too.
int64 choose_strip_q(const core::Problem& p, const ForwardConfig& config) {
  const int64 row_bytes =
      4 * (padded(p.head_dim) + padded(p.head_dim_v) + config.block_k + max_lanes);
  const int64 budget =
      static_cast<int64>(second_level_cache_bytes()) * 2 / 5 - bytes_of_keys(p, config.block_k);
  return std::clamp<int64>(budget / row_bytes / 12 * 12, 48, 384);
}

// Packing ahead lets tiles share the packs and visits each page of K and V once. It pays where a
// head has several tiles, and is bounded in memory: sequences pass in waves that fit, and where one
// sequence does not, every tile packs for itself.
constexpr int64 most_pack_bytes = int64{32} * 1024 * 1024;

int64 choose_pack_slots(const core::Problem& p, const ForwardConfig& config) {
  if (config.few_rows || longest_rows(p) <= config.strip_q) return 0;
  const int64 slot_bytes = 4 * Packs::slot_floats(p, config);
  const int64 slots_of_sequence = core::ceil_div(p.seqlen_k, config.block_k) * p.heads_kv;
  if (slots_of_sequence * slot_bytes > most_pack_bytes) return 0;
  return std::min(most_pack_bytes / slot_bytes, slots_of_sequence * p.batch);
}

// Rows per tile: several strips, so that many rows share a block of keys on its way through the
// caches, but few enough to give every thread several tiles.
int64 choose_block_q(const core::Problem& p, const ForwardConfig& config) {
  const int64 rows = longest_rows(p);
  const int64 sequences = std::max<int64>(1, p.batch * p.heads_kv);
  const int64 tiles_wanted = 8 * config.threads;
  int64 block = 4 * config.strip_q;
  while (block > 96 && sequences * row_block_count(rows, block) < tiles_wanted) block -= 12;
  return std::max<int64>(1, std::min(block, rows));
}

// Parts of the keys: only when there are fewer tiles than threads can share.
int64 choose_splits(const core::Problem& p, const ForwardConfig& config) {
  const int64 key_blocks = std::max<int64>(1, core::ceil_div(p.seqlen_k, config.block_k));
  if (p.num_splits > 0) return std::min<int64>(p.num_splits, key_blocks);
  const int64 tiles = p.batch * head_groups(p, config) *
                      std::max<int64>(1, row_block_count(longest_rows(p), config.block_q));
  const int64 tiles_wanted = 4 * config.threads;
  if (config.threads == 1 || tiles == 0 || tiles >= tiles_wanted) return 1;
  const int64 useful = std::max<int64>(1, key_blocks / 4);  // a part below 4 blocks is not worth it
  return std::min(core::ceil_div(tiles_wanted, tiles), useful);
}

int64 tile_capacity(const core::Problem& p, const ForwardConfig& config) {
  const int64 blocks = p.is_varlen_q()
                           ? core::ceil_div(p.total_q * p.group_size(), config.block_q) + p.batch
                           : p.batch * row_block_count(longest_rows(p), config.block_q);
  return blocks * head_groups(p, config) * config.splits;
}

int64 total_rows(const core::Problem& p) {
  return (p.is_varlen_q() ? p.total_q : p.batch * p.seqlen_q) * p.heads_q;
}

std::size_t partial_bytes(const core::Problem& p, const ForwardConfig& config) {
  if (config.splits == 1) return 0;
  const auto parts = static_cast<std::size_t>(total_rows(p) * config.splits);
  return align_up(parts * static_cast<std::size_t>(padded(p.head_dim_v)) * sizeof(float)) +
         align_up(parts * sizeof(float));
}

std::size_t pack_bytes(const core::Problem& p, const ForwardConfig& config) {
  return align_up(static_cast<std::size_t>(config.pack_slots * Packs::slot_floats(p, config)) *
                  sizeof(float));
}

int64 key_blocks(const core::Sequence& s, const ForwardConfig& config) {
  return core::ceil_div(s.length_k, config.block_k);
}

// Sequences [begin, end) whose packed keys share the slots.
struct Wave {
  int64 begin = 0;
  int64 end = 0;
};

Wave next_wave(const core::Problem& p, const ForwardConfig& config, int64 begin) {
  if (config.pack_slots == 0) return {begin, p.batch};
  int64 slots = 0;
  int64 end = begin;
  for (; end < p.batch; ++end) {
    slots += key_blocks(core::sequence_at(p, end), config) * p.heads_kv;
    if (slots > config.pack_slots) break;
  }
  return {begin, end};
}

// Packs every key block of the wave that some query sees; thread `thread` of `threads` takes its
// share.
void pack_wave(const core::Problem& p, const ForwardConfig& config, const Wave& wave, int thread,
               int threads, const TileScratch& scratch, const Packs& packs) {
  const int64 slot_floats = Packs::slot_floats(p, config);
  int64 first_slot = 0;
  int64 item = 0;
  for (int64 b = wave.begin; b < wave.end; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    const core::KeyRange seen = core::union_range(p.window, s.length_q, s.length_k, 0, s.length_q);
    const int64 blocks = key_blocks(s, config);
    for (int64 block = seen.begin / config.block_k; block * config.block_k < seen.end; ++block) {
      if (item++ % threads != thread) continue;
      pack_block(p, config, b, block, scratch.staging,
                 packs.slots + (first_slot + block) * slot_floats, blocks * slot_floats);
    }
    first_slot += blocks * p.heads_kv;
  }
}

int32 tile_cost(const core::Problem& p, const core::Sequence& s, const core::RowBlock& rows) {
  const int64 group = p.group_size();
  const int64 work = core::tile_work(p.window, s.length_q, s.length_k, rows.begin / group,
                                     (rows.end - 1) / group + 1);
  return static_cast<int32>(std::min<int64>(work / 64, 0x7fffffff));
}

// Longest first keeps every thread busy to the end. Where each head has enough tiles for that, the
// heads follow each other, so that one head's packed keys serve all its tiles from the cache.
void sort_tiles(const core::Problem& p, const ForwardConfig& config, core::Tile* tiles,
                int64 count) {
  const bool head_by_head =
      row_block_count(longest_rows(p), config.block_q) >= int64{4} * config.threads;
  std::sort(tiles, tiles + count, [&](const core::Tile& a, const core::Tile& b) {
    if (head_by_head) {
      if (a.head_cost != b.head_cost) return a.head_cost > b.head_cost;
      if (a.batch != b.batch) return a.batch < b.batch;
      if (a.head_kv != b.head_kv) return a.head_kv < b.head_kv;
    }
    if (a.cost != b.cost) return a.cost > b.cost;
    if (a.batch != b.batch) return a.batch < b.batch;
    if (a.head_kv != b.head_kv) return a.head_kv < b.head_kv;
    if (a.row_begin != b.row_begin) return a.row_begin < b.row_begin;
    return a.split < b.split;
  });
}

// Fills tiles with every row block of the wave's sequences, in the order to take them; returns how
// many.
int64 list_tiles(const core::Problem& p, const ForwardConfig& config, const Wave& wave,
                 core::Tile* tiles) {
  int64 count = 0;
  int64 first_slot = 0;
  for (int64 b = wave.begin; b < wave.end; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    const int64 rows = s.length_q * p.group_size();
    const int64 blocks = row_block_count(rows, config.block_q);
    const int64 first_tile = count;
    core::Tile tile;
    tile.batch = static_cast<int32>(b);
    for (int64 block = 0; block < blocks; ++block) {
      const core::RowBlock range = core::row_block(rows, blocks, block);
      tile.row_begin = range.begin;
      tile.row_end = range.end;
      tile.cost = tile_cost(p, s, range);
      tile.head_cost = std::max(tile.head_cost, tile.cost);
      for (int32 head = 0; head < p.heads_kv; head += config.heads_per_tile) {
        tile.head_kv = head;
        tile.head_count = std::min(config.heads_per_tile, p.heads_kv - head);
        tile.pack_slot = first_slot + head * key_blocks(s, config);
        for (int32 split = 0; split < config.splits; ++split) {
          tile.split = split;
          tiles[count++] = tile;
        }
      }
    }
    for (int64 i = first_tile; i < count; ++i) tiles[i].head_cost = tile.head_cost;
    first_slot += key_blocks(s, config) * p.heads_kv;
  }
  sort_tiles(p, config, tiles, count);
  return count;
}

void store_result(const core::Problem& p, const core::Sequence& s, int64 query, int32 head,
                  const float* row, float factor, float lse) {
  const int64 offset = p.out.offset(s.batch_q, s.row_q + query, head);
  for (int32 i = 0; i < p.head_dim_v; ++i) {
    core::store_element(p.out.data, p.out.dtype, offset + i * p.out.stride[3],
                        row == nullptr ? 0.0f : core::weighted(factor, row[i]));
  }
  if (p.lse) {
    static_cast<float*>(p.lse.data)[p.lse.offset(s.batch_q, head, s.row_q + query)] = lse;
  }
}

// Merges the parts of one row into its first part and stores it; the sink is added here, once.
void combine_row(const core::Problem& p, const ForwardConfig& config, const Partials& partials,
                 const core::Sequence& s, int64 query, int32 head) {
  const int64 first = partial_row(p, s, query, head) * config.splits;
  float* out = partials.out + first * partials.out_columns;
  float lse = partials.lse[first];
  for (int64 part = 1; part < config.splits; ++part) {
    const core::Merge merge = core::merge_parts(lse, partials.lse[first + part]);
    const float* other = partials.out + (first + part) * partials.out_columns;
    for (int64 i = 0; i < partials.out_columns; ++i) {
      out[i] = core::weighted(merge.weight_a, out[i]) + core::weighted(merge.weight_b, other[i]);
    }
    lse = merge.lse;
  }
  float factor = lse == -core::infinity ? 0.0f : 1.0f;
  if (p.sink) {
    const float sink = static_cast<const float*>(p.sink.data)[head * p.sink.stride[0]];
    const core::Merge merge = core::merge_parts(lse, sink);
    factor *= merge.weight_a;
    lse = merge.lse;
  }
  store_result(p, s, query, head, out, factor, lse);
}

// Rows of out that belong to no sequence, or lie beyond its used length: zero, lse = -infinity.
void clear_rows(const core::Problem& p, const core::Sequence& s, int64 begin, int64 end) {
  for (int64 query = begin; query < end; ++query) {
    for (int32 head = 0; head < p.heads_q; ++head) {
      store_result(p, s, query, head, nullptr, 0.0f, -core::infinity);
    }
  }
}

void clear_slack(const core::Problem& p) {
  if (p.seqused_q != nullptr) {
    for (int64 b = 0; b < p.batch; ++b) {
      const core::Sequence s = core::sequence_at(p, b);
      clear_rows(p, s, s.length_q, s.capacity_q);
    }
  }
  if (p.is_varlen_q()) {
    const core::Sequence whole;
    clear_rows(p, whole, p.cu_seqlens_q[p.batch], p.total_q);
  }
}

void add(ForwardStatistics& to, const ForwardStatistics& from) {
  to.tiles_full += from.tiles_full;
  to.tiles_partial += from.tiles_partial;
  to.rescales += from.rescales;
  to.repairs += from.repairs;
  to.recomputed_tiles += from.recomputed_tiles;
}

}  // namespace

ForwardConfig configure_forward(const core::Problem& problem, int threads,
                                core::SoftmaxPolicy softmax) {
  ForwardConfig config;
  config.threads = threads > 0 ? threads : omp_get_max_threads();
  config.softmax = softmax;
  config.bf16_products = problem.q.dtype == core::DType::bf16 && has_bf16_products();
  config.block_k = choose_block_k(problem);
  config.few_rows = longest_rows(problem) <= most_streamed_rows;
  if (config.few_rows) {
    config.block_k = 64;
    config.heads_per_tile = choose_heads_per_tile(problem);
  }
  config.strip_q = choose_strip_q(problem, config);
  config.pack_slots = choose_pack_slots(problem, config);
  config.block_q = choose_block_q(problem, config);
  config.strip_q = std::min(config.strip_q, config.block_q);
  config.splits = choose_splits(problem, config);
  config.tile_capacity = tile_capacity(problem, config);
  TileScratch scratch;
  config.thread_workspace_bytes = layout_scratch(problem, config, nullptr, scratch);
  config.workspace_bytes =
      alignment_bytes +
      align_up(static_cast<std::size_t>(config.tile_capacity) * sizeof(core::Tile)) +
      partial_bytes(problem, config) + pack_bytes(problem, config) +
      config.thread_workspace_bytes * static_cast<std::size_t>(config.threads);
  return config;
}

void forward(const core::Problem& problem, const ForwardConfig& config, std::byte* workspace,
             ForwardStatistics& statistics) {
  auto address = reinterpret_cast<std::uintptr_t>(workspace);
  std::byte* at = workspace + (align_up(address) - address);
  auto* tiles = reinterpret_cast<core::Tile*>(at);
  at += align_up(static_cast<std::size_t>(config.tile_capacity) * sizeof(core::Tile));
  Partials partials;
  partials.out_columns = padded(problem.head_dim_v);
  if (config.splits > 1) {
    const int64 parts = total_rows(problem) * config.splits;
    partials.out = reinterpret_cast<float*>(at);
    partials.lse = partials.out + parts * partials.out_columns;
    at += partial_bytes(problem, config);
  }
  Packs packs;
  packs.slots = reinterpret_cast<float*>(at);
  at += pack_bytes(problem, config);
  statistics = {};
  statistics.splits = config.splits;
  Wave wave;
  int64 count = 0;
#pragma omp parallel num_threads(config.threads)
  {
    const int thread = omp_get_thread_num();
    TileScratch scratch;
    layout_scratch(problem, config,
                   at + config.thread_workspace_bytes * static_cast<std::size_t>(thread), scratch);
    ForwardStatistics own;
    while (wave.end < problem.batch) {
#pragma omp barrier
#pragma omp single
      {
        wave = next_wave(problem, config, wave.end);
        count = list_tiles(problem, config, wave, tiles);
      }
      if (config.pack_slots > 0) {
        pack_wave(problem, config, wave, thread, omp_get_num_threads(), scratch, packs);
#pragma omp barrier
      }
#pragma omp for schedule(dynamic, 1)
      for (int64 i = 0; i < count; ++i) {
        forward_tile(problem, config, tiles[i], scratch, packs, partials, own);
      }
    }
    if (config.splits > 1) {
      for (int64 b = 0; b < problem.batch; ++b) {
        const core::Sequence s = core::sequence_at(problem, b);
#pragma omp for schedule(static)
        for (int64 row = 0; row < s.length_q * problem.heads_q; ++row) {
          combine_row(problem, config, partials, s, row / problem.heads_q,
                      static_cast<int32>(row % problem.heads_q));
        }
      }
    }
#pragma omp critical
    add(statistics, own);
  }
  clear_slack(problem);
}

}  // namespace fovea::cpu
