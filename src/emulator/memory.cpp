// Device memory, and what a thread's or an asynchronous operation's address means.
#include <algorithm>
#include <cstring>

#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

constexpr u64 kGuardBytes = 4096;  // unmapped space behind every allocation

std::string describe(const Allocation* allocation) {
  return "the allocation of " + std::to_string(allocation->bytes) + " bytes at " +
         hex(allocation->base);
}

std::string where_global(const MachineData& machine, u64 address, u64 bytes) {
  for (const auto& allocation : machine.allocations) {
    const u64 end = allocation->base + allocation->bytes;
    if (address < end && address + bytes > end && address >= allocation->base) {
      return "passes the end of " + describe(allocation.get()) + " by " +
             std::to_string(address + bytes - end) + ".";
    }
    if (address >= end && address < end + kGuardBytes) {
      return "begins " + std::to_string(address - end) + " bytes after the end of " +
             describe(allocation.get()) + ".";
    }
    if (address < allocation->base && address + kGuardBytes >= allocation->base) {
      return "begins " + std::to_string(allocation->base - address) + " bytes before " +
             describe(allocation.get()) + ".";
    }
  }
  return "is not in any allocation.";
}

std::string access_text(u64 address, u64 bytes, bool write) {
  return std::string(write ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes at " +
         hex(address) + " ";
}

}  // namespace

namespace {

Allocation& insert(std::vector<std::unique_ptr<Allocation>>& list,
                   std::unique_ptr<Allocation> allocation) {
  const auto at = std::upper_bound(list.begin(), list.end(), allocation->base,
                                   [](u64 base, const auto& a) { return base < a->base; });
  return **list.insert(at, std::move(allocation));
}

}  // namespace

Allocation* MachineData::find(u64 address, u64 bytes) const {
  auto inside = [&](const Allocation& a) {
    return address >= a.base && address - a.base <= a.bytes &&
           bytes <= a.bytes - (address - a.base);
  };
  if (last != nullptr && inside(*last)) return last;
  const auto it = std::upper_bound(allocations.begin(), allocations.end(), address,
                                   [](u64 at, const auto& a) { return at < a->base; });
  if (it == allocations.begin()) return nullptr;
  Allocation* candidate = std::prev(it)->get();
  if (!inside(*candidate)) return nullptr;
  last = candidate;
  return candidate;
}

u64 MachineData::allocate(u64 bytes) {
  if (bytes > (u64{1} << 40)) throw Error(0, "an allocation of more than 1 TiB was asked for.");
  auto allocation = std::make_unique<Allocation>();
  allocation->base = next_address;
  allocation->bytes = bytes;
  allocation->own = std::make_unique<u8[]>(std::max<u64>(bytes, 1));
  allocation->data = allocation->own.get();
  std::memset(allocation->data, 0xcd, bytes);
  next_address += (bytes + kGuardBytes + 511) / 512 * 512;
  return insert(allocations, std::move(allocation)).base;
}

void MachineData::adopt(u8* memory, u64 bytes) {
  const u64 base = reinterpret_cast<std::uintptr_t>(memory);
  const auto overlaps = [&](u64 begin, u64 size) {
    return base < begin + size && begin < base + bytes;
  };
  for (const u64 window : {kSharedWindow, kLocalWindow, kParamWindow}) {
    if (overlaps(window, u64{1} << 32)) {
      throw Error(0, "host memory at " + hex(base) + " lies in a window of the machine.");
    }
  }
  for (const auto& other : allocations) {
    if (!overlaps(other->base, std::max<u64>(other->bytes, 1))) continue;
    throw Error(0, "host memory at " + hex(base) + " is visible to kernels already.");
  }
  auto allocation = std::make_unique<Allocation>();
  allocation->base = base;
  allocation->bytes = bytes;
  allocation->data = memory;
  insert(allocations, std::move(allocation));
}

void MachineData::place_variables(const ModuleData& module) {
  auto& placed = symbols[module.serial];
  auto& variables = const_cast<ModuleData&>(module).variables;
  for (Variable& variable : variables) {
    if (variable.space != Space::global && variable.space != Space::constant) continue;
    if (placed.count(variable.name) != 0) {
      variable.offset = placed[variable.name];
      continue;
    }
    if (variable.external) {
      throw Error(0, "variable " + variable.name + " is external: linking is not supported.");
    }
    const u64 address = allocate(variable.bytes);
    Allocation& allocation = *find(address, variable.bytes);
    allocation.constant = variable.space == Space::constant;
    std::memset(allocation.data, 0, variable.bytes);
    std::copy(variable.initial.begin(), variable.initial.end(), allocation.data);
    placed[variable.name] = address;
    variable.offset = address;
  }
  for (const Variable& variable : variables) {
    for (const Variable::Address& pointer : variable.addresses) {
      const auto target = placed.find(pointer.symbol);
      if (target == placed.end()) {
        throw Error(0, "the initial value of " + variable.name + " names " + pointer.symbol +
                           ", which is not a .global or .const variable.");
      }
      const u64 value = target->second + static_cast<u64>(pointer.addend);
      std::memcpy(find(variable.offset, 8)->data + pointer.at, &value, 8);
    }
  }
}

u64 MachineData::symbol(const ModuleData& module, const std::string& name) {
  place_variables(module);
  const auto& placed = symbols[module.serial];
  const auto it = placed.find(name);
  return it == placed.end() ? 0 : it->second;
}

Cta* Cluster::cta_of(u64 shared_address) {
  const u64 rank = shared_address >> kRankShift & 0xff;
  return rank < ctas.size() ? ctas[rank].get() : nullptr;
}

namespace {

Place shared_place(Warp& warp, const Inst& inst, Space space, u64 address, u32 bytes, int lane,
                   bool write) {
  Place place;
  Cta* cta = warp.cluster->cta_of(address & 0xffffffffu);
  const u32 offset = static_cast<u32>(address & ((1u << kRankShift) - 1));
  if (cta == nullptr || (space == Space::shared && cta != warp.cta)) {
    warp.fault(FaultKind::out_of_bounds, inst, lane,
               access_text(address, bytes, write) + "names shared memory of CTA " +
                   std::to_string(address >> kRankShift & 0xff) + ", not of this CTA.");
    warp.launch->stopped = true;
    return place;
  }
  if (offset < kSharedStart || u64{offset} + bytes > cta->shared.size()) {
    warp.fault(FaultKind::out_of_bounds, inst, lane,
               access_text(address, bytes, write) +
                   "is outside the CTA's shared memory, which is " + hex(kSharedStart) + " to " +
                   hex(cta->shared.size()) + ".");
    warp.launch->stopped = true;
    return place;
  }
  if (cta->live_warps == 0) {
    warp.fault(FaultKind::out_of_bounds, inst, lane,
               access_text(address, bytes, write) + "reaches CTA " + std::to_string(cta->rank) +
                   " of the cluster after it has ended.");
  }
  place.space = Space::shared;
  place.cta = cta;
  place.offset = offset;
  place.data = cta->shared.data() + offset;
  return place;
}

Place local_place(Warp& warp, const Inst& inst, u64 offset, u32 bytes, int lane, bool write) {
  Place place;
  const u64 frame = warp.program->local_bytes;
  if (offset + bytes > frame) {
    warp.fault(FaultKind::out_of_bounds, inst, lane,
               access_text(offset, bytes, write) + "passes the thread's " + std::to_string(frame) +
                   " bytes of local memory.");
    warp.launch->stopped = true;
    return place;
  }
  place.space = Space::local;
  place.data =
      warp.cta->local.data() + (u64{warp.index} * 32 + static_cast<u64>(lane)) * frame + offset;
  return place;
}

Place parameter_place(Warp& warp, const Inst& inst, u64 offset, u32 bytes, int lane, bool write) {
  Place place;
  std::vector<u8>& block = warp.launch->parameters;
  if (write || offset + bytes > block.size()) {
    warp.fault(FaultKind::out_of_bounds, inst, lane,
               access_text(offset, bytes, write) + "does not fit the read-only parameters of " +
                   std::to_string(block.size()) + " bytes.");
    warp.launch->stopped = true;
    return place;
  }
  place.space = Space::param;
  place.data = block.data() + offset;
  return place;
}

}  // namespace

Place resolve(Warp& warp, const Inst& inst, Space space, u64 address, u32 bytes, int lane,
              bool write) {
  Place place;
  if (bytes > 1 && (address & (bytes - 1)) != 0 && std::has_single_bit(bytes)) {
    warp.fault(FaultKind::misaligned, inst, lane,
               access_text(address, bytes, write) + "is not aligned to its size.");
    warp.launch->stopped = true;
    return place;
  }
  const u64 window = address >> 32;
  if (space == Space::none) {
    if (window == kSharedWindow >> 32) {
      space = Space::shared_cluster;
    } else if (window == kLocalWindow >> 32) {
      space = Space::local;
    } else if (window == kParamWindow >> 32) {
      space = Space::param;
    } else {
      space = Space::global;
    }
  }
  switch (space) {
    case Space::shared:
    case Space::shared_cluster: return shared_place(warp, inst, space, address, bytes, lane, write);
    case Space::local: return local_place(warp, inst, address & 0xffffffffu, bytes, lane, write);
    case Space::param:
      return parameter_place(warp, inst, address & 0xffffffffu, bytes, lane, write);
    default: break;
  }
  Allocation* allocation = warp.launch->machine->find(address, bytes);
  if (allocation == nullptr) {
    warp.fault(
        FaultKind::out_of_bounds, inst, lane,
        access_text(address, bytes, write) + where_global(*warp.launch->machine, address, bytes));
    warp.launch->stopped = true;
    return place;
  }
  place.space = Space::global;
  place.allocation = allocation;
  place.address = address;
  place.data = allocation->data + (address - allocation->base);
  return place;
}

Place resolve_global(const AsyncOp& op, u64 address, u64 bytes, const char* what) {
  Place place;
  Launch& launch = *op.cta->cluster->launch;
  Allocation* allocation = launch.machine->find(address, bytes);
  if (allocation == nullptr) {
    launch.fault(FaultKind::out_of_bounds, op.cta, static_cast<int>(op.warp->index), op.lane,
                 op.inst, op.name(),
                 std::string(what) + " of " + std::to_string(bytes) + " bytes at " + hex(address) +
                     " " + where_global(*launch.machine, address, bytes));
    launch.stopped = true;
    return place;
  }
  place.space = Space::global;
  place.allocation = allocation;
  place.address = address;
  place.data = allocation->data + (address - allocation->base);
  return place;
}

Place resolve_shared(const AsyncOp& op, u32 address, u32 bytes, const char* what) {
  Place place;
  Cluster& cluster = *op.cta->cluster;
  Cta* cta = cluster.cta_of(address);
  const u32 offset = address & ((1u << kRankShift) - 1);
  std::string problem;
  if (cta == nullptr) {
    problem = "names CTA " + std::to_string(address >> kRankShift) + " of a cluster of " +
              std::to_string(cluster.ctas.size()) + ".";
  } else if (offset < kSharedStart || u64{offset} + bytes > cta->shared.size()) {
    problem = "is outside shared memory, which is " + hex(kSharedStart) + " to " +
              hex(cta->shared.size()) + ".";
  } else if (cta->live_warps == 0) {
    problem = "reaches CTA " + std::to_string(cta->rank) + " after all its warps have exited.";
  }
  if (!problem.empty()) {
    cluster.launch->fault(FaultKind::out_of_bounds, op.cta, static_cast<int>(op.warp->index),
                          op.lane, op.inst, op.name(),
                          std::string(what) + " of " + std::to_string(bytes) + " bytes at " +
                              hex(address) + " " + problem);
    if (cta == nullptr || offset < kSharedStart || u64{offset} + bytes > cta->shared.size()) {
      cluster.launch->stopped = true;
      return place;
    }
  }
  place.space = Space::shared;
  place.cta = cta;
  place.offset = offset;
  place.data = cta->shared.data() + offset;
  return place;
}

}  // namespace fovea::emulator
