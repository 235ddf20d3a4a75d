// The quantising kernels with the fewest registers to spare compile for the chip without a spilled
// register, under whichever NVRTC is found: how many CTAs share a multiprocessor is reckoned from
// what a thread holds (core::quantize_ctas), and compilers differ in what they need beside.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <utility>

#include "runtime/gather_pages.h"
#include "runtime/quantize_gpu.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using core::DType;
using core::QuantizeConfig;

struct Variant {
  std::string name;
  QuantizeConfig config;
};

std::ostream& operator<<(std::ostream& out, const Variant& v) { return out << v.name; }

QuantizeConfig rows(DType dtype, core::int32 columns) {
  QuantizeConfig c;
  c.dtype = dtype;
  c.columns = columns;
  c.rotate = true;
  c.ragged = true;
  return c;
}

QuantizeConfig columns(DType dtype, core::int32 columns) {
  QuantizeConfig c = rows(dtype, columns);
  c.rotate = false;
  c.transpose = true;
  return c;
}

QuantizeConfig scattered(QuantizeConfig c) {
  c.vectors = false;
  return c;
}

QuantizeConfig paged(QuantizeConfig c) {
  c.paged = true;
  return c;
}

QuantizeConfig to_pages(QuantizeConfig c) {
  c.to_pages = c.ragged = true;
  return c;
}

QuantizeConfig coded(QuantizeConfig c) {
  c.to = c.dtype;
  c.rotate = false;
  c.scaled = true;
  return c;
}

QuantizeConfig integers(QuantizeConfig c) {
  c.to = DType::s8;
  return c;
}

// With tables of the widest type.
QuantizeConfig turned(QuantizeConfig c, core::RotaryPairs pairing) {
  c.rotary = pairing;
  c.rotary_pairs = c.columns / 2;
  return c;
}

class CompileQuantize : public testing::TestWithParam<Variant> {};

void expect_no_spills(std::string text, std::string arch) {
  runtime::CompileRequest request;
  request.text = std::move(text);
  request.arch = std::move(arch);
  EXPECT_NO_THROW(runtime::default_jit().compile(request));
}

TEST_P(CompileQuantize, SpillsNothing) {
  expect_no_spills(runtime::quantize_text(GetParam().config), "sm_90a");
}

// The kernel that gathers quantised pages, too.
TEST(CompileGather, SpillsNothing) {
  for (const char* arch : {"sm_90a", "sm_100a"}) expect_no_spills(runtime::gather_text(), arch);
}

INSTANTIATE_TEST_SUITE_P(
    Variants, CompileQuantize,
    testing::Values(
        Variant{"rows_d64", rows(DType::bf16, 64)}, Variant{"rows_d256", rows(DType::bf16, 256)},
        Variant{"rows_d128_integers", integers(rows(DType::bf16, 128))},
        Variant{"rows_d64_f32", rows(DType::f32, 64)},
        Variant{"rows_d64_scattered", scattered(rows(DType::bf16, 64))},
        Variant{"rows_d256_f32_pages", paged(rows(DType::f32, 256))},
        Variant{"rows_d128_to_pages", to_pages(rows(DType::bf16, 128))},
        Variant{"rows_d256_f32_to_pages", to_pages(rows(DType::f32, 256))},
        Variant{"columns_d256_to_pages", to_pages(columns(DType::bf16, 256))},
        Variant{"rows_d64_turned", turned(rows(DType::bf16, 64), core::RotaryPairs::halves)},
        Variant{"rows_d256_turned", turned(rows(DType::bf16, 256), core::RotaryPairs::neighbours)},
        Variant{"columns_d128", columns(DType::bf16, 128)},
        Variant{"columns_d128_pages", paged(columns(DType::bf16, 128))},
        Variant{"columns_d256_f32", columns(DType::f32, 256)},
        Variant{"columns_d256_scattered", scattered(columns(DType::f16, 256))},
        Variant{"columns_d128_e4m3", coded(columns(DType::e4m3, 128))},
        Variant{"columns_d64_e5m2_pages", paged(coded(columns(DType::e5m2, 64)))}),
    [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace fovea::tests
