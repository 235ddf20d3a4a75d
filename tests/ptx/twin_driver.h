// The few driver calls of the twin test, from libcuda at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/ptx/kernel_runner.h"

namespace fovea::emulator::testing {

class Driver : public Device {
 public:
  std::string open();  // empty when a GPU is ready, else a sentence
  std::string name() const { return name_; }
  // Kernel "test(in, out)" with one warp; throws std::runtime_error with the driver's words.
  std::vector<std::uint64_t> run_case(const std::string& ptx,
                                      const std::vector<std::uint64_t>& input);
  std::uint64_t allocate(std::size_t bytes) override;
  void write(std::uint64_t address, const void* source, std::size_t bytes) override;
  void read(void* destination, std::uint64_t address, std::size_t bytes) override;
  TensorMap encode(const TensorMapSpec& spec) override;
  Report launch(const std::string& ptx, const std::string& entry, const LaunchConfig& config,
                std::span<const std::byte> parameters) override;  // no cluster

  // Kernel "test(out)" with 4096 zeroed words of output.
  std::vector<std::uint32_t> run_program(const std::string& ptx, unsigned grid, unsigned block);

 private:
  void* library_ = nullptr;
  std::string name_;
};

}  // namespace fovea::emulator::testing
