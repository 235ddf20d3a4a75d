// The driver's interface over the same session: what programs call beside the runtime (tensor maps
// above all), and enough of the rest for programs written for the driver alone.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "cuda_shim/abi.h"
#include "cuda_shim/events.h"
#include "cuda_shim/launch.h"
#include "cuda_shim/session.h"

namespace fovea::cuda_shim {
namespace {

using DevicePointer = std::uint64_t;

template <typename Action>
int driver_call(Action action) noexcept {
  return static_cast<int>(guarded(action));
}

int only_device(int device) {
  return driver_call([&](Session&) {
    if (device == 0) return;
    throw Failure(Status::invalid_device,
                  "device " + std::to_string(device) + " is named; there is one, 0.");
  });
}

void* pointer(DevicePointer address) { return reinterpret_cast<void*>(address); }

char context;  // the one context; its address is its handle

Kernel& kernel_at(Session& session, void* handle) { return session.kernel(handle); }

int launch(void* function, const emulator::LaunchConfig& config, void** arguments, void** extra) {
  return driver_call([&](Session& session) {
    session.launch(kernel_at(session, function), config, arguments, extra);
  });
}

// CUtensorMapDataType to the emulator's, in the order of the former.
constexpr emulator::TensorType kTensorTypes[] = {
    emulator::TensorType::uint8,       emulator::TensorType::uint16,
    emulator::TensorType::uint32,      emulator::TensorType::int32,
    emulator::TensorType::uint64,      emulator::TensorType::int64,
    emulator::TensorType::float16,     emulator::TensorType::float32,
    emulator::TensorType::float64,     emulator::TensorType::bfloat16,
    emulator::TensorType::float32_ftz, emulator::TensorType::tfloat32,
    emulator::TensorType::tfloat32_ftz};
constexpr emulator::Swizzle kSwizzles[] = {emulator::Swizzle::none, emulator::Swizzle::b32,
                                           emulator::Swizzle::b64, emulator::Swizzle::b128};

struct TensorMapRequest {
  int type;
  std::uint32_t rank;
  void* address;
  const std::uint64_t *extent, *strides;
  const std::uint32_t *box, *element_strides;
  int interleave, swizzle, fill;
};

void encode(const TensorMapRequest& request, void* target) {
  if (request.type < 0 || request.type >= static_cast<int>(std::size(kTensorTypes))) {
    throw Failure(Status::not_supported, "tensor map data type " + std::to_string(request.type) +
                                             " (packed 4- and 6-bit types) is not emulated.");
  }
  if (request.swizzle < 0 || request.swizzle >= static_cast<int>(std::size(kSwizzles))) {
    throw Failure(Status::not_supported, "tensor map swizzle " + std::to_string(request.swizzle) +
                                             " (other atoms than 16 bytes) is not emulated.");
  }
  if (request.interleave != 0) {
    throw Failure(Status::not_supported, "interleaved tensor maps are not emulated.");
  }
  if (request.rank < 1 || request.rank > 5) {
    throw Failure(Status::invalid_value,
                  "a tensor map's rank is " + std::to_string(request.rank) + ", not 1 to 5.");
  }
  emulator::TensorMapSpec spec;
  spec.type = kTensorTypes[request.type];
  spec.rank = static_cast<int>(request.rank);
  spec.address = reinterpret_cast<std::uintptr_t>(request.address);
  for (std::size_t i = 0; i < request.rank; ++i) {
    spec.dimensions[i] = request.extent[i];
    spec.box[i] = request.box[i];
    spec.element_strides[i] = request.element_strides[i];
    if (i > 0) spec.strides_bytes[i - 1] = request.strides[i - 1];
  }
  spec.swizzle = kSwizzles[request.swizzle];
  spec.nan_fill = request.fill != 0;
  const emulator::TensorMap map = emulator::encode_tensor_map(spec);
  std::memcpy(target, map.data(), map.size());
}

}  // namespace
}  // namespace fovea::cuda_shim

using namespace fovea::cuda_shim;
namespace emulator = fovea::emulator;

extern "C" {

int cuInit(unsigned) {
  return driver_call([](Session&) {});
}
int cuDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return 0;
}
int cuGetErrorName(int code, const char** text) {
  *text = driver_name(code);
  return *text == nullptr ? 1 : 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = description(code);
  return *text == nullptr ? 1 : 0;
}

// ---- device and context
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return only_device(ordinal);
}
int cuDeviceGetName(char* text, int length, int device) {
  const std::string name = Session::get().chip().name + " (emulated)";
  if (length > 0) std::strncpy(text, name.c_str(), static_cast<std::size_t>(length));
  return only_device(device);
}
int cuDeviceGetUuid_v2(void* uuid, int device) {
  std::memset(uuid, 0, 16);
  return only_device(device);
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
  *bytes = kGlobalBytes;
  return only_device(device);
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = device_attribute(Session::get(), attribute);
  return only_device(device);
}
int cuDevicePrimaryCtxRetain(void** target, int device) {
  *target = &context;
  return only_device(device);
}
int cuDevicePrimaryCtxRelease_v2(int device) { return only_device(device); }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return only_device(device);
}
int cuCtxCreate_v2(void** target, unsigned, int device) {
  return cuDevicePrimaryCtxRetain(target, device);
}
int cuCtxDestroy_v2(void*) { return 0; }
int cuCtxGetCurrent(void** target) {
  *target = &context;
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void** target) {
  if (target != nullptr) *target = &context;
  return 0;
}
int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cuCtxSynchronize() {
  return driver_call([](Session&) {});
}

// ---- memory
int cuMemAlloc_v2(DevicePointer* target, std::size_t bytes) {
  return driver_call([&](Session& session) {
    if (bytes == 0) throw Failure(Status::invalid_value, "an allocation of no bytes.");
    *target = session.allocate(bytes);
  });
}
int cuMemAllocAsync(DevicePointer* target, std::size_t bytes, void*) {
  return cuMemAlloc_v2(target, bytes);
}
int cuMemFree_v2(DevicePointer address) {
  return driver_call([&](Session& session) { session.free(address); });
}
int cuMemFreeAsync(DevicePointer address, void*) { return cuMemFree_v2(address); }
int cuMemAllocHost_v2(void** target, std::size_t bytes) {
  return driver_call([&](Session& session) { *target = session.allocate_host(bytes, false); });
}
int cuMemHostAlloc(void** target, std::size_t bytes, unsigned) {
  return cuMemAllocHost_v2(target, bytes);
}
int cuMemAllocManaged(DevicePointer* target, std::size_t bytes, unsigned) {
  return driver_call([&](Session& session) {
    *target = reinterpret_cast<std::uintptr_t>(session.allocate_host(bytes, true));
  });
}
int cuMemFreeHost(void* memory) {
  return driver_call([&](Session& session) { session.free_host(memory); });
}
int cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  return driver_call([&](Session& session) {
    *total_bytes = kGlobalBytes;
    *free_bytes = kGlobalBytes - std::min(kGlobalBytes, session.used_bytes());
  });
}
int cuMemGetAddressRange_v2(DevicePointer* base, std::size_t* bytes, DevicePointer address) {
  return driver_call([&](Session& session) {
    const emulator::Machine::Range range = session.allocation(address);
    if (range.bytes == 0) throw Failure(Status::not_found, "an address outside every allocation.");
    if (base != nullptr) *base = range.address;
    if (bytes != nullptr) *bytes = range.bytes;
  });
}
int cuMemcpyHtoDAsync_v2(DevicePointer target, const void* source, std::size_t bytes, void*) {
  return driver_call([&](Session& session) {
    session.copy(pointer(target), source, bytes, Direction::host_to_device);
  });
}
int cuMemcpyHtoD_v2(DevicePointer target, const void* source, std::size_t bytes) {
  return cuMemcpyHtoDAsync_v2(target, source, bytes, nullptr);
}
int cuMemcpyDtoHAsync_v2(void* target, DevicePointer source, std::size_t bytes, void*) {
  return driver_call([&](Session& session) {
    session.copy(target, pointer(source), bytes, Direction::device_to_host);
  });
}
int cuMemcpyDtoH_v2(void* target, DevicePointer source, std::size_t bytes) {
  return cuMemcpyDtoHAsync_v2(target, source, bytes, nullptr);
}
int cuMemcpyDtoDAsync_v2(DevicePointer target, DevicePointer source, std::size_t bytes, void*) {
  return driver_call([&](Session& session) {
    session.copy(pointer(target), pointer(source), bytes, Direction::device_to_device);
  });
}
int cuMemcpyDtoD_v2(DevicePointer target, DevicePointer source, std::size_t bytes) {
  return cuMemcpyDtoDAsync_v2(target, source, bytes, nullptr);
}
int cuMemcpyAsync(DevicePointer target, DevicePointer source, std::size_t bytes, void*) {
  return driver_call([&](Session& session) {
    session.copy(pointer(target), pointer(source), bytes, Direction::any);
  });
}
int cuMemcpy(DevicePointer target, DevicePointer source, std::size_t bytes) {
  return cuMemcpyAsync(target, source, bytes, nullptr);
}
int cuMemsetD8Async(DevicePointer target, unsigned char value, std::size_t count, void*) {
  return driver_call(
      [&](Session& session) { session.fill_pattern(pointer(target), value, 1, count); });
}
int cuMemsetD8_v2(DevicePointer target, unsigned char value, std::size_t count) {
  return cuMemsetD8Async(target, value, count, nullptr);
}
int cuMemsetD16Async(DevicePointer target, unsigned short value, std::size_t count, void*) {
  return driver_call(
      [&](Session& session) { session.fill_pattern(pointer(target), value, 2, count); });
}
int cuMemsetD16_v2(DevicePointer target, unsigned short value, std::size_t count) {
  return cuMemsetD16Async(target, value, count, nullptr);
}
int cuMemsetD32Async(DevicePointer target, unsigned value, std::size_t count, void*) {
  return driver_call(
      [&](Session& session) { session.fill_pattern(pointer(target), value, 4, count); });
}
int cuMemsetD32_v2(DevicePointer target, unsigned value, std::size_t count) {
  return cuMemsetD32Async(target, value, count, nullptr);
}

// ---- modules and functions
int cuModuleLoadData(void** module, const void* image) {
  return driver_call([&](Session& session) {
    Image* loaded = session.add_image(image);
    try {
      loaded->module(session.arch());
    } catch (...) {
      session.remove_image(loaded);
      throw;
    }
    *module = loaded;
  });
}
int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
  return cuModuleLoadData(module, image);
}
int cuModuleLoadFatBinary(void** module, const void* image) {
  return cuModuleLoadData(module, image);
}
int cuModuleUnload(void* module) {
  return driver_call([&](Session& session) { session.remove_image(static_cast<Image*>(module)); });
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return driver_call(
      [&](Session& session) { *function = session.kernel_of(static_cast<Image*>(module), name); });
}
int cuModuleGetGlobal_v2(DevicePointer* address, std::size_t* bytes, void* module,
                         const char* name) {
  return driver_call([&](Session& session) {
    const DevicePointer found = session.address_of({static_cast<Image*>(module), name, 0});
    if (address != nullptr) *address = found;
    if (bytes != nullptr) *bytes = session.allocation(found).bytes;
  });
}
int cuLibraryLoadData(void** library, const void* code, int*, void**, unsigned, int*, void**,
                      unsigned) {
  return cuModuleLoadData(library, code);
}
int cuLibraryUnload(void* library) { return cuModuleUnload(library); }
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  return cuModuleGetFunction(kernel, library, name);
}
int cuLibraryGetModule(void** module, void* library) {
  *module = library;
  return 0;
}
int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  return driver_call([&](Session& session) {
    *value = function_attribute(session, kernel_at(session, function), attribute);
  });
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return driver_call([&](Session& session) {
    set_function_attribute(session, kernel_at(session, function), attribute, value);
  });
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int) {
  return cuFuncSetAttribute(kernel, attribute, value);
}
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuFuncGetName(const char** name, void* function) {
  return driver_call([&](Session& session) { *name = kernel_at(session, function).name.c_str(); });
}
int cuFuncGetParamInfo(void* function, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  return driver_call([&](Session& session) {
    parameter_info(session, kernel_at(session, function), index, offset, bytes);
  });
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void*, void** arguments, void** extra) {
  return launch(
      function,
      launch_config({grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, {}),
      arguments, extra);
}
int cuLaunchCooperativeKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z,
                              unsigned shared_bytes, void* stream, void** arguments) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                        stream, arguments, nullptr);
}
int cuLaunchKernelEx(const abi::DriverLaunch* config, void* function, void** arguments,
                     void** extra) {
  return launch(function,
                launch_config(config->grid, config->block, config->dynamic_shared_bytes,
                              {config->attributes, config->attribute_count}),
                arguments, extra);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads,
                                                std::size_t shared_bytes) {
  return driver_call([&](Session& session) {
    *blocks = session.resident_ctas(kernel_at(session, function), threads, shared_bytes);
  });
}
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void* function, int threads,
                                                         std::size_t shared_bytes, unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared_bytes);
}
int cuOccupancyMaxActiveClusters(int* clusters, void* function, const abi::DriverLaunch* config) {
  return driver_call([&](Session& session) {
    *clusters =
        resident_clusters(session, kernel_at(session, function),
                          launch_config(config->grid, config->block, config->dynamic_shared_bytes,
                                        {config->attributes, config->attribute_count}));
  });
}

int cuTensorMapEncodeTiled(void* map, int type, std::uint32_t rank, void* address,
                           const std::uint64_t* extent, const std::uint64_t* strides,
                           const std::uint32_t* box, const std::uint32_t* element_strides,
                           int interleave, int swizzle, int, int fill) {
  return driver_call([&](Session&) {
    encode({type, rank, address, extent, strides, box, element_strides, interleave, swizzle, fill},
           map);
  });
}
int cuTensorMapReplaceAddress(void* map, void* address) {
  return driver_call([&](Session&) {
    emulator::TensorMapSpec spec;
    const std::span<const std::byte, 128> bytes(static_cast<const std::byte*>(map), 128);
    if (!emulator::decode_tensor_map(bytes, spec)) {
      throw Failure(Status::invalid_value, "a tensor map was not made by cuTensorMapEncodeTiled.");
    }
    spec.address = reinterpret_cast<std::uintptr_t>(address);
    const emulator::TensorMap encoded = emulator::encode_tensor_map(spec);
    std::memcpy(map, encoded.data(), encoded.size());
  });
}
int cuTensorMapEncodeIm2col() {
  return driver_call([](Session&) {
    throw Failure(Status::not_supported, "im2col tensor maps are not emulated.");
  });
}

// ---- streams and events
int cuStreamCreate(void** stream, unsigned flags) {
  return driver_call([&](Session&) { *stream = new Stream{flags, 0}; });
}
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return driver_call([&](Session&) { *stream = new Stream{flags, priority}; });
}
int cuStreamDestroy_v2(void* stream) {
  if (reinterpret_cast<std::uintptr_t>(stream) > 2) delete static_cast<Stream*>(stream);
  return 0;
}
int cuStreamSynchronize(void*) { return cuCtxSynchronize(); }
int cuStreamQuery(void*) { return cuCtxSynchronize(); }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuStreamIsCapturing(void*, int* status) {
  *status = 0;
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  return driver_call([&](Session&) { *event = new Event; });
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int cuEventRecord(void* event, void*) {
  return driver_call([&](Session&) {
    if (event == nullptr) throw Failure(Status::invalid_handle, "an event is null.");
    *static_cast<Event*>(event) = {std::chrono::steady_clock::now(), true};
  });
}
int cuEventSynchronize(void*) { return cuCtxSynchronize(); }
int cuEventQuery(void*) { return cuCtxSynchronize(); }
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  return driver_call([&](Session&) {
    if (begin == nullptr || end == nullptr) {
      throw Failure(Status::invalid_handle, "an event is null.");
    }
    *milliseconds = elapsed_ms(*static_cast<Event*>(begin), *static_cast<Event*>(end));
  });
}
int cuEventElapsedTime_v2(float* milliseconds, void* begin, void* end) {
  return cuEventElapsedTime(milliseconds, begin, end);
}

// ---- by name. A name without a version means the newest function of that name.
int cuGetProcAddress_v2(const char* symbol, void** function, int, std::uint64_t, int* status) {
  constexpr int found = 0, not_found = 1;
  static void* const self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *function = nullptr;
  if (self != nullptr && symbol != nullptr && std::strncmp(symbol, "cu", 2) == 0) {
    for (const char* version : {"_v2", ""}) {
      *function = dlsym(self, (std::string(symbol) + version).c_str());
      if (*function != nullptr) break;
    }
  }
  if (status != nullptr) *status = *function == nullptr ? not_found : found;
  return *function == nullptr ? static_cast<int>(Status::not_found) : 0;
}
int cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
// The tables that the vendor's own runtime asks for are not documented. Who comes here is that
// runtime, linked into the program.
int cuGetExportTable(const void**, const void*) {
  return driver_call([](Session& session) {
    session.refuse_static_runtime();
    throw Quiet{Status::not_supported};
  });
}
}
