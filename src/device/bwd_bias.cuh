// The gradient of an additive bias: dbias = the sum of dS over whatever the bias broadcasts.
//
// A CTA has a tile of 64 x 64 elements of dbias, or one of several equal parts of its sum, and goes
// through every (sequence, head, block of queries, block of keys) that adds to it: scores and dP
// are made again, by mma, and their derivative is summed in registers in a fixed order. So there is
// no workspace of queries x keys and no race, and every result is the same to the bit. Products of
// two operands in shared memory, 64 columns of the head dimension at a time; nothing overlaps.
#pragma once

#include "device/bwd_scores.h"
#include "device/tile.h"

namespace fovea::device {

struct BiasPlan {
  static constexpr int32 pitch = core::bias_tile + 1;
  alignas(128) uint8 rows[core::bias_tile * 128];  // queries, [row][64 columns], swizzled
  alignas(128) uint8 keys[core::bias_tile * 128];
  float sums[core::bias_tile * pitch];  // [query][key]; a row's sum behind it
};

template <auto C>
struct BwdBias {
  static constexpr int32 tile = core::bias_tile;
  using Products = float[tile / 8][4];  // a warp's 16 queries x 64 keys, as mma leaves them

  BiasPlan& plan;
  const BwdParams& params;
  BwdSequence s;
  int32 head, query_begin, key_begin;
  Products sum;

  __forceinline__ int32 warp() const { return warp_index(); }
  // Of element i of n-tile 0, seen from the tile's first.
  __forceinline__ int32 row(int32 i) const { return 16 * warp() + lane_index() / 4 + 8 * (i / 2); }
  __forceinline__ int32 column(int32 i) const { return 2 * (lane_index() % 4) + i % 2; }

  // 64 rows x 64 columns from `column` on; what does not exist is zero. Rows begin at multiples of
  // 16 bytes, which the copy engine wants, too.
  __forceinline__ void load(SharedAddress target, const uint16* data, int64 row_stride, int32 rows,
                            int32 first_column, int32 columns) const {
    for (int32 i = static_cast<int32>(threadIdx.x); i < tile * 8; i += core::bias_threads) {
      const int32 r = i / 8;
      const int32 at = first_column + 8 * (i % 8);
      const uint16* from = data + r * row_stride + at;
      uint32 words[4] = {};
      if (r < rows && at + 8 <= columns) {
        const uint4 all = *reinterpret_cast<const uint4*>(from);
        words[0] = all.x;
        words[1] = all.y;
        words[2] = all.z;
        words[3] = all.w;
      } else if (r < rows) {
#pragma unroll
        for (int32 j = 0; j < 8; ++j) {
          if (at + j < columns) words[j / 2] |= static_cast<uint32>(from[j]) << (16 * (j % 2));
        }
      }
      store_shared_x4(target + panel_offset(Swizzle::b128, tile, r, 16 * (i % 8)),
                      uint4{words[0], words[1], words[2], words[3]});
    }
  }

  // Rows of queries times rows of keys.
  __forceinline__ void multiply(Products& c, const uint16* queries, int64 query_stride,
                                const uint16* keys, int64 key_stride, int32 columns) const {
#pragma unroll
    for (int32 n = 0; n < tile / 8; ++n) {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) c[n][i] = 0.0f;
    }
    const int32 lane = lane_index();
    for (int32 first = 0; first < columns; first += 64) {
      __syncthreads();
      load(shared_address(plan.rows), queries, query_stride, s.length_q - query_begin, first,
           columns);
      load(shared_address(plan.keys), keys, key_stride, s.length_k - key_begin, first, columns);
      __syncthreads();
#pragma unroll
      for (int32 step = 0; step < 4; ++step) {
        uint32 a[4];
        load_matrix_x4(a,
                       shared_address(plan.rows) +
                           panel_offset(Swizzle::b128, tile, 16 * warp() + StoreMatrixX4::row(lane),
                                        2 * (16 * step + StoreMatrixX4::col(lane))));
#pragma unroll
        for (int32 n = 0; n < tile / 8; n += 2) {
          uint32 b[4];
          load_matrix_x4(b, shared_address(plan.keys) +
                                panel_offset(Swizzle::b128, tile, 8 * (n + lane / 16) + lane % 8,
                                             2 * (16 * step + 8 * (lane / 8 % 2))));
          product(c[n], a, b[0], b[1]);
          product(c[n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  static __forceinline__ void product(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    if constexpr (C.dtype == DType::bf16) {
      mma_bf16(d[0], d[1], d[2], d[3], a, b0, b1);
    } else {
      mma_f16(d[0], d[1], d[2], d[3], a, b0, b1);
    }
  }

  __forceinline__ bool sees(int32 query, int32 key) const {
    const int32 position = query + s.length_k - s.length_q;
    bool seen = query < s.length_q && key < s.length_k;
    if constexpr (C.bound_right) seen = seen && key <= position + params.window_right;
    if constexpr (C.bound_left) seen = seen && key >= position - params.window_left;
    return seen;
  }

  // Whether any of the tile's pairs may see each other by position.
  __forceinline__ bool may_see() const {
    if (query_begin >= s.length_q || key_begin >= s.length_k) return false;
    const int32 shift = s.length_k - s.length_q;
    bool any = true;
    if constexpr (C.bound_right) {
      any = any && key_begin <= query_begin + tile - 1 + shift + params.window_right;
    }
    if constexpr (C.bound_left) {
      any = any && key_begin + tile - 1 >= query_begin + shift - params.window_left;
    }
    return any;
  }

  // Adds dS of one tile.
  __forceinline__ void add() {
    if (!may_see()) return;
    const int64 query = static_cast<int64>(s.row_q) + query_begin;
    const int64 key = static_cast<int64>(s.row_k) + key_begin;
    const int32 head_kv = head / params.group_size;
    const auto at = [](const core::Rows& rows, int64 batch, int64 place, int32 which) {
      return rows.data + batch * rows.stride[0] + place * rows.stride[1] + which * rows.stride[2];
    };
    Products scores;
    multiply(scores, at(params.q_rows, s.batch_q, query, head), params.q_rows.stride[1],
             at(params.k_rows, s.batch_k, key, head_kv), params.k_rows.stride[1], params.head_dim);
    Products dweights;
    multiply(dweights,
             params.dout + s.batch_q * params.dout_stride[0] + query * params.dout_stride[1] +
                 head * params.dout_stride[2],
             params.dout_stride[1], at(params.v_rows, s.batch_k, key, head_kv),
             params.v_rows.stride[1], params.head_dim_v);
    const BwdScores<C> of(params, s, head);
    const int64 number = row_number<C>(params, s, head, query_begin);
#pragma unroll
    for (int32 half = 0; half < 2; ++half) {
      const int32 r = row(2 * half);
      if (query_begin + r >= s.length_q) continue;
      const float lse = params.lse_log2[number + r];
      const float delta = params.delta[number + r];
#pragma unroll
      for (int32 n = 0; n < tile / 8; ++n) {
#pragma unroll
        for (int32 e = 0; e < 2; ++e) {
          const int32 i = 2 * half + e;
          sum[n][i] += derivative(of, scores[n][i], dweights[n][i], query_begin + r,
                                  key_begin + 8 * n + column(i), lse, delta);
        }
      }
    }
  }

  __forceinline__ float derivative(const BwdScores<C>& of, float score, float dweight, int32 query,
                                   int32 key, float lse, float delta) const {
    if (!sees(query, key) || !of.shows(query, key)) return 0.0f;
    const float weight = exp2_approximate(of.score(score, query, key).x - lse);
    if constexpr (C.has_dropout) {
      const core::Philox4 words = of.words(query, key / 4);
      const uint32 low = key % 2 == 0 ? words.word[0] : words.word[1];
      const uint32 high = key % 2 == 0 ? words.word[2] : words.word[3];
      const bool kept = (key % 4 < 2 ? low : high) >= params.dropout_threshold;
      dweight = kept ? dweight * params.keep_scale : 0.0f;
    }
    return weight * (dweight - delta);
  }

  // An element of dbias, (first dimensions in `base`, query, key).
  __forceinline__ void store(const int32 (&at)[4], int32 part, float value) const {
    const core::BiasGradient& g = params.dbias;
    if (g.parts == 1) {
      core::store_element(
          g.data, g.dtype,
          at[0] * g.stride[0] + at[1] * g.stride[1] + at[2] * g.stride[2] + at[3] * g.stride[3],
          value);
      return;
    }
    const int64 row = (at[0] * g.extent[1] + at[1]) * g.extent[2] + at[2];
    const int64 count = g.extent[0] * g.extent[1] * g.extent[2] * g.extent[3];
    g.sums[part * count + row * g.extent[3] + at[3]] = value;
  }

  // Sums over the tile what the bias broadcasts, and stores the rest.
  __forceinline__ void finish(int32 batch, int32 bias_head, int32 q_tile, int32 key_tile,
                              int32 part) const {
    const core::BiasGradient& g = params.dbias;
    const int32 thread = static_cast<int32>(threadIdx.x);
#pragma unroll
    for (int32 n = 0; n < tile / 8; ++n) {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) {
        plan.sums[row(i) * BiasPlan::pitch + 8 * n + column(i)] = sum[n][i];
      }
    }
    __syncthreads();
    const bool one_row = g.extent[2] == 1;
    const bool one_column = g.extent[3] == 1;
    if (one_row) {
      if (thread < tile) {
        float total = 0.0f;
        for (int32 r = 0; r < tile; ++r) total += plan.sums[r * BiasPlan::pitch + thread];
        plan.sums[thread] = total;
      }
      __syncthreads();
    }
    if (one_column) {
      if (thread < (one_row ? 1 : tile)) {
        float total = 0.0f;
        for (int32 c = 0; c < tile; ++c) total += plan.sums[thread * BiasPlan::pitch + c];
        plan.sums[thread * BiasPlan::pitch] = total;
      }
      __syncthreads();
    }
    const int32 rows = static_cast<int32>(core::min64(tile, g.extent[2] - q_tile * tile));
    const int32 columns = static_cast<int32>(core::min64(tile, g.extent[3] - key_tile * tile));
    for (int32 i = thread; i < tile * tile; i += core::bias_threads) {
      const int32 r = i / tile;
      const int32 c = i % tile;
      if (r >= rows || c >= columns) continue;
      store({batch, bias_head, q_tile * tile + r, key_tile * tile + c}, part,
            plan.sums[r * BiasPlan::pitch + c]);
    }
  }

  __forceinline__ void run() {
    const core::BiasGradient& g = params.dbias;
    const int32 part = static_cast<int32>(blockIdx.x) % g.parts;
    int32 index = static_cast<int32>(blockIdx.x) / g.parts;
    const int32 key_tile = index % g.key_tiles;
    index /= g.key_tiles;
    const int32 q_tile = index % g.q_tiles;
    index /= g.q_tiles;
    const auto bias_head = static_cast<int32>(index % g.extent[1]);
    const auto batch = static_cast<int32>(index / g.extent[1]);
#pragma unroll
    for (int32 n = 0; n < tile / 8; ++n) {
#pragma unroll
      for (int32 i = 0; i < 4; ++i) sum[n][i] = 0.0f;
    }
    // What broadcasts is gone through.
    const int32 keys = g.extent[3] == 1 ? (params.seqlen_k + tile - 1) / tile : 1;
    const int32 queries = g.extent[2] == 1 ? (params.seqlen_q + tile - 1) / tile : 1;
    const int32 heads = g.extent[1] == 1 ? params.heads_q : 1;
    const int32 batches = g.extent[0] == 1 ? params.sequences : 1;
    const int64 steps = static_cast<int64>(batches) * heads * queries * keys;
    for (int64 step = steps * part / g.parts; step < steps * (part + 1) / g.parts; ++step) {
      int64 rest = step;
      key_begin = tile * static_cast<int32>(key_tile + rest % keys);
      rest /= keys;
      query_begin = tile * static_cast<int32>(q_tile + rest % queries);
      rest /= queries;
      head = static_cast<int32>(bias_head + rest % heads);
      s = bwd_sequence<C>(params, static_cast<int32>(batch + rest / heads));
      add();
    }
    finish(batch, bias_head, q_tile, key_tile, part);
  }
};

template <auto C>
__device__ void bwd_bias(const BwdParams& params) {
  __shared__ BiasPlan plan;
  BwdBias<C>{plan, params}.run();
}

// The parts of every element, in their order.
template <auto C>
__device__ void bwd_bias_sum(const BwdParams& params) {
  const core::BiasGradient& g = params.dbias;
  const int64 count = g.extent[0] * g.extent[1] * g.extent[2] * g.extent[3];
  const int64 step = static_cast<int64>(gridDim.x) * core::bias_threads;
  for (int64 i = static_cast<int64>(blockIdx.x) * core::bias_threads + threadIdx.x; i < count;
       i += step) {
    float sum = 0.0f;
    for (int32 part = 0; part < g.parts; ++part) sum += g.sums[part * count + i];
    int64 rest = i;
    int64 at = 0;
    for (int32 d = 3; d >= 0; --d) {
      at += rest % g.extent[d] * g.stride[d];
      rest /= g.extent[d];
    }
    core::store_element(g.data, g.dtype, at, sum);
  }
}

}  // namespace fovea::device
