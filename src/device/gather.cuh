// Gathers pages of codes in 8 bits into sequences (core/fp8.h): k, v and their scales, of the keys
// that a sequence has. What binds is memory: two bytes a key and column, read and written once. A
// CTA takes the keys of a head in one page, then others; a thread has four loads of 16 bytes under
// way.
#pragma once

#include "core/fp8.h"
#include "device/ptx.h"

namespace fovea::device {

using core::GatherParams;
using core::KeyScale;
using core::scale_block;

inline constexpr int32 piece_bytes = 16;

// Rows of whole pieces, from one layout to another.
__forceinline__ void copy_pieces(const uint8* from, int64 from_stride, uint8* to, int64 to_stride,
                                 int32 rows, int32 row_bytes) {
  constexpr int32 at_once = 4;
  const uint32 pieces = static_cast<uint32>(row_bytes / piece_bytes);  // of a row
  const int32 count = rows * static_cast<int32>(pieces);
  const auto offset = [pieces](int32 piece, int64 stride) {
    const uint32 row = static_cast<uint32>(piece) / pieces;
    return row * stride + static_cast<int64>((piece - row * pieces) * piece_bytes);
  };
  for (int32 first = static_cast<int32>(threadIdx.x); first < count;
       first += at_once * core::gather_threads) {
    uint4 held[at_once];
#pragma unroll
    for (int32 i = 0; i < at_once; ++i) {
      const int32 piece = first + i * core::gather_threads;
      if (piece < count) {
        held[i] = *reinterpret_cast<const uint4*>(from + offset(piece, from_stride));
      }
    }
#pragma unroll
    for (int32 i = 0; i < at_once; ++i) {
      const int32 piece = first + i * core::gather_threads;
      if (piece < count) *reinterpret_cast<uint4*>(to + offset(piece, to_stride)) = held[i];
    }
  }
}

// The keys of sequence b and a head from `first` on, which lie in one page.
__forceinline__ void gather_page(const GatherParams& p, int32 b, int32 first, int32 head) {
  const int32 used = min(p.seqused[b], p.keys);
  const int64 sequence = static_cast<int64>(b) * p.heads + head;
  const int32 blocks = (used + scale_block - 1) / scale_block;
  const KeyScale* scales = nullptr;
  if (first < used) {
    const int64 page = core::page_of(p, b, first).page;
    const int32 keys = min(used - first, p.page_size);
    const int64 row = static_cast<int64>(p.heads) * p.columns;
    copy_pieces(p.k + page * p.k_stride[0] + head * p.k_stride[2], p.k_stride[1],
                p.k_to + (static_cast<int64>(b) * p.keys + first) * row + head * p.columns, row,
                keys, p.columns);
    const int64 places = static_cast<int64>(p.blocks) * scale_block;
    copy_pieces(p.v + page * p.v_stride[0] + head * p.v_stride[2], p.v_stride[1],
                p.v_to + sequence * p.columns_v * places + first, places, p.columns_v,
                core::round_up(keys, scale_block));
    scales = p.key_scale + page * p.key_scale_stride[0] + head * p.key_scale_stride[1];
  }
  // Those behind the last block are read with it, and have to be numbers.
  const int32 end =
      min(min(blocks + core::scale_block_slack, p.blocks), (first + p.page_size) / scale_block);
  for (int32 block = first / scale_block + static_cast<int32>(threadIdx.x); block < end;
       block += core::gather_threads) {
    p.key_scale_to[sequence * p.blocks + block] =
        block < blocks ? scales[block - first / scale_block] : KeyScale{};
  }
}

__device__ void gather_pages(const GatherParams& p) {
  const int32 pages = (p.keys + p.page_size - 1) / p.page_size;
  const int64 count = static_cast<int64>(p.sequences) * p.heads * pages;
  for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
    const int64 page = i / p.heads;
    gather_page(p, static_cast<int32>(page / pages), static_cast<int32>(page % pages) * p.page_size,
                static_cast<int32>(i % p.heads));
  }
  if (blockIdx.x == 0 && threadIdx.x < core::scale_block_slack) {
    const int64 all = static_cast<int64>(p.sequences) * p.heads * p.blocks;
    p.key_scale_to[all + threadIdx.x] = KeyScale{};
  }
}

}  // namespace fovea::device
