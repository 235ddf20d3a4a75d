#include "runtime/devices.h"

namespace fovea::runtime {

namespace {

// Never destroyed: at the end of the process the CUDA driver may be gone before a static object is.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Device>, std::less<>> devices;
  EmulationOptions emulation;
};

Registry& registry() {
  static auto* const shared = new Registry;
  return *shared;
}

std::string shared_name(fovea::Device device) {
  if (device == fovea::Device::cuda) return "cuda:" + std::to_string(current_cuda_ordinal());
  return std::string(name(device));
}

}  // namespace

std::string_view emulated_arch(fovea::Device device) {
  switch (device) {
    case fovea::Device::emulated_sm90a: return "sm_90a";
    case fovea::Device::emulated_sm100a: return "sm_100a";
    case fovea::Device::emulated_sm103a: return "sm_103a";
    default: return {};
  }
}

Device& shared_device(fovea::Device device) {
  Registry& shared = registry();
  const std::string key = shared_name(device);
  const std::lock_guard lock(shared.mutex);
  auto found = shared.devices.find(key);
  if (found == shared.devices.end()) {
    found = shared.devices.emplace(key, open_device(key, shared.emulation)).first;
  }
  return *found->second;
}

void set_emulation(const EmulationOptions& options) {
  Registry& shared = registry();
  const std::lock_guard lock(shared.mutex);
  shared.emulation = options;
  for (const auto& [key, device] : shared.devices) device->set_emulation(options);
}

}  // namespace fovea::runtime
