// What the configurations of the forward kernels have in common: filling their features from a
// problem, counting their tiles, and writing them as C++ expressions. Internal to runtime/.
#pragma once

#include <string>
#include <string_view>

#include "core/config.h"
#include "core/config_sm100.h"
#include "core/types.h"

namespace fovea::runtime {

// Extents of (batch, row, head) in memory; pages are the batch of k and v.
struct Extents {
  core::int64 q[3];
  core::int64 k[3];
};
Extents extents_of(const core::Problem& problem);

// What the copy engine takes: contiguous rows of 16-bit elements, every other step a positive
// multiple of 16 bytes. Dimensions of extent 1 have no step.
bool suits_copy_engine(const core::View& view, const core::int64 (&extent)[3], core::int64 columns);
bool has_elements(const core::View& view, const core::int64 (&extent)[3]);

// Rows that one copy takes from a page: as many as fit both pages and tiles.
core::int32 page_box(const core::Problem& problem, core::int32 tile_k);

// Queries of a tile when the heads of a group share it; 0 when the group is too large.
core::int32 packed_queries(const core::Problem& problem, const core::FwdConfig& config);
core::int32 packed_queries(const core::Problem& problem, const core::Fwd100Config& config);

// Packing pays where query rows alone leave much of their last tile empty.
bool should_pack(const core::Problem& problem, core::int64 rows, core::int64 packed_queries);

// Parts of the keys for tiles of `rows` queries and `tile_k` keys, of which there are `tiles`: as
// many as the problem asks for, or as few as fill the multiprocessors about as well as any number.
core::int32 choose_splits(const core::Problem& problem, core::int64 rows, core::int64 tile_k,
                          core::int64 tiles, int sm_count);

// Where the last round of tiles would leave most multiprocessors idle, its tiles are cut into parts
// of their keys: tiles from `begin` on, into `parts` each.
struct Tail {
  core::int32 begin = 0;
  core::int32 parts = 1;
  core::int32 tiles = 0;  // that are cut

  core::int32 all_parts() const { return parts * tiles; }
};
// Of `tiles` tiles that visit `blocks` blocks of tile_k keys each.
Tail choose_tail(core::int64 tiles, core::int64 blocks, core::int32 tile_k, int sm_count);

// Tiles of all sequences, before keys are split.
struct TileCount {
  core::int64 sequences = 0;  // rows behind the last one are one more
  core::int64 q_blocks = 0;   // of the longest
  core::int64 tiles = 0;
};
TileCount count_tiles(const core::Problem& problem, core::int64 queries, core::int64 heads);

template <typename Config>
TileCount count_tiles(const core::Problem& p, const Config& c) {
  if (c.packed) return count_tiles(p, packed_queries(p, c), p.heads_kv);
  return count_tiles(p, core::int64{core::rows_of(c)} * core::ctas_of(c), p.heads_q);
}

// None of a configuration without one.
Tail forward_tail(const core::Problem& problem, const core::FwdConfig& config, int sm_count);

// Rows of out in all, heads included.
core::int64 row_count(const core::Problem& problem);

// Whether the copy engine takes out, and so the kernel may store tiles in one piece.
bool stores_tiles(const core::Problem& problem, core::DType dtype, core::DType out_dtype);

// Everything that follows from the problem and not from the chip.
template <typename Config>
void fill_features(Config& c, const core::Problem& p, core::SoftmaxPolicy softmax) {
  c.dtype = p.q.dtype;
  c.out_dtype = p.out.dtype;
  c.head_dim = core::round_up(p.head_dim, 16);
  c.head_dim_v = core::round_up(p.head_dim_v, 16);
  c.softmax = softmax;
  c.bound_right = p.window.right >= 0;
  c.bound_left = p.window.left >= 0;
  c.ragged = p.is_varlen_q() || p.is_varlen_k() || p.seqused_q != nullptr ||
             p.seqused_k != nullptr || p.is_paged();
  c.has_sink = static_cast<bool>(p.sink);
  if (p.softcap > 0.0f) {
    c.transform = core::ScoreTransform::softcap;
  } else if (!(p.softmax_scale > 0.0f)) {
    c.transform = core::ScoreTransform::scale;
  }
  c.has_alibi = static_cast<bool>(p.alibi);
  c.has_bias = static_cast<bool>(p.bias);
  if (c.has_bias) c.bias_dtype = p.bias.dtype;
  c.has_mask = static_cast<bool>(p.mask);
  c.has_dropout = p.dropout.probability > 0.0f;
  if (core::modifies_scores(c) && c.transform == core::ScoreTransform::none) {
    c.transform = core::ScoreTransform::scale;
  }
  c.tma_out = stores_tiles(p, c.dtype, c.out_dtype);
}

// A configuration as a C++ expression: "fovea::core::FwdConfig{.head_dim = 64, ...}". Fields come
// in the order of their declaration.
class ConfigText {
 public:
  explicit ConfigText(std::string_view type) : text_("fovea::core::" + std::string(type) + "{") {}

  void number(std::string_view name, int value) { add(name, std::to_string(value)); }
  void flag(std::string_view name, bool value) { add(name, value ? "true" : "false"); }
  void type(std::string_view name, core::DType value);
  void softmax(core::SoftmaxPolicy value);
  void transform(core::ScoreTransform value);
  void source(core::Source value);
  std::string value() const { return text_ + "}"; }

 private:
  void add(std::string_view name, std::string_view value) {
    text_ += (text_.back() == '{' ? "." : ", .") + std::string(name) + " = " + std::string(value);
  }
  std::string text_;
};

}  // namespace fovea::runtime
