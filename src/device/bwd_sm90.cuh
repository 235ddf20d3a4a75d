// Attention, backward, on Hopper: dk and dv of a block of keys of a KV head, and their part of dq.
//
// A CTA takes block of keys after block of keys, each against every block of query rows that sees
// it, of all heads that share the KV head: dk and dv stay in registers until the end. Two
// warpgroups compute; one warp copies (TMA) and finds the next block of keys, whose tiles arrive
// while dk and dv are stored; one adds dq to global memory (bulk reduction); or (dq_apart) a third
// warpgroup does all that and multiplies dq, so that none waits. Scores are transposed, keys
// x queries, so that P^T and dS^T leave the softmax as operand A of dv and dk needs them. Budget of
// one step, 64 rows x 128 keys x head_dim 128, in cycles of a multiprocessor
// (docs/kernels/bwd_sm90.md):
//
//   tensor cores    5 x 2 x 64 x 128 x 128 FLOP at 4096 a cycle                2560
//   shared memory   operands of five products, dS and dq, 128 bytes a cycle    ~3000
//   exponentials    64 x 128 at 16 a cycle                                      512
//   reduction       32 KB into L2 at about 32 bytes a cycle                     1024
//
// P follows from lse, so there is no running maximum: a weight is one multiply-add and one
// exponential.
#pragma once

#include "device/bwd_tile_sm90.h"

namespace fovea::device {

// A unit of dq = dS k: with head_dim 64 its half of the rows, with 128 its half of the columns.
template <BwdConfig C>
__forceinline__ void issue_dq_unit(float (&dq)[core::dq_unit_floats / 128], BwdPlan<C>& plan,
                                   int32 stage, int32 unit) {
  using Plan = BwdPlan<C>;
  constexpr bool split_rows = C.head_dim == 64;
  constexpr uint32 panel_bytes = Plan::keys * Plan::row_bytes;
  const uint32 own = static_cast<uint32>(unit) * panel_bytes;
  const SharedAddress scores =
      shared_address(plan.scores[0]) + static_cast<uint32>(stage) * Plan::score_bytes;
  const SharedAddress keys = shared_address(plan.k);
  const uint64 b = wgmma_descriptor(Swizzle::b128, (keys + (split_rows ? 0u : own)).value,
                                    panel_bytes, Plan::group_bytes);
  const uint64 a = wgmma_descriptor(Swizzle::b128, (scores + (split_rows ? own : 0u)).value,
                                    panel_bytes, Plan::group_bytes);
#pragma unroll
  for (int32 step = 0; step < Plan::keys / 16; ++step) {
    bwd_dq(dq, descriptor_advance(a, step * 16 * Plan::row_bytes),
           descriptor_advance(b, step * 16 * Plan::row_bytes), step > 0);
  }
  wgmma_commit();
}

// ---- Role: compute, one warpgroup: 64 keys, all columns -----------------------------------------
//
// P^T and dS^T stay in registers as operand A; only dS goes through shared memory, for dq.

template <BwdConfig C>
struct BwdCompute : BwdTile<C> {
  using Tile = BwdTile<C>;
  using Plan = BwdPlan<C>;
  using typename Tile::Fragments;
  static constexpr int32 score_count = Tile::score_count;
  static constexpr int32 dk_count = C.head_dim / 2;
  static constexpr int32 dv_count = C.head_dim_v / 2;
  static constexpr int32 unit_count = core::dq_unit_floats / 128;

  float scores[score_count];
  float dk[dk_count];  // [64 x head_dim]
  float dv[dv_count];  // [64 x head_dim_v]
  typename Tile::RowNumbers lse;

  // C = A B^T: the warpgroup's 64 keys of `keys` with the rows of `queries`, both K-major.
  __forceinline__ void issue_scores(float (&c)[score_count], SharedAddress keys,
                                    SharedAddress queries, int32 steps) {
    const uint64 a =
        wgmma_descriptor(Swizzle::b128, (keys + this->warpgroup * (64 * Plan::row_bytes)).value, 0,
                         Plan::group_bytes);
    const uint64 b = wgmma_descriptor(Swizzle::b128, queries.value, 0, Plan::group_bytes);
#pragma unroll
    for (int32 step = 0; step < steps; ++step) {
      const uint32 panel = step / 4;
      const uint32 inside = (step % 4) * 32;  // 16 elements
      bwd_scores(c, descriptor_advance(a, panel * Plan::keys * Plan::row_bytes + inside),
                 descriptor_advance(b, panel * Plan::rows * Plan::row_bytes + inside), step > 0);
    }
    wgmma_commit();
  }

  __forceinline__ void issue_dp(float (&dscores)[score_count]) {
    this->plan.dout_ring.wait_full(this->dout_state());
    wgmma_fence();
    issue_scores(dscores, shared_address(this->plan.v), this->dout_tile(), C.head_dim_v / 16);
  }

  // C += A B: P^T dout, or dS^T q. A from registers, B MN-major.
  template <int32 count>
  __forceinline__ void issue_gradient(float (&c)[count], const Fragments& a,
                                      SharedAddress queries) {
    const uint64 b = wgmma_descriptor(Swizzle::b128, queries.value, Plan::rows * Plan::row_bytes,
                                      Plan::group_bytes);
#pragma unroll
    for (int32 step = 0; step < Plan::rows / 16; ++step) {
      bwd_gradient(c, a[step], descriptor_advance(b, step * 16 * Plan::row_bytes), true);
    }
    wgmma_commit();
  }

  // Waits for a block's rows and issues its scores. lse is read first: beside products, which keep
  // shared memory busy, it would come hundreds of cycles later.
  __forceinline__ void begin(int32 block) {
    this->plan.q_ring.wait_full(this->q_state);
    this->clear_unseen_rows(block);
    this->read_rows(lse, this->own_lse());
    wgmma_fence();
    issue_scores(scores, shared_address(this->plan.k), this->q_tile(), C.head_dim / 16);
  }

  __forceinline__ void issue_dv(const Fragments& weights) {
    wgmma_fence();
    issue_gradient(dv, weights, this->dout_tile());
  }

  // From scores in flight to dS in shared memory, with dV in flight. What runs beside what is a
  // matter of registers: dk, dv and both kinds of scores are 192.
  __forceinline__ void find_dscores_of(const BwdVisit& at, Fragments& dweights) {
    constexpr bool in_place = !C.dq_apart && !core::modifies_backward(C);  // P beside dP
    constexpr bool dv_first = !C.dq_apart && !in_place;
    constexpr bool together = in_place || (!C.dq_apart && Plan::rows == 64);  // S beside dP
    Fragments weights;                                                        // P^T as operand A
    Fragments kept;                                                           // what dS takes of it
    float dscores[score_count];                                               // dP
    typename Tile::RowNumbers delta;
    if constexpr (together) issue_dp(dscores);
    const bool hides = !this->sees_all(at.block);
    wgmma_wait<together ? 1 : 0>();
    wgmma_hold(scores);
    if constexpr (in_place) {
      this->find_weights_in_place(scores, lse, at.block, hides);
    } else {
      this->find_weights(weights, kept, scores, lse, at.head, at.block, hides);
    }
    if constexpr (C.dq_apart) {
      this->plan.dout_ring.wait_full(this->dout_state());
      this->read_rows(delta, this->own_delta());
    }
    if constexpr (!together) issue_dp(dscores);
    if constexpr (dv_first) issue_dv(weights);
    wgmma_wait<dv_first ? 1 : 0>();
    wgmma_hold(dscores);
    if constexpr (!C.dq_apart) this->read_rows(delta, this->own_delta());
    if constexpr (in_place) {
      this->find_both(weights, dweights, scores, dscores, delta, hides);
    } else {
      this->find_dscores(dweights, kept, dscores, delta, hides);
    }
    if constexpr (C.dq_apart) this->plan.scores_ring.wait_free(this->q_state);
    this->store_scores(this->dscores_tile(), dweights);
    if constexpr (!dv_first) issue_dv(weights);
    if constexpr (C.dq_apart) {
      this->hand_scores_over();
    } else {
      this->publish_scores();
    }
  }

  // One block of rows, whose scores are in flight.
  __forceinline__ void step(const BwdVisit& at) {
    Fragments dweights;  // dS^T as operand A
    find_dscores_of(at, dweights);
    wgmma_fence();
    if constexpr (C.dq_apart) {
      issue_gradient(dk, dweights, this->q_tile());
      wgmma_wait<1>();
      this->release_dout();
    } else {
      float dq[unit_count];  // [64 x 64]
      issue_dq_unit<C>(dq, this->plan, this->q_state.stage, this->warpgroup);
      issue_gradient(dk, dweights, this->q_tile());
      wgmma_wait<1>();
      wgmma_hold(dq);
      this->release_dout();
      this->add_dq(dq, 0);
    }
    wgmma_wait<0>();
    wgmma_hold(dk);
    wgmma_hold(dv);
    this->release_q();
  }

  // Every block of rows that sees a key.
  __forceinline__ void add_blocks() {
    this->clear_unseen_keys();
    BwdVisit at = first_visit<C>(this->params, this->work());
#pragma unroll 1
    do {
      begin(at.block);
      step(at);
    } while (advance<C>(this->params, this->work(), this->block_end, at));
  }

  __forceinline__ void run() {
#pragma unroll 1
    while (this->begin_work()) {
#pragma unroll
      for (int32 i = 0; i < dk_count; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int32 i = 0; i < dv_count; ++i) dv[i] = 0.0f;
      this->wait_keys();
      if (this->work().is_seen()) add_blocks();
      this->release_keys();
      this->store_gradients(dk, 0, dv, 0);
      this->end_work();
    }
  }
};

// ---- Role: compute, one warpgroup: all keys, some of the columns --------------------------------
//
// Where dk and dv of 64 keys do not fit the registers of one warpgroup beside all else. Each makes
// the scores of half of the queries; P^T and dS^T both go through shared memory, as operand A of dv
// and dk, and dS as that of dq.

template <BwdConfig C, int32 own>
struct BwdColumns : BwdTile<C> {
  using Tile = BwdTile<C>;
  using Plan = BwdPlan<C>;
  using typename Tile::Fragments;
  static constexpr int32 score_count = Tile::score_count;
  static constexpr Panels dk_own = dk_panels(C, own);
  static constexpr Panels dv_own = dv_panels(C, own);
  static constexpr Panels dq_own = dq_panels(C, own);
  static constexpr int32 panel_count = 32;  // numbers of a panel in a thread
  // dv beside the derivative, where registers are left.
  static constexpr bool dv_early = !core::modifies_backward(C);

  // One number where it has none.
  static constexpr int32 numbers(Panels panels) {
    return panels.count > 0 ? panels.count * panel_count : 1;
  }
  float dk[numbers(dk_own)];
  float dv[numbers(dv_own)];

  static constexpr bool has_late_unit = dv_early && dq_own.count > 1;
  float late[panel_count];  // of dq
  bool is_late = false;     // of a step before this one

  // C = A B^T: 64 keys of `keys` with the warpgroup's rows of `queries`, both K-major.
  __forceinline__ void issue_scores(float (&c)[score_count], SharedAddress keys,
                                    SharedAddress queries, int32 steps) {
    const uint64 a = wgmma_descriptor(Swizzle::b128, keys.value, 0, Plan::group_bytes);
    const uint64 b =
        wgmma_descriptor(Swizzle::b128, (queries + own * (Tile::columns * Plan::row_bytes)).value,
                         0, Plan::group_bytes);
#pragma unroll
    for (int32 step = 0; step < steps; ++step) {
      const uint32 panel = step / 4;
      const uint32 inside = (step % 4) * 32;  // 16 elements
      bwd_scores(c, descriptor_advance(a, panel * Plan::keys * Plan::row_bytes + inside),
                 descriptor_advance(b, panel * Plan::rows * Plan::row_bytes + inside), step > 0);
    }
    wgmma_commit();
  }

  // C += A B: P^T dout, or dS^T q, from the panel `first` of B on. A K-major, B MN-major.
  template <int32 count>
  __forceinline__ void issue_gradient(float (&c)[count], SharedAddress scores,
                                      SharedAddress queries, int32 first) {
    constexpr uint32 panel_bytes = Plan::rows * Plan::row_bytes;
    const uint64 a = wgmma_descriptor(Swizzle::b128, scores.value, 0, Plan::group_bytes);
    const uint64 b = wgmma_descriptor(Swizzle::b128, (queries + first * panel_bytes).value,
                                      panel_bytes, Plan::group_bytes);
    wgmma_fence();
#pragma unroll
    for (int32 step = 0; step < Plan::rows / 16; ++step) {
      bwd_gradient(c, descriptor_advance(a, step * 32),
                   descriptor_advance(b, step * 16 * Plan::row_bytes), true);
    }
    wgmma_commit();
  }

  // Its panels of dq = dS k. Both operands MN-major.
  template <int32 count>
  __forceinline__ void issue_dq(float (&dq)[count]) {
    constexpr uint32 panel_bytes = Plan::keys * Plan::row_bytes;
    const uint64 a =
        wgmma_descriptor(Swizzle::b128, this->dscores_tile().value, panel_bytes, Plan::group_bytes);
    const uint64 b = wgmma_descriptor(
        Swizzle::b128, (shared_address(this->plan.k) + dq_own.begin * panel_bytes).value,
        panel_bytes, Plan::group_bytes);
    wgmma_fence();
#pragma unroll
    for (int32 step = 0; step < Plan::keys / 16; ++step) {
      bwd_dq(dq, descriptor_advance(a, step * 16 * Plan::row_bytes),
             descriptor_advance(b, step * 16 * Plan::row_bytes), step > 0);
    }
    wgmma_commit();
  }

  __forceinline__ void issue_dv(SharedAddress dout) {
    if constexpr (dv_own.count > 0) {
      issue_gradient(dv, this->weights_tile(), dout, dv_own.begin);
    }
  }

  // P and dS of this step into shared memory.
  __forceinline__ void find_scores(int32 head, int32 block, SharedAddress q, SharedAddress dout) {
    float scores[score_count];
    float dscores[score_count];  // dP
    Fragments weights;
    Fragments kept;
    typename Tile::RowNumbers numbers;
    wgmma_fence();
    issue_scores(scores, shared_address(this->plan.k), q, C.head_dim / 16);
    this->plan.dout_ring.wait_full(this->dout_state());
    wgmma_fence();
    issue_scores(dscores, shared_address(this->plan.v), dout, C.head_dim_v / 16);
    add_late_unit();
    const bool hides = !this->sees_all(block);
    wgmma_wait<1>();
    wgmma_hold(scores);
    this->read_rows(numbers, this->own_lse());
    this->find_weights(weights, kept, scores, numbers, head, block, hides);
    this->store_scores(this->weights_tile(), weights);
    if constexpr (dv_early) {
      this->publish_weights();
      issue_dv(dout);
    }
    wgmma_wait<(dv_early && dv_own.count > 0)>();
    wgmma_hold(dscores);
    this->read_rows(numbers, this->own_delta());
    this->find_dscores(weights, kept, dscores, numbers, hides);
    this->store_scores(this->dscores_tile(), weights);
    this->publish_scores();
  }

  // The last unit of dq leaves while the next scores are made: dq's buffer is not free earlier, and
  // meanwhile the tensor cores have work.
  __forceinline__ void add_late_unit() {
    if constexpr (has_late_unit) {
      if (is_late) this->add_dq(late, 0);
    }
  }

  // Takes dq from its accumulators.
  __forceinline__ void take_dq(const float (&dq)[numbers(dq_own)]) {
    constexpr int32 at_once = dq_own.count - (has_late_unit ? 1 : 0);
#pragma unroll
    for (int32 j = 0; j < at_once; ++j) this->add_dq(dq, j);
    if constexpr (has_late_unit) {
#pragma unroll
      for (int32 i = 0; i < panel_count; ++i) late[i] = dq[at_once * panel_count + i];
      is_late = true;
    }
  }

  __forceinline__ void step(const BwdVisit& at) {
    float dq[numbers(dq_own)];
    this->plan.q_ring.wait_full(this->q_state);
    this->clear_unseen_rows(at.block);
    const SharedAddress q = this->q_tile();
    const SharedAddress dout = this->dout_tile();
    find_scores(at.head, at.block, q, dout);
    if constexpr (!dv_early) issue_dv(dout);
    if constexpr (dq_own.count > 0) issue_dq(dq);
    if constexpr (dk_own.count > 0) issue_gradient(dk, this->dscores_tile(), q, dk_own.begin);
    wgmma_wait<(dk_own.count > 0)>();
    wgmma_hold(dv);
    this->release_dout();
    wgmma_hold(dq);
    take_dq(dq);
    wgmma_wait<0>();
    wgmma_hold(dk);
    this->release_q();
  }

  // Every block of rows that sees a key.
  __forceinline__ void add_blocks() {
    this->clear_unseen_keys();
    BwdVisit at = first_visit<C>(this->params, this->work());
#pragma unroll 1
    do {
      step(at);
    } while (advance<C>(this->params, this->work(), this->work().block_end, at));
    add_late_unit();
    is_late = false;
  }

  __forceinline__ void run() {
#pragma unroll 1
    while (this->begin_work()) {
#pragma unroll
      for (int32 i = 0; i < numbers(dk_own); ++i) dk[i] = 0.0f;
#pragma unroll
      for (int32 i = 0; i < numbers(dv_own); ++i) dv[i] = 0.0f;
      this->wait_keys();
      if (this->work().is_seen()) add_blocks();
      this->release_keys();
      this->store_gradients(dk, dk_own.begin * core::panel_columns, dv,
                            dv_own.begin * core::panel_columns);
      this->end_work();
    }
  }
};

// ---- Role: dq, one warpgroup --------------------------------------------------------------------
//
// It also copies and adds, so that the other two have all registers that dk, dv and scores take,
// and need not wait for each other.

template <BwdConfig C>
struct BwdDq {
  using Plan = BwdPlan<C>;
  static constexpr int32 unit_count = core::dq_unit_floats / 128;
  static_assert(core::dq_units_of(C) == 2);

  Plan& plan;
  const BwdParams& params;
  BwdLoad<C> load{plan, params};
  // Of the loading thread: the next block of rows to load, and whether the block of keys after this
  // one is published.
  BwdVisit ahead{};
  bool published = false;
  // What a thread does beside: one of each warp.
  static constexpr int32 loads = 0, adds = 1, passes = 2, waits = 3;
  const int32 warp = warp_index();
  const int32 role = elect_one() ? warp : -1;
  int32 block_end = 0;
  RingState<2> work_state;
  RingState<2> scores_state;

  __forceinline__ const BwdWork<C>& work() const { return plan.work[work_state.stage]; }

  __forceinline__ void issue(float (&dq)[unit_count], int32 unit) {
    wgmma_fence();
    issue_dq_unit<C>(dq, plan, scores_state.stage, unit);
  }

  __forceinline__ float* sums_of(const BwdVisit& at, int32 unit) const {
    return params.dq_sums + (visit_number<C>(params, work(), at) * core::dq_units_of(C) + unit) *
                                core::dq_unit_floats;
  }

  // Number 4 q + i of a thread is word i of its q-th quad.
  __forceinline__ void store(const float (&dq)[unit_count], int32 unit) const {
    const SharedAddress target = shared_address(plan.dq[0]) +
                                 static_cast<uint32>(unit) * Plan::unit_bytes + threadIdx.x * 16;
#pragma unroll
    for (int32 i = 0; i < unit_count; i += 4) {
      store_shared_x4(target + i * (128 * 4),
                      uint4{__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                            __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])});
    }
  }

  // Adds a unit that all have stored.
  __forceinline__ void add(const BwdVisit& at, int32 unit) {
    fence_proxy_async_shared();
    named_barrier_sync<Plan::dq_barrier, 128>();
    if (role != adds) return;
    if (C.deterministic && unit == 0) fence_proxy_async_global();
    bulk_reduce_add(sums_of(at, unit), shared_address(plan.dq[unit]), Plan::unit_bytes);
    bulk_commit();
  }

  // What takes the way to the L2 and back, each warp does one of: one has waited until the units
  // of the step before this one are complete, one passes their turn on, one waits for the next.
  __forceinline__ void take_turn(const BwdVisit& at) {
    const BwdTurns<C> turns{params, work()};
    if (role == passes) {
      if (plan.added.head >= 0) turns.pass(plan.added);
      plan.added = at;
    }
    if (role == waits) turns.wait(at, plan.turn);
    __syncwarp();
  }

  // Behind the last step of a block of keys.
  __forceinline__ void pass_last_turn() {
    if (role == adds) bwd_wait_added();
    named_barrier_sync<Plan::dq_barrier, 128>();
    if (role == passes) {
      BwdTurns<C>{params, work()}.pass(plan.added);
      plan.added.head = -1;
    }
    __syncwarp();
  }

  // dq of a block, the second unit while the first one leaves.
  __forceinline__ void step(const BwdVisit& at) {
    float dq[unit_count];
    plan.scores_ring.wait_full(scores_state);
    issue(dq, 0);
    if (role == adds) {
      if constexpr (C.deterministic) {
        bwd_wait_added();
      } else {
        bulk_wait_read<0>();
      }
    }
    named_barrier_sync<Plan::dq_barrier, 128>();
    if constexpr (C.deterministic) take_turn(at);
    wgmma_wait<0>();
    wgmma_hold(dq);
    store(dq, 0);
    issue(dq, 1);
    add(at, 0);
    __syncwarp();
    wgmma_wait<0>();
    wgmma_hold(dq);
    if (lane_index() == 0) plan.scores_ring.release(scores_state);
    scores_state.advance();
    store(dq, 1);
    add(at, 1);
  }

  // Publishes the next block of keys, once.
  __forceinline__ void publish_next() {
    if (published) return;
    published = true;
    load.work_state.advance();
    load.publish();
  }

  // Loads the block of rows behind the last one that was loaded, if there is one.
  __forceinline__ void load_next() {
    if (ahead.head == (work().head_kv + 1) * params.group_size) return publish_next();
    load.load_block(ahead.head, ahead.block, visit_number<C>(params, work(), ahead));
    advance<C>(params, work(), block_end, ahead);
  }

  __forceinline__ void add_blocks() {
    BwdVisit at = first_visit<C>(params, work());
    if (role == loads) {
      ahead = at;
      load_next();
      load_next();
    }
    __syncwarp();
#pragma unroll 1
    do {
      if constexpr (C.deterministic) {
        // Here, where no accumulator is alive.
        if (role == waits) plan.turn = BwdTurns<C>{params, work()}.before(at.block);
      }
      step(at);
      if (role == loads) load_next();
      __syncwarp();
    } while (advance<C>(params, work(), block_end, at));
    if constexpr (C.deterministic) pass_last_turn();
  }

  __forceinline__ void run() {
    if (role == loads) load.publish();
    __syncwarp();
#pragma unroll 1
    while (true) {
      plan.work_ring.wait_full(work_state);
      if (work().last) break;
      block_end = work().block_end;
      published = false;
      if (role == loads) load.load_keys();
      __syncwarp();
      plan.keys_ring.wait_full(keys_state(work_state));
      if (work().is_seen()) add_blocks();
      if (role == loads) publish_next();
      __syncwarp();
      if (lane_index() == 0) plan.work_ring.release(work_state);
      work_state.advance();
    }
    if (role == adds) bulk_wait<0>();
  }
};

// ---- Kernel -------------------------------------------------------------------------------------

template <BwdConfig C>
__device__ void bwd(const BwdParams& params) {
  using Plan = BwdPlan<C>;
  extern __shared__ __align__(1024) uint8 shared_memory[];
  Plan& plan = *reinterpret_cast<Plan*>(shared_memory);
  static_assert(sizeof(Plan) <= core::shared_bytes(C) &&
                core::shared_bytes(C) <= core::shared_limit_bytes);

  if (threadIdx.x == 0) {
    plan.q_ring.init(1, Plan::consumer_warps);
    plan.dout_ring.init(1, Plan::consumer_warps);
    for (Ring<1>& ring : plan.dq_ring) ring.init(128, 1);
    plan.scores_ring.init(Plan::consumer_warps, 4);
    plan.keys_ring.init(1, Plan::consumer_warps);
    plan.index = -1;
    plan.added.head = -1;
    plan.turn_ring.init(1, 1);
    plan.added_ring.init(1, 1);
    plan.work_ring.init(1, Plan::consumer_warps + (C.dq_apart ? 4 : C.deterministic ? 3 : 1));
    fence_mbarrier_init();
    tma_prefetch_map(&params.q);
    tma_prefetch_map(&params.dout_map);
  }
  __syncthreads();
  const int32 warp = warp_index();
  if constexpr (C.dq_apart) {
    if (warp < 4) {
      registers_shrink<88>();
      BwdDq<C>{plan, params}.run();
    } else {
      registers_grow<208>();
      BwdCompute<C>{{plan, params, warp / 4 - 1}}.run();
    }
  } else if (warp < 4) {
    registers_shrink<40>();
    if (warp == 0 && elect_one()) BwdLoad<C>{plan, params}.run();
    if (warp == 1 && elect_one()) BwdAdd<C>{plan, params}.run();
    if constexpr (C.deterministic) {
      if (warp == 2 && elect_one()) bwd_await_turns<C>(plan, params);
      if (warp == 3 && elect_one()) bwd_pass_turns<C>(plan, params);
    }
  } else {
    registers_grow<232>();
    if constexpr (!C.split_columns) {
      BwdCompute<C>{{plan, params, warp / 4 - 1}}.run();
    } else if (warp < 8) {
      BwdColumns<C, 0>{{plan, params, 0}}.run();
    } else {
      BwdColumns<C, 1>{{plan, params, 1}}.run();
    }
  }
}

}  // namespace fovea::device
