// The backward pass's host side: sizes, the list of items, threads, and what lies outside the
// items: dsink, dbias in 16 bits, and rows that no sequence uses. The arithmetic is in
// backward_tile.cpp.
#include "cpu/backward.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/mask.h"
#include "core/numeric.h"
#include "core/tiles.h"
#include "cpu/backward_tile.h"

namespace fovea::cpu {
namespace {

using core::int32;
using core::int64;

constexpr std::size_t alignment_bytes = 64;

std::size_t align_up(std::size_t bytes) {
  return (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

int64 second_level_cache_bytes() {
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? int64{bytes} : int64{512} * 1024;
}

// K^T, V^T, K, dK and dV of a block of keys.
int64 bytes_of_keys(const core::Problem& p, int64 count) {
  return 4 * count * (3 * padded(p.head_dim) + 2 * padded(p.head_dim_v));
}

int64 choose_block_k(const core::Problem& p) {
  for (const int64 block : {128, 64}) {
    if (bytes_of_keys(p, block) <= second_level_cache_bytes() * 2 / 5) return block;
  }
  return 32;
}

// Rows whose Q, dO, dQ, P and dS stay beside a block of keys in three quarters of the cache.
int64 choose_strip_q(const core::Problem& p, int64 block_k) {
  const int64 row_bytes =
      4 * (2 * padded(p.head_dim) + padded(p.head_dim_v) + 2 * block_k + 4 * max_lanes);
  const int64 budget = second_level_cache_bytes() * 3 / 4 - bytes_of_keys(p, block_k);
  const int64 strip = std::clamp<int64>(budget / row_bytes / 12 * 12, 24, 192);
  const int64 rows = std::max<int64>(p.seqlen_q * p.group_size(), 1);
  return std::max<int64>(12, std::min(strip, core::round_up(rows, 12)));
}

// Parts only where there are too few heads to occupy the threads: each has a dQ of its own.
int64 choose_splits(const core::Problem& p, const BackwardConfig& config) {
  const int64 blocks = std::max<int64>(1, core::ceil_div(p.seqlen_k, config.block_k));
  if (p.num_splits > 0) return std::min<int64>(p.num_splits, blocks);
  const int64 heads = std::max<int64>(1, p.batch * p.heads_kv);
  const int64 items_wanted = int64{4} * config.threads;
  if (config.threads == 1 || heads >= items_wanted) return 1;
  return std::min(core::ceil_div(items_wanted, heads), blocks);
}

int64 total_rows(const core::Problem& p) {
  return (p.is_varlen_q() ? p.total_q : p.batch * p.seqlen_q) * p.heads_q;
}

int64 item_count(const core::Problem& p, const BackwardConfig& config) {
  return p.batch * p.heads_kv * config.splits;
}

int64 bias_elements(const core::Gradients& g) {
  return g.dbias_extent[0] * g.dbias_extent[1] * g.dbias_extent[2] * g.dbias_extent[3];
}

// dbias in 16 bits is summed in fp32 of its own.
bool sums_bias_apart(const core::Gradients& g) {
  return g.dbias && g.dbias.dtype != core::DType::f32;
}

// The workspace, laid out from base; null only counts the bytes.
struct Workspace {
  BackwardItem* items = nullptr;
  int64* units = nullptr;  // where each unit begins among the items, and the end
  BackwardShared shared;
  std::byte* threads = nullptr;
  std::size_t bytes = 0;

  Workspace(const core::Problem& p, const core::Gradients& g, const BackwardConfig& config,
            std::byte* base) {
    const auto take = [&](int64 count, std::size_t element_bytes) {
      std::byte* at = base == nullptr ? nullptr : base + bytes;
      bytes += align_up(static_cast<std::size_t>(count) * element_bytes);
      return at;
    };
    const auto floats = [&](int64 count) {
      return reinterpret_cast<float*>(take(count, sizeof(float)));
    };
    const int64 count = item_count(p, config);
    items = reinterpret_cast<BackwardItem*>(take(count, sizeof(BackwardItem)));
    units = reinterpret_cast<int64*>(take(count + 1, sizeof(int64)));
    shared.rows = total_rows(p);
    shared.query_stride = padded(p.head_dim) + max_lanes;
    shared.dout_stride = padded(p.head_dim_v) + max_lanes;
    shared.dq_stride = padded(p.head_dim);
    shared.lse = floats(shared.rows);
    shared.delta = floats(shared.rows);
    shared.queries = floats(shared.rows * shared.query_stride);
    shared.douts = floats(shared.rows * shared.dout_stride);
    shared.dq = floats(config.splits * shared.rows * shared.dq_stride);
    shared.dbias = g.dbias;
    if (sums_bias_apart(g)) {
      shared.dbias.data = floats(bias_elements(g));
      shared.dbias.dtype = core::DType::f32;
      int64 stride = 1;
      for (int i = 3; i >= 0; --i) {
        shared.dbias.stride[i] = g.dbias_extent[i] == 1 ? 0 : stride;
        stride *= g.dbias_extent[i];
      }
    }
    threads = take(config.threads, config.thread_workspace_bytes);
  }
};

// Lists every item, those of a unit together and units of most work first; returns how many units.
int64 list_items(const core::Problem& p, const core::Gradients& g, const BackwardConfig& config,
                 const Workspace& workspace) {
  const int64 count = item_count(p, config);
  const auto own = [&](int dimension, int64 coordinate) {
    return g.dbias && g.dbias_extent[dimension] == 1 ? 0 : coordinate;
  };
  BackwardItem* item = workspace.items;
  for (int64 b = 0; b < p.batch; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    const int64 work = core::tile_work(p.window, s.length_q, s.length_k, 0, s.length_q);
    for (int32 head = 0; head < p.heads_kv; ++head) {
      for (int32 split = 0; split < config.splits; ++split, ++item) {
        const int64 unit = (own(0, b) * p.heads_kv + own(1, head)) * config.splits + own(3, split);
        *item = {static_cast<int32>(b), head, split, unit, work};
      }
    }
  }
  std::sort(workspace.items, workspace.items + count,
            [](const BackwardItem& x, const BackwardItem& y) {
              if (x.unit != y.unit) return x.unit < y.unit;
              if (x.batch != y.batch) return x.batch < y.batch;
              if (x.head_kv != y.head_kv) return x.head_kv < y.head_kv;
              return x.split < y.split;
            });
  int64 units = 0;
  for (int64 begin = 0; begin < count;) {
    int64 end = begin;
    int64 cost = 0;
    while (end < count && workspace.items[end].unit == workspace.items[begin].unit) {
      cost += workspace.items[end++].cost;
    }
    for (int64 i = begin; i < end; ++i) workspace.items[i].cost = cost;
    workspace.units[units++] = begin;
    begin = end;
  }
  std::sort(workspace.units, workspace.units + units, [&](int64 x, int64 y) {
    const int64 cost_x = workspace.items[x].cost;
    const int64 cost_y = workspace.items[y].cost;
    return cost_x != cost_y ? cost_x > cost_y : x < y;
  });
  return units;
}

void clear_row(const core::View& view, int64 batch, int64 row, int64 heads, int64 columns) {
  for (int64 head = 0; head < heads; ++head) {
    const int64 offset = view.offset(batch, row, head);
    for (int64 i = 0; i < columns; ++i) {
      core::store_element(view.data, view.dtype, offset + i * view.stride[3], 0.0f);
    }
  }
}

// Rows of the gradients that belong to no sequence, or lie beyond its used length.
void clear_slack(const core::Problem& p, const core::Gradients& g) {
  const auto clear_queries = [&](int64 batch, int64 begin, int64 end) {
    for (int64 row = begin; row < end; ++row) clear_row(g.dq, batch, row, p.heads_q, p.head_dim);
  };
  const auto clear_keys = [&](int64 batch, int64 begin, int64 end) {
    for (int64 row = begin; row < end; ++row) {
      clear_row(g.dk, batch, row, p.heads_kv, p.head_dim);
      clear_row(g.dv, batch, row, p.heads_kv, p.head_dim_v);
    }
  };
  for (int64 b = 0; b < p.batch; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    clear_queries(s.batch_q, s.row_q + s.length_q, s.row_q + s.capacity_q);
    const int64 end_k = p.is_varlen_k() ? p.cu_seqlens_k[b + 1] : g.rows_k;
    clear_keys(s.batch_k, s.row_k + s.length_k, end_k);
  }
  if (p.is_varlen_q()) clear_queries(0, p.cu_seqlens_q[p.batch], p.total_q);
  if (p.is_varlen_k()) clear_keys(0, p.cu_seqlens_k[p.batch], g.rows_k);
}

// Visits the elements of dbias of one (batch, head, query), by the offset in a view.
template <typename Visit>
void visit_bias_row(const core::Gradients& g, int64 row, const Visit& visit) {
  const int64* n = g.dbias_extent;
  const int64 i2 = row % n[2];
  const int64 i1 = row / n[2] % n[1];
  const int64 i0 = row / n[2] / n[1];
  for (int64 i3 = 0; i3 < n[3]; ++i3) visit(i0, i1, i2, i3);
}

int64 bias_rows(const core::Gradients& g) {
  return g.dbias ? g.dbias_extent[0] * g.dbias_extent[1] * g.dbias_extent[2] : 0;
}

void clear_bias_row(const core::Gradients& g, const BackwardShared& shared, int64 row) {
  visit_bias_row(g, row, [&](int64 i0, int64 i1, int64 i2, int64 i3) {
    static_cast<float*>(shared.dbias.data)[shared.dbias.offset(i0, i1, i2, i3)] = 0.0f;
  });
}

void convert_bias_row(const core::Gradients& g, const BackwardShared& shared, int64 row) {
  visit_bias_row(g, row, [&](int64 i0, int64 i1, int64 i2, int64 i3) {
    const float sum =
        static_cast<const float*>(shared.dbias.data)[shared.dbias.offset(i0, i1, i2, i3)];
    core::store_element(g.dbias.data, g.dbias.dtype, g.dbias.offset(i0, i1, i2, i3), sum);
  });
}

// dsink = -sum over rows of exp(sink - lse) delta: its value vector is zero.
float sink_gradient(const core::Problem& p, const BackwardShared& shared, int32 head) {
  const float sink = static_cast<const float*>(p.sink.data)[head * p.sink.stride[0]];
  if (sink == -core::infinity) return 0.0f;
  const int32 group = p.group_size();
  double sum = 0.0;
  for (int64 b = 0; b < p.batch; ++b) {
    const core::Sequence s = core::sequence_at(p, b);
    const int64 first = first_row(p, s, head / group) + head % group;
    for (int64 i = 0; i < s.length_q; ++i) {
      const int64 row = first + i * group;
      const double weight = std::exp(double{sink} - double{shared.lse[row]});
      sum -= weight * double{shared.delta[row]};
    }
  }
  return static_cast<float>(sum);
}

}  // namespace

BackwardConfig configure_backward(const core::Problem& problem, const core::Gradients& gradients,
                                  int threads) {
  BackwardConfig config;
  config.threads = threads > 0 ? threads : omp_get_max_threads();
  config.block_k = choose_block_k(problem);
  config.strip_q = choose_strip_q(problem, config.block_k);
  config.splits = choose_splits(problem, config);
  BackwardScratch scratch;
  config.thread_workspace_bytes = layout_scratch(problem, config, nullptr, scratch);
  config.workspace_bytes = alignment_bytes + Workspace(problem, gradients, config, nullptr).bytes;
  return config;
}

void backward(const core::Problem& problem, const core::Gradients& gradients,
              const BackwardConfig& config, std::byte* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  const Workspace space(problem, gradients, config, workspace + (align_up(address) - address));
  const BackwardShared& shared = space.shared;
  const int64 items = item_count(problem, config);
  const int64 units = list_items(problem, gradients, config, space);
#pragma omp parallel num_threads(config.threads)
  {
    BackwardScratch scratch;
    layout_scratch(problem, config,
                   space.threads + config.thread_workspace_bytes *
                                       static_cast<std::size_t>(omp_get_thread_num()),
                   scratch);
#pragma omp for schedule(static)
    for (int64 row = 0; row < bias_rows(gradients); ++row) clear_bias_row(gradients, shared, row);
#pragma omp for schedule(dynamic, 1)
    for (int64 i = 0; i < items; ++i) {
      prepare_rows(problem, gradients, config, space.items[i], scratch, shared);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64 u = 0; u < units; ++u) {
      const int64 unit = space.items[space.units[u]].unit;
      for (int64 i = space.units[u]; i < items && space.items[i].unit == unit; ++i) {
        backward_item(problem, gradients, config, space.items[i], scratch, shared);
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64 i = 0; i < items; ++i) {
      finish_rows(problem, gradients, config, space.items[i], scratch, shared);
    }
    if (gradients.dsink) {
#pragma omp for schedule(static)
      for (int32 head = 0; head < problem.heads_q; ++head) {
        static_cast<float*>(gradients.dsink.data)[head * gradients.dsink.stride[0]] =
            sink_gradient(problem, shared, head);
      }
    }
    if (sums_bias_apart(gradients)) {
#pragma omp for schedule(static)
      for (int64 row = 0; row < bias_rows(gradients); ++row) {
        convert_bias_row(gradients, shared, row);
      }
    }
  }
  clear_slack(problem, gradients);
}

}  // namespace fovea::cpu
