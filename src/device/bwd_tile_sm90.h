// What a computing warpgroup of the backward kernel for Hopper does besides multiplying: the
// softmax and its derivative on fragments, clearing of what hides, storing.
//
// Scores are transposed, [keys x queries]: element i of a register array is key
// WgmmaAccumulator::row() and query WgmmaAccumulator::col() of the warpgroup's part of the tile.
#pragma once

#include "device/bwd_plan_sm90.h"
#include "device/bwd_scores.h"
#include "device/wgmma.h"

namespace fovea::device {

template <bool wide>
struct GradientElement {
  using Type = uint16;
};
template <>
struct GradientElement<true> {
  using Type = float;
};

template <BwdConfig C>
struct BwdTile {
  using Plan = BwdPlan<C>;
  static constexpr bool split = C.split_products;
  static constexpr int32 score_count = Plan::rows / 2;
  using Fragments = uint32[Plan::rows / 16][4];

  Plan& plan;
  const BwdParams& params;
  const int32 warpgroup;  // 0 or 1
  RingState<2> work_state;
  RingState<2> q_state;
  RingState<1> dq_state;
  // The blocks of rows that see everything, in registers where there are any left.
  int32 open_begin = 0, open_end = 0;
  int32 block_end = 0;

  __forceinline__ const BwdWork<C>& work() const { return plan.work[work_state.stage]; }

  // The next block of keys; false behind the last.
  __forceinline__ bool begin_work() {
    plan.work_ring.wait_full(work_state);
    if (work().last) return false;
    open_begin = work().open_begin;
    open_end = work().open_end;
    block_end = work().block_end;
    return true;
  }
  __forceinline__ void end_work() {
    __syncwarp();
    if (lane_index() == 0) plan.work_ring.release(work_state);
    work_state.advance();
  }

  __forceinline__ void wait_keys() { plan.keys_ring.wait_full(keys_state(work_state)); }
  __forceinline__ void release_keys() {
    __syncwarp();
    if (lane_index() == 0) plan.keys_ring.release(keys_state(work_state));
  }

  __forceinline__ int32 thread() const { return static_cast<int32>(threadIdx.x % 128); }
  // Of the block's keys, the first of the warpgroup; of keys and queries, those of the thread's
  // element 0.
  __forceinline__ int32 first_key() const { return split ? 0 : 64 * warpgroup; }
  __forceinline__ int32 own_key() const { return first_key() + WgmmaAccumulator::row(thread(), 0); }
  __forceinline__ int32 own_query() const { return WgmmaAccumulator::col(thread(), 0); }

  // dout comes with q: of the same step, in a ring of as many stages or of one.
  __forceinline__ RingState<Plan::dout_stages> dout_state() const {
    if constexpr (Plan::dout_stages == 1) return {0, static_cast<uint32>(q_state.stage)};
    return {q_state.stage, q_state.parity};
  }

  __forceinline__ SharedAddress q_tile() const {
    return shared_address(plan.q[0]) + static_cast<uint32>(q_state.stage) * Plan::q_bytes;
  }
  __forceinline__ SharedAddress dout_tile() const {
    return shared_address(plan.dout[0]) +
           static_cast<uint32>(dout_state().stage) * Plan::dout_bytes;
  }
  // dS of this step.
  __forceinline__ SharedAddress dscores_tile() const {
    return shared_address(plan.scores[0]) + static_cast<uint32>(q_state.stage) * Plan::score_bytes;
  }

  __forceinline__ void release_q() {
    __syncwarp();
    if (lane_index() == 0) plan.q_ring.release(q_state);
    q_state.advance();
  }
  __forceinline__ void release_dout(RingState<Plan::dout_stages> state) {
    __syncwarp();
    if (lane_index() == 0) plan.dout_ring.release(state);
  }

  // -- What hides

  // True if every key of the CTA exists and is seen by every row of the block by its position.
  __forceinline__ bool sees_all(int32 block) const {
    if constexpr (core::modifies_backward(C)) {
      return block >= work().open_begin && block < work().open_end;
    }
    return block >= open_begin && block < open_end;
  }

  // What a thread's keys and queries see of each other in this block, by position: bounds of what
  // an element has beyond element 0, which the compiler knows.
  struct Sight {
    int32 key, query;               // of element 0
    int32 keys_left, queries_left;  // from there to the end
    int32 right, left;  // bounds of (key - query) of the element, less that of element 0

    __forceinline__ bool sees(int32 i) const {
      const int32 query_step = 8 * (i / 4) + i % 2;
      const int32 key_step = 8 * ((i / 2) % 2);
      bool seen = query_step < queries_left && key_step < keys_left;
      if constexpr (C.bound_right) seen = seen && key_step - query_step <= right;
      if constexpr (C.bound_left) seen = seen && key_step - query_step >= left;
      return seen;
    }
  };

  __forceinline__ Sight sight(int32 block) const {
    const BwdSequence& s = work().sequence;
    const int32 key = work().key_begin + own_key();
    const int32 query = block * Plan::rows + own_query();
    const int32 diagonal = query + s.length_k - s.length_q - key;
    return {key,
            query,
            s.length_k - key,
            s.length_q - query,
            diagonal + params.window_right,
            diagonal - params.window_left};
  }

  // Clears a row's chunks of 16 bytes, of which swizzling permutes eight at a time: 0 x NaN is NaN.
  static __forceinline__ void clear_row(SharedAddress tile, int32 panels, int32 count, int32 row) {
#pragma unroll 1
    for (int32 i = 0; i < 8 * panels; ++i) {
      store_shared_x4(tile + (i / 8 * count + row) * Plan::row_bytes + i % 8 * 16,
                      uint4{0, 0, 0, 0});
    }
  }

  __forceinline__ void publish_cleared() {
    fence_proxy_async_shared();
    named_barrier_sync<Plan::clear_barrier, 256>();
  }

  // Keys that no query of the sequence sees, or that do not exist; of the peer's, too, whose dS is
  // multiplied by them. What bias and mask hide is looked for only where it would do harm.
  __forceinline__ void clear_unseen_keys() {
    bool cleared = clear_keys(shared_address(plan.k), Plan::panels, work().key_begin);
    if constexpr (C.pair) {
      cleared |= clear_keys(shared_address(plan.peer_k), Plan::panels / 2, peer_key_begin(work()));
    }
    if (cleared) publish_cleared();
  }

  // Whether any may have been cleared.
  __forceinline__ bool clear_keys(SharedAddress keys, int32 panels, int32 key_begin) {
    const BwdSequence& s = work().sequence;
    const core::KeyRange seen =
        core::union_range(core::Window{params.window_left, params.window_right}, s.length_q,
                          s.length_k, 0, s.length_q);
    const int32 begin = max(0, static_cast<int32>(seen.begin) - key_begin);
    const int32 end = min(Plan::keys, static_cast<int32>(seen.end) - key_begin);
    if (!core::hides_anywhere(C) && begin == 0 && end == Plan::keys) return false;
    const int32 row = 128 * warpgroup + thread();
    if (row < Plan::keys) {
      bool clear = row < begin || row >= end;
      if constexpr (core::hides_anywhere(C)) {
        const SharedAddress key = keys + row * Plan::row_bytes;
        clear = clear || (is_special<C>(key, panels, Plan::keys * Plan::row_bytes) &&
                          !is_seen<C>(params, s, work().head_kv, key_begin + row));
      }
      if (clear) clear_row(keys, panels, Plan::keys, row);
    }
    return true;
  }

  // Query rows [begin, end) of a block; what else it has sees none of the keys, or does not exist.
  struct SeenRows {
    int32 begin, end;
    bool all;
  };
  __forceinline__ SeenRows seen_rows(int32 block) const {
    if (!core::hides_anywhere(C) && sees_all(block)) return {0, Plan::rows, true};
    const int32 begin = max(0, work().row_begin - block * Plan::rows);
    const int32 end = min(Plan::rows, work().row_end - block * Plan::rows);
    bool any = begin > 0 || end < Plan::rows;
    if constexpr (core::hides_anywhere(C)) {
      const float* lse = plan.lse_log2[q_state.stage];
#pragma unroll
      for (int32 i = 0; i < Plan::rows; i += 32) {
        any = __any_sync(0xffffffffu, any || lse[i + lane_index()] == infinity);
      }
    }
    return {begin, end, !any};
  }

  // Clears the others in a tile of q or dout, of which this thread has row `row`.
  __forceinline__ void clear_unseen(const SeenRows& seen, SharedAddress tile, int32 panels,
                                    int32 row) const {
    if (row >= Plan::rows) return;
    bool clear = row < seen.begin || row >= seen.end;
    if constexpr (core::hides_anywhere(C)) {
      clear = clear || plan.lse_log2[q_state.stage][row] == infinity;
    }
    if (clear) clear_row(tile, panels, Plan::rows, row);
  }

  // Both tiles of a block, by both warpgroups.
  __forceinline__ void clear_unseen_rows(int32 block) {
    const SeenRows seen = seen_rows(block);
    if (seen.all) return;
    plan.dout_ring.wait_full(dout_state());
    const int32 row = 128 * warpgroup + thread();
    clear_unseen(seen, q_tile(), Plan::panels, row);
    clear_unseen(seen, dout_tile(), Plan::panels_v, row);
    publish_cleared();
  }

  // -- The softmax and its derivative

  // A number for each of the thread's queries: those of elements 4 i and 4 i + 1 (mod 4) in [i].
  using RowNumbers = float2[Plan::rows / 8];

  static __forceinline__ void read_rows(RowNumbers& numbers, const float* from) {
#pragma unroll
    for (int32 i = 0; i < Plan::rows / 8; ++i) {
      numbers[i] = *reinterpret_cast<const float2*>(from + 8 * i);
    }
  }

  // lse and delta of the thread's queries.
  __forceinline__ const float* own_lse() const {
    return plan.lse_log2[q_state.stage] + own_query();
  }
  __forceinline__ const float* own_delta() const {
    return plan.delta[dout_state().stage] + own_query();
  }

  // P, of which hidden elements become zero by selection, whatever they were.
  template <bool hides>
  __forceinline__ void exponentiate(Fragments& weights, const float (&scores)[score_count],
                                    const RowNumbers& lse, int32 block) {
    Sight view{};
    if constexpr (hides) view = sight(block);
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const float2 of = lse[i / 4];
      float low = exp2_approximate(fmaf(scores[i], params.scale_log2, -of.x));
      float high = exp2_approximate(fmaf(scores[i + 1], params.scale_log2, -of.y));
      if (hides && !view.sees(i)) low = 0.0f;
      if (hides && !view.sees(i + 1)) high = 0.0f;
      weights[i / 8][i / 2 % 4] = pack<C.dtype>(low, high);
    }
  }

  // Which of elements 4 j .. 4 j + 3 dropout takes, a bit each. Four lanes hold four neighbouring
  // keys, which share random words, of the same two queries, and eight keys on again: each draws
  // the words of one query and four keys for all of them.
  __forceinline__ uint32 dropped(const BwdScores<C>& of, const Sight& view, int32 j) const {
    const int32 own = lane_index() / 4 % 4;
    const core::Philox4 drawn =
        of.words(view.query + 8 * j + own % 2, (view.key + 8 * (own / 2)) / 4);
    uint32 bits = 0;
#pragma unroll
    for (int32 step = 0; step < 4; ++step) {
      const int32 other = own ^ step;
      const uint32 low = other % 2 == 0 ? drawn.word[0] : drawn.word[1];
      const uint32 high = other % 2 == 0 ? drawn.word[2] : drawn.word[3];
      const uint32 word = __shfl_xor_sync(0xffffffffu, other < 2 ? low : high, 4 * step);
      bits |= static_cast<uint32>(word < params.dropout_threshold) << other;
    }
    return bits;
  }

  // The same where scores are modified. What is kept is P times the slope of the score, its sign
  // set where dropout takes the weight.
  __forceinline__ void exponentiate_modified(Fragments& weights, Fragments& kept,
                                             const float (&scores)[score_count], int32 head,
                                             int32 block) {
    const float* lse = own_lse();
    const Sight view = sight(block);
    const BwdScores<C> of(params, work().sequence, head);
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const float2 base = *reinterpret_cast<const float2*>(lse + 8 * (i / 4));
      uint32 bits = 0;
      if constexpr (C.has_dropout) bits = dropped(of, view, i / 4) >> i % 4;
      float weight[2];
      float slope[2];
#pragma unroll
      for (int32 e = 0; e < 2; ++e) {
        const float2 x =
            of.score(scores[i + e], view.query + 8 * (i / 4) + e, view.key + 8 * ((i / 2) % 2));
        const float lse_log2 = e == 0 ? base.x : base.y;
        weight[e] = exp2_approximate(x.x - lse_log2);
        slope[e] = weight[e] * x.y;
        // By selection: q of rows that see nothing may hold anything.
        if (!view.sees(i + e) || x.x == -infinity || lse_log2 == infinity) {
          weight[e] = slope[e] = 0.0f;
        }
        if constexpr (C.has_dropout) {
          weight[e] = (bits >> e & 1u) != 0 ? 0.0f : weight[e] * params.keep_scale;
        }
      }
      const uint32 packed = pack<C.dtype>(weight[0], weight[1]);
      uint32 copy = register_copy(packed);
      if constexpr (C.has_softcap || C.has_dropout) {
        copy = pack<C.dtype>(slope[0], slope[1]) | (bits & 1u) << 15 | (bits & 2u) << 30;
      }
      weights[i / 8][i / 2 % 4] = packed;
      kept[i / 8][i / 2 % 4] = copy;
    }
  }

  // `lse` is not read where scores are modified.
  __forceinline__ void find_weights(Fragments& weights, Fragments& kept,
                                    const float (&scores)[score_count], const RowNumbers& lse,
                                    int32 head, int32 block, bool hides) {
    if constexpr (core::modifies_backward(C)) {
      exponentiate_modified(weights, kept, scores, head, block);
      return;
    }
    if (hides) {
      exponentiate<true>(weights, scores, lse, block);
    } else {
      exponentiate<false>(weights, scores, lse, block);
    }
#pragma unroll
    for (int32 i = 0; i < Plan::rows / 16; ++i) {
#pragma unroll
      for (int32 j = 0; j < 4; ++j) kept[i][j] = weights[i][j];
    }
  }

  // dP of an element through dropout.
  __forceinline__ float passed(float dweight, uint32 sign) const {
    if constexpr (!C.has_dropout) return dweight;
    return sign != 0 ? 0.0f : dweight * params.keep_scale;
  }

  // dS = P (dP - delta), of P as dv takes it, so that the scores need not stay. Zero where P is, if
  // anything is hidden: what dP holds there is garbage.
  template <bool hides>
  __forceinline__ void differentiate(Fragments& dweights, const Fragments& kept,
                                     const float (&dscores)[score_count], const RowNumbers& delta) {
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const float2 of = delta[i / 4];
      const uint32 word = kept[i / 8][i / 2 % 4];
      const float2 weight = unpack<C.dtype>(C.has_dropout ? word & 0x7fff7fffu : word);
      float low = weight.x * (passed(dscores[i], word & 0x8000u) - of.x);
      float high = weight.y * (passed(dscores[i + 1], word & 0x80000000u) - of.y);
      if (hides && weight.x == 0.0f) low = 0.0f;
      if (hides && weight.y == 0.0f) high = 0.0f;
      dweights[i / 8][i / 2 % 4] = pack<C.dtype>(low, high);
    }
  }

  __forceinline__ void find_dscores(Fragments& dweights, const Fragments& kept,
                                    const float (&dscores)[score_count], const RowNumbers& delta,
                                    bool hides) {
    if (core::modifies_backward(C) || hides) {
      differentiate<true>(dweights, kept, dscores, delta);
    } else {
      differentiate<false>(dweights, kept, dscores, delta);
    }
  }

  // -- The same where nothing modifies scores and there are registers for P in fp32 beside dP: both
  // become operands at the end, so that neither is packed and unpacked on the way.

  template <bool hides>
  __forceinline__ void exponentiate_in_place(float (&scores)[score_count], const RowNumbers& lse,
                                             int32 block) {
    Sight view{};
    if constexpr (hides) view = sight(block);
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const float2 of = lse[i / 4];
      scores[i] = exp2_approximate(fmaf(scores[i], params.scale_log2, -of.x));
      scores[i + 1] = exp2_approximate(fmaf(scores[i + 1], params.scale_log2, -of.y));
      if (hides && !view.sees(i)) scores[i] = 0.0f;
      if (hides && !view.sees(i + 1)) scores[i + 1] = 0.0f;
    }
  }

  template <bool hides>
  __forceinline__ void differentiate_both(Fragments& weights, Fragments& dweights,
                                          const float (&p)[score_count],
                                          const float (&dscores)[score_count],
                                          const RowNumbers& delta) {
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const float2 of = delta[i / 4];
      float low = p[i] * (dscores[i] - of.x);
      float high = p[i + 1] * (dscores[i + 1] - of.y);
      if (hides && p[i] == 0.0f) low = 0.0f;
      if (hides && p[i + 1] == 0.0f) high = 0.0f;
      weights[i / 8][i / 2 % 4] = pack<C.dtype>(p[i], p[i + 1]);
      dweights[i / 8][i / 2 % 4] = pack<C.dtype>(low, high);
    }
  }

  __forceinline__ void find_weights_in_place(float (&scores)[score_count], const RowNumbers& lse,
                                             int32 block, bool hides) {
    if (hides) {
      exponentiate_in_place<true>(scores, lse, block);
    } else {
      exponentiate_in_place<false>(scores, lse, block);
    }
  }

  __forceinline__ void find_both(Fragments& weights, Fragments& dweights,
                                 const float (&p)[score_count], const float (&dscores)[score_count],
                                 const RowNumbers& delta, bool hides) {
    if (hides) {
      differentiate_both<true>(weights, dweights, p, dscores, delta);
    } else {
      differentiate_both<false>(weights, dweights, p, dscores, delta);
    }
  }

  // Where a lane's row of the step-th 16 queries of P^T or dS^T lies in their tile, [key][query].
  __forceinline__ SharedAddress score_address(SharedAddress tile, int32 step) const {
    const int32 key = first_key() + 16 * (warp_index() % 4) + StoreMatrixX4::row(lane_index());
    return tile + panel_offset(Swizzle::b128, Plan::keys, key,
                               2 * (16 * step + StoreMatrixX4::col(lane_index())));
  }
  __forceinline__ void store_scores(SharedAddress target, const Fragments& values) const {
#pragma unroll
    for (int32 step = 0; step < Plan::rows / 16; ++step) {
      store_matrix_x4(score_address(target, step), values[step][0], values[step][1],
                      values[step][2], values[step][3]);
    }
  }
  __forceinline__ void load_scores(Fragments& values, SharedAddress source) const {
#pragma unroll
    for (int32 step = 0; step < Plan::rows / 16; ++step) {
      load_matrix_x4(values[step], score_address(source, step));
    }
  }

  __forceinline__ void publish_scores() {
    fence_proxy_async_shared();
    named_barrier_sync<Plan::scores_barrier, 256>();
  }

  // To the warpgroup of dq.
  __forceinline__ void hand_scores_over() {
    fence_proxy_async_shared();
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(plan.scores_ring.full[q_state.stage]);
  }

  // Hands the warpgroup's j-th unit of dq to the adding thread: number 4 q + i of a thread is word
  // i of its q-th quad.
  __forceinline__ void add_dq(const float (&dq)[core::dq_unit_floats / 128], int32 j) {
    const int32 buffer = warpgroup + j;
    Ring<1>& ring = plan.dq_ring[buffer];
    ring.wait_free(dq_state);
    const SharedAddress target = shared_address(plan.dq[0]) +
                                 static_cast<uint32>(buffer) * Plan::unit_bytes +
                                 static_cast<uint32>(thread()) * 16;
#pragma unroll
    for (int32 i = 0; i < core::dq_unit_floats / 128; i += 4) {
      store_shared_x4(target + i * (128 * 4),
                      uint4{__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                            __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])});
    }
    fence_proxy_async_shared();
    mbarrier_arrive(ring.full[0]);
  }

  // -- The end: keys that exist get their gradients, zero if nobody sees them.

  struct Target {
    void* data;
    const int64 (&stride)[4];
    int32 columns;  // of the tensor
    float factor;
  };

  // 16 rows of 128 bytes for each warp, of shared memory that nobody else uses now: that of dS, or,
  // where products are split, the warpgroup's first buffer of dq.
  static constexpr uint32 part_bytes = 16 * Plan::row_bytes;
  static constexpr int32 part_columns = C.wide ? 32 : 64;
  __forceinline__ uint8* part() const {
    const auto warp = static_cast<uint32>(thread() / 32);
    if constexpr (split) return plan.dq[warpgroup] + warp * part_bytes;
    return plan.scores[0] + (4 * warpgroup + warp) * part_bytes;
  }

  // Numbers `from` .. of the accumulators, as they are stored.
  template <int32 count>
  __forceinline__ void fill_part(const float (&values)[count], int32 from, float factor) const {
    const int32 lane = lane_index();
    if constexpr (C.wide) {
#pragma unroll
      for (int32 i = 0; i < part_columns / 2; i += 2) {
        const int32 row = WgmmaAccumulator::row(lane, i);
        const int32 column = WgmmaAccumulator::col(lane, i);
        *reinterpret_cast<float2*>(
            part() + panel_offset(Swizzle::b128, 16, row, static_cast<uint32>(column) * 4)) =
            float2{values[from + i] * factor, values[from + i + 1] * factor};
      }
    } else {
#pragma unroll
      for (int32 step = 0; step < 4; ++step) {
        uint32 words[4];
#pragma unroll
        for (int32 i = 0; i < 4; ++i) {
          const int32 at = from + 8 * step + 2 * i;
          words[i] = pack<C.dtype>(values[at] * factor, values[at + 1] * factor);
        }
        store_matrix_x4(
            shared_address(part()) + panel_offset(Swizzle::b128, 16, StoreMatrixX4::row(lane),
                                                  2 * (16 * step + StoreMatrixX4::col(lane))),
            words[0], words[1], words[2], words[3]);
      }
    }
  }

  // The part's rows are those of 16 keys: by words of 16 bytes, or one number after the other.
  __forceinline__ void empty_part(const Target& to, int32 first_key, int32 first_column) const {
    using Element = typename GradientElement<C.wide>::Type;
    const BwdSequence& s = work().sequence;
    const int32 keys = s.capacity_k - first_key;
    const int32 columns = to.columns - first_column;
    Element* const data = static_cast<Element*>(to.data) + s.batch_k * to.stride[0] +
                          (static_cast<int64>(s.row_k) + first_key) * to.stride[1] +
                          work().head_kv * to.stride[2] + first_column * to.stride[3];
    if (params.dkv_in_words) {
      const int32 column = lane_index() % 8 * (16 / static_cast<int32>(sizeof(Element)));
      if (column >= columns) return;
      const int32 row = lane_index() / 8;
      uint4 words[4];
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        words[i] = *reinterpret_cast<const uint4*>(
            part() + panel_offset(Swizzle::b128, 16, row + 4 * i, lane_index() % 8 * 16));
      }
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        if (row + 4 * i >= keys) break;
        *reinterpret_cast<uint4*>(data + (row + 4 * i) * to.stride[1] + column) = words[i];
      }
      return;
    }
#pragma unroll 1
    for (int32 i = lane_index(); i < 16 * part_columns; i += 32) {
      const int32 row = i / part_columns;
      const int32 column = i % part_columns;
      if (row >= keys || column >= columns) continue;
      data[row * to.stride[1] + column * to.stride[3]] = *reinterpret_cast<const Element*>(
          part() +
          panel_offset(Swizzle::b128, 16, row,
                       static_cast<uint32>(column) * static_cast<uint32>(sizeof(Element))));
    }
  }

  // The gradients of the warpgroup's keys.
  template <int32 count>
  __forceinline__ void store_keys(const float (&values)[count], const Target& to) const {
    // One round, but for keys behind the last sequence.
    for (int32 key = work().key_begin; key < work().sequence.capacity_k;
         key += params.key_blocks * Plan::keys) {
#pragma unroll
      for (int32 from = 0; from < count; from += part_columns / 2) {
        fill_part(values, from, to.factor);
        __syncwarp();
        empty_part(to, key + first_key() + 16 * (warp_index() % 4), 2 * from);
        __syncwarp();
      }
    }
  }

  template <int32 count>
  __forceinline__ void store_dk(const float (&dk)[count]) const {
    store_keys(dk, Target{params.dk, params.dk_stride, params.head_dim, params.scale});
  }
  template <int32 count>
  __forceinline__ void store_dv(const float (&dv)[count]) const {
    store_keys(dv, Target{params.dv, params.dv_stride, params.head_dim_v, 1.0f});
  }
};

}  // namespace fovea::device
