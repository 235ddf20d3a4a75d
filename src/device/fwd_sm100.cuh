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

#include "device/fwd_correct_sm100.h"
#include "device/fwd_fp8_sm100.h"
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
  static constexpr TensorType type = C.dtype == DType::bf16   ? TensorType::bf16
                                     : C.dtype == DType::f16  ? TensorType::f16
                                     : C.dtype == DType::e4m3 ? TensorType::e4m3
                                                              : TensorType::e5m2;
  // 8-bit weights are e4m3 whatever the values are, and their values are transposed.
  static constexpr TensorType weight_type = Plan::eight_bit ? TensorType::e4m3 : type;
  static constexpr int32 step_bytes = 32;  // of a row, along which one product contracts
  static constexpr int32 step_keys = step_bytes / core::size_bytes(C.dtype);
  static constexpr int32 rows = core::query_tile_rows * core::ctas_of(C);

  Plan& plan;
  const Fwd100Params<C>& params;
  const TensorAddress base;
  RingState<C.stages> state;
  RingState<2> tile_state;
  RingState<1> q_states[C.query_tiles];
  RingState<1> output_states[C.query_tiles];
  int32 scored[C.query_tiles] = {};  // tiles of keys whose scores, and whose output, are issued
  int32 added[C.query_tiles] = {};

  __forceinline__ void begin(TracePhase phase) const {
    mark<C>(plan, params, TraceRole::multiply, true, phase);
  }

  __forceinline__ RingState<C.stages> take() {
    const RingState<C.stages> taken = state;
    state.advance();
    return taken;
  }

  __forceinline__ void scores(int32 t, const RingState<C.stages>& keys, bool first) {
    const int32 n = scored[t]++;
    if constexpr (!C.issue_order && !core::weights_apart(C)) {
      // The weights that these scores overwrite have been multiplied. Behind the first scores of a
      // tile no output is issued that could be waited for later: a parity tells two phases apart.
      const int32 before = n - (C.query_tiles == 2 || first ? 1 : 2);
      begin(TracePhase::output);
      if (before >= 0) wait_pair<C>(plan.output_done[t], parity_of(before));
      tcgen05_fence_after();
    }
    begin(TracePhase::issue);
    constexpr uint32 instruction =
        tcgen05_instruction({.a = type, .b = type, .m = rows, .n = C.tile_k});
    constexpr uint32 pattern = Plan::pattern_qk;
    uint64 q =
        tcgen05_descriptor(Plan::swizzle_qk, shared_address(plan.q[t]).value, 0, 8 * pattern);
    // No instruction: the descriptors that follow from it are not worth registers all along the
    // tile.
    asm volatile("" : "+l"(q));
    const uint64 k = tcgen05_descriptor(
        Plan::swizzle_qk, shared_address(plan.keys[keys.stage]).value, 0, 8 * pattern);
    const int32 slot = slot_of<C>(t, n);
    const TensorAddress to = base + core::score_column(0) + 128 * slot;
#pragma unroll
    for (uint32 at = 0; at < core::size_bytes(C.dtype) * C.head_dim; at += step_bytes) {
      const uint64 q_step =
          descriptor_advance(q, at / pattern * Plan::q_panel_bytes + at % pattern);
      const uint64 k_step =
          descriptor_advance(k, at / pattern * Plan::key_panel_bytes + at % pattern);
      if constexpr (Plan::eight_bit && C.cta_pair) {
        tcgen05_mma_f8f6f4_ss_cta2(to, q_step, k_step, instruction, at > 0);
      } else if constexpr (Plan::eight_bit) {
        tcgen05_mma_f8f6f4_ss_cta1(to, q_step, k_step, instruction, at > 0);
      } else if constexpr (C.cta_pair) {
        tcgen05_mma_f16_ss_cta2(to, q_step, k_step, instruction, at > 0);
      } else {
        tcgen05_mma_f16_ss_cta1(to, q_step, k_step, instruction, at > 0);
      }
    }
    commit<C>(plan.scores_full[slot]);
  }

  template <int32 first, int32 last>  // keys
  __forceinline__ void add(int32 t, int32 slot, const RingState<C.stages>& values,
                           bool accumulate) {
    constexpr uint32 instruction = tcgen05_instruction({.a = weight_type,
                                                        .b = type,
                                                        .m = rows,
                                                        .n = C.head_dim_v,
                                                        .b_mn_major = !Plan::eight_bit});
    const uint64 v =
        tcgen05_descriptor(Swizzle::b128, shared_address(plan.keys[values.stage]).value,
                           Plan::eight_bit ? 0 : Plan::panel_bytes, Plan::group_bytes);
    const TensorAddress to = base + core::output_column(C, 0) + C.head_dim_v * t;
    const TensorAddress weights = base + core::weight_column(C, 0) +
                                  (core::weight_column(C, 1) - core::weight_column(C, 0)) * slot;
    tcgen05_fence_after();
#pragma unroll
    for (int32 step = first / step_keys; step < last / step_keys; ++step) {
      // 16 bits: keys are rows; 8 bits: they lie along a row.
      const uint64 v_step = descriptor_advance(
          v, step * (Plan::eight_bit ? step_bytes : step_keys * Plan::row_bytes));
      const bool adds = accumulate || step > 0;
      if constexpr (Plan::eight_bit && C.cta_pair) {
        tcgen05_mma_f8f6f4_ts_cta2(to, weights + 8 * step, v_step, instruction, adds);
      } else if constexpr (Plan::eight_bit) {
        tcgen05_mma_f8f6f4_ts_cta1(to, weights + 8 * step, v_step, instruction, adds);
      } else if constexpr (C.cta_pair) {
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
    begin(TracePhase::weights);
    if constexpr (core::is_corrected(C)) {
      wait_pair<C>(plan.output_ready[slot], parity);  // of the first keys, too: it has been read
    } else if (first) {
      plan.output_ring[t].wait_free(output_states[t]);
    }
    wait_pair<C>(plan.weights_full[slot][0], parity);
    begin(TracePhase::issue);
    add<0, C.first_part>(t, slot, values, !first);
    if constexpr (!core::is_corrected(C)) commit<C>(plan.first_done[t]);
    begin(TracePhase::weights);
    wait_pair<C>(plan.weights_full[slot][1], parity);
    begin(TracePhase::issue);
    add<C.first_part, C.tile_k>(t, slot, values, true);
    if constexpr (!Plan::scores_follow_output || !(C.issue_order || core::weights_apart(C))) {
      commit<C>(plan.output_done[t]);
    }
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
    scores(t, keys, block == first_of(tile, span));
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
    begin(TracePhase::keys);
    if (has_values) plan.key_ring.wait_full(values);
#pragma unroll
    for (int32 t = 0; t < 2; ++t) {
      if (has_values) output_of(tile, t, block_at(tile, n - 1), values);
      if (has_values && t == 1) commit<C>(plan.key_ring.free[values.stage]);
      if (has_keys && t == 0) {
        begin(TracePhase::keys);
        plan.key_ring.wait_full(keys);
      }
      if (has_keys) scores_of(tile, t, block_at(tile, n), keys);
    }
    if (has_keys) commit<C>(plan.key_ring.free[keys.stage]);
  }

  __forceinline__ void step_of_one(const Fwd100Tile& tile, int32 n) {
    if (n < tile.count()) {
      const RingState<C.stages> keys = take();
      begin(TracePhase::keys);
      plan.key_ring.wait_full(keys);
      scores_of(tile, 0, block_at(tile, n), keys);
      commit<C>(plan.key_ring.free[keys.stage]);
    }
    if (n > 0) {
      const RingState<C.stages> values = take();
      begin(TracePhase::keys);
      plan.key_ring.wait_full(values);
      output_of(tile, 0, block_at(tile, n - 1), values);
      commit<C>(plan.key_ring.free[values.stage]);
    }
  }

  __forceinline__ void run() {
    begin(TracePhase::tile);
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
      begin(TracePhase::tile);
    }
    begin(TracePhase::none);
  }
};

// ---- Role: softmax, one warpgroup for a query tile, one thread for a row ------------------------

template <Fwd100Config C>
struct Softmax100 {
  using Plan = Fwd100Plan<C>;
  static constexpr int32 chunk = 32;  // scores in registers at a time
  static constexpr int32 chunk_words = core::weight_columns(C) * chunk / C.tile_k;  // as weights
  static constexpr bool eight_bit = Plan::eight_bit;
  static_assert(chunk == core::scale_block);
  // A tile's bounds are read where they are used: with a running maximum or random numbers there
  // are no registers for them.
  static constexpr bool rereads_bounds = core::is_corrected(C) || C.has_dropout;
  // 2^top is the largest weight where the reference is the row's maximum.
  static constexpr float top_log2 = eight_bit ? core::weight_top_log2(C.softmax) : 0.0f;

  Plan& plan;
  const Fwd100Params<C>& params;
  const TensorAddress base;  // this warp's lanes
  const int32 query_tile;
  RingState<1> row_state;
  int32 tiles = 0;       // so far; a RingState would be a register more
  int32 seen = 0;        // tiles of keys so far
  bool claimed = false;  // the rows in shared memory are this tile's
  float reference;       // in log2 units: core/softmax.h; in 8 bits with log2 of v's scale
  float sum;
  SharedAddress key_scales{};  // 8 bits: of the tile of keys
  float row_scale = 1.0f;      // 8 bits

  __forceinline__ RingState<2> tile_state() const {
    return {tiles % 2, static_cast<uint32>(tiles / 2) & 1u};
  }
  __forceinline__ int32 row() const { return static_cast<int32>(threadIdx.x % 128); }
  __forceinline__ int32 slot() const { return slot_of<C>(query_tile, seen); }
  __forceinline__ void begin(TracePhase phase) const {
    const auto role = static_cast<TraceRole>(static_cast<int32>(TraceRole::softmax) + query_tile);
    mark<C>(plan, params, role, row() == 0, phase);
  }
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

  // Columns [begin, end) of a block, which this thread's row sees.
  struct Visible {
    int32 begin, end;
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

  // 8 bits, of a chunk: what its products of codes are multiplied by, what its weights are
  // multiplied by in the exponent, and divided by in the row's sum.
  struct Units {
    float codes = 1.0f;
    float v_log2 = 0.0f;
    float v_inverse = 1.0f;
  };

  __forceinline__ Units units(int32 index) const {
    if constexpr (!eight_bit) return {};
    const KeyScale key = key_scale(key_scales, index);
    return {row_scale * key.k, key.v_log2, key.v_inverse};
  }

  // Log2 units per score. In 16 bits it is read where it is used, which costs no register.
  __forceinline__ float scale(const Units& unit) const {
    if constexpr (!eight_bit) return score_scale<C>(params);
    return C.transform == ScoreTransform::none ? unit.codes : 1.0f;
  }

  // Raw scores of a chunk to scores.
  __forceinline__ void transform(uint32 (&words)[chunk], const Units& unit) const {
    if constexpr (eight_bit && C.transform != ScoreTransform::none) {
#pragma unroll
      for (int32 i = 0; i < chunk; ++i) {
        float score = __uint_as_float(words[i]) * unit.codes;
        if constexpr (C.transform == ScoreTransform::softcap) {
          score = tanh_accurate(score) * params.transform_out;
        }
        words[i] = __float_as_uint(score);
      }
    } else if constexpr (C.transform != ScoreTransform::none && !core::modifies_scores(C)) {
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
    const int32 first = place.block * C.tile_k;
    return {begin - first, max(begin, end) - first};
  }

  // Hides what a row does not see: selects, so that what was there reaches nothing.
  __forceinline__ void mask(uint32 (&words)[chunk], int32 index, const Visible& seen_here) const {
    int32 first = seen_here.begin - chunk * index;
    // Differences of the first pass are not worth 128 registers until the second.
    if constexpr (!rereads_bounds) asm volatile("" : "+r"(first));
    const auto width = static_cast<uint32>(seen_here.end - seen_here.begin);
#pragma unroll
    for (int32 i = 0; i < chunk; ++i) {
      if (static_cast<uint32>(i - first) >= width) words[i] = __float_as_uint(-infinity);
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
    float2 before{};  // 8 bits: the other half of a word
#pragma unroll
    for (int32 i = 0; i < chunk / 2; ++i) {
      const int32 pair = eight_bit ? weight_pair(i) : i;
      float2 x{__uint_as_float(words[2 * pair]), __uint_as_float(words[2 * pair + 1])};
      x = fma_f32x2(x, float2{by, by}, float2{-base, -base});
      float2 e = by_polynomial(i) ? exp2_by_polynomial<guarded>(x)
                                  : float2{exp2_approximate(x.x), exp2_approximate(x.y)};
      total = add_f32x2(total, e);
      if constexpr (eight_bit) {
        if (i % 2 == 1) packed[i / 2] = pack_e4m3x4(before.x, before.y, e.x, e.y);
        before = e;
        continue;
      }
      if constexpr (C.has_dropout) {
        const int32 column = place.block * C.tile_k + chunk * index + 2 * i;
        if (i % 2 == 0) random = dropout_words(params, place.tile, place.at, column / 4);
        if (random.word[2 * (i % 2)] < params.dropout_threshold) e.x = 0.0f;
        if (random.word[2 * (i % 2) + 1] < params.dropout_threshold) e.y = 0.0f;
      }
      packed[i] = pack<C.dtype>(e.x, e.y);
    }
  }

  // Sums of weights: the row's, in halves that are added last, and a bound of the largest one.
  struct Sums {
    float2 row{0.0f, 0.0f};
    float most = 0.0f;  // in 8 bits: of a chunk's sums

    __forceinline__ float total() const { return row.x + row.y; }
    // A NaN passes in 8 bits: it is its row's answer.
    __forceinline__ bool is_beyond_guard() const {
      if constexpr (eight_bit) return most > core::e4m3_max;
      return !(total() <= core::rescale_threshold);
    }
  };

  // The weights of a chunk of scores, whose logits in log2 units are score x by + add.
  template <bool guarded>
  __forceinline__ void weigh(const uint32 (&words)[chunk], float by, const Units& unit, float base,
                             const Place& place, int32 index, Sums& sums, uint32* packed) const {
    if constexpr (eight_bit) {
      float2 inside{0.0f, 0.0f};
      exponentiate<guarded>(words, by, base, place, index, inside, packed);
      const float sum = inside.x + inside.y;
      sums.most = fmaxf(sums.most, sum);
      sums.row.x = fmaf(sum, unit.v_inverse, sums.row.x);
    } else {
      exponentiate<guarded>(words, by, base, place, index, sums.row, packed);
    }
  }

  // Beyond this, score x scale inside the multiply-add and the reference, which was rounded, may
  // differ by more than the logits do: scaling must round first, on both sides alike.
  static __forceinline__ bool far(float reference) { return !(fabsf(reference) < 2048.0f); }

  // -- Weights: to tensor memory, in two parts

  __forceinline__ void store_weights(int32 index, const uint32* packed) const {
    uint32 words[chunk_words];
#pragma unroll
    for (int32 i = 0; i < chunk_words; ++i) words[i] = packed[i];
    if constexpr (eight_bit) {
      tcgen05_store_32x32b_x8(weights() + chunk_words * index, words);
    } else {
      tcgen05_store_32x32b_x16(weights() + chunk_words * index, words);
    }
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
    if (!Plan::rows_are_free && !claimed) plan.row_ring[query_tile].wait_free(row_state);
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
      if constexpr (!Plan::scores_follow_output) {
        wait_pair<C>(plan.output_done[query_tile], parity_of(seen - 1));
      }
      if (after_part) wait_pair<C>(plan.first_done[query_tile], parity_of(seen));
      // Where nothing was waited for, the fence behind the scores' commit holds for the output,
      // too.
      if (!Plan::scores_follow_output || after_part) tcgen05_fence_after();
      scale_output<C>(output(), factor);  // handing over waits for it
      count_rows(params, 0);
    }
  }

  // The largest logit of keys [from, tile_k) that the row sees; in 8 bits with log2 of v's scale.
  template <bool masked, int32 from>
  __forceinline__ float largest(const Visible& seen_here) {
    float top = -infinity;  // of raw scores, where all have one scale
    const auto take_chunk = [&](float most, const Units& unit) {
      if constexpr (eight_bit) {
        const float logit = fmaf(most, scale(unit), unit.v_log2);
        top = max3_nan(top, logit, logit);
      } else {
        top = max3_nan(top, most, most);
      }
    };
    if constexpr (C.max_with_load && !masked) {
#pragma unroll
      for (int32 i = from / chunk; i < C.tile_k / chunk; ++i) {
        uint32 words[chunk];
        float most;
        tcgen05_load_max_32x32b_x32(words, most, scores() + chunk * i);
        tcgen05_wait_load();
        asm volatile("" : "+f"(most)::"memory");  // read behind the wait
        take_chunk(most, units(i));
      }
    } else {
      stream<from / chunk, C.tile_k / chunk>([&](int32 index, uint32(&words)[chunk]) {
        const Units unit = units(index);
        transform(words, unit);
        if constexpr (masked) mask(words, index, seen_here);
        float most = eight_bit ? -infinity : top;
#pragma unroll
        for (int32 i = 0; i < chunk; i += 2) {
          most = max3_nan(most, __uint_as_float(words[i]), __uint_as_float(words[i + 1]));
        }
        if constexpr (eight_bit) {
          take_chunk(most, unit);
        } else {
          top = most;
        }
      });
    }
    return eight_bit ? top : top * score_scale<C>(params);
  }

  // Weights of keys [from, tile_k) with their true maximum known first: scores are read twice.
  template <bool masked, int32 from>
  __forceinline__ void take_exactly(const Place& place, bool first, float threshold) {
    Visible seen_here{};
    if constexpr (masked) seen_here = visible(place);
    const float top = largest<masked, from>(seen_here);
    const core::Rescale raised = core::raise_reference(reference, top, threshold);
    // A row's first keys find no sum and no output to shrink.
    const float factor = reference > -infinity ? exp2_approximate(raised.factor_log2) : 1.0f;
    reference = raised.reference;
    correct_output(factor, first, from > 0);
    // No weight is a number where the largest score is infinite or none: nor is the sum.
    sum = top < infinity ? sum * factor : top - top;
    // A row that saw nothing yet keeps -infinity, but may not subtract it.
    const float base = reference > -infinity ? reference : 0.0f;
    const bool scale_first = __any_sync(0xffffffffu, far(base));
    Sums sums;
    stream<from / chunk, C.tile_k / chunk>([&](int32 index, uint32(&words)[chunk]) {
      const Units unit = units(index);
      transform(words, unit);
      if constexpr (masked) mask(words, index, seen_here);
      uint32 packed[chunk_words];
      if (scale_first) {
#pragma unroll
        for (int32 i = 0; i < chunk; ++i) {
          const float score = __uint_as_float(words[i]);
          words[i] = __float_as_uint(eight_bit ? fmaf(score, scale(unit), unit.v_log2) - base
                                               : score * scale(unit));
        }
      }
      const float by = scale_first ? 1.0f : scale(unit);
      const float less = eight_bit && scale_first ? -top_log2 : base - unit.v_log2 - top_log2;
      weigh<false>(words, by, unit, less, place, index, sums, packed);
      store_weights(index, packed);
      if (index == C.first_part / chunk - 1) hand_over<0>();
    });
    hand_over<1>();
    sum += sums.total();
  }

  // Weights of keys [from, to) with the reference known before. All are positive, so their sum
  // bounds the largest; false where a row of this warp has outgrown its reference, or has none.
  // Then nothing has been written, and the scores are still there.
  template <int32 from, int32 to>
  __forceinline__ bool take_guarded(const Place& place) {
    // A reference too far out, or none yet: infinity, or NaN, cannot pass the vote.
    const float base = far(reference) ? -infinity : reference;
    Sums sums;
    uint32 packed[(to - from) / chunk * chunk_words];
    stream<from / chunk, to / chunk>([&](int32 index, uint32(&words)[chunk]) {
      const Units unit = units(index);
      transform(words, unit);
      weigh<true>(words, scale(unit), unit, base - unit.v_log2 - top_log2, place, index, sums,
                  packed + chunk_words * (index - from / chunk));
    });
    if (__any_sync(0xffffffffu, sums.is_beyond_guard())) return false;
    sum += sums.total();
#pragma unroll
    for (int32 i = 0; i < (to - from) / chunk; ++i) {
      store_weights(from / chunk + i, packed + chunk_words * i);
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

  __forceinline__ void take(const Fwd100Tile& tile, const KeySpan& span, int32 block, bool first) {
    constexpr float threshold = C.softmax == SoftmaxPolicy::online ? 0.0f
                                : eight_bit ? core::fp8_rescale_threshold_log2
                                            : core::rescale_threshold_log2;
    const Place place = place_of(tile, block);
    begin(TracePhase::scores);
    wait_pair<C>(plan.scores_full[slot()], slot_parity<C>(seen));
    tcgen05_fence_after();
    begin(TracePhase::softmax);
    if constexpr (eight_bit) {
      key_scales =
          wait_key_scales<C>(plan, tile.first_keys + (block == tile.begin ? 0 : tile.end - block));
    }
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

  __forceinline__ void take_blocks(const Fwd100Tile& tile, const KeySpan& span) {
    if constexpr (rereads_bounds) {
#pragma unroll 1
      for (int32 block = first_of(tile, span);; block = block_after(tile, span, block)) {
        take(tile, span, block, block == first_of(tile, span));
        if (block == last_of(tile, span)) break;
      }
    } else {
      const int32 first = first_of(tile, span);
      const int32 last = last_of(tile, span);
      int32 next = second_of(tile, span);
#pragma unroll 1
      for (int32 block = first;; block = next--) {
        take(tile, span, block, block == first);
        if (block == last) break;
      }
    }
  }

  __forceinline__ void run() {
    begin(TracePhase::tile);
    while (const Fwd100Tile* tile = next_tile<C>(plan, tile_state())) {
      if (tile->spans[query_tile].count() > 0) {
        reference = -infinity;
        sum = 0.0f;
        claimed = false;
        if constexpr (eight_bit) {
          row_scale =
              query_scale<C>(params, *tile, find_row<C>(params, *tile, 128 * query_tile + row()));
        }
        if constexpr (eight_bit || rereads_bounds) {
          take_blocks(*tile, tile->spans[query_tile]);
        } else {
          const KeySpan span = tile->spans[query_tile];  // in registers
          take_blocks(*tile, span);
        }
        const int32 last_slot = slot_of<C>(query_tile, seen - 1);
        if constexpr (core::is_corrected(C)) {
          // The last factor lies where the sum goes.
          wait_pair<C>(plan.output_ready[last_slot], slot_parity<C>(seen - 1));
        }
        begin(TracePhase::store);
        claim_rows();
        plan.row_reference[query_tile][row()] = reference - top_log2;
        plan.row_factor[last_slot][row()] = sum;
        arrive_warp(plan.row_ring[query_tile].full[0]);
        row_state.advance();
      }
      arrive_warp(plan.tile_ring.free[tile_state().stage]);
      ++tiles;
      begin(TracePhase::tile);
    }
    begin(TracePhase::none);
  }
};

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
  if constexpr (Fwd100Plan<C>::eight_bit) {
    for (Barrier& full : plan.scales_full) mbarrier_init(full, 1);
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
__device__ void fwd(const Fwd100Params<C>& params) {
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
    trace_begin(plan.trace);
    tma_prefetch_map(&params.q);
    tma_prefetch_map(&params.k);
    tma_prefetch_map(&params.v);
  }
  meet<C>();
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
      if (pair_rank<C>() == 0 && elect_one()) Multiply100<C>{plan, params, tensor}.run();
    } else if (warp % 4 == 1) {
      Load100<C>{plan, params, elect_one()}.run();
    } else if (warp % 4 == 2) {
      if (elect_one()) store<C>(plan, params);
    }
    __syncwarp();  // before the aligned barrier
  }
  // A pair's products and arrivals reach into both CTAs; no work on tensor memory is on its way.
  meet<C>();
  if (owner) tcgen05_free<core::ctas_of(C)>(tensor, core::tensor_columns);
}

}  // namespace fovea::device
