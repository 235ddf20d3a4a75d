// tcgen05: loads and stores between tensor memory and registers, waits, fences.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "emulator/builders.h"
#include "emulator/execute.h"
#include "emulator/tensor.h"

namespace fovea::emulator {
namespace {

enum ShapeKind : u8 { shape_32x32b, shape_16x64b, shape_16x128b, shape_16x256b, shape_16x32bx2 };

u32 registers_of(u8 shape, u32 repeat) {
  return shape == shape_16x128b ? 2 * repeat : shape == shape_16x256b ? 4 * repeat : repeat;
}

// Lane (from the address's lane) and column (from its column) of register i of thread t.
struct Spot {
  u32 lane, column;
};

Spot spot(u8 shape, u32 t, u32 i, u32 split) {
  const u32 g = t / 4, q = t % 4;
  switch (shape) {
    case shape_32x32b: return {t, i};
    case shape_16x256b: return {g + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * q + i % 2};
    case shape_16x128b: return {g + 8 * (i % 2), 4 * (i / 2) + q};
    case shape_16x64b: return {g + 8 * (t & 1), 2 * i + (t >> 1 & 1)};
    default: return t < 16 ? Spot{t, i} : Spot{t - 16, i + split};
  }
}

// Inst::flags of ld and st.
enum TransferFlags : u32 {
  flag_packed = 1,
  flag_reduced = 2,
  flag_maximum = 4,
  flag_magnitude = 8,
  flag_keep_nan = 16
};

// Without .NaN a NaN loses against any number. -0 is less than +0, as everywhere in PTX.
float reduced(u32 flags, float a, float b) {
  constexpr float nan = std::bit_cast<float>(0x7fffffffu);
  const bool a_nan = std::isnan(a), b_nan = std::isnan(b);
  if ((a_nan && b_nan) || ((a_nan || b_nan) && (flags & flag_keep_nan) != 0)) return nan;
  if (a_nan || b_nan) return a_nan ? b : a;
  const bool a_less = a < b || (a == b && std::signbit(a));
  return a_less == ((flags & flag_maximum) != 0) ? b : a;
}

u32 reduced(const Inst& inst, u32 a, u32 b) {
  if (inst.type == Type::f32) {
    return std::bit_cast<u32>(
        reduced(inst.flags, std::bit_cast<float>(a), std::bit_cast<float>(b)));
  }
  const bool a_less = inst.type == Type::int32 ? static_cast<i32>(a) < static_cast<i32>(b) : a < b;
  return a_less == ((inst.flags & flag_maximum) != 0) ? b : a;
}

u32 columns_of(const Inst& inst, u32 count) {
  u32 columns = count;
  if (inst.mode == shape_16x64b || inst.mode == shape_16x128b || inst.mode == shape_16x256b) {
    columns = 2 * count;
  }
  if (inst.mode == shape_16x32bx2) columns = count + inst.immediate;
  return (inst.flags & flag_packed) != 0 ? 2 * columns : columns;
}

class TransferOp : public AsyncOp {
 public:
  bool store = false;
  u32 address = 0;
  u32 count = 0;            // registers
  std::vector<u32> values;  // store: [register][lane]

  const char* name() const override { return store ? "tcgen05.st" : "tcgen05.ld"; }

  bool execute(Cluster& cluster) override {
    const OperandRef* o = warp->operands(*inst);
    const u32 column = tensor_column(address), base = tensor_lane(address);
    const u32 columns = columns_of(*inst, count);
    if (!tensor_range_ok(*this, *cta, column, columns)) return true;
    if (cluster.launch->checks) {
      const u32 lanes = inst->mode == shape_32x32b ? 32 : 16;
      check_tensor(view(), *cta, column, columns, base, lanes, store ? Access::write : Access::read,
                   0);
    }
    const bool packed = (inst->flags & flag_packed) != 0;
    for (u32 i = 0; i < count; ++i) {
      u32* row = store ? values.data() + std::size_t{i} * 32 : warp->words(o[i]);
      for (u32 t = 0; t < 32; ++t) {
        const Spot at = spot(inst->mode, t, i, inst->immediate);
        u32* cell =
            &cta->tensor
                 .cells[(column + at.column * (packed ? 2 : 1)) * kTensorLanes + base + at.lane];
        if (store && packed) {
          cell[0] = row[t] & 0xffffu;
          cell[kTensorLanes] = row[t] >> 16;
        } else if (store) {
          cell[0] = row[t];
        } else {
          row[t] = packed ? (cell[0] & 0xffffu) | cell[kTensorLanes] << 16 : cell[0];
        }
      }
    }
    if ((inst->flags & flag_reduced) != 0) reduce();
    const u64 bytes = u64{128} * count;
    (store ? warp->counters.tensor_memory_write_bytes : warp->counters.tensor_memory_read_bytes) +=
        bytes;
    warp->tensor_finished.push_back({store, 0, agent, agent_clock});
    return true;
  }

 private:
  // .red: the result of each thread over the values that it has just received.
  void reduce() {
    const OperandRef* o = warp->operands(*inst);
    u32* const result = warp->words(o[count]);
    const u32 kept_bits =
        inst->type == Type::f32 && (inst->flags & flag_magnitude) != 0 ? 0x7fffffffu : ~0u;
    for (u32 t = 0; t < 32; ++t) {
      u32 value = warp->words(o[0])[t] & kept_bits;
      for (u32 i = 1; i < count; ++i) {
        value = reduced(*inst, value, warp->words(o[i])[t] & kept_bits);
      }
      result[t] = value;
    }
  }
};

bool own_lanes(Warp& warp, const Inst& inst, u32 address) {
  const u32 lane = tensor_lane(address), first = warp.index % 4 * 32;
  const bool half = inst.mode != shape_32x32b;
  if (lane == first || (half && lane == first + 16)) return true;
  warp.fault(FaultKind::tensor_memory, inst, -1,
             "warp " + std::to_string(warp.index) + " may touch tensor-memory lanes " +
                 std::to_string(first) + " to " + std::to_string(first + 31) + ", not from lane " +
                 std::to_string(lane) + ".");
  warp.launch->stopped = true;
  return false;
}

// What the ended loads or stores of a warp did is known to it from here on.
void take_finished(Warp& warp, bool stores) {
  std::vector<Finished> kept;
  for (const Finished& done : warp.tensor_finished) {
    if (done.bulk != stores) {
      kept.push_back(done);
    } else if (warp.launch->checks) {
      check_join_together(warp, done.agent, done.tick);
    }
  }
  warp.tensor_finished = std::move(kept);
}

// With tensor work in order a load is done when it is issued: hardware holds back who reads its
// registers. `load` may be done already.
void load_at_once(Warp& warp, const AsyncOp* load) {
  auto& pending = warp.cluster->pending;
  const auto at = std::find_if(pending.begin(), pending.end(),
                               [load](const auto& op) { return op.get() == load; });
  if (at != pending.end()) {
    (*at)->execute(*warp.cluster);
    pending.erase(at);
    warp.cluster->changed();
  }
  take_finished(warp, false);
  if (warp.launch->checks) check_land_flight(warp, warp.tensor_flight++);
}

Step run_transfer(Warp& warp, const Inst& inst) {
  if (!whole_warp(warp, inst)) return Step::next;
  if (warp.launch->checks) check_lanes_meet(warp);
  const bool store = inst.outputs == 0;
  const OperandRef* o = warp.operands(inst);
  const u32 address = static_cast<u32>(warp.address(o[inst.outputs], 0));
  if (!own_lanes(warp, inst, address)) return Step::next;
  auto op = std::make_unique<TransferOp>();
  op->store = store;
  op->address = address;
  const bool reduces = (inst.flags & flag_reduced) != 0;
  op->count = store ? inst.inputs - 1u : inst.outputs - (reduces ? 1u : 0u);
  if (store) {
    op->values.resize(std::size_t{op->count} * 32);
    for (u32 i = 0; i < op->count; ++i) {
      std::memcpy(op->values.data() + std::size_t{i} * 32, warp.source(o[1 + i]), 128);
    }
  }
  const bool at_once = !store && warp.launch->schedule.in_order_tensor;
  if (!store && warp.launch->checks) {
    for (u32 i = 0; i < inst.outputs; ++i) check_mark_flight(warp, o[i], warp.tensor_flight);
  }
  const AsyncOp* issued = op.get();
  warp.cluster->enqueue(std::move(op), warp, inst, -1);
  if (at_once) load_at_once(warp, issued);
  return Step::next;
}

// mode 1: wait::st
Step run_tensor_wait(Warp& warp, const Inst& inst) {
  if (!whole_warp(warp, inst)) return Step::next;
  const bool stores = inst.mode == 1;
  for (const auto& op : warp.cluster->pending) {
    const auto* transfer = dynamic_cast<const TransferOp*>(op.get());
    if (transfer != nullptr && transfer->warp == &warp && transfer->store == stores) {
      return Step::blocked;
    }
  }
  if (warp.launch->checks) check_lanes_meet(warp);
  take_finished(warp, stores);
  if (!stores) check_land_flight(warp, warp.tensor_flight++);
  ++warp.counters.barrier_waits;
  return Step::next;
}

Step run_tensor_fence(Warp& warp, const Inst& inst) {
  if (warp.launch->checks) check_tensor_fence(warp, inst.mode == 1);
  return Step::next;
}

// The modifiers of ld.red.
void build_reduction(Builder& b, int repeat) {
  Inst& inst = b.inst;
  b.only_for("sm_103");
  if (inst.mode != shape_32x32b && inst.mode != shape_16x32bx2) {
    b.fail("tcgen05.ld.red takes the shapes .32x32b and .16x32bx2.");
  }
  if (repeat == 0) b.fail("tcgen05.ld.red reduces two columns or more: .x2 to .x128.");
  if (b.has("pack::16b")) b.fail("tcgen05.ld.red does not pack.");
  if (b.has("min") == b.has("max")) b.fail("tcgen05.ld.red needs .min or .max.");
  inst.type = b.type(0);
  if (inst.type != Type::f32 && inst.type != Type::uint32 && inst.type != Type::int32) {
    b.fail("tcgen05.ld.red takes .f32, .u32 and .s32.");
  }
  if (inst.type != Type::f32 && (b.has("abs") || b.has("NaN"))) {
    b.fail(".abs and .NaN of tcgen05.ld.red belong to .f32.");
  }
  inst.flags = flag_reduced | (b.has("max") ? flag_maximum : 0u) |
               (b.has("abs") ? flag_magnitude : 0u) | (b.has("NaN") ? flag_keep_nan : 0u);
}

// ld: registers{, reduced value}, [address]{, split}; st: [address], {split, }registers.
void build_transfer(Builder& b, bool store) {
  Inst& inst = b.inst;
  const int shape = b.which({"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"});
  if (shape < 0) b.fail("tcgen05.ld and st need a shape.");
  inst.mode = static_cast<u8>(shape);
  const int repeat = b.which({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"});
  if (repeat < 0) b.fail("tcgen05.ld and st need a repeat count such as .x32.");
  const bool reduces = b.has("red");
  if (reduces) {
    if (store) b.fail("tcgen05.st does not reduce.");
    build_reduction(b, repeat);
  } else {
    if (b.which({"min", "max", "abs", "NaN"}) >= 0 || b.type(0) != Type::b32) {
      b.fail("tcgen05.ld and st without .red move .b32 as it is.");
    }
    inst.flags = b.has("pack::16b") || b.has("unpack::16b") ? flag_packed : 0u;
  }
  const bool split = inst.mode == shape_16x32bx2;
  const std::size_t results = reduces ? 2 : 1;
  const std::size_t operands = results + (split ? 2 : 1);
  b.expect_count(operands, operands);
  const Operand& address = b.operand(store ? 0 : results);
  const Operand& registers = b.operand(store ? (split ? 2 : 1) : 0);
  if (split) inst.immediate = static_cast<u32>(b.integer(b.operand(store ? 1 : results + 1)));
  if (!store) b.output_list(registers, Type::b32);
  const u32 loaded = inst.outputs;
  if (reduces) b.output(b.operand(1), Type::b32);
  b.address(address, Space::none);
  if (store) b.input_list(registers, Type::b32);
  if ((store ? inst.inputs - 1u : loaded) != registers_of(inst.mode, 1u << repeat)) {
    b.fail("the number of registers does not fit the shape.");
  }
  inst.late = !store;
  inst.unit = Unit::memory;
  inst.run = run_transfer;
}

}  // namespace

bool tensor_range_ok(const AsyncOp& op, Cta& cta, u32 column, u32 columns) {
  const std::vector<i32>& owner = cta.tensor.owner;
  std::string problem;
  if (std::size_t{column} + columns > owner.size()) {
    problem = "pass the end of tensor memory, which has " + std::to_string(owner.size()) + ".";
  } else {
    for (u32 c = column; c < column + columns && problem.empty(); ++c) {
      if (owner[c] < 0) {
        problem = "are not all allocated: column " + std::to_string(c) + " is free.";
      }
    }
  }
  if (problem.empty()) return true;
  Launch& launch = *cta.cluster->launch;
  launch.fault(FaultKind::tensor_memory, op.cta, static_cast<int>(op.warp->index), op.lane, op.inst,
               op.name(),
               "tensor-memory columns " + std::to_string(column) + " to " +
                   std::to_string(column + columns - 1) + " " + problem);
  launch.stopped = true;
  return false;
}

void build_tcgen05(Builder& b) {
  Inst& inst = b.inst;
  inst.aligned = b.has("aligned");
  b.only_for("sm_10");
  b.agree_on_cta_group();
  if (b.which({"alloc", "dealloc", "relinquish_alloc_permit"}) >= 0) {
    build_tensor_allocation(b);
  } else if (b.has("ld") || b.has("st")) {
    build_transfer(b, b.has("st"));
  } else if (b.has("wait::ld") || b.has("wait::st")) {
    inst.mode = b.has("wait::st") ? 1 : 0;
    inst.run = run_tensor_wait;
  } else if (b.has("fence::before_thread_sync") || b.has("fence::after_thread_sync")) {
    inst.mode = b.has("fence::before_thread_sync") ? 1 : 0;
    inst.run = run_tensor_fence;
  } else if (b.has("mma")) {
    build_tensor_mma(b);
  } else if (b.has("cp")) {
    build_tensor_cp(b);
  } else if (b.has("commit")) {
    build_tensor_commit(b);
  } else {
    b.fail("this tcgen05 operation is not supported.");
  }
}

}  // namespace fovea::emulator
