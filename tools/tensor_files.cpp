#include "tools/tensor_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "tools/convert.h"
#include "tools/npy.h"
#include "tools/safetensors.h"
#include "tools/text.h"

namespace fovea::tools {
namespace {

using Extents = std::array<std::int64_t, 4>;

std::optional<DType> dtype_of(ElementType type) {
  switch (type) {
    case ElementType::f32: return DType::f32;
    case ElementType::f16: return DType::f16;
    case ElementType::bf16: return DType::bf16;
    case ElementType::e4m3: return DType::e4m3;
    case ElementType::e5m2: return DType::e5m2;
    case ElementType::i8: return DType::s8;
    default: return std::nullopt;
  }
}

DType floating_dtype(std::string_view what, const Array& array) {
  const std::optional<DType> dtype = dtype_of(array.type);
  if (!dtype) {
    throw Error(
        fmt::format("{} holds {}; float32, float16 or bfloat16 is needed", what, name(array.type)));
  }
  return *dtype;
}

// The array's elements as `dtype`, where they are when nothing has to change.
const void* elements_as(Workload& workload, std::string_view what, const Array& array,
                        DType dtype) {
  const DType source = floating_dtype(what, array);
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(array.bytes.data()) % size_bytes(source) == 0;
  if (source == dtype && aligned) return array.bytes.data();
  std::byte* const data = workload.allocate(array.elements(), dtype);
  convert(array.bytes.data(), source, data, dtype, array.elements());
  return data;
}

// q, k or v with its dimensions in the order of `options.layout`.
Tensor read_tensor(Workload& workload, const TensorFiles& files, const std::string& what,
                   const ProblemOptions& options) {
  const Array& array = files.get(what);
  if (array.rank() != 3 && array.rank() != 4) {
    throw Error(
        fmt::format("{} has shape {}; (batch, seqlen, heads, dim) is needed, or the same "
                    "without batch",
                    what, shape_text(array.shape)));
  }
  const DType dtype = options.dtype.value_or(floating_dtype(what, array));
  const void* const data = elements_as(workload, what, array, dtype);
  Extents extents{1, 1, 1, 1};
  std::copy(array.shape.begin(), array.shape.end(), extents.end() - array.rank());
  const auto [batch, first, second, dim] = extents;
  return options.layout == Layout::bshd ? bshd(data, dtype, batch, first, second, dim)
                                        : bhsd(data, dtype, batch, second, first, dim);
}

std::vector<std::int32_t> read_integers(std::string_view what, const Array* array,
                                        std::int64_t rank) {
  std::vector<std::int32_t> values;
  if (array == nullptr) return values;
  if (array->rank() != rank) {
    throw Error(fmt::format("{} has shape {}; {} needed", what, shape_text(array->shape),
                            rank == 1 ? "one dimension is" : "two dimensions are"));
  }
  const bool wide = array->type == ElementType::i64;
  if (!wide && array->type != ElementType::i32) {
    throw Error(fmt::format("{} holds {}; int32 is needed", what, name(array->type)));
  }
  const auto count = static_cast<std::size_t>(array->elements());
  values.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t value = 0;
    if (wide) {
      std::memcpy(&value, array->bytes.data() + i * sizeof value, sizeof value);
    } else {
      std::int32_t narrow = 0;
      std::memcpy(&narrow, array->bytes.data() + i * sizeof narrow, sizeof narrow);
      value = narrow;
    }
    if (value < std::numeric_limits<std::int32_t>::min() ||
        value > std::numeric_limits<std::int32_t>::max()) {
      throw Error(fmt::format("{}[{}] is {}; a 32-bit integer is needed", what, i, value));
    }
    values[i] = static_cast<std::int32_t>(value);
  }
  return values;
}

// An array of at most four dimensions, with ones put before them as numpy's broadcasting does.
Extents leading_ones(std::string_view what, const Array& array) {
  if (array.rank() > 4) {
    throw Error(
        fmt::format("{} has shape {}; (batch, heads, seqlen_q, seqlen_k) is needed, or the "
                    "last of these",
                    what, shape_text(array.shape)));
  }
  Extents extents{1, 1, 1, 1};
  std::copy(array.shape.begin(), array.shape.end(), extents.end() - array.rank());
  return extents;
}

void read_bias_and_mask(Workload& w, const TensorFiles& files) {
  if (const Array* const bias = files.find("bias")) {
    const DType own = floating_dtype("bias", *bias);
    const DType dtype = own == w.problem.q.dtype ? own : DType::f32;
    w.problem.bias =
        contiguous(elements_as(w, "bias", *bias, dtype), dtype, leading_ones("bias", *bias));
  }
  if (const Array* const mask = files.find("mask")) {
    if (mask->type != ElementType::boolean && mask->type != ElementType::u8) {
      throw Error(fmt::format("mask holds {}; bool is needed, true for visible", name(mask->type)));
    }
    w.problem.mask = contiguous(mask->bytes.data(), DType::boolean, leading_ones("mask", *mask));
  }
}

void read_sink_and_alibi(Workload& w, const TensorFiles& files, const ProblemOptions& options) {
  const std::int64_t heads = w.problem.q.shape[2];
  if (const Array* const sink = files.find("sink")) {
    w.problem.sink = contiguous(elements_as(w, "sink", *sink, DType::f32), DType::f32,
                                leading_ones("sink", *sink));
  } else if (options.sink) {
    throw Error(
        "--sink is given, but the input has no tensor 'sink'; one logit per query head is "
        "needed");
  }
  if (const Array* const alibi = files.find("alibi")) {
    if (alibi->rank() != 1 && alibi->rank() != 2) {
      throw Error(fmt::format("alibi has shape {}; (heads,) or (batch, heads) is needed",
                              shape_text(alibi->shape)));
    }
    const std::int64_t batch = alibi->rank() == 2 ? alibi->shape[0] : 1;
    w.problem.alibi = contiguous(elements_as(w, "alibi", *alibi, DType::f32), DType::f32,
                                 {batch, alibi->shape.back(), 1, 1});
  } else if (options.alibi) {
    add_alibi(w, heads);
    fill_alibi_slopes(static_cast<float*>(w.problem.alibi.data), heads);
  }
}

void read_lengths(Workload& w, const TensorFiles& files) {
  w.cu_seqlens_q = read_integers("cu_seqlens_q", files.find("cu_seqlens_q"), 1);
  w.cu_seqlens_k = read_integers("cu_seqlens_k", files.find("cu_seqlens_k"), 1);
  w.seqused_q = read_integers("seqused_q", files.find("seqused_q"), 1);
  w.seqused_k = read_integers("seqused_k", files.find("seqused_k"), 1);
  w.problem.cu_seqlens_q = w.cu_seqlens_q;
  w.problem.cu_seqlens_k = w.cu_seqlens_k;
  w.problem.seqused_q = w.seqused_q;
  w.problem.seqused_k = w.seqused_k;
  if (const Array* const table = files.find("block_table")) {
    w.block_table = read_integers("block_table", table, 2);
    w.problem.block_table = w.block_table;
    w.problem.block_table_columns = table->shape[1];
  }
}

}  // namespace

void TensorFiles::add(const std::map<std::string, Array>& arrays) {
  for (const auto& [tensor, array] : arrays) arrays_[tensor] = array;
}

void TensorFiles::add_safetensors(const std::string& path) {
  auto file = std::make_unique<FileBytes>(path);
  try {
    add(parse_safetensors(file->bytes()).tensors);
  } catch (const Error& error) {
    throw Error(fmt::format("{} {}", one_line(path), error.what()));
  }
  files_.push_back(std::move(file));
  origin_ = path;
}

void TensorFiles::add_npy(const std::string& name, const std::string& path) {
  auto file = std::make_unique<FileBytes>(path);
  try {
    arrays_[name] = parse_npy(file->bytes());
  } catch (const Error& error) {
    throw Error(fmt::format("{} {}", one_line(path), error.what()));
  }
  files_.push_back(std::move(file));
  origin_ = path;
}

const Array* TensorFiles::find(const std::string& name) const {
  const auto found = arrays_.find(name);
  return found == arrays_.end() ? nullptr : &found->second;
}

const Array& TensorFiles::get(const std::string& name) const {
  const Array* const array = find(name);
  if (array != nullptr) return *array;
  std::string known;
  for (const auto& [other, unused] : arrays_) known += (known.empty() ? "" : ", ") + other;
  throw Error(fmt::format("{} has no tensor '{}'; it has {}", one_line(origin_),
                          printable(name, 40), known.empty() ? "none" : printable(known, 200)));
}

Workload load_workload(const TensorFiles& files, const ProblemOptions& options, DType out_dtype,
                       bool with_lse) {
  Workload w;
  Problem& p = w.problem;
  apply_options(options, p);
  read_lengths(w, files);
  if (options.layout == Layout::bhsd && (!w.cu_seqlens_q.empty() || !w.cu_seqlens_k.empty())) {
    throw Error(
        "--layout is bhsd and there are cu_seqlens; packed sequences are (rows, heads, dim), "
        "layout bshd");
  }
  p.q = read_tensor(w, files, "q", options);
  p.k = read_tensor(w, files, "k", options);
  p.v = read_tensor(w, files, "v", options);
  read_bias_and_mask(w, files);
  read_sink_and_alibi(w, files, options);
  const std::int64_t dim = p.v.shape[3];
  const std::int64_t rows =
      checked_elements(std::array{p.q.shape[0], p.q.shape[1], p.q.shape[2]}, 8);
  const std::int64_t count = checked_elements(std::array{rows, dim}, 8);
  if (count < 0) throw Error("the result has more elements than 64-bit sizes can hold");
  const std::byte* const out = w.allocate(count, out_dtype);
  p.out = options.layout == Layout::bshd
              ? bshd(out, out_dtype, p.q.shape[0], p.q.shape[1], p.q.shape[2], dim)
              : bhsd(out, out_dtype, p.q.shape[0], p.q.shape[1], p.q.shape[2], dim);
  if (with_lse) {
    p.lse = contiguous(w.allocate(rows, DType::f32), DType::f32,
                       {p.q.shape[0], p.q.shape[2], p.q.shape[1], 1});
  }
  return w;
}

std::vector<std::int64_t> out_shape(const TensorFiles& files, const Workload& workload) {
  std::vector<std::int64_t> shape = files.get("q").shape;
  shape.back() = workload.problem.out.shape[3];
  return shape;
}

std::vector<std::int64_t> lse_shape(const TensorFiles& files, const Workload& workload) {
  const Tensor& lse = workload.problem.lse;
  std::vector<std::int64_t> shape = {lse.shape[0], lse.shape[1], lse.shape[2]};
  if (files.get("q").rank() == 3) shape.erase(shape.begin());
  return shape;
}

std::vector<double> to_doubles(std::string_view what, const Array& array) {
  const auto count = static_cast<std::size_t>(array.elements());
  std::vector<double> values(count);
  if (array.type == ElementType::f64) {
    if (count > 0) std::memcpy(values.data(), array.bytes.data(), count * sizeof(double));
    return values;
  }
  const DType dtype = floating_dtype(what, array);
  std::vector<float> narrow(count);
  convert(array.bytes.data(), dtype, reinterpret_cast<std::byte*>(narrow.data()), DType::f32,
          array.elements());
  std::copy(narrow.begin(), narrow.end(), values.begin());
  return values;
}

}  // namespace fovea::tools
