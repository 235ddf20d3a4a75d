// The few driver calls of the twin test, from libcuda at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fovea::emulator::testing {

class Driver {
 public:
  std::string open();  // empty when a GPU is ready, else a sentence
  std::string name() const { return name_; }
  // Kernel "test(in, out)" with one warp; throws std::runtime_error with the driver's words.
  std::vector<std::uint64_t> run_case(const std::string& ptx,
                                      const std::vector<std::uint64_t>& input);
  // Kernel "test(out)" with 4096 zeroed words of output.
  std::vector<std::uint32_t> run_program(const std::string& ptx, unsigned grid, unsigned block);

 private:
  std::vector<std::uint8_t> launch(const std::string& ptx, unsigned grid, unsigned block,
                                   const void* input, std::size_t input_bytes,
                                   std::size_t output_bytes);

  void* library_ = nullptr;
  std::string name_;
};

}  // namespace fovea::emulator::testing
