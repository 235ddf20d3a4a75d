// The loading warp of the backward kernel for Blackwell: keys once, then tiles of query rows.
#pragma once

#include "device/bwd_plan_sm100.h"
#include "device/bwd_scores.h"
#include "device/tma.h"

namespace fovea::device {

inline constexpr int32 all_rows = 0x7fffffff;

template <BwdConfig C>
struct Load100Backward {
  using Plan = Bwd100Plan<C>;
  Plan& plan;
  const BwdParams& params;
  const Bwd100Work<C> work;  // in registers
  const int32 rank;
  const bool leader;  // of the warp
  int32 edges = 0;    // tiles cleared so far
  RingState<Plan::query_stages> q_state;
  RingState<1> state;
  RingState<2> row_state;

  __forceinline__ void begin(TracePhase phase) const {
    mark<C>(plan, params, BwdTraceRole::load, leader, phase);
  }

  // Rows of a tile and its first column. Rows outside [begin, end) are cleared, and those that bias
  // or mask hide entirely: 0 x NaN is NaN.
  struct Tile {
    int32 first, column;
    int32 begin, end;
    const float* lse = nullptr;  // queries: of the first; infinity where nothing is seen
    bool keys = false;           // keys: looks for unseen ones
  };

  // Clears rows of a tile, one lane each; swizzling permutes 16-byte chunks of a row.
  __forceinline__ void clear_rows(SharedAddress target, int32 count, int32 panels,
                                  const Tile& tile) {
    const uint32 panel_bytes = count * Plan::row_bytes;
#pragma unroll 1
    for (int32 i = lane_index(); i < count; i += 32) {
      const SharedAddress row = target + i * Plan::row_bytes;
      bool clear = tile.first + i < tile.begin || tile.first + i >= tile.end;
      if constexpr (core::hides_anywhere(C)) {
        if (tile.lse != nullptr) clear = clear || tile.lse[i] == infinity;
        // Looked for only where it would do harm.
        if (tile.keys && !clear) {
          clear = is_special<C>(row, panels, panel_bytes) &&
                  !is_seen<C>(params, work.sequence, work.head_kv, tile.first + i);
        }
      }
#pragma unroll 1
      for (int32 j = 0; clear && j < 8 * panels; ++j) {
        store_shared_x4(row + j / 8 * panel_bytes + j % 8 * 16, uint4{0, 0, 0, 0});
      }
    }
  }

  // Whether some rows of a tile may have to be cleared; the same in all lanes.
  __forceinline__ bool has_unseen(const Tile& tile, int32 count) const {
    bool any = tile.first < tile.begin || tile.first + count > tile.end;
    if constexpr (core::hides_anywhere(C)) {
      any = any || tile.keys;
      if (tile.lse == nullptr) return any;
#pragma unroll 1
      for (int32 i = lane_index(); i < count; i += 32) any = any || tile.lse[i] == infinity;
      any = __any_sync(0xffffffffu, any);
    }
    return any;
  }

  __forceinline__ void arrive(Barrier& full) {
    if constexpr (C.pair) {
      mbarrier_arrive_remote(barrier_of(full, 0));
    } else {
      mbarrier_arrive(full);
    }
  }

  // Lands on the leader's barrier, or, if there is something to clear, on one of this warp's own.
  template <int32 count, int32 panels, int32 box>
  __forceinline__ void load(SharedAddress target, const TensorMap* map, Barrier& full,
                            const Tile& tile, int32 row, int32 head, int32 batch) {
    constexpr uint32 bytes = panels * count * Plan::row_bytes;
    const bool clears = has_unseen(tile, count);
    if (leader) {
      if (clears || !C.pair) {
        mbarrier_arrive_expect_bytes(clears ? plan.edge_full : full, bytes);
      } else {
        mbarrier_arrive_expect_bytes_remote(barrier_of(full, 0), bytes);
      }
      const CachePolicy policy = cache_policy_evict_last();
#pragma unroll
      for (int32 i = 0; i < panels * (count / box); ++i) {
        const int32 panel = i / (count / box);
        const int32 part = i % (count / box) * box;
        const SharedAddress to = target + (panel * count + part) * Plan::row_bytes;
        const int32 at[4] = {tile.column + panel * core::panel_columns, row + tile.first + part,
                             head, batch};
        if (clears || !C.pair) {
          tma_load(to, map, clears ? plan.edge_full : full, at, policy);
        } else {
          tma_load_pair(to, map, barrier_of(full, 0), at, policy);
        }
      }
    }
    if (!clears) return;
    mbarrier_wait(plan.edge_full, parity_of(edges++));
    clear_rows(target, count, panels, tile);
    fence_proxy_async_shared();  // dq alone could do without, after the fence behind dS
    __syncwarp();                // of keys, other arrivals follow the next one
    if (leader) arrive(full);
  }

  __forceinline__ void load_keys() {
    const BwdSequence& s = work.sequence;
    const Tile as_is{work.key_begin, 0, 0, all_rows};
    const Tile seen{work.key_begin, 0, work.seen_begin, work.seen_end, nullptr, true};
    load<Plan::keys, Plan::panels_qk, Plan::keys>(shared_address(plan.k), &params.k, plan.keys_full,
                                                  C.pair ? as_is : seen, s.row_k, work.head_kv,
                                                  s.batch_k);
    load<Plan::keys, Plan::panels_v, Plan::keys>(shared_address(plan.v), &params.v, plan.keys_full,
                                                 as_is, s.row_k, work.head_kv, s.batch_k);
    if constexpr (C.pair) {
      const Tile columns{work.tile_begin, rank * core::panel_columns,
                         work.seen_begin, work.seen_end,
                         nullptr,         true};
      load<2 * Plan::keys, 1, Plan::keys>(shared_address(plan.k_columns), &params.k, plan.keys_full,
                                          columns, s.row_k, work.head_kv, s.batch_k);
    }
  }

  // Numbers of the rows of a block.
  __forceinline__ void load_numbers(int64 number) {
    constexpr uint32 bytes = Plan::rows * 4;
    begin(TracePhase::free);
    if constexpr (Plan::releases_numbers) plan.row_ring.wait_free(row_state);
    begin(TracePhase::copy);
    if (leader) {
      plan.row_ring.expect(row_state, 2 * bytes);
      Barrier& full = plan.row_ring.full[row_state.stage];
      bulk_load(shared_address(plan.lse_log2[row_state.stage]),
                params.lse_log2 + number * Plan::rows, bytes, full);
      bulk_load(shared_address(plan.delta[row_state.stage]), params.delta + number * Plan::rows,
                bytes, full);
    }
    __syncwarp();  // once per block: no lane falls a phase of a barrier behind
    row_state.advance();
  }

  // In the order in which products take them. dk takes q last, after the scores of the next block.
  __forceinline__ void load_block(int32 head, int32 block, int64 number) {
    const BwdSequence& s = work.sequence;
    const float* lse = params.lse_log2 + number * Plan::rows;
    const Tile own{block * Plan::rows + rank * Plan::rows_each, 0, work.row_begin, work.row_end,
                   lse + rank * Plan::rows_each};
    const Tile columns{block * Plan::rows, rank * core::panel_columns, work.row_begin, work.row_end,
                       lse};
    begin(TracePhase::free);
    wait_free<C>(plan.q_ring, q_state);
    begin(TracePhase::copy);
    load<Plan::rows_each, Plan::panels_qk, Plan::rows_each>(
        shared_address(plan.q[q_state.stage]), &params.q, plan.q_ring.full[q_state.stage], own,
        s.row_q, head, s.batch_q);
    begin(TracePhase::free);
    wait_free<C>(plan.dout_ring, state);
    begin(TracePhase::copy);
    load<Plan::rows_each, Plan::panels_v, Plan::rows_each>(shared_address(plan.dout),
                                                           &params.dout_map, plan.dout_ring.full[0],
                                                           own, s.row_q, head, s.batch_q);
    if constexpr (C.pair) {
      begin(TracePhase::free);
      wait_free<C>(plan.dout_columns_ring, state);
      begin(TracePhase::copy);
      load<Plan::rows, 1, Plan::rows_each>(shared_address(plan.dout_columns), &params.dout_map,
                                           plan.dout_columns_ring.full[0], columns, s.row_q, head,
                                           s.batch_q);
      begin(TracePhase::free);
      wait_free<C>(plan.q_columns_ring, state);
      begin(TracePhase::copy);
      load<Plan::rows, 1, Plan::rows_each>(shared_address(plan.q_columns), &params.q,
                                           plan.q_columns_ring.full[0], columns, s.row_q, head,
                                           s.batch_q);
    }
    q_state.advance();
    state.advance();
  }

  __forceinline__ void run() {
    if (work.steps(params) == 0) return;
    begin(TracePhase::copy);
    load_keys();
    for (int32 i = 0; i < params.group_size; ++i) {
      const int32 head = work.head_kv * params.group_size + i;
      const int64 first = first_block<C>(params, work.sequence, head);
#pragma unroll 1
      for (int32 block = work.block_begin; block < work.block_end; ++block) {
        load_numbers(first + block);
        load_block(head, block, first + block);
      }
    }
    begin(TracePhase::none);
  }
};

}  // namespace fovea::device
