// Register slots and reconvergence points of one function inside a program.
#pragma once

#include "emulator/program.h"

namespace fovea::emulator {

// Inst::mode of control instructions.
inline constexpr u8 kBranchMode = 1;
inline constexpr u8 kTableMode = 2;  // operands: index, then targets in OperandRef::offset
inline constexpr u8 kReturnMode = 3;
inline constexpr u8 kExitMode = 4;
inline constexpr u8 kCallMode = 5;

Step end_of_entry(Warp&, const Inst&);
Step end_of_function(Warp&, const Inst&);

// Sets Inst::join of branches in [begin, end) to the first instruction of their immediate
// post-dominator.
void find_joins(Program& program, u32 begin, u32 end);

// Gives the registers [first, last) slots after row_bytes and predicate_count, by linear scan over
// live ranges, and raises both.
void allocate_slots(Program& program, u32 begin, u32 end, u32 first, u32 last, u32& row_bytes,
                    u32& predicate_count);

}  // namespace fovea::emulator
