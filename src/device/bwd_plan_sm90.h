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

// CTAs that visit the same rows together, and their keys.
constexpr int32 bwd_ctas(const BwdConfig& c) { return c.pair ? 2 : 1; }
constexpr int32 bwd_keys_together(const BwdConfig& c) { return bwd_ctas(c) * core::keys_of(c); }

// Which CTA of the pair this one is.
template <BwdConfig C>
__forceinline__ int32 bwd_rank() {
  return C.pair ? static_cast<int32>(cluster_rank()) : 0;
}

// What this CTA works on. In shared memory, since registers are short.
template <BwdConfig C>
struct alignas(16) BwdWork {
  static constexpr int32 rows = core::rows_of(C);

  BwdSequence sequence;
  int32 head_kv;
  int32 row_begin, row_end;      // query rows that see any key of the block
  int32 block_begin, block_end;  // their blocks; of a pair, those of the rows that see either block
  int32 block_first;             // that which is visited first; then those behind it, then the rest
  int32 open_begin, open_end;    // those of which every row exists and sees every key
  int32 key_begin;               // first key of the block
  bool exists;                   // a key of it, or of the other CTA's
  bool last;                     // no block, but the end of them

  // Number `index` in the order in which they are dealt, of the blocks or of their pairs.
  __forceinline__ void find(const BwdParams& params, int32 index) {
    constexpr int32 together = bwd_keys_together(C);
    const int32 count = params.key_blocks / bwd_ctas(C);
    const PairBlock at = pair_block(index, params.batch * params.heads_kv, params.section, count);
    const int32 b = at.pair / params.heads_kv;
    sequence = bwd_sequence<C>(params, b);
    head_kv = at.pair - b * params.heads_kv;
    const int32 first = (core::last_keys_first(C) ? count - 1 - at.block : at.block) * together;
    key_begin = first + bwd_rank<C>() * core::keys_of(C);
    exists = first < sequence.capacity_k;
    const core::KeyRange visited =
        rows_that_see<C>(params, sequence, first, min(first + together, sequence.length_k));
    block_begin = static_cast<int32>(visited.begin) / rows;
    block_end = (static_cast<int32>(visited.end) + rows - 1) / rows;
    block_first = block_begin;
    if constexpr (core::goes_round(C)) {
      block_first +=
          static_cast<int32>(static_cast<int64>(at.block) * (block_end - block_begin) / count);
    }
    find_rows(params, visited);
    find_open(params);
  }

  __forceinline__ void find_rows(const BwdParams& params, core::KeyRange visited) {
    core::KeyRange seen = visited;
    // Keys behind the last one have no gradients that a row could spoil.
    if (C.pair && key_begin < sequence.capacity_k) {
      seen = rows_that_see<C>(params, sequence, key_begin,
                              min(key_begin + core::keys_of(C), sequence.length_k));
    }
    row_begin = static_cast<int32>(seen.begin);
    row_end = static_cast<int32>(seen.end);
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

  __forceinline__ bool is_seen() const { return block_begin < block_end; }
};

// The first key of the other CTA of a pair.
template <BwdConfig C>
__forceinline__ int32 peer_key_begin(const BwdWork<C>& work) {
  return work.key_begin + (1 - 2 * bwd_rank<C>()) * core::keys_of(C);
}

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

// What a CTA of a pair has of the other one: its dS, and the columns of its keys for which this CTA
// multiplies dq.
template <BwdConfig C, bool pair = C.pair>
struct BwdPeer {};
template <BwdConfig C>
struct BwdPeer<C, true> {
  alignas(1024) uint8 peer_k[core::keys_of(C) * C.head_dim];
  alignas(1024) uint8 peer_dscores[core::keys_of(C) * core::rows_of(C) * 2];
};

// Tiles are panels of 64 columns, each [row][64] with the 128-byte swizzle.
template <BwdConfig C>
struct BwdPlan : BwdPeer<C> {
  static constexpr int32 rows = core::rows_of(C);
  static constexpr int32 keys = core::keys_of(C);
  static constexpr int32 ctas = bwd_ctas(C);
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
  static constexpr int32 score_stages = core::score_stages(C);
  static constexpr int32 dq_buffers = core::dq_buffers(C);

  alignas(1024) uint8 k[k_bytes];
  alignas(1024) uint8 v[v_bytes];
  alignas(1024) uint8 q[2][q_bytes];
  alignas(1024) uint8 dout[dout_stages][dout_bytes];
  // [query panel][key][64 queries]: dS. Where products are split P comes first, from one warpgroup
  // to the other, which writes dS over it.
  alignas(1024) uint8 scores[score_stages][score_bytes];
  alignas(1024) uint8 dq[dq_buffers][unit_bytes];  // in the order of the accumulator
  alignas(128) float lse_log2[2][rows];
  alignas(128) float delta[2][rows];
  Ring<2> q_ring;               // with lse_log2. full: 1 producer and the bytes
  Ring<dout_stages> dout_ring;  // with delta. free: each computing warp
  Ring<1> dq_ring[dq_buffers];  // full: the threads of a warpgroup; free: the adding thread
  // dq_apart. full: each computing warp, of dS; free: each warp of dq. split_products: full: each
  // warp of the first warpgroup, of P; free: each computing warp
  Ring<score_stages> scores_ring;
  Barrier dscores_full[score_stages];  // split_products: dS is in P's place
  Ring<2> turn_ring;         // in turns. full: the thread that waits; free: that which adds
  Ring<2> added_ring;        // in turns. full: the thread that adds; free: that which passes on
  Ring<1> keys_ring;         // k and v. free: each computing warp
  Ring<2> work_ring;         // free: each computing warp, and whoever has to do with dq
  Ring<1> peer_ring;         // pair, of peer_dscores. full: each warp and the bytes of the other
                             // CTA's that makes dS; free: each computing warp of the other CTA
  Ring<1, true> index_ring;  // pair. full, of the second CTA: 1 and the bytes; free, of the first
  uint4 next_index;          // pair, of the second CTA: its next pair of blocks of keys, in x
  int32 index;               // of the next block of keys, of the loading thread alone
  BwdVisit added;            // dq_apart, of the passing thread: the step whose turn it has
  uint32 turn;               // dq_apart, of the waiting thread: that of the next step
  BwdWork<C> work[2];

  static constexpr uint32 consumer_warps = 8;

  // Named barriers, of all computing threads. 0 is __syncthreads.
  static constexpr int32 scores_barrier = 1;
  static constexpr int32 clear_barrier = 2;
  static constexpr int32 dq_barrier = 3;       // of the warpgroup of dq
  static constexpr int32 dscores_barrier = 4;  // of the warpgroup of dS, where products are split

  static_assert(C.dtype == DType::bf16 || C.dtype == DType::f16);
  static_assert(C.head_dim % core::panel_columns == 0 && C.head_dim_v % core::panel_columns == 0);
  static_assert(C.split_products || (C.head_dim == C.head_dim_v && C.head_dim <= 128));
};

// Keys come with each block, in a ring of one stage where those have two.
__forceinline__ RingState<1> keys_state(const RingState<2>& work_state) {
  return {0, static_cast<uint32>(work_state.stage)};
}

// The units of its CTA's dq that a warpgroup has; with an odd number the second has one more. Its
// buffers are those from its own number on.
struct DqUnits {
  int32 begin, count;
};
constexpr DqUnits dq_units(const BwdConfig& c, int32 warpgroup) {
  const int32 all = core::dq_units_of_cta(c);
  return warpgroup == 0 ? DqUnits{0, all / 2} : DqUnits{all / 2, all - all / 2};
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
  RingState<1> index_state;

  __forceinline__ const BwdWork<C>& work() const { return plan.work[work_state.stage]; }

  // Blocks of keys, or pairs of them, as they come: the first by place, further ones from a counter
  // that all CTAs share, or, without one, in rounds. In turns all CTAs have to find room at once:
  // they wait for each other.
  __forceinline__ int32 next(int32 index) const {
    const int32 width = static_cast<int32>(gridDim.x) / Plan::ctas;
    if (index < 0) return static_cast<int32>(blockIdx.x) / Plan::ctas;
    if (params.scheduler == nullptr) return index + width;
    return width + static_cast<int32>(atomicAdd(params.scheduler, 1u));
  }

  // The next of which any key exists, or that none does.
  __forceinline__ void find_next(BwdWork<C>& work) {
    do {
      plan.index = next(plan.index);
      work.last = plan.index >= params.tiles / Plan::ctas;
      if (work.last) break;
      work.find(params, plan.index);
    } while (!work.exists);
  }

  // The first CTA of a pair asks, and tells the second.
  __forceinline__ void find_next_of_pair(BwdWork<C>& work) {
    if (bwd_rank<C>() == 0) {
      find_next(work);
      plan.index_ring.wait_free(index_state);
      const auto index = static_cast<uint32>(plan.index);
      store_async_x4(map_to_rank(shared_address(&plan.next_index), 1), uint4{index, 0, 0, 0},
                     map_to_rank(shared_address(&plan.index_ring.full[0]), 1));
    } else {
      plan.index_ring.expect(index_state, sizeof(uint4));
      plan.index_ring.wait_full(index_state);
      const auto index = static_cast<int32>(load_shared_x4(shared_address(&plan.next_index)).x);
      mbarrier_arrive_remote(map_to_rank(shared_address(&plan.index_ring.free[0]), 0));
      work.last = index >= params.tiles / Plan::ctas;
      if (!work.last) work.find(params, index);
    }
    index_state.advance();
  }

  // Tells the others which block of keys comes next, or that none does; returns whether one does.
  __forceinline__ bool publish() {
    plan.work_ring.wait_free(work_state);
    BwdWork<C>& work = plan.work[work_state.stage];
    if constexpr (C.pair) {
      find_next_of_pair(work);
    } else {
      find_next(work);
    }
    mbarrier_arrive(plan.work_ring.full[work_state.stage]);
    return !work.last;
  }

  __forceinline__ void load_panels(SharedAddress memory, const TensorMap* map, Barrier& barrier,
                                   int32 panels, int32 tile_rows, int32 row, int32 head,
                                   int32 batch, CachePolicy policy, int32 first_panel = 0) {
    for (int32 panel = 0; panel < panels; ++panel) {
      tma_load(memory + panel * tile_rows * Plan::row_bytes, map, barrier,
               {(first_panel + panel) * core::panel_columns, row, head, batch}, policy);
    }
  }

  __forceinline__ void load_keys() {
    const BwdSequence& s = work().sequence;
    const CachePolicy policy = cache_policy_evict_first();
    const int32 row = s.row_k + work().key_begin;
    const int32 head = work().head_kv;
    Barrier& barrier = plan.keys_ring.full[0];
    plan.keys_ring.wait_free(keys_state(work_state));
    plan.keys_ring.expect(keys_state(work_state),
                          Plan::k_bytes + Plan::v_bytes + (C.pair ? Plan::k_bytes / 2 : 0));
    load_panels(shared_address(plan.k), &params.k, barrier, Plan::panels, Plan::keys, row, head,
                s.batch_k, policy);
    load_panels(shared_address(plan.v), &params.v, barrier, Plan::panels_v, Plan::keys, row, head,
                s.batch_k, policy);
    if constexpr (C.pair) {
      load_panels(shared_address(plan.peer_k), &params.k, barrier, Plan::panels / 2, Plan::keys,
                  s.row_k + peer_key_begin<C>(work()), head, s.batch_k, policy,
                  bwd_rank<C>() * (Plan::panels / 2));
    }
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
// In deterministic order: a counter for each block of rows has how many blocks of keys have added;
// where CTAs work in pairs, how many pairs have, one for each half of the columns.

template <BwdConfig C>
struct BwdTurns {
  const BwdParams& params;
  const BwdWork<C>& work;

  __forceinline__ uint32* counter(const BwdVisit& at) const {
    return params.turns + visit_number<C>(params, work, at) * core::turn_counters(C) +
           bwd_rank<C>();
  }

  // How many blocks of keys, or pairs of them, add to a block of rows before this one.
  __forceinline__ uint32 before(int32 block) const {
    const BwdSequence& s = work.sequence;
    const core::BlockRange keys =
        core::block_range(core::Window{params.window_left, params.window_right}, s.length_q,
                          s.length_k, block * core::rows_of(C),
                          min((block + 1) * core::rows_of(C), s.length_q), bwd_keys_together(C));
    const int64 own = work.key_begin / bwd_keys_together(C);
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
  RingState<1> state;
  RingState<2> turn_state;

  // Every unit of a block of rows that this CTA multiplies. A buffer has one of each.
  __forceinline__ void add_block(int64 number) {
    constexpr int32 count = core::dq_units_of_cta(C);
    constexpr int32 first = Plan::dq_buffers - count;
    const int64 unit = number * core::dq_units_of(C) + bwd_rank<C>() * count;
    float* const sums = params.dq_sums + unit * core::dq_unit_floats;
#pragma unroll
    for (int32 i = 0; i < count; ++i) {
      plan.dq_ring[first + i].wait_full(state);
      bulk_reduce_add(sums + i * core::dq_unit_floats, shared_address(plan.dq[first + i]),
                      Plan::unit_bytes);
      bulk_commit();
    }
    release_behind<first>();
    state.advance();
  }

  // Gives buffers back in the order in which they are read.
  template <int32 buffer>
  __forceinline__ void release_behind() {
    if constexpr (buffer < Plan::dq_buffers) {
      bulk_wait_read<Plan::dq_buffers - 1 - buffer>();
      plan.dq_ring[buffer].release(state);
      release_behind<buffer + 1>();
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
