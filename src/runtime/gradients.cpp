#include "runtime/gradients.h"

#include "runtime/problem.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {
namespace {

// What a gradient is the gradient of, and what follows for it.
struct Rule {
  const GradientArgument& argument;
  std::string_view counterpart_name;
  const Tensor& counterpart;
  bool is_required = false;
  bool may_be_f32 = false;  // instead of the counterpart's dtype
};

void check_presence(const Rule& rule, const Tensor& tensor) {
  require(tensor.present || !rule.is_required, rule.argument.name,
          " is absent; gradients need dout, dq, dk and dv");
  require(!tensor.present || rule.counterpart.present, rule.argument.name,
          " is present but the problem has no ", rule.counterpart_name, "; leave it absent");
}

void check_shape_and_dtype(const Rule& rule, const Tensor& tensor) {
  require(tensor.shape == rule.counterpart.shape, rule.argument.name, " has shape ",
          Tuple{tensor.shape}, " but ", rule.counterpart_name, " has ",
          Tuple{rule.counterpart.shape}, "; they must be equal");
  const DType right = rule.counterpart.dtype;
  require(tensor.dtype == right || (rule.may_be_f32 && tensor.dtype == DType::f32),
          rule.argument.name, " has dtype ", tensor.dtype, "; it must be ", right,
          rule.may_be_f32 && right != DType::f32 ? ", as that of " : ", that of ",
          rule.counterpart_name, rule.may_be_f32 && right != DType::f32 ? ", or f32" : "");
}

void check_overlap(std::string_view name, const Tensor& written, std::string_view other_name,
                   const Tensor& other) {
  require(!share_memory(written, other), name, " shares memory with ", other_name,
          "; a gradient must lie apart from every other tensor");
}

void check_overlaps(const Problem& problem, const Gradients& gradients) {
  for (const GradientArgument& output : gradient_arguments) {
    if (!output.is_output) continue;
    const Tensor& written = gradients.*output.tensor;
    require(!overlaps_itself(written), output.name, " has strides ", Tuple{written.stride},
            " for shape ", Tuple{written.shape},
            ", which let elements share memory; every element of a gradient needs its own");
    for (const Argument& other : arguments) {
      check_overlap(output.name, written, other.name, problem.*other.tensor);
    }
    for (const GradientArgument& other : gradient_arguments) {
      if (other.tensor == output.tensor) continue;
      check_overlap(output.name, written, other.name, gradients.*other.tensor);
    }
  }
}

}  // namespace

core::Gradients validate(const Problem& problem, const Gradients& gradients) {
  require(problem.lse.present,
          "lse is absent; the backward pass needs out and lse as the forward pass wrote them");
  const Rule rules[] = {{gradient_arguments[0], "out", problem.out, true},
                        {gradient_arguments[1], "lse", problem.lse},
                        {gradient_arguments[2], "q", problem.q, true, true},
                        {gradient_arguments[3], "k", problem.k, true, true},
                        {gradient_arguments[4], "v", problem.v, true, true},
                        {gradient_arguments[5], "sink", problem.sink},
                        {gradient_arguments[6], "bias", problem.bias, false, true}};
  for (const Rule& rule : rules) {
    const Tensor& tensor = gradients.*rule.argument.tensor;
    check_view(rule.argument.name, tensor);
    check_presence(rule, tensor);
    if (tensor.present) check_shape_and_dtype(rule, tensor);
  }
  check_overlaps(problem, gradients);
  return translate(problem, gradients);
}

core::Gradients translate(const Problem& problem, const Gradients& gradients) {
  core::Gradients result;
  result.dout = to_view(gradients.dout);
  result.dlse = to_view(gradients.dlse);
  result.dq = to_view(gradients.dq);
  result.dk = to_view(gradients.dk);
  result.dv = to_view(gradients.dv);
  result.dsink = to_view(gradients.dsink);
  result.dsink.stride[0] = result.dsink.stride[3];  // one dimension: the query head
  result.dbias = to_view(gradients.dbias);
  for (std::size_t i = 0; i < 4; ++i) result.dbias_extent[i] = gradients.dbias.shape[i];
  result.rows_k = problem.k.shape[1];
  return result;
}

}  // namespace fovea
