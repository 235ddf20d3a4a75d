// Small tools that instruction handlers share.
#pragma once

#include <string>

#include "emulator/builder.h"
#include "emulator/machine.h"

namespace fovea::emulator {

// Calls f(lane) for every set bit.
template <class F>
inline void for_lanes(u32 mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

inline std::string hex(u64 value) {
  constexpr const char* digits = "0123456789abcdef";
  std::string text;
  do {
    text.insert(text.begin(), digits[value & 15]);
    value >>= 4;
  } while (value != 0);
  return "0x" + text;
}

Step run_lane(Warp& warp, const Inst& inst);

}  // namespace fovea::emulator
