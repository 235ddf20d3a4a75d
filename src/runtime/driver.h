// The part of the CUDA driver's interface that is used, declared here so that building needs no
// CUDA. Names and values are those of cuda.h; the library is opened by name.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::runtime::driver {

using Result = int;  // 0: success
using DevicePtr = unsigned long long;
using Context = void*;
using ModuleHandle = void*;
using Function = void*;
using StreamHandle = void*;
using EventHandle = void*;

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int flag;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct Launch {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

inline constexpr int attribute_cluster_dimension = 4;
inline constexpr int attribute_programmatic_stream_serialization = 6;

inline constexpr int device_clock_rate = 13;
inline constexpr int device_multiprocessor_count = 16;
inline constexpr int device_l2_cache_size = 38;
inline constexpr int device_capability_major = 75;
inline constexpr int device_capability_minor = 76;
inline constexpr int device_max_shared_per_block_optin = 97;

inline constexpr int function_static_shared = 1;
inline constexpr int function_max_dynamic_shared = 8;
inline constexpr int function_non_portable_cluster = 14;

inline constexpr std::uintptr_t param_end = 0;
inline constexpr std::uintptr_t param_buffer_pointer = 1;
inline constexpr std::uintptr_t param_buffer_size = 2;

inline constexpr int pointer_memory_type = 2;

inline constexpr unsigned stream_non_blocking = 1;
inline constexpr int l2_promotion_128_bytes = 2;
inline constexpr int l2_promotion_256_bytes = 3;

struct Functions {
  Result (*init)(unsigned);
  Result (*driver_version)(int*);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);
  Result (*device_count)(int*);
  Result (*device_get)(int*, int ordinal);
  Result (*device_name)(char*, int length, int device);
  Result (*device_total_memory)(std::size_t*, int device);
  Result (*device_attribute)(int*, int attribute, int device);
  Result (*context_retain)(Context*, int device);
  Result (*context_release)(int device);
  Result (*context_push)(Context);
  Result (*context_pop)(Context*);
  Result (*context_synchronize)();
  Result (*context_device)(int*);
  Result (*pointer_attribute)(void* value, int attribute, DevicePtr);
  Result (*memory_allocate)(DevicePtr*, std::size_t);
  Result (*memory_free)(DevicePtr);
  Result (*copy_to_device)(DevicePtr, const void*, std::size_t, StreamHandle);
  Result (*copy_to_host)(void*, DevicePtr, std::size_t, StreamHandle);
  Result (*copy)(DevicePtr, DevicePtr, std::size_t, StreamHandle);
  Result (*fill)(DevicePtr, unsigned char, std::size_t, StreamHandle);
  Result (*module_load)(ModuleHandle*, const void* image);
  Result (*module_unload)(ModuleHandle);
  Result (*module_function)(Function*, ModuleHandle, const char* name);
  Result (*function_set)(Function, int attribute, int value);
  Result (*function_get)(int* value, int attribute, Function);
  Result (*launch)(const Launch*, Function, void** parameters, void** extra);
  Result (*tensor_map_encode)(void* map, int type, std::uint32_t rank, void* address,
                              const std::uint64_t* extent, const std::uint64_t* strides,
                              const std::uint32_t* box, const std::uint32_t* element_strides,
                              int interleave, int swizzle, int l2_promotion, int fill);
  Result (*stream_create)(StreamHandle*, unsigned flags);
  Result (*stream_destroy)(StreamHandle);
  Result (*stream_synchronize)(StreamHandle);
  Result (*stream_wait_event)(StreamHandle, EventHandle, unsigned flags);
  Result (*event_create)(EventHandle*, unsigned flags);
  Result (*event_destroy)(EventHandle);
  Result (*event_record)(EventHandle, StreamHandle);
  Result (*event_synchronize)(EventHandle);
  Result (*event_elapsed)(float*, EventHandle, EventHandle);
};

// Opens libcuda.so.1 and initialises it, once per process. Throws Unsupported without a driver.
const Functions& functions();

}  // namespace fovea::runtime::driver
