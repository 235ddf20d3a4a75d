// Matrix operands in shared memory, as wgmma and tcgen05 descriptors describe them.
#pragma once

#include <vector>

#include "emulator/machine.h"

namespace fovea::emulator {

struct MatrixDescriptor {
  u32 start = 0;    // byte address in the CTA's shared memory
  u32 leading = 0;  // bytes
  u32 stride = 0;
  u32 swizzle = 0;      // 0 none, 1: 32, 2: 64, 3: 128 bytes
  bool atom32 = false;  // 128-byte swizzle of 32-byte atoms (tcgen05)
  bool supported = true;
};

MatrixDescriptor hopper_descriptor(u64 bits);
MatrixDescriptor blackwell_descriptor(u64 bits);

enum class Element : u8 { f16, bf16, tf32, e4m3, e5m2, e2m3, e3m2, e2m1, int8, uint8 };
u32 element_size(Element element);  // bytes in shared memory
Element element_of(Type type);
const float* byte_table(Element element);  // 256 values of an 8-bit format

// Decodes 16 bytes at `chunk` to 16 / element_size floats.
void decode_chunk(Element element, const u8* chunk, float* out);

// Address of the 16 bytes that hold row `row`, elements [k, k + 16 / size) of a K-major operand, or
// rows [row, row + 16 / size), element k of an MN-major one. Before the swizzle's exclusive or it
// is
//   K-major, swizzled   start + (row / 8) stride + (row % 8) S + k size
//   K-major, plain      start + (row / 8) stride + (row % 8) 16 + (k size / 16) leading
//   MN-major, swizzled  start + (row / W) leading + (k / 8) stride + (k % 8) S + (row % W) size
//   MN-major, plain     start + (row size / 16) stride + (k / 8) leading + (k % 8) 16
// with S the swizzle's bytes and W = S / size.
u32 chunk_address(const MatrixDescriptor& d, bool mn_major, u32 row, u32 k, u32 size);

// Reads rows x depth elements into out[row * depth + k]. Checks every 16 bytes against the shadow
// memory and the bounds; false after reporting a fault.
bool load_operand(const AsyncOp& op, const AccessView& view, Cta& source,
                  const MatrixDescriptor& descriptor, bool mn_major, Element element, u32 rows,
                  u32 depth, float* out);

}  // namespace fovea::emulator
