// tcgen05.mma, cp and commit: the asynchronous tensor pipe of a CTA or of a pair of CTAs.
//
// Order follows the manual: products of one thread into the same accumulator, with the same shape
// and kind, are done in issue order; copies precede later products; a commit follows everything
// before it. Nothing else is ordered, unless the schedule asks for in-order execution.
#include "emulator/tensor.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "emulator/builders.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

enum MmaFlags : u32 { flag_pair_of_ctas = 1, flag_tensor_a = 2, flag_multicast = 4 };
enum class MmaKind : u8 { f16, tf32, f8f6f4 };

class PipeOp : public AsyncOp {
 public:
  u32 chain = 0;  // products of equal accumulator, shape and kind
  bool is_copy = false;
  bool is_commit = false;

  bool ready(const Cluster& cluster) const override {
    for (const auto& other : cluster.pending) {
      if (other.get() == this) return true;
      const auto* pipe = dynamic_cast<const PipeOp*>(other.get());
      if (pipe == nullptr || pipe->warp != warp) continue;
      if (is_commit || cluster.launch->schedule.in_order_tensor) return false;
      if (pipe->is_commit) continue;
      if (pipe->is_copy || pipe->chain == chain) return false;
    }
    return true;
  }

 protected:
  // Reports a fault when a CTA of the pair has ended: its memories are gone.
  bool both_active() const {
    for (const Cta* half : {static_cast<const Cta*>(cta), static_cast<const Cta*>(peer_of(*cta))}) {
      if (half->live_warps != 0) continue;
      cta->cluster->launch->fault(FaultKind::out_of_bounds, cta, static_cast<int>(warp->index),
                                  lane, inst, name(),
                                  "CTA " + std::to_string(half->rank) +
                                      " of the pair has ended before this operation was done.");
      return false;
    }
    return true;
  }

  // Where the schedule promises the order of issue, everything this warp issued before is done.
  void follow(const Cluster& cluster) {
    if (!cluster.launch->checks || !cluster.launch->schedule.in_order_tensor) return;
    clock.join(warp->check.tensor_done);
    clock.join_part(clock_tensor, clock, clock_ordered);
  }

  void done(const Cluster& cluster) const {
    if (!cluster.launch->checks) return;
    Clock& finished = warp->check.tensor_done;
    if (finished.empty()) finished.resize(clock.agents());
    for (const ClockPart part :
         {clock_ordered, clock_proxied, clock_proxied_global, clock_released}) {
      finished.raise(part, agent, agent_clock);
    }
  }
};

// The 32-bit instruction descriptor.
struct Shape {
  u32 m = 0, n = 0, k = 0;
  Element a = Element::f16, b = Element::f16;
  bool d_is_half = false, negate_a = false, negate_b = false, a_mn = false, b_mn = false;
  std::string problem;
};

Element small_element(u32 code, std::string& problem) {
  switch (code) {
    case 0: return Element::e4m3;
    case 1: return Element::e5m2;
    case 3: return Element::e2m3;
    case 4: return Element::e3m2;
    case 5: return Element::e2m1;
    default:
      problem = "operand type " + std::to_string(code) + " is not one of kind f8f6f4.";
      break;
  }
  return Element::e4m3;
}

Element element(MmaKind kind, u32 code, std::string& problem) {
  switch (kind) {
    case MmaKind::f16:
      if (code > 1) problem = "operand type " + std::to_string(code) + " is not one of kind f16.";
      return code == 0 ? Element::f16 : Element::bf16;
    case MmaKind::tf32:
      if (code != 2) problem = "operand type " + std::to_string(code) + " is not tf32.";
      return Element::tf32;
    default: return small_element(code, problem);
  }
}

Shape decode_shape(MmaKind kind, u32 bits, bool pair) {
  Shape s;
  s.d_is_half = (bits >> 4 & 3) == 0;
  s.a = element(kind, bits >> 7 & 7, s.problem);
  s.b = element(kind, bits >> 10 & 7, s.problem);
  s.negate_a = (bits >> 13 & 1) != 0;
  s.negate_b = (bits >> 14 & 1) != 0;
  s.a_mn = (bits >> 15 & 1) != 0;
  s.b_mn = (bits >> 16 & 1) != 0;
  s.n = (bits >> 17 & 63) << 3;
  s.m = (bits >> 24 & 31) << 4;
  s.k = 32 / element_size(s.a);
  if ((bits & 4) != 0) s.problem = "sparse products are not supported.";
  if ((bits >> 4 & 3) > 1) s.problem = "an integer accumulator is not supported.";
  const bool m_ok = pair ? s.m == 128 || s.m == 256 : s.m == 64 || s.m == 128;
  const u32 n_step = s.m == 64 ? 8 : 16;
  if (!m_ok || s.n == 0 || s.n > 256 || s.n % n_step != 0) {
    s.problem = "M = " + std::to_string(s.m) + ", N = " + std::to_string(s.n) +
                " is not a shape of cta_group::" + (pair ? "2." : "1.");
  }
  return s;
}

class MmaOp : public PipeOp {
 public:
  Shape shape;
  u32 d = 0;
  u64 a = 0, b = 0;
  bool accumulate = false;
  u32 flags = 0;

  const char* name() const override { return "tcgen05.mma"; }

  bool execute(Cluster& cluster) override {
    follow(cluster);
    const bool pair = (flags & flag_pair_of_ctas) != 0;
    const u32 first = pair ? cta->rank & ~1u : cta->rank, ctas = pair ? 2 : 1;
    const u32 n_each = shape.n / ctas;
    b_.resize(std::size_t{shape.n} * shape.k);
    if (pair && !both_active()) return true;
    for (u32 i = 0; i < ctas; ++i) {
      if (!load_operand(*this, view(), *cluster.ctas[first + i], blackwell_descriptor(b),
                        shape.b_mn, shape.b, n_each, shape.k,
                        b_.data() + std::size_t{i} * n_each * shape.k)) {
        return true;
      }
    }
    if (shape.negate_b != shape.negate_a) {
      for (float& value : b_) value = -value;
    }
    for (u32 i = 0; i < ctas; ++i) {
      if (!run_cta(cluster, *cluster.ctas[first + i], shape.m / ctas)) return true;
    }
    count();
    done(cluster);
    return true;
  }

 private:
  // Lane of row r of this CTA's part, before the "2x2" split of N.
  u32 lane_of(u32 row, u32 rows) const {
    const bool pair = (flags & flag_pair_of_ctas) != 0;
    if (rows == 64 && !pair) return row / 16 * 32 + row % 16 + tensor_lane(d) % 32;
    return row;
  }

  bool read_a(Cluster& cluster, Cta& target, u32 rows) {
    a_.assign(std::size_t{rows} * shape.k, 0.0f);
    if ((flags & flag_tensor_a) == 0) {
      return load_operand(*this, view(), target, blackwell_descriptor(a), shape.a_mn, shape.a, rows,
                          shape.k, a_.data());
    }
    // Row in its lane, 32 / size-in-bits elements to a column, eight columns in all.
    const u32 column = tensor_column(static_cast<u32>(a));
    if (!tensor_range_ok(*this, target, column, 8)) return false;
    if (cluster.launch->checks) {
      check_tensor(view(), target, column, 8, 0, rows == 64 ? 64 : kTensorLanes, Access::read, 0);
    }
    for (u32 row = 0; row < rows; ++row) {
      u32 words[8];
      for (u32 c = 0; c < 8; ++c) {
        words[c] = target.tensor.cells[std::size_t{column + c} * kTensorLanes + lane_of(row, rows)];
      }
      const u32 per_chunk = 16 / element_size(shape.a);
      for (u32 half = 0; half < 2; ++half) {
        float values[16];
        u8 bytes[16];
        std::memcpy(bytes, words + 4 * half, 16);
        decode_chunk(shape.a, bytes, values);
        std::memcpy(a_.data() + std::size_t{row} * shape.k + half * per_chunk, values,
                    per_chunk * sizeof(float));
      }
    }
    return true;
  }

  bool run_cta(Cluster& cluster, Cta& target, u32 rows) {
    const bool split = (flags & flag_pair_of_ctas) != 0 && rows == 64;
    const u32 columns = split ? shape.n / 2 : shape.n;
    const u32 column = tensor_column(d);
    if (!tensor_range_ok(*this, target, column, columns)) return false;
    if (!read_a(cluster, target, rows)) return false;
    if (cluster.launch->checks) check_accumulator(target, column, columns, rows);
    for (u32 part = 0; part < (split ? 2u : 1u); ++part) {
      const float* b_part = b_.data() + std::size_t{part} * columns * shape.k;
      for (u32 row = 0; row < rows; row += 16) {
        run_rows(target, row, rows, (split ? 64 * part : 0), column, columns, b_part);
      }
    }
    return true;
  }

  void check_accumulator(Cta& target, u32 column, u32 columns, u32 rows) {
    const Access access = accumulate ? Access::atomic : Access::write;
    const bool pair = (flags & flag_pair_of_ctas) != 0;
    if (rows == 64 && !pair) {
      for (u32 part = 0; part < 4; ++part) {
        check_tensor(view(), target, column, columns, part * 32 + tensor_lane(d) % 32, 16, access,
                     chain);
      }
    } else {
      check_tensor(view(), target, column, columns, 0, kTensorLanes, access, chain);
    }
  }

  // 16 rows at a time; two halves of the 32-lane product kernel when they are neighbours would be
  // faster, so full blocks of 32 rows are taken where the layout allows it.
  void run_rows(Cta& target, u32 row, u32 rows, u32 lane_offset, u32 column, u32 columns,
                const float* b_part) {
    const bool scattered = rows == 64 && (flags & flag_pair_of_ctas) == 0;
    const u32 width = scattered ? 16 : 32;
    if (!scattered && row % 32 != 0) return;
    const u32 first = lane_of(row, rows) + lane_offset;
    std::vector<float> spread(std::size_t{shape.k} * 32, 0.0f);
    for (u32 k = 0; k < shape.k; ++k) {
      for (u32 l = 0; l < width; ++l) {
        spread[std::size_t{k} * 32 + l] = a_[std::size_t{row + l} * shape.k + k];
      }
    }
    const bool direct = width == 32 && !shape.d_is_half;
    std::vector<float> copy(direct ? 0 : std::size_t{columns} * 32, 0.0f);
    std::vector<float*> rows_of_d(columns);
    for (u32 c = 0; c < columns; ++c) {
      u32* cells = &target.tensor.cells[std::size_t{column + c} * kTensorLanes + first];
      rows_of_d[c] = direct ? reinterpret_cast<float*>(cells) : copy.data() + std::size_t{c} * 32;
      if (!accumulate) {
        std::memset(rows_of_d[c], 0, 128);
      } else if (!direct) {
        for (u32 l = 0; l < width; ++l) {
          rows_of_d[c][l] =
              shape.d_is_half ? half_to_float(cells[l] & 0xffffu) : std::bit_cast<float>(cells[l]);
        }
      }
    }
    ProductArguments product{
        rows_of_d.data(),          spread.data(), b_part, static_cast<int>(columns),
        static_cast<int>(shape.k), true};
    product_function()(product);
    for (u32 c = 0; !direct && c < columns; ++c) {
      u32* cells = &target.tensor.cells[std::size_t{column + c} * kTensorLanes + first];
      for (u32 l = 0; l < width; ++l) {
        cells[l] =
            shape.d_is_half ? float_to_half(rows_of_d[c][l]) : std::bit_cast<u32>(rows_of_d[c][l]);
      }
    }
  }

  void count() {
    Counters& c = warp->counters;
    const u64 flops = u64{2} * shape.m * shape.n * shape.k;
    const u32 size = element_size(shape.a);
    (size == 2   ? c.tensor_flops_f16
     : size == 4 ? c.tensor_flops_tf32
                 : c.tensor_flops_fp8) += flops;
    const u64 a_bytes = u64{shape.m} * 32, d_bytes = u64{shape.m} * shape.n * 4;
    const bool in_tensor_memory = (flags & flag_tensor_a) != 0;
    c.shared_tensor_read_bytes += u64{shape.n} * 32;
    (in_tensor_memory ? c.tensor_memory_operand_bytes : c.shared_tensor_read_bytes) += a_bytes;
    const u64 read = accumulate ? d_bytes : 0;
    c.accumulator_read_bytes += read;
    c.accumulator_write_bytes += d_bytes;
    c.tensor_memory_read_bytes += read + (in_tensor_memory ? a_bytes : 0);
    c.tensor_memory_write_bytes += d_bytes;
  }

  std::vector<float> a_, b_;
};

u32 chain_of(const Warp& warp, const MmaOp& op, MmaKind kind) {
  u64 hash = warp.agent + 1;
  for (const u64 part : {u64{op.d}, u64{op.shape.m}, u64{op.shape.n},
                         u64{op.flags & flag_pair_of_ctas}, static_cast<u64>(kind)}) {
    hash = (hash ^ part) * 0x9e3779b97f4a7c15u;
  }
  return static_cast<u32>(hash >> 32) | 1u;
}

bool has_peer(Warp& warp, const Inst& inst) {
  if ((inst.flags & flag_pair_of_ctas) == 0 || peer_of(*warp.cta) != nullptr) return true;
  warp.fault(FaultKind::bad_argument, inst, -1, kNoPeer);
  warp.launch->stopped = true;
  return false;
}

bool one_lane(Warp& warp, const Inst& inst) {
  if (std::popcount(warp.active) == 1) return true;
  warp.fault(FaultKind::divergent, inst, -1,
             "one thread issues this instruction, not lanes " + hex(warp.active) + ".");
  return false;
}

// operands: d, a, b, descriptor, enable-input-d
Step run_tensor_mma(Warp& warp, const Inst& inst) {
  if (!has_peer(warp, inst)) return Step::next;
  one_lane(warp, inst);
  const int lane = warp.first_lane();
  const OperandRef* o = warp.operands(inst);
  auto op = std::make_unique<MmaOp>();
  op->flags = inst.flags;
  op->d = static_cast<u32>(warp.address(o[0], lane));
  const bool tensor_a = (inst.flags & flag_tensor_a) != 0;
  op->a = tensor_a ? warp.address(o[1], lane) : warp.value(o[1], lane);
  op->b = warp.value(o[2], lane);
  const MmaKind kind = static_cast<MmaKind>(inst.mode);
  op->shape = decode_shape(kind, warp.value32(o[3], lane), (inst.flags & flag_pair_of_ctas) != 0);
  op->accumulate = (warp.mask_of(o[4]) >> lane & 1u) != 0;
  std::string problem = op->shape.problem;
  for (u32 i = 0; i < inst.extra; ++i) {
    if (warp.value32(o[5 + i], lane) != 0) problem = "disabled output lanes are not supported.";
  }
  if (!blackwell_descriptor(op->b).supported ||
      (!tensor_a && !blackwell_descriptor(op->a).supported)) {
    problem =
        "a shared-memory descriptor has a version, base offset or layout that is not supported.";
  }
  if (!problem.empty()) {
    warp.fault(FaultKind::bad_argument, inst, lane, problem);
    warp.launch->stopped = true;
    return Step::next;
  }
  op->chain = chain_of(warp, *op, kind);
  warp.cluster->enqueue(std::move(op), warp, inst, lane);
  return Step::next;
}

// ---- cp: shared memory to tensor memory

enum CopyShape : u8 { shape_128x256b, shape_4x256b, shape_128x128b, shape_64x128b, shape_32x128b };

class CopyToTensorOp : public PipeOp {
 public:
  u32 address = 0;
  u64 descriptor = 0;
  bool pair = false;

  const char* name() const override { return "tcgen05.cp"; }

  bool execute(Cluster& cluster) override {
    const u32 first = pair ? cta->rank & ~1u : cta->rank, ctas = pair ? 2 : 1;
    if (pair && !both_active()) return true;
    for (u32 i = 0; i < ctas; ++i) {
      if (!copy(cluster, *cluster.ctas[first + i])) return true;
    }
    done(cluster);
    return true;
  }

 private:
  // Lanes that receive row r; the rows of narrow shapes are repeated in other parts.
  std::vector<u32> lanes_of(u32 row) const {
    switch (inst->mode) {
      case shape_4x256b: return {row * 32};
      case shape_64x128b:
        if (inst->extra == 0) return {row, row + 64};  // 02_13
        return row < 32 ? std::vector<u32>{row, row + 32} : std::vector<u32>{row + 32, row + 64};
      case shape_32x128b: return {row, row + 32, row + 64, row + 96};
      default: return {row};
    }
  }

  bool copy(Cluster& cluster, Cta& target) {
    constexpr u32 rows_of[5] = {128, 4, 128, 64, 32};
    const u32 rows = rows_of[inst->mode];
    const u32 chunks = inst->mode == shape_128x256b || inst->mode == shape_4x256b ? 2 : 1;
    const u32 column = tensor_column(address);
    if (!tensor_range_ok(*this, target, column, 4 * chunks)) return false;
    const bool checks = cluster.launch->checks;
    const AccessView who = view();
    if (checks) {
      check_tensor(who, target, column, 4 * chunks, 0, kTensorLanes, Access::write, chain);
    }
    const MatrixDescriptor from = blackwell_descriptor(descriptor);
    for (u32 row = 0; row < rows; ++row) {
      for (u32 chunk = 0; chunk < chunks; ++chunk) {
        const u32 at = chunk_address(from, false, row, chunk * 16, 1);
        if (at < kSharedStart || at + 16 > target.shared.size()) {
          resolve_shared(*this, at | target.rank << kRankShift, 16, "a tcgen05.cp read");
          return false;
        }
        if (checks) check_shared(who, target, at, 16, Access::read);
        u32 words[4];
        std::memcpy(words, target.shared.data() + at, 16);
        for (const u32 to : lanes_of(row)) {
          for (u32 c = 0; c < 4; ++c) {
            target.tensor.cells[std::size_t{column + 4 * chunk + c} * kTensorLanes + to] = words[c];
          }
        }
      }
    }
    warp->counters.shared_tensor_read_bytes += u64{16} * rows * chunks;
    warp->counters.tensor_memory_write_bytes += u64{16} * rows * chunks;
    return true;
  }
};

Step run_tensor_cp(Warp& warp, const Inst& inst) {
  if (!has_peer(warp, inst)) return Step::next;
  one_lane(warp, inst);
  const int lane = warp.first_lane();
  const OperandRef* o = warp.operands(inst);
  auto op = std::make_unique<CopyToTensorOp>();
  op->address = static_cast<u32>(warp.address(o[0], lane));
  op->descriptor = warp.value(o[1], lane);
  op->pair = (inst.flags & flag_pair_of_ctas) != 0;
  op->is_copy = true;
  if (!blackwell_descriptor(op->descriptor).supported) {
    warp.fault(FaultKind::bad_argument, inst, lane,
               "the shared-memory descriptor is not supported.");
    warp.launch->stopped = true;
    return Step::next;
  }
  warp.cluster->enqueue(std::move(op), warp, inst, lane);
  return Step::next;
}

// ---- commit

class CommitOp : public PipeOp {
 public:
  u32 barrier = 0;
  u32 mask = 0;

  const char* name() const override { return "tcgen05.commit"; }

  bool execute(Cluster& cluster) override {
    if (cluster.launch->checks) {
      clock.join(warp->check.tensor_done);
      clock.join_part(clock_released, clock, clock_tensor);  // a commit implies the fence before it
    }
    if (mask == 0) {
      barrier_signal(*this, barrier);
      return true;
    }
    for (u32 rank = 0; rank < 16; ++rank) {
      if ((mask >> rank & 1) == 0) continue;
      barrier_signal(*this, (barrier & ((1u << kRankShift) - 1)) | rank << kRankShift);
    }
    return true;
  }
};

Step run_tensor_commit(Warp& warp, const Inst& inst) {
  if (!has_peer(warp, inst)) return Step::next;
  one_lane(warp, inst);
  const int lane = warp.first_lane();
  const OperandRef* o = warp.operands(inst);
  auto op = std::make_unique<CommitOp>();
  op->barrier = static_cast<u32>(warp.address(o[0], lane));
  if ((inst.flags & flag_multicast) != 0) op->mask = warp.value32(o[1], lane) & 0xffff;
  op->is_commit = true;
  warp.cluster->enqueue(std::move(op), warp, inst, lane);
  return Step::next;
}

}  // namespace

void build_tensor_mma(Builder& b) {
  Inst& inst = b.inst;
  const int kind = b.which({"kind::f16", "kind::tf32", "kind::f8f6f4"});
  if (kind < 0) b.fail("tcgen05.mma needs a kind: f16, tf32 or f8f6f4.");
  inst.mode = static_cast<u8>(kind);
  b.expect_count(5, 7);
  const Operand& a = b.operand(1);
  const bool tensor_a = a.kind == Operand::Kind::memory;
  inst.flags = (b.has("cta_group::2") ? flag_pair_of_ctas : 0u) | (tensor_a ? flag_tensor_a : 0u);
  std::size_t at = 4;
  if (b.operand(at).kind == Operand::Kind::vector) {
    inst.extra = static_cast<u32>(b.operand(at).items.size());  // disable-output-lane
    ++at;
  }
  if (b.count() > at + 1) b.fail("scale-input-d of tcgen05.mma is not supported.");
  b.address(b.operand(0), Space::none);
  if (tensor_a) {
    b.address(a, Space::none);
  } else {
    b.input(a, Type::b64);
  }
  b.input(b.operand(2), Type::b64);
  b.input(b.operand(3), Type::b32);
  b.input(b.operand(at), Type::pred);
  if (inst.extra != 0) b.input_list(b.operand(4), Type::b32);
  inst.unit = Unit::tensor;
  inst.run = run_tensor_mma;
}

void build_tensor_cp(Builder& b) {
  Inst& inst = b.inst;
  b.expect_count(2, 2);
  const int shape = b.which({"128x256b", "4x256b", "128x128b", "64x128b", "32x128b"});
  if (shape < 0) b.fail("tcgen05.cp needs a shape.");
  inst.mode = static_cast<u8>(shape);
  inst.extra = b.has("warpx2::01_23") ? 1 : 0;
  inst.flags = b.has("cta_group::2") ? flag_pair_of_ctas : 0u;
  b.address(b.operand(0), Space::none);
  b.input(b.operand(1), Type::b64);
  inst.unit = Unit::tensor;
  inst.run = run_tensor_cp;
}

void build_tensor_commit(Builder& b) {
  Inst& inst = b.inst;
  const bool multicast = b.has("multicast::cluster");
  b.expect_count(multicast ? 2 : 1, multicast ? 2 : 1);
  inst.flags = (multicast ? flag_multicast : 0u) | (b.has("cta_group::2") ? flag_pair_of_ctas : 0u);
  b.address(b.operand(0), Space::shared_cluster);
  if (multicast) b.input(b.operand(1), Type::b16);
  inst.run = run_tensor_commit;
}

}  // namespace fovea::emulator
