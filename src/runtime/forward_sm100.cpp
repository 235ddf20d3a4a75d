// The forward kernel for Blackwell: problem -> configuration -> kernel text.
#include <algorithm>

#include "core/mask.h"
#include "runtime/forward_config.h"
#include "runtime/forward_gpu.h"
#include "runtime/source.h"

namespace fovea::runtime {

namespace {

using core::Fwd100Config;
using core::int32;
using core::Problem;

// Two CTAs share their products where every row sees the same keys and little is done to scores:
// half as much of keys and values is copied, and read by products, for each of them. The last pair
// of a head may lack half of its rows: not where that is much.
bool suits_pairs(const Fwd100Config& c, const Problem& p) {
  const core::int64 tiles = core::ceil_div(p.seqlen_q, core::rows_of(c));
  return core::is_dense(c) && c.head_dim_v % 128 == 0 && (tiles % 2 == 0 || tiles >= 8) &&
         c.transform != core::ScoreTransform::softcap && !core::modifies_scores(c) &&
         !c.has_dropout;
}

// Of 16 exponentials, how many go by polynomial: the fewest that bring the exponential unit below
// 7/8 of what binds without it, the tensor cores or that unit at work together with the FMA units
// (docs/kernels/fwd_sm100.md). A B300 computes twice as many exponentials a cycle: none.
int32 polynomial_share(const Fwd100Config& c, std::string_view arch) {
  if (arch.starts_with("sm_103")) return 0;
  const int32 tensor = 4 * (c.head_dim + c.head_dim_v);  // cycles a tile of 128 x 128
  int32 share = 0;
  while (share < 7 && 1024 * (16 - share) > 14 * tensor) ++share;
  return share;
}

}  // namespace

Fwd100Config choose_forward_sm100(const Problem& p, core::SoftmaxPolicy softmax,
                                  std::string_view arch, int sm_count) {
  Fwd100Config c;
  fill_features(c, p, softmax);
  // Two query tiles need the output of both in half of the tensor memory.
  // Where much is done to each score, one tile's threads have the registers for it.
  const bool busy = c.transform == core::ScoreTransform::softcap || core::modifies_scores(c) ||
                    c.has_dropout || c.head_dim_v > 128;
  c.query_tiles = busy || p.seqlen_q <= core::query_tile_rows ? 1 : 2;
  if (p.is_paged()) c.source = core::Source::paged;
  c.packed = should_pack(p, core::rows_of(c), packed_queries(p, c));
  if (c.packed && !busy && p.seqlen_q * p.group_size() > core::query_tile_rows) {
    c.query_tiles = 2;
  }
  c.split = forward_splits(p, c, sm_count) > 1;
  if (c.split) c.has_sink = false;  // added once, when the parts are merged
  if (c.packed || c.split) c.tma_out = false;
  c.cta_pair = suits_pairs(c, p);
  // Out has memory of its own where that leaves three stages.
  c.stages = 3;
  c.out_apart = core::shared_bytes(c) <= core::shared_limit_bytes;
  if (!c.out_apart && c.head_dim < c.head_dim_v) c.out_apart = true;
  const int32 room = core::shared_limit_bytes - core::shared_bytes_but_stages(c);
  c.stages = std::min(room / core::stage_bytes(c), 6);
  c.polynomial = polynomial_share(c, arch);
  c.max_with_load = arch.starts_with("sm_103") &&
                    (c.transform == core::ScoreTransform::none || core::modifies_scores(c));
  c.polynomial_degree = p.lse || c.dtype == core::DType::f16 ? 4 : 3;
  return c;
}

int32 forward_splits(const Problem& p, const Fwd100Config& c, int sm_count) {
  return choose_splits(p, core::rows_of(c), c.tile_k, count_tiles(p, c).tiles, sm_count);
}

std::string forward_expression(const Fwd100Config& c) {
  ConfigText text("Fwd100Config");
  text.type("dtype", c.dtype);
  text.type("out_dtype", c.out_dtype);
  text.number("head_dim", c.head_dim);
  text.number("head_dim_v", c.head_dim_v);
  text.number("query_tiles", c.query_tiles);
  text.number("tile_k", c.tile_k);
  text.number("stages", c.stages);
  text.number("first_part", c.first_part);
  text.number("polynomial", c.polynomial);
  text.number("polynomial_degree", c.polynomial_degree);
  text.softmax(c.softmax);
  text.transform(c.transform);
  text.flag("bound_right", c.bound_right);
  text.flag("bound_left", c.bound_left);
  text.flag("ragged", c.ragged);
  text.flag("has_sink", c.has_sink);
  text.source(c.source);
  text.flag("packed", c.packed);
  text.flag("split", c.split);
  text.flag("has_alibi", c.has_alibi);
  text.flag("has_bias", c.has_bias);
  text.type("bias_dtype", c.bias_dtype);
  text.flag("has_mask", c.has_mask);
  text.flag("has_dropout", c.has_dropout);
  text.flag("tma_out", c.tma_out);
  text.flag("out_apart", c.out_apart);
  text.flag("persistent", c.persistent);
  text.flag("issue_order", c.issue_order);
  text.flag("cta_pair", c.cta_pair);
  text.flag("launch_control", c.launch_control);
  text.flag("max_with_load", c.max_with_load);
  return text.value();
}

std::vector<std::string> forward_instructions_sm100() {
  std::vector<std::string> list{tcgen05_load_text(16), tcgen05_load_text(32),
                                tcgen05_load_max_text(32), tcgen05_store_text(16)};
  for (const int ctas : {1, 2}) {
    for (const bool tensor_memory : {false, true}) {
      list.push_back(tcgen05_mma_text({.a_in_tensor_memory = tensor_memory, .cta_group = ctas}));
    }
  }
  return list;
}

std::string forward_text(const Fwd100Config& c) {
  KernelSource source;
  source.include = "device/fwd_sm100.cuh";
  source.instructions = forward_instructions_sm100();
  source.call = "fovea::device::fwd<" + forward_expression(c) + ">";
  source.params = "fovea::core::FwdParams";
  source.threads = core::threads_of(c);
  return kernel_text(source);
}

}  // namespace fovea::runtime
