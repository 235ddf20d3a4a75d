#include "cuda_shim/settings.h"

#include <charconv>

namespace fovea::cuda_shim {
namespace {

[[noreturn]] void wrong(std::string_view key, std::string_view value, const char* right) {
  throw emulator::Error(0, std::string(kSettingsVariable) + ": " + std::string(key) + " is '" +
                               std::string(value) + "', not " + right + ".");
}

template <typename T>
T number(std::string_view key, std::string_view value) {
  T result{};
  const auto [end, fault] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (fault != std::errc() || end != value.data() + value.size()) {
    wrong(key, value, "a whole number");
  }
  return result;
}

bool on_or_off(std::string_view key, std::string_view value) {
  if (value != "on" && value != "off") wrong(key, value, "on or off");
  return value == "on";
}

emulator::Policy policy(std::string_view key, std::string_view value) {
  if (value == "eager") return emulator::Policy::eager;
  if (value == "lazy") return emulator::Policy::lazy;
  if (value == "random") return emulator::Policy::random;
  wrong(key, value, "eager, lazy or random");
}

void set(Settings& settings, std::string_view key, std::string_view value) {
  if (key == "device") {
    settings.device = value;
  } else if (key == "order") {
    settings.schedule.policy = policy(key, value);
  } else if (key == "seed") {
    settings.schedule.seed = number<std::uint64_t>(key, value);
  } else if (key == "checks") {
    settings.schedule.checks = on_or_off(key, value);
  } else if (key == "in_order_tensor") {
    settings.schedule.in_order_tensor = on_or_off(key, value);
  } else if (key == "ctas") {
    settings.schedule.cta_limit = number<std::uint64_t>(key, value);
  } else if (key == "steps") {
    settings.schedule.step_limit = number<std::uint64_t>(key, value);
  } else if (key == "sms") {
    settings.sm_count = number<int>(key, value);
  } else if (key == "stop") {
    settings.stop_at_first = on_or_off(key, value);
  } else if (key == "report") {
    settings.report = value;
  } else {
    wrong("a key", key,
          "device, order, seed, checks, in_order_tensor, ctas, steps, sms, stop or report");
  }
}

}  // namespace

Settings parse_settings(std::string_view text) {
  Settings settings;
  while (!text.empty()) {
    const std::size_t equals = text.find('=');
    const std::string_view key = text.substr(0, equals);
    if (equals == std::string_view::npos) wrong("a setting", key, "of the form key=value");
    text.remove_prefix(equals + 1);
    const std::size_t end = key == "report" ? text.size() : std::min(text.find(','), text.size());
    set(settings, key, text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return settings;
}

}  // namespace fovea::cuda_shim
