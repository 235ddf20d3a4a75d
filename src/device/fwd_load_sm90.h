// The loading role of the forward kernel for Hopper: finds tiles, publishes them to the computing
// warps, and fills the rings of q, k and v. Values lag one block behind keys, as the products do:
//
//   K3 Q | K2 V3 | K1 V2 | K0 V1 | V0        of key blocks 3..0
//
// Load drives the copy engine, with one thread, or with one warp where k and v lie in pages. Gather
// copies by threads, row by row, what the copy engine cannot read.
#pragma once

#include "device/fwd_plan_sm90.h"
#include "device/tma.h"

namespace fovea::device {

template <FwdConfig C>
struct Load {
  using Plan = FwdPlan<C>;
  static constexpr bool paged = C.source == Source::paged;

  Plan& plan;
  const FwdParams& params;
  RingState<C.stages> k_state, v_state;
  RingState<1> q_state;
  RingState<2> tile_state;

  // One thread acts for all. Pages are looked up and copied by a lane each.
  static __forceinline__ bool leads() { return !paged || lane_index() == 0; }

  __forceinline__ void mark(TracePhase phase) const {
    trace_mark(plan.trace, params.trace, 0, leads(), phase);
  }

  __forceinline__ void load_q(const FwdTile& tile) {
#pragma unroll
    for (int32 part = 0; part < Plan::query_parts; ++part) {
      Ring<1>& ring = plan.q_ring[part];
      mark(TracePhase::free);
      ring.wait_free(q_state);
      mark(TracePhase::copy);
      if (!leads()) continue;
      const CachePolicy once = cache_policy_evict_first();
      const uint32 packed_rows = static_cast<uint32>(params.queries_per_tile * params.group_size);
      const uint32 rows = C.packed ? packed_rows : Plan::part_rows;
      ring.expect(q_state, rows * Plan::panels_qk * Plan::row_bytes);
#pragma unroll
      for (int32 panel = 0; panel < Plan::panels_qk; ++panel) {
        const int32 first = part * Plan::part_rows;
        const SharedAddress target =
            shared_address(plan.q) + (panel * Plan::rows + first) * Plan::row_bytes;
        const int32 column = panel * core::panel_columns;
        const int32 row = tile.row_q + tile.q_begin + first;
        if constexpr (C.packed) {
          tma_load(target, &params.q, ring.full[0], {column, 0, row, tile.head_kv, tile.batch_q},
                   once);
        } else {
          tma_load(target, &params.q, ring.full[0], {column, row, tile.head, tile.batch_q}, once);
        }
      }
    }
    q_state.advance();
  }

  // Queries come from memory, whose latency is longer than the way from the last scores of a tile
  // to the first of the next; fetched into the L2 before, they are there in time.
  __forceinline__ void fetch_q(const FwdTile& tile) const {
#pragma unroll
    for (int32 panel = 0; panel < Plan::panels_qk; ++panel) {
#pragma unroll
      for (int32 first = 0; first < Plan::rows; first += Plan::part_rows) {
        tma_prefetch(&params.q, {panel * core::panel_columns, tile.row_q + tile.q_begin + first,
                                 tile.head, tile.batch_q});
      }
    }
  }

  template <int32 panel_count>
  __forceinline__ void load_keys(const TensorMap* map, Ring<C.stages>& ring,
                                 RingState<C.stages>& state, const uint8* memory,
                                 const FwdTile& tile, int32 block) {
    constexpr uint32 panel_bytes = C.tile_k * Plan::row_bytes;
    mark(TracePhase::free);
    ring.wait_free(state);
    mark(TracePhase::copy);
    if (leads()) ring.expect(state, panel_count * panel_bytes);
    const CachePolicy policy =
        C.reads_once ? cache_policy_evict_first() : cache_policy_evict_last();
    const SharedAddress target =
        shared_address(memory) + static_cast<uint32>(state.stage) * (panel_count * panel_bytes);
    if constexpr (paged) {
      const int32 box = params.page_box;
      const int32 lane = lane_index();
      if (lane * box < C.tile_k) {
        const int32 key = first_of_piece<C>(tile, block, lane * box, box);
        const core::KeyPlace at = core::page_of(params, tile.sequence, key);
#pragma unroll
        for (int32 panel = 0; panel < panel_count; ++panel) {
          const uint32 offset =
              panel * panel_bytes + static_cast<uint32>(lane * box) * Plan::row_bytes;
          tma_load(target + offset, map, ring.full[state.stage],
                   {panel * core::panel_columns, at.row, tile.head_kv, at.page}, policy);
        }
      }
    } else {
#pragma unroll
      for (int32 panel = 0; panel < panel_count; ++panel) {
        tma_load(target + panel * panel_bytes, map, ring.full[state.stage],
                 {panel * core::panel_columns, tile.row_k + block * C.tile_k, tile.head_kv,
                  tile.batch_k},
                 policy);
      }
    }
    state.advance();
  }

  // Tells the computing warps which tile comes next.
  __forceinline__ void publish(const FwdTile& tile) {
    mark(TracePhase::tile);
    plan.tile_ring.wait_free(tile_state);
    if (leads()) {
      plan.tiles[tile_state.stage] = tile;
      mbarrier_arrive(plan.tile_ring.full[tile_state.stage]);
    }
    tile_state.advance();
  }

  // The first keys before the queries, since the ring has a place for them while the tile before
  // still needs its queries. Values come one block behind keys, as the products take them. Behind
  // the first of both there is time to look ahead.
  template <typename LookAhead>
  __forceinline__ void load_tile(const FwdTile& tile, const LookAhead& look_ahead) {
    load_keys<Plan::panels_qk>(&params.k, plan.k_ring, k_state, plan.k[0], tile, tile.end - 1);
    load_q(tile);
    for (int32 block = tile.end - 1; block >= tile.begin; --block) {
      if (block > tile.begin) {
        load_keys<Plan::panels_qk>(&params.k, plan.k_ring, k_state, plan.k[0], tile, block - 1);
      }
      load_keys<Plan::panels_v>(&params.v, plan.v_ring, v_state, plan.v[0], tile, block);
      if (C.looks_ahead && block == tile.end - 1) look_ahead();
    }
  }

  // The counter's answer is awaited under the loads of the tile before.
  __forceinline__ int32 next(int32 round) { return next_tile_index<paged>(params, round); }

  __forceinline__ void run() {
    FwdTile tile, ahead;
    int32 index = next(0);
    if (C.looks_ahead && index < params.tiles) ahead = find_tile<C>(params, index);
    for (int32 round = 1; index < params.tiles; ++round) {
      tile = C.looks_ahead ? ahead : find_tile<C>(params, index);
      const bool exists = tile.exists();
      if (exists) publish(tile);
      const auto look_ahead = [&] {
        index = next(round);
        if (index >= params.tiles) return;
        ahead = find_tile<C>(params, index);
        if (ahead.exists() && ahead.count() > 0) fetch_q(ahead);
      };
      if constexpr (!C.looks_ahead) index = C.persistent ? next(round) : params.tiles;
      if (exists && tile.count() > 0) {
        load_tile(tile, look_ahead);
      } else if (C.looks_ahead) {
        look_ahead();
      }
      while (next_unused<C>(tile, params)) publish(tile);
    }
    tile.last = 1;
    publish(tile);
    mark(TracePhase::none);
    if (C.persistent && params.scheduler != nullptr && leads()) leave_scheduler(params);
  }
};

// A warpgroup. Eight lanes copy 128 bytes of a row, which is a panel's width; each lane finds the
// address of one row in 32. One tile per CTA.
template <FwdConfig C>
struct Gather {
  using Plan = FwdPlan<C>;

  Plan& plan;
  const FwdParams& params;
  const int32 warp;
  RingState<C.stages> k_state, v_state;
  RingState<2> tile_state;
  Barrier* landing = nullptr;  // of the copies that may still be in flight

  // A chunk of 8 elements; those from `count` on are zero.
  static __forceinline__ void copy_chunk(SharedAddress target, const uint16* source, int64 stride,
                                         int32 count) {
    if constexpr (C.chunked) {
      copy_async_16(target, source, count > 0 ? 16 : 0);
    } else {
      uint32 words[4];
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        const uint32 low = 2 * i < count ? source[2 * i * stride] : 0u;
        const uint32 high = 2 * i + 1 < count ? source[(2 * i + 1) * stride] : 0u;
        words[i] = low | (high << 16);
      }
      store_shared_x4(target, uint4{words[0], words[1], words[2], words[3]});
    }
  }

  // Rows into panels. row_at(r) is the address of row r, or null where zeros belong.
  template <int32 row_count, int32 panel_count, typename RowAt>
  __forceinline__ void copy_rows(SharedAddress target, const core::Rows& rows, int32 columns,
                                 const RowAt& row_at) {
    constexpr int32 share = row_count / 4;  // of a warp
    const int32 lane = lane_index();
#pragma unroll 1
    for (int32 first = 0; first < share; first += 32) {
      const int32 own = first + lane;
      const uint16* address = own < share ? row_at(warp * share + own) : nullptr;
#pragma unroll 1
      for (int32 i = first; i < min(first + 32, share); i += 4) {
        const int32 row = i + lane / 8;
        const auto bits = __shfl_sync(0xffffffffu, reinterpret_cast<uint64>(address), row - first);
        const auto* source = reinterpret_cast<const uint16*>(bits);
#pragma unroll
        for (int32 panel = 0; panel < panel_count; ++panel) {
          const int32 column = panel * core::panel_columns + 8 * (lane % 8);
          const uint32 offset =
              panel_offset(Swizzle::b128, row_count, static_cast<uint32>(warp * share + row),
                           static_cast<uint32>(2 * column));
          const int32 count = source != nullptr ? columns - column : 0;
          copy_chunk(target + offset, count > 0 ? source + column * rows.stride[3] : rows.data,
                     rows.stride[3], count);
        }
      }
    }
  }

  // The copies that `full` waits for have been started; those before have landed after this.
  __forceinline__ void commit(Barrier& full) {
    if constexpr (C.chunked) {
      copy_async_commit();
      if (landing != nullptr) {
        copy_async_wait<1>();
        arrive(*landing);
      }
      landing = &full;
    } else {
      arrive(full);
    }
  }

  __forceinline__ void settle() {
    if (landing == nullptr) return;
    copy_async_wait<0>();
    arrive(*landing);
    landing = nullptr;
  }

  __forceinline__ void arrive(Barrier& full) {
    fence_proxy_async_shared();
    mbarrier_arrive(full);
  }

  template <int32 panel_count>
  __forceinline__ void load_keys(const core::Rows& rows, int32 columns, Ring<C.stages>& ring,
                                 RingState<C.stages>& state, const uint8* memory,
                                 const FwdTile& tile, int32 block) {
    // Nobody frees a stage for want of what only waits here to be announced.
    if (!ring.is_free(state)) settle();
    ring.wait_free(state);
    const SharedAddress target =
        shared_address(memory) +
        static_cast<uint32>(state.stage) * (panel_count * C.tile_k * Plan::row_bytes);
    copy_rows<C.tile_k, panel_count>(target, rows, columns, [&](int32 row) {
      const int32 key = block * C.tile_k + row;
      const bool seen = key >= tile.key_begin && key < tile.key_end;
      return seen ? key_row<C>(params, rows, tile, key) : nullptr;
    });
    commit(ring.full[state.stage]);
    state.advance();
  }

  __forceinline__ void load_q(const FwdTile& tile) {
    const core::Rows& q = params.q_rows;
    copy_rows<Plan::rows, Plan::panels_qk>(
        shared_address(plan.q), q, params.head_dim, [&](int32 row) -> const uint16* {
          const FwdRow at = find_row<C>(params, tile, row);
          if (at.query >= tile.length_q) return nullptr;
          return q.data + tile.batch_q * q.stride[0] + (tile.row_q + at.query) * q.stride[1] +
                 at.head * q.stride[2];
        });
    commit(plan.q_ring[0].full[0]);
  }

  __forceinline__ void publish(const FwdTile& tile) {
    if (threadIdx.x == 0) {
      plan.tile_ring.wait_free(tile_state);
      plan.tiles[tile_state.stage] = tile;
      mbarrier_arrive(plan.tile_ring.full[tile_state.stage]);
    }
    tile_state.advance();
  }

  __forceinline__ void run() {
    FwdTile tile = find_tile<C>(params, static_cast<int32>(blockIdx.x));
    const bool exists = tile.exists();
    if (exists) publish(tile);
    if (exists && tile.count() > 0) {
      load_q(tile);
      for (int32 block = tile.end - 1; block >= tile.begin - 1; --block) {
        if (block >= tile.begin) {
          load_keys<Plan::panels_qk>(params.k_rows, params.head_dim, plan.k_ring, k_state,
                                     plan.k[0], tile, block);
        }
        if (block + 1 < tile.end) {
          load_keys<Plan::panels_v>(params.v_rows, params.head_dim_v, plan.v_ring, v_state,
                                    plan.v[0], tile, block + 1);
        }
      }
      settle();
    }
    while (next_unused<C>(tile, params)) publish(tile);
    tile.last = 1;
    publish(tile);
  }
};

}  // namespace fovea::device
