// Random data in eight bits, its keys and values in pages as a QuantizePlan writes them.
#pragma once

#include <cstdint>

#include "fovea/fp8.hpp"
#include "tools/workload.h"

namespace fovea::tools {

class QuantizedPages {
 public:
  // Of a workload that is neither paged nor in 8 bits, and that must outlive this. Enough for
  // plan(); of the memory little is touched.
  QuantizedPages(Workload& workload, const Quantization& quantization, std::int64_t page_size,
                 std::uint64_t seed);

  // Attention to them, in place of the workload's problem.
  [[nodiscard]] const Problem& problem() const { return problem_; }

  // Quantises the values that the workload has.
  void fill();

 private:
  const Workload& workload_;
  QuantizePlan plan_;
  Quantized codes_;
  Problem problem_;
};

}  // namespace fovea::tools
