#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

#include "emulator/emulator.h"
#include "fovea/fovea.hpp"
#include "runtime/device.h"

namespace fovea::runtime {

namespace {

// The emulator's own objections, in this library's exceptions.
template <typename Action>
auto translate(Action action) {
  try {
    return action();
  } catch (const emulator::Error& fault) {
    throw DeviceError(std::string("emulator: ") + fault.what());
  }
}

class EmulatedKernel final : public Kernel {
 public:
  EmulatedKernel(emulator::Module parsed, std::string_view entry)
      : module(std::move(parsed)), name(entry) {}

  emulator::Module module;
  std::string name;
};

emulator::Dim3 convert(const Dim3& d) { return {d.x, d.y, d.z}; }

// Work is done when it is asked for, so streams are in order by themselves and events are host
// times.
class EmulatedDevice final : public Device {
 public:
  EmulatedDevice(std::string_view arch, const EmulationOptions& options)
      : machine_(translate([&] {
          emulator::Chip chip = emulator::find_chip(arch);
          if (options.sm_count > 0) chip.sm_count = options.sm_count;
          return chip;
        })) {
    const emulator::Chip& chip = machine_.chip();
    properties_.name = chip.name + " (emulated)";
    properties_.arch = chip.arch;
    properties_.image_format = ImageFormat::ptx;
    properties_.sm_count = chip.sm_count;
    properties_.shared_bytes_per_block = chip.shared_bytes_per_cta;
    properties_.emulated = true;
    set_emulation(options);
  }

  const DeviceProperties& properties() const override { return properties_; }

  DeviceAddress allocate(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    return translate([&] { return machine_.allocate(bytes == 0 ? 1 : bytes); });
  }

  bool reaches(DeviceAddress address) const override {
    const std::lock_guard lock(mutex_);
    try {
      char byte = 0;
      machine_.read(&byte, address, 1);
      return true;
    } catch (const emulator::Error&) {
      return false;
    }
  }

  void free(DeviceAddress address) noexcept override {
    if (address == 0) return;
    const std::lock_guard lock(mutex_);
    try {
      machine_.free(address);
    } catch (const emulator::Error&) {
      // An address that was never allocated: nothing to give back.
    }
  }

  void copy_to_device(DeviceAddress target, const void* source, std::size_t bytes,
                      Stream) override {
    const std::lock_guard lock(mutex_);
    if (bytes != 0) translate([&] { machine_.write(target, source, bytes); });
  }

  void copy_to_host(void* target, DeviceAddress source, std::size_t bytes, Stream) override {
    const std::lock_guard lock(mutex_);
    if (bytes != 0) translate([&] { machine_.read(target, source, bytes); });
  }

  void copy(DeviceAddress target, DeviceAddress source, std::size_t bytes, Stream) override {
    if (bytes == 0) return;
    std::string staged(bytes, '\0');
    const std::lock_guard lock(mutex_);
    translate([&] {
      machine_.read(staged.data(), source, bytes);
      machine_.write(target, staged.data(), bytes);
    });
  }

  void fill(DeviceAddress target, std::uint8_t byte, std::size_t bytes, Stream) override {
    const std::lock_guard lock(mutex_);
    if (bytes != 0) translate([&] { machine_.fill(target, byte, bytes); });
  }

  std::shared_ptr<Kernel> load(std::string_view image, std::string_view entry) override {
    return translate([&] {
      emulator::Module module = emulator::Module::parse(image);
      (void)module.kernel(entry);  // throws when there is none of that name
      return std::make_shared<EmulatedKernel>(std::move(module), entry);
    });
  }

  void launch(Kernel& kernel, const LaunchConfig& config, std::span<const std::byte> parameters,
              Stream) override {
    auto& emulated = static_cast<EmulatedKernel&>(kernel);
    const emulator::LaunchConfig launch{convert(config.grid), convert(config.block),
                                        convert(config.cluster), config.dynamic_shared_bytes};
    const std::lock_guard lock(mutex_);
    report_ = translate([&] {
      return machine_.launch(emulated.module, emulated.name, launch, parameters, schedule_);
    });
    if (report_.ok()) return;
    const std::size_t more = report_.faults.size() - 1 + report_.faults_not_listed;
    throw DeviceError(report_.faults.front().text() +
                      (more == 0 ? "" : " (and " + std::to_string(more) + " more faults)"));
  }

  core::TensorMap encode_tensor_map(const TensorMapSpec& spec) override {
    check_tensor_map(spec);
    constexpr emulator::TensorType types[] = {
        emulator::TensorType::uint8,  emulator::TensorType::uint16,  emulator::TensorType::uint32,
        emulator::TensorType::int32,  emulator::TensorType::float16, emulator::TensorType::bfloat16,
        emulator::TensorType::float32};
    emulator::TensorMapSpec own;
    own.type = types[static_cast<int>(spec.type)];
    own.rank = spec.rank;
    own.address = spec.address;
    own.dimensions = spec.extent;
    for (std::size_t i = 0; i < 4; ++i) own.strides_bytes[i] = spec.stride_bytes[i + 1];
    own.box = spec.box;
    constexpr emulator::Swizzle swizzles[] = {emulator::Swizzle::none, emulator::Swizzle::b32,
                                              emulator::Swizzle::b64, emulator::Swizzle::b128};
    own.swizzle = swizzles[static_cast<int>(spec.swizzle)];
    const emulator::TensorMap encoded = translate([&] { return emulator::encode_tensor_map(own); });
    core::TensorMap map;
    static_assert(sizeof map == sizeof encoded);
    std::memcpy(&map, encoded.data(), sizeof map);
    return map;
  }

  Stream create_stream() override { return {}; }
  void destroy(Stream) noexcept override {}
  void synchronize(Stream) override {}
  void synchronize() override {}

  Event create_event() override {
    const std::lock_guard lock(mutex_);
    return {&events_[++last_event_]};
  }
  void destroy(Event event) noexcept override {
    const std::lock_guard lock(mutex_);
    std::erase_if(events_, [&](const auto& entry) { return &entry.second == event.handle; });
  }
  void record(Event event, Stream) override {
    *static_cast<Time*>(event.handle) = std::chrono::steady_clock::now();
  }
  void wait(Stream, Event) override {}
  float elapsed_ms(Event begin, Event end) override {
    return std::chrono::duration<float, std::milli>(*static_cast<Time*>(end.handle) -
                                                    *static_cast<Time*>(begin.handle))
        .count();
  }

  std::string report(bool json) const override {
    const std::lock_guard lock(mutex_);
    return json ? report_.json() : report_.table();
  }

  void set_emulation(const EmulationOptions& options) override {
    const std::lock_guard lock(mutex_);
    schedule_.seed = options.seed;
    schedule_.checks = options.checks;
    schedule_.in_order_tensor = options.in_order_tensor;
    schedule_.ordered_sums = options.ordered_sums;
    switch (options.order) {
      case EmulationOptions::Order::eager: schedule_.policy = emulator::Policy::eager; break;
      case EmulationOptions::Order::lazy: schedule_.policy = emulator::Policy::lazy; break;
      case EmulationOptions::Order::random: schedule_.policy = emulator::Policy::random; break;
    }
  }

 private:
  using Time = std::chrono::steady_clock::time_point;

  mutable std::mutex mutex_;
  emulator::Machine machine_;
  emulator::Schedule schedule_;
  emulator::Report report_;
  DeviceProperties properties_;
  std::map<int, Time> events_;  // a map: handles point into it
  int last_event_ = 0;
};

}  // namespace

std::unique_ptr<Device> open_emulated_device(std::string_view arch,
                                             const EmulationOptions& options) {
  return std::make_unique<EmulatedDevice>(arch, options);
}

}  // namespace fovea::runtime
