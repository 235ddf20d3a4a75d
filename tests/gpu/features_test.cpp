// Everything that a caller may ask of the forward kernels beyond plain attention, on both emulated
// chips: every entry point and layout, what position adds, dropout, split keys, packed heads,
// pages of any size, odd head dimensions, and values that are not finite where some rows look away.
// FOVEA_TEST_DEVICES=cuda runs it on a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/forward_gpu.h"
#include "tests/call.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using core::FwdConfig;
using core::int64;
using core::SoftmaxPolicy;
using runtime::Device;
using runtime::DeviceAddress;
using runtime::DeviceBuffer;
using test::Bias;
using test::Call;
using test::CaseSpec;
using test::Entry;
using test::Layout;
using test::Mask;

// Device memory with the contents of host memory, at an address equal to the host's modulo 256.
class Mirror {
 public:
  Mirror(Device& device, const void* data, std::size_t bytes) : device_(&device), bytes_(bytes) {
    const auto host = reinterpret_cast<std::uintptr_t>(data);
    shift_ = host % 256;
    buffer_ = DeviceBuffer(device, shift_ + bytes);
    device.copy_to_device(address(), data, bytes);
  }
  DeviceAddress address() const { return buffer_.address() + shift_; }
  void fetch(void* data) const {
    device_->copy_to_host(data, address(), bytes_);
    device_->synchronize();
  }

 private:
  Device* device_;
  DeviceBuffer buffer_;
  std::size_t bytes_;
  std::size_t shift_ = 0;
};

// What of memory a tensor covers, from its lowest to its highest element.
struct Covered {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  std::ptrdiff_t base = 0;  // of element 0 behind begin, in bytes
};

Covered covered(const Tensor& tensor) {
  int64 low = 0;
  int64 high = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    if (tensor.shape[i] <= 0) return {};
    const int64 reach = (tensor.shape[i] - 1) * tensor.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  const int64 element = core::size_bytes(static_cast<core::DType>(tensor.dtype));
  return {static_cast<std::byte*>(tensor.data) + low * element,
          static_cast<std::size_t>((high - low + 1) * element), -low * element};
}

struct Feature {
  CaseSpec spec;
  std::function<void(FwdConfig&)> change = nullptr;  // of what was chosen for Hopper
  std::function<void(Call&)> prepare = nullptr;
};

SoftmaxPolicy policy_of(Softmax softmax) {
  switch (softmax) {
    case Softmax::online: return SoftmaxPolicy::online;
    case Softmax::conditional: return SoftmaxPolicy::conditional;
    default: return SoftmaxPolicy::sum_guard;
  }
}

// The call's problem on a device: launches, and brings the results back.
class Launch {
 public:
  Launch(Device& device, Call& call) : device_(device), call_(call) {
    call.out.poison();
    if (call.lse.present()) call.lse.poison();
    problem_ = test::to_core(call.problem);
    problem_.total_k = problem_.is_varlen_k() ? call.k.shape()[1] : 0;
    problem_.pages = problem_.is_paged() ? call.k.shape()[0] : 0;
    place(problem_.q, call.problem.q);
    place(problem_.k, call.problem.k);
    place(problem_.v, call.problem.v);
    place(problem_.out, call.problem.out);
    place(problem_.lse, call.problem.lse);
    place(problem_.bias, call.problem.bias);
    place(problem_.mask, call.problem.mask);
    place(problem_.sink, call.problem.sink);
    place(problem_.alibi, call.problem.alibi);
    place(problem_.cu_seqlens_q, call.problem.cu_seqlens_q);
    place(problem_.cu_seqlens_k, call.problem.cu_seqlens_k);
    place(problem_.seqused_q, call.problem.seqused_q);
    place(problem_.seqused_k, call.problem.seqused_k);
    place(problem_.block_table, call.problem.block_table);
  }

  // The kernel for Blackwell reads through the copy engine alone.
  bool is_refused() const {
    const std::vector<std::string> reasons =
        runtime::forward_supports(problem_, device_.properties().arch);
    if (reasons.empty()) return false;
    EXPECT_EQ(device_.properties().arch, "sm_100a") << reasons.front();
    EXPECT_TRUE(reasons.front().find("is laid out in a way") != std::string::npos ||
                reasons.front().find("takes pages of") != std::string::npos)
        << reasons.front();
    return true;
  }

  runtime::ForwardConfig run(const Feature& feature) {
    const runtime::DeviceProperties& chip = device_.properties();
    runtime::ForwardConfig config =
        runtime::choose_forward(problem_, policy_of(call_.spec.softmax), chip.arch, chip.sm_count);
    auto* hopper = std::get_if<FwdConfig>(&config);
    if (feature.change && hopper != nullptr) feature.change(*hopper);
    const runtime::ForwardKernel kernel(device_, config);
    const DeviceBuffer scheduler(device_, 8);
    device_.fill(scheduler.address(), 0, 8);
    const DeviceBuffer workspace(device_,
                                 runtime::forward_workspace_bytes(problem_, config, chip.sm_count));
    runtime::ForwardCall launch;
    launch.problem = problem_;
    launch.scheduler = scheduler.address();
    launch.workspace = workspace.address();
    kernel.run(launch);
    fetch(call_.problem.out);
    if (call_.lse.present()) fetch(call_.problem.lse);
    return config;
  }

 private:
  void place(core::View& view, const Tensor& tensor) {
    if (!tensor.present) return;
    const Covered part = covered(tensor);
    mirrors_.emplace_back(tensor.data, Mirror(device_, part.begin, part.bytes));
    view.data = reinterpret_cast<void*>(mirrors_.back().second.address() +
                                        static_cast<DeviceAddress>(part.base));
  }

  void place(const core::int32*& list, std::span<const std::int32_t> values) {
    if (values.empty()) return;
    mirrors_.emplace_back(values.data(), Mirror(device_, values.data(), values.size_bytes()));
    list = reinterpret_cast<const core::int32*>(mirrors_.back().second.address());
  }

  void fetch(const Tensor& tensor) {
    for (const auto& [data, mirror] : mirrors_) {
      if (data == tensor.data && tensor.data != nullptr) mirror.fetch(covered(tensor).begin);
    }
  }

  Device& device_;
  Call& call_;
  core::Problem problem_;
  std::vector<std::pair<const void*, Mirror>> mirrors_;
};

// In every order of asynchronous work by turns. Gives what was chosen for Hopper.
FwdConfig check(const Feature& feature) {
  static int turn = 0;
  SCOPED_TRACE(test::describe(feature.spec));
  Call call(feature.spec);
  call.poison_unseen();
  if (feature.prepare) feature.prepare(call);
  FwdConfig config;
  ++turn;
  for (const std::string& name : test_devices()) {
    SCOPED_TRACE(name);
    const auto order = static_cast<runtime::EmulationOptions::Order>(turn % 3);
    const auto device = runtime::open_device(
        name, {.order = order, .seed = static_cast<std::uint64_t>(turn), .checks = true});
    // What is changed on Hopper alone has run elsewhere as it was chosen.
    if (feature.change && device->properties().arch != "sm_90a") continue;
    Launch launch(*device, call);
    if (launch.is_refused()) continue;
    const runtime::ForwardConfig chosen = launch.run(feature);
    if (const auto* hopper = std::get_if<FwdConfig>(&chosen)) config = *hopper;
    EXPECT_EQ(call.out.foreign_bytes_changed(), 0) << "beside out";
    EXPECT_EQ(call.lse.foreign_bytes_changed(), 0) << "beside lse";
    call.expect_matches_oracle();
  }
  return config;
}

CaseSpec base(const std::string& name) {
  CaseSpec s;
  s.name = name;
  s.batch = 1;
  s.hq = 2;
  s.hkv = 2;
  s.sq = 150;
  s.sk = 300;
  s.d = 64;
  s.dtype = DType::bf16;
  s.num_splits = 1;
  return s;
}

// ---- What position adds -------------------------------------------------------------------------

TEST(Features, AddsBiases) {
  for (const Bias bias : {Bias::full, Bias::per_key, Bias::per_head, Bias::with_minus_infinity}) {
    for (const Layout layout : {Layout::bshd, Layout::bhsd}) {  // fp32 and 16-bit biases
      CaseSpec s = base("bias_" + std::to_string(static_cast<int>(bias)));
      s.bias = bias;
      s.layout = layout;
      s.causal = bias == Bias::per_key;
      s.dtype = bias == Bias::full ? DType::f16 : DType::bf16;
      s.softmax = test::every_softmax[static_cast<std::size_t>(bias) % 3];
      EXPECT_TRUE(check({s}).has_bias);
    }
  }
}

TEST(Features, HidesByMask) {
  for (const Mask mask : {Mask::random, Mask::per_key, Mask::empty_rows, Mask::late}) {
    for (const Softmax softmax : test::every_softmax) {
      if (mask != Mask::late && softmax != test::every_softmax[static_cast<int>(mask) % 3])
        continue;
      CaseSpec s = base("mask_" + std::to_string(static_cast<int>(mask)));
      s.mask = mask;
      s.softmax = softmax;
      s.logits = mask == Mask::late ? 8.0 : 1.0;
      EXPECT_TRUE(check({s}).has_mask);
    }
  }
}

TEST(Features, SlopesByDistance) {
  for (const Softmax softmax : test::every_softmax) {
    CaseSpec s = base("alibi");
    s.batch = 2;
    s.alibi = true;
    s.softcap = softmax == Softmax::online ? 4.0f : 0.0f;
    s.softmax = softmax;
    s.d = 128;
    EXPECT_TRUE(check({s}).has_alibi);
    s.causal = true;
    s.sk = 130;
    check({s});
  }
}

TEST(Features, DropsWhatTheOracleDrops) {
  for (const Softmax softmax : test::every_softmax) {
    CaseSpec s = base("dropout");
    s.batch = 2;
    s.dropout = 0.4f;
    s.softmax = softmax;
    s.causal = softmax == Softmax::conditional;
    EXPECT_TRUE(check({s}).has_dropout);
    s.entry = Entry::varlen;
    s.d = 128;
    s.hkv = 1;
    check({s});
  }
}

// ---- Values that are not finite
// ------------------------------------------------------------------

TEST(Features, KeepsValuesFromRowsThatDoNotSeeThem) {
  const auto poison = [](Call& call) {
    call.set_v(0, 70, 0, 3, std::numeric_limits<double>::quiet_NaN());
    call.set_v(0, 140, 1, 0, std::numeric_limits<double>::infinity());
    call.set_v(0, 33, 1, 9, -std::numeric_limits<double>::infinity());
  };
  CaseSpec s = base("values_causal");
  s.sq = s.sk = 150;
  s.causal = true;
  s.softmax = Softmax::sum_guard;
  check({s, nullptr, poison});
  s.name = "values_window";
  s.causal = false;
  s.window_left = 20;
  s.window_right = 5;
  s.d = 128;
  s.sink = true;
  s.softmax = Softmax::online;
  check({s, nullptr, poison});
  s.name = "values_mask";
  s.window_left = s.window_right = -1;
  s.mask = Mask::random;
  s.alibi = true;
  s.softmax = Softmax::conditional;
  check({s, nullptr, poison});
  s.name = "values_dropout";
  s.mask = Mask::none;
  s.dropout = 0.5f;
  s.softmax = Softmax::sum_guard;
  check({s, nullptr, poison});
}

// ---- Packed heads and split keys
// -------------------------------------------------------------------

TEST(Features, PacksTheHeadsOfAGroup) {
  for (const test::Index group : {2, 3, 7, 16}) {
    for (const test::Index sq : {1, 5, 40}) {
      CaseSpec s = base("packed");
      s.batch = 2;
      s.hq = 2 * group;
      s.sq = sq;
      s.sk = 200;
      s.d = group == 3 ? 128 : 64;
      s.causal = sq == 5;
      s.window_left = sq == 40 ? 50 : -1;
      s.sink = group == 7;
      s.alibi = group == 3;
      s.dropout = group == 16 && sq == 5 ? 0.3f : 0.0f;
      s.entry = sq == 40 ? Entry::varlen : Entry::dense;
      s.softmax = test::every_softmax[static_cast<std::size_t>(group) % 3];
      const FwdConfig config = check({s});
      EXPECT_TRUE(config.packed || sq == 40);
      EXPECT_EQ(config.warpgroups == 1, group * sq <= 64);
      EXPECT_EQ(config.reads_once, group * sq <= 64);
      if (sq == 40) check({s, [](FwdConfig& c) { c.packed = true, c.tma_out = false; }});
    }
  }
}

TEST(Features, SplitsKeys) {
  for (const Entry entry : test::every_entry) {
    for (const int splits : {0, 2, 3, 9}) {
      // Each entry with two numbers of parts, and each number with three entries.
      if ((static_cast<int>(entry) + splits) % 2 != 0) continue;
      CaseSpec s = base("split");
      s.batch = 5;
      s.hq = 4;
      s.sq = splits == 9 ? 40 : 3;  // two warpgroups, or one
      s.sk = 1100;
      s.d = splits == 3 ? 66 : 64;  // merged column by column, or in fours
      s.num_splits = splits;
      s.entry = entry;
      s.page_size = 32;
      s.sink = splits == 3;
      s.causal = splits == 2;
      s.window_left = splits == 9 ? 300 : -1;
      s.out_dtype = splits == 2 ? std::optional(DType::f32) : std::nullopt;
      s.softmax = test::every_softmax[static_cast<std::size_t>(entry) % 3];
      EXPECT_TRUE(check({s}).split);
    }
  }
}

TEST(Features, MergesMorePartsThanAWarpHasLanes) {
  CaseSpec s = base("parts");
  s.sq = 1;
  s.sk = 36 * 128 - 5;
  s.d = 16;
  s.num_splits = 36;
  s.sink = true;
  EXPECT_TRUE(check({s}).split);
}

// ---- Pages
// -----------------------------------------------------------------------------------------

TEST(Features, ReadsPagesOfAnySize) {
  for (const test::Index page : {1, 3, 8, 16, 48, 96, 128, 256, 500}) {
    for (const bool windowed : {false, true}) {
      if (page > 16 && windowed == (page % 256 == 0)) continue;
      CaseSpec s = base("pages");
      s.batch = 3;
      s.hq = 6;
      s.sq = 3;
      s.lengths_k = {1, 37, 600};
      s.page_size = page;
      s.entry = windowed ? Entry::varlen_paged : Entry::paged;
      s.window_left = windowed ? 150 : -1;
      s.window_right = windowed ? 0 : -1;
      s.d = 128;
      s.softmax = test::every_softmax[static_cast<std::size_t>(page) % 3];
      s.logits = 6.0;
      const FwdConfig config = check({s});
      EXPECT_EQ(config.source, page % 8 == 0 ? core::Source::paged : core::Source::gather);
    }
  }
}

// ---- Head dimensions and layouts
// ---------------------------------------------------------------------

TEST(Features, TakesEveryHeadDimension) {
  using test::Index;
  constexpr std::pair<Index, Index> dims[] = {
      {1, 1},     {3, 3},    {7, 20},   {17, 17},   {40, 40}, {100, 64}, {129, 129},
      {192, 128}, {64, 256}, {256, 64}, {256, 256}, {255, 1}, {1, 256}};
  for (const auto& [d, dv] : dims) {
    CaseSpec s = base("dims");
    s.hkv = 1;
    s.sq = 70;
    s.sk = 200;
    s.d = d;
    s.dv = dv;
    s.causal = d % 2 == 0;
    s.softmax = test::every_softmax[static_cast<std::size_t>(d) % 3];
    s.logits = 5.0;
    check({s});
  }
}

TEST(Features, TakesLayoutsThatTheCopyEngineDoesNot) {
  for (const Layout layout : {Layout::padded, Layout::strided, Layout::reversed}) {
    for (const Entry entry : {Entry::dense, Entry::varlen, Entry::varlen_paged}) {
      CaseSpec s = base("layout");
      s.batch = 5;
      s.hq = 4;
      s.sq = 70;
      s.sk = 150;
      s.d = layout == Layout::strided ? 24 : 64;
      s.layout = layout;
      s.entry = entry;
      s.causal = true;
      s.sink = entry == Entry::varlen;
      s.bias = layout == Layout::reversed ? Bias::full : Bias::none;
      s.mask = layout == Layout::strided ? Mask::random : Mask::none;
      s.softmax = test::every_softmax[static_cast<std::size_t>(entry) % 3];
      check({s});
    }
  }
}

}  // namespace
}  // namespace fovea::tests
