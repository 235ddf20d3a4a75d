#include "runtime/problem.h"

#include <cmath>
#include <limits>

#include "core/fp8.h"
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
  for (unsigned i = 0; i <= static_cast<unsigned>(DType::s8); ++i) {
    if (!set.has(static_cast<DType>(i))) continue;
    stream << separator << static_cast<DType>(i);
    separator = " or ";
  }
  return stream;
}

void check_dtypes(const Problem& problem) {
  constexpr DTypes f32 = only(DType::f32);
  constexpr DTypes narrow = only(DType::bf16) | only(DType::f16);
  constexpr DTypes eight_bits = only(DType::e4m3) | only(DType::e5m2) | only(DType::s8);
  const DType inputs = problem.q.dtype;
  const DTypes same = only(inputs);
  const DTypes values =
      only(static_cast<DType>(core::value_type(static_cast<core::DType>(inputs))));
  const bool quantized = eight_bits.has(inputs);
  const DTypes computable = f32 | narrow | eight_bits;
  require(computable.has(inputs), "q has dtype ", inputs, "; it must be ", computable);
  const struct {
    const Argument& argument;
    DTypes allowed;
  } rules[] = {{arguments[1], same},
               {arguments[2], values},
               {arguments[3], quantized ? f32 | narrow : f32 | same},
               {arguments[4], f32},
               {arguments[5], quantized ? f32 : f32 | same},
               {arguments[6], only(DType::boolean)},
               {arguments[7], f32},
               {arguments[8], f32},
               {arguments[9], f32},
               {arguments[10], f32},
               {arguments[11], f32},
               {arguments[12], f32}};
  for (const auto& [argument, allowed] : rules) {
    const Tensor& tensor = problem.*argument.tensor;
    require(!tensor.present || allowed.has(tensor.dtype), argument.name, " has dtype ",
            tensor.dtype, "; with q in ", inputs, " it must be ", allowed);
  }
  for (const Argument& argument : std::span(arguments).subspan(9)) {
    require(quantized || !(problem.*argument.tensor).present, argument.name,
            " is present but q, k and v are ", inputs,
            "; scales belong to e4m3, e5m2 and s8, so leave it absent");
  }
}

void check_heads(const Problem& problem) {
  const std::int64_t heads_q = problem.q.shape[2];
  const std::int64_t heads_kv = problem.k.shape[2];
  const std::int64_t head_dim = problem.q.shape[3];
  const std::array<std::int64_t, 4> values = value_shape(problem);
  const std::int64_t head_dim_v = values[3];
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
    require(values[i] == problem.k.shape[i], "v has shape ", Tuple{problem.v.shape}, " but k has ",
            Tuple{problem.k.shape},
            problem.key_scale.present
                ? "; with key_scale it must be (batch, heads, head_dim, keys padded as quantised)"
                : "; they may differ in the head dimension (the last extent) alone");
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
  check_shape(arguments[3], problem, {rows_batch, rows, heads, value_shape(problem)[3]}, exact);
  check_shape(arguments[4], problem, {rows_batch, heads, rows, 1}, exact);
  check_shape(arguments[5], problem, scores, any);
  check_shape(arguments[6], problem, scores, any);
  check_shape(arguments[7], problem, {1, 1, 1, heads}, exact);
  check_shape(arguments[8], problem, {extents.batch, heads, 1, 1}, over_batch);
}

// Blocks of 32 rows of a side, as core::Fp8Layout counts them.
std::int64_t row_blocks(const Tensor& rows, std::span<const std::int32_t> cu_seqlens,
                        std::int64_t batch) {
  return core::scale_blocks(rows.shape[1], batch, is_given(cu_seqlens));
}

void check_scale_values(const Argument& argument, const Problem& problem) {
  const Tensor& scale = problem.*argument.tensor;
  // Integers have no NaN: a block that is not finite has it in its scale (core/numeric.h).
  const bool may_be_nan = problem.q.dtype == DType::s8 && argument.tensor != &Problem::v_scale;
  for (std::int64_t b = 0; b < scale.shape[0]; ++b) {
    for (std::int64_t h = 0; h < scale.shape[1]; ++h) {
      for (std::int64_t i = 0; i < scale.shape[2]; ++i) {
        const float value = static_cast<const float*>(
            scale.data)[b * scale.stride[0] + h * scale.stride[1] + i * scale.stride[2]];
        if (may_be_nan && std::isnan(value)) continue;
        require(value >= std::numeric_limits<float>::min() && value <= 0x1p100f, argument.name,
                " is ", value, " at (", b, ", ", h, ", ", i,
                "); a scale must be positive and finite (2^-126 to 2^100)");
      }
    }
  }
}

// One of q_scale, k_scale and v_scale.
void check_scale(const Argument& argument, const Problem& problem, const Extents& extents) {
  const Tensor& scale = problem.*argument.tensor;
  if (!scale.present) return;
  const bool queries = argument.tensor == &Problem::q_scale;
  const Tensor& rows = queries ? problem.q : problem.k;
  const std::span<const std::int32_t> cu = queries ? problem.cu_seqlens_q : problem.cu_seqlens_k;
  const auto [sequences, heads, blocks, one] = scale.shape;
  const bool shared_heads = heads == 1 || heads == problem.k.shape[2];
  require(one == 1 && (shared_heads || (queries && heads == problem.q.shape[2])), argument.name,
          " has shape ", Tuple{scale.shape}, "; it must be (sequences or 1, ",
          queries ? "query heads, " : "", "key/value heads or 1, blocks or 1, 1)");
  if (blocks == 1) {
    require(sequences == 1 || sequences == extents.batch, argument.name, " has shape ",
            Tuple{scale.shape}, " but there are ", extents.batch,
            " sequences; its first extent must be that or 1");
  } else {
    require(queries || !is_paged(problem), argument.name, " has shape ", Tuple{scale.shape},
            " but k is paged; it must have one scale per sequence and head, a third extent of 1");
    const std::int64_t right = row_blocks(rows, cu, extents.batch);
    const std::int64_t first = is_given(cu) ? 1 : extents.batch;
    require(blocks == right && sequences == first, argument.name, " has shape ", Tuple{scale.shape},
            "; for each 32 rows it must be ",
            Tuple{std::array<std::int64_t, 4>{first, heads, right, 1}});
  }
  if (problem.memory == Memory::host) check_scale_values(argument, problem);
}

// The copy engine reads pages in 8 bits where they are, or nobody does.
void check_quantized_pages(const Problem& problem) {
  const std::int64_t page_size = problem.k.shape[1];
  require(page_size % core::scale_block == 0, "k has a page size of ", page_size,
          " (its second extent); with key_scale it must be a multiple of ", core::scale_block,
          ", whole blocks of scales");
  require(problem.k.shape[3] % 32 == 0 && problem.k.stride[3] == 1, "k has shape ",
          Tuple{problem.k.shape}, " and strides ", Tuple{problem.k.stride},
          "; in pages with key_scale its last extent must be contiguous and a multiple of 32, as"
          " QuantizePlan::operands() gives it");
  for (const Argument& argument : {arguments[1], arguments[2], arguments[12]}) {
    const Tensor& tensor = problem.*argument.tensor;
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
    require(address % 16 == 0, argument.name, " has data at address ", address,
            "; in pages with key_scale it must be a multiple of 16");
  }
  for (const Argument& argument : {arguments[1], arguments[2]}) {
    const Tensor& tensor = problem.*argument.tensor;
    for (std::size_t i = 0; i < 3; ++i) {
      const std::int64_t stride = tensor.stride[i];
      require(tensor.shape[i] <= 1 || (stride > 0 && stride % 16 == 0), argument.name,
              " has strides ", Tuple{tensor.stride},
              "; in pages with key_scale all but the last must be positive multiples of 16");
    }
  }
}

// k and v as a QuantizePlan writes them.
void check_key_scale(const Problem& problem, const Extents& extents) {
  const Tensor& scale = problem.key_scale;
  if (!scale.present) return;
  for (const Argument& argument : {arguments[10], arguments[11]}) {
    require(!(problem.*argument.tensor).present, argument.name,
            " is present beside key_scale, which holds the scales of k and v; leave it absent");
  }
  if (is_paged(problem)) check_quantized_pages(problem);
  const std::int64_t blocks = row_blocks(problem.k, problem.cu_seqlens_k, extents.batch);
  const std::int64_t pairs = problem.k.shape[0] * problem.k.shape[2];
  const std::array<std::int64_t, 4> right{1, 1, pairs * blocks + core::scale_block_slack, 4};
  require(scale.shape == right && scale.stride[2] == 4 && scale.stride[3] == 1, "key_scale has ",
          "shape ", Tuple{scale.shape}, " and strides ", Tuple{scale.stride}, "; it must be ",
          Tuple{right}, " without gaps, as QuantizePlan::operands() gives it");
  require(problem.v.shape[3] == blocks * core::scale_block && problem.v.stride[3] == 1,
          "v has shape ", Tuple{problem.v.shape}, " and strides ", Tuple{problem.v.stride},
          "; with key_scale it must be (batch, heads, head_dim, ", blocks * core::scale_block,
          "), the last contiguous, as QuantizePlan::operands() gives it");
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

std::array<std::int64_t, 4> value_shape(const Problem& problem) {
  if (!problem.key_scale.present) return problem.v.shape;
  const std::array<std::int64_t, 4>& v = problem.v.shape;
  return {v[0], problem.k.shape[1], v[1], v[2]};
}

namespace {

// (sequence, head, block): extents of 1 are shared, and blocks of packed rows by all sequences.
core::View scale_view(const Tensor& scale) {
  core::View view = to_view(scale);
  for (std::size_t i = 0; i < 3; ++i) {
    if (scale.shape[i] == 1) view.stride[i] = 0;
  }
  return view;
}

// One field of the array of core::KeyScale.
core::View key_scale_view(const Problem& problem, const Extents& extents, std::int64_t field) {
  const std::int64_t blocks = row_blocks(problem.k, problem.cu_seqlens_k, extents.batch);
  core::View view = to_view(problem.key_scale);
  view.data = static_cast<float*>(view.data) + field;
  const std::int64_t packed = is_given(problem.cu_seqlens_k) ? 0 : 1;
  const std::int64_t stride[] = {packed * problem.k.shape[2] * blocks * 4, blocks * 4, 4, 1};
  for (int i = 0; i < 4; ++i) view.stride[i] = stride[i];
  return view;
}

void translate_scales(const Problem& problem, const Extents& extents, core::Problem& result) {
  result.q_scale = scale_view(problem.q_scale);
  const std::int64_t heads = problem.q_scale.shape[1];
  result.q_scale_heads = heads > 1 && heads < result.heads_q ? result.group_size() : 1;
  if (!problem.key_scale.present) {
    result.k_scale = scale_view(problem.k_scale);
    result.v_scale = scale_view(problem.v_scale);
    return;
  }
  result.k_scale = key_scale_view(problem, extents, 0);
  result.v_scale = key_scale_view(problem, extents, 3);
  result.v_transposed = true;
  const core::View v = result.v;  // (batch, head, column, key)
  result.v.stride[1] = v.stride[3];
  result.v.stride[2] = v.stride[1];
  result.v.stride[3] = v.stride[2];
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
  result.head_dim_v = static_cast<core::int32>(value_shape(problem)[3]);
  translate_scales(problem, extents, result);
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

void require_host_memory(const Problem& problem, std::string_view reader) {
  require(problem.memory == Memory::host, "memory is not host, where ", reader,
          " reads; give it copies there");
}

core::Problem validate(const Problem& problem) {
  check_present(problem);
  check_dtypes(problem);
  check_heads(problem);
  check_options(problem);
  const Extents extents = check_lengths(problem);
  check_shapes(problem, extents);
  for (const Argument& argument : std::span(arguments).subspan(9, 3)) {
    check_scale(argument, problem, extents);
  }
  check_key_scale(problem, extents);
  check_overlaps(problem);
  return translate(problem, extents);
}

}  // namespace fovea
