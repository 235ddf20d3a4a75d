// The plan of the backward kernel for Blackwell: what a CTA works on, shared memory, barriers.
#pragma once

#include "core/config_backward_sm100.h"
#include "device/bwd_blocks.h"
#include "device/pipeline.h"
#include "device/tcgen05.h"
#include "device/trace.h"

namespace fovea::device {

using core::DType;

// ---- Work ---------------------------------------------------------------------------------------

// What this CTA works on. In a pair both have the same rows of queries, those that see any key of
// either.
template <BwdConfig C>
struct Bwd100Work {
  static constexpr int32 rows = core::rows_of(C);
  static constexpr int32 ctas = C.pair ? 2 : 1;
  static constexpr int32 tile_keys = ctas * core::keys_of(C);

  BwdSequence sequence;
  int32 head_kv;
  int32 tile_begin;              // first key of the CTA or pair
  int32 key_begin;               // of this CTA
  int32 row_begin, row_end;      // query rows that see any key of the tile
  int32 block_begin, block_end;  // their blocks
  int32 seen_begin, seen_end;    // keys of the sequence that any query sees

  __forceinline__ void find(const BwdParams& params, int32 rank) {
    const int32 tiles = params.key_blocks / ctas;
    const PairBlock at = pair_block(static_cast<int32>(blockIdx.x) / ctas,
                                    params.batch * params.heads_kv, params.section, tiles);
    const int32 b = at.pair / params.heads_kv;
    sequence = bwd_sequence<C>(params, b);
    head_kv = at.pair - b * params.heads_kv;
    tile_begin = (core::last_keys_first(C) ? tiles - 1 - at.block : at.block) * tile_keys;
    key_begin = tile_begin + rank * core::keys_of(C);
    const core::KeyRange seen = rows_that_see<C>(params, sequence, tile_begin,
                                                 min(tile_begin + tile_keys, sequence.length_k));
    row_begin = static_cast<int32>(seen.begin);
    row_end = static_cast<int32>(seen.end);
    block_begin = row_begin / rows;
    block_end = (row_end + rows - 1) / rows;
    const core::KeyRange keys =
        core::union_range(core::Window{params.window_left, params.window_right}, sequence.length_q,
                          sequence.length_k, 0, sequence.length_q);
    seen_begin = static_cast<int32>(keys.begin);
    seen_end = static_cast<int32>(keys.end);
  }

  __forceinline__ bool exists() const { return tile_begin < sequence.capacity_k; }

  // Tiles of query rows, all heads of the group one after the other.
  __forceinline__ int32 steps(const BwdParams& params) const {
    return params.group_size * max(0, block_end - block_begin);
  }
};

// ---- Plan ---------------------------------------------------------------------------------------

// What a pair has beside: halves of the columns, for products whose columns it splits, and the half
// of dS that the peer needs.
template <bool pair>
struct Bwd100Halves {};
template <>
struct Bwd100Halves<true> {
  alignas(1024) uint8 k_columns[256 * 128];  // keys of both CTAs
  alignas(1024) uint8 q_columns[128 * 128];  // rows of both
  alignas(1024) uint8 dout_columns[128 * 128];
  alignas(1024) uint8 exchange[128 * 128];  // [own key][64 queries of the peer]
};

// Tiles are panels of 64 columns, each [row][64] with the 128-byte swizzle.
//
// Where a pair shares a barrier it is the leader's (rank 0): the other CTA arrives there from afar.
// Barriers complete once per tile of query rows unless they belong to a ring.
template <BwdConfig C>
struct Bwd100Plan : Bwd100Halves<C.pair> {
  static constexpr int32 ctas = C.pair ? 2 : 1;
  static constexpr int32 keys = core::keys_of(C);
  static constexpr int32 rows = core::rows_of(C);
  static constexpr int32 rows_each = rows / ctas;  // operand B of the scores is split by rows
  static constexpr int32 panels_qk = C.head_dim / core::panel_columns;
  static constexpr int32 panels_v = C.head_dim_v / core::panel_columns;
  static constexpr uint32 row_bytes = 2 * core::panel_columns;
  static constexpr uint32 group_bytes = 8 * row_bytes;  // 8 rows: the period of the swizzle
  static constexpr uint32 panel_bytes = 128 * row_bytes;
  static constexpr uint32 query_panel_bytes = rows_each * row_bytes;
  static constexpr int32 query_stages = core::query_stages(C);
  static constexpr uint32 unit_bytes = core::dq_unit_columns(C) * 128 * 4;

  alignas(1024) uint8 k[panels_qk * panel_bytes];
  alignas(1024) uint8 v[panels_v * panel_bytes];
  alignas(1024) uint8 q[query_stages][panels_qk * query_panel_bytes];
  alignas(1024) uint8 dout[panels_v * query_panel_bytes];
  // One CTA: [query panel][key][64 queries]. Pair: [key of both][64 queries of this CTA].
  alignas(1024) uint8 dscores[2 * panel_bytes];
  alignas(1024) uint8 dq[2][unit_bytes];  // [quad of columns][lane][4]
  alignas(128) float lse_log2[2][rows];
  alignas(128) float delta[2][rows];

  Ring<query_stages> q_ring;  // full: a producer of each CTA and the bytes; free: 1 commit
  Ring<1> dout_ring;
  Ring<1> q_columns_ring;     // pair
  Ring<1> dout_columns_ring;  // pair
  Ring<2> row_ring;           // full: 1 producer and the bytes; free: as releases_numbers says
  Barrier keys_full;          // a producer for each tile of keys and the bytes
  Barrier edge_full;          // a tile that is cleared before others see it

  Barrier scores_full;     // 1 commit
  Barrier weights_full;    // each computing warp: the scores are read, P^T is in tensor memory
  Barrier weights_free;    // 1 commit: dv has read P^T
  Barrier dp_full;         // 1 commit
  Barrier dscores_full;    // each computing warp: dS^T is in tensor memory, dS in shared memory
  Barrier dk_done;         // 1 commit: dk has read dS^T
  Barrier dq_full;         // 1 commit: and dq has read dS
  Barrier dq_free;         // each reducing warp
  Barrier exchange_ready;  // pair, own: each computing warp, the peer's half of dS is written
  Barrier exchange_full;   // pair, own: 1 and the bytes, the peer has sent this CTA's half
  Barrier exchanged;       // pair: both CTAs have theirs
  Barrier gradients_full;  // 1 commit, of all products

  Bwd100Work<C> work;
  uint32 tensor_memory;
  [[no_unique_address]] TraceCounts<C.trace> trace;

  // Numbers are free again when each computing warp says so. With one stage of q nobody has to: q
  // of the next tile has waited for dk, which has waited for all that reads the numbers.
  static constexpr bool releases_numbers = query_stages > 1;

  static constexpr uint32 computing_warps = 8;
  static constexpr uint32 reducing_warps = 4;
  static constexpr uint32 key_tiles = C.pair ? 3 : 2;

  // Named barriers. 0 is __syncthreads.
  static constexpr int32 unit_barrier = 1;  // of the reducing warps

  static_assert(C.dtype == DType::bf16 || C.dtype == DType::f16);
  static_assert(C.head_dim == 64 || C.head_dim == 128 || C.head_dim == 192);
  static_assert(!C.pair || C.head_dim == 128);

  static constexpr core::BackwardColumns columns = core::backward_columns(C);
  // Gradients outlive every step and share columns with nothing.
  static_assert(!core::overlap(columns.dv, C.head_dim_v, columns.dk, C.head_dim));
  static_assert(!core::overlap(columns.dv, C.head_dim_v, columns.scores, 128));
  static_assert(!core::overlap(columns.dv, C.head_dim_v, columns.dp, 128));
  static_assert(!core::overlap(columns.dv, C.head_dim_v, columns.dq, columns.dq_width));
  static_assert(!core::overlap(columns.dk, C.head_dim, columns.scores, 128));
  static_assert(!core::overlap(columns.dk, C.head_dim, columns.dp, 128));
  static_assert(!core::overlap(columns.dk, C.head_dim, columns.dq, columns.dq_width));
  // P^T and dS^T are there at once.
  static_assert(!core::overlap(columns.scores, 64, columns.dp, 128));
  static_assert(columns.scores + 128 <= 512 && columns.dp + 128 <= 512);
  static_assert(columns.dk + C.head_dim <= 512 && columns.dq + columns.dq_width <= 512);
};

// ---- Timelines ----------------------------------------------------------------------------------

enum class BwdTraceRole : int32 { load, multiply, compute, compute_1, reduce, relay };

template <BwdConfig C>
__forceinline__ void mark(Bwd100Plan<C>& plan, const BwdParams& params, BwdTraceRole role,
                          bool scribe, TracePhase phase) {
  trace_mark(plan.trace, params.trace, static_cast<int32>(role), scribe, phase);
}

// ---- One CTA or two -----------------------------------------------------------------------------

__forceinline__ uint32 parity_of(int32 n) { return static_cast<uint32>(n) & 1u; }

template <BwdConfig C>
__forceinline__ int32 pair_rank() {
  return C.pair ? static_cast<int32>(cluster_rank()) : 0;
}

__forceinline__ ClusterAddress barrier_of(Barrier& barrier, int32 rank) {
  return map_to_rank(shared_address(&barrier), static_cast<uint32>(rank));
}

// One arrival of a warp at the leader's barrier, after what each of its lanes did before.
template <BwdConfig C>
__forceinline__ void arrive_leader(Barrier& barrier) {
  __syncwarp();
  if (lane_index() != 0) return;
  if constexpr (C.pair) {
    mbarrier_arrive_remote(barrier_of(barrier, 0));
  } else {
    mbarrier_arrive(barrier);
  }
}

// For the n-th time, from 0.
template <BwdConfig C>
__forceinline__ void wait_for(Barrier& barrier, int32 n) {
  if constexpr (C.pair) {
    mbarrier_wait_cluster(barrier, parity_of(n));
  } else {
    mbarrier_wait(barrier, parity_of(n));
  }
}

template <BwdConfig C, int32 stages>
__forceinline__ void wait_full(Ring<stages>& ring, const RingState<stages>& state) {
  wait_for<C>(ring.full[state.stage], static_cast<int32>(state.parity));
}

template <BwdConfig C, int32 stages>
__forceinline__ void wait_free(Ring<stages>& ring, const RingState<stages>& state) {
  wait_for<C>(ring.free[state.stage], static_cast<int32>(state.parity ^ 1u));
}

// One arrival, in a pair at both CTAs' barriers, when this thread's products are complete.
template <BwdConfig C>
__forceinline__ void commit(Barrier& barrier) {
  if constexpr (C.pair) {
    tcgen05_commit_pair(barrier, 0b11);
  } else {
    tcgen05_commit(barrier);
  }
}

}  // namespace fovea::device
