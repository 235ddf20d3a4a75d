#include "core/tiles.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace fovea::core {
namespace {

TEST(CoreTiles, RowBlocksCoverEvenly) {
  for (int64 rows = 0; rows <= 40; ++rows) {
    for (int64 blocks = 1; blocks <= 9; ++blocks) {
      int64 next = 0;
      for (int64 i = 0; i < blocks; ++i) {
        const RowBlock block = row_block(rows, blocks, i);
        ASSERT_EQ(block.begin, next);
        const int64 size = block.end - block.begin;
        ASSERT_GE(size, rows / blocks);
        ASSERT_LE(size, ceil_div(rows, blocks));
        next = block.end;
      }
      ASSERT_EQ(next, rows);
    }
  }
  EXPECT_EQ(row_block(130, 2, 0).end, 65);
}

TEST(CoreTiles, SplitsPartitionTheKeysAtBlockBorders) {
  for (int64 begin = 0; begin <= 12; ++begin) {
    for (int64 end = begin; end <= 24; ++end) {
      for (int64 block_k = 1; block_k <= 5; ++block_k) {
        for (int64 splits = 1; splits <= 7; ++splits) {
          int64 next = begin;
          for (int64 i = 0; i < splits; ++i) {
            const KeyRange part = split_range({begin, end}, splits, i, block_k);
            if (part.empty()) continue;
            ASSERT_EQ(part.begin, next);
            ASSERT_TRUE(part.begin == begin || part.begin % block_k == 0);
            ASSERT_TRUE(part.end == end || part.end % block_k == 0);
            next = part.end;
          }
          ASSERT_EQ(next, end) << begin << " to " << end << " by " << block_k << ", " << splits;
        }
      }
    }
  }
}

TEST(CoreTiles, PackedRowsVisitEachQueryOfEachHeadOnce) {
  for (const int32 group : {1, 2, 3, 7, 12}) {
    for (int32 head_kv = 0; head_kv < 3; ++head_kv) {
      std::set<std::pair<int64, int32>> seen;
      for (int64 row = 0; row < 5 * group; ++row) {
        const PackedRow packed = packed_row(row, group, head_kv);
        EXPECT_EQ(packed.head / group, head_kv);
        EXPECT_LT(packed.query, 5);
        seen.emplace(packed.query, packed.head);
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(5 * group));
    }
  }
}

TEST(CoreTiles, WorkCountsTheKeysThatCanMatter) {
  EXPECT_EQ(tile_work({}, 10, 20, 0, 5), 100);
  EXPECT_EQ(tile_work({-1, 0}, 10, 10, 0, 5), 25);
  EXPECT_EQ(tile_work({-1, 0}, 10, 10, 5, 10), 50);
  EXPECT_EQ(tile_work({-1, 0}, 6, 2, 0, 4), 0);  // causal rows before the first key
  EXPECT_EQ(tile_work({-1, -1}, 6, 0, 0, 6), 0);
}

TEST(CoreTiles, SectionsLeaveNoRestWhereHalfOfWhatFitsDoes) {
  EXPECT_EQ(section_of(25, 128), 16);
  EXPECT_EQ(section_of(24, 24), 24);
  EXPECT_EQ(section_of(4, 10), 2);
  EXPECT_EQ(section_of(6, 7), 6);  // a prime: a rest there will be
  EXPECT_EQ(section_of(1, 7), 1);
}

}  // namespace
}  // namespace fovea::core
