// What the fuzzers call: any bytes give a value that holds together, or an Error of one sentence.
// Everything else (another exception, a crash, a sanitizer's report) is a finding.
//
// Each fuzz_<target>.cpp is built twice: for the deterministic driver, fuzz_test.cpp, that runs
// with all other tests, and with -DFOVEA_FUZZ=ON (the preset `fuzz`) as a libFuzzer program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string_view>

namespace fovea::test {

// A property that does not hold. No Error: the targets take those for an answer.
class Finding : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw Finding(what);
}

// A message for a person: not empty, short enough, on one line.
inline void require_sentence(std::string_view message) {
  require(!message.empty(), "an Error without a message");
  require(message.size() < 2000, "an Error too long to read");
  for (const char c : message) {
    require(static_cast<unsigned char>(c) >= 0x20, "a control character in an Error");
  }
}

void fuzz_npy(std::span<const std::byte> bytes);
void fuzz_safetensors(std::span<const std::byte> bytes);
// The command line's arguments, separated by line breaks.
void fuzz_options(std::span<const std::byte> bytes);
// PTX: parsed, and every kernel of what parses is launched with a step limit.
void fuzz_ptx(std::span<const std::byte> bytes);

}  // namespace fovea::test

#ifdef FOVEA_LIBFUZZER
#define FOVEA_FUZZ_ENTRY(target)                                                      \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) { \
    fovea::test::target(std::as_bytes(std::span(data, size)));                        \
    return 0;                                                                         \
  }
#else
#define FOVEA_FUZZ_ENTRY(target)
#endif
