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

// ---- Products -----------------------------------------------------------------------------------

// C = A B^T: 64 keys with the rows of a block, both K-major.
template <BwdConfig C>
__forceinline__ void issue_scores(float (&c)[core::rows_of(C) / 2], SharedAddress keys,
                                  SharedAddress queries, int32 steps) {
  using Plan = BwdPlan<C>;
  const uint64 a = wgmma_descriptor(Swizzle::b128, keys.value, 0, Plan::group_bytes);
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

// C += A B: P^T dout, or dS^T q. A from registers, B MN-major.
template <BwdConfig C, int32 count>
__forceinline__ void issue_gradient(float (&c)[count], const uint32 (&a)[core::rows_of(C) / 16][4],
                                    SharedAddress queries) {
  using Plan = BwdPlan<C>;
  const uint64 b = wgmma_descriptor(Swizzle::b128, queries.value, Plan::rows * Plan::row_bytes,
                                    Plan::group_bytes);
#pragma unroll
  for (int32 step = 0; step < Plan::rows / 16; ++step) {
    bwd_gradient(c, a[step], descriptor_advance(b, step * 16 * Plan::row_bytes), true);
  }
  wgmma_commit();
}

// dq = dS k, or += of the keys of a peer, of 64 rows and 64 columns: from a panel [key][64 queries]
// of dS^T and one [key][64 columns] of keys, both MN-major.
template <BwdConfig C>
__forceinline__ void issue_dq(float (&dq)[core::dq_unit_floats / 128], SharedAddress dscores,
                              SharedAddress keys, bool add = false) {
  using Plan = BwdPlan<C>;
  constexpr uint32 panel_bytes = Plan::keys * Plan::row_bytes;
  const uint64 a = wgmma_descriptor(Swizzle::b128, dscores.value, panel_bytes, Plan::group_bytes);
  const uint64 b = wgmma_descriptor(Swizzle::b128, keys.value, panel_bytes, Plan::group_bytes);
#pragma unroll
  for (int32 step = 0; step < Plan::keys / 16; ++step) {
    bwd_dq(dq, descriptor_advance(a, step * 16 * Plan::row_bytes),
           descriptor_advance(b, step * 16 * Plan::row_bytes), add || step > 0);
  }
  wgmma_commit();
}

// Of whole columns: with head_dim 64 a unit is half of the rows, with 128 half of the columns.
template <BwdConfig C>
__forceinline__ void issue_dq_unit(float (&dq)[core::dq_unit_floats / 128], BwdPlan<C>& plan,
                                   int32 stage, int32 unit) {
  using Plan = BwdPlan<C>;
  constexpr bool split_rows = C.head_dim == 64;
  const uint32 own = static_cast<uint32>(unit) * (Plan::keys * Plan::row_bytes);
  const SharedAddress scores =
      shared_address(plan.scores[0]) + static_cast<uint32>(stage) * Plan::score_bytes;
  issue_dq<C>(dq, scores + (split_rows ? own : 0u),
              shared_address(plan.k) + (split_rows ? 0u : own));
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

  // The warpgroup's keys, of a tile of all.
  __forceinline__ SharedAddress own_keys(const uint8* tile) const {
    return shared_address(tile) + static_cast<uint32>(this->first_key()) * Plan::row_bytes;
  }

  __forceinline__ void issue_dp(float (&dscores)[score_count]) {
    this->plan.dout_ring.wait_full(this->dout_state());
    wgmma_fence();
    issue_scores<C>(dscores, own_keys(this->plan.v), this->dout_tile(), C.head_dim_v / 16);
  }

  // Waits for a block's rows and issues its scores. lse is read first: beside products, which keep
  // shared memory busy, it would come hundreds of cycles later.
  __forceinline__ void begin(int32 block) {
    this->plan.q_ring.wait_full(this->q_state);
    this->clear_unseen_rows(block);
    this->read_rows(lse, this->own_lse());
    wgmma_fence();
    issue_scores<C>(scores, own_keys(this->plan.k), this->q_tile(), C.head_dim / 16);
  }

  __forceinline__ void issue_dv(const Fragments& weights) {
    wgmma_fence();
    issue_gradient<C>(dv, weights, this->dout_tile());
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
      issue_gradient<C>(dk, dweights, this->q_tile());
      wgmma_wait<1>();
      this->release_dout(this->dout_state());
    } else {
      float dq[unit_count];  // [64 x 64]
      issue_dq_unit<C>(dq, this->plan, this->q_state.stage, this->warpgroup);
      issue_gradient<C>(dk, dweights, this->q_tile());
      wgmma_wait<1>();
      wgmma_hold(dq);
      this->release_dout(this->dout_state());
      this->add_dq(dq, 0);
      this->dq_state.advance();
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
      await_scores_read();
      this->store_dk(dk);
      this->store_dv(dv);
      this->end_work();
    }
  }

  // The gradients leave by way of the memory of dS.
  __forceinline__ void await_scores_read() {
    if constexpr (C.dq_apart) {
      RingState<2> other = this->q_state;
      this->plan.scores_ring.wait_free(other);
      other.advance();
      this->plan.scores_ring.wait_free(other);
    } else {
      named_barrier_sync<Plan::scores_barrier, 256>();
    }
  }
};

// ---- Roles: P and dv, dS and dk, one warpgroup each ---------------------------------------------
//
// Where dk and dv of 64 keys do not fit the registers of one warpgroup beside all else. Both have
// the same keys. P goes through shared memory to the other warpgroup, and dS comes back the same
// way, in its place, as operand A of dq; those of dv and dk stay in registers. While one takes
// exponentials, products of the other run.
//
// In a pair each CTA sends its dS to the other one and multiplies half of the columns of dq with
// the keys of both: half as much is added in global memory, which binds otherwise.

template <BwdConfig C>
struct BwdHalf : BwdTile<C> {
  using Tile = BwdTile<C>;
  using Plan = BwdPlan<C>;
  static constexpr int32 unit_count = core::dq_unit_floats / 128;
  static constexpr uint32 panel_bytes = Plan::keys * Plan::row_bytes;

  RingState<Plan::score_stages> scores_state;

  // The other CTA of the pair.
  static __forceinline__ uint32 peer() { return static_cast<uint32>(1 - bwd_rank<C>()); }

  // P of this step, and then dS.
  __forceinline__ SharedAddress scores_tile() const {
    return shared_address(this->plan.scores[0]) +
           static_cast<uint32>(scores_state.stage) * Plan::score_bytes;
  }

  // The warpgroup's units of dq, of the CTA's own keys, once dS is there.
  template <int32 units>
  __forceinline__ void issue_own_dq(float (&dq)[units][unit_count], int32 first) {
    Ring<1>::wait(this->plan.dscores_full[scores_state.stage], scores_state.parity);
    const SharedAddress keys =
        shared_address(this->plan.k) +
        static_cast<uint32>(bwd_rank<C>() * core::dq_units_of_cta(C) + first) * panel_bytes;
    wgmma_fence();
#pragma unroll
    for (uint32 j = 0; j < units; ++j) issue_dq<C>(dq[j], scores_tile(), keys + j * panel_bytes);
  }

  // The same of the peer's keys, once its dS has come.
  template <int32 units>
  __forceinline__ void issue_peer_dq(float (&dq)[units][unit_count], int32 first) {
    const SharedAddress keys =
        shared_address(this->plan.peer_k) + static_cast<uint32>(first) * panel_bytes;
    this->plan.peer_ring.wait_full(scores_state);
    fence_proxy_async_shared();  // it was stored, not copied
    wgmma_fence();
#pragma unroll
    for (uint32 j = 0; j < units; ++j) {
      issue_dq<C>(dq[j], shared_address(this->plan.peer_dscores), keys + j * panel_bytes, true);
    }
  }

  // Waits for the units, and gives dS back.
  template <int32 units>
  __forceinline__ void await_dq(float (&dq)[units][unit_count]) {
    wgmma_wait<0>();
#pragma unroll
    for (int32 j = 0; j < units; ++j) wgmma_hold(dq[j]);
    __syncwarp();
    if (lane_index() == 0) {
      this->plan.scores_ring.release(scores_state);
      if constexpr (C.pair) {
        mbarrier_arrive_remote_read(
            map_to_rank(shared_address(&this->plan.peer_ring.free[0]), peer()));
      }
    }
    scores_state.advance();
  }

  template <int32 units>
  __forceinline__ void add_units(const float (&dq)[units][unit_count]) {
#pragma unroll
    for (int32 j = 0; j < units; ++j) this->add_dq(dq[j], j);
    this->dq_state.advance();
  }

  // Gradients leave by way of a buffer of dq.
  template <int32 units>
  __forceinline__ void await_dq_read() {
    if constexpr (units > 0) this->plan.dq_ring[this->warpgroup].wait_free(this->dq_state);
  }
};

template <BwdConfig C>
struct BwdWeights : BwdHalf<C> {
  using Half = BwdHalf<C>;
  using Plan = BwdPlan<C>;
  using typename BwdTile<C>::Fragments;
  static constexpr DqUnits own = dq_units(C, 0);

  float dv[C.head_dim_v / 2];  // [64 x head_dim_v]
  Fragments weights;           // P of this step
  bool sees_rows = true;       // every row of it sees a key, so that none is cleared

  // Waits for a block's rows and issues its scores. lse is read first: beside products it would
  // come hundreds of cycles later.
  __forceinline__ void issue(float (&scores)[BwdTile<C>::score_count],
                             typename BwdTile<C>::RowNumbers& lse) {
    this->plan.q_ring.wait_full(this->q_state);
    this->read_rows(lse, this->own_lse());
    wgmma_fence();
    issue_scores<C>(scores, shared_address(this->plan.k), this->q_tile(), C.head_dim / 16);
  }

  // P from scores in flight, and for the other warpgroup what dS takes of it.
  __forceinline__ void find(Fragments& kept, float (&scores)[BwdTile<C>::score_count],
                            const typename BwdTile<C>::RowNumbers& lse, const BwdVisit& at) {
    const bool hides = !this->sees_all(at.block);
    wgmma_wait<0>();
    wgmma_hold(scores);
    this->find_weights(weights, kept, scores, lse, at.head, at.block, hides);
    // Here, since q and lse may go once P is published.
    sees_rows = this->seen_rows(at.block).all;
  }

  __forceinline__ void publish(const Fragments& kept) {
    this->plan.scores_ring.wait_free(this->scores_state);
    this->store_scores(this->scores_tile(), kept);
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(this->plan.scores_ring.full[this->scores_state.stage]);
  }

  // P of the first block of rows.
  __forceinline__ void begin(const BwdVisit& at) {
    float scores[BwdTile<C>::score_count];
    typename BwdTile<C>::RowNumbers lse;
    Fragments kept;
    issue(scores, lse);
    find(kept, scores, lse, at);
    publish(kept);
  }

  // dv of a block of rows whose P is published, P of the next one if there are `more`, and dq, for
  // which dS comes back meanwhile.
  template <bool more>
  __forceinline__ void step(const BwdVisit& next) {
    float scores[BwdTile<C>::score_count];
    typename BwdTile<C>::RowNumbers lse;
    Fragments kept;
    const auto dout = this->dout_state();
    // The other warpgroup has cleared what is not seen.
    if (!sees_rows) named_barrier_sync<Plan::clear_barrier, 256>();
    this->plan.dout_ring.wait_full(dout);
    wgmma_fence();
    issue_gradient<C>(dv, weights, this->dout_tile());
    this->q_state.advance();
    if constexpr (more) issue(scores, lse);
    wgmma_wait<more>();
    wgmma_hold(dv);
    this->release_dout(dout);
    if constexpr (more) find(kept, scores, lse, next);
    float dq[own.count > 0 ? own.count : 1][Half::unit_count];
    if constexpr (own.count > 0) {
      this->issue_own_dq(dq, own.begin);
      if constexpr (C.pair) this->issue_peer_dq(dq, own.begin);
    }
    this->await_dq(dq);
    if constexpr (more) publish(kept);
    if constexpr (own.count > 0) this->add_units(dq);
  }

  // Every block of rows that sees a key.
  __forceinline__ void add_blocks() {
    this->clear_unseen_keys();
    BwdVisit next = first_visit<C>(this->params, this->work());
    begin(next);
#pragma unroll 1
    while (advance<C>(this->params, this->work(), this->block_end, next)) {
      step<true>(next);
    }
    step<false>(next);
  }

  __forceinline__ void run() {
#pragma unroll 1
    while (this->begin_work()) {
#pragma unroll
      for (float& sum : dv) sum = 0.0f;
      this->wait_keys();
      if (this->work().is_seen()) add_blocks();
      this->release_keys();
      this->template await_dq_read<own.count>();
      this->store_dv(dv);
      this->end_work();
    }
  }
};

template <BwdConfig C>
struct BwdDerivatives : BwdHalf<C> {
  using Half = BwdHalf<C>;
  using Plan = BwdPlan<C>;
  using typename BwdTile<C>::Fragments;
  static constexpr DqUnits own = dq_units(C, 1);

  float dk[C.head_dim / 2];  // [64 x head_dim]

  // dP, and dS from it and what the other warpgroup has published.
  __forceinline__ void find_dscores(const BwdVisit& at, Fragments& dweights) {
    float dscores[BwdTile<C>::score_count];  // dP
    Fragments kept;
    typename BwdTile<C>::RowNumbers delta;
    this->plan.q_ring.wait_full(this->q_state);
    this->plan.dout_ring.wait_full(this->dout_state());
    const auto seen = this->seen_rows(at.block);
    if (!seen.all) {
      this->clear_unseen(seen, this->dout_tile(), Plan::panels_v, this->thread());
      this->publish_cleared();
    }
    this->read_rows(delta, this->own_delta());
    wgmma_fence();
    issue_scores<C>(dscores, shared_address(this->plan.v), this->dout_tile(), C.head_dim_v / 16);
    this->plan.scores_ring.wait_full(this->scores_state);
    this->load_scores(kept, this->scores_tile());
    const bool hides = !this->sees_all(at.block);
    wgmma_wait<0>();
    wgmma_hold(dscores);
    this->release_dout(this->dout_state());
    BwdTile<C>::find_dscores(dweights, kept, dscores, delta, hides);
    this->store_scores(this->scores_tile(), dweights);
    // The scores are made, so q may change. Every warp fences behind, with dS.
    if (!seen.all) {
      this->clear_unseen(seen, this->q_tile(), Plan::panels, this->thread());
      named_barrier_sync<Plan::dscores_barrier, 128>();
    }
  }

  // To the other warpgroup.
  __forceinline__ void publish_dscores() {
    fence_proxy_async_shared();
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(this->plan.dscores_full[this->scores_state.stage]);
  }

  // To the other CTA: the rows of the warp's 16 keys, which lie together. By stores: a copy would
  // queue behind those of tiles and the additions to dq.
  __forceinline__ void send_dscores() {
    constexpr int32 part_bytes = Plan::score_bytes / 4;
    const int32 first = warp_index() % 4 * part_bytes + lane_index() * 16;
    this->plan.peer_ring.wait_free(this->scores_state);
    if (lane_index() == 0) this->plan.peer_ring.expect(this->scores_state, part_bytes);
    const ClusterAddress target =
        map_to_rank(shared_address(this->plan.peer_dscores) + first, this->peer());
    const ClusterAddress arrived =
        map_to_rank(shared_address(&this->plan.peer_ring.full[0]), this->peer());
#pragma unroll
    for (int32 at = 0; at < part_bytes; at += 32 * 16) {
      store_async_x4(target + at, load_shared_x4(this->scores_tile() + first + at), arrived);
    }
    __syncwarp();
  }

  __forceinline__ void step(const BwdVisit& at) {
    Fragments dweights;
    find_dscores(at, dweights);
    publish_dscores();
    if constexpr (C.pair) send_dscores();
    wgmma_fence();
    issue_gradient<C>(dk, dweights, this->q_tile());
    float dq[own.count][Half::unit_count];
    this->issue_own_dq(dq, own.begin);
    if constexpr (C.pair) this->issue_peer_dq(dq, own.begin);
    this->await_dq(dq);
    wgmma_hold(dk);
    this->release_q();
    this->add_units(dq);
  }

  // Every block of rows that sees a key.
  __forceinline__ void add_blocks() {
    this->clear_unseen_keys();
    BwdVisit at = first_visit<C>(this->params, this->work());
#pragma unroll 1
    do {
      step(at);
    } while (advance<C>(this->params, this->work(), this->block_end, at));
  }

  __forceinline__ void run() {
#pragma unroll 1
    while (this->begin_work()) {
#pragma unroll
      for (float& sum : dk) sum = 0.0f;
      this->wait_keys();
      if (this->work().is_seen()) add_blocks();
      this->release_keys();
      this->template await_dq_read<own.count>();
      this->store_dk(dk);
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

// All threads of the CTA, or of the pair.
template <BwdConfig C>
__forceinline__ void bwd_meet() {
  if constexpr (C.pair) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

template <BwdConfig C>
__device__ void bwd(const BwdParams& params) {
  using Plan = BwdPlan<C>;
  extern __shared__ __align__(1024) uint8 shared_memory[];
  Plan& plan = *reinterpret_cast<Plan*>(shared_memory);
  static_assert(sizeof(Plan) <= core::shared_bytes(C) &&
                core::shared_bytes(C) <= core::shared_limit_bytes);

  if (threadIdx.x == 0) {
    plan.q_ring.init(1, C.split_products ? 4 : Plan::consumer_warps);
    plan.dout_ring.init(1, Plan::consumer_warps);
    for (Ring<1>& ring : plan.dq_ring) ring.init(128, 1);
    if constexpr (C.split_products) {
      plan.scores_ring.init(4, Plan::consumer_warps);
    } else {
      plan.scores_ring.init(Plan::consumer_warps, 4);
    }
    for (Barrier& full : plan.dscores_full) mbarrier_init(full, 4);
    plan.peer_ring.init(4, Plan::consumer_warps);
    plan.index_ring.init(1, 1);
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
  bwd_meet<C>();
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
    if constexpr (!C.split_products) {
      BwdCompute<C>{{plan, params, warp / 4 - 1}}.run();
    } else if (warp < 8) {
      BwdWeights<C>{{{plan, params, 0}}}.run();
    } else {
      BwdDerivatives<C>{{{plan, params, 1}}}.run();
    }
  }
  // A CTA's shared memory must not go while the other one copies to it or arrives there.
  if constexpr (C.pair) {
    __syncwarp();
    bwd_meet<C>();
  }
}

}  // namespace fovea::device
