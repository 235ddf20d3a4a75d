// Shared memory, barriers and registers of the forward kernel for Hopper.
#pragma once

#include "device/fwd_tiles.h"
#include "device/pipeline.h"
#include "device/trace.h"

namespace fovea::device {

// Tiles are panels of 64 columns, each [row][64] with the 128-byte swizzle.
template <FwdConfig C>
struct FwdPlan {
  static constexpr int32 rows = core::rows_of(C);
  static constexpr int32 query_parts = core::query_parts(C);
  static constexpr int32 part_rows = rows / query_parts;
  static constexpr int32 panels_qk = core::panels(C.head_dim);
  static constexpr int32 panels_v = core::panels(C.head_dim_v);
  static constexpr uint32 row_bytes = 2 * core::panel_columns;
  static constexpr uint32 group_bytes = 8 * row_bytes;  // 8 rows: the period of the swizzle
  static constexpr uint32 q_bytes = rows * panels_qk * row_bytes;
  static constexpr uint32 k_bytes = C.tile_k * panels_qk * row_bytes;
  static constexpr uint32 v_bytes = C.tile_k * panels_v * row_bytes;

  alignas(1024) uint8 q[q_bytes];
  alignas(1024) uint8 k[C.stages][k_bytes];
  alignas(1024) uint8 v[C.stages][v_bytes];
  alignas(1024) uint8 out[C.out_apart ? rows * panels_v * row_bytes : 1024];
  // full: the loaders and the bytes; free: each computing warp.
  Ring<C.stages> k_ring;
  Ring<C.stages> v_ring;
  Ring<1> q_ring[query_parts];
  Ring<2> tile_ring;  // full: 1 producer; free: each computing warp
  FwdTile tiles[2];
  uint32 grown[4 * C.warpgroups];  // written for the order of instructions alone: wgmma.h
  [[no_unique_address]] TraceCounts<C.trace> trace;

  static constexpr uint32 loaders = C.source == Source::gather ? 128 : 1;  // threads that arrive
  static constexpr uint32 consumer_warps = 4 * C.warpgroups;
  static constexpr int32 consumer_threads = 128 * C.warpgroups;

  // Named barriers. 0 is __syncthreads.
  static constexpr int32 turn_barrier = 1;     // + warpgroup: its turn to issue products
  static constexpr int32 compute_barrier = 9;  // all computing threads

  using DType = core::DType;
  static_assert(C.dtype == DType::bf16 || C.dtype == DType::f16);
  static_assert(C.warpgroups >= 1 && C.warpgroups <= 3, "the register pool is split for these");
  static_assert(C.warpgroups > 1 || !C.ping_pong, "turns need two that take them");
  static_assert(C.head_dim % 16 == 0 && C.head_dim_v % 16 == 0);
  static_assert(C.head_dim <= 256 && C.head_dim_v <= 256);
  static_assert(C.tile_k % 16 == 0 && C.tile_k <= 256);
  static_assert(C.out_apart || !C.tma_out || C.head_dim >= C.head_dim_v,
                "out is staged where q was");
  static_assert(!C.out_direct || (!C.out_apart && C.tma_out && C.head_dim_v % 32 == 0));
  static_assert(!C.tma_out || (C.out_dtype == C.dtype && !C.packed && !C.split));
  static_assert(!C.split || !C.has_sink, "the sink is added once, by the combining kernel");
  static_assert(!C.tail || core::may_have_tail(C));
  static_assert(C.source == Source::tma || C.ragged);
  static_assert(C.source != Source::gather || (!C.persistent && C.tile_k <= 128));

  // By one thread, before a barrier of the CTA.
  __forceinline__ void init_barriers() {
    tile_ring.init(1, consumer_warps);
    for (Ring<1>& ring : q_ring) ring.init(loaders, consumer_warps / query_parts);
    k_ring.init(loaders, consumer_warps);
    v_ring.init(loaders, consumer_warps);
    fence_mbarrier_init();
  }
};

}  // namespace fovea::device
