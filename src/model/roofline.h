// What the forward pass takes on a chip, from the cycles that each unit needs.
//
// A step is a tile of query rows against a block of keys. Units work side by side, but for what
// an H200 shows (docs/kernels/fwd_sm90.md): tensor cores reach 98 % of their rate within a tile,
// and of the softmax's two kinds of instructions, exponentials of the special function unit and all
// others (through FMA, ALU and issue, side by side), a part of the shorter kind hides under the
// longer and the rest does not.
#pragma once

#include <string_view>

#include "core/types.h"
#include "model/hardware.h"

namespace fovea::model {

struct ForwardShape {
  core::int64 rows = 128;      // of a tile
  core::int64 tile_rows = 64;  // that one product takes: its operands are read once for each
  core::int64 keys = 128;      // of a step
  core::int64 head_dim = 128;
  core::int64 head_dim_v = 128;
  core::int64 element_bytes = 2;  // of q, k, v and weights; 8-bit products take half as long
  double special_share = 1.0;     // of the exponentials, by the special function unit
  double instructions = 2.8;      // of a warp, for 32 scores
  double fma_lanes = 2.2;         // for a score
  double alu_lanes = 0.85;        // the same
  core::int64 ctas = 1;           // that share products: each brings its part of keys and values
  // Blackwell, where scores and output lie in tensor memory: how often a score is read, and the
  // share of steps at which the output is read to be rescaled. 0, 0: there is none.
  double score_reads = 0.0;
  double rescales = 0.0;
};

// Cycles of one step, of each unit alone.
struct StepCycles {
  double tensor = 0.0;
  double exponential = 0.0;
  double fma = 0.0;
  double alu = 0.0;
  double issue = 0.0;
  double shared = 0.0;
  double copy = 0.0;
  double tensor_memory = 0.0;  // reads by threads; their writes go beside them

  double softmax() const;            // of exponentials, FMA, ALU and issue together
  double bound() const;              // of all of them together
  std::string_view binding() const;  // the unit that sets it
};

StepCycles forward_step(const Gpu& gpu, const ForwardShape& shape);

// Milliseconds of a problem: its tiles, dealt over the multiprocessors, and their steps.
double forward_ms(const Gpu& gpu, const ForwardShape& shape, const core::Problem& problem);

}  // namespace fovea::model
