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
  static HWY_NOINLINE void multiply(RowsAtOnce<Element> keys, const uint16* queries,
                                    int64 query_stride, int64 columns, float* scores,
                                    int64 score_stride) {
    for (int first = 0; first < keys_at_once; first += keys_in_registers) {
      const uint16* key[keys_in_registers];
      __m512 sum[rows][keys_in_registers];
#pragma GCC unroll 4
      for (int j = 0; j < keys_in_registers; ++j) key[j] = keys[first + j];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < keys_in_registers; ++j) sum[r][j] = _mm512_setzero_ps();
      }
      for (int64 i = 0; i < columns; i += 32) {
        __m512bh column[keys_in_registers];
#pragma GCC unroll 4
        for (int j = 0; j < keys_in_registers; ++j) column[j] = pairs(key[j] + i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const __m512bh q = pairs(queries + r * query_stride + i);
#pragma GCC unroll 4
          for (int j = 0; j < keys_in_registers; ++j) {
            sum[r][j] = _mm512_dpbf16_ps(sum[r][j], q, column[j]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        store_lane_sums(FloatVec{sum[r][0]}, FloatVec{sum[r][1]}, FloatVec{sum[r][2]},
                        FloatVec{sum[r][3]}, scores + r * score_stride + first);
      }
    }
  }

  static void convert_weights(float* row, int64 count) {
    convert_weights_bf16(row, 0, core::ceil_div(count, lanes) * lanes);
  }

  template <int rows>
  static HWY_NOINLINE void add(RowsAtOnce<Element> values, const float* scores, int64 key,
                               int64 score_stride, int64 columns, float* out, int64 out_stride) {
    constexpr int pairs_of_keys = keys_at_once / 2;
    const uint16* value[keys_at_once];
    __m512bh weight[rows][pairs_of_keys];
#pragma GCC unroll 8
    for (int j = 0; j < keys_at_once; ++j) value[j] = values[j];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      // Weights of one row: bf16 from the row's start, two to a word.
      const auto* words = reinterpret_cast<const int*>(scores + r * score_stride) + key / 2;
#pragma GCC unroll 4
      for (int p = 0; p < pairs_of_keys; ++p) {
        weight[r][p] = reinterpret_cast<__m512bh>(_mm512_set1_epi32(words[p]));
      }
    }
    for (int64 i = 0; i < columns; i += 32) {
      __m512bh low[pairs_of_keys];
      __m512bh high[pairs_of_keys];
#pragma GCC unroll 4
      for (int p = 0; p < pairs_of_keys; ++p) {
        const __m512i even = _mm512_loadu_si512(value[2 * p] + i);
        const __m512i odd = _mm512_loadu_si512(value[2 * p + 1] + i);
        low[p] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(even, odd));
        high[p] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(even, odd));
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        float* to = out + r * out_stride + i;
        __m512 first = _mm512_load_ps(to);
        __m512 second = _mm512_load_ps(to + 16);
#pragma GCC unroll 4
        for (int p = 0; p < pairs_of_keys; ++p) {
          first = _mm512_dpbf16_ps(first, weight[r][p], low[p]);
          second = _mm512_dpbf16_ps(second, weight[r][p], high[p]);
        }
        _mm512_store_ps(to, first);
        _mm512_store_ps(to + 16, second);
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
