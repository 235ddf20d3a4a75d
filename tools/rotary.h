// A rotary embedding of quantised runs on random data: its tables, and q and k as it turns them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fovea/device.hpp"
#include "fovea/fovea.hpp"
#include "tools/problem_options.h"

namespace fovea::tools {

// Tables for positions from 0 on, where the device of the options reads them. Nothing where the
// options ask for none.
class RotaryTables {
 public:
  // Throws where they would turn more columns than head_dim.
  RotaryTables(const ProblemOptions& options, std::int64_t positions, std::int64_t head_dim);

  // The options' own, with these tables, which must outlive it.
  [[nodiscard]] Options on_device(const Options& options) const;
  // The quantisation of the options with tables in host memory.
  [[nodiscard]] Quantization on_host(const Quantization& quantization) const;

 private:
  [[nodiscard]] Rotary tables(const float* cos, const float* sin) const;

  std::int64_t positions_ = 0;
  std::int64_t pairs_ = 0;
  bool interleaved_ = false;
  std::vector<float> cos_, sin_;
  std::optional<DeviceMemory> memory_;  // of both, where a GPU reads them
};

// A problem in host memory with tensors in f32, of which q and k are turned as quantisation turns
// them, in fp64. They point into the vectors.
struct Turned {
  Problem problem;
  std::vector<float> q, k, v, out;
};
[[nodiscard]] Turned turned(const Problem& problem, const Rotary& rotary);

}  // namespace fovea::tools
