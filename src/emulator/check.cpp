#include "emulator/check.h"

#include <algorithm>

#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

constexpr u32 kTickMask = (1u << kTickBits) - 1;

std::string agent_text(const Cluster& cluster, u32 agent) {
  const ClusterCheck& check = cluster.check;
  const u32 rank = agent / check.agents_per_cta;
  u32 index = agent % check.agents_per_cta;
  if (index >= check.warps + kAsyncSlots) index -= check.warps + kAsyncSlots;
  std::string text = index < check.warps ? "warp " + std::to_string(index)
                                         : std::string("an asynchronous operation");
  if (cluster.ctas.size() > 1) text += " of CTA " + std::to_string(rank);
  return text;
}

void report(const AccessView& view, FaultKind kind, const std::string& sentence) {
  const bool async = std::string_view(view.agent_name) != "warp";
  view.launch->fault(kind, view.cta, view.warp, view.lane, view.inst,
                     async ? std::string(view.agent_name) + " of warp " + std::to_string(view.warp)
                           : "warp " + std::to_string(view.warp),
                     sentence);
}

const char* verb(Access access) {
  return !is_write(access) ? "reads" : !is_read(access) ? "writes" : "updates";
}

// ---- one cell against one access

struct Conflict {
  FaultKind kind = FaultKind::none;
  u32 epoch = 0;
  bool with_write = false;
};

// A warp is in order with itself.
bool is_own(const AccessView& view, u32 agent) { return agent == view.agent || agent == view.twin; }

bool before(const AccessView& view, u32 epoch, ClockPart part) {
  return view.clock->at(part, epoch >> kTickBits) >= (epoch & kTickMask);
}

Conflict against_write(const AccessView& view, const Cell& cell, Access access, ClockPart part) {
  if (is_own(view, cell.write >> kTickBits)) return {};
  if (is_strong(access) && (cell.flags & kStrongWrite) != 0) return {};
  if (!before(view, cell.write, part)) return {FaultKind::race, cell.write, true};
  const bool crosses = view.async && (cell.flags & kAsyncWrite) == 0 && part == clock_ordered;
  if (crosses && !before(view, cell.write, clock_proxied)) {
    return {FaultKind::missing_proxy_fence, cell.write, true};
  }
  return {};
}

Conflict against_reads(const AccessView& view, const Cell& cell, Access access, ClockPart part) {
  for (std::size_t i = 0; i < cell.reads.size(); ++i) {
    const u32 epoch = cell.reads[i];
    if (epoch == 0 || is_own(view, epoch >> kTickBits)) continue;
    if (is_strong(access) && (cell.strong_reads >> i & 1) != 0) continue;
    if (!before(view, epoch, part)) return {FaultKind::race, epoch, false};
  }
  return {};
}

void record_read(const AccessView& view, Cell& cell, Access access, ClockPart part) {
  const u32 mine = epoch_of(view.agent, view.tick);
  std::size_t slot = cell.reads.size();
  for (std::size_t i = 0; i < cell.reads.size(); ++i) {
    const u32 epoch = cell.reads[i];
    const bool own = epoch != 0 && epoch >> kTickBits == view.agent;
    if (own || ((epoch == 0 || before(view, epoch, part)) && slot == cell.reads.size())) slot = i;
  }
  if (slot == cell.reads.size()) slot = view.agent % 3;
  // A plain load stands for the strong ones of its tick.
  const u8 bit = static_cast<u8>(1u << slot);
  const bool strong =
      is_strong(access) && (cell.reads[slot] != mine || (cell.strong_reads & bit) != 0);
  cell.reads[slot] = mine;
  cell.strong_reads = static_cast<u8>(strong ? cell.strong_reads | bit : cell.strong_reads & ~bit);
}

void record_write(const AccessView& view, Cell& cell, Access access, u8 bytes) {
  cell.write = epoch_of(view.agent, view.tick);
  cell.reads = {};
  cell.strong_reads = 0;
  cell.write_line = view.inst->line;
  cell.written_bytes = bytes;
  cell.defined_bytes |= bytes;
  cell.flags =
      static_cast<u8>((view.async ? kAsyncWrite : 0) | (is_strong(access) ? kStrongWrite : 0));
}

void report_conflict(const AccessView& view, const Conflict& conflict, const std::string& where,
                     Access access, int line) {
  const std::string other = agent_text(*view.cluster, conflict.epoch >> kTickBits);
  if (conflict.kind == FaultKind::missing_proxy_fence) {
    report(view, conflict.kind,
           std::string(verb(access)) + " " + where + " through the async proxy after " + other +
               " wrote it with ordinary stores (line " + std::to_string(line) +
               ") and no fence.proxy.async lies between.");
    return;
  }
  report(view, FaultKind::race,
         std::string(verb(access)) + " " + where + ", which " + other +
             (conflict.with_write ? " writes (line " + std::to_string(line) + ")" : " reads") +
             ", and nothing orders the two.");
}

}  // namespace

void Clock::join(const Clock& other, u32 parts) {
  join_clusters(other);
  if (other.ticks_.empty()) return;
  if (ticks_.empty()) resize(other.agents_);
  const std::size_t n = std::size_t{parts} * agents_;
  u32* mine = ticks_.data();
  const u32* theirs = other.ticks_.data();
  for (std::size_t i = 0; i < n; ++i) mine[i] = mine[i] < theirs[i] ? theirs[i] : mine[i];
}

void Clock::join_part(ClockPart to, const Clock& other, ClockPart from) {
  for (u32 i = 0; i < agents_; ++i) raise(to, i, other.at(from, i));
}

Releases Clock::releases_of(u32 cluster) const {
  if (clusters_ == nullptr) return {};
  const auto found = clusters_->find(cluster);
  return found == clusters_->end() ? Releases{} : found->second;
}

namespace {

// Whether all of `some` is in `all`.
bool holds(const OtherClusters& all, const OtherClusters& some) {
  return std::all_of(some.begin(), some.end(), [&](const auto& entry) {
    const auto found = all.find(entry.first);
    return found != all.end() && found->second.seen >= entry.second.seen &&
           found->second.proxied >= entry.second.proxied;
  });
}

}  // namespace

void Clock::join_clusters(const Clock& other) {
  if (other.clusters_ == nullptr || other.clusters_ == clusters_) return;
  if (clusters_ == nullptr || holds(*other.clusters_, *clusters_)) {
    clusters_ = other.clusters_;
    return;
  }
  if (holds(*clusters_, *other.clusters_)) return;
  auto joined = std::make_shared<OtherClusters>(*clusters_);
  for (const auto& [cluster, releases] : *other.clusters_) {
    Releases& mine = (*joined)[cluster];
    mine = {std::max(mine.seen, releases.seen), std::max(mine.proxied, releases.proxied)};
  }
  clusters_ = std::move(joined);
}

void Clock::see_release(u32 cluster, u32 count) {
  auto more = clusters_ == nullptr ? std::make_shared<OtherClusters>()
                                   : std::make_shared<OtherClusters>(*clusters_);
  u32& seen = (*more)[cluster].seen;
  seen = std::max(seen, count);
  clusters_ = std::move(more);
}

void Clock::fence_clusters() {
  if (clusters_ == nullptr) return;
  auto fenced = std::make_shared<OtherClusters>(*clusters_);
  for (auto& [cluster, releases] : *fenced) releases.proxied = releases.seen;
  clusters_ = std::move(fenced);
}

void check_start_cluster(Cluster& cluster) {
  ClusterCheck& check = cluster.check;
  check.on = true;
  check.warps = cluster.launch->warps;
  check.agents_per_cta = 2 * check.warps + kAsyncSlots;
  // Agent 0 tick 0 is the empty epoch, so ticks start at 1; of warps at 2, since at 1 they met.
  check.agents = check.agents_per_cta * static_cast<u32>(cluster.ctas.size());
  check.ticks.assign(check.agents, 1);
  check.next_slot.assign(cluster.ctas.size(), 0);
  for (auto& cta : cluster.ctas) {
    cta->shadow.cells.assign((cta->shared.size() + 3) / 4, Cell{});
    check.tensor.emplace_back(std::size_t{cluster.launch->machine->chip.tensor_columns} * 8);
    for (auto& warp : cta->warps) check_start_warp(*warp);
  }
}

void check_start_warp(Warp& warp) {
  const ClusterCheck& check = warp.cluster->check;
  warp.agent = warp.cta->rank * check.agents_per_cta + warp.index;
  warp.lone_agent = warp.agent + check.warps + kAsyncSlots;
  warp.check.clock.resize(check.agents);
  warp.check.clock.raise(clock_ordered, warp.agent, 1);
  warp.check.clock.raise(clock_ordered, warp.lone_agent, 2);
  const std::size_t n = warp.program->registers.size();
  warp.check.defined.assign(n, 0);
  warp.check.defined_words.clear();
  warp.check.in_flight.assign(n, 0);
  warp.check.written.assign(n, 0);
  warp.sequence = 1;
}

namespace {

bool is_lone(const Warp& warp) { return std::popcount(warp.active) == 1; }

u32 now(const Warp& warp) { return warp.check.clock.at(clock_ordered, warp.lone_agent); }

}  // namespace

AccessView view_of(Warp& warp, const Inst& inst, int lane) {
  AccessView view;
  view.launch = warp.launch;
  view.cluster = warp.cluster;
  view.cta = warp.cta;
  view.warp = static_cast<int>(warp.index);
  view.lane = lane;
  view.inst = &inst;
  view.clock = &warp.check.clock;
  const bool lone = is_lone(warp);
  view.agent = lone ? warp.lone_agent : warp.agent;
  view.twin = lone ? warp.agent : warp.lone_agent;
  view.tick = now(warp);
  return view;
}

// ---- registers

namespace {

std::string register_text(const Warp& warp, i32 vreg) {
  const Function& entry = *warp.program->entry;
  const Register& reg = warp.program->registers[static_cast<std::size_t>(vreg)];
  (void)entry;
  // "%r<73>" declares a range: the number is the distance from its first register.
  i32 first = vreg;
  while (first > 0 && warp.program->registers[static_cast<std::size_t>(first - 1)].name.data() ==
                          reg.name.data()) {
    --first;
  }
  return std::string(reg.name) + std::to_string(vreg - first);
}

void fault_register(Warp& warp, const Inst& inst, i32 vreg, bool flying, bool writing) {
  const std::string name = register_text(warp, vreg);
  if (flying) {
    warp.fault(FaultKind::in_flight, inst, -1,
               std::string(writing ? "writes" : "reads") + " register " + name +
                   " while an asynchronous operation that uses it has not been waited for.");
    return;
  }
  const u32 missing = warp.active & ~warp.check.defined[static_cast<std::size_t>(vreg)];
  warp.fault(
      FaultKind::uninitialised, inst, std::countr_zero(missing),
      "uses register " + name + ", which was never given a value in lanes " + hex(missing) + ".");
}

}  // namespace

void check_registers_before(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  WarpCheck& check = warp.check;
  if (inst.guard >= 0) {
    const auto v = static_cast<std::size_t>(inst.guard_vreg);
    if ((warp.active & ~check.defined[v]) != 0) {
      fault_register(warp, inst, inst.guard_vreg, false, false);
    }
  }
  const u32 outputs = inst.outputs;
  if (!inst.late) {
    for (u32 i = 0; i < outputs; ++i) {
      if (o[i].vreg >= 0 && check.in_flight[static_cast<std::size_t>(o[i].vreg)] != 0) {
        fault_register(warp, inst, o[i].vreg, true, true);
      }
    }
  }
  for (u32 i = outputs; i < outputs + inst.inputs; ++i) {
    const i32 vreg = o[i].vreg;
    if (vreg < 0) continue;
    const auto v = static_cast<std::size_t>(vreg);
    if (check.in_flight[v] != 0 && !inst.late) fault_register(warp, inst, vreg, true, false);
    if (!inst.pure && (warp.active & ~check.defined[v]) != 0 && check.in_flight[v] == 0) {
      fault_register(warp, inst, vreg, false, false);
    }
  }
}

namespace {

// Lanes in which a word of a 64-bit operand, or a 32-bit operand, holds a value.
u32 defined_word(const Warp& warp, const OperandRef& operand, std::size_t word) {
  if (operand.vreg < 0) return ~0u;
  const auto v = static_cast<std::size_t>(operand.vreg);
  const auto words = warp.check.defined_words.find(v);
  const u32 alone = words == warp.check.defined_words.end() ? 0 : words->second[word];
  return warp.check.defined[v] | alone;
}

// {a, b} of which one was never given a value, or such a pair taken apart: compilers pair a word
// with any other to get at instructions for two, and use but one.
void define_halves(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  if (inst.outputs == 1) {
    const std::array<u32, 2> given{defined_word(warp, o[1], 0), defined_word(warp, o[2], 0)};
    std::array<u32, 2> words;
    for (std::size_t i = 0; i < 2; ++i) {
      words[i] = (defined_word(warp, o[0], i) & ~warp.active) | (given[i] & warp.active);
    }
    check_define(warp, o[0], warp.active, given[0] & given[1]);
    warp.check.defined_words[static_cast<std::size_t>(o[0].vreg)] = words;
    return;
  }
  for (std::size_t i = 0; i < 2; ++i) {
    check_define(warp, o[i], warp.active, defined_word(warp, o[2], i));
  }
}

}  // namespace

void check_registers_after(Warp& warp, const Inst& inst) {
  if (inst.late) return;
  const OperandRef* o = warp.operands(inst);
  WarpCheck& check = warp.check;
  u32 defined = warp.active;
  u64 written = warp.sequence;
  if (inst.pure) {
    for (u32 i = inst.outputs; i < static_cast<u32>(inst.outputs) + inst.inputs; ++i) {
      if (o[i].vreg >= 0) defined &= check.defined[static_cast<std::size_t>(o[i].vreg)];
    }
    if (inst.copy && o[1].vreg >= 0) written = check.written[static_cast<std::size_t>(o[1].vreg)];
  }
  if (inst.halves && defined != warp.active) {
    define_halves(warp, inst);
    return;
  }
  for (u32 i = 0; i < inst.outputs; ++i) {
    if (o[i].vreg < 0) continue;
    const auto v = static_cast<std::size_t>(o[i].vreg);
    check.defined[v] = (check.defined[v] & ~warp.active) | defined;
    if (defined != warp.active) check.defined_words.erase(v);
    check.written[v] = written;
  }
}

void check_define(Warp& warp, const OperandRef& operand, u32 written, u32 defined) {
  if (operand.vreg < 0) return;
  const auto v = static_cast<std::size_t>(operand.vreg);
  u32& lanes = warp.check.defined[v];
  lanes = (lanes & ~written) | (defined & written);
  warp.check.written[v] = warp.sequence;
}

void check_mark_flight(Warp& warp, const OperandRef& operand, u32 flight) {
  if (operand.vreg < 0) return;
  u32& state = warp.check.in_flight[static_cast<std::size_t>(operand.vreg)];
  if (state == flight) return;
  state = flight;
  warp.check.flights[flight].push_back(operand.vreg);
}

void check_land_flight(Warp& warp, u32 flight) {
  const auto it = warp.check.flights.find(flight);
  if (it == warp.check.flights.end()) return;
  for (const i32 vreg : it->second) {
    const auto v = static_cast<std::size_t>(vreg);
    warp.check.defined[v] = ~0u;
    if (warp.check.in_flight[v] == flight) warp.check.in_flight[v] = 0;
  }
  warp.check.flights.erase(it);
}

// ---- shared memory

void check_shared(const AccessView& view, Cta& target, u32 offset, u32 bytes, Access access) {
  u32 write_ok = 0;
  std::array<u32, 3> reads_ok{};
  const u32 last = (offset + bytes - 1) / 4;
  for (u32 word = offset / 4; word <= last; ++word) {
    Cell& cell = target.shadow.cells[word];
    u8 mask = 15;
    if (word == offset / 4) mask = static_cast<u8>(mask & (15u << (offset % 4)));
    if (word == last) mask = static_cast<u8>(mask & (15u >> (3 - (offset + bytes - 1) % 4)));
    Conflict conflict;
    if (cell.write != 0 && cell.write != write_ok && (cell.written_bytes & mask) != 0) {
      conflict = against_write(view, cell, access, clock_ordered);
      if (conflict.kind == FaultKind::none) write_ok = cell.write;
    }
    if (is_write(access) && conflict.kind == FaultKind::none && cell.reads != reads_ok) {
      conflict = against_reads(view, cell, access, clock_ordered);
      if (conflict.kind == FaultKind::none) reads_ok = cell.reads;
    }
    const std::string where =
        conflict.kind == FaultKind::none
            ? std::string()
            : "shared memory at " + hex(word * 4) +
                  (target.rank != view.cta->rank ? " of CTA " + std::to_string(target.rank)
                                                 : std::string());
    if (conflict.kind != FaultKind::none) {
      report_conflict(view, conflict, where, access, cell.write_line);
    }
    if (is_read(access) && (cell.defined_bytes & mask) != mask) {
      report(view, FaultKind::uninitialised,
             "reads shared memory at " + hex(word * 4) + ", which was never written.");
      cell.defined_bytes = 15;
    }
    if (!is_write(access)) {
      record_read(view, cell, access, clock_ordered);
    } else {
      record_write(view, cell, access, mask);
    }
  }
}

void check_forget_shared(Cta& target, u32 offset, u32 bytes) {
  for (u32 word = offset / 4; word < (offset + bytes + 3) / 4; ++word) {
    target.shadow.cells[word] = Cell{};
  }
}

// ---- tensor memory

void check_tensor(const AccessView& view, Cta& target, u32 column, u32 columns, u32 lane, u32 lanes,
                  Access access, u32 chain) {
  std::vector<Cell>& cells = view.cluster->check.tensor[target.rank];
  const bool plain = chain == kOrderedByBarriers || view.launch->schedule.in_order_tensor;
  const ClockPart part_of_clock = plain ? clock_ordered : clock_tensor;
  for (u32 c = column; c < column + columns; ++c) {
    for (u32 part = lane / 16; part < (lane + lanes + 15) / 16; ++part) {
      Cell& cell = cells[std::size_t{c} * 8 + part];
      Conflict conflict;
      const bool in_pipeline = chain != 0 && cell.chain == chain;
      if (cell.write != 0 && !in_pipeline) {
        conflict = against_write(view, cell, access, part_of_clock);
      }
      if (access != Access::read && conflict.kind == FaultKind::none) {
        conflict = against_reads(view, cell, access, part_of_clock);
      }
      if (conflict.kind != FaultKind::none) {
        report_conflict(view, conflict,
                        "tensor memory column " + std::to_string(c) + " lanes " +
                            std::to_string(part * 16) + "-" + std::to_string(part * 16 + 15),
                        access, cell.write_line);
      }
      if (access != Access::write && cell.defined_bytes == 0) {
        report(view, FaultKind::uninitialised,
               "reads tensor memory column " + std::to_string(c) + ", which was never written.");
        cell.defined_bytes = 15;
      }
      if (access == Access::read) {
        record_read(view, cell, access, plain ? clock_ordered : clock_tensor);
      } else {
        record_write(view, cell, Access::write, 15);
        cell.chain = chain;
      }
    }
  }
}

// ---- global memory

namespace {

GlobalCell& global_cell(const Launch& launch, Allocation& allocation, u64 offset) {
  if (allocation.shadow == nullptr) allocation.shadow = std::make_unique<GlobalShadow>();
  GlobalShadow& shadow = *allocation.shadow;
  if (shadow.launch != launch.serial) {
    shadow.pages.clear();
    shadow.pages.resize(allocation.bytes / kShadowPageBytes + 1);
    shadow.launch = launch.serial;
  }
  auto& page = shadow.pages[offset / kShadowPageBytes];
  if (page == nullptr) {
    page = std::make_unique<std::array<GlobalCell, kShadowPageBytes / 4>>();
  }
  return (*page)[offset % kShadowPageBytes / 4];
}

bool ordered_global(const AccessView& view, u32 epoch, u32 cluster, u32 time) {
  if (cluster == static_cast<u32>(view.cluster->serial)) {
    return is_own(view, epoch >> kTickBits) || before(view, epoch, clock_ordered);
  }
  return view.clock->releases_of(cluster).seen >= time;
}

std::string global_agent(const AccessView& view, u32 epoch, u32 cluster) {
  if (cluster == static_cast<u32>(view.cluster->serial)) {
    return agent_text(*view.cluster, epoch >> kTickBits);
  }
  return "another cluster (number " + std::to_string(cluster - 1) + ")";
}

void report_global(const AccessView& view, u64 address, Access access, const std::string& other,
                   bool write, int line) {
  report(view, FaultKind::race,
         std::string(verb(access)) + " global memory at " + hex(address) + ", which " + other +
             (write ? " writes (line " + std::to_string(line) + ")" : std::string(" reads")) +
             ", and nothing orders the two.");
}

// An addition after one that it has to follow.
void check_sum(const AccessView& view, const GlobalCell& cell, u64 address) {
  const bool own = cell.write_cluster == static_cast<u32>(view.cluster->serial);
  const u32 proxied = view.clock->releases_of(cell.write_cluster).proxied;
  if (!ordered_global(view, cell.write, cell.write_cluster, cell.write_time)) {
    report_global(view, address, Access::atomic, global_agent(view, cell.write, cell.write_cluster),
                  true, cell.write_line);
  } else if (!own && view.async && proxied < cell.write_time) {
    report(view, FaultKind::missing_proxy_fence,
           "adds to global memory at " + hex(address) + " through the async proxy after " +
               global_agent(view, cell.write, cell.write_cluster) +
               " without fence.proxy.async behind what orders the two.");
  }
}

void check_global_word(const AccessView& view, GlobalCell& cell, u64 address, u8 mask,
                       Access access) {
  const u32 mine = static_cast<u32>(view.cluster->serial);
  const bool both_strong = is_strong(access) && (cell.flags & kStrongWrite) != 0;
  const bool sums =
      view.launch->schedule.ordered_sums && access == Access::atomic && is_float(view.inst->type);
  if (sums && cell.write != 0 && (cell.flags & kFloatSum) != 0) check_sum(view, cell, address);
  if (cell.write != 0 && (cell.written_bytes & mask) != 0 && !both_strong) {
    if (!ordered_global(view, cell.write, cell.write_cluster, cell.write_time)) {
      report_global(view, address, access, global_agent(view, cell.write, cell.write_cluster), true,
                    cell.write_line);
    } else if (view.async && (cell.flags & kAsyncWrite) == 0 && cell.write_cluster == mine &&
               !before(view, cell.write, clock_proxied_global)) {
      report(view, FaultKind::missing_proxy_fence,
             std::string(verb(access)) + " global memory at " + hex(address) +
                 " through the async proxy after ordinary stores (line " +
                 std::to_string(cell.write_line) + ") without fence.proxy.async between.");
    }
  }
  if (is_write(access) && cell.read != 0 && !both_strong &&
      !(is_strong(access) && (cell.flags & kStrongRead) != 0) &&
      !ordered_global(view, cell.read, cell.read_cluster, cell.read_time)) {
    report_global(view, address, access, global_agent(view, cell.read, cell.read_cluster), false,
                  0);
  }
  const u32 epoch = epoch_of(view.agent, view.tick), time = view.cluster->check.time;
  if (!is_write(access)) {
    // A plain load stands for the strong ones of its tick.
    const bool strong =
        is_strong(access) && (cell.read != epoch || (cell.flags & kStrongRead) != 0);
    cell.flags = static_cast<u8>((cell.flags & ~kStrongRead) | (strong ? kStrongRead : 0));
    cell.read = epoch;
    cell.read_cluster = mine;
    cell.read_time = time;
    return;
  }
  cell.write = epoch;
  cell.write_cluster = mine;
  cell.write_time = time;
  cell.write_line = view.inst->line;
  cell.written_bytes = mask;
  cell.flags = static_cast<u8>((view.async ? kAsyncWrite : 0) |
                               (is_strong(access) ? kStrongWrite : 0) | (sums ? kFloatSum : 0));
  cell.read = 0;
}

}  // namespace

void check_global(const AccessView& view, Allocation& allocation, u64 address, u64 bytes,
                  Access access) {
  const u64 offset = address - allocation.base, end = offset + bytes;
  for (u64 word = offset / 4 * 4; word < end; word += 4) {
    u8 mask = 15;
    if (word < offset) mask = static_cast<u8>(mask & (15u << (offset - word)));
    if (word + 4 > end) mask = static_cast<u8>(mask & (15u >> (word + 4 - end)));
    check_global_word(view, global_cell(*view.launch, allocation, word), allocation.base + word,
                      mask, access);
  }
}

// ---- synchronisation

namespace {

void tick(Warp& warp) {
  if (now(warp) < kTickMask) {
    warp.check.clock.raise(clock_ordered, warp.lone_agent, now(warp) + 1);
  }
}

// What the lanes that are active do is part of what they know.
void include_own(const Warp& warp, Clock& clock, ClockPart part) {
  if (!is_lone(warp)) clock.raise(part, warp.agent, now(warp));
}

// What the lanes that are active know, and may pass on.
void pass_on(const Warp& warp, Clock& object, u32 parts) {
  const WarpCheck& check = warp.check;
  if (!is_lone(warp) || check.withheld.empty()) {
    object.join(check.clock, parts);
  } else {
    Clock known = check.clock;
    for (const Withheld& held : check.withheld) {
      for (u32 part = 0; part < clock_parts; ++part) {
        known.set(static_cast<ClockPart>(part), held.agent, held.before[part]);
      }
    }
    object.join(known, parts);
  }
  include_own(warp, object, clock_ordered);
}

}  // namespace

void check_lanes_meet(Warp& warp) {
  if (is_lone(warp)) return;
  warp.check.clock.raise(clock_ordered, warp.agent, now(warp));
  warp.check.withheld.clear();
  tick(warp);
}

void check_join_together(Warp& warp, u32 agent, u32 tick) {
  Clock& clock = warp.check.clock;
  Withheld held{agent};
  for (u32 part = 0; part < clock_parts; ++part) {
    held.before[part] = clock.at(static_cast<ClockPart>(part), agent);
  }
  warp.check.withheld.push_back(held);
  clock.raise(clock_ordered, agent, tick);
  clock.raise(clock_tensor, agent, tick);
}

void check_release(Warp& warp, Clock& object) {
  pass_on(warp, object, clock_tensor);
  tick(warp);
}

void check_share(Warp& warp, Clock& operation) { pass_on(warp, operation, clock_tensor); }

void check_acquire(Warp& warp, const Clock& object) {
  WarpCheck& check = warp.check;
  check.clock.join(object);
  if (object.empty()) return;
  // What comes back through a barrier every lane knows by itself.
  for (Withheld& held : check.withheld) {
    for (u32 part = 0; part < clock_tensor; ++part) {
      held.before[part] =
          std::max(held.before[part], object.at(static_cast<ClockPart>(part), held.agent));
    }
  }
}

void check_release_relaxed(Warp& warp, Clock& object) {
  const WarpCheck& check = warp.check;
  if (object.empty()) object.resize(check.clock.agents());
  object.join_part(clock_inits, check.clock, clock_inits);
  if (check.fenced.empty()) return;
  object.join(check.fenced);
  tick(warp);
}

void check_release_async(const AsyncOp& op, Clock& object) {
  object.join(op.clock);
  object.raise(clock_ordered, op.agent, op.agent_clock);
  object.raise(clock_proxied, op.agent, op.agent_clock);
  object.raise(clock_proxied_global, op.agent, op.agent_clock);
}

void check_proxy_fence(Warp& warp, bool shared, bool global) {
  Clock& clock = warp.check.clock;
  const auto make_visible = [&](ClockPart part) {
    clock.join_part(part, clock, clock_ordered);
    include_own(warp, clock, part);
  };
  if (shared) {
    make_visible(clock_proxied);
    check_barrier_fence(warp);
  }
  if (global) {
    make_visible(clock_proxied_global);
    clock.fence_clusters();
  }
  tick(warp);
}

void check_memory_fence(Warp& warp) {
  WarpCheck& check = warp.check;
  check.clock.join(check.acquired);
  check.fenced = check.clock;
  include_own(warp, check.fenced, clock_ordered);
  check.fenced_time = warp.cluster->check.time++;
  tick(warp);
}

void check_tensor_fence(Warp& warp, bool is_before) {
  Clock& clock = warp.check.clock;
  if (is_before) {
    clock.join_part(clock_released, clock, clock_tensor);
  } else {
    clock.join_part(clock_tensor, clock, clock_released);
  }
}

void check_global_sync(Warp& warp, u64 address, bool release, bool acquire, bool store, bool load) {
  Launch& launch = *warp.launch;
  WarpCheck& check = warp.check;
  GlobalSync& sync = launch.global_sync[address];
  const u32 mine = static_cast<u32>(warp.cluster->serial);
  if (load) {
    const bool same = sync.cluster == mine && !sync.clock.empty();
    Clock& taken = acquire ? check.clock : check.acquired;
    if (same) taken.join(sync.clock);
    taken.join_clusters(sync.clock);
  }
  if (!store) return;
  if (release) check_memory_fence(warp);
  if (check.fenced.empty()) return;
  if (sync.cluster != mine) {
    sync.clock.clear();
    sync.cluster = mine;
  }
  sync.clock.join(check.fenced);
  sync.clock.see_release(mine, check.fenced_time);
}

void check_barrier_init(Warp& warp, Mbarrier& barrier) {
  barrier.init_agent = is_lone(warp) ? warp.lone_agent : warp.agent;
  barrier.init_clock = now(warp);
}

// mbarriers whose initialisation this warp has seen become visible to the async proxy and to other
// CTAs.
void check_barrier_fence(Warp& warp) {
  for (auto& [offset, barrier] : warp.cta->barriers) {
    if (barrier.init_agent == warp.agent ||
        warp.check.clock.at(clock_ordered, barrier.init_agent) >= barrier.init_clock) {
      barrier.visible_to_async = true;
    }
  }
  warp.check.clock.join_part(clock_inits, warp.check.clock, clock_ordered);
  include_own(warp, warp.check.clock, clock_inits);
  tick(warp);
}

void check_barrier_use(const AccessView& view, Mbarrier& barrier, bool async_or_remote) {
  if (barrier.init_clock == 0) return;
  const auto knows = [&](ClockPart part) {
    return view.clock->at(part, barrier.init_agent) >= barrier.init_clock;
  };
  if (!is_own(view, barrier.init_agent) && !knows(clock_ordered) && !knows(clock_inits)) {
    report(view, FaultKind::race,
           "uses an mbarrier whose initialisation (line " + std::to_string(barrier.line) +
               ") is not ordered before it.");
    barrier.init_clock = 0;
    return;
  }
  if (async_or_remote && !barrier.visible_to_async) {
    report(view, FaultKind::missing_proxy_fence,
           "uses an mbarrier whose initialisation (line " + std::to_string(barrier.line) +
               ") was not followed by fence.mbarrier_init or fence.proxy.async.");
    barrier.visible_to_async = true;
  }
}

void check_fork(AsyncOp& op, Warp& warp) {
  ClusterCheck& check = warp.cluster->check;
  const u32 slot = check.next_slot[warp.cta->rank]++ % kAsyncSlots;
  op.agent = warp.cta->rank * check.agents_per_cta + check.warps + slot;
  // Two ticks: an operation may end its reads before its writes.
  check.ticks[op.agent] = std::min(check.ticks[op.agent] + 2, kTickMask - 2);
  op.agent_clock = check.ticks[op.agent];
  pass_on(warp, op.clock, clock_parts);
  tick(warp);
}

void check_join(Warp& warp, const Clock& clock) { warp.check.clock.join(clock); }

}  // namespace fovea::emulator
