#include "runtime/forward_config.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/mask.h"

namespace fovea::runtime {

namespace {

using core::DType;
using core::int32;
using core::int64;
using core::Problem;
using core::ScoreTransform;
using core::SoftmaxPolicy;

std::string_view name_of(DType type) {
  switch (type) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::s8: return "s8";
    default: return "f32";
  }
}

std::string_view name_of(SoftmaxPolicy policy) {
  switch (policy) {
    case SoftmaxPolicy::online: return "online";
    case SoftmaxPolicy::conditional: return "conditional";
    default: return "sum_guard";
  }
}

std::string_view name_of(ScoreTransform transform) {
  switch (transform) {
    case ScoreTransform::scale: return "scale";
    case ScoreTransform::softcap: return "softcap";
    default: return "none";
  }
}

std::string_view name_of(core::Source source) {
  switch (source) {
    case core::Source::paged: return "paged";
    case core::Source::gather: return "gather";
    default: return "tma";
  }
}

}  // namespace

Extents extents_of(const Problem& p) {
  Extents e{{p.batch, p.seqlen_q, p.heads_q}, {p.batch, p.seqlen_k, p.heads_kv}};
  if (p.is_varlen_q()) e.q[0] = 1, e.q[1] = p.total_q;
  if (p.is_varlen_k()) e.k[0] = 1, e.k[1] = p.total_k;
  if (p.is_paged()) e.k[0] = p.pages, e.k[1] = p.page_size;
  return e;
}

bool suits_copy_engine(const core::View& view, const int64 (&extent)[3], int64 columns) {
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % 16 != 0 || core::size_bytes(view.dtype) != 2) return false;
  if (view.stride[3] != 1 && columns > 1) return false;
  for (int i = 0; i < 3; ++i) {
    if (extent[i] <= 1) continue;
    const int64 bytes = view.stride[i] * 2;
    if (bytes <= 0 || bytes % 16 != 0 || bytes >= int64{1} << 40) return false;
  }
  return true;
}

bool has_elements(const core::View& view, const int64 (&extent)[3]) {
  return extent[0] > 0 && extent[1] > 0 && view.data != nullptr;
}

int32 page_box(const Problem& p, int32 tile_k) { return std::gcd(p.page_size, tile_k); }

int32 packed_queries(const Problem& p, const core::FwdConfig& c) {
  return core::rows_of(c) / p.group_size();
}

int32 packed_queries(const Problem& p, const core::Fwd100Config& c) {
  // Each query tile holds whole queries, and is full.
  if (core::query_tile_rows % p.group_size() != 0) return 0;
  return core::rows_of(c) / p.group_size();
}

bool should_pack(const Problem& p, int64 rows, int64 packed) {
  if (p.group_size() == 1 || packed == 0) return false;
  const auto filled = [](int64 count, int64 capacity) {
    return static_cast<double>(count) / static_cast<double>(core::round_up(count, capacity));
  };
  const int64 queries = std::max<int64>(p.seqlen_q, 1);
  const double usable = static_cast<double>(packed * p.group_size()) / static_cast<double>(rows);
  return filled(queries, rows) < 0.9 * usable * filled(queries, packed);
}

int32 choose_splits(const Problem& p, int64 rows, int64 tile_k, int64 tiles, int sm_count) {
  // Blocks of keys that the longest tile visits.
  int64 keys = p.seqlen_k;
  if (p.window.left >= 0) {
    const int64 right = p.window.right >= 0 ? std::min(p.window.right, keys) : keys;
    keys = std::min(keys, std::min(p.window.left, keys) + right + rows);
  }
  const int64 span = std::max<int64>(core::ceil_div(keys, tile_k), 1);
  if (p.num_splits > 0) return static_cast<int32>(std::min<int64>(p.num_splits, span));
  // A few blocks for each part.
  if (tiles == 0 || 10 * tiles >= 8 * int64{sm_count}) return 1;
  const auto filled = [&](int64 splits) {
    const int64 waves = core::ceil_div(tiles * splits, sm_count);
    return static_cast<double>(tiles * splits) / static_cast<double>(waves * sm_count);
  };
  const int64 most = std::clamp<int64>(span / 4, 1, 128);
  double best = 0.0;
  for (int64 splits = 1; splits <= most; ++splits) best = std::max(best, filled(splits));
  int64 splits = 1;
  while (splits < most && filled(splits) < 0.95 * best) ++splits;
  return static_cast<int32>(splits);
}

Tail choose_tail(int64 tiles, int64 blocks, int32 tile_k, int sm_count) {
  Tail tail;
  tail.begin = static_cast<int32>(tiles);
  const int64 rest = tiles % sm_count;
  if (rest == 0) return tail;
  // In blocks: to write or read a part takes 64 / tile_k of the time of a block where L2 gives 64
  // bytes a cycle and the tensor cores do 4096 FLOP (docs/kernels/fwd_sm90.md), and a part more
  // starts and ends.
  const double move = 64.0 / tile_k;
  constexpr double start = 1.0;
  constexpr int64 most = 16;
  double best = static_cast<double>(blocks);
  for (int64 parts = 2; parts <= std::min(most, blocks); ++parts) {
    const auto rounds = static_cast<double>(core::ceil_div(rest * parts, sm_count));
    const auto longest = static_cast<double>(core::ceil_div(blocks, parts));
    const double cost = rounds * (longest + start + move) + static_cast<double>(parts) * move;
    if (cost >= best) continue;
    best = cost;
    tail.parts = static_cast<int32>(parts);
  }
  // What is not worth so much of all rounds costs more in instructions of every tile.
  constexpr double worth = 0.015;
  const auto all = static_cast<double>(blocks * core::ceil_div(tiles, sm_count));
  if (tail.parts == 1 || static_cast<double>(blocks) - best < worth * all) {
    tail.parts = 1;
    return tail;
  }
  tail.tiles = static_cast<int32>(rest);
  tail.begin -= tail.tiles;
  return tail;
}

TileCount count_tiles(const Problem& p, int64 queries, int64 heads) {
  TileCount count;
  count.sequences = p.batch + (p.is_varlen_q() ? 1 : 0);
  // With rows behind the last sequence and no other (total_q > 0) there is one block at least.
  const int64 longest =
      p.is_varlen_q() && p.total_q > 0 ? std::max<int64>(p.seqlen_q, 1) : p.seqlen_q;
  count.q_blocks = core::ceil_div(longest, queries);
  count.tiles = count.q_blocks * heads * count.sequences;
  return count;
}

Tail forward_tail(const Problem& p, const core::FwdConfig& c, int sm_count) {
  if (!c.tail) return {};
  return choose_tail(count_tiles(p, c).tiles, core::ceil_div(p.seqlen_k, c.tile_k), c.tile_k,
                     sm_count);
}

int64 row_count(const Problem& p) {
  const Extents extent = extents_of(p);
  return extent.q[0] * extent.q[1] * p.heads_q;
}

bool stores_tiles(const Problem& p, DType dtype, DType out_dtype) {
  return out_dtype == dtype && suits_copy_engine(p.out, extents_of(p).q, p.head_dim_v);
}

void ConfigText::type(std::string_view name, DType value) {
  add(name, "fovea::core::DType::" + std::string(name_of(value)));
}

void ConfigText::softmax(SoftmaxPolicy value) {
  add("softmax", "fovea::core::SoftmaxPolicy::" + std::string(name_of(value)));
}

void ConfigText::source(core::Source value) {
  add("source", "fovea::core::Source::" + std::string(name_of(value)));
}

void ConfigText::transform(ScoreTransform value) {
  add("transform", "fovea::core::ScoreTransform::" + std::string(name_of(value)));
}

}  // namespace fovea::runtime
