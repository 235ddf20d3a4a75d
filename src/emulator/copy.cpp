// cp.async, bulk copies and reductions, st.async and red.async, cluster launch control.
#include <algorithm>
#include <cstring>
#include <memory>

#include "emulator/async.h"
#include "emulator/builders.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

// ---- cp.async: 4, 8 or 16 bytes per lane, through the generic proxy

class CopyOp : public AsyncOp {
 public:
  struct Piece {
    u64 from = 0;
    u32 to = 0, bytes = 0, valid = 0;
    int lane = 0;
  };
  std::vector<Piece> pieces;
  u64 group = 0;

  const char* name() const override { return "cp.async"; }
  bool through_async_proxy() const override { return false; }
  bool execute(Cluster& cluster) override {
    const bool checks = cluster.launch->checks;
    for (const Piece& piece : pieces) {
      lane = piece.lane;
      const Place to = resolve_shared(*this, piece.to, piece.bytes, "a cp.async write");
      if (to.data == nullptr) return true;
      std::memset(to.data, 0, piece.bytes);
      const AccessView who = view();
      if (piece.valid != 0) {
        const Place from = resolve_global(*this, piece.from, piece.valid, "a cp.async read");
        if (from.data == nullptr) return true;
        if (checks) check_global(who, *from.allocation, piece.from, piece.valid, Access::read);
        std::memcpy(to.data, from.data, piece.valid);
      }
      if (checks) check_shared(who, *to.cta, to.offset, piece.bytes, Access::write);
    }
    warp->finished.push_back({false, group, agent, agent_clock});
    return true;
  }
};

// The arrival that follows a thread's earlier cp.async operations.
class CopyArriveOp : public AsyncOp {
 public:
  u32 barrier = 0;
  bool ready(const Cluster& cluster) const override {
    for (const auto& op : cluster.pending) {
      if (op.get() == this) return true;
      if (op->warp == warp && dynamic_cast<const CopyOp*>(op.get()) != nullptr) return false;
    }
    return true;
  }
  const char* name() const override { return "cp.async.mbarrier.arrive"; }
  bool through_async_proxy() const override { return false; }
  bool execute(Cluster& cluster) override {
    if (cluster.launch->checks) {
      for (const Finished& done : warp->finished) {
        if (!done.bulk) clock.raise(clock_ordered, done.agent, done.tick);
      }
    }
    barrier_signal(*this, barrier);
    return true;
  }
};

Step run_cp_async(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  auto op = std::make_unique<CopyOp>();
  op->group = warp.copy_group;
  for_lanes(warp.active, [&](int lane) {
    CopyOp::Piece piece;
    const u64 to = warp.address(o[0], lane);
    piece.to = static_cast<u32>(to);
    piece.from = warp.address(o[1], lane);
    piece.bytes = inst.immediate;
    piece.valid = inst.inputs > 2 ? std::min(warp.value32(o[2], lane), piece.bytes) : piece.bytes;
    piece.lane = lane;
    if (piece.to % piece.bytes != 0 || piece.from % piece.bytes != 0) {
      warp.fault(FaultKind::misaligned, inst, lane,
                 "cp.async of " + std::to_string(piece.bytes) + " bytes from " + hex(piece.from) +
                     " to " + hex(to) + " is not aligned to its size.");
      warp.launch->stopped = true;
    }
    op->pieces.push_back(piece);
    warp.counters.cp_async_bytes += piece.bytes;
  });
  warp.cluster->enqueue(std::move(op), warp, inst, warp.first_lane());
  return Step::next;
}

Step run_copy_commit(Warp& warp, const Inst& inst) {
  ++(inst.mode == 0 ? warp.copy_group : warp.bulk_group);
  return Step::next;
}

void join_finished(Warp& warp, bool bulk, u64 below, bool reads_only) {
  std::vector<Finished> kept;
  for (const Finished& done : warp.finished) {
    if (done.bulk != bulk || done.group >= below) {
      kept.push_back(done);
      continue;
    }
    if (warp.launch->checks) {
      warp.check.clock.raise(clock_ordered, done.agent, reads_only ? done.tick : done.tick + 1);
    }
    if (reads_only) kept.push_back(done);
  }
  warp.finished = std::move(kept);
}

Step run_cp_wait(Warp& warp, const Inst& inst) {
  const u64 keep = inst.immediate;
  const bool all = inst.flags != 0;
  if (all) ++warp.copy_group;
  const u64 below = all ? warp.copy_group : warp.copy_group - std::min<u64>(keep, warp.copy_group);
  for (const auto& op : warp.cluster->pending) {
    const auto* copy = dynamic_cast<const CopyOp*>(op.get());
    if (copy != nullptr && copy->warp == &warp && copy->group < below) {
      if (all) --warp.copy_group;
      return Step::blocked;
    }
  }
  join_finished(warp, false, below, false);
  ++warp.counters.barrier_waits;
  return Step::next;
}

Step run_copy_arrive(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    const u32 address = static_cast<u32>(warp.address(o[0], lane));
    auto op = std::make_unique<CopyArriveOp>();
    op->barrier = address | warp.cta->rank << kRankShift;
    if (inst.mode == 0) {
      Mbarrier* barrier = find_barrier(*warp.cta, address & ((1u << kRankShift) - 1));
      if (barrier != nullptr) ++barrier->pending;
    }
    warp.cluster->enqueue(std::move(op), warp, inst, lane);
  });
  return Step::next;
}

// ---- bulk copies

enum class Side : u8 { global, shared };

class BulkOp : public AsyncOp {
 public:
  Side from_side = Side::global, to_side = Side::shared;
  u64 from = 0, to = 0;
  u32 bytes = 0;
  u32 barrier = 0;  // 0: completes through a bulk group
  u16 multicast = 0;
  bool reduce = false;
  AtomicKind operation = AtomicKind::add;
  Type type = Type::none;
  u64 group = 0;
  bool has_read = false;
  std::vector<u8> buffer;

  const char* name() const override { return "bulk copy"; }

  bool reads_done() const { return has_read; }

  bool execute(Cluster& cluster) override {
    if (!has_read) {
      has_read = true;
      if (!read_source(cluster)) return true;
      // Through a group, the write may become visible much later than the read ends.
      if (barrier == 0) {
        return false;
      }
    }
    write_all(cluster);
    if (barrier == 0) warp->finished.push_back({true, group, agent, agent_clock});
    return true;
  }

 private:
  bool read_source(Cluster& cluster) {
    const bool checks = cluster.launch->checks;
    Place place;
    if (from_side == Side::global) {
      place = resolve_global(*this, from, bytes, "a bulk read");
      if (place.data == nullptr) return false;
      if (checks) check_global(view(), *place.allocation, from, bytes, Access::read);
    } else {
      place = resolve_shared(*this, static_cast<u32>(from), bytes, "a bulk read");
      if (place.data == nullptr) return false;
      if (checks) check_shared(view(), *place.cta, place.offset, bytes, Access::read);
    }
    buffer.assign(place.data, place.data + bytes);
    return true;
  }

  void store(u8* target) {
    if (!reduce) {
      std::memcpy(target, buffer.data(), bytes);
      return;
    }
    const u32 step = type_bytes(type);
    for (u32 at = 0; at + step <= bytes; at += step) {
      u64 old = 0, value = 0;
      std::memcpy(&old, target + at, step);
      std::memcpy(&value, buffer.data() + at, step);
      const u64 result = apply_atomic(operation, type, old, value, 0);
      std::memcpy(target + at, &result, step);
    }
  }

  void write_all(Cluster& cluster) {
    if (to_side == Side::global) {
      const Place place = resolve_global(*this, to, bytes, "a bulk write");
      if (place.data == nullptr) return;
      if (cluster.launch->checks) {
        AccessView who = view();
        ++who.tick;
        check_global(who, *place.allocation, to, bytes, reduce ? Access::atomic : Access::write);
      }
      store(place.data);
      return;
    }
    if (multicast == 0) {
      write_shared(cluster, static_cast<u32>(to), barrier);
      return;
    }
    for (u32 rank = 0; rank < 16; ++rank) {
      if ((multicast >> rank & 1) == 0) continue;
      const u32 low = (1u << kRankShift) - 1;
      write_shared(cluster, (static_cast<u32>(to) & low) | rank << kRankShift,
                   (barrier & low) | rank << kRankShift);
    }
  }

  void write_shared(Cluster& cluster, u32 address, u32 signal) {
    const Place place = resolve_shared(*this, address, bytes, "a bulk write");
    if (place.data == nullptr) return;
    if (cluster.launch->checks) {
      check_shared(view(), *place.cta, place.offset, bytes,
                   reduce ? Access::atomic : Access::write);
    }
    store(place.data);
    // Multicast. What comes from shared memory was counted when it was issued.
    if (place.cta != cta && from_side == Side::global) warp->counters.dsmem_bytes += bytes;
    if (signal != 0) barrier_receive(*this, signal, bytes);
  }
};

enum BulkFlags : u32 {
  flag_to_global = 1,
  flag_from_shared = 2,
  flag_multicast = 4,
  flag_reduce = 8
};

// operands: destination, source, size, [mbarrier], [mask]
Step run_bulk(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    auto op = std::make_unique<BulkOp>();
    op->to = warp.address(o[0], lane);
    op->from = warp.address(o[1], lane);
    op->bytes = warp.value32(o[2], lane);
    op->to_side = (inst.flags & flag_to_global) != 0 ? Side::global : Side::shared;
    op->from_side = (inst.flags & flag_from_shared) != 0 ? Side::shared : Side::global;
    if (op->to_side == Side::shared) op->barrier = static_cast<u32>(warp.address(o[3], lane));
    if ((inst.flags & flag_multicast) != 0) {
      op->multicast = static_cast<u16>(warp.value32(o[4], lane));
    }
    op->reduce = (inst.flags & flag_reduce) != 0;
    op->operation = static_cast<AtomicKind>(inst.mode);
    op->type = inst.type;
    op->group = warp.bulk_group;
    if (op->bytes % 16 != 0 || op->to % 16 != 0 || op->from % 16 != 0) {
      warp.fault(FaultKind::misaligned, inst, lane,
                 "a bulk copy of " + std::to_string(op->bytes) + " bytes from " + hex(op->from) +
                     " to " + hex(op->to) + " must have multiples of 16 in all three.");
      warp.launch->stopped = true;
      return;
    }
    if (op->bytes == 0) return;
    if (op->to_side == Side::global) {
      warp.counters.tma_store_bytes += op->bytes;
    } else {
      const bool loads = op->from_side == Side::global;
      (loads ? warp.counters.tma_load_bytes : warp.counters.dsmem_bytes) += op->bytes;
    }
    warp.cluster->enqueue(std::move(op), warp, inst, lane);
  });
  return Step::next;
}

// ---- st.async and red.async: a few bytes to another CTA, completing on its mbarrier

class RemoteStoreOp : public AsyncOp {
 public:
  u32 to = 0, barrier = 0;
  std::vector<u8> data;
  bool reduce = false;
  AtomicKind operation = AtomicKind::add;
  Type type = Type::none;

  const char* name() const override { return reduce ? "red.async" : "st.async"; }
  bool execute(Cluster& cluster) override {
    const u32 bytes = static_cast<u32>(data.size());
    const Place place = resolve_shared(*this, to, bytes, "a remote write");
    if (place.data == nullptr) return true;
    if (cluster.launch->checks) {
      AccessView who = view();
      who.async = false;
      check_shared(who, *place.cta, place.offset, bytes, reduce ? Access::atomic : Access::write);
    }
    if (reduce) {
      u64 old = 0, value = 0;
      std::memcpy(&old, place.data, bytes);
      std::memcpy(&value, data.data(), bytes);
      const u64 result = apply_atomic(operation, type, old, value, 0);
      std::memcpy(place.data, &result, bytes);
    } else {
      std::memcpy(place.data, data.data(), bytes);
    }
    warp->counters.dsmem_bytes += bytes;
    barrier_receive(*this, barrier, bytes);
    return true;
  }
};

Step run_remote_store(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bytes = type_bytes(inst.type), count = inst.inputs - 2u;
  for_lanes(warp.active, [&](int lane) {
    auto op = std::make_unique<RemoteStoreOp>();
    op->to = static_cast<u32>(warp.address(o[0], lane));
    op->barrier = static_cast<u32>(warp.address(o[1], lane));
    op->data.resize(std::size_t{bytes} * count);
    for (u32 i = 0; i < count; ++i) {
      const u64 value = warp.value(o[2 + i], lane);
      std::memcpy(op->data.data() + i * bytes, &value, bytes);
    }
    op->reduce = inst.flags != 0;
    op->operation = static_cast<AtomicKind>(inst.mode);
    op->type = inst.type;
    warp.cluster->enqueue(std::move(op), warp, inst, lane);
  });
  return Step::next;
}

// ---- clusterlaunchcontrol: takes over a cluster that has not started
//
// A cluster that has seen a request fail may not make another (PTX ISA, try_cancel), and what
// get_first_ctaid says of a failed request is undefined.

class CancelOp : public AsyncOp {
 public:
  u32 to = 0, barrier = 0;
  bool all = false;
  const char* name() const override { return "clusterlaunchcontrol"; }
  bool execute(Cluster& cluster) override {
    Launch& launch = *cluster.launch;
    u32 answer[4] = {0, 0, 0, 0};
    if (launch.next_cluster < launch.clusters) {
      const u64 index = launch.next_cluster++;
      const std::array<u32, 3>& dims = launch.cluster_dims;
      const u64 x = launch.config.grid.x / dims[0], y = launch.config.grid.y / dims[1];
      answer[0] = static_cast<u32>(index % x) * dims[0];
      answer[1] = static_cast<u32>(index / x % y) * dims[1];
      answer[2] = static_cast<u32>(index / x / y) * dims[2];
      answer[3] = 1;
    }
    const u32 low = (1u << kRankShift) - 1;
    for (u32 rank = 0; rank < cluster.ctas.size(); ++rank) {
      if (!all && rank != cta->rank) continue;
      const u32 address = (to & low) | rank << kRankShift;
      const Place place = resolve_shared(*this, address, 16, "a launch control answer");
      if (place.data == nullptr) return true;
      if (launch.checks) check_shared(view(), *place.cta, place.offset, 16, Access::write);
      std::memcpy(place.data, answer, 16);
      barrier_receive(*this, (barrier & low) | rank << kRankShift, 16);
    }
    return true;
  }
};

Step run_try_cancel(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) {
    if (warp.cluster->cancel_failed) {
      warp.fault(
          FaultKind::bad_argument, inst, lane,
          "a cluster asks for another launch to cancel after it has seen that none is left.");
    }
    if (warp.address(o[0], lane) % 16 != 0) {
      warp.fault(FaultKind::misaligned, inst, lane,
                 "the answer of a launch control request goes to a multiple of 16 bytes, not to " +
                     hex(warp.address(o[0], lane)) + ".");
      warp.launch->stopped = true;
      return;
    }
    auto op = std::make_unique<CancelOp>();
    op->to = static_cast<u32>(warp.address(o[0], lane));
    op->barrier = static_cast<u32>(warp.address(o[1], lane));
    op->all = inst.flags != 0;
    warp.cluster->enqueue(std::move(op), warp, inst, lane);
  });
  return Step::next;
}

// mode 0 is_canceled, 1 to 3 one coordinate, 4 all three
Step run_query_cancel(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32* answer = static_cast<const u32*>(warp.source(o[inst.outputs]));
  u32 yes = 0;
  for_lanes(warp.active, [&](int lane) {
    if (answer[4 * lane + 3] == 1) yes |= 1u << lane;
  });
  if (inst.mode == 0) {
    warp.cluster->cancel_failed = warp.cluster->cancel_failed || yes != warp.active;
    u32& p = warp.predicates[static_cast<u32>(o[0].slot)];
    p = (p & ~warp.active) | yes;
    return Step::next;
  }
  const u32 first = inst.mode == 4 ? 0 : inst.mode - 1u;
  for (u32 i = 0; i < inst.outputs; ++i) {
    if (o[i].kind == OperandRef::Kind::none) continue;
    for_lanes(warp.active, [&](int lane) {
      // The fourth word of a vector is unused, and zero.
      const u32 value = i < 3 ? answer[4 * lane + static_cast<int>(first + i)] : 0;
      warp.set(o[i], lane, value);
    });
    if (warp.launch->checks) check_define(warp, o[i], warp.active, yes);
  }
  return Step::next;
}

Step run_bulk_wait(Warp& warp, const Inst& inst) {
  const bool reads_only = inst.flags != 0;
  const u64 below = warp.bulk_group - std::min<u64>(inst.immediate, warp.bulk_group);
  for (const auto& op : warp.cluster->pending) {
    if (op->warp == &warp && bulk_unfinished(*op, below, reads_only)) return Step::blocked;
  }
  join_finished(warp, true, below, reads_only);
  // Reads that have ended count even while the writes are still on their way.
  if (reads_only && warp.launch->checks) {
    for (const auto& op : warp.cluster->pending) {
      if (op->warp == &warp && bulk_group_of(*op) < below) {
        warp.check.clock.raise(clock_ordered, op->agent, op->agent_clock);
      }
    }
  }
  ++warp.counters.barrier_waits;
  return Step::next;
}

void build_cp_async(Builder& b) {
  Inst& inst = b.inst;
  if (b.has("commit_group")) {
    inst.run = run_copy_commit;
  } else if (b.has("wait_group") || b.has("wait_all")) {
    inst.flags = b.has("wait_all") ? 1u : 0u;
    inst.immediate = inst.flags != 0 ? 0 : static_cast<u32>(b.integer(b.operand(0)));
    inst.run = run_cp_wait;
  } else if (b.has("mbarrier")) {
    b.address(b.operand(0), Space::shared);
    inst.mode = b.has("noinc") ? 1 : 0;
    inst.run = run_copy_arrive;
  } else {
    b.expect_count(3, 5);
    b.address(b.operand(0), Space::shared);
    b.address(b.operand(1), Space::global);
    inst.immediate = static_cast<u32>(b.integer(b.operand(2)));
    if (inst.immediate != 4 && inst.immediate != 8 && inst.immediate != 16) {
      b.fail("cp.async copies 4, 8 or 16 bytes.");
    }
    const bool hint = b.has("L2::cache_hint");
    const std::size_t optional = b.count() - 3 - (hint ? 1 : 0);
    if (optional > 0) {
      if (b.operand(3).kind == Operand::Kind::reg && b.reg(b.operand(3)).type == Type::pred) {
        b.fail("the ignore-src predicate of cp.async is not supported.");
      }
      b.input(b.operand(3), Type::b32);
    }
    inst.unit = Unit::memory;
    inst.run = run_cp_async;
  }
}

void build_bulk(Builder& b) {
  Inst& inst = b.inst;
  std::vector<std::string_view> sides;
  for (const std::string_view word : b.text.modifiers) {
    if (word == "global" || word.substr(0, 6) == "shared") sides.push_back(word);
  }
  if (sides.size() != 2) b.fail("a bulk copy names two state spaces.");
  const bool to_global = sides[0] == "global", from_shared = sides[1] != "global";
  if (b.has("cp_mask")) b.fail("the byte mask of cp.async.bulk is not supported.");
  const bool multicast = b.has("multicast::cluster");
  inst.flags = (to_global ? flag_to_global : 0u) | (from_shared ? flag_from_shared : 0u) |
               (multicast ? flag_multicast : 0u) | (b.has("reduce") ? flag_reduce : 0u);
  if (b.has("reduce")) {
    inst.type = b.type(0);
    const int kind =
        b.which({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
    if (kind < 0) b.fail("the reduction is missing.");
    inst.mode = static_cast<u8>(kind);
  }
  b.address(b.operand(0), to_global ? Space::global : Space::shared);
  b.address(b.operand(1), from_shared ? Space::shared : Space::global);
  b.input(b.operand(2), Type::b32);
  if (!to_global) b.address(b.operand(3), Space::shared);
  if (multicast) b.input(b.operand(4), Type::b16);
  inst.unit = Unit::memory;
  inst.run = run_bulk;
}

}  // namespace

bool bulk_unfinished(const AsyncOp& op, u64 below, bool reads_only) {
  if (const auto* bulk = dynamic_cast<const BulkOp*>(&op)) {
    return bulk->barrier == 0 && bulk->group < below && !(reads_only && bulk->reads_done());
  }
  return tensor_store_unfinished(op, below, reads_only);
}

u64 bulk_group_of(const AsyncOp& op) {
  if (const auto* bulk = dynamic_cast<const BulkOp*>(&op)) {
    return bulk->barrier == 0 ? bulk->group : ~u64{0};
  }
  return tensor_store_group(op);
}

AccessView AsyncOp::view() const {
  AccessView result;
  result.launch = cta->cluster->launch;
  result.cluster = cta->cluster;
  result.cta = cta;
  result.warp = static_cast<int>(warp->index);
  result.lane = lane;
  result.inst = inst;
  result.agent_name = name();
  result.clock = &clock;
  result.agent = result.twin = agent;
  result.tick = agent_clock;
  result.async = through_async_proxy();
  return result;
}

namespace {

Mbarrier* signalled(const AsyncOp& op, u32 shared_address, Cta*& target) {
  Cluster& cluster = *op.cta->cluster;
  const u32 offset = shared_address & ((1u << kRankShift) - 1);
  target = cluster.cta_of(shared_address);
  Mbarrier* barrier = target == nullptr ? nullptr : find_barrier(*target, offset);
  if (barrier == nullptr) {
    cluster.launch->fault(
        FaultKind::barrier_misuse, op.cta, static_cast<int>(op.warp->index), op.lane, op.inst,
        op.name(),
        "completes on " + hex(shared_address) + ", where there is no initialised mbarrier.");
    return nullptr;
  }
  if (cluster.launch->checks) {
    check_barrier_use(op.view(), *barrier, op.through_async_proxy());
    check_release_async(op, barrier->arriving);
  }
  return barrier;
}

}  // namespace

void barrier_receive(const AsyncOp& op, u32 shared_address, u64 bytes) {
  Cta* target = nullptr;
  Mbarrier* barrier = signalled(op, shared_address, target);
  if (barrier == nullptr) return;
  barrier->bytes -= static_cast<i64>(bytes);
  barrier->bytes_received_total += bytes;
  barrier_advance(*target, *barrier);
}

void barrier_signal(const AsyncOp& op, u32 shared_address) {
  Cta* target = nullptr;
  Mbarrier* barrier = signalled(op, shared_address, target);
  if (barrier == nullptr) return;
  Launch& launch = *op.cta->cluster->launch;
  std::string problem;
  if (!barrier_arrive(launch, *target, *barrier, 1, problem)) {
    launch.fault(FaultKind::arrivals, op.cta, static_cast<int>(op.warp->index), op.lane, op.inst,
                 op.name(), problem);
  }
}

void build_async_store(Builder& b) {
  Inst& inst = b.inst;
  inst.type = b.type(0);
  inst.unit = Unit::memory;
  b.address(b.operand(0), Space::shared_cluster);
  b.address(b.operand(2), Space::shared_cluster);
  b.input_list(b.operand(1), inst.type);
  if (b.text.mnemonic == "red") {
    inst.flags = 1;
    const int kind =
        b.which({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
    if (kind < 0) b.fail("the operation is missing.");
    inst.mode = static_cast<u8>(kind);
  }
  inst.run = run_remote_store;
}

void build_copy(Builder& b) {
  Inst& inst = b.inst;
  if (!b.has("bulk")) {
    build_cp_async(b);
    return;
  }
  if (b.has("commit_group")) {
    inst.mode = 1;
    inst.run = run_copy_commit;
  } else if (b.has("wait_group")) {
    inst.immediate = static_cast<u32>(b.integer(b.operand(0)));
    inst.flags = b.has("read") ? 1u : 0u;
    inst.run = run_bulk_wait;
  } else if (b.has("prefetch")) {
    build_nothing(b);
  } else if (b.has("tensor")) {
    build_tensor_copy(b);
  } else {
    build_bulk(b);
  }
}

void build_launch_control(Builder& b) {
  Inst& inst = b.inst;
  b.only_for("sm_10");
  b.expect_count(2, 2);
  if (b.has("try_cancel")) {
    b.address(b.operand(0), Space::shared);
    b.address(b.operand(1), Space::shared);
    inst.flags = b.has("multicast::cluster::all") ? 1u : 0u;
    inst.run = run_try_cancel;
    return;
  }
  const int kind = b.which({"is_canceled", "get_first_ctaid::x", "get_first_ctaid::y",
                            "get_first_ctaid::z", "get_first_ctaid"});
  if (kind < 0) b.fail("clusterlaunchcontrol.query_cancel needs a question.");
  inst.mode = static_cast<u8>(kind);
  b.output_list(b.operand(0), kind == 0 ? Type::pred : Type::b32);
  b.input(b.operand(1), Type::b128);
  inst.late = kind != 0;  // which lanes are defined is the handler's to say
  inst.run = run_query_cancel;
}

}  // namespace fovea::emulator
