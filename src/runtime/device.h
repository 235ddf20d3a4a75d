// The seam: what a backend that runs kernels offers. device_cuda.cpp implements it over the CUDA
// driver, device_emulated.cpp over the emulator; everything above is the same code on both.
//
// Faults are exceptions: Error for an argument the caller can mend, Unsupported where the device is
// not there, DeviceError for what the driver or the emulator reports.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/config.h"
#include "fovea/fovea.hpp"
#include "runtime/nvrtc.h"

namespace fovea::runtime {

using fovea::DeviceError;

// Device memory, as kernels see it.
using DeviceAddress = std::uint64_t;

struct DeviceProperties {
  std::string name;
  std::string arch;  // what to compile for: "sm_90a"
  ImageFormat image_format = ImageFormat::cubin;
  int sm_count = 0;
  std::uint64_t memory_bytes = 0;
  std::uint64_t l2_bytes = 0;
  std::uint32_t shared_bytes_per_block = 0;  // the most dynamic shared memory of a CTA
  int clock_khz = 0;
  int driver_version = 0;  // 13000 is 13.0; 0 when emulated
  bool emulated = false;
};

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  Dim3 grid;
  Dim3 block;
  Dim3 cluster;  // 1, 1, 1: none
  std::uint32_t dynamic_shared_bytes = 0;
  // The kernel may start before its predecessor in the stream has ended (griddepcontrol).
  bool overlap_predecessor = false;
};

enum class MapType : std::uint8_t { u8, u16, u32, s32, f16, bf16, f32 };
enum class MapSwizzle : std::uint8_t { none, b32, b64, b128 };
// How much the L2 fetches where a box misses.
enum class MapPromotion : std::uint8_t { b128, b256 };

// A tiled tensor map, innermost dimension first. Boxes and extents count elements.
struct TensorMapSpec {
  MapType type = MapType::bf16;
  int rank = 2;               // 1..5
  DeviceAddress address = 0;  // multiple of 16
  std::array<std::uint64_t, 5> extent{1, 1, 1, 1, 1};
  std::array<std::uint64_t, 5>
      stride_bytes{};  // of dimensions 1..; multiples of 16; [0] is not used
  std::array<std::uint32_t, 5> box{1, 1, 1, 1,
                                   1};  // 1..256 each; box[0] within the swizzle's width
  MapSwizzle swizzle = MapSwizzle::none;
  MapPromotion promotion = MapPromotion::b256;
};

// Throws Error naming the value that neither driver nor emulator would take.
void check_tensor_map(const TensorMapSpec& spec);

// A queue of work, executed in order. The null handle is the device's default stream; a handle of
// CUDA is a CUstream, which is also what cudaStream_t points to.
struct Stream {
  void* handle = nullptr;
};

struct Event {
  void* handle = nullptr;
};

// A loaded kernel; valid as long as its Device lives.
class Kernel {
 public:
  virtual ~Kernel() = default;
};

// How the emulator orders what the hardware leaves open; see docs/emulator.md.
struct EmulationOptions {
  enum class Order { eager, lazy, random };
  Order order = Order::eager;
  std::uint64_t seed = 0;
  bool checks = true;
  bool in_order_tensor = false;  // tcgen05 products follow each other in the order of issue
  bool ordered_sums = false;     // floating-point sums in global memory need an order
  int sm_count = 0;              // when the device is opened; 0: the chip's
};

// Safe for several threads; an emulated device serves them one after the other. All addresses and
// handles belong to it.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceProperties& properties() const = 0;

  virtual DeviceAddress allocate(std::size_t bytes) = 0;  // 256-byte aligned, contents undefined
  virtual void free(DeviceAddress address) noexcept = 0;  // zero is ignored
  // Whether kernels reach the address: not for memory of the host that the driver does not know.
  virtual bool reaches(DeviceAddress address) const = 0;

  // Host memory must stay untouched until the stream is synchronised.
  virtual void copy_to_device(DeviceAddress target, const void* source, std::size_t bytes,
                              Stream stream = {}) = 0;
  virtual void copy_to_host(void* target, DeviceAddress source, std::size_t bytes,
                            Stream stream = {}) = 0;
  virtual void copy(DeviceAddress target, DeviceAddress source, std::size_t bytes,
                    Stream stream = {}) = 0;
  virtual void fill(DeviceAddress target, std::uint8_t byte, std::size_t bytes,
                    Stream stream = {}) = 0;

  // image is what properties().image_format says; entry the kernel's name in it.
  virtual std::shared_ptr<Kernel> load(std::string_view image, std::string_view entry) = 0;

  // parameters are the bytes of the kernel's parameter block: for the one by-value struct that
  // kernels here take, its bytes. Every fault of an emulated kernel is a DeviceError.
  virtual void launch(Kernel& kernel, const LaunchConfig& config,
                      std::span<const std::byte> parameters, Stream stream = {}) = 0;

  virtual core::TensorMap encode_tensor_map(const TensorMapSpec& spec) = 0;

  virtual Stream create_stream() = 0;
  virtual void destroy(Stream stream) noexcept = 0;
  virtual void synchronize(Stream stream) = 0;
  virtual void synchronize() = 0;  // all streams

  virtual Event create_event() = 0;
  virtual void destroy(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream = {}) = 0;
  virtual void wait(Stream stream, Event event) = 0;  // later work waits for what event recorded
  // Milliseconds between two recorded events; waits for `end`. Host time on the emulated device.
  virtual float elapsed_ms(Event begin, Event end) = 0;

  // What the last launch did, counted by the emulator: a table or JSON. Empty on CUDA.
  virtual std::string report(bool json) const = 0;

  // Of the emulator, from the next launch on; nothing on CUDA.
  virtual void set_emulation(const EmulationOptions& options) = 0;
};

// Device `ordinal` of the CUDA driver, sharing the primary context with the CUDA runtime (and so
// with PyTorch). Throws Unsupported when there is no driver or no such device of compute
// capability 9.0, 10.0 or 10.3.
std::unique_ptr<Device> open_cuda_device(int ordinal = 0);

// The device of the calling thread's current CUDA context; 0 where there is none. Throws
// Unsupported without a driver.
int current_cuda_ordinal();

// arch is "sm_90a", "sm_100a", "sm_103a" or a chip's name: "h200".
std::unique_ptr<Device> open_emulated_device(std::string_view arch,
                                             const EmulationOptions& options = {});

// "cuda", "cuda:1", "emulated:sm_90a". Throws Error for anything else.
std::unique_ptr<Device> open_device(std::string_view name, const EmulationOptions& options = {});

// Device memory that frees itself.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device& device, std::size_t bytes)
      : device_(&device), address_(device.allocate(bytes)), bytes_(bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer() {
    if (device_ != nullptr) device_->free(address_);
  }

  DeviceAddress address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
  }

  Device* device_ = nullptr;
  DeviceAddress address_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace fovea::runtime
