// The model of GPUs: what it says beside what an H200 measured, and how it explains itself.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <string>

#include "fovea/device.hpp"
#include "model/hardware.h"
#include "model/roofline.h"

namespace fovea::test {
namespace {

// Tensors that are planned for but never read.
Problem shaped(std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t dim,
               bool causal) {
  static std::uint64_t stand_in[2];
  Problem p;
  p.q = bshd(stand_in, DType::bf16, batch, rows, heads, dim);
  p.k = p.v = p.q;
  p.out = p.q;
  p.out.data = reinterpret_cast<void*>(std::uintptr_t{1} << 46);
  p.causal = causal;
  return p;
}

TEST(Model, ComesNearWhatWasMeasured) {
  // What the model's constants were fitted to, the whole table of docs/kernels/fwd_sm90.md: device
  // time by bench/gpu_peers.py, 32768 tokens, 2048 = heads x head_dim, TFLOPS.
  constexpr struct {
    std::int64_t dim, rows;
    bool causal;
    double tflops;
  } measured[] = {{128, 512, false, 615},   {128, 1024, false, 730}, {128, 2048, false, 801},
                  {128, 4096, false, 828},  {128, 8192, false, 840}, {128, 16384, false, 846},
                  {128, 4096, true, 738},   {128, 16384, true, 818}, {128, 32768, true, 831},
                  {64, 4096, false, 631},   {64, 16384, false, 662}, {64, 4096, true, 544},
                  {64, 16384, true, 630},   {256, 4096, false, 820}, {256, 8192, false, 840},
                  {256, 16384, false, 846}, {256, 4096, true, 727},  {256, 16384, true, 826}};
  double sum = 0.0;
  for (const auto& m : measured) {
    const std::int64_t batch = 32768 / m.rows;
    const std::int64_t heads = 2048 / m.dim;
    const Problem p = shaped(batch, heads, m.rows, m.dim, m.causal);
    const double flops = 4.0 * static_cast<double>(batch * heads) * static_cast<double>(m.rows) *
                         static_cast<double>(m.rows) * static_cast<double>(m.dim) /
                         (m.causal ? 2.0 : 1.0);
    for (const Configuration& c : configurations(p, {}, "h200")) {
      if (!c.chosen) continue;
      const double ratio = flops / c.model_ms * 1e-9 / m.tflops;
      EXPECT_NEAR(ratio, 1.0, 0.05)
          << "d=" << m.dim << " " << m.rows << (m.causal ? " causal" : "");
      sum += std::abs(ratio - 1.0);
    }
  }
  EXPECT_LT(sum / static_cast<double>(std::size(measured)), 0.013);
}

// Cycles of a step with a share of the exponentials by polynomial, as the chosen one is given and
// others behind "but".
double step_cycles(const std::string& explained, const std::string& line) {
  const std::size_t at = explained.find(line);
  EXPECT_NE(at, std::string::npos) << line << " in\n" << explained;
  return at == std::string::npos ? 0.0 : std::stod(explained.substr(at + line.size()));
}

// Where the softmax binds a second way for exponentials brings time, where the tensor cores do
// none.
TEST(Model, SaysWhatThePolynomialBrings) {
  constexpr struct {
    const char* chip;
    std::int64_t dim;
    int chosen;
    const char* other;
    bool gains;
  } cases[] = {{"b200", 64, 7, "but        0 of 16 exponentials by polynomial: ", true},
               {"b200", 128, 2, "but        0 of 16 exponentials by polynomial: ", true},
               {"b200", 256, 0, "but        2 of 16 exponentials by polynomial: ", false},
               {"b300", 128, 0, "but        2 of 16 exponentials by polynomial: ", false},
               {"b300", 256, 0, "but        4 of 16 exponentials by polynomial: ", false}};
  for (const auto& c : cases) {
    const std::string text = explain(shaped(8, 16, 4096, c.dim, false), {}, c.chip);
    EXPECT_NE(text.find("polynomial=" + std::to_string(c.chosen) + ","), std::string::npos) << text;
    const double chosen = step_cycles(text, "step       ");
    const double other = step_cycles(text, c.other);
    if (c.gains) {
      EXPECT_GT(other, 1.03 * chosen) << c.chip << " d=" << c.dim;
    } else {
      EXPECT_EQ(other, chosen) << c.chip << " d=" << c.dim;
    }
  }
}

// Some hides, some does not: neither the longest unit alone nor the sum of all.
TEST(Model, LetsUnitsWorkSideBySide) {
  const model::Gpu& gpu = *model::find_gpu("b200");
  const model::StepCycles all = model::forward_step(gpu, {.special_share = 1.0});
  EXPECT_GT(all.softmax(), all.exponential);
  EXPECT_LT(all.softmax(), (all.exponential + all.issue) / 0.95);
  // FMA and ALU count where they are longer than the issue of their instructions.
  const model::StepCycles fma = model::forward_step(gpu, {.fma_lanes = 20.0});
  EXPECT_EQ(fma.binding(), "FMA");
  EXPECT_GT(fma.softmax(), fma.fma);
  EXPECT_EQ(model::forward_step(gpu, {.alu_lanes = 10.0}).binding(), "ALU");
}

TEST(Model, OrdersWhatHasRoomAndSaysWhatHasNot) {
  const auto list = configurations(shaped(8, 16, 4096, 128, false), {}, "h200");
  int chosen = 0;
  bool refused = false;
  double before = 0.0;
  for (const Configuration& c : list) {
    chosen += c.chosen ? 1 : 0;
    refused = refused || !c.refusal.empty();
    EXPECT_EQ(refused, !c.refusal.empty()) << "what has no room comes last";
    if (refused) continue;
    EXPECT_GE(c.model_ms, before);
    before = c.model_ms;
  }
  EXPECT_EQ(chosen, 1);
  EXPECT_TRUE(refused);
}

TEST(Model, ExplainsChipsThatAreNotHere) {
  const Problem p = shaped(8, 16, 4096, 128, true);
  for (const model::Gpu& gpu : model::gpus()) {
    const std::string text = explain(p, {}, gpu.name);
    for (const char* fragment : {"chosen ", "candidate ", "cycles of tensor cores", "sources "}) {
      EXPECT_NE(text.find(fragment), std::string::npos) << text;
    }
    EXPECT_FALSE(gpu.sources.empty());
  }
  EXPECT_THROW(static_cast<void>(explain(p, {}, "a100")), Error);
}

TEST(Model, FindsAChipByTheDriversName) {
  ASSERT_NE(model::find_gpu("NVIDIA H200"), nullptr);
  EXPECT_EQ(model::find_gpu("NVIDIA H200")->name, "h200");
  EXPECT_EQ(model::find_gpu("NVIDIA GeForce RTX 4090"), nullptr);
}

TEST(Model, SwitchesEachPartOfTheScheduleOff) {
  const auto list = ablations(shaped(8, 16, 4096, 128, false), {}, "h200");
  ASSERT_GE(list.size(), 4u);
  EXPECT_NE(list.front().find("overlap=1"), std::string::npos);
  bool without_overlap = false;
  for (const std::string& c : list) {
    without_overlap = without_overlap || c.find("overlap=0") != std::string::npos;
  }
  EXPECT_TRUE(without_overlap);
}

// Without a mask no row sees half of its first block, and tiles of 64 keys have no half.
TEST(Model, ShowsSwitchesWhereTheyChangeSomething) {
  const auto shows = [](const Configuration& c) {
    return c.text.find("short_first=1") != std::string::npos;
  };
  for (const Configuration& c : configurations(shaped(8, 16, 4096, 128, false), {}, "h200")) {
    EXPECT_FALSE(shows(c)) << c.text;
    EXPECT_NE(c.text.find("overlap=1"), std::string::npos) << c.text;
  }
  for (const Configuration& c : configurations(shaped(8, 16, 4096, 128, true), {}, "h200")) {
    EXPECT_EQ(shows(c), c.text.find("tile_k=128") != std::string::npos) << c.text;
  }
}

// What a hand-set configuration may not be is said before anything is compiled.
TEST(Model, RefusesConfigurationsWithoutRoom) {
  Options options;
  options.device = Device::emulated_sm90a;
  const Problem p = shaped(1, 2, 128, 128, false);
  for (const char* text :
       {"tile_k=100", "tile_k=256", "warpgroups=7", "color=3", "tile_k", "overlap=2"}) {
    options.configuration = text;
    EXPECT_THROW(static_cast<void>(plan(p, options)), Error) << text;
  }
  options.eight_bits.emplace();
  options.configuration = "warpgroups=1,ping_pong=0";
  EXPECT_THROW(static_cast<void>(plan(p, options)), Error);
}

}  // namespace
}  // namespace fovea::test
