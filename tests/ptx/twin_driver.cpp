#include "twin_driver.h"

#include <dlfcn.h>

#include <cstring>
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

// With no input the kernel takes the output's address alone.
std::vector<std::uint8_t> Driver::launch(const std::string& ptx, unsigned grid, unsigned block,
                                         const void* input, std::size_t input_bytes,
                                         std::size_t output_bytes) {
  auto call = [&](auto* entry, const char* what, auto... arguments) {
    require(entry(arguments...), what);
  };
  void *module = nullptr, *kernel = nullptr;
  call(function<int(void**, const void*)>(library_, "cuModuleLoadData"), "cuModuleLoadData",
       &module, static_cast<const void*>(ptx.c_str()));
  call(function<int(void**, void*, const char*)>(library_, "cuModuleGetFunction"),
       "cuModuleGetFunction", &kernel, module, "test");
  auto* allocate = function<int(Pointer*, std::size_t)>(library_, "cuMemAlloc_v2");
  auto* release = function<int(Pointer)>(library_, "cuMemFree_v2");
  auto* upload = function<int(Pointer, const void*, std::size_t)>(library_, "cuMemcpyHtoD_v2");
  Pointer in = 0, out = 0;
  std::vector<std::uint8_t> output(output_bytes, 0);
  call(allocate, "cuMemAlloc", &out, output_bytes);
  call(upload, "cuMemcpyHtoD", out, static_cast<const void*>(output.data()), output_bytes);
  if (input_bytes != 0) {
    call(allocate, "cuMemAlloc", &in, input_bytes);
    call(upload, "cuMemcpyHtoD", in, input, input_bytes);
  }
  void* both[] = {&in, &out};
  void* only[] = {&out};
  using Launch = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void*, void**, void**);
  require(function<Launch>(library_, "cuLaunchKernel")(kernel, grid, 1, 1, block, 1, 1, 0, nullptr,
                                                       input_bytes != 0 ? both : only, nullptr),
          "cuLaunchKernel");
  call(function<int(void*, Pointer, std::size_t)>(library_, "cuMemcpyDtoH_v2"), "cuMemcpyDtoH",
       static_cast<void*>(output.data()), out, output_bytes);
  if (in != 0) release(in);
  release(out);
  function<int(void*)>(library_, "cuModuleUnload")(module);
  return output;
}

std::vector<std::uint64_t> Driver::run_case(const std::string& ptx,
                                            const std::vector<std::uint64_t>& input) {
  const std::vector<std::uint8_t> bytes =
      launch(ptx, 1, 32, input.data(), input.size() * 8, 32 * 8);
  std::vector<std::uint64_t> words(32);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

std::vector<std::uint32_t> Driver::run_program(const std::string& ptx, unsigned grid,
                                               unsigned block) {
  const std::vector<std::uint8_t> bytes = launch(ptx, grid, block, nullptr, 0, 4096 * 4);
  std::vector<std::uint32_t> words(4096);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

}  // namespace fovea::emulator::testing
