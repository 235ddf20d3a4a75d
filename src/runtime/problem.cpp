#include "runtime/problem.h"

#include <cmath>
#include <limits>

#include "core/mask.h"
#include "runtime/lengths.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {
namespace {

void check_present(const Problem& problem) {
  for (const Argument& argument : arguments) check_view(argument.name, problem.*argument.tensor);
  for (std::size_t i = 0; i < 4; ++i) {
    require((problem.*arguments[i].tensor).present, arguments[i].name,
            " is absent; a problem needs q, k, v and out");
  }
}

// A set of dtypes, printed as "bf16 or f32".
struct DTypes {
  unsigned bits = 0;
  constexpr bool has(DType dtype) const { return (bits >> static_cast<unsigned>(dtype) & 1u) != 0; }
};

constexpr DTypes operator|(DTypes a, DTypes b) { return {a.bits | b.bits}; }
constexpr DTypes only(DType dtype) { return {1u << static_cast<unsigned>(dtype)}; }

std::ostream& operator<<(std::ostream& stream, DTypes set) {
  const char* separator = "";
  for (unsigned i = 0; i <= static_cast<unsigned>(DType::boolean); ++i) {
    if (!set.has(static_cast<DType>(i))) continue;
    stream << separator << static_cast<DType>(i);
    separator = " or ";
  }
  return stream;
}

void check_dtypes(const Problem& problem) {
  constexpr DTypes f32 = only(DType::f32);
  constexpr DTypes narrow = only(DType::bf16) | only(DType::f16);
  constexpr DTypes fp8 = only(DType::e4m3) | only(DType::e5m2);
  const DType inputs = problem.q.dtype;
  const DTypes same = only(inputs);
  const bool quantized = fp8.has(inputs);
  const DTypes computable = f32 | narrow | fp8;
  require(computable.has(inputs), "q has dtype ", inputs, "; it must be ", computable);
  const struct {
    const Argument& argument;
    DTypes allowed;
  } rules[] = {{arguments[1], same},
               {arguments[2], same},
               {arguments[3], quantized ? f32 | narrow : f32 | same},
               {arguments[4], f32},
               {arguments[5], quantized ? f32 : f32 | same},
               {arguments[6], only(DType::boolean)},
               {arguments[7], f32},
               {arguments[8], f32}};
  for (const auto& [argument, allowed] : rules) {
    const Tensor& tensor = problem.*argument.tensor;
    require(!tensor.present || allowed.has(tensor.dtype), argument.name, " has dtype ",
            tensor.dtype, "; with q in ", inputs, " it must be ", allowed);
  }
}

void check_heads(const Problem& problem) {
  const std::int64_t heads_q = problem.q.shape[2];
  const std::int64_t heads_kv = problem.k.shape[2];
  const std::int64_t head_dim = problem.q.shape[3];
  const std::int64_t head_dim_v = problem.v.shape[3];
  require(heads_q > 0, "q has 0 heads (its third extent); it must have at least 1");
  require(heads_kv > 0, "k has 0 heads (its third extent); it must have at least 1");
  require(heads_q % heads_kv == 0, "k has ", heads_kv, " heads but q has ", heads_q,
          "; the number of query heads must be a multiple of the number of key/value heads");
  require(head_dim >= 1 && head_dim <= max_head_dim, "q has head dimension ", head_dim,
          "; it must lie in 1..", max_head_dim);
  require(problem.k.shape[3] == head_dim, "k has head dimension ", problem.k.shape[3],
          " but q has ", head_dim, "; they must be equal");
  require(head_dim_v >= 1 && head_dim_v <= max_head_dim_v, "v has head dimension ", head_dim_v,
          "; it must lie in 1..", max_head_dim_v);
  for (std::size_t i = 0; i < 3; ++i) {
    require(problem.v.shape[i] == problem.k.shape[i], "v has shape ", Tuple{problem.v.shape},
            " but k has ", Tuple{problem.k.shape},
            "; they may differ in the head dimension (the last extent) alone");
  }
}

void check_options(const Problem& problem) {
  // Below 2^127, so that the factor log2(e) of base-2 exponentials cannot overflow it.
  constexpr float largest = 0x1p127f;
  const float scale = problem.softmax_scale.value_or(1.0f);
  require(std::abs(scale) <= largest, "softmax_scale is ", scale,
          "; it must be finite (at most 2^127), or left out for 1 / sqrt(head_dim)");
  // A subnormal softcap has no finite reciprocal.
  const float softcap = problem.softcap;
  require(softcap == 0.0f || (softcap >= std::numeric_limits<float>::min() && softcap <= largest),
          "softcap is ", softcap,
          "; it must be positive and finite (2^-126 to 2^127), or 0 for none");
  require(softcap == 0.0f || std::abs(scale / softcap) <= largest, "softcap is ", softcap,
          ", too small for softmax_scale ", scale, "; their quotient must be at most 2^127");
  for (const auto& [name, bound] : {std::pair{"window_left", problem.window_left},
                                    std::pair{"window_right", problem.window_right}}) {
    require(
        bound >= -1, name, " is ", bound,
        "; it must be -1 for unbounded, or the number of keys to see on that side of the diagonal");
  }
  const float probability = problem.dropout.probability;
  require(probability >= 0.0f && probability < 1.0f, "dropout.probability is ", probability,
          "; it must lie in [0, 1)");
  require(problem.num_splits >= 0, "num_splits is ", problem.num_splits,
          "; it must be positive, or 0 to let the plan decide");
  require(problem.memory <= Memory::device, "memory is ", static_cast<int>(problem.memory),
          "; it must be host or device");
  require(problem.stream == nullptr || problem.memory == Memory::device,
          "stream is given but memory is host; leave stream null, or pass device memory");
}

void check_shape(const Argument& argument, const Problem& problem,
                 const std::array<std::int64_t, 4>& right, std::array<bool, 4> broadcasts) {
  const Tensor& tensor = problem.*argument.tensor;
  if (!tensor.present) return;
  for (std::size_t i = 0; i < 4; ++i) {
    require(tensor.shape[i] == right[i] || (broadcasts[i] && tensor.shape[i] == 1), argument.name,
            " has shape ", Tuple{tensor.shape}, "; it must be ", Tuple{right},
            broadcasts[3]   ? ", where any extent may be 1 to broadcast"
            : broadcasts[0] ? ", where the first extent may be 1 to broadcast"
                            : "");
  }
}

// Every tensor but q, k and v, whose shapes follow from those three.
void check_shapes(const Problem& problem, const Extents& extents) {
  const std::int64_t rows_batch = problem.q.shape[0];
  const std::int64_t rows = problem.q.shape[1];
  const std::int64_t heads = problem.q.shape[2];
  constexpr std::array<bool, 4> exact{};
  constexpr std::array<bool, 4> over_batch{true, false, false, false};
  constexpr std::array<bool, 4> any{true, true, true, true};
  const std::array<std::int64_t, 4> scores{extents.batch, heads, extents.seqlen_q,
                                           extents.seqlen_k};
  check_shape(arguments[3], problem, {rows_batch, rows, heads, problem.v.shape[3]}, exact);
  check_shape(arguments[4], problem, {rows_batch, heads, rows, 1}, exact);
  check_shape(arguments[5], problem, scores, any);
  check_shape(arguments[6], problem, scores, any);
  check_shape(arguments[7], problem, {1, 1, 1, heads}, exact);
  check_shape(arguments[8], problem, {extents.batch, heads, 1, 1}, over_batch);
}

// A result that is also an input, or whose elements are each other, depends on the order of work.
void check_overlaps(const Problem& problem) {
  for (const Argument& output : arguments) {
    if (!output.is_output) continue;
    const Tensor& written = problem.*output.tensor;
    require(!overlaps_itself(written), output.name, " has strides ", Tuple{written.stride},
            " for shape ", Tuple{written.shape},
            ", which let elements share memory; every element of an output needs its own");
    for (const Argument& other : arguments) {
      if (other.tensor == output.tensor) continue;
      require(!share_memory(written, problem.*other.tensor), output.name, " shares memory with ",
              other.name, "; an output must lie apart from every other tensor");
    }
  }
}

}  // namespace

core::Problem translate(const Problem& problem, const Extents& extents) {
  core::Problem result;
  result.q = to_view(problem.q);
  result.k = to_view(problem.k);
  result.v = to_view(problem.v);
  result.out = to_view(problem.out);
  result.lse = to_view(problem.lse);
  result.bias = to_view(problem.bias);
  result.mask = to_view(problem.mask);
  result.alibi = to_view(problem.alibi);
  result.sink = to_view(problem.sink);
  result.sink.stride[0] = result.sink.stride[3];  // one dimension: the query head

  result.batch = extents.batch;
  result.seqlen_q = extents.seqlen_q;
  result.seqlen_k = extents.seqlen_k;
  result.heads_q = static_cast<core::int32>(problem.q.shape[2]);
  result.heads_kv = static_cast<core::int32>(problem.k.shape[2]);
  result.head_dim = static_cast<core::int32>(problem.q.shape[3]);
  result.head_dim_v = static_cast<core::int32>(problem.v.shape[3]);
  if (is_given(problem.cu_seqlens_q)) {
    result.cu_seqlens_q = problem.cu_seqlens_q.data();
    result.total_q = problem.q.shape[1];
  }
  if (is_given(problem.cu_seqlens_k)) {
    result.cu_seqlens_k = problem.cu_seqlens_k.data();
    result.total_k = problem.k.shape[1];
  }
  result.seqused_q = problem.seqused_q.data();
  result.seqused_k = problem.seqused_k.data();
  if (is_paged(problem)) {
    result.block_table = problem.block_table.data();
    result.block_table_stride = problem.block_table_columns;
    result.page_size = static_cast<core::int32>(problem.k.shape[1]);
    result.pages = problem.k.shape[0];
  }

  result.softmax_scale =
      problem.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(result.head_dim)));
  result.softcap = problem.softcap;
  result.window =
      core::effective_window({problem.window_left, problem.window_right}, problem.causal);
  result.dropout = {problem.dropout.probability, problem.dropout.seed, problem.dropout.offset};
  result.num_splits = problem.num_splits;
  result.deterministic = problem.deterministic;
  return result;
}

core::Problem validate(const Problem& problem) {
  check_present(problem);
  check_dtypes(problem);
  check_heads(problem);
  check_options(problem);
  const Extents extents = check_lengths(problem);
  check_shapes(problem, extents);
  check_overlaps(problem);
  return translate(problem, extents);
}

}  // namespace fovea
