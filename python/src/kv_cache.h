// What decoding does to a KV cache before it attends: new keys and values take their places, and
// rotary embedding turns queries and new keys.
#pragma once

#include <cstdint>
#include <span>

#include "fovea/fovea.hpp"

namespace fovea::python {

// cos and sin of the angles by which positions turn, (1, 1, positions, pairs), of the dtype of what
// they turn. Absent: nothing is turned.
struct Rotary {
  Tensor cos;
  Tensor sin;
  bool interleaved = false;  // pairs (0, 1), (2, 3), ...; otherwise (0, pairs), (1, pairs + 1), ...
};

// Row i of sequence b stands at position first_position[b] + i.
struct Rows {
  std::span<const std::int32_t> cu_seqlens;  // empty: dense, (B, rows, heads, head_dim)
  std::span<const std::int32_t> first_position;
  bool one_position = false;  // every row stands at first_position[b]
};

// k and v are (pages, page_size, Hkv, D); a cache without pages is one with a page per sequence.
struct Cache {
  Tensor k;
  Tensor v;
  std::span<const std::int32_t> block_table;  // B rows of `columns` page numbers
  std::int64_t columns = 0;
};

// Copies the rows of k and v to their positions in the cache, those of k turned. Throws Error
// before anything is written.
void append(const Cache& cache, const Tensor& k, const Tensor& v, const Rows& rows,
            const Rotary& rotary);

// result = x, turned; the rest of each head, beyond the pairs, as it is.
void rotate(const Tensor& x, const Tensor& result, const Rows& rows, const Rotary& rotary);

}  // namespace fovea::python
