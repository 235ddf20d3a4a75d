// The correcting and the storing warps of the forward kernel for Blackwell: output in tensor
// memory, from the first rescaling to the last division, and out.
#pragma once

#include "device/fwd_exact_row.h"
#include "device/fwd_plan_sm100.h"
#include "device/tma.h"

namespace fovea::device {

// ---- Output in tensor memory --------------------------------------------------------------------

// Output of this warp's rows x factor, a row per lane; its stores have yet to be waited for.
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
}

// Rows of a warp, all at once.
__forceinline__ void count_rows(const FwdParams& params, int32 which) {
  if (params.counters != nullptr && lane_index() == 0) atomicAdd(params.counters + which, 32ull);
}

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

  __forceinline__ void begin(TracePhase phase) const {
    mark<C>(plan, params, TraceRole::correct, row() == 0, phase);
  }

  __forceinline__ void correct(int32 t, bool first) {
    const int32 n = seen[t]++;
    const int32 slot = slot_of<C>(t, n);
    begin(TracePhase::softmax);
    mbarrier_wait(plan.factor_full[slot], slot_parity<C>(n));
    if (!first) {
      begin(TracePhase::correct);
      const float factor = plan.row_factor[slot][row()];
      if (__any_sync(0xffffffffu, factor != 1.0f)) {
        if constexpr (!Plan::scores_follow_output) {
          wait_pair<C>(plan.output_done[t], parity_of(n - 1));
        }
        tcgen05_fence_after();
        scale_output<C>(output(t), factor);
        tcgen05_wait_store();
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
      if constexpr (!Plan::rows_are_free) arrive_warp(plan.row_ring[t].free[0]);
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
      if constexpr (core::mends_rows(C)) zero = fmaf(values[i], 0.0f, zero);
    }
  }

  static __forceinline__ uint4 pack_8(const float* values) {
    return uint4{pack<C.out_dtype>(values[0], values[1]), pack<C.out_dtype>(values[2], values[3]),
                 pack<C.out_dtype>(values[4], values[5]), pack<C.out_dtype>(values[6], values[7])};
  }

  // Rows of this warp, a bit for each, whose result is not finite although some of the values they
  // met were not theirs to see. Such rows are computed again, by themselves.
  static __forceinline__ uint32 broken_rows(bool used, float zero) {
    if constexpr (!core::mends_rows(C)) return 0;
    return __ballot_sync(0xffffffffu, used && !(zero == 0.0f));
  }

  template <typename Store>
  __forceinline__ void compute_again(const Fwd100Tile& tile, int32 t, uint32 broken, Store store) {
    if constexpr (core::mends_rows(C)) {
      if (broken != 0) __syncwarp();  // lanes have written what others are going to
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
              static_cast<uint16>(pack<C.out_dtype>(value, 0.0f) & 0xffffu);
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
    begin(TracePhase::output);
    const float factor = finish_row(tile, t);
    if (has_output) {
      plan.output_ring[t].wait_full(output_states[t]);
      tcgen05_fence_after();
    }
    begin(TracePhase::convert);
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
      if constexpr (!core::is_corrected(C)) arrive_for_products<C>(plan.output_ring[t].free[0]);
      output_states[t].advance();
    }
  }

  __forceinline__ void run() {
    begin(TracePhase::tile);
    while (const Fwd100Tile* tile = next_tile<C>(plan, tile_state)) {
      if constexpr (core::is_corrected(C)) {
        const KeySpan all = *tile;  // in registers, like those of the query tiles
        KeySpan spans[C.query_tiles];
#pragma unroll
        for (int32 t = 0; t < C.query_tiles; ++t) spans[t] = tile->spans[t];
#pragma unroll 1
        for (int32 n = 0; n < all.count(); ++n) {
          const int32 block = block_at(all, n);
#pragma unroll
          for (int32 t = 0; t < C.query_tiles; ++t) {
            if (visits(spans[t], block)) correct(t, block == first_of(all, spans[t]));
          }
        }
      }
#pragma unroll
      for (int32 t = 0; t < C.query_tiles; ++t) finish(*tile, t);
      arrive_warp(plan.tile_ring.free[tile_state.stage]);
      tile_state.advance();
      begin(TracePhase::tile);
    }
    begin(TracePhase::none);
  }
};

// ---- Role: store, one thread --------------------------------------------------------------------

template <Fwd100Config C>
__forceinline__ void store(Fwd100Plan<C>& plan, const FwdParams& params) {
  RingState<2> tile_state;
  RingState<1> out_states[C.query_tiles];
  const auto begin = [&](TracePhase phase) {
    mark<C>(plan, params, TraceRole::store, true, phase);
  };
  begin(TracePhase::tile);
  while (const Fwd100Tile* tile = next_tile<C>(plan, tile_state)) {
#pragma unroll
    for (int32 t = 0; t < C.query_tiles; ++t) {
      if (!is_staged<C>(*tile, t)) continue;
      begin(TracePhase::output);
      plan.out_ring[t].wait_full(out_states[t]);
      begin(TracePhase::store);
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
    begin(TracePhase::tile);
  }
  begin(TracePhase::none);
}

}  // namespace fovea::device
