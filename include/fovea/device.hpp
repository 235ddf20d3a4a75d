// Memory and time of the devices that fovea computes on, for programs that have no CUDA of their
// own, and the configurations that a plan chooses from. Everything here is for measuring and for
// small programs; an engine passes its own pointers and streams in a Problem.
//
// What takes a Device throws Error for automatic and cpu, Unsupported where there is no such
// device, and DeviceError when the device fails.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fovea/fovea.hpp"

namespace fovea {

struct DeviceInfo {
  std::string name;
  std::string arch;  // what kernels are compiled for: "sm_90a"
  int multiprocessors = 0;
  double peak_tflops_16bit = 0.0;  // dense products with fp32 sums, by the data sheet; 0: unknown
};

// Of Device::cuda or an emulated one.
[[nodiscard]] DeviceInfo device_info(Device device);

// Waits for everything that was put into any stream of the device.
void synchronize(Device device);

// Device memory that frees itself, with any content at first. One that was moved from may be
// destroyed or assigned to, nothing else.
class DeviceMemory {
 public:
  DeviceMemory(Device device, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&&) noexcept;
  DeviceMemory& operator=(DeviceMemory&&) noexcept;

  [[nodiscard]] std::byte* data() const;  // an address of the device
  [[nodiscard]] std::size_t bytes() const;
  // Copy the first count bytes from or to host memory, in the default stream, and wait until they
  // have arrived. Throw Error for more bytes than there are.
  void upload(const void* source, std::size_t count);
  void download(void* target, std::size_t count) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Time between two points of the default stream; on an emulated device that of the host's clock.
class DeviceTimer {
 public:
  explicit DeviceTimer(Device device);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  // Holds up the stream for half a millisecond: what is put into it meanwhile, start() and stop()
  // included, does not wait for the host.
  void give_head_start();
  void start();
  void stop();
  [[nodiscard]] double milliseconds() const;  // from start() to stop(), both called; waits for it

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// One way to run a problem on a GPU.
struct Configuration {
  std::string text;          // for Options::configuration
  double model_ms = 0.0;     // what the model of the chip says it takes
  std::string binding;       // the unit that takes longest: "tensor cores"
  bool chosen = false;       // what a plan takes by itself
  std::string refusal = {};  // why it cannot be; empty when it can
};

// The configurations of the kernel that computes the problem on a chip: "h100", "h200", "b200",
// "b300", none of which needs to be here, ordered by the model's time, refused ones last. Of the
// options, softmax and eight_bits count. Throws Error for a fault of the problem or another name,
// Unsupported when no kernel of the chip computes the problem. So do the next two.
[[nodiscard]] std::vector<Configuration> configurations(const Problem& problem,
                                                        const Options& options,
                                                        std::string_view chip);

// The same as text: the choice, the candidates with their times, the cycles of each unit.
[[nodiscard]] std::string explain(const Problem& problem, const Options& options,
                                  std::string_view chip);

// The configuration a plan for a GPU takes, and each of its schedule's switches turned over, each
// as text for Options::configuration.
[[nodiscard]] std::vector<std::string> ablations(const Problem& problem, const Options& options,
                                                 std::string_view chip);

// The ways to run a problem's gradients on a GPU that kernels are compiled for as `arch`, such as
// "sm_90a", the chosen one first, each as text for Options::configuration. No GPU needs to be here.
// Throws Error for a fault of the problem, Unsupported where its kernels do not compute them.
[[nodiscard]] std::vector<std::string> backward_configurations(const Problem& problem,
                                                               const Gradients& gradients,
                                                               std::string_view arch);

}  // namespace fovea
