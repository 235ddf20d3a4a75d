#include "emulator/matrix.h"

#include <array>
#include <cstring>

#include "emulator/async.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

using Table = std::array<float, 256>;

Table make_table(const SmallFloat& format, u32 bits) {
  Table table{};
  for (u32 code = 0; code < 256; ++code) {
    table[code] = decode_small(format, code & ((1u << bits) - 1));
  }
  return table;
}

}  // namespace

MatrixDescriptor hopper_descriptor(u64 bits) {
  MatrixDescriptor d;
  d.start = static_cast<u32>(bits & 0x3fff) << 4;
  d.leading = static_cast<u32>(bits >> 16 & 0x3fff) << 4;
  d.stride = static_cast<u32>(bits >> 32 & 0x3fff) << 4;
  constexpr u32 kinds[4] = {0, 3, 2, 1};
  d.swizzle = kinds[bits >> 62];
  d.supported = (bits >> 49 & 7) == 0;
  return d;
}

MatrixDescriptor blackwell_descriptor(u64 bits) {
  MatrixDescriptor d;
  d.start = static_cast<u32>(bits & 0x3fff) << 4;
  d.leading = static_cast<u32>(bits >> 16 & 0x3fff) << 4;
  d.stride = static_cast<u32>(bits >> 32 & 0x3fff) << 4;
  d.supported = (bits >> 46 & 7) == 1 && (bits >> 49 & 15) == 0;
  switch (bits >> 61) {
    case 0: d.swizzle = 0; break;
    case 1:
      d.swizzle = 3;
      d.atom32 = true;
      break;
    case 2: d.swizzle = 3; break;
    case 4: d.swizzle = 2; break;
    case 6: d.swizzle = 1; break;
    default: d.supported = false; break;
  }
  return d;
}

u32 element_size(Element element) {
  switch (element) {
    case Element::f16:
    case Element::bf16: return 2;
    case Element::tf32: return 4;
    default: return 1;
  }
}

Element element_of(Type type) {
  switch (type) {
    case Type::f16: return Element::f16;
    case Type::bf16: return Element::bf16;
    case Type::tf32: return Element::tf32;
    case Type::e4m3: return Element::e4m3;
    case Type::e5m2: return Element::e5m2;
    case Type::e2m3: return Element::e2m3;
    case Type::e3m2: return Element::e3m2;
    case Type::int8: return Element::int8;
    case Type::uint8: return Element::uint8;
    default: return Element::e2m1;
  }
}

// Sub-byte formats stand one to a byte: fp6 in the low six bits, fp4 in bits 2 to 5.
const float* byte_table(Element element) {
  static const Table e4m3 = make_table(kE4m3, 8);
  static const Table e5m2 = make_table(kE5m2, 8);
  static const Table e2m3 = make_table(kE2m3, 6);
  static const Table e3m2 = make_table(kE3m2, 6);
  static const Table e2m1 = [] {
    Table table{};
    for (u32 code = 0; code < 256; ++code) table[code] = decode_small(kE2m1, code >> 2 & 15);
    return table;
  }();
  static const Table signed_bytes = [] {
    Table table{};
    for (u32 code = 0; code < 256; ++code) table[code] = static_cast<i8>(code);
    return table;
  }();
  static const Table unsigned_bytes = [] {
    Table table{};
    for (u32 code = 0; code < 256; ++code) table[code] = static_cast<float>(code);
    return table;
  }();
  switch (element) {
    case Element::int8: return signed_bytes.data();
    case Element::uint8: return unsigned_bytes.data();
    case Element::e4m3: return e4m3.data();
    case Element::e5m2: return e5m2.data();
    case Element::e2m3: return e2m3.data();
    case Element::e3m2: return e3m2.data();
    default: return e2m1.data();
  }
}

void decode_chunk(Element element, const u8* chunk, float* out) {
  u16 halves[8];
  switch (element) {
    case Element::bf16:
      std::memcpy(halves, chunk, 16);
      for (int i = 0; i < 8; ++i) out[i] = std::bit_cast<float>(u32{halves[i]} << 16);
      break;
    case Element::f16:
      std::memcpy(halves, chunk, 16);
      for (int i = 0; i < 8; ++i) out[i] = half_to_float(halves[i]);
      break;
    case Element::tf32: {
      u32 words[4];
      std::memcpy(words, chunk, 16);
      for (int i = 0; i < 4; ++i) out[i] = std::bit_cast<float>(words[i] & 0xffffe000u);
      break;
    }
    default: {
      const float* table = byte_table(element);
      for (int i = 0; i < 16; ++i) out[i] = table[chunk[i]];
      break;
    }
  }
}

u32 chunk_address(const MatrixDescriptor& d, bool mn_major, u32 row, u32 k, u32 size) {
  const u32 span = d.swizzle == 0 ? 16 : 16u << d.swizzle;
  u32 address = d.start;
  if (!mn_major && d.swizzle != 0) {
    address += row / 8 * d.stride + row % 8 * span + k * size;
  } else if (!mn_major) {
    address += row / 8 * d.stride + row % 8 * 16 + k * size / 16 * d.leading;
  } else if (d.swizzle != 0) {
    const u32 width = span / size;
    address += row / width * d.leading + k / 8 * d.stride + k % 8 * span + row % width * size;
  } else {
    address += row * size / 16 * d.stride + k / 8 * d.leading + k % 8 * 16;
  }
  if (d.atom32) return address ^ ((address >> 7 & 3) << 5);
  return swizzled(address, swizzle_mask(d.swizzle));
}

bool load_operand(const AsyncOp& op, const AccessView& view, Cta& source,
                  const MatrixDescriptor& descriptor, bool mn_major, Element element, u32 rows,
                  u32 depth, float* out) {
  const u32 size = element_size(element), per_chunk = 16 / size;
  const u32 outer = mn_major ? depth : rows, inner = mn_major ? rows : depth;
  const bool checks = source.cluster->launch->checks;
  for (u32 o = 0; o < outer; ++o) {
    for (u32 i = 0; i < inner; i += per_chunk) {
      const u32 row = mn_major ? i : o, k = mn_major ? o : i;
      const u32 address = chunk_address(descriptor, mn_major, row, k, size);
      if (address < kSharedStart || address + 16 > source.shared.size()) {
        resolve_shared(op, address | source.rank << kRankShift, 16, "an operand read");
        return false;
      }
      if (checks) check_shared(view, source, address, 16, Access::read);
      float values[16];
      decode_chunk(element, source.shared.data() + address, values);
      if (!mn_major) {
        std::memcpy(out + row * depth + k, values, per_chunk * sizeof(float));
      } else {
        for (u32 e = 0; e < per_chunk; ++e) out[(row + e) * depth + k] = values[e];
      }
    }
  }
  return true;
}

}  // namespace fovea::emulator
