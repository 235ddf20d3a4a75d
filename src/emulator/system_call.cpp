// Functions that the CUDA runtime provides to kernels: vprintf and __assertfail.
#include "emulator/system_call.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "emulator/builder.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

constexpr std::size_t kLongestText = 4096;
// What a device's print buffer holds by default; the rest of a kernel's output is dropped.
constexpr std::size_t kOutputBytes = std::size_t{1} << 20;

// Bytes of the thread's memory, read as a load through a generic address would.
template <typename T>
bool read(Warp& warp, const Inst& inst, u64 address, int lane, T& value) {
  const Place place = resolve(warp, inst, Space::none, address, sizeof(T), lane, false);
  if (place.data == nullptr) return false;
  std::memcpy(&value, place.data, sizeof(T));
  return true;
}

std::string text_at(Warp& warp, const Inst& inst, u64 address, int lane) {
  std::string text;
  for (char c = 0; text.size() < kLongestText && read(warp, inst, address, lane, c) && c != 0;
       ++address) {
    text += c;
  }
  return text;
}

u64 argument(Warp& warp, u32 frame_offset, int lane, u32 bytes) {
  const u8* frame = warp.cta->local.data() +
                    (u64{warp.index} * 32 + static_cast<u64>(lane)) * warp.program->local_bytes;
  u64 value = 0;
  std::memcpy(&value, frame + frame_offset, bytes);
  return value;
}

// The arguments of vprintf lie in the thread's memory one after another, each aligned to its size.
class PrintArguments {
 public:
  PrintArguments(Warp& warp, const Inst& inst, int lane, u64 address)
      : warp_(warp), inst_(inst), lane_(lane), at_(address) {}
  template <typename T>
  T next() {
    at_ = (at_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    T value{};
    read(warp_, inst_, at_, lane_, value);
    at_ += sizeof(T);
    ++count_;
    return value;
  }
  std::string text() { return text_at(warp_, inst_, next<u64>(), lane_); }
  u32 count() const { return count_; }

 private:
  Warp& warp_;
  const Inst& inst_;
  int lane_;
  u64 at_;
  u32 count_ = 0;
};

// One conversion: %[flags][width][.precision][length]letter.
struct Conversion {
  std::string flags;
  int width = -1, precision = -1;
  bool wide = false;  // l, ll, j, z or t: 8 bytes
  char letter = 0;
};

Conversion read_conversion(const std::string& format, std::size_t& at, PrintArguments& arguments) {
  Conversion result;
  const auto number = [&] {
    if (at < format.size() && format[at] == '*') {
      ++at;
      return static_cast<int>(arguments.next<i32>());
    }
    int value = 0;
    for (; at < format.size() && std::isdigit(static_cast<unsigned char>(format[at])); ++at) {
      value = std::min(value * 10 + (format[at] - '0'), 1000);
    }
    return value;
  };
  for (; at < format.size() && std::strchr("-+ #0", format[at]) != nullptr; ++at) {
    if (result.flags.find(format[at]) == std::string::npos) result.flags += format[at];
  }
  if (at < format.size() &&
      (format[at] == '*' || std::isdigit(static_cast<unsigned char>(format[at])))) {
    result.width = number();
  }
  if (at < format.size() && format[at] == '.') {
    ++at;
    result.precision = number();
  }
  for (; at < format.size() && std::strchr("hljztL", format[at]) != nullptr; ++at) {
    if (format[at] != 'h' && format[at] != 'L') result.wide = true;
  }
  if (at < format.size()) result.letter = format[at++];
  return result;
}

template <typename... Values>
std::string formatted(const Conversion& conversion, const char* length, Values... values) {
  std::string format = "%" + conversion.flags;
  if (conversion.width >= 0) format += std::to_string(conversion.width);
  if (conversion.precision >= 0) format += "." + std::to_string(conversion.precision);
  format += length;
  format += conversion.letter;
  std::array<char, kLongestText> buffer{};
  std::snprintf(buffer.data(), buffer.size(), format.c_str(), values...);
  return buffer.data();
}

std::string convert(const Conversion& conversion, PrintArguments& arguments) {
  switch (conversion.letter) {
    case 'd':
    case 'i':
      return conversion.wide
                 ? formatted(conversion, "ll", static_cast<long long>(arguments.next<i64>()))
                 : formatted(conversion, "", arguments.next<i32>());
    case 'u':
    case 'x':
    case 'X':
    case 'o':
      return conversion.wide ? formatted(conversion, "ll",
                                         static_cast<unsigned long long>(arguments.next<u64>()))
                             : formatted(conversion, "", arguments.next<u32>());
    case 'c': return formatted(conversion, "", arguments.next<i32>());
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
    case 'a':
    case 'A': return formatted(conversion, "", arguments.next<double>());
    case 'p': return formatted(conversion, "", reinterpret_cast<void*>(arguments.next<u64>()));
    case 's': return formatted(conversion, "", arguments.text().c_str());
    case '%': return "%";
    default: return std::string("%") + conversion.letter;
  }
}

std::string print(Warp& warp, const Inst& inst, int lane, u64 format_address, u64 values,
                  u32& count) {
  const std::string format = text_at(warp, inst, format_address, lane);
  PrintArguments arguments(warp, inst, lane, values);
  std::string text;
  for (std::size_t at = 0; at < format.size();) {
    if (format[at] != '%') {
      text += format[at++];
      continue;
    }
    ++at;
    text += convert(read_conversion(format, at, arguments), arguments);
  }
  count = arguments.count();
  return text;
}

// Frame offsets: immediate the format's address, flags that of the values, extra the result.
Step run_print(Warp& warp, const Inst& inst) {
  std::string& output = warp.launch->report->output;
  for (u32 mask = warp.active; mask != 0 && !warp.launch->stopped; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    u32 count = 0;
    const std::string text = print(warp, inst, lane, argument(warp, inst.immediate, lane, 8),
                                   argument(warp, inst.flags, lane, 8), count);
    if (output.size() + text.size() <= kOutputBytes) output += text;
    u8* frame = warp.cta->local.data() +
                (u64{warp.index} * 32 + static_cast<u64>(lane)) * warp.program->local_bytes;
    std::memcpy(frame + inst.extra, &count, sizeof count);
  }
  return Step::next;
}

// Frame offsets: immediate the message's address, flags the file's, extra the line.
Step run_assert(Warp& warp, const Inst& inst) {
  const int lane = warp.first_lane();
  const std::string message = text_at(warp, inst, argument(warp, inst.immediate, lane, 8), lane);
  const std::string file = text_at(warp, inst, argument(warp, inst.flags, lane, 8), lane);
  const u64 line = argument(warp, inst.extra, lane, 4);
  warp.fault(FaultKind::trap, inst, lane,
             "the device assertion '" + message + "' of " + file + ":" + std::to_string(line) +
                 " failed.");
  warp.launch->stopped = true;
  return Step::next;
}

}  // namespace

bool build_system_call(Builder& b, std::string_view callee) {
  const bool print = callee == "vprintf";
  if (!print && callee != "__assertfail") return false;
  const bool returns = b.operand(0).kind == Operand::Kind::vector;
  const std::vector<Operand>& arguments = b.operand(returns ? 2 : 1).items;
  if (arguments.size() != (print ? 2 : 5) || (print && !returns)) {
    b.fail(std::string(callee) + " is called with other arguments than it takes.");
  }
  const auto offset = [&](const Operand& operand) {
    return static_cast<u32>(b.variable_offset(operand));
  };
  b.inst.immediate = offset(arguments[0]);
  b.inst.flags = offset(arguments[1]);
  b.inst.extra = offset(print ? b.operand(0).items[0] : arguments[2]);
  b.inst.run = print ? run_print : run_assert;
  return true;
}

}  // namespace fovea::emulator
