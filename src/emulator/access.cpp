// Loads, stores, atomics, matrix loads and stores, and memory fences.
#include <algorithm>
#include <array>
#include <cstring>

#include "emulator/async.h"
#include "emulator/builders.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

enum AccessFlags : u32 { flag_strong = 1, flag_acquire = 2, flag_release = 4 };

// Extra cycles of one access: lanes of a phase that hit different words of one of the 32 banks.
u64 bank_conflicts(const u32* offsets, u32 mask, u32 bytes) {
  const int lanes_per_phase = bytes >= 16 ? 8 : bytes == 8 ? 16 : 32;
  u64 extra = 0;
  for (int begin = 0; begin < 32; begin += lanes_per_phase) {
    std::array<u32, 128> words;
    std::size_t count = 0;
    for (int lane = begin; lane < begin + lanes_per_phase; ++lane) {
      if ((mask >> lane & 1u) == 0) continue;
      const u32 first = offsets[lane] / 4, last = (offsets[lane] + bytes - 1) / 4;
      for (u32 word = first; word <= last && count < words.size(); ++word) words[count++] = word;
    }
    if (count == 0) continue;
    std::array<u8, 32> per_bank{};
    std::sort(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(count));
    u8 worst = 1;
    for (std::size_t i = 0; i < count; ++i) {
      if (i > 0 && words[i] == words[i - 1]) continue;
      worst = std::max(worst, ++per_bank[words[i] % 32]);
    }
    extra += worst - 1u;
  }
  return extra;
}

// Where the lanes of one access point to, and the shared offsets for the bank count.
struct Lanes {
  std::array<Place, 32> place;
  std::array<u32, 32> offset{};
  u32 shared = 0;  // lanes in shared memory
};

bool locate(Warp& warp, const Inst& inst, const OperandRef& address, u32 bytes, bool write,
            Lanes& lanes) {
  for (u32 mask = warp.active; mask != 0; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    const std::size_t i = static_cast<std::size_t>(lane);
    lanes.place[i] =
        resolve(warp, inst, inst.space, warp.address(address, lane), bytes, lane, write);
    if (lanes.place[i].data == nullptr) return false;
    if (lanes.place[i].space == Space::shared) {
      lanes.shared |= 1u << lane;
      lanes.offset[i] = lanes.place[i].offset;
    }
  }
  return true;
}

void count_access(Warp& warp, const Lanes& lanes, u32 bytes, bool write) {
  const u64 shared = static_cast<u64>(std::popcount(lanes.shared));
  Counters& c = warp.counters;
  if (shared != 0) {
    (write ? c.shared_write_bytes : c.shared_read_bytes) += shared * bytes;
    c.bank_conflicts += bank_conflicts(lanes.offset.data(), lanes.shared, bytes);
  }
  for (u32 mask = warp.active & ~lanes.shared; mask != 0; mask &= mask - 1) {
    if (lanes.place[static_cast<std::size_t>(std::countr_zero(mask))].space == Space::global) {
      (write ? c.global_write_bytes : c.global_read_bytes) += bytes;
    }
  }
  for_lanes(lanes.shared, [&](int lane) {
    if (lanes.place[static_cast<std::size_t>(lane)].cta != warp.cta) c.dsmem_bytes += bytes;
  });
}

void check_access(Warp& warp, const Inst& inst, const Lanes& lanes, u32 bytes, Access access) {
  if (!warp.launch->checks) return;
  AccessView view = view_of(warp, inst, 0);
  for_lanes(warp.active, [&](int lane) {
    const Place& place = lanes.place[static_cast<std::size_t>(lane)];
    view.lane = lane;
    if (place.space == Space::shared) {
      check_shared(view, *place.cta, place.offset, bytes, access);
    } else if (place.space == Space::global) {
      check_global(view, *place.allocation, place.address, bytes, access);
    }
  });
}

void synchronise(Warp& warp, const Inst& inst, const Lanes& lanes, bool load, bool store) {
  if (!warp.launch->checks || (inst.flags & flag_strong) == 0) return;
  for_lanes(warp.active, [&](int lane) {
    const Place& place = lanes.place[static_cast<std::size_t>(lane)];
    const u64 key = place.space == Space::shared
                        ? kSharedWindow + (u64{place.cta->rank} << kRankShift) + place.offset
                        : place.address;
    if (place.space != Space::shared && place.space != Space::global) return;
    check_global_sync(warp, key, (inst.flags & flag_release) != 0, (inst.flags & flag_acquire) != 0,
                      store, load);
  });
}

u64 read_bytes(const u8* data, u32 bytes) {
  u64 value = 0;
  std::memcpy(&value, data, bytes);
  return value;
}

void set_loaded(Warp& warp, const Inst& inst, const OperandRef& operand, int lane, const u8* data,
                u32 bytes) {
  if (operand.kind == OperandRef::Kind::none) return;
  if (bytes == 16) {
    std::memcpy(warp.words(operand) + 4 * lane, data, 16);
    return;
  }
  u64 value = read_bytes(data, bytes);
  if (inst.type == Type::int8) value = static_cast<u64>(i64{static_cast<i8>(value)});
  if (inst.type == Type::int16) value = static_cast<u64>(i64{static_cast<i16>(value)});
  if (inst.type == Type::int32) value = static_cast<u64>(i64{static_cast<i32>(value)});
  warp.set(operand, lane, value);
}

// Kernel parameters: the same bytes for all lanes.
Step run_load_parameter(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bytes = type_bytes(inst.type), total = bytes * inst.outputs;
  const OperandRef& address = o[inst.outputs];
  const std::vector<u8>& block = warp.launch->parameters;
  for_lanes(warp.active, [&](int lane) {
    u64 at = warp.address(address, lane);
    if (at >> 32 == kParamWindow >> 32) at -= kParamWindow;
    if (at + total > block.size()) {
      warp.fault(FaultKind::out_of_bounds, inst, lane,
                 "a load of " + std::to_string(total) + " bytes at parameter offset " +
                     std::to_string(at) + " passes the end of the parameters.");
      return;
    }
    for (u32 i = 0; i < inst.outputs; ++i) {
      set_loaded(warp, inst, o[i], lane, block.data() + at + i * bytes, bytes);
    }
  });
  return Step::next;
}

Step run_load(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bytes = type_bytes(inst.type), total = bytes * inst.outputs;
  Lanes lanes;
  if (!locate(warp, inst, o[inst.outputs], total, false, lanes)) return Step::next;
  check_access(warp, inst, lanes, total,
               (inst.flags & flag_strong) != 0 ? Access::strong_read : Access::read);
  synchronise(warp, inst, lanes, true, false);
  for (u32 i = 0; i < inst.outputs; ++i) {
    for_lanes(warp.active, [&](int lane) {
      set_loaded(warp, inst, o[i], lane,
                 lanes.place[static_cast<std::size_t>(lane)].data + i * bytes, bytes);
    });
  }
  count_access(warp, lanes, total, false);
  return Step::next;
}

Step run_store(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 count = inst.inputs - 1u;
  const u32 bytes = type_bytes(inst.type), total = bytes * count;
  Lanes lanes;
  if (!locate(warp, inst, o[0], total, true, lanes)) return Step::next;
  check_access(warp, inst, lanes, total,
               (inst.flags & flag_strong) != 0 ? Access::strong_write : Access::write);
  synchronise(warp, inst, lanes, false, true);
  for_lanes(warp.active, [&](int lane) {
    u8* data = lanes.place[static_cast<std::size_t>(lane)].data;
    for (u32 i = 0; i < count; ++i, data += bytes) {
      if (bytes == 16) {
        std::memcpy(data, static_cast<const u32*>(warp.source(o[1 + i])) + 4 * lane, 16);
      } else {
        const u64 value = warp.value(o[1 + i], lane);
        std::memcpy(data, &value, bytes);
      }
    }
  });
  count_access(warp, lanes, total, true);
  if ((inst.flags & flag_strong) != 0) {
    warp.cluster->changed();
  } else {
    ++warp.cluster->stores;
  }
  return Step::next;
}

Step run_atomic(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 bytes = type_bytes(inst.type);
  const u32 count = inst.extra;  // elements of a vector form
  const OperandRef* inputs = o + inst.outputs;
  Lanes lanes;
  if (!locate(warp, inst, inputs[0], bytes * count, true, lanes)) return Step::next;
  check_access(warp, inst, lanes, bytes * count, Access::atomic);
  synchronise(warp, inst, lanes, true, true);
  const AtomicKind kind = static_cast<AtomicKind>(inst.mode);
  for_lanes(warp.active, [&](int lane) {
    for (u32 i = 0; i < count; ++i) {
      u8* data = lanes.place[static_cast<std::size_t>(lane)].data + i * bytes;
      const u64 old = read_bytes(data, std::min(bytes, 8u));
      const u64 second = kind == AtomicKind::cas ? warp.value(inputs[2], lane) : 0;
      const u64 result =
          apply_atomic(kind, inst.type, old, warp.value(inputs[1 + i], lane), second);
      std::memcpy(data, &result, bytes);
      if (i < inst.outputs && o[i].kind != OperandRef::Kind::none) warp.set(o[i], lane, old);
    }
  });
  warp.counters.atomics += static_cast<u64>(std::popcount(warp.active)) * count;
  warp.cluster->changed();
  return Step::next;
}

bool is_small_float(Type type) {
  return type == Type::f16 || type == Type::bf16 || type == Type::f16x2 || type == Type::bf16x2;
}

float small_value(Type type, u32 code) {
  return type == Type::f16 || type == Type::f16x2 ? half_to_float(code & 0xffff)
                                                  : bfloat16_to_float(code & 0xffff);
}

u32 small_atomic(AtomicKind kind, Type type, u32 a, u32 b) {
  const float x = small_value(type, a), y = small_value(type, b);
  float result = x + y;
  if (kind == AtomicKind::min) result = std::fmin(x, y);
  if (kind == AtomicKind::max) result = std::fmax(x, y);
  return type == Type::f16 || type == Type::f16x2 ? float_to_half(result)
                                                  : float_to_bfloat16(result);
}

void access_flags(Builder& b) {
  const bool acquire = b.has("acquire") || b.has("acq_rel");
  const bool release = b.has("release") || b.has("acq_rel");
  const bool strong = b.has("volatile") || b.has("relaxed") || b.has("mmio") || acquire || release;
  b.inst.flags =
      (strong ? flag_strong : 0u) | (acquire ? flag_acquire : 0u) | (release ? flag_release : 0u);
}

int atomic_kind(const Builder& b) {
  return b.which({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
}

// ---- ldmatrix and stmatrix: lane 8 m + r names row r of 8x8 matrix m of 16-bit elements.

struct Matrices {
  std::array<Place, 32> row;
  u32 rows = 0;
};

bool locate_rows(Warp& warp, const Inst& inst, const OperandRef& address, bool write, Matrices& m) {
  if (warp.active != ~0u) {
    warp.fault(FaultKind::divergent, inst, -1, "not all lanes of the warp take part.");
    return false;
  }
  m.rows = 8 * inst.extra;
  Lanes lanes;
  AccessView view;
  if (warp.launch->checks) {
    check_lanes_meet(warp);
    view = view_of(warp, inst, 0);
  }
  for (u32 r = 0; r < m.rows; ++r) {
    const int lane = static_cast<int>(r);
    m.row[r] = resolve(warp, inst, Space::shared, warp.address(address, lane), 16, lane, write);
    if (m.row[r].data == nullptr) return false;
    if (warp.launch->checks) {
      view.lane = lane;
      check_shared(view, *m.row[r].cta, m.row[r].offset, 16, write ? Access::write : Access::read);
    }
    lanes.offset[r] = m.row[r].offset;
    lanes.shared |= 1u << r;
  }
  Counters& c = warp.counters;
  (write ? c.shared_write_bytes : c.shared_read_bytes) += 16u * m.rows;
  c.bank_conflicts += bank_conflicts(lanes.offset.data(), lanes.shared, 16);
  return true;
}

// Register i of lane l holds elements (row l / 4, columns 2 (l % 4) and + 1), or transposed.
Step run_matrix(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const bool store = inst.mode == 1, transposed = inst.flags != 0;
  Matrices m;
  if (!locate_rows(warp, inst, store ? o[0] : o[inst.outputs], store, m)) return Step::next;
  for (u32 i = 0; i < inst.extra; ++i) {
    u32* values = warp.words(o[store ? 1 + i : i]);
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 e = 0; e < 2; ++e) {
        const u32 row = transposed ? 2 * (lane % 4) + e : lane / 4;
        const u32 column = transposed ? lane / 4 : 2 * (lane % 4) + e;
        u8* at = m.row[8 * i + row].data + 2 * column;
        u16 value = 0;
        if (store) {
          value = static_cast<u16>(values[lane] >> (16 * e));
          std::memcpy(at, &value, 2);
        } else {
          std::memcpy(&value, at, 2);
          const u32 kept = e == 0 ? 0u : values[lane] & 0xffffu;
          values[lane] = kept | u32{value} << (16 * e);
        }
      }
    }
  }
  return Step::next;
}

Step run_movmatrix(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  if (warp.active != ~0u) {
    warp.fault(FaultKind::divergent, inst, -1, "not all lanes of the warp take part.");
    return Step::next;
  }
  u32 in[32];
  for (int lane = 0; lane < 32; ++lane) in[lane] = warp.value32(o[1], lane);
  for (u32 lane = 0; lane < 32; ++lane) {
    u32 out = 0;
    for (u32 e = 0; e < 2; ++e) {
      const u32 row = 2 * (lane % 4) + e, column = lane / 4;
      out |= (in[4 * row + column / 2] >> (16 * (column % 2)) & 0xffffu) << (16 * e);
    }
    warp.set(o[0], static_cast<int>(lane), out);
  }
  return Step::next;
}

Step run_createpolicy(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  for_lanes(warp.active, [&](int lane) { warp.set(o[0], lane, 0); });
  return Step::next;
}

// ---- fences

Step run_memory_fence(Warp& warp, const Inst&) {
  if (warp.launch->checks) check_memory_fence(warp);
  return Step::next;
}

// mode 1: shared memory alone; 2: global memory alone
Step run_proxy_fence(Warp& warp, const Inst& inst) {
  if (warp.launch->checks) check_proxy_fence(warp, inst.mode != 2, inst.mode != 1);
  return Step::next;
}

Step run_barrier_init_fence(Warp& warp, const Inst&) {
  if (warp.launch->checks) check_barrier_fence(warp);
  return Step::next;
}

Step run_no_fence(Warp&, const Inst&) { return Step::next; }

void matrix_operands(Builder& b) {
  b.inst.extra = b.has("x4") ? 4 : b.has("x2") ? 2 : 1;
  b.inst.flags = b.has("trans") ? 1u : 0u;
  b.inst.aligned = true;
  b.inst.unit = Unit::memory;
  b.inst.run = run_matrix;
  if (!b.has("m8n8") || b.types.size() != 1 || b.type(0) != Type::b16) {
    b.fail("only .m8n8 with .b16 is supported for " + std::string(b.text.mnemonic) + ".");
  }
}

}  // namespace

u64 apply_atomic(AtomicKind kind, Type type, u64 old, u64 operand, u64 second) {
  const u32 bytes = std::min(type_bytes(type), 8u);
  const u64 mask = bytes == 8 ? ~u64{0} : (u64{1} << (8 * bytes)) - 1;
  old &= mask;
  operand &= mask;
  if (is_small_float(type) && kind <= AtomicKind::max) {
    const u32 a = static_cast<u32>(old), b = static_cast<u32>(operand);
    if (bytes == 2) return small_atomic(kind, type, a, b);
    return small_atomic(kind, type, a, b) | small_atomic(kind, type, a >> 16, b >> 16) << 16;
  }
  if (type == Type::f32 && kind == AtomicKind::add) {
    return std::bit_cast<u32>(std::bit_cast<float>(static_cast<u32>(old)) +
                              std::bit_cast<float>(static_cast<u32>(operand)));
  }
  if (type == Type::f64 && kind == AtomicKind::add) {
    return std::bit_cast<u64>(std::bit_cast<double>(old) + std::bit_cast<double>(operand));
  }
  const u32 shift = 64 - 8 * bytes;
  const bool less = is_signed(type)
                        ? static_cast<i64>(old << shift) < static_cast<i64>(operand << shift)
                        : old < operand;
  switch (kind) {
    case AtomicKind::add: return (old + operand) & mask;
    case AtomicKind::min: return less ? old : operand;
    case AtomicKind::max: return less ? operand : old;
    case AtomicKind::bit_and: return old & operand;
    case AtomicKind::bit_or: return old | operand;
    case AtomicKind::bit_xor: return old ^ operand;
    case AtomicKind::exchange: return operand;
    case AtomicKind::cas: return old == operand ? second & mask : old;
    case AtomicKind::increment: return old >= operand ? 0 : old + 1;
    case AtomicKind::decrement: return old == 0 || old > operand ? operand : old - 1;
  }
  return old;
}

void build_load(Builder& b) {
  b.expect_count(2, 3);
  Inst& inst = b.inst;
  inst.type = b.type(0);
  inst.space = b.space();
  inst.unit = Unit::memory;
  access_flags(b);
  const Operand& to = b.operand(0);
  if (to.kind == Operand::Kind::vector) {
    for (const Operand& item : to.items) b.output_any(item);
  } else {
    b.output_any(to);
  }
  inst.run = run_load;
  if (inst.space == Space::param) {
    const Operand& base = b.operand(1).items.empty() ? b.operand(1) : b.operand(1).items[0];
    if (b.in_entry() && (b.is_entry_parameter(base) || base.kind == Operand::Kind::reg)) {
      inst.run = run_load_parameter;
    } else {
      inst.space = Space::local;
    }
  }
  b.address(b.operand(1), inst.space);
}

void build_store(Builder& b) {
  if (b.has("async")) {
    build_async_store(b);
    return;
  }
  b.expect_count(2, 3);
  Inst& inst = b.inst;
  inst.type = b.type(0);
  inst.space = b.space();
  if (inst.space == Space::param) inst.space = Space::local;
  inst.unit = Unit::memory;
  access_flags(b);
  b.address(b.operand(0), inst.space);
  const Operand& from = b.operand(1);
  auto value = [&](const Operand& item) {
    if (item.kind == Operand::Kind::reg) {
      b.input_any(item);
    } else {
      b.input(item, inst.type);
    }
  };
  if (from.kind == Operand::Kind::vector) {
    for (const Operand& item : from.items) value(item);
  } else {
    value(from);
  }
  inst.run = run_store;
}

void build_atomic(Builder& b) {
  const int kind = atomic_kind(b);
  if (kind < 0) b.fail("the atomic operation is missing.");
  Inst& inst = b.inst;
  inst.type = b.type(0);
  if (inst.type == Type::b128) b.fail("128-bit atomics are not supported.");
  inst.space = b.space();
  inst.mode = static_cast<u8>(kind);
  inst.unit = Unit::memory;
  access_flags(b);
  inst.flags |= flag_strong;
  b.output_list(b.operand(0), inst.type);
  inst.extra = std::max<u32>(1, inst.outputs);
  b.address(b.operand(1), inst.space);
  b.input_list(b.operand(2), inst.type);
  if (static_cast<AtomicKind>(kind) == AtomicKind::cas) b.input(b.operand(3), inst.type);
  inst.run = run_atomic;
}

void build_reduction(Builder& b) {
  if (b.has("async")) {
    build_async_store(b);
    return;
  }
  const int kind = atomic_kind(b);
  if (kind < 0) b.fail("the operation is missing.");
  Inst& inst = b.inst;
  inst.type = b.type(0);
  inst.space = b.space();
  inst.mode = static_cast<u8>(kind);
  inst.unit = Unit::memory;
  access_flags(b);
  inst.flags |= flag_strong;
  b.address(b.operand(0), inst.space);
  b.input_list(b.operand(1), inst.type);
  inst.extra = inst.inputs - 1u;
  inst.run = run_atomic;
}

void build_ldmatrix(Builder& b) {
  b.expect_count(2, 2);
  matrix_operands(b);
  b.output_list(b.operand(0), Type::b32);
  if (b.inst.outputs != b.inst.extra) b.fail("the number of registers does not fit .x1/.x2/.x4.");
  b.address(b.operand(1), Space::shared);
}

void build_stmatrix(Builder& b) {
  b.expect_count(2, 2);
  matrix_operands(b);
  b.inst.mode = 1;
  b.address(b.operand(0), Space::shared);
  b.input_list(b.operand(1), Type::b32);
  if (b.inst.inputs != b.inst.extra + 1) {
    b.fail("the number of registers does not fit .x1/.x2/.x4.");
  }
}

void build_movmatrix(Builder& b) {
  b.expect_count(2, 2);
  b.output(b.operand(0), Type::b32);
  b.input(b.operand(1), Type::b32);
  b.inst.aligned = true;
  b.inst.run = run_movmatrix;
}

void build_createpolicy(Builder& b) {
  b.output(b.operand(0), Type::b64);
  b.inst.run = run_createpolicy;
}

void build_fence(Builder& b) {
  Inst& inst = b.inst;
  if (b.has("mbarrier_init")) {
    inst.run = run_barrier_init_fence;
  } else if (b.has("async")) {
    inst.run = run_proxy_fence;
    inst.mode = b.has("shared::cta") || b.has("shared::cluster") ? 1 : b.has("global") ? 2 : 0;
  } else if (b.has("proxy") || b.has("sync_restrict::shared::cta") ||
             b.has("sync_restrict::shared::cluster")) {
    inst.run = run_no_fence;
  } else {
    inst.run = run_memory_fence;
  }
}

}  // namespace fovea::emulator
