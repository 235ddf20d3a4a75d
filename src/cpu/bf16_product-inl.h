// Products through the bf16 dot-product instruction (AVX512_BF16's vdpbf16ps): 64 FLOPs per vector
// instruction instead of 32, fp32 accumulation. Only these functions are compiled with the
// extension; has_bf16_products() in forward_tile.cpp decides at run time whether they are called.
//
// Included once per instruction set (see forward_tile.cpp).

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
namespace fovea::cpu::HWY_NAMESPACE {

template <int rows, int vectors, int pitch_vectors>
HWY_NOINLINE void multiply_bf16(const ProductArguments& arguments) {
  const auto* a = static_cast<const uint32*>(arguments.a);
  const auto* b = static_cast<const char*>(arguments.panel);
  const int64 a_stride = arguments.a_stride / 2;  // in pairs
  __m512 sum[rows][vectors];
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (const uint32* const end = a + arguments.depth / 2; a != end; ++a, b += pitch_vectors * 64) {
    __m512bh column[vectors];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      column[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(b + v * 64));
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const auto left =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[r * a_stride])));
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, column[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      float* c = arguments.c + r * arguments.c_stride + v * lanes;
      const __m512 before = arguments.accumulate ? _mm512_load_ps(c) : _mm512_setzero_ps();
      _mm512_store_ps(c, _mm512_add_ps(before, sum[r][v]));
    }
  }
}

// Rounds fp32 weights [begin, end) of a row to bf16, in place: element j moves from byte 4 j to
// byte 2 j, so ascending order never overwrites what is still to be read. Bounds are whole vectors.
HWY_NOINLINE inline void convert_weights_bf16(float* row, int64 begin, int64 end) {
  auto* to = reinterpret_cast<uint16*>(row);
  for (int64 i = begin; i < end; i += lanes) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_load_ps(row + i));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i), reinterpret_cast<__m256i>(rounded));
  }
}

template <bool first_columns, int... row>
constexpr ProductKernels bf16_kernels(std::integer_sequence<int, row...>) {
  return {{{multiply_bf16 < row + 1, 1, first_columns ? 2 : 1 >, multiply_bf16<row + 1, 2, 2>}...}};
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_POP_ATTRIBUTES

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

// Copies count bf16 elements; gathers where the element stride is not 1.
HWY_INLINE void copy_row_bf16(const core::View& view, int64 offset, int64 element_stride,
                              int64 count, uint16* HWY_RESTRICT row) {
  const uint16* source = static_cast<const uint16*>(view.data) + offset;
  if (element_stride == 1) {
    std::memcpy(row, source, static_cast<std::size_t>(count) * sizeof(uint16));
    return;
  }
  for (int64 i = 0; i < count; ++i) row[i] = source[i * element_stride];
}

struct Bf16Products {
  using Element = uint16;
  static constexpr int64 depth_multiple = 2;

  template <bool first_columns>
  static void multiply(int64 rows, int64 vectors, const ProductArguments& arguments) {
    static constexpr auto kernels =
        bf16_kernels<first_columns>(std::make_integer_sequence<int, kernel_rows>());
    kernels[static_cast<std::size_t>(rows - 1)][static_cast<std::size_t>(vectors - 1)](arguments);
  }

  static void convert_weights(float* row, int64 begin, int64 end) {
    convert_weights_bf16(row, begin, end);
  }

  static void pack_query(const core::View& view, int64 offset, int64 head_dim, Element* row) {
    copy_row_bf16(view, offset, view.stride[3], head_dim, row);
    if (head_dim % 2 != 0) row[head_dim] = 0;
  }

  static void pack_keys(const KeyRows& rows, const KeyPart& part, int64 head_dim, float* staging,
                        Element* panels) {
    const int64 pairs = core::ceil_div(head_dim, 2);
    auto* stage = reinterpret_cast<uint16*>(staging);
    auto* words = reinterpret_cast<uint32*>(panels);
    const int64 padded = core::ceil_div(part.end, panel_width) * panel_width;
    for (int64 key = part.begin; key < padded; key += 4) {
      const uint32* row[4];
      for (int64 i = 0; i < 4; ++i) {
        uint16* to = stage + i * 2 * pairs;
        if (key + i < part.count) {
          prefetch_key(rows, part.first_key + key + i + rows_ahead, head_dim);
          pack_query(rows.view, rows.offset(part.first_key + key + i), head_dim, to);
        } else {
          std::memset(to, 0, static_cast<std::size_t>(pairs) * sizeof(uint32));
        }
        row[i] = reinterpret_cast<const uint32*>(to);
      }
      uint32* panel = words + key / panel_width * panel_width * pairs + key % panel_width;
      transpose_four_rows(row[0], row[1], row[2], row[3], pairs, panel, panel_width);
    }
  }

  static void pack_values(const KeyRows& rows, const KeyPart& part, int64 columns, float* staging,
                          Element* panels) {
    const hn::Full128<uint16> d;
    const int64 padded = padded_columns(columns);
    const int64 depth = core::ceil_div(part.count, 2) * 2;
    auto* even = reinterpret_cast<uint16*>(staging);
    uint16* odd = even + padded;
    std::memset(even, 0, static_cast<std::size_t>(2 * padded) * sizeof(uint16));
    for (int64 key = part.begin; key < part.end; key += 2) {
      prefetch_key(rows, part.first_key + key + rows_ahead, columns);
      prefetch_key(rows, part.first_key + key + 1 + rows_ahead, columns);
      copy_row_bf16(rows.view, rows.offset(part.first_key + key), rows.view.stride[3], columns,
                    even);
      if (key + 1 < part.count) {
        copy_row_bf16(rows.view, rows.offset(part.first_key + key + 1), rows.view.stride[3],
                      columns, odd);
      } else {
        std::memset(odd, 0, static_cast<std::size_t>(columns) * sizeof(uint16));
      }
      for (int64 column = 0; column < padded; column += panel_width) {
        const int64 width = core::min64(panel_width, padded - column);
        uint16* to = panels + column * depth + key * width;
        for (int64 i = 0; i < width; i += 8) {
          const auto a = hn::LoadU(d, even + column + i);
          const auto b = hn::LoadU(d, odd + column + i);
          hn::StoreU(hn::InterleaveLower(d, a, b), d, to + 2 * i);
          hn::StoreU(hn::InterleaveUpper(d, a, b), d, to + 2 * i + 8);
        }
      }
    }
  }

  static bool has_nonfinite(const Element* values, int64 elements) {
    const hn::Repartition<uint16, FloatTag> d;
    const auto exponent = hn::Set(d, 0x7f80);
    auto seen = hn::Zero(d);
    for (int64 i = 0; i < elements; i += 2 * lanes) {
      seen = hn::Max(seen, hn::And(hn::Load(d, values + i), exponent));
    }
    return !hn::AllFalse(d, hn::Eq(seen, exponent));
  }
};

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
