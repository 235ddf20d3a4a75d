#include "model/timeline.h"

#include <algorithm>
#include <limits>

namespace fovea::model {

namespace {

using core::TracePhase;

std::string_view name_of(TracePhase phase) {
  switch (phase) {
    case TracePhase::none: return "none";
    case TracePhase::tile: return "tile";
    case TracePhase::free: return "wait for free memory";
    case TracePhase::copy: return "copy";
    case TracePhase::query: return "wait for q";
    case TracePhase::turn: return "wait for turn";
    case TracePhase::issue: return "issue products";
    case TracePhase::scores: return "wait for scores";
    case TracePhase::softmax: return "softmax";
    case TracePhase::output: return "wait for output";
    case TracePhase::convert: return "convert";
    case TracePhase::store: return "store";
    case TracePhase::keys: return "wait for keys and values";
    case TracePhase::weights: return "wait for weights";
    case TracePhase::correct: return "scale output";
    case TracePhase::operands: return "wait for operands";
    case TracePhase::issue_scores: return "issue S";
    case TracePhase::issue_dp: return "issue dP";
    case TracePhase::issue_dv: return "issue dV";
    case TracePhase::issue_dk: return "issue dK";
    case TracePhase::issue_dq: return "issue dQ";
    case TracePhase::dp: return "wait for dP";
    case TracePhase::differentiate: return "make dS";
    case TracePhase::dq: return "wait for dQ";
    case TracePhase::reduce: return "add dQ";
    case TracePhase::dscores: return "wait for dS";
    case TracePhase::exchange: return "exchange dS";
  }
  return "unknown";
}

// Viewers take microseconds.
std::string thousandths(core::uint64 ticks) {
  const std::string rest = std::to_string(ticks % 1000);
  return std::to_string(ticks / 1000) + "." + std::string(3 - rest.size(), '0') + rest;
}

std::string thread_name(std::size_t role, std::string_view name) {
  return R"({"ph":"M","pid":0,"tid":)" + std::to_string(role) +
         R"(,"name":"thread_name","args":{"name":")" + std::string(name) + R"("}})";
}

std::string span(std::size_t role, TracePhase phase, core::uint64 begin, core::uint64 end) {
  return R"({"ph":"X","pid":0,"tid":)" + std::to_string(role) + R"(,"name":")" +
         std::string(name_of(phase)) + R"(","ts":)" + thousandths(begin) + R"(,"dur":)" +
         thousandths(end - begin) + "}";
}

}  // namespace

std::string trace_json(const Timeline& timeline) {
  core::uint64 first = std::numeric_limits<core::uint64>::max();
  for (const core::uint64 event : timeline.events) {
    if (event != 0) first = std::min(first, core::trace_clock(event));
  }
  std::string text = R"({"displayTimeUnit":"ns","otherData":{"kernel":")" +
                     std::string(timeline.title) + R"(","clock":"1 ns is 1 of )" +
                     std::string(timeline.unit) + R"("},"traceEvents":[)";
  text += R"({"ph":"M","pid":0,"name":"process_name","args":{"name":")" +
          std::string(timeline.title) + R"("}})";
  const auto capacity = static_cast<std::size_t>(timeline.capacity);
  for (std::size_t role = 0; role * capacity < timeline.events.size(); ++role) {
    const auto events = timeline.events.subspan(role * capacity, capacity);
    if (events[0] == 0) continue;
    text += ",\n" + thread_name(role, timeline.roles[role]);
    for (std::size_t i = 0; i + 1 < events.size() && events[i + 1] != 0; ++i) {
      const TracePhase phase = core::trace_phase(events[i]);
      if (phase == TracePhase::none) continue;
      text += ",\n" + span(role, phase, core::trace_clock(events[i]) - first,
                           core::trace_clock(events[i + 1]) - first);
    }
  }
  return text + "\n]}\n";
}

}  // namespace fovea::model
