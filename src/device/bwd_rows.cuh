// Before and after the backward kernel: what it needs of each query row, and dq from its sums; the
// gradient of the sinks.
//
//   prepare   delta = dout out - dlse;  lse in log2 units;  dq_sums, turns, scheduler = 0
//   finish    dq = scale * dq_sums
//   sink      dsink = -sum of exp(sink - lse) delta over the rows of a head
//
// All are bound by memory: prepare reads out and dout and writes 4 bytes of dq_sums per element of
// dq, finish reads those and writes dq.
#pragma once

#include "device/bwd_blocks.h"
#include "device/scores.h"
#include "device/tile.h"

namespace fovea::device {

template <auto C>
__forceinline__ float octet_product(uint4 a, uint4 b) {
  const uint32 words[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
  float sum = 0.0f;
#pragma unroll
  for (int32 i = 0; i < 4; ++i) {
    const float2 of_a = unpack<C.dtype>(words[0][i]);
    const float2 of_b = unpack<C.dtype>(words[1][i]);
    sum = fmaf(of_a.x, of_b.x, fmaf(of_a.y, of_b.y, sum));
  }
  return sum;
}

// How a warp takes rows: several at a time, `lanes` for each.
template <auto C>
struct RowLanes {
  static constexpr int32 lanes = C.head_dim_v <= 64 ? 8 : C.head_dim_v <= 128 ? 16 : 32;
  static constexpr int32 at_a_time = 32 / lanes;
  static constexpr int32 together = 4 * at_a_time;  // all are read before any is summed
};

// The products of rows `first` .. of a block, each in all lanes that take it: those of rows
// i at_a_time + lane / lanes in delta[i].
template <auto C>
__forceinline__ void row_products(const BwdParams& params, const BwdSequence& s, int32 head,
                                  int32 query, float (&delta)[4]) {
  using Lanes = RowLanes<C>;
  const int32 own = lane_index() % Lanes::lanes;
  const int32 first = query + lane_index() / Lanes::lanes;
  const int64 at = static_cast<int64>(s.row_q) + first;
  const uint16* const out_row = params.out + s.batch_q * params.out_stride[0] +
                                at * params.out_stride[1] + head * params.out_stride[2];
  const uint16* const dout_row = params.dout + s.batch_q * params.dout_stride[0] +
                                 at * params.dout_stride[1] + head * params.dout_stride[2];
  const auto exists = [&](int32 i) { return first + i * Lanes::at_a_time < s.length_q; };
  if (params.out_in_octets) {
    uint4 out[4] = {};
    uint4 dout[4] = {};
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
      if (!exists(i) || 8 * own >= params.head_dim_v) continue;
      const int64 step = i * Lanes::at_a_time;
      out[i] = *reinterpret_cast<const uint4*>(out_row + step * params.out_stride[1] + 8 * own);
      dout[i] = *reinterpret_cast<const uint4*>(dout_row + step * params.dout_stride[1] + 8 * own);
    }
#pragma unroll
    for (int32 i = 0; i < 4; ++i) delta[i] = octet_product<C>(out[i], dout[i]);
  } else {
#pragma unroll
    for (int32 i = 0; i < 4; ++i) delta[i] = 0.0f;
#pragma unroll 1
    for (int32 d = own; d < params.head_dim_v; d += Lanes::lanes) {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        if (!exists(i)) continue;
        const int64 step = i * Lanes::at_a_time;
        const uint16 a = out_row[step * params.out_stride[1] + d * params.out_stride[3]];
        const uint16 b = dout_row[step * params.dout_stride[1] + d * params.dout_stride[3]];
        delta[i] = fmaf(widen<C.dtype>(a), widen<C.dtype>(b), delta[i]);
      }
    }
  }
#pragma unroll
  for (int32 step = Lanes::lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int32 i = 0; i < 4; ++i) delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], step);
  }
}

// Rows of a block from `first` on, by one warp.
template <auto C>
__forceinline__ void prepare_rows(const BwdParams& params, const BwdSequence& s, int32 head,
                                  int32 block, int32 first, int64 number) {
  using Lanes = RowLanes<C>;
  const int32 query = block * core::rows_of(C) + first;
  // Each of four lanes of a row has one of the rows that it took part in.
  const int32 own = lane_index() % Lanes::lanes;
  const int32 row = own % 4 * Lanes::at_a_time + lane_index() / Lanes::lanes;
  const int64 at = static_cast<int64>(s.row_q) + query + row;
  const bool exists = query + row < s.length_q && own < 4;
  float lse = -infinity;
  if (exists) {
    lse = params.lse[s.batch_q * params.lse_stride[0] + head * params.lse_stride[1] +
                     at * params.lse_stride[2]];
  }
  float deltas[4];
  row_products<C>(params, s, head, query, deltas);
  if (own >= 4) return;
  float delta = own < 2 ? (own == 0 ? deltas[0] : deltas[1]) : (own == 2 ? deltas[2] : deltas[3]);
  if (exists && params.dlse != nullptr) {
    delta -= params.dlse[s.batch_q * params.dlse_stride[0] + head * params.dlse_stride[1] +
                         at * params.dlse_stride[2]];
  }
  // A row that sees nothing subtracts infinity, and its weights are zero: lse is then -infinity, or
  // the sink. An infinite logit leaves no weight that is a number.
  const bool empty = lse == -infinity;
  float lse_log2 = lse * core::log2_e;
  if (lse == infinity) lse_log2 = core::float_of(0x7fc00000u);
  if (empty) lse_log2 = infinity;
  if constexpr (core::hides_anywhere(C)) {
    if (params.sink != nullptr && lse == params.sink[head * params.sink_stride]) {
      lse_log2 = infinity;
    }
  }
  params.lse_log2[number * core::rows_of(C) + first + row] = lse_log2;
  params.delta[number * core::rows_of(C) + first + row] = empty ? 0.0f : delta;
}

// 128 threads take a block of rows.
template <auto C>
__device__ void bwd_prepare(const BwdParams& params) {
  constexpr int32 rows = core::rows_of(C);
  constexpr int32 warps = core::row_threads / 32;
  constexpr int32 together = RowLanes<C>::together;
  const int32 index = static_cast<int32>(blockIdx.x);
  const int32 pair = index / params.q_blocks;
  const int32 block = index - pair * params.q_blocks;
  const int32 head = pair % params.heads_q;
  const BwdSequence s = bwd_sequence<C>(params, pair / params.heads_q);
  if (params.scheduler != nullptr && index == 0 && threadIdx.x == 0) *params.scheduler = 0;
  if (block * rows >= s.length_q) return;
  const int64 number = first_block<C>(params, s, head) + block;

  constexpr int32 quads = core::dq_block_floats(C) / 4;
  auto* sums = reinterpret_cast<float4*>(params.dq_sums) + number * quads;
  for (int32 i = static_cast<int32>(threadIdx.x); i < quads; i += core::row_threads) {
    sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  constexpr int32 counters = core::turn_counters(C);
  if (C.deterministic && static_cast<int32>(threadIdx.x) < counters) {
    params.turns[number * counters + threadIdx.x] = 0;
  }

  static_assert(rows % (warps * together) == 0);
#pragma unroll 1
  for (int32 row = together * warp_index(); row < rows; row += warps * together) {
    prepare_rows<C>(params, s, head, block, row, number);
  }
}

// Four neighbouring numbers of dq, of which `left` exist.
template <auto C>
__forceinline__ void store_dq_quad(const BwdParams& params, int64 at, const float (&values)[4],
                                   int32 left) {
  if (params.dq_in_quads) {
    if constexpr (C.wide) {
      *reinterpret_cast<float4*>(static_cast<float*>(params.dq) + at) =
          float4{values[0], values[1], values[2], values[3]};
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16*>(params.dq) + at) =
          uint2{pack<C.dtype>(values[0], values[1]), pack<C.dtype>(values[2], values[3])};
    }
    return;
  }
#pragma unroll
  for (int32 i = 0; i < 4; ++i) {
    if (i >= left) return;
    core::store_element(params.dq, C.wide ? DType::f32 : C.dtype, at + i * params.dq_stride[3],
                        values[i]);
  }
}

// One unit of a block of rows: from the order of a warpgroup's accumulator through shared memory to
// whole rows. Rows beyond the length of the sequence are zero.
template <auto C>
__forceinline__ void finish_unit(const BwdParams& params, const BwdSequence& s, int32 head,
                                 int32 block, int32 unit) {
  constexpr int32 rows = core::rows_of(C);
  constexpr int32 pitch = core::panel_columns + 8;  // pairs of 8 rows then meet no bank twice
  __shared__ float staged[64 * pitch];
  const int32 thread = static_cast<int32>(threadIdx.x);
  const int32 first_row = block * rows + (rows == 128 ? 64 * unit : 0);
  const int32 first_column = rows == 128 ? 0 : 64 * unit;
  if (block * rows < s.length_q) {
    const int64 number = first_block<C>(params, s, head) + block;
    const auto* sums = reinterpret_cast<const float4*>(
        params.dq_sums + (number * core::dq_units_of(C) + unit) * core::dq_unit_floats);
#pragma unroll
    for (int32 quad = 0; quad < 8; ++quad) {
      const float4 sum = sums[quad * core::row_threads + thread];
      float* low = staged + WgmmaAccumulator::row(thread, 0) * pitch +
                   WgmmaAccumulator::col(thread, 4 * quad);
      *reinterpret_cast<float2*>(low) = float2{sum.x, sum.y};
      *reinterpret_cast<float2*>(low + 8 * pitch) = float2{sum.z, sum.w};
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int32 i = thread; i < 64 * 16; i += core::row_threads) {
    const int32 query = first_row + i / 16;
    const int32 column = first_column + 4 * (i % 16);
    if (query >= s.capacity_q || column >= params.head_dim) continue;
    float values[4] = {};
    if (query < s.length_q) {
      const float4 sum = *reinterpret_cast<const float4*>(staged + i / 16 * pitch + 4 * (i % 16));
      values[0] = sum.x * params.scale;
      values[1] = sum.y * params.scale;
      values[2] = sum.z * params.scale;
      values[3] = sum.w * params.scale;
    }
    const int64 at = s.batch_q * params.dq_stride[0] +
                     (static_cast<int64>(s.row_q) + query) * params.dq_stride[1] +
                     head * params.dq_stride[2] + column * params.dq_stride[3];
    store_dq_quad<C>(params, at, values, params.head_dim - column);
  }
  __syncthreads();
}

// A block of rows from the order of tensor memory, in which a thread's quads are neighbours in a
// row: those of one row, or (pair) of half a row of the 64 that each CTA has, the lanes of the
// upper half with the right half of the columns.
template <auto C>
__forceinline__ void finish_lanes(const BwdParams& params, const BwdSequence& s, int32 head,
                                  int32 block) {
  const bool summed = block * core::rows_of(C) < s.length_q;
  const int64 number = summed ? first_block<C>(params, s, head) + block : 0;
  const auto* sums =
      reinterpret_cast<const float4*>(params.dq_sums + number * core::dq_block_floats(C));
  const int32 thread = static_cast<int32>(threadIdx.x);
  constexpr int32 quads = core::dq_block_floats(C) / (4 * core::row_threads);
#pragma unroll 1
  for (int32 quad = 0; quad < quads; ++quad) {
    constexpr int32 quads_of_cta = C.head_dim / 8;  // pair
    const int32 row = C.pair ? 64 * (quad / quads_of_cta) + thread % 64 : thread;
    const int32 column =
        C.pair ? C.head_dim / 2 * (thread / 64) + 4 * (quad % quads_of_cta) : 4 * quad;
    const int32 query = block * core::rows_of(C) + row;
    if (query >= s.capacity_q || column >= params.head_dim) continue;
    float values[4] = {};
    if (query < s.length_q) {
      const float4 sum = sums[quad * core::row_threads + thread];
      values[0] = sum.x * params.scale;
      values[1] = sum.y * params.scale;
      values[2] = sum.z * params.scale;
      values[3] = sum.w * params.scale;
    }
    const int64 at = s.batch_q * params.dq_stride[0] +
                     (static_cast<int64>(s.row_q) + query) * params.dq_stride[1] +
                     head * params.dq_stride[2] + column * params.dq_stride[3];
    store_dq_quad<C>(params, at, values, params.head_dim - column);
  }
}

template <auto C>
__device__ void bwd_finish(const BwdParams& params) {
  const int32 index = static_cast<int32>(blockIdx.x);
  const int32 pair = index / params.q_blocks;
  const BwdSequence s = bwd_sequence<C>(params, pair / params.heads_q);
  // One round, but for rows behind the last sequence.
  for (int32 block = index - pair * params.q_blocks; block * core::rows_of(C) < s.capacity_q;
       block += params.q_blocks) {
    if constexpr (C.tensor_memory) {
      finish_lanes<C>(params, s, pair % params.heads_q, block);
    } else {
#pragma unroll 1
      for (int32 unit = 0; unit < core::dq_units_of(C); ++unit) {
        finish_unit<C>(params, s, pair % params.heads_q, block, unit);
      }
    }
  }
}

// One CTA for each query head; the order of its sums is fixed.
template <auto C>
__device__ void bwd_sink(const BwdParams& params) {
  __shared__ float parts[core::sink_threads];
  const int32 head = static_cast<int32>(blockIdx.x);
  const int32 thread = static_cast<int32>(threadIdx.x);
  const float sink = params.sink[head * params.sink_stride];
  float sum = 0.0f;
  for (int32 b = 0; b < params.sequences; ++b) {
    const BwdSequence s = bwd_sequence<C>(params, b);
    const float* lse = params.lse + s.batch_q * params.lse_stride[0] + head * params.lse_stride[1] +
                       s.row_q * params.lse_stride[2];
    const float* delta = params.delta + row_number<C>(params, s, head, 0);
    for (int32 query = thread; query < s.length_q; query += core::sink_threads) {
      const float weight =
          exp2_approximate((sink - lse[query * params.lse_stride[2]]) * core::log2_e);
      sum = fmaf(-weight, delta[query], sum);
    }
  }
  parts[thread] = sum;
  for (int32 width = core::sink_threads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (thread < width) parts[thread] += parts[thread + width];
  }
  // A sink of -infinity is none: its weights above may be no numbers.
  if (thread == 0) params.dsink[head * params.dsink_stride] = sink > -infinity ? parts[0] : 0.0f;
}

}  // namespace fovea::device
