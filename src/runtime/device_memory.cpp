// Memory, time and names of devices for programs: include/fovea/device.hpp.
#include <span>

#include "fovea/device.hpp"
#include "model/hardware.h"
#include "runtime/devices.h"
#include "runtime/jit.h"
#include "runtime/source.h"
#include "runtime/text.h"

namespace fovea {

namespace {

constexpr core::SpinParams head_start{500'000};

std::shared_ptr<runtime::Kernel> spin_kernel(runtime::Device& device) {
  runtime::KernelSource source;
  source.name = "spin";
  source.include = "device/spin.cuh";
  source.call = "fovea::device::spin";
  source.params = "fovea::core::SpinParams";
  source.threads = core::spin_threads;
  return runtime::load_kernel(device, runtime::default_jit(), runtime::kernel_text(source));
}

runtime::Device& gpu(Device device) {
  require(device == Device::cuda || !runtime::emulated_arch(device).empty(), "device is ",
          name(device), "; it must be cuda or an emulated one");
  return runtime::shared_device(device);
}

}  // namespace

DeviceInfo device_info(Device device) {
  const runtime::DeviceProperties& properties = gpu(device).properties();
  DeviceInfo info{properties.name, properties.arch, properties.sm_count};
  if (const model::Gpu* chip = model::find_gpu(properties.name)) {
    info.peak_tflops_16bit = chip->peak_tflops_16bit;
  }
  return info;
}

void synchronize(Device device) { gpu(device).synchronize(); }

struct DeviceMemory::State {
  State(Device device, std::size_t bytes) : owner(gpu(device)), buffer(owner, bytes) {}
  runtime::Device& owner;
  runtime::DeviceBuffer buffer;
};

DeviceMemory::DeviceMemory(Device device, std::size_t bytes)
    : state_(std::make_unique<State>(device, bytes)) {}
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;

std::byte* DeviceMemory::data() const {
  return reinterpret_cast<std::byte*>(state_->buffer.address());
}

std::size_t DeviceMemory::bytes() const { return state_->buffer.bytes(); }

void DeviceMemory::upload(const void* source, std::size_t count) {
  require(count <= bytes(), "count is ", count, " but the memory has ", bytes(), " bytes");
  state_->owner.copy_to_device(state_->buffer.address(), source, count);
  state_->owner.synchronize(runtime::Stream{});
}

void DeviceMemory::download(void* target, std::size_t count) const {
  require(count <= bytes(), "count is ", count, " but the memory has ", bytes(), " bytes");
  state_->owner.copy_to_host(target, state_->buffer.address(), count);
  state_->owner.synchronize(runtime::Stream{});
}

struct DeviceTimer::State {
  explicit State(Device device)
      : owner(gpu(device)), begin(owner.create_event()), end(owner.create_event()) {}
  ~State() {
    owner.destroy(begin);
    owner.destroy(end);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  runtime::Device& owner;
  std::shared_ptr<runtime::Kernel> spin;  // compiled when it is first asked for
  runtime::Event begin;
  runtime::Event end;
};

DeviceTimer::DeviceTimer(Device device) : state_(std::make_unique<State>(device)) {}
DeviceTimer::~DeviceTimer() = default;

void DeviceTimer::give_head_start() {
  if (!state_->spin) state_->spin = spin_kernel(state_->owner);
  runtime::LaunchConfig launch;
  launch.block.x = core::spin_threads;
  state_->owner.launch(*state_->spin, launch, std::as_bytes(std::span(&head_start, 1)));
}

void DeviceTimer::start() { state_->owner.record(state_->begin); }
void DeviceTimer::stop() { state_->owner.record(state_->end); }
double DeviceTimer::milliseconds() const {
  return static_cast<double>(state_->owner.elapsed_ms(state_->begin, state_->end));
}

}  // namespace fovea
