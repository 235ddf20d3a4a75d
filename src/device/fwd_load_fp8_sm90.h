// Attention in 8 bits on Hopper (device/fwd_fp8_sm90.cuh): what lies where in shared memory, and
// the thread that brings it there.
#pragma once

#include "core/fp8.h"
#include "device/fwd_tiles.h"
#include "device/pipeline.h"
#include "device/tma.h"

namespace fovea::device {

using core::FwdFp8Params;
using core::KeyPlace;
using core::KeyScale;
using core::scale_block;

// ---- Plan: shared memory, barriers, registers ---------------------------------------------------

template <FwdConfig C>
struct Fp8Plan {
  static constexpr int32 rows = core::rows_of(C);
  // q and k: panels of pattern_qk columns, each [row][column]; v: panels of pattern_v keys, each
  // [column][key]. A copy fills whole rows of a panel: in pages v's are no wider than it.
  static constexpr Swizzle swizzle_qk = pattern_of(C.head_dim);
  static constexpr Swizzle swizzle_v =
      pattern_of(C.source == Source::paged ? C.page_keys : C.tile_k);
  static constexpr int32 pattern_qk = static_cast<int32>(swizzle_bytes(swizzle_qk));
  static constexpr int32 pattern_v = static_cast<int32>(swizzle_bytes(swizzle_v));
  static constexpr uint32 q_bytes = rows * C.head_dim;
  static constexpr uint32 k_bytes = C.tile_k * C.head_dim;
  static constexpr uint32 v_bytes = C.tile_k * C.head_dim_v;
  static constexpr int32 groups = C.tile_k / scale_block;
  static constexpr uint32 scale_bytes = groups * sizeof(KeyScale);
  // out: for each warp, panels of 64 columns of 16 bits, each [16 rows][64], 128-byte swizzle.
  static constexpr int32 panels_v = core::panels(C.head_dim_v);
  static constexpr uint32 out_row_bytes = 2 * core::panel_columns;
  static constexpr uint32 out_bytes = 16 * panels_v * out_row_bytes;  // of a warp
  // Sums: 4 of each thread side by side, [head_dim_v / 8][thread][4] for each warpgroup.
  static constexpr uint32 sum_bytes = core::fp8_sum_bytes(C) / (4 * C.warpgroups);
  static constexpr uint32 apart_bytes =
      C.out_apart ? (out_bytes > sum_bytes ? out_bytes : sum_bytes) : sum_bytes;

  alignas(1024) uint8 q[q_bytes];
  alignas(1024) uint8 k[C.stages][k_bytes];
  alignas(1024) uint8 v[C.stages][v_bytes];
  alignas(
      1024) uint8 apart[apart_bytes > 0 ? 4 * C.warpgroups* apart_bytes : 16];  // sums, then out
  // Scales of a key tile arrive with k and are read after k has been released. Their slot is
  // written again 2 C.stages tiles later, when every warp has released a later k.
  KeyScale scales[2 * C.stages][groups];
  static __forceinline__ uint32 scale_slot(const RingState<C.stages>& k_state) {
    return static_cast<uint32>(k_state.stage) + k_state.parity * C.stages;
  }
  Ring<C.stages> k_ring;  // full: 1 producer and the bytes; free: each computing warp
  Ring<C.stages> v_ring;
  Ring<1> q_ring;
  Ring<2> tile_ring;  // full: 1 producer; free: each computing warp
  FwdTile tiles[2];
  uint32 tile_parity[2];  // of the ring

  static constexpr uint32 consumer_warps = 4 * C.warpgroups;
  static constexpr int32 consumer_threads = 128 * C.warpgroups;

  static constexpr int32 turn_barrier = 1;     // + warpgroup: its turn to issue products
  static constexpr int32 group_barrier = 5;    // + warpgroup: its own 128 threads
  static constexpr int32 compute_barrier = 9;  // all computing threads

  static_assert(core::is_eight_bit(C.dtype));
  static_assert(C.warpgroups == 2 || C.warpgroups == 3, "the register pool is split for these");
  static_assert(C.head_dim % 32 == 0 && C.head_dim <= 256);
  static_assert(C.head_dim_v % 16 == 0 && C.head_dim_v <= 256);
  static_assert(C.tile_k % scale_block == 0 && C.tile_k <= 256);
  static_assert(C.source == Source::tma || (C.source == Source::paged && C.page_keys == pattern_v &&
                                            C.tile_k % C.page_keys == 0));
  static_assert(!C.tma_out || core::size_bytes(C.out_dtype) == 2);
  static_assert(C.out_apart || !C.tma_out || sum_bytes == 0, "out is staged where the sums were");
  static_assert(C.out_apart || 4 * out_bytes * C.warpgroups <= q_bytes,
                "out is staged where q was");
};

// ---- Role: load, one thread; a warp where k and v lie in pages ----------------------------------

template <FwdConfig C>
struct Fp8Load {
  using Plan = Fp8Plan<C>;
  static constexpr bool paged = C.source == Source::paged;

  Plan& plan;
  const FwdFp8Params& params;
  RingState<C.stages> k_state, v_state;
  RingState<1> q_state;
  RingState<2> tile_state;

  // One thread acts for all. Pages are looked up and copied by a lane each.
  static __forceinline__ bool leads() { return !paged || lane_index() == 0; }

  __forceinline__ void load_q(const FwdTile& tile) {
    plan.q_ring.wait_free(q_state);
    if (leads()) {
      plan.q_ring.expect(q_state, Plan::q_bytes);
      const CachePolicy once = cache_policy_evict_first();
#pragma unroll
      for (int32 column = 0; column < C.head_dim; column += Plan::pattern_qk) {
        tma_load(shared_address(plan.q) + column * Plan::rows, &params.q, plan.q_ring.full[0],
                 {column, tile.row_q + tile.q_begin, tile.head, tile.batch_q}, once);
      }
    }
    q_state.advance();
  }

  // A lane's keys of a block, which lie in one page and are whole blocks of scales.
  static __forceinline__ int32 own_keys() { return lane_index() * C.page_keys; }
  static __forceinline__ bool has_keys() { return own_keys() < C.tile_k; }

  __forceinline__ KeyPlace find_keys(const FwdTile& tile, int32 block) const {
    if (!has_keys()) return {0, 0};
    const int32 key = first_of_piece<C>(tile, block, own_keys(), C.page_keys);
    return core::page_of(params, tile.sequence, static_cast<uint32>(key));
  }

  __forceinline__ void load_k_pages(const FwdTile& tile, const KeyPlace& at) {
    plan.k_ring.wait_free(k_state);
    if (leads()) plan.k_ring.expect(k_state, Plan::k_bytes + Plan::scale_bytes);
    if (has_keys()) {
      Barrier& full = plan.k_ring.full[k_state.stage];
      const CachePolicy again = cache_policy_evict_last();
      const SharedAddress target = shared_address(plan.k[0]) +
                                   static_cast<uint32>(k_state.stage) * Plan::k_bytes +
                                   own_keys() * Plan::pattern_qk;
#pragma unroll
      for (int32 column = 0; column < C.head_dim; column += Plan::pattern_qk) {
        tma_load(target + column * C.tile_k, &params.k, full,
                 {column, at.row, tile.head_kv, at.page}, again);
      }
      constexpr uint32 bytes = C.page_keys / scale_block * sizeof(KeyScale);
      const KeyScale* scales = params.key_scale + at.page * params.key_scale_stride[0] +
                               tile.head_kv * params.key_scale_stride[1] + at.row / scale_block;
      bulk_load(shared_address(plan.scales[0]) + Plan::scale_slot(k_state) * Plan::scale_bytes +
                    static_cast<uint32>(lane_index()) * bytes,
                scales, bytes, full);
    }
    k_state.advance();
  }

  __forceinline__ void load_v_pages(const FwdTile& tile, const KeyPlace& at) {
    plan.v_ring.wait_free(v_state);
    if (leads()) plan.v_ring.expect(v_state, Plan::v_bytes);
    if (has_keys()) {
      tma_load(shared_address(plan.v[0]) + static_cast<uint32>(v_state.stage) * Plan::v_bytes +
                   own_keys() * C.head_dim_v,
               &params.v, plan.v_ring.full[v_state.stage], {at.row, 0, tile.head_kv, at.page},
               cache_policy_evict_last());
    }
    v_state.advance();
  }

  __forceinline__ void load_k(const FwdTile& tile, int32 block) {
    plan.k_ring.wait_free(k_state);
    plan.k_ring.expect(k_state, Plan::k_bytes + Plan::scale_bytes);
    Barrier& full = plan.k_ring.full[k_state.stage];
    const CachePolicy again = cache_policy_evict_last();
    const SharedAddress target =
        shared_address(plan.k[0]) + static_cast<uint32>(k_state.stage) * Plan::k_bytes;
#pragma unroll
    for (int32 column = 0; column < C.head_dim; column += Plan::pattern_qk) {
      tma_load(target + column * C.tile_k, &params.k, full,
               {column, tile.row_k + block * C.tile_k, tile.head_kv, tile.batch_k}, again);
    }
    const KeyScale* scales = params.key_scale + tile.batch_k * params.key_scale_stride[0] +
                             tile.head_kv * params.key_scale_stride[1] + first_block(tile) +
                             block * Plan::groups;
    bulk_load(shared_address(plan.scales[0]) + Plan::scale_slot(k_state) * Plan::scale_bytes,
              scales, Plan::scale_bytes, full);
    k_state.advance();
  }

  __forceinline__ void load_v(const FwdTile& tile, int32 block) {
    plan.v_ring.wait_free(v_state);
    plan.v_ring.expect(v_state, Plan::v_bytes);
    const CachePolicy again = cache_policy_evict_last();
    const SharedAddress target =
        shared_address(plan.v[0]) + static_cast<uint32>(v_state.stage) * Plan::v_bytes;
    const int32 first_key = first_block(tile) * scale_block + block * C.tile_k;
#pragma unroll
    for (int32 key = 0; key < C.tile_k; key += Plan::pattern_v) {
      tma_load(target + key * C.head_dim_v, &params.v, plan.v_ring.full[v_state.stage],
               {first_key + key, 0, tile.head_kv, tile.batch_k}, again);
    }
    v_state.advance();
  }

  // Block of 32 keys with which the sequence begins.
  __forceinline__ int32 first_block(const FwdTile& tile) const {
    return C.ragged && params.cu_seqlens_k != nullptr
               ? core::block_offset(tile.row_k, tile.sequence)
               : 0;
  }

  // Tells the computing warps which tile comes next.
  __forceinline__ void publish(const FwdTile& tile) {
    plan.tile_ring.wait_free(tile_state);
    if (leads()) {
      plan.tiles[tile_state.stage] = tile;
      plan.tile_parity[tile_state.stage] = tile_state.parity;
      mbarrier_arrive(plan.tile_ring.full[tile_state.stage]);
    }
    tile_state.advance();
  }

  // Values lag one block behind keys, as the products do. The first keys come before q, whose place
  // is still in use when theirs is free.
  __forceinline__ void load_tile(const FwdTile& tile) {
    if constexpr (paged) {
      load_tile_of_pages(tile);
      return;
    }
    load_k(tile, tile.end - 1);
    load_q(tile);
    for (int32 block = tile.end - 2; block >= tile.begin; --block) {
      load_k(tile, block);
      load_v(tile, block + 1);
    }
    load_v(tile, tile.begin);
  }

  // A block's pages are looked up once for keys and values, a block ahead: a division and an access
  // to memory take as long as a block's products.
  __forceinline__ void load_tile_of_pages(const FwdTile& tile) {
    KeyPlace values = find_keys(tile, tile.end - 1);
    KeyPlace keys = find_keys(tile, tile.end - 2);
    load_k_pages(tile, values);
    load_q(tile);
    for (int32 block = tile.end - 2; block >= tile.begin; --block) {
      const KeyPlace ahead = find_keys(tile, block - 1);
      load_k_pages(tile, keys);
      load_v_pages(tile, values);
      values = keys;
      keys = ahead;
    }
    load_v_pages(tile, values);
  }

  __forceinline__ void run() {
    FwdTile tile;
    int32 index = next_tile_index<paged>(params, 0);
    for (int32 round = 1; index < params.tiles; ++round) {
      tile = find_tile<C>(params, index);
      const bool exists = tile.exists();
      if (exists) publish(tile);
      index = C.persistent ? next_tile_index<paged>(params, round) : params.tiles;
      if (exists && tile.count() > 0) load_tile(tile);
      while (next_unused<C>(tile, params)) publish(tile);
    }
    tile.last = 1;
    publish(tile);
    if (C.persistent && params.scheduler != nullptr && leads()) leave_scheduler(params);
  }
};

}  // namespace fovea::device
