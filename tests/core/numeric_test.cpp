// Number formats against an independent rounding in double precision, and the two transcendental
// functions against the C library's.
#include "core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support.h"

namespace fovea::core {
namespace {

// A binary format by its definition. Codes carry the sign in their top bit.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool saturates;    // finite overflow and infinities become the largest finite value
  bool no_infinity;  // e4m3: the top exponent is an ordinary one, NaN is all ones
  double largest;
};

constexpr Format bf16{8, 7, false, false, 0x1.fep127};
constexpr Format f16{5, 10, false, false, 65504.0};
constexpr Format e4m3{4, 3, true, true, 448.0};
constexpr Format e5m2{5, 2, true, false, 57344.0};

double decode(const Format& format, std::uint32_t code) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const std::uint32_t mantissa_limit = 1u << format.mantissa_bits;
  const std::uint32_t mantissa = code % mantissa_limit;
  const std::uint32_t exponent = (code / mantissa_limit) % (1u << format.exponent_bits);
  const bool negative = (code >> (format.mantissa_bits + format.exponent_bits)) != 0;
  const bool top = exponent == (1u << format.exponent_bits) - 1;
  double value = 0.0;
  if (format.no_infinity ? top && mantissa == mantissa_limit - 1 : top && mantissa != 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (top && !format.no_infinity) {
    value = HUGE_VAL;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + mantissa_limit,
                       static_cast<int>(exponent) - bias - format.mantissa_bits);
  }
  return negative ? -value : value;
}

// The value to nearest even in the format. Relies on the default rounding mode.
double round_to(const Format& format, double value) {
  if (std::isnan(value)) return value;
  const double magnitude = std::abs(value);
  double rounded = HUGE_VAL;
  if (std::isfinite(magnitude) && magnitude > 0.0) {
    const int smallest = 2 - (1 << (format.exponent_bits - 1));
    const int exponent = std::max(std::ilogb(magnitude), smallest) - format.mantissa_bits;
    rounded = std::ldexp(std::nearbyint(std::ldexp(magnitude, -exponent)), exponent);
  } else if (magnitude == 0.0) {
    rounded = 0.0;
  }
  if (rounded > format.largest) rounded = format.saturates ? format.largest : HUGE_VAL;
  return std::copysign(rounded, value);
}

bool same(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

// Every code decodes to what the format defines, and encodes back to itself. The middle between
// neighbours and the floats beside it round to the right side.
template <typename Decode, typename Encode>
void check_all_codes(const Format& format, Decode to_float, Encode from_float) {
  const std::uint32_t codes = 1u << (1 + format.exponent_bits + format.mantissa_bits);
  for (std::uint32_t code = 0; code < codes; ++code) {
    const double expected = decode(format, code);
    const float value = to_float(code);
    ASSERT_TRUE(same(value, expected)) << "code " << code << " gives " << value;
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(to_float(from_float(value)))) << "code " << code;
      continue;
    }
    if (std::isfinite(expected) || !format.saturates) {
      ASSERT_EQ(from_float(value), code);
    }
    const double next = decode(format, code + 1 < codes ? code + 1 : code);
    if (!std::isfinite(expected) || !std::isfinite(next)) continue;
    const float middle = static_cast<float>(expected / 2 + next / 2);
    for (const float x : {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, 1e38f),
                          std::nextafterf(value, 0.0f), std::nextafterf(value, 1e38f)}) {
      ASSERT_TRUE(same(to_float(from_float(x)), round_to(format, x))) << x;
    }
  }
}

template <typename Decode, typename Encode>
void check_random_floats(const Format& format, Decode to_float, Encode from_float) {
  fovea::test::Random random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    const float any = float_of(static_cast<uint32>(random.bits()));
    // Half of the samples within the format's range, where the rounding is.
    const double in_range = std::ldexp(random.normal(), static_cast<int>(random.below(48)) - 30);
    for (const float x : {any, static_cast<float>(in_range)}) {
      ASSERT_TRUE(same(to_float(from_float(x)), round_to(format, x)))
          << x << " gives " << to_float(from_float(x)) << " instead of " << round_to(format, x);
    }
  }
  for (const float x : {0.0f,           -0.0f,         HUGE_VALF,     -HUGE_VALF, std::nanf(""),
                        -std::nanf(""), 65504.0f,      65519.996f,    65520.0f,   65536.0f,
                        448.0f,         463.99997f,    464.0f,        57344.0f,   61440.0f,
                        3.4028235e38f,  3.3961776e38f, 3.3961774e38f, 1e-45f,     1.4e-38f}) {
    EXPECT_TRUE(same(to_float(from_float(x)), round_to(format, x))) << x;
    EXPECT_TRUE(same(to_float(from_float(-x)), round_to(format, -x))) << -x;
  }
}

template <typename Decode, typename Encode>
void check(const Format& format, Decode to_float, Encode from_float) {
  check_all_codes(format, to_float, from_float);
  check_random_floats(format, to_float, from_float);
}

TEST(CoreNumeric, Bf16) {
  check(
      bf16, [](std::uint32_t code) { return bf16_to_float(static_cast<uint16>(code)); },
      [](float x) { return std::uint32_t{float_to_bf16(x)}; });
}

TEST(CoreNumeric, F16) {
  check(
      f16, [](std::uint32_t code) { return f16_to_float(static_cast<uint16>(code)); },
      [](float x) { return std::uint32_t{float_to_f16(x)}; });
}

TEST(CoreNumeric, E4m3) {
  check(
      e4m3, [](std::uint32_t code) { return e4m3_to_float(static_cast<uint8>(code)); },
      [](float x) { return std::uint32_t{float_to_e4m3(x)}; });
}

TEST(CoreNumeric, E5m2) {
  check(
      e5m2, [](std::uint32_t code) { return e5m2_to_float(static_cast<uint8>(code)); },
      [](float x) { return std::uint32_t{float_to_e5m2(x)}; });
}

TEST(CoreNumeric, ElementsLoadAsStored) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16, DType::e4m3, DType::e5m2}) {
    std::vector<unsigned char> memory(64, 0xff);
    store_element(memory.data(), type, 3, -1.5f);
    EXPECT_EQ(load_element(memory.data(), type, 3), -1.5f);
    EXPECT_TRUE(is_nan(load_element(memory.data(), type, 2)));
    EXPECT_TRUE(is_nan(load_element(memory.data(), type, 4)));
  }
  unsigned char flags[3] = {0, 1, 255};
  EXPECT_EQ(load_element(flags, DType::boolean, 0), 0.0f);
  EXPECT_EQ(load_element(flags, DType::boolean, 1), 1.0f);
  EXPECT_EQ(load_element(flags, DType::boolean, 2), 1.0f);
}

template <int degree>
double largest_relative_error() {
  double worst = 0.0;
  test::Random random(2);
  for (int i = 0; i < 2'000'000; ++i) {
    const double low = i % 2 == 0 ? -125.999 : -1.0;
    const double high = i % 2 == 0 ? 127.999 : 1.0;
    const auto x = static_cast<float>(low + random.uniform() * (high - low));
    const double exact = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::abs(exp2_polynomial<degree>(x) - exact) / exact);
  }
  return worst;
}

TEST(CoreNumeric, ExponentialKeepsItsErrorBounds) {
  EXPECT_LT(largest_relative_error<3>(), 1.02e-4);
  EXPECT_LT(largest_relative_error<4>(), 3.0e-6);
  EXPECT_LT(largest_relative_error<6>(), 1.2e-7);
}

template <int degree>
void check_exponential_specials() {
  for (int n = -125; n <= 127; ++n) {
    EXPECT_EQ(exp2_polynomial<degree>(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
  }
  EXPECT_EQ(exp2_polynomial<degree>(0.0f), 1.0f);
  EXPECT_EQ(exp2_polynomial<degree>(-0.0f), 1.0f);
  EXPECT_EQ(exp2_polynomial<degree>(-126.0f), 0.0f);
  EXPECT_EQ(exp2_polynomial<degree>(-1e30f), 0.0f);
  EXPECT_EQ(exp2_polynomial<degree>(-infinity), 0.0f);
  EXPECT_EQ(exp2_polynomial<degree>(128.0f), infinity);
  EXPECT_EQ(exp2_polynomial<degree>(infinity), infinity);
  EXPECT_TRUE(is_nan(exp2_polynomial<degree>(std::nanf(""))));
  EXPECT_LT(exp2_polynomial<degree>(127.99f), infinity);
  for (const float edge : {-0.5f, 0.5f, 1.5f, -1.5f, 127.5f, -125.5f}) {
    // Either neighbour of a half rounds to another integer part; the value must not jump.
    const float low = std::nextafterf(edge, -1e9f);
    const float high = std::nextafterf(edge, 1e9f);
    EXPECT_NEAR(exp2_polynomial<degree>(low) / exp2_polynomial<degree>(high),
                std::exp2(static_cast<double>(low) - high), degree == 3 ? 2.1e-4 : 6e-6)
        << edge;
  }
}

TEST(CoreNumeric, ExponentialSpecials) {
  check_exponential_specials<3>();
  check_exponential_specials<4>();
  check_exponential_specials<6>();
  static_assert(exp2_polynomial<6>(3.0f) == 8.0f);
}

TEST(CoreNumeric, LogarithmIsWithinThreeUnits) {
  test::Random random(3);
  double worst = 0.0;
  for (int i = 0; i < 3'000'000; ++i) {
    float x = float_of(static_cast<uint32>(random.bits()) & 0x7fffffffu);
    if (i % 2 == 0) x = static_cast<float>(0.5 + 1.5 * random.uniform());
    if (!(x < infinity) || x == 0.0f) continue;
    const double exact = std::log(static_cast<double>(x));
    const double unit = std::ldexp(1.0, std::max(std::ilogb(exact), -126) - 23);
    worst = std::max(worst, std::abs(natural_log(x) - exact) / unit);
  }
  EXPECT_LT(worst, 3.0);
}

TEST(CoreNumeric, LogarithmSpecials) {
  EXPECT_EQ(natural_log(1.0f), 0.0f);
  EXPECT_EQ(natural_log(0.0f), -infinity);
  EXPECT_EQ(natural_log(-0.0f), -infinity);
  EXPECT_EQ(natural_log(infinity), infinity);
  EXPECT_TRUE(is_nan(natural_log(-1.0f)));
  EXPECT_TRUE(is_nan(natural_log(-infinity)));
  EXPECT_TRUE(is_nan(natural_log(std::nanf(""))));
  EXPECT_NEAR(natural_log(1e-45f), -103.278929903, 1e-5);
}

}  // namespace
}  // namespace fovea::core
