// Tensor memory: what the files of tcgen05 share.
#pragma once

#include "emulator/async.h"
#include "emulator/matrix.h"

namespace fovea::emulator {

inline constexpr u32 kTensorLanes = 128;

inline u32 tensor_column(u32 address) { return address & 0xffff; }
inline u32 tensor_lane(u32 address) { return address >> 16; }

// Reports a fault where lanes of the warp are missing.
bool whole_warp(Warp& warp, const Inst& inst);

// The other CTA of the pair, or null: the ranks of a pair differ in their last bit.
Cta* peer_of(const Cta& cta);
inline constexpr const char* kNoPeer =
    "cta_group::2 needs the CTA's peer: a cluster of an even number of CTAs.";

// Reports a fault where columns do not exist or belong to no allocation.
bool tensor_range_ok(const AsyncOp& op, Cta& cta, u32 column, u32 columns);

void build_tensor_allocation(Builder& b);
void build_tensor_mma(Builder& b);
void build_tensor_cp(Builder& b);
void build_tensor_commit(Builder& b);

}  // namespace fovea::emulator
