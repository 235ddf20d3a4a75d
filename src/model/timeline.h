// Timelines as files that trace viewers show.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/trace.h"

namespace fovea::model {

struct Timeline {
  std::string_view title;  // "fwd_sm90, CTA 3"
  std::string_view unit;   // of the clock: "cycles"
  int capacity = 0;
  std::span<const core::uint64> events;     // core::trace_roles times capacity
  std::span<const std::string_view> roles;  // their names
};

// A document in the JSON trace format that Perfetto and chrome://tracing read. The earliest event
// is at 0; a tick of the clock is shown as a nanosecond.
std::string trace_json(const Timeline& timeline);

}  // namespace fovea::model
