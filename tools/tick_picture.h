// A picture of what outliers do to an 8-bit format: the numbers it has, as ticks, under the values
// that have to be rounded to them.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace fovea::tools {

// How a row of numbers fares in e4m3 under one scale.
struct TickUse {
  float scale = 1.0f;
  int ticks_of_most = 0;   // numbers of the format between the 0.5 and 99.5 percent quantiles
  double rms_error = 0.0;  // of rounding
};

[[nodiscard]] TickUse tick_use(std::span<const float> values);

// SVG of two panels: the values (rows of `columns`) as they are under one scale, and rotated by
// signs of `seed` and a Hadamard matrix under one scale.
[[nodiscard]] std::string tick_picture(std::span<const float> values, std::int64_t columns,
                                       std::uint64_t seed);

}  // namespace fovea::tools
