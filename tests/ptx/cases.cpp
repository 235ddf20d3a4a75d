#include "tests/ptx/cases.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace fovea::emulator::testing {
namespace {

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(trimmed(part));
  return parts;
}

std::uint64_t number(const std::string& text) {
  if (!text.empty() && text[0] == '-')
    return static_cast<std::uint64_t>(std::stoll(text, nullptr, 0));
  return std::stoull(text, nullptr, 0);
}

Sample read_sample(const std::string& text) {
  Sample sample;
  const std::vector<std::string> sides = split(text, '=');
  for (const std::string& input : split(sides.at(0), ',')) sample.inputs.push_back(number(input));
  std::string result = sides.at(1);
  if (result[0] == '~') sample.tolerance = std::ldexp(1.0, -20);
  if (result[0] == '^') sample.tolerance = std::ldexp(1.0, -10);
  if (sample.tolerance > 0) result = result.substr(1);
  sample.expected = number(result);
  return sample;
}

int bits_of(const std::string& type) { return type == "pred" ? 1 : std::stoi(type.substr(1)); }

std::uint64_t masked(std::uint64_t value, const std::string& type) {
  const int bits = bits_of(type);
  return bits == 64 ? value : value & ((std::uint64_t{1} << bits) - 1);
}

}  // namespace

std::vector<InstructionCase> read_cases(const std::string& path) {
  std::vector<InstructionCase> cases;
  std::ifstream file(path);
  int line_number = 0;
  for (std::string line; std::getline(file, line);) {
    ++line_number;
    line = trimmed(line);
    if (line.empty() || line[0] == '#') continue;
    InstructionCase item;
    item.file = path.substr(path.rfind('/') + 1);
    item.line = line_number;
    if (line.substr(0, 5) == "@100 ") {
      item.blackwell = true;
      line = line.substr(5);
    }
    // the instruction itself may hold '|' (two predicates), so the last two bars separate
    const std::size_t last = line.rfind(" | "), first = line.rfind(" | ", last - 1);
    item.instruction = trimmed(line.substr(0, first));
    item.types = split(line.substr(first + 3, last - first - 3), ' ');
    for (const std::string& sample : split(line.substr(last + 3), ';')) {
      item.samples.push_back(read_sample(sample));
    }
    cases.push_back(std::move(item));
  }
  return cases;
}

std::string InstructionCase::ptx() const {
  static constexpr char kNames[] = "dabce";
  std::string text =
      std::string(".version 9.0\n.target ") + (blackwell ? "sm_100a" : "sm_90a") +
      "\n.address_size 64\n.visible .entry test(.param .u64 in, .param .u64 out)\n{\n"
      "  .reg .b64 %in, %out, %at;\n  .reg .b32 %lane;\n";
  for (std::size_t i = 0; i < types.size(); ++i) {
    text += "  .reg ." + types[i] + " %" + kNames[i] + ";\n  .reg .b64 %x" + kNames[i] + ";\n";
  }
  text +=
      "  ld.param.u64 %in, [in];\n  ld.param.u64 %out, [out];\n  mov.u32 %lane, %tid.x;\n"
      "  mul.wide.u32 %at, %lane, 64;\n  add.u64 %in, %in, %at;\n  mul.wide.u32 %at, %lane, 8;\n"
      "  add.u64 %out, %out, %at;\n";
  for (std::size_t i = 1; i < types.size(); ++i) {
    const std::string name(1, kNames[i]);
    const std::string from = "[%in+" + std::to_string(8 * (i - 1)) + "];\n";
    if (types[i] == "pred") {
      text += "  ld.global.u64 %x" + name + ", " + from + "  setp.ne.u64 %" + name + ", %x" + name +
              ", 0;\n";
    } else {
      text += "  ld.global." + types[i] + " %" + name + ", " + from;
    }
  }
  if (instruction.find('%') != std::string::npos) {
    text += "  " + instruction + "\n";
  } else {
    text += "  " + instruction + " %d";
    for (std::size_t i = 1; i < types.size(); ++i) text += std::string(", %") + kNames[i];
    text += ";\n";
  }
  if (types[0] == "pred")
    text += "  selp.u64 %xd, 1, 0, %d;\n";
  else if (types[0] == "b64")
    text += "  mov.b64 %xd, %d;\n";
  else
    text += "  cvt.u64.u" + types[0].substr(1) + " %xd, %d;\n";
  return text + "  st.global.u64 [%out], %xd;\n  ret;\n}\n";
}

std::vector<std::uint64_t> InstructionCase::input_block() const {
  std::vector<std::uint64_t> block(32 * 8, 0);
  for (std::size_t lane = 0; lane < 32; ++lane) {
    const Sample& sample = samples[lane % samples.size()];
    for (std::size_t i = 0; i < sample.inputs.size(); ++i) block[lane * 8 + i] = sample.inputs[i];
  }
  return block;
}

std::string InstructionCase::mismatch(std::size_t i, std::uint64_t output) const {
  const Sample& sample = samples[i];
  const std::uint64_t wanted = masked(sample.expected, types[0]);
  if (output == wanted) return {};
  if (sample.tolerance > 0) {
    const double x = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(output)));
    const double y = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(wanted)));
    if (std::fabs(x - y) <= sample.tolerance * std::fabs(y)) return {};
  }
  char text[200];
  std::string inputs;
  for (const std::uint64_t input : sample.inputs) {
    std::snprintf(text, sizeof text, " %#llx", static_cast<unsigned long long>(input));
    inputs += text;
  }
  std::snprintf(text, sizeof text, " gives %#llx, expected %#llx",
                static_cast<unsigned long long>(output), static_cast<unsigned long long>(wanted));
  return file + ":" + std::to_string(line) + " " + instruction + " of" + inputs + text;
}

}  // namespace fovea::emulator::testing
