// The C interface. Nothing throws across it: guarded() turns exceptions into a status and a
// sentence.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/fovea.hpp"
#include "fovea/fp8.hpp"
#include "runtime/tensor.h"
#include "runtime/text.h"

struct fovea_plan {
  fovea::Plan plan;
};

struct fovea_backward_plan {
  fovea::BackwardPlan plan;
};

struct fovea_quantize_plan {
  fovea::QuantizePlan plan;
};

namespace {

using fovea::require;

// No structure is near this size: a larger one was never initialised.
constexpr std::size_t largest_structure_bytes = 65536;

// A buffer, because a failed allocation has to be reported too.
thread_local char last_error[4096] = "";

void set_last_error(const char* message) {
  const std::size_t length = std::min(std::strlen(message), sizeof last_error - 1);
  std::memcpy(last_error, message, length);
  last_error[length] = '\0';
}

template <typename Body>
fovea_status guarded(const Body& body) noexcept {
  const auto failed = [](fovea_status status, const char* message) {
    set_last_error(message);
    return status;
  };
  try {
    last_error[0] = '\0';
    body();
    return FOVEA_OK;
  } catch (const fovea::Unsupported& error) {
    return failed(FOVEA_UNSUPPORTED, error.what());
  } catch (const fovea::Error& error) {
    return failed(FOVEA_INVALID_ARGUMENT, error.what());
  } catch (const fovea::DeviceError& error) {
    return failed(FOVEA_DEVICE_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return failed(FOVEA_OUT_OF_MEMORY, "there is not enough memory for this call");
  } catch (const std::exception& error) {
    return failed(FOVEA_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(FOVEA_INTERNAL_ERROR, "an unknown exception was thrown inside the library");
  }
}

template <typename Structure>
void require_pointer(const char* name, const Structure* pointer) {
  require(pointer != nullptr, name, " is null; pass the address of one");
}

std::size_t checked_size(const char* name, const void* structure, std::size_t least) {
  std::size_t size = 0;  // the first member of every sized structure
  std::memcpy(&size, structure, sizeof size);
  require(size >= least && size <= largest_structure_bytes, name, "->size is ", size,
          "; set it to the size of the structure with fovea_", name, "_init");
  return size;
}

// A copy of a structure from a caller whose header may be older (shorter: what it lacks keeps its
// default) or newer (longer: what this library does not know must be zero). least is where the
// members end without which the structure means nothing.
template <typename Structure>
Structure import_structure(const char* name, const Structure* given, Structure defaults,
                           std::size_t least) {
  require_pointer(name, given);
  const std::size_t size = checked_size(name, given, least);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Structure); i < size; ++i) {
    require(bytes[i] == 0, name, "->size is ", size, " but this library knows only ",
            sizeof(Structure), " bytes, and byte ", i,
            " is not zero; leave members that this version of fovea lacks at their default");
  }
  std::memcpy(&defaults, given, std::min(size, sizeof(Structure)));
  return defaults;
}

// Fills the first `size` bytes with the defaults, and what lies beyond them with zeros.
template <typename Structure>
void export_structure(const char* name, Structure* target, std::size_t size,
                      const Structure& value) {
  require_pointer(name, target);
  require(size >= sizeof(std::size_t) && size <= largest_structure_bytes, "size is ", size,
          "; pass sizeof *", name);
  std::memset(static_cast<void*>(target), 0, size);
  std::memcpy(static_cast<void*>(target), &value, std::min(size, sizeof(Structure)));
  std::memcpy(static_cast<void*>(target), &size, sizeof size);
}

fovea_problem default_problem() {
  fovea_problem problem;
  std::memset(&problem, 0, sizeof problem);
  problem.size = sizeof problem;
  problem.window_left = -1;
  problem.window_right = -1;
  return problem;
}

fovea_gradients default_gradients() {
  fovea_gradients gradients;
  std::memset(&gradients, 0, sizeof gradients);
  gradients.size = sizeof gradients;
  return gradients;
}

fovea_quantization default_quantization() {
  fovea_quantization quantization;
  std::memset(&quantization, 0, sizeof quantization);
  quantization.dtype = FOVEA_E4M3;
  quantization.scales = FOVEA_FP8_SCALES_BLOCK;
  quantization.rotate = 1;
  return quantization;
}

fovea_options default_options() {
  fovea_options options;
  std::memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.quantization = default_quantization();
  options.promote_keys = -1;
  return options;
}

fovea_quantized default_quantized() {
  fovea_quantized operands;
  std::memset(&operands, 0, sizeof operands);
  operands.size = sizeof operands;
  return operands;
}

// An enumerator from a C caller may hold any int; reading it as an enum would be undefined.
template <typename To, typename From>
To to_enum(const char* owner, const char* member, const From& value, To last) {
  static_assert(sizeof(From) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &value, sizeof number);
  require(number >= 0 && number <= static_cast<int>(last), owner, member, " is ", number,
          "; it must be an enumerator, 0..", static_cast<int>(last));
  return static_cast<To>(number);
}

fovea::DType to_dtype(const char* name, const fovea_dtype& dtype) {
  return to_enum(name, ".dtype", dtype, fovea::DType::s8);
}

fovea::Tensor to_tensor(const char* name, const fovea_tensor& given) {
  fovea::Tensor tensor;
  tensor.data = given.data;
  tensor.present = given.present != 0;
  if (tensor.present) tensor.dtype = to_dtype(name, given.dtype);
  std::copy(std::begin(given.shape), std::end(given.shape), tensor.shape.begin());
  std::copy(std::begin(given.stride), std::end(given.stride), tensor.stride.begin());
  return tensor;
}

std::span<const std::int32_t> to_span(const char* name, const fovea_lengths& given) {
  require(given.count >= 0, name, ".count is ", given.count, "; it must not be negative");
  require(given.data != nullptr || given.count == 0, name, ".data is null but count is ",
          given.count, "; point it at the entries");
  return {given.data, static_cast<std::size_t>(given.count)};
}

fovea::Problem to_problem(const fovea_problem* given) {
  const fovea_problem from =
      import_structure("problem", given, default_problem(), offsetof(fovea_problem, lse));
  fovea::Problem problem;
  const struct {
    const char* name;
    const fovea_tensor& from;
    fovea::Tensor& to;
  } tensors[] = {{"q", from.q, problem.q},
                 {"k", from.k, problem.k},
                 {"v", from.v, problem.v},
                 {"out", from.out, problem.out},
                 {"lse", from.lse, problem.lse},
                 {"bias", from.bias, problem.bias},
                 {"mask", from.mask, problem.mask},
                 {"sink", from.sink, problem.sink},
                 {"alibi", from.alibi, problem.alibi},
                 {"q_scale", from.q_scale, problem.q_scale},
                 {"k_scale", from.k_scale, problem.k_scale},
                 {"v_scale", from.v_scale, problem.v_scale},
                 {"key_scale", from.key_scale, problem.key_scale}};
  for (const auto& tensor : tensors) tensor.to = to_tensor(tensor.name, tensor.from);
  const struct {
    const char* name;
    const fovea_lengths& from;
    std::span<const std::int32_t>& to;
  } lengths[] = {{"cu_seqlens_q", from.cu_seqlens_q, problem.cu_seqlens_q},
                 {"cu_seqlens_k", from.cu_seqlens_k, problem.cu_seqlens_k},
                 {"seqused_q", from.seqused_q, problem.seqused_q},
                 {"seqused_k", from.seqused_k, problem.seqused_k},
                 {"block_table", from.block_table, problem.block_table}};
  for (const auto& length : lengths) length.to = to_span(length.name, length.from);
  problem.max_seqlen_q = from.max_seqlen_q;
  problem.max_seqlen_k = from.max_seqlen_k;
  problem.block_table_columns = from.block_table_columns;
  if (from.has_softmax_scale != 0) problem.softmax_scale = from.softmax_scale;
  problem.causal = from.causal != 0;
  problem.window_left = from.window_left;
  problem.window_right = from.window_right;
  problem.softcap = from.softcap;
  problem.dropout = {from.dropout_probability, from.dropout_seed, from.dropout_offset};
  problem.num_splits = from.num_splits;
  problem.deterministic = from.deterministic != 0;
  problem.memory = to_enum("problem", ".memory", from.memory, fovea::Memory::device);
  problem.stream = from.stream;
  return problem;
}

fovea::Gradients to_gradients(const fovea_gradients* given) {
  const fovea_gradients from =
      import_structure("gradients", given, default_gradients(), offsetof(fovea_gradients, dsink));
  return {to_tensor("dout", from.dout),  to_tensor("dlse", from.dlse),
          to_tensor("dq", from.dq),      to_tensor("dk", from.dk),
          to_tensor("dv", from.dv),      to_tensor("dsink", from.dsink),
          to_tensor("dbias", from.dbias)};
}

fovea::Quantization to_quantization(const fovea_quantization& from) {
  fovea::Quantization quantization{
      to_dtype("quantization", from.dtype),
      to_enum("quantization", ".scales", from.scales, fovea::Fp8Scales::block), from.rotate != 0,
      from.seed};
  if (from.rotary != nullptr) {
    quantization.rotary = {to_tensor("rotary.cos", from.rotary->cos),
                           to_tensor("rotary.sin", from.rotary->sin), from.rotary->interleaved != 0,
                           from.rotary->first_position};
  }
  return quantization;
}

fovea::Quantized to_quantized(const fovea_quantized* given) {
  const fovea_quantized from = import_structure("operands", given, default_quantized(),
                                                offsetof(fovea_quantized, key_scale));
  return {to_tensor("q", from.q),
          to_tensor("q_scale", from.q_scale),
          to_tensor("k", from.k),
          to_tensor("v", from.v),
          to_tensor("key_scale", from.key_scale),
          to_tensor("k_scale", from.k_scale),
          to_tensor("v_scale", from.v_scale),
          to_span("block_table", from.block_table),
          from.block_table_columns,
          to_span("first_keys", from.first_keys)};
}

fovea::Options to_options(const fovea_options* given) {
  if (given == nullptr) return {};
  const fovea_options from =
      import_structure("options", given, default_options(), offsetof(fovea_options, threads));
  fovea::Options options;
  options.device = to_enum("options", ".device", from.device, fovea::Device::emulated_sm103a);
  options.threads = from.threads;
  options.softmax = to_enum("options", ".softmax", from.softmax, fovea::Softmax::sum_guard);
  options.own_workspace = from.own_workspace != 0;
  if (from.configuration != nullptr) options.configuration = from.configuration;
  if (from.eight_bits != 0) {
    fovea::EightBits bits{.quantization = to_quantization(from.quantization)};
    if (from.promote_keys >= 0) bits.promote_keys = from.promote_keys;
    options.eight_bits = bits;
  }
  return options;
}

// Checked before the work, so that a wrong size is reported before anything is written.
std::size_t statistics_size(const fovea_statistics* statistics) {
  if (statistics == nullptr) return 0;
  return checked_size("statistics", statistics, offsetof(fovea_statistics, tiles_partial));
}

// Null where the caller wants no counts: a GPU's are read back, and that waits for the stream.
fovea::Statistics* asked_for(const fovea_statistics* statistics, fovea::Statistics& counts) {
  return statistics == nullptr ? nullptr : &counts;
}

void write_statistics(fovea_statistics* target, std::size_t size, const fovea::Statistics& from) {
  if (target == nullptr) return;
  export_structure("statistics", target, size,
                   fovea_statistics{size, from.tiles_full, from.tiles_partial, from.rescales,
                                    from.repairs, from.recomputed_tiles, from.splits});
}

// Cut to capacity and terminated.
void write_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* length) {
  require(buffer != nullptr || capacity == 0, "buffer is null but capacity is ", capacity,
          "; pass capacity 0 to ask for the length alone");
  if (length != nullptr) *length = text.size();
  if (capacity == 0) return;
  const std::size_t copied = std::min(capacity - 1, text.size());
  std::memcpy(buffer, text.data(), copied);
  buffer[copied] = '\0';
}

void require_workspace(const void* workspace, std::size_t bytes, const char* sizing_function) {
  require(workspace != nullptr || bytes == 0, "workspace is null but workspace_bytes is ", bytes,
          "; pass as many bytes as ", sizing_function, " says");
}

fovea_tensor from_tensor(const fovea::Tensor& tensor) {
  fovea_tensor result;
  std::memset(&result, 0, sizeof result);
  result.data = tensor.data;
  result.dtype = static_cast<fovea_dtype>(tensor.dtype);
  result.present = tensor.present ? 1 : 0;
  std::copy(tensor.shape.begin(), tensor.shape.end(), result.shape);
  std::copy(tensor.stride.begin(), tensor.stride.end(), result.stride);
  return result;
}

// The helpers that make tensors report no error; validation finds an absurd dtype or shape.
fovea_tensor from_tensor(const fovea::Tensor& tensor, const fovea_dtype& dtype) {
  fovea_tensor result;
  std::memset(&result, 0, sizeof result);
  result.data = tensor.data;
  std::memcpy(&result.dtype, &dtype, sizeof dtype);
  result.present = 1;
  std::copy(tensor.shape.begin(), tensor.shape.end(), result.shape);
  std::copy(tensor.stride.begin(), tensor.stride.end(), result.stride);
  return result;
}

}  // namespace

fovea_tensor fovea_tensor_bshd(const void* data, fovea_dtype dtype, int64_t batch, int64_t seqlen,
                               int64_t heads, int64_t head_dim) {
  return from_tensor(fovea::bshd(data, fovea::DType::f32, batch, seqlen, heads, head_dim), dtype);
}

fovea_tensor fovea_tensor_bhsd(const void* data, fovea_dtype dtype, int64_t batch, int64_t seqlen,
                               int64_t heads, int64_t head_dim) {
  return from_tensor(fovea::bhsd(data, fovea::DType::f32, batch, seqlen, heads, head_dim), dtype);
}

fovea_tensor fovea_tensor_packed(const void* data, fovea_dtype dtype, int64_t total, int64_t heads,
                                 int64_t head_dim) {
  return from_tensor(fovea::packed(data, fovea::DType::f32, total, heads, head_dim), dtype);
}

fovea_tensor fovea_tensor_contiguous(const void* data, fovea_dtype dtype, const int64_t shape[4]) {
  return from_tensor(
      fovea::contiguous(data, fovea::DType::f32, {shape[0], shape[1], shape[2], shape[3]}), dtype);
}

fovea_status fovea_problem_init(fovea_problem* problem, size_t size) {
  return guarded([&] { export_structure("problem", problem, size, default_problem()); });
}

fovea_status fovea_gradients_init(fovea_gradients* gradients, size_t size) {
  return guarded([&] { export_structure("gradients", gradients, size, default_gradients()); });
}

fovea_status fovea_options_init(fovea_options* options, size_t size) {
  return guarded([&] { export_structure("options", options, size, default_options()); });
}

fovea_status fovea_statistics_init(fovea_statistics* statistics, size_t size) {
  return guarded([&] { export_structure("statistics", statistics, size, fovea_statistics{}); });
}

fovea_status fovea_plan_create(const fovea_problem* problem, const fovea_options* options,
                               fovea_plan** plan) {
  return guarded([&] {
    require_pointer("plan", plan);
    *plan = nullptr;
    *plan = new fovea_plan{fovea::plan(to_problem(problem), to_options(options))};
  });
}

void fovea_plan_destroy(fovea_plan* plan) { delete plan; }

fovea_status fovea_plan_workspace_bytes(const fovea_plan* plan, size_t* bytes) {
  return guarded([&] {
    require_pointer("plan", plan);
    require_pointer("bytes", bytes);
    *bytes = plan->plan.workspace_bytes();
  });
}

fovea_status fovea_plan_run(const fovea_plan* plan, const fovea_problem* problem, void* workspace,
                            size_t workspace_bytes, fovea_statistics* statistics) {
  return guarded([&] {
    require_pointer("plan", plan);
    require_workspace(workspace, workspace_bytes, "fovea_plan_workspace_bytes");
    const std::size_t size = statistics_size(statistics);
    fovea::Statistics counts;
    plan->plan.run(to_problem(problem), {static_cast<std::byte*>(workspace), workspace_bytes},
                   asked_for(statistics, counts));
    write_statistics(statistics, size, counts);
  });
}

fovea_status fovea_plan_explain(const fovea_plan* plan, char* buffer, size_t capacity,
                                size_t* length) {
  return guarded([&] {
    require_pointer("plan", plan);
    write_text(plan->plan.explain(), buffer, capacity, length);
  });
}

fovea_status fovea_attention(const fovea_problem* problem, const fovea_options* options,
                             fovea_statistics* statistics) {
  return guarded([&] {
    const std::size_t size = statistics_size(statistics);
    fovea::Statistics counts;
    fovea::attention(to_problem(problem), to_options(options), asked_for(statistics, counts));
    write_statistics(statistics, size, counts);
  });
}

fovea_quantization fovea_quantization_default(void) { return default_quantization(); }

fovea_status fovea_quantize_plan_create(const fovea_problem* problem,
                                        const fovea_quantization* quantization,
                                        fovea_value_layout values, const fovea_options* options,
                                        fovea_quantize_plan** plan) {
  return guarded([&] {
    require_pointer("plan", plan);
    *plan = nullptr;
    require_pointer("quantization", quantization);
    *plan = new fovea_quantize_plan{fovea::plan_quantize(
        to_problem(problem), to_quantization(*quantization),
        to_enum("values", "", values, fovea::ValueLayout::rows), to_options(options))};
  });
}

fovea_status fovea_quantize_plan_create_pages(const fovea_problem* problem,
                                              const fovea_quantization* quantization, int64_t pages,
                                              int64_t page_size, const fovea_options* options,
                                              fovea_quantize_plan** plan) {
  return guarded([&] {
    require_pointer("plan", plan);
    *plan = nullptr;
    require_pointer("quantization", quantization);
    *plan = new fovea_quantize_plan{
        fovea::plan_quantize(to_problem(problem), to_quantization(*quantization),
                             fovea::PagePool{pages, page_size}, to_options(options))};
  });
}

void fovea_quantize_plan_destroy(fovea_quantize_plan* plan) { delete plan; }

fovea_status fovea_quantize_plan_workspace_bytes(const fovea_quantize_plan* plan, size_t* bytes) {
  return guarded([&] {
    require_pointer("plan", plan);
    require_pointer("bytes", bytes);
    *bytes = plan->plan.workspace_bytes();
  });
}

fovea_status fovea_quantize_plan_operands(const fovea_quantize_plan* plan,
                                          fovea_quantized* operands, size_t size) {
  return guarded([&] {
    require_pointer("plan", plan);
    const fovea::Quantized from = plan->plan.operands();
    const fovea_quantized value{size,
                                from_tensor(from.q),
                                from_tensor(from.q_scale),
                                from_tensor(from.k),
                                from_tensor(from.v),
                                from_tensor(from.key_scale),
                                from_tensor(from.k_scale),
                                from_tensor(from.v_scale),
                                {},
                                0,
                                {}};
    export_structure("operands", operands, size, value);
  });
}

fovea_status fovea_quantize_plan_run(const fovea_quantize_plan* plan, const fovea_problem* problem,
                                     const fovea_quantized* to, void* workspace,
                                     size_t workspace_bytes) {
  return guarded([&] {
    require_pointer("plan", plan);
    require_workspace(workspace, workspace_bytes, "fovea_quantize_plan_workspace_bytes");
    plan->plan.run(to_problem(problem), to_quantized(to),
                   {static_cast<std::byte*>(workspace), workspace_bytes});
  });
}

fovea_status fovea_problem_attend(fovea_problem* problem, const fovea_quantized* operands) {
  return guarded([&] {
    const fovea::Problem changed = fovea::attend(to_problem(problem), to_quantized(operands));
    require(problem->size >= sizeof(fovea_problem), "problem->size is ", problem->size,
            "; quantised operands need a problem of ", sizeof(fovea_problem), " bytes");
    problem->q = from_tensor(changed.q);
    problem->k = from_tensor(changed.k);
    problem->v = from_tensor(changed.v);
    problem->q_scale = from_tensor(changed.q_scale);
    problem->k_scale = from_tensor(changed.k_scale);
    problem->v_scale = from_tensor(changed.v_scale);
    problem->key_scale = from_tensor(changed.key_scale);
    problem->softmax_scale = *changed.softmax_scale;
    problem->has_softmax_scale = 1;
  });
}

fovea_status fovea_backward_plan_create(const fovea_problem* problem,
                                        const fovea_gradients* gradients,
                                        const fovea_options* options, fovea_backward_plan** plan) {
  return guarded([&] {
    require_pointer("plan", plan);
    *plan = nullptr;
    *plan = new fovea_backward_plan{
        fovea::plan_backward(to_problem(problem), to_gradients(gradients), to_options(options))};
  });
}

void fovea_backward_plan_destroy(fovea_backward_plan* plan) { delete plan; }

fovea_status fovea_backward_plan_workspace_bytes(const fovea_backward_plan* plan, size_t* bytes) {
  return guarded([&] {
    require_pointer("plan", plan);
    require_pointer("bytes", bytes);
    *bytes = plan->plan.workspace_bytes();
  });
}

fovea_status fovea_backward_plan_run(const fovea_backward_plan* plan, const fovea_problem* problem,
                                     const fovea_gradients* gradients, void* workspace,
                                     size_t workspace_bytes) {
  return guarded([&] {
    require_pointer("plan", plan);
    require_workspace(workspace, workspace_bytes, "fovea_backward_plan_workspace_bytes");
    plan->plan.run(to_problem(problem), to_gradients(gradients),
                   {static_cast<std::byte*>(workspace), workspace_bytes});
  });
}

fovea_status fovea_backward_plan_explain(const fovea_backward_plan* plan, char* buffer,
                                         size_t capacity, size_t* length) {
  return guarded([&] {
    require_pointer("plan", plan);
    write_text(plan->plan.explain(), buffer, capacity, length);
  });
}

fovea_status fovea_attention_backward(const fovea_problem* problem,
                                      const fovea_gradients* gradients,
                                      const fovea_options* options) {
  return guarded([&] {
    fovea::attention_backward(to_problem(problem), to_gradients(gradients), to_options(options));
  });
}

fovea_status fovea_merge(const fovea_part* parts, int64_t count, const fovea_part* result,
                         const fovea_tensor* sink) {
  return guarded([&] {
    require(count >= 0, "count is ", count, "; it must not be negative");
    require(parts != nullptr || count == 0, "parts is null but count is ", count,
            "; point it at the parts");
    require_pointer("result", result);
    std::vector<fovea::Part> converted;
    for (std::int64_t i = 0; i < count; ++i) {
      converted.push_back({to_tensor(fovea::text("parts[", i, "].out").c_str(), parts[i].out),
                           to_tensor(fovea::text("parts[", i, "].lse").c_str(), parts[i].lse)});
    }
    fovea::merge(converted,
                 {to_tensor("result.out", result->out), to_tensor("result.lse", result->lse)},
                 sink != nullptr ? to_tensor("sink", *sink) : fovea::Tensor{});
  });
}

const char* fovea_last_error(void) { return last_error; }

const char* fovea_version(void) { return FOVEA_VERSION; }
