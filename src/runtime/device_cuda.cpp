#include <dlfcn.h>

#include <array>
#include <type_traits>

#include "fovea/fovea.hpp"
#include "runtime/device.h"
#include "runtime/driver.h"

namespace fovea::runtime {

namespace driver {

namespace {

Functions open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  if (library == nullptr) {
    throw Unsupported(
        "there is no CUDA driver here (libcuda.so.1 does not open); use an emulated "
        "device or the CPU");
  }
  Functions f{};
  const auto load = [&](auto& function, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) {
      throw Unsupported("the CUDA driver lacks " + std::string(name) +
                        ": it must be release 570 (CUDA 12.8) or later");
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  load(f.init, "cuInit");
  load(f.driver_version, "cuDriverGetVersion");
  load(f.error_name, "cuGetErrorName");
  load(f.error_string, "cuGetErrorString");
  load(f.device_count, "cuDeviceGetCount");
  load(f.device_get, "cuDeviceGet");
  load(f.device_name, "cuDeviceGetName");
  load(f.device_total_memory, "cuDeviceTotalMem_v2");
  load(f.device_attribute, "cuDeviceGetAttribute");
  load(f.context_retain, "cuDevicePrimaryCtxRetain");
  load(f.context_release, "cuDevicePrimaryCtxRelease_v2");
  load(f.context_push, "cuCtxPushCurrent_v2");
  load(f.context_pop, "cuCtxPopCurrent_v2");
  load(f.context_synchronize, "cuCtxSynchronize");
  load(f.context_device, "cuCtxGetDevice");
  load(f.pointer_attribute, "cuPointerGetAttribute");
  load(f.memory_allocate, "cuMemAlloc_v2");
  load(f.memory_free, "cuMemFree_v2");
  load(f.copy_to_device, "cuMemcpyHtoDAsync_v2");
  load(f.copy_to_host, "cuMemcpyDtoHAsync_v2");
  load(f.copy, "cuMemcpyDtoDAsync_v2");
  load(f.fill, "cuMemsetD8Async");
  load(f.module_load, "cuModuleLoadData");
  load(f.module_unload, "cuModuleUnload");
  load(f.module_function, "cuModuleGetFunction");
  load(f.function_set, "cuFuncSetAttribute");
  load(f.function_get, "cuFuncGetAttribute");
  load(f.launch, "cuLaunchKernelEx");
  load(f.tensor_map_encode, "cuTensorMapEncodeTiled");
  load(f.stream_create, "cuStreamCreate");
  load(f.stream_destroy, "cuStreamDestroy_v2");
  load(f.stream_synchronize, "cuStreamSynchronize");
  load(f.stream_wait_event, "cuStreamWaitEvent");
  load(f.event_create, "cuEventCreate");
  load(f.event_destroy, "cuEventDestroy_v2");
  load(f.event_record, "cuEventRecord");
  load(f.event_synchronize, "cuEventSynchronize");
  load(f.event_elapsed, "cuEventElapsedTime");
  if (const Result result = f.init(0); result != 0) {
    const char* name = nullptr;
    f.error_name(result, &name);
    throw Unsupported("the CUDA driver does not start: cuInit gives " +
                      std::string(name != nullptr ? name : std::to_string(result)));
  }
  return f;
}

}  // namespace

const Functions& functions() {
  static const Functions opened = open_driver();
  return opened;
}

}  // namespace driver

namespace {

// Turns a driver's refusal into an exception: "cuMemAlloc of 16 bytes: CUDA_ERROR_..., its text".
// Makes no string before it has to, since run() allocates nothing.
void check(driver::Result result, std::string_view action) {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver::functions().error_name(result, &name);
  driver::functions().error_string(result, &text);
  throw DeviceError(std::string(action) + ": " + (name != nullptr ? name : std::to_string(result)) +
                    (text != nullptr ? std::string(", ") + text : ""));
}

void check(driver::Result result, std::string_view action, std::size_t bytes) {
  if (result != 0) check(result, std::string(action) + " of " + std::to_string(bytes) + " bytes");
}

// Makes a context current on this thread while it lives.
class Current {
 public:
  explicit Current(driver::Context context) {
    check(driver::functions().context_push(context), "cuCtxPushCurrent");
  }
  ~Current() {
    driver::Context previous = nullptr;
    driver::functions().context_pop(&previous);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

class CudaKernel final : public Kernel {
 public:
  CudaKernel(driver::Context context, std::string_view image, std::string_view entry)
      : context_(context) {
    const Current current(context_);
    const auto& f = driver::functions();
    // PTX text needs its terminating zero; a cubin ignores one.
    check(f.module_load(&module_, std::string(image).c_str()), "cuModuleLoadData");
    const std::string name(entry);
    const driver::Result found = f.module_function(&function_, module_, name.c_str());
    if (found != 0) {
      f.module_unload(module_);
      check(found, "cuModuleGetFunction of " + name);
    }
  }
  ~CudaKernel() override {
    const Current current(context_);
    driver::functions().module_unload(module_);
  }
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  driver::Function function() const { return function_; }

 private:
  driver::Context context_;
  driver::ModuleHandle module_ = nullptr;
  driver::Function function_ = nullptr;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int ordinal) {
    const auto& f = driver::functions();
    int count = 0;
    check(f.device_count(&count), "cuDeviceGetCount");
    if (ordinal < 0 || ordinal >= count) {
      throw Unsupported("device is cuda:" + std::to_string(ordinal) + ", but there are " +
                        std::to_string(count) + " CUDA devices here");
    }
    check(f.device_get(&device_, ordinal), "cuDeviceGet");
    read_properties();
    check(f.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  }
  ~CudaDevice() override { driver::functions().context_release(device_); }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const DeviceProperties& properties() const override { return properties_; }

  DeviceAddress allocate(std::size_t bytes) override {
    const Current current(context_);
    driver::DevicePtr address = 0;
    // The driver refuses zero bytes; an empty tensor still wants an address of its own.
    check(driver::functions().memory_allocate(&address, bytes == 0 ? 1 : bytes), "cuMemAlloc",
          bytes);
    return address;
  }

  void free(DeviceAddress address) noexcept override {
    if (address == 0) return;
    const auto& f = driver::functions();
    driver::Context previous = nullptr;
    if (f.context_push(context_) != 0) return;
    f.memory_free(address);
    f.context_pop(&previous);
  }

  bool reaches(DeviceAddress address) const override {
    const Current current(context_);
    unsigned memory_type = 0;
    return driver::functions().pointer_attribute(&memory_type, driver::pointer_memory_type,
                                                 address) == 0;
  }

  void copy_to_device(DeviceAddress target, const void* source, std::size_t bytes,
                      Stream stream) override {
    const Current current(context_);
    check(driver::functions().copy_to_device(target, source, bytes, stream.handle),
          "cuMemcpyHtoDAsync", bytes);
  }

  void copy_to_host(void* target, DeviceAddress source, std::size_t bytes, Stream stream) override {
    const Current current(context_);
    check(driver::functions().copy_to_host(target, source, bytes, stream.handle),
          "cuMemcpyDtoHAsync", bytes);
  }

  void copy(DeviceAddress target, DeviceAddress source, std::size_t bytes, Stream stream) override {
    const Current current(context_);
    check(driver::functions().copy(target, source, bytes, stream.handle), "cuMemcpyDtoDAsync",
          bytes);
  }

  void fill(DeviceAddress target, std::uint8_t byte, std::size_t bytes, Stream stream) override {
    const Current current(context_);
    check(driver::functions().fill(target, byte, bytes, stream.handle), "cuMemsetD8Async", bytes);
  }

  std::shared_ptr<Kernel> load(std::string_view image, std::string_view entry) override {
    const auto kernel = std::make_shared<CudaKernel>(context_, image, entry);
    const auto& f = driver::functions();
    const Current current(context_);
    int static_bytes = 0;
    check(f.function_get(&static_bytes, driver::function_static_shared, kernel->function()),
          "cuFuncGetAttribute of the static shared memory");
    check(f.function_set(kernel->function(), driver::function_max_dynamic_shared,
                         static_cast<int>(properties_.shared_bytes_per_block) - static_bytes),
          "cuFuncSetAttribute of the dynamic shared memory");
    check(f.function_set(kernel->function(), driver::function_non_portable_cluster, 1),
          "cuFuncSetAttribute of the cluster size");
    return kernel;
  }

  void launch(Kernel& kernel, const LaunchConfig& config, std::span<const std::byte> parameters,
              Stream stream) override {
    std::array<driver::LaunchAttribute, 2> attributes{};
    unsigned count = 0;
    if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
      attributes[count].id = driver::attribute_cluster_dimension;
      attributes[count].value.cluster = {config.cluster.x, config.cluster.y, config.cluster.z};
      ++count;
    }
    if (config.overlap_predecessor) {
      attributes[count].id = driver::attribute_programmatic_stream_serialization;
      attributes[count].value.flag = 1;
      ++count;
    }
    const driver::Launch launch{config.grid.x,
                                config.grid.y,
                                config.grid.z,
                                config.block.x,
                                config.block.y,
                                config.block.z,
                                config.dynamic_shared_bytes,
                                stream.handle,
                                attributes.data(),
                                count};
    // By pointer, not as a block of bytes: a parameter's place in the block depends on its
    // alignment, and the driver knows it.
    void* arguments[] = {const_cast<std::byte*>(parameters.data())};
    const Current current(context_);
    check(driver::functions().launch(&launch, static_cast<CudaKernel&>(kernel).function(),
                                     arguments, nullptr),
          "cuLaunchKernelEx");
  }

  core::TensorMap encode_tensor_map(const TensorMapSpec& spec) override {
    check_tensor_map(spec);
    // CUtensorMapDataType, in the order of MapType.
    constexpr int types[] = {0, 1, 2, 3, 6, 9, 7};
    constexpr std::uint32_t element_strides[5] = {1, 1, 1, 1, 1};
    core::TensorMap map{};
    const Current current(context_);
    check(
        driver::functions().tensor_map_encode(
            &map, types[static_cast<int>(spec.type)], static_cast<std::uint32_t>(spec.rank),
            reinterpret_cast<void*>(spec.address), spec.extent.data(), spec.stride_bytes.data() + 1,
            spec.box.data(), element_strides, 0, static_cast<int>(spec.swizzle),
            spec.promotion == MapPromotion::b128 ? driver::l2_promotion_128_bytes
                                                 : driver::l2_promotion_256_bytes,
            0),
        "cuTensorMapEncodeTiled");
    return map;
  }

  Stream create_stream() override {
    const Current current(context_);
    Stream stream;
    check(driver::functions().stream_create(&stream.handle, driver::stream_non_blocking),
          "cuStreamCreate");
    return stream;
  }

  void destroy(Stream stream) noexcept override {
    if (stream.handle != nullptr) driver::functions().stream_destroy(stream.handle);
  }

  void synchronize(Stream stream) override {
    const Current current(context_);
    check(driver::functions().stream_synchronize(stream.handle), "cuStreamSynchronize");
  }

  void synchronize() override {
    const Current current(context_);
    check(driver::functions().context_synchronize(), "cuCtxSynchronize");
  }

  Event create_event() override {
    const Current current(context_);
    Event event;
    check(driver::functions().event_create(&event.handle, 0), "cuEventCreate");
    return event;
  }

  void destroy(Event event) noexcept override {
    if (event.handle != nullptr) driver::functions().event_destroy(event.handle);
  }

  void record(Event event, Stream stream) override {
    const Current current(context_);
    check(driver::functions().event_record(event.handle, stream.handle), "cuEventRecord");
  }

  void wait(Stream stream, Event event) override {
    const Current current(context_);
    check(driver::functions().stream_wait_event(stream.handle, event.handle, 0),
          "cuStreamWaitEvent");
  }

  float elapsed_ms(Event begin, Event end) override {
    const Current current(context_);
    float milliseconds = 0.0f;
    check(driver::functions().event_synchronize(end.handle), "cuEventSynchronize");
    check(driver::functions().event_elapsed(&milliseconds, begin.handle, end.handle),
          "cuEventElapsedTime");
    return milliseconds;
  }

  std::string report(bool) const override { return {}; }
  void set_emulation(const EmulationOptions&) override {}

 private:
  int attribute(int which) const {
    int value = 0;
    check(driver::functions().device_attribute(&value, which, device_), "cuDeviceGetAttribute");
    return value;
  }

  void read_properties() {
    const auto& f = driver::functions();
    std::array<char, 256> name{};
    check(f.device_name(name.data(), static_cast<int>(name.size()), device_), "cuDeviceGetName");
    properties_.name = name.data();
    const int capability = 10 * attribute(driver::device_capability_major) +
                           attribute(driver::device_capability_minor);
    switch (capability) {
      case 90: properties_.arch = "sm_90a"; break;
      case 100: properties_.arch = "sm_100a"; break;
      case 103: properties_.arch = "sm_103a"; break;
      default:
        throw Unsupported(properties_.name + " has compute capability " +
                          std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
                          ", but kernels here need 9.0, 10.0 or 10.3");
    }
    std::size_t memory = 0;
    check(f.device_total_memory(&memory, device_), "cuDeviceTotalMem");
    check(f.driver_version(&properties_.driver_version), "cuDriverGetVersion");
    properties_.memory_bytes = memory;
    properties_.sm_count = attribute(driver::device_multiprocessor_count);
    properties_.l2_bytes = static_cast<std::uint64_t>(attribute(driver::device_l2_cache_size));
    properties_.clock_khz = attribute(driver::device_clock_rate);
    properties_.shared_bytes_per_block =
        static_cast<std::uint32_t>(attribute(driver::device_max_shared_per_block_optin));
  }

  int device_ = 0;
  driver::Context context_ = nullptr;
  DeviceProperties properties_;
};

}  // namespace

int current_cuda_ordinal() {
  int ordinal = 0;
  return driver::functions().context_device(&ordinal) == 0 ? ordinal : 0;
}

std::unique_ptr<Device> open_cuda_device(int ordinal) {
  return std::make_unique<CudaDevice>(ordinal);
}

}  // namespace fovea::runtime
