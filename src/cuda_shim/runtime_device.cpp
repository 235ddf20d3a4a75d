// The device: its properties, errors, versions, and the way to the driver's functions.
#include <algorithm>
#include <cstring>
#include <set>
#include <type_traits>

#include "cuda_shim/abi.h"
#include "cuda_shim/launch.h"
#include "cuda_shim/runtime.h"

// In the driver's replacement.
extern "C" int cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                   std::uint64_t flags, int* status);

namespace fovea::cuda_shim {

int& last_error() {
  thread_local int code = 0;
  return code;
}

int not_served(const char* name) noexcept {
  return runtime_call([&](Session&) {
    static std::set<std::string> said;
    const std::string text = std::string(name) + "() is not served by the emulated runtime.";
    if (said.insert(name).second) throw Failure(Status::not_supported, text);
    throw Quiet{Status::not_supported};
  });
}

namespace {

template <typename Properties>
Properties properties(const Session& session) {
  const auto get = [&](int attribute) { return device_attribute(session, attribute); };
  const auto size = [&](int attribute) { return static_cast<std::size_t>(get(attribute)); };
  Properties p;
  std::memset(&p, 0, sizeof p);
  const std::string name = session.chip().name + " (emulated)";
  std::copy_n(name.begin(), std::min(name.size(), sizeof p.name - 1), p.name);
  p.global_bytes = kGlobalBytes;
  p.shared_bytes_per_block = size(8);
  p.registers_per_block = get(12);
  p.warp_size = get(10);
  p.memory_pitch = size(11);
  p.max_threads_per_block = get(1);
  for (int i = 0; i < 3; ++i) {
    p.max_block[i] = get(2 + i);
    p.max_grid[i] = get(5 + i);
  }
  p.constant_bytes = size(9);
  p.major = get(75);
  p.minor = get(76);
  p.texture_alignment = size(14);
  p.texture_pitch_alignment = size(51);
  p.sm_count = get(16);
  p.can_map_host_memory = get(19);
  p.surface_alignment = size(30);
  p.concurrent_kernels = get(31);
  p.ecc = get(32);
  p.copy_engines = get(40);
  p.unified_addressing = get(41);
  p.memory_bus_bits = get(37);
  p.l2_bytes = get(38);
  p.threads_per_sm = get(39);
  p.stream_priorities = get(78);
  p.global_l1 = get(79);
  p.local_l1 = get(80);
  p.shared_bytes_per_sm = size(81);
  p.registers_per_sm = get(82);
  p.managed_memory = get(83);
  p.concurrent_managed_access = get(89);
  p.preemption = get(90);
  p.registered_host_pointer = get(91);
  p.cooperative_launch = get(95);
  p.shared_bytes_per_block_optin = size(97);
  p.blocks_per_sm = get(106);
  p.reserved_shared_bytes_per_block = size(111);
  p.host_register = get(99);
  p.memory_pools = get(115);
  p.cluster_launch = get(120);
  if constexpr (std::is_same_v<Properties, abi::DeviceProperties12>) {
    p.clock_khz = get(13);
    p.device_overlap = get(15);
    p.memory_clock_khz = get(36);
    p.single_to_double = get(87);
  }
  return p;
}

int device_must_be_zero(int device) {
  return runtime_call([&](Session&) {
    if (device == 0) return;
    throw Failure(Status::invalid_device,
                  "device " + std::to_string(device) + " is named; there is one, 0.");
  });
}

int entry_point(const char* symbol, void** function, int version, unsigned long long flags,
                int* query) {
  int found = 0;
  const int code = cuGetProcAddress_v2(symbol, function, version, flags, &found);
  if (query != nullptr) *query = found;
  // A name that is not there is no error of the call; the query's result says so.
  return code == static_cast<int>(Status::not_found) ? 0 : code;
}

}  // namespace
}  // namespace fovea::cuda_shim

using namespace fovea::cuda_shim;

extern "C" {

int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaSetDevice(int device) { return device_must_be_zero(device); }
int cudaInitDevice(int device, unsigned, unsigned) { return device_must_be_zero(device); }
int cudaChooseDevice(int* device, const void*) { return cudaGetDevice(device); }
int cudaSetDeviceFlags(unsigned) { return 0; }
int cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return 0;
}
int cudaSetValidDevices(int*, int) { return 0; }
int cudaDeviceSynchronize() {
  return static_cast<int>(guarded([](Session&) {}));
}
int cudaDeviceReset() {
  Session::get().reset();
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  const int code = device_must_be_zero(device);
  if (code == 0) *value = device_attribute(Session::get(), attribute);
  return code;
}
// Under this name version 12 has the structure of version 11, which is not served.
#if FOVEA_CUDART_MAJOR >= 13
int cudaGetDeviceProperties(abi::DeviceProperties13* target, int device) {
  const int code = device_must_be_zero(device);
  if (code == 0) *target = properties<abi::DeviceProperties13>(Session::get());
  return code;
}
#endif
int cudaGetDeviceProperties_v2(abi::DeviceProperties12* target, int device) {
  const int code = device_must_be_zero(device);
  if (code == 0) *target = properties<abi::DeviceProperties12>(Session::get());
  return code;
}
int cudaDeviceGetPCIBusId(char* text, int length, int) {
  if (length > 0) std::strncpy(text, "0000:00:00.0", static_cast<std::size_t>(length));
  return 0;
}
int cudaDeviceGetByPCIBusId(int* device, const char*) { return cudaGetDevice(device); }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return 0;
}
int cudaDeviceGetLimit(std::size_t* value, int) {
  *value = 0;
  return 0;
}
int cudaDeviceSetLimit(int, std::size_t) { return 0; }
int cudaDeviceGetCacheConfig(int* config) {
  *config = 0;
  return 0;
}
int cudaDeviceSetCacheConfig(int) { return 0; }
int cudaDeviceGetSharedMemConfig(int* config) {
  *config = 0;
  return 0;
}
int cudaDeviceSetSharedMemConfig(int) { return 0; }
int cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}
int cudaCtxResetPersistingL2Cache() { return 0; }
int cudaProfilerStart() { return 0; }
int cudaProfilerStop() { return 0; }

int cudaGetLastError() {
  const int sticky = static_cast<int>(Session::get().sticky());
  const int code = sticky != 0 ? sticky : last_error();
  last_error() = 0;
  return code;
}
int cudaPeekAtLastError() {
  const int sticky = static_cast<int>(Session::get().sticky());
  return sticky != 0 ? sticky : last_error();
}
const char* cudaGetErrorName(int code) {
  const char* name = runtime_name(code);
  return name == nullptr ? "unrecognized error code" : name;
}
const char* cudaGetErrorString(int code) {
  const char* text = description(code);
  return text == nullptr ? "unrecognized error code" : text;
}
int cudaDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return 0;
}
int cudaRuntimeGetVersion(int* version) {
  *version = FOVEA_CUDART_MAJOR * 1000;
  return 0;
}
int cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                            int* query) {
  return entry_point(symbol, function, kCudaVersion, flags, query);
}
int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                     unsigned long long flags, int* query) {
  return entry_point(symbol, function, static_cast<int>(version), flags, query);
}
}
