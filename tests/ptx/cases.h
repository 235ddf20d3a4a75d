// Single-instruction cases: "instruction | types | a,b,...=d ; a,b,...=d" to PTX and back.
//
// Types are of the result and of the sources: b16, b32, b64 or pred. An instruction without '%'
// gets its operands appended; "@100 " in front asks for sm_100a. Results are hexadecimal or
// decimal; ~ before a float result allows a relative error of 2^-20, ^ one of 2^-10.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fovea::emulator::testing {

struct Sample {
  std::vector<std::uint64_t> inputs;
  std::uint64_t expected = 0;
  double tolerance = 0;  // relative, of float results
};

struct InstructionCase {
  std::string file;
  int line = 0;
  std::string instruction;
  bool blackwell = false;
  std::vector<std::string> types;
  std::vector<Sample> samples;

  // Entry "test(in, out)": lane i takes 8-byte inputs from in + 64 i and writes out[i], 8 bytes.
  std::string ptx() const;
  std::vector<std::uint64_t> input_block() const;  // 32 lanes; lanes repeat the samples
  // Empty when sample i of the output is right.
  std::string mismatch(std::size_t i, std::uint64_t output) const;
};

std::vector<InstructionCase> read_cases(const std::string& path);

}  // namespace fovea::emulator::testing
