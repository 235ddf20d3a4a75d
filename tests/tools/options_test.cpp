#include <gtest/gtest.h>

#include <limits>

#include "core/mask.h"
#include "tests/tools/tools_support.h"
#include "tools/accuracy.h"
#include "tools/problem_options.h"
#include "tools/program.h"
#include "tools/text.h"
#include "tools/visible.h"
#include "tools/workload.h"

namespace fovea::test {
namespace {

using tools::Shape;

std::string fault(const std::vector<std::string>& arguments) {
  return error_of([&] {
    tools::Program program;
    static_cast<void>(program.parse(arguments));
  });
}

TEST(Options, AcceptsEveryOptionOfTheContract) {
  EXPECT_EQ(fault({"check",
                   "--shape",
                   "2,8,2,1000,1500,72,40",
                   "--dtype",
                   "bf16",
                   "--causal",
                   "--window",
                   "300,0",
                   "--softcap",
                   "30",
                   "--scale",
                   "-0.125",
                   "--alibi",
                   "--sink",
                   "--layout",
                   "bhsd",
                   "--deterministic",
                   "--dropout",
                   "0.1",
                   "--dropout-seed",
                   "18446744073709551615",
                   "--splits",
                   "4",
                   "--softmax",
                   "sum_guard",
                   "--seed",
                   "7",
                   "--device",
                   "emulated:sm_100a",
                   "--threads",
                   "2",
                   "--json",
                   "-",
                   "--quiet"}),
            "");
  EXPECT_EQ(fault({"run", "--input", "a.safetensors", "b.safetensors", "--window", "-1,-1"}), "");
  EXPECT_EQ(fault({"bench", "--grid", "paper", "--d", "64,128", "--seqs", "512,1024"}), "");
  EXPECT_EQ(fault({"bench", "--quantize", "head", "--rotary", "64,5e5", "--rotary-interleaved"}),
            "");
  EXPECT_EQ(fault({"bench", "--quantized-pages", "64", "--queries", "1,512"}), "");
  EXPECT_EQ(fault({"explain", "--shape=1,1,1,1,1,1"}), "");
  EXPECT_EQ(fault({"info"}), "");
  EXPECT_EQ(fault({"--help"}), "");
  EXPECT_EQ(fault({"run", "--help"}), "");
  EXPECT_EQ(fault({"--version"}), "");
}

TEST(Options, NamesWhatIsWrong) {
  struct Row {
    std::vector<std::string> arguments;
    const char* expected;
  };
  const Row rows[] = {
      {{}, "a command is needed"},
      {{"frobnicate"}, "'frobnicate' is not a command"},
      {{"check"}, "--shape is required"},
      {{"check", "--shape", "1,2,3"}, "--shape is '1,2,3'"},
      {{"check", "--shape", "1,2,2,x,4,8"}, "'x'"},
      {{"check", "--shape", "1,2,2,-4,4,8"}, "'-4'"},
      {{"check", "--shape", "1,2,2,99999999999,4,8"}, "'99999999999'"},
      {{"info", "--threads", "0"}, "--threads is '0'"},
      {{"info", "--threads", "two"}, "--threads is 'two'"},
      {{"info", "--device", "tpu"}, "--device is 'tpu'"},
      {{"info", "--quiet=3"}, "quiet was given"},
      {{"run", "--dtype", "f64"}, "f32, bf16, f16, e4m3, e5m2 or s8"},
      {{"run", "--window", "3"}, "--window is '3'"},
      {{"run", "--window", "3,4,5"}, "--window is '3,4,5'"},
      {{"run", "--softcap", "1e"}, "--softcap is '1e'"},
      {{"run", "--scale", "1e400"}, "--scale is '1e400'"},
      {{"run", "--dropout-seed", "-1"}, "--dropout-seed is '-1'"},
      {{"run", "--splits", "1.5"}, "--splits is '1.5'"},
      {{"run", "--layout", "sbhd"}, "bshd or bhsd"},
      {{"run", "--softmax", "fast"}, "--softmax is 'fast'"},
      {{"run", "--wrong"}, "--wrong"},
      {{"run", "stray"}, "stray"},
      {{"run", "--out"}, "--out"},
      {{"bench", "--grid", "gpu"}, "--grid is 'gpu'"},
      {{"bench", "--rotary", "many"}, "--rotary is 'many'"},
      {{"bench", "--rotary", "63"}, "--rotary is 63; columns are turned in pairs"},
      {{"bench", "--rotary", "64,-1"}, "--rotary has the base -1"},
      {{"bench", "--rotary-interleaved"}, "--rotary"},
      {{"check", "--quantized-pages", "none"}, "--quantized-pages is 'none'"},
      {{"bench", "--quantized-pages", "0"}, "--quantized-pages is '0'"},
      {{"bench", "--queries", "1,0"}, "--queries"},
      {{"bench", "--heads", "8,2,2"}, "--heads is '8,2,2'"},
      {{"run", "--causal", "check", "--shape", "1,1,1,1,1,1"}, "check"},
  };
  for (const Row& row : rows) {
    const std::string message = fault(row.arguments);
    EXPECT_NE(message.find(row.expected), std::string::npos)
        << row.expected << " is not in: " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

TEST(Text, KeepsMessagesOnOneLine) {
  EXPECT_EQ(tools::one_line("a\nb\tc\x7f"), "a b c");
  EXPECT_EQ(tools::printable("caf\xc3\xa9\n", 20), "caf???");
  EXPECT_EQ(tools::printable("abcdef", 3), "abc...");
}

// The count that GFLOP/s stand on, against the mask's own definition.
TEST(Visible, CountsThePairsThatTheMaskAllows) {
  for (const std::int64_t rows : {0, 1, 5, 9}) {
    for (const std::int64_t keys : {0, 1, 5, 9}) {
      for (const std::int64_t left : {-1, 0, 2, 100}) {
        for (const std::int64_t right : {-1, 0, 3}) {
          for (const bool causal : {false, true}) {
            if (causal && left < 0 && right < 0 && rows == keys) continue;  // half by convention
            Problem p;
            p.q = bshd(nullptr, DType::f32, 2, rows, 3, 4);
            p.k = bshd(nullptr, DType::f32, 2, keys, 1, 4);
            p.window_left = left;
            p.window_right = right;
            p.causal = causal;
            std::int64_t pairs = 0;
            for (std::int64_t i = 0; i < rows; ++i) {
              for (std::int64_t j = 0; j < keys; ++j) {
                pairs +=
                    core::allowed(core::effective_window({left, right}, causal), rows, keys, i, j);
              }
            }
            EXPECT_EQ(tools::visible_pairs(p), static_cast<double>(2 * 3 * pairs))
                << rows << " rows, " << keys << " keys, window " << left << "," << right;
          }
        }
      }
    }
  }
  Problem p;
  p.q = bshd(nullptr, DType::f32, 1, 8, 2, 4);
  p.k = p.q;
  p.v = p.q;
  p.causal = true;
  EXPECT_EQ(tools::visible_pairs(p), 64.0);
  EXPECT_EQ(tools::flop_count(p), 64.0 * 2 * 8);
}

TEST(Workload, IsAFunctionOfTheSeed) {
  const Shape shape{2, 4, 2, 9, 13, 8, 8};
  const auto values = [&](std::uint64_t seed) {
    tools::Workload w = tools::make_workload(shape, {});
    tools::fill_inputs(w, seed);
    return tools::values_of(w.problem.k);
  };
  EXPECT_EQ(values(3), values(3));
  EXPECT_NE(values(3), values(4));
}

TEST(Workload, IsStandardNormal) {
  constexpr std::int64_t count = 1 << 20;
  std::vector<float> values(count);
  tools::fill_normal(reinterpret_cast<std::byte*>(values.data()), DType::f32, count, 1);
  double sum = 0.0;
  double square = 0.0;
  double fourth = 0.0;
  for (const float value : values) {
    const double x = value;
    sum += x;
    square += x * x;
    fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / count, 0.0, 0.005);
  EXPECT_NEAR(square / count, 1.0, 0.01);
  EXPECT_NEAR(fourth / count, 3.0, 0.05);
}

TEST(Workload, GivesThePublishedAlibiSlopes) {
  std::vector<float> eight(8);
  tools::fill_alibi_slopes(eight.data(), 8);
  for (int h = 0; h < 8; ++h)
    EXPECT_EQ(eight[static_cast<std::size_t>(h)], std::exp2(-1.0f - static_cast<float>(h)));
  std::vector<float> twelve(12);
  tools::fill_alibi_slopes(twelve.data(), 12);
  EXPECT_EQ(twelve[7], std::exp2(-8.0f));
  EXPECT_EQ(twelve[8], std::exp2(-0.5f));
  EXPECT_EQ(twelve[9], std::exp2(-1.5f));
}

TEST(Workload, RefusesShapesBeyondTheMachine) {
  EXPECT_NE(error_of([] {
              static_cast<void>(tools::make_workload({1000000, 1000, 1, 1000000, 1, 128, 128}, {}));
            }),
            "");
}

TEST(Accuracy, JudgesAnError) {
  const std::vector<double> exact = {1.0, -2.0, 3.0};
  const std::vector<double> naive = {1.001, -2.0, 3.0};
  EXPECT_TRUE(tools::judge_out({{1.0, -2.0015, 3.0}}, naive, exact, DType::f32).passed);
  EXPECT_FALSE(tools::judge_out({{1.0, -2.0025, 3.0}}, naive, exact, DType::f32).passed);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(tools::judge_out({{1.0, nan, 3.0}}, naive, exact, DType::f32).passed);
  EXPECT_FALSE(tools::judge_lse({{1.0, -2.0, 3.0}}, naive, {{1.0, -infinity, 3.0}}).passed);
  EXPECT_TRUE(
      tools::judge_lse({{1.0, -infinity, 3.0}}, {{1.0, -infinity, 3.0}}, {{1.0, -infinity, 3.0}})
          .passed);
  EXPECT_FALSE(
      tools::judge_lse({{1.0, infinity, 3.0}}, {{1.0, -infinity, 3.0}}, {{1.0, -infinity, 3.0}})
          .passed);
}

}  // namespace
}  // namespace fovea::test
