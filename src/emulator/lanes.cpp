#include "emulator/lanes.h"

namespace fovea::emulator {
namespace {

#if defined(FOVEA_EMULATOR_AVX2)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

}  // namespace

LaneFunction lane_function(LaneOp op) {
  static const LaneFunction* const table =
#if defined(FOVEA_EMULATOR_AVX2)
      has_avx2() ? avx2::kLaneFunctions :
#endif
                 baseline::kLaneFunctions;
  return table[static_cast<std::size_t>(op)];
}

ProductFunction product_function() {
#if defined(FOVEA_EMULATOR_AVX2)
  if (has_avx2()) return avx2::product;
#endif
  return baseline::product;
}

}  // namespace fovea::emulator
