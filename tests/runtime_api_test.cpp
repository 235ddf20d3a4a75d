// The C interface: statuses, sentences, sizes of structures. What it computes, and what it says
// about bad problems, is tested with the C++ interface (runtime_problem_test.cpp).
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fovea/fovea.h"
#include "tests/runtime_api_c99.h"
#include "tests/runtime_setup.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

void expect_error(const std::string& fragment) {
  EXPECT_NE(std::string(fovea_last_error()).find(fragment), std::string::npos)
      << '"' << fragment << "\" is not in \"" << fovea_last_error() << '"';
}

TEST(CApi, WorksFromC99) {
  float out[4] = {NAN, NAN, NAN, NAN};
  float lse = NAN;
  char explanation[20];
  ASSERT_EQ(fovea_c99_smoke(out, &lse, explanation, sizeof explanation), 0) << fovea_last_error();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(out[i], static_cast<float>(2 + i));
  EXPECT_NEAR(lse, std::log(2.0), 1e-6);
}

TEST(CApi, ComputesWhatCppComputes) {
  for (const Kind kind : {Kind::dense, Kind::varlen, Kind::paged}) {
    SmallCall call(kind);
    call.problem.causal = true;
    call.problem.softcap = 3.0f;
    call.problem.softmax_scale = 0.7f;
    call.problem.window_left = 3;
    call.problem.dropout = {0.25f, 11, 12};
    attention(call.problem);
    const std::vector<std::byte> expected = call.out.bytes();
    const std::vector<std::byte> expected_lse = call.lse.bytes();
    call.out.poison();
    call.lse.poison();
    const fovea_problem problem = to_c(call.problem);
    ASSERT_EQ(fovea_attention(&problem, nullptr, nullptr), FOVEA_OK) << fovea_last_error();
    EXPECT_TRUE(same_bits(call.out.bytes(), expected));
    EXPECT_TRUE(same_bits(call.lse.bytes(), expected_lse));
  }
}

TEST(CApi, NullPointersAreNamed) {
  SmallCall call;
  const fovea_problem problem = to_c(call.problem);
  fovea_plan* plan = nullptr;
  EXPECT_EQ(fovea_attention(nullptr, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("problem is null");
  EXPECT_EQ(fovea_plan_create(&problem, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("plan is null");
  EXPECT_EQ(fovea_plan_run(nullptr, &problem, nullptr, 0, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("plan is null");
  EXPECT_EQ(fovea_plan_explain(nullptr, nullptr, 0, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_problem_init(nullptr, sizeof problem), FOVEA_INVALID_ARGUMENT);
  expect_error("problem is null");
  EXPECT_EQ(fovea_merge(nullptr, 1, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("parts is null but count is 1");
  EXPECT_EQ(fovea_merge(nullptr, -1, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("count is -1");
  fovea_plan_destroy(nullptr);
  ASSERT_EQ(fovea_plan_create(&problem, nullptr, &plan), FOVEA_OK);
  EXPECT_EQ(fovea_plan_workspace_bytes(plan, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("bytes is null");
  EXPECT_EQ(fovea_plan_run(plan, &problem, nullptr, 100, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("workspace is null but workspace_bytes is 100");
  EXPECT_EQ(fovea_plan_run(plan, &problem, nullptr, 0, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("workspace has 0 bytes");
  EXPECT_EQ(fovea_plan_explain(plan, nullptr, 1, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("buffer is null but capacity is 1");
  fovea_plan_destroy(plan);
}

TEST(CApi, FailedPlanIsNull) {
  SmallCall call;
  call.problem.k = {};
  const fovea_problem problem = to_c(call.problem);
  auto* plan = reinterpret_cast<fovea_plan*>(&call);
  EXPECT_EQ(fovea_plan_create(&problem, nullptr, &plan), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
}

TEST(CApi, UninitialisedSizeIsRefused) {
  SmallCall call;
  fovea_problem problem = to_c(call.problem);
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, ~std::size_t{0}}) {
    problem.size = size;
    EXPECT_EQ(fovea_attention(&problem, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
    expect_error("problem->size is " + std::to_string(size));
    expect_error("fovea_problem_init");
  }
  EXPECT_EQ(fovea_problem_init(&problem, sizeof(std::size_t) - 1), FOVEA_INVALID_ARGUMENT);
  expect_error("size is 7; pass sizeof *problem");
  EXPECT_EQ(fovea_problem_init(&problem, ~std::size_t{0}), FOVEA_INVALID_ARGUMENT);
  problem.size = sizeof problem;
  fovea_options options{};
  EXPECT_EQ(fovea_attention(&problem, &options, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("options->size is 0");
  fovea_statistics statistics{};
  const std::vector<std::byte> before = call.out.buffer();
  EXPECT_EQ(fovea_attention(&problem, nullptr, &statistics), FOVEA_INVALID_ARGUMENT);
  expect_error("statistics->size is 0");
  EXPECT_TRUE(same_bits(call.out.buffer(), before));
}

// A caller whose header ends before window_left: what it cannot know has the default.
TEST(CApi, ShorterStructureKeepsDefaultsBeyond) {
  SmallCall call;
  attention(call.problem);
  const std::vector<std::byte> expected = call.out.bytes();
  call.out.poison();
  fovea_problem problem = to_c(call.problem);
  problem.size = offsetof(fovea_problem, window_left);
  std::memset(&problem.window_left, 0x7f, sizeof problem - offsetof(fovea_problem, window_left));
  ASSERT_EQ(fovea_attention(&problem, nullptr, nullptr), FOVEA_OK) << fovea_last_error();
  EXPECT_TRUE(same_bits(call.out.bytes(), expected));
}

TEST(CApi, LongerStructureMustBeZeroBeyond) {
  struct Longer {
    fovea_problem problem;
    std::int64_t unknown;
  };
  SmallCall call;
  Longer longer{};
  ASSERT_EQ(fovea_problem_init(&longer.problem, sizeof longer), FOVEA_OK);
  EXPECT_EQ(longer.problem.size, sizeof longer);
  EXPECT_EQ(longer.unknown, 0);
  longer.problem = to_c(call.problem);
  longer.problem.size = sizeof longer;
  EXPECT_EQ(fovea_attention(&longer.problem, nullptr, nullptr), FOVEA_OK) << fovea_last_error();
  call.out.poison();
  const std::vector<std::byte> before = call.out.buffer();
  longer.unknown = 1;
  EXPECT_EQ(fovea_attention(&longer.problem, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("problem->size is " + std::to_string(sizeof longer) +
               " but this library knows only");
  EXPECT_TRUE(same_bits(call.out.buffer(), before));
}

// init() of an older caller's structure writes no further than that structure.
TEST(CApi, InitStaysWithinTheGivenSize) {
  fovea_problem problem;
  std::memset(&problem, 0x55, sizeof problem);
  const std::size_t size = offsetof(fovea_problem, softcap);
  ASSERT_EQ(fovea_problem_init(&problem, size), FOVEA_OK);
  EXPECT_EQ(problem.size, size);
  EXPECT_EQ(problem.window_right, -1);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&problem);
  for (std::size_t i = size; i < sizeof problem; ++i) EXPECT_EQ(bytes[i], 0x55);

  SmallCall call;
  fovea_statistics statistics;
  std::memset(&statistics, 0x55, sizeof statistics);
  statistics.size = offsetof(fovea_statistics, rescales);
  const fovea_problem good = to_c(call.problem);
  ASSERT_EQ(fovea_attention(&good, nullptr, &statistics), FOVEA_OK) << fovea_last_error();
  EXPECT_GT(statistics.tiles_full + statistics.tiles_partial, 0);
  EXPECT_EQ(statistics.size, offsetof(fovea_statistics, rescales));
  EXPECT_EQ(statistics.rescales, 0x5555555555555555);
}

TEST(CApi, WrongEnumeratorsAreNamed) {
  SmallCall call;
  const fovea_problem problem = to_c(call.problem);
  fovea_options options;
  ASSERT_EQ(fovea_options_init(&options, sizeof options), FOVEA_OK);
  const int wrong = -7;
  std::memcpy(&options.device, &wrong, sizeof wrong);
  EXPECT_EQ(fovea_attention(&problem, &options, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("options.device is -7");
  ASSERT_EQ(fovea_options_init(&options, sizeof options), FOVEA_OK);
  std::memcpy(&options.softmax, &wrong, sizeof wrong);
  EXPECT_EQ(fovea_attention(&problem, &options, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("options.softmax is -7");
  fovea_problem bad = problem;
  std::memcpy(&bad.bias.dtype, &wrong, sizeof wrong);
  EXPECT_EQ(fovea_attention(&bad, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("bias.dtype is -7");
}

TEST(CApi, LengthsNeedDataAndACount) {
  SmallCall call;
  fovea_problem problem = to_c(call.problem);
  problem.seqused_k = {nullptr, 2};
  EXPECT_EQ(fovea_attention(&problem, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("seqused_k.data is null but count is 2");
  problem.seqused_k = {nullptr, -1};
  EXPECT_EQ(fovea_attention(&problem, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("seqused_k.count is -1");
}

TEST(CApi, UnsupportedIsNotInvalid) {
  SmallCall call;
  const fovea_problem problem = to_c(call.problem);
  fovea_options options;
  ASSERT_EQ(fovea_options_init(&options, sizeof options), FOVEA_OK);
  options.device = FOVEA_DEVICE_CUDA;
  EXPECT_EQ(fovea_attention(&problem, &options, nullptr), FOVEA_UNSUPPORTED);
  expect_error("device cuda does not compute this problem");
}

TEST(CApi, MergesLikeCpp) {
  const std::int64_t shape[4] = {1, 1, 1, 2};
  const std::int64_t lse_shape[4] = {1, 1, 1, 1};
  const float a[2] = {3.0f, -2.0f};
  const float b[2] = {NAN, NAN};
  const float a_lse = -80.25f;
  const float b_lse = -INFINITY;
  float out[2] = {NAN, NAN};
  float lse = NAN;
  const auto part = [&](const float* values, const float* log) {
    return fovea_part{fovea_tensor_contiguous(values, FOVEA_F32, shape),
                      fovea_tensor_contiguous(log, FOVEA_F32, lse_shape)};
  };
  const fovea_part parts[2] = {part(b, &b_lse), part(a, &a_lse)};
  const fovea_part result = part(out, &lse);
  ASSERT_EQ(fovea_merge(parts, 2, &result, nullptr), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(out[0], 3.0f);
  EXPECT_EQ(out[1], -2.0f);
  EXPECT_EQ(lse, a_lse);
  const float logit = a_lse;
  const fovea_tensor sink = fovea_tensor_contiguous(&logit, FOVEA_F32, lse_shape);
  ASSERT_EQ(fovea_merge(parts, 2, &result, &sink), FOVEA_OK) << fovea_last_error();
  EXPECT_NEAR(out[0], 1.5f, 1e-6);
  EXPECT_EQ(fovea_merge(parts, -1, &result, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("count is -1");
  EXPECT_EQ(fovea_merge(parts, 2, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_error("result is null");
}

TEST(CApi, TheLastErrorBelongsToItsThread) {
  EXPECT_EQ(fovea_attention(nullptr, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  std::thread([] { EXPECT_STREQ(fovea_last_error(), ""); }).join();
  expect_error("problem is null");
}

TEST(CApi, PackedIsOneBatch) {
  const float data = 0;
  const fovea_tensor tensor = fovea_tensor_packed(&data, FOVEA_F16, 7, 2, 4);
  EXPECT_EQ(tensor.shape[0], 1);
  EXPECT_EQ(tensor.shape[1], 7);
  EXPECT_EQ(tensor.stride[1], 8);
  EXPECT_EQ(tensor.dtype, FOVEA_F16);
}

}  // namespace
}  // namespace fovea::test
