// Registration of device code, and launches.
#include <array>
#include <cstring>
#include <vector>

#include "cuda_shim/abi.h"
#include "cuda_shim/launch.h"
#include "cuda_shim/runtime.h"

namespace fovea::cuda_shim {
namespace {

struct PushedConfiguration {
  abi::Dim3 grid, block;
  std::size_t shared_bytes;
  void* stream;
};
thread_local std::vector<PushedConfiguration> pushed;

int launch(const void* function, abi::Dim3 grid, abi::Dim3 block, void** arguments,
           std::size_t shared_bytes) {
  return runtime_call([&](Session& session) {
    session.launch(session.kernel(function), launch_config(grid, block, shared_bytes, {}),
                   arguments, nullptr);
  });
}

emulator::LaunchConfig config_of(const abi::RuntimeLaunch& launch) {
  return launch_config(launch.grid, launch.block, launch.dynamic_shared_bytes,
                       {launch.attributes, launch.attribute_count});
}

}  // namespace
}  // namespace fovea::cuda_shim

using namespace fovea::cuda_shim;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  void** handle = nullptr;
  runtime_call([&](Session& session) {
    const auto* fat = static_cast<const abi::FatWrapper*>(wrapper);
    if (fat->magic != abi::kFatWrapperMagic || fat->version >= abi::kFatWrapperLinked) {
      throw Failure(Status::invalid_image,
                    "the program's device code was linked separately (nvcc -rdc=true), which is "
                    "not emulated; compile it with -rdc=false.");
    }
    handle = reinterpret_cast<void**>(session.add_image(fat->data));
  });
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) {
  runtime_call([&](Session& session) { session.remove_image(reinterpret_cast<Image*>(handle)); });
}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** handle, const char* host_function, char*, const char* name, int,
                            void*, void*, void*, void*, int*) {
  runtime_call([&](Session& session) {
    session.add_kernel(reinterpret_cast<Image*>(handle), name, host_function);
  });
}
void __cudaRegisterVar(void** handle, char* host_variable, char*, const char* name, int,
                       std::size_t bytes, int, int) {
  runtime_call([&](Session& session) {
    session.add_variable(reinterpret_cast<Image*>(handle), name, bytes, host_variable);
  });
}
void __cudaRegisterManagedVar(void**, void**, char*, const char* name, int, std::size_t, int, int) {
  runtime_call([&](Session&) {
    throw Failure(Status::not_supported, std::string("variable ") + name +
                                             " is __managed__, which is not emulated; allocate it "
                                             "with cudaMallocManaged.");
  });
}

unsigned __cudaPushCallConfiguration(abi::Dim3 grid, abi::Dim3 block, std::size_t shared_bytes,
                                     void* stream) {
  pushed.push_back({grid, block, shared_bytes, stream});
  return 0;
}
int __cudaPopCallConfiguration(abi::Dim3* grid, abi::Dim3* block, std::size_t* shared_bytes,
                               void** stream) {
  if (pushed.empty()) return static_cast<int>(Status::invalid_configuration);
  const PushedConfiguration top = pushed.back();
  pushed.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *stream = top.stream;
  return 0;
}

int cudaLaunchKernel(const void* function, abi::Dim3 grid, abi::Dim3 block, void** arguments,
                     std::size_t shared_bytes, void*) {
  return launch(function, grid, block, arguments, shared_bytes);
}
int __cudaLaunchKernel(const void* function, abi::Dim3 grid, abi::Dim3 block, void** arguments,
                       std::size_t shared_bytes, void*) {
  return launch(function, grid, block, arguments, shared_bytes);
}
int cudaLaunchCooperativeKernel(const void* function, abi::Dim3 grid, abi::Dim3 block,
                                void** arguments, std::size_t shared_bytes, void*) {
  return launch(function, grid, block, arguments, shared_bytes);
}
int cudaLaunchKernelExC(const abi::RuntimeLaunch* config, const void* function, void** arguments) {
  return runtime_call([&](Session& session) {
    session.launch(session.kernel(function), config_of(*config), arguments, nullptr);
  });
}

int cudaFuncGetAttributes(abi::FunctionAttributes* attributes, const void* function) {
  return runtime_call([&](Session& session) {
    Kernel& kernel = session.kernel(function);
    const auto get = [&](int which) { return function_attribute(session, kernel, which); };
    *attributes = {};
    attributes->shared_bytes = static_cast<std::size_t>(get(abi::function_shared_bytes));
    attributes->max_threads = get(abi::function_max_threads);
    attributes->registers = get(abi::function_registers);
    attributes->ptx_version = get(abi::function_ptx_version);
    attributes->binary_version = get(abi::function_binary_version);
    attributes->max_dynamic_shared_bytes = get(abi::function_max_dynamic_shared);
    attributes->shared_carveout = -1;
    attributes->cluster_must_be_set = get(abi::function_cluster_must_be_set);
    for (int i = 0; i < 3; ++i) {
      attributes->required_cluster[i] = get(abi::function_required_cluster_x + i);
    }
    attributes->non_portable_cluster = get(abi::function_non_portable_cluster);
  });
}
int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  return runtime_call([&](Session& session) {
    set_function_attribute(session, session.kernel(function), attribute, value);
  });
}
int cudaKernelSetAttributeForDevice(const void* kernel, int attribute, int value, int) {
  return cudaFuncSetAttribute(kernel, attribute, value);
}
int cudaFuncSetCacheConfig(const void*, int) { return 0; }
int cudaFuncSetSharedMemConfig(const void*, int) { return 0; }
int cudaFuncGetName(const char** name, const void* function) {
  return runtime_call([&](Session& session) { *name = session.kernel(function).name.c_str(); });
}
int cudaFuncGetParamInfo(const void* function, std::size_t index, std::size_t* offset,
                         std::size_t* bytes) {
  return runtime_call([&](Session& session) {
    parameter_info(session, session.kernel(function), index, offset, bytes);
  });
}
int cudaGetFuncBySymbol(void** target, const void* symbol) {
  return runtime_call([&](Session& session) { *target = &session.kernel(symbol); });
}
int cudaGetKernel(void** target, const void* symbol) {
  return runtime_call([&](Session& session) { *target = &session.kernel(symbol); });
}
int __cudaGetKernel(void** target, const void* symbol) { return cudaGetKernel(target, symbol); }

int cudaLibraryLoadData(void** library, const void* code, int*, void**, unsigned, int*, void**,
                        unsigned) {
  return runtime_call([&](Session& session) { *library = session.add_image(code); });
}
int cudaLibraryUnload(void* library) {
  return runtime_call(
      [&](Session& session) { session.remove_image(static_cast<Image*>(library)); });
}
int cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  return runtime_call(
      [&](Session& session) { *kernel = session.kernel_of(static_cast<Image*>(library), name); });
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                  std::size_t shared_bytes) {
  return runtime_call([&](Session& session) {
    *blocks = session.resident_ctas(session.kernel(function), threads, shared_bytes);
  });
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function,
                                                           int threads, std::size_t shared_bytes,
                                                           unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared_bytes);
}
int cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                   const abi::RuntimeLaunch* config) {
  return runtime_call([&](Session& session) {
    *clusters = resident_clusters(session, session.kernel(function), config_of(*config));
  });
}
int cudaOccupancyMaxPotentialClusterSize(int* size, const void* function,
                                         const abi::RuntimeLaunch*) {
  return runtime_call(
      [&](Session& session) { *size = session.kernel(function).non_portable_cluster ? 16 : 8; });
}
int cudaOccupancyAvailableDynamicSMemPerBlock(std::size_t* bytes, const void* function, int blocks,
                                              int) {
  return runtime_call([&](Session& session) {
    *bytes = shared_bytes_for(session, session.kernel(function), blocks);
  });
}
}
