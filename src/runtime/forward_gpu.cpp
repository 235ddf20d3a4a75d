#include "runtime/forward_gpu.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/mask.h"
#include "core/numeric.h"
#include "fovea/fovea.hpp"
#include "runtime/forward_config.h"
#include "runtime/source.h"

namespace fovea::runtime {

namespace {

using core::DType;
using core::FwdConfig;
using core::FwdParams;
using core::int32;
using core::int64;
using core::Problem;
using core::ScoreTransform;
using core::View;

bool is_blackwell(std::string_view arch) { return arch == "sm_100a" || arch == "sm_103a"; }

DeviceAddress address_of(const View& view) { return reinterpret_cast<DeviceAddress>(view.data); }

// What the copy engine takes: contiguous rows of 16-bit elements, every other step a positive
// multiple of 16 bytes. Dimensions of extent 1 have no step.
bool suits_copy_engine(const View& view, const int64 (&extent)[3], int64 columns) {
  if (address_of(view) % 16 != 0 || core::size_bytes(view.dtype) != 2) return false;
  if (view.stride[3] != 1 && columns > 1) return false;
  for (int i = 0; i < 3; ++i) {
    if (extent[i] <= 1) continue;
    const int64 bytes = view.stride[i] * 2;
    if (bytes <= 0 || bytes % 16 != 0 || bytes >= int64{1} << 40) return false;
  }
  return true;
}

// Extents of (batch, row, head) in memory.
struct Extents {
  int64 q[3];
  int64 k[3];
};

Extents extents_of(const Problem& p, int64 total_k) {
  return {{p.is_varlen_q() ? 1 : p.batch, p.is_varlen_q() ? p.total_q : p.seqlen_q, p.heads_q},
          {p.is_varlen_k() ? 1 : p.batch, p.is_varlen_k() ? total_k : p.seqlen_k, p.heads_kv}};
}

MapType map_type(DType type) { return type == DType::bf16 ? MapType::bf16 : MapType::f16; }

// (head_dim, row, head, batch), in boxes of 64 columns x box_rows.
core::TensorMap encode(Device& device, const View& view, const int64 (&extent)[3], int64 columns,
                       int32 box_rows) {
  constexpr int order[3] = {1, 2, 0};
  TensorMapSpec spec;
  spec.type = map_type(view.dtype);
  spec.rank = 4;
  spec.address = address_of(view);
  spec.extent[0] = static_cast<std::uint64_t>(columns);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto from = static_cast<std::size_t>(order[i]);
    spec.extent[i + 1] = static_cast<std::uint64_t>(std::max<int64>(extent[from], 1));
    spec.stride_bytes[i + 1] =
        extent[from] > 1 ? static_cast<std::uint64_t>(view.stride[from]) * 2 : 16;
  }
  spec.box = {core::panel_columns, static_cast<std::uint32_t>(box_rows), 1, 1, 1};
  spec.swizzle = MapSwizzle::b128;
  return device.encode_tensor_map(spec);
}

// A bound of the window as the kernel takes it: beyond every distance is none.
int32 narrow_bound(int64 bound, const Problem& p) {
  if (bound < 0 || bound >= p.seqlen_q + p.seqlen_k) return -1;
  return static_cast<int32>(bound);
}

// Pairs of (batch, head) whose keys and values fit half of the L2 together.
int32 pairs_in_cache(const Problem& p, const DeviceProperties& chip) {
  const std::uint64_t head_bytes = static_cast<std::uint64_t>(p.seqlen_k) *
                                   static_cast<std::uint64_t>(p.head_dim + p.head_dim_v) * 2;
  const std::uint64_t heads = chip.l2_bytes / 2 / std::max<std::uint64_t>(head_bytes, 1);
  const auto pairs = static_cast<std::uint64_t>(p.batch * p.heads_q);
  return static_cast<int32>(std::clamp<std::uint64_t>(
      heads * static_cast<std::uint64_t>(p.group_size()), 1, std::max<std::uint64_t>(pairs, 1)));
}

void fill_scores(FwdParams& params, const Problem& p, ScoreTransform transform) {
  const float scale = p.softmax_scale * core::log2_e;
  switch (transform) {
    case ScoreTransform::none: params.scale_log2 = scale; break;
    case ScoreTransform::scale: params.transform_in = scale; break;
    case ScoreTransform::softcap:
      params.transform_in = p.softmax_scale / p.softcap;
      params.transform_out = p.softcap * core::log2_e;
      break;
  }
}

}  // namespace

std::vector<std::string> forward_supports(const Problem& p, std::string_view arch) {
  std::vector<std::string> reasons;
  const auto refuse = [&](bool condition, const std::string& reason) {
    if (condition) reasons.push_back(reason);
  };
  refuse(arch != "sm_90a" && !is_blackwell(arch),
         "its forward kernels are for sm_90a, sm_100a and sm_103a and the device is " +
             std::string(arch));
  refuse(p.q.dtype != DType::bf16 && p.q.dtype != DType::f16,
         "it computes bf16 and f16 but q, k and v are of another dtype, so convert them");
  refuse(p.head_dim > 256 || p.head_dim_v > 256,
         "it takes head dimensions up to 256 but they are " + std::to_string(p.head_dim) + " and " +
             std::to_string(p.head_dim_v));
  refuse(static_cast<bool>(p.bias), "it has no bias");
  refuse(static_cast<bool>(p.mask), "it has no mask tensor");
  refuse(static_cast<bool>(p.alibi), "it has no ALiBi");
  refuse(p.dropout.probability > 0.0f, "it has no dropout");
  refuse(p.is_paged(), "it has no paged keys");
  refuse(p.num_splits > 1, "it does not split keys but num_splits is " +
                               std::to_string(p.num_splits) + ", so leave it 0");
  const Extents extent = extents_of(p, p.seqlen_k);
  const auto check = [&](std::string_view name, const View& view, const int64(&e)[3], int64 dim) {
    const bool empty = e[0] == 0 || e[1] == 0 || view.data == nullptr;
    refuse(!empty && !suits_copy_engine(view, e, dim),
           std::string(name) +
               " is laid out in a way that the copy engine does not take, so give it contiguous "
               "head dimensions, a 16-byte aligned address and strides that are positive multiples "
               "of 8 elements");
  };
  if (reasons.empty()) {
    check("q", p.q, extent.q, p.head_dim);
    check("k", p.k, extent.k, p.head_dim);
    check("v", p.v, extent.k, p.head_dim_v);
  }
  return reasons;
}

bool stores_tiles(const Problem& p, DType dtype, DType out_dtype) {
  return out_dtype == dtype && suits_copy_engine(p.out, extents_of(p, p.seqlen_k).q, p.head_dim_v);
}

FwdConfig choose_forward_sm90(const Problem& p, core::SoftmaxPolicy softmax) {
  FwdConfig c;
  fill_features(c, p, softmax);
  // What measured best (docs/kernels/fwd_sm90.md); the registers of a tile decide what is possible.
  const int32 widest = std::max(c.head_dim, c.head_dim_v);
  const bool plain = c.transform == ScoreTransform::none;
  const bool windowed = core::is_windowed(c);
  const bool long_keys = p.seqlen_k >= 8192;
  if (widest <= 64) {
    c.warpgroups = 3;
    c.tile_k = plain && (long_keys || !windowed) ? 128 : 96;
    c.stages = 4;
  } else if (widest <= 128) {
    c.tile_k = 128;
  } else if (widest <= 192) {
    c.tile_k = c.head_dim_v <= 128 ? 128 : 96;
  } else {
    c.tile_k = plain && !windowed && softmax == core::SoftmaxPolicy::sum_guard ? 80 : 64;
    c.persistent = !(windowed && long_keys);
  }
  while (shared_bytes(c) > core::shared_limit_bytes && c.tile_k > 32) {
    // Staging out where q was costs less than smaller tiles, but needs q to be as wide.
    if (c.out_apart && c.head_dim >= c.head_dim_v) {
      c.out_apart = false;
    } else {
      c.tile_k -= 16;
    }
  }
  return c;
}

std::string forward_expression(const FwdConfig& c) {
  ConfigText text("FwdConfig");
  text.type("dtype", c.dtype);
  text.type("out_dtype", c.out_dtype);
  text.number("head_dim", c.head_dim);
  text.number("head_dim_v", c.head_dim_v);
  text.number("warpgroups", c.warpgroups);
  text.number("tile_k", c.tile_k);
  text.number("stages", c.stages);
  text.softmax(c.softmax);
  text.transform(c.transform);
  text.flag("bound_right", c.bound_right);
  text.flag("bound_left", c.bound_left);
  text.flag("ragged", c.ragged);
  text.flag("has_sink", c.has_sink);
  text.flag("tma_out", c.tma_out);
  text.flag("out_apart", c.out_apart);
  text.flag("persistent", c.persistent);
  text.flag("ping_pong", c.ping_pong);
  text.flag("overlap", c.overlap);
  text.number("promote", c.promote);
  return text.value();
}

std::string forward_text(const FwdConfig& config) {
  KernelSource source;
  source.include = "device/fwd_sm90.cuh";
  source.instructions = {
      wgmma_text({.n = config.tile_k, .a = config.dtype, .b = config.dtype}, "fwd_scores"),
      wgmma_text({.n = config.head_dim_v,
                  .a = config.dtype,
                  .b = config.dtype,
                  .a_in_registers = true,
                  .b_mn_major = true},
                 "fwd_output")};
  source.call = "fovea::device::fwd<" + forward_expression(config) + ">";
  source.params = "fovea::core::FwdParams";
  source.threads = core::threads_of(config);
  return kernel_text(source);
}

ForwardConfig choose_forward(const Problem& p, core::SoftmaxPolicy softmax, std::string_view arch) {
  if (is_blackwell(arch)) return choose_forward_sm100(p, softmax, arch);
  return choose_forward_sm90(p, softmax);
}

std::string forward_text(const ForwardConfig& config) {
  return std::visit([](const auto& c) { return forward_text(c); }, config);
}

ForwardKernel::ForwardKernel(Device& device, const ForwardConfig& config, Jit& jit)
    : device_(device), config_(config) {
  CompileRequest request;
  request.text = forward_text(config);
  request.arch = device.properties().arch;
  request.format = device.properties().image_format;
  compiled_ = jit.compile(request);
  kernel_ = device.load(compiled_.image->bytes, kernel_entry);
}

template <typename Config>
ForwardTiles fill_forward_params(FwdParams& params, const ForwardCall& call, const Config& config,
                                 const DeviceProperties& chip) {
  const Problem& p = call.problem;
  // Packed rows behind the last sequence are one sequence more, of no queries.
  const int64 sequences = p.batch + (p.is_varlen_q() ? 1 : 0);
  const int64 longest = p.is_varlen_q() ? std::max(p.seqlen_q, p.total_q - p.seqlen_q) : p.seqlen_q;
  const int64 q_blocks = core::ceil_div(longest, core::rows_of(config));
  const int64 tiles = q_blocks * p.heads_q * sequences;
  if (tiles > std::numeric_limits<int32>::max() / 2) {
    throw Error("the problem has " + std::to_string(tiles) +
                " tiles, but a launch takes at most 2^30; call it in parts");
  }
  params.keys = static_cast<const core::uint16*>(p.k.data);
  for (int i = 0; i < 3; ++i) params.key_stride[i] = p.k.stride[i];
  params.out = p.out.data;
  for (int i = 0; i < 4; ++i) params.out_stride[i] = p.out.stride[i];
  params.lse = static_cast<float*>(p.lse.data);
  params.lse_stride[0] = p.lse.stride[0];
  params.lse_stride[1] = p.lse.stride[1];
  params.lse_stride[2] = p.lse.stride[2];
  params.sink = static_cast<const float*>(p.sink.data);
  params.sink_stride = p.sink.stride[0];
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.seqused_q = p.seqused_q;
  params.seqused_k = p.seqused_k;
  params.scheduler = reinterpret_cast<core::uint32*>(call.scheduler);
  params.counters = reinterpret_cast<core::uint64*>(call.counters);
  params.batch = static_cast<int32>(sequences);
  params.sequences = static_cast<int32>(p.batch);
  params.seqlen_q = static_cast<int32>(p.seqlen_q);
  params.seqlen_k = static_cast<int32>(p.seqlen_k);
  params.total_q = static_cast<int32>(p.total_q);
  params.heads_q = p.heads_q;
  params.group_size = p.group_size();
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.window_left = narrow_bound(p.window.left, p);
  params.window_right = narrow_bound(p.window.right, p);
  fill_scores(params, p, config.transform);
  params.q_blocks = static_cast<int32>(q_blocks);
  params.section = core::is_windowed(config) || config.ragged ? pairs_in_cache(p, chip) : 1;
  params.tiles = static_cast<int32>(tiles);
  const auto width = static_cast<std::uint32_t>(tiles);
  return {static_cast<std::uint32_t>(core::threads_of(config)),
          config.persistent ? std::min(width, static_cast<std::uint32_t>(chip.sm_count)) : width};
}

template ForwardTiles fill_forward_params(FwdParams&, const ForwardCall&, const FwdConfig&,
                                          const DeviceProperties&);
template ForwardTiles fill_forward_params(FwdParams&, const ForwardCall&, const core::Fwd100Config&,
                                          const DeviceProperties&);

void ForwardKernel::run(const ForwardCall& call, Stream stream) const {
  std::visit([&](const auto& config) { launch(config, call, stream); }, config_);
}

template <typename Config>
void ForwardKernel::launch(const Config& config, const ForwardCall& call, Stream stream) const {
  const Problem& p = call.problem;
  FwdParams params;
  const ForwardTiles tiles = fill_forward_params(params, call, config, device_.properties());
  if (tiles.ctas == 0) return;
  const Extents extent = extents_of(p, call.total_k);
  params.q = encode(device_, p.q, extent.q, p.head_dim, core::query_box_rows(config));
  const bool has_keys = extent.k[0] > 0 && extent.k[1] > 0 && p.k.data != nullptr;
  params.k = has_keys ? encode(device_, p.k, extent.k, p.head_dim, config.tile_k) : params.q;
  params.v = has_keys ? encode(device_, p.v, extent.k, p.head_dim_v, config.tile_k) : params.q;
  if (config.tma_out)
    params.out_map = encode(device_, p.out, extent.q, p.head_dim_v, core::out_box_rows(config));

  LaunchConfig shape;
  shape.grid.x = tiles.ctas;
  shape.block.x = tiles.threads;
  shape.dynamic_shared_bytes = static_cast<std::uint32_t>(core::shared_bytes(config));
  device_.launch(*kernel_, shape, std::as_bytes(std::span(&params, 1)), stream);
}

}  // namespace fovea::runtime
