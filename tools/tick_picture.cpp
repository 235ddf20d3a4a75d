#include "tools/tick_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/numeric.h"

namespace fovea::tools {
namespace {

constexpr double width = 900.0;  // of the picture, in pixels
constexpr double panel_height = 190.0;
constexpr double margin = 40.0;
constexpr int bins = 160;

float largest_of(std::span<const float> values) {
  float largest = 0.0f;
  for (const float x : values) largest = std::max(largest, std::fabs(x));
  return largest;
}

// Rows times signs times a Hadamard matrix.
std::vector<float> rotated(std::span<const float> values, std::int64_t columns,
                           std::uint64_t seed) {
  const core::RotationSigns signs = core::rotation_signs(seed);
  const auto block = core::rotation_block(static_cast<core::int32>(columns));
  std::vector<float> result(values.begin(), values.end());
  for (std::size_t i = 0; i < result.size(); ++i) {
    const auto column = static_cast<core::int32>(static_cast<std::int64_t>(i) % columns);
    result[i] = core::signed_by(signs, column, result[i]);
  }
  for (std::size_t i = 0; i < result.size(); i += static_cast<std::size_t>(block)) {
    core::hadamard(result.data() + i, block);
  }
  for (float& x : result) x *= core::rotation_norm(block);
  return result;
}

std::vector<float> ticks_of(float scale) {
  std::vector<float> ticks;
  for (core::uint32 code = 0; code < 0x7f; ++code) {
    const float x = core::e4m3_to_float(static_cast<core::uint8>(code)) * scale;
    ticks.push_back(x);
    if (code != 0) ticks.push_back(-x);
  }
  std::sort(ticks.begin(), ticks.end());
  return ticks;
}

std::string panel(std::span<const float> values, double top, double reach,
                  const std::string& title) {
  const TickUse use = tick_use(values);
  const double middle = width / 2.0;
  const double unit = (width / 2.0 - margin) / reach;
  const double base = top + panel_height - 45.0;
  std::string svg = fmt::format(
      "<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"15\">{}</text>\n"
      "<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"12\" fill=\"#555\">scale 2^{:.0f}; 99 % of the "
      "values lie on {} of 253 numbers; rounding costs {:.1e} rms</text>\n",
      margin, top + 18.0, title, margin, top + 35.0, std::log2(static_cast<double>(use.scale)),
      use.ticks_of_most, use.rms_error);
  std::vector<double> counts(bins, 0.0);
  for (const float x : values) {
    const double at = (static_cast<double>(x) / reach + 1.0) / 2.0 * bins;
    counts[static_cast<std::size_t>(std::clamp(at, 0.0, bins - 1.0))] += 1.0;
  }
  const double most = *std::max_element(counts.begin(), counts.end());
  for (int i = 0; i < bins; ++i) {
    if (counts[static_cast<std::size_t>(i)] == 0.0) continue;
    // The logarithm, so that single outliers can be seen.
    const double height = 4.0 + (panel_height - 100.0) *
                                    std::log1p(counts[static_cast<std::size_t>(i)]) /
                                    std::log1p(most);
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#4878a8\"/>\n",
        margin + (width - 2.0 * margin) * i / bins, base - height,
        (width - 2.0 * margin) / bins - 0.5, height);
  }
  svg += "<path stroke=\"#b03030\" stroke-width=\"0.7\" d=\"";
  for (const float tick : ticks_of(use.scale)) {
    const double x = middle + static_cast<double>(tick) * unit;
    if (x < margin || x > width - margin) continue;
    svg += fmt::format("M{:.2f} {:.0f}v12", x, base + 3.0);
  }
  svg += fmt::format(
      "\"/>\n<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"11\" fill=\"#555\">{:.3g}</text>"
      "<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"11\" fill=\"#555\" "
      "text-anchor=\"middle\">0</text>"
      "<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"11\" fill=\"#555\" "
      "text-anchor=\"end\">{:.3g}</text>\n",
      margin, base + 30.0, -reach, middle, base + 30.0, width - margin, base + 30.0, reach);
  return svg;
}

}  // namespace

TickUse tick_use(std::span<const float> values) {
  TickUse use;
  use.scale = core::block_scale(largest_of(values));
  std::vector<float> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const std::size_t tail = sorted.size() / 200;
  const std::vector<float> ticks = ticks_of(use.scale);
  if (!sorted.empty()) {
    use.ticks_of_most = static_cast<int>(
        std::upper_bound(ticks.begin(), ticks.end(), sorted[sorted.size() - 1 - tail]) -
        std::lower_bound(ticks.begin(), ticks.end(), sorted[tail]));
  }
  double squares = 0.0;
  for (const float x : values) {
    const float code = core::e4m3_to_float(core::float_to_e4m3(x / use.scale));
    const double error = static_cast<double>(code * use.scale - x);
    squares += error * error;
  }
  use.rms_error = std::sqrt(squares / static_cast<double>(std::max<std::size_t>(values.size(), 1)));
  return use;
}

std::string tick_picture(std::span<const float> values, std::int64_t columns, std::uint64_t seed) {
  const std::vector<float> after = rotated(values, columns, seed);
  const double reach = static_cast<double>(largest_of(values));
  const double reach_after = static_cast<double>(largest_of(after));
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
             "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\">\n"
             "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
             width, 3.0 * panel_height) +
         panel(values, 0.0, reach, "As they are") +
         panel(after, panel_height, reach, "Rotated, on the same axis") +
         panel(after, 2.0 * panel_height, reach_after, "Rotated, on an axis of its own") +
         "</svg>\n";
}

}  // namespace fovea::tools
