// The backward kernels on an emulated chip as they are, and broken in one synchronising instruction
// at a time.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "core/config_backward.h"
#include "core/types.h"
#include "runtime/device.h"
#include "tests/explained.h"
#include "tests/faults.h"

namespace fovea::tests {

// An emulated chip that keeps the report of the launch whose kernel has the most to do, and may
// change a kernel's text before it is loaded.
class WatchedDevice : public runtime::Device {
 public:
  WatchedDevice(const std::string& name, const runtime::EmulationOptions& options)
      : device_(runtime::open_device(name, options)) {}

  std::function<std::string(std::string)> change = [](std::string text) { return text; };
  nlohmann::json largest;

  const runtime::DeviceProperties& properties() const override { return device_->properties(); }
  runtime::DeviceAddress allocate(std::size_t bytes) override { return device_->allocate(bytes); }
  void free(runtime::DeviceAddress address) noexcept override { device_->free(address); }
  bool reaches(runtime::DeviceAddress address) const override { return device_->reaches(address); }
  void copy_to_device(runtime::DeviceAddress target, const void* source, std::size_t bytes,
                      runtime::Stream stream) override {
    device_->copy_to_device(target, source, bytes, stream);
  }
  void copy_to_host(void* target, runtime::DeviceAddress source, std::size_t bytes,
                    runtime::Stream stream) override {
    device_->copy_to_host(target, source, bytes, stream);
  }
  void copy(runtime::DeviceAddress target, runtime::DeviceAddress source, std::size_t bytes,
            runtime::Stream stream) override {
    device_->copy(target, source, bytes, stream);
  }
  void fill(runtime::DeviceAddress target, std::uint8_t byte, std::size_t bytes,
            runtime::Stream stream) override {
    device_->fill(target, byte, bytes, stream);
  }
  std::shared_ptr<runtime::Kernel> load(std::string_view image, std::string_view entry) override {
    return device_->load(change(std::string(image)), entry);
  }
  void launch(runtime::Kernel& kernel, const runtime::LaunchConfig& config,
              std::span<const std::byte> parameters, runtime::Stream stream) override;
  core::TensorMap encode_tensor_map(const runtime::TensorMapSpec& spec) override {
    return device_->encode_tensor_map(spec);
  }
  runtime::Stream create_stream() override { return device_->create_stream(); }
  void destroy(runtime::Stream stream) noexcept override { device_->destroy(stream); }
  void synchronize(runtime::Stream stream) override { device_->synchronize(stream); }
  void synchronize() override { device_->synchronize(); }
  runtime::Event create_event() override { return device_->create_event(); }
  void destroy(runtime::Event event) noexcept override { device_->destroy(event); }
  void record(runtime::Event event, runtime::Stream stream) override {
    device_->record(event, stream);
  }
  void wait(runtime::Stream stream, runtime::Event event) override { device_->wait(stream, event); }
  float elapsed_ms(runtime::Event begin, runtime::Event end) override {
    return device_->elapsed_ms(begin, end);
  }
  std::string report(bool as_json) const override { return device_->report(as_json); }
  void set_emulation(const runtime::EmulationOptions& options) override {
    device_->set_emulation(options);
  }

 private:
  std::unique_ptr<runtime::Device> device_;
};

// One batch; as many heads of queries as of keys.
struct BackwardShape {
  core::int64 seqlen_q = 200;
  core::int64 seqlen_k = 300;
  core::int32 head_dim = 128;
  core::int32 head_dim_v = 128;
  core::Window window = {};
  core::int32 heads = 1;
};

// Normal inputs in bf16 with out and lse of the oracle; sums in turns.
class BackwardInputs {
 public:
  explicit BackwardInputs(const BackwardShape& shape);

  core::Problem problem;
  core::Gradients gradients;
  std::vector<core::uint16> q, k, v, out, dout;
  std::vector<float> lse;
};

using GradientBits = std::array<std::vector<core::uint16>, 3>;  // dq, dk, dv

// Throws DeviceError for every fault that the emulator finds.
GradientBits run_backward(runtime::Device& device, const BackwardInputs& inputs,
                          const core::BwdConfig& config);

// What a broken kernel is run on: on so many multiprocessors, or on those of the chip.
struct BackwardRun {
  BackwardShape shape;
  int sm_count = 0;
};

// A configuration of the main kernel, to be broken. Where it adds to dq in no order, no more than
// two blocks of keys may add to a row, so that results are the same to the bit.
class BackwardFaultBench {
 public:
  BackwardFaultBench(std::string chip, const core::BwdConfig& config,
                     std::span<const BackwardRun> runs);

  // Breaks it in every `stride`-th way; prints what goes unnoticed, and the table. A fault reported
  // under any order, in any run, is reported.
  FaultTable break_kernel(std::size_t stride, std::span<const Explained> harmless) const;

 private:
  struct Run {
    BackwardInputs inputs;
    int sm_count;
    GradientBits right;
  };

  using Order = runtime::EmulationOptions::Order;
  static constexpr Order orders[] = {Order::lazy, Order::random, Order::eager};

  runtime::EmulationOptions options(const Run& run, Order order) const;
  void require_silence() const;
  FaultOutcome outcome_of(const Mutant& mutant) const;
  bool objects(const Run& run, const std::string& text, Order order, GradientBits& result) const;

  std::string chip_;
  core::BwdConfig config_;
  std::string entry_;
  std::string text_;
  std::vector<Run> runs_;
};

}  // namespace fovea::tests
