// Samples of the case list: which cases the emulator has the time for, and how many.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "runtime/devices.h"
#include "tests/call.h"

namespace fovea::test {

// Rows x keys, padded to tiles: what the emulator's time goes with.
inline Index cost(const CaseSpec& s) {
  const auto padded = [](Index n, Index tile) { return (n + tile - 1) / tile * tile; };
  return s.batch * s.hq * padded(s.sq, 128) * padded(s.sk, 128);
}

inline std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Of the emulated devices, from now on.
inline void emulate(runtime::EmulationOptions::Order order, std::uint64_t seed) {
  runtime::set_emulation({.order = order, .seed = seed, .checks = true});
}

}  // namespace fovea::test
