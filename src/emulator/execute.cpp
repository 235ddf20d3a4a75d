// Arithmetic, comparison, selection, moves and warp-wide instructions.
#include "emulator/execute.h"

#include <cfenv>
#include <cstring>

#include "emulator/allocate.h"
#include "emulator/builders.h"

namespace fovea::emulator {
namespace {

__extension__ using u128 = unsigned __int128;

LaneArguments arguments(Warp& warp, const Inst& inst) {
  const OperandRef* operands = warp.operands(inst);
  LaneArguments x{};
  x.d = warp.row(operands[0]);
  for (u32 i = 0; i < inst.inputs && i < 3; ++i) {
    x.s[i] = warp.source(operands[inst.outputs + i]);
  }
  x.mask = warp.active;
  x.immediate = inst.immediate;
  return x;
}

int host_rounding(Rounding rounding) {
  switch (rounding) {
    case Rounding::zero: return FE_TOWARDZERO;
    case Rounding::down: return FE_DOWNWARD;
    case Rounding::up: return FE_UPWARD;
    default: return FE_TONEAREST;
  }
}

// The operation is behind a function pointer, so the compiler cannot move it across the mode
// change.
Step run_rounded(Warp& warp, const Inst& inst) {
  std::fesetround(host_rounding(inst.rounding));
  inst.lane(arguments(warp, inst));
  std::fesetround(FE_TONEAREST);
  return Step::next;
}

// The result clamped by a second operation, whose number is in `extra`.
Step run_saturated(Warp& warp, const Inst& inst) {
  std::fesetround(host_rounding(inst.rounding));
  LaneArguments x = arguments(warp, inst);
  inst.lane(x);
  std::fesetround(FE_TONEAREST);
  x.s[0] = x.d;
  lane_function(static_cast<LaneOp>(inst.extra))(x);
  return Step::next;
}

Unit unit_of(const Builder& b, Type type) {
  if (!is_float(type)) return Unit::alu;
  const std::string_view name = b.text.mnemonic;
  // Machine code has these as modifiers of the operands of what follows.
  if (name == "neg" || name == "abs") return Unit::other;
  return name == "min" || name == "max" ? Unit::alu : Unit::fma;
}

bool is_half(Type type) {
  return type == Type::f16 || type == Type::f16x2 || type == Type::bf16 || type == Type::bf16x2;
}

std::string wide_or_high(const Builder& b) {
  if (b.has("hi")) return "_hi";
  if (b.has("wide")) return "_wide";
  return {};
}

// Name of the operation in lanes.def, without its type.
std::string arithmetic_stem(const Builder& b, Type type) {
  std::string stem(b.text.mnemonic);
  if (stem == "mad" && is_float(type)) stem = "fma";
  if (stem == "mul24" || stem == "mad24") {
    stem += b.has("hi") ? "_hi" : "_lo";
  } else {
    stem += wide_or_high(b);
  }
  if (!is_float(type) && b.has("sat")) stem += "_sat";
  if (type == Type::f32 || type == Type::f32x2) {
    if (b.has("xorsign")) {
      stem += "_xorsign";
    } else if (b.has("NaN")) {
      stem += "_nan";
    } else if (b.has("ftz")) {
      stem += "_ftz";
    }
    if (b.count() == 4 && (b.text.mnemonic == "min" || b.text.mnemonic == "max")) stem += "3";
  }
  if ((type == Type::int32 || type == Type::int16x2) && b.has("relu")) stem += "_relu";
  return stem;
}

u32 lane_number(Builder& b, std::string_view name) {
  // lane() also rejects unknown names, so the pointer below is of a known operation
  const LaneFunction before = b.inst.lane;
  b.lane(name);
  const LaneFunction found = b.inst.lane;
  b.inst.lane = before;
  for (u32 i = 0; i < static_cast<u32>(LaneOp::count); ++i) {
    if (lane_function(static_cast<LaneOp>(i)) == found) return i;
  }
  return 0;
}

void saturate(Builder& b, const std::string& post) {
  b.inst.run = run_saturated;
  b.inst.extra = lane_number(b, post);
}

u32 predicate_result(Warp& warp, const Inst& inst, const OperandRef* sources) {
  LaneArguments x{};
  x.s[0] = warp.source(sources[0]);
  x.s[1] = warp.source(sources[1]);
  x.mask = warp.active;
  u32 hits = inst.lane(x);
  if ((inst.flags & 1u) != 0) {  // also the other way round: ordered "ne" is a < b or b < a
    std::swap(x.s[0], x.s[1]);
    hits |= inst.lane(x);
  }
  if ((inst.flags & 2u) != 0) hits = ~hits;
  return hits;
}

u32 combine(u32 mode, u32 hits, u32 with) {
  switch (mode) {
    case 1: return hits & with;
    case 2: return hits | with;
    case 3: return hits ^ with;
    default: return hits;
  }
}

void write_predicate(Warp& warp, const OperandRef& operand, u32 mask) {
  if (operand.kind == OperandRef::Kind::none) return;
  u32& target = warp.predicates[static_cast<u32>(operand.slot)];
  target = (target & ~warp.active) | (mask & warp.active);
}

Step run_setp(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  u32 hits = predicate_result(warp, inst, o + 2);
  u32 other = ~hits;
  if (inst.mode != 0) {
    const u32 with = warp.mask_of(o[4]);
    other = combine(inst.mode, ~hits, with);
    hits = combine(inst.mode, hits, with);
  }
  write_predicate(warp, o[0], hits);
  write_predicate(warp, o[1], other);
  return Step::next;
}

// Packed halves compare element by element: the first predicate is of the low half.
// The comparison of both halves of packed operands, o[0] and o[1]: which lanes hold, by half.
std::array<u32, 2> pair_result(Warp& warp, const Inst& inst, const OperandRef* o) {
  alignas(64) u32 a[2][32], b[2][32];
  const u32* x = static_cast<const u32*>(warp.source(o[0]));
  const u32* y = static_cast<const u32*>(warp.source(o[1]));
  for (int lane = 0; lane < 32; ++lane) {
    a[0][lane] = x[lane] & 0xffffu;
    a[1][lane] = x[lane] >> 16;
    b[0][lane] = y[lane] & 0xffffu;
    b[1][lane] = y[lane] >> 16;
  }
  std::array<u32, 2> result{};
  for (std::size_t half = 0; half < 2; ++half) {
    LaneArguments args{};
    args.s[0] = a[half];
    args.s[1] = b[half];
    u32 hits = inst.lane(args);
    if ((inst.flags & 1u) != 0) {
      std::swap(args.s[0], args.s[1]);
      hits |= inst.lane(args);
    }
    if ((inst.flags & 2u) != 0) hits = ~hits;
    if (inst.mode != 0) hits = combine(inst.mode, hits, warp.mask_of(o[2]));
    result[half] = hits;
  }
  return result;
}

Step run_setp_pair(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const std::array<u32, 2> hits = pair_result(warp, inst, o + 2);
  write_predicate(warp, o[0], hits[0]);
  write_predicate(warp, o[1], hits[1]);
  return Step::next;
}

Step run_set_pair(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const std::array<u32, 2> hits = pair_result(warp, inst, o + 1);
  for_lanes(warp.active, [&](int lane) {
    const u32 low = (hits[0] >> lane & 1u) != 0 ? static_cast<u32>(inst.immediate) : 0u;
    const u32 high = (hits[1] >> lane & 1u) != 0 ? static_cast<u32>(inst.immediate) : 0u;
    warp.set(o[0], lane, low | high << 16);
  });
  return Step::next;
}

Step run_set(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  u32 hits = predicate_result(warp, inst, o + 1);
  if (inst.mode != 0) hits = combine(inst.mode, hits, warp.mask_of(o[3]));
  for_lanes(warp.active, [&](int lane) {
    warp.set(o[0], lane, (hits >> lane & 1u) != 0 ? inst.immediate : 0u);
  });
  return Step::next;
}

// Which comparison of lanes.def, whether its operands are swapped, and the two flags above.
struct Comparison {
  std::string stem;
  bool swap = false;
  u32 flags = 0;
};

Comparison comparison(const Builder& b, Type type) {
  const bool real = is_float(type);
  if (b.has("num")) return {"nan", false, 2};
  if (b.has("nan")) return {"nan", false, 0};
  if (b.has("eq")) return {"eq", false, 0};
  if (b.has("ne")) return real ? Comparison{"lt", false, 1} : Comparison{"eq", false, 2};
  if (b.has("neu")) return {"eq", false, 2};
  if (b.has("equ")) return {"lt", false, 3};
  if (b.has("lt") || b.has("lo")) return {"lt", false, 0};
  if (b.has("le") || b.has("ls")) return {"le", false, 0};
  if (b.has("gt") || b.has("hi")) return {"lt", true, 0};
  if (b.has("ge") || b.has("hs")) return {"le", true, 0};
  if (b.has("ltu")) return {"le", true, 2};
  if (b.has("leu")) return {"lt", true, 2};
  if (b.has("gtu")) return {"le", false, 2};
  if (b.has("geu")) return {"lt", false, 2};
  b.fail("the comparison is missing.");
}

std::string compare_type(const Builder& b, const Comparison& how, Type type) {
  if (type == Type::f16x2) return "f16";
  if (type == Type::bf16x2) return "bf16";
  if (type == Type::f32 && b.has("ftz") && how.stem != "nan") return "ftz_f32";
  if (is_float(type)) return exact_name(type);
  const bool order = how.stem != "eq" && is_signed(type);
  const char* letter =
      order && !b.has("lo") && !b.has("ls") && !b.has("hi") && !b.has("hs") ? "s" : "u";
  return letter + std::to_string(8 * type_bytes(type));
}

void bind_comparison(Builder& b, Type type, const Comparison& how) {
  b.lane(how.stem + "_" + compare_type(b, how, type));
  b.inst.flags = how.flags;
  const int boolean = b.which({"and", "or", "xor"});
  b.inst.mode = static_cast<u8>(boolean + 1);
  b.inst.unit = Unit::alu;
  b.inst.pure = true;
}

void inputs(Builder& b, Type type, bool swap, std::size_t first) {
  b.input(b.operand(first + (swap ? 1 : 0)), type);
  b.input(b.operand(first + (swap ? 0 : 1)), type);
  if (b.inst.mode != 0) b.input(b.operand(first + 2), Type::pred);
}

Step run_selp(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 chosen = warp.mask_of(o[3]);
  if (inst.type == Type::b64) {
    u64* d = static_cast<u64*>(warp.row(o[0]));
    const u64* a = static_cast<const u64*>(warp.source(o[1]));
    const u64* c = static_cast<const u64*>(warp.source(o[2]));
    for_lanes(warp.active,
              [&](int lane) { d[lane] = (chosen >> lane & 1u) != 0 ? a[lane] : c[lane]; });
  } else {
    u32* d = static_cast<u32*>(warp.row(o[0]));
    const u32* a = static_cast<const u32*>(warp.source(o[1]));
    const u32* c = static_cast<const u32*>(warp.source(o[2]));
    for_lanes(warp.active,
              [&](int lane) { d[lane] = (chosen >> lane & 1u) != 0 ? a[lane] : c[lane]; });
  }
  return Step::next;
}

Step run_predicate_logic(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 a = warp.mask_of(o[1]);
  const u32 b = inst.inputs > 1 ? warp.mask_of(o[2]) : 0;
  u32 result = ~a;
  if (inst.mode == 1) result = a & b;
  if (inst.mode == 2) result = a | b;
  if (inst.mode == 3) result = a ^ b;
  if (inst.mode == 4) result = a;
  write_predicate(warp, o[0], result);
  return Step::next;
}

Step run_bfi(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bits = inst.type == Type::b64 ? 64 : 32;
  for_lanes(warp.active, [&](int lane) {
    const u64 field = warp.value(o[1], lane), base = warp.value(o[2], lane);
    const u32 position = warp.value32(o[3], lane) & 0xff, length = warp.value32(o[4], lane) & 0xff;
    const u32 kept = position >= bits ? 0 : std::min(length, bits - position);
    const u64 ones = kept >= 64 ? ~u64{0} : (u64{1} << kept) - 1;
    const u64 mask = position >= bits ? 0 : ones << position;
    warp.set(o[0], lane, (base & ~mask) | (position >= bits ? 0 : (field << position) & mask));
  });
  return Step::next;
}

// lop3.or / .and: d|p = f(a, b, c), p = (d != 0) op q
Step run_lop3_predicate(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  alignas(64) u32 result[32];
  LaneArguments x{};
  x.d = result;
  for (int i = 0; i < 3; ++i) x.s[i] = warp.source(o[2 + i]);
  x.mask = ~0u;
  x.immediate = inst.immediate;
  inst.lane(x);
  u32 hits = 0;
  for (int lane = 0; lane < 32; ++lane) hits |= result[lane] != 0 ? 1u << lane : 0u;
  const u32 with = warp.mask_of(o[5]);
  write_predicate(warp, o[1], inst.mode == 1 ? hits | with : hits & with);
  if (o[0].kind != OperandRef::Kind::none) {
    for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, result[lane]); });
  }
  return Step::next;
}

// mode: 0 add, 1 sub, 2 mad.lo, 3 mad.hi; flags: 1 reads the carry, 2 writes it
Step run_carry(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const bool wide = type_bytes(inst.type) == 8;
  const u64 limit = wide ? ~u64{0} : 0xffffffffu;
  u32& carry = warp.carry[0];
  for_lanes(warp.active, [&](int lane) {
    u64 a = warp.value(o[1], lane) & limit, b = warp.value(o[2], lane) & limit;
    if (inst.mode >= 2) {
      const auto product = static_cast<u128>(a) * b;
      u64 part = static_cast<u64>(product);
      if (inst.mode == 3) part = wide ? static_cast<u64>(product >> 64) : part >> 32;
      if (inst.mode == 3 && is_signed(inst.type)) {
        const u32 top = wide ? 63 : 31;
        part -= ((a >> top & 1) != 0 ? b : 0) + ((b >> top & 1) != 0 ? a : 0);
      }
      a = part & limit;
      b = warp.value(o[3], lane) & limit;
    }
    const u64 in = (inst.flags & 1u) != 0 ? carry >> lane & 1u : 0u;
    u64 result = 0;
    bool out = false;
    if (inst.mode == 1) {
      result = (a - b - in) & limit;
      out = static_cast<u128>(a) < static_cast<u128>(b) + in;
    } else {
      result = (a + b + in) & limit;
      out = static_cast<u128>(a) + b + in > limit;
    }
    warp.set(o[0], lane, result);
    if ((inst.flags & 2u) != 0) carry = (carry & ~(1u << lane)) | static_cast<u32>(out) << lane;
  });
  return Step::next;
}

Step run_testp(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  LaneArguments x{};
  x.s[0] = x.s[1] = warp.source(o[1]);
  write_predicate(warp, o[0], inst.lane(x));
  return Step::next;
}

void mark_lane(Builder& b, Unit unit) {
  b.inst.pure = true;
  b.inst.unit = unit;
  if (b.inst.run == nullptr) b.inst.run = run_lane;
}

}  // namespace

Step run_lane(Warp& warp, const Inst& inst) {
  inst.lane(arguments(warp, inst));
  return Step::next;
}

void build_carry(Builder& b) {
  const Type type = b.type(0);
  const std::string_view name = b.text.mnemonic;
  const bool multiply = name == "madc" || name == "mad";
  b.expect_count(multiply ? 4 : 3, multiply ? 4 : 3);
  b.output(b.operand(0), type);
  for (std::size_t i = 1; i < b.count(); ++i) b.input(b.operand(i), type);
  b.inst.mode = static_cast<u8>(multiply ? (b.has("hi") ? 3 : 2) : name.substr(0, 3) == "sub");
  b.inst.flags = (name.size() == 4 ? 1u : 0u) | (b.has("cc") ? 2u : 0u);
  b.inst.type = type;
  b.inst.run = run_carry;
  mark_lane(b, Unit::alu);
}

void build_arithmetic(Builder& b) {
  const Type type = b.type(0);
  if (b.has("cc")) {
    build_carry(b);
    return;
  }
  const std::string_view name = b.text.mnemonic;
  const bool three = name == "mad" || name == "fma" || name == "mad24" || name == "sad" ||
                     ((name == "min" || name == "max") && b.count() == 4);
  const std::size_t sources = name == "abs" || name == "neg" ? 1 : three ? 3 : 2;
  b.expect_count(sources + 1, sources + 1);
  Type result = type;
  if (b.has("wide")) result = type_bytes(type) == 2 ? Type::b32 : Type::b64;
  b.output(b.operand(0), result);
  for (std::size_t i = 1; i <= sources; ++i) b.input(b.operand(i), i == 3 ? result : type);
  const std::string stem = arithmetic_stem(b, type);
  Type named = type;
  if ((name == "neg" || name == "abs") && (type == Type::bf16 || type == Type::bf16x2)) {
    named = type == Type::bf16 ? Type::f16 : Type::f16x2;
  }
  if (b.has_lane(stem + "_" + exact_name(named))) {
    b.lane(stem + "_" + exact_name(named));
  } else {
    b.lane(stem + "_" + unsigned_name(named));
  }
  if (is_half(type)) b.inst.immediate = (b.has("NaN") ? 1u : 0u) | (b.has("xorsign") ? 2u : 0u);
  b.inst.rounding = b.rounding();
  if (b.inst.rounding != Rounding::nearest_even) b.inst.run = run_rounded;
  if (is_float(type) && b.has("sat")) saturate(b, "saturate_" + exact_name(type));
  if (is_float(type) && b.has("relu")) saturate(b, "relu_" + exact_name(type));
  const bool divide = name == "div" && is_float(type) && type == Type::f32;
  mark_lane(b, divide ? Unit::mufu : unit_of(b, type));
}

void build_logic(Builder& b) {
  const Type type = b.type(0);
  const std::string name(b.text.mnemonic);
  const std::size_t sources = name == "not" || name == "cnot" ? 1 : 2;
  const bool shift = name == "shl" || name == "shr";
  b.expect_count(sources + 1, sources + 1);
  b.output(b.operand(0), type);
  b.input(b.operand(1), type);
  if (sources == 2) b.input(b.operand(2), shift ? Type::b32 : type);
  if (type == Type::pred) {
    b.inst.run = run_predicate_logic;
    b.inst.mode = name == "and" ? 1 : name == "or" ? 2 : name == "xor" ? 3 : 0;
  } else if (name == "shr") {
    b.lane("shr_" + std::string(is_signed(type) ? "s" : "u") +
           std::to_string(8 * type_bytes(type)));
  } else {
    b.lane(name + "_" + bits_name(type));
  }
  mark_lane(b, Unit::alu);
}

void build_funnel(Builder& b) {
  b.expect_count(4, 4);
  b.output(b.operand(0), Type::b32);
  for (std::size_t i = 1; i < 4; ++i) b.input(b.operand(i), Type::b32);
  b.lane(std::string("shf_") + (b.has("l") ? "l" : "r") + (b.has("wrap") ? "_wrap" : "_clamp"));
  mark_lane(b, Unit::alu);
}

void build_lop3(Builder& b) {
  const int boolean = b.which({"or", "and"});
  b.expect_count(boolean < 0 ? 5 : 7, boolean < 0 ? 5 : 7);
  const std::size_t first = boolean < 0 ? 1 : 2;
  b.output(b.operand(0), Type::b32);
  if (boolean >= 0) b.output(b.operand(1), Type::pred);
  for (std::size_t i = 0; i < 3; ++i) b.input(b.operand(first + i), Type::b32);
  b.inst.immediate = static_cast<u32>(b.integer(b.operand(first + 3)));
  if (boolean >= 0) {
    b.input(b.operand(first + 4), Type::pred);
    b.inst.mode = boolean == 0 ? 1 : 2;
    b.inst.run = run_lop3_predicate;
  }
  b.lane("lop3_b32");
  mark_lane(b, Unit::alu);
}

void build_prmt(Builder& b) {
  b.expect_count(4, 4);
  b.output(b.operand(0), Type::b32);
  for (std::size_t i = 1; i < 4; ++i) b.input(b.operand(i), Type::b32);
  b.inst.immediate = static_cast<u32>(b.which({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}) + 1);
  b.lane("prmt_b32");
  mark_lane(b, Unit::alu);
}

void build_bits(Builder& b) {
  const Type type = b.type(0);
  const std::string name(b.text.mnemonic);
  const bool narrow = name == "popc" || name == "clz" || name == "bfind";
  b.output(b.operand(0), narrow ? Type::b32 : type);
  for (std::size_t i = 1; i < b.count(); ++i) b.input(b.operand(i), i == 1 ? type : Type::b32);
  b.inst.immediate = b.has("shiftamt") || b.has("wrap") ? 1u : 0u;
  const std::size_t sources = name == "bfe" || name == "fns"      ? 3
                              : name == "szext" || name == "bmsk" ? 2
                                                                  : 1;
  b.expect_count(sources + 1, sources + 1);
  b.lane(name + "_" + exact_name(type));
  mark_lane(b, Unit::alu);
}

void build_bfi(Builder& b) {
  b.expect_count(5, 5);
  b.inst.type = b.type(0);
  b.output(b.operand(0), b.type(0));
  b.input(b.operand(1), b.type(0));
  b.input(b.operand(2), b.type(0));
  b.input(b.operand(3), Type::b32);
  b.input(b.operand(4), Type::b32);
  b.inst.run = run_bfi;
  mark_lane(b, Unit::alu);
}

void build_dot(Builder& b) {
  b.expect_count(4, 4);
  b.output(b.operand(0), Type::b32);
  for (std::size_t i = 1; i < 4; ++i) b.input(b.operand(i), Type::b32);
  b.inst.immediate =
      (is_signed(b.type(0)) ? 1u : 0u) | (is_signed(b.type(1)) ? 2u : 0u) | (b.has("hi") ? 4u : 0u);
  b.lane(b.text.mnemonic);
  mark_lane(b, Unit::alu);
}

void build_function(Builder& b) {
  b.expect_count(2, 2);
  const Type type = b.type(0);
  b.output(b.operand(0), type);
  b.input(b.operand(1), type);
  std::string stem(b.text.mnemonic);
  if (b.has("ftz") && b.has_lane(stem + "_ftz_" + exact_name(type))) stem += "_ftz";
  b.lane(stem + "_" + exact_name(type));
  b.inst.rounding = b.rounding();
  if (b.inst.rounding != Rounding::nearest_even) b.inst.run = run_rounded;
  mark_lane(b, Unit::mufu);
}

void build_testp(Builder& b) {
  b.expect_count(2, 2);
  b.output(b.operand(0), Type::pred);
  b.input(b.operand(1), b.type(0));
  constexpr std::array<const char*, 6> names{"finite",     "infinite", "number",
                                             "notanumber", "normal",   "subnormal"};
  const int which = b.which({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  if (which < 0) b.fail("testp needs a class such as .finite.");
  b.lane(std::string("testp_") + names[static_cast<std::size_t>(which)] +
         (b.type(0) == Type::f64 ? "_d" : ""));
  b.inst.run = run_testp;
  mark_lane(b, Unit::alu);
}

void build_setp(Builder& b) {
  const Type type = b.type(b.types.empty() ? 0 : b.types.size() - 1);
  const Comparison how = comparison(b, type);
  const bool boolean = b.which({"and", "or", "xor"}) >= 0;
  // p|q are two operands in the list
  const std::size_t inputs_count = boolean ? 3 : 2;
  b.expect_count(1 + inputs_count, 2 + inputs_count);
  const bool two = b.count() == 2 + inputs_count;
  b.output(b.operand(0), Type::pred);
  if (two) {
    b.output(b.operand(1), Type::pred);
  } else {
    b.none_output();
  }
  bind_comparison(b, type, how);
  inputs(b, type, how.swap, two ? 2 : 1);
  b.inst.run = type == Type::f16x2 || type == Type::bf16x2 ? run_setp_pair : run_setp;
}

void build_set(Builder& b) {
  const Type result = b.type(0), type = b.type(b.types.size() - 1);
  const Comparison how = comparison(b, type);
  const bool packed = type == Type::f16x2 || type == Type::bf16x2;
  if (packed && result != type) b.fail("set of packed halves gives packed halves only.");
  b.output(b.operand(0), result);
  bind_comparison(b, type, how);
  inputs(b, type, how.swap, 1);
  const bool half = result == Type::f16 || result == Type::f16x2;
  const bool brain = result == Type::bf16 || result == Type::bf16x2;
  b.inst.immediate = result == Type::f32 ? 0x3f800000u : half ? 0x3c00u : brain ? 0x3f80u : ~0u;
  b.inst.run = packed ? run_set_pair : run_set;
}

void build_selp(Builder& b) {
  b.expect_count(4, 4);
  const Type type = b.type(0);
  b.inst.type = type_bytes(type) == 8 ? Type::b64 : Type::b32;
  b.output(b.operand(0), type);
  b.input(b.operand(1), type);
  b.input(b.operand(2), type);
  b.input(b.operand(3), Type::pred);
  b.inst.run = run_selp;
  mark_lane(b, Unit::alu);
}

void build_slct(Builder& b) {
  b.expect_count(4, 4);
  const Type type = b.type(0), by = b.type(1);
  b.output(b.operand(0), type);
  b.input(b.operand(1), type);
  b.input(b.operand(2), type);
  b.input(b.operand(3), by);
  const char* const stem = by != Type::f32 ? "slct_" : b.has("ftz") ? "slct_ftz_f32_" : "slct_f32_";
  b.lane(stem + bits_name(type));
  mark_lane(b, Unit::alu);
}

}  // namespace fovea::emulator
