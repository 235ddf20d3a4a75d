// The copy engine (TMA): tensor tiles and bulk copies between global and shared memory.
//
// Tile functions take the coordinates of the box's first element, innermost first, as a braced
// list:
//
//   tma_load(target, &params.q_map, barrier, {column, row, head, batch}, policy);
//
// Maps have 2, 4 or 5 dimensions; a dimension of extent 1 makes a third into a fourth. Coordinates
// are signed 32-bit; elements outside the tensor are read as the map's fill value, still count as
// bytes on the barrier, and are not written. The first coordinate times the element's size is a
// multiple of 16, outside the tensor too: at any other an H200 raises "illegal instruction". Shared
// addresses are 128-byte aligned (for the 128-byte swizzle: tiles start at multiples of 1024 bytes,
// where the swizzle pattern does), and rows of a box narrower than its swizzle still take the whole
// span. One elected thread issues; `map` is the parameter itself, never a copy of it.
#pragma once

#include "core/config.h"
#include "device/mbarrier.h"

namespace fovea::device {

using core::TensorMap;

// prefetch.tensormap
__forceinline__ void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.prefetch.tensor: a box on its way into the L2, ahead of its load.
__forceinline__ void tma_prefetch(const TensorMap* map, const int32 (&at)[4]) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
               : "memory");
}

// createpolicy.fractional: no preference.
__forceinline__ CachePolicy cache_policy_normal() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy.value));
  return policy;
}

// createpolicy.fractional: keep in L2 what will be read again, such as K and V.
__forceinline__ CachePolicy cache_policy_evict_last() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy.value));
  return policy;
}

// createpolicy.fractional: give up first what is read once, such as Q.
__forceinline__ CachePolicy cache_policy_evict_first() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.value));
  return policy;
}

// cp.async.bulk.tensor, global to shared: the box's bytes are counted on the barrier as they land.
template <int rank>
__forceinline__ void tma_load(SharedAddress target, const TensorMap* map, Barrier& barrier,
                              const int32 (&at)[rank], CachePolicy policy) {
  static_assert(rank == 2 || rank == 4 || rank == 5);
  if constexpr (rank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target.value),
        "l"(map), "r"(shared_address(&barrier).value), "r"(at[0]), "r"(at[1]), "l"(policy.value)
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target.value),
        "l"(map), "r"(shared_address(&barrier).value), "r"(at[0]), "r"(at[1]), "r"(at[2]),
        "r"(at[3]), "l"(policy.value)
        : "memory");
  } else if constexpr (rank == 5) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target.value),
        "l"(map), "r"(shared_address(&barrier).value), "r"(at[0]), "r"(at[1]), "r"(at[2]),
        "r"(at[3]), "r"(at[4]), "l"(policy.value)
        : "memory");
  }
}

// cp.async.bulk.tensor with .multicast::cluster: to the same shared offset of every CTA whose bit
// is set in cta_mask; each of them gets the bytes counted on its own barrier at this barrier's
// offset.
template <int rank>
__forceinline__ void tma_load_multicast(SharedAddress target, const TensorMap* map,
                                        Barrier& barrier, const int32 (&at)[rank], uint16 cta_mask,
                                        CachePolicy policy) {
  static_assert(rank == 2 || rank == 4 || rank == 5);
  if constexpr (rank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(
            target.value),
        "l"(map), "r"(shared_address(&barrier).value), "r"(at[0]), "r"(at[1]), "h"(cta_mask),
        "l"(policy.value)
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(
            target.value),
        "l"(map), "r"(shared_address(&barrier).value), "r"(at[0]), "r"(at[1]), "r"(at[2]),
        "r"(at[3]), "h"(cta_mask), "l"(policy.value)
        : "memory");
  } else if constexpr (rank == 5) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(
            target.value),
        "l"(map), "r"(shared_address(&barrier).value), "r"(at[0]), "r"(at[1]), "r"(at[2]),
        "r"(at[3]), "r"(at[4]), "h"(cta_mask), "l"(policy.value)
        : "memory");
  }
}

// cp.async.bulk.tensor with .cta_group::2 (sm_100 and later): the tile lands here, the bytes are
// counted on a barrier of either CTA of the pair.
template <int rank>
__forceinline__ void tma_load_pair(SharedAddress target, const TensorMap* map,
                                   ClusterAddress barrier, const int32 (&at)[rank],
                                   CachePolicy policy) {
  static_assert(rank == 2 || rank == 4 || rank == 5);
  if constexpr (rank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target.value),
        "l"(map), "r"(barrier.value), "r"(at[0]), "r"(at[1]), "l"(policy.value)
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target.value),
        "l"(map), "r"(barrier.value), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
        "l"(policy.value)
        : "memory");
  } else if constexpr (rank == 5) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(
            target.value),
        "l"(map), "r"(barrier.value), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
        "l"(policy.value)
        : "memory");
  }
}

// cp.async.bulk.tensor, shared to global, clipped at the tensor's edges. The writer's ordinary
// stores to shared memory need fence_proxy_async_shared() and a barrier before it.
template <int rank>
__forceinline__ void tma_store(const TensorMap* map, SharedAddress source,
                               const int32 (&at)[rank]) {
  static_assert(rank == 2 || rank == 4 || rank == 5);
  if constexpr (rank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group "
        "[%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(source.value), "r"(at[0]), "r"(at[1])
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
        "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(source.value), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  } else if constexpr (rank == 5) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(source.value), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
        : "memory");
  }
}

// cp.reduce.async.bulk.tensor: adds the tile to global memory, element by element, atomically.
template <int rank>
__forceinline__ void tma_reduce_add(const TensorMap* map, SharedAddress source,
                                    const int32 (&at)[rank]) {
  static_assert(rank == 2 || rank == 4 || rank == 5);
  if constexpr (rank == 2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(source.value), "r"(at[0]), "r"(at[1])
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(source.value), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  } else if constexpr (rank == 5) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(source.value), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
        : "memory");
  }
}

// cp.async.bulk, global to shared: `bytes` contiguous bytes; all three multiples of 16.
__forceinline__ void bulk_load(SharedAddress target, const void* source, uint32 bytes,
                               Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target.value),
      "l"(source), "r"(bytes), "r"(shared_address(&barrier).value)
      : "memory");
}

// cp.async.bulk, shared to the shared memory of another CTA, counted on that CTA's barrier.
__forceinline__ void bulk_copy_remote(ClusterAddress target, SharedAddress source, uint32 bytes,
                                      ClusterAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(target.value),
      "r"(source.value), "r"(bytes), "r"(barrier.value)
      : "memory");
}

// cp.async.bulk, shared to global
__forceinline__ void bulk_store(void* target, SharedAddress source, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(source.value), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk: adds fp32 values to global memory.
__forceinline__ void bulk_reduce_add(float* target, SharedAddress source, uint32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
      "r"(source.value), "r"(bytes)
      : "memory");
}

// cp.async.bulk.commit_group: this thread's stores and reductions so far form a group.
__forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: all but the latest `pending` groups have read their shared memory.
template <int pending>
__forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// cp.async.bulk.wait_group: all but the latest `pending` groups are written and visible.
template <int pending>
__forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace fovea::device
