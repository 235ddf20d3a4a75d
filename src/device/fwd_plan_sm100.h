// The plan of the forward kernel for Blackwell: shared memory, barriers, the tiles of a CTA.
#pragma once

#include "core/config_sm100.h"
#include "device/fwd_tiles.h"
#include "device/pipeline.h"
#include "device/tcgen05.h"
#include "device/trace.h"

namespace fovea::device {

using core::DType;
using core::Fwd100Config;
using core::FwdFp8Params;
using core::KeyScale;

// What the kernel of a configuration is launched with.
template <bool eight_bit>
struct Fwd100ParamsOf {
  using Type = FwdParams;
};
template <>
struct Fwd100ParamsOf<true> {
  using Type = FwdFp8Params;
};
template <Fwd100Config C>
using Fwd100Params = typename Fwd100ParamsOf<core::is_eight_bit(C)>::Type;

// The rows of a CTA, and what each of its query tiles visits.
struct Fwd100Tile : FwdTile {
  KeySpan spans[2];
  int32 first_keys;  // 8 bits: tiles of keys that this CTA has loaded before
};

// Tiles of q, k, 16-bit v and out are panels of the width of their swizzle, 128 bytes but for 8-bit
// rows of another multiple, each [row][panel]. 8-bit v is [column][128 keys], in places that
// core::value_key() permutes.
//
// A slot is a place for scores: that of a query tile, or, with one query tile, of every other tile
// of keys. Barriers of a slot or a query tile complete once per tile of keys, and their parity
// follows from the tiles of keys seen so far.
//
// Of a CTA pair, the first issues all products. What products wait for, they wait for there: both
// CTAs arrive on the barriers of the first that are marked *, with twice the arrivals. Commits
// arrive in both.
template <Fwd100Config C>
struct Fwd100Plan {
  static constexpr bool eight_bit = core::is_eight_bit(C);
  static constexpr Swizzle swizzle_qk = pattern_of(core::row_bytes_of(C));
  static constexpr uint32 pattern_qk = swizzle_bytes(swizzle_qk);
  static constexpr int32 panels_qk = core::row_bytes_of(C) / static_cast<int32>(pattern_qk);
  // Columns of a panel of q, k and 16-bit v.
  static constexpr int32 panel_elements =
      static_cast<int32>(pattern_qk) / core::size_bytes(C.dtype);
  static constexpr int32 panels_v = core::panels(C.head_dim_v);  // of out
  // Of values, each with all keys; in 8 bits one holds all columns.
  static constexpr int32 panels_loaded = eight_bit ? 1 : core::panels(core::value_columns_of(C));
  static constexpr uint32 row_bytes = 2 * core::panel_columns;
  static constexpr uint32 group_bytes = 8 * row_bytes;  // 8 rows: the period of the swizzle
  static constexpr uint32 panel_bytes = 128 * row_bytes;
  static constexpr uint32 q_panel_bytes = 128 * pattern_qk;
  static constexpr uint32 key_panel_bytes = core::key_rows_of(C) * pattern_qk;
  static constexpr uint32 value_panel_bytes =
      (eight_bit ? core::value_columns_of(C) : C.tile_k) * row_bytes;
  static constexpr uint32 q_bytes = panels_qk * q_panel_bytes;
  static constexpr uint32 stage_bytes = core::stage_bytes(C);

  alignas(1024) uint8 q[C.query_tiles][q_bytes];
  alignas(1024) uint8 keys[C.stages][stage_bytes];  // k and v in turn
  alignas(1024) uint8 out[C.out_apart ? C.query_tiles * panels_v * panel_bytes : 1];

  using PairRing = Ring<1, C.cta_pair>;
  Ring<C.stages, C.cta_pair> key_ring;  // full*: 1 producer and the bytes; free: 1 commit
  PairRing q_ring[C.query_tiles];       // full*: 1 producer and the bytes; free: 1
  Ring<2> tile_ring;                    // full: 1 producer; free: each warp that computes or stores
  PairRing output_ring[C.query_tiles];  // full: 1 commit, of the last keys; free*: 4 warps
  PairRing next_ring;                   // full: the answer's bytes; free*: 1 loading warp
  Ring<1> row_ring[C.query_tiles];      // full: 4 warps, rows are summed; free: 4 warps
  Ring<1> out_ring[C.query_tiles];      // full: 4 warps, out is staged; free: 1, it has left

  Barrier scores_full[2];              // slot: 1 commit
  Barrier weights_full[2][2];          // slot, part: 4 warps*
  Barrier factor_full[2];              // slot: 4 warps, with corrections
  Barrier output_ready[2];             // slot: 4 warps*, with corrections; in both CTAs of a pair
  Barrier first_done[C.query_tiles];   // 1 commit: the product of the first part
  Barrier output_done[C.query_tiles];  // 1 commit: the product of both
  Barrier edge_full;                   // values that are cleared before others see them
  Barrier scales_full[core::key_scale_slots];  // 8 bits: 1 producer and the bytes

  float row_factor[2][128];  // slot: of the corrections; in the end the sums
  float row_reference[2][128];
  Fwd100Tile tiles[2];
  alignas(16) uint64 answer[2];  // of launch control
  uint32 tensor_memory;
  [[no_unique_address]] TraceCounts<C.trace> trace;
  KeyScale scales[eight_bit ? core::key_scale_slots : 1][C.tile_k / core::scale_block];

  // With corrections, two query tiles need not wait before they write rows: the product before the
  // second block of a tile, or before its end, has waited for warps that have read the last rows.
  static constexpr bool rows_are_free = core::is_corrected(C) && C.query_tiles == 2;

  // The scores of a block are told of behind the product with the values of the one before, and a
  // commit waits for all products before it. With one query tile they come in front of it.
  static constexpr bool scores_follow_output = C.query_tiles == 2;

  static constexpr uint32 tile_consumers = 4 * C.query_tiles + 4 + 2;
  __forceinline__ SharedAddress staging(int32 query_tile) const {
    return C.out_apart ? shared_address(out) + query_tile * panels_v * panel_bytes
                       : shared_address(q[query_tile]);
  }

  static_assert(eight_bit || C.dtype == DType::bf16 || C.dtype == DType::f16);
  static_assert(C.query_tiles == 1 || C.query_tiles == 2);
  static_assert(C.tile_k == 128 && C.first_part % 32 == 0 && C.first_part > 0);
  static_assert(C.first_part < C.tile_k && C.polynomial >= 0 && C.polynomial <= 16);
  static_assert(C.head_dim % (eight_bit ? 32 : 16) == 0);
  static_assert(C.head_dim_v % 16 == 0 && C.head_dim_v <= 256);
  static_assert(core::output_column(C, C.query_tiles) <= core::tensor_columns);
  static_assert(C.stages >= 2 && (C.out_apart || q_bytes >= panels_v * panel_bytes));
  static_assert(!C.tma_out || (core::size_bytes(C.out_dtype) == 2 && !C.packed && !C.split));
  static_assert(eight_bit || !C.tma_out || C.out_dtype == C.dtype);
  // The values of a tile of keys are at most two stages behind the keys of the next one.
  static_assert(!eight_bit || C.stages <= core::most_stages_fp8);
  static_assert(!eight_bit || (C.source == Source::tma && !C.split && !core::modifies_scores(C) &&
                               !C.has_dropout));
  static_assert(!C.split || !C.has_sink, "the sink is added once, by the combining kernel");
  static_assert(C.source != Source::gather);
  static_assert(!C.cta_pair || (core::is_dense(C) && C.head_dim_v % 128 == 0));
  static_assert(!C.launch_control || C.persistent);
};

// ---- CTA pairs ----------------------------------------------------------------------------------

// In which CTA of the cluster this one is, and whether it issues products.
template <Fwd100Config C>
__forceinline__ uint32 pair_rank() {
  return C.cta_pair ? cluster_rank() : 0;
}

template <Fwd100Config C>
__forceinline__ ClusterAddress of_first_cta(Barrier& barrier) {
  return map_to_rank(shared_address(&barrier), 0);
}

template <Fwd100Config C>
__forceinline__ void wait_pair(Barrier& barrier, uint32 parity) {
  Ring<1, C.cta_pair>::wait(barrier, parity);
}

// All products issued so far are done: told to both CTAs of a pair.
template <Fwd100Config C>
__forceinline__ void commit(Barrier& barrier) {
  if constexpr (C.cta_pair) {
    tcgen05_commit_pair(barrier, 3);
  } else {
    tcgen05_commit(barrier);
  }
}

// One arrival of a warp, after what each of its lanes did before.
__forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (lane_index() == 0) mbarrier_arrive(barrier);
}

// The same, where products wait for it.
template <Fwd100Config C>
__forceinline__ void arrive_for_products(Barrier& barrier) {
  if constexpr (C.cta_pair) {
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive_remote(of_first_cta<C>(barrier));
  } else {
    arrive_warp(barrier);
  }
}

// ---- Timelines ----------------------------------------------------------------------------------

enum class TraceRole : int32 { load, multiply, softmax, softmax_1, correct, store };

template <Fwd100Config C>
__forceinline__ void mark(Fwd100Plan<C>& plan, const FwdParams& params, TraceRole role, bool scribe,
                          TracePhase phase) {
  trace_mark(plan.trace, params.trace, static_cast<int32>(role), scribe, phase);
}

// ---- Tiles --------------------------------------------------------------------------------------

// What a span has in common with blocks [begin, end).
__forceinline__ KeySpan clipped(KeySpan span, int32 begin, int32 end) {
  const auto inside = [&](int32 block) { return min(max(block, begin), end); };
  return {span.key_begin,          span.key_end,          inside(span.begin),
          inside(span.full_begin), inside(span.full_end), inside(span.end)};
}

template <Fwd100Config C>
__forceinline__ Fwd100Tile find_query_tiles(const FwdParams& params, int32 index) {
  Fwd100Tile tile;
  static_cast<FwdTile&>(tile) = find_tile<C>(params, index);
  tile.q_begin += static_cast<int32>(pair_rank<C>()) * queries_per_tile<C>(params);
  const int32 queries = queries_per_tile<C>(params) / C.query_tiles;
#pragma unroll
  for (int32 t = 0; t < C.query_tiles; ++t) {
    if constexpr (C.cta_pair) {
      tile.spans[t] = tile;  // both CTAs take part in all products, also where one has no rows
    } else {
      KeySpan span = find_span<C>(tile, params, tile.q_begin + queries * t, queries);
      if constexpr (C.split) span = clipped(span, tile.begin, tile.end);
      tile.spans[t] = span;
    }
  }
  return tile;
}

__forceinline__ bool visits(const KeySpan& span, int32 block) {
  return block >= span.begin && block < span.end;
}

// The order of a tile's blocks of keys: the first one first, then from the last one down. Trained
// models let rows attend most to their first keys ("attention sinks"), so that a reference taken
// there is seldom outgrown; the rest comes masked blocks first. n counts from 0.
__forceinline__ int32 block_at(const KeySpan& all, int32 n) {
  return n == 0 ? all.begin : all.end - n;
}
// What a query tile visits of them it visits in this order: its first and last block, and the next.
__forceinline__ int32 first_of(const KeySpan& all, const KeySpan& span) {
  return span.begin == all.begin ? span.begin : span.end - 1;
}
__forceinline__ int32 last_of(const KeySpan& all, const KeySpan& span) {
  return span.begin == all.begin && span.count() > 1 ? span.begin + 1 : span.begin;
}
__forceinline__ int32 block_after(const KeySpan& all, const KeySpan& span, int32 block) {
  return block == all.begin ? span.end - 1 : block - 1;
}
// What follows the first; from there on they go down.
__forceinline__ int32 second_of(const KeySpan& all, const KeySpan& span) {
  return span.begin == all.begin ? span.end - 1 : span.end - 2;
}

// Where the n-th tile of keys of a query tile goes, and the parity of the barriers it completes.
template <Fwd100Config C>
__forceinline__ int32 slot_of(int32 query_tile, int32 n) {
  return C.query_tiles == 2 ? query_tile : n % 2;
}
template <Fwd100Config C>
__forceinline__ uint32 slot_parity(int32 n) {
  return static_cast<uint32>(C.query_tiles == 2 ? n : n / 2) & 1u;
}
__forceinline__ uint32 parity_of(int32 n) { return static_cast<uint32>(n) & 1u; }

// Whether out of a query tile goes through shared memory: not where its rows end inside.
template <Fwd100Config C>
__forceinline__ bool is_staged(const Fwd100Tile& tile, int32 query_tile) {
  if constexpr (!C.tma_out) return false;
  if (tile.spans[query_tile].count() == 0) return false;
  return !C.ragged || tile.q_begin + 128 * query_tile + 128 <= tile.capacity_q;
}

// The tile that this CTA works on; none behind the last.
template <Fwd100Config C>
__forceinline__ const Fwd100Tile* next_tile(Fwd100Plan<C>& plan, const RingState<2>& state) {
  plan.tile_ring.wait_full(state);
  const Fwd100Tile* tile = &plan.tiles[state.stage];
  return tile->last != 0 ? nullptr : tile;
}

}  // namespace fovea::device
