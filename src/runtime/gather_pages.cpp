#include "runtime/gather_pages.h"

#include <algorithm>
#include <span>

#include "runtime/jit.h"
#include "runtime/source.h"
#include "runtime/text.h"

namespace fovea::runtime {

namespace {

using core::int32;
using core::int64;

// Query rows that a key meets, on average over the keys of a sequence and the heads that share it.
int64 rows_of_a_key(const core::Problem& p) {
  const auto keys = static_cast<double>(std::max<int64>(p.seqlen_k, 1));
  double rows = static_cast<double>(p.seqlen_q);
  if (p.is_varlen_q() && p.batch > 0) {
    rows = std::min(rows, static_cast<double>(p.total_q) / static_cast<double>(p.batch));
  }
  // A row sees `left` keys before its own position and `right` behind it; the last row's position
  // is the last key's.
  const double left = p.window.left < 0 ? keys : static_cast<double>(p.window.left);
  const double right = p.window.right < 0 ? keys : static_cast<double>(p.window.right);
  const double seen =
      std::min(std::min(left, keys - rows / 2) + 1 + std::min(right, rows / 2), keys);
  return static_cast<int64>(rows * std::max(seen, 1.0) / keys) * p.group_size();
}

// From how many on a copy is the cheaper, as measured (docs/kernels/fp8.md, "Pages"); 0: at no
// number. Sums in fp32 leave the fewest registers beside a warp that finds pages, and lose most.
int64 rows_that_pay(const core::FwdConfig& c) {
  const int32 widest = std::max(c.head_dim, c.head_dim_v);
  if (widest <= 64) return c.page_keys <= 64 ? 8192 : 0;
  if (c.promote == 0 || c.dtype == core::DType::s8) return 6144;
  if (widest > 128) return 4096;
  return core::is_windowed(c) ? 2048 : 1536;
}

}  // namespace

Gathering gathering_of(const core::Problem& p, const core::FwdConfig& in_place) {
  const int64 rows = rows_of_a_key(p);
  const int64 enough = rows_that_pay(in_place);
  if (enough == 0) return {false, "128 keys of 64 columns at a time cost what contiguous ones do"};
  if (rows < enough) {
    return {false, text("a key meets ", rows, " query rows, and a copy pays from ", enough, " on")};
  }
  if (p.batch * p.seqlen_k > p.pages * p.page_size) {
    return {false, text("a copy would have room for ", p.batch * p.seqlen_k,
                        " keys, more than the pages hold; max_seqlen_k bounds it")};
  }
  return {true, text("a key meets ", rows, " query rows, and a copy pays from ", enough, " on")};
}

core::Problem gathered(core::Problem p) {
  p.block_table = nullptr;
  p.block_table_stride = 0;
  p.page_size = 0;
  return p;
}

std::string gather_text() {
  KernelSource source;
  source.name = "gather_pages";
  source.include = "device/gather.cuh";
  source.call = "fovea::device::gather_pages";
  source.params = "fovea::core::GatherParams";
  source.threads = core::gather_threads;
  source.ctas = core::gather_ctas;
  return kernel_text(source);
}

GatherKernel::GatherKernel(Device& device)
    : device_(device), kernel_(load_kernel(device, default_jit(), gather_text())) {}

void GatherKernel::run(const core::Problem& p, const Fp8Operands& to, Stream stream) const {
  const core::Fp8Layout of_pages = core::fp8_layout(core::pages_as_sequences(p));
  const core::Fp8Layout l = core::fp8_layout(gathered(p));
  core::GatherParams params;
  params.k = static_cast<const core::uint8*>(p.k.data);
  params.v = static_cast<const core::uint8*>(p.v.data);
  params.key_scale = static_cast<const core::KeyScale*>(p.k_scale.data);
  std::copy_n(p.k.stride, 3, params.k_stride);
  const int64 v_stride[] = {p.v.stride[0], p.v.stride[3], p.v.stride[2]};
  std::copy_n(v_stride, 3, params.v_stride);
  params.key_scale_stride[0] = of_pages.blocks_k * p.heads_kv;
  params.key_scale_stride[1] = of_pages.blocks_k;
  params.block_table = p.block_table;
  params.block_table_stride = p.block_table_stride;
  params.seqused = p.seqused_k;
  params.page_size = p.page_size;
  params.sequences = static_cast<int32>(p.batch);
  params.heads = p.heads_kv;
  params.columns = l.columns;
  params.columns_v = l.columns_v;
  params.keys = static_cast<int32>(p.seqlen_k);
  params.blocks = static_cast<int32>(l.blocks_k);
  params.k_to = reinterpret_cast<core::uint8*>(to.k);
  params.v_to = reinterpret_cast<core::uint8*>(to.v);
  params.key_scale_to = reinterpret_cast<core::KeyScale*>(to.key_scale);
  const int64 pieces = p.batch * p.heads_kv * core::ceil_div(p.seqlen_k, p.page_size);
  const int64 at_once = int64{device_.properties().sm_count} * core::gather_ctas;
  LaunchConfig launch;
  launch.grid.x = static_cast<std::uint32_t>(std::clamp<int64>(pieces, 1, at_once));
  launch.block.x = core::gather_threads;
  device_.launch(*kernel_, launch, std::as_bytes(std::span(&params, 1)), stream);
}

}  // namespace fovea::runtime
