#include "tests/ptx/twin_driver.h"

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

std::uint64_t Driver::allocate(std::size_t bytes) {
  Pointer address = 0;
  require(function<int(Pointer*, std::size_t)>(library_, "cuMemAlloc_v2")(&address, bytes),
          "cuMemAlloc");
  return address;
}

void Driver::write(std::uint64_t address, const void* source, std::size_t bytes) {
  require(function<int(Pointer, const void*, std::size_t)>(library_, "cuMemcpyHtoD_v2")(
              address, source, bytes),
          "cuMemcpyHtoD");
}

void Driver::read(void* destination, std::uint64_t address, std::size_t bytes) {
  require(function<int(void*, Pointer, std::size_t)>(library_, "cuMemcpyDtoH_v2")(destination,
                                                                                  address, bytes),
          "cuMemcpyDtoH");
}

TensorMap Driver::encode(const TensorMapSpec& spec) {
  // CUtensorMapDataType has the order of TensorType; interleave none, L2 promotion of 256 bytes.
  using Encode = int(void*, int, unsigned, void*, const std::uint64_t*, const std::uint64_t*,
                     const std::uint32_t*, const std::uint32_t*, int, int, int, int);
  struct alignas(64) Aligned {
    TensorMap map;
  } result{};
  require(function<Encode>(library_, "cuTensorMapEncodeTiled")(
              &result, static_cast<int>(spec.type), static_cast<unsigned>(spec.rank),
              reinterpret_cast<void*>(spec.address), spec.dimensions.data(),
              spec.strides_bytes.data(), spec.box.data(), spec.element_strides.data(), 0,
              static_cast<int>(spec.swizzle), 3, spec.nan_fill ? 1 : 0),
          "cuTensorMapEncodeTiled");
  return result.map;
}

Report Driver::launch(const std::string& ptx, const std::string& entry, const LaunchConfig& config,
                      std::span<const std::byte> parameters) {
  void *module = nullptr, *kernel = nullptr;
  require(function<int(void**, const void*)>(library_, "cuModuleLoadData")(&module, ptx.c_str()),
          "cuModuleLoadData");
  require(function<int(void**, void*, const char*)>(library_, "cuModuleGetFunction")(
              &kernel, module, entry.c_str()),
          "cuModuleGetFunction");
  const int shared = static_cast<int>(config.dynamic_shared_bytes);
  constexpr int kMaxDynamicShared = 8;
  require(function<int(void*, int, int)>(library_, "cuFuncSetAttribute")(kernel, kMaxDynamicShared,
                                                                         shared),
          "cuFuncSetAttribute");
  // One pointer per parameter: a packed buffer would have to know where the driver aligns the
  // first.
  std::vector<void*> pointers;
  for (const std::uint32_t offset : Module::parse(ptx).kernel(entry).parameter_offsets) {
    pointers.push_back(const_cast<std::byte*>(parameters.data()) + offset);
  }
  using Launch = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void*, void**, void**);
  require(function<Launch>(library_, "cuLaunchKernel")(
              kernel, config.grid.x, config.grid.y, config.grid.z, config.block.x, config.block.y,
              config.block.z, config.dynamic_shared_bytes, nullptr, pointers.data(), nullptr),
          "cuLaunchKernel");
  require(function<int()>(library_, "cuCtxSynchronize")(), "the kernel");
  function<int(void*)>(library_, "cuModuleUnload")(module);
  return {};
}

std::vector<std::uint64_t> Driver::run_case(const std::string& ptx,
                                            const std::vector<std::uint64_t>& input) {
  std::vector<std::uint64_t> words(32);
  const std::uint64_t pointers[2] = {allocate(input.size() * 8), allocate(words.size() * 8)};
  write(pointers[0], input.data(), input.size() * 8);
  LaunchConfig config;
  config.block.x = 32;
  launch(ptx, "test", config, std::as_bytes(std::span(pointers)));
  read(words.data(), pointers[1], words.size() * 8);
  return words;
}

std::vector<std::uint32_t> Driver::run_program(const std::string& ptx, unsigned grid,
                                               unsigned block) {
  std::vector<std::uint32_t> words(4096, 0);
  const std::uint64_t out = allocate(words.size() * 4);
  write(out, words.data(), words.size() * 4);
  LaunchConfig config;
  config.grid.x = grid;
  config.block.x = block;
  launch(ptx, "test", config, std::as_bytes(std::span(&out, 1)));
  read(words.data(), out, words.size() * 4);
  return words;
}

}  // namespace fovea::emulator::testing
