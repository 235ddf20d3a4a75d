#include "tools/text.h"

#include <fmt/format.h>

#include <charconv>
#include <system_error>

#include "fovea/fovea.hpp"

namespace fovea::tools {
namespace {

constexpr std::size_t value_limit = 40;

template <typename Number>
bool parse_whole(std::string_view text, Number& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && !text.empty();
}

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  for (const char c : text.substr(0, limit)) out.push_back(c >= ' ' && c <= '~' ? c : '?');
  if (text.size() > limit) out += "...";
  return out;
}

std::string one_line(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    out.push_back(code < 0x20 || code == 0x7f ? ' ' : c);
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::int64_t parse_integer(std::string_view what, std::string_view text, std::int64_t low,
                           std::int64_t high) {
  std::int64_t value = 0;
  if (!parse_whole(text, value) || value < low || value > high) {
    throw Error(fmt::format("{} is '{}'; an integer from {} to {} is needed", what,
                            printable(text, value_limit), low, high));
  }
  return value;
}

std::uint64_t parse_unsigned(std::string_view what, std::string_view text) {
  std::uint64_t value = 0;
  if (!parse_whole(text, value)) {
    throw Error(fmt::format("{} is '{}'; an integer from 0 to 2^64 - 1 is needed", what,
                            printable(text, value_limit)));
  }
  return value;
}

float parse_real(std::string_view what, std::string_view text) {
  float value = 0.0f;
  if (!parse_whole(text, value)) {
    throw Error(fmt::format("{} is '{}'; a number such as 0.125 that fp32 can hold is needed", what,
                            printable(text, value_limit)));
  }
  return value;
}

std::string duration_text(double seconds) {
  if (seconds < 0.9995e-3) return fmt::format("{:.3g} us", seconds * 1e6);
  if (seconds < 0.9995) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.4g} s", seconds);
}

}  // namespace fovea::tools
