#include "cpu/quantize.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/mask.h"
#include "core/numeric.h"

namespace fovea::cpu {
namespace {

using core::DType;
using core::Fp8Layout;
using core::int32;
using core::int64;
using core::KeyScale;
using core::Problem;
using core::QuantizeOptions;
using core::scale_block;
using core::uint32;
using core::uint8;

constexpr uint32 infinite_bits = 0x7f800000u;
constexpr int32 most_columns = 576;  // of a row, rotated or not

// 32 rows in fp32.
struct Block {
  float x[scale_block][most_columns];
};

enum class Which { q, k, v };

// One of q, k and v, with what its rows become.
struct Operand {
  const Problem& p;
  const QuantizeOptions& options;
  Which which;
  const core::View& view;
  const core::View& scale;
  core::PageTarget target;  // of keys; queries stand where those do
  bool to_pages;
  int64 batches;  // of the result
  int64 rows;     // per batch
  int32 heads;
  int32 columns;  // of the view
  int32 padded;   // of the codes
  int64 blocks;   // per batch and head
  bool turns;     // by the rotary embedding
  bool rotate;
  float norm;  // of the rotation: what elements are times it
  DType to;

  Operand(const Problem& problem, const QuantizeOptions& o, const Fp8Layout& l, Which which_one,
          const core::PageTarget& pages = {})
      : p(problem),
        options(o),
        which(which_one),
        view(which == Which::q   ? p.q
             : which == Which::k ? p.k
                                 : p.v),
        scale(which == Which::q   ? p.q_scale
              : which == Which::k ? p.k_scale
                                  : p.v_scale),
        target(pages),
        to_pages(pages && which != Which::q),
        batches(which == Which::q ? l.batches_q : l.batches_k),
        rows(which == Which::q ? l.rows_q
             : to_pages        ? pages.page_size
                               : l.rows_k),
        heads(which == Which::q ? l.heads_q : l.heads_kv),
        columns(which == Which::v ? p.head_dim_v : p.head_dim),
        padded(which == Which::v ? p.head_dim_v : l.columns),
        blocks(which == Which::q ? l.blocks_q
               : to_pages        ? pages.page_size / scale_block
                                 : l.blocks_k),
        turns(o.rotary && which != Which::v && !core::is_eight_bit(view.dtype)),
        rotate(o.rotate && which != Which::v && !core::is_eight_bit(view.dtype)),
        norm(rotate ? core::rotation_norm(core::rotation_block(padded)) : 1.0f),
        to(which == Which::v ? core::value_type(core::code_type(view.dtype, o))
                             : core::code_type(view.dtype, o)) {}
};

// Rows of one sequence.
struct Rows {
  core::Sequence sequence;
  int64 index;  // of the sequence
  int64 batch;  // coordinates in the result
  int64 first;
  int64 capacity;  // rows that belong to it
  int64 used;      // of these
  int64 first_block;

  int64 blocks() const { return core::ceil_div(capacity, scale_block); }
};

Rows rows_of(const Operand& o, int64 index) {
  const core::Sequence s = core::sequence_at(o.p, index);
  if (o.which == Which::q) {
    return {
        s, index, s.batch_q, s.row_q, s.capacity_q, s.length_q, core::first_block_q(o.p, s, index)};
  }
  int64 capacity =
      o.p.is_varlen_k() ? o.p.cu_seqlens_k[index + 1] - o.p.cu_seqlens_k[index] : o.p.seqlen_k;
  if (o.to_pages) capacity = s.length_k;
  return {s, index, s.batch_k, s.row_k, capacity, s.length_k, core::first_block_k(o.p, s, index)};
}

int64 offset_of(const Operand& o, const Rows& rows, int64 row, int64 head) {
  switch (o.which) {
    case Which::q: return o.view.offset(rows.batch, rows.first + row, head);
    case Which::k: return core::key_offset(o.p, o.view, rows.sequence, rows.index, row, head);
    default: return core::value_offset(o.p, rows.sequence, rows.index, row, head);
  }
}

// The scale that the block's elements have already.
float given_scale(const Operand& o, const Rows& rows, int64 head, int64 block) {
  if (!o.scale) return 1.0f;
  const auto* scales = static_cast<const float*>(o.scale.data);
  const int64 row = block * scale_block;
  if (o.which == Which::q) {
    return scales[core::scale_offset(o.scale, rows.index, head / o.p.q_scale_heads,
                                     rows.first_block, row)];
  }
  // Behind a sequence's keys there may be no page.
  if (core::has_quantized_pages(o.p) && row >= rows.used) return 1.0f;
  return scales[core::key_scale_offset(o.p, o.scale, rows.sequence, rows.index, row, head)];
}

// Turns the pairs of a row that stands at `position` (core::Rotary). One product of two is rounded,
// as in the kernels.
void turn(const core::Rotary& rotary, int64 position, float* x) {
  const int64 place = std::clamp<int64>(position, 0, rotary.positions - 1);
  const auto at = [place](const core::View& table, int32 pair) {
    return core::load_element(table.data, table.dtype,
                              place * table.stride[2] + pair * table.stride[3]);
  };
  for (int32 pair = 0; pair < rotary.pairs; ++pair) {
    float& a = x[core::rotary_column(rotary.pairing, rotary.pairs, pair, false)];
    float& b = x[core::rotary_column(rotary.pairing, rotary.pairs, pair, true)];
    const float cos = at(rotary.cos, pair);
    const float sin = at(rotary.sin, pair);
    const float first = a;
    a = std::fma(first, cos, -(b * sin));
    b = std::fma(first, sin, b * cos);
  }
}

// Position of row 0 of a sequence.
int64 first_position(const Operand& o, const Rows& rows) {
  const core::Sequence& s = rows.sequence;
  const int64 before = o.which == Which::q ? s.length_k - s.length_q : 0;
  return o.options.rotary.first + o.target.first_key(rows.index) + before;
}

// Unused rows are zero. Without the rotation's norm, as kernels have it.
void load_block(const Operand& o, const Rows& rows, int64 head, int64 block,
                const core::RotationSigns& signs, Block& to) {
  const int32 width = core::rotation_block(o.padded);
  for (int64 r = 0; r < scale_block; ++r) {
    float* x = to.x[r];
    std::fill_n(x, o.padded, 0.0f);
    if (block * scale_block + r >= rows.used) continue;
    const int64 offset = offset_of(o, rows, block * scale_block + r, head);
    for (int32 c = 0; c < o.columns; ++c) {
      x[c] = core::load_element(o.view.data, o.view.dtype, offset + c * o.view.stride[3]);
    }
    if (o.turns) turn(o.options.rotary, first_position(o, rows) + block * scale_block + r, x);
    if (!o.rotate) continue;
    for (int32 c = 0; c < o.columns; ++c) x[c] = core::signed_by(signs, c, x[c]);
    for (int32 c = 0; c < o.padded; c += width) core::hadamard(x + c, width);
  }
}

// Bits of the largest magnitude. What is not finite does not count, but of integers it is all that
// counts.
uint32 largest_of(const Operand& o, const Block& block) {
  float largest = 0.0f;
  for (const auto& row : block.x) {
    for (int32 c = 0; c < o.padded; ++c) {
      if (std::isfinite(row[c])) {
        largest = std::max(largest, std::fabs(row[c]));
      } else if (o.to == DType::s8) {
        return infinite_bits;
      }
    }
  }
  return core::bits_of(largest * o.norm);
}

uint8 code_of(const Operand& o, float x, float by) {
  if (o.to == DType::s8) return core::float_to_s8(x, by);
  if (!std::isfinite(x)) return uint8{0x7f};
  return o.to == DType::e4m3 ? core::float_to_e4m3(x * by) : core::float_to_e5m2(x * by);
}

float value_of(const Operand& o, uint8 code) { return core::load_element(&code, o.to, 0); }

// Blocks of integers that are not finite do not count.
uint32 largest_of(const Operand& o, int64 sequence, int64 head, const core::RotationSigns& signs) {
  const Rows rows = rows_of(o, sequence);
  Block block;
  uint32 largest = 0;
  for (int64 b = 0; b < rows.blocks(); ++b) {
    load_block(o, rows, head, b, signs, block);
    const uint32 of_block = largest_of(o, block);
    if (of_block < infinite_bits) largest = std::max(largest, of_block);
  }
  return largest;
}

// What turns a block into codes. Integers that are there already stay.
core::CodeScale code_scale_of(const Operand& o, uint32 largest) {
  if (o.view.dtype == DType::s8) return {1.0f, 1.0f};
  const core::CodeScale code = core::code_scale(largest, o.to);
  return {code.scale, o.norm * code.by};
}

// store(rows, head, block, code, scale, x) takes each block: codes are x times code.by, which stand
// for themselves times scale.
template <typename Store>
void quantize_operand(const Operand& o, int threads, const Store& store) {
  const int team = threads > 0 ? threads : omp_get_max_threads();
  const core::RotationSigns signs = core::rotation_signs(o.options.seed);
  // Codes that are there already are shifted block by block.
  const auto granularity =
      core::is_eight_bit(o.view.dtype) ? core::ScaleGranularity::block : o.options.granularity;
  const int64 pairs = o.p.batch * o.heads;
  uint32 of_all = 0;
  if (granularity == core::ScaleGranularity::tensor) {
#pragma omp parallel for num_threads(team) reduction(max : of_all) schedule(dynamic)
    for (int64 pair = 0; pair < pairs; ++pair) {
      of_all = std::max(of_all, largest_of(o, pair / o.heads, pair % o.heads, signs));
    }
  }
#pragma omp parallel for num_threads(team) schedule(dynamic)
  for (int64 pair = 0; pair < pairs; ++pair) {
    const Rows rows = rows_of(o, pair / o.heads);
    const int64 head = pair % o.heads;
    Block block;
    uint32 largest = of_all;
    if (granularity == core::ScaleGranularity::head) {
      largest = largest_of(o, pair / o.heads, head, signs);
    }
    for (int64 b = 0; b < rows.blocks(); ++b) {
      load_block(o, rows, head, b, signs, block);
      const uint32 of_block = largest_of(o, block);
      const bool own = granularity == core::ScaleGranularity::block || of_block >= infinite_bits;
      const core::CodeScale code = code_scale_of(o, own ? of_block : largest);
      store(rows, head, b, code, code.scale * given_scale(o, rows, head, b), block);
    }
  }
}

// Where a block of rows lies in the result, and its scale.
struct Place {
  int64 batch;
  int64 row;
  int64 block;  // of the batch and head
};

Place place_of(const Operand& o, const Rows& rows, int64 block) {
  if (!o.to_pages) {
    return {rows.batch, rows.first + block * scale_block, rows.first_block + block};
  }
  const int64 key = o.target.first_key(rows.index) + block * scale_block;
  const core::KeyPlace at = core::page_of(o.target, rows.index, key);
  return {at.page, at.row, at.row / scale_block};
}

// Codes as rows.
void store_rows(const Operand& o, const Rows& rows, int64 head, int64 block,
                const core::CodeScale& code, const Block& x, uint8* codes) {
  const int64 count = std::min<int64>(scale_block, rows.capacity - block * scale_block);
  const Place place = place_of(o, rows, block);
  for (int64 r = 0; r < count; ++r) {
    const int64 row = place.batch * o.rows + place.row + r;
    for (int32 c = 0; c < o.padded; ++c) {
      codes[(row * o.heads + head) * o.padded + c] = code_of(o, x.x[r][c], code.by);
    }
  }
}

// Codes transposed, for v.
void store_columns(const Operand& o, const Rows& rows, int64 head, int64 block,
                   const core::CodeScale& code, const Block& x, uint8* codes) {
  const int64 keys = o.blocks * scale_block;
  const Place place = place_of(o, rows, block);
  for (int32 c = 0; c < o.columns; ++c) {
    uint8* column =
        codes + ((place.batch * o.heads + head) * o.columns + c) * keys + place.block * scale_block;
    for (int32 slot = 0; slot < scale_block; ++slot) {
      const int32 key = slot / 16 * 16 + core::value_key(slot % 16);
      column[slot] = code_of(o, x.x[key][c], code.by);
    }
  }
}

// What the codes stand for, as rows.
void store_values(const Operand& o, const Rows& rows, int64 head, int64 block,
                  const core::CodeScale& code, float scale, const Block& x, float* values) {
  const int64 count = std::min<int64>(scale_block, rows.capacity - block * scale_block);
  const Place place = place_of(o, rows, block);
  for (int64 r = 0; r < count; ++r) {
    const int64 row = place.batch * o.rows + place.row + r;
    float* to = values + (row * o.heads + head) * o.padded;
    if (core::is_eight_bit(o.view.dtype)) {
      for (int32 c = 0; c < o.padded; ++c) to[c] = x.x[r][c] * (scale / code.scale);
      continue;
    }
    for (int32 c = 0; c < o.padded; ++c) {
      to[c] = value_of(o, code_of(o, x.x[r][c], code.by)) * scale;
    }
  }
}

int64 scale_at(const Operand& o, const Rows& rows, int64 head, int64 block) {
  const Place place = place_of(o, rows, block);
  return (place.batch * o.heads + head) * o.blocks + place.block;
}

// Codes as rows, and scales in an array of their own; those of gaps between packed sequences are 1.
void quantize_as_rows(const Operand& o, uint8* codes, float* scales, int threads) {
  if (codes == nullptr || scales == nullptr) return;
  std::fill_n(scales, o.batches * o.heads * o.blocks, 1.0f);
  quantize_operand(o, threads,
                   [&](const Rows& rows, int64 head, int64 block, const core::CodeScale& code,
                       float scale, const Block& x) {
                     store_rows(o, rows, head, block, code, x, codes);
                     scales[scale_at(o, rows, head, block)] = scale;
                   });
}

}  // namespace

void quantize(const Problem& p, const QuantizeOptions& options, const Fp8Operands& operands,
              int threads) {
  const Fp8Layout l = core::fp8_layout(p);
  const core::PageTarget& target = operands.target;
  const Operand k(p, options, l, Which::k, target);
  const Operand v(p, options, l, Which::v, target);
  quantize_as_rows(Operand(p, options, l, Which::q, target), operands.q, operands.q_scale, threads);
  if (operands.key_scale != nullptr && !target) {
    // Gaps between packed sequences and the slack are read, though never used.
    std::fill_n(operands.key_scale, l.key_scale_bytes / int64{sizeof(KeyScale)}, KeyScale{});
  }
  if (operands.k != nullptr && operands.key_scale != nullptr) {
    quantize_operand(k, threads,
                     [&](const Rows& rows, int64 head, int64 block, const core::CodeScale& code,
                         float scale, const Block& x) {
                       store_rows(k, rows, head, block, code, x, operands.k);
                       operands.key_scale[scale_at(k, rows, head, block)].k = scale;
                     });
  }
  if (operands.v != nullptr && operands.key_scale != nullptr) {
    quantize_operand(v, threads,
                     [&](const Rows& rows, int64 head, int64 block, const core::CodeScale& code,
                         float scale, const Block& x) {
                       store_columns(v, rows, head, block, code, x, operands.v);
                       KeyScale& s = operands.key_scale[scale_at(v, rows, head, block)];
                       s.v_log2 = std::log2(scale);
                       s.v_inverse = 1.0f / scale;
                       s.v = scale;
                     });
  }
}

void quantize_rows(const Problem& p, const QuantizeOptions& options, const RowOperands& operands,
                   int threads) {
  const Fp8Layout l = core::fp8_layout(p);
  quantize_as_rows(Operand(p, options, l, Which::q), operands.q, operands.q_scale, threads);
  quantize_as_rows(Operand(p, options, l, Which::k), operands.k, operands.k_scale, threads);
  quantize_as_rows(Operand(p, options, l, Which::v), operands.v, operands.v_scale, threads);
}

std::size_t widened_bytes(const Problem& p) {
  const Fp8Layout l = core::fp8_layout(p);
  const int64 elements = l.q_bytes + l.k_bytes + l.batches_k * l.rows_k * l.heads_kv * l.columns_v;
  return static_cast<std::size_t>(elements) * sizeof(float);
}

Problem widened(const Problem& p, std::byte* memory) {
  const Fp8Layout l = core::fp8_layout(p);
  Problem result = p;
  result.head_dim = l.columns;
  result.block_table = nullptr;
  result.block_table_stride = 0;
  result.page_size = 0;
  result.q_scale = result.k_scale = result.v_scale = {};
  result.v_transposed = false;
  auto* values = reinterpret_cast<float*>(memory);
  const auto place = [&](core::View& view, int64 batches, int64 rows, int64 heads, int64 columns) {
    view = {values, DType::f32, {rows * heads * columns, heads * columns, columns, 1}};
    values += batches * rows * heads * columns;
  };
  place(result.q, l.batches_q, l.rows_q, l.heads_q, l.columns);
  place(result.k, l.batches_k, l.rows_k, l.heads_kv, l.columns);
  place(result.v, l.batches_k, l.rows_k, l.heads_kv, l.columns_v);
  return result;
}

void widen(const Problem& p, const QuantizeOptions& options, std::byte* memory, int threads) {
  const Fp8Layout l = core::fp8_layout(p);
  const Problem to = widened(p, memory);
  for (const auto& [which, view] :
       {std::pair{Which::q, to.q}, std::pair{Which::k, to.k}, std::pair{Which::v, to.v}}) {
    const Operand o(p, options, l, which);
    auto* values = static_cast<float*>(view.data);
    quantize_operand(
        o, threads,
        [&](const Rows& rows, int64 head, int64 block, const core::CodeScale& code, float scale,
            const Block& x) { store_values(o, rows, head, block, code, scale, x, values); });
  }
}

}  // namespace fovea::cpu
