#include "tools/visible.h"

#include <algorithm>

namespace fovea::tools {
namespace {

double pairs_of_sequence(const Problem& p, std::int64_t rows, std::int64_t keys) {
  const double square = static_cast<double>(rows) * static_cast<double>(keys);
  const bool windowed = p.window_left >= 0 || p.window_right >= 0;
  if (!p.causal && !windowed) return square;
  if (!windowed && rows == keys) return square / 2.0;
  const std::int64_t reach = rows + keys;  // a bound beyond it hides nothing
  const std::int64_t left = p.window_left < 0 ? reach : std::min(p.window_left, reach);
  std::int64_t right = p.window_right < 0 ? reach : std::min(p.window_right, reach);
  if (p.causal) right = 0;
  double pairs = 0.0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t position = row + keys - rows;
    const std::int64_t begin = std::max<std::int64_t>(0, position - left);
    const std::int64_t end = std::min(keys, position + right + 1);
    pairs += static_cast<double>(std::max<std::int64_t>(0, end - begin));
  }
  return pairs;
}

}  // namespace

double visible_pairs(const Problem& p) {
  const auto entry = [](std::span<const std::int32_t> values, std::int64_t index) {
    return static_cast<std::int64_t>(values[static_cast<std::size_t>(index)]);
  };
  const auto length = [&](std::span<const std::int32_t> used, std::span<const std::int32_t> offsets,
                          std::int64_t dense, std::int64_t b) {
    if (!used.empty()) return entry(used, b);
    if (!offsets.empty()) return entry(offsets, b + 1) - entry(offsets, b);
    return dense;
  };
  std::int64_t batch = p.q.shape[0];
  if (!p.cu_seqlens_q.empty()) batch = static_cast<std::int64_t>(p.cu_seqlens_q.size()) - 1;
  double pairs = 0.0;
  for (std::int64_t b = 0; b < batch; ++b) {
    pairs += pairs_of_sequence(p, length(p.seqused_q, p.cu_seqlens_q, p.q.shape[1], b),
                               length(p.seqused_k, p.cu_seqlens_k, p.k.shape[1], b));
  }
  return pairs * static_cast<double>(p.q.shape[2]);
}

double flop_count(const Problem& p) {
  return 2.0 * visible_pairs(p) * static_cast<double>(p.q.shape[3] + p.v.shape[3]);
}

double backward_flop_count(const Problem& p) {
  return 2.0 * visible_pairs(p) * static_cast<double>(3 * p.q.shape[3] + 2 * p.v.shape[3]);
}

}  // namespace fovea::tools
