#include "runtime/backward_gpu.h"

#include <algorithm>
#include <limits>
#include <span>

#include "core/mask.h"
#include "core/numeric.h"
#include "fovea/fovea.hpp"
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

constexpr int32 largest_head_dim = 128;

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

int64 key_blocks(const Problem& p) {
  const int64 blocks = core::ceil_div(p.seqlen_k, core::backward_keys);
  return p.total_k > 0 ? std::max<int64>(blocks, 1) : blocks;
}

// Blocks of query rows of all sequences and heads (device/bwd_blocks.h, first_block).
int64 all_blocks(const Problem& p, const BwdConfig& c) {
  if (!p.is_varlen_q()) return p.batch * p.heads_q * query_blocks(p, c);
  return (p.total_q / core::rows_of(c) + p.batch + 1) * p.heads_q;
}

// The scratch of a call, laid out from `base`.
struct Scratch {
  DeviceAddress lse_log2 = 0, delta = 0, dq_sums = 0, turns = 0;
  std::size_t bytes = 0;

  Scratch(const Problem& p, const BwdConfig& c, DeviceAddress base) {
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
  }
};

template <std::size_t count>
void copy_strides(int64 (&to)[count], const View& from) {
  for (std::size_t i = 0; i < count; ++i) to[i] = from.stride[i];
}

// Whether elements 2 i and 2 i + 1 of every row share an aligned word.
bool in_pairs(const View& view, int32 columns) {
  const bool even_steps =
      view.stride[0] % 2 == 0 && view.stride[1] % 2 == 0 && view.stride[2] % 2 == 0;
  return even_steps && view.stride[3] == 1 && columns % 2 == 0 &&
         reinterpret_cast<DeviceAddress>(view.data) % 4 == 0;
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
  params.paired = in_pairs(g.dk, p.head_dim) && in_pairs(g.dv, p.head_dim_v);
}

// (sequence, KV head) pairs whose rows of q, dout and dq_sums fit half of the L2 together.
int32 pairs_in_cache(const Problem& p, const DeviceProperties& chip) {
  const auto bytes = static_cast<std::uint64_t>(
      p.seqlen_q * p.group_size() * (2 * p.head_dim + 2 * p.head_dim_v + 4 * p.head_dim));
  const auto pairs = static_cast<std::uint64_t>(sequences(p) * p.heads_kv);
  return static_cast<int32>(std::clamp<std::uint64_t>(
      chip.l2_bytes / 2 / std::max<std::uint64_t>(bytes, 1), 1, std::max<std::uint64_t>(pairs, 1)));
}

// Everything but the tensor maps.
BwdParams fill_params(const BackwardCall& call, const BwdConfig& config,
                      const DeviceProperties& chip) {
  const Problem& p = call.problem;
  BwdParams params;
  fill_tensors(params, p, call.gradients);
  const Scratch scratch(p, config, call.workspace);
  params.lse_log2 = reinterpret_cast<float*>(scratch.lse_log2);
  params.delta = reinterpret_cast<float*>(scratch.delta);
  params.dq_sums = reinterpret_cast<float*>(scratch.dq_sums);
  params.turns = reinterpret_cast<core::uint32*>(scratch.turns);
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
  params.key_blocks = static_cast<int32>(key_blocks(p));
  params.section = pairs_in_cache(p, chip);
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
  refuse(arch != "sm_90a",
         "its backward kernels are for sm_90a and the device is " + std::string(arch));
  refuse(p.q.dtype != DType::bf16 && p.q.dtype != DType::f16,
         "it computes bf16 and f16 but q, k and v are of another dtype, so convert them");
  refuse(p.out.dtype != p.q.dtype, "it takes out and dout in the dtype of q, so convert them");
  refuse(g.dq.dtype != g.dk.dtype || g.dk.dtype != g.dv.dtype,
         "it writes dq, dk and dv in one dtype, so give them the same");
  refuse(p.head_dim > largest_head_dim || p.head_dim_v > largest_head_dim,
         "it takes head dimensions up to 128 but they are " + std::to_string(p.head_dim) + " and " +
             std::to_string(p.head_dim_v));
  refuse(p.softcap > 0.0f, "it has no softcap");
  refuse(static_cast<bool>(p.bias), "it has no bias");
  refuse(static_cast<bool>(p.mask), "it has no mask tensor");
  refuse(static_cast<bool>(p.alibi), "it has no ALiBi");
  refuse(static_cast<bool>(g.dsink), "it does not compute dsink, so leave it absent");
  refuse(p.dropout.probability > 0.0f, "it has no dropout");
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

BwdConfig choose_backward(const Problem& p, const Gradients& g) {
  BwdConfig c;
  c.dtype = p.q.dtype;
  c.wide = g.dq.dtype == DType::f32;
  c.head_dim = std::max(p.head_dim, p.head_dim_v) <= 64 ? 64 : 128;
  c.bound_right = p.window.right >= 0;
  c.bound_left = p.window.left >= 0;
  c.ragged = p.is_varlen_q() || p.is_varlen_k() || p.seqused_q != nullptr || p.seqused_k != nullptr;
  c.deterministic = p.deterministic;
  return c;
}

std::string backward_text(const BwdConfig& c, BackwardPart part) {
  ConfigText config("BwdConfig");
  config.type("dtype", c.dtype);
  config.flag("wide", c.wide);
  config.number("head_dim", c.head_dim);
  config.flag("bound_right", c.bound_right);
  config.flag("bound_left", c.bound_left);
  config.flag("ragged", c.ragged);
  config.flag("deterministic", c.deterministic);
  config.flag("tensor_memory", c.tensor_memory);
  config.flag("pair", c.pair);
  config.flag("issue_order", c.issue_order);
  KernelSource source;
  source.params = "fovea::core::BwdParams";
  source.include = "device/bwd_rows.cuh";
  source.threads = core::row_threads;
  std::string function = part == BackwardPart::prepare ? "bwd_prepare" : "bwd_finish";
  if (part == BackwardPart::main) {
    source.include = "device/bwd_sm90.cuh";
    source.threads = core::backward_threads;
    source.instructions = {
        wgmma_text({.n = core::rows_of(c), .a = c.dtype, .b = c.dtype}, "bwd_scores"),
        wgmma_text({.n = c.head_dim,
                    .a = c.dtype,
                    .b = c.dtype,
                    .a_in_registers = true,
                    .b_mn_major = true},
                   "bwd_gradient"),
        wgmma_text({.n = core::panel_columns,
                    .a = c.dtype,
                    .b = c.dtype,
                    .a_mn_major = true,
                    .b_mn_major = true},
                   "bwd_dq")};
    function = "bwd";
  }
  source.call = "fovea::device::" + function + "<" + config.value() + ">";
  return kernel_text(source);
}

std::size_t backward_workspace_bytes(const Problem& problem, const BwdConfig& config) {
  return Scratch(problem, config, 0).bytes;
}

BackwardKernels::BackwardKernels(Device& device, const BwdConfig& config, Jit& jit)
    : device_(device), config_(config) {
  for (const BackwardPart part :
       {BackwardPart::prepare, BackwardPart::main, BackwardPart::finish}) {
    const auto index = static_cast<std::size_t>(part);
    CompileRequest request;
    request.text = backward_text(config, part);
    request.arch = device.properties().arch;
    request.format = device.properties().image_format;
    compiled_[index] = jit.compile(request);
    kernels_[index] = device.load(compiled_[index].image->bytes, kernel_entry);
  }
}

void BackwardKernels::launch(BackwardPart part, std::uint32_t ctas, std::uint32_t threads,
                             std::uint32_t shared_bytes, const BwdParams& params,
                             Stream stream) const {
  if (ctas == 0) return;
  LaunchConfig shape;
  shape.grid.x = ctas;
  shape.block.x = threads;
  shape.dynamic_shared_bytes = shared_bytes;
  device_.launch(*kernels_[static_cast<std::size_t>(part)], shape,
                 std::as_bytes(std::span(&params, 1)), stream);
}

void BackwardKernels::run(const BackwardCall& call, Stream stream) const {
  const Problem& p = call.problem;
  const Gradients& g = call.gradients;
  BwdParams params = fill_params(call, config_, device_.properties());
  const std::uint32_t row_ctas = checked_grid(query_blocks(p, config_) * p.heads_q * sequences(p));
  const std::uint32_t key_ctas = checked_grid(key_blocks(p) * p.heads_kv * sequences(p));
  const RowExtents queries = query_extents(p);
  const RowExtents keys = key_extents(p);
  if (queries.of[0] > 0 && queries.of[1] > 0) {
    params.q = encode_rows(device_, p.q, queries, p.head_dim, core::rows_of(config_));
    params.dout_map = encode_rows(device_, g.dout, queries, p.head_dim_v, core::rows_of(config_));
  }
  if (keys.of[0] > 0 && keys.of[1] > 0) {
    params.k = encode_rows(device_, p.k, keys, p.head_dim, core::backward_keys);
    params.v = encode_rows(device_, p.v, keys, p.head_dim_v, core::backward_keys);
  }
  launch(BackwardPart::prepare, row_ctas, core::row_threads, 0, params, stream);
  launch(BackwardPart::main, key_ctas, core::backward_threads,
         static_cast<std::uint32_t>(core::shared_bytes(config_)), params, stream);
  launch(BackwardPart::finish, row_ctas, core::row_threads, 0, params, stream);
}

}  // namespace fovea::runtime
