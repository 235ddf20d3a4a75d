#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "cpu/quantize.h"
#include "fovea/fp8.hpp"
#include "runtime/devices.h"
#include "runtime/eight_bits.h"
#include "runtime/plan.h"
#include "runtime/problem.h"
#include "runtime/quantize_gpu.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {

struct QuantizePlan::Choice {
  core::Problem problem;
  std::array<Tensor, 3> inputs;  // q, k and v as planned
  Memory memory = Memory::host;
  core::QuantizeOptions options;
  int threads = 0;
  Quantized operands;
  bool transposed = true;
  PagePool pool;                                // without pages: none
  runtime::Device* device = nullptr;            // of device memory
  std::optional<runtime::Quantizer> quantizer;  // there
  std::size_t workspace_bytes = 0;
};

namespace {

struct Part {
  std::string_view name;
  Tensor Quantized::*tensor;
};
constexpr std::array<Part, 7> parts{{{"q", &Quantized::q},
                                     {"q_scale", &Quantized::q_scale},
                                     {"k", &Quantized::k},
                                     {"v", &Quantized::v},
                                     {"key_scale", &Quantized::key_scale},
                                     {"k_scale", &Quantized::k_scale},
                                     {"v_scale", &Quantized::v_scale}}};
// Codes and the scales that come with them.
constexpr std::pair<std::size_t, std::size_t> companions[] = {
    {0, 1}, {2, 4}, {3, 4}, {2, 5}, {3, 6}};
constexpr std::array inputs{&Problem::q, &Problem::k, &Problem::v};

Tensor dense(DType dtype, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  return contiguous(nullptr, dtype, {a, b, c, d});
}

Quantized operands_of(const core::Problem& p, DType dtype, bool transposed) {
  const core::Fp8Layout l = core::fp8_layout(p);
  const auto values = static_cast<DType>(core::value_type(static_cast<core::DType>(dtype)));
  Quantized to;
  to.q = dense(dtype, l.batches_q, l.rows_q, l.heads_q, l.columns);
  to.q_scale = dense(DType::f32, l.batches_q, l.heads_q, l.blocks_q, 1);
  to.k = dense(dtype, l.batches_k, l.rows_k, l.heads_kv, l.columns);
  if (!transposed) {
    to.v = dense(values, l.batches_k, l.rows_k, l.heads_kv, l.columns_v);
    to.k_scale = to.v_scale = dense(DType::f32, l.batches_k, l.heads_kv, l.blocks_k, 1);
    return to;
  }
  to.v = dense(values, l.batches_k, l.heads_kv, l.columns_v, l.blocks_k * core::scale_block);
  to.key_scale = dense(DType::f32, 1, 1,
                       l.key_scale_bytes / static_cast<std::int64_t>(sizeof(core::KeyScale)), 4);
  return to;
}

// The pool, whose pages are the batch of k, v and key_scale.
Quantized operands_of(core::Problem p, DType dtype, const PagePool& pool) {
  const Quantized of_queries = operands_of(p, dtype, true);
  p.cu_seqlens_k = nullptr;
  p.pages = pool.pages;
  p.page_size = static_cast<core::int32>(pool.page_size);
  Quantized to = operands_of(core::pages_as_sequences(p), dtype, true);
  to.q = of_queries.q;
  to.q_scale = of_queries.q_scale;
  return to;
}

void check_inputs(const QuantizePlan::Choice& choice, const Problem& problem) {
  require(problem.memory == choice.memory, "memory is not that of the plan; plan again");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& now = problem.*inputs[i];
    const Tensor& before = choice.inputs[i];
    require(now.shape == before.shape && now.dtype == before.dtype && now.stride == before.stride,
            arguments[i].name,
            " has another shape, dtype or layout than the plan was made for;"
            " plan again");
  }
}

void check_operands(const QuantizePlan::Choice& choice, const Problem& problem,
                    const Quantized& to) {
  for (const Part& part : parts) {
    const Tensor& tensor = to.*part.tensor;
    if (tensor.data == nullptr) continue;
    const Tensor& right = choice.operands.*part.tensor;
    require(right.present, part.name,
            " has data but this plan does not write it: values in rows have k_scale and v_scale,"
            " transposed ones key_scale");
    require(
        tensor.shape == right.shape && tensor.dtype == right.dtype && tensor.stride == right.stride,
        part.name, " is not as QuantizePlan::operands() gives it; set nothing but its data");
    require(reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0, part.name,
            " has data at address ", reinterpret_cast<std::uintptr_t>(tensor.data),
            "; it must be a multiple of 16");
    for (const Argument& argument : arguments) {
      require(!share_memory(tensor, problem.*argument.tensor), part.name, " shares memory with ",
              argument.name, " of the problem; operands must lie apart from every tensor");
    }
    for (const Part& other : parts) {
      require(other.tensor == part.tensor || (to.*other.tensor).data == nullptr ||
                  !share_memory(tensor, to.*other.tensor),
              part.name, " shares memory with ", other.name, "; operands must lie apart");
    }
  }
  for (const auto& [codes, scale] : companions) {
    const Tensor& a = to.*parts[codes].tensor;
    const Tensor& b = to.*parts[scale].tensor;
    if (!(choice.operands.*parts[scale].tensor).present) continue;
    require(!has_elements(a) || (a.data != nullptr) == (b.data != nullptr), parts[codes].name,
            a.data != nullptr ? " has data but " : " has no data but ", parts[scale].name,
            a.data != nullptr ? " has none" : " has", "; codes and their scales come together");
  }
}

// Keys of sequence b, where lengths can be read.
std::int64_t keys_of(const Problem& problem, std::size_t b) {
  if (!problem.seqused_k.empty()) return problem.seqused_k[b];
  if (problem.cu_seqlens_k.empty()) return problem.k.shape[1];
  return problem.cu_seqlens_k[b + 1] - problem.cu_seqlens_k[b];
}

// Of those entries that keys go to.
void check_page_numbers(const QuantizePlan::Choice& choice, const Problem& problem,
                        const Quantized& to) {
  const PagePool& pool = choice.pool;
  const std::int64_t room = to.block_table_columns * pool.page_size;
  for (std::size_t b = 0; b < static_cast<std::size_t>(choice.problem.batch); ++b) {
    const std::int64_t first = to.first_keys.empty() ? 0 : to.first_keys[b];
    require(first >= 0 && first % core::scale_block == 0, "first_keys is ", first, " at entry ", b,
            "; it must be a multiple of ", core::scale_block,
            ", since blocks of so many are written");
    const std::int64_t end = first + keys_of(problem, b);
    require(end <= room, "first_keys is ", first, " at entry ", b, ", whose ", end - first,
            " keys would end at ", end, ", but a row of block_table has room for ", room);
    if (end == first) continue;
    const core::Rotary& rotary = choice.options.rotary;
    require(!rotary || rotary.first + end <= rotary.positions, "first_keys is ", first,
            " at entry ", b, ", whose last key would stand at position ", rotary.first + end - 1,
            ", but rotary.cos has ", rotary.positions, " rows");
    for (std::int64_t i = first / pool.page_size; i <= (end - 1) / pool.page_size; ++i) {
      const auto row = static_cast<std::int64_t>(b) * to.block_table_columns;
      const std::int32_t page = to.block_table[static_cast<std::size_t>(row + i)];
      require(page >= 0 && page < pool.pages, "block_table is ", page, " at row ", b, ", column ",
              i, ", but the pool has ", pool.pages, " pages; entries that keys go to must be less");
    }
  }
}

void check_pages(const QuantizePlan::Choice& choice, const Problem& problem, const Quantized& to) {
  const bool given = !to.block_table.empty() || to.block_table_columns != 0;
  if (choice.pool.pages == 0) {
    require(!given && to.first_keys.empty(), given ? "block_table" : "first_keys",
            " is given but this plan writes no pages; plan with a fovea::PagePool");
    return;
  }
  const std::int64_t batch = choice.problem.batch;
  require(to.first_keys.empty() || static_cast<std::int64_t>(to.first_keys.size()) == batch,
          "first_keys has ", to.first_keys.size(), " entries but there are ", batch,
          " sequences; it must have one for each, or none");
  if (to.k.data == nullptr) return;
  require(to.block_table_columns >= 0 &&
              static_cast<std::int64_t>(to.block_table.size()) == batch * to.block_table_columns,
          "block_table has ", to.block_table.size(), " entries; ", batch,
          " sequences of block_table_columns = ", to.block_table_columns, " entries make ",
          batch * to.block_table_columns);
  if (problem.memory == Memory::host) check_page_numbers(choice, problem, to);
}

core::PageTarget target_of(const QuantizePlan::Choice& choice, const Quantized& to) {
  if (choice.pool.pages == 0) return {};
  return {to.block_table.data(), to.block_table_columns,
          to.first_keys.empty() ? nullptr : to.first_keys.data(),
          static_cast<core::int32>(choice.pool.page_size)};
}

template <typename Value>
Value* data_of(const Tensor& tensor) {
  return static_cast<Value*>(tensor.data);
}

void run_on_host(const QuantizePlan::Choice& choice, const core::Problem& p, const Quantized& to) {
  if (!choice.transposed) {
    cpu::quantize_rows(
        p, choice.options,
        {data_of<core::uint8>(to.q), data_of<core::uint8>(to.k), data_of<core::uint8>(to.v),
         data_of<float>(to.q_scale), data_of<float>(to.k_scale), data_of<float>(to.v_scale)},
        choice.threads);
    return;
  }
  cpu::quantize(
      p, choice.options,
      {data_of<core::uint8>(to.q), data_of<core::uint8>(to.k), data_of<core::uint8>(to.v),
       data_of<float>(to.q_scale), data_of<core::KeyScale>(to.key_scale), target_of(choice, to)},
      choice.threads);
}

void run_on_device(const QuantizePlan::Choice& choice, const Problem& problem,
                   const core::Problem& p, const Quantized& to, runtime::DeviceAddress scratch) {
  const auto reachable = [&](const void* data, std::string_view name) {
    const auto place = reinterpret_cast<runtime::DeviceAddress>(data);
    require(place == 0 || choice.device->reaches(place), name, " has data at address ", place,
            ", which is not memory of ", choice.device->properties().name,
            "; with memory = device every pointer must be");
    return place;
  };
  const auto address = [&](const Tensor& tensor, std::string_view name) {
    return reachable(tensor.data, name);
  };
  reachable(to.block_table.data(), "block_table");
  reachable(to.first_keys.data(), "first_keys");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& tensor = problem.*inputs[i];
    if (has_elements(tensor)) static_cast<void>(address(tensor, arguments[i].name));
  }
  const runtime::RowOperands rows{address(to.q, "q"),
                                  address(to.k, "k"),
                                  address(to.v, "v"),
                                  address(to.q_scale, "q_scale"),
                                  address(to.k_scale, "k_scale"),
                                  address(to.v_scale, "v_scale")};
  runtime::ForwardCall call;
  call.problem = p;
  const runtime::Stream stream{problem.stream};
  if (!choice.transposed) {
    choice.quantizer->run_rows(call, rows, scratch, stream);
    return;
  }
  const runtime::Fp8Operands operands{.q = rows.q,
                                      .k = rows.k,
                                      .v = rows.v,
                                      .q_scale = rows.q_scale,
                                      .key_scale = address(to.key_scale, "key_scale"),
                                      .target = target_of(choice, to)};
  if (operands.q != 0) choice.quantizer->run_q(call, operands, scratch, stream);
  if (operands.k != 0) choice.quantizer->run_keys(call, operands, scratch, stream);
}

// The GPU that holds the problem.
runtime::Device& device_for(const Options& options) {
  const Device asked = options.device == Device::automatic ? Device::cuda : options.device;
  if (asked == Device::cpu) {
    throw Unsupported("device cpu does not quantise device memory; leave device automatic");
  }
  return runtime::shared_device(asked);
}

const QuantizePlan::Choice& checked(const std::shared_ptr<const QuantizePlan::Choice>& choice) {
  require(choice != nullptr,
          "the plan is empty, as a moved-from one is; use one from"
          " plan_quantize()");
  return *choice;
}

}  // namespace

QuantizePlan::QuantizePlan(std::shared_ptr<const Choice> choice) : choice_(std::move(choice)) {}

Quantized QuantizePlan::operands() const { return checked(choice_).operands; }

std::size_t QuantizePlan::workspace_bytes() const { return checked(choice_).workspace_bytes; }

void QuantizePlan::run(const Problem& problem, const Quantized& to,
                       std::span<std::byte> workspace) const {
  const Choice& choice = checked(choice_);
  core::Problem validated = validate(problem);
  check_inputs(choice, problem);
  check_operands(choice, problem, to);
  check_pages(choice, problem, to);
  require(workspace.size() >= choice.workspace_bytes, "workspace has ", workspace.size(),
          " bytes; it must have at least ", choice.workspace_bytes,
          " (QuantizePlan::workspace_bytes)");
  validated.seqlen_q = choice.problem.seqlen_q;
  validated.seqlen_k = choice.problem.seqlen_k;
  if (choice.memory == Memory::host) {
    run_on_host(choice, validated, to);
    return;
  }
  require(choice.quantizer->suits(validated),
          "q, k or v is not aligned as when the plan was made, or has lengths (cu_seqlens, seqused)"
          " that it had not then; plan again");
  constexpr runtime::DeviceAddress granule = 16;
  const auto first = reinterpret_cast<runtime::DeviceAddress>(workspace.data());
  run_on_device(choice, problem, validated, to, (first + granule - 1) / granule * granule);
}

namespace {

QuantizePlan make_plan(const Problem& problem, const Quantization& quantization, bool transposed,
                       const PagePool& pool, const Options& options) {
  check_options(options);
  check_quantization(quantization);
  auto choice = std::make_shared<QuantizePlan::Choice>();
  choice->problem = validate(problem);
  const core::Problem& p = choice->problem;
  require(!core::is_eight_bit(p.q.dtype), "q has dtype ", problem.q.dtype,
          "; what is to be quantised must be f32, bf16 or f16");
  check_rotary(quantization.rotary, p);
  require(
      !p.is_paged(),
      "block_table is given; what is in pages is not quantised, so give dense or packed keys, and"
      " a fovea::PagePool where they are to go to pages");
  const std::vector<std::string> objections = quantization_objections(p);
  if (!objections.empty()) throw Unsupported("no device quantises: " + objections.front());
  require(transposed || p.head_dim_v % 8 == 0, "v has head dimension ", p.head_dim_v,
          "; in rows it is quantised in multiples of 8, so take ValueLayout::transposed");
  for (std::size_t i = 0; i < inputs.size(); ++i) choice->inputs[i] = problem.*inputs[i];
  choice->memory = problem.memory;
  choice->options = quantize_options(quantization);
  choice->threads = options.threads;
  choice->transposed = transposed;
  choice->pool = pool;
  choice->operands = pool.pages > 0 ? operands_of(p, quantization.dtype, pool)
                                    : operands_of(p, quantization.dtype, transposed);
  if (problem.memory == Memory::host) {
    if (options.device != Device::automatic && options.device != Device::cpu) {
      throw Unsupported(
          text("device ", name(options.device), " does not quantise host memory; device cpu does"));
    }
    return QuantizePlan(std::move(choice));
  }
  choice->device = &device_for(options);
  runtime::QuantizeParts wanted;
  wanted.transpose_v = transposed;
  wanted.to_pages = pool.pages > 0;
  choice->quantizer.emplace(*choice->device, p, choice->options, wanted, true);
  choice->workspace_bytes = choice->quantizer->scratch_bytes(p);
  if (choice->workspace_bytes > 0) choice->workspace_bytes += 16;
  return QuantizePlan(std::move(choice));
}

}  // namespace

QuantizePlan plan_quantize(const Problem& problem, const Quantization& quantization,
                           ValueLayout values, const Options& options) {
  require(values <= ValueLayout::rows, "values is ", static_cast<int>(values),
          ", which is no fovea::ValueLayout");
  return make_plan(problem, quantization, values == ValueLayout::transposed, {}, options);
}

QuantizePlan plan_quantize(const Problem& problem, const Quantization& quantization,
                           const PagePool& pool, const Options& options) {
  require(pool.pages > 0 && pool.pages <= max_extent, "pool.pages is ", pool.pages,
          "; it must lie in 1..", max_extent);
  require(
      pool.page_size > 0 && pool.page_size % core::scale_block == 0 && pool.page_size <= max_extent,
      "pool.page_size is ", pool.page_size, "; it must be a positive multiple of ",
      core::scale_block, ", since as many keys share scales");
  return make_plan(problem, quantization, true, pool, options);
}

Problem attend(Problem problem, const Quantized& operands) {
  // Padded columns are zero: the scale is that of the head dimension before.
  if (!problem.softmax_scale) {
    problem.softmax_scale = 1.0f / std::sqrt(static_cast<float>(problem.q.shape[3]));
  }
  problem.q = operands.q;
  problem.k = operands.k;
  problem.v = operands.v;
  problem.q_scale = operands.q_scale;
  problem.k_scale = operands.k_scale;
  problem.v_scale = operands.v_scale;
  problem.key_scale = operands.key_scale;
  return problem;
}

}  // namespace fovea
