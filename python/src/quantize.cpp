#include "python/quantize.h"

#include <algorithm>

#include "python/device_call.h"

namespace fovea::python {
namespace {

// An operand, and which of its four dimensions Python's tensors have.
struct Operand {
  const char* name;
  Tensor Quantized::*field;
  std::size_t first, last;
};
constexpr std::array<Operand, 7> operands{{{"q", &Quantized::q, 0, 3},
                                           {"q_scale", &Quantized::q_scale, 0, 2},
                                           {"k", &Quantized::k, 0, 3},
                                           {"v", &Quantized::v, 0, 3},
                                           {"key_scale", &Quantized::key_scale, 2, 3},
                                           {"k_scale", &Quantized::k_scale, 0, 2},
                                           {"v_scale", &Quantized::v_scale, 0, 2}}};

DType to_code_type(const std::string& name) {
  if (name == "float8_e4m3fn") return DType::e4m3;
  if (name == "float8_e5m2") return DType::e5m2;
  if (name == "int8") return DType::s8;
  throw Error("dtype is '" + name + "'; it must be float8_e4m3fn, float8_e5m2 or int8");
}

Fp8Scales to_scales(const std::string& name) {
  static constexpr std::array names{"tensor", "head", "block"};
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) {
    throw Error("scales is '" + name + "'; it must be 'tensor', 'head' or 'block'");
  }
  return static_cast<Fp8Scales>(found - names.begin());
}

// One table of a rotary embedding.
Array to_table(nb::handle object, const char* name, Tensor& tensor) {
  static constexpr std::size_t dims[]{2, 3};
  Array array(object, name, Access::read);
  if (!array.present()) return array;
  if (array.rank() != static_cast<int>(std::size(dims))) {
    throw nb::value_error((std::string(name) + " has " + std::to_string(array.rank()) +
                           " dimensions; it must have 2, (positions, rotary_dim / 2)")
                              .c_str());
  }
  tensor = to_tensor(array, name, dims);
  return array;
}

void check_device_of(const Array& array, const char* name, const Call& call) {
  if (!array.present() || same_device(array.device(), call.device())) return;
  throw nb::value_error((std::string(name) + " is on " + device_name(array.device()) +
                         " but q is on " + device_name(call.device()) +
                         "; they must be on one device")
                            .c_str());
}

// The array as what the plan writes: of its shape and dtype, without gaps.
Tensor to_operand(const Array& array, const Operand& operand, const Tensor& right) {
  bool fits = array.present() && array.shape().size() == operand.last - operand.first + 1;
  for (std::size_t i = operand.first; fits && i <= operand.last; ++i) {
    const std::size_t at = i - operand.first;
    fits = array.shape()[at] == right.shape[i] &&
           (right.shape[i] <= 1 || array.strides()[at] == right.stride[i]);
  }
  if (!fits || to_dtype(array, operand.name) != right.dtype) {
    throw nb::value_error((std::string(operand.name) +
                           " is not what the plan writes: contiguous, of the shape that it gives")
                              .c_str());
  }
  Tensor tensor = right;
  tensor.data = array.data();
  return tensor;
}

}  // namespace

QuantizeSettings::QuantizeSettings(const std::string& dtype, const std::string& scales, bool rotate,
                                   std::uint64_t seed, nb::handle cos, nb::handle sin,
                                   bool interleaved, std::int64_t first_position)
    : quantization_{.dtype = to_code_type(dtype),
                    .scales = to_scales(scales),
                    .rotate = rotate,
                    .seed = seed} {
  quantization_.rotary.interleaved = interleaved;
  quantization_.rotary.first_position = first_position;
  tables_ = {to_table(cos, "rotary_cos", quantization_.rotary.cos),
             to_table(sin, "rotary_sin", quantization_.rotary.sin)};
}

void QuantizeSettings::check_device(const Call& call) const {
  check_device_of(tables_[0], "rotary_cos", call);
  check_device_of(tables_[1], "rotary_sin", call);
}

namespace {

QuantizePlan make_plan(const Call& call, const QuantizeSettings& settings, ValueLayout values,
                       const PagePool& pool, Device device) {
  settings.check_device(call);
  if (call.problem().memory == Memory::device) {
    return quantize_plan_on_device(call, settings.quantization(), values, pool, device);
  }
  if (pool.pages == 0) return plan_quantize(call.problem(), settings.quantization(), values);
  return plan_quantize(call.problem(), settings.quantization(), pool);
}

}  // namespace

Quantizer::Quantizer(const Call& call, const QuantizeSettings& settings, ValueLayout values,
                     const PagePool& pool, Device device)
    : plan_(make_plan(call, settings, values, pool, device)) {}

std::vector<Quantizer::Shape> Quantizer::shapes() const {
  const Quantized to = plan_.operands();
  std::vector<Shape> shapes;
  for (const Operand& operand : operands) {
    const Tensor& tensor = to.*operand.field;
    shapes.emplace_back();
    if (!tensor.present) continue;
    shapes.back().emplace(tensor.shape.data() + operand.first,
                          tensor.shape.data() + operand.last + 1);
  }
  return shapes;
}

void Quantizer::run(const Call& call, const std::vector<nb::object>& tensors,
                    nb::handle block_table, nb::handle first_keys, nb::handle workspace) const {
  const Quantized right = plan_.operands();
  Quantized to = right;
  std::array<Array, operands.size()> alive;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const Operand& operand = operands[i];
    (to.*operand.field).data = nullptr;
    alive[i] = Array(tensors.at(i), operand.name, Access::write);
    if (!alive[i].present()) continue;
    check_device_of(alive[i], operand.name, call);
    to.*operand.field = to_operand(alive[i], operand, right.*operand.field);
  }
  const Array table(block_table, "block_table");
  const Array first(first_keys, "first_keys");
  const Array scratch(workspace, "workspace", Access::write);
  std::array<std::vector<std::int32_t>, 2> storage;
  check_device_of(table, "block_table", call);
  check_device_of(first, "first_keys", call);
  if (table.present()) {
    if (table.rank() != 2) {
      throw nb::value_error(("block_table has " + std::to_string(table.rank()) +
                             " dimensions; it must have 2, (batch, pages of a sequence)")
                                .c_str());
    }
    to.block_table = to_int32(table, "block_table", storage[0]);
    to.block_table_columns = table.shape()[1];
  }
  if (first.present()) to.first_keys = to_int32(first, "first_keys", storage[1]);
  std::span<std::byte> bytes;
  if (scratch.present()) {
    bytes = {static_cast<std::byte*>(scratch.data()), static_cast<std::size_t>(scratch.shape()[0])};
  }
  const nb::gil_scoped_release unlocked;
  plan_.run(call.problem(), to, bytes);
}

}  // namespace fovea::python
