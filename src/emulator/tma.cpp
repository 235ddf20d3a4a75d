// Tensor maps and cp.async.bulk.tensor: tiled loads, stores and reductions of 1 to 5 dimensions.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "emulator/async.h"
#include "emulator/builders.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

constexpr u64 kMagic = 0x3150414d4c555046;  // "FPULMAP1" in memory order

// The 128 bytes of a map. The real one is opaque; this one describes itself.
struct Packed {
  u64 magic;
  u64 address;
  std::array<u64, 4> strides;
  std::array<u32, 5> last_index;  // dimension - 1: a dimension may be 2^32
  std::array<u16, 5> box;
  std::array<u8, 5> element_strides;
  u8 type, rank, swizzle, nan_fill;
};
static_assert(sizeof(Packed) <= 128);

u32 element_bytes(TensorType type) {
  switch (type) {
    case TensorType::uint8: return 1;
    case TensorType::uint16:
    case TensorType::float16:
    case TensorType::bfloat16: return 2;
    case TensorType::uint64:
    case TensorType::int64:
    case TensorType::float64: return 8;
    default: return 4;
  }
}

Type reduction_type(TensorType type) {
  switch (type) {
    case TensorType::uint8: return Type::uint8;
    case TensorType::uint16: return Type::uint16;
    case TensorType::uint32: return Type::uint32;
    case TensorType::int32: return Type::int32;
    case TensorType::uint64: return Type::uint64;
    case TensorType::int64: return Type::int64;
    case TensorType::float16: return Type::f16;
    case TensorType::bfloat16: return Type::bf16;
    case TensorType::float64: return Type::f64;
    default: return Type::f32;
  }
}

u32 swizzle_span(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::b32: return 32;
    case Swizzle::b64: return 64;
    case Swizzle::b128: return 128;
    default: return 0;
  }
}

// Of all dimensions together: what an H200's driver takes.
constexpr u64 kMaxBoxBytes = 228 * 1024;

[[noreturn]] void refuse(const std::string& sentence) { throw Error(0, "tensor map: " + sentence); }

void validate_dimensions(const TensorMapSpec& spec) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
    const std::string at = "[" + std::to_string(i) + "]";
    if (spec.dimensions[i] == 0 || spec.dimensions[i] > (u64{1} << 32)) {
      refuse("dimensions" + at + " is " + std::to_string(spec.dimensions[i]) +
             "; it must be from 1 to 2^32.");
    }
    if (spec.box[i] == 0 || spec.box[i] > 256) {
      refuse("box" + at + " is " + std::to_string(spec.box[i]) + "; it must be from 1 to 256.");
    }
    if (spec.element_strides[i] == 0 || spec.element_strides[i] > 8) {
      refuse("element_strides" + at + " must be from 1 to 8.");
    }
    if (i == 0) continue;
    const u64 stride = spec.strides_bytes[i - 1];
    if (stride % 16 != 0 || stride >= (u64{1} << 40)) {
      refuse("strides_bytes[" + std::to_string(i - 1) + "] is " + std::to_string(stride) +
             "; it must be a multiple of 16 below 2^40.");
    }
  }
}

}  // namespace

TensorMap encode_tensor_map(const TensorMapSpec& spec) {
  if (spec.rank < 1 || spec.rank > 5) {
    refuse("rank is " + std::to_string(spec.rank) + "; it must be from 1 to 5.");
  }
  if (spec.address % 16 != 0) {
    refuse("address " + hex(spec.address) + " is not a multiple of 16.");
  }
  validate_dimensions(spec);
  const u32 inner = spec.box[0] * element_bytes(spec.type);
  if (inner % 16 != 0) {
    refuse("box[0] is " + std::to_string(inner) + " bytes; it must be a multiple of 16.");
  }
  u64 box_bytes = inner;
  for (std::size_t i = 1; i < static_cast<std::size_t>(spec.rank); ++i) box_bytes *= spec.box[i];
  if (box_bytes > kMaxBoxBytes) {
    refuse("box is " + std::to_string(box_bytes) + " bytes; it must be at most " +
           std::to_string(kMaxBoxBytes) + ".");
  }
  if (spec.nan_fill && spec.type < TensorType::float16) {
    refuse("nan_fill needs a floating-point type.");
  }
  const u32 span = swizzle_span(spec.swizzle);
  if (span != 0 && inner > span) {
    refuse("box[0] is " + std::to_string(inner) + " bytes, more than the swizzle's " +
           std::to_string(span) + ".");
  }
  Packed packed{};
  packed.magic = kMagic;
  packed.address = spec.address;
  packed.strides = spec.strides_bytes;
  for (std::size_t i = 0; i < 5; ++i) {
    packed.last_index[i] = static_cast<u32>(spec.dimensions[i] - 1);
    packed.box[i] = static_cast<u16>(spec.box[i]);
    packed.element_strides[i] = static_cast<u8>(spec.element_strides[i]);
  }
  packed.type = static_cast<u8>(spec.type);
  packed.rank = static_cast<u8>(spec.rank);
  packed.swizzle = static_cast<u8>(spec.swizzle);
  packed.nan_fill = spec.nan_fill ? 1 : 0;
  TensorMap map{};
  std::memcpy(map.data(), &packed, sizeof packed);
  return map;
}

bool decode_tensor_map(std::span<const std::byte, 128> bytes, TensorMapSpec& spec) {
  Packed packed;
  std::memcpy(&packed, bytes.data(), sizeof packed);
  if (packed.magic != kMagic || packed.rank < 1 || packed.rank > 5 || packed.swizzle > 3 ||
      packed.type > static_cast<u8>(TensorType::tfloat32_ftz)) {
    return false;
  }
  spec.type = static_cast<TensorType>(packed.type);
  spec.rank = packed.rank;
  spec.address = packed.address;
  spec.strides_bytes = packed.strides;
  for (std::size_t i = 0; i < 5; ++i) {
    spec.dimensions[i] = u64{packed.last_index[i]} + 1;
    spec.box[i] = packed.box[i];
    spec.element_strides[i] = packed.element_strides[i];
  }
  spec.swizzle = static_cast<Swizzle>(packed.swizzle);
  spec.nan_fill = packed.nan_fill != 0;
  return true;
}

namespace {

enum TensorFlags : u32 {
  flag_store = 1,
  flag_reduce = 2,
  flag_multicast = 4,
  flag_pair = 8,
  flag_gather = 16,
  flag_bulk_group = 32
};

class TensorOp : public AsyncOp {
 public:
  TensorMapSpec map;
  std::array<i32, 5> at{};
  u32 shared = 0;
  u32 barrier = 0;
  u32 multicast = 0;
  u32 flags = 0;
  AtomicKind operation = AtomicKind::add;
  u64 group = 0;
  bool has_read = false;
  std::vector<u8> buffer;  // the box, row by row, before swizzling

  const char* name() const override {
    return (flags & flag_store) == 0    ? "tma load"
           : (flags & flag_reduce) != 0 ? "tma reduction"
                                        : "tma store";
  }

  u32 rows() const {
    if ((flags & flag_gather) != 0) return 4;
    u32 n = 1;
    for (std::size_t i = 1; i < static_cast<std::size_t>(map.rank); ++i) {
      n *= (map.box[i] + map.element_strides[i] - 1) / map.element_strides[i];
    }
    return n;
  }
  u32 row_bytes() const { return map.box[0] * element_bytes(map.type); }
  // From row to row in shared memory: a swizzled row takes its whole span, even a narrower one.
  u32 pitch() const {
    const u32 span = swizzle_span(map.swizzle);
    return span != 0 ? span : row_bytes();
  }
  u32 box_bytes() const { return rows() * row_bytes(); }

  bool execute(Cluster& cluster) override {
    if ((flags & flag_store) != 0) return execute_store(cluster);
    buffer.assign(box_bytes(), 0);
    if (map.nan_fill) fill_nan();
    if (!visit_rows(cluster, false)) return true;
    deliver(cluster);
    return true;
  }

 private:
  bool execute_store(Cluster& cluster) {
    if (!has_read) {
      has_read = true;
      return !read_shared(cluster);
    }
    visit_rows(cluster, true);
    warp->finished.push_back({true, group, agent, agent_clock});
    return true;
  }

  // The bytes that an H200 writes, whatever the element's width.
  void fill_nan() {
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = i % 2 == 0 ? 0xf7 : 0x7f;
  }

  // Global coordinates of a box row; false when it lies outside the tensor.
  bool row_address(u32 row, u64& address) const {
    address = map.address;
    if ((flags & flag_gather) != 0) {
      const i64 index = at[1 + row];
      if (index < 0 || static_cast<u64>(index) >= map.dimensions[1]) return false;
      address += static_cast<u64>(index) * map.strides_bytes[0];
      return true;
    }
    for (std::size_t i = 1; i < static_cast<std::size_t>(map.rank); ++i) {
      const u32 count = (map.box[i] + map.element_strides[i] - 1) / map.element_strides[i];
      const i64 index = i64{at[i]} + i64{row % count} * map.element_strides[i];
      row /= count;
      if (index < 0 || static_cast<u64>(index) >= map.dimensions[i]) return false;
      address += static_cast<u64>(index) * map.strides_bytes[i - 1];
    }
    return true;
  }

  // Moves the part of every row that lies inside the tensor between global memory and the buffer.
  bool visit_rows(Cluster& cluster, bool store) {
    const u32 size = element_bytes(map.type);
    const i64 begin = std::max<i64>(at[0], 0);
    const i64 end = std::min<i64>(i64{at[0]} + map.box[0], static_cast<i64>(map.dimensions[0]));
    if (begin >= end) return true;
    const u64 bytes = static_cast<u64>(end - begin) * size;
    const u64 skip = static_cast<u64>(begin - at[0]) * size;
    AccessView who = view();
    if (store) ++who.tick;
    const u32 count = rows();
    for (u32 row = 0; row < count; ++row) {
      u64 address = 0;
      if (!row_address(row, address)) continue;
      address += static_cast<u64>(begin) * size;
      const Place place =
          resolve_global(*this, address, bytes, store ? "a tensor write" : "a tensor read");
      if (place.data == nullptr) return false;
      if (cluster.launch->checks) {
        check_global(who, *place.allocation, address, bytes,
                     !store                       ? Access::read
                     : (flags & flag_reduce) != 0 ? Access::atomic
                                                  : Access::write);
      }
      u8* in_buffer = buffer.data() + u64{row} * row_bytes() + skip;
      if (!store) {
        std::memcpy(in_buffer, place.data, bytes);
      } else if ((flags & flag_reduce) == 0) {
        std::memcpy(place.data, in_buffer, bytes);
      } else {
        reduce(place.data, in_buffer, bytes);
      }
    }
    return true;
  }

  void reduce(u8* target, const u8* source, u64 bytes) const {
    const u32 size = element_bytes(map.type);
    for (u64 i = 0; i < bytes; i += size) {
      u64 old = 0, value = 0;
      std::memcpy(&old, target + i, size);
      std::memcpy(&value, source + i, size);
      const u64 result = apply_atomic(operation, reduction_type(map.type), old, value, 0);
      std::memcpy(target + i, &result, size);
    }
  }

  // Calls visit(shared offset, buffer offset) for every 16 bytes, swizzled by address.
  template <class Visit>
  void for_chunks(u32 address, const Visit& visit) const {
    const u32 mask = swizzle_mask(static_cast<u32>(map.swizzle));
    const u32 bytes = row_bytes();
    for (u32 row = 0; row < rows(); ++row) {
      for (u32 i = 0; i < bytes; i += 16) {
        visit(swizzled(address + row * pitch() + i, mask), row * bytes + i);
      }
    }
  }

  void check_box(const Place& place, Access access) const {
    if (pitch() == row_bytes()) {
      check_shared(view(), *place.cta, place.offset, box_bytes(), access);
      return;
    }
    for_chunks(place.offset,
               [&](u32 chunk, u32) { check_shared(view(), *place.cta, chunk, 16, access); });
  }

  bool read_shared(Cluster& cluster) {
    buffer.resize(box_bytes());
    const Place place = resolve_shared(*this, shared, rows() * pitch(), "a tensor store's read");
    if (place.data == nullptr) return false;
    if (cluster.launch->checks) check_box(place, Access::read);
    const u8* memory = place.cta->shared.data();
    for_chunks(place.offset, [&](u32 chunk, u32 index) {
      std::memcpy(buffer.data() + index, memory + chunk, 16);
    });
    return true;
  }

  void deliver(Cluster& cluster) {
    if (multicast == 0) {
      write_shared(cluster, shared, barrier);
      return;
    }
    const u32 low = (1u << kRankShift) - 1;
    for (u32 rank = 0; rank < 16; ++rank) {
      if ((multicast >> rank & 1) == 0) continue;
      // With .cta_group::2 the signal goes to the CTA of the pair that the address names.
      const u32 signal_rank =
          (flags & flag_pair) != 0 ? (rank & ~1u) | (barrier >> kRankShift & 1u) : rank;
      write_shared(cluster, (shared & low) | rank << kRankShift,
                   (barrier & low) | signal_rank << kRankShift);
    }
  }

  void write_shared(Cluster& cluster, u32 address, u32 signal) {
    const Place place = resolve_shared(*this, address, rows() * pitch(), "a tensor load's write");
    if (place.data == nullptr) return;
    if (cluster.launch->checks) check_box(place, Access::write);
    u8* memory = place.cta->shared.data();
    for_chunks(place.offset, [&](u32 chunk, u32 index) {
      std::memcpy(memory + chunk, buffer.data() + index, 16);
    });
    if (place.cta != cta) warp->counters.dsmem_bytes += box_bytes();
    barrier_receive(*this, signal, box_bytes());
  }
};

bool stop(Warp& warp, const Inst& inst, int lane, FaultKind kind, const std::string& sentence) {
  warp.fault(kind, inst, lane, sentence);
  warp.launch->stopped = true;
  return false;
}

bool read_map(Warp& warp, const Inst& inst, u64 address, int lane, TensorMapSpec& map) {
  if (address % 64 != 0) {
    return stop(warp, inst, lane, FaultKind::misaligned,
                "a tensor map at " + hex(address) + " is not aligned to 64 bytes.");
  }
  std::array<std::byte, 128> bytes;
  for (u32 half = 0; half < 2; ++half) {  // each aligned to its size, which the whole need not be
    const Place place = resolve(warp, inst, Space::none, address + 64 * half, 64, lane, false);
    if (place.data == nullptr) return false;
    std::memcpy(bytes.data() + 64 * half, place.data, 64);
  }
  if (!decode_tensor_map(bytes, map)) {
    return stop(warp, inst, lane, FaultKind::bad_argument,
                "the 128 bytes at " + hex(address) + " are not a tensor map.");
  }
  return true;
}

// What an H200 stops at: with "misaligned address" at the shared address, with "illegal
// instruction" at the first byte, which holds outside the tensor too.
bool check_operands(Warp& warp, const Inst& inst, int lane, const TensorOp& op) {
  if (op.shared % 128 != 0) {
    return stop(
        warp, inst, lane, FaultKind::misaligned,
        "the shared address " + hex(op.shared) + " of a tensor copy is not a multiple of 128.");
  }
  const i64 first_byte = i64{op.at[0]} * element_bytes(op.map.type);
  if (first_byte % 16 != 0) {
    return stop(warp, inst, lane, FaultKind::misaligned,
                "the box of a tensor copy begins at byte " + std::to_string(first_byte) +
                    " of its rows, which is not a multiple of 16.");
  }
  if ((inst.flags & (flag_store | flag_pair | flag_multicast)) == 0 &&
      op.shared >> kRankShift != op.barrier >> kRankShift) {
    warp.fault(FaultKind::bad_argument, inst, lane,
               "the mbarrier is in another CTA than the destination, which needs .cta_group::2.");
  }
  return true;
}

// operands: map, coordinates..., shared address, [mbarrier], [mask]
Step run_tensor(Warp& warp, const Inst& inst) {
  const OperandRef* o = warp.operands(inst);
  const u32 coordinates = inst.extra;
  // Lanes that all store one tile to one place store the same bytes; that is one copy.
  u32 first_shared = 0;
  u64 first_map = 0;
  std::array<i32, 5> first_at{};
  for (u32 mask = warp.active; mask != 0 && !warp.launch->stopped; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    auto op = std::make_unique<TensorOp>();
    if (!read_map(warp, inst, warp.address(o[0], lane), lane, op->map)) return Step::next;
    const u32 wanted = (inst.flags & flag_gather) != 0 ? 2u : coordinates;
    if (static_cast<u32>(op->map.rank) != wanted) {
      stop(warp, inst, lane, FaultKind::bad_argument,
           "a copy of " + std::to_string(wanted) + " dimensions uses a tensor map of " +
               std::to_string(op->map.rank) + ".");
      return Step::next;
    }
    for (u32 i = 0; i < coordinates; ++i) {
      op->at[i] = static_cast<i32>(warp.value32(o[1 + i], lane));
    }
    const OperandRef* rest = o + 1 + coordinates;
    op->shared = static_cast<u32>(warp.address(rest[0], lane));
    op->flags = inst.flags;
    op->operation = static_cast<AtomicKind>(inst.mode);
    op->group = warp.bulk_group;
    if ((inst.flags & flag_store) == 0) op->barrier = static_cast<u32>(warp.address(rest[1], lane));
    if ((inst.flags & flag_multicast) != 0) op->multicast = warp.value32(rest[2], lane) & 0xffff;
    if (!check_operands(warp, inst, lane, *op)) return Step::next;
    if (inst.flags == flag_store) {
      const bool repeated = mask != warp.active && op->shared == first_shared &&
                            op->at == first_at && warp.address(o[0], lane) == first_map;
      if (repeated) continue;
      first_shared = op->shared;
      first_at = op->at;
      first_map = warp.address(o[0], lane);
    }
    ((inst.flags & flag_store) != 0 ? warp.counters.tma_store_bytes
                                    : warp.counters.tma_load_bytes) += op->box_bytes();
    warp.cluster->enqueue(std::move(op), warp, inst, lane);
  }
  return Step::next;
}

}  // namespace

bool tensor_store_unfinished(const AsyncOp& op, u64 below, bool reads_only) {
  const auto* tensor = dynamic_cast<const TensorOp*>(&op);
  return tensor != nullptr && (tensor->flags & flag_store) != 0 && tensor->group < below &&
         !(reads_only && tensor->has_read);
}

u64 tensor_store_group(const AsyncOp& op) {
  const auto* tensor = dynamic_cast<const TensorOp*>(&op);
  return tensor != nullptr && (tensor->flags & flag_store) != 0 ? tensor->group : ~u64{0};
}

void build_tensor_copy(Builder& b) {
  Inst& inst = b.inst;
  for (const std::string_view word : b.text.modifiers) {
    if (word.substr(0, 6) == "im2col") b.fail("im2col copies are not supported.");
  }
  const bool store = !b.text.modifiers.empty() && b.has("bulk_group");
  const std::size_t map_at = store ? 0 : 1;
  const Operand& map = b.operand(map_at);
  if (map.kind != Operand::Kind::memory || map.items.size() != 2 ||
      map.items[1].kind != Operand::Kind::vector) {
    b.fail("a tensor copy needs [map, {coordinates}].");
  }
  const bool gather = b.has("tile::gather4") || b.has("tile::scatter4");
  inst.flags = (store ? flag_store : 0u) | (b.has("reduce") ? flag_reduce : 0u) |
               (b.has("multicast::cluster") ? flag_multicast : 0u) |
               (b.has("cta_group::2") ? flag_pair : 0u) | (gather ? flag_gather : 0u);
  const int dims = b.which({"1d", "2d", "3d", "4d", "5d"});
  const std::size_t coordinates = map.items[1].items.size();
  if (!gather && coordinates != static_cast<std::size_t>(dims) + 1) {
    b.fail("the number of coordinates does not fit the dimensions.");
  }
  if (gather && coordinates != 5) b.fail("gather4 and scatter4 take five coordinates.");
  if (b.has("reduce")) {
    const int kind =
        b.which({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
    if (kind < 0) b.fail("the reduction is missing.");
    inst.mode = static_cast<u8>(kind);
  }
  inst.extra = static_cast<u32>(coordinates);
  b.address(map, Space::none);
  for (const Operand& item : map.items[1].items) b.input(item, Type::b32);
  b.address(b.operand(store ? 1 : 0), Space::shared);
  if (!store) b.address(b.operand(2), Space::shared);
  if ((inst.flags & flag_multicast) != 0) b.input(b.operand(3), Type::b16);
  inst.unit = Unit::memory;
  inst.run = run_tensor;
}

void build_tensormap(Builder& b) {
  if (b.has("cp_fenceproxy")) b.fail("tensormap.cp_fenceproxy is not supported.");
  b.fail("tensormap.replace is not supported.");
}

}  // namespace fovea::emulator
