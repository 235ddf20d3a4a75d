// Number formats of the tensor cores and of `cvt`: bit-exact encode and decode.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace fovea::emulator {

using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

enum class Rounding : u8 { nearest_even, zero, down, up, nearest_away };

// A binary format of at most 16 bits: 1 sign bit (unless `is_unsigned`), exponent, mantissa.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  u32 max_code;       // magnitude code of the largest finite value
  u32 infinity_code;  // 0 when the format has no infinity
  u32 nan_code;       // 0 when the format has no NaN
};

inline constexpr SmallFloat kHalf{5, 10, 15, 0x7bff, 0x7c00, 0x7fff};
inline constexpr SmallFloat kBfloat16{8, 7, 127, 0x7f7f, 0x7f80, 0x7fff};
inline constexpr SmallFloat kE4m3{4, 3, 7, 0x7e, 0, 0x7f};
inline constexpr SmallFloat kE5m2{5, 2, 15, 0x7b, 0x7c, 0x7f};
inline constexpr SmallFloat kE2m3{2, 3, 1, 0x1f, 0, 0};
inline constexpr SmallFloat kE3m2{3, 2, 3, 0x1f, 0, 0};
inline constexpr SmallFloat kE2m1{2, 1, 1, 0x7, 0, 0};

// Rounds the non-negative `value` to an integer; `negative` is the sign of the whole number,
// which decides what "down" and "up" mean.
inline double round_magnitude(double value, Rounding rounding, bool negative) {
  const double floor_value = std::floor(value);
  const double rest = value - floor_value;
  if (rest == 0) return floor_value;
  bool up = false;
  switch (rounding) {
    case Rounding::nearest_even:
      up = rest > 0.5 || (rest == 0.5 && std::fmod(floor_value, 2.0) != 0);
      break;
    case Rounding::nearest_away: up = rest >= 0.5; break;
    case Rounding::zero: break;
    case Rounding::down: up = negative; break;
    case Rounding::up: up = !negative; break;
  }
  return floor_value + (up ? 1.0 : 0.0);
}

// Nearest code of `format` to `value`. Overflow gives the largest finite value with satfinite (or
// where the rounding points to zero), else infinity, else NaN.
inline u32 encode_small(const SmallFloat& format, double value, Rounding rounding, bool satfinite) {
  const bool negative = std::signbit(value);
  const u32 sign = negative ? 1u << (format.exponent_bits + format.mantissa_bits) : 0u;
  if (std::isnan(value)) return format.nan_code != 0 ? format.nan_code : format.max_code;
  const bool no_infinity = format.infinity_code == 0;
  const u32 overflow = no_infinity && format.nan_code != 0 ? format.nan_code
                       : no_infinity                       ? format.max_code
                                                           : format.infinity_code;
  if (std::isinf(value)) return sign | (satfinite ? format.max_code : overflow);
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int lowest = 1 - format.bias;
  const int quantum = (exponent - 1 > lowest ? exponent - 1 : lowest) - format.mantissa_bits;
  const double steps = round_magnitude(std::ldexp(magnitude, -quantum), rounding, negative);
  // A normal number's steps carry the hidden bit, so the sum below also handles rounding up to the
  // next binade; below the lowest binade the exponent field is 0 and nothing is added.
  i64 code = static_cast<i64>(steps);
  code += static_cast<i64>(quantum + format.mantissa_bits - lowest) << format.mantissa_bits;
  if (code > static_cast<i64>(format.max_code)) {
    const bool toward_zero = rounding == Rounding::zero ||
                             (rounding == Rounding::down && !negative) ||
                             (rounding == Rounding::up && negative);
    return sign | (satfinite || toward_zero ? format.max_code : overflow);
  }
  return sign | static_cast<u32>(code);
}

inline float decode_small(const SmallFloat& format, u32 code) {
  const u32 magnitude_mask = (1u << (format.exponent_bits + format.mantissa_bits)) - 1;
  const u32 magnitude = code & magnitude_mask;
  const bool negative = (code & ~magnitude_mask) != 0;
  float value = 0;
  if (format.infinity_code != 0 && magnitude >= format.infinity_code) {
    value = magnitude == format.infinity_code ? std::numeric_limits<float>::infinity()
                                              : std::numeric_limits<float>::quiet_NaN();
  } else if (format.nan_code != 0 && magnitude > format.max_code) {
    value = std::numeric_limits<float>::quiet_NaN();
  } else {
    const u32 field = magnitude >> format.mantissa_bits;
    const u32 fraction = magnitude & ((1u << format.mantissa_bits) - 1);
    const u32 significand = field == 0 ? fraction : fraction | (1u << format.mantissa_bits);
    const int exponent = (field == 0 ? 1 : static_cast<int>(field)) - format.bias;
    value = std::ldexp(static_cast<float>(significand), exponent - format.mantissa_bits);
  }
  return negative ? -value : value;
}

inline float bfloat16_to_float(u32 code) { return std::bit_cast<float>(code << 16); }

// Round to nearest even, written without branches so that loops over it vectorise.
inline u32 float_to_bfloat16(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;
}

inline float half_to_float(u32 code) {
  // Shift into float position and rebias by a multiplication, which also handles subnormals.
  const u32 magnitude = (code & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * std::bit_cast<float>(0x77800000u);
  const u32 special = magnitude >= 0x0f800000u ? 0x7f800000u | magnitude : 0u;
  return std::bit_cast<float>((special != 0 ? special : std::bit_cast<u32>(scaled)) |
                              ((code & 0x8000u) << 16));
}

inline u32 float_to_half(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // subnormal result: let the float adder round
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | (std::bit_cast<u32>(shifted) - 0x3f000000u);
  }
  return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

// Largest power-of-two format of block scales; 0xff is NaN.
inline float ue8m0_to_float(u32 code) {
  if (code == 0xff) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0f, static_cast<int>(code) - 127);
}

// a + b rounded to odd in double: a later rounding to at most 51 bits is then correct.
inline double add_round_to_odd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double b_part = sum - a;
  const double error = (a - (sum - b_part)) + (b - b_part);
  const u64 bits = std::bit_cast<u64>(sum);
  if (error == 0 || (bits & 1) != 0) return sum;
  const bool away = (error > 0) == (sum > 0);
  return std::bit_cast<double>(away ? bits + 1 : bits - 1);
}

}  // namespace fovea::emulator
