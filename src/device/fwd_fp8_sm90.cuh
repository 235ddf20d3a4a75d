// Attention, forward, on Hopper, in 8 bits: out = softmax(transform(q k^T), where visible) v, and
// its LSE, of operands as core/fp8.h describes them.
//
// The shape of the kernel is that of fwd_sm90.cuh. What differs comes from twice the product rate:
// budget of one step, 128 rows x 192 keys x head_dim 128, in cycles of a multiprocessor
// (docs/kernels/fp8.md):
//
//   tensor cores    2 x 2 x 128 x 192 x 128 FLOP at 8192 a cycle               1536
//   exponentials    128 x 192 at 16 a cycle                                    1536
//   other issue     multiply-add, sum, half a conversion per score, 128 wide    ~560 of 4 slots
//   copies          48 KB from L2 at 64 bytes a cycle                           768
//
// Two units have to be full at the same time, so everything that stands between a product and the
// exponentials of the next counts. Per score there is nothing beside the four instructions above:
// the scales of q, k and v ride in the multiply-add and its addend (KeyScale), weights become the
// next product's operand without a shuffle (value_key), and there is no running maximum.
//
// Where q and k are integers (s8), scores are sums of integers, exact. They begin at the bits of
// 1.5 x 2^23, so that they are fp32 numbers when the products end, and that number's share is
// taken out by the addend: a move per score, 192 cycles of the issue slots. Weights and v are e4m3.
//
// Hopper's products of 8-bit floats add into accumulators of about 14 bits: a promoting kernel adds
// the parts up in fp32 (device/fwd_sums_fp8_sm90.h).
#pragma once

#include "core/fp8.h"
#include "device/fwd_fragments_sm90.h"
#include "device/fwd_load_fp8_sm90.h"
#include "device/fwd_sight.h"
#include "device/fwd_sums_fp8_sm90.h"
#include "device/fwd_tiles.h"
#include "device/pipeline.h"
#include "device/scores.h"
#include "device/tma.h"
#include "device/wgmma.h"

namespace fovea::device {

using core::FwdConfig;
using core::FwdFp8Params;
using core::KeyScale;
using core::scale_block;

// ---- Role: compute, one warpgroup ---------------------------------------------------------------

template <FwdConfig C>
struct Fp8Compute {
  using Plan = Fp8Plan<C>;
  static constexpr int32 score_count = C.tile_k / 2;
  static constexpr int32 output_count = C.head_dim_v / 2;
  static constexpr int32 group_count = scale_block / 2;  // scores of a thread under one KeyScale
  // Up to 64 columns the exponentials of a tile take twice as long as its products.
  static constexpr bool exponentials_bind =
      C.dtype != core::DType::s8 && C.head_dim + C.head_dim_v <= 128;
  static constexpr float top_log2 = core::weight_top_log2(C.softmax);

  Plan& plan;
  const FwdFp8Params& params;
  const int32 warpgroup;  // 0 based among the computing ones
  RingState<C.stages> k_state, v_state;
  RingState<1> q_state;
  RingState<2> tile_state;
  bool k_is_full, v_is_full;  // known already
  KeyScale scales_ahead[exponentials_bind ? Plan::groups : 1];

  static constexpr bool paged = C.source == Source::paged;
  static constexpr bool integers = C.dtype == DType::s8;
  // Raw scores that stand for zero; transforms take it out.
  static constexpr bool shifted = integers && C.transform == ScoreTransform::none;
  static constexpr float zero_score = core::integer_offset;
  static constexpr int32 q_steps = C.head_dim / 32;
  uint32 query[C.q_in_registers ? q_steps : 1][4];  // operand A of the scores, where it is held
  float scores[score_count];                        // [64 x tile_k]: raw, then weights
  int32 products[integers ? score_count : 1];       // raw, while products are in flight
  uint32 weights[C.tile_k / 32][4];                 // the same as operand A, 8 bits each
  float output[output_count];                       // [64 x head_dim_v], since the last promotion
  float reference[2];                               // per half: of t + log2 of v's scale
  float sum[2];                                     // this thread's share
  float row_scale;  // of this warp's q, and softmax_scale log2(e) unless transformed
  Fp8Sums<C> sums = {plan, warpgroup};  // of what was in output before the last promotion

  __forceinline__ int32 warp() const { return warp_index() % 4; }
  __forceinline__ int32 first_row() const {
    return 64 * warpgroup + 16 * warp() + lane_index() / 4;
  }

  // -- Turns: who may issue products

  __forceinline__ void take_turn() {
    if constexpr (C.ping_pong) named_barrier_sync<256>(Plan::turn_barrier + warpgroup);
  }
  __forceinline__ void pass_turn() {
    if constexpr (C.ping_pong) {
      const int32 next = warpgroup + 1 == C.warpgroups ? 0 : warpgroup + 1;
      named_barrier_arrive<256>(Plan::turn_barrier + next);
    }
  }

  // -- Products. Each warp releases for itself: its wait covers its own part of a product.

  // Whether what the next products need has come: asked ahead, since an answer takes 40 cycles.
  __forceinline__ void look_ahead() {
    if constexpr (!exponentials_bind) return;
    k_is_full = plan.k_ring.is_full(k_state);
    v_is_full = plan.v_ring.is_full(v_state);
  }

  // This warp's 16 rows of columns d to d + 32, as operand A.
  __forceinline__ void load_q(uint32 (&a)[4], int32 lane, int32 d) const {
    const int32 row = 64 * warpgroup + 16 * warp() + StoreMatrixX4::row(lane);
    load_matrix_x4(a, shared_address(plan.q) + panel_offset(Plan::swizzle_qk, Plan::rows, row,
                                                            d + 2 * StoreMatrixX4::col(lane)));
  }

  // Into registers, once a tile. The next tile's q may come when all lanes have theirs.
  __forceinline__ void hold_q() {
#pragma unroll
    for (int32 step = 0; step < q_steps; ++step) load_q(query[step], lane_index(), 32 * step);
#pragma unroll
    for (int32 step = 0; step < q_steps; ++step) wgmma_hold(query[step]);
    __syncwarp();
    if constexpr (!q_stays) release_q();
  }

  __forceinline__ void issue_scores() {
    if (!exponentials_bind || !k_is_full) plan.k_ring.wait_full(k_state);
    constexpr uint32 pattern = Plan::pattern_qk;
    const SharedAddress q = shared_address(plan.q) + warpgroup * (64 * pattern);
    const SharedAddress k =
        shared_address(plan.k[0]) + static_cast<uint32>(k_state.stage) * Plan::k_bytes;
    const uint64 q_tile = wgmma_descriptor(Plan::swizzle_qk, q.value, 0, 8 * pattern);
    const uint64 k_tile = wgmma_descriptor(Plan::swizzle_qk, k.value, 0, 8 * pattern);
    if constexpr (integers) {
#pragma unroll
      for (int32 i = 0; i < score_count; ++i) products[i] = __float_as_int(zero_score);
      wgmma_hold(products);  // in registers now, not behind the fence
    }
    wgmma_fence();
#pragma unroll
    for (int32 column = 0; column < C.head_dim; column += 32) {
      const uint32 panel = column / pattern;
      const uint32 inside = column % pattern;
      const uint64 k_step = descriptor_advance(k_tile, panel * C.tile_k * pattern + inside);
      if constexpr (C.q_in_registers) {
        fwd_scores(products_of_codes(), query[column / 32], k_step, integers || column > 0);
      } else {
        fwd_scores(products_of_codes(),
                   descriptor_advance(q_tile, panel * Plan::rows * pattern + inside), k_step,
                   integers || column > 0);
      }
    }
    wgmma_commit();
  }

  __forceinline__ void issue_output() {
    if (!exponentials_bind || !v_is_full) plan.v_ring.wait_full(v_state);
    constexpr uint32 pattern = Plan::pattern_v;
    const SharedAddress v =
        shared_address(plan.v[0]) + static_cast<uint32>(v_state.stage) * Plan::v_bytes;
    const uint64 v_tile = wgmma_descriptor(Plan::swizzle_v, v.value, 0, 8 * pattern);
    wgmma_fence();
#pragma unroll
    for (int32 key = 0; key < C.tile_k; key += 32) {
      const uint32 panel = key / pattern;
      fwd_output(output, weights[key / 32],
                 descriptor_advance(v_tile, panel * C.head_dim_v * pattern + key % pattern), true);
    }
    wgmma_commit();
  }

  __forceinline__ auto& products_of_codes() {
    if constexpr (integers) {
      return products;
    } else {
      return scores;
    }
  }

  // Behind the wait.
  __forceinline__ void settle_scores() {
    wgmma_hold(products_of_codes());
    release_k();
    if constexpr (integers) {
      // No instruction. Their magnitude is at most 127 x 127 x 256, below 2^22: the exponent stays.
#pragma unroll
      for (int32 i = 0; i < score_count; ++i) scores[i] = __int_as_float(products[i]);
    }
  }

  // The state goes on after the softmax, which finds its scales by it.
  __forceinline__ void release_k() {
    if (lane_index() == 0) plan.k_ring.release(k_state);
  }
  __forceinline__ void release_v() {
    if (lane_index() == 0) plan.v_ring.release(v_state);
    v_state.advance();
  }
  __forceinline__ void release_q() {
    if (lane_index() == 0) plan.q_ring.release(q_state);
    q_state.advance();
  }

  // -- Scores

  __forceinline__ KeyScale key_scale(int32 group) const {
    const uint4 bits = load_shared_x4(
        shared_address(plan.scales[0]) + Plan::scale_slot(k_state) * Plan::scale_bytes +
        static_cast<uint32>(group) * static_cast<uint32>(sizeof(KeyScale)));
    return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), 0.0f};
  }

  // A raw score, exact.
  static __forceinline__ float unshifted(float score) {
    return shifted ? score - zero_score : score;
  }
  // The addend of raw scores times `by`, which has 20 bits. Exact as long as `add` is a multiple of
  // fineness(by), since the share of zero_score is one, of 22 bits; else it rounds by less than a
  // unit of the scores' sums.
  static __forceinline__ float shifted_addend(float add, float by) {
    return shifted ? fmaf(-zero_score, by, add) : add;
  }

  // What a score is multiplied by: log2 units per product of codes, 1 behind a transform.
  __forceinline__ float scale(const KeyScale& key) const {
    if constexpr (C.transform != ScoreTransform::none) return 1.0f;
    const float by = row_scale * key.k;
    return shifted ? __uint_as_float((__float_as_uint(by) + 8u) & ~15u) : by;
  }

  __forceinline__ void transform() {
    if constexpr (C.transform == ScoreTransform::none) return;
#pragma unroll
    for (int32 g = 0; g < Plan::groups; ++g) {
      const float by = row_scale * key_scale(g).k;
#pragma unroll
      for (int32 i = g * group_count; i < (g + 1) * group_count; ++i) {
        scores[i] = (integers ? scores[i] - zero_score : scores[i]) * by;
        if constexpr (C.transform == ScoreTransform::softcap) {
          scores[i] = tanh_accurate(scores[i]) * params.transform_out;
        }
      }
    }
  }

  __forceinline__ Sight<C> sight(const FwdTile& tile, int32 block) const {
    return find_sight<C>(tile, params, tile.q_begin + 64 * warpgroup + 16 * warp(), block);
  }

  // -- Softmax. Weights are 2^(t - m + top), and what is summed and compared is weights.

  static __forceinline__ bool far(float m) { return !(fabsf(m) < 2048.0f); }

  // Weights with the tile's true maximum known first. Gives the factors by which what was summed
  // before must shrink. Of a masked block a warp passes over the 32 keys that none of its rows
  // see, and compares positions in those that only some see.
  template <bool masked, bool skips = false>
  __forceinline__ void exponentiate_exact(float (&factor)[2], const Sight<C>& sight) {
    float top[2] = {-infinity, -infinity};
    float widest = 0.0f;  // factor
#pragma unroll
    for (int32 g = 0; g < Plan::groups; ++g) {
      if (skips && !sight.sees(g)) continue;
      if (masked && !sight.sees_all(g)) sight.hide_unseen(scores, g);
      const KeyScale key = key_scale(g);
      float largest[2] = {-infinity, -infinity};
#pragma unroll
      for (int32 i = g * group_count; i < (g + 1) * group_count; ++i) {
        largest[(i / 2) % 2] = fmaxf(largest[(i / 2) % 2], scores[i]);
      }
      const float by = scale(key);
      widest = fmaxf(widest, by);
#pragma unroll
      for (int32 half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], unshifted(largest[half]) * by + key.v_log2);
      }
    }
    constexpr float threshold =
        C.softmax == SoftmaxPolicy::online ? 0.0f : core::fp8_rescale_threshold_log2;
    float base[2];
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      float largest = quad_max(top[half]);
      if constexpr (shifted) {
        const float step = fineness(widest);
        largest = ceilf(largest * (1.0f / step)) * step;
      }
      const core::Rescale raised = core::raise_reference(reference[half], largest, threshold);
      reference[half] = raised.reference;
      factor[half] = exp2_approximate(raised.factor_log2);
      sum[half] *= factor[half];
      // A row that saw nothing yet keeps -infinity, but may not subtract it.
      base[half] = raised.reference > -infinity ? -raised.reference : 0.0f;
    }
    // Far out, where a unit of the reference's last place counts: round as its maximum did.
    const bool rounds = __any_sync(0xffffffffu, far(base[0]) || far(base[1]));
    if (rounds) round_as_maximum(base);
#pragma unroll
    for (int32 g = 0; g < Plan::groups; ++g) {
      if (skips && !sight.sees(g)) {
#pragma unroll
        for (int32 r = 0; r < 4; ++r) weights[g][r] = 0;
        continue;
      }
      const KeyScale key = key_scale(g);
      const float by = rounds ? 1.0f : scale(key);
      const float add[2] = {
          rounds ? top_log2 : shifted_addend(key.v_log2 + base[0] + top_log2, by),
          rounds ? top_log2 : shifted_addend(key.v_log2 + base[1] + top_log2, by)};
      float part[2] = {0.0f, 0.0f};
#pragma unroll
      for (int32 i = g * group_count; i < (g + 1) * group_count; ++i) {
        const int32 half = (i / 2) % 2;
        scores[i] = exp2_approximate(fmaf(scores[i], by, add[half]));
        part[half] += scores[i];
      }
      sum[0] = fmaf(part[0], key.v_inverse, sum[0]);
      sum[1] = fmaf(part[1], key.v_inverse, sum[1]);
      if constexpr (skips) convert(g);
    }
  }

  __forceinline__ void round_as_maximum(const float (&base)[2]) {
#pragma unroll
    for (int32 g = 0; g < Plan::groups; ++g) {
      const KeyScale key = key_scale(g);
      const float by = scale(key);
#pragma unroll
      for (int32 i = g * group_count; i < (g + 1) * group_count; ++i) {
        scores[i] = (unshifted(scores[i]) * by + key.v_log2) + base[(i / 2) % 2];
      }
    }
  }

  __forceinline__ void load_scales() {
#pragma unroll
    for (int32 g = 0; g < Plan::groups; ++g) scales_ahead[g] = key_scale(g);
  }

  // Weights with the reference known before. part bounds the largest of them; more is the tile's
  // share of the row sum.
  __forceinline__ void exponentiate_guarded(float (&part)[2], float (&more)[2]) {
    // A reference too far out, or none yet, is left to repair(): infinity cannot pass the vote.
    const float base[2] = {far(reference[0]) ? infinity : top_log2 - reference[0],
                           far(reference[1]) ? infinity : top_log2 - reference[1]};
#pragma unroll
    for (int32 g = 0; g < Plan::groups; ++g) {
      const KeyScale key = exponentials_bind ? scales_ahead[g] : key_scale(g);
      const float by = scale(key);
      const float add[2] = {shifted_addend(key.v_log2 + base[0], by),
                            shifted_addend(key.v_log2 + base[1], by)};
      float inside[2];
#pragma unroll
      for (int32 i = g * group_count; i < (g + 1) * group_count; i += 2) {
        const int32 half = (i / 2) % 2;
        scores[i] = exp2_approximate(fmaf(scores[i], by, add[half]));
        scores[i + 1] = exp2_approximate(fmaf(scores[i + 1], by, add[half]));
        const float pair = scores[i] + scores[i + 1];
        // No sum begins with an addition to zero, which ptxas would have to keep.
        inside[half] = i < g * group_count + 4 ? pair : inside[half] + pair;
      }
#pragma unroll
      for (int32 half = 0; half < 2; ++half) {
        part[half] = g == 0 ? inside[half] : part[half] + inside[half];
        more[half] =
            g == 0 ? inside[half] * key.v_inverse : fmaf(inside[half], key.v_inverse, more[half]);
      }
    }
  }

  // One vote of the warp: some weight may lie above e4m3's range. A NaN needs none: it is its row's
  // answer.
  __forceinline__ bool beyond_guard(const float (&part)[2]) {
    return __any_sync(0xffffffffu, fmaxf(part[0], part[1]) > core::e4m3_max);
  }

  __forceinline__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int32 i = 0; i < output_count; ++i) output[i] *= factor[(i / 2) % 2];
    sums.scale(factor);
  }

  __forceinline__ void count(int32 which, bool happened) {
    if (params.counters != nullptr && happened && lane_index() % 4 == 0) {
      atomicAdd(params.counters + which, 1ull);
    }
  }

  // As load_q(). Selects, since registers have no index.
  __forceinline__ void find_q(uint32 (&a)[4], int32 lane, int32 d) const {
    if constexpr (C.q_in_registers) {
#pragma unroll
      for (int32 r = 0; r < 4; ++r) {
        a[r] = query[0][r];
#pragma unroll
        for (int32 step = 1; step < q_steps; ++step) a[r] = d == 32 * step ? query[step][r] : a[r];
      }
    } else {
      load_q(a, lane, d);
    }
  }

  // The scores of an unmasked tile again, this warp's 16 rows, by mma and from global memory: the
  // ring has let go of the keys.
  __forceinline__ void compute_scores_again(const FwdTile& tile, int32 block) {
#pragma unroll
    for (int32 i = 0; i < score_count; ++i) scores[i] = 0.0f;
    int32 lane = lane_index();
    // No instruction: what follows from it is not worth registers all along the tile.
    asm volatile("" : "+r"(lane));
    const int64 stride = params.k_rows.stride[1];
    const uint8* keys = reinterpret_cast<const uint8*>(params.k_rows.data) +
                        (paged ? 0 : tile.batch_k) * params.k_rows.stride[0] +
                        tile.head_kv * params.k_rows.stride[2] +
                        ((paged ? 0 : tile.row_k + block * C.tile_k) + lane / 4) * stride +
                        4 * (lane % 4);
#pragma unroll 1
    for (int32 d = 0; d < C.head_dim; d += 32) {
      uint32 a[4];
      find_q(a, lane, d);
#pragma unroll 1
      for (int32 half = 0; half < 2; ++half) {
        // Four codes of a row as two pairs: which of the 16 columns a pair is does not matter, as
        // long as it is the same for both operands.
        const uint32 wide[4] = {
            unpack_codes<C.dtype>(a[0] & 0xffffu), unpack_codes<C.dtype>(a[1] & 0xffffu),
            unpack_codes<C.dtype>(a[0] >> 16), unpack_codes<C.dtype>(a[1] >> 16)};
        a[0] = a[2];
        a[1] = a[3];
        const uint8* key = keys + d + 16 * half;
#pragma unroll
        for (int32 n = 0; n < C.tile_k / 8; ++n, key += 8 * stride) {
          if (paged && n % (C.page_keys / 8) == 0) {
            const auto first = static_cast<uint32>(block * C.tile_k + 8 * n);
            const KeyPlace at = core::page_of(params, tile.sequence, first);
            key = keys + d + 16 * half + at.page * params.k_rows.stride[0] + at.row * stride;
          }
          // No instruction: one address and load at a time, since registers are dearer than time.
          asm volatile("" : "+l"(key)::"memory");
          const uint32 codes = *reinterpret_cast<const uint32*>(key);
          mma_f16(scores[4 * n], scores[4 * n + 1], scores[4 * n + 2], scores[4 * n + 3], wide,
                  unpack_codes<C.dtype>(codes & 0xffffu), unpack_codes<C.dtype>(codes >> 16));
        }
      }
    }
    __syncwarp();  // all lanes have read q before one gives it back
    if constexpr (integers) {
#pragma unroll
      for (int32 i = 0; i < score_count; ++i) scores[i] += zero_score;
    }
    transform();
  }

  // A vote fell: some row of this warp has outgrown its reference. False where sums are infinite:
  // the scores have to be taken again. The output's product is in flight.
  __forceinline__ bool repair(const float (&part)[2], const float (&more)[2], float (&factor)[2]) {
    const float total[2] = {quad_max(part[0]), quad_max(part[1])};
    // More is of values of scale 1, and may be infinite where no weight is.
    const float most = fmaxf(fmaxf(total[0], total[1]), fmaxf(more[0], more[1]));
    if (__any_sync(0xffffffffu, most == infinity)) return false;
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32 i = 0; i < score_count; ++i) {
      largest[(i / 2) % 2] = fmaxf(largest[(i / 2) % 2], scores[i]);
    }
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const bool grown = total[half] > core::e4m3_max;
      // The largest weight becomes the nominal top again; many small ones halve.
      const int32 above = core::guard_exponent(quad_max(largest[half])) - 3;
      const float raised = reference[half] + (grown ? static_cast<float>(max(above, 1)) : 0.0f);
      factor[half] = exp2_approximate(reference[half] - raised);  // a power of two
      reference[half] = raised;
      sum[half] = factor[half] * (sum[half] + more[half]);
      count(0, grown);
    }
#pragma unroll
    for (int32 i = 0; i < score_count; ++i) scores[i] *= factor[(i / 2) % 2];
    return true;
  }

  // Nothing is in flight here: registers are dear enough without its operands. Sums in registers
  // take the output, whose place is free meanwhile.
  __forceinline__ void take_again(const FwdTile& tile, int32 block, float (&factor)[2]) {
    if constexpr (Fp8Sums<C>::in_registers) sums.promote(output);
    compute_scores_again(tile, block);
    exponentiate_exact<false>(factor, {});
    count(1, true);
    count(1, true);
    if constexpr (Fp8Sums<C>::in_registers) {
#pragma unroll
      for (int32 i = 0; i < output_count; ++i) output[i] = 0.0f;
    }
  }

  // Element e of register r of step k is key 32 k + 16 (r / 2) + value_key(4 (lane % 4) + e).
  __forceinline__ void convert(int32 k) {
#pragma unroll
    for (int32 r = 0; r < 4; ++r) {
      const float* s = scores + 16 * k + 8 * (r / 2) + 2 * (r % 2);
      weights[k][r] = pack_e4m3x4(s[0], s[1], s[4], s[5]);
    }
  }
  __forceinline__ void convert() {
#pragma unroll
    for (int32 k = 0; k < C.tile_k / 32; ++k) convert(k);
  }

  // -- Values that no row sees: 0 x NaN is NaN, so they are cleared before the product.

  __forceinline__ void clear_unseen_values(const FwdTile& tile, int32 block) {
    if constexpr (core::is_windowed(C) || C.ragged) {
      const int32 begin = max(0, tile.key_begin - block * C.tile_k);
      const int32 end = min(C.tile_k, tile.key_end - block * C.tile_k);
      if (begin == 0 && end == C.tile_k) return;
      plan.v_ring.wait_full(v_state);
      const SharedAddress v =
          shared_address(plan.v[0]) + static_cast<uint32>(v_state.stage) * Plan::v_bytes;
      int32 thread = 128 * warpgroup + static_cast<int32>(threadIdx.x % 128);
      // No instruction: what follows from it is not worth registers all along the tile.
      asm volatile("" : "+r"(thread));
      constexpr int32 chunks = C.tile_k / 16;  // of 16 keys in a column of v
#pragma unroll 1
      for (int32 i = thread; i < C.head_dim_v * chunks; i += Plan::consumer_threads) {
        const int32 first = i % chunks * 16;
        if (first >= begin && first + 16 <= end) continue;
        const SharedAddress at =
            v + panel_offset(Plan::swizzle_v, C.head_dim_v, static_cast<uint32>(i / chunks),
                             static_cast<uint32>(first));
        uint32 words[4];
        const uint4 old = load_shared_x4(at);
        words[0] = old.x;
        words[1] = old.y;
        words[2] = old.z;
        words[3] = old.w;
#pragma unroll
        for (int32 slot = 0; slot < 16; ++slot) {
          const int32 key = first + core::value_key(slot);
          if (key < begin || key >= end) words[slot / 4] &= ~(0xffu << (8 * (slot % 4)));
        }
        store_shared_x4(at, {words[0], words[1], words[2], words[3]});
      }
      fence_proxy_async_shared();
      named_barrier_sync<Plan::compute_barrier, Plan::consumer_threads>();
    }
  }

  // -- Steps over key blocks

  __forceinline__ void load_row_scale(const FwdTile& tile) {
    const int32 first = C.ragged && params.cu_seqlens_q != nullptr
                            ? core::block_offset(tile.row_q, tile.sequence)
                            : 0;
    const int32 row = tile.q_begin + 64 * warpgroup + 16 * warp();
    // Rows behind the sequence have no scale: what they compute is not stored.
    const bool real = row < tile.capacity_q;
    row_scale =
        real ? params.q_scale[tile.batch_q * params.q_scale_stride[0] +
                              tile.head * params.q_scale_stride[1] + first + row / scale_block]
             : 1.0f;
    row_scale *= C.transform == ScoreTransform::none ? params.scale_log2 : params.transform_in;
  }

  __forceinline__ void reset() {
    reference[0] = reference[1] = -infinity;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int32 i = 0; i < output_count; ++i) output[i] = 0.0f;
    sums.reset();
  }

  // The first block: its scores alone.
  __forceinline__ void begin(const FwdTile& tile, const KeySpan& own, int32 block) {
    plan.q_ring.wait_full(q_state);
    if constexpr (C.q_in_registers) hold_q();
    take_turn();
    k_is_full = false;
    issue_scores();
    pass_turn();
    reset();
    load_row_scale(tile);
    if constexpr (Fp8Sums<C>::in_memory && C.out_apart) wait_for_staging();
    wgmma_wait<0>();
    settle_scores();
    transform();
    float factor[2];
    exponentiate_exact<true, true>(factor, sight(tile, block));
    k_state.advance();
    if (block == tile.begin) release_q_early();
    look_ahead();
    if (block == tile.end - 1 && block > tile.begin) clear_unseen_values(tile, block);
  }

  // A block that other warpgroups see: lets it pass.
  __forceinline__ void skip(const FwdTile& tile, int32 block) {
    take_turn();
    pass_turn();
    plan.k_ring.wait_full(k_state);
    release_k();
    k_state.advance();
    if (block == tile.end - 1) clear_unseen_values(tile, block);
    plan.v_ring.wait_full(v_state);
    release_v();
  }

  static constexpr bool q_stays = !C.out_apart && C.tma_out;  // until out has been staged there
  // The next tile's q comes while this one's last weights are multiplied.
  __forceinline__ void release_q_early() {
    if constexpr (!q_stays && !C.q_in_registers) release_q();
  }

  __forceinline__ void settle_output() {
    wgmma_wait<0>();
    wgmma_hold(output);
    release_v();
  }

  // A further block: its scores, and the output of the block before.
  template <bool masked>
  __forceinline__ void advance(const FwdTile& tile, int32 block) {
    constexpr bool guarded = !masked && C.softmax == SoftmaxPolicy::sum_guard;
    take_turn();
    if constexpr (C.overlap) {
      issue_scores();
      if constexpr (exponentials_bind && guarded) load_scales();
      sums.promote_if_due(output);
      issue_output();
      pass_turn();
      wgmma_wait<1>();
    } else {
      sums.promote_if_due(output);
      issue_output();
      settle_output();
      issue_scores();
      if constexpr (exponentials_bind && guarded) load_scales();
      pass_turn();
      wgmma_wait<0>();
    }
    settle_scores();
    transform();
    if constexpr (!guarded) {
      float factor[2];
      exponentiate_exact<masked>(factor, sight(tile, block));
      const bool rescale = C.softmax == SoftmaxPolicy::online ||
                           __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f);
      if constexpr (C.overlap) settle_output();
      if (rescale) scale_output(factor);
    } else {
      float part[2];
      float more[2];
      exponentiate_guarded(part, more);
      float factor[2];
      if constexpr (exponentials_bind) {
        finish_guarded(tile, block, part, more);
        return;
      }
      const bool grown = beyond_guard(part);
      bool known = true;
      // The wait stands behind a branch: in one basic block with the exponentials, ptxas moves it
      // in front of them, and the output's products overlap nothing.
      if (grown) {
        known = repair(part, more, factor);
      } else {
        sum[0] += more[0];
        sum[1] += more[1];
      }
      if constexpr (C.overlap) settle_output();
      if (!known) take_again(tile, block, factor);
      if (grown) scale_output(factor);
    }
    go_on(tile, block);
    convert();
  }

  // Weights are rounded before the vote, so that conversions fill the cycles between exponentials;
  // where it falls, they are rounded again. The wait for the output's products is early, but short.
  __forceinline__ void finish_guarded(const FwdTile& tile, int32 block, const float (&part)[2],
                                      const float (&more)[2]) {
    if constexpr (C.overlap) settle_output();
    convert();
    if (__builtin_expect(beyond_guard(part), false)) {
      float factor[2];
      if (!repair(part, more, factor)) take_again(tile, block, factor);
      scale_output(factor);
      convert();
    } else {
      sum[0] += more[0];
      sum[1] += more[1];
    }
    go_on(tile, block);
  }

  // Behind a block's softmax.
  __forceinline__ void go_on(const FwdTile& tile, int32 block) {
    k_state.advance();
    if (block == tile.begin) release_q_early();
    sums.count_tile();
    look_ahead();
  }

  // The last block's output.
  __forceinline__ void end(const FwdTile& tile) {
    clear_unseen_values(tile, tile.begin);
    sums.promote_if_due(output);
    take_turn();
    issue_output();
    pass_turn();
    settle_output();
    sums.add_to(output);
  }

  // -- Results

  // Divides by the sum, writes the LSE. The output is on the scale of v already.
  __forceinline__ void finish(const FwdTile& tile) {
    float factor[2];
    bool alive[2];
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const int32 row = tile.q_begin + first_row() + 8 * half;
      const float seen = quad_sum(sum[half]);  // of every lane: no branch around it
      float total = seen;
      float top = reference[half] - top_log2;
      float share = 1.0f;
      if constexpr (C.has_sink) {
        const float sink = params.sink[tile.head * params.sink_stride] * core::log2_e;
        const float before = top;
        top = sink > before ? sink : before;
        const float base = top > -infinity ? top : 0.0f;
        share = exp2_approximate(before - base);
        total = fmaf(total, share, exp2_approximate(sink - base));
      }
      const bool used = row < tile.length_q;
      alive[half] = used && !(seen == 0.0f);
      factor[half] = share * reciprocal_approximate(total);
      if (params.lse != nullptr && lane_index() % 4 == 0 && row < tile.capacity_q) {
        const bool some = used && !(total == 0.0f);
        params.lse[tile.batch_q * params.lse_stride[0] + tile.head * params.lse_stride[1] +
                   (tile.row_q + row) * params.lse_stride[2]] =
            some ? (top + log2_approximate(total)) * core::ln_2 : -infinity;
      }
    }
#pragma unroll
    for (int32 i = 0; i < output_count; ++i) {
      const int32 half = (i / 2) % 2;
      output[i] = alive[half] ? output[i] * factor[half] : 0.0f;
    }
  }

  // What is apart is free again: the tile before has left, and the sums, which lie across warps,
  // have been read.
  __forceinline__ void wait_for_staging() {
    if (lane_index() == 0) bulk_wait_read<0>();
    if constexpr (Fp8Sums<C>::in_memory) {
      named_barrier_sync<128>(Plan::group_barrier + warpgroup);
    } else {
      __syncwarp();
    }
  }

  // Through shared memory, this warp's 16 rows in one piece.
  __forceinline__ void store_tile(const FwdTile& tile) {
    const int32 own = 4 * warpgroup + warp();
    const SharedAddress staging =
        (C.out_apart ? shared_address(plan.apart) : shared_address(plan.q)) +
        static_cast<uint32>(own) * (C.out_apart ? Plan::apart_bytes : Plan::out_bytes);
    stage_rows<C, 16>(staging, output, 0);
    fence_proxy_async_shared();
    __syncwarp();
    if (lane_index() == 0) {
#pragma unroll
      for (int32 panel = 0; panel < Plan::panels_v; ++panel) {
        tma_store(&params.out_map, staging + panel * 16 * Plan::out_row_bytes,
                  {panel * core::panel_columns, tile.row_q + tile.q_begin + 16 * own, tile.head,
                   tile.batch_q});
      }
      bulk_commit();
      // q may be overwritten only when out has been read.
      if constexpr (!C.out_apart) bulk_wait_read<0>();
    }
  }

  __forceinline__ void store_rows(const FwdTile& tile) {
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const int32 row = tile.q_begin + first_row() + 8 * half;
      if (row >= tile.capacity_q) continue;
      store_row<C>(params, output, half,
                   tile.batch_q * params.out_stride[0] + (tile.row_q + row) * params.out_stride[1] +
                       tile.head * params.out_stride[2]);
    }
  }

  __forceinline__ void store(const FwdTile& tile) {
    finish(tile);
    // Out is staged where q was, once all have read it.
    if constexpr (!C.out_apart && C.tma_out) {
      named_barrier_sync<Plan::compute_barrier, Plan::consumer_threads>();
    }
    // All warps, whichever way their rows go: sums lie across them.
    if constexpr (C.out_apart && C.tma_out) wait_for_staging();
    // Tiles of a packed tensor end where the next sequence begins.
    const int32 last = tile.q_begin + 64 * warpgroup + 16 * warp() + 16;
    if (C.tma_out && (!C.ragged || last <= tile.capacity_q)) {
      store_tile(tile);
    } else {
      store_rows(tile);
    }
    if constexpr (!C.out_apart && C.tma_out) release_q();
  }

  __forceinline__ void store_empty(const FwdTile& tile) {
    reset();
    finish(tile);
    store_rows(tile);
  }

  // What this warpgroup's rows see of the tile's blocks; at least one.
  __forceinline__ KeySpan own_span(const FwdTile& tile) const {
    return span_inside<C>(tile, params, tile.q_begin + 64 * warpgroup, 64);
  }

  __forceinline__ void run_tile(const FwdTile& tile) {
    int32 block = tile.end - 1;
    int32 full_begin = tile.full_begin;
    {
      const KeySpan own = own_span(tile);
      if constexpr (C.bound_right) {
#pragma unroll 1
        for (; block >= own.end; --block) skip(tile, block);
      }
      begin(tile, own, block);
      --block;
      if constexpr (core::is_windowed(C)) {
        full_begin = own.full_begin;
        const int32 full_end = own.full_end;
#pragma unroll 1
        for (; block >= full_end; --block) advance<true>(tile, block);
      }
    }
#pragma unroll 1
    for (; block >= full_begin; --block) advance<false>(tile, block);
    if constexpr (C.bound_left) {
#pragma unroll 1
      for (; block >= tile.begin; --block) advance<true>(tile, block);
    }
    end(tile);
    store(tile);
  }

  __forceinline__ void run() {
    if (C.ping_pong && warpgroup == C.warpgroups - 1) {
      named_barrier_arrive<256>(Plan::turn_barrier);
    }
    while (true) {
      plan.tile_ring.wait_full(tile_state);
      // Read where it lies: few of its fields are worth a register in the loops.
      const FwdTile& tile = plan.tiles[tile_state.stage];
      if (tile.last != 0) break;
      if (tile.count() == 0) {
        store_empty(tile);
      } else {
        run_tile(tile);
      }
      // Read again: all along the tile it would take a register.
      tile_state.parity = plan.tile_parity[tile_state.stage];
      __syncwarp();
      if (lane_index() == 0) plan.tile_ring.release(tile_state);
      tile_state.advance();
    }
    // The last turn passed is nobody's: take it, so that the barrier ends as it began.
    if (C.ping_pong && warpgroup == 0) named_barrier_sync<256>(Plan::turn_barrier);
    // Shared memory outlives the stores that read it.
    if (C.tma_out && lane_index() == 0) bulk_wait_read<0>();
  }
};

// ---- Kernel -------------------------------------------------------------------------------------

template <FwdConfig C>
__device__ void fwd_fp8(const FwdFp8Params& params) {
  extern __shared__ __align__(1024) uint8 shared_memory[];
  Fp8Plan<C>& plan = *reinterpret_cast<Fp8Plan<C>*>(shared_memory);
  static_assert(sizeof(Fp8Plan<C>) <= core::fp8_shared_bytes(C));

  if (threadIdx.x == 0) {
    plan.tile_ring.init(1, Fp8Plan<C>::consumer_warps);
    plan.q_ring.init(1, Fp8Plan<C>::consumer_warps);
    plan.k_ring.init(1, Fp8Plan<C>::consumer_warps);
    plan.v_ring.init(1, Fp8Plan<C>::consumer_warps);
    fence_mbarrier_init();
    tma_prefetch_map(&params.q);
    tma_prefetch_map(&params.k);
    tma_prefetch_map(&params.v);
  }
  __syncthreads();

  const int32 warp = warp_index();
  if (warp < 4) {
    registers_shrink<core::producer_registers(C)>();
    if (warp == 0 && (Fp8Load<C>::paged || elect_one())) Fp8Load<C>{plan, params}.run();
  } else {
    registers_grow<core::consumer_registers(C)>();
    Fp8Compute<C>{plan, params, warp / 4 - 1}.run();
  }
}

}  // namespace fovea::device
