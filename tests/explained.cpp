#include "tests/explained.h"

#include <algorithm>
#include <string>

#include "device/files.h"

namespace fovea::tests {

namespace {

std::string line_of(const std::string& text, int number) {
  std::size_t at = 0;
  for (int i = 1; i < number && at < text.size(); ++i) at = text.find('\n', at) + 1;
  return text.substr(at, text.find('\n', at) - at);
}

// "pipeline.h:36" -> that line of a header that kernels are compiled with.
std::string source_line(const std::string& place) {
  const std::size_t colon = place.rfind(':');
  const std::string file = "/" + place.substr(0, colon);
  for (const device::File& header : device::files()) {
    const std::string name = "/" + std::string(header.name);
    if (name.size() >= file.size() && name.ends_with(file)) {
      return line_of(std::string(header.text), std::stoi(place.substr(colon + 1)));
    }
  }
  return {};
}

}  // namespace

const char* explanation(const Mutant& mutant, std::span<const Explained> list) {
  std::string around;
  for (std::size_t at = 0; at < mutant.where.size();) {
    const std::size_t end = std::min(mutant.where.find(", ", at), mutant.where.size());
    around += source_line(mutant.where.substr(at, end - at)) + "\n";
    at = end + 2;
  }
  for (const Explained& known : list) {
    if (mutant.kind == known.kind && around.find(known.source) != std::string::npos)
      return known.reason;
  }
  return nullptr;
}

}  // namespace fovea::tests
