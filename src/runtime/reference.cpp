#include "cpu/reference.h"

#include <utility>

#include "fovea/fovea.hpp"
#include "runtime/gradients.h"
#include "runtime/problem.h"
#include "runtime/text.h"

namespace fovea {

namespace {

void check(const Problem& problem, Precision precision, int threads) {
  require_host_memory(problem, "the reference");
  require(precision <= Precision::same, "precision is ", static_cast<int>(precision),
          ", which is no fovea::Precision");
  require(threads >= 0 && threads <= max_threads, "threads is ", threads, "; it must lie in 0..",
          max_threads, ", where 0 is the OpenMP default");
}

}  // namespace

Reference reference(const Problem& problem, Precision precision, int threads) {
  check(problem, precision, threads);
  const core::Problem validated = validate(problem);
  cpu::ReferenceResult result = precision == Precision::fp64
                                    ? cpu::reference_forward(validated, threads)
                                    : cpu::naive_forward(validated, threads);
  return {std::move(result.out), std::move(result.lse)};
}

ReferenceGradients reference_backward(const Problem& problem, const Gradients& gradients,
                                      Precision precision, int threads) {
  check(problem, precision, threads);
  const core::Problem validated = validate(problem);
  const core::Gradients wanted = validate(problem, gradients);
  require(!validated.is_paged(),
          "block_table is given; gradients are defined for dense and packed keys alone");
  cpu::ReferenceGradients result = precision == Precision::fp64
                                       ? cpu::reference_backward(validated, wanted, threads)
                                       : cpu::naive_backward(validated, wanted, threads);
  return {std::move(result.dq), std::move(result.dk), std::move(result.dv), std::move(result.dsink),
          std::move(result.dbias)};
}

}  // namespace fovea
