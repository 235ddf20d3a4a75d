// Text from outside: numbers and lists read out of it, and messages made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::tools {

// `text` with everything but printable ASCII replaced by '?', cut to `limit` characters with "...".
[[nodiscard]] std::string printable(std::string_view text, std::size_t limit);

// `text` without control characters, so that a message stays on its line. Keeps UTF-8.
[[nodiscard]] std::string one_line(std::string_view text);

[[nodiscard]] std::vector<std::string_view> split(std::string_view text, char separator);

// The whole of `text` as a number; Error names `what` (an option), the text and what would be
// right.
[[nodiscard]] std::int64_t parse_integer(std::string_view what, std::string_view text,
                                         std::int64_t low, std::int64_t high);
[[nodiscard]] std::uint64_t parse_unsigned(std::string_view what, std::string_view text);
// NaN and infinities are numbers here; whether they make sense is for the library to say.
[[nodiscard]] float parse_real(std::string_view what, std::string_view text);

// "1.23 ms", "45.6 us": three significant digits.
[[nodiscard]] std::string duration_text(double seconds);

}  // namespace fovea::tools
