// The native half of the Python package: Python's arguments in, fovea's public interface out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstddef>
#include <memory>

#include "fovea/device.hpp"
#include "python/array.h"
#include "python/call.h"
#include "python/device_call.h"
#include "python/kv_cache.h"
#include "python/quantize.h"
#include "tools/program.h"

namespace fovea::python {
namespace {

using namespace nb::literals;

Device to_device(const std::string& text) {
  for (std::uint8_t i = 0; i <= static_cast<std::uint8_t>(Device::emulated_sm103a); ++i) {
    if (text == fovea::name(static_cast<Device>(i))) return static_cast<Device>(i);
  }
  throw Error("device is '" + text +
              "'; it must be auto, cpu, cuda, emulated:sm_90a, emulated:sm_100a or "
              "emulated:sm_103a");
}

Options to_options(const std::string& device, int threads) {
  Options options;
  options.device = to_device(device);
  options.threads = threads;
  return options;
}

bool on_device(const Call& call) { return call.problem().memory == Memory::device; }

// allocate and device: of a call on device memory alone.
void attention(const Call& call, nb::handle allocate, const std::string& device) {
  if (on_device(call)) return attention_on_device(call, allocate, to_device(device));
  const nb::gil_scoped_release unlocked;
  fovea::attention(call.problem());
}

// Seconds per call from C++ alone: what the benchmark takes off the time in Python.
double seconds_of_attention(const Call& call, int repeat, nb::handle allocate) {
  if (on_device(call)) return seconds_of_launch(call, repeat, allocate);
  const nb::gil_scoped_release unlocked;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeat; ++i) fovea::attention(call.problem());
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / repeat;
}

void attention_backward(const Call& call, nb::handle dout, nb::handle dlse, nb::handle dq,
                        nb::handle dk, nb::handle dv, nb::handle dsink, nb::handle dbias,
                        nb::handle allocate, const std::string& device) {
  const struct {
    nb::handle object;
    const char* name;
    Slot like;
    Access access;
    Tensor Gradients::*field;
  } rows[] = {{dout, "dout", out, Access::read, &Gradients::dout},
              {dlse, "dlse", lse, Access::read, &Gradients::dlse},
              {dq, "dq", q, Access::write, &Gradients::dq},
              {dk, "dk", k, Access::write, &Gradients::dk},
              {dv, "dv", v, Access::write, &Gradients::dv},
              {dsink, "dsink", sink, Access::write, &Gradients::dsink},
              {dbias, "dbias", bias, Access::write, &Gradients::dbias}};
  std::array<Array, std::size(rows)> alive;
  Gradients gradients;
  for (std::size_t i = 0; i < alive.size(); ++i) {
    alive[i] = Array(rows[i].object, rows[i].name, rows[i].access);
    if (alive[i].present() && !same_device(alive[i].device(), call.device())) {
      throw nb::value_error((std::string(rows[i].name) + " is on " +
                             device_name(alive[i].device()) + " but q is on " +
                             device_name(call.device()) + "; all tensors must be on one device")
                                .c_str());
    }
    gradients.*rows[i].field = call.tensor_like(rows[i].like, alive[i], rows[i].name);
  }
  if (on_device(call)) {
    return attention_backward_on_device(call, gradients, allocate, to_device(device));
  }
  const nb::gil_scoped_release unlocked;
  fovea::attention_backward(call.problem(), gradients);
}

// values: "rows" or "transposed"; pages: 0 for none, else those of the pool that keys go to.
Quantizer plan_quantize(const Call& call, const QuantizeSettings& settings,
                        const std::string& values, std::int64_t pages, std::int64_t page_size,
                        const std::string& device) {
  if (values != "rows" && values != "transposed") {
    throw Error("values is '" + values + "'; it must be 'rows' or 'transposed'");
  }
  return {call, settings, values == "rows" ? ValueLayout::rows : ValueLayout::transposed,
          PagePool{pages, page_size}, to_device(device)};
}

Plan plan(const Call& call, const std::string& device, int threads) {
  return fovea::plan(call.problem(), to_options(device, threads));
}

void run(const Plan& plan, const Call& call, nb::handle workspace) {
  const Array array(workspace, "workspace", Access::write);
  std::span<std::byte> bytes;
  if (array.present()) {
    if (array.rank() != 1 || array.dtype().bits != 8 ||
        (array.shape()[0] > 1 && array.strides()[0] != 1)) {
      throw nb::type_error("workspace must be one-dimensional and contiguous, in 8-bit elements");
    }
    if (!same_device(array.device(), call.device())) {
      throw nb::value_error(("workspace is on " + device_name(array.device()) + " but q is on " +
                             device_name(call.device()) + "; they must be on one device")
                                .c_str());
    }
    bytes = {static_cast<std::byte*>(array.data()), static_cast<std::size_t>(array.shape()[0])};
  }
  const nb::gil_scoped_release unlocked;
  plan.run(call.problem(), bytes);
}

Part to_part(const Array& out, const Array& lse, const char* out_name, const char* lse_name) {
  static constexpr std::size_t rows_heads[]{0, 1, 2, 3};
  if (out.rank() != 4 || lse.rank() != 3) {
    throw nb::value_error(("each " + std::string(out_name) +
                           " must be (batch, seqlen, heads, head_dim) and each " + lse_name +
                           " (batch, heads, seqlen)")
                              .c_str());
  }
  for (const auto& [array, name] : {std::pair{&out, out_name}, std::pair{&lse, lse_name}}) {
    if (!on_host(array->device())) {
      throw Unsupported(std::string(name) + " is on " + device_name(array->device()) +
                        "; this version merges on the CPU");
    }
  }
  return {to_tensor(out, out_name, rows_heads),
          to_tensor(lse, lse_name, std::span<const std::size_t>(rows_heads).first(3))};
}

void merge(const std::vector<nb::object>& outs, const std::vector<nb::object>& lses, nb::handle out,
           nb::handle lse, nb::handle sink) {
  if (outs.size() != lses.size()) throw nb::value_error("there must be one lse for each out");
  static constexpr std::size_t head[]{3};
  std::vector<Array> alive;
  std::vector<Part> parts;
  const auto take = [&alive](nb::handle tensor, const char* argument, Access access) -> Array& {
    return alive.emplace_back(tensor, argument, access);
  };
  alive.reserve(2 * outs.size() + 3);
  for (std::size_t i = 0; i < outs.size(); ++i) {
    const Array& part_out = take(outs[i], "out_partial", Access::read);
    const Array& part_lse = take(lses[i], "lse_partial", Access::read);
    parts.push_back(to_part(part_out, part_lse, "out_partial", "lse_partial"));
  }
  const Array& result_out = take(out, "out", Access::write);
  const Array& result_lse = take(lse, "lse", Access::write);
  const Part result = to_part(result_out, result_lse, "out", "lse");
  const Array& sink_array = take(sink, "sink", Access::read);
  Tensor sink_tensor;
  if (sink_array.present()) {
    if (sink_array.rank() != 1) throw nb::value_error("sink must have one dimension, (heads)");
    sink_tensor = to_tensor(sink_array, "sink", head);
  }
  const nb::gil_scoped_release unlocked;
  fovea::merge(parts, result, sink_tensor);
}

// What append() and rotate() share: arrays by name, kept alive, each of the rank it must have.
class Arrays {
 public:
  Tensor tensor(nb::handle object, const char* argument, std::span<const std::size_t> dims,
                Access access = Access::read) {
    const Array& array = take(object, argument, access);
    if (!array.present()) return {};
    if (array.shape().size() != dims.size()) {
      throw nb::value_error((std::string(argument) + " has " + std::to_string(array.rank()) +
                             " dimensions; it must have " + std::to_string(dims.size()))
                                .c_str());
    }
    return to_tensor(array, argument, dims);
  }

  // (batch, seqlen, heads, head_dim), or (total, heads, head_dim)
  Tensor rows(nb::handle object, const char* argument, bool varlen, Access access = Access::read) {
    static constexpr std::size_t dims[]{0, 1, 2, 3};
    return tensor(object, argument, std::span<const std::size_t>(dims).subspan(varlen ? 1 : 0),
                  access);
  }

  std::span<const std::int32_t> int32(nb::handle object, const char* argument) {
    const Array& array = take(object, argument, Access::read);
    if (!array.present()) return {};
    return to_int32(array, argument, storage_.emplace_back());
  }

  Rotary rotary(nb::handle cos, nb::handle sin, bool interleaved) {
    static constexpr std::size_t dims[]{2, 3};
    return {tensor(cos, "rotary_cos", dims), tensor(sin, "rotary_sin", dims), interleaved};
  }

 private:
  const Array& take(nb::handle object, const char* argument, Access access) {
    const Array& array = *alive_.emplace_back(std::make_unique<Array>(object, argument, access));
    if (array.present() && !on_host(array.device())) {
      throw Unsupported(std::string(argument) + " is on " + device_name(array.device()) +
                        "; this version computes on the CPU");
    }
    return array;
  }

  std::vector<std::unique_ptr<Array>> alive_;
  std::vector<std::vector<std::int32_t>> storage_;
};

void append(nb::handle k_cache, nb::handle v_cache, nb::handle k, nb::handle v,
            nb::handle cache_seqlens, nb::handle block_table, nb::handle cu_seqlens_k_new,
            nb::handle rotary_cos, nb::handle rotary_sin, bool rotary_interleaved) {
  Arrays arrays;
  const bool varlen = !cu_seqlens_k_new.is_none();
  Cache cache;
  cache.k = arrays.rows(k_cache, "k_cache", false, Access::write);
  cache.v = arrays.rows(v_cache, "v_cache", false, Access::write);
  const Tensor new_k = arrays.rows(k, "k", varlen);
  const Tensor new_v = arrays.rows(v, "v", varlen);
  Rows rows;
  rows.first_position = arrays.int32(cache_seqlens, "cache_seqlens");
  rows.cu_seqlens = arrays.int32(cu_seqlens_k_new, "cu_seqlens_k_new");
  cache.block_table = arrays.int32(block_table, "block_table");
  const auto batch = static_cast<std::int64_t>(rows.first_position.size());
  cache.columns = batch == 0 ? 0 : std::ssize(cache.block_table) / batch;
  const Rotary rotary = arrays.rotary(rotary_cos, rotary_sin, rotary_interleaved);
  const nb::gil_scoped_release unlocked;
  python::append(cache, new_k, new_v, rows, rotary);
}

void rotate(nb::handle q, nb::handle result, nb::handle positions, nb::handle cu_seqlens_q,
            nb::handle rotary_cos, nb::handle rotary_sin, bool rotary_interleaved,
            bool one_position) {
  Arrays arrays;
  const bool varlen = !cu_seqlens_q.is_none();
  const Tensor from = arrays.rows(q, "q", varlen);
  const Tensor to = arrays.rows(result, "out", varlen, Access::write);
  Rows rows;
  rows.first_position = arrays.int32(positions, "cache_seqlens");
  rows.cu_seqlens = arrays.int32(cu_seqlens_q, "cu_seqlens_q");
  rows.one_position = one_position;
  const Rotary rotary = arrays.rotary(rotary_cos, rotary_sin, rotary_interleaved);
  const nb::gil_scoped_release unlocked;
  python::rotate(from, to, rows, rotary);
}

// The bytes of a contiguous array on the host.
std::span<std::byte> bytes_of(const Array& array, const char* argument) {
  if (!on_host(array.device()) || array.rank() != 1 || array.dtype().bits != 8 ||
      (array.shape()[0] > 1 && array.strides()[0] != 1)) {
    throw nb::type_error(
        (std::string(argument) + " must be one-dimensional, contiguous bytes of the host").c_str());
  }
  return {static_cast<std::byte*>(array.data()), static_cast<std::size_t>(array.shape()[0])};
}

void bind_device_memory(nb::module_& module) {
  nb::class_<DeviceMemory>(module, "DeviceMemory", "Memory of a GPU, or of an emulated one.")
      .def(
          "__init__",
          [](DeviceMemory* self, const std::string& device, std::size_t bytes) {
            new (self) DeviceMemory(to_device(device), bytes);
          },
          "device"_a, "bytes"_a)
      .def_prop_ro(
          "address",
          [](const DeviceMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def(
          "upload",
          [](DeviceMemory& self, nb::handle source) {
            const Array array(source, "source");
            const auto bytes = bytes_of(array, "source");
            self.upload(bytes.data(), bytes.size());
          },
          "source"_a)
      .def(
          "download",
          [](const DeviceMemory& self, nb::handle target) {
            const Array array(target, "target", Access::write);
            const auto bytes = bytes_of(array, "target");
            self.download(bytes.data(), bytes.size());
          },
          "target"_a);
}

int run_program(const std::vector<std::string>& arguments) {
  const nb::gil_scoped_release unlocked;
  return tools::run_program(arguments);
}

// nanobind asks this before its own translator, which makes every std::invalid_argument a
// ValueError.
void translate(const std::exception_ptr& exception, void* /*payload*/) {
  try {
    std::rethrow_exception(exception);
  } catch (const Unsupported& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const Error& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const DeviceError& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

void bind_call(nb::module_& module) {
  nb::class_<Call>(module, "Call", "One attention call: its tensors, lengths and settings.")
      .def(
          "__init__",
          [](Call* self, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
             nb::handle bias, nb::handle mask, nb::handle sink, nb::handle alibi,
             nb::handle cu_seqlens_q, nb::handle cu_seqlens_k, nb::handle seqused_q,
             nb::handle seqused_k, nb::handle block_table, std::int64_t max_seqlen_q,
             std::int64_t max_seqlen_k, std::optional<double> softmax_scale, bool causal,
             std::int64_t window_left, std::int64_t window_right, double softcap, double dropout_p,
             std::uint64_t dropout_seed, std::uint64_t dropout_offset, int num_splits,
             bool deterministic, std::uintptr_t stream, bool heads_first, nb::handle q_scale,
             nb::handle k_scale, nb::handle v_scale, nb::handle key_scale) {
            new (self) Call(
                {q, k, v, out, lse, bias, mask, sink, alibi, q_scale, k_scale, v_scale, key_scale},
                {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table},
                {max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left, window_right,
                 softcap, dropout_p, dropout_seed, dropout_offset, num_splits, deterministic,
                 stream, heads_first});
          },
          "q"_a.none(), "k"_a.none(), "v"_a.none(), "out"_a.none(), "lse"_a.none(), "bias"_a.none(),
          "mask"_a.none(), "sink"_a.none(), "alibi"_a.none(), "cu_seqlens_q"_a.none(),
          "cu_seqlens_k"_a.none(), "seqused_q"_a.none(), "seqused_k"_a.none(),
          "block_table"_a.none(), "max_seqlen_q"_a, "max_seqlen_k"_a, "softmax_scale"_a.none(),
          "causal"_a, "window_left"_a, "window_right"_a, "softcap"_a, "dropout_p"_a,
          "dropout_seed"_a, "dropout_offset"_a, "num_splits"_a, "deterministic"_a, "stream"_a,
          "heads_first"_a, "q_scale"_a.none() = nb::none(), "k_scale"_a.none() = nb::none(),
          "v_scale"_a.none() = nb::none(), "key_scale"_a.none() = nb::none());
}

void bind_quantize(nb::module_& module) {
  nb::class_<QuantizeSettings>(module, "Quantization", "How tensors become eight bits.")
      .def(
          "__init__",
          [](QuantizeSettings* self, const std::string& dtype, const std::string& scales,
             bool rotate, std::uint64_t seed, nb::handle rotary_cos, nb::handle rotary_sin,
             bool rotary_interleaved, std::int64_t first_position) {
            new (self) QuantizeSettings(dtype, scales, rotate, seed, rotary_cos, rotary_sin,
                                        rotary_interleaved, first_position);
          },
          "dtype"_a, "scales"_a, "rotate"_a, "seed"_a, "rotary_cos"_a.none() = nb::none(),
          "rotary_sin"_a.none() = nb::none(), "rotary_interleaved"_a = false,
          "first_position"_a = 0);
  nb::class_<Quantizer>(module, "QuantizePlan", "Quantisation of the tensors of a call.")
      .def_prop_ro("workspace_bytes", &Quantizer::workspace_bytes)
      .def_prop_ro("shapes", &Quantizer::shapes)
      .def("run", &Quantizer::run, "call"_a, "tensors"_a, "block_table"_a.none() = nb::none(),
           "first_keys"_a.none() = nb::none(), "workspace"_a.none() = nb::none());
  module.def("plan_quantize", plan_quantize, nb::keep_alive<0, 2>(), "call"_a, "settings"_a,
             "values"_a = "transposed", "pages"_a = 0, "page_size"_a = 0, "device"_a = "auto");
}

void bind(nb::module_& module) {
  nb::register_exception_translator(translate);
  bind_call(module);
  bind_device_memory(module);
  bind_quantize(module);
  nb::class_<Plan>(module, "Plan", "A validated call with its chosen configuration.")
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_prop_ro("device", [](const Plan& self) { return std::string(name(self.device())); })
      .def("explain", &Plan::explain)
      .def("run", run, "call"_a, "workspace"_a.none());
  module.def("plan", plan, "call"_a, "device"_a, "threads"_a);
  module.def("attention", attention, "call"_a, "allocate"_a.none() = nb::none(),
             "device"_a = "auto");
  module.def("attention_backward", attention_backward, "call"_a, "dout"_a, "dlse"_a.none(), "dq"_a,
             "dk"_a, "dv"_a, "dsink"_a.none(), "dbias"_a.none(), "allocate"_a.none() = nb::none(),
             "device"_a = "auto");
  module.def("seconds_of_attention", seconds_of_attention, "call"_a, "repeat"_a,
             "allocate"_a.none() = nb::none());
  module.def("merge", merge, "outs"_a, "lses"_a, "out"_a, "lse"_a, "sink"_a.none());
  module.def("append", append, "k_cache"_a, "v_cache"_a, "k"_a, "v"_a, "cache_seqlens"_a,
             "block_table"_a, "cu_seqlens_k_new"_a.none(), "rotary_cos"_a.none(),
             "rotary_sin"_a.none(), "rotary_interleaved"_a);
  module.def("rotate", rotate, "q"_a, "out"_a, "positions"_a, "cu_seqlens_q"_a.none(),
             "rotary_cos"_a, "rotary_sin"_a, "rotary_interleaved"_a, "one_position"_a);
  module.def("run_program", run_program, "arguments"_a);
  module.def("version", [] { return std::string(version()); });
  module.def("cpu_instruction_set", [] { return std::string(cpu_instruction_set()); });
}

}  // namespace
}  // namespace fovea::python

NB_MODULE(_native, module) { fovea::python::bind(module); }
