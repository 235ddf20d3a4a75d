#include "cpu/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace fovea::cpu {
namespace {

using core::Fp8Layout;
using core::int32;
using core::int64;
using core::KeyScale;
using core::Problem;
using core::QuantizeOptions;
using core::scale_block;
using core::uint8;

std::size_t index(int64 value) { return static_cast<std::size_t>(value); }

// One of q, k and v, with what its rows become.
struct Operand {
  const core::View& view;
  int64 batches;
  int64 rows;
  int32 heads;
  int32 columns;  // of the view
  int32 padded;   // of the codes
  int64 blocks;
  const int32* cu_seqlens;
  int64 sequences;
  bool rotate;
};

// Rows of one sequence in memory.
struct Rows {
  int64 batch;
  int64 first;
  int64 count;
  int64 first_block;
};

Rows rows_of(const Operand& o, int64 sequence) {
  if (o.cu_seqlens == nullptr) return {sequence, 0, o.rows, 0};
  const int32 first = o.cu_seqlens[sequence];
  return {0, first, o.cu_seqlens[sequence + 1] - first,
          core::block_offset(first, static_cast<int32>(sequence))};
}

// [scale_block][padded], rows behind the sequence zero.
void load_block(const Operand& o, const Rows& rows, int64 head, int64 block,
                const core::RotationSigns& signs, std::vector<float>& x) {
  x.assign(index(int64{scale_block} * o.padded), 0.0f);
  const int64 count = std::min<int64>(scale_block, rows.count - block * scale_block);
  for (int64 r = 0; r < count; ++r) {
    float* row = x.data() + r * o.padded;
    const int64 offset = o.view.offset(rows.batch, rows.first + block * scale_block + r, head);
    for (int32 c = 0; c < o.columns; ++c) {
      row[c] = core::load_element(o.view.data, o.view.dtype, offset + c * o.view.stride[3]);
    }
    if (!o.rotate) continue;
    for (int32 c = 0; c < o.padded; ++c) row[c] = core::signed_by(signs, c, row[c]);
    const int32 width = core::rotation_block(o.padded);
    for (int32 c = 0; c < o.padded; c += width) core::hadamard(row + c, width);
    const float norm = core::rotation_norm(width);
    for (int32 c = 0; c < o.padded; ++c) row[c] *= norm;
  }
}

float largest_of(const std::vector<float>& x) {
  float largest = 0.0f;
  for (const float value : x) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

uint8 code_of(float value, float inverse) {
  return std::isfinite(value) ? core::float_to_e4m3(value * inverse) : uint8{0x7f};
}

// store(rows, head, block, scale, x) takes each block.
template <typename Store>
void quantize_operand(const Operand& o, const QuantizeOptions& options, const Store& store) {
  const core::RotationSigns signs = core::rotation_signs(options.seed);
  std::vector<float> x;
  const auto measure = [&](int64 sequence, int64 head) {
    const Rows rows = rows_of(o, sequence);
    float largest = 0.0f;
    for (int64 block = 0; block * scale_block < rows.count; ++block) {
      load_block(o, rows, head, block, signs, x);
      largest = std::max(largest, largest_of(x));
    }
    return largest;
  };
  float of_all = 0.0f;
  if (options.granularity == core::ScaleGranularity::tensor) {
    for (int64 s = 0; s < o.sequences; ++s) {
      for (int64 h = 0; h < o.heads; ++h) of_all = std::max(of_all, measure(s, h));
    }
  }
  for (int64 s = 0; s < o.sequences; ++s) {
    const Rows rows = rows_of(o, s);
    for (int64 h = 0; h < o.heads; ++h) {
      float largest = of_all;
      if (options.granularity == core::ScaleGranularity::head) largest = measure(s, h);
      for (int64 block = 0; block * scale_block < rows.count; ++block) {
        load_block(o, rows, h, block, signs, x);
        if (options.granularity == core::ScaleGranularity::block) largest = largest_of(x);
        store(rows, h, block, core::block_scale(largest), x);
      }
    }
  }
}

// Codes as rows, for q and k.
void store_rows(const Operand& o, const Rows& rows, int64 head, int64 block, float scale,
                const std::vector<float>& x, uint8* codes) {
  const int64 count = std::min<int64>(scale_block, rows.count - block * scale_block);
  for (int64 r = 0; r < count; ++r) {
    const int64 row = rows.batch * o.rows + rows.first + block * scale_block + r;
    for (int32 c = 0; c < o.padded; ++c) {
      codes[(row * o.heads + head) * o.padded + c] =
          code_of(x[index(r * o.padded + c)], 1.0f / scale);
    }
  }
}

// Codes transposed, for v.
void store_columns(const Operand& o, const Rows& rows, int64 head, int64 block, float scale,
                   const std::vector<float>& x, uint8* codes) {
  const int64 keys = o.blocks * scale_block;
  const int64 first = (rows.first_block + block) * scale_block;
  for (int32 c = 0; c < o.columns; ++c) {
    uint8* column = codes + ((rows.batch * o.heads + head) * o.columns + c) * keys + first;
    for (int32 slot = 0; slot < scale_block; ++slot) {
      const int32 key = slot / 16 * 16 + core::value_key(slot % 16);
      column[slot] = code_of(x[index(int64{key} * o.padded + c)], 1.0f / scale);
    }
  }
}

}  // namespace

void quantize(const Problem& p, const QuantizeOptions& options, const Fp8Operands& operands) {
  const Fp8Layout l = core::fp8_layout(p);
  const Operand q{p.q,       l.batches_q, l.rows_q,       l.heads_q, p.head_dim,
                  l.columns, l.blocks_q,  p.cu_seqlens_q, p.batch,   options.rotate};
  const Operand k{p.k,       l.batches_k, l.rows_k,       l.heads_kv, p.head_dim,
                  l.columns, l.blocks_k,  p.cu_seqlens_k, p.batch,    options.rotate};
  const Operand v{p.v,          l.batches_k, l.rows_k,       l.heads_kv, p.head_dim_v,
                  p.head_dim_v, l.blocks_k,  p.cu_seqlens_k, p.batch,    false};
  if (operands.q != nullptr) {
    quantize_operand(
        q, options,
        [&](const Rows& rows, int64 head, int64 block, float scale, const std::vector<float>& x) {
          store_rows(q, rows, head, block, scale, x, operands.q);
          operands.q_scale[(rows.batch * q.heads + head) * q.blocks + rows.first_block + block] =
              scale;
        });
  }
  const auto key_scale = [&](const Rows& rows, int64 head, int64 block) -> KeyScale& {
    return operands.key_scale[(rows.batch * k.heads + head) * k.blocks + rows.first_block + block];
  };
  if (operands.key_scale != nullptr) {
    // Gaps between packed sequences and the slack are read, though never used.
    std::fill_n(operands.key_scale, l.key_scale_bytes / int64{sizeof(KeyScale)}, KeyScale{});
  }
  if (operands.k != nullptr) {
    quantize_operand(
        k, options,
        [&](const Rows& rows, int64 head, int64 block, float scale, const std::vector<float>& x) {
          store_rows(k, rows, head, block, scale, x, operands.k);
          key_scale(rows, head, block).k = scale;
        });
  }
  if (operands.v != nullptr) {
    quantize_operand(
        v, options,
        [&](const Rows& rows, int64 head, int64 block, float scale, const std::vector<float>& x) {
          store_columns(v, rows, head, block, scale, x, operands.v);
          KeyScale& s = key_scale(rows, head, block);
          s.v_log2 = std::log2(scale);
          s.v_inverse = 1.0f / scale;
        });
  }
}

}  // namespace fovea::cpu
