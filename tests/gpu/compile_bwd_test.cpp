// The backward kernels compile for the chip without spilled registers, but for the variants that
// say so, and without a line from ptxas about serialised products.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "runtime/backward_gpu.h"
#include "runtime/backward_tuning.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using runtime::BackwardPart;

struct Variant {
  std::string name;
  core::BwdConfig config;
  bool spills = false;  // a few registers: a known fault, at the price of time and not of results
};

std::ostream& operator<<(std::ostream& out, const Variant& v) { return out << v.name; }

std::vector<Variant> variants() {
  std::vector<Variant> list;
  for (const core::int32 head_dim : {64, 128}) {
    for (int set = head_dim == 64 ? 0 : 1; set < 16; set += 2) {
      const auto bit = [set](int place) { return (set >> place & 1) != 0; };
      core::BwdConfig c;
      c.dtype = bit(0) ? core::DType::bf16 : core::DType::f16;
      c.wide = bit(1) && bit(3);
      c.head_dim = c.head_dim_v = head_dim;
      c.bound_right = bit(0) || bit(1);
      c.bound_left = bit(1);
      c.ragged = bit(2);
      c.deterministic = bit(3);
      c.dq_apart = core::fits_dq_apart(c);
      list.push_back({"d" + std::to_string(head_dim) + "_" + std::to_string(set), c, false});
    }
  }
  constexpr core::HeadDims dims[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
  for (const core::HeadDims d : dims) {
    for (const char* feature : {"plain", "softcap", "alibi", "all"}) {
      const std::string name = feature;
      const bool all = name == "all";
      core::BwdConfig c;
      c.dtype = all ? core::DType::f16 : core::DType::bf16;
      c.head_dim = d.qk;
      c.head_dim_v = d.v;
      c.bound_right = c.ragged = c.deterministic = true;
      c.has_softcap = all || name == "softcap";
      c.has_alibi = all || name == "alibi";
      c.has_bias = c.has_mask = c.has_dropout = all;
      c.split_products = !core::fits_whole_columns(c);
      c.dq_apart = core::fits_dq_apart(c);
      c.pair = core::fits_pair(c);
      // Softcap and ALiBi alone are of interest where they keep whole columns.
      if (c.split_products && core::modifies_backward(c) && !all) continue;
      list.push_back({"d" + std::to_string(d.qk) + "_" + std::to_string(d.v) + "_" + name, c,
                      d.qk > 64 && all});
    }
  }
  // Schedules other than the chosen one.
  for (const core::int32 head_dim : {64, 128}) {
    core::BwdConfig c;
    c.head_dim = c.head_dim_v = head_dim;
    c.bound_right = true;
    c.dq_apart = core::fits_dq_apart(c);
    for (const core::BwdConfig& variant : runtime::backward_variants(c)) {
      if (variant == c) continue;
      std::string name = "d" + std::to_string(head_dim) + "_";
      for (const char letter : runtime::backward_switches(variant)) {
        name += letter == ',' || letter == '=' ? '_' : letter;
      }
      list.push_back({name, variant, false});
    }
  }
  return list;
}

class CompileBackward : public ::testing::TestWithParam<Variant> {};

TEST_P(CompileBackward, WithoutSpills) {
  const TemporaryFolder folder;
  runtime::Jit jit({.cache_folder = folder.path()});
  for (std::size_t i = 0; i < runtime::backward_parts; ++i) {
    const auto part = static_cast<BackwardPart>(i);
    runtime::CompileRequest request;
    request.text = runtime::backward_text(GetParam().config, part);
    request.arch = "sm_90a";
    request.format = runtime::ImageFormat::cubin;
    const bool may_spill = GetParam().spills && part == BackwardPart::main;
    request.strict = !may_spill;  // strict: a spill or an advisory is an error
    try {
      const runtime::CompileResult result = jit.compile(request);
      ASSERT_EQ(result.image->report.kernels.size(), 1u);
      const runtime::KernelResources& kernel = result.image->report.kernels.front();
      EXPECT_EQ(kernel.spill_store_bytes + kernel.spill_load_bytes > 0, may_spill)
          << "a variant that spills no longer has to be held to it";
      RecordProperty("registers", kernel.registers);
    } catch (const runtime::CompileError& error) {
      FAIL() << error.what() << "\n" << error.log();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CompileBackward, ::testing::ValuesIn(variants()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fovea::tests
