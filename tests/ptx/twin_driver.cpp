#include "twin_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace fovea::emulator::testing {
namespace {

using Pointer = unsigned long long;  // CUdeviceptr

template <class F>
F* function(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(std::string("libcuda has no ") + name);
  return reinterpret_cast<F*>(symbol);
}

void require(int status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(std::string(what) + " fails with status " + std::to_string(status));
  }
}

}  // namespace

std::string Driver::open() {
  library_ = dlopen("libcuda.so.1", RTLD_NOW);
  if (library_ == nullptr) return "libcuda.so.1 cannot be opened: the twin test needs a GPU.";
  try {
    require(function<int(unsigned)>(library_, "cuInit")(0), "cuInit");
    int device = 0;
    require(function<int(int*, int)>(library_, "cuDeviceGet")(&device, 0), "cuDeviceGet");
    char text[100] = {};
    require(function<int(char*, int, int)>(library_, "cuDeviceGetName")(text, 99, device),
            "cuDeviceGetName");
    name_ = text;
    void* context = nullptr;
    require(function<int(void**, int)>(library_, "cuDevicePrimaryCtxRetain")(&context, device),
            "cuDevicePrimaryCtxRetain");
    require(function<int(void*)>(library_, "cuCtxSetCurrent")(context), "cuCtxSetCurrent");
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

std::vector<std::uint64_t> Driver::run_case(const std::string& ptx,
                                            const std::vector<std::uint64_t>& input) {
  void *module = nullptr, *kernel = nullptr;
  require(function<int(void**, const void*)>(library_, "cuModuleLoadData")(&module, ptx.c_str()),
          "cuModuleLoadData");
  require(function<int(void**, void*, const char*)>(library_, "cuModuleGetFunction")(
              &kernel, module, "test"),
          "cuModuleGetFunction");
  auto* allocate = function<int(Pointer*, std::size_t)>(library_, "cuMemAlloc_v2");
  auto* release = function<int(Pointer)>(library_, "cuMemFree_v2");
  Pointer in = 0, out = 0;
  require(allocate(&in, input.size() * 8), "cuMemAlloc");
  require(allocate(&out, 32 * 8), "cuMemAlloc");
  require(function<int(Pointer, const void*, std::size_t)>(library_, "cuMemcpyHtoD_v2")(
              in, input.data(), input.size() * 8),
          "cuMemcpyHtoD");
  void* parameters[] = {&in, &out};
  using Launch = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void*, void**, void**);
  require(function<Launch>(library_, "cuLaunchKernel")(kernel, 1, 1, 1, 32, 1, 1, 0, nullptr,
                                                       parameters, nullptr),
          "cuLaunchKernel");
  std::vector<std::uint64_t> output(32);
  require(function<int(void*, Pointer, std::size_t)>(library_, "cuMemcpyDtoH_v2")(output.data(),
                                                                                  out, 32 * 8),
          "cuMemcpyDtoH");
  release(in);
  release(out);
  function<int(void*)>(library_, "cuModuleUnload")(module);
  return output;
}

}  // namespace fovea::emulator::testing
