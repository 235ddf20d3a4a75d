// Timelines: what a tracing kernel writes, and that another one writes nothing.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/fovea.hpp"
#include "fovea/kernels.hpp"
#include "model/timeline.h"
#include "runtime/backward_gpu.h"
#include "runtime/forward_gpu.h"
#include "runtime/jit.h"

namespace fovea::tests {
namespace {

using core::TracePhase;
using Json = nlohmann::json;

TEST(Timeline, MakesSpansOfEvents) {
  std::vector<core::uint64> events(4 * 8);
  events[0] = core::trace_event(1000, TracePhase::tile);
  events[1] = core::trace_event(1250, TracePhase::copy);
  events[2] = core::trace_event(4000, TracePhase::none);
  events[8] = core::trace_event(900, TracePhase::softmax);
  events[9] = core::trace_event(902, TracePhase::none);
  constexpr std::string_view names[] = {"load", "compute 0"};
  const Json file = Json::parse(model::trace_json({"k", "cycles", 8, events, names}));
  std::vector<Json> spans;
  std::set<std::string> roles;
  for (const Json& event : file.at("traceEvents")) {
    if (event.at("ph") == "X") spans.push_back(event);
    if (event.at("name") == "thread_name") roles.insert(event.at("args").at("name"));
  }
  EXPECT_EQ(roles, (std::set<std::string>{"load", "compute 0"}));
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(spans[0].at("name"), "tile");
  EXPECT_DOUBLE_EQ(spans[0].at("ts"), 0.1);  // ticks are nanoseconds, the file has microseconds
  EXPECT_DOUBLE_EQ(spans[0].at("dur"), 0.25);
  EXPECT_EQ(spans[1].at("name"), "copy");
  EXPECT_DOUBLE_EQ(spans[1].at("dur"), 2.75);
  EXPECT_EQ(spans[2].at("tid"), 1);
  EXPECT_DOUBLE_EQ(spans[2].at("ts"), 0.0);
}

struct Tensors {
  explicit Tensors(int seqlen, int head_dim) {
    const std::int64_t count = std::int64_t{2} * seqlen * head_dim;
    data.resize(static_cast<std::size_t>(count) * 4, 0x3c00);
    const auto at = [&](int i) {
      return bshd(data.data() + i * count, DType::bf16, 1, seqlen, 2, head_dim);
    };
    problem.q = at(0);
    problem.k = at(1);
    problem.v = at(2);
    problem.out = at(3);
    problem.causal = true;
  }
  std::vector<std::uint16_t> data;
  Problem problem;
};

TEST(Trace, ShowsEveryRoleOfAnEmulatedCta) {
  Tensors tensors(384, 64);
  const std::vector<std::uint16_t> before = tensors.data;
  Options options;
  options.device = Device::emulated_sm90a;
  const Json file = Json::parse(trace(tensors.problem, options));
  EXPECT_EQ(tensors.data, before) << "a timeline writes nothing of the problem";
  std::map<int, double> end;
  std::map<int, std::set<std::string>> phases;
  for (const Json& event : file.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const int role = event.at("tid");
    const double begin = event.at("ts"), length = event.at("dur");
    EXPECT_GE(begin, end[role] - 1e-9) << "spans of a role follow one another";
    EXPECT_GE(length, 0.0);
    end[role] = begin + length;
    phases[role].insert(event.at("name"));
  }
  ASSERT_GE(phases.size(), 3u) << "the loading role and two warpgroups or more";
  EXPECT_EQ(phases[0], (std::set<std::string>{"tile", "wait for free memory", "copy"}));
  for (const auto& [role, seen] : phases) {
    if (role == 0) continue;
    for (const char* phase : {"tile", "wait for q", "wait for turn", "issue products",
                              "wait for scores", "softmax", "wait for output", "store"}) {
      EXPECT_TRUE(seen.contains(phase)) << phase << " of role " << role;
    }
  }
}

// Spans of each role that an emulated timeline shows.
std::map<int, std::set<std::string>> phases_of(const std::string& document) {
  std::map<int, std::set<std::string>> phases;
  std::map<int, double> end;
  const Json file = Json::parse(document);
  for (const Json& event : file.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const int role = event.at("tid");
    EXPECT_GE(event.at("ts"), end[role] - 1e-9) << "spans of a role follow one another";
    end[role] = event.at("ts").get<double>() + event.at("dur").get<double>();
    phases[role].insert(event.at("name"));
  }
  return phases;
}

// A role each for loading, products, both softmax warpgroups, corrections and stores.
TEST(Trace, ShowsEveryRoleOfAnEmulatedBlackwellCta) {
  Tensors tensors(512, 128);
  Options options;
  options.device = Device::emulated_sm100a;
  const auto phases = phases_of(trace(tensors.problem, options));
  ASSERT_EQ(phases.size(), 6u);
  const std::set<std::string> expected[] = {
      {"tile", "wait for free memory", "copy"},
      {"tile", "wait for keys and values", "wait for output", "wait for weights", "issue products"},
      {"tile", "wait for scores", "softmax", "store"},
      {"tile", "wait for scores", "softmax", "store"},
      {"tile", "wait for output", "convert"},
      {"tile", "wait for output", "store"}};
  for (int role = 0; role < 6; ++role) {
    for (const std::string& phase : expected[role]) {
      EXPECT_TRUE(phases.at(role).contains(phase)) << phase << " of role " << role;
    }
  }
}

// One CTA, and a pair, whose relay is a role more.
TEST(Trace, ShowsEveryRoleOfBlackwellsBackward) {
  for (const int seqlen : {128, 256}) {
    Tensors tensors(seqlen, 128);
    std::vector<float> lse(static_cast<std::size_t>(2 * seqlen));
    tensors.problem.lse = contiguous(lse.data(), DType::f32, {1, 2, seqlen, 1});
    std::vector<std::uint16_t> gradients(tensors.data.size());
    const auto at = [&](std::ptrdiff_t i) {
      const std::ptrdiff_t count = std::ptrdiff_t{2} * seqlen * 128;
      return bshd(gradients.data() + i * count, DType::bf16, 1, seqlen, 2, 128);
    };
    Gradients g;
    g.dout = at(0);
    g.dq = at(1);
    g.dk = at(2);
    g.dv = at(3);
    Options options;
    options.device = Device::emulated_sm100a;
    const auto phases = phases_of(trace_backward(tensors.problem, g, options));
    EXPECT_EQ(gradients, std::vector<std::uint16_t>(gradients.size())) << "nothing is written";
    const std::set<std::string> compute = {"wait for scores", "softmax",         "wait for dP",
                                           "make dS",         "wait for output", "store"};
    std::map<int, std::set<std::string>> expected = {
        {0, {"wait for free memory", "copy"}},
        {1, {"wait for operands", "issue S", "issue dP", "issue dV", "issue dK", "issue dQ"}},
        {2, compute},
        {3, compute},
        {4, {"wait for dQ", "wait for turn", "add dQ"}}};
    if (seqlen > 128) expected[5] = {"wait for dS", "exchange dS"};
    EXPECT_EQ(phases, expected) << seqlen << " keys";
    EXPECT_THROW((void)trace_backward(tensors.problem, g, options, 1000), Error);
    options.device = Device::emulated_sm90a;
    EXPECT_THROW((void)trace_backward(tensors.problem, g, options), Unsupported);
  }
}

TEST(Trace, RefusesWhatHasNoTimeline) {
  Tensors tensors(128, 64);
  Options options;
  options.device = Device::cpu;
  EXPECT_THROW((void)trace(tensors.problem, options), Error);
  options.device = Device::emulated_sm90a;
  EXPECT_THROW((void)trace(tensors.problem, options, 1000), Error);
  EXPECT_THROW((void)trace(tensors.problem, options, -1), Error);
  tensors.problem.memory = Memory::device;
  EXPECT_THROW((void)trace(tensors.problem, options), Error);
}

TEST(Trace, IsInTracingBlackwellKernelsAlone) {
  for (const bool traced : {false, true}) {
    core::BwdConfig backward;
    backward.tensor_memory = true;
    backward.trace = traced;
    core::Fwd100Config config;
    config.trace = traced;
    runtime::CompileRequest request;
    request.text = runtime::forward_text(config);
    request.arch = "sm_100a";
    request.format = runtime::ImageFormat::ptx;
    for (const std::string& text :
         {request.text, runtime::backward_text(backward, runtime::BackwardPart::main)}) {
      request.text = text;
      const auto ptx = runtime::default_jit().compile(request).image;
      EXPECT_EQ(ptx->bytes.find("%clock64") != std::string::npos, traced);
    }
  }
}

// Off, it costs nothing: no instruction of it is in the kernel. On, the kernel still neither spills
// nor serialises.
TEST(Trace, IsInTracingKernelsAlone) {
  for (const int head_dim : {64, 128}) {
    core::FwdConfig config;
    config.head_dim = config.head_dim_v = head_dim;
    if (head_dim == 64) {
      config.warpgroups = 3;
      config.stages = 4;
    }
    for (const bool traced : {false, true}) {
      config.trace = traced;
      runtime::CompileRequest request;
      request.text = runtime::forward_text(config);
      request.format = runtime::ImageFormat::ptx;
      const auto ptx = runtime::default_jit().compile(request).image;
      EXPECT_EQ(ptx->bytes.find("%clock64") != std::string::npos, traced);
      request.format = runtime::ImageFormat::cubin;
      if (traced) {
        EXPECT_NO_THROW(runtime::default_jit().compile(request));
      }
    }
  }
}

}  // namespace
}  // namespace fovea::tests
