// The two matrix products of attention on the CPU, and the packing that feeds them.
//
// Both products have one shape: C[rows x columns] (+)= A[rows x depth] B[depth x columns], where A
// is row-major (queries, or softmax weights) and B is packed into panels of one or two vectors
// width:
//
//   panel[depth][width]            fp32:  B(k, column) of the panel's columns, k after k
//   panel[depth / 2][width][2]     bf16:  the same with pairs of k side by side, as the dot-product
//                                         instructions take them
//
// For S = Q K^T the columns are keys and the depth is the head dimension, so packing transposes K;
// for O += P V the columns are the head dimension of V and the depth is the keys.
// Packing also ends every difference of strides, alignment, dtype and paging: behind it all memory
// is contiguous, aligned and padded with zeros.
//
// Included once per instruction set (see forward_tile.cpp).

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using core::int64;
using core::uint16;
using core::uint32;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
// Sizes are compile-time constants: scalable vectors (SVE, RVV) are not among the targets.
constexpr int64 lanes = static_cast<int64>(hn::MaxLanes(FloatTag()));
// Four keys at least, since packing moves them by fours.
constexpr int panel_vectors = lanes == 1 ? 4 : 2;
constexpr int64 panel_width = panel_vectors * lanes;

// Register blocking: kernel_rows x 2 accumulators, two vectors of B and a broadcast fill 32
// (AVX-512, NEON) or 16 (AVX2, SSE) registers without spilling.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kernel_rows = 12;
#else
constexpr int kernel_rows = 6;
#endif

// Operands of one call. Strides count elements of A's type and floats of C.
struct ProductArguments {
  const void* a;
  int64 a_stride;
  const void* panel;
  int64 depth;  // in elements of A; even in bf16
  float* c;
  int64 c_stride;
  bool accumulate;
};

// The accumulators must be registers from the first instruction to the last, so every loop over
// them is unrolled before the compiler decides where they live.
// pitch_vectors: from one k to the next in the panel; more than `vectors` where only its first
// columns are wanted.
template <int rows, int vectors, int pitch_vectors>
HWY_NOINLINE void multiply_f32(const ProductArguments& arguments) {
  const FloatTag d;
  const float* HWY_RESTRICT a = static_cast<const float*>(arguments.a);
  const float* HWY_RESTRICT b = static_cast<const float*>(arguments.panel);
  const int64 a_stride = arguments.a_stride;
  FloatVec sum[rows][vectors];
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sum[r][v] = hn::Zero(d);
  }
  for (const float* const end = a + arguments.depth; a != end; ++a, b += pitch_vectors * lanes) {
    FloatVec column[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) column[v] = hn::Load(d, b + v * lanes);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const FloatVec left = hn::Set(d, a[r * a_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[r][v] = hn::MulAdd(left, column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      float* c = arguments.c + r * arguments.c_stride + v * lanes;
      const FloatVec before = arguments.accumulate ? hn::Load(d, c) : hn::Zero(d);
      hn::Store(hn::Add(before, sum[r][v]), d, c);
    }
  }
}

using ProductKernel = void (*)(const ProductArguments&);

// kernels[rows - 1][vectors - 1]
using ProductKernels = std::array<std::array<ProductKernel, panel_vectors>, kernel_rows>;

// `first_columns`: every panel is panel_vectors wide; otherwise as wide as what is wanted of it.
template <int rows, bool first_columns, int... vector>
constexpr std::array<ProductKernel, panel_vectors> f32_kernels_of_rows(
    std::integer_sequence<int, vector...>) {
  return {multiply_f32 < rows, vector + 1, first_columns ? panel_vectors : vector + 1 > ...};
}

template <bool first_columns, int... row>
constexpr ProductKernels f32_kernels(std::integer_sequence<int, row...>) {
  return {f32_kernels_of_rows<row + 1, first_columns>(
      std::make_integer_sequence<int, panel_vectors>())...};
}

// Reads count elements at the given element stride as fp32.
HWY_INLINE void load_row(const core::View& view, int64 offset, int64 element_stride, int64 count,
                         float* HWY_RESTRICT row) {
  const FloatTag d;
  int64 i = 0;
  if (element_stride == 1 && view.dtype == core::DType::f32) {
    std::memcpy(row, static_cast<const float*>(view.data) + offset,
                static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  if (element_stride == 1 && view.dtype == core::DType::bf16) {
    const hn::Rebind<uint16, FloatTag> d16;
    const hn::Rebind<uint32, FloatTag> d32;
    const uint16* source = static_cast<const uint16*>(view.data) + offset;
    for (; i + lanes <= count; i += lanes) {
      const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, source + i)));
      hn::StoreU(hn::BitCast(d, bits), d, row + i);
    }
  } else if (element_stride == 1 && view.dtype == core::DType::f16) {
    const hn::Rebind<hwy::float16_t, FloatTag> d16;
    const auto* source = static_cast<const hwy::float16_t*>(view.data) + offset;
    for (; i + lanes <= count; i += lanes) {
      hn::StoreU(hn::PromoteTo(d, hn::LoadU(d16, source + i)), d, row + i);
    }
  }
  for (; i < count; ++i)
    row[i] = core::load_element(view.data, view.dtype, offset + i * element_stride);
}

// Writes count fp32 numbers at offset of a view, along its last dimension; row is vector aligned.
HWY_INLINE void store_row(const float* HWY_RESTRICT row, int64 count, const core::View& view,
                          int64 offset) {
  const int64 stride = view.stride[3];
  if (view.dtype == core::DType::f32 && stride == 1) {
    std::memcpy(static_cast<float*>(view.data) + offset, row,
                static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  int64 i = 0;
  if (view.dtype == core::DType::bf16 && stride == 1) {
    // Adding half of the last kept unit, less one where that unit is even, rounds to nearest even.
    const FloatTag d;
    const hn::RebindToUnsigned<FloatTag> d32;
    const hn::Rebind<uint16, FloatTag> d16;
    auto* to = static_cast<uint16*>(view.data) + offset;
    for (; i + lanes <= count; i += lanes) {
      const FloatVec x = hn::Load(d, row + i);
      if (!hn::AllTrue(d, hn::Eq(x, x))) break;  // NaN: one by one
      const auto bits = hn::BitCast(d32, x);
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
      const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7fff)), odd);
      hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(rounded)), d16, to + i);
    }
  }
  for (; i < count; ++i) {
    core::store_element(view.data, view.dtype, offset + i * stride, row[i]);
  }
}

// Four rows of 32-bit elements become four columns: destination[i * pitch + 0..3] = rows[0..3][i].
HWY_INLINE void transpose_four_rows(const uint32* HWY_RESTRICT r0, const uint32* HWY_RESTRICT r1,
                                    const uint32* HWY_RESTRICT r2, const uint32* HWY_RESTRICT r3,
                                    int64 count, uint32* HWY_RESTRICT destination, int64 pitch) {
  int64 i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<uint32> d;
  const hn::Full128<std::uint64_t> d64;
  for (; i + 4 <= count; i += 4) {
    const auto a = hn::LoadU(d, r0 + i);
    const auto b = hn::LoadU(d, r1 + i);
    const auto c = hn::LoadU(d, r2 + i);
    const auto e = hn::LoadU(d, r3 + i);
    const auto ab_low = hn::BitCast(d64, hn::InterleaveLower(d, a, b));   // a0 b0 a1 b1
    const auto ab_high = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));  // a2 b2 a3 b3
    const auto ce_low = hn::BitCast(d64, hn::InterleaveLower(d, c, e));
    const auto ce_high = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
    uint32* to = destination + i * pitch;
    hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, ab_low, ce_low)), d, to);
    hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, ab_low, ce_low)), d, to + pitch);
    hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, ab_high, ce_high)), d, to + 2 * pitch);
    hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, ab_high, ce_high)), d, to + 3 * pitch);
  }
#endif
  for (; i < count; ++i) {
    uint32* to = destination + i * pitch;
    to[0] = r0[i];
    to[1] = r1[i];
    to[2] = r2[i];
    to[3] = r3[i];
  }
}

// Columns of V come in panels of two vectors and, if one vector is left, one of one vector.
constexpr int64 padded_columns(int64 columns) { return core::ceil_div(columns, lanes) * lanes; }

// Rows of one head of k or v within a sequence, addressed by key: contiguous, strided or paged.
struct KeyRows {
  const core::Problem& problem;
  const core::View& view;
  core::Sequence sequence;
  int64 batch;
  int64 head;

  int64 offset(int64 key) const {
    return core::key_offset(problem, view, sequence, batch, key, head);
  }
};

// Positions [begin, end) of the block of `count` keys that starts at first_key: packing may go part
// by part. Parts are cut at multiples of panel_width.
struct KeyPart {
  int64 first_key;
  int64 count;
  int64 begin;
  int64 end;
};

// How many rows ahead of packing memory is asked for.
inline constexpr int64 rows_ahead = 8;

// Asks for a row before it is packed. Rows are often a page apart (BSHD with many heads), where no
// hardware prefetcher follows.
HWY_INLINE void prefetch_row(const core::View& view, int64 offset, int64 columns) {
  if (view.stride[3] != 1) return;
  const int64 bytes = core::size_bytes(view.dtype);
  const char* row = static_cast<const char*>(view.data) + offset * bytes;
  for (int64 i = 0; i < columns * bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

HWY_INLINE void prefetch_key(const KeyRows& rows, int64 key, int64 columns) {
  if (key < rows.sequence.length_k) prefetch_row(rows.view, rows.offset(key), columns);
}

// How products in fp32 store and pack their operands. Serves fp32 exactly, and bf16 and fp16 on
// machines without instructions for them.
struct Float32Products {
  using Element = float;
  static constexpr int64 depth_multiple = 1;

  template <bool first_columns>
  static void multiply(int64 rows, int64 vectors, const ProductArguments& arguments) {
    static constexpr auto kernels =
        f32_kernels<first_columns>(std::make_integer_sequence<int, kernel_rows>());
    kernels[static_cast<std::size_t>(rows - 1)][static_cast<std::size_t>(vectors - 1)](arguments);
  }

  // The weights of a row are already what multiply() reads.
  static void convert_weights(float*, int64, int64) {}

  static void pack_query(const core::View& view, int64 offset, int64 head_dim, Element* row) {
    load_row(view, offset, view.stride[3], head_dim, row);
  }

  // Packs K into transposed panels of panel_width keys; the last panel is padded with zero keys.
  // `staging` holds four rows of depth elements.
  static void pack_keys(const KeyRows& rows, const KeyPart& part, int64 head_dim, float* staging,
                        float* panels) {
    const bool direct = rows.view.dtype == core::DType::f32 && rows.view.stride[3] == 1;
    const int64 padded = core::ceil_div(part.end, panel_width) * panel_width;
    for (int64 key = part.begin; key < padded; key += 4) {
      const uint32* row[4];
      for (int64 i = 0; i < 4; ++i) {
        float* stage = staging + i * head_dim;
        row[i] = reinterpret_cast<const uint32*>(stage);
        if (key + i >= part.count) {
          std::memset(stage, 0, static_cast<std::size_t>(head_dim) * sizeof(float));
          continue;
        }
        prefetch_key(rows, part.first_key + key + i + rows_ahead, head_dim);
        const int64 offset = rows.offset(part.first_key + key + i);
        if (direct) {
          row[i] = static_cast<const uint32*>(rows.view.data) + offset;
        } else {
          load_row(rows.view, offset, rows.view.stride[3], head_dim, stage);
        }
      }
      float* panel = panels + key / panel_width * panel_width * head_dim + key % panel_width;
      transpose_four_rows(row[0], row[1], row[2], row[3], head_dim,
                          reinterpret_cast<uint32*>(panel), panel_width);
    }
  }

  // Packs V; each row's columns are padded with zeros to whole vectors. `staging` holds one row of
  // padded columns.
  static void pack_values(const KeyRows& rows, const KeyPart& part, int64 columns, float* staging,
                          float* panels) {
    const FloatTag d;
    const int64 padded = padded_columns(columns);
    const bool direct =
        rows.view.dtype == core::DType::f32 && rows.view.stride[3] == 1 && padded == columns;
    for (int64 i = columns; i < padded; ++i) staging[i] = 0.0f;
    for (int64 key = part.begin; key < part.end; ++key) {
      prefetch_key(rows, part.first_key + key + rows_ahead, columns);
      const int64 offset = rows.offset(part.first_key + key);
      const float* row = static_cast<const float*>(rows.view.data) + offset;
      if (!direct) {
        load_row(rows.view, offset, rows.view.stride[3], columns, staging);
        row = staging;
      }
      for (int64 column = 0; column < padded; column += panel_width) {
        const int64 width = core::min64(panel_width, padded - column);
        float* to = panels + column * part.count + key * width;
        for (int64 i = 0; i < width; i += lanes) {
          hn::Store(hn::LoadU(d, row + column + i), d, to + i);
        }
      }
    }
  }

  // True if packed values hold an infinity or NaN; elements is a multiple of the lanes.
  static bool has_nonfinite(const Element* values, int64 elements) {
    const FloatTag d;
    FloatVec nonfinite = hn::Zero(d);
    for (int64 i = 0; i < elements; i += lanes) {
      const FloatVec x = hn::Load(d, values + i);
      nonfinite = hn::Add(nonfinite, hn::Sub(x, x));
    }
    return !hn::AllTrue(d, hn::Eq(nonfinite, hn::Zero(d)));
  }
};

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
