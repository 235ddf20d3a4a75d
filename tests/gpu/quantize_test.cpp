// The quantising kernels against their CPU twin, bit for bit: dtypes, layouts, odd head dimensions,
// packed sequences, every granularity of scales, and elements that are not finite. On the emulated
// Hopper chip; FOVEA_TEST_DEVICES=cuda runs it on a GPU.
#include "cpu/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "runtime/quantize_gpu.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using core::int32;
using core::int64;
using core::uint8;
using runtime::Device;
using runtime::DeviceAddress;
using runtime::DeviceBuffer;

struct QuantizeCase {
  std::string name;
  core::DType dtype = core::DType::bf16;
  int64 batch = 1;
  int64 rows = 150;
  int32 heads_q = 2;
  int32 heads_kv = 1;
  int32 head_dim = 128;
  int32 head_dim_v = 128;
  core::ScaleGranularity granularity = core::ScaleGranularity::block;
  bool rotate = true;
  bool specials = false;    // infinities and NaN among the elements
  int64 column_stride = 1;  // elements from one column to the next
  std::vector<int32> cu_seqlens = {};
  std::vector<int32> seqused = {};  // of q, k and v
  core::DType to = core::DType::e4m3;
  bool scaled = false;  // the elements have scales: of a (sequence, KV head), and of blocks
  int32 page_size = 0;  // of k and v, in reversed order
  int32 to_pages = 0;   // keys of a page that codes go to, in reversed order
  int64 rows_q = 0;     // fewer than of k and v, and all of them used
  core::RotaryPairs rotary = core::RotaryPairs::none;
  int32 rotary_pairs = 32;
  core::DType rotary_dtype = core::DType::bf16;
};

std::ostream& operator<<(std::ostream& out, const QuantizeCase& c) { return out << c.name; }

// A tensor (batch, row, head, column) on the host; values spread over twelve binades.
class HostTensor {
 public:
  HostTensor(const QuantizeCase& c, int32 heads, int32 columns, core::uint64 seed) {
    const int64 rows = c.cu_seqlens.empty() ? c.rows : c.cu_seqlens.back();
    const int64 batches = c.cu_seqlens.empty() ? c.batch : 1;
    view.dtype = c.dtype;
    view.stride[3] = c.column_stride;
    view.stride[2] = columns * c.column_stride;
    view.stride[1] = heads * view.stride[2];
    view.stride[0] = rows * view.stride[1];
    bytes.resize(static_cast<std::size_t>(batches * view.stride[0] * core::size_bytes(c.dtype)));
    view.data = bytes.data();
    core::uint64 state = seed;
    for (int64 i = 0; i < batches * view.stride[0]; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const double uniform = static_cast<double>(state >> 11) * 0x1p-52 - 1.0;
      auto value = static_cast<float>(uniform * std::exp2(static_cast<double>(state >> 60) - 6.0));
      if (c.specials && i % 977 == 5) value = std::numeric_limits<float>::infinity();
      if (c.specials && i % 977 == 6) value = std::numeric_limits<float>::quiet_NaN();
      core::store_element(bytes.data(), c.dtype, i, value);
    }
  }

  core::View view;
  std::vector<uint8> bytes;
};

// Bytes of all operands, in one order. What is not written stays zero.
std::vector<std::vector<uint8>> run_on_cpu(const core::Problem& p,
                                           const core::QuantizeOptions& options,
                                           const core::PageTarget& target, int64 pages) {
  const core::Fp8Layout l = core::fp8_layout(p);
  core::Problem pool = p;
  pool.pages = pages;
  pool.page_size = target.page_size;
  pool.cu_seqlens_k = nullptr;
  const core::Fp8Layout keys = target ? core::fp8_layout(core::pages_as_sequences(pool)) : l;
  std::vector<std::vector<uint8>> all;
  for (const int64 bytes :
       {l.q_bytes, keys.k_bytes, keys.v_bytes, l.q_scale_bytes, keys.key_scale_bytes}) {
    all.emplace_back(static_cast<std::size_t>(bytes), uint8{0});
  }
  const auto neutral = std::vector<float>(all[3].size() / sizeof(float), 1.0f);
  std::memcpy(all[3].data(), neutral.data(), all[3].size());
  cpu::quantize(
      p, options,
      {all[0].data(), all[1].data(), all[2].data(), reinterpret_cast<float*>(all[3].data()),
       reinterpret_cast<core::KeyScale*>(all[4].data()), target});
  return all;
}

class QuantizeKernels : public ::testing::TestWithParam<QuantizeCase> {};

TEST_P(QuantizeKernels, AgreeWithTheirTwin) {
  const QuantizeCase& c = GetParam();
  const HostTensor q(c, c.heads_q, c.head_dim, 1);
  const HostTensor k(c, c.heads_kv, c.head_dim, 2);
  const HostTensor v(c, c.heads_kv, c.head_dim_v, 3);
  core::Problem p;
  p.q = q.view;
  p.k = k.view;
  p.v = v.view;
  p.batch = c.cu_seqlens.empty() ? c.batch : static_cast<int64>(c.cu_seqlens.size()) - 1;
  p.seqlen_q = p.seqlen_k = c.rows;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  const int64 total = c.cu_seqlens.empty() ? 0 : c.cu_seqlens.back();
  p.total_q = p.total_k = total;
  if (!c.cu_seqlens.empty()) p.cu_seqlens_q = p.cu_seqlens_k = c.cu_seqlens.data();
  if (!c.seqused.empty()) p.seqused_q = p.seqused_k = c.seqused.data();
  if (c.rows_q > 0) {
    p.seqlen_q = c.rows_q;
    p.seqused_q = nullptr;
  }
  std::vector<float> scales;
  if (c.scaled) {
    for (int i = 0; i < 64; ++i) scales.push_back(0.5f + 0.0625f * static_cast<float>(i));
    const int64 blocks = core::ceil_div(c.rows, core::scale_block);
    p.q_scale = {scales.data(), core::DType::f32, {c.heads_kv, 1, 0, 0}};
    p.q_scale_heads = c.heads_q / c.heads_kv;
    p.k_scale = p.q_scale;
    p.v_scale = {scales.data(), core::DType::f32, {c.heads_kv * blocks, blocks, 1, 0}};
  }
  std::vector<int32> table;
  if (c.page_size > 0) {
    p.page_size = c.page_size;
    p.pages = c.batch * c.rows / c.page_size;
    p.block_table_stride = c.rows / c.page_size;
    for (int64 i = p.pages - 1; i >= 0; --i) table.push_back(static_cast<int32>(i));
    p.block_table = table.data();
    p.k.stride[0] = p.k.stride[1] * c.page_size;
    p.v.stride[0] = p.v.stride[1] * c.page_size;
  }
  core::QuantizeOptions options{c.granularity, c.rotate, 42, c.to};
  QuantizeCase tables;
  tables.dtype = c.rotary_dtype;
  tables.rows = 400;
  const HostTensor cos(tables, 1, c.rotary_pairs, 4);
  const HostTensor sin(tables, 1, c.rotary_pairs, 5);
  if (c.rotary != core::RotaryPairs::none) {
    const int64 strides[] = {0, 0, c.rotary_pairs, 1};
    options.rotary = {c.rotary, c.rotary_pairs, 400, 7, cos.view, sin.view};
    std::copy_n(strides, 4, options.rotary.cos.stride);
    std::copy_n(strides, 4, options.rotary.sin.stride);
  }
  std::vector<int32> first_keys;
  core::PageTarget target;
  if (c.to_pages > 0) {
    target.page_size = c.to_pages;
    for (int64 b = 0; b < p.batch; ++b) first_keys.push_back(static_cast<int32>(64 * b));
    target.first_keys = first_keys.data();
    target.block_table_stride = (c.rows + 64 * p.batch) / c.to_pages + 1;
    for (int64 i = p.batch * target.block_table_stride - 1; i >= 0; --i) {
      table.push_back(static_cast<int32>(i));
    }
    target.block_table = table.data();
  }
  const std::vector<std::vector<uint8>> expected =
      run_on_cpu(p, options, target, static_cast<int64>(table.size()));

  for (const std::string& name : test_devices()) {
    if (name.find("sm_90a") == std::string::npos && name.find("cuda") == std::string::npos) {
      continue;
    }
    SCOPED_TRACE(name);
    const auto device = runtime::open_device(name);
    std::vector<DeviceBuffer> memory;
    const auto upload = [&](const std::vector<uint8>& bytes) {
      memory.emplace_back(*device, bytes.size());
      device->copy_to_device(memory.back().address(), bytes.data(), bytes.size());
      return memory.back().address();
    };
    const auto reserve = [&](std::size_t bytes) {
      memory.emplace_back(*device, bytes);
      device->fill(memory.back().address(), 0, bytes);
      return memory.back().address();
    };
    runtime::ForwardCall call;
    call.problem = p;
    call.problem.q.data = reinterpret_cast<void*>(upload(q.bytes));
    call.problem.k.data = reinterpret_cast<void*>(upload(k.bytes));
    call.problem.v.data = reinterpret_cast<void*>(upload(v.bytes));
    if (!c.cu_seqlens.empty()) {
      std::vector<uint8> bytes(c.cu_seqlens.size() * sizeof(int32));
      std::memcpy(bytes.data(), c.cu_seqlens.data(), bytes.size());
      call.problem.cu_seqlens_q = call.problem.cu_seqlens_k =
          reinterpret_cast<const int32*>(upload(bytes));
    }
    const auto upload_list = [&](const auto& list) {
      std::vector<uint8> bytes(list.size() * sizeof list[0]);
      std::memcpy(bytes.data(), list.data(), bytes.size());
      return upload(bytes);
    };
    if (!c.seqused.empty()) {
      const auto there = reinterpret_cast<const int32*>(upload_list(c.seqused));
      call.problem.seqused_k = there;
      if (p.seqused_q != nullptr) call.problem.seqused_q = there;
    }
    core::QuantizeOptions on_device = options;
    if (options.rotary) {
      on_device.rotary.cos.data = reinterpret_cast<void*>(upload(cos.bytes));
      on_device.rotary.sin.data = reinterpret_cast<void*>(upload(sin.bytes));
    }
    if (c.page_size > 0) {
      call.problem.block_table = reinterpret_cast<const int32*>(upload_list(table));
    }
    if (c.scaled) {
      const auto there = reinterpret_cast<void*>(upload_list(scales));
      call.problem.q_scale.data = call.problem.k_scale.data = call.problem.v_scale.data = there;
    }
    std::vector<DeviceAddress> places;
    for (const std::vector<uint8>& bytes : expected) places.push_back(reserve(bytes.size()));
    runtime::Fp8Operands operands{places[0], places[1], places[2], places[3], places[4]};
    operands.target = target;
    if (target) {
      operands.target.block_table = reinterpret_cast<const int32*>(upload_list(table));
      operands.target.first_keys = reinterpret_cast<const int32*>(upload_list(first_keys));
    }
    const runtime::Quantizer quantizer(*device, call.problem, on_device,
                                       {.to_pages = static_cast<bool>(target)});
    const DeviceAddress scratch = reserve(quantizer.scratch_bytes(p) + 4);
    quantizer.run_q(call, operands, scratch);
    quantizer.run_keys(call, operands, scratch);
    constexpr const char* names[] = {"q", "k", "v", "q_scale", "key_scale"};
    for (std::size_t i = 0; i < places.size(); ++i) {
      std::vector<uint8> got(expected[i].size());
      device->copy_to_host(got.data(), places[i], got.size());
      device->synchronize();
      std::size_t different = 0;
      for (std::size_t at = 0; at < got.size(); ++at) {
        // The logarithm of a scale that is no power of two is an approximation.
        if (c.scaled && i == 4 && at % sizeof(core::KeyScale) / 4 == 1) continue;
        if (got[at] != expected[i][at] && different++ == 0) {
          ADD_FAILURE() << names[i] << " byte " << at << " is " << int{got[at]} << " instead of "
                        << int{expected[i][at]};
        }
      }
      EXPECT_EQ(different, 0u) << names[i] << " of " << got.size();
    }
  }
}

const QuantizeCase quantize_cases[] = {
    {.name = "bf16"},
    {.name = "f16_batches", .dtype = core::DType::f16, .batch = 2, .rows = 33},
    {.name = "f32_d64", .dtype = core::DType::f32, .head_dim = 64, .head_dim_v = 64},
    {.name = "d256", .rows = 70, .head_dim = 256, .head_dim_v = 256},
    {.name = "d80_d40", .head_dim = 80, .head_dim_v = 40},
    {.name = "d100_d20", .head_dim = 100, .head_dim_v = 20},
    {.name = "d192", .head_dim = 192, .head_dim_v = 128},
    {.name = "strided_columns", .head_dim = 64, .head_dim_v = 64, .column_stride = 3},
    {.name = "one_tensor_one_scale", .batch = 2, .granularity = core::ScaleGranularity::tensor},
    {.name = "one_head_one_scale",
     .batch = 2,
     .heads_q = 4,
     .heads_kv = 2,
     .granularity = core::ScaleGranularity::head},
    {.name = "unrotated", .rotate = false},
    {.name = "rotary", .rows_q = 40, .rotary = core::RotaryPairs::halves, .rotary_pairs = 64},
    {.name = "rotary_d256_seqused",
     .batch = 2,
     .rows = 70,
     .head_dim = 256,
     .seqused = {70, 33},
     .rows_q = 20,
     .rotary = core::RotaryPairs::halves,
     .rotary_dtype = core::DType::f32},
    {.name = "rotary_neighbours_packed",
     .dtype = core::DType::f16,
     .head_dim = 64,
     .cu_seqlens = {0, 50, 50, 178, 179, 300},
     .rotary = core::RotaryPairs::neighbours,
     .rotary_dtype = core::DType::f16},
    {.name = "rotary_part_of_columns",
     .head_dim = 80,
     .to = core::DType::s8,
     .rotary = core::RotaryPairs::halves,
     .rotary_pairs = 20},
    {.name = "specials", .rotate = false, .specials = true},
    {.name = "specials_rotated", .specials = true},
    {.name = "specials_one_scale",
     .granularity = core::ScaleGranularity::tensor,
     .rotate = false,
     .specials = true},
    {.name = "e4m3", .dtype = core::DType::e4m3, .rotate = false},
    {.name = "e5m2", .dtype = core::DType::e5m2},
    {.name = "packed", .heads_kv = 2, .cu_seqlens = {0, 50, 50, 178, 179, 300}},
    {.name = "packed_heads",
     .granularity = core::ScaleGranularity::head,
     .cu_seqlens = {0, 50, 50, 178, 179, 300}},
    {.name = "unused_rows", .batch = 2, .seqused = {0, 77}},
    {.name = "to_e5m2", .to = core::DType::e5m2},
    {.name = "to_s8", .batch = 2, .heads_q = 4, .heads_kv = 2, .to = core::DType::s8},
    {.name = "to_s8_d100_f16",
     .dtype = core::DType::f16,
     .rows = 70,
     .head_dim = 100,
     .head_dim_v = 20,
     .to = core::DType::s8},
    {.name = "to_s8_d256_specials",
     .dtype = core::DType::f32,
     .rows = 70,
     .head_dim = 256,
     .head_dim_v = 64,
     .specials = true,
     .to = core::DType::s8},
    {.name = "to_s8_specials_one_scale",
     .heads_q = 1,
     .head_dim = 32,
     .head_dim_v = 32,
     .granularity = core::ScaleGranularity::tensor,
     .rotate = false,
     .specials = true,
     .to = core::DType::s8},
    {.name = "to_s8_packed_heads",
     .heads_kv = 2,
     .granularity = core::ScaleGranularity::head,
     .cu_seqlens = {0, 50, 50, 178, 179, 300},
     .to = core::DType::s8},
    {.name = "s8_scaled",
     .dtype = core::DType::s8,
     .batch = 2,
     .rows = 90,
     .heads_q = 4,
     .heads_kv = 2,
     .head_dim = 64,
     .head_dim_v = 64,
     .seqused = {90, 17},
     .scaled = true},
    {.name = "scaled_codes",
     .dtype = core::DType::e4m3,
     .batch = 2,
     .rows = 90,
     .heads_q = 4,
     .heads_kv = 2,
     .scaled = true},
    {.name = "pages",
     .dtype = core::DType::e5m2,
     .batch = 2,
     .rows = 96,
     .head_dim = 64,
     .head_dim_v = 64,
     .seqused = {90, 17},
     .page_size = 24},
    {.name = "to_pages", .batch = 2, .heads_kv = 2, .to_pages = 64},
    {.name = "to_pages_seqused_s8",
     .batch = 3,
     .rows = 70,
     .head_dim = 80,
     .head_dim_v = 40,
     .seqused = {70, 0, 33},
     .to = core::DType::s8,
     .to_pages = 32},
    {.name = "to_pages_packed_rotary",
     .head_dim = 64,
     .head_dim_v = 64,
     .cu_seqlens = {0, 50, 50, 148},
     .to_pages = 96,
     .rotary = core::RotaryPairs::halves},
    {.name = "to_pages_one_scale_d256",
     .dtype = core::DType::f32,
     .rows = 70,
     .head_dim = 256,
     .head_dim_v = 256,
     .granularity = core::ScaleGranularity::head,
     .to_pages = 128},
};

INSTANTIATE_TEST_SUITE_P(Cases, QuantizeKernels, ::testing::ValuesIn(quantize_cases),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fovea::tests
