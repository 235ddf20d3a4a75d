// Shared by the files that implement asynchronous instructions.
#pragma once

#include "emulator/builder.h"
#include "emulator/machine.h"

namespace fovea::emulator {

enum class AtomicKind : u8 {
  add,
  min,
  max,
  bit_and,
  bit_or,
  bit_xor,
  exchange,
  cas,
  increment,
  decrement
};

// New value of a location of the type's width.
u64 apply_atomic(AtomicKind kind, Type type, u64 old, u64 operand, u64 second);

void build_async_store(Builder& b);  // st.async and red.async
void build_tensor_copy(Builder& b);  // cp.async.bulk.tensor and its reductions

// Whether an operation of a bulk group numbered below `below` still has reads (or writes) to do.
bool bulk_unfinished(const AsyncOp& op, u64 below, bool reads_only);
u64 bulk_group_of(const AsyncOp& op);  // ~0 when it belongs to none
bool tensor_store_unfinished(const AsyncOp& op, u64 below, bool reads_only);
u64 tensor_store_group(const AsyncOp& op);

inline u32 swizzle_mask(u32 kind) { return kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? 3 : 7; }

// Swizzle of a shared address: 16-byte chunks exclusive-or'ed with bits 7 and up.
inline u32 swizzled(u32 address, u32 mask) { return address ^ ((address >> 7 & mask) << 4); }

}  // namespace fovea::emulator
