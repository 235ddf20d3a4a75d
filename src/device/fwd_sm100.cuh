// Attention, forward, on Blackwell: out = softmax(transform(q k^T), where visible) v, and its LSE.
//
// Two tiles of 128 query rows share each tile of keys and take turns: while one's scores are in the
// tensor cores, the other's are exponentiated. Budget of 128 rows x 128 keys x head_dim 128, in
// cycles of a multiprocessor (docs/kernels/fwd_sm100.md; nothing here has run on the chip yet):
//
//   tensor cores    2 x 2 x 128 x 128 x 128 FLOP at 8192 a cycle                    1024
//   exponentials    128 x 128 at 16 a cycle, less 1/8 by polynomial                  896
//   FMA             2 a score, 6 more where by polynomial, 128 wide                  352
//   shared memory   q and k, then v, 32 bytes deep each, at 128 bytes a cycle        768
//
// Roles, by warp:   load (TMA)    multiply (one thread)    softmax (a row each thread, 128 each)
//                   correct (128 threads)    store (TMA)
//
// Scores, weights and output are in tensor memory; weights lie over the half of the scores that has
// been read by then, so that the others' scores can still be taken again. The softmax keeps no
// running maximum in tiles that no mask touches: docs/kernels/softmax.md.
#pragma once

#include "device/fwd_exact_row.h"
#include "device/fwd_load_sm100.h"
#include "device/fwd_plan_sm100.h"
#include "device/scores.h"
#include "device/tcgen05.h"

namespace fovea::device {

// ---- Role: multiply, one thread -----------------------------------------------------------------
//
// Two query tiles:  S0 S1 | O0 S0 O1 S1 | O0 S0 O1 S1 | ... | O0 O1     S: scores of a block
// One:              S     | S O         | S O         | ... | O         O: output of the one before

template <Fwd100Config C>
struct Multiply100 {
  using Plan = Fwd100Plan<C>;
  static constexpr TensorType type = C.dtype == DType::bf16 ? TensorType::bf16 : TensorType::f16;
  static constexpr int32 rows = core::query_tile_rows * core::ctas_of(C);

  Plan& plan;
  const TensorAddress base;
  RingState<C.stages> state;
  RingState<2> tile_state;
  RingState<1> q_states[C.query_tiles];
  RingState<1> output_states[C.query_tiles];
  int32 scored[C.query_tiles] = {};  // tiles of keys whose scores, and whose output, are issued
  int32 added[C.query_tiles] = {};

  __forceinline__ RingState<C.stages> take() {
    const RingState<C.stages> taken = state;
    state.advance();
    return taken;
  }

  __forceinline__ void scores(int32 t, const RingState<C.stages>& keys) {
    const int32 n = scored[t]++;
    if constexpr (!C.issue_order && !core::weights_apart(C)) {
      // The weights that these scores overwrite have been multiplied.
      const int32 before = n - (C.query_tiles == 2 ? 1 : 2);
      if (before >= 0) wait_pair<C>(plan.output_done[t], parity_of(before));
    }
    tcgen05_fence_after();
    constexpr uint32 instruction =
        tcgen05_instruction({.a = type, .b = type, .m = rows, .n = C.tile_k});
    uint64 q =
        tcgen05_descriptor(Swizzle::b128, shared_address(plan.q[t]).value, 0, Plan::group_bytes);
    // No instruction: the descriptors that follow from it are not worth registers all along the
    // tile.
    asm volatile("" : "+l"(q));
    const uint64 k = tcgen05_descriptor(Swizzle::b128, shared_address(plan.keys[keys.stage]).value,
                                        0, Plan::group_bytes);
    const int32 slot = slot_of<C>(t, n);
    const TensorAddress to = base + core::score_column(0) + 128 * slot;
#pragma unroll
    for (int32 step = 0; step < C.head_dim / 16; ++step) {
      const uint32 along = step % 4 * 32;  // 16 elements, in panels of 64
      const uint64 q_step = descriptor_advance(q, step / 4 * Plan::panel_bytes + along);
      const uint64 k_step = descriptor_advance(k, step / 4 * Plan::key_panel_bytes + along);
      if constexpr (C.cta_pair) {
        tcgen05_mma_f16_ss_cta2(to, q_step, k_step, instruction, step > 0);
      } else {
        tcgen05_mma_f16_ss_cta1(to, q_step, k_step, instruction, step > 0);
      }
    }
    commit<C>(plan.scores_full[slot]);
  }

  template <int32 first, int32 last>  // keys
  __forceinline__ void add(int32 t, int32 slot, const RingState<C.stages>& values,
                           bool accumulate) {
    constexpr uint32 instruction = tcgen05_instruction(
        {.a = type, .b = type, .m = rows, .n = C.head_dim_v, .b_mn_major = true});
    const uint64 v =
        tcgen05_descriptor(Swizzle::b128, shared_address(plan.keys[values.stage]).value,
                           Plan::panel_bytes, Plan::group_bytes);
    const TensorAddress to = base + core::output_column(C, 0) + C.head_dim_v * t;
    const TensorAddress weights = base + core::weight_column(C, 0) +
                                  (core::weight_column(C, 1) - core::weight_column(C, 0)) * slot;
    tcgen05_fence_after();
#pragma unroll
    for (int32 step = first / 16; step < last / 16; ++step) {
      const uint64 v_step = descriptor_advance(v, step * 16 * Plan::row_bytes);
      const bool adds = accumulate || step > 0;
      if constexpr (C.cta_pair) {
        tcgen05_mma_f16_ts_cta2(to, weights + 8 * step, v_step, instruction, adds);
      } else {
        tcgen05_mma_f16_ts_cta1(to, weights + 8 * step, v_step, instruction, adds);
      }
    }
  }

  __forceinline__ void output(int32 t, const RingState<C.stages>& values, bool first, bool last) {
    const int32 n = added[t]++;
    const int32 slot = slot_of<C>(t, n);
    const uint32 parity = slot_parity<C>(n);
    if (first) plan.output_ring[t].wait_free(output_states[t]);
    if constexpr (core::is_corrected(C)) wait_pair<C>(plan.output_ready[slot], parity);
    wait_pair<C>(plan.weights_full[slot][0], parity);
    add<0, C.first_part>(t, slot, values, !first);
    if constexpr (!core::is_corrected(C)) commit<C>(plan.first_done[t]);
    wait_pair<C>(plan.weights_full[slot][1], parity);
    add<C.first_part, C.tile_k>(t, slot, values, true);
    commit<C>(plan.output_done[t]);
    if (last) {
      commit<C>(plan.output_ring[t].full[0]);
      output_states[t].advance();
    }
  }

  // The scores of one query tile, if it visits the block; q goes with the last of them.
  __forceinline__ void scores_of(const Fwd100Tile& tile, int32 t, int32 block,
                                 const RingState<C.stages>& keys) {
    const KeySpan& span = tile.spans[t];
    if (!visits(span, block)) return;
    if (block == first_of(tile, span)) plan.q_ring[t].wait_full(q_states[t]);
    scores(t, keys);
    if (block == last_of(tile, span)) {
      if constexpr (C.out_apart || !C.tma_out) commit<C>(plan.q_ring[t].free[0]);
      q_states[t].advance();
    }
  }

  __forceinline__ void output_of(const Fwd100Tile& tile, int32 t, int32 block,
                                 const RingState<C.stages>& values) {
    const KeySpan& span = tile.spans[t];
    if (visits(span, block)) {
      output(t, values, block == first_of(tile, span), block == last_of(tile, span));
    }
  }

  // Step n: the scores of the n-th block, the output of the one before.
  __forceinline__ void step_of_two(const Fwd100Tile& tile, int32 n) {
    RingState<C.stages> keys, values;
    const bool has_values = n > 0;
    const bool has_keys = n < tile.count();
    if (has_values) values = take();
    if (has_keys) keys = take();
    if (has_values) plan.key_ring.wait_full(values);
#pragma unroll
    for (int32 t = 0; t < 2; ++t) {
      if (has_values) output_of(tile, t, block_at(tile, n - 1), values);
      if (has_values && t == 1) commit<C>(plan.key_ring.free[values.stage]);
      if (has_keys && t == 0) plan.key_ring.wait_full(keys);
      if (has_keys) scores_of(tile, t, block_at(tile, n), keys);
    }
    if (has_keys) commit<C>(plan.key_ring.free[keys.stage]);
  }

  __forceinline__ void step_of_one(const Fwd100Tile& tile, int32 n) {
    if (n < tile.count()) {
      const RingState<C.stages> keys = take();
      plan.key_ring.wait_full(keys);
      scores_of(tile, 0, block_at(tile, n), keys);
      commit<C>(plan.key_ring.free[keys.stage]);
    }
    if (n > 0) {
      const RingState<C.stages> values = take();
      plan.key_ring.wait_full(values);
      output_of(tile, 0, block_at(tile, n - 1), values);
      commit<C>(plan.key_ring.free[values.stage]);
    }
  }

  __forceinline__ void run() {
    while (const Fwd100Tile* tile = next_tile<C>(plan, tile_state)) {
      if (tile->count() > 0) {
#pragma unroll 1
        for (int32 n = 0; n <= tile->count(); ++n) {
          if constexpr (C.query_tiles == 2) {
            step_of_two(*tile, n);
          } else {
            step_of_one(*tile, n);
          }
        }
      }
      plan.tile_ring.release(tile_state);
      tile_state.advance();
    }
  }
};

// ---- Output in tensor memory --------------------------------------------------------------------

// Output of this warp's rows x factor, a row per lane.
template <Fwd100Config C>
__forceinline__ void scale_output(TensorAddress output, float factor) {
#pragma unroll 1
  for (int32 column = 0; column < C.head_dim_v; column += 16) {
    uint32 words[16];
    tcgen05_load_32x32b_x16(words, output + column);
    tcgen05_wait_load();
    tcgen05_hold(words);
#pragma unroll
    for (int32 i = 0; i < 16; ++i) words[i] = __float_as_uint(__uint_as_float(words[i]) * factor);
    tcgen05_store_32x32b_x16(output + column, words);
  }
  tcgen05_wait_store();
}

// Rows of a warp, all at once.
__forceinline__ void count_rows(const FwdParams& params, int32 which) {
  if (params.counters != nullptr && lane_index() == 0) atomicAdd(params.counters + which, 32ull);
}

// ---- Role: softmax, one warpgroup for a query tile, one thread for a row ------------------------

template <Fwd100Config C>
struct Softmax100 {
  using Plan = Fwd100Plan<C>;
  static constexpr int32 chunk = 32;  // scores in registers at a time

  Plan& plan;
  const FwdParams& params;
  const TensorAddress base;  // this warp's lanes
  const int32 query_tile;
  RingState<2> tile_state;
  RingState<1> row_state;
  int32 seen = 0;        // tiles of keys so far
  bool claimed = false;  // the rows in shared memory are this tile's
  float reference;       // in log2 units: core/softmax.h
  float sum;

  __forceinline__ int32 row() const { return static_cast<int32>(threadIdx.x % 128); }
  __forceinline__ int32 slot() const { return slot_of<C>(query_tile, seen); }
  __forceinline__ TensorAddress scores() const { return base + core::score_column(1) * slot(); }
  __forceinline__ TensorAddress weights() const {
    return base + core::weight_column(C, 0) +
           (core::weight_column(C, 1) - core::weight_column(C, 0)) * slot();
  }
  __forceinline__ TensorAddress output() const {
    return base + core::output_column(C, 0) + C.head_dim_v * query_tile;
  }

  // -- Scores

  // Where this thread's row stands, and the block of keys it meets.
  struct Place {
    const Fwd100Tile& tile;
    int32 block;
    FwdRow at;
    ScoreRow<C> row;
  };

  __forceinline__ Place place_of(const Fwd100Tile& tile, int32 block) const {
    const FwdRow at = find_row<C>(params, tile, 128 * query_tile + row());
    return {tile, block, at, ScoreRow<C>(params, tile, at)};
  }

  // Columns [first, first + width) of a block, which this thread's row sees.
  struct Visible {
    int32 first;
    uint32 width;
  };

  // Where little is done to a score, the next chunk is loaded while one is in use; elsewhere the
  // other warps' work hides the load, and registers are dearer.
  static constexpr bool loads_ahead =
      (C.transform != ScoreTransform::softcap || core::modifies_scores(C)) && !C.has_dropout;

  // Gives the chunks of scores [first, last) to use(chunk, words).
  template <int32 first, int32 last, typename Use>
  __forceinline__ void stream(Use use) {
    uint32 words[loads_ahead ? 2 : 1][chunk];
    const auto load = [&](int32 i) {
      tcgen05_load_32x32b_x32(words[loads_ahead ? (i - first) % 2 : 0], scores() + chunk * i);
    };
    if constexpr (loads_ahead) load(first);
#pragma unroll
    for (int32 i = first; i < last; ++i) {
      if constexpr (!loads_ahead) load(i);
      uint32(&now)[chunk] = words[loads_ahead ? (i - first) % 2 : 0];
      tcgen05_wait_load();
      tcgen05_hold(now);
      if (loads_ahead && i + 1 < last) load(i + 1);
      use(i, now);
    }
  }

  __forceinline__ float scale() const { return score_scale<C>(params); }

  // Raw scores of a chunk to scores.
  __forceinline__ void transform(uint32 (&words)[chunk]) const {
    if constexpr (C.transform != ScoreTransform::none && !core::modifies_scores(C)) {
#pragma unroll
      for (int32 i = 0; i < chunk; ++i) {
        words[i] = __float_as_uint(transformed<C>(params, __uint_as_float(words[i])));
      }
    }
  }

  // With what position adds, scores are changed where they lie, once for both of the passes that
  // may follow: all at once would take more registers than there are.
  __forceinline__ void modify_scores(const Place& place) const {
    if constexpr (core::modifies_scores(C)) {
      constexpr int32 some = 16;
#pragma unroll 1
      for (int32 first = 0; first < C.tile_k; first += some) {
        uint32 words[some];
        tcgen05_load_32x32b_x16(words, scores() + first);
        tcgen05_wait_load();
        tcgen05_hold(words);
#pragma unroll
        for (int32 i = 0; i < some; ++i) {
          const float score = transformed<C>(params, __uint_as_float(words[i]));
          words[i] = __float_as_uint(place.row.modified(score, place.block * C.tile_k + first + i));
        }
        tcgen05_store_32x32b_x16(scores() + first, words);
      }
      tcgen05_wait_store();
    }
  }

  __forceinline__ Visible visible(const Place& place) const {
    const Fwd100Tile& tile = place.tile;
    int32 begin = 0;
    int32 end = tile.length_k;
    if constexpr (core::is_windowed(C)) {
      const int32 position = place.at.query + tile.length_k - tile.length_q;
      if constexpr (C.bound_left) begin = max(0, position - params.window_left);
      if constexpr (C.bound_right) end = min(end, position + params.window_right + 1);
    }
    return {begin - place.block * C.tile_k, static_cast<uint32>(max(0, end - begin))};
  }

  // Hides what a row does not see: selects, so that what was there reaches nothing.
  __forceinline__ void mask(uint32 (&words)[chunk], int32 index, const Visible& seen_here) const {
#pragma unroll
    for (int32 i = 0; i < chunk; ++i) {
      const auto at = static_cast<uint32>(chunk * index + i - seen_here.first);
      if (at >= seen_here.width) words[i] = __float_as_uint(-infinity);
    }
  }

  // -- Exponentials

  // 2^x as 2^n p(x - n): n is the nearest integer, whose bits come out of an addition's last place,
  // p the polynomial of core/numeric.h. Gives zero from -127 down, and 2^127 from 127 up, where the
  // guard has to hear of it.
  template <bool guarded>
  static __forceinline__ float2 exp2_by_polynomial(float2 x) {
    using Polynomial = core::Exp2Polynomial<C.polynomial_degree>;
    constexpr float magic = 12582912.0f;  // 1.5 x 2^23
    if constexpr (guarded) x = float2{fminf(x.x, 127.0f), fminf(x.y, 127.0f)};
    x = float2{fmaxf(x.x, -127.0f), fmaxf(x.y, -127.0f)};
    const float2 shifted = add_f32x2(x, float2{magic, magic});
    const float2 nearest = add_f32x2(shifted, float2{-magic, -magic});
    const float2 rest = fma_f32x2(nearest, float2{-1.0f, -1.0f}, x);
    constexpr float top = Polynomial::coefficient[C.polynomial_degree - 1];
    float2 p{top, top};
#pragma unroll
    for (int32 i = C.polynomial_degree - 2; i >= 0; --i) {
      const float c = Polynomial::coefficient[i];
      p = fma_f32x2(p, rest, float2{c, c});
    }
    p = fma_f32x2(p, rest, float2{1.0f, 1.0f});
    const auto raise = [](float mantissa, float exponent) {
      return __int_as_float(__float_as_int(mantissa) +
                            static_cast<int32>(__float_as_uint(exponent) << 23));
    };
    return float2{raise(p.x, shifted.x), raise(p.y, shifted.y)};
  }

  // Which pairs of a chunk go by polynomial: the same in every tile, masked or not, and spread so
  // that both paths are busy at all times.
  static constexpr bool by_polynomial(int32 pair) {
    return (pair + 1) * C.polynomial / 16 != pair * C.polynomial / 16;
  }

  // Weights 2^(score x by - base), summed up and packed. Dropped ones count in the sum alone.
  template <bool guarded>
  __forceinline__ void exponentiate(const uint32 (&words)[chunk], float by, float base,
                                    const Place& place, int32 index, float2& total,
                                    uint32* packed) const {
    core::Philox4 random{};
#pragma unroll
    for (int32 i = 0; i < chunk / 2; ++i) {
      float2 x{__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1])};
      x = fma_f32x2(x, float2{by, by}, float2{-base, -base});
      float2 e = by_polynomial(i) ? exp2_by_polynomial<guarded>(x)
                                  : float2{exp2_approximate(x.x), exp2_approximate(x.y)};
      total = add_f32x2(total, e);
      if constexpr (C.has_dropout) {
        const int32 column = place.block * C.tile_k + chunk * index + 2 * i;
        if (i % 2 == 0) random = dropout_words(params, place.tile, place.at, column / 4);
        if (random.word[2 * (i % 2)] < params.dropout_threshold) e.x = 0.0f;
        if (random.word[2 * (i % 2) + 1] < params.dropout_threshold) e.y = 0.0f;
      }
      packed[i] = pack<C.dtype>(e.x, e.y);
    }
  }

  // Beyond this, score x scale inside the multiply-add and the reference, which was rounded, may
  // differ by more than the logits do: scaling must round first, on both sides alike.
  static __forceinline__ bool far(float reference) { return !(fabsf(reference) < 2048.0f); }

  // -- Weights: to tensor memory, in two parts

  __forceinline__ void store_weights(int32 index, const uint32* packed) const {
    uint32 words[chunk / 2];
#pragma unroll
    for (int32 i = 0; i < chunk / 2; ++i) words[i] = packed[i];
    tcgen05_store_32x32b_x16(weights() + chunk / 2 * index, words);
  }

  template <int32 part>
  __forceinline__ void hand_over() {
    tcgen05_wait_store();
    tcgen05_fence_before();
    arrive_for_products<C>(plan.weights_full[slot()][part]);
  }

  // -- Tiles of keys

  // The rows in shared memory may be written: those of the last tile have been read.
  __forceinline__ void claim_rows() {
    if (!claimed) plan.row_ring[query_tile].wait_free(row_state);
    claimed = true;
  }

  // What was summed before shrinks by this row's factor. With corrections, those warps do it, and
  // at each tile; otherwise this warp does, if one of its rows has to.
  __forceinline__ void correct_output(float factor, bool first, bool after_part) {
    if constexpr (core::is_corrected(C)) {
      if (!first) {
        claim_rows();
        plan.row_factor[slot()][row()] = factor;
      }
      arrive_warp(plan.factor_full[slot()]);
    } else if (!first && __any_sync(0xffffffffu, factor != 1.0f)) {
      wait_pair<C>(plan.output_done[query_tile], parity_of(seen - 1));
      if (after_part) wait_pair<C>(plan.first_done[query_tile], parity_of(seen));
      tcgen05_fence_after();
      scale_output<C>(output(), factor);
      count_rows(params, 0);
    }
  }

  // The largest of the scores of keys [from, tile_k) that the row sees.
  template <bool masked, int32 from>
  __forceinline__ float largest(const Visible& seen_here) {
    float top = -infinity;
    if constexpr (C.max_with_load && !masked) {
#pragma unroll
      for (int32 i = from / chunk; i < C.tile_k / chunk; ++i) {
        uint32 words[chunk];
        float most;
        tcgen05_load_max_32x32b_x32(words, most, scores() + chunk * i);
        tcgen05_wait_load();
        asm volatile("" : "+f"(most)::"memory");  // read behind the wait
        top = max3_nan(top, most, most);
      }
    } else {
      stream<from / chunk, C.tile_k / chunk>([&](int32 index, uint32(&words)[chunk]) {
        transform(words);
        if constexpr (masked) mask(words, index, seen_here);
#pragma unroll
        for (int32 i = 0; i < chunk; i += 2) {
          top = max3_nan(top, __uint_as_float(words[i]), __uint_as_float(words[i + 1]));
        }
      });
    }
    return top;
  }

  // Weights of keys [from, tile_k) with their true maximum known first: scores are read twice.
  template <bool masked, int32 from>
  __forceinline__ void take_exactly(const Place& place, bool first, float threshold) {
    Visible seen_here{};
    if constexpr (masked) seen_here = visible(place);
    const float top = largest<masked, from>(seen_here);
    const core::Rescale raised = core::raise_reference(reference, top * scale(), threshold);
    // A row's first keys find no sum and no output to shrink.
    const float factor = reference > -infinity ? exp2_approximate(raised.factor_log2) : 1.0f;
    reference = raised.reference;
    correct_output(factor, first, from > 0);
    // No weight is a number where the largest score is infinite or none: nor is the sum.
    sum = top < infinity ? sum * factor : top - top;
    // A row that saw nothing yet keeps -infinity, but may not subtract it.
    const float base = reference > -infinity ? reference : 0.0f;
    const bool scale_first = __any_sync(0xffffffffu, far(base));
    float2 total{0.0f, 0.0f};
    stream<from / chunk, C.tile_k / chunk>([&](int32 index, uint32(&words)[chunk]) {
      transform(words);
      if constexpr (masked) mask(words, index, seen_here);
      uint32 packed[chunk / 2];
      if (scale_first) {
#pragma unroll
        for (int32 i = 0; i < chunk; ++i) {
          words[i] = __float_as_uint(__uint_as_float(words[i]) * scale());
        }
      }
      exponentiate<false>(words, scale_first ? 1.0f : scale(), base, place, index, total, packed);
      store_weights(index, packed);
      if (index == C.first_part / chunk - 1) hand_over<0>();
    });
    hand_over<1>();
    sum += total.x + total.y;
  }

  // Weights of keys [from, to) with the reference known before. All are positive, so their sum
  // bounds the largest; false where a row of this warp has outgrown its reference, or has none.
  // Then nothing has been written, and the scores are still there.
  template <int32 from, int32 to>
  __forceinline__ bool take_guarded(const Place& place) {
    // A reference too far out, or none yet: infinity, or NaN, cannot pass the vote.
    const float base = far(reference) ? -infinity : reference;
    float2 total{0.0f, 0.0f};
    uint32 packed[(to - from) / 2];
    stream<from / chunk, to / chunk>([&](int32 index, uint32(&words)[chunk]) {
      transform(words);
      exponentiate<true>(words, scale(), base, place, index, total,
                         packed + chunk / 2 * (index - from / chunk));
    });
    const float part = total.x + total.y;
    if (__any_sync(0xffffffffu, !(part <= core::rescale_threshold))) return false;
    sum += part;
#pragma unroll
    for (int32 i = 0; i < (to - from) / chunk; ++i) {
      store_weights(from / chunk + i, packed + chunk / 2 * i);
    }
    return true;
  }

  __forceinline__ void take_unmasked(const Place& place) {
    if (!take_guarded<0, C.first_part>(place)) {
      count_rows(params, 1);
      take_exactly<false, 0>(place, false, 0.0f);
      return;
    }
    hand_over<0>();
    if (!take_guarded<C.first_part, C.tile_k>(place)) {
      count_rows(params, 1);
      take_exactly<false, C.first_part>(place, false, 0.0f);
      return;
    }
    hand_over<1>();
  }

  __forceinline__ void take(const Fwd100Tile& tile, const KeySpan& span, int32 block) {
    constexpr float threshold =
        C.softmax == SoftmaxPolicy::online ? 0.0f : core::rescale_threshold_log2;
    const bool first = block == first_of(tile, span);
    const Place place = place_of(tile, block);
    wait_pair<C>(plan.scores_full[slot()], slot_parity<C>(seen));
    tcgen05_fence_after();
    modify_scores(place);
    if (block >= span.full_end || block < span.full_begin) {
      take_exactly<true, 0>(place, first, threshold);
    } else if (first || core::is_corrected(C)) {
      take_exactly<false, 0>(place, first, threshold);
    } else {
      take_unmasked(place);
    }
    ++seen;
  }

  __forceinline__ void run() {
    while (const Fwd100Tile* tile = next_tile<C>(plan, tile_state)) {
      const KeySpan& span = tile->spans[query_tile];
      if (span.count() > 0) {
        reference = -infinity;
        sum = 0.0f;
        claimed = false;
#pragma unroll 1
        for (int32 block = first_of(*tile, span);; block = block_after(*tile, span, block)) {
          take(*tile, span, block);
          if (block == last_of(*tile, span)) break;
        }
        const int32 last_slot = slot_of<C>(query_tile, seen - 1);
        if constexpr (core::is_corrected(C)) {
          // The last factor lies where the sum goes.
          wait_pair<C>(plan.output_ready[last_slot], slot_parity<C>(seen - 1));
        }
        claim_rows();
        plan.row_reference[query_tile][row()] = reference;
        plan.row_factor[last_slot][row()] = sum;
        arrive_warp(plan.row_ring[query_tile].full[0]);
        row_state.advance();
      }
      arrive_warp(plan.tile_ring.free[tile_state.stage]);
      tile_state.advance();
    }
  }
};

// ---- Role: correct, one warpgroup ---------------------------------------------------------------
//
// With corrections: at each tile of keys, scales the output of rows that have outgrown their
// reference before the next weights are added. Always: divides by the sums, writes out and LSE.

template <Fwd100Config C>
struct Correct100 {
  using Plan = Fwd100Plan<C>;
  Plan& plan;
  const FwdParams& params;
  const TensorAddress base;  // this warp's lanes
  RingState<2> tile_state;
  RingState<1> row_states[C.query_tiles];
  RingState<1> output_states[C.query_tiles];
  RingState<1> out_states[C.query_tiles];
  int32 seen[C.query_tiles] = {};  // tiles of keys so far

  __forceinline__ int32 row() const { return static_cast<int32>(threadIdx.x % 128); }
  __forceinline__ TensorAddress output(int32 t) const {
    return base + core::output_column(C, 0) + C.head_dim_v * t;
  }

  __forceinline__ void correct(int32 t, bool first) {
    const int32 n = seen[t]++;
    const int32 slot = slot_of<C>(t, n);
    mbarrier_wait(plan.factor_full[slot], slot_parity<C>(n));
    if (!first) {
      const float factor = plan.row_factor[slot][row()];
      if (__any_sync(0xffffffffu, factor != 1.0f)) {
        wait_pair<C>(plan.output_done[t], parity_of(n - 1));
        tcgen05_fence_after();
        scale_output<C>(output(t), factor);
        tcgen05_fence_before();
        count_rows(params, 0);
      }
    }
    arrive_for_products<C>(plan.output_ready[slot]);
    // This CTA's softmax waits for it, too.
    if (pair_rank<C>() != 0) arrive_warp(plan.output_ready[slot]);
  }

  __forceinline__ FwdRow row_of(const Fwd100Tile& tile, int32 t) const {
    return find_row<C>(params, tile, 128 * t + row());
  }

  // By what a row's output is multiplied in the end; zero where nothing was seen.
  __forceinline__ float finish_row(const Fwd100Tile& tile, int32 t) {
    float sum = 0.0f;
    float reference = -infinity;
    if (tile.spans[t].count() > 0) {
      plan.row_ring[t].wait_full(row_states[t]);
      sum = plan.row_factor[slot_of<C>(t, seen[t] - 1)][row()];
      reference = plan.row_reference[t][row()];
      arrive_warp(plan.row_ring[t].free[0]);
      row_states[t].advance();
    }
    const FwdRow at = row_of(tile, t);
    const RowTotal all = total_of<C>(params, at.head, reference, sum);
    const bool used = at.query < tile.length_q;
    if (params.lse != nullptr && at.query < tile.capacity_q) {
      int64 offset = tile.batch_q * params.lse_stride[0] + at.head * params.lse_stride[1] +
                     (tile.row_q + at.query) * params.lse_stride[2];
      if constexpr (C.split) offset += tile.split * params.lse_split_stride;
      const bool some = used && !(all.total == 0.0f);
      const float none = C.split && !used ? infinity : -infinity;
      params.lse[offset] = some ? (all.top + log2_approximate(all.total)) * core::ln_2 : none;
    }
    const float kept = C.has_dropout ? params.keep_scale : 1.0f;
    return used && !(sum == 0.0f) ? all.share * kept * reciprocal_approximate(all.total) : 0.0f;
  }

  // 16 columns of the output of this thread's row; zero x NaN shall be zero.
  __forceinline__ void load_output(float (&values)[16], int32 t, int32 column, float factor,
                                   float& zero) const {
    uint32 words[16];
    tcgen05_load_32x32b_x16(words, output(t) + column);
    tcgen05_wait_load();
    tcgen05_hold(words);
#pragma unroll
    for (int32 i = 0; i < 16; ++i) {
      values[i] = factor == 0.0f ? 0.0f : __uint_as_float(words[i]) * factor;
      if constexpr (core::rows_differ(C)) zero = fmaf(values[i], 0.0f, zero);
    }
  }

  static __forceinline__ uint4 pack_8(const float* values) {
    return uint4{pack<C.dtype>(values[0], values[1]), pack<C.dtype>(values[2], values[3]),
                 pack<C.dtype>(values[4], values[5]), pack<C.dtype>(values[6], values[7])};
  }

  // Rows of this warp, a bit for each, whose result is not finite although some of the values they
  // met were not theirs to see. Such rows are computed again, by themselves.
  static __forceinline__ uint32 broken_rows(bool used, float zero) {
    if constexpr (!core::rows_differ(C)) return 0;
    return __ballot_sync(0xffffffffu, used && !(zero == 0.0f));
  }

  template <typename Store>
  __forceinline__ void compute_again(const Fwd100Tile& tile, int32 t, uint32 broken, Store store) {
    if constexpr (core::rows_differ(C)) {
      __syncwarp();
      for (; broken != 0; broken &= broken - 1) {
        const int32 lane = __ffs(static_cast<int32>(broken)) - 1;
        const int32 index = static_cast<int32>(threadIdx.x % 128) / 32 * 32 + lane;
        const FwdRow at = find_row<C>(params, tile, 128 * t + index);
        ExactRow<C> exact{params, tile, at};
        exact.run();
#pragma unroll
        for (int32 slot = 0; slot < ExactRow<C>::output_slots; ++slot) {
          const int32 column = lane_index() + 32 * slot;
          if (column < params.head_dim_v) store(at, index, column, exact.output[slot]);
        }
      }
    }
  }

  // Through shared memory, in one piece. Neighbouring rows write to different banks.
  __forceinline__ void stage_output(const Fwd100Tile& tile, int32 t, float factor) {
    const SharedAddress staging = plan.staging(t);
    if constexpr (C.out_apart) plan.out_ring[t].wait_free(out_states[t]);
    float zero = 0.0f;  // or NaN
#pragma unroll 1
    for (int32 column = 0; column < 64 * Plan::panels_v; column += 16) {
      float values[16] = {};
      if (column < C.head_dim_v) load_output(values, t, column, factor, zero);
#pragma unroll
      for (int32 half = 0; half < 2; ++half) {
        const auto bytes = static_cast<uint32>(2 * (column + 8 * half));
        store_shared_x4(
            staging + panel_offset(Swizzle::b128, 128, static_cast<uint32>(row()), bytes),
            pack_8(values + 8 * half));
      }
    }
    compute_again(
        tile, t, broken_rows(factor != 0.0f, zero),
        [&](FwdRow, int32 index, int32 column, float value) {
          uint8* place =
              (C.out_apart ? plan.out + t * (Plan::panels_v * Plan::panel_bytes) : plan.q[t]) +
              panel_offset(Swizzle::b128, 128, static_cast<uint32>(index),
                           static_cast<uint32>(2 * column));
          *reinterpret_cast<uint16*>(place) =
              static_cast<uint16>(pack<C.dtype>(value, 0.0f) & 0xffffu);
        });
    fence_proxy_async_shared();
    arrive_warp(plan.out_ring[t].full[0]);
    out_states[t].advance();
  }

  __forceinline__ void store_element(int64 offset, float value) {
    if constexpr (core::stored_dtype(C) == DType::f32) {
      static_cast<float*>(params.out)[offset] = value;
    } else {
      static_cast<uint16*>(params.out)[offset] =
          static_cast<uint16>(pack<C.out_dtype>(value, 0.0f) & 0xffffu);
    }
  }

  __forceinline__ int64 out_offset(const Fwd100Tile& tile, FwdRow at) const {
    int64 offset = tile.batch_q * params.out_stride[0] +
                   (tile.row_q + at.query) * params.out_stride[1] + at.head * params.out_stride[2];
    if constexpr (C.split) offset += tile.split * params.out_split_stride;
    return offset;
  }

  // Row by row: where rows end inside the tile, or out suits no copy engine.
  __forceinline__ void store_row(const Fwd100Tile& tile, int32 t, float factor, bool has_output) {
    const FwdRow at = row_of(tile, t);
    const int64 offset = out_offset(tile, at);
    float zero = 0.0f;  // or NaN
#pragma unroll 1
    for (int32 column = 0; column < C.head_dim_v; column += 16) {
      float values[16] = {};
      if (has_output) load_output(values, t, column, factor, zero);
      if (at.query >= tile.capacity_q) continue;
#pragma unroll
      for (int32 i = 0; i < 16; i += 8) {
        if (C.tma_out && column + i + 8 <= params.head_dim_v) {
          *reinterpret_cast<uint4*>(static_cast<uint16*>(params.out) + offset + column + i) =
              pack_8(values + i);
          continue;
        }
#pragma unroll
        for (int32 j = i; j < i + 8; ++j) {
          if (column + j < params.head_dim_v) {
            store_element(offset + (column + j) * params.out_stride[3], values[j]);
          }
        }
      }
    }
    compute_again(tile, t, broken_rows(factor != 0.0f, zero),
                  [&](FwdRow row, int32, int32 column, float value) {
                    store_element(out_offset(tile, row) + column * params.out_stride[3], value);
                  });
  }

  __forceinline__ void finish(const Fwd100Tile& tile, int32 t) {
    const bool has_output = tile.spans[t].count() > 0;
    if constexpr (!core::is_corrected(C)) seen[t] += tile.spans[t].count();
    const float factor = finish_row(tile, t);
    if (has_output) {
      plan.output_ring[t].wait_full(output_states[t]);
      tcgen05_fence_after();
    }
    if (is_staged<C>(tile, t)) {
      stage_output(tile, t, factor);
    } else {
      store_row(tile, t, factor, has_output);
      // Nobody stores from where q was: it is free again.
      if (has_output && C.tma_out && !C.out_apart && warp_index() % 4 == 0) {
        arrive_warp(plan.q_ring[t].free[0]);
      }
    }
    if (has_output) {
      tcgen05_fence_before();
      arrive_for_products<C>(plan.output_ring[t].free[0]);
      output_states[t].advance();
    }
  }

  __forceinline__ void run() {
    while (const Fwd100Tile* tile = next_tile<C>(plan, tile_state)) {
      if constexpr (core::is_corrected(C)) {
#pragma unroll 1
        for (int32 n = 0; n < tile->count(); ++n) {
          const int32 block = block_at(*tile, n);
#pragma unroll
          for (int32 t = 0; t < C.query_tiles; ++t) {
            const KeySpan& span = tile->spans[t];
            if (visits(span, block)) correct(t, block == first_of(*tile, span));
          }
        }
      }
#pragma unroll
      for (int32 t = 0; t < C.query_tiles; ++t) finish(*tile, t);
      arrive_warp(plan.tile_ring.free[tile_state.stage]);
      tile_state.advance();
    }
  }
};

// ---- Role: store, one thread --------------------------------------------------------------------

template <Fwd100Config C>
__forceinline__ void store(Fwd100Plan<C>& plan, const FwdParams& params) {
  RingState<2> tile_state;
  RingState<1> out_states[C.query_tiles];
  while (const Fwd100Tile* tile = next_tile<C>(plan, tile_state)) {
#pragma unroll
    for (int32 t = 0; t < C.query_tiles; ++t) {
      if (!is_staged<C>(*tile, t)) continue;
      plan.out_ring[t].wait_full(out_states[t]);
#pragma unroll
      for (int32 panel = 0; panel < Fwd100Plan<C>::panels_v; ++panel) {
        tma_store(&params.out_map, plan.staging(t) + panel * Fwd100Plan<C>::panel_bytes,
                  {panel * core::panel_columns, tile->row_q + tile->q_begin + 128 * t, tile->head,
                   tile->batch_q});
      }
      bulk_commit();
      bulk_wait_read<0>();
      if constexpr (C.out_apart) {
        plan.out_ring[t].release(out_states[t]);
      } else {
        mbarrier_arrive(plan.q_ring[t].free[0]);
      }
      out_states[t].advance();
    }
    plan.tile_ring.release(tile_state);
    tile_state.advance();
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

template <Fwd100Config C>
__forceinline__ void init_barriers(Fwd100Plan<C>& plan) {
  constexpr uint32 ctas = core::ctas_of(C);
  const bool first = pair_rank<C>() == 0;
  plan.key_ring.init(ctas, 1);
  plan.next_ring.init(1, ctas);
  // The second CTA of a pair multiplies nothing.
  plan.tile_ring.init(1, Fwd100Plan<C>::tile_consumers - (first ? 0 : 1));
  mbarrier_init(plan.edge_full, 1);
  for (int32 t = 0; t < C.query_tiles; ++t) {
    plan.q_ring[t].init(ctas, 1);
    plan.output_ring[t].init(1, 4 * ctas);
    plan.row_ring[t].init(4, 4);
    plan.out_ring[t].init(4, 1);
    mbarrier_init(plan.first_done[t], 1);
    mbarrier_init(plan.output_done[t], 1);
  }
  for (int32 slot = 0; slot < 2; ++slot) {
    mbarrier_init(plan.scores_full[slot], 1);
    mbarrier_init(plan.weights_full[slot][0], 4 * ctas);
    mbarrier_init(plan.weights_full[slot][1], 4 * ctas);
    mbarrier_init(plan.factor_full[slot], 4);
    mbarrier_init(plan.output_ready[slot], first ? 4 * ctas : 4);
  }
  fence_mbarrier_init();
}

// All threads of the CTA, or of the pair.
template <Fwd100Config C>
__forceinline__ void meet() {
  if constexpr (C.cta_pair) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

template <Fwd100Config C>
__device__ void fwd(const FwdParams& params) {
  extern __shared__ __align__(1024) uint8 shared_memory[];
  Fwd100Plan<C>& plan = *reinterpret_cast<Fwd100Plan<C>*>(shared_memory);
  static_assert(sizeof(Fwd100Plan<C>) <= core::shared_bytes(C));
  static_assert(core::shared_bytes(C) <= core::shared_limit_bytes);

  const int32 warp = warp_index();
  const int32 group = warp / 4;
  const bool owner = warp == 4 * C.query_tiles + 7;  // of the tensor memory
  if (owner) {
    tcgen05_allocate<core::ctas_of(C)>(&plan.tensor_memory, core::tensor_columns);
    tcgen05_allocated_all<core::ctas_of(C)>();
  }
  if (threadIdx.x == 0) {
    init_barriers<C>(plan);
    tma_prefetch_map(&params.q);
    tma_prefetch_map(&params.k);
    tma_prefetch_map(&params.v);
  }
  tcgen05_fence_before();
  meet<C>();
  tcgen05_fence_after();
  const TensorAddress tensor{plan.tensor_memory};
  const TensorAddress lanes = tensor.lane(32 * (warp % 4));

  if (group < C.query_tiles) {
    registers_grow<core::softmax_registers(C)>();
    Softmax100<C>{plan, params, lanes, group}.run();
  } else if (group == C.query_tiles) {
    registers_shrink<core::correction_registers(C)>();
    Correct100<C>{plan, params, lanes}.run();
  } else {
    registers_shrink<core::other_registers(C)>();
    if (warp % 4 == 0) {
      if (pair_rank<C>() == 0 && elect_one()) Multiply100<C>{plan, tensor}.run();
    } else if (warp % 4 == 1) {
      Load100<C>{plan, params, elect_one()}.run();
    } else if (warp % 4 == 2) {
      if (elect_one()) store<C>(plan, params);
    }
    __syncwarp();
  }
  tcgen05_fence_before();
  meet<C>();  // a pair's products and arrivals reach into both CTAs
  if (owner) {
    tcgen05_fence_after();
    tcgen05_free<core::ctas_of(C)>(tensor, core::tensor_columns);
  }
}

}  // namespace fovea::device
