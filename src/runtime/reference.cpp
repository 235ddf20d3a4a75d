#include "cpu/reference.h"

#include <utility>

#include "fovea/fovea.hpp"
#include "runtime/problem.h"
#include "runtime/text.h"

namespace fovea {

Reference reference(const Problem& problem, Precision precision, int threads) {
  require(precision <= Precision::same, "precision is ", static_cast<int>(precision),
          ", which is no fovea::Precision");
  require(threads >= 0 && threads <= max_threads, "threads is ", threads, "; it must lie in 0..",
          max_threads, ", where 0 is the OpenMP default");
  const core::Problem validated = validate(problem);
  cpu::ReferenceResult result = precision == Precision::fp64
                                    ? cpu::reference_forward(validated, threads)
                                    : cpu::naive_forward(validated, threads);
  return {std::move(result.out), std::move(result.lse)};
}

}  // namespace fovea
