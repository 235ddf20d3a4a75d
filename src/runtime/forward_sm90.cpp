// The forward kernel for Hopper: problem -> configuration -> kernel text.
#include <algorithm>
#include <cstdint>

#include "core/mask.h"
#include "runtime/forward_config.h"
#include "runtime/forward_gpu.h"
#include "runtime/source.h"

namespace fovea::runtime {

namespace {

using core::DType;
using core::FwdConfig;
using core::int32;
using core::int64;
using core::Problem;
using core::ScoreTransform;
using core::View;

// Whether every row is whole 16-byte chunks at 16-byte aligned addresses.
bool is_chunked(const View& view, int64 columns) {
  if (view.data == nullptr) return true;
  bool whole = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && columns % 8 == 0 &&
               view.stride[3] == 1;
  for (int i = 0; i < 3; ++i) whole = whole && view.stride[i] % 8 == 0;
  return whole;
}

constexpr int32 swizzle_rows = 8;  // after which its pattern repeats

// By how many keys a tile is shorter: what is added to scores needs registers of its own.
int32 fewer_keys(const FwdConfig& c) {
  int32 fewer = (c.has_bias ? 48 : 0) + (c.has_mask ? 32 : 0) + (c.has_dropout ? 16 : 0) +
                (c.has_alibi ? 16 : 0);
  if (fewer > 0 && c.head_dim > 128) fewer += 16;
  if (fewer > 0 && c.transform == ScoreTransform::softcap) fewer += 16;
  return fewer;
}

// What measured best (docs/kernels/fwd_sm90.md); the registers of a tile decide what is possible.
void choose_tile(FwdConfig& c, const Problem& p) {
  const int32 widest = std::max(c.head_dim, c.head_dim_v);
  const bool plain =
      c.transform == ScoreTransform::none && !core::modifies_scores(c) && !c.has_dropout;
  const bool windowed = core::is_windowed(c);
  const bool long_keys = p.seqlen_k >= 8192;
  const int64 rows = p.seqlen_q * p.group_size();  // packed
  // Two warpgroups where rows are few, or blocks: a causal tile of fewer rows wastes less.
  if (widest <= 64 && (rows <= 128 || (plain && windowed && !long_keys))) {
    c.tile_k = 128;
    c.stages = 4;
  } else if (widest <= 64) {
    c.warpgroups = 3;
    c.tile_k = plain ? 128 : 96;
    c.stages = 4;
  } else if (widest <= 128) {
    c.tile_k = 128;
  } else if (widest <= 192) {
    c.tile_k = c.head_dim_v <= 128 ? 128 : 96;
  } else {
    const bool roomy = plain && !windowed && c.softmax == core::SoftmaxPolicy::sum_guard;
    // Unless the last block would be emptier by a hundredth of all keys.
    const int64 empty = core::ceil_div(p.seqlen_k, 80) * 80 - core::ceil_div(p.seqlen_k, 64) * 64;
    c.tile_k = roomy && 100 * empty < p.seqlen_k ? 80 : 64;
    c.persistent = !(windowed && long_keys);
  }
  c.tile_k = std::max(c.tile_k - fewer_keys(c), c.head_dim_v > 128 ? 32 : 48);
  while (shared_bytes(c) > core::shared_limit_bytes && c.tile_k > 32) {
    // Staging out where q was costs less than smaller tiles, but needs q to be as wide.
    if (c.out_apart && c.head_dim >= c.head_dim_v) {
      c.out_apart = false;
    } else {
      c.tile_k -= 16;
    }
  }
}

// Whether the queries of a sequence, of all heads of a group, are rows of one warpgroup.
bool has_few_rows(const Problem& p) { return p.seqlen_q * p.group_size() <= 64; }

// Where rows are few, memory binds: one warpgroup computes, and what memory there is holds keys and
// values on their way. Out needs none: where it is stored by the copy engine, q is not read again.
void choose_few(FwdConfig& c) {
  const int32 keys = std::max(c.head_dim, c.head_dim_v) <= 128 ? 128 : 64;
  c.warpgroups = 1;
  c.ping_pong = false;
  c.out_apart = c.head_dim < c.head_dim_v;
  c.tile_k = std::max(keys - fewer_keys(c), 32);
  c.stages = 8;
  while (shared_bytes(c) > core::shared_limit_bytes) --c.stages;
}

void choose_source(FwdConfig& c, const Problem& p) {
  const Extents extent = extents_of(p);
  const auto suits = [](const View& view, const int64(&e)[3], int64 columns) {
    return !has_elements(view, e) || suits_copy_engine(view, e, columns);
  };
  const bool all = suits(p.q, extent.q, p.head_dim) && suits(p.k, extent.k, p.head_dim) &&
                   suits(p.v, extent.k, p.head_dim_v);
  if (all && !p.is_paged()) return;
  if (all && page_box(p, c.tile_k) % swizzle_rows == 0) {
    c.source = core::Source::paged;
    return;
  }
  c.source = core::Source::gather;
  // The copying threads need registers, too, and those that compute more for addresses.
  c.warpgroups = 2;
  if (c.tile_k > 64) c.tile_k -= 16;
  c.chunked =
      is_chunked(p.q, p.head_dim) && is_chunked(p.k, p.head_dim) && is_chunked(p.v, p.head_dim_v);
  c.ragged = true;
  c.persistent = false;
}

}  // namespace

FwdConfig choose_forward_sm90(const Problem& p, core::SoftmaxPolicy softmax, int sm_count) {
  FwdConfig c;
  fill_features(c, p, softmax);
  choose_tile(c, p);
  choose_source(c, p);
  if (has_few_rows(p) && c.source != core::Source::gather) choose_few(c);
  c.packed = should_pack(p, core::rows_of(c), packed_queries(p, c));
  c.split = forward_splits(p, c, sm_count) > 1;
  if (c.split) c.has_sink = false;  // added once, when the parts are merged
  if (c.packed || c.split) c.tma_out = false;
  c.reads_once = c.warpgroups == 1 && (c.packed || p.group_size() == 1);
  c.out_direct = c.persistent && c.tma_out && !c.out_apart && p.head_dim_v % 32 == 0;
  c.tail = core::may_have_tail(c);
  c.tail = forward_tail(p, c, sm_count).tiles > 0;
  // Elsewhere the loading thread lacks registers, or values come late for it.
  const bool wide = c.head_dim == 128 && c.head_dim_v == 128;
  const bool narrow = c.head_dim <= 64 && c.head_dim_v <= 64 && !c.bound_right;
  c.looks_ahead = core::may_look_ahead(c) && !c.bound_left && (wide || narrow);
  return c;
}

int32 forward_splits(const Problem& p, const FwdConfig& c, int sm_count) {
  return choose_splits(p, core::rows_of(c), c.tile_k, count_tiles(p, c).tiles, sm_count);
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
  text.source(c.source);
  text.flag("chunked", c.chunked);
  text.flag("packed", c.packed);
  text.flag("split", c.split);
  text.flag("tail", c.tail);
  text.flag("has_alibi", c.has_alibi);
  text.flag("has_bias", c.has_bias);
  text.type("bias_dtype", c.bias_dtype);
  text.flag("has_mask", c.has_mask);
  text.flag("has_dropout", c.has_dropout);
  text.flag("tma_out", c.tma_out);
  text.flag("out_apart", c.out_apart);
  text.flag("out_direct", c.out_direct);
  text.flag("persistent", c.persistent);
  text.flag("ping_pong", c.ping_pong);
  text.flag("overlap", c.overlap);
  text.flag("short_first", core::begins_short(c));
  text.flag("looks_ahead", c.looks_ahead && core::may_look_ahead(c));
  if (c.reads_once && core::size_bytes(c.dtype) == 2) text.flag("reads_once", true);
  text.flag("q_in_registers", c.q_in_registers);
  text.number("promote", c.promote);
  if (c.page_keys > 0) text.number("page_keys", c.page_keys);
  if (c.trace) text.flag("trace", c.trace);
  return text.value();
}

std::string forward_text(const FwdConfig& config) {
  KernelSource source;
  source.name = "forward_sm90_" + operand_name(config.dtype, config.head_dim, config.head_dim_v);
  source.include = "device/fwd_sm90.cuh";
  source.instructions = {
      wgmma_text({.n = config.tile_k, .a = config.dtype, .b = config.dtype}, "fwd_scores"),
      wgmma_text({.n = config.head_dim_v,
                  .a = config.dtype,
                  .b = config.dtype,
                  .a_in_registers = true,
                  .b_mn_major = true},
                 "fwd_output")};
  if (core::begins_short(config)) {
    source.instructions.push_back(
        wgmma_text({.n = config.tile_k / 2, .a = config.dtype, .b = config.dtype}, "fwd_scores"));
  }
  source.call = "fovea::device::fwd<" + forward_expression(config) + ">";
  source.params = "fovea::core::FwdParams";
  source.threads = core::threads_of(config);
  return kernel_text(source);
}

std::string combine_text(DType out_dtype) {
  const std::string type = out_dtype == DType::bf16  ? "bf16"
                           : out_dtype == DType::f16 ? "f16"
                                                     : "f32";
  KernelSource source;
  source.name = "combine_" + type;
  source.include = "device/combine.cuh";
  source.call = "fovea::device::combine<fovea::core::DType::" + type + ">";
  source.params = "fovea::core::CombineParams";
  source.threads = core::combine_threads;
  return kernel_text(source);
}

}  // namespace fovea::runtime
