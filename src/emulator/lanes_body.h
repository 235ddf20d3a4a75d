// The text of both builds of lanes.def; FOVEA_LANES names the namespace. Everything is internal to
// the including file and uses no standard containers, so no AVX2 code can leak through the linker.
#include <bit>
#include <cmath>
#include <cstring>

#include "emulator/lanes.h"

namespace fovea::emulator::FOVEA_LANES {
namespace {

using f32 = float;
using f64 = double;
struct F32x2 {
  float x, y;
};
constexpr f32 kNan = std::bit_cast<f32>(0x7fffffffu);  // the only NaN that arithmetic makes

// Narrow integers live in 32-bit rows.
template <class T>
struct Row {
  using Stored = T;
};
template <>
struct Row<u16> {
  using Stored = u32;
};
template <>
struct Row<i16> {
  using Stored = u32;
};

template <class T>
inline T load(const void* row, int lane) {
  return static_cast<T>(static_cast<const typename Row<T>::Stored*>(row)[lane]);
}

template <class T>
inline typename Row<T>::Stored stored(T value) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<u16>(value);
  } else {
    return value;
  }
}

// Results go through a local row: the destination may be one of the sources.
template <class D, class F>
inline u32 map(const LaneArguments& x, F function) {
  using Stored = typename Row<D>::Stored;
  Stored result[32];
  for (int lane = 0; lane < 32; ++lane) result[lane] = stored<D>(function(lane));
  Stored* const out = static_cast<Stored*>(x.d);
  if (x.mask == ~0u) {
    std::memcpy(out, result, sizeof result);
  } else {
    for (int lane = 0; lane < 32; ++lane) {
      if ((x.mask >> lane & 1u) != 0) out[lane] = result[lane];
    }
  }
  return 0;
}

inline f32 ftz(f32 value) {
  const u32 bits = std::bit_cast<u32>(value);
  return std::bit_cast<f32>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}
inline f32 nan1(f32 value) { return value != value ? kNan : value; }
inline f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
inline i32 clamp_to_i32(i64 v) {
  return static_cast<i32>(v < INT32_MIN ? INT32_MIN : v > INT32_MAX ? INT32_MAX : v);
}
inline i32 relu_i32(i32 v) { return v < 0 ? 0 : v; }
inline i64 sign24(i32 v) { return static_cast<i32>(static_cast<u32>(v) << 8) >> 8; }

inline u64 mul_high_u64(u64 a, u64 b) {
  const u64 low = (a & 0xffffffffu) * (b & 0xffffffffu);
  const u64 middle = (a >> 32) * (b & 0xffffffffu) + (low >> 32);
  const u64 other = (a & 0xffffffffu) * (b >> 32) + (middle & 0xffffffffu);
  return (a >> 32) * (b >> 32) + (middle >> 32) + (other >> 32);
}
inline i64 mul_high_s64(i64 a, i64 b) {
  const u64 x = static_cast<u64>(a), y = static_cast<u64>(b);
  return static_cast<i64>(mul_high_u64(x, y) - (a < 0 ? y : 0) - (b < 0 ? x : 0));
}

inline u32 low_half(u32 v) { return v & 0xffffu; }
inline u16 low(u32 v) { return static_cast<u16>(v); }
inline u16 high(u32 v) { return static_cast<u16>(v >> 16); }
inline u32 join(u32 low_part, u32 high_part) { return low_half(low_part) | high_part << 16; }
template <class F>
inline u32 pairwise(u32 a, u32 b, F f) {
  return join(f(low(a), low(b)), f(high(a), high(b)));
}
template <class T>
inline u32 min_pair(u32 a, u32 b) {
  return pairwise(a, b, [](u16 x, u16 y) { return static_cast<T>(x) < static_cast<T>(y) ? x : y; });
}
template <class T>
inline u32 max_pair(u32 a, u32 b) {
  return pairwise(a, b, [](u16 x, u16 y) { return static_cast<T>(x) > static_cast<T>(y) ? x : y; });
}

inline u64 reverse_bits(u64 value, int bits) {
  u64 result = 0;
  for (int i = 0; i < bits; ++i) result |= (value >> i & 1) << (bits - 1 - i);
  return result;
}
inline u32 find_top(u64 value, int bits, u32 shift_amount) {
  if (value == 0) return ~0u;
  const u32 top = static_cast<u32>(63 - std::countl_zero(value));
  return shift_amount != 0 ? static_cast<u32>(bits) - 1 - top : top;
}
inline u64 extract_bits(u64 value, u32 position, u32 length, u32 bits, bool with_sign) {
  position &= 0xff;
  length &= 0xff;
  if (length == 0) return 0;
  const u32 top = position + length - 1 < bits - 1 ? position + length - 1 : bits - 1;
  const u64 sign = with_sign ? value >> top & 1 : 0;
  u64 field = position >= bits ? 0 : value >> position;
  const u32 kept = position >= bits ? 0 : (length < bits - position ? length : bits - position);
  if (kept < 64) field &= (u64{1} << kept) - 1;
  if (sign != 0 && kept < 64) field |= ~u64{0} << kept;
  return field;
}
inline u32 find_nth_set(u32 mask, u32 base, i32 offset) {
  const int step = offset < 0 ? -1 : 1;
  int wanted = offset < 0 ? -offset : offset;
  if (offset == 0) return (mask >> (base & 31) & 1u) != 0 ? base : ~0u;
  for (int at = static_cast<int>(base); at >= 0 && at < 32; at += step) {
    if ((mask >> at & 1u) != 0 && --wanted == 0) return static_cast<u32>(at);
  }
  return ~0u;
}
inline u32 logic3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (u32 i = 0; i < 8; ++i) {
    const u32 hit = ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
    result |= hit & (0u - (table >> i & 1u));
  }
  return result;
}
// Selector nibbles of the special prmt modes, for selector values 0..3 of register c.
inline u32 prmt_selector(u32 c, u32 mode) {
  constexpr u32 forward[4] = {0x3210, 0x4321, 0x5432, 0x6543};
  constexpr u32 backward[4] = {0x5670, 0x6701, 0x7012, 0x0123};
  constexpr u32 edge_left[4] = {0x3210, 0x3211, 0x3222, 0x3333};
  constexpr u32 edge_right[4] = {0x0000, 0x1110, 0x2210, 0x3210};
  constexpr u32 byte[4] = {0x0000, 0x1111, 0x2222, 0x3333};
  constexpr u32 half[4] = {0x1010, 0x3232, 0x1010, 0x3232};
  switch (mode) {
    case 1: return forward[c & 3];
    case 2: return backward[c & 3];
    case 3: return byte[c & 3];
    case 4: return edge_left[c & 3];
    case 5: return edge_right[c & 3];
    case 6: return half[c & 3];
    default: return c;
  }
}
inline u32 permute_bytes(u32 a, u32 b, u32 c, u32 mode) {
  const u64 bytes = u64{b} << 32 | a;
  const u32 selector = prmt_selector(c, mode);
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 nibble = selector >> (4 * i) & 15u;
    u32 byte = static_cast<u32>(bytes >> (8 * (nibble & 7u))) & 0xffu;
    if ((nibble & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
// imm: bit 0 a is signed, bit 1 b is signed, bit 2 dp2a.hi
inline u32 dot_bytes(u32 a, u32 b, u32 c, u32 imm) {
  for (u32 i = 0; i < 4; ++i) {
    const i32 x =
        (imm & 1) != 0 ? static_cast<i8>(a >> 8 * i) : static_cast<i32>(a >> 8 * i & 0xff);
    const i32 y =
        (imm & 2) != 0 ? static_cast<i8>(b >> 8 * i) : static_cast<i32>(b >> 8 * i & 0xff);
    c += static_cast<u32>(x * y);
  }
  return c;
}
inline u32 dot_halves(u32 a, u32 b, u32 c, u32 imm) {
  const u32 shift = (imm & 4) != 0 ? 16 : 0;
  for (u32 i = 0; i < 2; ++i) {
    const u32 half = a >> 16 * i & 0xffffu, byte = b >> (shift + 8 * i) & 0xffu;
    const i32 x = (imm & 1) != 0 ? static_cast<i16>(half) : static_cast<i32>(half);
    const i32 y = (imm & 2) != 0 ? static_cast<i8>(byte) : static_cast<i32>(byte);
    c += static_cast<u32>(x * y);
  }
  return c;
}
inline u32 szext_width(u32 b, u32 wrap) { return wrap != 0 ? b & 31 : (b > 32 ? 32 : b); }
inline u32 bit_mask(u32 position, u32 width, u32 wrap) {
  if (wrap != 0) {
    position &= 31;
    width &= 31;
  }
  if (position > 31) return 0;
  const u32 field = width > 31 ? ~0u : (1u << width) - 1;
  return field << position;
}

template <class T>
inline T canonical_nan() {
  if constexpr (sizeof(T) == 4) {
    return kNan;
  } else {
    return std::numeric_limits<T>::quiet_NaN();
  }
}
template <class T>
inline T min_number(T a, T b) {
  // -0 counts as less than +0; a NaN loses against a number and two NaNs give the canonical one
  const T smaller = a < b || (a == b && std::signbit(a)) ? a : b;
  const T number = a != a ? b : b != b ? a : smaller;
  return number != number ? canonical_nan<T>() : number;
}
template <class T>
inline T max_number(T a, T b) {
  const T larger = a > b || (a == b && !std::signbit(a)) ? a : b;
  const T number = a != a ? b : b != b ? a : larger;
  return number != number ? canonical_nan<T>() : number;
}
inline f32 xor_sign(f32 magnitude, f32 a, f32 b) {
  const u32 sign = (std::bit_cast<u32>(a) ^ std::bit_cast<u32>(b)) & 0x80000000u;
  return std::bit_cast<f32>((std::bit_cast<u32>(magnitude) & 0x7fffffffu) | sign);
}

// 2^x: the Taylor series of 2^f on [-1/2, 1/2] in double, degree 11, error below 2^-50; the float
// result is therefore within 0.5 ulp + 2^-26, far inside the manual's bound for ex2.approx.
inline f32 exp2_float(f32 x) {
  const f64 clamped = x < -160.0f ? -160.0 : x > 160.0f ? 160.0 : f64{x};
  const f64 shifted = clamped + 6755399441055744.0;  // 1.5 * 2^52: rounds to an integer
  const f64 f = clamped - (shifted - 6755399441055744.0);
  f64 p = 4.4455382718708116e-10;
  p = p * f + 7.0549116208011235e-09;
  p = p * f + 1.0178086009239699e-07;
  p = p * f + 1.3215486790144309e-06;
  p = p * f + 1.5252733804059841e-05;
  p = p * f + 1.5403530393381609e-04;
  p = p * f + 1.3333558146428443e-03;
  p = p * f + 9.6181291076284772e-03;
  p = p * f + 5.5504108664821580e-02;
  p = p * f + 2.4022650695910071e-01;
  p = p * f + 6.9314718055994531e-01;
  p = p * f + 1.0;
  const u64 exponent = std::bit_cast<u64>(shifted) & 0xfffu;
  const f64 scale = std::bit_cast<f64>(((exponent + 1023) & 0x7ffu) << 52);
  const f32 result = static_cast<f32>(p * scale);
  return x != x ? kNan : result;
}

inline f32 from_half(u16 code) { return half_to_float(code); }
inline u16 to_half(f32 value) { return static_cast<u16>(float_to_half(value)); }
inline f32 from_brain(u16 code) { return bfloat16_to_float(code); }
inline u16 to_brain(f32 value) { return static_cast<u16>(float_to_bfloat16(value)); }
inline u16 half_sum(u16 a, u16 b) { return to_half(from_half(a) + from_half(b)); }
inline u16 half_product(u16 a, u16 b) { return to_half(from_half(a) * from_half(b)); }
// The product of two halves is exact in double; rounding the sum to odd makes the second rounding,
// to half, the only one that counts.
inline u16 half_fma(u16 a, u16 b, u16 c) {
  const f64 sum = add_round_to_odd(f64{from_half(a)} * from_half(b), f64{from_half(c)});
  return static_cast<u16>(encode_small(kHalf, sum, Rounding::nearest_even, false));
}
inline u16 brain_fma(u16 a, u16 b, u16 c) {
  const f64 sum = add_round_to_odd(f64{from_brain(a)} * from_brain(b), f64{from_brain(c)});
  return static_cast<u16>(encode_small(kBfloat16, sum, Rounding::nearest_even, false));
}
// imm: bit 0 .NaN, bit 1 .xorsign.abs
template <class Decode, class Pick>
inline u16 small_extreme(u16 a, u16 b, u32 imm, Decode decode, Pick pick) {
  const u16 sign = static_cast<u16>((imm & 2) != 0 ? (a ^ b) & 0x8000u : 0u);
  if ((imm & 2) != 0) {
    a = a & 0x7fffu;
    b = b & 0x7fffu;
  }
  const f32 x = decode(a), y = decode(b);
  if ((x != x && y != y) || ((imm & 1) != 0 && (x != x || y != y))) return 0x7fff;
  const f32 chosen = pick(x, y);
  const bool first = std::bit_cast<u32>(chosen) == std::bit_cast<u32>(x);
  const u32 code = first ? a : b;
  return static_cast<u16>((imm & 2) != 0 ? (code & 0x7fffu) | sign : code);
}
inline u16 half_min(u16 a, u16 b, u32 imm) {
  return small_extreme(a, b, imm, from_half, min_number<f32>);
}
inline u16 half_max(u16 a, u16 b, u32 imm) {
  return small_extreme(a, b, imm, from_half, max_number<f32>);
}
inline u16 brain_min(u16 a, u16 b, u32 imm) {
  return small_extreme(a, b, imm, from_brain, min_number<f32>);
}
inline u16 brain_max(u16 a, u16 b, u32 imm) {
  return small_extreme(a, b, imm, from_brain, max_number<f32>);
}
inline u16 half_saturate(u16 a) {
  const f32 v = from_half(a);
  return v > 0 ? (v < 1.0f ? a : u16{0x3c00}) : u16{0};
}
inline u16 half_relu(u16 a) {
  const f32 v = from_half(a);
  return v != v ? u16{0x7fff} : v > 0 ? a : u16{0};
}
inline u16 brain_relu(u16 a) {
  const f32 v = from_brain(a);
  return v != v ? u16{0x7fff} : v > 0 ? a : u16{0};
}
// Round to nearest even with saturation to 448; the float adder rounds subnormal results.
inline u32 to_e4m3(f32 value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 sign = bits >> 24 & 0x80u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= 0x43e80000u) return sign | 0x7eu;  // 464 and above
  u32 code;
  if (magnitude < 0x3c800000u) {  // below 2^-6: steps of 2^-9, the ulp of 2^14
    const f32 shifted = std::bit_cast<f32>(magnitude) + 16384.0f;
    code = std::bit_cast<u32>(shifted) - 0x46800000u;
  } else {
    code = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  }
  return sign | (code > 0x7eu ? 0x7eu : code);
}

#define UNARY(name, D, A, expression)                        \
  u32 name(const LaneArguments& args) {                      \
    [[maybe_unused]] const u32 imm = args.immediate;         \
    return map<D>(args, [&](int lane) -> D {                 \
      [[maybe_unused]] const A a = load<A>(args.s[0], lane); \
      return expression;                                     \
    });                                                      \
  }
#define BINARY(name, D, A, B, expression)            \
  u32 name(const LaneArguments& args) {              \
    [[maybe_unused]] const u32 imm = args.immediate; \
    return map<D>(args, [&](int lane) -> D {         \
      const A a = load<A>(args.s[0], lane);          \
      const B b = load<B>(args.s[1], lane);          \
      return expression;                             \
    });                                              \
  }
#define TERNARY(name, D, A, B, C, expression)        \
  u32 name(const LaneArguments& args) {              \
    [[maybe_unused]] const u32 imm = args.immediate; \
    return map<D>(args, [&](int lane) -> D {         \
      const A a = load<A>(args.s[0], lane);          \
      const B b = load<B>(args.s[1], lane);          \
      const C c = load<C>(args.s[2], lane);          \
      return expression;                             \
    });                                              \
  }
#define COMPARE(name, A, expression)                         \
  u32 name(const LaneArguments& args) {                      \
    u32 hits = 0;                                            \
    for (int lane = 0; lane < 32; ++lane) {                  \
      const A a = load<A>(args.s[0], lane);                  \
      [[maybe_unused]] const A b = load<A>(args.s[1], lane); \
      hits |= (expression) ? 1u << lane : 0u;                \
    }                                                        \
    return hits;                                             \
  }
#include "emulator/lanes.def"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef COMPARE

// Products of two numbers of at most 12 significant bits are exact in float, so fusing changes no
// bit of the sum and both builds agree.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// A few columns at a time: their accumulators stay in registers over the whole depth.
template <int Columns, bool Uniform>
inline void product_columns(const ProductArguments& x, int first) {
  constexpr std::size_t width = Uniform ? 1 : 8;
  const std::size_t depth = static_cast<std::size_t>(x.depth);
  float sum[Columns][32];
  for (int c = 0; c < Columns; ++c) std::memcpy(sum[c], x.d[first + c], sizeof sum[c]);
  const float* b = x.b + static_cast<std::size_t>(first) * depth * width;
  for (std::size_t k = 0; k < depth; ++k) {
    const float* a = x.a + k * 32;
    for (int c = 0; c < Columns; ++c) {
      const float* bk = b + (static_cast<std::size_t>(c) * depth + k) * width;
      for (int group = 0; group < 32; group += 8) {
        for (int lane = 0; lane < 8; ++lane) {
          sum[c][group + lane] =
              multiply_add(a[group + lane], bk[Uniform ? 0 : lane], sum[c][group + lane]);
        }
      }
    }
  }
  for (int c = 0; c < Columns; ++c) std::memcpy(x.d[first + c], sum[c], sizeof sum[c]);
}

template <bool Uniform>
inline void product_all(const ProductArguments& x) {
  int column = 0;
  for (; column + 2 <= x.columns; column += 2) product_columns<2, Uniform>(x, column);
  if (column < x.columns) product_columns<1, Uniform>(x, column);
}

}  // namespace

const LaneFunction kLaneFunctions[] = {
#define UNARY(name, ...) name,
#define BINARY(name, ...) name,
#define TERNARY(name, ...) name,
#define COMPARE(name, ...) name,
#include "emulator/lanes.def"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef COMPARE
};

void product(const ProductArguments& x) {
  if (x.uniform) {
    product_all<true>(x);
  } else {
    product_all<false>(x);
  }
}

}  // namespace fovea::emulator::FOVEA_LANES
