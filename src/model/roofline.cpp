#include "model/roofline.h"

#include <algorithm>

#include "core/mask.h"

namespace fovea::model {

namespace {

using core::int64;

// Of a multiprocessor and cycle: 16 for each lane of a warp's quarter (docs/kernels/fwd_sm100.md).
constexpr double tensor_memory_bytes = 512.0;
constexpr double tensor_share = 0.985;
// Of the shorter of exponentials and other instructions, what does not hide under the longer.
constexpr double serial_share = 0.8;
constexpr double softmax_share = 0.97;
// These two and the clock of the H200 leave the least squares of what the model is off in the table
// of docs/kernels/fwd_sm90.md. First and last step of a tile overlap nothing, and its output is
// written.
constexpr double tile_cycles = 3100.0;
// A tile that a mask cuts takes the blocks at its edges by a softmax with a maximum.
constexpr double edge_cycles = 1500.0;

}  // namespace

StepCycles forward_step(const Gpu& gpu, const ForwardShape& s) {
  const auto rows = static_cast<double>(s.rows);
  const auto keys = static_cast<double>(s.keys);
  const auto d = static_cast<double>(s.head_dim);
  const auto dv = static_cast<double>(s.head_dim_v);
  const double products = rows / static_cast<double>(s.tile_rows);
  const auto ctas = static_cast<double>(s.ctas);
  const auto element = static_cast<double>(s.element_bytes);
  const double key_bytes = keys * (d + dv) * element / ctas;
  const double operand_bytes = static_cast<double>(s.tile_rows) * d * element + key_bytes;
  const double cells_read = s.score_reads * keys + s.rescales * dv;  // of each row
  return {.tensor = rows * keys * (d + dv) * element / gpu.tensor_flops,
          .exponential = rows * keys * s.special_share / gpu.exponentials,
          .fma = rows * keys * s.fma_lanes / gpu.fma_lanes,
          .alu = rows * keys * s.alu_lanes / gpu.alu_lanes,
          .issue = rows * keys / 32 * s.instructions / gpu.warp_instructions,
          .shared = products * operand_bytes / gpu.shared_bytes,
          .copy = key_bytes / gpu.l2_bytes,
          .tensor_memory = rows * cells_read * 4 / tensor_memory_bytes};
}

double StepCycles::softmax() const {
  const double others = std::max({fma, alu, issue});
  const auto [shorter, longer] = std::minmax(exponential, others);
  return (longer + serial_share * shorter) / softmax_share;
}

double StepCycles::bound() const {
  return std::max({tensor / tensor_share, softmax(), shared, copy, tensor_memory});
}

std::string_view StepCycles::binding() const {
  const double most = bound();
  if (most == tensor / tensor_share) return "tensor cores";
  if (most == shared) return "shared memory";
  if (most == copy) return "copies from L2";
  if (most == tensor_memory) return "tensor memory";
  const double longest = std::max({exponential, fma, alu, issue});
  if (longest == exponential) return "exponentials";
  return longest == fma ? "FMA" : longest == alu ? "ALU" : "instruction issue";
}

double forward_ms(const Gpu& gpu, const ForwardShape& shape, const core::Problem& p) {
  const int64 q_tiles = core::ceil_div(p.seqlen_q, shape.rows);
  const int64 heads = p.batch * p.heads_q;
  int64 steps = 0;
  int64 longest = 0;
  for (int64 t = 0; t < q_tiles; ++t) {
    const core::BlockRange blocks =
        core::block_range(p.window, p.seqlen_q, p.seqlen_k, t * shape.rows,
                          std::min(p.seqlen_q, (t + 1) * shape.rows), shape.keys);
    steps += blocks.end - blocks.begin;
    longest = std::max(longest, blocks.end - blocks.begin);
  }
  const double step = forward_step(gpu, shape).bound();
  const bool is_cut = p.window.left >= 0 || p.window.right >= 0;
  const double once = tile_cycles + (is_cut ? edge_cycles : 0.0);  // a tile
  const auto total = static_cast<double>(heads) *
                     (static_cast<double>(steps) * step + static_cast<double>(q_tiles) * once);
  // Tiles of unequal length pack well when dealt longest first; the last of them shows.
  const double last = static_cast<double>(longest) * step + once;
  const double waves = static_cast<double>(core::ceil_div(heads * q_tiles, gpu.sm_count));
  const double balanced = total / gpu.sm_count;
  const bool equal = longest * q_tiles == steps;
  const double cycles = equal ? waves * last : std::max(balanced + last / 2, last);
  return cycles / (gpu.clock_ghz * 1e6);
}

}  // namespace fovea::model
