// The products of streamed rows through the bf16 dot-product instruction: a third of the
// instructions of the fp32 form, so that memory binds again.
//
// Scores are dot products of pairs along the rows of K as they lie. For O += P V pairs run along
// keys, so two rows of V are interleaved on the way; interleaving works within 128-bit blocks, and
// the output is kept in the order it leaves behind:
//
//   natural   0 .. 3 | 4 .. 7 | 8 .. 11 | 12 .. 15 | 16 .. 19 | 20 .. 23 | 24 .. 27 | 28 .. 31
//   stored    0 .. 3 | 8 .. 11 | 16 .. 19 | 24 .. 27 | 4 .. 7 | 12 .. 15 | 20 .. 23 | 28 .. 31
//
// Included once per instruction set (see forward_tile.cpp).

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
namespace fovea::cpu::HWY_NAMESPACE {

struct Bf16Stream {
  using Element = uint16;
  using Query = uint16;
  static constexpr int64 columns_multiple = 32;

  static void load_query(const core::View& view, int64 offset, int64 columns, uint16* row) {
    copy_row_bf16(view, offset, view.stride[3], columns, row);
  }
  static void stage_row(const core::View& view, int64 offset, int64 columns, uint16* row) {
    copy_row_bf16(view, offset, view.stride[3], columns, row);
  }

  template <int rows>
  static HWY_NOINLINE void multiply(const FourRows<Element>& keys, const uint16* queries,
                                    int64 query_stride, int64 columns, float* scores,
                                    int64 score_stride) {
    __m512 sum[rows][keys_at_once];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < keys_at_once; ++j) sum[r][j] = _mm512_setzero_ps();
    }
    for (int64 i = 0; i < columns; i += 32) {
      __m512bh column[keys_at_once];
#pragma GCC unroll 4
      for (std::size_t j = 0; j < keys_at_once; ++j) column[j] = pairs(keys[j] + i);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const __m512bh q = pairs(queries + r * query_stride + i);
#pragma GCC unroll 4
        for (int j = 0; j < keys_at_once; ++j) {
          sum[r][j] = _mm512_dpbf16_ps(sum[r][j], q, column[j]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      store_lane_sums(FloatVec{sum[r][0]}, FloatVec{sum[r][1]}, FloatVec{sum[r][2]},
                      FloatVec{sum[r][3]}, scores + r * score_stride);
    }
  }

  static void convert_weights(float* row, int64 count) {
    convert_weights_bf16(row, 0, core::ceil_div(count, lanes) * lanes);
  }

  template <int rows>
  static HWY_NOINLINE void add(const FourRows<Element>& values, const float* scores, int64 key,
                               int64 score_stride, int64 columns, float* out, int64 out_stride) {
    __m512bh weight[rows][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      // Weights of one row: bf16 from the row's start, two to a word.
      const auto* words = reinterpret_cast<const int*>(scores + r * score_stride) + key / 2;
      weight[r][0] = reinterpret_cast<__m512bh>(_mm512_set1_epi32(words[0]));
      weight[r][1] = reinterpret_cast<__m512bh>(_mm512_set1_epi32(words[1]));
    }
    for (int64 i = 0; i < columns; i += 32) {
      const __m512i v0 = _mm512_loadu_si512(values[0] + i);
      const __m512i v1 = _mm512_loadu_si512(values[1] + i);
      const __m512i v2 = _mm512_loadu_si512(values[2] + i);
      const __m512i v3 = _mm512_loadu_si512(values[3] + i);
      const auto low01 = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(v0, v1));
      const auto low23 = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(v2, v3));
      const auto high01 = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(v0, v1));
      const auto high23 = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(v2, v3));
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        float* to = out + r * out_stride + i;
        __m512 low = _mm512_load_ps(to);
        __m512 high = _mm512_load_ps(to + 16);
        low = _mm512_dpbf16_ps(_mm512_dpbf16_ps(low, weight[r][0], low01), weight[r][1], low23);
        high = _mm512_dpbf16_ps(_mm512_dpbf16_ps(high, weight[r][0], high01), weight[r][1], high23);
        _mm512_store_ps(to, low);
        _mm512_store_ps(to + 16, high);
      }
    }
  }

  // Blocks of four floats, moved between the two orders drawn above.
  static void to_stored_order(float* row, int64 columns) {
    permute(row, columns, {0, 2, 4, 6, 1, 3, 5, 7});
  }
  static void to_natural_order(float* row, int64 columns) {
    permute(row, columns, {0, 4, 1, 5, 2, 6, 3, 7});
  }

 private:
  static HWY_INLINE __m512bh pairs(const uint16* from) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
  }

  static void permute(float* row, int64 columns, const std::array<int64, 8>& source) {
    for (int64 i = 0; i < columns; i += 32) {
      float copy[32];
      std::memcpy(copy, row + i, sizeof(copy));
      for (std::size_t block = 0; block < 8; ++block) {
        std::memcpy(row + i + 4 * static_cast<int64>(block), copy + 4 * source[block],
                    4 * sizeof(float));
      }
    }
  }
};

// True if rows of such width need no padding.
constexpr bool bf16_streams(const core::Problem& p) {
  return p.head_dim % Bf16Stream::columns_multiple == 0 &&
         p.head_dim_v % Bf16Stream::columns_multiple == 0;
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3
