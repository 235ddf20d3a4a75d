// The forward kernel for Blackwell: problem -> configuration -> kernel text.
#include <algorithm>

#include "core/mask.h"
#include "runtime/forward_config.h"
#include "runtime/forward_fp8.h"
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

// The same in 8 bits, where products take half as long and the softmax binds: the fewest that bring
// it below 7/8 of the tensor cores' time, or those with which it takes the least. Per score, in
// lanes: packed multiply-add and sum, half a conversion and the exponential, instead of which a
// polynomial takes two bounds, shift, add and its degree and three packed instructions. A running
// maximum takes half an instruction.
int32 polynomial_share_fp8(const Fwd100Config& c, std::string_view arch) {
  if (arch.starts_with("sm_103")) return 0;
  constexpr int32 scores = 128 * 128;
  const double always = core::is_corrected(c) ? 3.0 : 2.5;
  const double tensor = 2.0 * (c.head_dim + c.head_dim_v);
  int32 best = 0;
  double least = 0.0;
  for (int32 share = 0; share <= 8; ++share) {
    const double part = share / 16.0;
    const double special = scores * (1.0 - part) / 16;
    const double issue = scores * (always + (3.0 + (c.polynomial_degree + 3) / 2.0) * part) / 128;
    const double alu = scores * (0.5 + 4.0 * part) / 64;
    const double softmax = std::max({special, issue, alu});
    if (share == 0 || softmax < least) {
      best = share;
      least = softmax;
    }
    if (softmax <= tensor * 7 / 8) break;
  }
  return best;
}

// Out has memory of its own where that leaves three stages; the rest is for stages.
void fill_shared_memory(Fwd100Config& c) {
  c.stages = 3;
  c.out_apart = core::shared_bytes(c) <= core::shared_limit_bytes;
  if (!c.out_apart && c.head_dim < c.head_dim_v) c.out_apart = true;
  const int32 room = core::shared_limit_bytes - core::shared_bytes_but_stages(c);
  c.stages = std::min(room / core::stage_bytes(c), 6);
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
  fill_shared_memory(c);
  c.polynomial = polynomial_share(c, arch);
  c.max_with_load = arch.starts_with("sm_103") &&
                    (c.transform == core::ScoreTransform::none || core::modifies_scores(c));
  c.polynomial_degree = p.lse || c.dtype == core::DType::f16 ? 4 : 3;
  return c;
}

Fwd100Config choose_forward_fp8_sm100(const Problem& p, core::SoftmaxPolicy softmax,
                                      std::string_view arch, core::DType codes) {
  Fwd100Config c;
  fill_features(c, p, softmax);
  c.dtype = codes;
  c.head_dim = core::fp8_columns(p.head_dim);
  c.tma_out = stores_tiles(p, c.out_dtype, c.out_dtype);
  const bool busy = c.transform == core::ScoreTransform::softcap || c.head_dim_v > 128;
  c.query_tiles = busy || p.seqlen_q <= core::query_tile_rows ? 1 : 2;
  c.packed = should_pack(p, core::rows_of(c), packed_queries(p, c));
  if (c.packed && !busy && p.seqlen_q * p.group_size() > core::query_tile_rows) {
    c.query_tiles = 2;
  }
  if (c.packed) c.tma_out = false;
  c.cta_pair = suits_pairs(c, p);
  fill_shared_memory(c);
  // Registers: a smaller part waits in fewer of them.
  if (core::is_windowed(c) && c.ragged) c.first_part = 64;
  c.polynomial_degree = p.lse ? 4 : 2;
  c.polynomial = polynomial_share_fp8(c, arch);
  c.max_with_load = arch.starts_with("sm_103") && c.transform == core::ScoreTransform::none;
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
  if (c.trace) text.flag("trace", c.trace);
  return text.value();
}

std::vector<std::string> forward_instructions_sm100() {
  std::vector<std::string> list{tcgen05_load_text(16), tcgen05_load_text(32),
                                tcgen05_load_max_text(32), tcgen05_store_text(8),
                                tcgen05_store_text(16)};
  for (const int ctas : {1, 2}) {
    for (const bool tensor_memory : {false, true}) {
      for (const bool eight_bit : {false, true}) {
        list.push_back(tcgen05_mma_text({eight_bit, tensor_memory, ctas}));
      }
    }
  }
  return list;
}

std::string forward_text(const Fwd100Config& c) {
  KernelSource source;
  source.name = "forward_sm100_" + operand_name(c.dtype, c.head_dim, c.head_dim_v);
  source.include = "device/fwd_sm100.cuh";
  source.instructions = forward_instructions_sm100();
  source.call = "fovea::device::fwd<" + forward_expression(c) + ">";
  source.params = core::is_eight_bit(c) ? "fovea::core::FwdFp8Params" : "fovea::core::FwdParams";
  source.threads = core::threads_of(c);
  return kernel_text(source);
}

}  // namespace fovea::runtime
