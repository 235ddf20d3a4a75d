// The arithmetic of the backward pass, compiled once per instruction set and dispatched at run
// time.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "cpu/backward.h"
#include "cpu/forward_tile.h"

namespace fovea::cpu {

// A part of the key blocks of one KV head against all queries of its group: blocks split,
// split + splits, and so on, which under a causal mask are equal work.
struct BackwardItem {
  core::int32 batch = 0;
  core::int32 head_kv = 0;
  core::int32 split = 0;
  core::int64 unit = 0;  // items of a unit add to the same elements of dbias: one after the other
  core::int64 cost = 0;  // of the unit
};

// What items share. Rows are packed rows (core/tiles.h), those of a KV head one after the other:
// see first_row(). Every block of keys meets every row, so q and dout are brought into fp32, row
// beside row, once. Strides keep successive rows out of the same cache sets.
struct BackwardShared {
  float* lse = nullptr;      // [rows], natural logarithm
  float* delta = nullptr;    // [rows], dO O - dLSE
  float* queries = nullptr;  // [rows][query_stride]
  float* douts = nullptr;    // [rows][dout_stride]
  float* dq = nullptr;       // [splits][rows][dq_stride], without the scale
  core::int64 rows = 0;
  core::int64 query_stride = 0;
  core::int64 dout_stride = 0;
  core::int64 dq_stride = 0;
  core::View dbias;  // fp32; absent unless asked for
};

// Index of packed row 0 of a head among all rows of the problem.
core::int64 first_row(const core::Problem& problem, const core::Sequence& sequence,
                      core::int32 head_kv);

// The scratch of one thread. Strides keep successive rows out of the same cache sets.
struct BackwardScratch {
  core::int64 score_stride = 0;
  core::int64 dkey_stride = 0;
  core::int64 dvalue_stride = 0;
  float* weights = nullptr;          // [strip_q][score_stride]: S, then P with dropout
  float* dscores = nullptr;          // [strip_q][score_stride]: dP, then dS
  VisibleKeys* visible = nullptr;    // [strip_q], of each block of rows
  float* transposed_keys = nullptr;  // K^T and V^T in panels of keys
  float* transposed_values = nullptr;
  float* keys = nullptr;     // K in panels of columns
  float* dkeys = nullptr;    // [block_k][dkey_stride]
  float* dvalues = nullptr;  // [block_k][dvalue_stride]
  float* slopes = nullptr;   // [block_k], of the softcap
  float* kept = nullptr;     // [block_k], of the dropout
  float* staging = nullptr;  // rows on their way: four of K, or of dO and O each
};

// Lays the scratch out from base (64-byte aligned); returns the bytes it takes.
std::size_t layout_scratch(const core::Problem& problem, const BackwardConfig& config,
                           std::byte* base, BackwardScratch& scratch);

// An item's share of the queries of its sequence, all heads: q and dout in fp32, lse and delta,
// before any item is taken.
void prepare_rows(const core::Problem& problem, const core::Gradients& gradients,
                  const BackwardConfig& config, const BackwardItem& item,
                  const BackwardScratch& scratch, const BackwardShared& shared);

// dK and dV of the item's keys, and their part of dQ.
void backward_item(const core::Problem& problem, const core::Gradients& gradients,
                   const BackwardConfig& config, const BackwardItem& item,
                   const BackwardScratch& scratch, const BackwardShared& shared);

// Adds up the parts of dQ for the item's share of the rows, when all items are done.
void finish_rows(const core::Problem& problem, const core::Gradients& gradients,
                 const BackwardConfig& config, const BackwardItem& item,
                 const BackwardScratch& scratch, const BackwardShared& shared);

}  // namespace fovea::cpu
