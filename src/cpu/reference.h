// The naive oracle: attention by its definition, one row at a time, for tests and `fovea check`.
#pragma once

#include <vector>

#include "core/types.h"

namespace fovea::cpu {

// out and lse in row order: out[((b * rows + i) * heads_q + h) * head_dim_v + d] and
// lse[(b * heads_q + h) * rows + i], where dense problems have batch x seqlen_q rows and varlen
// ones one batch of total_q rows (slack rows are zero and -infinity).
struct ReferenceResult {
  std::vector<double> out;
  std::vector<double> lse;
};

// fp64 throughout. `threads` rows blocks run in parallel; 0 takes the OpenMP default.
ReferenceResult reference_forward(const core::Problem& problem, int threads = 0);

// The same algorithm with what a framework without a fused kernel would do in the problem's own
// precision: scores and their softmax in fp32, probabilities and the output rounded to the inputs'
// dtype, products accumulated in fp32. Its error against reference_forward() sets the tolerance.
ReferenceResult naive_forward(const core::Problem& problem, int threads = 0);

// Gradients of every input, as dense arrays in row-major order of the tensors' shapes (rows outside
// the sequences are zero); dsink and dbias are empty unless asked for. Scores are computed anew:
// out and lse of the problem are not read.
struct ReferenceGradients {
  std::vector<double> dq, dk, dv, dsink, dbias;
};

ReferenceGradients reference_backward(const core::Problem& problem,
                                      const core::Gradients& gradients, int threads = 0);

// What a framework without a fused kernel computes: every product's result is rounded to the
// inputs' dtype, every sum is taken in fp32.
ReferenceGradients naive_backward(const core::Problem& problem, const core::Gradients& gradients,
                                  int threads = 0);

}  // namespace fovea::cpu
