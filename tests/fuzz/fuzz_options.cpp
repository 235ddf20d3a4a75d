#include <string>
#include <vector>

#include "fovea/fovea.hpp"
#include "tests/fuzz/fuzz_targets.h"
#include "tools/program.h"
#include "tools/text.h"

namespace fovea::test {

void fuzz_options(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::vector<std::string> arguments;
  for (const std::string_view part : tools::split(text, '\n')) arguments.emplace_back(part);
  try {
    tools::Program program;
    const tools::Program::Request request = program.parse(arguments);
    require((request.command != nullptr) != !request.text.empty(), "neither a command nor a text");
  } catch (const Error& error) {
    require_sentence(error.what());
  }
}

}  // namespace fovea::test

FOVEA_FUZZ_ENTRY(fuzz_options)
