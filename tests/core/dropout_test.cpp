#include "core/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>

namespace fovea::core {
namespace {

std::array<uint32, 4> words(const Philox4& x) {
  return {x.word[0], x.word[1], x.word[2], x.word[3]};
}

// Known answers of Random123, the authors' own library (kat_vectors, philox4x32-10).
TEST(CoreDropout, PhiloxKnownAnswers) {
  using Words = std::array<uint32, 4>;
  EXPECT_EQ(words(philox4x32({{0, 0, 0, 0}}, 0, 0)),
            (Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  constexpr uint32 ones = 0xffffffffu;
  EXPECT_EQ(words(philox4x32({{ones, ones, ones, ones}}, ones, ones)),
            (Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  // Digits of pi.
  EXPECT_EQ(words(philox4x32({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u,
                             0x299f31d0u)),
            (Words{0xd16cfe09u, 0x94fdcceb, 0x5001e420u, 0x24126ea1u}));
}

double keep_rate(const Dropout& dropout, int64 batch, int64 head) {
  int kept = 0;
  for (int64 row = 0; row < 256; ++row) {
    for (int64 column = 0; column < 256; ++column) {
      kept += dropout_keeps(dropout, batch, head, row, column) ? 1 : 0;
    }
  }
  return kept / 65536.0;
}

TEST(CoreDropout, KeepsTheAskedShare) {
  for (const float probability : {0.0f, 0.1f, 0.25f, 0.5f, 0.9f, 0.999f}) {
    const Dropout dropout{probability, 1234, 5};
    const double sigma = std::sqrt(probability * (1.0 - probability) / 65536.0);
    EXPECT_NEAR(keep_rate(dropout, 0, 0), 1.0 - probability, 4.5 * sigma + 1e-9) << probability;
    EXPECT_NEAR(keep_rate(dropout, 3, 2), 1.0 - probability, 4.5 * sigma + 1e-9) << probability;
  }
}

// The fate of 128 columns of one row.
std::array<bool, 128> mask(const Dropout& dropout, int64 batch, int64 head, int64 row,
                           int64 column) {
  std::array<bool, 128> result{};
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = dropout_keeps(dropout, batch, head, row, column + static_cast<int64>(i));
  }
  return result;
}

TEST(CoreDropout, EveryCoordinateMatters) {
  constexpr int64 far = int64{1} << 31;
  std::set<std::array<bool, 128>> masks;
  int count = 0;
  for (const uint64 seed : {0ull, 1ull, 1ull << 32, 1ull << 63}) {
    for (const uint64 offset : {0ull, 1ull, 2ull, 1ull << 32}) {
      for (const int64 batch : {int64{0}, int64{1}, far}) {
        for (const int64 head : {int64{0}, int64{1}}) {
          for (const int64 row : {int64{0}, int64{1}, far}) {
            for (const int64 column : {int64{0}, int64{128}, far}) {
              masks.insert(mask({0.5f, seed, offset}, batch, head, row, column));
              ++count;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(masks.size(), static_cast<std::size_t>(count));
}

TEST(CoreDropout, ThresholdStaysBelowOne) {
  EXPECT_EQ(dropout_threshold(0.0f), 0u);
  EXPECT_EQ(dropout_threshold(0.5f), 0x80000000u);
  EXPECT_EQ(dropout_threshold(std::nextafterf(1.0f, 0.0f)), 0xffffff00u);
}

}  // namespace
}  // namespace fovea::core
