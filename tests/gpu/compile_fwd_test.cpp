// The variants of Hopper's forward kernel with the fewest registers to spare compile for the chip
// without a spilled register, under whichever NVRTC is found: an older one than that of the
// development machine spilled in each of them.
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "runtime/forward_fp8.h"
#include "runtime/forward_gpu.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using core::FwdConfig;
using core::SoftmaxPolicy;
using core::Source;

struct Variant {
  std::string name;
  FwdConfig config;
};

std::ostream& operator<<(std::ostream& out, const Variant& v) { return out << v.name; }

FwdConfig base(core::int32 head_dim, core::int32 head_dim_v, core::int32 tile_k) {
  FwdConfig c;
  c.head_dim = head_dim;
  c.head_dim_v = head_dim_v;
  c.tile_k = tile_k;
  return c;
}

// Rows found by threads, one tile per CTA.
FwdConfig gathered(core::int32 head_dim, core::int32 head_dim_v, core::int32 tile_k) {
  FwdConfig c = base(head_dim, head_dim_v, tile_k);
  c.source = Source::gather;
  c.softmax = SoftmaxPolicy::online;
  c.ragged = true;
  c.chunked = c.tma_out = c.persistent = false;
  return c;
}

// In 8 bits with q in registers.
FwdConfig holding_q(core::int32 head_dim, core::int32 tile_k, core::int32 promote) {
  FwdConfig c = base(head_dim, head_dim, tile_k);
  c.dtype = core::DType::e4m3;
  c.bound_left = c.bound_right = c.ragged = c.has_sink = c.q_in_registers = true;
  c.promote = promote;
  c.ping_pong = promote > 0;
  return c;
}

// A window, of whose first blocks a warpgroup may take half.
FwdConfig halved(core::int32 head_dim, core::int32 head_dim_v) {
  FwdConfig c = base(head_dim, head_dim_v, 128);
  c.bound_left = c.bound_right = c.ragged = true;
  return c;
}

// Where the loading thread holds two tiles in 24 registers.
FwdConfig looking_ahead(bool causal) {
  FwdConfig c = base(128, 128, 128);
  c.looks_ahead = true;
  c.bound_right = causal;
  c.tail = !causal;
  return c;
}

// In 8 bits and pages, between the bounds of a window.
FwdConfig in_pages(core::int32 head_dim, core::int32 tile_k, core::int32 promote,
                   core::int32 page_keys) {
  FwdConfig c = holding_q(head_dim, tile_k, promote);
  c.q_in_registers = false;
  c.source = Source::paged;
  c.page_keys = page_keys;
  return c;
}

FwdConfig with(FwdConfig c, void (*change)(FwdConfig&)) {
  change(c);
  return c;
}

void staged_in_q(FwdConfig& c) { c.out_apart = false; }

void three_warpgroups(FwdConfig& c) {
  c.warpgroups = 3;
  c.stages = 4;
}

void packed_window(FwdConfig& c) {
  c.chunked = c.packed = true;
  c.bound_left = c.bound_right = true;
}

void conditional(FwdConfig& c) { c.softmax = SoftmaxPolicy::conditional; }

// Parts of packed heads, keys in pages.
void split_pages(FwdConfig& c) {
  c.stages = 4;
  c.source = Source::paged;
  c.bound_left = c.ragged = c.packed = c.split = true;
  c.tma_out = false;
}

// One warpgroup, for few rows.
FwdConfig few(core::int32 head_dim, core::int32 tile_k, core::int32 stages) {
  FwdConfig c = base(head_dim, head_dim, tile_k);
  c.stages = stages;
  c.warpgroups = 1;
  c.ping_pong = c.out_apart = c.tma_out = false;
  c.packed = c.reads_once = true;
  return c;
}

// Parts, keys in pages, between the bounds of a window, with what is added to scores.
void modified_pages(FwdConfig& c) {
  c.source = Source::paged;
  c.transform = core::ScoreTransform::softcap;
  c.bound_left = c.bound_right = c.ragged = c.split = c.has_alibi = true;
}

const Variant variants[] = {
    {"gathered_d256_16", gathered(256, 16, 64)},
    {"gathered_d144", with(gathered(144, 144, 80), staged_in_q)},
    {"gathered_d128_packed", with(gathered(128, 128, 112), packed_window)},
    {"gathered_d16_256", with(gathered(16, 256, 64), conditional)},
    {"paged_d64_split", with(base(64, 64, 128), split_pages)},
    {"e4m3_d64_q_in_registers", with(holding_q(64, 128, 0), three_warpgroups)},
    {"e4m3_d256_promoted_q_in_registers", holding_q(256, 64, 12)},
    {"halved_d192_128", with(halved(192, 128), staged_in_q)},
    {"halved_d64", with(halved(64, 64), three_warpgroups)},
    {"e4m3_d128_promoted_pages", in_pages(128, 128, 6, 128)},
    {"e4m3_d256_promoted_pages", in_pages(256, 64, 12, 32)},
    {"few_d64_modified_pages", with(few(64, 96, 8), modified_pages)},
    {"few_d128_modified_pages", with(few(128, 96, 4), modified_pages)},
    {"few_d256_modified_pages", with(few(256, 32, 6), modified_pages)},
    {"few_d128", few(128, 128, 3)},
    {"few_d256", few(256, 64, 3)},
    {"ahead_d128_causal", looking_ahead(true)},
    {"ahead_d128_tail", looking_ahead(false)},
};

class CompileForward : public testing::TestWithParam<Variant> {};

TEST_P(CompileForward, SpillsNothing) {
  runtime::CompileRequest request;
  const FwdConfig& config = GetParam().config;
  request.text = core::is_eight_bit(config.dtype) ? runtime::forward_fp8_text(config)
                                                  : runtime::forward_text(config);
  request.arch = "sm_90a";
  EXPECT_NO_THROW(runtime::default_jit().compile(request));
}

INSTANTIATE_TEST_SUITE_P(Variants, CompileForward, testing::ValuesIn(variants),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace fovea::tests
