// Layouts of tiles: swizzles, matrix descriptors, which thread holds which element, where rows lie
// in tensor memory, and the position in a ring of stages. Pure arithmetic, constexpr, the same on
// host and device; tests/jit checks every layout exhaustively on the host.
//
// A "K-major" tile stores the contraction dimension contiguously, an "MN-major" one the row
// (column) dimension.
#pragma once

#include "core/types.h"

namespace fovea::device {

using core::int32;
using core::uint32;
using core::uint64;
using core::uint8;

// ---- Swizzled shared memory
// -------------------------------------------------------------------------
//
// A tile row of `swizzle_bytes` bytes is stored contiguously, the next row right behind it. The
// 16-byte chunk index within 128 bytes is XORed with the row index within the repeating pattern, on
// the absolute address, so that a column of chunks touches all banks:
//
//   128-byte swizzle, chunk stored at each place of 8 rows (pattern repeats every 1024 bytes)
//     row 0   0 1 2 3 4 5 6 7
//     row 1   1 0 3 2 5 4 7 6
//     row 2   2 3 0 1 6 7 4 5
//     ...
//     row 7   7 6 5 4 3 2 1 0

enum class Swizzle : uint8 { none, b32, b64, b128 };

// Bytes of a row of the pattern; 16 without swizzle (a core matrix is 8 rows of 16 bytes).
constexpr uint32 swizzle_bytes(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none: return 16;
    case Swizzle::b32: return 32;
    case Swizzle::b64: return 64;
    case Swizzle::b128: return 128;
  }
  return 0;
}

// Of rows of so many bytes, a multiple of 32: the widest whose rows divide them.
constexpr Swizzle pattern_of(int32 row_bytes) {
  return row_bytes % 128 == 0 ? Swizzle::b128 : row_bytes % 64 == 0 ? Swizzle::b64 : Swizzle::b32;
}

// Bytes after which the pattern repeats: the alignment of tile bases.
constexpr uint32 swizzle_period_bytes(Swizzle swizzle) { return 8 * swizzle_bytes(swizzle); }

// Where the copy engine and the tensor cores keep the byte that an unswizzled tile has at
// `address`.
constexpr uint32 swizzled(Swizzle swizzle, uint32 address) {
  const uint32 mask = swizzle_bytes(swizzle) / 16 - 1;  // 0, 1, 3, 7
  return address ^ (((address >> 7) & mask) << 4);
}

// Byte offset of (row, column_bytes) in a tile of `rows` rows that is wider than one pattern row:
// panels of swizzle_bytes columns, each with all rows, one after the other.
constexpr uint32 panel_offset(Swizzle swizzle, uint32 rows, uint32 row, uint32 column_bytes) {
  const uint32 width = swizzle_bytes(swizzle);
  const uint32 panel = column_bytes / width;
  return panel * rows * width + swizzled(swizzle, row * width + column_bytes % width);
}

// ---- Shared-memory matrix descriptors
// ---------------------------------------------------------------
//
// K-major, swizzled: 8 rows are one pattern period; stride is the distance from one group of 8 rows
// to the next; leading is not used. Going on along K inside a pattern row adds bytes to the start
// address. MN-major, swizzled, W = swizzle_bytes / element size: leading is the distance from one
// W-wide panel to the next, stride the distance from one group of 8 k to the next. Without swizzle,
// K-major: stride between groups of 8 rows, leading between 16-byte columns.

constexpr uint64 descriptor_fields(uint32 address, uint32 leading_bytes, uint32 stride_bytes) {
  return static_cast<uint64>((address & 0x3ffffu) >> 4) |
         (static_cast<uint64>((leading_bytes & 0x3ffffu) >> 4) << 16) |
         (static_cast<uint64>((stride_bytes & 0x3ffffu) >> 4) << 32);
}

// wgmma (PTX ISA, "Matrix Descriptor Format"). The tile base is aligned to the swizzle period.
constexpr uint64 wgmma_descriptor(Swizzle swizzle, uint32 address, uint32 leading_bytes,
                                  uint32 stride_bytes) {
  constexpr uint64 code[4] = {0, 3, 2, 1};
  return descriptor_fields(address, leading_bytes, stride_bytes) |
         (code[static_cast<int>(swizzle)] << 62);
}

// tcgen05 (PTX ISA, "Shared memory descriptor").
constexpr uint64 tcgen05_descriptor(Swizzle swizzle, uint32 address, uint32 leading_bytes,
                                    uint32 stride_bytes) {
  constexpr uint64 code[4] = {0, 6, 4, 2};
  constexpr uint64 version = 1;
  return descriptor_fields(address, leading_bytes, stride_bytes) | (version << 46) |
         (code[static_cast<int>(swizzle)] << 61);
}

// The descriptor of the same tile `bytes` further on.
constexpr uint64 descriptor_advance(uint64 descriptor, uint32 bytes) {
  return descriptor + (bytes >> 4);
}

// ---- tcgen05 instruction descriptor (kinds f16 and f8f6f4)
// ------------------------------------------

enum class TensorType : uint8 { f16, bf16, e4m3, e5m2 };

struct Tcgen05Product {
  TensorType a = TensorType::bf16;
  TensorType b = TensorType::bf16;
  int32 m = 128;  // 64 or 128; 128 or 256 for a CTA pair
  int32 n = 128;  // multiple of 8 (m 64) or 16, at most 256
  bool a_mn_major = false;
  bool b_mn_major = false;
  bool negate_a = false;
};

// Format codes differ per kind: f16 0, bf16 1 in kind f16; e4m3 0, e5m2 1 in kind f8f6f4.
constexpr uint32 tensor_type_code(TensorType type) {
  return type == TensorType::bf16 || type == TensorType::e5m2 ? 1 : 0;
}

// The 32-bit descriptor; the accumulator is fp32.
constexpr uint32 tcgen05_instruction(const Tcgen05Product& p) {
  constexpr uint32 accumulate_f32 = 1;
  return (accumulate_f32 << 4) | (tensor_type_code(p.a) << 7) | (tensor_type_code(p.b) << 10) |
         (static_cast<uint32>(p.negate_a) << 13) | (static_cast<uint32>(p.a_mn_major) << 15) |
         (static_cast<uint32>(p.b_mn_major) << 16) | (static_cast<uint32>(p.n / 8) << 17) |
         (static_cast<uint32>(p.m / 16) << 24);
}

// ---- Fragments: which element a thread holds
// --------------------------------------------------------

// wgmma accumulator, 64 x n: thread t of the warpgroup, register i of n / 2. Each warp has 16 rows,
// and each quad of lanes holds whole rows:
//
//   i            0          1        |    2          3        |   4 ...
//   row          16w + g             |    16w + g + 8         |   16w + g
//   column       2q         2q + 1   |    2q         2q + 1   |   8 + 2q      g = lane / 4, q =
//   lane % 4
struct WgmmaAccumulator {
  static constexpr int32 row(int32 t, int32 i) {
    return 16 * (t / 32) + (t % 32) / 4 + 8 * ((i / 2) % 2);
  }
  static constexpr int32 col(int32 t, int32 i) { return 8 * (i / 4) + 2 * (t % 4) + i % 2; }
};

// wgmma operand A from registers, 64 x 16 of 16-bit elements: element e (0..7) of the four
// registers, two per register, low half first.
struct WgmmaOperandA {
  static constexpr int32 row(int32 t, int32 e) {
    return 16 * (t / 32) + (t % 32) / 4 + 8 * ((e / 2) % 2);
  }
  static constexpr int32 col(int32 t, int32 e) { return 2 * (t % 4) + 8 * (e / 4) + e % 2; }
};

// The same for 8-bit elements, 64 x 32: e in 0..15, four per register, low byte first.
struct WgmmaOperandA8 {
  static constexpr int32 row(int32 t, int32 e) {
    return 16 * (t / 32) + (t % 32) / 4 + 8 * ((e / 4) % 2);
  }
  static constexpr int32 col(int32 t, int32 e) { return 4 * (t % 4) + 16 * (e / 8) + e % 4; }
};

// stmatrix x4 of a 16 x 16 block whose matrices are the register pairs {0,1} {2,3} {4,5} {6,7} of
// an accumulator: the row and column whose address lane l supplies.
struct StoreMatrixX4 {
  static constexpr int32 row(int32 lane) { return lane % 8 + 8 * ((lane / 8) % 2); }
  static constexpr int32 col(int32 lane) { return 8 * (lane / 16); }
};

// tcgen05.ld / st .32x32b: register i of a lane is column i; lane l of warp w is tensor-memory lane
// 32 (w % 4) + l.
struct TensorMemory32x32b {
  static constexpr int32 lane(int32 t, int32) { return t % 128; }
  static constexpr int32 column(int32, int32 i) { return i; }
};

// ---- Tensor memory: where row r, column n of an accumulator with fp32 cells lies
// ------------------

// One CTA, m = 128, and either CTA of a pair with m = 256 (128 rows each).
struct TensorAccumulator128 {
  static constexpr int32 lane(int32 r, int32) { return r; }
  static constexpr int32 column(int32, int32 n) { return n; }
};

// One CTA, m = 64: 16 rows in the first half of each warp's 32 lanes.
struct TensorAccumulator64 {
  static constexpr int32 lane(int32 r, int32) { return 32 * (r / 16) + r % 16; }
  static constexpr int32 column(int32, int32 n) { return n; }
};

// Either CTA of a pair with m = 128: 64 rows, the right half of the columns in the upper lanes.
template <int32 width>
struct TensorAccumulatorPair64 {
  static constexpr int32 lane(int32 r, int32 n) { return n < width / 2 ? r : 64 + r; }
  static constexpr int32 column(int32, int32 n) { return n % (width / 2); }
};

// ---- Ring of stages
// -----------------------------------------------------------------------------------

// Position of one thread in a ring of buffers: which stage, and the parity of the round.
template <int32 stages>
struct RingState {
  int32 stage = 0;
  uint32 parity = 0;

  constexpr void advance() {
    ++stage;
    if (stage == stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

}  // namespace fovea::device
