// The devices of this process that plans share: each is opened at its first use and kept, so that a
// plan may refer to it for ever.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "fovea/fovea.hpp"
#include "runtime/device.h"

namespace fovea::runtime {

// What `device` compiles for: "sm_90a". Empty for cuda, whose devices have to be asked.
std::string_view emulated_arch(fovea::Device device);

// The emulated devices are one chip each. cuda is the device of the calling thread's current
// context, or else device 0. Throws Unsupported where there is no such device.
Device& shared_device(fovea::Device device);

// How the shared emulated devices order what the hardware leaves open, from the next launch on.
void set_emulation(const EmulationOptions& options);

// What is compiled for a shared device once and then used by every plan that needs it, for ever.
template <typename Program>
class SharedPrograms {
 public:
  template <typename Make>
  std::shared_ptr<const Program> get(Device& device, const std::string& key, const Make& make) {
    const std::pair<Device*, std::string> place(&device, key);
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = programs_.find(place); found != programs_.end()) return found->second;
    }
    std::shared_ptr<const Program> made = make();  // slow, and others may make theirs meanwhile
    const std::lock_guard lock(mutex_);
    return programs_.emplace(place, std::move(made)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<Device*, std::string>, std::shared_ptr<const Program>> programs_;
};

}  // namespace fovea::runtime
