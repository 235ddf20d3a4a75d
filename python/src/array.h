// A tensor of any Python library, seen from C++ without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/fovea.hpp"
#include "python/dlpack.h"

namespace fovea::python {

namespace nb = nanobind;

enum class Access : std::uint8_t { read, write };

// Borrows the memory of a torch, numpy, jax or cupy array, or of whatever else speaks DLPack or the
// buffer protocol, and keeps it alive. Faults are TypeErrors that begin with the argument's name.
class Array {
 public:
  Array() = default;  // absent
  // None is absent too.
  Array(nb::handle object, const char* argument, Access access = Access::read);
  Array(Array&& other) noexcept;
  Array& operator=(Array&& other) noexcept;
  ~Array();

  [[nodiscard]] bool present() const { return present_; }
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] int rank() const { return static_cast<int>(shape_.size()); }
  [[nodiscard]] std::span<const std::int64_t> shape() const { return shape_; }
  [[nodiscard]] std::span<const std::int64_t> strides() const { return strides_; }  // in elements
  [[nodiscard]] dlpack::DataType dtype() const { return dtype_; }
  [[nodiscard]] dlpack::Device device() const { return device_; }

  // New bytes on the device of this one, of the allocator of its library; absent if that library
  // gives none from C.
  [[nodiscard]] Array bytes_beside(std::size_t count) const;

 private:
  static constexpr std::size_t max_rank = 8;

  // Up to eight numbers in place: arrays are made on every call.
  struct Extents {
    std::array<std::int64_t, max_rank> values{};
    std::size_t count = 0;
    [[nodiscard]] std::size_t size() const { return count; }
    operator std::span<const std::int64_t>() const { return {values.data(), count}; }
  };

  bool take_exchange_api(nb::handle object, const char* argument);
  bool take_buffer(nb::handle object, const char* argument, Access access);
  bool take_viewed_numpy(nb::handle object, const char* argument, Access access);
  void take_capsule(nb::handle object, const char* argument, Access access);
  void take(const dlpack::Tensor& tensor, const char* argument);
  void release();

  bool present_ = false;
  void* data_ = nullptr;
  dlpack::DataType dtype_{};
  dlpack::Device device_{};
  Extents shape_;
  Extents strides_;

  nb::object owner_;
  std::optional<Py_buffer> buffer_;
  dlpack::ManagedTensor* managed_ = nullptr;
  dlpack::ManagedTensorVersioned* managed_versioned_ = nullptr;
};

// "float32", "int64": as Python users know them.
[[nodiscard]] std::string dtype_name(dlpack::DataType dtype);
// "cpu", "cuda:0"
[[nodiscard]] std::string device_name(dlpack::Device device);
[[nodiscard]] bool on_host(dlpack::Device device);
[[nodiscard]] bool same_device(dlpack::Device one, dlpack::Device other);

// TypeError if fovea does not know the dtype.
[[nodiscard]] DType to_dtype(const Array& array, const char* argument);

// int32 numbers in row-major order: the array's own memory, or `storage` if it has to be converted.
[[nodiscard]] std::span<const std::int32_t> to_int32(const Array& array, const char* argument,
                                                     std::vector<std::int32_t>& storage);

}  // namespace fovea::python
