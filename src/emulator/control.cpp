// Branches, calls, exit, and instructions in which the lanes of a warp talk to each other.
#include <bit>

#include "emulator/allocate.h"
#include "emulator/builders.h"
#include "emulator/execute.h"
#include "emulator/system_call.h"

namespace fovea::emulator {
namespace {

Step run_branch(Warp& warp, const Inst& inst) {
  warp.branch(inst, warp.active);
  return Step::jumped;
}

// Lanes that agree on a target go there together; the rest comes back to this instruction.
Step run_branch_table(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const int first = warp.first_lane();
  const u32 index = warp.value32(o[0], first);
  if (index >= inst.extra) {
    warp.fault(FaultKind::out_of_bounds, inst, first,
               "brx.idx takes entry " + std::to_string(index) + " of a table of " +
                   std::to_string(inst.extra) + ".");
    return Step::next;
  }
  u32 same = 0;
  for_lanes(warp.active, [&](int lane) {
    if (warp.value32(o[0], lane) == index) same |= 1u << lane;
  });
  // The others take this instruction again.
  warp.split(same, static_cast<u32>(o[1 + index].offset), warp.fragment().pc, inst.join);
  return Step::jumped;
}

Step run_call(Warp& warp, const Inst& inst) {
  Fragment& fragment = warp.fragment();
  if (warp.active != fragment.mask) {
    warp.fault(FaultKind::divergent, inst, warp.first_lane(), "a guarded call diverges.");
    return Step::next;
  }
  fragment.returns.push_back(fragment.pc + 1);
  if (fragment.returns.size() > 64) {
    warp.fault(FaultKind::resources, inst, warp.first_lane(),
               "calls are nested more than 64 deep.");
    warp.launch->stopped = true;
  }
  fragment.pc = inst.target;
  return Step::jumped;
}

Step run_return(Warp& warp, const Inst& inst) {
  warp.branch(inst, warp.active);
  return Step::jumped;
}

Step run_exit(Warp& warp, const Inst&) {
  warp.exit_lanes(warp.active);
  return Step::gone;
}

Step run_trap(Warp& warp, const Inst& inst) {
  warp.fault(FaultKind::trap, inst, warp.first_lane(),
             "the kernel executed " + std::string(inst.text->mnemonic) + ".");
  warp.launch->stopped = true;
  return Step::next;
}

Step run_nothing(Warp&, const Inst&) { return Step::next; }

// All lanes named by a member mask must be here together.
bool members_present(Warp& warp, const OperandRef& mask_operand) {
  const u32 members = warp.value32(mask_operand, warp.first_lane());
  const u32 wanted = members & warp.live;
  if ((wanted & ~warp.active) == 0) return true;
  // Lanes may be on their way: let the other fragments of this warp run first. Fragments that meet
  // at one instruction are merged by the scheduler.
  for (const Fragment& fragment : warp.fragments) {
    if (&fragment != &warp.fragment() && !fragment.blocked) return false;
  }
  return true;
}

// Lanes of a member mask that are not here are a fault. That orders no memory.
void report_absent(Warp& warp, const Inst& inst, const OperandRef& mask_operand) {
  if (!warp.launch->checks) return;
  const u32 members = warp.value32(mask_operand, warp.first_lane());
  const u32 absent = members & warp.live & ~warp.active;
  if (absent != 0) {
    warp.fault(FaultKind::divergent, inst, std::countr_zero(absent),
               "lane " + std::to_string(std::countr_zero(absent)) +
                   " is named by the member mask " + hex(members) + " but is not here.");
  }
}

int shuffle_source(int lane, u32 mode, u32 b, u32 c, bool& valid) {
  const int clamp = static_cast<int>(c & 31u), segment = static_cast<int>(c >> 8 & 31u);
  const int low = lane & segment;
  const int high = low | (clamp & ~segment);
  const int by = static_cast<int>(b & 31u);
  int from = lane;
  switch (mode) {
    case 0:
      from = lane - by;
      valid = from >= high;
      break;
    case 1:
      from = lane + by;
      valid = from <= high;
      break;
    case 2:
      from = lane ^ by;
      valid = from <= high;
      break;
    default:
      from = low | (by & ~segment);
      valid = from <= high;
      break;
  }
  return valid ? from : lane;
}

Step run_shuffle(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  if (!members_present(warp, o[5])) return Step::blocked;
  report_absent(warp, inst, o[5]);
  u32 result[32], valid_mask = 0;
  for_lanes(warp.active, [&](int lane) {
    bool valid = false;
    const int from =
        shuffle_source(lane, inst.mode, warp.value32(o[3], lane), warp.value32(o[4], lane), valid);
    if (valid) valid_mask |= 1u << lane;
    result[lane] = warp.value32(o[2], from);
    if (warp.launch->checks && o[2].vreg >= 0 && (warp.active >> from & 1u) == 0) {
      warp.fault(FaultKind::uninitialised, inst, lane,
                 "shfl reads lane " + std::to_string(from) + ", which does not take part.");
    }
  });
  for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, result[lane]); });
  if (o[1].kind != OperandRef::Kind::none) {
    u32& p = warp.predicates[static_cast<u32>(o[1].slot)];
    p = (p & ~warp.active) | valid_mask;
  }
  return Step::next;
}

Step run_vote(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  if (!members_present(warp, o[2])) return Step::blocked;
  report_absent(warp, inst, o[2]);
  const u32 votes = warp.mask_of(o[1]) & warp.active;
  if (inst.mode == 3) {
    for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, votes); });
    return Step::next;
  }
  bool result = votes == warp.active;
  if (inst.mode == 1) result = votes != 0;
  if (inst.mode == 2) result = votes == warp.active || votes == 0;
  u32& p = warp.predicates[static_cast<u32>(o[0].slot)];
  p = (p & ~warp.active) | (result ? warp.active : 0u);
  return Step::next;
}

Step run_match(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  if (!members_present(warp, o[3])) return Step::blocked;
  report_absent(warp, inst, o[3]);
  u32 result[32], same_for_all = 0;
  for_lanes(warp.active, [&](int lane) {
    u32 same = 0;
    for_lanes(warp.active, [&](int other) {
      if (warp.value(o[2], other) == warp.value(o[2], lane)) same |= 1u << other;
    });
    result[lane] = same;
    if (same == warp.active) same_for_all |= 1u << lane;
  });
  for_lanes(warp.active, [&](int lane) {
    const bool all = (same_for_all >> lane & 1u) != 0;
    warp.set(o[0], lane, inst.mode == 0 ? result[lane] : all ? warp.active : 0u);
  });
  if (o[1].kind != OperandRef::Kind::none) {
    u32& p = warp.predicates[static_cast<u32>(o[1].slot)];
    p = (p & ~warp.active) | same_for_all;
  }
  return Step::next;
}

u32 reduce_pair(u32 mode, Type type, u32 a, u32 b) {
  const bool less = is_signed(type) ? static_cast<i32>(a) < static_cast<i32>(b) : a < b;
  switch (mode) {
    case 0: return a + b;
    case 1: return less ? a : b;
    case 2: return less ? b : a;
    case 3: return a & b;
    case 4: return a | b;
    default: return a ^ b;
  }
}

u32 reduce_float(const Inst& inst, u32 a, u32 b) {
  float x = std::bit_cast<float>(a), y = std::bit_cast<float>(b);
  if ((inst.flags & 1u) != 0) {
    x = std::fabs(x);
    y = std::fabs(y);
  }
  if (x != x || y != y) {
    const bool both = x != x && y != y;
    if ((inst.flags & 2u) != 0 || both) return 0x7fffffffu;
    return std::bit_cast<u32>(x != x ? y : x);
  }
  return std::bit_cast<u32>(inst.mode == 1 ? std::fmin(x, y) : std::fmax(x, y));
}

Step run_redux(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  if (!members_present(warp, o[2])) return Step::blocked;
  report_absent(warp, inst, o[2]);
  const int first = warp.first_lane();
  u32 result = warp.value32(o[1], first);
  if (inst.type == Type::f32) result = reduce_float(inst, result, result);
  for_lanes(warp.active & ~(1u << first), [&](int lane) {
    const u32 value = warp.value32(o[1], lane);
    result = inst.type == Type::f32 ? reduce_float(inst, result, value)
                                    : reduce_pair(inst.mode, inst.type, result, value);
  });
  for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, result); });
  return Step::next;
}

Step run_activemask(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, warp.active); });
  return Step::next;
}

// The lowest lane of the member mask is the leader.
Step run_elect(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  if (!members_present(warp, o[2])) return Step::blocked;
  report_absent(warp, inst, o[2]);
  if (warp.launch->checks) check_lanes_meet(warp);  // what others' kernels count on
  const u32 members = warp.value32(o[2], warp.first_lane()) & warp.active;
  const int leader = members != 0 ? std::countr_zero(members) : warp.first_lane();
  if (o[0].kind != OperandRef::Kind::none) {
    for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, static_cast<u32>(leader)); });
  }
  u32& p = warp.predicates[static_cast<u32>(o[1].slot)];
  p = (p & ~warp.active) | (1u << leader & warp.active);
  return Step::next;
}

}  // namespace

// The end of a kernel's text: lanes that get here leave.
Step end_of_entry(Warp& warp, const Inst&) {
  warp.exit_lanes(warp.active);
  return Step::gone;
}

Step end_of_function(Warp& warp, const Inst&) {
  Fragment& fragment = warp.fragment();
  fragment.pc = fragment.returns.back();
  fragment.returns.pop_back();
  return Step::jumped;
}

void build_branch(Builder& b) {
  b.expect_count(1, 1);
  if (b.operand(0).kind != Operand::Kind::label) b.fail("a branch needs a label.");
  b.inst.target = b.label(b.operand(0));
  b.inst.unit = Unit::control;
  b.inst.mode = kBranchMode;
  b.inst.run = run_branch;
}

void build_branch_table(Builder& b) {
  b.expect_count(2, 2);
  if (b.operand(1).kind != Operand::Kind::vector) b.fail("brx.idx needs a list of targets.");
  b.input(b.operand(0), Type::b32);
  b.add_table(b.operand(1));
  b.inst.unit = Unit::control;
  b.inst.mode = kTableMode;
  b.inst.run = run_branch_table;
}

// Parameters travel in .param variables, which both sides place in the same frame.
void build_call(Builder& b) {
  const Operand& callee = b.operand(b.operand(0).kind == Operand::Kind::vector ? 1 : 0);
  if (callee.kind != Operand::Kind::function) {
    b.fail("'" + std::string(callee.text) +
           "' is not a function of this module; indirect calls "
           "are not supported.");
  }
  if (build_system_call(b, callee.text)) return;
  b.call_target(callee);
  b.inst.unit = Unit::control;
  b.inst.mode = kCallMode;
  b.inst.run = run_call;
}

void build_ret(Builder& b) {
  b.expect_count(0, 0);
  b.inst.unit = Unit::control;
  if (b.in_entry()) {
    b.inst.mode = kExitMode;
    b.inst.run = run_exit;
  } else {
    b.inst.mode = kReturnMode;
    b.inst.run = run_return;
  }
}

void build_exit(Builder& b) {
  b.expect_count(0, 0);
  b.inst.unit = Unit::control;
  b.inst.mode = kExitMode;
  b.inst.run = run_exit;
}

void build_trap(Builder& b) { b.inst.run = run_trap; }

void build_nothing(Builder& b) { b.inst.run = run_nothing; }

void build_unsupported(Builder& b) {
  b.fail(std::string(b.text.mnemonic) + " is not supported by this emulator.");
}

void build_shuffle(Builder& b) {
  b.expect_count(5, 6);
  const bool with_predicate = b.count() == 6;
  const std::size_t first = with_predicate ? 2 : 1;
  b.output(b.operand(0), Type::b32);
  if (with_predicate) {
    b.output(b.operand(1), Type::pred);
  } else {
    b.none_output();
  }
  for (std::size_t i = 0; i < 4; ++i) b.input(b.operand(first + i), Type::b32);
  const int mode = b.which({"up", "down", "bfly", "idx"});
  if (mode < 0) b.fail("shfl needs a mode such as .bfly.");
  b.inst.mode = static_cast<u8>(mode);
  b.inst.unit = Unit::alu;
  b.inst.pure = true;
  b.inst.run = run_shuffle;
}

void build_vote(Builder& b) {
  b.expect_count(3, 3);
  const int mode = b.which({"all", "any", "uni", "ballot"});
  if (mode < 0) b.fail("vote needs a mode such as .any.");
  b.inst.mode = static_cast<u8>(mode);
  b.output(b.operand(0), mode == 3 ? Type::b32 : Type::pred);
  b.input(b.operand(1), Type::pred);
  b.input(b.operand(2), Type::b32);
  b.inst.unit = Unit::alu;
  b.inst.run = run_vote;
}

void build_match(Builder& b) {
  const bool all = b.has("all");
  const bool with_predicate = b.count() == 4;
  b.output(b.operand(0), Type::b32);
  if (with_predicate) {
    b.output(b.operand(1), Type::pred);
  } else {
    b.none_output();
  }
  b.input(b.operand(with_predicate ? 2 : 1), b.type(0));
  b.input(b.operand(with_predicate ? 3 : 2), Type::b32);
  b.inst.mode = all ? 1 : 0;
  b.inst.unit = Unit::alu;
  b.inst.run = run_match;
}

void build_redux(Builder& b) {
  b.expect_count(3, 3);
  const int mode = b.which({"add", "min", "max", "and", "or", "xor"});
  if (mode < 0) b.fail("redux needs an operation.");
  b.inst.mode = static_cast<u8>(mode);
  b.inst.type = b.type(0);
  b.inst.flags = (b.has("abs") ? 1u : 0u) | (b.has("NaN") ? 2u : 0u);
  b.output(b.operand(0), Type::b32);
  b.input(b.operand(1), Type::b32);
  b.input(b.operand(2), Type::b32);
  b.inst.unit = Unit::alu;
  b.inst.run = run_redux;
}

void build_activemask(Builder& b) {
  b.expect_count(1, 1);
  b.output(b.operand(0), Type::b32);
  b.inst.run = run_activemask;
}

void build_elect(Builder& b) {
  b.expect_count(3, 3);
  b.output(b.operand(0), Type::b32);
  b.output(b.operand(1), Type::pred);
  b.input(b.operand(2), Type::b32);
  b.inst.run = run_elect;
}

}  // namespace fovea::emulator
