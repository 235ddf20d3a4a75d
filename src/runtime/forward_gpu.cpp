#include "runtime/forward_gpu.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/dropout.h"
#include "core/mask.h"
#include "core/numeric.h"
#include "core/tiles.h"
#include "fovea/fovea.hpp"
#include "runtime/forward_config.h"
#include "runtime/source.h"

namespace fovea::runtime {

namespace {

using core::CombineParams;
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

// Of a dimension with a single element any step will do.
std::uint64_t step_bytes(int64 stride, int64 extent) {
  return extent > 1 ? static_cast<std::uint64_t>(stride) * 2 : 16;
}

MapType map_type(DType type) { return type == DType::bf16 ? MapType::bf16 : MapType::f16; }

// (head_dim, row, head, batch), in boxes of 64 columns x box_rows.
core::TensorMap encode(Device& device, const View& view, const int64 (&extent)[3], int64 columns,
                       int32 box_rows, MapPromotion promotion = MapPromotion::b256) {
  constexpr int order[3] = {1, 2, 0};
  TensorMapSpec spec;
  spec.type = map_type(view.dtype);
  spec.rank = 4;
  spec.address = address_of(view);
  spec.extent[0] = static_cast<std::uint64_t>(columns);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto from = static_cast<std::size_t>(order[i]);
    spec.extent[i + 1] = static_cast<std::uint64_t>(std::max<int64>(extent[from], 1));
    spec.stride_bytes[i + 1] = step_bytes(view.stride[from], extent[from]);
  }
  spec.box = {core::panel_columns, static_cast<std::uint32_t>(box_rows), 1, 1, 1};
  spec.swizzle = MapSwizzle::b128;
  spec.promotion = promotion;
  return device.encode_tensor_map(spec);
}

// q with the heads of a group as rows: (head_dim, head of the group, row, key/value head, batch).
core::TensorMap encode_packed(Device& device, const Problem& p, const int64 (&extent)[3],
                              int32 queries) {
  const int64 group = p.group_size();
  TensorMapSpec spec;
  spec.type = map_type(p.q.dtype);
  spec.rank = 5;
  spec.address = address_of(p.q);
  const int64 extents[5] = {p.head_dim, group, extent[1], p.heads_kv, extent[0]};
  const int64 strides[5] = {1, p.q.stride[2], p.q.stride[1], group * p.q.stride[2], p.q.stride[0]};
  for (std::size_t i = 0; i < 5; ++i) {
    spec.extent[i] = static_cast<std::uint64_t>(std::max<int64>(extents[i], 1));
    spec.stride_bytes[i] = step_bytes(strides[i], extents[i]);
  }
  spec.box = {core::panel_columns, static_cast<std::uint32_t>(group),
              static_cast<std::uint32_t>(queries), 1, 1};
  spec.swizzle = MapSwizzle::b128;
  return device.encode_tensor_map(spec);
}

// A bound of the window as the kernel takes it: no further than any distance between positions.
int32 narrow_bound(int64 bound, const Problem& p) {
  return bound < 0 ? -1 : static_cast<int32>(std::min(bound, std::max(p.seqlen_q, p.seqlen_k)));
}

// Pairs of (batch, head) that are dealt together: their keys and values fit two thirds of the L2.
int32 pairs_of_section(const Problem& p, bool packed, core::DType keys,
                       const DeviceProperties& chip) {
  const int64 head_bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * core::size_bytes(keys);
  const int64 heads = static_cast<int64>(chip.l2_bytes / 3 * 2) / std::max<int64>(head_bytes, 1);
  const int64 pairs = std::max<int64>(p.batch * (packed ? p.heads_kv : p.heads_q), 1);
  const int64 fitting = std::clamp<int64>(heads * (packed ? 1 : p.group_size()), 1, pairs);
  return static_cast<int32>(core::section_of(fitting, pairs));
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

void fill_position(FwdParams& params, const Problem& p) {
  params.bias = p.bias.data;
  params.mask = static_cast<const core::uint8*>(p.mask.data);
  params.alibi = static_cast<const float*>(p.alibi.data);
  for (int i = 0; i < 4; ++i) {
    params.bias_stride[i] = p.bias.stride[i];
    params.mask_stride[i] = p.mask.stride[i];
  }
  for (int i = 0; i < 2; ++i) params.alibi_stride[i] = p.alibi.stride[i];
  if (p.dropout.probability > 0.0f) {
    const core::uint64 key = core::dropout_key(p.dropout);
    params.dropout_threshold = core::dropout_threshold(p.dropout.probability);
    params.dropout_key[0] = static_cast<core::uint32>(key);
    params.dropout_key[1] = static_cast<core::uint32>(key >> 32);
    params.keep_scale = 1.0f / (1.0f - p.dropout.probability);
  }
}

core::Rows rows_of(const View& view) {
  core::Rows rows;
  rows.data = static_cast<const core::uint16*>(view.data);
  for (int i = 0; i < 4; ++i) rows.stride[i] = view.stride[i];
  return rows;
}

// Partial results: out of all parts, then lse of all parts.
std::size_t partial_bytes(const Problem& p, int32 splits) {
  return static_cast<std::size_t>(row_count(p) * splits * (p.head_dim_v + 1)) * sizeof(float);
}

// Lets the tiles write into the workspace, and describes to the combining kernel what they leave.
core::CombineParams split_result(FwdParams& params, const ForwardCall& call) {
  const Problem& p = call.problem;
  const Extents extent = extents_of(p);
  core::CombineParams parts;
  parts.splits = params.splits;
  parts.batch = extent.q[0];
  parts.rows = extent.q[1];
  parts.heads = p.heads_q;
  parts.head_dim_v = p.head_dim_v;
  parts.out = p.out.data;
  for (int i = 0; i < 4; ++i) parts.out_stride[i] = p.out.stride[i];
  parts.lse = static_cast<float*>(p.lse.data);
  for (int i = 0; i < 3; ++i) parts.lse_stride[i] = p.lse.stride[i];
  parts.sink = static_cast<const float*>(p.sink.data);
  parts.sink_stride = p.sink.stride[0];

  const int64 rows = row_count(p);
  auto* out = reinterpret_cast<float*>(call.workspace);
  float* lse = out + rows * p.head_dim_v * params.splits;
  parts.part_out = out;
  parts.part_lse = lse;
  params.out = out;
  params.lse = lse;
  params.out_split_stride = rows * p.head_dim_v;
  params.lse_split_stride = rows;
  const int64 row = p.heads_q;
  const int64 batch = extent.q[1] * row;
  const int64 out_stride[4] = {batch * p.head_dim_v, row * p.head_dim_v, p.head_dim_v, 1};
  for (int i = 0; i < 4; ++i) params.out_stride[i] = out_stride[i];
  const int64 lse_stride[3] = {batch, 1, row};
  for (int i = 0; i < 3; ++i) params.lse_stride[i] = lse_stride[i];
  return parts;
}

// What the kernel for Blackwell lacks.
template <typename Refuse>
void refuse_on_blackwell(const Problem& p, const Refuse& refuse) {
  refuse(p.is_paged() && page_box(p, 128) % 8 != 0,
         "it takes pages of multiples of 8 keys but page_size is " + std::to_string(p.page_size));
  const Extents extent = extents_of(p);
  const auto check = [&](std::string_view name, const View& view, const int64(&e)[3], int64 dim) {
    refuse(has_elements(view, e) && core::size_bytes(view.dtype) == 2 &&
               !suits_copy_engine(view, e, dim),
           std::string(name) +
               " is laid out in a way that the copy engine does not take, so give it contiguous "
               "head dimensions, a 16-byte aligned address and strides that are positive multiples "
               "of 8 elements");
  };
  check("q", p.q, extent.q, p.head_dim);
  check("k", p.k, extent.k, p.head_dim);
  check("v", p.v, extent.k, p.head_dim_v);
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
  if (is_blackwell(arch)) refuse_on_blackwell(p, refuse);
  return reasons;
}

ForwardConfig choose_forward(const Problem& p, core::SoftmaxPolicy softmax, std::string_view arch,
                             int sm_count) {
  if (is_blackwell(arch)) return choose_forward_sm100(p, softmax, arch, sm_count);
  return choose_forward_sm90(p, softmax, sm_count);
}

std::string forward_text(const ForwardConfig& config) {
  return std::visit([](const auto& c) { return forward_text(c); }, config);
}

std::size_t forward_workspace_bytes(const Problem& p, const ForwardConfig& config, int sm_count) {
  if (const auto* c = std::get_if<FwdConfig>(&config); c != nullptr && c->tail) {
    const auto threads = 2 * static_cast<std::size_t>(core::rows_of(*c));  // that compute
    const auto parts = static_cast<std::size_t>(forward_tail(p, *c, sm_count).all_parts());
    return parts * threads * static_cast<std::size_t>(core::part_floats(*c)) * sizeof(float);
  }
  return std::visit(
      [&](const auto& c) {
        return c.split ? partial_bytes(p, forward_splits(p, c, sm_count)) : std::size_t{0};
      },
      config);
}

std::size_t forward_arrivals(const Problem& p, const ForwardConfig& config, int sm_count) {
  const auto* c = std::get_if<FwdConfig>(&config);
  if (c == nullptr) return 0;
  return static_cast<std::size_t>(4 * c->warpgroups * forward_tail(p, *c, sm_count).tiles);
}

ForwardKernel::ForwardKernel(Device& device, const ForwardConfig& config, Jit& jit,
                             bool tolerates_spills)
    : device_(device), config_(config) {
  CompileRequest request;
  request.text = forward_text(config);
  request.arch = device.properties().arch;
  request.format = device.properties().image_format;
  request.strict = !tolerates_spills;
  compiled_ = jit.compile(request);
  kernel_ = device.load(compiled_.image->bytes, kernel_name(request.text));
  std::visit(
      [&](const auto& c) {
        if (!c.split) return;
        combine_ = load_kernel(device, jit, combine_text(c.out_dtype), !tolerates_spills);
      },
      config);
}

namespace {

// Describes the parts of the last tiles, and gives how many items there are to compute in all.
int64 fill_tail(FwdParams& params, const ForwardCall& call, const FwdConfig& config, int64 tiles,
                int sm_count) {
  params.tail_begin = static_cast<int32>(tiles);
  if (!config.tail || call.arrivals == 0 || call.workspace == 0) return tiles;
  const Tail tail = forward_tail(call.problem, config, sm_count);
  params.tail_begin = tail.begin;
  params.tail_parts = tail.parts;
  params.tail_results = reinterpret_cast<float*>(call.workspace);
  params.tail_arrivals = reinterpret_cast<core::uint32*>(call.arrivals);
  return tail.begin + tail.all_parts();
}

int64 fill_tail(FwdParams&, const ForwardCall&, const core::Fwd100Config&, int64 tiles, int) {
  return tiles;
}

// Whether a CTA takes tile after tile by itself, so that there is one for each multiprocessor.
bool keeps_ctas(const FwdConfig& c) { return c.persistent; }
bool keeps_ctas(const core::Fwd100Config& c) { return c.persistent && !c.launch_control; }

// Whether the kernel waits itself for what comes before it in the stream.
bool reads_once(const FwdConfig& c) { return c.reads_once; }
bool reads_once(const core::Fwd100Config&) { return false; }

// How many of them there are at most `most`. Tiles that take equally long end in rounds: where
// those are few and long, as few CTAs as take no round more. The others' power goes to the clock of
// these (docs/kernels/fwd_sm90.md); short tiles do not keep in step for so long.
int64 kept_ctas(const Problem& p, const FwdConfig& c, int64 tiles, int64 most) {
  constexpr int64 few_rounds = 16;
  constexpr int64 long_blocks = 32;
  const int64 rounds = std::max<int64>(core::ceil_div(tiles, most), 1);
  const bool in_step = core::may_have_tail(c) && !c.tail && rounds <= few_rounds &&
                       p.seqlen_k >= long_blocks * c.tile_k;
  return in_step ? core::ceil_div(tiles, rounds) : std::min(tiles, most);
}
int64 kept_ctas(const Problem&, const core::Fwd100Config&, int64 tiles, int64 most) {
  return std::min(tiles, most);
}

}  // namespace

template <typename Config>
ForwardTiles fill_forward_params(FwdParams& params, const ForwardCall& call, const Config& config,
                                 const DeviceProperties& chip) {
  const Problem& p = call.problem;
  const TileCount count = count_tiles(p, config);
  params.queries_per_tile = config.packed ? packed_queries(p, config) : core::rows_of(config);
  if (config.split) params.splits = forward_splits(p, config, chip.sm_count);
  if (p.is_paged()) params.page_box = page_box(p, config.tile_k);
  const int64 tiles = fill_tail(params, call, config, count.tiles * params.splits, chip.sm_count);
  if (tiles > std::numeric_limits<int32>::max() / 2) {
    throw Error("the problem has " + std::to_string(tiles) +
                " tiles, but a launch takes at most 2^30; call it in parts");
  }
  params.q_rows = rows_of(p.q);
  params.k_rows = rows_of(p.k);
  params.v_rows = rows_of(p.v);
  params.out = p.out.data;
  for (int i = 0; i < 4; ++i) params.out_stride[i] = p.out.stride[i];
  params.lse = static_cast<float*>(p.lse.data);
  for (int i = 0; i < 3; ++i) params.lse_stride[i] = p.lse.stride[i];
  params.sink = static_cast<const float*>(p.sink.data);
  params.sink_stride = p.sink.stride[0];
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.seqused_q = p.seqused_q;
  params.seqused_k = p.seqused_k;
  params.block_table = p.block_table;
  params.block_table_stride = p.block_table_stride;
  params.page_size = p.page_size;
  params.scheduler = reinterpret_cast<core::uint32*>(call.scheduler);
  params.counters = reinterpret_cast<core::uint64*>(call.counters);
  params.trace = call.trace;
  params.batch = static_cast<int32>(count.sequences);
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
  fill_position(params, p);
  params.q_blocks = static_cast<int32>(count.q_blocks);
  params.section = core::is_windowed(config) || config.ragged
                       ? pairs_of_section(p, config.packed, config.dtype, chip)
                       : 1;
  params.tiles = static_cast<int32>(tiles);
  const int64 ctas = core::ctas_of(config);  // of a cluster
  const int64 clusters =
      keeps_ctas(config) ? kept_ctas(p, config, tiles, chip.sm_count / ctas) : tiles;
  return {static_cast<std::uint32_t>(core::threads_of(config)),
          static_cast<std::uint32_t>(ctas * clusters)};
}

template ForwardTiles fill_forward_params(FwdParams&, const ForwardCall&, const FwdConfig&,
                                          const DeviceProperties&);
template ForwardTiles fill_forward_params(FwdParams&, const ForwardCall&, const core::Fwd100Config&,
                                          const DeviceProperties&);

template <typename Config>
void ForwardKernel::encode_maps(FwdParams& params, const Problem& p, const Config& config) const {
  const Extents extent = extents_of(p);
  if (config.tma_out) {
    params.out_map = encode(device_, p.out, extent.q, p.head_dim_v, core::out_box_rows(config));
  }
  if (config.source == core::Source::gather) return;
  const bool paged = config.source == core::Source::paged;
  const int32 key_rows = paged ? params.page_box : core::key_rows_of(config);
  const int32 value_rows = paged ? params.page_box : core::value_rows_of(config);
  const int32 query_rows = core::query_box_rows(config);
  const int32 boxes = core::rows_of(config) / query_rows;  // of a tile
  params.q = config.packed ? encode_packed(device_, p, extent.q, params.queries_per_tile / boxes)
                           : encode(device_, p.q, extent.q, p.head_dim, query_rows);
  params.k = params.v = params.q;
  if (!has_elements(p.k, extent.k)) return;
  // Where memory binds, what is fetched beyond a box costs 6 % of its rate, even if it is asked for
  // next (docs/kernels/fwd_sm90.md).
  const MapPromotion promotion = reads_once(config) ? MapPromotion::b128 : MapPromotion::b256;
  params.k = encode(device_, p.k, extent.k, p.head_dim, key_rows, promotion);
  params.v = encode(device_, p.v, extent.k, p.head_dim_v, value_rows, promotion);
}

void ForwardKernel::run(const ForwardCall& call, Stream stream) const {
  std::visit([&](const auto& config) { launch(config, call, stream); }, config_);
}

template <typename Config>
void ForwardKernel::launch(const Config& config, const ForwardCall& call, Stream stream) const {
  const Problem& p = call.problem;
  FwdParams params;
  const ForwardTiles tiles = fill_forward_params(params, call, config, device_.properties());
  if (tiles.ctas == 0) return;
  CombineParams parts;
  if (combine_ != nullptr) {
    if (call.workspace == 0) {
      throw Error("the keys are split, so the call needs a workspace of " +
                  std::to_string(partial_bytes(p, params.splits)) + " bytes");
    }
    parts = split_result(params, call);
  }
  encode_maps(params, p, config);
  LaunchConfig shape;
  shape.grid.x = tiles.ctas;
  shape.block.x = tiles.threads;
  shape.cluster.x = static_cast<std::uint32_t>(core::ctas_of(config));
  shape.dynamic_shared_bytes = static_cast<std::uint32_t>(core::shared_bytes(config));
  shape.overlap_predecessor = reads_once(config);
  device_.launch(*kernel_, shape, std::as_bytes(std::span(&params, 1)), stream);
  if (combine_ == nullptr) return;

  constexpr int64 rows_per_cta = core::combine_threads / 32;
  constexpr int64 most_ctas = int64{1} << 20;
  LaunchConfig merge;
  merge.grid.x =
      static_cast<std::uint32_t>(std::min(core::ceil_div(row_count(p), rows_per_cta), most_ctas));
  merge.block.x = core::combine_threads;
  merge.overlap_predecessor = true;
  device_.launch(*combine_, merge, std::as_bytes(std::span(&parts, 1)), stream);
}

}  // namespace fovea::runtime
