// The layouts of device/tile.h, exhaustively: every element has exactly one place, and the formulas
// agree with a second description of the same thing.
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <utility>
#include <vector>

#include "device/tile.h"

namespace fovea::device {
namespace {

using Cells = std::set<std::pair<int, int>>;

TEST(Swizzle, MovesChunksWithinTheirRowsAndBack) {
  for (const Swizzle swizzle : {Swizzle::none, Swizzle::b32, Swizzle::b64, Swizzle::b128}) {
    const uint32 period = swizzle_period_bytes(swizzle);
    std::set<uint32> seen;
    for (uint32 address = 0; address < 4096; ++address) {
      const uint32 moved = swizzled(swizzle, address);
      EXPECT_EQ(swizzled(swizzle, moved), address) << "its own inverse";
      EXPECT_EQ(moved / swizzle_bytes(swizzle), address / swizzle_bytes(swizzle)) << "same row";
      EXPECT_EQ(moved % 16, address % 16) << "16-byte chunks stay whole";
      EXPECT_EQ(moved - address, swizzled(swizzle, address % period) - address % period);
      seen.insert(moved);
    }
    EXPECT_EQ(seen.size(), 4096u);
  }
}

TEST(Swizzle, SpreadsAColumnOfChunksOverAllBanks) {
  std::set<uint32> banks;
  for (uint32 row = 0; row < 8; ++row) {
    banks.insert(swizzled(Swizzle::b128, row * 128 + 3 * 16) % 128);
  }
  EXPECT_EQ(banks.size(), 8u);
}

TEST(Swizzle, FollowsTheDrawing) {
  constexpr std::array<uint32, 8> row_2 = {2, 3, 0, 1, 6, 7, 4, 5};
  for (uint32 place = 0; place < 8; ++place) {
    EXPECT_EQ(swizzled(Swizzle::b128, 2 * 128 + 16 * place) / 16 - 16, row_2[place]);
  }
}

TEST(Panels, CoverTheTileOnce) {
  constexpr uint32 rows = 64;
  constexpr uint32 width_bytes = 256;
  std::set<uint32> seen;
  for (uint32 row = 0; row < rows; ++row) {
    for (uint32 column = 0; column < width_bytes; column += 2) {
      const uint32 offset = panel_offset(Swizzle::b128, rows, row, column);
      EXPECT_EQ(offset / (rows * 128), column / 128) << "panel after panel";
      seen.insert(offset);
    }
  }
  EXPECT_EQ(seen.size(), rows * width_bytes / 2);
  EXPECT_EQ(*seen.rbegin(), rows * width_bytes - 2);
}

TEST(Descriptor, PutsFieldsWhereTheManualSays) {
  const uint64 hopper = wgmma_descriptor(Swizzle::b128, 0x12340, 0x400, 0x800);
  EXPECT_EQ(hopper & 0x3fff, 0x1234u);
  EXPECT_EQ((hopper >> 16) & 0x3fff, 0x40u);
  EXPECT_EQ((hopper >> 32) & 0x3fff, 0x80u);
  EXPECT_EQ(hopper >> 62, 1u);
  EXPECT_EQ(wgmma_descriptor(Swizzle::b64, 0, 0, 0) >> 62, 2u);
  EXPECT_EQ(wgmma_descriptor(Swizzle::b32, 0, 0, 0) >> 62, 3u);
  const uint64 blackwell = tcgen05_descriptor(Swizzle::b64, 0x12340, 0x400, 0x800);
  EXPECT_EQ(blackwell & 0xffffffffffffull, 0x400000400000ull | (0x80ull << 32) | 0x401234ull);
  EXPECT_EQ(blackwell >> 61, 4u);
  EXPECT_EQ(descriptor_advance(hopper, 32), hopper + 2);
}

TEST(Descriptor, KeepsOnlyTheBitsOfSharedAddresses) {
  // A shared::cluster address carries the CTA's rank from bit 24 on.
  EXPECT_EQ(tcgen05_descriptor(Swizzle::b128, 0x01000400, 0, 1024),
            tcgen05_descriptor(Swizzle::b128, 0x400, 0, 1024));
}

TEST(Tcgen05Instruction, PutsFieldsWhereTheManualSays) {
  const uint32 d = tcgen05_instruction({.a = TensorType::bf16,
                                        .b = TensorType::f16,
                                        .m = 128,
                                        .n = 256,
                                        .a_mn_major = false,
                                        .b_mn_major = true,
                                        .negate_a = true});
  EXPECT_EQ((d >> 4) & 3, 1u);
  EXPECT_EQ((d >> 7) & 7, 1u);
  EXPECT_EQ((d >> 10) & 7, 0u);
  EXPECT_EQ((d >> 13) & 1, 1u);
  EXPECT_EQ((d >> 15) & 1, 0u);
  EXPECT_EQ((d >> 16) & 1, 1u);
  EXPECT_EQ((d >> 17) & 63, 32u);
  EXPECT_EQ((d >> 24) & 31, 8u);
  EXPECT_EQ(tcgen05_instruction({.a = TensorType::e4m3, .b = TensorType::e5m2}) >> 7 & 63, 8u);
}

template <typename Layout>
Cells cells(int threads, int per_thread) {
  Cells found;
  for (int t = 0; t < threads; ++t) {
    for (int i = 0; i < per_thread; ++i) {
      EXPECT_TRUE(found.emplace(Layout::row(t, i), Layout::col(t, i)).second) << t << " " << i;
    }
  }
  return found;
}

Cells rectangle(int rows, int columns) {
  Cells all;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) all.emplace(row, column);
  }
  return all;
}

TEST(Fragments, CoverTheirMatrixOnce) {
  EXPECT_EQ(cells<WgmmaAccumulator>(128, 128), rectangle(64, 256));
  EXPECT_EQ(cells<WgmmaAccumulator>(128, 4), rectangle(64, 8));
  EXPECT_EQ(cells<WgmmaOperandA>(128, 8), rectangle(64, 16));
  EXPECT_EQ(cells<WgmmaOperandA8>(128, 16), rectangle(64, 32));
}

// What makes P = softmax(S) an operand without moving data: 16 columns of an accumulator are, pair
// by pair, the 16-bit operand A.
TEST(Fragments, AccumulatorPairsAreOperandA) {
  for (int t = 0; t < 128; ++t) {
    for (int block = 0; block < 4; ++block) {
      for (int e = 0; e < 8; ++e) {
        EXPECT_EQ(WgmmaAccumulator::row(t, 8 * block + e), WgmmaOperandA::row(t, e));
        EXPECT_EQ(WgmmaAccumulator::col(t, 8 * block + e), 16 * block + WgmmaOperandA::col(t, e));
      }
    }
  }
}

// stmatrix takes register j of all lanes as matrix j: lane l's two elements lie in row l / 4,
// columns 2 (l % 4) and one more, of the matrix whose row addresses lanes 8 j .. 8 j + 7 give.
TEST(Fragments, StoreMatrixWritesTheAccumulatorBlock) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const int matrix = i / 2;
      const int addressing_lane = 8 * matrix + lane / 4;
      EXPECT_EQ(StoreMatrixX4::row(addressing_lane), WgmmaAccumulator::row(lane, i));
      EXPECT_EQ(StoreMatrixX4::col(addressing_lane) + 2 * (lane % 4) + i % 2,
                WgmmaAccumulator::col(lane, i));
    }
  }
}

template <typename Layout>
Cells tensor_cells(int rows, int columns) {
  Cells found;
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < columns; ++n) {
      EXPECT_TRUE(found.emplace(Layout::lane(r, n), Layout::column(r, n)).second);
    }
  }
  return found;
}

TEST(TensorMemory, HoldsEachAccumulatorElementOnce) {
  EXPECT_EQ(tensor_cells<TensorAccumulator128>(128, 64), rectangle(128, 64));
  EXPECT_EQ(tensor_cells<TensorAccumulatorPair64<64>>(64, 64), rectangle(128, 32));
  for (const auto& [lane, column] : tensor_cells<TensorAccumulator64>(64, 8)) {
    EXPECT_LT(lane % 32, 16);
    EXPECT_LT(column, 8);
  }
}

TEST(TensorMemory, RowsOfThe32x32bLoadAreThreads) {
  std::set<std::pair<int, int>> found;
  for (int t = 0; t < 128; ++t) {
    for (int i = 0; i < 32; ++i) {
      found.emplace(TensorMemory32x32b::lane(t, i), TensorMemory32x32b::column(t, i));
      EXPECT_EQ(TensorMemory32x32b::lane(t, i) / 32, t / 32) << "a warp reaches 32 lanes";
    }
  }
  EXPECT_EQ(found, rectangle(128, 32));
}

TEST(RingState, GoesRoundAndFlipsItsParity) {
  RingState<3> state;
  for (uint32 step = 0; step < 20; ++step) {
    EXPECT_EQ(state.stage, static_cast<int>(step % 3));
    EXPECT_EQ(state.parity, (step / 3) % 2);
    state.advance();
  }
}

}  // namespace
}  // namespace fovea::device
