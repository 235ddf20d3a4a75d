#include "python/kv_cache.h"

#include <cstring>
#include <string>

#include "core/numeric.h"

namespace fovea::python {
namespace {

using Text = std::string;

Text number(std::int64_t value) { return std::to_string(value); }

void require(bool condition, const Text& sentence) {
  if (!condition) throw Error(sentence);
}

// One row of one head: `count` elements that lie `stride` apart.
struct Lane {
  std::byte* data = nullptr;
  std::int64_t stride = 1;
};

Lane lane(const Tensor& tensor, std::int64_t first, std::int64_t row, std::int64_t head) {
  const std::int64_t at =
      first * tensor.stride[0] + row * tensor.stride[1] + head * tensor.stride[2];
  return {static_cast<std::byte*>(tensor.data) +
              at * static_cast<std::int64_t>(size_bytes(tensor.dtype)),
          tensor.stride[3]};
}

core::DType core_dtype(DType dtype) { return static_cast<core::DType>(dtype); }

// Rows of all sequences, as (first index, second index) of a tensor and a position.
template <typename Visit>
void for_each_row(const Tensor& x, const Rows& rows, const Visit& visit) {
  const bool varlen = !rows.cu_seqlens.empty();
  for (std::size_t b = 0; b < rows.first_position.size(); ++b) {
    const std::int64_t begin = varlen ? rows.cu_seqlens[b] : 0;
    const std::int64_t count = varlen ? rows.cu_seqlens[b + 1] - begin : x.shape[1];
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t position = rows.first_position[b] + (rows.one_position ? 0 : i);
      visit(varlen ? 0 : static_cast<std::int64_t>(b), begin + i, static_cast<std::int64_t>(b),
            position);
    }
  }
}

void check_rows(const char* what, const Tensor& x, const Rows& rows) {
  const auto batch = static_cast<std::int64_t>(rows.first_position.size());
  if (rows.cu_seqlens.empty()) {
    require(x.shape[0] == batch, Text(what) + " holds " + number(x.shape[0]) +
                                     " sequences but cache_seqlens " + number(batch) +
                                     "; they must be equal");
    return;
  }
  const auto& cu = rows.cu_seqlens;
  require(static_cast<std::int64_t>(cu.size()) == batch + 1,
          "the cumulative lengths of " + Text(what) + " have " + number(std::ssize(cu)) +
              " entries; " + number(batch) + " sequences need " + number(batch + 1));
  require(cu[0] == 0, "the cumulative lengths of " + Text(what) + " must start at 0");
  for (std::size_t b = 0; b + 1 < cu.size(); ++b) {
    require(cu[b] <= cu[b + 1] && cu[b + 1] <= x.shape[1],
            "the cumulative lengths of " + Text(what) + " must not decrease, nor exceed its " +
                number(x.shape[1]) + " rows; they go from " + number(cu[b]) + " to " +
                number(cu[b + 1]));
  }
}

void check_rotary(const char* what, const Tensor& x, const Rows& rows, const Rotary& rotary) {
  if (!rotary.cos.present) return;
  const std::int64_t pairs = rotary.cos.shape[3];
  require(rotary.sin.present && rotary.sin.shape == rotary.cos.shape,
          "rotary_sin must have the shape of rotary_cos");
  require(rotary.cos.dtype == x.dtype && rotary.sin.dtype == x.dtype,
          "rotary_cos and rotary_sin must have the dtype of " + Text(what) + ", " +
              Text(name(x.dtype)));
  require(2 * pairs <= x.shape[3], "rotary_cos has " + number(pairs) +
                                       " columns, which turn more than the head dimension " +
                                       number(x.shape[3]) + " of " + what);
  for_each_row(x, rows, [&](auto, auto, auto, std::int64_t position) {
    require(position >= 0 && position < rotary.cos.shape[2],
            "rotary_cos has " + number(rotary.cos.shape[2]) + " rows but a row of " + what +
                " stands at position " + number(position));
  });
}

void copy_lane(const Lane& from, const Lane& to, std::int64_t count, std::size_t element_bytes) {
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  if (from.stride == 1 && to.stride == 1) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(count * bytes));
    return;
  }
  for (std::int64_t d = 0; d < count; ++d) {
    std::memcpy(to.data + d * to.stride * bytes, from.data + d * from.stride * bytes,
                element_bytes);
  }
}

void turn_lane(const Lane& from, const Lane& to, std::int64_t count, DType dtype,
               const Rotary& rotary, std::int64_t position) {
  const core::DType type = core_dtype(dtype);
  const std::int64_t pairs = rotary.cos.shape[3];
  const auto at = [position](const Tensor& table, std::int64_t pair) {
    return core::load_element(table.data, core_dtype(table.dtype),
                              position * table.stride[2] + pair * table.stride[3]);
  };
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const std::int64_t one = rotary.interleaved ? 2 * pair : pair;
    const std::int64_t two = rotary.interleaved ? 2 * pair + 1 : pair + pairs;
    const float x = core::load_element(from.data, type, one * from.stride);
    const float y = core::load_element(from.data, type, two * from.stride);
    const float cos = at(rotary.cos, pair);
    const float sin = at(rotary.sin, pair);
    core::store_element(to.data, type, one * to.stride, x * cos - y * sin);
    core::store_element(to.data, type, two * to.stride, x * sin + y * cos);
  }
  const auto bytes = static_cast<std::int64_t>(size_bytes(dtype));
  const std::int64_t turned = 2 * pairs;
  copy_lane({from.data + turned * from.stride * bytes, from.stride},
            {to.data + turned * to.stride * bytes, to.stride}, count - turned, size_bytes(dtype));
}

void check_append(const Cache& cache, const Tensor& k, const Tensor& v, const Rows& rows) {
  const struct {
    const char* name;
    const char* cache_name;
    const Tensor& fresh;
    const Tensor& held;
  } sides[] = {{"k", "k_cache", k, cache.k}, {"v", "v_cache", v, cache.v}};
  for (const auto& side : sides) {
    require(side.fresh.dtype == side.held.dtype,
            Text(side.name) + " has dtype " + Text(name(side.fresh.dtype)) + " but " +
                side.cache_name + " has " + Text(name(side.held.dtype)) + "; they must be equal");
    require(side.fresh.shape[2] == side.held.shape[2] && side.fresh.shape[3] == side.held.shape[3],
            Text(side.name) + " has " + number(side.fresh.shape[2]) + " heads of " +
                number(side.fresh.shape[3]) + " but " + side.cache_name + " has " +
                number(side.held.shape[2]) + " of " + number(side.held.shape[3]) +
                "; they must be equal");
  }
  require(k.shape[0] == v.shape[0] && k.shape[1] == v.shape[1],
          "k and v must hold the same number of sequences and rows");
  require(cache.k.shape[0] == cache.v.shape[0] && cache.k.shape[1] == cache.v.shape[1],
          "k_cache and v_cache must have the same first two extents");
  const std::int64_t page_size = cache.k.shape[1];
  for_each_row(k, rows, [&](auto, auto, std::int64_t b, std::int64_t position) {
    require(position >= 0 && position < cache.columns * page_size,
            "cache_seqlens leaves no room at entry " + number(b) + ": a new key would stand at " +
                number(position) + ", and the cache holds " + number(cache.columns * page_size));
    const std::int64_t page =
        cache.block_table[static_cast<std::size_t>(b * cache.columns + position / page_size)];
    require(page >= 0 && page < cache.k.shape[0],
            "block_table is " + number(page) + " at row " + number(b) + ", column " +
                number(position / page_size) + "; the cache has " + number(cache.k.shape[0]) +
                " pages");
  });
}

}  // namespace

void append(const Cache& cache, const Tensor& k, const Tensor& v, const Rows& rows,
            const Rotary& rotary) {
  check_rows("k", k, rows);
  check_append(cache, k, v, rows);
  check_rotary("k", k, rows, rotary);
  const std::int64_t page_size = cache.k.shape[1];
  for_each_row(
      k, rows, [&](std::int64_t first, std::int64_t row, std::int64_t b, std::int64_t position) {
        const std::int64_t page =
            cache.block_table[static_cast<std::size_t>(b * cache.columns + position / page_size)];
        for (std::int64_t head = 0; head < k.shape[2]; ++head) {
          const Lane key = lane(k, first, row, head);
          const Lane key_place = lane(cache.k, page, position % page_size, head);
          if (rotary.cos.present) {
            turn_lane(key, key_place, k.shape[3], k.dtype, rotary, position);
          } else {
            copy_lane(key, key_place, k.shape[3], size_bytes(k.dtype));
          }
          copy_lane(lane(v, first, row, head), lane(cache.v, page, position % page_size, head),
                    v.shape[3], size_bytes(v.dtype));
        }
      });
}

void rotate(const Tensor& x, const Tensor& result, const Rows& rows, const Rotary& rotary) {
  check_rows("q", x, rows);
  check_rotary("q", x, rows, rotary);
  require(rotary.cos.present, "rotary_cos is absent");
  require(result.shape == x.shape && result.dtype == x.dtype,
          "the turned q must have the shape and dtype of q");
  for_each_row(x, rows, [&](std::int64_t first, std::int64_t row, auto, std::int64_t position) {
    for (std::int64_t head = 0; head < x.shape[2]; ++head) {
      turn_lane(lane(x, first, row, head), lane(result, first, row, head), x.shape[3], x.dtype,
                rotary, position);
    }
  });
}

}  // namespace fovea::python
