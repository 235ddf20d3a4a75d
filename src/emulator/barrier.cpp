// Named barriers, cluster barriers, mbarriers, and the register pool of setmaxnreg.
#include <algorithm>

#include "emulator/async.h"
#include "emulator/builders.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

constexpr i64 kMaxTransactions = (1 << 20) - 1;

// ---- named barriers. A warp arrives once and waits for the generation to end.

enum BarMode : u8 { bar_sync, bar_arrive, bar_red };

u32 barrier_number(Warp& warp, const Inst& inst, const OperandRef& operand) {
  const u32 id = warp.value32(operand, warp.first_lane());
  if (id < 16) return id;
  warp.fault(FaultKind::bad_argument, inst, -1,
             "barrier " + std::to_string(id) + " does not exist; there are 16.");
  warp.launch->stopped = true;
  return 0;
}

void end_generation(Cta& cta, NamedBarrier& barrier) {
  barrier.arrived = 0;
  barrier.expected = 0;
  ++barrier.generation;
  barrier.done = barrier.arriving;
  barrier.arriving.clear();
  barrier.result_and = barrier.reduce_and;
  barrier.result_or = barrier.reduce_or;
  barrier.result_count = barrier.reduce_count;
  barrier.reduce_and = ~0u;
  barrier.reduce_or = 0;
  barrier.reduce_count = 0;
  cta.cluster->changed();
}

void arrive_named(Warp& warp, const Inst& inst, NamedBarrier& barrier, u32 id, u32 expected) {
  const u32 count = inst.aligned ? 32u : static_cast<u32>(std::popcount(warp.active));
  if (barrier.arrived != 0 && barrier.expected != expected) {
    warp.fault(FaultKind::barrier_misuse, inst, -1,
               "barrier " + std::to_string(id) + " is used with " + std::to_string(expected) +
                   " threads while others use it with " + std::to_string(barrier.expected) + ".");
  }
  if (expected % 32 != 0) {
    warp.fault(
        FaultKind::bad_argument, inst, -1,
        "a barrier's thread count must be a multiple of 32, not " + std::to_string(expected) + ".");
  }
  barrier.expected = expected;
  barrier.arrived += count;
  if (warp.launch->checks) check_release(warp, barrier.arriving);
  if (expected != 0 && barrier.arrived > expected) {
    warp.fault(FaultKind::arrivals, inst, -1,
               std::to_string(barrier.arrived) + " threads arrive at barrier " +
                   std::to_string(id) + ", which expects " + std::to_string(expected) + ".");
  }
  warp.cluster->changed();
}

// With no count the barrier is for all warps that are still alive.
bool named_complete(const Warp& warp, const NamedBarrier& barrier) {
  const u32 wanted = barrier.expected != 0 ? barrier.expected : warp.cta->live_warps * 32;
  return barrier.arrived != 0 && barrier.arrived >= wanted;
}

void write_reduction(Warp& warp, const Inst& inst, const NamedBarrier& barrier) {
  const OperandRef& result = warp.operands(inst)[0];
  if (inst.extra == 2) {
    for_lanes(warp.active, [&](int lane) { warp.set(result, lane, barrier.result_count); });
    return;
  }
  const bool value = inst.extra == 0 ? barrier.result_and != 0 : barrier.result_or != 0;
  u32& target = warp.predicates[static_cast<u32>(result.slot)];
  target = (target & ~warp.active) | (value ? warp.active : 0u);
}

void add_votes(Warp& warp, const Inst& inst, NamedBarrier& barrier) {
  const OperandRef* o = warp.operands(inst);
  const u32 votes = warp.mask_of(o[3]) & warp.active;
  if (votes != warp.active) barrier.reduce_and = 0;
  barrier.reduce_or |= votes;
  barrier.reduce_count += static_cast<u32>(std::popcount(votes));
}

// operands: [result], id, count, [predicate]
Step run_bar(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst) + inst.outputs;
  const u32 id = barrier_number(warp, inst, o[0]);
  NamedBarrier& barrier = warp.cta->named[id];
  Fragment& fragment = warp.fragment();
  if (inst.aligned && warp.active != warp.live) {
    if (warp.fragments.size() > 1 && !warp.launch->checks) return Step::blocked;
    warp.fault(FaultKind::divergent, inst, -1,
               "an aligned barrier is executed by lanes " + hex(warp.active) + " of live lanes " +
                   hex(warp.live) + ".");
  }
  if (fragment.token == 0) {
    const u32 expected =
        o[1].kind == OperandRef::Kind::none ? 0 : warp.value32(o[1], warp.first_lane());
    if (inst.mode == bar_red) add_votes(warp, inst, barrier);
    arrive_named(warp, inst, barrier, id, expected);
    ++warp.counters.barrier_waits;
    fragment.token = barrier.generation + 1;
    if (named_complete(warp, barrier)) end_generation(*warp.cta, barrier);
    if (inst.mode == bar_arrive) {
      fragment.token = 0;
      return Step::next;
    }
  } else if (barrier.generation == fragment.token - 1 && named_complete(warp, barrier)) {
    end_generation(*warp.cta, barrier);
  }
  if (barrier.generation == fragment.token - 1) return Step::blocked;
  fragment.token = 0;
  if (warp.launch->checks) {
    check_acquire(warp, barrier.done);
    if (inst.aligned) check_lanes_meet(warp);
  }
  if (inst.mode == bar_red) write_reduction(warp, inst, barrier);
  return Step::next;
}

Step run_warp_sync(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 members = warp.value32(o[0], warp.first_lane()) & warp.live;
  if ((members & ~warp.active) == 0) {
    if (warp.launch->checks) check_lanes_meet(warp);
    return Step::next;
  }
  for (const Fragment& fragment : warp.fragments) {
    if (&fragment != &warp.fragment() && !fragment.blocked) return Step::blocked;
  }
  if (warp.launch->checks) {
    warp.fault(FaultKind::divergent, inst, -1,
               "bar.warp.sync names lanes " + hex(members) + " but only " + hex(warp.active) +
                   " are here.");
  }
  return Step::next;
}

// ---- cluster barrier: counted in threads of the whole cluster

u32 live_threads(const Cluster& cluster) {
  u32 threads = 0;
  for (const auto& cta : cluster.ctas) {
    for (const auto& warp : cta->warps) threads += static_cast<u32>(std::popcount(warp->live));
  }
  return threads;
}

void try_end_cluster(Cluster& cluster) {
  NamedBarrier& barrier = cluster.barrier;
  if (barrier.arrived == 0 || barrier.arrived < live_threads(cluster)) return;
  end_generation(*cluster.ctas[0], barrier);
}

Step run_cluster_arrive(Warp& warp, const Inst& inst) {
  Cluster& cluster = *warp.cluster;
  if (inst.aligned && warp.active != warp.live) {
    warp.fault(FaultKind::divergent, inst, -1, "barrier.cluster.arrive.aligned diverges.");
  }
  cluster.barrier.arrived += static_cast<u32>(std::popcount(warp.active));
  if (warp.launch->checks) {
    if (inst.flags == 0) {
      check_release(warp, cluster.barrier.arriving);
    } else {
      check_release_relaxed(warp, cluster.barrier.arriving);
    }
  }
  warp.cluster_generation = cluster.barrier.generation + 1;
  cluster.changed();
  try_end_cluster(cluster);
  return Step::next;
}

Step run_cluster_wait(Warp& warp, const Inst& inst) {
  Cluster& cluster = *warp.cluster;
  if (inst.aligned && warp.active != warp.live) {
    warp.fault(FaultKind::divergent, inst, -1, "barrier.cluster.wait.aligned diverges.");
  }
  if (warp.cluster_generation == 0) {
    warp.fault(FaultKind::barrier_misuse, inst, -1,
               "barrier.cluster.wait is executed without an arrival before it.");
    return Step::next;
  }
  if (cluster.barrier.generation == warp.cluster_generation - 1) try_end_cluster(cluster);
  if (cluster.barrier.generation == warp.cluster_generation - 1) return Step::blocked;
  warp.cluster_generation = 0;
  ++warp.counters.barrier_waits;
  if (warp.launch->checks) {
    check_acquire(warp, cluster.barrier.done);
    if (inst.aligned) check_lanes_meet(warp);
  }
  return Step::next;
}

// ---- setmaxnreg: a pool of 64 K registers per SM, shared by the CTA's warps

u32 starting_registers(const Launch& launch) {
  const u32 each = launch.machine->chip.registers_per_sm / (launch.warps * 32);
  return std::min(each / 8 * 8, 256u);
}

Step run_setmaxnreg(Warp& warp, const Inst& inst) {
  if (warp.active != warp.live) {
    warp.fault(FaultKind::divergent, inst, -1, "setmaxnreg diverges.");
  }
  Cta& cta = *warp.cta;
  Launch& launch = *warp.launch;
  if (cta.free_registers == 0 && warp.register_quota == 0 && !cta.pool_started) {
    cta.pool_started = true;
    cta.free_registers =
        launch.machine->chip.registers_per_sm - launch.warps * 32 * starting_registers(launch);
  }
  if (warp.register_quota == 0) warp.register_quota = starting_registers(launch);
  const u32 wanted = inst.immediate;
  const bool grow = inst.mode == 1;
  if (grow ? wanted < warp.register_quota : wanted > warp.register_quota) {
    warp.fault(FaultKind::resources, inst, -1,
               "setmaxnreg." + std::string(grow ? "inc" : "dec") + " to " + std::to_string(wanted) +
                   " registers goes the wrong way from " + std::to_string(warp.register_quota) +
                   ".");
    return Step::next;
  }
  if (grow) {
    const u32 more = (wanted - warp.register_quota) * 32;
    if (more > cta.free_registers) return Step::blocked;
    cta.free_registers -= more;
  } else {
    cta.free_registers += (warp.register_quota - wanted) * 32;
  }
  warp.register_quota = wanted;
  warp.cluster->changed();
  return Step::next;
}

// ---- mbarrier

enum MbarrierMode : u8 {
  mode_init,
  mode_inval,
  mode_arrive_one,
  mode_arrive_drop,
  mode_test,
  mode_try,
  mode_expect,
  mode_complete,
  mode_pending
};
enum MbarrierFlags : u32 {
  flag_parity = 1,
  flag_relaxed = 2,
  flag_with_expect = 4,
  flag_no_complete = 8
};

u64 state_token(const Mbarrier& barrier) {
  return barrier.phase << 32 | (static_cast<u64>(barrier.pending) & 0xfffffu);
}

struct Target {
  Cta* cta = nullptr;
  u32 offset = 0;
  Mbarrier* barrier = nullptr;
};

Target find_target(Warp& warp, const Inst& inst, const OperandRef& address, int lane, bool must) {
  Target target;
  const Place place = resolve(warp, inst, inst.space, warp.address(address, lane), 8, lane, true);
  if (place.data == nullptr) return target;
  if (place.space != Space::shared) {
    warp.fault(FaultKind::bad_argument, inst, lane, "an mbarrier must be in shared memory.");
    warp.launch->stopped = true;
    return target;
  }
  target.cta = place.cta;
  target.offset = place.offset;
  target.barrier = find_barrier(*place.cta, place.offset);
  if (target.barrier == nullptr && must) {
    warp.fault(FaultKind::barrier_misuse, inst, lane,
               "there is no initialised mbarrier at shared address " + hex(place.offset) +
                   " of CTA " + std::to_string(place.cta->rank) + ".");
    warp.launch->stopped = true;
  }
  if (target.barrier != nullptr && warp.launch->checks) {
    check_barrier_use(view_of(warp, inst, lane), *target.barrier, place.cta != warp.cta);
  }
  return target;
}

Step run_init(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    const Target target = find_target(warp, inst, o[0], lane, false);
    if (target.cta == nullptr) return;
    const u32 count = warp.value32(o[1], lane);
    if (count == 0 || count > kMaxTransactions) {
      warp.fault(FaultKind::bad_argument, inst, lane,
                 "an mbarrier cannot expect " + std::to_string(count) + " arrivals.");
    }
    Mbarrier barrier;
    barrier.expected = count;
    barrier.pending = count;
    barrier.valid = true;
    barrier.line = inst.line;
    if (warp.launch->checks) check_barrier_init(warp, barrier);
    target.cta->barriers[target.offset] = std::move(barrier);
  });
  return Step::next;
}

Step run_inval(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    const Target target = find_target(warp, inst, o[0], lane, true);
    if (target.barrier != nullptr) target.barrier->valid = false;
  });
  return Step::next;
}

void expect_bytes(Warp& warp, const Inst& inst, Mbarrier& barrier, int lane, i64 bytes) {
  barrier.bytes += bytes;
  barrier.bytes_expected_total += static_cast<u64>(bytes);
  if (barrier.bytes > kMaxTransactions) {
    warp.fault(
        FaultKind::transaction_bytes, inst, lane,
        "the transaction count reaches " + std::to_string(barrier.bytes) + ", above 2^20 - 1.");
  }
}

// operands: [state], address, [count or bytes]
Step run_arrive(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const OperandRef* in = o + inst.outputs;
  const Mbarrier* last = nullptr;
  for (u32 mask = warp.active; mask != 0 && !warp.launch->stopped; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    const Target target = find_target(warp, inst, in[0], lane, true);
    if (target.barrier == nullptr) return Step::next;
    Mbarrier& barrier = *target.barrier;
    u32 count = 1;
    if ((inst.flags & flag_with_expect) != 0) {
      expect_bytes(warp, inst, barrier, lane, warp.value32(in[1], lane));
    } else if (inst.inputs > 1) {
      count = warp.value32(in[1], lane);
    }
    if (inst.outputs != 0 && o[0].kind != OperandRef::Kind::none) {
      warp.set(o[0], lane, state_token(barrier));
    }
    const bool fresh = &barrier != last;
    last = &barrier;
    if (warp.launch->checks && fresh && (inst.flags & flag_relaxed) == 0) {
      check_release(warp, barrier.arriving);
    }
    if (inst.mode == mode_arrive_drop) barrier.expected -= std::min(count, barrier.expected);
    std::string problem;
    if (!barrier_arrive(*warp.launch, *target.cta, barrier, count, problem)) {
      warp.fault(FaultKind::arrivals, inst, lane, problem);
    }
  }
  return Step::next;
}

Step run_transactions(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    const Target target = find_target(warp, inst, o[0], lane, true);
    if (target.barrier == nullptr) return;
    const i64 bytes = warp.value32(o[1], lane);
    if (inst.mode == mode_expect) {
      expect_bytes(warp, inst, *target.barrier, lane, bytes);
    } else {
      target.barrier->bytes -= bytes;
      target.barrier->bytes_received_total += static_cast<u64>(bytes);
      barrier_advance(*target.cta, *target.barrier);
    }
  });
  return Step::next;
}

bool phase_complete(const Inst& inst, const Mbarrier& barrier, u64 argument) {
  if ((inst.flags & flag_parity) != 0) return (barrier.phase & 1) != (argument & 1);
  return barrier.phase > argument >> 32;
}

// Whether the phase for which a suspended warp waits has completed, however many have since: its
// completion is what resumes the warp. Fragment::token holds that phase, and 1.
bool resumed(const Fragment& fragment, const Mbarrier& barrier) {
  return fragment.blocked && fragment.token != 0 && barrier.phase >= fragment.token;
}

// Lanes whose phase is complete get true. try_wait suspends the others, and gives up only when
// nothing else in the cluster can move (or, in random schedules, now and then).
//
// A wait that passes ends the warp's turn, except in random schedules: all warps that wait for one
// phase see it before any of them goes on to complete the next, as on an SM, where they advance
// together. Kernels in which every warp waits but one alone arrives count on that.
Step run_wait(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  u32 complete = 0;
  bool uniform = true;
  const Mbarrier *awaited = nullptr, *last = nullptr;
  Cluster& cluster = *warp.cluster;
  for (u32 mask = warp.active; mask != 0; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    const Target target = find_target(warp, inst, o[1], lane, true);
    if (target.barrier == nullptr) return Step::next;
    if (!phase_complete(inst, *target.barrier, warp.value(o[2], lane)) &&
        !resumed(warp.fragment(), *target.barrier)) {
      uniform = uniform && (awaited == nullptr || awaited == target.barrier);
      awaited = target.barrier;
      continue;
    }
    complete |= 1u << lane;
    const bool fresh = target.barrier != last;
    last = target.barrier;
    if (warp.launch->checks && fresh && (inst.flags & flag_relaxed) == 0) {
      check_acquire(warp, target.barrier->done);
    }
  }
  const bool patient = inst.mode == mode_try;
  if (patient && complete == 0) {
    const bool whim = warp.launch->schedule.policy == Policy::random && !warp.fragment().blocked &&
                      !cluster.idle() && cluster.random() % 8 == 0;
    if (!cluster.failing_waits && !whim) {
      warp.fragment().token = uniform && awaited != nullptr ? awaited->phase + 1 : 0;
      return Step::blocked;
    }
    ++cluster.failed_waits;
  }
  warp.fragment().token = 0;
  warp.turn_over = warp.launch->schedule.policy != Policy::random;
  ++warp.counters.barrier_waits;
  u32& p = warp.predicates[static_cast<u32>(o[0].slot)];
  p = (p & ~warp.active) | complete;
  return Step::next;
}

Step run_pending_count(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active,
            [&](int lane) { warp.set(o[0], lane, warp.value(o[1], lane) & 0xfffffu); });
  return Step::next;
}

void bar_operands(Builder& b, std::size_t at) {
  b.input(b.operand(at), Type::b32);
  if (b.count() > at + 1 && (b.inst.mode != bar_red || b.count() > at + 2)) {
    b.input(b.operand(at + 1), Type::b32);
    ++at;
  } else {
    b.none_input();
  }
  if (b.inst.mode == bar_red) b.input(b.operand(at + 1), Type::pred);
}

}  // namespace

Mbarrier* find_barrier(Cta& cta, u32 offset) {
  const auto it = cta.barriers.find(offset);
  return it == cta.barriers.end() || !it->second.valid ? nullptr : &it->second;
}

void barrier_advance(Cta& cta, Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  if (!barrier.arriving.empty()) barrier.done = barrier.arriving;
  cta.cluster->failed_waits = 0;
  cta.cluster->changed();
}

bool barrier_arrive(Launch&, Cta& cta, Mbarrier& barrier, u32 count, std::string& problem) {
  if (barrier.pending < static_cast<i64>(count)) {
    problem = "arrival of " + std::to_string(count) + " at an mbarrier that waits for " +
              std::to_string(barrier.pending) + " more of " + std::to_string(barrier.expected) +
              " (initialised at line " + std::to_string(barrier.line) + ", phase " +
              std::to_string(barrier.phase) + ", " + std::to_string(barrier.bytes) +
              " bytes outstanding).";
    return false;
  }
  barrier.pending -= count;
  cta.cluster->changed();
  barrier_advance(cta, barrier);
  return true;
}

std::string describe_barriers(const Cta& cta) {
  std::string text;
  for (u32 id = 0; id < 16; ++id) {
    const NamedBarrier& barrier = cta.named[id];
    if (barrier.arrived == 0) continue;
    text += "barrier " + std::to_string(id) + ": " + std::to_string(barrier.arrived) + " of " +
            (barrier.expected != 0 ? std::to_string(barrier.expected) : "all") +
            " threads arrived; ";
  }
  std::vector<u32> offsets;
  for (const auto& [offset, barrier] : cta.barriers) {
    if (barrier.valid) offsets.push_back(offset);
  }
  std::sort(offsets.begin(), offsets.end());
  for (const u32 offset : offsets) {
    const Mbarrier& barrier = cta.barriers.at(offset);
    text += "mbarrier " + hex(offset) + ": phase " + std::to_string(barrier.phase) + ", " +
            std::to_string(barrier.pending) + " of " + std::to_string(barrier.expected) +
            " arrivals missing, " + std::to_string(barrier.bytes) + " bytes outstanding; ";
  }
  return text.empty() ? "No barrier is in use." : text;
}

void build_bar(Builder& b) {
  Inst& inst = b.inst;
  if (b.has("warp")) {
    b.expect_count(1, 1);
    b.input(b.operand(0), Type::b32);
    inst.run = run_warp_sync;
    return;
  }
  const bool red = b.has("red");
  inst.mode = red ? bar_red : b.has("arrive") ? bar_arrive : bar_sync;
  inst.aligned = b.text.mnemonic == "bar" || b.has("aligned");
  if (red) {
    inst.extra = b.has("and") ? 0 : b.has("or") ? 1 : 2;
    b.output(b.operand(0), inst.extra == 2 ? Type::b32 : Type::pred);
  }
  if (b.count() == 0) b.fail("the barrier number is missing.");
  bar_operands(b, red ? 1 : 0);
  inst.run = run_bar;
}

void build_barrier(Builder& b) {
  if (!b.has("cluster")) {
    build_bar(b);
    return;
  }
  b.expect_count(0, 0);
  b.inst.aligned = b.has("aligned");
  b.inst.flags = b.has("relaxed") ? 1u : 0u;
  b.inst.run = b.has("arrive") ? run_cluster_arrive : run_cluster_wait;
}

void build_setmaxnreg(Builder& b) {
  b.expect_count(1, 1);
  b.inst.immediate = static_cast<u32>(b.integer(b.operand(0)));
  if (b.inst.immediate < 24 || b.inst.immediate > 256 || b.inst.immediate % 8 != 0) {
    b.fail("setmaxnreg takes a multiple of 8 from 24 to 256.");
  }
  b.inst.mode = b.has("inc") ? 1 : 0;
  b.inst.aligned = true;
  b.inst.run = run_setmaxnreg;
}

void build_mbarrier(Builder& b) {
  Inst& inst = b.inst;
  inst.space = b.space();
  inst.flags = (b.has("parity") ? flag_parity : 0u) | (b.has("relaxed") ? flag_relaxed : 0u) |
               (b.has("expect_tx") ? flag_with_expect : 0u) |
               (b.has("noComplete") ? flag_no_complete : 0u);
  const int kind = b.which({"init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait",
                            "expect_tx", "complete_tx", "pending_count"});
  if (kind < 0) b.fail("mbarrier needs an operation.");
  inst.mode = static_cast<u8>(kind);
  switch (kind) {
    case mode_init:
      b.expect_count(2, 2);
      b.address(b.operand(0), inst.space);
      b.input(b.operand(1), Type::b32);
      inst.run = run_init;
      break;
    case mode_inval:
      b.address(b.operand(0), inst.space);
      inst.run = run_inval;
      break;
    case mode_arrive_one:
    case mode_arrive_drop: {
      const bool state = b.operand(0).kind != Operand::Kind::memory;
      if (state) b.output(b.operand(0), Type::b64);
      const std::size_t at = state ? 1 : 0;
      b.address(b.operand(at), inst.space);
      if (b.count() > at + 1) b.input(b.operand(at + 1), Type::b32);
      inst.run = run_arrive;
      break;
    }
    case mode_test:
    case mode_try:
      b.output(b.operand(0), Type::pred);
      b.address(b.operand(1), inst.space);
      b.input(b.operand(2), (inst.flags & flag_parity) != 0 ? Type::b32 : Type::b64);
      inst.run = run_wait;
      break;
    case mode_pending:
      b.output(b.operand(0), Type::b32);
      b.input(b.operand(1), Type::b64);
      inst.run = run_pending_count;
      break;
    default:
      b.address(b.operand(0), inst.space);
      b.input(b.operand(1), Type::b32);
      inst.run = run_transactions;
      break;
  }
}

}  // namespace fovea::emulator
