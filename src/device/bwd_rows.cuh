// Before and after the backward kernel: what it needs of each query row, and dq from its sums.
//
//   prepare   delta = dout out - dlse;  lse in log2 units;  dq_sums = 0, turns = 0
//   finish    dq = scale * dq_sums
//
// Both are bound by memory: prepare reads out and dout and writes 4 bytes of dq_sums per element of
// dq, finish reads those and writes dq.
#pragma once

#include "device/bwd_blocks.h"
#include "device/scores.h"
#include "device/tile.h"

namespace fovea::device {

// One warp takes one row after the other; 128 threads take a block of rows.
template <BwdConfig C>
__device__ void bwd_prepare(const BwdParams& params) {
  constexpr int32 rows = core::rows_of(C);
  const int32 index = static_cast<int32>(blockIdx.x);
  const int32 pair = index / params.q_blocks;
  const int32 block = index - pair * params.q_blocks;
  const int32 head = pair % params.heads_q;
  const BwdSequence s = bwd_sequence<C>(params, pair / params.heads_q);
  if (block * rows >= s.length_q) return;
  const int64 number = first_block<C>(params, s, head) + block;

  auto* sums = reinterpret_cast<float4*>(params.dq_sums + number * core::dq_block_floats(C));
  constexpr int32 quads = core::dq_block_floats(C) / 4;
  for (int32 i = static_cast<int32>(threadIdx.x); i < quads; i += core::row_threads) {
    sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  constexpr int32 counters = core::turn_counters(C);
  if (C.deterministic && static_cast<int32>(threadIdx.x) < counters) {
    params.turns[number * counters + threadIdx.x] = 0;
  }

  for (int32 row = warp_index(); row < rows; row += core::row_threads / 32) {
    const int32 query = block * rows + row;
    const bool used = query < s.length_q;
    float delta = 0.0f;
    float lse = -infinity;
    if (used) {
      const int64 at = static_cast<int64>(s.row_q) + query;
      const uint16* out = params.out + s.batch_q * params.out_stride[0] +
                          at * params.out_stride[1] + head * params.out_stride[2];
      const uint16* dout = params.dout + s.batch_q * params.dout_stride[0] +
                           at * params.dout_stride[1] + head * params.dout_stride[2];
      for (int32 d = lane_index(); d < params.head_dim_v; d += 32) {
        delta = fmaf(widen<C.dtype>(out[d * params.out_stride[3]]),
                     widen<C.dtype>(dout[d * params.dout_stride[3]]), delta);
      }
      lse = params.lse[s.batch_q * params.lse_stride[0] + head * params.lse_stride[1] +
                       at * params.lse_stride[2]];
      if (params.dlse != nullptr && lane_index() == 0) {
        delta -= params.dlse[s.batch_q * params.dlse_stride[0] + head * params.dlse_stride[1] +
                             at * params.dlse_stride[2]];
      }
    }
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
    if (lane_index() == 0) {
      // A row that sees nothing subtracts infinity, and its weights are zero.
      const bool empty = lse == -infinity;
      params.lse_log2[number * rows + row] = empty ? infinity : lse * core::log2_e;
      params.delta[number * rows + row] = empty ? 0.0f : delta;
    }
  }
}

// The element of a block of dq that is number i of one of a thread's quads of sums.
struct DqPlace {
  int32 row, column;
};

template <BwdConfig C>
__forceinline__ DqPlace dq_place(int32 thread, int32 quad, int32 i) {
  if constexpr (C.tensor_memory && C.pair) {
    // Each CTA has 64 rows; the lanes of the upper half hold the right half of the columns.
    constexpr int32 quads_of_cta = C.head_dim / 8;
    return {64 * (quad / quads_of_cta) + thread % 64,
            C.head_dim / 2 * (thread / 64) + 4 * (quad % quads_of_cta) + i};
  } else if constexpr (C.tensor_memory) {
    return {thread, 4 * quad + i};
  } else {
    const int32 unit = quad / 8;
    const int32 element = quad % 8 * 4 + i;  // of this thread's 32 numbers in the unit
    return {(C.head_dim == 64 ? 64 * unit : 0) + WgmmaAccumulator::row(thread, element),
            (C.head_dim == 64 ? 0 : 64 * unit) + WgmmaAccumulator::col(thread, element)};
  }
}

// A thread's numbers of one block of rows; those beyond the length of the sequence are zero.
template <BwdConfig C>
__forceinline__ void finish_block(const BwdParams& params, const BwdSequence& s, int32 head,
                                  int32 block) {
  constexpr int32 rows = core::rows_of(C);
  const bool summed = block * rows < s.length_q;
  const int64 number = summed ? first_block<C>(params, s, head) + block : 0;
  const float* sums = params.dq_sums + number * core::dq_block_floats(C);
  const int64 base = s.batch_q * params.dq_stride[0] +
                     (static_cast<int64>(s.row_q) + block * rows) * params.dq_stride[1] +
                     head * params.dq_stride[2];
  const int32 thread = static_cast<int32>(threadIdx.x);
#pragma unroll 1
  for (int32 quad = 0; quad < core::dq_block_floats(C) / (4 * core::row_threads); ++quad) {
    float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
    if (summed) {
      sum = reinterpret_cast<const float4*>(sums)[quad * core::row_threads + thread];
    }
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
      const auto [row, column] = dq_place<C>(thread, quad, i);
      const int32 query = block * rows + row;
      if (query >= s.capacity_q || column >= params.head_dim) continue;
      const float value = query < s.length_q ? values[i] * params.scale : 0.0f;
      const int64 offset = base + row * params.dq_stride[1] + column * params.dq_stride[3];
      core::store_element(params.dq, C.wide ? DType::f32 : C.dtype, offset, value);
    }
  }
}

template <BwdConfig C>
__device__ void bwd_finish(const BwdParams& params) {
  const int32 index = static_cast<int32>(blockIdx.x);
  const int32 pair = index / params.q_blocks;
  const BwdSequence s = bwd_sequence<C>(params, pair / params.heads_q);
  // One round, but for rows behind the last sequence.
  for (int32 block = index - pair * params.q_blocks; block * core::rows_of(C) < s.capacity_q;
       block += params.q_blocks) {
    finish_block<C>(params, s, pair % params.heads_q, block);
  }
}

}  // namespace fovea::device
