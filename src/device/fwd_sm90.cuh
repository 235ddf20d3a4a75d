// Attention, forward, on Hopper: out = softmax(transform(q k^T), where visible) v, and its LSE.
//
// One warp copies (TMA); one to three warpgroups compute, 64 query rows each. Budget of one step,
// 128 rows x 128 keys x head_dim 128, in cycles of a multiprocessor (docs/kernels/fwd_sm90.md):
//
//   tensor cores    2 x 2 x 128 x 128 x 128 FLOP at 4096 a cycle               2048
//   exponentials    128 x 128 at 16 a cycle                                    1024
//   other issue     multiply-add, sum, half a conversion per score, 128 wide    ~320 of 4 slots
//   copies          64 KB from L2 at 64 bytes a cycle                          1024
//   shared memory   q twice, k and v once per warpgroup, 128 bytes a cycle     1280
//
// Three overlaps hide everything behind the tensor cores: the copying warp runs ahead by the ring;
// warpgroups take turns at issuing products, so that one exponentiates while another multiplies;
// and inside a warpgroup the scores of this tile and weights x values of the one before are in
// flight together. Keys go from the last to the first: masked tiles come first.
//
// The softmax keeps no running maximum in tiles that no mask touches: docs/kernels/softmax.md.
#pragma once

#include "core/softmax.h"
#include "device/fwd_exact_row.h"
#include "device/fwd_fragments_sm90.h"
#include "device/fwd_load_sm90.h"
#include "device/wgmma.h"

namespace fovea::device {

// ---- Role: compute, one warpgroup ---------------------------------------------------------------
//
// A thread holds rows 16 warp + lane / 4 (half 0) and 8 below (half 1) of its warpgroup's 64, and
// every fourth pair of columns: element i of a register array is in half (i / 2) % 2 (tile.h,
// WgmmaAccumulator).

template <FwdConfig C>
struct Compute {
  using Plan = FwdPlan<C>;
  static constexpr int32 score_count = C.tile_k / 2;
  static constexpr int32 output_count = C.head_dim_v / 2;

  Plan& plan;
  const FwdParams& params;
  const int32 warpgroup;  // 0 based among the computing ones
  RingState<C.stages> k_state, v_state;
  RingState<1> q_state;
  RingState<2> tile_state;

  static constexpr int32 query_steps = C.head_dim <= 64 ? C.head_dim / 16 : 1;
  uint64 query[query_steps];         // descriptors of this warpgroup's rows of q
  float scores[score_count];         // [64 x tile_k]: raw, then exponentials
  uint32 weights[C.tile_k / 16][4];  // the same as operand A, 16 bits each
  float output[output_count];        // [64 x head_dim_v]
  bool has_output = false;           // or what output holds is of no tile, and overwritten
  float reference[2];                // per half, in log2 units: core/softmax.h
  float base[2];                     // what exponentiate_guarded() adds: -reference, or infinity
  float sum[2];                      // this thread's share
  float share[2];                    // find_totals()

  // The same in all lanes to the compiler, too, at the price of a shuffle.
  __forceinline__ int32 warp() const { return warp_index() % 4; }
  __forceinline__ int32 warp_row() const {
    return 64 * warpgroup + static_cast<int32>(threadIdx.x % 128) / 32 * 16;
  }
  __forceinline__ int32 first_row() const { return warp_row() + lane_index() / 4; }

  __forceinline__ void mark(TracePhase phase) const {
    trace_mark(plan.trace, params.trace, 1 + warpgroup, threadIdx.x % 128 == 0, phase);
  }

  // -- Turns: who may issue products

  __forceinline__ void take_turn() {
    mark(TracePhase::turn);
    if constexpr (C.ping_pong) named_barrier_sync<256>(Plan::turn_barrier + warpgroup);
    mark(TracePhase::issue);
  }
  __forceinline__ void pass_turn() {
    if constexpr (C.ping_pong) {
      const int32 next = warpgroup + 1 == C.warpgroups ? 0 : warpgroup + 1;
      named_barrier_arrive<256>(Plan::turn_barrier + next);
    }
  }

  // -- Products. Each warp releases for itself: its wait covers its own part of a product.

  __forceinline__ Ring<1>& query_ring() const {
    return plan.q_ring[Plan::query_parts > 1 ? warpgroup : 0];
  }

  __forceinline__ SharedAddress query_tile() const { return shared_address(plan.q); }

  // Products wait for descriptors that are computed between them, so those of q are computed once
  // and hidden from the compiler, which would do it again each time: all where they are few.
  __forceinline__ void find_query() {
    const SharedAddress q = query_tile() + warpgroup * (64 * Plan::row_bytes);
#pragma unroll
    for (int32 i = 0; i < query_steps; ++i) {
      query[i] = wgmma_descriptor(Swizzle::b128, q.value + 32 * i, 0, Plan::group_bytes);
      asm volatile("" : "+l"(query[i]));
    }
  }

  // 16 elements of head_dim; inside a row of the pattern the address has zeros to fill.
  __forceinline__ uint64 query_at(int32 step) const {
    if constexpr (query_steps > 1) return query[step];
    return descriptor_advance(query[0], step / 4 * (Plan::rows * Plan::row_bytes)) | (step % 4 * 2);
  }

  // Of all keys of a block, or of the first half of them.
  template <int32 count>
  __forceinline__ void issue_scores(float (&s)[count]) {
    mark(TracePhase::keys);
    plan.k_ring.wait_full(k_state);
    mark(TracePhase::issue);
    const SharedAddress k =
        shared_address(plan.k[0]) + static_cast<uint32>(k_state.stage) * Plan::k_bytes;
    const uint64 k_tile = wgmma_descriptor(Swizzle::b128, k.value, 0, Plan::group_bytes);
    wgmma_fence();
#pragma unroll
    for (int32 step = 0; step < C.head_dim / 16; ++step) {
      const uint32 panel = step / 4;
      const uint32 inside = (step % 4) * 32;  // 16 elements
      fwd_scores(s, query_at(step),
                 descriptor_advance(k_tile, panel * C.tile_k * Plan::row_bytes + inside), step > 0);
    }
    wgmma_commit();
  }

  __forceinline__ void issue_output() {
    mark(TracePhase::keys);
    plan.v_ring.wait_full(v_state);
    mark(TracePhase::issue);
    const SharedAddress v =
        shared_address(plan.v[0]) + static_cast<uint32>(v_state.stage) * Plan::v_bytes;
    const uint64 v_tile =
        wgmma_descriptor(Swizzle::b128, v.value, C.tile_k * Plan::row_bytes, Plan::group_bytes);
    wgmma_fence();
#pragma unroll
    for (int32 step = 0; step < C.tile_k / 16; ++step) {
      fwd_output(output, weights[step], descriptor_advance(v_tile, step * 16 * Plan::row_bytes),
                 step > 0 || has_output);
    }
    wgmma_commit();
    has_output = true;
  }

  __forceinline__ void release_k() {
    if (lane_index() == 0) plan.k_ring.release(k_state);
    k_state.advance();
  }
  __forceinline__ void release_v() {
    if (lane_index() == 0) plan.v_ring.release(v_state);
    v_state.advance();
  }
  __forceinline__ void release_q() {
    if (lane_index() == 0) query_ring().release(q_state);
    q_state.advance();
  }

  // -- Scores s: all of this thread's, or those of the first half of a block.

  __forceinline__ float scale() const { return score_scale<C>(params); }

  __forceinline__ FwdRow row_of(const FwdTile& tile, int32 half) const {
    return find_row<C>(params, tile, first_row() + 8 * half);
  }

  // From raw products to scores.
  template <int32 count>
  __forceinline__ void transform(float (&s)[count], const FwdTile& tile, int32 block) const {
    if constexpr (C.transform != ScoreTransform::none) {
#pragma unroll
      for (int32 i = 0; i < count; ++i) s[i] = transformed<C>(params, s[i]);
    }
    if constexpr (core::modifies_scores(C)) {
      const int32 origin = block * C.tile_k + 2 * (lane_index() % 4);
#pragma unroll
      for (int32 half = 0; half < 2; ++half) {
        const ScoreRow<C> row(params, tile, row_of(tile, half));
#pragma unroll
        for (int32 i = 2 * half; i < count; i += 4) {
          s[i] = row.modified(s[i], origin + 2 * i - 4 * half);
          s[i + 1] = row.modified(s[i + 1], origin + 2 * i - 4 * half + 1);
        }
      }
    }
  }

  template <int32 count>
  __forceinline__ void mask(float (&s)[count], const FwdTile& tile, int32 block) const {
    hide_unseen<C>(s, params, tile, block, [&](int32 half) { return row_of(tile, half).query; });
  }

  // -- Softmax

  // Beyond this, score x scale inside the multiply-add and the reference, which was rounded, may
  // differ by more than the logits do: scaling must round first, on both sides alike.
  static __forceinline__ bool far(float reference) { return !(fabsf(reference) < 2048.0f); }

  // Exponentials with the tile's true maximum known first. Gives the factors by which what was
  // summed before must shrink.
  template <int32 count>
  __forceinline__ void exponentiate_exact(float (&s)[count], float (&factor)[2]) {
    // In several chains, since a comparison's result comes later than the next one could start.
    float tops[8];
#pragma unroll
    for (int32 i = 0; i < count; ++i) tops[i % 8] = i < 8 ? s[i] : fmaxf(tops[i % 8], s[i]);
    const float top[2] = {fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[4], tops[5])),
                          fmaxf(fmaxf(tops[2], tops[3]), fmaxf(tops[6], tops[7]))};
    constexpr float threshold =
        C.softmax == SoftmaxPolicy::online ? 0.0f : core::rescale_threshold_log2;
    float from[2];
    float part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const core::Rescale raised =
          core::raise_reference(reference[half], quad_max(top[half]) * scale(), threshold);
      reference[half] = raised.reference;
      factor[half] = exp2_approximate(raised.factor_log2);
      // A row that saw nothing yet keeps -infinity, but may not subtract it.
      from[half] = raised.reference > -infinity ? -raised.reference : 0.0f;
    }
    float by = scale();
    if (__any_sync(0xffffffffu, far(from[0]) || far(from[1]))) {
#pragma unroll
      for (int32 i = 0; i < count; ++i) s[i] *= by;
      by = 1.0f;
    }
#pragma unroll
    for (int32 i = 0; i < count; ++i) {
      const int32 half = (i / 2) % 2;
      s[i] = exp2_approximate(fmaf(s[i], by, from[half]));
      part[half] += s[i];
    }
#pragma unroll
    for (int32 half = 0; half < 2; ++half) sum[half] = fmaf(sum[half], factor[half], part[half]);
    find_base();
  }

  // After each change of the reference, not before each use, where the selection would stand in
  // front of half of the exponentials. A reference too far out, or none yet, is left to repair():
  // infinity cannot pass the vote.
  __forceinline__ void find_base() {
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      base[half] = far(reference[half]) ? infinity : -reference[half];
    }
  }

  // Exponentials with the reference known before; part bounds the largest of them.
  __forceinline__ void exponentiate_guarded(float (&part)[2]) {
    part[0] = part[1] = 0.0f;
#pragma unroll
    for (int32 i = 0; i < score_count; i += 2) {
      const int32 half = (i / 2) % 2;
      scores[i] = exp2_approximate(fmaf(scores[i], scale(), base[half]));
      scores[i + 1] = exp2_approximate(fmaf(scores[i + 1], scale(), base[half]));
      part[half] += scores[i] + scores[i + 1];
    }
  }

  // One vote of the warp. NaN counts as beyond: a row that has seen nothing gives infinity, or NaN.
  __forceinline__ bool beyond_guard(const float (&part)[2]) {
    return __any_sync(0xffffffffu, !(part[0] + part[1] <= core::rescale_threshold));
  }

  __forceinline__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int32 i = 0; i < output_count; ++i) output[i] *= factor[(i / 2) % 2];
  }

  __forceinline__ void count(int32 which, bool happened) {
    if (params.counters != nullptr && happened && lane_index() % 4 == 0) {
      atomicAdd(params.counters + which, 1ull);
    }
  }

  // Distance of neighbouring elements of a key.
  __forceinline__ int64 key_step() const {
    return C.source == Source::gather && !C.chunked ? params.k_rows.stride[3] : 1;
  }

  // Two neighbouring elements of a key that has `left` of them from there on, then zeros.
  __forceinline__ uint32 load_pair(const uint16* at, int32 left) const {
    if constexpr (C.source == Source::gather && !C.chunked) {
      const uint32 low = left > 0 ? at[0] : 0u;
      const uint32 high = left > 1 ? at[key_step()] : 0u;
      return low | (high << 16);
    }
    return left > 0 ? *reinterpret_cast<const uint32*>(at) : 0u;
  }

  // The scores of an unmasked tile again, this warp's 16 rows, by mma and from global memory: the
  // ring has let go of the keys.
  __forceinline__ void compute_scores_again(const FwdTile& tile, int32 block) {
#pragma unroll
    for (int32 i = 0; i < score_count; ++i) scores[i] = 0.0f;
    const int32 lane = lane_index();
    const int64 stride = params.k_rows.stride[1];
    const int32 first_key = block * C.tile_k + lane / 4;
    const uint16* first =
        key_row<C>(params, params.k_rows, tile, first_key) + 2 * (lane % 4) * key_step();
    const int32 row = 64 * warpgroup + 16 * warp() + StoreMatrixX4::row(lane);
#pragma unroll 1
    for (int32 d = 0; d < C.head_dim; d += 16) {
      uint32 a[4];
      load_matrix_x4(a, query_tile() + panel_offset(Swizzle::b128, Plan::rows, row,
                                                    2 * (d + StoreMatrixX4::col(lane))));
      const int32 left = params.head_dim - d - 2 * (lane % 4);
      const uint16* key = first + d * key_step();
#pragma unroll
      for (int32 n = 0; n < C.tile_k / 8; ++n, key += 8 * stride) {
        if constexpr (C.source != Source::tma) {
          key = key_row<C>(params, params.k_rows, tile, first_key + 8 * n) +
                (d + 2 * (lane % 4)) * key_step();
        }
        // No instruction: one address and one load at a time, since registers are dearer than time.
        asm volatile("" : "+l"(key)::"memory");
        const uint32 b0 = load_pair(key, left);
        const uint32 b1 = load_pair(key + 8 * key_step(), left - 8);
        if constexpr (C.dtype == DType::bf16) {
          mma_bf16(scores[4 * n], scores[4 * n + 1], scores[4 * n + 2], scores[4 * n + 3], a, b0,
                   b1);
        } else {
          mma_f16(scores[4 * n], scores[4 * n + 1], scores[4 * n + 2], scores[4 * n + 3], a, b0,
                  b1);
        }
      }
    }
    __syncwarp();  // all lanes have read q before one gives it back
    transform(scores, tile, block);
  }

  // A vote fell: some row of this warp has outgrown its reference. Nothing is in flight here.
  __forceinline__ void repair(const FwdTile& tile, int32 block, const float (&part)[2]) {
    float factor[2];
    const float top[2] = {quad_max(part[0]), quad_max(part[1])};
    if (__any_sync(0xffffffffu, !(part[0] < infinity) || !(part[1] < infinity))) {
      compute_scores_again(tile, block);
      exponentiate_exact(scores, factor);
      count(1, true);
      count(1, true);
    } else {
#pragma unroll
      for (int32 half = 0; half < 2; ++half) {
        const bool grown = top[half] > core::rescale_threshold;
        const float raised =
            reference[half] + (grown ? static_cast<float>(core::guard_exponent(top[half])) : 0.0f);
        factor[half] = exp2_approximate(reference[half] - raised);  // a power of two
        reference[half] = raised;
        sum[half] = factor[half] * (sum[half] + part[half]);
        count(0, grown);
      }
#pragma unroll
      for (int32 i = 0; i < score_count; ++i) scores[i] *= factor[(i / 2) % 2];
      find_base();
    }
    scale_output(factor);
  }

  // Zeroes the weights that dropout takes. Two lanes hold four neighbouring columns, which share
  // random words, of two rows: each draws the words of one row and gives half of them away.
  template <int32 count>
  __forceinline__ void drop(float (&s)[count], const FwdTile& tile, int32 block) const {
    const bool odd = lane_index() % 2 != 0;
    const FwdRow own = row_of(tile, odd ? 1 : 0);
    const int32 group = (block * C.tile_k + 2 * (lane_index() % 4)) / 4;
#pragma unroll
    for (int32 j = 0; j < count / 4; ++j) {
      const core::Philox4 drawn = dropout_words(params, tile, own, group + 2 * j);
      uint32 words[2][2];  // [half][column]
#pragma unroll
      for (int32 column = 0; column < 2; ++column) {
        const uint32 given = odd ? drawn.word[column] : drawn.word[2 + column];
        const uint32 kept = odd ? drawn.word[2 + column] : drawn.word[column];
        const uint32 got = __shfl_xor_sync(0xffffffffu, given, 1);
        words[0][column] = odd ? got : kept;
        words[1][column] = odd ? kept : got;
      }
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        if (words[i / 2][i % 2] < params.dropout_threshold) s[4 * j + i] = 0.0f;
      }
    }
  }

  // From exponentials to weights.
  template <int32 count>
  __forceinline__ void convert(float (&s)[count], const FwdTile& tile, int32 block) {
    if constexpr (C.has_dropout) drop(s, tile, block);
#pragma unroll
    for (int32 i = 0; i < count / 2; ++i) {
      weights[i / 4][i % 4] = pack<C.dtype>(s[2 * i], s[2 * i + 1]);
    }
  }

  // -- Values that no row sees: 0 x NaN is NaN, so their rows are cleared before the product.

  __forceinline__ void clear_unseen_values(const FwdTile& tile, int32 block) {
    if constexpr ((core::is_windowed(C) || C.ragged) && C.source != Source::gather) {
      const int32 begin = max(0, tile.key_begin - block * C.tile_k);
      const int32 end = min(C.tile_k, tile.key_end - block * C.tile_k);
      if (begin == 0 && end == C.tile_k) return;
      plan.v_ring.wait_full(v_state);
      const SharedAddress v =
          shared_address(plan.v[0]) + static_cast<uint32>(v_state.stage) * Plan::v_bytes;
      int32 thread = 128 * warpgroup + static_cast<int32>(threadIdx.x % 128);
      // No instruction: what follows from it is not worth registers all along the tile.
      asm volatile("" : "+r"(thread));
      constexpr int32 chunks = 8 * Plan::panels_v;  // of 16 bytes in a row; swizzling permutes them
#pragma unroll 1
      for (int32 i = thread; i < C.tile_k * chunks; i += Plan::consumer_threads) {
        const int32 key = i / chunks;
        if (key >= begin && key < end) continue;
        const int32 panel = (i % chunks) / 8;
        store_shared_x4(v + (panel * C.tile_k + key) * Plan::row_bytes + (i % 8) * 16,
                        uint4{0, 0, 0, 0});
      }
      fence_proxy_async_shared();
      named_barrier_sync<Plan::compute_barrier, Plan::consumer_threads>();
    }
  }

  // -- Steps over key blocks

  __forceinline__ void clear_output() {
#pragma unroll
    for (int32 i = 0; i < output_count; ++i) output[i] = 0.0f;
  }

  // Whether the first rows of a tile may visit fewer blocks than its last ones.
  static constexpr bool passes_by =
      C.bound_right && !C.packed && 64 * (C.warpgroups - 1) >= C.tile_k;

  // How many keys this warpgroup's last row sees by its position, whether there are as many or not.
  __forceinline__ int32 visible_keys(const FwdTile& tile) const {
    const int32 last_row = tile.q_begin + 64 * warpgroup + 63;
    return last_row + tile.length_k - tile.length_q + params.window_right + 1;
  }

  // Behind the last block that this warpgroup's rows visit. One at least, so that there are scores
  // to begin with.
  __forceinline__ int32 end_of(const FwdTile& tile) const {
    if constexpr (!passes_by) return tile.end;
    return min(tile.end, max(tile.begin + 1, (visible_keys(tile) + C.tile_k - 1) / C.tile_k));
  }

  // Blocks that other warpgroups visit and this one does not.
  __forceinline__ void pass_by(const FwdTile& tile) {
    if constexpr (passes_by) {
      const int32 end = end_of(tile);
#pragma unroll 1
      for (int32 block = tile.end - 1; block >= end; --block) {
        take_turn();
        pass_turn();
        // Not before they are there, or this would count for what the memory held before.
        plan.k_ring.wait_full(k_state);
        release_k();
        if (block == tile.end - 1) clear_unseen_values(tile, block);
        plan.v_ring.wait_full(v_state);
        release_v();
      }
    }
  }

  // The first block: its scores alone, of rows that have seen nothing before.
  template <int32 count>
  __forceinline__ void begin(float (&s)[count], const FwdTile& tile) {
    pass_by(tile);
    mark(TracePhase::query);
    query_ring().wait_full(q_state);
    if constexpr (!core::is_eager(C)) take_turn();
    issue_scores(s);
    if constexpr (!core::is_eager(C)) pass_turn();
    has_output = false;
    int32 end = end_of(tile);
    int32 masked = core::is_windowed(C) || end > tile.full_end;
    // No instruction: found under the product, not behind it.
    asm volatile("" : "+r"(end), "+r"(masked)::"memory");
    mark(TracePhase::scores);
    wgmma_wait<0>();
    wgmma_hold(s);
    mark(TracePhase::softmax);
    release_k();
    const int32 block = end - 1;
    reference[0] = reference[1] = -infinity;
    sum[0] = sum[1] = 0.0f;
    transform(s, tile, block);
    if (core::is_windowed(C) || masked != 0) mask(s, tile, block);
    float factor[2];
    exponentiate_exact(s, factor);
    convert(s, tile, block);
    if (end - tile.begin > 1) clear_unseen_values(tile, block);
  }

  // Whether this warpgroup's rows see at most half of the first block that they visit.
  __forceinline__ bool sees_half(const FwdTile& tile) const {
    return visible_keys(tile) <= end_of(tile) * C.tile_k - C.tile_k / 2;
  }

  // The first block where they do. Scores of its own, and not a part of the others: a register that
  // two sizes of products share makes ptxas serialise them.
  __forceinline__ void begin_short(const FwdTile& tile) {
    float s[score_count / 2];
    begin(s, tile);
#pragma unroll
    for (int32 step = C.tile_k / 32; step < C.tile_k / 16; ++step) {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) weights[step][i] = 0;
    }
  }

  __forceinline__ void settle_output() {
    mark(TracePhase::output);
    wgmma_wait<0>();
    wgmma_hold(output);
    mark(TracePhase::convert);
    release_v();
  }

  // A further block: its scores, and the output of the block before.
  template <bool masked>
  __forceinline__ void advance(const FwdTile& tile, int32 block) {
    take_turn();
    if constexpr (C.overlap) {
      issue_scores(scores);
      issue_output();
      pass_turn();
      mark(TracePhase::scores);
      wgmma_wait<1>();
    } else {
      issue_output();
      settle_output();
      issue_scores(scores);
      pass_turn();
      mark(TracePhase::scores);
      wgmma_wait<0>();
    }
    wgmma_hold(scores);
    mark(TracePhase::softmax);
    release_k();
    transform(scores, tile, block);
    if constexpr (masked || C.softmax != SoftmaxPolicy::sum_guard) {
      if constexpr (masked) mask(scores, tile, block);
      float factor[2];
      exponentiate_exact(scores, factor);
      const bool rescale = C.softmax == SoftmaxPolicy::online ||
                           __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f);
      if constexpr (C.overlap) settle_output();
      if (rescale) scale_output(factor);
      convert(scores, tile, block);
    } else {
      float part[2];
      exponentiate_guarded(part);
      const bool grown = beyond_guard(part);
      if constexpr (C.overlap) {
        wgmma_keep_before_wait(grown, plan.grown[4 * warpgroup + warp()]);
        settle_output();
      }
      // While the vote is counted; once more where one fell, which is rare.
      if constexpr (core::is_eager(C)) convert(scores, tile, block);
      if (grown) {
        repair(tile, block, part);
        if constexpr (core::is_eager(C)) convert(scores, tile, block);
      } else {
        sum[0] += part[0];
        sum[1] += part[1];
      }
      if constexpr (!core::is_eager(C)) convert(scores, tile, block);
    }
  }

  // The last block's output.
  __forceinline__ void end(const FwdTile& tile) {
    if constexpr (core::q_apart(C)) release_q();
    clear_unseen_values(tile, tile.begin);
    take_turn();
    issue_output();
    pass_turn();
    if constexpr (finds_totals_early) {
      find_totals(tile, true);
      wait_for_staging();
    }
    settle_output();
  }

  // -- Results

  // A part of a tile, in a tail: where this thread leaves what it holds, float4s 32 apart.
  static constexpr int32 part_pieces = core::part_floats(C) / 4;
  __forceinline__ float4* part_at(int32 part) const {
    const int64 warps = int64{part} * Plan::consumer_warps + 4 * warpgroup + warp();
    return reinterpret_cast<float4*>(params.tail_results) + warps * (32 * part_pieces) +
           lane_index();
  }

  __forceinline__ void leave_part(int32 part) const {
    float4* const place = part_at(part);
#pragma unroll
    for (int32 i = 0; i < output_count / 4; ++i) {
      place[32 * i] =
          float4{output[4 * i], output[4 * i + 1], output[4 * i + 2], output[4 * i + 3]};
    }
    place[32 * (output_count / 4)] = float4{reference[0], reference[1], sum[0], sum[1]};
    fence_gpu();
  }

  // All parts of a tile, in their order, whichever of them came last: a sum is the same each time.
  __forceinline__ void take_parts(int32 first) {
    fence_gpu();
    float top[2] = {-infinity, -infinity};
#pragma unroll 1
    for (int32 i = 0; i < params.tail_parts; ++i) {
      const float4 row = part_at(first + i)[32 * (output_count / 4)];
      top[0] = fmaxf(top[0], row.x);
      top[1] = fmaxf(top[1], row.y);
    }
    clear_output();
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      reference[half] = top[half];
      if (!(top[half] > -infinity)) top[half] = 0.0f;  // nothing seen: not to be subtracted
    }
#pragma unroll 1
    for (int32 i = 0; i < params.tail_parts; ++i) {
      const float4* const place = part_at(first + i);
      const float4 row = place[32 * (output_count / 4)];
      const float factor[2] = {exp2_approximate(row.x - top[0]), exp2_approximate(row.y - top[1])};
      sum[0] = fmaf(factor[0], row.z, sum[0]);
      sum[1] = fmaf(factor[1], row.w, sum[1]);
#pragma unroll
      for (int32 j = 0; j < output_count / 4; ++j) {
        const float4 piece = place[32 * j];
        output[4 * j] = fmaf(factor[0], piece.x, output[4 * j]);
        output[4 * j + 1] = fmaf(factor[0], piece.y, output[4 * j + 1]);
        output[4 * j + 2] = fmaf(factor[1], piece.z, output[4 * j + 2]);
        output[4 * j + 3] = fmaf(factor[1], piece.w, output[4 * j + 3]);
      }
    }
  }

  // Whether this warp holds all of its rows of the tile: it computed all, or the last part of them
  // and has added the others. Nobody waits for a part: the others go on.
  __forceinline__ bool is_whole(const FwdTile& tile) {
    if constexpr (!C.tail) return true;
    if (tile.split < 0) return true;
    leave_part(tile.split);
    __syncwarp();
    const int32 cut = tile.split / params.tail_parts;
    uint32* const arrivals =
        params.tail_arrivals + cut * Plan::consumer_warps + 4 * warpgroup + warp();
    uint32 before = 0;
    if (lane_index() == 0) before = atomicAdd(arrivals, 1u);
    before = __shfl_sync(0xffffffffu, before, 0);
    if (static_cast<int32>(before) != params.tail_parts - 1) return false;
    take_parts(cut * params.tail_parts);
    if (lane_index() == 0) *arrivals = 0;
    return true;
  }

  // Under the last product, where no tile is in parts that others may complete.
  static constexpr bool finds_totals_early = !C.tail;

  // What the rows are yet to be multiplied by, negative for those without keys, and the LSE of rows
  // that are whole. Needs nothing of the output.
  __forceinline__ void find_totals(const FwdTile& tile, bool whole) {
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const FwdRow row = row_of(tile, half);
      const float seen = quad_sum(sum[half]);  // of every lane: no branch around it
      const RowTotal all = total_of<C>(params, row.head, reference[half], seen);
      const bool used = row.query < tile.length_q;
      float by = all.share * reciprocal_approximate(all.total);
      if constexpr (C.has_dropout) by *= params.keep_scale;
      share[half] = used && !(seen == 0.0f) ? by : -1.0f;
      if (whole && params.lse != nullptr && lane_index() % 4 == 0 && row.query < tile.capacity_q) {
        const bool some = used && !(all.total == 0.0f);
        const float none = C.split && !used ? infinity : -infinity;
        params.lse[lse_offset(tile, row)] =
            some ? (all.top + log2_approximate(all.total)) * core::ln_2 : none;
      }
    }
  }

  // Divides by the sum. Gives the rows of this warp, a bit for each of its 16, whose result is not
  // finite although some of the values it met were not the row's to see.
  __forceinline__ uint32 finish(const FwdTile& tile) {
    // Not multiplied by zero, which would leave what is not finite.
    if (__any_sync(0xffffffffu, share[0] < 0.0f || share[1] < 0.0f)) {
#pragma unroll
      for (int32 half = 0; half < 2; ++half) {
        if (!(share[half] < 0.0f)) continue;
#pragma unroll
        for (int32 i = 2 * half; i < output_count; i += 4) output[i] = output[i + 1] = 0.0f;
        share[half] = 0.0f;
      }
    }
    float zero[2] = {0.0f, 0.0f};  // or NaN
#pragma unroll
    for (int32 i = 0; i < output_count; ++i) {
      const int32 half = (i / 2) % 2;
      output[i] *= share[half];
      if constexpr (core::rows_differ(C)) zero[half] = fmaf(output[i], 0.0f, zero[half]);
    }
    uint32 broken = 0;
    if constexpr (core::rows_differ(C)) {
#pragma unroll
      for (int32 half = 0; half < 2; ++half) {
        const float all_columns = quad_sum(zero[half]);  // of every lane, as above
        const bool here = row_of(tile, half).query < tile.length_q;
        const uint32 lanes = __ballot_sync(0xffffffffu, here && !(all_columns == 0.0f));
        // One lane of each quad stands for its row.
#pragma unroll
        for (int32 row = 0; row < 8; ++row) {
          broken |= ((lanes >> (4 * row)) & 1u) << (row + 8 * half);
        }
      }
    }
    return broken;
  }

  __forceinline__ int64 lse_offset(const FwdTile& tile, FwdRow row) const {
    int64 offset = tile.batch_q * params.lse_stride[0] + row.head * params.lse_stride[1] +
                   (tile.row_q + row.query) * params.lse_stride[2];
    if constexpr (C.split) offset += tile.split * params.lse_split_stride;
    return offset;
  }

  __forceinline__ int64 out_offset(const FwdTile& tile, FwdRow row) const {
    int64 offset = tile.batch_q * params.out_stride[0] +
                   (tile.row_q + row.query) * params.out_stride[1] +
                   row.head * params.out_stride[2];
    if constexpr (C.split) offset += tile.split * params.out_split_stride;
    return offset;
  }

  // Until the tile before has left the memory that out is staged in.
  __forceinline__ void wait_for_staging() {
    if constexpr (C.tma_out && C.out_apart) {
      if (lane_index() == 0) bulk_wait_read<0>();
      __syncwarp();
    }
  }

  // Through shared memory, this warp's 16 rows in one piece.
  __forceinline__ void store_tile(const FwdTile& tile, bool whole) {
    const SharedAddress staging = C.out_apart ? shared_address(plan.out) : query_tile();
    if constexpr (!finds_totals_early) wait_for_staging();
    // In one register for all lanes, or every store becomes a loop over the lanes' values.
    const int32 first = 64 * warpgroup + 16 * warp();
    stage_rows<C, Plan::rows>(staging, output, warp_row());
    int32 row = tile.row_q + tile.q_begin + first;
    int32 head = tile.head;
    int32 batch = tile.batch_q;
    // No instruction: read before the fence, which takes long, and not behind it.
    asm volatile("" : "+r"(row), "+r"(head), "+r"(batch)::"memory");
    fence_proxy_async_shared();
    __syncwarp();
    if (whole && lane_index() == 0) {
#pragma unroll
      for (int32 panel = 0; panel < Plan::panels_v; ++panel) {
        tma_store(&params.out_map, staging + (panel * Plan::rows + first) * Plan::row_bytes,
                  {panel * core::panel_columns, row, head, batch});
      }
      bulk_commit();
      // q may be overwritten only when out has been read.
      if constexpr (!C.out_apart) bulk_wait_read<0>();
    }
  }

  // From registers, in chunks that need no copy engine.
  __forceinline__ void store_chunks(const FwdTile& tile, bool whole) {
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const FwdRow row = row_of(tile, half);
      store_row_chunks<C>(params, output, half, out_offset(tile, row),
                          whole && row.query < tile.capacity_q);
    }
  }

  // From registers, row by row.
  __forceinline__ void store_rows(const FwdTile& tile, bool whole) {
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const FwdRow row = row_of(tile, half);
      if (whole && row.query < tile.capacity_q) {
        store_row<C>(params, output, half, out_offset(tile, row));
      }
    }
  }

  // Rows of this warp again, one by one, over what store_rows() left there.
  __forceinline__ void store_exactly(const FwdTile& tile, uint32 broken) {
    __syncwarp();
#pragma unroll 1
    for (int32 i = 0; i < 16; ++i) {
      if (((broken >> i) & 1u) == 0) continue;
      const FwdRow row = find_row<C>(params, tile, 64 * warpgroup + 16 * warp() + i);
      ExactRow<C> exact{params, tile, row};
      exact.run();
      const int64 base = out_offset(tile, row);
#pragma unroll
      for (int32 slot = 0; slot < ExactRow<C>::output_slots; ++slot) {
        const int32 column = lane_index() + 32 * slot;
        if (column < params.head_dim_v) {
          store_element<C>(params.out, base + column * params.out_stride[3], exact.output[slot]);
        }
      }
    }
  }

  __forceinline__ void store(const FwdTile& tile) {
    mark(TracePhase::store);
    const bool whole = is_whole(tile);
    if constexpr (!finds_totals_early) find_totals(tile, whole);
    const uint32 broken = finish(tile);
    // Tiles of a packed tensor end where the next sequence begins.
    const int32 last = tile.q_begin + 64 * warpgroup + 16 * warp() + 16;
    if (C.tma_out && broken == 0 && (!C.ragged || last <= tile.capacity_q)) {
      if constexpr (C.out_direct) {
        store_chunks(tile, whole);
      } else {
        store_tile(tile, whole);
      }
    } else {
      store_rows(tile, whole);
    }
    if constexpr (core::rows_differ(C)) {
      if (broken != 0) store_exactly(tile, broken);
    }
    if constexpr (!core::q_apart(C)) release_q();
  }

  __forceinline__ void store_empty(const FwdTile& tile) {
    clear_output();
    reference[0] = reference[1] = -infinity;
    sum[0] = sum[1] = 0.0f;
    find_totals(tile, true);
    finish(tile);
    store_rows(tile, true);
  }

  // -- Tiles

  // All blocks but the first.
  __forceinline__ void advance_all(const FwdTile& tile) {
    int32 block = end_of(tile) - 2;
    if constexpr (core::is_windowed(C)) {
#pragma unroll 1
      for (; block >= tile.full_end; --block) advance<true>(tile, block);
    }
    const int32 full_begin = tile.full_begin;
#pragma unroll 1
    for (; block >= full_begin; --block) advance<false>(tile, block);
    if constexpr (C.bound_left) {
#pragma unroll 1
      for (; block >= tile.begin; --block) advance<true>(tile, block);
    }
  }

  __forceinline__ void run_tile(const FwdTile& tile) {
    if (core::begins_short(C) && sees_half(tile)) {
      if constexpr (core::begins_short(C)) begin_short(tile);
    } else {
      begin(scores, tile);
    }
    advance_all(tile);
    end(tile);
    store(tile);
  }

  __forceinline__ void release_tile() {
    __syncwarp();
    if (lane_index() == 0) plan.tile_ring.release(tile_state);
    tile_state.advance();
  }

  __forceinline__ void run() {
    find_query();
    if (C.ping_pong && warpgroup == C.warpgroups - 1) {
      named_barrier_arrive<256>(Plan::turn_barrier);
    }
    while (true) {
      mark(TracePhase::tile);
      plan.tile_ring.wait_full(tile_state);
      // Read where it lies: few of its fields are worth a register in the loops.
      const FwdTile& tile = plan.tiles[tile_state.stage];
      // Both at once, before a branch asks for the first; no instruction.
      int32 last = tile.last;
      int32 empty = tile.count() == 0;
      asm volatile("" : "+r"(last), "+r"(empty)::"memory");
      if (last != 0) break;
      if (empty != 0) {
        store_empty(tile);
      } else {
        run_tile(tile);
      }
      release_tile();
    }
    mark(TracePhase::none);
    // The last turn passed is nobody's: take it, so that the barrier ends as it began.
    if (C.ping_pong && warpgroup == 0) named_barrier_sync<256>(Plan::turn_barrier);
    // Shared memory outlives the stores that read it.
    if (C.tma_out && lane_index() == 0) bulk_wait_read<0>();
  }
};

// ---- Kernel -------------------------------------------------------------------------------------

template <FwdConfig C>
__device__ void fwd(const FwdParams& params) {
  extern __shared__ __align__(1024) uint8 shared_memory[];
  FwdPlan<C>& plan = *reinterpret_cast<FwdPlan<C>*>(shared_memory);
  static_assert(sizeof(FwdPlan<C>) <= core::shared_limit_bytes);

  if (threadIdx.x == 0) {
    plan.init_barriers();
    trace_begin(plan.trace);
    if constexpr (C.source != Source::gather) {
      tma_prefetch_map(&params.q);
      tma_prefetch_map(&params.k);
      tma_prefetch_map(&params.v);
    }
  }
  if constexpr (C.packed) {
    // Rows that stand for no query are never loaded, but multiplied.
    for (uint32 i = 16 * threadIdx.x; i < sizeof(plan.q); i += 16 * blockDim.x) {
      store_shared_x4(shared_address(plan.q) + i, uint4{0, 0, 0, 0});
    }
    fence_proxy_async_shared();
  }
  __syncthreads();
  // What comes before this runs while the kernel before it still does; what merges the parts may
  // come as soon as there is room.
  if constexpr (C.reads_once) grid_dependency_wait();
  if constexpr (C.split) grid_launch_dependents();

  const int32 warp = warp_index();
  if (warp < 4) {
    if constexpr (core::divides_registers(C)) registers_shrink<core::producer_registers(C)>();
    if constexpr (C.source == Source::gather) {
      Gather<C>{plan, params, warp}.run();
    } else if constexpr (C.source == Source::paged) {
      if (warp == 0) Load<C>{plan, params}.run();
    } else {
      if (warp == 0 && elect_one()) Load<C>{plan, params}.run();
    }
  } else {
    if constexpr (core::divides_registers(C)) registers_grow<core::consumer_registers(C)>();
    Compute<C>{plan, params, warp / 4 - 1}.run();
  }
}

}  // namespace fovea::device
