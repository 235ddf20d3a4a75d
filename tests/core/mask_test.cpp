// Every range of core/mask.h against allowed(), exhaustively over small shapes.
#include "core/mask.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace fovea::core {
namespace {

struct Problem {
  Window window;
  int64 length_q;
  int64 length_k;
};

std::ostream& operator<<(std::ostream& out, const Problem& p) {
  return out << "window (" << p.window.left << ", " << p.window.right << "), " << p.length_q
             << " queries, " << p.length_k << " keys";
}

bool sees(const Problem& p, int64 q, int64 k) {
  return allowed(p.window, p.length_q, p.length_k, q, k);
}

// Calls visit for every window and every pair of lengths up to the limits.
template <typename Visit>
void for_every_problem(int64 queries, int64 keys, const Visit& visit) {
  for (int64 length_q = 0; length_q <= queries; ++length_q) {
    for (int64 length_k = 0; length_k <= keys; ++length_k) {
      const int64 reach = length_q + length_k + 1;
      for (int64 left = -1; left <= reach; ++left) {
        for (int64 right = -1; right <= reach; ++right) {
          visit(Problem{{left, right}, length_q, length_k});
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CoreMask, AllowedIsTheBottomRightBand) {
  for_every_problem(4, 6, [](const Problem& p) {
    for (int64 q = 0; q < p.length_q; ++q) {
      for (int64 k = -2; k < p.length_k + 2; ++k) {
        const int64 position = q + p.length_k - p.length_q;
        const bool inside = k >= 0 && k < p.length_k;
        const bool after_left = p.window.left == -1 || k >= position - p.window.left;
        const bool before_right = p.window.right == -1 || k <= position + p.window.right;
        ASSERT_EQ(sees(p, q, k), inside && after_left && before_right) << p << " " << q << " " << k;
      }
    }
  });
}

TEST(CoreMask, CausalIntersectsTheWindow) {
  EXPECT_EQ(effective_window({-1, -1}, true).right, 0);
  EXPECT_EQ(effective_window({-1, 5}, true).right, 0);
  EXPECT_EQ(effective_window({-1, 0}, true).right, 0);
  EXPECT_EQ(effective_window({3, 5}, true).left, 3);
  EXPECT_EQ(effective_window({3, 5}, false).right, 5);
  EXPECT_EQ(effective_window({-1, -1}, false).right, -1);
}

TEST(CoreMask, KeyRangeIsWhatARowSees) {
  for_every_problem(6, 8, [](const Problem& p) {
    for (int64 q = 0; q < p.length_q; ++q) {
      const KeyRange range = key_range(p.window, p.length_q, p.length_k, q);
      for (int64 k = 0; k < p.length_k; ++k) {
        ASSERT_EQ(sees(p, q, k), k >= range.begin && k < range.end) << p << " " << q << " " << k;
      }
      ASSERT_TRUE(range.empty() ? range.begin == 0 && range.end == 0
                                : range.begin >= 0 && range.end <= p.length_k)
          << p << " " << q;
    }
  });
}

TEST(CoreMask, UnionAndCommonRanges) {
  for_every_problem(6, 8, [](const Problem& p) {
    for (int64 begin = 0; begin <= p.length_q; ++begin) {
      for (int64 end = begin; end <= p.length_q; ++end) {
        int64 first = p.length_k;
        int64 last = -1;
        std::vector<bool> common(static_cast<std::size_t>(p.length_k), end > begin);
        for (int64 k = 0; k < p.length_k; ++k) {
          for (int64 q = begin; q < end; ++q) {
            if (!sees(p, q, k)) {
              common[static_cast<std::size_t>(k)] = false;
              continue;
            }
            first = min64(first, k);
            last = max64(last, k);
          }
        }
        const KeyRange any = union_range(p.window, p.length_q, p.length_k, begin, end);
        ASSERT_EQ(any.empty(), last < 0) << p << " rows " << begin << " to " << end;
        if (last >= 0) {
          ASSERT_EQ(any.begin, first) << p << " rows " << begin << " to " << end;
          ASSERT_EQ(any.end, last + 1) << p << " rows " << begin << " to " << end;
        }
        const KeyRange all = common_range(p.window, p.length_q, p.length_k, begin, end);
        for (int64 k = 0; k < p.length_k; ++k) {
          ASSERT_EQ(common[static_cast<std::size_t>(k)], k >= all.begin && k < all.end)
              << p << " rows " << begin << " to " << end << " key " << k;
        }
      }
    }
  });
}

// Counts the (row, key) pairs of a block that are visible, out of how many there are.
struct Count {
  int64 visible = 0;
  int64 pairs = 0;
};

Count count(const Problem& p, int64 q_begin, int64 q_end, int64 block, int64 block_k) {
  Count result;
  for (int64 q = q_begin; q < q_end; ++q) {
    for (int64 k = block * block_k; k < (block + 1) * block_k; ++k) {
      ++result.pairs;
      if (sees(p, q, k)) ++result.visible;
    }
  }
  return result;
}

TEST(CoreMask, BlockRangeSortsEveryBlock) {
  for_every_problem(5, 9, [](const Problem& p) {
    for (int64 block_k = 1; block_k <= 5; ++block_k) {
      for (int64 q_begin = 0; q_begin < p.length_q; ++q_begin) {
        for (int64 q_end = q_begin + 1; q_end <= p.length_q; ++q_end) {
          const BlockRange r =
              block_range(p.window, p.length_q, p.length_k, q_begin, q_end, block_k);
          ASSERT_TRUE(0 <= r.begin && r.begin <= r.full_begin && r.full_begin <= r.full_end &&
                      r.full_end <= r.end)
              << p << " rows " << q_begin << " to " << q_end << " block " << block_k;
          for (int64 block = 0; block <= ceil_div(p.length_k, block_k); ++block) {
            const Count c = count(p, q_begin, q_end, block, block_k);
            const bool inside = block >= r.begin && block < r.end;
            const bool full = block >= r.full_begin && block < r.full_end;
            ASSERT_EQ(full, c.visible == c.pairs) << p << " rows " << q_begin << " to " << q_end
                                                  << " block " << block << " of " << block_k;
            ASSERT_TRUE(inside || c.visible == 0) << p << " block " << block << " of " << block_k;
            // The ends are tight: skipping is all there is to gain.
            const bool end = inside && (block == r.begin || block == r.end - 1);
            ASSERT_TRUE(!end || c.visible > 0) << p << " block " << block << " of " << block_k;
          }
        }
      }
    }
  });
}

TEST(CoreMask, BoundsBeyondEveryKeyDoNotOverflow) {
  constexpr int64 huge = std::numeric_limits<int64>::max();
  for (const Window window : {Window{huge, huge}, Window{huge, -1}, Window{-1, huge}}) {
    for (const int64 length : {int64{1}, int64{5}, int64{1} << 40}) {
      const KeyRange range = key_range(window, length, length, length - 1);
      EXPECT_EQ(range.begin, 0);
      EXPECT_EQ(range.end, length);
      const KeyRange all = union_range(window, length, length, 0, length);
      EXPECT_EQ(all.begin, 0);
      EXPECT_EQ(all.end, length);
      EXPECT_TRUE(allowed(window, length, length, 0, length - 1));
      const BlockRange blocks = block_range(window, length, length, 0, length, 128);
      EXPECT_EQ(blocks.end, ceil_div(length, 128));
      EXPECT_EQ(blocks.full_end - (blocks.full_begin == blocks.full_end ? blocks.end : 0),
                blocks.full_begin == blocks.full_end ? 0 : length / 128);
    }
  }
}

}  // namespace
}  // namespace fovea::core
