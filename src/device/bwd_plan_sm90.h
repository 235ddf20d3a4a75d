// The backward kernel for Hopper but for its arithmetic: what a CTA works on, its shared memory and
// barriers, and the threads that copy: one brings tiles, one adds dq to global memory, and in
// deterministic order one waits for turns and one passes them on.
#pragma once

#include "core/config_backward.h"
#include "device/bwd_blocks.h"
#include "device/pipeline.h"
#include "device/tma.h"

namespace fovea::device {

// ---- Work ---------------------------------------------------------------------------------------

// What this CTA works on. In shared memory, since registers are short.
template <BwdConfig C>
struct alignas(16) BwdWork {
  static constexpr int32 rows = core::rows_of(C);

  BwdSequence sequence;
  int32 head_kv;
  int32 row_begin, row_end;      // query rows that see any key of the block
  int32 block_begin, block_end;  // their blocks
  int32 block_first;             // that which is visited first; then those behind it, then the rest
  int32 open_begin, open_end;    // those of which every row exists and sees every key
  int32 key_begin;               // first key of the block
  bool last;                     // no block, but the end of them

  // Block `index` in the order in which they are dealt.
  __forceinline__ void find(const BwdParams& params, int32 index) {
    const PairBlock at =
        pair_block(index, params.batch * params.heads_kv, params.section, params.key_blocks);
    const int32 b = at.pair / params.heads_kv;
    sequence = bwd_sequence<C>(params, b);
    head_kv = at.pair - b * params.heads_kv;
    key_begin =
        (core::last_keys_first(C) ? params.key_blocks - 1 - at.block : at.block) * core::keys_of(C);
    const core::KeyRange seen = rows_that_see<C>(
        params, sequence, key_begin, min(key_begin + core::keys_of(C), sequence.length_k));
    row_begin = static_cast<int32>(seen.begin);
    row_end = static_cast<int32>(seen.end);
    block_begin = row_begin / rows;
    block_end = (row_end + rows - 1) / rows;
    block_first = block_begin;
    if constexpr (core::goes_round(C)) {
      block_first += static_cast<int32>(static_cast<int64>(at.block) * (block_end - block_begin) /
                                        params.key_blocks);
    }
    find_open(params);
  }

  __forceinline__ void find_open(const BwdParams& params) {
    const int32 key_end = key_begin + core::keys_of(C);
    const int32 shift = sequence.length_k - sequence.length_q;
    open_begin = 0;
    open_end = key_end <= sequence.length_k ? sequence.length_q / rows : 0;
    if constexpr (C.bound_right) {
      open_begin = (max(0, key_end - 1 - shift - params.window_right) + rows - 1) / rows;
    }
    if constexpr (C.bound_left) {
      open_end = min(open_end, max(0, key_begin - shift + params.window_left + 1) / rows);
    }
  }

  __forceinline__ bool exists() const { return key_begin < sequence.capacity_k; }
  __forceinline__ bool is_seen() const { return block_begin < block_end; }
};

// The blocks of rows that a CTA visits, of one head after the other.
struct BwdVisit {
  int32 head, block;
};

template <BwdConfig C>
__forceinline__ BwdVisit first_visit(const BwdParams& params, const BwdWork<C>& work) {
  return {work.head_kv * params.group_size, work.block_first};
}

// Moves to the next; false behind the last. The caller has `block_end` in a register.
template <BwdConfig C>
__forceinline__ bool advance(const BwdParams& params, const BwdWork<C>& work, int32 block_end,
                             BwdVisit& visit) {
  ++visit.block;
  if constexpr (core::goes_round(C)) {
    if (visit.block == block_end) visit.block = work.block_begin;
    if (visit.block != work.block_first) return true;
  } else {
    if (visit.block < block_end) return true;
    visit.block = work.block_first;
  }
  return ++visit.head < (work.head_kv + 1) * params.group_size;
}

// The number of the visited block among all.
template <BwdConfig C>
__forceinline__ int64 visit_number(const BwdParams& params, const BwdWork<C>& work,
                                   const BwdVisit& visit) {
  return first_block<C>(params, work.sequence, visit.head) + visit.block;
}

// ---- Plan: shared memory, barriers --------------------------------------------------------------

// Tiles are panels of 64 columns, each [row][64] with the 128-byte swizzle.
template <BwdConfig C>
struct BwdPlan {
  static constexpr int32 rows = core::rows_of(C);
  static constexpr int32 keys = core::keys_of(C);
  static constexpr int32 panels = C.head_dim / core::panel_columns;
  static constexpr int32 panels_v = C.head_dim_v / core::panel_columns;
  static constexpr int32 dout_stages = core::dout_stages(C);
  static constexpr uint32 row_bytes = 2 * core::panel_columns;
  static constexpr uint32 group_bytes = 8 * row_bytes;  // 8 rows: the period of the swizzle
  static constexpr uint32 k_bytes = keys * panels * row_bytes;
  static constexpr uint32 v_bytes = keys * panels_v * row_bytes;
  static constexpr uint32 q_bytes = rows * panels * row_bytes;
  static constexpr uint32 dout_bytes = rows * panels_v * row_bytes;
  static constexpr uint32 score_bytes = keys * rows * 2;
  static constexpr uint32 unit_bytes = core::dq_unit_floats * 4;
  static constexpr int32 score_tiles = C.split_columns ? 4 : 2;

  alignas(1024) uint8 k[k_bytes];
  alignas(1024) uint8 v[v_bytes];
  alignas(1024) uint8 q[2][q_bytes];
  alignas(1024) uint8 dout[dout_stages][dout_bytes];
  // [query panel][key][64 queries]: two stages of dS, then two of P where columns are split.
  alignas(1024) uint8 scores[score_tiles][score_bytes];
  alignas(1024) uint8 dq[2][unit_bytes];  // of each warpgroup, in the order of the accumulator
  alignas(128) float lse_log2[2][rows];
  alignas(128) float delta[2][rows];
  Ring<2> q_ring;               // with lse_log2. full: 1 producer and the bytes
  Ring<dout_stages> dout_ring;  // with delta. free: each computing warp
  Ring<1> dq_ring[2];           // full: the threads of a warpgroup; free: the adding thread
  Ring<2> scores_ring;          // dq_apart. full: each computing warp; free: each warp of dq
  Ring<2> turn_ring;            // in turns. full: the thread that waits; free: that which adds
  Ring<2> added_ring;           // in turns. full: the thread that adds; free: that which passes on
  Ring<1> keys_ring;            // k and v. free: each computing warp
  Ring<2> work_ring;            // free: each computing warp, and whoever has to do with dq
  int32 index;                  // of the next block of keys, of the loading thread alone
  BwdVisit added;               // dq_apart, of the passing thread: the step whose turn it has
  uint32 turn;                  // dq_apart, of the waiting thread: that of the next step
  BwdWork<C> work[2];

  static constexpr uint32 consumer_warps = 8;

  // Named barriers, of all computing threads. 0 is __syncthreads.
  static constexpr int32 scores_barrier = 1;
  static constexpr int32 clear_barrier = 2;
  static constexpr int32 dq_barrier = 3;       // of the warpgroup of dq
  static constexpr int32 weights_barrier = 4;  // of P, where it goes through shared memory

  static_assert(C.dtype == DType::bf16 || C.dtype == DType::f16);
  static_assert(C.head_dim % core::panel_columns == 0 && C.head_dim_v % core::panel_columns == 0);
  static_assert(C.split_columns || (C.head_dim == C.head_dim_v && C.head_dim <= 128));
};

// Keys come with each block, in a ring of one stage where those have two.
__forceinline__ RingState<1> keys_state(const RingState<2>& work_state) {
  return {0, static_cast<uint32>(work_state.stage)};
}

// The panels of columns of a tensor that a warpgroup has.
struct Panels {
  int32 begin, count;
};

// dk and dv where columns are split, dq always: with an odd number, the warpgroup that has more of
// dk has less of dq and dv.
constexpr Panels dk_panels(const BwdConfig& c, int32 warpgroup) {
  const int32 all = c.head_dim / core::panel_columns;
  const int32 first = (all + 1) / 2;
  return warpgroup == 0 ? Panels{0, first} : Panels{first, all - first};
}
constexpr Panels dv_panels(const BwdConfig& c, int32 warpgroup) {
  const int32 all = c.head_dim_v / core::panel_columns;
  return warpgroup == 0 ? Panels{0, all / 2} : Panels{all / 2, all - all / 2};
}
// In units of dq, of which a tile of 128 rows has two under each other.
constexpr Panels dq_panels(const BwdConfig& c, int32 warpgroup) {
  const int32 all = core::dq_units_of(c);
  return warpgroup == 0 ? Panels{0, all / 2} : Panels{all / 2, all - all / 2};
}

// ---- Role: load, one thread ---------------------------------------------------------------------

template <BwdConfig C>
struct BwdLoad {
  using Plan = BwdPlan<C>;
  Plan& plan;
  const BwdParams& params;
  RingState<2> q_state;
  RingState<Plan::dout_stages> dout_state;
  RingState<2> work_state;

  __forceinline__ const BwdWork<C>& work() const { return plan.work[work_state.stage]; }

  // Blocks of keys as they come: the first by place, further ones from a counter that all CTAs
  // share, or, without one, in rounds.
  __forceinline__ int32 next(int32 index) const {
    if (params.scheduler == nullptr) return index + static_cast<int32>(gridDim.x);
    return static_cast<int32>(gridDim.x + atomicAdd(params.scheduler, 1u));
  }

  // Tells the others which block of keys comes next, or that none does; returns whether one does.
  __forceinline__ bool publish() {
    plan.work_ring.wait_free(work_state);
    BwdWork<C>& work = plan.work[work_state.stage];
    while (true) {
      const int32 index = plan.index < 0 ? static_cast<int32>(blockIdx.x) : next(plan.index);
      plan.index = index;
      work.last = index >= params.tiles;
      if (work.last) break;
      work.find(params, index);
      if (work.exists()) break;
    }
    mbarrier_arrive(plan.work_ring.full[work_state.stage]);
    return !work.last;
  }

  __forceinline__ void load_panels(SharedAddress memory, const TensorMap* map, Barrier& barrier,
                                   int32 panels, int32 tile_rows, int32 row, int32 head,
                                   int32 batch, CachePolicy policy) {
    for (int32 panel = 0; panel < panels; ++panel) {
      tma_load(memory + panel * tile_rows * Plan::row_bytes, map, barrier,
               {panel * core::panel_columns, row, head, batch}, policy);
    }
  }

  __forceinline__ void load_keys() {
    const BwdSequence& s = work().sequence;
    const CachePolicy policy = cache_policy_evict_first();
    const int32 row = s.row_k + work().key_begin;
    const int32 head = work().head_kv;
    Barrier& barrier = plan.keys_ring.full[0];
    plan.keys_ring.wait_free(keys_state(work_state));
    plan.keys_ring.expect(keys_state(work_state), Plan::k_bytes + Plan::v_bytes);
    load_panels(shared_address(plan.k), &params.k, barrier, Plan::panels, Plan::keys, row, head,
                s.batch_k, policy);
    load_panels(shared_address(plan.v), &params.v, barrier, Plan::panels_v, Plan::keys, row, head,
                s.batch_k, policy);
  }

  // Query rows of one tensor, and one number for each row.
  template <int stages>
  __forceinline__ void load_rows(Ring<stages>& ring, RingState<stages>& state, const uint8* memory,
                                 int32 panels, const TensorMap* map, float* row_memory,
                                 const float* row_numbers, int32 head, int32 block, int64 number) {
    constexpr uint32 number_bytes = Plan::rows * 4;
    const BwdSequence& s = work().sequence;
    const auto stage = static_cast<uint32>(state.stage);
    const uint32 bytes = panels * Plan::rows * Plan::row_bytes;
    ring.wait_free(state);
    ring.expect(state, bytes + number_bytes);
    load_panels(shared_address(memory) + stage * bytes, map, ring.full[state.stage], panels,
                Plan::rows, s.row_q + block * Plan::rows, head, s.batch_q,
                cache_policy_evict_last());
    bulk_load(shared_address(row_memory) + stage * number_bytes, row_numbers + number * Plan::rows,
              number_bytes, ring.full[state.stage]);
    state.advance();
  }

  __forceinline__ void load_block(int32 head, int32 block, int64 number) {
    load_rows(plan.q_ring, q_state, plan.q[0], Plan::panels, &params.q, plan.lse_log2[0],
              params.lse_log2, head, block, number);
    load_rows(plan.dout_ring, dout_state, plan.dout[0], Plan::panels_v, &params.dout_map,
              plan.delta[0], params.delta, head, block, number);
  }

  __forceinline__ void load_blocks() {
    BwdVisit at = first_visit<C>(params, work());
    const int32 end = work().block_end;
#pragma unroll 1
    do {
      load_block(at.head, at.block, visit_number<C>(params, work(), at));
    } while (advance<C>(params, work(), end, at));
  }

  __forceinline__ void run() {
#pragma unroll 1
    while (publish()) {
      load_keys();
      if (work().is_seen()) load_blocks();
      work_state.advance();
    }
  }
};

// ---- Turns --------------------------------------------------------------------------------------
//
// In deterministic order: a counter for each block of rows has how many blocks of keys have added.

template <BwdConfig C>
struct BwdTurns {
  const BwdParams& params;
  const BwdWork<C>& work;

  __forceinline__ uint32* counter(const BwdVisit& at) const {
    return params.turns + visit_number<C>(params, work, at);
  }

  // How many blocks of keys add to a block of rows before this one.
  __forceinline__ uint32 before(int32 block) const {
    const BwdSequence& s = work.sequence;
    const core::BlockRange keys =
        core::block_range(core::Window{params.window_left, params.window_right}, s.length_q,
                          s.length_k, block * core::rows_of(C),
                          min((block + 1) * core::rows_of(C), s.length_q), core::keys_of(C));
    const int64 own = work.key_begin / core::keys_of(C);
    return static_cast<uint32>(core::last_keys_first(C) ? keys.end - 1 - own : own - keys.begin);
  }

  // Until `turn` blocks have added: what they wrote comes before what follows.
  __forceinline__ void wait(const BwdVisit& at, uint32 turn) const {
    const uint32* const added = counter(at);
    while (load_acquire(added) != turn) {
    }
  }

  __forceinline__ void pass(const BwdVisit& at) const { add_release(counter(at), 1u); }
};

// The additions themselves must be complete, not only their source read, before the next may add.
__forceinline__ void bwd_wait_added() {
  bulk_wait<0>();
  fence_proxy_async_global();
}

// ---- Roles: wait for turns, add dq, pass turns on: one thread each ------------------------------
//
// A look at a counter takes the way to the L2 and back, and so do additions until they are complete
// and what releases them: one thread that did it all would take longer than a step.

// Every block of rows of every block of keys of this CTA: step(work, visit).
template <BwdConfig C, typename Step>
__forceinline__ void visit_all(BwdPlan<C>& plan, const BwdParams& params, Step step) {
  RingState<2> state;
  while (true) {
    plan.work_ring.wait_full(state);
    const BwdWork<C>& work = plan.work[state.stage];
    if (work.last) return;
    if (work.is_seen()) {
      BwdVisit at = first_visit<C>(params, work);
      const int32 end = work.block_end;
#pragma unroll 1
      do {
        step(work, at);
      } while (advance<C>(params, work, end, at));
    }
    plan.work_ring.release(state);
    state.advance();
  }
}

// Up to two steps ahead of the adding thread.
template <BwdConfig C>
__forceinline__ void bwd_await_turns(BwdPlan<C>& plan, const BwdParams& params) {
  RingState<2> state;
  visit_all<C>(plan, params, [&](const BwdWork<C>& work, const BwdVisit& at) {
    const BwdTurns<C> turns{params, work};
    plan.turn_ring.wait_free(state);
    turns.wait(at, turns.before(at.block));
    mbarrier_arrive(plan.turn_ring.full[state.stage]);
    state.advance();
  });
}

template <BwdConfig C>
__forceinline__ void bwd_pass_turns(BwdPlan<C>& plan, const BwdParams& params) {
  RingState<2> state;
  visit_all<C>(plan, params, [&](const BwdWork<C>& work, const BwdVisit& at) {
    plan.added_ring.wait_full(state);
    BwdTurns<C>{params, work}.pass(at);
    plan.added_ring.release(state);
    state.advance();
  });
}

template <BwdConfig C>
struct BwdAdd {
  using Plan = BwdPlan<C>;
  Plan& plan;
  const BwdParams& params;
  RingState<1> state[2];
  RingState<2> turn_state;

  // The j-th unit of a warpgroup for a block of rows.
  template <int32 warpgroup>
  __forceinline__ void add_unit(int64 number, int32 j) {
    const int64 unit = number * core::dq_units_of(C) + dq_panels(C, warpgroup).begin + j;
    plan.dq_ring[warpgroup].wait_full(state[warpgroup]);
    bulk_reduce_add(params.dq_sums + unit * core::dq_unit_floats,
                    shared_address(plan.dq[warpgroup]), Plan::unit_bytes);
    bulk_commit();
  }
  template <int32 warpgroup>
  __forceinline__ void release() {
    plan.dq_ring[warpgroup].release(state[warpgroup]);
    state[warpgroup].advance();
  }

  __forceinline__ void add_block(int64 number) {
    constexpr int32 units[2] = {dq_panels(C, 0).count, dq_panels(C, 1).count};
    static_assert(units[0] <= units[1]);
#pragma unroll
    for (int32 j = 0; j < units[1]; ++j) {
      if (j < units[0]) add_unit<0>(number, j);
      add_unit<1>(number, j);
      if (j < units[0]) {
        bulk_wait_read<1>();
        release<0>();
      }
      bulk_wait_read<0>();
      release<1>();
    }
  }

  __forceinline__ void wait_turn() {
    plan.turn_ring.wait_full(turn_state);
    plan.turn_ring.release(turn_state);
    fence_proxy_async_global();
  }

  __forceinline__ void hand_turn_over() {
    plan.added_ring.wait_free(turn_state);
    bwd_wait_added();
    mbarrier_arrive(plan.added_ring.full[turn_state.stage]);
    turn_state.advance();
  }

  __forceinline__ void run() {
    visit_all<C>(plan, params, [&](const BwdWork<C>& work, const BwdVisit& at) {
      if constexpr (C.deterministic) wait_turn();
      add_block(visit_number<C>(params, work, at));
      if constexpr (C.deterministic) hand_turn_over();
    });
    bulk_wait<0>();
  }
};

}  // namespace fovea::device
