// Attention, backward, on Hopper: dk and dv of 128 keys of a KV head, and their part of dq.
//
// One CTA per block of keys, against every block of query rows that sees it, of all heads that
// share the KV head: dk and dv stay in registers until the end. Two warpgroups compute, 64 keys
// each; one warp copies (TMA), one adds dq to global memory (bulk reduction). Scores are computed
// transposed, keys x queries, so that P^T and dS^T leave the softmax in registers as operand A of
// dv and dk; only dS goes through shared memory, for dq. Budget of one step, 64 rows x 128 keys x
// head_dim 128, in cycles of a multiprocessor (docs/kernels/bwd_sm90.md):
//
//   tensor cores    5 x 2 x 64 x 128 x 128 FLOP at 4096 a cycle                2560
//   shared memory   operands of five products, dS and dq, 128 bytes a cycle    ~1900
//   exponentials    64 x 128 at 16 a cycle                                      512
//   reduction       32 KB into L2 at about 32 bytes a cycle                     1024
//
// P follows from lse, so there is no running maximum: a weight is one multiply-add and one
// exponential.
#pragma once

#include "core/config_backward.h"
#include "device/bwd_blocks.h"
#include "device/pipeline.h"
#include "device/scores.h"
#include "device/tma.h"
#include "device/wgmma.h"

namespace fovea::device {

// ---- Work ---------------------------------------------------------------------------------------

// What this CTA works on. In shared memory, since registers are short.
template <BwdConfig C>
struct BwdWork {
  static constexpr int32 rows = core::rows_of(C);

  BwdSequence sequence;
  int32 head_kv;
  int32 key_begin;               // first key of the block
  int32 row_begin, row_end;      // query rows that see any key of the block
  int32 block_begin, block_end;  // their blocks

  __forceinline__ void find(const BwdParams& params) {
    const PairBlock at = pair_block(static_cast<int32>(blockIdx.x), params.batch * params.heads_kv,
                                    params.section, params.key_blocks);
    const int32 b = at.pair / params.heads_kv;
    sequence = bwd_sequence<C>(params, b);
    head_kv = at.pair - b * params.heads_kv;
    key_begin = (core::last_keys_first(C) ? params.key_blocks - 1 - at.block : at.block) *
                core::backward_keys;
    const core::KeyRange seen = rows_that_see<C>(
        params, sequence, key_begin, min(key_begin + core::backward_keys, sequence.length_k));
    row_begin = static_cast<int32>(seen.begin);
    row_end = static_cast<int32>(seen.end);
    block_begin = row_begin / rows;
    block_end = (row_end + rows - 1) / rows;
  }

  __forceinline__ bool exists() const { return key_begin < sequence.capacity_k; }
};

// ---- Plan: shared memory, barriers --------------------------------------------------------------

// Tiles are panels of 64 columns, each [row][64] with the 128-byte swizzle.
template <BwdConfig C>
struct BwdPlan {
  static constexpr int32 rows = core::rows_of(C);
  static constexpr int32 keys = core::backward_keys;
  static constexpr int32 panels = C.head_dim / core::panel_columns;
  static constexpr uint32 row_bytes = 2 * core::panel_columns;
  static constexpr uint32 group_bytes = 8 * row_bytes;  // 8 rows: the period of the swizzle
  static constexpr uint32 query_bytes = rows * panels * row_bytes;
  static constexpr uint32 key_bytes = keys * panels * row_bytes;
  static constexpr uint32 score_bytes = keys * rows * 2;
  static constexpr uint32 unit_bytes = core::dq_unit_floats * 4;

  alignas(1024) uint8 k[key_bytes];
  alignas(1024) uint8 v[key_bytes];
  alignas(1024) uint8 q[2][query_bytes];
  alignas(1024) uint8 dout[2][query_bytes];
  alignas(1024) uint8 dscores[2][score_bytes];         // [query panel][key][64 queries]
  alignas(1024) uint8 dq[core::dq_units][unit_bytes];  // in the order of the accumulator
  alignas(128) float lse_log2[2][rows];
  alignas(128) float delta[2][rows];
  Ring<2> q_ring;     // with lse_log2. full: 1 producer and the bytes; free: each computing warp
  Ring<2> dout_ring;  // with delta
  Ring<1> dq_ring[core::dq_units];  // full: the threads of a warpgroup; free: the adding thread
  Barrier keys_full;
  BwdWork<C> work;

  static constexpr uint32 consumer_warps = 8;

  // Named barriers, of all computing threads. 0 is __syncthreads.
  static constexpr int32 dscores_barrier = 1;
  static constexpr int32 clear_barrier = 2;

  static_assert(C.dtype == DType::bf16 || C.dtype == DType::f16);
  static_assert(C.head_dim == 64 || C.head_dim == 128);
};

// ---- Role: load, one thread ---------------------------------------------------------------------

template <BwdConfig C>
struct BwdLoad {
  using Plan = BwdPlan<C>;
  Plan& plan;
  const BwdParams& params;
  const BwdWork<C>& work;
  RingState<2> state;

  __forceinline__ void load_keys() {
    const BwdSequence& s = work.sequence;
    mbarrier_arrive_expect_bytes(plan.keys_full, 2 * Plan::key_bytes);
    const CachePolicy policy = cache_policy_evict_first();
#pragma unroll
    for (int32 panel = 0; panel < Plan::panels; ++panel) {
      const uint32 offset = panel * Plan::keys * Plan::row_bytes;
      const int32 at[4] = {panel * core::panel_columns, s.row_k + work.key_begin, work.head_kv,
                           s.batch_k};
      tma_load(shared_address(plan.k) + offset, &params.k, plan.keys_full, at, policy);
      tma_load(shared_address(plan.v) + offset, &params.v, plan.keys_full, at, policy);
    }
  }

  // Query rows of one tensor, and one number for each row.
  __forceinline__ void load_rows(Ring<2>& ring, const uint8* memory, const TensorMap* map,
                                 float* row_memory, const float* row_numbers, int32 head,
                                 int32 block, int64 number) {
    constexpr uint32 number_bytes = Plan::rows * 4;
    const BwdSequence& s = work.sequence;
    const auto stage = static_cast<uint32>(state.stage);
    ring.wait_free(state);
    ring.expect(state, Plan::query_bytes + number_bytes);
    const CachePolicy policy = cache_policy_evict_last();
#pragma unroll
    for (int32 panel = 0; panel < Plan::panels; ++panel) {
      tma_load(
          shared_address(memory) + stage * Plan::query_bytes + panel * Plan::rows * Plan::row_bytes,
          map, ring.full[state.stage],
          {panel * core::panel_columns, s.row_q + block * Plan::rows, head, s.batch_q}, policy);
    }
    bulk_load(shared_address(row_memory) + stage * number_bytes, row_numbers + number * Plan::rows,
              number_bytes, ring.full[state.stage]);
  }

  __forceinline__ void run() {
    if (work.block_begin >= work.block_end) return;
    load_keys();
    for (int32 i = 0; i < params.group_size; ++i) {
      const int32 head = work.head_kv * params.group_size + i;
      const int64 first = first_block<C>(params, work.sequence, head);
#pragma unroll 1
      for (int32 block = work.block_begin; block < work.block_end; ++block) {
        load_rows(plan.q_ring, plan.q[0], &params.q, plan.lse_log2[0], params.lse_log2, head, block,
                  first + block);
        load_rows(plan.dout_ring, plan.dout[0], &params.dout_map, plan.delta[0], params.delta, head,
                  block, first + block);
        state.advance();
      }
    }
  }
};

// ---- Role: add dq, one thread -------------------------------------------------------------------

template <BwdConfig C>
struct BwdAdd {
  using Plan = BwdPlan<C>;
  Plan& plan;
  const BwdParams& params;
  const BwdWork<C>& work;
  RingState<1> state;

  // How many blocks of keys add to a block of rows before this one.
  __forceinline__ uint32 turn(int32 block) const {
    const BwdSequence& s = work.sequence;
    const core::BlockRange keys = core::block_range(
        core::Window{params.window_left, params.window_right}, s.length_q, s.length_k,
        block * Plan::rows, min((block + 1) * Plan::rows, s.length_q), core::backward_keys);
    const int64 own = work.key_begin / core::backward_keys;
    return static_cast<uint32>(core::last_keys_first(C) ? keys.end - 1 - own : own - keys.begin);
  }

  // Waits until those have added: what they wrote comes before what this one adds.
  __forceinline__ void wait_turn(int64 number, int32 block) {
    const uint32 before = turn(block);
    while (load_acquire(params.turns + number) != before) {
    }
    fence_proxy_async_global();
  }

  // The additions themselves must be complete, not only their source read, before the next may add.
  __forceinline__ void pass_turn(int64 number) {
    bulk_wait<0>();
    fence_proxy_async_global();
    add_release(params.turns + number, 1u);
  }

  __forceinline__ void run() {
    for (int32 i = 0; i < params.group_size; ++i) {
      const int32 head = work.head_kv * params.group_size + i;
      const int64 first = first_block<C>(params, work.sequence, head);
#pragma unroll 1
      for (int32 block = work.block_begin; block < work.block_end; ++block) {
        const int64 number = first + block;
        if constexpr (C.deterministic) wait_turn(number, block);
#pragma unroll
        for (int32 unit = 0; unit < core::dq_units; ++unit) {
          plan.dq_ring[unit].wait_full(state);
          bulk_reduce_add(params.dq_sums + (number * core::dq_units + unit) * core::dq_unit_floats,
                          shared_address(plan.dq[unit]), Plan::unit_bytes);
          bulk_commit();
        }
        bulk_wait_read<1>();
        plan.dq_ring[0].release(state);
        bulk_wait_read<0>();
        plan.dq_ring[1].release(state);
        if constexpr (C.deterministic) pass_turn(number);
        state.advance();
      }
    }
    bulk_wait<0>();
  }
};

// ---- Role: compute, one warpgroup ---------------------------------------------------------------
//
// Scores are [64 keys x rows]: element i of a register array is key WgmmaAccumulator::row() of the
// warpgroup's 64 and query WgmmaAccumulator::col() of the block.

template <BwdConfig C>
struct BwdCompute {
  using Plan = BwdPlan<C>;
  static constexpr int32 score_count = Plan::rows / 2;
  static constexpr int32 gradient_count = C.head_dim / 2;
  static constexpr int32 unit_count = core::dq_unit_floats / 128;
  using Fragments = uint32[Plan::rows / 16][4];

  Plan& plan;
  const BwdParams& params;
  const BwdWork<C>& work;
  const int32 warpgroup;  // 0 or 1
  RingState<2> state;
  RingState<1> dq_state;

  Fragments weights;         // P^T as operand A
  Fragments dweights;        // dS^T as operand A
  float dk[gradient_count];  // [64 x head_dim]
  float dv[gradient_count];

  __forceinline__ int32 thread() const { return static_cast<int32>(threadIdx.x % 128); }
  // Its row of the warpgroup's keys, seen from the block's first.
  __forceinline__ int32 own_key() const {
    return 64 * warpgroup + WgmmaAccumulator::row(thread(), 0);
  }
  __forceinline__ SharedAddress stage_of(const uint8* memory, uint32 bytes) const {
    return shared_address(memory) + static_cast<uint32>(state.stage) * bytes;
  }

  // -- Products

  // C = A B^T: the warpgroup's 64 keys of `keys` with the rows of `queries`, both K-major.
  __forceinline__ void issue_scores(float (&c)[score_count], SharedAddress keys,
                                    SharedAddress queries) {
    const uint64 a = wgmma_descriptor(
        Swizzle::b128, (keys + warpgroup * (64 * Plan::row_bytes)).value, 0, Plan::group_bytes);
    const uint64 b = wgmma_descriptor(Swizzle::b128, queries.value, 0, Plan::group_bytes);
#pragma unroll
    for (int32 step = 0; step < C.head_dim / 16; ++step) {
      const uint32 panel = step / 4;
      const uint32 inside = (step % 4) * 32;  // 16 elements
      bwd_scores(c, descriptor_advance(a, panel * Plan::keys * Plan::row_bytes + inside),
                 descriptor_advance(b, panel * Plan::rows * Plan::row_bytes + inside), step > 0);
    }
    wgmma_commit();
  }

  __forceinline__ void issue_dp(float (&dscores)[score_count], SharedAddress dout) {
    plan.dout_ring.wait_full(state);
    wgmma_fence();
    issue_scores(dscores, shared_address(plan.v), dout);
  }

  // C += A B: P^T dout, or dS^T q. A from registers, B MN-major.
  __forceinline__ void issue_gradient(float (&c)[gradient_count], const Fragments& a,
                                      SharedAddress queries) {
    const uint64 b = wgmma_descriptor(Swizzle::b128, queries.value, Plan::rows * Plan::row_bytes,
                                      Plan::group_bytes);
#pragma unroll
    for (int32 step = 0; step < Plan::rows / 16; ++step) {
      bwd_gradient(c, a[step], descriptor_advance(b, step * 16 * Plan::row_bytes), true);
    }
    wgmma_commit();
  }

  // A unit of dq = dS k: with head_dim 64 this warpgroup's half of the rows, with 128 its half of
  // the columns. Both operands MN-major.
  __forceinline__ void issue_dq(float (&dq)[unit_count]) {
    constexpr bool split_rows = C.head_dim == 64;
    constexpr uint32 panel_bytes = Plan::keys * Plan::row_bytes;
    const uint32 own = static_cast<uint32>(warpgroup) * panel_bytes;
    const SharedAddress rows = stage_of(plan.dscores[0], Plan::score_bytes);
    const SharedAddress keys = shared_address(plan.k);
    const uint64 a = wgmma_descriptor(Swizzle::b128, (rows + (split_rows ? own : 0u)).value,
                                      panel_bytes, Plan::group_bytes);
    const uint64 b = wgmma_descriptor(Swizzle::b128, (keys + (split_rows ? 0u : own)).value,
                                      panel_bytes, Plan::group_bytes);
#pragma unroll
    for (int32 step = 0; step < Plan::keys / 16; ++step) {
      bwd_dq(dq, descriptor_advance(a, step * 16 * Plan::row_bytes),
             descriptor_advance(b, step * 16 * Plan::row_bytes), step > 0);
    }
    wgmma_commit();
  }

  // -- What hides

  // True if every key of the block exists and is seen by every row of this one.
  __forceinline__ bool sees_all(int32 block) const {
    const BwdSequence& s = work.sequence;
    const int32 q_begin = block * Plan::rows;
    const int32 q_last = q_begin + Plan::rows - 1;
    const int32 key_last = work.key_begin + Plan::keys - 1;
    const int32 shift = s.length_k - s.length_q;
    bool all = q_last < s.length_q && key_last < s.length_k;
    if constexpr (C.bound_right) all = all && key_last <= q_begin + shift + params.window_right;
    if constexpr (C.bound_left) all = all && work.key_begin >= q_last + shift - params.window_left;
    return all;
  }

  // What a thread's keys and queries see of each other in this block.
  struct Sight {
    int32 key, query;  // of element 0
    int32 length_k, length_q, shift;

    __forceinline__ bool sees(const BwdParams& params, int32 i) const {
      const int32 row = query + 8 * (i / 4) + i % 2;
      const int32 column = key + 8 * ((i / 2) % 2);
      bool seen = row < length_q && column < length_k;
      if constexpr (C.bound_right) seen = seen && column <= row + shift + params.window_right;
      if constexpr (C.bound_left) seen = seen && column >= row + shift - params.window_left;
      return seen;
    }
  };

  __forceinline__ Sight sight(int32 block) const {
    const BwdSequence& s = work.sequence;
    return {work.key_begin + own_key(), block * Plan::rows + WgmmaAccumulator::col(thread(), 0),
            s.length_k, s.length_q, s.length_k - s.length_q};
  }

  // Clears the rows outside [begin, end) of a tile of `count` rows: 0 x NaN is NaN.
  __forceinline__ void clear_rows(SharedAddress tile, int32 count, int32 begin, int32 end) {
    constexpr int32 chunks = 8 * Plan::panels;  // of 16 bytes in a row; swizzling permutes them
    const int32 own = 128 * warpgroup + thread();
#pragma unroll 1
    for (int32 i = own; i < count * chunks; i += 256) {
      const int32 row = i / chunks;
      if (row >= begin && row < end) continue;
      const int32 panel = (i % chunks) / 8;
      store_shared_x4(tile + (panel * count + row) * Plan::row_bytes + (i % 8) * 16,
                      uint4{0, 0, 0, 0});
    }
  }

  __forceinline__ void publish_cleared() {
    fence_proxy_async_shared();
    named_barrier_sync<Plan::clear_barrier, 256>();
  }

  // Keys that no query of the sequence sees, or that do not exist.
  __forceinline__ void clear_unseen_keys() {
    const BwdSequence& s = work.sequence;
    const core::KeyRange seen =
        core::union_range(core::Window{params.window_left, params.window_right}, s.length_q,
                          s.length_k, 0, s.length_q);
    const int32 begin = max(0, static_cast<int32>(seen.begin) - work.key_begin);
    const int32 end = min(Plan::keys, static_cast<int32>(seen.end) - work.key_begin);
    if (begin == 0 && end == Plan::keys) return;
    clear_rows(shared_address(plan.k), Plan::keys, begin, end);
    publish_cleared();
  }

  // Query rows that see none of the keys, or that do not exist.
  __forceinline__ void clear_unseen_rows(int32 block) {
    const int32 begin = max(0, work.row_begin - block * Plan::rows);
    const int32 end = min(Plan::rows, work.row_end - block * Plan::rows);
    if (begin == 0 && end == Plan::rows) return;
    plan.dout_ring.wait_full(state);
    clear_rows(stage_of(plan.q[0], Plan::query_bytes), Plan::rows, begin, end);
    clear_rows(stage_of(plan.dout[0], Plan::query_bytes), Plan::rows, begin, end);
    publish_cleared();
  }

  // -- One block of query rows

  // P, of which hidden elements become zero by selection, whatever they were.
  template <bool hides>
  __forceinline__ void exponentiate(Fragments& kept, const float (&scores)[score_count],
                                    int32 block) {
    const float* lse = plan.lse_log2[state.stage] + WgmmaAccumulator::col(thread(), 0);
    Sight view{};
    if constexpr (hides) view = sight(block);
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const float2 of = *reinterpret_cast<const float2*>(lse + 8 * (i / 4));
      float low = exp2_approximate(fmaf(scores[i], params.scale_log2, -of.x));
      float high = exp2_approximate(fmaf(scores[i + 1], params.scale_log2, -of.y));
      if (hides && !view.sees(params, i)) low = 0.0f;
      if (hides && !view.sees(params, i + 1)) high = 0.0f;
      weights[i / 8][i / 2 % 4] = pack<C.dtype>(low, high);
      kept[i / 8][i / 2 % 4] = register_copy(weights[i / 8][i / 2 % 4]);
    }
  }

  // dS = P (dP - delta), of P as dv takes it, so that the scores need not stay. Zero where P is, if
  // anything is hidden: what dP holds there is garbage.
  template <bool hides>
  __forceinline__ void differentiate(const Fragments& kept, const float (&dscores)[score_count]) {
    const float* delta = plan.delta[state.stage] + WgmmaAccumulator::col(thread(), 0);
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const float2 of = *reinterpret_cast<const float2*>(delta + 8 * (i / 4));
      const float2 weight = unpack<C.dtype>(kept[i / 8][i / 2 % 4]);
      float low = weight.x * (dscores[i] - of.x);
      float high = weight.y * (dscores[i + 1] - of.y);
      if (hides && weight.x == 0.0f) low = 0.0f;
      if (hides && weight.y == 0.0f) high = 0.0f;
      dweights[i / 8][i / 2 % 4] = pack<C.dtype>(low, high);
    }
  }

  // dS^T as it is, [key][query]: operand A of dq, MN-major.
  __forceinline__ void store_dscores() {
    const SharedAddress target = stage_of(plan.dscores[0], Plan::score_bytes);
    const int32 lane = lane_index();
    const int32 key = 64 * warpgroup + 16 * (warp_index() % 4) + StoreMatrixX4::row(lane);
#pragma unroll
    for (int32 step = 0; step < Plan::rows / 16; ++step) {
      const uint32 column = 2 * (16 * step + StoreMatrixX4::col(lane));
      store_matrix_x4(target + panel_offset(Swizzle::b128, Plan::keys, key, column),
                      dweights[step][0], dweights[step][1], dweights[step][2], dweights[step][3]);
    }
    fence_proxy_async_shared();
    named_barrier_sync<Plan::dscores_barrier, 256>();
  }

  // Hands dq to the adding thread: number 4 j + i of a thread is word i of its j-th quad.
  __forceinline__ void store_dq(const float (&dq)[unit_count]) {
    Ring<1>& ring = plan.dq_ring[warpgroup];
    ring.wait_free(dq_state);
    const SharedAddress target = shared_address(plan.dq[0]) +
                                 static_cast<uint32>(warpgroup) * Plan::unit_bytes +
                                 static_cast<uint32>(thread()) * 16;
#pragma unroll
    for (int32 j = 0; j < 8; ++j) {
      store_shared_x4(target + j * (128 * 16),
                      uint4{__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                            __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3])});
    }
    fence_proxy_async_shared();
    mbarrier_arrive(ring.full[0]);
    dq_state.advance();
  }

  __forceinline__ void release(Ring<2>& ring) {
    __syncwarp();
    if (lane_index() == 0) ring.release(state);
  }

  __forceinline__ void step(int32 block) {
    // Not of the struct: nothing of them outlives the step.
    float scores[score_count];
    Fragments kept;              // P again, for while dv has it
    float dscores[score_count];  // dP
    float dq[unit_count];        // [64 x 64]
    plan.q_ring.wait_full(state);
    clear_unseen_rows(block);
    const SharedAddress q = stage_of(plan.q[0], Plan::query_bytes);
    const SharedAddress dout = stage_of(plan.dout[0], Plan::query_bytes);
    wgmma_fence();
    issue_scores(scores, shared_address(plan.k), q);
    // Side by side where the registers hold both.
    constexpr bool together = C.head_dim == 128;
    if constexpr (together) issue_dp(dscores, dout);
    const bool hides = !sees_all(block);
    wgmma_wait<together ? 1 : 0>();
    wgmma_hold(scores);
    if (hides) {
      exponentiate<true>(kept, scores, block);
    } else {
      exponentiate<false>(kept, scores, block);
    }
    if constexpr (!together) issue_dp(dscores, dout);
    // dV runs while dS is made.
    wgmma_fence();
    issue_gradient(dv, weights, dout);
    wgmma_wait<1>();
    wgmma_hold(dscores);
    if (hides) {
      differentiate<true>(kept, dscores);
    } else {
      differentiate<false>(kept, dscores);
    }
    store_dscores();
    wgmma_fence();
    issue_dq(dq);
    issue_gradient(dk, dweights, q);
    wgmma_wait<1>();
    wgmma_hold(dq);
    release(plan.dout_ring);
    store_dq(dq);
    wgmma_wait<0>();
    wgmma_hold(dk);
    wgmma_hold(dv);
    release(plan.q_ring);
    state.advance();
  }

  // -- The end: keys that exist get their gradients, zero if nobody sees them.

  __forceinline__ void store_gradient(const float (&values)[gradient_count], float factor,
                                      int32 key_begin, void* gradient, const int64 (&stride)[4],
                                      int32 columns) const {
    const BwdSequence& s = work.sequence;
    const int64 base = s.batch_k * stride[0] + work.head_kv * stride[2];
    const int32 column = WgmmaAccumulator::col(thread(), 0);
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const int32 key = key_begin + own_key() + 8 * half;
      if (key >= s.capacity_k) continue;
      const int64 row = base + (static_cast<int64>(s.row_k) + key) * stride[1];
#pragma unroll
      for (int32 i = 0; i < gradient_count / 4; ++i) {
        if (column + 8 * i >= columns) continue;
        const bool is_pair = column + 8 * i + 1 < columns;
        const float low = values[4 * i + 2 * half] * factor;
        const float high = values[4 * i + 2 * half + 1] * factor;
        const int64 at = row + (column + 8 * i) * stride[3];
        if constexpr (C.wide) {
          static_cast<float*>(gradient)[at] = low;
          if (is_pair) static_cast<float*>(gradient)[at + stride[3]] = high;
        } else {
          const uint32 both = pack<C.dtype>(low, high);
          auto* const target = static_cast<uint16*>(gradient) + at;
          if (params.paired) {
            *reinterpret_cast<uint32*>(target) = both;
          } else {
            target[0] = static_cast<uint16>(both);
            if (is_pair) target[stride[3]] = static_cast<uint16>(both >> 16);
          }
        }
      }
    }
  }

  __forceinline__ void run() {
#pragma unroll
    for (int32 i = 0; i < gradient_count; ++i) dk[i] = dv[i] = 0.0f;
    if (work.block_begin < work.block_end) {
      mbarrier_wait(plan.keys_full, 0);
      clear_unseen_keys();
      for (int32 i = 0; i < params.group_size; ++i) {
#pragma unroll 1
        for (int32 block = work.block_begin; block < work.block_end; ++block) step(block);
      }
    }
    // One round, but for keys behind the last sequence.
    for (int32 key = work.key_begin; key < work.sequence.capacity_k;
         key += params.key_blocks * Plan::keys) {
      store_gradient(dk, params.scale, key, params.dk, params.dk_stride, params.head_dim);
      store_gradient(dv, 1.0f, key, params.dv, params.dv_stride, params.head_dim_v);
    }
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
    plan.work.find(params);
    plan.q_ring.init(1, Plan::consumer_warps);
    plan.dout_ring.init(1, Plan::consumer_warps);
    for (Ring<1>& ring : plan.dq_ring) ring.init(128, 1);
    mbarrier_init(plan.keys_full, 1);
    fence_mbarrier_init();
    tma_prefetch_map(&params.q);
    tma_prefetch_map(&params.dout_map);
  }
  __syncthreads();
  if (!plan.work.exists()) return;

  const int32 warp = warp_index();
  if (warp < 4) {
    registers_shrink<24>();
    if (warp == 0 && elect_one()) BwdLoad<C>{plan, params, plan.work}.run();
    if (warp == 1 && elect_one()) BwdAdd<C>{plan, params, plan.work}.run();
  } else {
    registers_grow<240>();
    BwdCompute<C>{plan, params, plan.work, warp / 4 - 1}.run();
  }
}

}  // namespace fovea::device
