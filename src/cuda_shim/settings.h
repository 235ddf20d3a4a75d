// What `fovea emulate` tells the program that it starts, through one environment variable:
//
//   FOVEA_EMULATE="device=sm_90a,order=random,seed=3,checks=on,report=/tmp/x"
//
// Every key may be missing; `report` takes the rest of the text.
#pragma once

#include <string>
#include <string_view>

#include "emulator/emulator.h"

namespace fovea::cuda_shim {

struct Settings {
  std::string device = "sm_90a";
  emulator::Schedule schedule;
  int sm_count = 0;            // of the emulated chip; 0: its own number
  bool stop_at_first = false;  // end the program at the first launch with a finding
  std::string report;          // file to which each launch adds a line of JSON; empty: none
};

inline constexpr const char* kSettingsVariable = "FOVEA_EMULATE";

// Throws emulator::Error that names the key, its value and what would be right.
Settings parse_settings(std::string_view text);

}  // namespace fovea::cuda_shim
