// Quantisation of Python's tensors to eight bits: as rows, as the kernels read them, or into pages.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fovea/fp8.hpp"
#include "python/call.h"

namespace fovea::python {

// How to quantise. Keeps the tables of a rotary embedding alive, which every run reads.
class QuantizeSettings {
 public:
  // dtype: "float8_e4m3fn", "float8_e5m2" or "int8"; scales: "tensor", "head" or "block";
  // cos, sin: (positions, pairs), or None.
  QuantizeSettings(const std::string& dtype, const std::string& scales, bool rotate,
                   std::uint64_t seed, nb::handle cos, nb::handle sin, bool interleaved,
                   std::int64_t first_position);

  [[nodiscard]] const Quantization& quantization() const { return quantization_; }
  // ValueError unless the tables are on the call's device.
  void check_device(const Call& call) const;

 private:
  Quantization quantization_;
  std::array<Array, 2> tables_;
};

// A plan of a call: its q, k and v, of which a run takes those that it has somewhere to write.
class Quantizer {
 public:
  // pool.pages = 0: dense or packed. device: of a call on device memory, as attention_on_device()
  // has it; its plans are kept from call to call.
  Quantizer(const Call& call, const QuantizeSettings& settings, ValueLayout values,
            const PagePool& pool, Device device);

  [[nodiscard]] std::size_t workspace_bytes() const { return plan_.workspace_bytes(); }

  // Of q, q_scale, k, v, key_scale, k_scale and v_scale, the scales as Python has them; none of
  // what this plan does not write.
  using Shape = std::optional<std::vector<std::int64_t>>;
  [[nodiscard]] std::vector<Shape> shapes() const;

  // tensors: in the order of shapes() and of these, contiguous, or None for what is left out.
  // block_table, first_keys: of a plan for pages, int32 beside q, or None.
  void run(const Call& call, const std::vector<nb::object>& tensors, nb::handle block_table,
           nb::handle first_keys, nb::handle workspace) const;

 private:
  QuantizePlan plan_;
};

}  // namespace fovea::python
