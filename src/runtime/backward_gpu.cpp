#include "runtime/backward_gpu.h"

#include <algorithm>
#include <limits>
#include <set>
#include <span>

#include "core/config_backward_sm100.h"
#include "core/dropout.h"
#include "core/mask.h"
#include "core/numeric.h"
#include "core/tiles.h"
#include "fovea/fovea.hpp"
#include "runtime/backward_tuning.h"
#include "runtime/copy_engine.h"
#include "runtime/forward_config.h"
#include "runtime/source.h"

namespace fovea::runtime {

namespace {

using core::BwdConfig;
using core::BwdParams;
using core::DType;
using core::Gradients;
using core::int32;
using core::int64;
using core::Problem;
using core::View;

RowExtents query_extents(const Problem& p) {
  if (p.is_varlen_q()) return {{1, p.total_q, p.heads_q}};
  return {{p.batch, p.seqlen_q, p.heads_q}};
}

RowExtents key_extents(const Problem& p) {
  if (p.is_varlen_k()) return {{1, p.total_k, p.heads_kv}};
  return {{p.batch, p.seqlen_k, p.heads_kv}};
}

// A bound of the window as the kernel takes it: no further than any distance between positions.
int32 narrow_bound(int64 bound, const Problem& p) {
  return bound < 0 ? -1 : static_cast<int32>(std::min(bound, std::max(p.seqlen_q, p.seqlen_k)));
}

// Packed rows behind the last sequence are one sequence more, of no queries and no keys.
int64 sequences(const Problem& p) { return p.batch + (p.is_varlen_q() || p.is_varlen_k() ? 1 : 0); }

// Blocks of the longest sequence; rows behind the last one go round in as many.
int64 query_blocks(const Problem& p, const BwdConfig& c) {
  const int64 blocks = core::ceil_div(p.seqlen_q, core::rows_of(c));
  return p.total_q > 0 ? std::max<int64>(blocks, 1) : blocks;
}

int64 key_blocks(const Problem& p, const BwdConfig& c) {
  const int64 blocks = core::ceil_div(p.seqlen_k, core::keys_of(c));
  return core::round_up(p.total_k > 0 ? std::max<int64>(blocks, 1) : blocks, int64{c.pair ? 2 : 1});
}

// Blocks of query rows of all sequences and heads (device/bwd_blocks.h, first_block).
int64 all_blocks(const Problem& p, const BwdConfig& c) {
  if (!p.is_varlen_q()) return p.batch * p.heads_q * query_blocks(p, c);
  return (p.total_q / core::rows_of(c) + p.batch + 1) * p.heads_q;
}

// How the gradient of the bias is dealt: tiles of its elements, and of each as many parts as bring
// work to all multiprocessors.
struct BiasTiles {
  int64 queries = 0, keys = 0;  // tiles along them
  int64 parts = 1;
  int64 elements = 0;

  BiasTiles(const Problem& p, const Gradients& g, const DeviceProperties& chip) {
    if (!g.dbias) return;
    const auto& extent = g.dbias_extent;
    elements = extent[0] * extent[1] * extent[2] * extent[3];
    queries = core::ceil_div(extent[2], core::bias_tile);
    keys = core::ceil_div(extent[3], core::bias_tile);
    if (elements == 0) return;
    const int64 summed = (extent[0] == 1 ? p.batch : 1) * (extent[1] == 1 ? p.heads_q : 1) *
                         (extent[2] == 1 ? core::ceil_div(p.seqlen_q, core::bias_tile) : 1) *
                         (extent[3] == 1 ? core::ceil_div(p.seqlen_k, core::bias_tile) : 1);
    parts = std::clamp<int64>(4 * chip.sm_count / count(extent), 1, std::max<int64>(summed, 1));
  }

  [[nodiscard]] int64 count(const int64 (&extent)[4]) const {
    return extent[0] * extent[1] * queries * keys;
  }
};

// The scratch of a call, laid out from `base`.
struct Scratch {
  DeviceAddress lse_log2 = 0, delta = 0, dq_sums = 0, turns = 0, bias_sums = 0, scheduler = 0;
  std::size_t bytes = 0;

  Scratch(const Problem& p, const BwdConfig& c, const BiasTiles& bias, DeviceAddress base) {
    const auto take = [&](int64 count) {
      const DeviceAddress at = base + bytes;
      bytes += (static_cast<std::size_t>(count) * 4 + 255) / 256 * 256;
      return at;
    };
    const int64 blocks = all_blocks(p, c);
    lse_log2 = take(blocks * core::rows_of(c));
    delta = take(blocks * core::rows_of(c));
    dq_sums = take(blocks * core::dq_block_floats(c));
    if (c.deterministic) turns = take(blocks * core::turn_counters(c));
    if (!c.tensor_memory) scheduler = take(1);
    if (bias.parts > 1) bias_sums = take(bias.parts * bias.elements);
  }
};

template <std::size_t count>
void copy_strides(int64 (&to)[count], const View& from) {
  for (std::size_t i = 0; i < count; ++i) to[i] = from.stride[i];
}

// Whether `count` neighbours of every row, from a multiple of it on, share an aligned word.
bool in_words(const View& view, int32 columns, int count) {
  const bool even_steps =
      view.stride[0] % count == 0 && view.stride[1] % count == 0 && view.stride[2] % count == 0;
  const auto bytes =
      static_cast<DeviceAddress>(count) * static_cast<DeviceAddress>(core::size_bytes(view.dtype));
  return even_steps && view.stride[3] == 1 && columns % count == 0 &&
         reinterpret_cast<DeviceAddress>(view.data) % bytes == 0;
}

core::Rows rows_of_view(const View& view) {
  core::Rows rows;
  rows.data = static_cast<const core::uint16*>(view.data);
  for (std::size_t i = 0; i < 4; ++i) rows.stride[i] = view.stride[i];
  return rows;
}

void fill_tensors(BwdParams& params, const Problem& p, const Gradients& g) {
  params.out = static_cast<const core::uint16*>(p.out.data);
  copy_strides(params.out_stride, p.out);
  params.dout = static_cast<const core::uint16*>(g.dout.data);
  copy_strides(params.dout_stride, g.dout);
  params.lse = static_cast<const float*>(p.lse.data);
  copy_strides(params.lse_stride, p.lse);
  params.dlse = static_cast<const float*>(g.dlse.data);
  copy_strides(params.dlse_stride, g.dlse);
  params.dq = g.dq.data;
  copy_strides(params.dq_stride, g.dq);
  params.dk = g.dk.data;
  copy_strides(params.dk_stride, g.dk);
  params.dv = g.dv.data;
  copy_strides(params.dv_stride, g.dv);
  params.q_rows = rows_of_view(p.q);
  params.k_rows = rows_of_view(p.k);
  params.v_rows = rows_of_view(p.v);
  params.paired = in_words(g.dk, p.head_dim, 2) && in_words(g.dv, p.head_dim_v, 2);
  params.out_in_octets = in_words(p.out, p.head_dim_v, 8) && in_words(g.dout, p.head_dim_v, 8);
  const int word = 16 / static_cast<int>(core::size_bytes(g.dk.dtype));
  params.dkv_in_words = in_words(g.dk, p.head_dim, word) && in_words(g.dv, p.head_dim_v, word);
  params.dq_in_quads = in_words(g.dq, p.head_dim, 4);
}

// What modifies scores, and the gradients of it.
void fill_features(BwdParams& params, const Problem& p, const Gradients& g, const BiasTiles& bias) {
  if (p.softcap > 0.0f) {
    params.softcap_in = p.softmax_scale / p.softcap;
    params.softcap_out = p.softcap * core::log2_e;
  }
  params.alibi = static_cast<const float*>(p.alibi.data);
  params.alibi_stride[0] = p.alibi.stride[0];
  params.alibi_stride[1] = p.alibi.stride[1];
  params.bias = p.bias.data;
  copy_strides(params.bias_stride, p.bias);
  params.mask = static_cast<const core::uint8*>(p.mask.data);
  copy_strides(params.mask_stride, p.mask);
  params.sink = static_cast<const float*>(p.sink.data);
  params.sink_stride = p.sink.stride[0];
  const core::uint64 key = core::dropout_key(p.dropout);
  params.dropout_threshold = core::dropout_threshold(p.dropout.probability);
  params.dropout_key[0] = static_cast<core::uint32>(key);
  params.dropout_key[1] = static_cast<core::uint32>(key >> 32);
  params.keep_scale = 1.0f / (1.0f - p.dropout.probability);
  params.dsink = static_cast<float*>(g.dsink.data);
  params.dsink_stride = g.dsink.stride[0];
  params.dbias.data = g.dbias.data;
  params.dbias.dtype = g.dbias.dtype;
  std::copy(std::begin(g.dbias_extent), std::end(g.dbias_extent), params.dbias.extent);
  copy_strides(params.dbias.stride, g.dbias);
  params.dbias.q_tiles = static_cast<int32>(bias.queries);
  params.dbias.key_tiles = static_cast<int32>(bias.keys);
  params.dbias.parts = static_cast<int32>(bias.parts);
}

// (sequence, KV head) pairs that are dealt together: their rows of q, dout and dq_sums fit half of
// the L2.
int32 pairs_of_section(const Problem& p, const DeviceProperties& chip) {
  const int64 bytes =
      p.seqlen_q * p.group_size() * (2 * p.head_dim + 2 * p.head_dim_v + 4 * p.head_dim);
  const int64 pairs = std::max<int64>(sequences(p) * p.heads_kv, 1);
  const int64 fitting = std::clamp<int64>(
      static_cast<int64>(chip.l2_bytes / 2) / std::max<int64>(bytes, 1), 1, pairs);
  return static_cast<int32>(core::section_of(fitting, pairs));
}

// Everything but the tensor maps.
BwdParams fill_params(const BackwardCall& call, const BwdConfig& config,
                      const DeviceProperties& chip) {
  const Problem& p = call.problem;
  BwdParams params;
  const BiasTiles bias(p, call.gradients, chip);
  fill_tensors(params, p, call.gradients);
  fill_features(params, p, call.gradients, bias);
  const Scratch scratch(p, config, bias, call.workspace);
  params.dbias.sums = reinterpret_cast<float*>(scratch.bias_sums);
  params.lse_log2 = reinterpret_cast<float*>(scratch.lse_log2);
  params.delta = reinterpret_cast<float*>(scratch.delta);
  params.dq_sums = reinterpret_cast<float*>(scratch.dq_sums);
  params.turns = reinterpret_cast<core::uint32*>(scratch.turns);
  params.scheduler = reinterpret_cast<core::uint32*>(scratch.scheduler);
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.seqused_q = p.seqused_q;
  params.seqused_k = p.seqused_k;
  params.batch = static_cast<int32>(sequences(p));
  params.sequences = static_cast<int32>(p.batch);
  params.seqlen_q = static_cast<int32>(p.seqlen_q);
  params.seqlen_k = static_cast<int32>(p.seqlen_k);
  params.total_q = static_cast<int32>(p.total_q);
  params.total_k = static_cast<int32>(p.total_k);
  params.heads_q = p.heads_q;
  params.heads_kv = p.heads_kv;
  params.group_size = p.group_size();
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.window_left = narrow_bound(p.window.left, p);
  params.window_right = narrow_bound(p.window.right, p);
  params.scale = p.softmax_scale;
  params.scale_log2 = p.softmax_scale * core::log2_e;
  params.q_blocks = static_cast<int32>(query_blocks(p, config));
  params.key_blocks = static_cast<int32>(key_blocks(p, config));
  params.section = pairs_of_section(p, chip);
  params.trace = call.trace;
  return params;
}

std::uint32_t checked_grid(int64 ctas) {
  if (ctas > std::numeric_limits<int32>::max() / 2) {
    throw Error("the gradients take " + std::to_string(ctas) +
                " tiles, but a launch takes at most 2^30; call it in parts");
  }
  return static_cast<std::uint32_t>(ctas);
}

}  // namespace

std::vector<std::string> backward_supports(const Problem& p, const Gradients& g,
                                           std::string_view arch) {
  std::vector<std::string> reasons;
  const auto refuse = [&](bool condition, const std::string& reason) {
    if (condition) reasons.push_back(reason);
  };
  refuse(arch != "sm_90a" && !is_blackwell(arch),
         "its backward kernels are for sm_90a, sm_100a and sm_103a and the device is " +
             std::string(arch));
  refuse(p.q.dtype != DType::bf16 && p.q.dtype != DType::f16,
         "it computes bf16 and f16 but q, k and v are of another dtype, so convert them");
  refuse(p.out.dtype != p.q.dtype, "it takes out and dout in the dtype of q, so convert them");
  refuse(g.dq.dtype != g.dk.dtype || g.dk.dtype != g.dv.dtype,
         "it writes dq, dk and dv in one dtype, so give them the same");
  // On Blackwell dk and dv stay in tensor memory beside a tile of scores and one of dP.
  const core::HeadDims largest =
      is_blackwell(arch) ? core::HeadDims{192, 128} : core::HeadDims{256, 256};
  refuse(p.head_dim > largest.qk || p.head_dim_v > largest.v,
         "it takes head dimensions up to " + std::to_string(largest.qk) + " of q and k and " +
             std::to_string(largest.v) + " of v but they are " + std::to_string(p.head_dim) +
             " and " + std::to_string(p.head_dim_v));
  refuse(p.is_paged(), "it has no paged keys");
  const auto check = [&](std::string_view name, const View& view, const RowExtents& e, int64 dim) {
    const bool empty = e.of[0] == 0 || e.of[1] == 0 || view.data == nullptr;
    refuse(!empty && !suits_copy_engine(view, e, dim),
           std::string(name) +
               " is laid out in a way that the copy engine does not take, so give it contiguous "
               "head dimensions, a 16-byte aligned address and strides that are positive multiples "
               "of 8 elements");
  };
  if (reasons.empty()) {
    check("q", p.q, query_extents(p), p.head_dim);
    check("k", p.k, key_extents(p), p.head_dim);
    check("v", p.v, key_extents(p), p.head_dim_v);
    check("dout", g.dout, query_extents(p), p.head_dim_v);
  }
  return reasons;
}

BwdConfig choose_backward(const Problem& p, const Gradients& g, std::string_view arch,
                          std::string_view by_hand) {
  BwdConfig c;
  c.dtype = p.q.dtype;
  c.wide = g.dq.dtype == DType::f32;
  c.bound_right = p.window.right >= 0;
  c.bound_left = p.window.left >= 0;
  c.ragged = p.is_varlen_q() || p.is_varlen_k() || p.seqused_q != nullptr || p.seqused_k != nullptr;
  c.deterministic = p.deterministic;
  c.has_softcap = p.softcap > 0.0f;
  c.has_alibi = static_cast<bool>(p.alibi);
  c.has_bias = static_cast<bool>(p.bias);
  if (c.has_bias) c.bias_dtype = p.bias.dtype;
  c.has_mask = static_cast<bool>(p.mask);
  c.has_dropout = p.dropout.probability > 0.0f;
  c.head_dim = p.head_dim;
  c.head_dim_v = p.head_dim_v;
  if (is_blackwell(arch)) {
    choose_backward_sm100(c, p);
  } else {
    c.split_products = !core::fits_whole_columns(c);
    c.dq_apart = core::fits_dq_apart(c);
  }
  override_backward(c, by_hand);
  const std::string objection = backward_objection(c);
  if (!objection.empty()) {
    throw Error("configuration is " + std::string(by_hand) + ", but " + objection);
  }
  if (!c.tensor_memory) {
    const core::HeadDims dims =
        core::backward_head_dims(p.head_dim, p.head_dim_v, c.split_products);
    c.head_dim = dims.qk;
    c.head_dim_v = dims.v;
    c.pair = core::fits_pair(c);
  }
  return c;
}

namespace {

std::string config_value(const BwdConfig& c) {
  ConfigText config("BwdConfig");
  config.type("dtype", c.dtype);
  config.flag("wide", c.wide);
  config.number("head_dim", c.head_dim);
  config.number("head_dim_v", c.head_dim_v);
  config.flag("bound_right", c.bound_right);
  config.flag("bound_left", c.bound_left);
  config.flag("ragged", c.ragged);
  config.flag("deterministic", c.deterministic);
  config.flag("has_softcap", c.has_softcap);
  config.flag("has_alibi", c.has_alibi);
  config.flag("has_bias", c.has_bias);
  config.type("bias_dtype", c.bias_dtype);
  config.flag("has_mask", c.has_mask);
  config.flag("has_dropout", c.has_dropout);
  config.flag("split_products", c.split_products);
  config.flag("dq_apart", c.dq_apart);
  config.flag("pair", c.pair);
  config.flag("tensor_memory", c.tensor_memory);
  config.flag("issue_order", c.issue_order);
  if (c.trace) config.flag("trace", c.trace);
  return config.value();
}

// The products of the main kernel, overloaded by the columns that a warpgroup has.
std::vector<std::string> products(const BwdConfig& c) {
  const core::int32 queries = core::rows_of(c);
  std::vector<std::string> texts{
      wgmma_text({.n = queries, .a = c.dtype, .b = c.dtype}, "bwd_scores")};
  for (const int32 n : std::set<int32>{c.head_dim, c.head_dim_v}) {
    texts.push_back(
        wgmma_text({.n = n, .a = c.dtype, .b = c.dtype, .a_in_registers = true, .b_mn_major = true},
                   "bwd_gradient"));
  }
  texts.push_back(wgmma_text({.n = core::panel_columns,
                              .a = c.dtype,
                              .b = c.dtype,
                              .a_mn_major = true,
                              .b_mn_major = true},
                             "bwd_dq"));
  return texts;
}

struct PartText {
  const char* name;
  const char* include;
  const char* function;
  int threads;
};

// In the order of BackwardPart.
constexpr PartText part_texts[backward_parts] = {
    {"prepare", "device/bwd_rows.cuh", "bwd_prepare", core::row_threads},
    {"main_sm90", "device/bwd_sm90.cuh", "bwd", core::backward_threads},
    {"finish", "device/bwd_rows.cuh", "bwd_finish", core::row_threads},
    {"sink", "device/bwd_rows.cuh", "bwd_sink", core::sink_threads},
    {"bias", "device/bwd_bias.cuh", "bwd_bias", core::bias_threads},
    {"bias_sum", "device/bwd_bias.cuh", "bwd_bias_sum", core::bias_threads}};

constexpr PartText main_sm100{"main_sm100", "device/bwd_sm100.cuh", "bwd_sm100",
                              core::backward_threads_sm100};

const PartText& text_of(const BwdConfig& c, BackwardPart part) {
  if (c.tensor_memory && part == BackwardPart::main) return main_sm100;
  return part_texts[static_cast<std::size_t>(part)];
}

}  // namespace

std::string backward_text(const BwdConfig& c, BackwardPart part) {
  KernelSource source;
  source.params = "fovea::core::BwdParams";
  const PartText& text = text_of(c, part);
  source.name =
      "backward_" + std::string(text.name) + "_" + operand_name(c.dtype, c.head_dim, c.head_dim_v);
  source.include = text.include;
  source.threads = text.threads;
  if (part == BackwardPart::main) {
    source.instructions = c.tensor_memory ? backward_products_sm100() : products(c);
  }
  source.call = "fovea::device::" + std::string(text.function) + "<" + config_value(c) + ">";
  return kernel_text(source);
}

std::size_t backward_workspace_bytes(const BackwardCall& call, const BwdConfig& config,
                                     const DeviceProperties& chip) {
  const BiasTiles bias(call.problem, call.gradients, chip);
  return Scratch(call.problem, config, bias, 0).bytes;
}

std::int64_t backward_ctas(const Problem& p, const BwdConfig& config) {
  return key_blocks(p, config) * p.heads_kv * sequences(p);
}

BackwardKernels::BackwardKernels(Device& device, const BwdConfig& config,
                                 const Gradients& gradients, Jit& jit)
    : device_(device), config_(config) {
  std::vector<BackwardPart> parts{BackwardPart::prepare, BackwardPart::main, BackwardPart::finish};
  if (gradients.dsink) parts.push_back(BackwardPart::sink);
  if (gradients.dbias) {
    parts.insert(parts.end(), {BackwardPart::bias, BackwardPart::bias_sum});
  }
  for (const BackwardPart part : parts) {
    // Not strict: a rare set of features that spills a few registers is slow, but right; the tests
    // name it.
    kernels_[static_cast<std::size_t>(part)] =
        load_kernel(device, jit, backward_text(config, part), false);
  }
}

void BackwardKernels::launch(BackwardPart part, std::uint32_t ctas, const BwdParams& params,
                             Stream stream) const {
  if (ctas == 0) return;
  LaunchConfig shape;
  shape.grid.x = ctas;
  shape.block.x = static_cast<std::uint32_t>(text_of(config_, part).threads);
  if (part == BackwardPart::main) {
    shape.cluster.x = config_.pair ? 2 : 1;
    shape.dynamic_shared_bytes = static_cast<std::uint32_t>(
        config_.tensor_memory ? core::shared_bytes_sm100(config_) : core::shared_bytes(config_));
  }
  device_.launch(*kernels_[static_cast<std::size_t>(part)], shape,
                 std::as_bytes(std::span(&params, 1)), stream);
}

// Hopper's CTAs take block of keys after block of keys, those of a pair together.
std::uint32_t BackwardKernels::main_ctas(std::uint32_t key_ctas) const {
  if (config_.tensor_memory) return key_ctas;
  const auto sm_count = static_cast<std::uint32_t>(device_.properties().sm_count);
  return std::min(key_ctas, config_.pair ? std::max(sm_count / 2 * 2, 2u) : sm_count);
}

void BackwardKernels::launch_bias(const BackwardCall& call, const BwdParams& params,
                                  Stream stream) const {
  const BiasTiles tiles(call.problem, call.gradients, device_.properties());
  if (tiles.elements == 0) return;
  const int64 count = tiles.count(call.gradients.dbias_extent);
  launch(BackwardPart::bias, checked_grid(count * tiles.parts), params, stream);
  if (tiles.parts == 1) return;
  const int64 sums = core::ceil_div(tiles.elements, core::bias_threads);
  launch(BackwardPart::bias_sum,
         checked_grid(std::min<int64>(sums, 8 * device_.properties().sm_count)), params, stream);
}

void BackwardKernels::run(const BackwardCall& call, Stream stream) const {
  const Problem& p = call.problem;
  const Gradients& g = call.gradients;
  BwdParams params = fill_params(call, config_, device_.properties());
  const std::uint32_t row_ctas = checked_grid(query_blocks(p, config_) * p.heads_q * sequences(p));
  const std::uint32_t key_ctas = checked_grid(backward_ctas(p, config_));
  const RowExtents queries = query_extents(p);
  const RowExtents keys = key_extents(p);
  if (queries.of[0] > 0 && queries.of[1] > 0) {
    params.q = encode_rows(device_, p.q, queries, p.head_dim, core::query_box_rows(config_));
    params.dout_map =
        encode_rows(device_, g.dout, queries, p.head_dim_v, core::query_box_rows(config_));
  }
  if (keys.of[0] > 0 && keys.of[1] > 0) {
    params.k = encode_rows(device_, p.k, keys, p.head_dim, core::keys_of(config_));
    params.v = encode_rows(device_, p.v, keys, p.head_dim_v, core::keys_of(config_));
  }
  params.tiles = static_cast<int32>(key_ctas);
  if (row_ctas == 0) params.scheduler = nullptr;  // which prepare would have cleared
  launch(BackwardPart::prepare, row_ctas, params, stream);
  if (g.dsink) launch(BackwardPart::sink, static_cast<std::uint32_t>(p.heads_q), params, stream);
  if (g.dbias) launch_bias(call, params, stream);
  launch(BackwardPart::main, main_ctas(key_ctas), params, stream);
  launch(BackwardPart::finish, row_ctas, params, stream);
}

}  // namespace fovea::runtime
