// One warp: operands, fragments of lanes, divergence and reconvergence, the instruction loop.
#include <algorithm>
#include <cstring>

#include "emulator/execute.h"

namespace fovea::emulator {

void* Warp::row(const OperandRef& operand) { return registers + operand.slot; }

const void* Warp::source(const OperandRef& operand) const {
  if (operand.kind == OperandRef::Kind::constant) {
    return reinterpret_cast<const u8*>(program->constants.data()) + operand.slot;
  }
  return registers + operand.slot;
}

u64 Warp::value(const OperandRef& operand, int lane) const {
  const u8* base = static_cast<const u8*>(source(operand));
  if (operand.words >= 2) {
    u64 result = 0;
    std::memcpy(&result, base + lane * (4 * operand.words), 8);
    return result;
  }
  u32 result = 0;
  std::memcpy(&result, base + lane * 4, 4);
  return result;
}

u32 Warp::value32(const OperandRef& operand, int lane) const {
  u32 result = 0;
  std::memcpy(&result, static_cast<const u8*>(source(operand)) + lane * (4 * operand.words), 4);
  return result;
}

void Warp::set(const OperandRef& operand, int lane, u64 value) {
  u8* base = registers + operand.slot + lane * (4 * operand.words);
  if (operand.words >= 2) {
    std::memcpy(base, &value, 8);
  } else {
    const u32 low = static_cast<u32>(value);
    std::memcpy(base, &low, 4);
  }
}

u64 Warp::address(const OperandRef& operand, int lane) const {
  u64 base = 0;
  if (operand.slot >= 0) {
    u32 low = 0;
    if (operand.words == 2) {
      std::memcpy(&base, registers + operand.slot + lane * 8, 8);
    } else {
      std::memcpy(&low, registers + operand.slot + lane * 4, 4);
      base = low;
    }
  }
  if (operand.shared_base) base += u64{cta->rank} << kRankShift;
  return base + static_cast<u64>(operand.offset);
}

i32 Warp::new_join(u32 pc, const Fragment& fragment) {
  std::size_t i = 0;
  while (i < joins.size() && joins[i].used) ++i;
  if (i == joins.size()) joins.emplace_back();
  joins[i] = {pc, fragment.mask, 0, fragment.join, true, fragment.returns};
  return static_cast<i32>(i);
}

void Warp::split(u32 taken, u32 target, u32 rest, u32 join) {
  Fragment& fragment = fragments[current];
  if (taken == fragment.mask) {
    fragment.pc = target;
    return;
  }
  if (taken == 0 || target == rest) {
    fragment.pc = rest;
    return;
  }
  i32 meeting = fragment.join;
  const bool same = meeting >= 0 && joins[static_cast<std::size_t>(meeting)].pc == join &&
                    joins[static_cast<std::size_t>(meeting)].returns == fragment.returns;
  if (join != ~0u && !same) meeting = new_join(join, fragment);
  Fragment other = fragment;
  other.mask = fragment.mask & ~taken;
  other.pc = rest;
  other.join = meeting;
  fragment.mask = taken;
  fragment.pc = target;
  fragment.join = meeting;
  fragments.push_back(std::move(other));
}

// When the lanes expected at a join are all there, they go on as one fragment.
void Warp::release_join(i32 which) {
  Join& join = joins[static_cast<std::size_t>(which)];
  if (join.arrived != join.waiting_for) return;
  const i32 parent = join.parent;
  if (join.waiting_for != 0) {
    Fragment merged;
    merged.pc = join.pc;
    merged.mask = join.arrived;
    merged.join = parent;
    merged.returns = join.returns;
    fragments.push_back(std::move(merged));
  }
  join.used = false;
}

void Warp::arrive_join() {
  Fragment arriving = std::move(fragments[current]);
  Join& join = joins[static_cast<std::size_t>(arriving.join)];
  join.arrived |= arriving.mask;
  if (join.arrived == join.waiting_for) {
    arriving.mask = join.arrived;
    arriving.join = join.parent;
    arriving.blocked = false;
    join.used = false;
    fragments[current] = std::move(arriving);
    return;
  }
  fragments.erase(fragments.begin() + static_cast<std::ptrdiff_t>(current));
  current = 0;
}

void Warp::exit_lanes(u32 mask) {
  Fragment& fragment = fragments[current];
  live &= ~mask;
  fragment.mask &= ~mask;
  fragment.pc += 1;
  const bool empty = fragment.mask == 0;
  i32 join = fragment.join;
  if (empty) {
    fragments.erase(fragments.begin() + static_cast<std::ptrdiff_t>(current));
    current = 0;
  }
  // Nobody waits for lanes that have left; a join may be complete without them.
  while (join >= 0) {
    Join& at = joins[static_cast<std::size_t>(join)];
    const i32 parent = at.parent;
    at.waiting_for &= ~mask;
    if (at.waiting_for == at.arrived) release_join(join);
    join = parent;
  }
  if (live == 0) {
    --cta->live_warps;
    cluster->changed();
  }
}

bool Warp::runnable() const {
  for (const Fragment& fragment : fragments) {
    if (!fragment.blocked || fragment.blocked_at != cluster->changes) return true;
  }
  return false;
}

// Prefers the fragment that comes first in the text, and merges fragments that have met at one
// instruction on the same way out.
bool Warp::pick_fragment() {
  if (fragments.empty()) return false;
  for (std::size_t i = 0; i + 1 < fragments.size(); ++i) {
    for (std::size_t j = i + 1; j < fragments.size();) {
      Fragment& a = fragments[i];
      Fragment& b = fragments[j];
      if (a.pc == b.pc && a.join == b.join && a.token == 0 && b.token == 0 &&
          a.returns == b.returns) {
        a.mask |= b.mask;
        a.blocked = false;
        fragments.erase(fragments.begin() + static_cast<std::ptrdiff_t>(j));
      } else {
        ++j;
      }
    }
  }
  std::size_t best = fragments.size();
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    if (fragments[i].blocked && fragments[i].blocked_at == cluster->changes) continue;
    if (best == fragments.size() || fragments[i].pc < fragments[best].pc) best = i;
  }
  if (best == fragments.size()) return false;
  // Lanes that spin on others of their own warp must not starve them.
  if (fragments.size() > 1 && ++picks % 64 == 0) {
    const std::size_t turn = picks / 64 % fragments.size();
    if (!fragments[turn].blocked || fragments[turn].blocked_at != cluster->changes) best = turn;
  }
  current = best;
  return true;
}

bool Warp::step() {
  Fragment& fragment = fragments[current];
  const Inst& inst = program->code[fragment.pc];
  u32 mask = fragment.mask;
  if (inst.guard >= 0) {
    const u32 guard = predicates[static_cast<u32>(inst.guard)];
    mask &= inst.guard_not ? ~guard : guard;
  }
  const bool checks = launch->checks;
  if (mask == 0) {
    ++fragment.pc;
    return true;
  }
  active = mask;
  if (checks) check_registers_before(*this, inst);
  const u32 pc = fragment.pc;
  const bool retried = fragment.blocked;
  switch (inst.run(*this, inst)) {
    case Step::next:
      if (checks) check_registers_after(*this, inst);
      fragments[current].pc = pc + 1;
      fragments[current].blocked = false;
      break;
    case Step::jumped: fragments[current].blocked = false; break;
    case Step::blocked:
      fragments[current].blocked = true;
      fragments[current].blocked_at = cluster->changes;
      if (!retried) ++counters.barrier_blocks;
      return false;
    case Step::gone: break;
  }
  ++sequence;
  ++launch->steps;
  ++counters.warp_instructions;
  const u64 lanes = static_cast<u64>(std::popcount(mask));
  switch (inst.unit) {
    case Unit::alu: counters.alu_lanes += lanes; break;
    case Unit::fma: counters.fma_lanes += lanes; break;
    case Unit::mufu: counters.mufu_lanes += lanes; break;
    default: counters.other_lanes += lanes; break;
  }
  return true;
}

bool Warp::run(u64 quantum) {
  bool worked = false;
  turn_over = false;
  while (quantum > 0 && !launch->stopped && !turn_over) {
    if (!pick_fragment()) break;
    bool go_on = true;
    while (quantum > 0 && go_on && !launch->stopped && !turn_over) {
      --quantum;
      const Fragment& fragment = fragments[current];
      const bool at_join =
          fragment.join >= 0 && joins[static_cast<std::size_t>(fragment.join)].pc == fragment.pc &&
          joins[static_cast<std::size_t>(fragment.join)].returns == fragment.returns;
      const std::size_t before = fragments.size();
      if (at_join) {
        arrive_join();
        worked = true;
      } else if (step()) {
        worked = true;
      } else {
        go_on = false;
      }
      if (fragments.size() != before || fragments.size() > 1) go_on = false;
      if (fragments.empty()) return worked;
    }
  }
  return worked;
}

void Warp::fault(FaultKind kind, const Inst& inst, int lane, const std::string& sentence) {
  launch->fault(kind, cta, static_cast<int>(index), lane, &inst, "warp " + std::to_string(index),
                sentence);
}

}  // namespace fovea::emulator
