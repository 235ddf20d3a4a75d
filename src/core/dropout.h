// The dropout mask: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
// 2011), keyed by the seed and counted by position. An element's fate depends on
// (seed, offset, batch, head, row, column) alone, never on tiles, threads or splits.
#pragma once

#include "core/types.h"

namespace fovea::core {

struct Philox4 {
  uint32 word[4];
};

constexpr Philox4 philox4x32(Philox4 counter, uint32 key0, uint32 key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64 a = static_cast<uint64>(0xD2511F53u) * counter.word[0];
    const uint64 b = static_cast<uint64>(0xCD9E8D57u) * counter.word[2];
    counter = {{static_cast<uint32>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32>(b),
                static_cast<uint32>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The offset, which callers advance between calls, enters the key by a bijective mix so that
// (seed, offset) pairs differ.
constexpr uint64 dropout_key(const Dropout& dropout) {
  return dropout.seed ^ (dropout.offset * 0x9E3779B97F4A7C15ull);
}

// Four consecutive columns share one Philox call: column / 4 counts, column % 4 picks the word.
// The counter holds (column / 4, row, head, batch), each below 2^32.
constexpr Philox4 dropout_words(const Dropout& dropout, int64 batch, int64 head, int64 row,
                                int64 column_div_4) {
  const uint64 mixed = dropout_key(dropout);
  return philox4x32({{static_cast<uint32>(column_div_4), static_cast<uint32>(row),
                      static_cast<uint32>(head), static_cast<uint32>(batch)}},
                    static_cast<uint32>(mixed), static_cast<uint32>(mixed >> 32));
}

// A word below this drops its element; probability is in [0, 1).
constexpr uint32 dropout_threshold(float probability) {
  return static_cast<uint32>(static_cast<double>(probability) * 4294967296.0);
}

constexpr bool dropout_keeps(const Dropout& dropout, int64 batch, int64 head, int64 row,
                             int64 column) {
  const Philox4 words = dropout_words(dropout, batch, head, row, column / 4);
  return words.word[column % 4] >= dropout_threshold(dropout.probability);
}

}  // namespace fovea::core
