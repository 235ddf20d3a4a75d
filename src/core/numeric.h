// Number formats and the exponential, written once for host and device.
//
// Conversions round to nearest even and keep NaN and infinities (e4m3 has no infinity: it saturates
// to 448, as the hardware's satfinite conversion does).
#pragma once

#include "core/types.h"

namespace fovea::core {

inline constexpr float log2_e = 1.44269504088896340736f;
inline constexpr float ln_2 = 0.69314718055994530942f;
inline constexpr float infinity = __builtin_bit_cast(float, 0x7f800000u);

constexpr uint32 bits_of(float value) { return __builtin_bit_cast(uint32, value); }
constexpr float float_of(uint32 bits) { return __builtin_bit_cast(float, bits); }
constexpr bool is_nan(float value) { return (bits_of(value) & 0x7fffffffu) > 0x7f800000u; }

constexpr float bf16_to_float(uint16 bits) { return float_of(static_cast<uint32>(bits) << 16); }

constexpr uint16 float_to_bf16(float value) {
  const uint32 bits = bits_of(value);
  if (is_nan(value)) return static_cast<uint16>((bits >> 16) | 0x40u);
  return static_cast<uint16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rounds a non-negative integer significand right by `shift` bits, to nearest even.
constexpr uint32 round_shift(uint32 significand, int shift) {
  if (shift <= 0) return significand << -shift;
  if (shift > 31) return 0;
  const uint32 half = 1u << (shift - 1);
  const uint32 rest = significand & ((half << 1) - 1u);
  const uint32 kept = significand >> shift;
  return kept + ((rest > half || (rest == half && (kept & 1u) != 0u)) ? 1u : 0u);
}

// A binary format of 1 sign, exponent_bits and mantissa_bits, given as an integer code without the
// sign. Subnormals are kept. Overflow follows the carry into the exponent field; callers clamp.
template <int exponent_bits, int mantissa_bits>
constexpr uint32 encode_magnitude(float magnitude) {
  constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32 bits = bits_of(magnitude);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  if (bits < 0x00800000u) return 0;  // below every subnormal of the narrow formats
  const uint32 significand = (bits & 0x7fffffu) | 0x800000u;
  if (exponent >= 1 - bias) {
    const uint32 rounded = round_shift(significand, 23 - mantissa_bits);
    return (static_cast<uint32>(exponent + bias - 1) << mantissa_bits) + rounded;
  }
  return round_shift(significand, 23 - mantissa_bits + (1 - bias - exponent));
}

template <int exponent_bits, int mantissa_bits>
constexpr float decode_magnitude(uint32 code) {
  constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32 exponent = code >> mantissa_bits;
  const uint32 mantissa = code & ((1u << mantissa_bits) - 1u);
  if (exponent == 0) {
    constexpr float unit = float_of(static_cast<uint32>(127 + 1 - bias - mantissa_bits) << 23);
    return static_cast<float>(mantissa) * unit;
  }
  return float_of(((exponent + 127u - static_cast<uint32>(bias)) << 23) |
                  (mantissa << (23 - mantissa_bits)));
}

constexpr float f16_to_float(uint16 bits) {
  const uint32 sign = static_cast<uint32>(bits & 0x8000u) << 16;
  const uint32 code = bits & 0x7fffu;
  if (code >= 0x7c00u) return float_of(sign | 0x7f800000u | ((code & 0x3ffu) << 13));
  return float_of(sign | bits_of(decode_magnitude<5, 10>(code)));
}

constexpr uint16 float_to_f16(float value) {
  const uint32 sign = (bits_of(value) >> 16) & 0x8000u;
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  if (is_nan(value)) return static_cast<uint16>(sign | 0x7e00u);
  uint32 code = magnitude >= 65536.0f ? 0x7c00u : encode_magnitude<5, 10>(magnitude);
  if (code > 0x7c00u) code = 0x7c00u;
  return static_cast<uint16>(sign | code);
}

inline constexpr float e4m3_max = 448.0f;
inline constexpr float e5m2_max = 57344.0f;

constexpr float e4m3_to_float(uint8 bits) {
  const uint32 sign = static_cast<uint32>(bits & 0x80u) << 24;
  const uint32 code = bits & 0x7fu;
  if (code == 0x7fu) return float_of(sign | 0x7fc00000u);
  return float_of(sign | bits_of(decode_magnitude<4, 3>(code)));
}

constexpr uint8 float_to_e4m3(float value) {
  const uint32 sign = (bits_of(value) >> 24) & 0x80u;
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  if (is_nan(value)) return static_cast<uint8>(sign | 0x7fu);
  const uint32 code = magnitude >= e4m3_max ? 0x7eu : encode_magnitude<4, 3>(magnitude);
  return static_cast<uint8>(sign | code);
}

constexpr float e5m2_to_float(uint8 bits) {
  return f16_to_float(static_cast<uint16>(static_cast<uint32>(bits) << 8));
}

constexpr uint8 float_to_e5m2(float value) {
  const uint32 sign = (bits_of(value) >> 24) & 0x80u;
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  if (is_nan(value)) return static_cast<uint8>(sign | 0x7fu);
  const uint32 code = magnitude >= e5m2_max ? 0x7bu : encode_magnitude<5, 2>(magnitude);
  return static_cast<uint8>(sign | code);
}

// ---- Integers -----------------------------------------------------------------------------------

constexpr float s8_to_float(uint8 bits) { return static_cast<float>(static_cast<int8>(bits)); }

// x * by, whose magnitude is below 2^22, rounded once to the nearest even integer, modulo 256. A
// float has it in its low byte after fma(x, by, integer_offset), as kernels do; here the double sum
// of the exact product. NaN: the low byte of the NaN that GPUs return.
inline constexpr float integer_offset = 12582912.0f;  // 1.5 x 2^23
constexpr uint8 float_to_s8(float x, float by) {
  if (is_nan(x) || is_nan(by)) return 0xff;
  constexpr double offset = 6755399441055744.0;  // 1.5 x 2^52
  const double sum = static_cast<double>(x) * static_cast<double>(by) + offset;
  return static_cast<uint8>(__builtin_bit_cast(uint64, sum));
}

// ---- Block scales and rotation: core/fp8.h says what for ----------------------------------------

// The smallest power of two s with largest / s <= 448 (e5m2: 57344); 1 for a block of zeros.
constexpr float block_scale(float largest, DType to = DType::e4m3) {
  if (!(largest > 0.0f)) return 1.0f;
  // 448 = 1.75 x 2^8 and 57344 = 1.75 x 2^15: the exponent of the quotient, rounded up.
  const uint32 bits = bits_of(largest);
  const int32 exponent = static_cast<int32>(bits >> 23) - 127 - (to == DType::e4m3 ? 8 : 15) +
                         ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  const int32 kept = exponent < -126 ? -126 : exponent;
  return float_of(static_cast<uint32>(kept + 127) << 23);
}

// The scale of a block, and what its elements are multiplied by to become codes.
struct CodeScale {
  float scale;
  float by;
};

// Of integers, the largest becomes 127, which is no power of two; scales below 2^-57 are not made,
// so that products of scales stay normal. largest: bits of the largest magnitude, of a NaN or an
// infinity if the block holds one. Integers have none, so its scale becomes NaN.
constexpr CodeScale code_scale(uint32 largest, DType to) {
  const float top = float_of(largest);
  if (to != DType::s8) {
    const float scale = block_scale(top, to);
    return {scale, 1.0f / scale};
  }
  if (largest >= 0x7f800000u) return {float_of(0x7fc00000u), float_of(0x7fc00000u)};
  if (largest == 0) return {1.0f, 1.0f};
  const float range = top < 0x1p-50f ? 0x1p-50f : top;
  return {range / 127.0f, 127.0f / range};
}

// The rotation works on blocks of this many columns: the largest power of two that divides the
// padded width, 32 at least. 128 -> 128, 96 -> 32, 80 (padded to 96) -> 32.
constexpr int32 rotation_block(int32 columns) { return columns & -columns; }

// A sign for each of up to 256 columns, set for negative, in word column / 32. Those of a pair of
// columns are 16 bits apart, so that one shift brings both to the signs of two 16-bit numbers.
constexpr int32 sign_bit(int32 column) { return (column % 2 != 0 ? 31 : 15) - column % 32 / 2; }

struct RotationSigns {
  uint32 word[8] = {};
};

constexpr RotationSigns rotation_signs(uint64 seed) {
  RotationSigns signs;
  for (int32 i = 0; i < 4; ++i) {
    // SplitMix64 (Steele, Lea, Flood 2014).
    uint64 x = seed + static_cast<uint64>(i + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    signs.word[2 * i] = static_cast<uint32>(x);
    signs.word[2 * i + 1] = static_cast<uint32>(x >> 32);
  }
  return signs;
}

constexpr float signed_by(const RotationSigns& signs, int32 column, float value) {
  const uint32 sign = (signs.word[column / 32] >> sign_bit(column)) & 1u;
  return float_of(bits_of(value) ^ (sign << 31));
}

// What makes the butterflies of a block a rotation: 1 / sqrt(block).
constexpr float rotation_norm(int32 block) {
  switch (block) {
    case 32: return 0.17677669529663688f;
    case 64: return 0.125f;
    case 128: return 0.08838834764831845f;
    default: return 0.0625f;
  }
}

// The Hadamard transform of `block` values, without the norm. Strides ascend; kernels keep to the
// same order, so that results agree to the bit.
constexpr void hadamard(float* x, int32 block) {
  for (int32 stride = 1; stride < block; stride *= 2) {
    for (int32 i = 0; i < block; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i];
      const float b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
}

constexpr float load_element(const void* data, DType type, int64 index) {
  switch (type) {
    case DType::f32: return static_cast<const float*>(data)[index];
    case DType::bf16: return bf16_to_float(static_cast<const uint16*>(data)[index]);
    case DType::f16: return f16_to_float(static_cast<const uint16*>(data)[index]);
    case DType::e4m3: return e4m3_to_float(static_cast<const uint8*>(data)[index]);
    case DType::e5m2: return e5m2_to_float(static_cast<const uint8*>(data)[index]);
    case DType::boolean: return static_cast<const uint8*>(data)[index] != 0 ? 1.0f : 0.0f;
    case DType::s8: return s8_to_float(static_cast<const uint8*>(data)[index]);
  }
  return 0.0f;
}

constexpr void store_element(void* data, DType type, int64 index, float value) {
  switch (type) {
    case DType::f32: static_cast<float*>(data)[index] = value; return;
    case DType::bf16: static_cast<uint16*>(data)[index] = float_to_bf16(value); return;
    case DType::f16: static_cast<uint16*>(data)[index] = float_to_f16(value); return;
    case DType::e4m3: static_cast<uint8*>(data)[index] = float_to_e4m3(value); return;
    case DType::e5m2: static_cast<uint8*>(data)[index] = float_to_e5m2(value); return;
    case DType::boolean: static_cast<uint8*>(data)[index] = value != 0.0f ? 1 : 0; return;
    case DType::s8: {
      const float kept = value > 127.0f ? 127.0f : value < -128.0f ? -128.0f : value;
      static_cast<uint8*>(data)[index] = is_nan(value) ? uint8{0} : float_to_s8(kept, 1.0f);
      return;
    }
  }
}

// 2^x = 2^n * p(r) with n the nearest integer and r in [-1/2, 1/2] (Cody and Waite; the split that
// FlashAttention-4 section 3.1 runs on the FMA units). The coefficients are minimax in relative
// error under p(0) = 1, so that the largest logit's weight is exactly one. Highest power last, the
// constant 1 left out.
template <int degree>
struct Exp2Polynomial;
template <>
struct Exp2Polynomial<2> {  // relative error 2.0e-3: e4m3, which rounds by up to 6.2e-2
  static constexpr float coefficient[2] = {0.702941802f, 0.239864039f};
};
template <>
struct Exp2Polynomial<3> {  // relative error 1.0e-4: bf16
  static constexpr float coefficient[3] = {0.693282902f, 0.242210954f, 0.0550089329f};
};
template <>
struct Exp2Polynomial<4> {  // 2.9e-6: fp16, and bf16 with an fp32 LSE
  static constexpr float coefficient[4] = {0.693124175f, 0.240240991f, 0.0559064262f,
                                           0.00958285294f};
};
template <>
struct Exp2Polynomial<6> {  // 9.7e-8 evaluated in fp32: as good as the format
  static constexpr float coefficient[6] = {0.693147182f,   0.240226477f,   0.0555033237f,
                                           0.00961843692f, 0.00133988739f, 0.00015353362f};
};

// Scalar form of the polynomial exponential. Arguments below -126 flush to zero.
template <int degree>
constexpr float exp2_polynomial(float x) {
  if (!(x > -126.0f)) return is_nan(x) ? x : 0.0f;
  if (x >= 128.0f) return infinity;
  const int nearest = static_cast<int>(x + (x < 0.0f ? -0.5f : 0.5f));
  const float r = x - static_cast<float>(nearest);
  float p = Exp2Polynomial<degree>::coefficient[degree - 1];
  for (int i = degree - 2; i >= 0; --i) p = p * r + Exp2Polynomial<degree>::coefficient[i];
  p = p * r + 1.0f;
  // nearest is 128 for x in [127.5, 128): scale in two steps, each a normal power of two.
  const int half = nearest / 2;
  return p * float_of(static_cast<uint32>(127 + half) << 23) *
         float_of(static_cast<uint32>(127 + nearest - half) << 23);
}

// ln(x) for x > 0, to about one unit in the last place: x = 2^n * m with m in [sqrt(1/2), sqrt(2)),
// ln m = 2 atanh(z) with z = (m - 1) / (m + 1).
constexpr float natural_log(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -infinity : float_of(0x7fc00000u);
  if (!(x < infinity)) return x;
  int shift = 0;
  if (x < 1.17549435e-38f) {  // subnormal
    x *= 8388608.0f;
    shift = -23;
  }
  const uint32 bits = bits_of(x) - 0x3f3504f3u;  // offset so that m starts at sqrt(1/2)
  const int n = static_cast<int>(static_cast<int32>(bits) >> 23) + shift;
  const float m = float_of((bits & 0x7fffffu) + 0x3f3504f3u);
  const float z = (m - 1.0f) / (m + 1.0f);
  const float w = z * z;
  const float tail = w * (0.33333333f + w * (0.2f + w * (0.14285714f + w * 0.11111111f)));
  return static_cast<float>(n) * ln_2 + 2.0f * (z + z * tail);
}

}  // namespace fovea::core
