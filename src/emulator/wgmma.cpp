// wgmma: warpgroup products that run from commit to wait, and the warp-level mma.sync.
#include <algorithm>
#include <cstring>
#include <memory>

#include "emulator/builders.h"
#include "emulator/execute.h"
#include "emulator/matrix.h"

namespace fovea::emulator {
namespace {

enum WgmmaFlags : u32 {
  flag_transpose_a = 1,
  flag_transpose_b = 2,
  flag_negate_a = 4,
  flag_negate_b = 8,
  flag_shared = 16
};

constexpr u32 kLanes = 32;

// Inst::mode: what an accumulator register holds, one fp32 number, two of fp16, or an s32.
enum Sums : u32 { float_sums, half_sums, integer_sums };

struct Shape {
  u32 n = 0, k = 0;
};

Shape shape_of(const Inst& inst) { return {inst.extra & 0xffff, inst.extra >> 16}; }

WarpGroup& group_of(Warp& warp) { return warp.cta->groups[warp.index / 4]; }

MatrixGroup& open_group(Warp& warp) {
  WarpGroup& wg = group_of(warp);
  const u64 serial = warp.matrix_group;
  while (wg.first_serial + wg.groups.size() <= serial) {
    MatrixGroup group;
    group.serial = wg.first_serial + wg.groups.size();
    wg.groups.push_back(std::move(group));
  }
  return wg.groups[serial - wg.first_serial];
}

// Products of one commit group, for all four warps at once: B is decoded once.
class WgmmaOp : public AsyncOp {
 public:
  u32 warpgroup = 0;
  u64 group = 0;

  const char* name() const override { return "wgmma"; }

  bool ready(const Cluster&) const override {
    const WarpGroup& wg = cta->groups[warpgroup];
    for (u64 earlier = wg.first_serial; earlier < group; ++earlier) {
      if (!wg.groups[earlier - wg.first_serial].done) return false;
    }
    return true;
  }

  bool execute(Cluster&) override {
    WarpGroup& wg = cta->groups[warpgroup];
    MatrixGroup& mine = wg.groups[group - wg.first_serial];
    for (const MatrixStep& step : mine.steps) {
      if (!run_step(step)) break;
    }
    mine.done = true;
    mine.agent = agent;
    mine.agent_clock = agent_clock;
    return true;
  }

 private:
  // b[(c * depth + k) * 8 + q]: column 8 j + 2 q + e of B with c = 2 j + e, the four q twice.
  void arrange_b(const float* b, u32 n, u32 depth) {
    arranged_.resize(std::size_t{n} / 4 * depth * 8);
    for (u32 column = 0; column < n; ++column) {
      const u32 c = column / 8 * 2 + column % 2, q = column % 8 / 2;
      for (u32 k = 0; k < depth; ++k) {
        float* to = arranged_.data() + (std::size_t{c} * depth + k) * 8 + q;
        to[0] = to[4] = b[column * depth + k];
      }
    }
  }

  bool run_step(const MatrixStep& step) {
    const Inst& mma = *step.inst;
    inst = &mma;
    const Shape shape = shape_of(mma);
    const AccessView who = view();
    const Element b_type = element_of(mma.type2);
    const MatrixDescriptor b = hopper_descriptor(step.descriptors[1]);
    b_.resize(std::size_t{shape.n} * shape.k);
    if (!load_operand(*this, who, *cta, b, (mma.flags & flag_transpose_b) != 0, b_type, shape.n,
                      shape.k, b_.data())) {
      return false;
    }
    if ((mma.flags & flag_negate_b) != 0) {
      for (float& value : b_) value = -value;
    }
    arrange_b(b_.data(), shape.n, shape.k);
    a_.resize(std::size_t{64} * shape.k);
    if ((mma.flags & flag_shared) != 0 &&
        !load_operand(*this, who, *cta, hopper_descriptor(step.descriptors[0]),
                      (mma.flags & flag_transpose_a) != 0, element_of(mma.type), 64, shape.k,
                      a_.data())) {
      return false;
    }
    for (u32 w = 0; w < 4; ++w) run_warp(step, w, shape);
    return true;
  }

  // Row 16 w + g + 8 h of A for every lane, for h = 0 and 1: a[(h * depth + k) * 32 + lane].
  void spread_a(const MatrixStep& step, u32 w, u32 depth, float* a) const {
    const Inst& mma = *step.inst;
    const Element type = element_of(mma.type);
    float rows[16 * 32];
    if ((mma.flags & flag_shared) != 0) {
      std::memcpy(rows, a_.data() + std::size_t{16} * w * depth, std::size_t{16} * depth * 4);
    } else {
      const u32 per = 4 / element_size(type);
      for (u32 p = 0; p < 4; ++p) {
        for (u32 l = 0; l < kLanes; ++l) {
          u8 bytes[16] = {};
          std::memcpy(bytes, &step.a_registers[(std::size_t{w} * 4 + p) * kLanes + l], 4);
          float values[16];
          decode_chunk(type, bytes, values);
          const u32 row = l / 4 + 8 * (p & 1);
          const u32 k = l % 4 * per + 4 * per * (p >> 1);
          std::memcpy(rows + row * depth + k, values, per * sizeof(float));
        }
      }
    }
    const float sign = (mma.flags & flag_negate_a) != 0 ? -1.0f : 1.0f;
    for (u32 h = 0; h < 2; ++h) {
      for (u32 k = 0; k < depth; ++k) {
        float* to = a + (std::size_t{h} * depth + k) * kLanes;
        for (u32 l = 0; l < kLanes; ++l) to[l] = sign * rows[(l / 4 + 8 * h) * depth + k];
      }
    }
  }

  void run_warp(const MatrixStep& step, u32 w, const Shape& shape) {
    Warp& target = *cta->warps[warpgroup * 4 + w];
    const OperandRef* d = target.operands(*step.inst);
    const bool half = step.inst->mode == half_sums;
    const bool integer = step.inst->mode == integer_sums;
    float a[2 * 32 * kLanes];
    spread_a(step, w, shape.k, a);
    const u32 columns = shape.n / 4;
    std::vector<float> unpacked;
    std::vector<float*> rows(columns);
    if (half || integer) unpacked.resize(std::size_t{columns} * kLanes);
    for (u32 h = 0; h < 2; ++h) {
      for (u32 c = 0; c < columns; ++c) {
        // register 4 j + 2 h + e of f32, register 2 j + h of packed f16
        rows[c] = half || integer ? unpacked.data() + std::size_t{c} * kLanes
                                  : static_cast<float*>(target.row(sum_of(d, h, c)));
        if (half) unpack(target, d[2 * (c / 2) + h], c % 2, rows[c]);
        if (!step.accumulate || integer) std::memset(rows[c], 0, kLanes * sizeof(float));
      }
      ProductArguments product{rows.data(),
                               a + std::size_t{h} * shape.k * kLanes,
                               arranged_.data(),
                               static_cast<int>(columns),
                               static_cast<int>(shape.k),
                               false};
      product_function()(product);
      for (u32 c = 0; half && c < columns; ++c) pack(target, d[2 * (c / 2) + h], c % 2, rows[c]);
      for (u32 c = 0; integer && c < columns; ++c) {
        add_integers(target, sum_of(d, h, c), step.accumulate, rows[c]);
      }
    }
    count(target.counters, *step.inst, shape);
  }

  static void unpack(Warp& warp, const OperandRef& operand, u32 e, float* row) {
    const u32* words = warp.words(operand);
    for (u32 l = 0; l < kLanes; ++l) row[l] = half_to_float(words[l] >> (16 * e) & 0xffffu);
  }
  static void pack(Warp& warp, const OperandRef& operand, u32 e, const float* row) {
    u32* words = warp.words(operand);
    for (u32 l = 0; l < kLanes; ++l) {
      const u32 kept = words[l] & (e == 0 ? 0xffff0000u : 0xffffu);
      words[l] = kept | float_to_half(row[l]) << (16 * e);
    }
  }

  // Register of column c of a row's share: 4 j + 2 h + e for c = 2 j + e.
  static const OperandRef& sum_of(const OperandRef* d, u32 h, u32 c) {
    return d[4 * (c / 2) + 2 * h + c % 2];
  }

  // A step's products, at most 32 x 255 x 255, are whole numbers that fp32 sums exactly; what is
  // summed over steps wraps around.
  static void add_integers(Warp& warp, const OperandRef& operand, bool accumulate,
                           const float* row) {
    u32* words = warp.words(operand);
    for (u32 l = 0; l < kLanes; ++l) {
      words[l] = (accumulate ? words[l] : 0) + static_cast<u32>(static_cast<i32>(row[l]));
    }
  }

  static void count(Counters& counters, const Inst& mma, const Shape& shape) {
    const u64 flops = u64{2} * 16 * shape.n * shape.k;
    const u32 size = element_size(element_of(mma.type));
    (mma.mode == integer_sums ? counters.tensor_ops_int8
     : size == 2              ? counters.tensor_flops_f16
     : size == 4              ? counters.tensor_flops_tf32
                              : counters.tensor_flops_fp8) += flops;
    const u64 a_bytes = (mma.flags & flag_shared) != 0 ? u64{16} * shape.k * size : 0;
    counters.shared_tensor_read_bytes += a_bytes + u64{shape.n} * shape.k * size / 4;
  }

  std::vector<float> a_, b_, arranged_;
};

bool full_warp(Warp& warp, const Inst& inst) {
  if (warp.active == ~0u) return true;
  warp.fault(FaultKind::divergent, inst, -1,
             "a warpgroup instruction is executed by lanes " + hex(warp.active) + " only.");
  return false;
}

void check_fragments(Warp& warp, const Inst& inst, bool accumulate) {
  const OperandRef* o = warp.operands(inst);
  WarpCheck& check = warp.check;
  const u32 flight = static_cast<u32>(warp.matrix_group) + 1;
  const u32 a_count = (inst.flags & flag_shared) != 0 ? 0 : 4;
  for (u32 i = 0; i < inst.outputs + a_count; ++i) {
    const OperandRef& operand = o[i];
    const auto v = static_cast<std::size_t>(operand.vreg);
    const bool in_flight = check.in_flight[v] != 0;
    if (!in_flight && (!check.matrix_fence_seen || check.written[v] > check.matrix_fence)) {
      warp.fault(FaultKind::missing_fence, inst, -1,
                 "register '" + std::string(warp.program->registers[v].name) + "' no. " +
                     std::to_string(i) +
                     " of the fragment was written after the last wgmma.fence.");
      break;
    }
    if (accumulate && i < inst.outputs && !in_flight && check.defined[v] != ~0u) {
      warp.fault(FaultKind::uninitialised, inst, -1,
                 "accumulator register no. " + std::to_string(i) + " has never been written.");
      break;
    }
  }
  for (u32 i = 0; i < inst.outputs + a_count; ++i) check_mark_flight(warp, o[i], flight);
}

Step run_mma_async(Warp& warp, const Inst& inst) {
  if (!full_warp(warp, inst)) return Step::next;
  if (warp.cta->warps.size() < (warp.index / 4 + 1) * 4) {
    warp.fault(FaultKind::divergent, inst, -1, "the warpgroup has fewer than four warps.");
    warp.launch->stopped = true;
    return Step::next;
  }
  const OperandRef* o = warp.operands(inst) + inst.outputs;
  const u32 w = warp.index % 4;
  MatrixGroup& group = open_group(warp);
  const u32 index = group.issued[w]++;
  if (index == group.steps.size()) group.steps.emplace_back();
  MatrixStep& step = group.steps[index];
  const bool shared = (inst.flags & flag_shared) != 0;
  const u32 a_count = shared ? 1 : 4;
  std::array<u64, 2> descriptors{shared ? warp.value(o[0], 0) : 0, warp.value(o[a_count], 0)};
  const bool accumulate = (warp.mask_of(o[a_count + 1]) & 1u) != 0;
  if (step.inst == nullptr) {
    step.inst = &inst;
    step.descriptors = descriptors;
    step.accumulate = accumulate;
    if (!shared) step.a_registers.resize(std::size_t{4} * 4 * kLanes);
    for (std::size_t i = shared ? 0 : 1; i < 2; ++i) {
      if (hopper_descriptor(descriptors[i]).supported) continue;
      warp.fault(FaultKind::bad_argument, inst, -1,
                 "a matrix descriptor with a base offset is not supported.");
      warp.launch->stopped = true;
    }
  } else if (step.inst != &inst || step.descriptors[1] != descriptors[1] ||
             step.accumulate != accumulate) {
    warp.fault(FaultKind::divergent, inst, -1,
               "the warps of a warpgroup issue different products in the same place.");
    warp.launch->stopped = true;
    return Step::next;
  }
  for (u32 p = 0; p < 4 && !shared; ++p) {
    std::memcpy(&step.a_registers[(std::size_t{w} * 4 + p) * kLanes], warp.row(o[p]), 128);
  }
  if (warp.launch->checks) {
    check_fragments(warp, inst, accumulate);
    check_share(warp, group.clock);
  }
  return Step::next;
}

Step run_matrix_fence(Warp& warp, const Inst& inst) {
  full_warp(warp, inst);
  if (warp.launch->checks) check_lanes_meet(warp);
  warp.check.matrix_fence = warp.sequence;
  warp.check.matrix_fence_seen = true;
  return Step::next;
}

Step run_matrix_commit(Warp& warp, const Inst& inst) {
  if (!full_warp(warp, inst)) return Step::next;
  MatrixGroup& group = open_group(warp);
  group.committed |= 1u << (warp.index % 4);
  ++warp.matrix_group;
  if (group.committed != 15) return Step::next;
  for (u32 w = 1; w < 4; ++w) {
    if (group.issued[w] == group.issued[0]) continue;
    warp.fault(FaultKind::divergent, inst, -1,
               "the warps of a warpgroup commit different numbers of products.");
    warp.launch->stopped = true;
    return Step::next;
  }
  auto op = std::make_unique<WgmmaOp>();
  op->warpgroup = warp.index / 4;
  op->group = group.serial;
  op->clock = group.clock;
  warp.cluster->enqueue(std::move(op), warp, inst, -1);
  return Step::next;
}

Step run_matrix_wait(Warp& warp, const Inst& inst) {
  if (!full_warp(warp, inst)) return Step::next;
  WarpGroup& wg = group_of(warp);
  const u64 below = warp.matrix_group - std::min<u64>(inst.immediate, warp.matrix_group);
  for (u64 serial = wg.first_serial; serial < below; ++serial) {
    if (serial - wg.first_serial >= wg.groups.size() || !wg.groups[serial - wg.first_serial].done) {
      return Step::blocked;
    }
  }
  ++warp.counters.barrier_waits;
  if (warp.launch->checks) {
    check_lanes_meet(warp);
    for (u64 serial = wg.first_serial; serial < below; ++serial) {
      const MatrixGroup& group = wg.groups[serial - wg.first_serial];
      if (group.agent != 0) warp.check.clock.raise(clock_ordered, group.agent, group.agent_clock);
    }
    std::vector<u32> landed;
    for (const auto& [flight, registers] : warp.check.flights) {
      if (flight < 0x80000000u && flight <= below) landed.push_back(flight);
    }
    for (const u32 flight : landed) check_land_flight(warp, flight);
  }
  // Groups are dropped when all four warps have gone past them.
  u64 oldest = ~u64{0};
  for (u32 w = 0; w < 4; ++w) {
    Warp& other = *warp.cta->warps[warp.index / 4 * 4 + w];
    if (&other == &warp) other.matrix_waited = std::max(other.matrix_waited, below);
    oldest = std::min(oldest, other.matrix_waited);
  }
  while (!wg.groups.empty() && wg.first_serial < oldest && wg.groups.front().done) {
    wg.groups.pop_front();
    ++wg.first_serial;
  }
  return Step::next;
}

// ---- mma.sync m16n8kK, row.col. Same fragments as wgmma for one 8-column tile.

Step run_mma_sync(Warp& warp, const Inst& inst) {
  if (!full_warp(warp, inst)) return Step::next;
  const OperandRef* o = warp.operands(inst);
  const Element ta = element_of(inst.type), tb = element_of(inst.type2);
  const u32 depth = inst.extra, size = element_size(ta), per = 4 / size;
  const u32 a_count = 16 * depth * size / 128, b_count = 8 * depth * size / 128;
  const u32 d_count = inst.mode == 1 ? 2 : 4;
  const OperandRef *a = o + d_count, *b = a + a_count, *c = b + b_count;
  float fa[16 * 32], fb[8 * 32];
  float values[16];
  u8 bytes[16] = {};
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 g = lane / 4, q = lane % 4;
    for (u32 p = 0; p < a_count; ++p) {
      const u32 word = warp.value32(a[p], static_cast<int>(lane));
      std::memcpy(bytes, &word, 4);
      decode_chunk(ta, bytes, values);
      const u32 row = g + 8 * (p & 1), k = q * per + 4 * per * (p >> 1);
      for (u32 e = 0; e < per; ++e) fa[row * depth + k + e] = values[e];
    }
    for (u32 p = 0; p < b_count; ++p) {
      const u32 word = warp.value32(b[p], static_cast<int>(lane));
      std::memcpy(bytes, &word, 4);
      decode_chunk(tb, bytes, values);
      for (u32 e = 0; e < per; ++e) fb[g * depth + q * per + 4 * per * p + e] = values[e];
    }
  }
  float sums[4][kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = lane / 4 + 8 * (i >> 1), column = 2 * (lane % 4) + (i & 1);
      float sum = 0;
      if (inst.mode == 1) {
        sum = half_to_float(warp.value32(c[i / 2], static_cast<int>(lane)) >> (16 * (i & 1)) &
                            0xffffu);
      } else {
        sum = std::bit_cast<float>(warp.value32(c[i], static_cast<int>(lane)));
      }
      for (u32 k = 0; k < depth; ++k) sum += fa[row * depth + k] * fb[column * depth + k];
      sums[i][lane] = sum;
    }
  }
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const int l = static_cast<int>(lane);
    for (u32 i = 0; i < 4 && inst.mode == 0; ++i) {
      warp.set(o[i], l, std::bit_cast<u32>(sums[i][lane]));
    }
    for (u32 i = 0; i < 2 && inst.mode == 1; ++i) {
      warp.set(o[i], l,
               float_to_half(sums[2 * i][lane]) | float_to_half(sums[2 * i + 1][lane]) << 16);
    }
  }
  const u64 flops = u64{2} * 16 * 8 * depth;
  (size == 2   ? warp.counters.tensor_flops_f16
   : size == 4 ? warp.counters.tensor_flops_tf32
               : warp.counters.tensor_flops_fp8) += flops;
  return Step::next;
}

u32 parse_shape(const Builder& b, std::string_view word, Shape& shape) {
  // m64n<N>k<K>
  u32 numbers[3] = {0, 0, 0};
  int which = -1;
  for (const char c : word) {
    if (c == 'm' || c == 'n' || c == 'k') {
      ++which;
    } else if (c >= '0' && c <= '9' && which >= 0 && which < 3 && numbers[which] < 10000) {
      numbers[which] = numbers[which] * 10 + static_cast<u32>(c - '0');
    } else
      b.fail("shape ." + std::string(word) + " is not known.");
  }
  shape.n = numbers[1];
  shape.k = numbers[2];
  return numbers[0];
}

bool is_integer_operand(Type type) { return type == Type::int8 || type == Type::uint8; }

void build_mma_async(Builder& b) {
  Inst& inst = b.inst;
  Shape shape;
  const std::string word = "m64" + std::string(b.after("m64"));
  const u32 m = parse_shape(b, word, shape);
  if (b.types.size() != 3) b.fail("wgmma.mma_async needs three types.");
  const Type d = b.type(0);
  inst.type = b.type(1);
  inst.type2 = b.type(2);
  const bool integer = is_integer_operand(inst.type);
  if (is_integer_operand(inst.type2) != integer || (d == Type::int32) != integer) {
    b.fail("wgmma sums .s8 and .u8 in .s32, and nothing else there.");
  }
  if (!integer && d != Type::f32 && d != Type::f16) b.fail("wgmma accumulates in .f32 or .f16.");
  // PTX ISA, wgmma.mma_async: for integers N is 8, 24 or a multiple of 16.
  if (integer && shape.n % 16 != 0 && shape.n != 8 && shape.n != 24) {
    b.fail("shape ." + word + " is not valid for integers.");
  }
  const u32 size = element_size(element_of(inst.type));
  if (m != 64 || shape.n % 8 != 0 || shape.n == 0 || shape.n > 256 || shape.k * size != 32) {
    b.fail("shape ." + word + " is not valid for these types.");
  }
  inst.extra = shape.n | shape.k << 16;
  inst.mode = integer ? integer_sums : d == Type::f16 ? half_sums : float_sums;
  const Operand& a = b.operand(1);
  const bool shared = a.kind != Operand::Kind::vector;
  b.output_list(b.operand(0), Type::b32);
  const u32 wanted = d == Type::f16 ? shape.n / 4 : shape.n / 2;
  if (inst.outputs != wanted) b.fail("the accumulator has the wrong number of registers.");
  if (shared) {
    b.input(a, Type::b64);
  } else {
    b.input_list(a, Type::b32);
  }
  if (!shared && inst.inputs != 4) b.fail("the A fragment takes four registers.");
  b.input(b.operand(2), Type::b64);
  b.input(b.operand(3), Type::pred);
  inst.flags = shared ? flag_shared : 0u;
  // Integers have neither signs nor a choice of major: K-major alone.
  if (integer) b.expect_count(4, 4);
  if (b.count() > 4 && static_cast<i64>(b.integer(b.operand(4))) < 0) inst.flags |= flag_negate_a;
  if (b.count() > 5 && static_cast<i64>(b.integer(b.operand(5))) < 0) inst.flags |= flag_negate_b;
  const std::size_t first_transpose = 6;
  if (size == 2) {
    b.expect_count(shared ? 8 : 7, shared ? 8 : 7);
    if (shared && b.integer(b.operand(first_transpose)) != 0) inst.flags |= flag_transpose_a;
    if (b.integer(b.operand(first_transpose + (shared ? 1 : 0))) != 0) {
      inst.flags |= flag_transpose_b;
    }
  }
  for (const Operand& item : b.operand(0).items) b.keep(item, Type::b32);
  inst.unit = Unit::tensor;
  inst.late = true;
  inst.run = run_mma_async;
}

}  // namespace

void build_wgmma(Builder& b) {
  Inst& inst = b.inst;
  b.only_for("sm_90a");
  inst.aligned = true;
  if (b.has("mma_async")) {
    build_mma_async(b);
  } else if (b.has("fence")) {
    inst.run = run_matrix_fence;
  } else if (b.has("commit_group")) {
    inst.run = run_matrix_commit;
  } else if (b.has("wait_group")) {
    inst.immediate = static_cast<u32>(b.integer(b.operand(0)));
    inst.run = run_matrix_wait;
  } else {
    b.fail("wgmma needs an operation.");
  }
}

void build_mma_sync(Builder& b) {
  Inst& inst = b.inst;
  b.expect_count(4, 4);
  if (b.types.size() != 4) b.fail("mma.sync needs four types.");
  inst.type = b.type(1);
  inst.type2 = b.type(2);
  const Type d = b.type(0);
  if (inst.type == Type::int8 || inst.type == Type::uint8) {
    b.fail("integer mma.sync is not supported.");
  }
  if ((d != Type::f32 && d != Type::f16) || b.type(3) != d) {
    b.fail("mma.sync is supported with .f32 or .f16 accumulators of equal type.");
  }
  const int k = b.which({"m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32"});
  if (k < 0) b.fail("the shape of mma.sync is not supported.");
  inst.extra = 4u << k;
  const u32 bytes = inst.extra * element_size(element_of(inst.type));
  if (bytes != 16 && bytes != 32) b.fail("this shape does not fit the type.");
  inst.mode = d == Type::f16 ? 1 : 0;
  b.output_list(b.operand(0), Type::b32);
  for (std::size_t i = 1; i < 4; ++i) b.input_list(b.operand(i), Type::b32);
  const u32 wanted_inputs = bytes / 8 + bytes / 16 + (inst.mode == 1 ? 2 : 4);
  if (inst.outputs != (inst.mode == 1 ? 2 : 4) || inst.inputs != wanted_inputs) {
    b.fail("mma.sync has the wrong number of registers.");
  }
  inst.unit = Unit::tensor;
  inst.aligned = true;
  inst.run = run_mma_sync;
}

}  // namespace fovea::emulator
