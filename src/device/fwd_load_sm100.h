// The loading warp of the forward kernel for Blackwell: deals out tiles, keeps the ring of keys and
// values full.
#pragma once

#include "device/fwd_fp8_sm100.h"
#include "device/fwd_plan_sm100.h"
#include "device/tma.h"

namespace fovea::device {

template <Fwd100Config C>
struct Load100 {
  using Plan = Fwd100Plan<C>;
  Plan& plan;
  const Fwd100Params<C>& params;
  const bool leader;
  RingState<C.stages> state;
  RingState<1> q_states[C.query_tiles];
  RingState<2> tile_state;
  RingState<1> next_state;
  int32 key_tiles = 0;                 // loaded so far
  int32 edges = 0;                     // stages of values cleared so far
  int32 edge_stage = -1;               // the one that has to be
  int32 edge_begin = 0, edge_end = 0;  // its keys that are seen

  __forceinline__ void begin(TracePhase phase) const {
    mark<C>(plan, params, TraceRole::load, leader, phase);
  }

  // One copy of a tile's; in a pair its bytes count in the first CTA.
  template <int dimensions>
  static __forceinline__ void copy(SharedAddress target, const TensorMap* map, Barrier& full,
                                   const int32 (&at)[dimensions], CachePolicy policy) {
    if constexpr (C.cta_pair) {
      tma_load_pair(target, map, of_first_cta<C>(full), at, policy);
    } else {
      tma_load(target, map, full, at, policy);
    }
  }

  static __forceinline__ void expect(Barrier& full, uint32 bytes) {
    if constexpr (C.cta_pair) {
      mbarrier_arrive_expect_bytes_remote(of_first_cta<C>(full), bytes);
    } else {
      mbarrier_arrive_expect_bytes(full, bytes);
    }
  }

  __forceinline__ void load_q(const Fwd100Tile& tile) {
#pragma unroll
    for (int32 t = 0; t < C.query_tiles; ++t) {
      if (tile.spans[t].count() == 0) continue;
      begin(TracePhase::free);
      plan.q_ring[t].wait_free(q_states[t]);
      begin(TracePhase::copy);
      const int32 row = tile.row_q + tile.q_begin + queries_per_tile<C>(params) / C.query_tiles * t;
      if (leader) {
        expect(plan.q_ring[t].full[0], Plan::q_bytes);
        const CachePolicy once = cache_policy_evict_first();
#pragma unroll
        for (int32 panel = 0; panel < Plan::panels_qk; ++panel) {
          const SharedAddress target = shared_address(plan.q[t]) + panel * Plan::q_panel_bytes;
          const int32 column = panel * Plan::panel_elements;
          if constexpr (C.packed) {
            copy(target, &params.q, plan.q_ring[t].full[0],
                 {column, 0, row, tile.head_kv, tile.batch_q}, once);
          } else {
            copy(target, &params.q, plan.q_ring[t].full[0], {column, row, tile.head, tile.batch_q},
                 once);
          }
        }
      }
      q_states[t].advance();
    }
  }

  // A tile of keys or values: a copy for each panel, or one for each panel and page, by a lane
  // each. From (column, row) of the tile on, which are zero but for the second CTA of a pair.
  template <int32 panel_count, uint32 panel_bytes>
  __forceinline__ void load_panels(const TensorMap* map, Barrier& full, const Fwd100Tile& tile,
                                   int32 block, int32 first_column, int32 first_row) {
    if (leader) expect(full, panel_count * panel_bytes);
    const CachePolicy again = cache_policy_evict_last();
    if constexpr (C.source == Source::paged) {
      const int32 box = params.page_box;
      const int32 lane = lane_index();
      if (lane * box >= C.tile_k) return;
      const int32 key = first_of_piece<C>(tile, block, lane * box, box);
      const core::KeyPlace at = core::page_of(params, tile.sequence, key);
#pragma unroll
      for (int32 panel = 0; panel < panel_count; ++panel) {
        tma_load(shared_address(plan.keys[state.stage]) + panel * panel_bytes +
                     static_cast<uint32>(lane * box) * Plan::row_bytes,
                 map, full, {panel * core::panel_columns, at.row, tile.head_kv, at.page}, again);
      }
      return;
    }
    if (!leader) return;
#pragma unroll
    for (int32 panel = 0; panel < panel_count; ++panel) {
      copy(shared_address(plan.keys[state.stage]) + panel * panel_bytes, map, full,
           {first_column + panel * Plan::panel_elements, tile.row_k + block * C.tile_k + first_row,
            tile.head_kv, tile.batch_k},
           again);
    }
  }

  __forceinline__ void load_keys(const Fwd100Tile& tile, int32 block) {
    begin(TracePhase::free);
    plan.key_ring.wait_free(state);
    begin(TracePhase::copy);
    load_panels<Plan::panels_qk, Plan::key_panel_bytes>(
        &params.k, plan.key_ring.full[state.stage], tile, block, 0,
        static_cast<int32>(pair_rank<C>()) * core::key_rows_of(C));
    if constexpr (Plan::eight_bit) {
      if (leader) load_key_scales<C>(plan, params, tile, block, key_tiles);
      ++key_tiles;
    }
    state.advance();
  }

  // Values of keys that no row sees are cleared, since 0 x NaN is NaN: they land on a barrier of
  // this warp's own, and the ring's gets a plain arrival once they are clean.
  __forceinline__ void load_values(const Fwd100Tile& tile, int32 block) {
    begin(TracePhase::free);
    plan.key_ring.wait_free(state);
    begin(TracePhase::copy);
    if constexpr (core::is_windowed(C) || C.ragged) {
      edge_begin = max(0, tile.key_begin - block * C.tile_k);
      edge_end = min(C.tile_k, tile.key_end - block * C.tile_k);
      if (edge_begin > 0 || edge_end < C.tile_k) {
        load_value_panels(plan.edge_full, tile, block);
        edge_stage = state.stage;
        state.advance();
        return;
      }
    }
    load_value_panels(plan.key_ring.full[state.stage], tile, block);
    state.advance();
  }

  __forceinline__ void load_value_panels(Barrier& full, const Fwd100Tile& tile, int32 block) {
    const int32 first_column = static_cast<int32>(pair_rank<C>()) * core::value_columns_of(C);
    if constexpr (Plan::eight_bit) {
      if (!leader) return;
      expect(full, Plan::value_panel_bytes);
      const int32 first_key =
          first_key_block<C>(params, tile) * core::scale_block + block * C.tile_k;
      copy(shared_address(plan.keys[state.stage]), &params.v, full,
           {first_key, first_column, tile.head_kv, tile.batch_k}, cache_policy_evict_last());
    } else {
      load_panels<Plan::panels_loaded, Plan::value_panel_bytes>(&params.v, full, tile, block,
                                                                first_column, 0);
    }
  }

  __forceinline__ void clear_edge() {
    if constexpr (core::is_windowed(C) || C.ragged) {
      if (edge_stage < 0) return;
      mbarrier_wait(plan.edge_full, parity_of(edges++));
      const SharedAddress values = shared_address(plan.keys[edge_stage]);
      if constexpr (Plan::eight_bit) {
        clear_fp8_values<C>(values, edge_begin, edge_end);
      } else {
        clear_values(values);
      }
      fence_proxy_async_shared();
      arrive_warp(plan.key_ring.full[edge_stage]);
      edge_stage = -1;
    }
  }

  __forceinline__ void clear_values(SharedAddress values) const {
    constexpr int32 chunks = 8 * Plan::panels_v;  // of 16 bytes in a row; swizzling permutes them
#pragma unroll 1
    for (int32 i = lane_index(); i < C.tile_k * chunks; i += 32) {
      const int32 key = i / chunks;
      if (key >= edge_begin && key < edge_end) continue;
      const int32 panel = (i % chunks) / 8;
      store_shared_x4(values + panel * Plan::panel_bytes + key * Plan::row_bytes + (i % 8) * 16,
                      uint4{0, 0, 0, 0});
    }
  }

  // Tells all warps which tile comes next. This one, too, reads it where it lies.
  __forceinline__ const Fwd100Tile& publish(const Fwd100Tile& tile) {
    Fwd100Tile& place = plan.tiles[tile_state.stage];
    plan.tile_ring.wait_free(tile_state);
    if (leader) {
      place = tile;
      if constexpr (Plan::eight_bit) place.first_keys = key_tiles;
      mbarrier_arrive(plan.tile_ring.full[tile_state.stage]);
    }
    __syncwarp();  // all lanes read it
    tile_state.advance();
    return place;
  }

  // In the order in which products take them: values come one step behind keys, and before the keys
  // of that step where two query tiles share it.
  __forceinline__ void load_tile(const Fwd100Tile& tile) {
    load_q(tile);
    const KeySpan all = tile;  // in registers
    for (int32 n = 0; n <= all.count(); ++n) {
      const bool keys = n < all.count();
      const bool values = n > 0;
      if constexpr (C.query_tiles == 2) {
        if (values) load_values(tile, block_at(all, n - 1));
        if (keys) load_keys(tile, block_at(all, n));
        clear_edge();
      } else {
        if (keys) load_keys(tile, block_at(all, n));
        clear_edge();
        if (values) load_values(tile, block_at(all, n - 1));
      }
    }
    clear_edge();
  }

  // Tiles as they come: the first by place, further ones from the hardware's queue, from a counter
  // that all CTAs share, or, without either, in rounds. A pair's tiles are as long as all others,
  // and both of its CTAs have to find the same.
  static constexpr int32 ctas = core::ctas_of(C);
  static constexpr bool counts = C.persistent && !C.launch_control && !C.cta_pair;

  __forceinline__ int32 next(int32 round) {
    if constexpr (C.launch_control) {
      return round == 0 ? static_cast<int32>(blockIdx.x) / ctas : granted();
    } else if constexpr (C.cta_pair) {
      return tile_index(round, ctas);
    } else {
      if (params.scheduler == nullptr || round == 0) return tile_index(round);
      int32 index = 0;
      if (leader) index = static_cast<int32>(gridDim.x + atomicAdd(params.scheduler, 1u));
      return __reduce_max_sync(0xffffffffu, index);
    }
  }

  // Asks for the tile of a CTA, or of a pair, that has not started; both of a pair get the answer.
  __forceinline__ void ask() {
    if constexpr (C.launch_control) {
      if (pair_rank<C>() == 0) plan.next_ring.wait_free(next_state);
      if (!leader) return;
      plan.next_ring.expect(next_state, sizeof plan.answer);
      if constexpr (C.cta_pair) {
        if (pair_rank<C>() == 0) {
          launch_control_try_cancel_all(shared_address(plan.answer),
                                        shared_address(&plan.next_ring.full[0]));
        }
      } else {
        launch_control_try_cancel(shared_address(plan.answer),
                                  shared_address(&plan.next_ring.full[0]));
      }
    }
  }

  // The answer: a tile, or one behind the last.
  __forceinline__ int32 granted() {
    plan.next_ring.wait_full(next_state);
    const uint4 bits = load_shared_x4(shared_address(plan.answer));
    const uint64 low = bits.x | static_cast<uint64>(bits.y) << 32;
    const uint64 high = bits.z | static_cast<uint64>(bits.w) << 32;
    uint32 first = 0;
    const bool some = launch_control_granted(low, high, first);
    fence_proxy_async_shared();  // the next answer is written behind this read
    arrive_for_products<C>(plan.next_ring.free[0]);
    next_state.advance();
    return some ? static_cast<int32>(first) / ctas : params.tiles;
  }

  __forceinline__ void run() {
    int32 index = next(0);
#pragma unroll 1
    for (int32 round = 1; index < params.tiles; ++round) {
      begin(TracePhase::tile);
      ask();
      Fwd100Tile found = find_query_tiles<C>(params, index);
      // What the hardware grants is known once the tile is on its way.
      if constexpr (!C.launch_control) index = C.persistent ? next(round) : params.tiles;
      if (C.cta_pair || found.exists()) {
        const Fwd100Tile& tile = publish(found);
        if (tile.count() > 0) load_tile(tile);
        while (next_unused<C>(found, params)) publish(found);
      }
      if constexpr (C.launch_control) index = next(round);
    }
    Fwd100Tile none{};
    none.last = 1;
    begin(TracePhase::tile);
    publish(none);
    begin(TracePhase::none);
    if (counts && params.scheduler != nullptr && leader) leave_scheduler(params);
  }
};

}  // namespace fovea::device
