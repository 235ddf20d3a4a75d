// Sentences for people: error messages and explanations.
//
// require() formats its parts only when it fails, so that checking allocates nothing.
#pragma once

#include <array>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>

#include "fovea/fovea.hpp"

namespace fovea {

// Prints as "(2, 128, 8, 64)".
struct Tuple {
  const std::array<std::int64_t, 4>& values;
};

inline std::ostream& operator<<(std::ostream& stream, const Tuple& tuple) {
  const char* separator = "(";
  for (const std::int64_t value : tuple.values) {
    stream << separator << value;
    separator = ", ";
  }
  return stream << ")";
}

inline std::ostream& operator<<(std::ostream& stream, DType dtype) { return stream << name(dtype); }

// The parts, one after the other, as a string; in the C locale whatever the program's is.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw Error(text(parts...));
}

}  // namespace fovea
