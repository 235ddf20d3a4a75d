#include "python/array.h"

#include <array>
#include <limits>
#include <utility>

namespace fovea::python {
namespace {

constexpr const char* known_dtypes =
    "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8 and bool";

[[noreturn]] void refuse(const char* argument, const std::string& fault) {
  throw nb::type_error((std::string(argument) + " " + fault).c_str());
}

std::string name_of_type(nb::handle object) {
  return nb::str(object.type().attr("__name__")).c_str();
}

// For an error inside another library: TypeError with the argument's name, caused by that error.
[[noreturn]] void refuse_because(nb::python_error& cause, nb::handle object, const char* argument) {
  nb::raise_from(cause, PyExc_TypeError, "%s is a %s that does not lend its memory: %s", argument,
                 name_of_type(object).c_str(), cause.what());
}

const dlpack::ExchangeApi* exchange_api(nb::handle object) {
  // Types have it or not for good, so two slots remember what was asked last.
  static thread_local std::array<std::pair<PyObject*, const dlpack::ExchangeApi*>, 2> known{};
  PyObject* const type = object.type().ptr();
  for (const auto& [known_type, api] : known) {
    if (known_type == type) return api;
  }
  const dlpack::ExchangeApi* api = nullptr;
  const nb::object capsule = nb::getattr(object.type(), "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") != 0) {
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->version.major > 1) api = api->previous;
  }
  // Both slots keep their types alive: an address names one type.
  Py_INCREF(type);
  Py_XDECREF(known[1].first);
  known[1] = known[0];
  known[0] = {type, api};
  return api;
}

// "f" and an itemsize of 4, and so on: the buffer protocol's names for what fovea computes with.
dlpack::DataType from_format(const Py_buffer& buffer) {
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  const auto bits = static_cast<std::uint8_t>(buffer.itemsize * 8);
  switch (format[0] == '\0' || format[1] != '\0' ? '\0' : format[0]) {
    case 'e':
    case 'f':
    case 'd': return {dlpack::floating, bits, 1};
    case '?': return {dlpack::boolean, bits, 1};
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q': return {dlpack::signed_integer, bits, 1};
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q': return {dlpack::unsigned_integer, bits, 1};
    default: return {std::numeric_limits<std::uint8_t>::max(), bits, 1};
  }
}

bool on_cuda(dlpack::Device device) {
  return device.type == dlpack::cuda || device.type == dlpack::cuda_managed;
}

}  // namespace

Array::Array(nb::handle object, const char* argument, Access access) {
  if (!object.is_valid() || object.is_none()) return;
  try {
    if (!take_exchange_api(object, argument) && !take_buffer(object, argument, access) &&
        !take_viewed_numpy(object, argument, access)) {
      take_capsule(object, argument, access);
    }
  } catch (...) {
    release();
    throw;
  }
  present_ = true;
}

Array::Array(Array&& other) noexcept { *this = std::move(other); }

Array& Array::operator=(Array&& other) noexcept {
  if (this == &other) return *this;
  release();
  present_ = std::exchange(other.present_, false);
  data_ = std::exchange(other.data_, nullptr);
  dtype_ = other.dtype_;
  device_ = other.device_;
  shape_ = other.shape_;
  strides_ = other.strides_;
  owner_ = std::move(other.owner_);
  buffer_ = std::exchange(other.buffer_, std::nullopt);
  managed_ = std::exchange(other.managed_, nullptr);
  managed_versioned_ = std::exchange(other.managed_versioned_, nullptr);
  return *this;
}

Array::~Array() { release(); }

void Array::release() {
  if (buffer_) PyBuffer_Release(&*buffer_);
  buffer_.reset();
  if (managed_ != nullptr && managed_->deleter != nullptr) managed_->deleter(managed_);
  managed_ = nullptr;
  if (managed_versioned_ != nullptr && managed_versioned_->deleter != nullptr) {
    managed_versioned_->deleter(managed_versioned_);
  }
  managed_versioned_ = nullptr;
  owner_.reset();
}

Array Array::bytes_beside(std::size_t count) const {
  Array made;
  const dlpack::ExchangeApi* api = owner_.is_valid() ? exchange_api(owner_) : nullptr;
  if (api == nullptr || api->allocate == nullptr) return made;
  auto extent = static_cast<std::int64_t>(count);
  dlpack::Tensor prototype{};
  prototype.device = device_;
  prototype.ndim = 1;
  prototype.dtype = {dlpack::unsigned_integer, 8, 1};
  prototype.shape = &extent;
  std::string fault;
  const auto keep_fault = [](void* into, const char* /*kind*/, const char* message) {
    *static_cast<std::string*>(into) = message;
  };
  if (api->allocate(&prototype, &made.managed_versioned_, &fault, keep_fault) != 0) {
    throw DeviceError("a workspace of " + std::to_string(count) + " bytes on " +
                      device_name(device_) + " cannot be had: " + fault);
  }
  made.take(made.managed_versioned_->tensor, "workspace");
  made.present_ = true;
  return made;
}

void Array::take(const dlpack::Tensor& tensor, const char* argument) {
  if (tensor.ndim < 0 || tensor.ndim > static_cast<int>(max_rank)) {
    refuse(argument, "has " + std::to_string(tensor.ndim) + " dimensions; at most 4 make sense");
  }
  if (tensor.dtype.lanes != 1) refuse(argument, "packs several numbers into one element");
  const auto rank = static_cast<std::size_t>(tensor.ndim);
  shape_.count = strides_.count = rank;
  std::int64_t row_major = 1;
  for (std::size_t i = rank; i-- > 0;) {
    shape_.values[i] = tensor.shape[i];
    strides_.values[i] = tensor.strides == nullptr ? row_major : tensor.strides[i];
    row_major *= tensor.shape[i];
  }
  data_ =
      tensor.data == nullptr ? nullptr : static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  dtype_ = tensor.dtype;
  device_ = tensor.device;
}

bool Array::take_exchange_api(nb::handle object, const char* argument) {
  const dlpack::ExchangeApi* api = exchange_api(object);
  if (api == nullptr || api->tensor_from_object == nullptr) return false;
  dlpack::Tensor tensor{};
  try {
    if (api->tensor_from_object(object.ptr(), &tensor) != 0) throw nb::python_error();
    take(tensor, argument);
  } catch (nb::python_error& error) {
    refuse_because(error, object, argument);
  }
  owner_ = nb::borrow(object);
  return true;
}

bool Array::take_buffer(nb::handle object, const char* argument, Access access) {
  if (PyObject_CheckBuffer(object.ptr()) == 0) return false;
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) {
    PyErr_Clear();  // numpy refuses dtypes that are not its own
    return false;
  }
  buffer_ = buffer;
  if (access == Access::write && buffer.readonly != 0) {
    refuse(argument, "is read-only; it is written to");
  }
  dlpack::Tensor tensor{};
  std::array<std::int64_t, max_rank> strides{};
  if (buffer.ndim > static_cast<int>(max_rank)) {
    refuse(argument, "has " + std::to_string(buffer.ndim) + " dimensions; at most 4 make sense");
  }
  for (int i = 0; i < buffer.ndim; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (buffer.strides[i] % buffer.itemsize != 0) {
      refuse(argument, "has a stride of " + std::to_string(buffer.strides[i]) +
                           " bytes, no multiple of its elements' size");
    }
    strides[at] = buffer.strides[i] / buffer.itemsize;
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(std::int64_t));
  tensor.data = buffer.buf;
  tensor.device = {dlpack::cpu, 0};
  tensor.ndim = buffer.ndim;
  tensor.dtype = from_format(buffer);
  tensor.shape = reinterpret_cast<std::int64_t*>(buffer.shape);
  tensor.strides = strides.data();
  take(tensor, argument);
  return true;
}

// numpy arrays in the dtypes of ml_dtypes lend neither a buffer nor a capsule, but views can.
bool Array::take_viewed_numpy(nb::handle object, const char* argument, Access access) {
  if (!nb::hasattr(object, "__array_interface__")) return false;
  const nb::object dtype = object.attr("dtype");
  const std::string name = nb::str(nb::handle(dtype)).c_str();
  const struct {
    const char* name;
    const char* view_as;
    dlpack::DataType dtype;
  } rows[] = {{"bfloat16", "uint16", {dlpack::bfloat, 16, 1}},
              {"float8_e4m3fn", "uint8", {dlpack::float8_e4m3fn, 8, 1}},
              {"float8_e5m2", "uint8", {dlpack::float8_e5m2, 8, 1}}};
  for (const auto& row : rows) {
    if (name != row.name) continue;
    if (!take_buffer(object.attr("view")(row.view_as), argument, access)) return false;
    dtype_ = row.dtype;
    return true;
  }
  refuse(argument, "has dtype " + name + "; fovea knows " + known_dtypes);
}

void Array::take_capsule(nb::handle object, const char* argument, Access access) {
  if (!nb::hasattr(object, "__dlpack__")) {
    refuse(argument, "is a " + name_of_type(object) +
                         "; it must be a tensor of torch, numpy, jax or cupy, or of any library "
                         "that speaks DLPack");
  }
  nb::object capsule;
  try {
    // Work goes into the caller's current stream, so that nobody has to wait: stream -1.
    const auto device = nb::cast<nb::tuple>(object.attr("__dlpack_device__")());
    const nb::object stream =
        nb::cast<int>(device[0]) == dlpack::cpu ? nb::object(nb::none()) : nb::int_(-1);
    try {
      capsule = object.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 1),
                                          nb::arg("stream") = stream);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;  // a library older than the argument
      capsule = object.attr("__dlpack__")();
    }
  } catch (nb::python_error& error) {
    refuse_because(error, object, argument);
  }
  // Renaming tells the capsule that somebody else calls the deleter now.
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    managed_versioned_ = static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    if (managed_versioned_->version.major > 1) {
      refuse(argument, "speaks a DLPack newer than 1.x");
    }
    if (access == Access::write && (managed_versioned_->flags & dlpack::flag_read_only) != 0) {
      refuse(argument, "is read-only; it is written to");
    }
    take(managed_versioned_->tensor, argument);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    managed_ = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    take(managed_->tensor, argument);
  } else {
    refuse(argument, "gives something other than a DLPack capsule");
  }
}

std::string dtype_name(dlpack::DataType dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case dlpack::floating: return "float" + bits;
    case dlpack::bfloat: return "bfloat" + bits;
    case dlpack::boolean: return "bool";
    case dlpack::float8_e4m3fn: return "float8_e4m3fn";
    case dlpack::float8_e5m2: return "float8_e5m2";
    case dlpack::signed_integer: return "int" + bits;
    case dlpack::unsigned_integer: return "uint" + bits;
    default: return "unknown to fovea";
  }
}

std::string device_name(dlpack::Device device) {
  if (on_host(device)) return "cpu";
  if (on_cuda(device)) {
    return "cuda:" + std::to_string(device.id);
  }
  return "a device of DLPack type " + std::to_string(device.type);
}

bool on_host(dlpack::Device device) {
  return device.type == dlpack::cpu || device.type == dlpack::cuda_host;
}

bool same_device(dlpack::Device one, dlpack::Device other) {
  if (on_host(one) || on_host(other)) return on_host(one) && on_host(other);
  const bool same_kind = one.type == other.type || (on_cuda(one) && on_cuda(other));
  return same_kind && one.id == other.id;
}

DType to_dtype(const Array& array, const char* argument) {
  const auto is = [dtype = array.dtype()](std::uint8_t code, std::uint8_t bits) {
    return dtype.code == code && dtype.bits == bits;
  };
  if (is(dlpack::floating, 32)) return DType::f32;
  if (is(dlpack::bfloat, 16)) return DType::bf16;
  if (is(dlpack::floating, 16)) return DType::f16;
  if (is(dlpack::float8_e4m3fn, 8)) return DType::e4m3;
  if (is(dlpack::float8_e5m2, 8)) return DType::e5m2;
  if (is(dlpack::signed_integer, 8)) return DType::s8;
  if (is(dlpack::boolean, 8)) return DType::boolean;
  refuse(argument, "has dtype " + dtype_name(array.dtype()) + "; fovea knows " + known_dtypes);
}

std::span<const std::int32_t> to_int32(const Array& array, const char* argument,
                                       std::vector<std::int32_t>& storage) {
  const bool is_int = array.dtype().code == dlpack::signed_integer;
  const int bits = array.dtype().bits;
  if (!is_int || (bits != 32 && bits != 64)) {
    refuse(argument, "has dtype " + dtype_name(array.dtype()) + "; it must be int32 or int64");
  }
  if (array.rank() < 1 || array.rank() > 2) {
    refuse(argument, "has " + std::to_string(array.rank()) +
                         " dimensions; it must have one, or two as a table");
  }
  const bool table = array.rank() == 2;
  const std::int64_t rows = table ? array.shape()[0] : 1;
  const std::int64_t columns = array.shape()[table ? 1 : 0];
  const std::int64_t row_stride = table ? array.strides()[0] : 0;
  const std::int64_t column_stride = array.strides()[table ? 1 : 0];
  const std::int64_t count = rows * columns;
  const bool in_place =
      bits == 32 && (columns <= 1 || column_stride == 1) && (rows <= 1 || row_stride == columns);
  static constexpr std::int32_t nothing = 0;  // an empty span that is present
  if (count == 0) return {&nothing, 0};
  if (!in_place && !on_host(array.device())) {
    refuse(argument, "is " + dtype_name(array.dtype()) + (bits == 32 ? " with gaps" : "") +
                         "; on a device it must be contiguous int32");
  }
  if (in_place) {
    return {static_cast<const std::int32_t*>(array.data()), static_cast<std::size_t>(count)};
  }
  storage.clear();
  storage.reserve(static_cast<std::size_t>(count));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int64_t at = row * row_stride + column * column_stride;
      const std::int64_t value = bits == 32 ? static_cast<const std::int32_t*>(array.data())[at]
                                            : static_cast<const std::int64_t*>(array.data())[at];
      if (!std::in_range<std::int32_t>(value)) {
        throw nb::value_error(
            (std::string(argument) + " holds " + std::to_string(value) + "; it must fit 32 bits")
                .c_str());
      }
      storage.push_back(static_cast<std::int32_t>(value));
    }
  }
  return storage;
}

}  // namespace fovea::python
