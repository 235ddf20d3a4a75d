// What the forward kernel for Blackwell does otherwise in 8 bits (core/fp8.h): where scales come
// from and what they do, in which order weights are packed, and how values that no row sees are
// cleared.
//
// Nothing is added per score. 32 scores of a row, the chunk that a thread holds, share one
// KeyScale: that of k (times that of the row of q) is the factor of the exponential's multiply-add,
// that of v is in its addend. Weights are 2^(t - m + top) s_v, and at most e4m3's 448 before any is
// rounded:
//
//   reference known before    32 of them sum up to 448 at most, or the warp's vote falls
//   reference just raised     top 2^3, and growth by 2^5 is tolerated (online: top 2^8, none)
#pragma once

#include "device/fwd_plan_sm100.h"
#include "device/scores.h"
#include "device/tma.h"

namespace fovea::device {

// ---- Scales -------------------------------------------------------------------------------------

// Blocks of 32 keys with which the tile's sequence begins.
template <Fwd100Config C>
__forceinline__ int32 first_key_block(const FwdFp8Params& params, const FwdTile& tile) {
  return C.ragged && params.cu_seqlens_k != nullptr ? core::block_offset(tile.row_k, tile.sequence)
                                                    : 0;
}

// One thread, with the tile of keys that is the n-th of this CTA.
template <Fwd100Config C>
__forceinline__ void load_key_scales(Fwd100Plan<C>& plan, const FwdFp8Params& params,
                                     const FwdTile& tile, int32 block, int32 n) {
  constexpr uint32 bytes = core::key_scale_bytes(C);
  const int32 slot = n % core::key_scale_slots;
  mbarrier_arrive_expect_bytes(plan.scales_full[slot], bytes);
  const KeyScale* scales = params.key_scale + tile.batch_k * params.key_scale_stride[0] +
                           tile.head_kv * params.key_scale_stride[1] +
                           first_key_block<C>(params, tile) +
                           block * (C.tile_k / core::scale_block);
  bulk_load(shared_address(plan.scales[slot]), scales, bytes, plan.scales_full[slot]);
}

// Where they are, once they are there.
template <Fwd100Config C>
__forceinline__ SharedAddress wait_key_scales(Fwd100Plan<C>& plan, int32 n) {
  const int32 slot = n % core::key_scale_slots;
  mbarrier_wait(plan.scales_full[slot], static_cast<uint32>(n / core::key_scale_slots) & 1u);
  return shared_address(plan.scales[slot]);
}

__forceinline__ KeyScale key_scale(SharedAddress scales, int32 chunk) {
  const uint4 bits = load_shared_x4(scales + chunk * static_cast<int32>(sizeof(KeyScale)));
  return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), 0.0f};
}

// Of a row of q, and what its products of codes are multiplied by beside the scale of k. Rows that
// are not there have none: what they compute is not stored.
template <Fwd100Config C>
__forceinline__ float query_scale(const FwdFp8Params& params, const FwdTile& tile, FwdRow row) {
  const float by = C.transform == ScoreTransform::none ? params.scale_log2 : params.transform_in;
  if (row.query >= tile.capacity_q) return by;
  const int32 first = C.ragged && params.cu_seqlens_q != nullptr
                          ? core::block_offset(tile.row_q, tile.sequence)
                          : 0;
  return by * params.q_scale[tile.batch_q * params.q_scale_stride[0] +
                             row.head * params.q_scale_stride[1] + first +
                             row.query / core::scale_block];
}

// ---- Weights ------------------------------------------------------------------------------------

// Places of v hold keys in the order that Hopper's registers ask for (core::value_key). A thread
// here has a whole row, so the weights are packed in that order at no cost, and one form of
// quantised values serves both chips. Four codes of a word are two pairs of neighbouring keys: the
// pair that comes i-th.
constexpr int32 weight_pair(int32 i) { return 8 * (i / 8) + core::value_key(2 * (i % 8)) / 2; }
static_assert(weight_pair(0) == 0 && weight_pair(1) == 4 && weight_pair(2) == 1);
static_assert(core::value_key(3) == core::value_key(2) + 1 && core::value_key(2) % 2 == 0);

// ---- Values that no row sees --------------------------------------------------------------------

// One warp clears the keys outside [begin, end) in a tile of values: 0 x NaN is NaN.
template <Fwd100Config C>
__forceinline__ void clear_fp8_values(SharedAddress values, int32 begin, int32 end) {
  constexpr int32 chunks = C.tile_k / 16;  // of 16 keys in a column of v
#pragma unroll 1
  for (int32 i = lane_index(); i < core::value_columns_of(C) * chunks; i += 32) {
    const int32 first = i % chunks * 16;
    if (first >= begin && first + 16 <= end) continue;
    const SharedAddress at =
        values + panel_offset(Swizzle::b128, core::value_columns_of(C),
                              static_cast<uint32>(i / chunks), static_cast<uint32>(first));
    const uint4 old = load_shared_x4(at);
    uint32 words[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
    for (int32 slot = 0; slot < 16; ++slot) {
      const int32 key = first + core::value_key(slot);
      if (key < begin || key >= end) words[slot / 4] &= ~(0xffu << (8 * (slot % 4)));
    }
    store_shared_x4(at, {words[0], words[1], words[2], words[3]});
  }
}

}  // namespace fovea::device
