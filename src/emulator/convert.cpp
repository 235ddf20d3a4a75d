// mov in all its forms, cvt, and conversions between address spaces.
#include <cmath>
#include <cstring>

#include "emulator/builders.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

Step run_mov_predicate(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  u32& target = warp.predicates[static_cast<u32>(o[0].slot)];
  const u32 mask = warp.mask_of(o[1]);
  target = (target & ~warp.active) | (mask & warp.active);
  return Step::next;
}

Step run_mov_wide(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  u32* d = warp.words(o[0]);
  const u32* a = static_cast<const u32*>(warp.source(o[1]));
  for_lanes(warp.active, [&](int lane) { std::memcpy(d + 4 * lane, a + 4 * lane, 16); });
  return Step::next;
}

// d = {a, b, ...}: element 0 in the low bits. `extra` is the width of an element in bits.
Step run_pack(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bits = inst.extra;
  for_lanes(warp.active, [&](int lane) {
    u64 part[2] = {0, 0};
    for (u32 i = 0; i < inst.inputs; ++i) {
      const u64 mask = bits == 64 ? ~u64{0} : (u64{1} << bits) - 1;
      part[i * bits / 64] |= (warp.value(o[1 + i], lane) & mask) << (i * bits % 64);
    }
    if (o[0].words == 4) {
      std::memcpy(warp.words(o[0]) + 4 * lane, part, 16);
    } else {
      warp.set(o[0], lane, part[0]);
    }
  });
  return Step::next;
}

Step run_unpack(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bits = inst.extra;
  const OperandRef& a = o[inst.outputs];
  for_lanes(warp.active, [&](int lane) {
    u64 part[2] = {0, 0};
    if (a.words == 4) {
      std::memcpy(part, static_cast<const u32*>(warp.source(a)) + 4 * lane, 16);
    } else {
      part[0] = warp.value(a, lane);
    }
    for (u32 i = 0; i < inst.outputs; ++i) {
      if (o[i].kind == OperandRef::Kind::none) continue;
      const u64 mask = bits == 64 ? ~u64{0} : (u64{1} << bits) - 1;
      warp.set(o[i], lane, part[i * bits / 64] >> (i * bits % 64) & mask);
    }
  });
  return Step::next;
}

Step run_address(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, warp.address(o[1], lane)); });
  return Step::next;
}

Step run_clock(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, warp.launch->steps); });
  return Step::next;
}

void build_pack(Builder& b, Type type) {
  const Operand& list = b.operand(1);
  b.output(b.operand(0), type);
  b.inst.extra = 8 * type_bytes(type) / static_cast<u32>(list.items.size());
  for (const Operand& item : list.items) b.input_any(item);
  b.inst.halves = b.inst.extra == 32 && list.items.size() == 2;
  b.inst.run = run_pack;
}

void build_unpack(Builder& b, Type type) {
  const Operand& list = b.operand(0);
  b.inst.extra = 8 * type_bytes(type) / static_cast<u32>(list.items.size());
  for (const Operand& item : list.items) b.output_any(item);
  b.input(b.operand(1), type);
  b.inst.halves = b.inst.extra == 32 && list.items.size() == 2;
  b.inst.run = run_unpack;
}

// ---- cvt

enum CvtFlags : u32 {
  flag_ftz = 1,
  flag_sat = 2,
  flag_satfinite = 4,
  flag_relu = 8,
  flag_to_integer = 16
};

bool is_integer(Type type) { return type >= Type::uint8 && type <= Type::int64; }

const SmallFloat* small_format(Type type) {
  switch (type) {
    case Type::f16:
    case Type::f16x2: return &kHalf;
    case Type::bf16:
    case Type::bf16x2: return &kBfloat16;
    case Type::e4m3x2: return &kE4m3;
    case Type::e5m2x2: return &kE5m2;
    case Type::e2m3x2: return &kE2m3;
    case Type::e3m2x2: return &kE3m2;
    case Type::e2m1x2: return &kE2m1;
    default: return nullptr;
  }
}

double flush(double value, u32 flags) {
  return (flags & flag_ftz) != 0 && std::fabs(value) < 0x1p-126 ? std::copysign(0.0, value) : value;
}

double source_real(const Inst& inst, u64 bits) {
  switch (inst.type) {
    case Type::f32: return flush(std::bit_cast<float>(static_cast<u32>(bits)), inst.flags);
    case Type::f64: return std::bit_cast<double>(bits);
    default: return decode_small(*small_format(inst.type), static_cast<u32>(bits) & 0xffff);
  }
}

u64 real_to_integer(double value, Type type, Rounding rounding) {
  const int bits = static_cast<int>(8 * type_bytes(type));
  const bool with_sign = is_signed(type);
  if (std::isnan(value)) {
    return bits == 64 ? u64{1} << 63 : 0;
  }
  const bool negative = std::signbit(value);
  const double magnitude =
      std::isinf(value) ? value : round_magnitude(std::fabs(value), rounding, negative);
  const double rounded = std::isinf(value) ? value : (negative ? -magnitude : magnitude);
  const double high = std::ldexp(1.0, with_sign ? bits - 1 : bits);
  const double low = with_sign ? -high : 0.0;
  if (rounded >= high) {
    return with_sign ? (u64{1} << (bits - 1)) - 1 : bits == 64 ? ~u64{0} : (u64{1} << bits) - 1;
  }
  if (rounded < low) return with_sign ? u64{1} << (bits - 1) : 0;
  if (with_sign) return static_cast<u64>(static_cast<i64>(rounded));
  return static_cast<u64>(rounded);
}

u64 integer_value(u64 bits, Type type) {
  switch (type) {
    case Type::int8: return static_cast<u64>(i64{static_cast<i8>(bits)});
    case Type::int16: return static_cast<u64>(i64{static_cast<i16>(bits)});
    case Type::int32: return static_cast<u64>(i64{static_cast<i32>(bits)});
    case Type::uint8: return bits & 0xff;
    case Type::uint16: return bits & 0xffff;
    case Type::uint32: return bits & 0xffffffff;
    default: return bits;
  }
}

u64 integer_to_integer(u64 value, const Inst& inst) {
  const u32 bits = 8 * type_bytes(inst.type2);
  if ((inst.flags & flag_sat) != 0 && bits < 64) {
    const bool source_signed = is_signed(inst.type);
    const i64 low = is_signed(inst.type2) ? -(i64{1} << (bits - 1)) : 0;
    const i64 high = is_signed(inst.type2) ? (i64{1} << (bits - 1)) - 1 : (i64{1} << bits) - 1;
    if (source_signed) {
      const i64 v = static_cast<i64>(value);
      value = static_cast<u64>(v < low ? low : v > high ? high : v);
    } else {
      value = value > static_cast<u64>(high) ? static_cast<u64>(high) : value;
    }
  }
  // A narrow result in a wider register is sign- or zero-extended.
  return integer_value(value, inst.type2);
}

// Exact value of a 64-bit integer may not fit a double, so large ones are split for rounding.
float integer_to_float(u64 value, bool with_sign, Rounding rounding) {
  const bool negative = with_sign && static_cast<i64>(value) < 0;
  const u64 magnitude = negative ? 0 - value : value;
  if (magnitude == 0) return 0.0f;
  const int top = 63 - std::countl_zero(magnitude);
  if (top <= 23) return negative ? -static_cast<float>(magnitude) : static_cast<float>(magnitude);
  const int shift = top - 23;
  const u64 whole = magnitude >> shift;
  const u64 rest = magnitude & ((u64{1} << shift) - 1);
  // Two guard bits, the lower one sticky, are all that rounding needs.
  const u64 half = u64{1} << (shift - 1);
  const double guard = rest == 0 ? 0.0 : rest < half ? 0.25 : rest == half ? 0.5 : 0.75;
  const double steps = round_magnitude(static_cast<double>(whole) + guard, rounding, negative);
  const double result = std::ldexp(steps, shift);
  return static_cast<float>(negative ? -result : result);
}

double round_to_double(u64 value, bool with_sign, Rounding rounding) {
  const bool negative = with_sign && static_cast<i64>(value) < 0;
  const u64 magnitude = negative ? 0 - value : value;
  if (magnitude == 0) return 0.0;
  const int top = 63 - std::countl_zero(magnitude);
  if (top <= 52) return negative ? -static_cast<double>(magnitude) : static_cast<double>(magnitude);
  const int shift = top - 52;
  u64 whole = magnitude >> shift;
  const u64 rest = magnitude & ((u64{1} << shift) - 1);
  const u64 half = u64{1} << (shift - 1);
  const bool up = rounding == Rounding::nearest_even
                      ? rest > half || (rest == half && (whole & 1) != 0)
                      : rest != 0 && ((rounding == Rounding::up && !negative) ||
                                      (rounding == Rounding::down && negative));
  whole += up ? 1 : 0;
  const double result = std::ldexp(static_cast<double>(whole), shift);
  return negative ? -result : result;
}

float double_to_float(double value, Rounding rounding) {
  const float nearest = static_cast<float>(value);
  if (rounding == Rounding::nearest_even || std::isnan(value) || double{nearest} == value) {
    return nearest;
  }
  const bool above = double{nearest} > value;
  const float infinity = std::numeric_limits<float>::infinity();
  const bool want_above = rounding == Rounding::up || (rounding == Rounding::zero && value < 0);
  if (above == want_above) return nearest;
  return std::nextafter(nearest, want_above ? infinity : -infinity);
}

u64 saturate_unit(double value) {
  return std::bit_cast<u64>(value > 0 ? (value < 1 ? value : 1.0) : 0.0);
}

u64 to_real(const Inst& inst, double value) {
  if ((inst.flags & flag_to_integer) != 0 && std::isfinite(value)) {
    const bool negative = std::signbit(value);
    const double whole = round_magnitude(std::fabs(value), inst.rounding, negative);
    value = negative ? -whole : whole;
  }
  if ((inst.flags & flag_sat) != 0) value = std::bit_cast<double>(saturate_unit(value));
  if ((inst.flags & flag_relu) != 0 && !std::isnan(value) && value < 0) value = 0;
  switch (inst.type2) {
    case Type::f64: return std::bit_cast<u64>(value);
    case Type::f32: {
      const float result = std::isnan(value) ? std::numeric_limits<float>::quiet_NaN()
                                             : double_to_float(value, inst.rounding);
      return std::bit_cast<u32>(static_cast<float>(flush(result, inst.flags)));
    }
    case Type::tf32: {
      constexpr SmallFloat tf32{8, 10, 127, 0x3fbff, 0x3fc00, 0x3ffff};
      const u32 code = encode_small(tf32, value, inst.rounding, (inst.flags & flag_satfinite) != 0);
      return u64{code} << 13;
    }
    default:
      return encode_small(*small_format(inst.type2), value, inst.rounding,
                          (inst.flags & flag_satfinite) != 0);
  }
}

Step run_cvt(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    const u64 bits = warp.value(o[1], lane);
    u64 result = 0;
    if (is_integer(inst.type)) {
      const u64 value = integer_value(bits, inst.type);
      if (is_integer(inst.type2)) {
        result = integer_to_integer(value, inst);
      } else if (inst.type2 == Type::f32) {
        result = std::bit_cast<u32>(integer_to_float(value, is_signed(inst.type), inst.rounding));
      } else {
        result = to_real(inst, round_to_double(value, is_signed(inst.type), inst.rounding));
      }
    } else if (is_integer(inst.type2)) {
      result = real_to_integer(source_real(inst, bits), inst.type2, inst.rounding);
      result = integer_value(result, inst.type2);
    } else {
      result = to_real(inst, source_real(inst, bits));
    }
    warp.set(o[0], lane, result);
  });
  return Step::next;
}

// d = {cvt(a) in the upper half, cvt(b) in the lower}
Step run_cvt_pair(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bits = inst.extra;
  for_lanes(warp.active, [&](int lane) {
    const u64 high = to_real(inst, source_real(inst, warp.value(o[1], lane)));
    const u64 low = to_real(inst, source_real(inst, warp.value(o[2], lane)));
    warp.set(o[0], lane, high << bits | low);
  });
  return Step::next;
}

// Two narrow numbers of one register to two halves: f16x2 from e4m3x2 and the like, and back.
Step run_cvt_packed(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const SmallFloat& from = *small_format(inst.type);
  const u32 in = inst.extra & 0xff, out = inst.extra >> 8;
  for_lanes(warp.active, [&](int lane) {
    const u32 bits = warp.value32(o[1], lane);
    u64 result = 0;
    for (u32 i = 0; i < 2; ++i) {
      const double value = decode_small(from, bits >> (i * in) & ((1u << in) - 1));
      result |= to_real(inst, value) << (i * out);
    }
    warp.set(o[0], lane, result);
  });
  return Step::next;
}

u32 packed_bits(Type type) {
  switch (type) {
    case Type::f16x2:
    case Type::bf16x2: return 16;
    case Type::e2m1x2: return 4;
    default: return 8;
  }
}

// The conversions that need no parameter have vectorised forms in lanes.def.
std::string fast_conversion(const Builder& b, Type to, Type from, bool pair) {
  if (b.has("sat") || b.has("relu") || b.has("ftz") || b.has("rz")) return {};
  if (pair) {
    if (to == Type::e4m3x2 && b.has("satfinite")) return "cvt_rn_e4m3x2_f32";
    if (b.has("satfinite")) return {};
    if (to == Type::f16x2) return "cvt_rn_f16x2_f32";
    if (to == Type::bf16x2) return "cvt_rn_bf16x2_f32";
    return {};
  }
  if (b.has("satfinite")) return {};
  const std::string f = exact_name(from), t = exact_name(to);
  if (is_integer(from) && is_integer(to)) {
    const u32 n = type_bytes(from), m = type_bytes(to);
    if (m == 8) {
      return "cvt_" + std::string(is_signed(from) ? "s" : "u") + std::to_string(8 * n) + "_" +
             (is_signed(from) ? "s" : "u") + "64";
    }
    if (n == 8 && m == 4) return "cvt_u64_u32";
    return {};
  }
  return "cvt_" + std::string(b.has("rn") ? "rn_" : "") + t + "_" + f;
}

void check_cvt(const Builder& b, Type to, Type from) {
  if (b.has("scaled::n2::ue8m0") || b.has("rs")) b.fail("this form of cvt is not supported.");
  if (to == Type::ue8m0x2 || from == Type::ue8m0x2) b.fail("cvt of ue8m0x2 is not supported.");
  const bool real = !is_integer(from) && !is_integer(to);
  if (real && to == from && to != Type::f32 && to != Type::f64 && to != Type::f16 &&
      to != Type::bf16) {
    b.fail("a conversion between equal types is not supported here.");
  }
}

// Where width of register and type differ the plain row copies do not fit.
bool widths_match(const Builder& b, Type to, Type from) {
  auto fits = [&](const Operand& operand, Type type) {
    if (operand.kind != Operand::Kind::reg) return true;
    const u32 width = type_bytes(b.reg(operand).type), bytes = type_bytes(type);
    return (width <= 4) == (bytes <= 4) && width <= 8;
  };
  return fits(b.operand(0), to) && fits(b.operand(1), from);
}

void cvta_space(Builder& b, u64& window) {
  switch (b.space()) {
    case Space::shared:
    case Space::shared_cluster: window = kSharedWindow; break;
    case Space::local: window = kLocalWindow; break;
    case Space::param: window = kParamWindow; break;
    default: window = 0; break;
  }
}

// mode 1: generic to the space
Step run_cvta(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u64 window = u64{inst.immediate} << 32;
  for_lanes(warp.active, [&](int lane) {
    const u64 a =
        o[1].kind == OperandRef::Kind::memory ? warp.address(o[1], lane) : warp.value(o[1], lane);
    warp.set(o[0], lane, inst.mode == 1 ? a - window : a + window);
  });
  return Step::next;
}

bool is_constant(Warp& warp, u64 address) {
  const Allocation* allocation = warp.launch->machine->find(address, 1);
  return allocation != nullptr && allocation->constant;
}

Step run_isspacep(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  u32 hits = 0;
  for_lanes(warp.active, [&](int lane) {
    const u64 a = warp.value(o[1], lane);
    const u64 window = a >> 32;
    bool hit = false;
    switch (inst.space) {
      case Space::shared:
        hit = window == kSharedWindow >> 32 && (a >> kRankShift & 0xff) == warp.cta->rank;
        break;
      case Space::shared_cluster: hit = window == kSharedWindow >> 32; break;
      case Space::local: hit = window == kLocalWindow >> 32; break;
      case Space::param: hit = window == kParamWindow >> 32; break;
      case Space::constant: hit = is_constant(warp, a); break;
      default: hit = a >= kDeviceBase && a < kParamWindow && !is_constant(warp, a); break;
    }
    if (hit) hits |= 1u << lane;
  });
  u32& target = warp.predicates[static_cast<u32>(o[0].slot)];
  target = (target & ~warp.active) | hits;
  return Step::next;
}

// Address of the same variable in another CTA of the cluster.
Step run_mapa(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    const u64 a =
        o[1].kind == OperandRef::Kind::memory ? warp.address(o[1], lane) : warp.value(o[1], lane);
    const u64 rank = warp.value32(o[2], lane);
    if (rank >= warp.cluster->ctas.size()) {
      warp.fault(FaultKind::bad_argument, inst, lane,
                 "mapa names CTA " + std::to_string(rank) + " of a cluster of " +
                     std::to_string(warp.cluster->ctas.size()) + ".");
      return;
    }
    warp.set(o[0], lane, (a & ~(u64{0xff} << kRankShift)) | rank << kRankShift);
  });
  return Step::next;
}

Step run_getctarank(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    const u64 a =
        o[1].kind == OperandRef::Kind::memory ? warp.address(o[1], lane) : warp.value(o[1], lane);
    warp.set(o[0], lane, a >> kRankShift & 0xff);
  });
  return Step::next;
}

}  // namespace

void build_mov(Builder& b) {
  b.expect_count(2, 2);
  const Type type = b.type(0);
  const Operand& from = b.operand(1);
  b.inst.pure = true;
  b.inst.unit = Unit::alu;
  if (type == Type::pred) {
    b.output(b.operand(0), type);
    b.input(from, type);
    b.inst.run = run_mov_predicate;
    b.inst.copy = from.kind != Operand::Kind::integer;
  } else if (b.operand(0).kind == Operand::Kind::vector) {
    build_unpack(b, type);
  } else if (from.kind == Operand::Kind::vector) {
    build_pack(b, type);
  } else if (from.kind == Operand::Kind::variable) {
    b.output(b.operand(0), type);
    b.address_of(from);
    b.inst.run = run_address;
  } else if (from.kind == Operand::Kind::function || from.kind == Operand::Kind::label) {
    b.fail("the address of a function or label is not supported.");
  } else if (from.kind == Operand::Kind::special &&
             (from.text.substr(0, 6) == "%clock" || from.text == "%globaltimer")) {
    b.output(b.operand(0), type);
    b.inst.run = run_clock;
  } else {
    b.output(b.operand(0), type);
    b.input(from, type);
    b.inst.copy = from.kind == Operand::Kind::reg;
    const u32 bytes = type_bytes(type);
    if (bytes == 16) {
      b.inst.run = run_mov_wide;
    } else {
      b.lane(bytes == 8 ? "mov_b64" : bytes == 4 ? "mov_b32" : "mov_b16");
      b.inst.run = run_lane;
    }
  }
}

void build_cvt(Builder& b) {
  if (b.types.size() != 2) b.fail("cvt needs two types.");
  const Type to = b.type(0), from = b.type(1);
  check_cvt(b, to, from);
  Inst& inst = b.inst;
  inst.type = from;
  inst.type2 = to;
  inst.rounding = b.rounding();
  inst.pure = true;
  inst.unit = Unit::alu;
  const bool integral = b.has("rni") || b.has("rzi") || b.has("rmi") || b.has("rpi");
  inst.flags = (b.has("ftz") ? flag_ftz : 0u) | (b.has("sat") ? flag_sat : 0u) |
               (b.has("satfinite") ? flag_satfinite : 0u) | (b.has("relu") ? flag_relu : 0u) |
               (integral && !is_integer(to) ? flag_to_integer : 0u);
  b.output_any(b.operand(0));
  const bool pair = b.count() == 3;
  const bool packed =
      !pair && (small_format(from) != nullptr && from != Type::f16 && from != Type::bf16);
  if (pair) {
    if (from != Type::f32) b.fail("cvt with two sources takes .f32.");
    b.input(b.operand(1), Type::f32);
    b.input(b.operand(2), Type::f32);
    inst.extra = packed_bits(to);
    inst.run = run_cvt_pair;
  } else if (packed) {
    b.input_any(b.operand(1));
    if (small_format(to) == nullptr) b.fail("this packed conversion is not supported.");
    inst.extra = packed_bits(from) | packed_bits(to) << 8;
    inst.run = run_cvt_packed;
  } else {
    b.expect_count(2, 2);
    b.input_any(b.operand(1));
    inst.run = run_cvt;
  }
  const std::string fast = fast_conversion(b, to, from, pair);
  if (!packed && !fast.empty() && !integral && b.has_lane(fast) && widths_match(b, to, from)) {
    b.lane(fast);
    inst.run = run_lane;
  }
}

void build_cvta(Builder& b) {
  b.expect_count(2, 2);
  u64 window = 0;
  cvta_space(b, window);
  b.inst.immediate = static_cast<u32>(window >> 32);
  b.inst.mode = b.has("to") ? 1 : 0;
  b.inst.pure = true;
  b.inst.unit = Unit::alu;
  b.output_any(b.operand(0));
  if (b.operand(1).kind == Operand::Kind::variable) {
    b.address_of(b.operand(1));
  } else {
    b.input_any(b.operand(1));
  }
  b.inst.run = run_cvta;
}

void build_isspacep(Builder& b) {
  b.expect_count(2, 2);
  b.inst.space = b.space();
  b.output(b.operand(0), Type::pred);
  b.input_any(b.operand(1));
  b.inst.pure = true;
  b.inst.unit = Unit::alu;
  b.inst.run = run_isspacep;
}

void build_mapa(Builder& b) {
  b.expect_count(3, 3);
  b.output_any(b.operand(0));
  if (b.operand(1).kind == Operand::Kind::variable) {
    b.address_of(b.operand(1));
  } else {
    b.input_any(b.operand(1));
  }
  b.input(b.operand(2), Type::b32);
  b.inst.unit = Unit::alu;
  b.inst.run = run_mapa;
}

void build_getctarank(Builder& b) {
  b.expect_count(2, 2);
  b.output_any(b.operand(0));
  if (b.operand(1).kind == Operand::Kind::variable) {
    b.address_of(b.operand(1));
  } else {
    b.input_any(b.operand(1));
  }
  b.inst.pure = true;
  b.inst.unit = Unit::alu;
  b.inst.run = run_getctarank;
}

}  // namespace fovea::emulator
