#include "tests/runtime_setup.h"

#include <algorithm>
#include <cstring>

namespace fovea::test {
namespace {

HostTensor filled(DType dtype, Shape shape, Random& random) {
  HostTensor tensor(dtype, shape);
  tensor.fill([&](Index, Index, Index, Index) {
    return dtype == DType::boolean ? static_cast<double>(random.below(2)) : random.normal();
  });
  return tensor;
}

fovea_lengths to_c(std::span<const std::int32_t> lengths) {
  return {lengths.data(), static_cast<std::int64_t>(lengths.size())};
}

}  // namespace

SmallCall::SmallCall(Kind kind, DType dtype) {
  Random random(7);
  const bool varlen = kind == Kind::varlen;
  const Shape rows_q = varlen ? Shape{1, 6, 4, 8} : Shape{2, 3, 4, 8};
  const Shape rows_k = varlen                ? Shape{1, 10, 2, 8}
                       : kind == Kind::paged ? Shape{7, 4, 2, 8}
                                             : Shape{2, 5, 2, 8};
  const Index keys = kind == Kind::paged ? 12 : 5;
  q = filled(dtype, rows_q, random);
  k = filled(dtype, rows_k, random);
  v = filled(dtype, {rows_k[0], rows_k[1], rows_k[2], 6}, random);
  out = HostTensor(dtype, {rows_q[0], rows_q[1], rows_q[2], 6});
  lse = HostTensor(DType::f32, {rows_q[0], rows_q[2], rows_q[1], 1});
  bias = filled(DType::f32, {2, 4, 3, keys}, random);
  mask = filled(DType::boolean, {1, 4, 3, keys}, random);
  sink = filled(DType::f32, {1, 1, 1, 4}, random);
  alibi = filled(DType::f32, {2, 4, 1, 1}, random);

  problem.q = q.tensor();
  problem.k = k.tensor();
  problem.v = v.tensor();
  problem.out = out.tensor();
  problem.lse = lse.tensor();
  problem.bias = bias.tensor();
  problem.mask = mask.tensor();
  problem.sink = sink.tensor();
  problem.alibi = alibi.tensor();
  if (varlen) {
    problem.cu_seqlens_q = keep({0, 2, 5});
    problem.cu_seqlens_k = keep({0, 4, 9});
  }
  if (kind == Kind::paged) {
    problem.block_table = keep({5, 1, 1 << 30, 0, 6, 2});  // the third entry is not in use
    problem.block_table_columns = 3;
    problem.seqused_k = keep({5, 9});
  }
}

std::span<const std::int32_t> SmallCall::keep(std::initializer_list<std::int32_t> values) {
  return entries.emplace_back(values);
}

fovea_tensor to_c(const Tensor& tensor) {
  fovea_tensor result;
  result.data = tensor.data;
  const int dtype = static_cast<int>(tensor.dtype);
  std::memcpy(&result.dtype, &dtype, sizeof dtype);  // may be a wrong one on purpose
  result.present = tensor.present ? 1 : 0;
  std::copy(tensor.shape.begin(), tensor.shape.end(), result.shape);
  std::copy(tensor.stride.begin(), tensor.stride.end(), result.stride);
  return result;
}

fovea_problem to_c(const Problem& problem) {
  fovea_problem result;
  fovea_problem_init(&result, sizeof result);
  result.q = to_c(problem.q);
  result.k = to_c(problem.k);
  result.v = to_c(problem.v);
  result.out = to_c(problem.out);
  result.lse = to_c(problem.lse);
  result.bias = to_c(problem.bias);
  result.mask = to_c(problem.mask);
  result.sink = to_c(problem.sink);
  result.alibi = to_c(problem.alibi);
  result.cu_seqlens_q = to_c(problem.cu_seqlens_q);
  result.cu_seqlens_k = to_c(problem.cu_seqlens_k);
  result.seqused_q = to_c(problem.seqused_q);
  result.seqused_k = to_c(problem.seqused_k);
  result.max_seqlen_q = problem.max_seqlen_q;
  result.max_seqlen_k = problem.max_seqlen_k;
  result.block_table = to_c(problem.block_table);
  result.block_table_columns = problem.block_table_columns;
  result.has_softmax_scale = problem.softmax_scale.has_value() ? 1 : 0;
  result.softmax_scale = problem.softmax_scale.value_or(0.0f);
  result.causal = problem.causal ? 1 : 0;
  result.window_left = problem.window_left;
  result.window_right = problem.window_right;
  result.softcap = problem.softcap;
  result.dropout_probability = problem.dropout.probability;
  result.dropout_seed = problem.dropout.seed;
  result.dropout_offset = problem.dropout.offset;
  result.num_splits = problem.num_splits;
  result.deterministic = problem.deterministic ? 1 : 0;
  return result;
}

}  // namespace fovea::test
