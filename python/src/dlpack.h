// DLPack 1.x: how array libraries describe memory to each other. Written down from its
// specification (https://dmlc.github.io/dlpack/latest/c_api.html); the layout of these structs is
// its ABI.
#pragma once

#include <cstdint>

namespace fovea::dlpack {

enum DeviceType : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3, cuda_managed = 13 };

struct Device {
  std::int32_t type;
  std::int32_t id;
};

enum TypeCode : std::uint8_t {
  signed_integer = 0,
  unsigned_integer = 1,
  floating = 2,
  bfloat = 4,
  boolean = 6,
  float8_e4m3fn = 10,
  float8_e5m2 = 12,
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

// In a capsule named "dltensor": versions before 1.0.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

inline constexpr std::uint64_t flag_read_only = 1;

// In a capsule named "dltensor_versioned".
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// What `type(x).__dlpack_c_exchange_api__` holds, a capsule named "dlpack_exchange_api": the same
// exchange without a Python object for each tensor. Functions return 0, or set a Python error.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor*, ManagedTensorVersioned**, void*,
                  void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, ManagedTensorVersioned**);
  int (*managed_to_object)(ManagedTensorVersioned*, void**);
  int (*tensor_from_object)(void*, Tensor*);  // may be null; lends, without a reference
  int (*current_work_stream)(std::int32_t, std::int32_t, void**);
};

}  // namespace fovea::dlpack
