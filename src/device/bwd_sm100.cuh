// Attention, backward, on Blackwell: dk and dv of 128 keys of a KV head (256 in a pair of CTAs),
// and their part of dq.
//
// One CTA or pair per tile of keys, against every block of 128 query rows that sees it, of all
// heads that share the KV head: dk and dv stay in tensor memory until the end. Scores and dP are
// computed transposed, keys x queries, so that P^T and dS^T, written back over them, are operand A
// of dv and dk from tensor memory; only dS goes through shared memory, for dq. Budget of 128 rows x
// 128 keys x head_dim 128, in cycles of a multiprocessor (docs/kernels/bwd_sm100.md; emulated
// only):
//
//                                                             one CTA   pair, each
//   tensor cores     5 x 2 x 128 x 128 x 128 FLOP at 8192       2560      2560
//   shared memory    operands, dS, exchange, dq at 128 bytes    3072      2432
//   exponentials     128 x 128 at 16                            1024      1024
//   reduction        64 or 32 KB into L2 at about 32 bytes      2048      1024
//
// Roles, by warp:   0-7 compute (a key each thread)   8-11 reduce dq   12 multiply (one thread)
//                   13 load   14 relay (pair)   15 owns the tensor memory
#pragma once

#include "device/bwd_load_sm100.h"
#include "device/bwd_plan_sm100.h"
#include "device/bwd_scores.h"

namespace fovea::device {

// ---- Role: multiply, one thread; of a pair, the leader's ----------------------------------------
//
// n counts tiles of query rows. Products of n + 1 run while those threads compute that n waits for:
//
//   64, 128    S0 dP0 dV0 | S1 dK0 dQ0 dP1 dV1 | S2 dK1 dQ1 dP2 dV2 | ... | dK dQ
//   pair       S0 dP0 dV0 | S1 dK0 dP1 dQ0 dV1 | ...        dQ late: dS has to be exchanged first
//   192        S0 dP0 dV0 | dK0 dQ0 S1 dP1 dV1 | ...        dQ lies over S and dP
//
// The manual orders products into one accumulator alone. What one reads and another overwrites is
// waited for, unless the configuration counts on the order of issue.

template <BwdConfig C>
struct Multiply100Backward {
  using Plan = Bwd100Plan<C>;
  static constexpr TensorType type = C.dtype == DType::bf16 ? TensorType::bf16 : TensorType::f16;
  static constexpr core::BackwardColumns columns = Plan::columns;
  static constexpr int32 m = 128 * Plan::ctas;

  Plan& plan;
  const BwdParams& params;
  const TensorAddress base;
  RingState<Plan::query_stages> q_state, q_late_state;  // of the scores, of dk
  RingState<1> state, late_state;                       // of dout; of the columns of q and dout

  __forceinline__ void begin(TracePhase phase) const {
    mark<C>(plan, params, BwdTraceRole::multiply, true, phase);
  }

  // Made anew for each product: those that follow from it are not worth registers all along.
  static __forceinline__ uint64 descriptor(SharedAddress tile, uint32 panel_bytes) {
    uint64 made = tcgen05_descriptor(Swizzle::b128, tile.value, panel_bytes, Plan::group_bytes);
    asm volatile("" : "+l"(made));
    return made;
  }

  static __forceinline__ void multiply(TensorAddress d, uint64 a, uint64 b, uint32 instruction,
                                       bool accumulate) {
    if constexpr (C.pair) {
      tcgen05_mma_f16_ss_cta2(d, a, b, instruction, accumulate);
    } else {
      tcgen05_mma_f16_ss_cta1(d, a, b, instruction, accumulate);
    }
  }

  static __forceinline__ void multiply(TensorAddress d, TensorAddress a, uint64 b,
                                       uint32 instruction, bool accumulate) {
    if constexpr (C.pair) {
      tcgen05_mma_f16_ts_cta2(d, a, b, instruction, accumulate);
    } else {
      tcgen05_mma_f16_ts_cta1(d, a, b, instruction, accumulate);
    }
  }

  // D = A B^T, [keys x queries]: rows of keys or values with rows of queries, both K-major.
  template <int32 depth>
  __forceinline__ void keys_by_queries(int32 column, SharedAddress keys, SharedAddress queries) {
    constexpr uint32 instruction = tcgen05_instruction({.a = type, .b = type, .m = m, .n = 128});
    const uint64 a = descriptor(keys, 0);
    const uint64 b = descriptor(queries, 0);
#pragma unroll
    for (int32 step = 0; step < depth / 16; ++step) {
      const uint32 inside = step % 4 * 32;  // 16 elements
      multiply(base + column, descriptor_advance(a, step / 4 * Plan::panel_bytes + inside),
               descriptor_advance(b, step / 4 * Plan::query_panel_bytes + inside), instruction,
               step > 0);
    }
  }

  // D += A B, [keys x head_dim]: P^T or dS^T with rows of dout or q, MN-major.
  template <int32 width>
  __forceinline__ void add_gradient(int32 column, int32 weights, SharedAddress queries,
                                    bool accumulate) {
    constexpr uint32 instruction =
        tcgen05_instruction({.a = type, .b = type, .m = m, .n = width, .b_mn_major = true});
    const uint64 b = descriptor(queries, Plan::panel_bytes);
#pragma unroll
    for (int32 step = 0; step < 128 / 16; ++step) {
      multiply(base + column, base + (weights + core::weight_column(step / 2) + step % 2 * 8),
               descriptor_advance(b, step * 16 * Plan::row_bytes), instruction,
               accumulate || step > 0);
    }
  }

  __forceinline__ void scores(int32 n) {
    begin(TracePhase::operands);
    wait_full<C>(plan.q_ring, q_state);
    if (n > 0 && !C.issue_order) wait_for<C>(plan.weights_free, n - 1);
    if constexpr (core::dq_over_scores(C)) {
      // dq of the step that the columns were last lent to has left them.
      constexpr int32 behind = core::dq_over_weights(C) ? 1 : 2;
      if (n >= behind) wait_for<C>(plan.dq_free, n - behind);
    }
    if (n > 0) tcgen05_fence_after();
    begin(TracePhase::issue_scores);
    keys_by_queries<C.head_dim>(columns.scores, shared_address(plan.k),
                                shared_address(plan.q[q_state.stage]));
    commit<C>(plan.scores_full);
    if constexpr (C.pair) commit<C>(plan.q_ring.free[q_state.stage]);
    q_state.advance();
  }

  __forceinline__ void dp(int32 n) {
    begin(TracePhase::operands);
    wait_full<C>(plan.dout_ring, state);
    if (n > 0 && core::dq_over_dp(C)) {
      wait_for<C>(plan.dq_free, n - 1);  // dq has waited for dk
    } else if (n > 0 && !C.issue_order) {
      wait_for<C>(plan.dk_done, n - 1);  // it reads dS^T
    }
    if constexpr (core::dp_over_scores(C)) wait_for<C>(plan.weights_full, n);
    if (n > 0 || core::dp_over_scores(C)) tcgen05_fence_after();
    begin(TracePhase::issue_dp);
    keys_by_queries<C.head_dim_v>(columns.dp, shared_address(plan.v), shared_address(plan.dout));
    commit<C>(plan.dp_full);
    if constexpr (C.pair) commit<C>(plan.dout_ring.free[0]);
    state.advance();
  }

  __forceinline__ void dv(int32 n) {
    begin(TracePhase::operands);
    // In a pair, dq of the tile before has waited for these weights.
    const bool waits = !C.pair || n == 0;
    if (waits) wait_for<C>(plan.weights_full, n);
    SharedAddress rows = shared_address(plan.dout);
    if constexpr (C.pair) {
      wait_full<C>(plan.dout_columns_ring, late_state);
      rows = shared_address(plan.dout_columns);
    }
    if (waits) tcgen05_fence_after();
    begin(TracePhase::issue_dv);
    add_gradient<C.head_dim_v>(columns.dv, columns.scores, rows, n > 0);
    commit<C>(plan.weights_free);
    commit<C>(C.pair ? plan.dout_columns_ring.free[0] : plan.dout_ring.free[0]);
  }

  __forceinline__ void dk(int32 n) {
    begin(TracePhase::operands);
    wait_for<C>(plan.dscores_full, n);
    SharedAddress rows = shared_address(plan.q[q_late_state.stage]);
    if constexpr (C.pair) {
      wait_full<C>(plan.q_columns_ring, late_state);
      rows = shared_address(plan.q_columns);
    }
    tcgen05_fence_after();
    begin(TracePhase::issue_dk);
    add_gradient<C.head_dim>(columns.dk, columns.dp, rows, n > 0);
    commit<C>(plan.dk_done);
    commit<C>(C.pair ? plan.q_columns_ring.free[0] : plan.q_ring.free[q_late_state.stage]);
    q_late_state.advance();
  }

  // dq = dS k, of rows of queries: both operands MN-major.
  __forceinline__ void dq(int32 n, bool last) {
    begin(TracePhase::operands);
    if (n > 0 && !core::dq_over_dp(C)) wait_for<C>(plan.dq_free, n - 1);  // else dp has
    if constexpr (C.pair) {
      wait_for<C>(plan.exchanged, n);
      // Half of the next scores is read by then.
      if (!last) wait_for<C>(plan.weights_full, n + 1);
    }
    if (core::dq_over_dp(C) && !C.issue_order) wait_for<C>(plan.dk_done, n);
    if (core::dq_over_weights(C) && !C.issue_order) wait_for<C>(plan.weights_free, n);
    tcgen05_fence_after();
    begin(TracePhase::issue_dq);
    constexpr uint32 instruction = tcgen05_instruction(
        {.a = type, .b = type, .m = 128, .n = C.head_dim, .a_mn_major = true, .b_mn_major = true});
    const uint64 a = descriptor(shared_address(plan.dscores), Plan::panel_bytes);
    SharedAddress keys = shared_address(plan.k);
    if constexpr (C.pair) keys = shared_address(plan.k_columns);
    const uint64 b = descriptor(keys, Plan::panel_bytes);
#pragma unroll
    for (int32 step = 0; step < Plan::ctas * Plan::keys / 16; ++step) {
      const uint32 along = step * 16 * Plan::row_bytes;
      multiply(base + columns.dq, descriptor_advance(a, along), descriptor_advance(b, along),
               instruction, step > 0);
    }
    commit<C>(plan.dq_full);
  }

  __forceinline__ void run(int32 steps) {
    if (steps == 0) return;
    wait_for<C>(plan.keys_full, 0);
    scores(0);
    dp(0);
    dv(0);
#pragma unroll 1
    for (int32 n = 0; n < steps; ++n) {
      constexpr bool scores_late = core::dq_over_weights(C);
      const bool last = n + 1 == steps;
      if (!last && !scores_late) scores(n + 1);
      dk(n);
      if (!last && C.pair) dp(n + 1);
      dq(n, last);
      if (last) break;
      late_state.advance();
      if (scores_late) scores(n + 1);
      if (!C.pair) dp(n + 1);
      dv(n + 1);
    }
    commit<C>(plan.gradients_full);
    begin(TracePhase::none);
  }
};

// ---- Role: compute, two warpgroups, one thread for a key ----------------------------------------
//
// Both warpgroups have all 128 keys of the CTA; chunks of 32 queries w and w + 2 are warpgroup w's.
// A thread writes P^T and dS^T over columns that it has read itself.

template <BwdConfig C>
struct Compute100Backward {
  using Plan = Bwd100Plan<C>;
  // What a thread has in registers at a time: where much is done to a score, half a chunk.
  static constexpr bool is_tight = core::hides_anywhere(C) || C.has_dropout;
  static constexpr int32 piece = is_tight ? 16 : 32;
  static constexpr int32 pieces = 64 / piece;

  Plan& plan;
  const BwdParams& params;
  const Bwd100Work<C> work;  // in registers
  const TensorAddress base;  // this warp's lanes
  const int32 rank;
  const int32 warpgroup;
  RingState<2> row_state;
  using Packed = uint32[piece / 2];
  Packed kept[pieces];  // P, times the derivative of the logits where it is not 1

  __forceinline__ void begin(TracePhase phase) const {
    const auto role =
        static_cast<BwdTraceRole>(static_cast<int32>(BwdTraceRole::compute) + warpgroup);
    mark<C>(plan, params, role, own_key() == 0, phase);
  }
  __forceinline__ int32 own_key() const { return static_cast<int32>(threadIdx.x % 128); }
  // The first query of the i-th piece of this thread's, and the column of its weights.
  __forceinline__ int32 query_of(int32 i) const {
    const int32 at = piece * i;
    return 32 * (warpgroup + 2 * (at / 32)) + at % 32;
  }
  __forceinline__ int32 weight_column(int32 i) const {
    return core::weight_column(query_of(i) / 32) + query_of(i) % 32 / 2;
  }

  // -- What hides

  // Rows [first, first + width) of a block, which see this thread's key.
  struct Visible {
    int32 first;
    uint32 width;
    __forceinline__ bool sees(int32 row) const { return static_cast<uint32>(row - first) < width; }
  };

  __forceinline__ Visible visible(int32 block) const {
    const BwdSequence& s = work.sequence;
    const int32 key = work.key_begin + own_key();
    const int32 shift = s.length_k - s.length_q;
    int32 begin = 0;
    int32 end = key < s.length_k ? s.length_q : 0;
    if constexpr (C.bound_right) begin = max(0, key - shift - params.window_right);
    if constexpr (C.bound_left) end = min(end, key - shift + params.window_left + 1);
    return {begin - block * Plan::rows, static_cast<uint32>(max(0, end - begin))};
  }

  // -- One block of query rows

  // Gives the pieces at `column` to use(i, words), the next one loaded while one is in use, where
  // there are registers for two.
  template <typename Use>
  __forceinline__ void stream(int32 column, Use use) {
    constexpr bool loads_ahead = !is_tight;
    uint32 words[loads_ahead ? 2 : 1][piece];
    const auto load = [&](int32 i) {
      uint32(&to)[piece] = words[loads_ahead ? i % 2 : 0];
      const TensorAddress from = base + (column + query_of(i));
      if constexpr (piece == 32) {
        tcgen05_load_32x32b_x32(to, from);
      } else {
        tcgen05_load_32x32b_x16(to, from);
      }
    };
    if constexpr (loads_ahead) load(0);
#pragma unroll
    for (int32 i = 0; i < pieces; ++i) {
      if constexpr (!loads_ahead) load(i);
      uint32(&now)[piece] = words[loads_ahead ? i % 2 : 0];
      tcgen05_wait_load();
      tcgen05_hold(now);
      if (loads_ahead && i + 1 < pieces) load(i + 1);
      use(i, now);
    }
  }

  __forceinline__ void store_tensor(int32 column, int32 i, const Packed& words) {
    const TensorAddress to = base + (column + weight_column(i));
    if constexpr (piece == 32) {
      tcgen05_store_32x32b_x16(to, words);
    } else {
      tcgen05_store_32x32b_x8(to, words);
    }
  }

  __forceinline__ float4 numbers(const float (&rows)[Plan::rows], int32 row) const {
    return *reinterpret_cast<const float4*>(rows + row);
  }

  // P, of which hidden elements become zero by selection, whatever they were.
  template <bool hides>
  __forceinline__ void exponentiate(int32 i, const uint32 (&scores)[piece], const Visible& seen,
                                    Packed& weights) {
    const float2 scale{params.scale_log2, params.scale_log2};
    const int32 first = query_of(i);
#pragma unroll
    for (int32 j = 0; j < piece; j += 4) {
      const float4 lse = numbers(plan.lse_log2[row_state.stage], first + j);
      float2 x[2];
      x[0] = fma_f32x2({__uint_as_float(scores[j]), __uint_as_float(scores[j + 1])}, scale,
                       {-lse.x, -lse.y});
      x[1] = fma_f32x2({__uint_as_float(scores[j + 2]), __uint_as_float(scores[j + 3])}, scale,
                       {-lse.z, -lse.w});
#pragma unroll
      for (int32 h = 0; h < 2; ++h) {
        float low = exp2_approximate(x[h].x);
        float high = exp2_approximate(x[h].y);
        if (hides && !seen.sees(first + j + 2 * h)) low = 0.0f;
        if (hides && !seen.sees(first + j + 2 * h + 1)) high = 0.0f;
        weights[j / 2 + h] = kept[i][j / 2 + h] = pack<C.dtype>(low, high);
      }
    }
  }

  // Which of queries query .. query + 3 dropout takes from this thread's key, a bit each. Four
  // lanes hold four neighbouring keys, which share random words: each draws those of one query.
  __forceinline__ uint32 dropped(const BwdScores<C>& of, int32 query) const {
    const int32 own = lane_index() % 4;
    const core::Philox4 drawn = of.words(query + own, (work.key_begin + own_key()) / 4);
    uint32 bits = 0;
#pragma unroll
    for (int32 step = 0; step < 4; ++step) {
      const int32 other = own ^ step;
      const uint32 low = other % 2 == 0 ? drawn.word[0] : drawn.word[1];
      const uint32 high = other % 2 == 0 ? drawn.word[2] : drawn.word[3];
      const uint32 word = __shfl_xor_sync(0xffffffffu, other < 2 ? low : high, step);
      bits |= static_cast<uint32>(word < params.dropout_threshold) << other;
    }
    return bits;
  }

  // The same where scores are modified. What is kept has its sign set where dropout takes the
  // weight.
  __forceinline__ void exponentiate_modified(int32 i, const uint32 (&scores)[piece],
                                             const Visible& seen, const BwdScores<C>& of,
                                             int32 block, Packed& weights) {
    const int32 first = query_of(i);
    const int32 key = work.key_begin + own_key();
#pragma unroll
    for (int32 j = 0; j < piece; j += 4) {
      const float4 numbered = numbers(plan.lse_log2[row_state.stage], first + j);
      const float lse[4] = {numbered.x, numbered.y, numbered.z, numbered.w};
      const int32 query = block * Plan::rows + first + j;
      uint32 bits = 0;
      if constexpr (C.has_dropout) bits = dropped(of, query);
      float weight[4];
      float slope[4];
#pragma unroll
      for (int32 e = 0; e < 4; ++e) {
        const float2 x = of.score(__uint_as_float(scores[j + e]), query + e, key);
        weight[e] = exp2_approximate(x.x - lse[e]);
        if (!seen.sees(first + j + e) || x.x == -infinity) weight[e] = 0.0f;
        slope[e] = weight[e] * x.y;
        if constexpr (C.has_dropout) {
          weight[e] = (bits >> e & 1u) != 0 ? 0.0f : weight[e] * params.keep_scale;
        }
      }
#pragma unroll
      for (int32 h = 0; h < 2; ++h) {
        const uint32 packed = pack<C.dtype>(weight[2 * h], weight[2 * h + 1]);
        uint32 copy = packed;
        if constexpr (C.has_softcap || C.has_dropout) {
          const uint32 taken = bits >> 2 * h;
          copy = pack<C.dtype>(slope[2 * h], slope[2 * h + 1]) | (taken & 1u) << 15 |
                 (taken & 2u) << 30;
        }
        weights[j / 2 + h] = packed;
        kept[i][j / 2 + h] = copy;
      }
    }
  }

  // dP of two elements through dropout.
  __forceinline__ float2 passed(float2 dweights, uint32 word) const {
    if constexpr (C.has_dropout) {
      dweights.x = (word & 0x8000u) != 0 ? 0.0f : dweights.x * params.keep_scale;
      dweights.y = (word & 0x80000000u) != 0 ? 0.0f : dweights.y * params.keep_scale;
    }
    return dweights;
  }

  // dS = P (dP - delta), of P as dv takes it. Zero where P is, if anything is hidden: what dP holds
  // there is garbage.
  template <bool hides>
  __forceinline__ void differentiate(int32 i, const uint32 (&dp)[piece], Packed& dscores) {
    const int32 first = query_of(i);
#pragma unroll
    for (int32 j = 0; j < piece; j += 4) {
      const float4 delta = numbers(plan.delta[row_state.stage], first + j);
      const float2 of[2] = {{-delta.x, -delta.y}, {-delta.z, -delta.w}};
#pragma unroll
      for (int32 h = 0; h < 2; ++h) {
        const uint32 word = kept[i][j / 2 + h];
        const float2 weight = unpack<C.dtype>(C.has_dropout ? word & 0x7fff7fffu : word);
        const float2 dweight =
            passed({__uint_as_float(dp[j + 2 * h]), __uint_as_float(dp[j + 2 * h + 1])}, word);
        const float2 difference = add_f32x2(dweight, of[h]);
        float2 product = multiply_f32x2(weight, difference);
        if (hides && weight.x == 0.0f) product.x = 0.0f;
        if (hides && weight.y == 0.0f) product.y = 0.0f;
        dscores[j / 2 + h] = pack<C.dtype>(product.x, product.y);
      }
    }
  }

  // dS^T as it is, [key][query]: operand A of dq, MN-major. In a pair the half of the rows that is
  // the peer's waits to be sent.
  __forceinline__ void store_shared(int32 i, const Packed& dscores) {
    const int32 half = query_of(i) / 64;
    SharedAddress panel = shared_address(plan.dscores);
    if constexpr (C.pair) {
      panel = half == rank ? panel + rank * Plan::panel_bytes : shared_address(plan.exchange);
    } else {
      panel = panel + half * Plan::panel_bytes;
    }
    const SharedAddress row = panel + own_key() * Plan::row_bytes;
#pragma unroll
    for (int32 j = 0; j < piece / 8; ++j) {
      const uint32 at = (query_of(i) % 64 / 8 + j) ^ (own_key() % 8);  // 16-byte chunk, swizzled
      store_shared_x4(row + at * 16, uint4{dscores[4 * j], dscores[4 * j + 1], dscores[4 * j + 2],
                                           dscores[4 * j + 3]});
    }
  }

  template <bool hides>
  __forceinline__ void make_weights(int32 head, int32 block) {
    const Visible seen = visible(block);
    const BwdScores<C> of(params, work.sequence, head);
    stream(Plan::columns.scores, [&](int32 i, const uint32(&words)[piece]) {
      Packed weights;
      if constexpr (core::modifies_backward(C)) {
        exponentiate_modified(i, words, seen, of, block, weights);
      } else {
        exponentiate<hides>(i, words, seen, weights);
      }
      store_tensor(Plan::columns.scores, i, weights);
    });
  }

  template <bool hides>
  __forceinline__ void make_dscores(int32 n) {
    stream(Plan::columns.dp, [&](int32 i, const uint32(&words)[piece]) {
      Packed dscores;
      differentiate<hides>(i, words, dscores);
      store_tensor(Plan::columns.dp, i, dscores);
      // The dS before it is read: dq of the last tile is there. Where dq lies over dP, this dP
      // could not be computed before.
      if (!core::dq_over_dp(C) && i == 0 && n > 0) wait_for<C>(plan.dq_full, n - 1);
      store_shared(i, dscores);
    });
  }

  __forceinline__ void step(int32 n, int32 head, int32 block) {
    const bool hides = core::modifies_backward(C) ||
                       !sees_all<C, Plan::rows, Plan::keys>(params, work.sequence,
                                                            block * Plan::rows, work.key_begin);
    begin(TracePhase::scores);
    plan.row_ring.wait_full(row_state);
    wait_for<C>(plan.scores_full, n);
    tcgen05_fence_after();
    begin(TracePhase::softmax);
    if (hides) {
      make_weights<true>(head, block);
    } else {
      make_weights<false>(head, block);
    }
    tcgen05_wait_store();
    tcgen05_fence_before();
    arrive_leader<C>(plan.weights_full);

    begin(TracePhase::dp);
    wait_for<C>(plan.dp_full, n);
    tcgen05_fence_after();
    begin(TracePhase::differentiate);
    if (hides) {
      make_dscores<true>(n);
    } else {
      make_dscores<false>(n);
    }
    tcgen05_wait_store();
    tcgen05_fence_before();
    fence_proxy_async_shared();
    arrive_leader<C>(plan.dscores_full);
    // Lanes have met for that arrival.
    if (lane_index() == 0) {
      if constexpr (C.pair) mbarrier_arrive(plan.exchange_ready);
      if constexpr (Plan::releases_numbers) mbarrier_arrive(plan.row_ring.free[row_state.stage]);
    }
    row_state.advance();
  }

  // -- The end: keys that exist get their gradients, zero if nobody sees them.

  static constexpr int32 chunk = 32;  // columns at a time

  // A chunk of columns of this thread's key.
  __forceinline__ void store_columns(const float (&values)[chunk], void* gradient, int64 at,
                                     int64 step, int32 count) const {
#pragma unroll
    for (int32 i = 0; i < chunk; i += 2) {
      if (i >= count) return;
      const bool is_pair = i + 1 < count;
      if constexpr (C.wide) {
        static_cast<float*>(gradient)[at + i * step] = values[i];
        if (is_pair) static_cast<float*>(gradient)[at + (i + 1) * step] = values[i + 1];
      } else {
        const uint32 both = pack<C.dtype>(values[i], values[i + 1]);
        auto* const target = static_cast<uint16*>(gradient) + at + i * step;
        if (params.paired) {
          *reinterpret_cast<uint32*>(target) = both;
        } else {
          target[0] = static_cast<uint16>(both);
          if (is_pair) target[step] = static_cast<uint16>(both >> 16);
        }
      }
    }
  }

  template <int32 width>
  __forceinline__ void store_gradient(bool computed, TensorAddress from, float factor,
                                      void* gradient, const int64 (&stride)[4],
                                      int32 columns) const {
    const BwdSequence& s = work.sequence;
    const int64 base_at = s.batch_k * stride[0] + work.head_kv * stride[2];
#pragma unroll 1
    for (int32 column = 0; column < width; column += chunk) {
      float values[chunk];
      if (computed) {
        uint32 words[chunk];
        tcgen05_load_32x32b_x32(words, from + column);
        tcgen05_wait_load();
        tcgen05_hold(words);
#pragma unroll
        for (int32 i = 0; i < chunk; ++i) values[i] = __uint_as_float(words[i]) * factor;
      } else {
#pragma unroll
        for (int32 i = 0; i < chunk; ++i) values[i] = 0.0f;
      }
      // One round, but for keys behind the last sequence, which nobody sees.
      for (int32 key = work.key_begin + own_key(); key < s.capacity_k;
           key += params.key_blocks * Plan::keys) {
        const int64 row = base_at + (static_cast<int64>(s.row_k) + key) * stride[1];
        store_columns(values, gradient, row + column * stride[3], stride[3], columns - column);
      }
    }
  }

  __forceinline__ void run(int32 steps) {
    int32 n = 0;
    for (int32 i = 0; i < params.group_size; ++i) {
#pragma unroll 1
      for (int32 block = work.block_begin; block < work.block_end; ++block) {
        step(n++, work.head_kv * params.group_size + i, block);
      }
    }
    begin(TracePhase::output);
    if (steps > 0) {
      wait_for<C>(plan.gradients_full, 0);
      tcgen05_fence_after();
    }
    begin(TracePhase::store);
    if (warpgroup == 0) {
      store_gradient<C.head_dim_v>(steps > 0, base + Plan::columns.dv, 1.0f, params.dv,
                                   params.dv_stride, params.head_dim_v);
    } else {
      store_gradient<C.head_dim>(steps > 0, base + Plan::columns.dk, params.scale, params.dk,
                                 params.dk_stride, params.head_dim);
    }
    begin(TracePhase::none);
  }
};

// ---- Role: reduce dq, one warpgroup -------------------------------------------------------------

template <BwdConfig C>
struct Reduce100 {
  using Plan = Bwd100Plan<C>;
  static constexpr int32 unit = core::dq_unit_columns(C);
  static constexpr int32 units = Plan::columns.dq_width / unit;
  static constexpr int32 staged_units = units - core::dq_direct_units(C);

  Plan& plan;
  const BwdParams& params;
  const Bwd100Work<C> work;  // in registers
  const TensorAddress base;  // this warp's lanes
  const int32 rank;
  const bool adds;   // the thread that talks to the copy engine
  int32 staged = 0;  // units that have gone through shared memory

  __forceinline__ void begin(TracePhase phase) const {
    mark<C>(plan, params, BwdTraceRole::reduce, adds, phase);
  }

  // How many tiles of keys add to a block of rows before this one.
  __forceinline__ uint32 turn(int32 block) const {
    constexpr int32 tile_keys = Bwd100Work<C>::tile_keys;
    const BwdSequence& s = work.sequence;
    const core::BlockRange keys = core::block_range(
        core::Window{params.window_left, params.window_right}, s.length_q, s.length_k,
        block * Plan::rows, min((block + 1) * Plan::rows, s.length_q), tile_keys);
    const int64 own = work.tile_begin / tile_keys;
    return static_cast<uint32>(core::last_keys_first(C) ? keys.end - 1 - own : own - keys.begin);
  }

  __forceinline__ uint32* counter(int64 number) const {
    return params.turns + number * core::turn_counters(C) + rank;
  }

  // Waits until those have added: what they wrote comes before what this one adds.
  __forceinline__ void wait_turn(int64 number, int32 block) {
    const uint32 before = turn(block);
    while (load_acquire(counter(number)) != before) {
    }
    fence_proxy_async_global();
  }

  // The additions themselves must be complete, not only their source read, before the next may add.
  __forceinline__ void pass_turn(int64 number) {
    bulk_wait<0>();
    add_release(counter(number), 1u);
  }

  // Tensor memory -> registers -> shared memory: quad j of columns of a lane is word 128 j + lane.
  __forceinline__ void stage(SharedAddress target, const uint32 (&words)[unit]) {
#pragma unroll
    for (int32 j = 0; j < unit / 4; ++j) {
      store_shared_x4(target + (128 * j + threadIdx.x % 128) * 16,
                      uint4{words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]});
    }
    fence_proxy_async_shared();
  }

  // The same quads into global memory.
  static __forceinline__ void add_directly(float* target, const uint32 (&words)[unit]) {
#pragma unroll
    for (int32 j = 0; j < unit / 4; ++j) {
      reduce_add_x4(target + (128 * j + threadIdx.x % 128) * 4,
                    float4{__uint_as_float(words[4 * j]), __uint_as_float(words[4 * j + 1]),
                           __uint_as_float(words[4 * j + 2]), __uint_as_float(words[4 * j + 3])});
    }
  }

  __forceinline__ void step(int32 n, int64 number, int32 block) {
    begin(TracePhase::dq);
    wait_for<C>(plan.dq_full, n);
    tcgen05_fence_after();
    begin(TracePhase::turn);
    if (C.deterministic && adds) wait_turn(number, block);
    begin(TracePhase::reduce);
    float* const sums =
        params.dq_sums + number * core::dq_block_floats(C) + rank * (Plan::rows_each * C.head_dim);
#pragma unroll 1
    for (int32 i = 0; i < units; ++i) {
      uint32 words[unit];
      if constexpr (unit == 32) {
        tcgen05_load_32x32b_x32(words, base + (Plan::columns.dq + unit * i));
      } else {
        tcgen05_load_32x32b_x16(words, base + (Plan::columns.dq + unit * i));
      }
      tcgen05_wait_load();
      tcgen05_hold(words);
      if (i == units - 1) {
        tcgen05_fence_before();
        arrive_leader<C>(plan.dq_free);
      }
      if (i >= staged_units) {
        add_directly(sums + i * (unit * 128), words);
        continue;
      }
      if (adds) bulk_wait_read<1>();
      named_barrier_sync<Plan::unit_barrier, 128>();
      const SharedAddress place = shared_address(plan.dq[staged++ % 2]);
      stage(place, words);
      named_barrier_sync<Plan::unit_barrier, 128>();
      if (adds) {
        bulk_reduce_add(sums + i * (unit * 128), place, Plan::unit_bytes);
        bulk_commit();
      }
    }
    if (C.deterministic && adds) pass_turn(number);
  }

  __forceinline__ void run() {
    int32 n = 0;
    for (int32 i = 0; i < params.group_size; ++i) {
      const int32 head = work.head_kv * params.group_size + i;
      const int64 first = first_block<C>(params, work.sequence, head);
#pragma unroll 1
      for (int32 block = work.block_begin; block < work.block_end; ++block) {
        step(n++, first + block, block);
      }
    }
    // The CTA's memory must not go before it has been read; in turns the last one has waited.
    if (!C.deterministic && adds) bulk_wait_read<0>();
    begin(TracePhase::none);
  }
};

// ---- Role: relay, one thread of each CTA of a pair ----------------------------------------------
//
// Sends the peer its half of dS, and tells the leader when this CTA has the half that it needs.

template <BwdConfig C>
__forceinline__ void relay(Bwd100Plan<C>& plan, const BwdParams& params, int32 rank, int32 steps) {
  using Plan = Bwd100Plan<C>;
  const auto begin = [&](TracePhase phase) {
    mark<C>(plan, params, BwdTraceRole::relay, true, phase);
  };
  const auto peer = static_cast<uint32>(1 - rank);
  const ClusterAddress target =
      map_to_rank(shared_address(plan.dscores) + rank * Plan::panel_bytes, peer);
  const ClusterAddress arrived = map_to_rank(shared_address(&plan.exchange_full), peer);
#pragma unroll 1
  for (int32 n = 0; n < steps; ++n) {
    mbarrier_arrive_expect_bytes(plan.exchange_full, Plan::panel_bytes);
    begin(TracePhase::dscores);
    wait_for<C>(plan.exchange_ready, n);
    begin(TracePhase::exchange);
    bulk_copy_remote(target, shared_address(plan.exchange), Plan::panel_bytes, arrived);
    wait_for<C>(plan.exchange_full, n);
    mbarrier_arrive_remote(barrier_of(plan.exchanged, 0));
  }
  begin(TracePhase::none);
}

// ---- Kernel -------------------------------------------------------------------------------------

template <BwdConfig C>
__forceinline__ void init_barriers(Bwd100Plan<C>& plan) {
  using Plan = Bwd100Plan<C>;
  constexpr uint32 ctas = Plan::ctas;
  plan.q_ring.init(ctas, 1);
  plan.dout_ring.init(ctas, 1);
  plan.q_columns_ring.init(ctas, 1);
  plan.dout_columns_ring.init(ctas, 1);
  plan.row_ring.init(1, Plan::computing_warps);
  mbarrier_init(plan.keys_full, Plan::key_tiles * ctas);
  mbarrier_init(plan.edge_full, 1);
  mbarrier_init(plan.weights_full, Plan::computing_warps * ctas);
  mbarrier_init(plan.dscores_full, Plan::computing_warps * ctas);
  mbarrier_init(plan.dq_free, Plan::reducing_warps * ctas);
  mbarrier_init(plan.exchange_ready, Plan::computing_warps);
  mbarrier_init(plan.exchange_full, 1);
  mbarrier_init(plan.exchanged, ctas);
  for (Barrier* committed : {&plan.scores_full, &plan.weights_free, &plan.dp_full, &plan.dk_done,
                             &plan.dq_full, &plan.gradients_full}) {
    mbarrier_init(*committed, 1);
  }
  fence_mbarrier_init();
}

// All threads of the CTA, or of the pair. No work on tensor memory is on its way: all loads from it
// have been waited for.
template <BwdConfig C>
__forceinline__ void meet() {
  if constexpr (C.pair) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

template <BwdConfig C>
__device__ void bwd_sm100(const BwdParams& params) {
  using Plan = Bwd100Plan<C>;
  extern __shared__ __align__(1024) uint8 shared_memory[];
  Plan& plan = *reinterpret_cast<Plan*>(shared_memory);
  static_assert(sizeof(Plan) <= core::shared_bytes_sm100(C));
  static_assert(core::shared_bytes_sm100(C) <= core::shared_limit_bytes);

  const int32 warp = warp_index();
  const int32 rank = pair_rank<C>();
  constexpr int32 owner = 15;  // of the tensor memory
  if (warp == owner) {
    tcgen05_allocate<Plan::ctas>(&plan.tensor_memory, 512);
    tcgen05_allocated_all<Plan::ctas>();
  }
  if (threadIdx.x == 0) {
    plan.work.find(params, rank);
    init_barriers<C>(plan);
    trace_begin(plan.trace);
    tma_prefetch_map(&params.q);
    tma_prefetch_map(&params.dout_map);
  }
  meet<C>();
  const TensorAddress tensor{plan.tensor_memory};
  const TensorAddress lanes = tensor.lane(32 * (warp % 4));
  const int32 steps = plan.work.steps(params);

  if (warp < 8) {
    registers_grow<core::backward_compute_registers(C)>();
    if (plan.work.exists()) {
      Compute100Backward<C>{plan, params, plan.work, lanes, rank, warp / 4}.run(steps);
    }
  } else if (warp < 12) {
    registers_shrink<core::backward_reduce_registers>();
    Reduce100<C>{plan, params, plan.work, lanes, rank, threadIdx.x == 8 * 32}.run();
  } else {
    registers_shrink<core::backward_other_registers(C)>();
    if (warp == 12) {
      if (rank == 0 && elect_one()) Multiply100Backward<C>{plan, params, tensor}.run(steps);
    } else if (warp == 13) {
      Load100Backward<C>{plan, params, plan.work, rank, elect_one()}.run();
    } else if (warp == 14) {
      if constexpr (C.pair) {
        if (elect_one()) relay<C>(plan, params, rank, steps);
      }
    }
    __syncwarp();  // before the aligned barrier
  }
  meet<C>();
  if (warp == owner) tcgen05_free<Plan::ctas>(tensor, 512);
}

}  // namespace fovea::device
