// tcgen05.alloc, dealloc and relinquish_alloc_permit, of one CTA or of a pair.
//
// With cta_group::2 a warp of each CTA of the pair performs the operation together (PTX ISA,
// tcgen05, issue granularity): the first that comes waits for the other, and the columns are the
// same in both CTAs. A kernel may not count on the wait as a synchronisation, so the checker
// orders nothing by it.
#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "emulator/builders.h"
#include "emulator/execute.h"
#include "emulator/tensor.h"

namespace fovea::emulator {
namespace {

constexpr u32 kColumnsOfRequest = 32;  // allocations are multiples of it

bool valid_columns(Warp& warp, const Inst& inst, u32 columns) {
  if (columns >= 32 && columns <= 512 && std::has_single_bit(columns)) return true;
  warp.fault(
      FaultKind::tensor_memory, inst, -1,
      std::to_string(columns) + " columns cannot be allocated; a power of two from 32 to 512 can.");
  warp.launch->stopped = true;
  return false;
}

// The first column from which `columns` are free in all of `ctas`, or -1.
i64 find_free(std::span<Cta* const> ctas, u32 columns) {
  const u32 total = static_cast<u32>(ctas[0]->tensor.owner.size());
  for (u32 first = 0; first + columns <= total; first += kColumnsOfRequest) {
    const bool is_free = std::all_of(ctas.begin(), ctas.end(), [&](const Cta* cta) {
      const auto begin = cta->tensor.owner.begin() + first;
      return std::all_of(begin, begin + columns, [](i32 owner) { return owner < 0; });
    });
    if (is_free) return first;
  }
  return -1;
}

void take(Launch& launch, Cta& cta, u32 first, u32 columns) {
  TensorMemory& memory = cta.tensor;
  std::fill_n(memory.owner.begin() + first, columns, static_cast<i32>(memory.allocations.size()));
  memory.allocations.emplace_back(first, columns);
  if (launch.checks) {
    auto& cells = cta.cluster->check.tensor[cta.rank];
    std::fill_n(cells.begin() + i64{first} * 8, columns * 8, Cell{});
  }
}

// Writes the address of an allocation to where the instruction wants it.
void answer(Warp& warp, const Inst& inst, u32 first) {
  const Place place =
      resolve(warp, inst, inst.space, warp.address(warp.operands(inst)[0], 0), 4, 0, true);
  if (place.data == nullptr) return;
  std::memcpy(place.data, &first, 4);
  if (warp.launch->checks) {
    check_shared(view_of(warp, inst, 0), *place.cta, place.offset, 4, Access::write);
  }
}

// Frees what one CTA holds at `address`. Whoever still uses the columns races with it, unless one
// of the warps that perform the operation knows that the use has ended: `clock` is what they know.
void release(Warp& warp, const Inst& inst, const Clock& clock, u32 address, u32 columns) {
  TensorMemory& memory = warp.cta->tensor;
  const auto held = std::find(memory.allocations.begin(), memory.allocations.end(),
                              std::pair{tensor_column(address), columns});
  if (held == memory.allocations.end() || columns == 0) {
    warp.fault(
        FaultKind::tensor_memory, inst, -1,
        "no allocation of " + std::to_string(columns) + " columns begins at " + hex(address) + ".");
    return;
  }
  if (warp.launch->checks) {
    AccessView view = view_of(warp, inst, -1);
    view.clock = &clock;
    check_tensor(view, *warp.cta, held->first, columns, 0, kTensorLanes, Access::write,
                 kOrderedByBarriers);
  }
  std::fill_n(memory.owner.begin() + held->first, columns, -1);
  held->second = 0;
}

void refuse_after_relinquish(Warp& warp, const Inst& inst) {
  if (warp.cta->tensor.may_allocate) return;
  warp.fault(FaultKind::tensor_memory, inst, -1,
             "tensor memory is allocated after the permit was relinquished.");
}

// ---- one CTA

Step run_alone(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  switch (static_cast<TensorRequest::Kind>(inst.mode)) {
    case TensorRequest::Kind::allocate: {
      const u32 columns = warp.value32(o[1], 0);
      if (!valid_columns(warp, inst, columns)) return Step::next;
      refuse_after_relinquish(warp, inst);
      Cta* const ctas[] = {warp.cta};
      const i64 first = find_free(ctas, columns);
      if (first < 0) return Step::blocked;
      take(*warp.launch, *warp.cta, static_cast<u32>(first), columns);
      answer(warp, inst, static_cast<u32>(first));
      break;
    }
    case TensorRequest::Kind::free:
      release(warp, inst, warp.check.clock, warp.value32(o[0], 0), warp.value32(o[1], 0));
      break;
    default: warp.cta->tensor.may_allocate = false; break;
  }
  warp.cluster->changed();
  return Step::next;
}

// ---- a pair of CTAs

bool same(const TensorRequest& a, const TensorRequest& b) {
  return a.kind == b.kind && a.columns == b.columns && a.address == b.address;
}

std::string text_of(const TensorRequest& request) {
  switch (request.kind) {
    case TensorRequest::Kind::allocate:
      return "allocates " + std::to_string(request.columns) + " columns";
    case TensorRequest::Kind::free:
      return "frees " + std::to_string(request.columns) + " columns at " + hex(request.address);
    default: return "relinquishes the permit";
  }
}

// Does for both CTAs what their warps ask for; false when there is no room yet.
bool perform(TensorRequest& mine, TensorRequest& other) {
  Warp& warp = *mine.warp;
  Warp& peer = *other.warp;
  if (!same(mine, other)) {
    warp.fault(FaultKind::tensor_memory, *mine.inst, -1,
               "CTA " + std::to_string(warp.cta->rank) + " " + text_of(mine) +
                   " where its peer of the pair " + text_of(other) +
                   "; cta_group::2 asks both for the same.");
    warp.launch->stopped = true;
    return true;
  }
  switch (mine.kind) {
    case TensorRequest::Kind::allocate: {
      Cta* const ctas[] = {warp.cta, peer.cta};
      const i64 first = find_free(ctas, mine.columns);
      if (first < 0) return false;
      for (TensorRequest* request : {&mine, &other}) {
        take(*warp.launch, *request->warp->cta, static_cast<u32>(first), request->columns);
        request->address = static_cast<u32>(first);
      }
      break;
    }
    case TensorRequest::Kind::free: {
      Clock known = warp.check.clock;
      if (warp.launch->checks) known.join(peer.check.clock, clock_parts);
      release(warp, *mine.inst, known, mine.address, mine.columns);
      release(peer, *other.inst, known, other.address, other.columns);
      break;
    }
    default:
      warp.cta->tensor.may_allocate = false;
      peer.cta->tensor.may_allocate = false;
      break;
  }
  return true;
}

bool enter(Warp& warp, const Inst& inst, TensorRequest& request) {
  const OperandRef* o = warp.operands(inst);
  TensorRequest fresh;
  fresh.kind = static_cast<TensorRequest::Kind>(inst.mode);
  if (fresh.kind == TensorRequest::Kind::allocate) {
    fresh.columns = warp.value32(o[1], 0);
    if (!valid_columns(warp, inst, fresh.columns)) return false;
    refuse_after_relinquish(warp, inst);
  } else if (fresh.kind == TensorRequest::Kind::free) {
    fresh.address = warp.value32(o[0], 0);
    fresh.columns = warp.value32(o[1], 0);
  }
  fresh.warp = &warp;
  fresh.inst = &inst;
  request = fresh;
  warp.cluster->changed();
  return true;
}

Step run_together(Warp& warp, const Inst& inst) {
  Cta* const peer = peer_of(*warp.cta);
  if (peer == nullptr) {
    warp.fault(FaultKind::bad_argument, inst, -1, kNoPeer);
    warp.launch->stopped = true;
    return Step::next;
  }
  TensorRequest& mine = warp.cta->tensor.request;
  TensorRequest& other = peer->tensor.request;
  if (mine.warp == nullptr && !enter(warp, inst, mine)) return Step::next;
  if (mine.warp != &warp) return Step::blocked;  // another warp of this CTA is at it
  if (!mine.done) {
    if (other.warp == nullptr || other.done || !perform(mine, other)) return Step::blocked;
    mine.done = other.done = true;
  }
  const TensorRequest ended = std::exchange(mine, TensorRequest{});
  if (ended.kind == TensorRequest::Kind::allocate) answer(warp, inst, ended.address);
  warp.cluster->changed();
  return Step::next;
}

Step run_request(Warp& warp, const Inst& inst) {
  if (!whole_warp(warp, inst)) return Step::next;
  return inst.flags != 0 ? run_together(warp, inst) : run_alone(warp, inst);
}

}  // namespace

bool whole_warp(Warp& warp, const Inst& inst) {
  if (warp.active == ~0u) return true;
  warp.fault(FaultKind::divergent, inst, -1,
             "an aligned tcgen05 instruction is executed by lanes " + hex(warp.active) + " only.");
  return false;
}

Cta* peer_of(const Cta& cta) {
  const auto& ctas = cta.cluster->ctas;
  const u32 rank = cta.rank ^ 1u;
  return rank < ctas.size() ? ctas[rank].get() : nullptr;
}

void build_tensor_allocation(Builder& b) {
  Inst& inst = b.inst;
  TensorRequest::Kind kind = TensorRequest::Kind::relinquish;
  if (b.has("alloc")) {
    kind = TensorRequest::Kind::allocate;
    b.expect_count(2, 2);
    inst.space = b.space();
    b.address(b.operand(0), inst.space);
    b.input(b.operand(1), Type::b32);
  } else if (b.has("dealloc")) {
    kind = TensorRequest::Kind::free;
    b.expect_count(2, 2);
    b.input(b.operand(0), Type::b32);
    b.input(b.operand(1), Type::b32);
  } else {
    b.expect_count(0, 0);
  }
  inst.mode = static_cast<u8>(kind);
  inst.flags = b.has("cta_group::2") ? 1u : 0u;
  inst.run = run_request;
}

}  // namespace fovea::emulator
