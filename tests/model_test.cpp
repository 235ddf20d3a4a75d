// The model of GPUs: what it says beside what an H200 measured, and how it explains itself.
#include <gtest/gtest.h>

#include <string>

#include "fovea/device.hpp"
#include "model/hardware.h"

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
  // docs/kernels/fwd_sm90.md: 32768 tokens, 2048 = heads x head_dim, cool.
  constexpr struct {
    std::int64_t dim, rows;
    bool causal;
    double tflops;
  } measured[] = {{128, 1024, false, 693}, {128, 4096, false, 802}, {128, 16384, false, 825},
                  {128, 4096, true, 708},  {128, 16384, true, 794}, {64, 4096, false, 604},
                  {64, 16384, false, 645}, {64, 16384, true, 597},  {256, 4096, false, 788},
                  {256, 16384, false, 829}};
  for (const auto& m : measured) {
    const std::int64_t batch = 32768 / m.rows;
    const std::int64_t heads = 2048 / m.dim;
    const Problem p = shaped(batch, heads, m.rows, m.dim, m.causal);
    const double flops = 4.0 * static_cast<double>(batch * heads) * static_cast<double>(m.rows) *
                         static_cast<double>(m.rows) * static_cast<double>(m.dim) /
                         (m.causal ? 2.0 : 1.0);
    for (const Configuration& c : configurations(p, {}, "h200")) {
      if (!c.chosen) continue;
      const double modelled = flops / c.model_ms * 1e-9;
      EXPECT_NEAR(modelled / m.tflops, 1.0, 0.15)
          << "d=" << m.dim << " " << m.rows << (m.causal ? " causal" : "");
    }
  }
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
}

}  // namespace
}  // namespace fovea::test
