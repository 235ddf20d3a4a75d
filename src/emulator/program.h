// A kernel ready to run: instructions bound to handlers, operands bound to register-file offsets.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "emulator/lanes.h"
#include "emulator/syntax.h"

namespace fovea::emulator {

class Warp;
struct Inst;

enum class Step : u8 {
  next,     // go on with the following instruction
  jumped,   // the handler has set the fragment's pc
  blocked,  // try the same instruction again when something has changed
  gone,     // the fragment has ended or waits at a join
};
using Handler = Step (*)(Warp&, const Inst&);

struct OperandRef {
  enum class Kind : u8 { none, row, constant, predicate, memory };
  Kind kind = Kind::none;
  bool negated = false;
  bool shared_base = false;  // a shared variable: the CTA's window is added at run time
  u8 words = 1;              // 32-bit words per lane
  i32 slot = 0;    // byte offset of the row; predicate: index; memory: row of the base, -1
  i32 vreg = -1;   // virtual register, for the checker; -1 for constants
  i64 offset = 0;  // memory: displacement or absolute address
};

enum class Unit : u8 { alu, fma, mufu, memory, tensor, control, other };

struct Inst {
  Handler run = nullptr;
  LaneFunction lane = nullptr;
  i32 guard = -1;
  i32 guard_vreg = -1;
  bool guard_not = false;
  bool pure = false;     // undefined inputs make undefined outputs; others must be defined
  bool copy = false;     // a plain move: carries checker state along
  bool halves = false;   // a move of two 32-bit words into 64 bits, or out of them
  bool late = false;     // results arrive after the instruction
  bool aligned = false;  // all live lanes of the warp must execute it together
  Unit unit = Unit::other;
  Rounding rounding = Rounding::nearest_even;
  Type type = Type::none;   // of the operation or the source
  Type type2 = Type::none;  // of the result where it differs
  Space space = Space::none;
  u8 mode = 0;                  // meaning is the handler's
  u16 outputs = 0, inputs = 0;  // operands [first, first+outputs) are written
  u16 kept = 0;                 // further operands that only have to stay alive
  u32 first = 0;
  u32 immediate = 0;
  u32 flags = 0;
  u32 extra = 0;
  u32 target = 0;  // branch
  u32 join = ~0u;  // where the sides of a branch meet again
  int line = 0;
  int source_file = 0;
  u32 source_line = 0;
  const Instruction* text = nullptr;
};

struct SpecialRow {
  std::string name;
  u32 slot;
};

struct Program {
  const ModuleData* module = nullptr;
  const Function* entry = nullptr;
  std::vector<Inst> code;
  std::vector<OperandRef> operands;
  std::vector<u32> constants;  // rows of 32 or 64 words
  std::vector<SpecialRow> specials;
  std::vector<Register> registers;  // of all functions linked in
  u32 register_bytes = 0;           // register file of one warp
  u32 predicates = 0;
  u64 local_bytes = 0;  // per lane
  u64 parameter_bytes = 0;
  u64 static_shared_bytes = 0;  // of this kernel and of the module
  bool uses_shared_base = false;
};

// Links `entry` with the functions it calls. Throws Error at the first instruction or modifier that
// is not in isa.def.
std::shared_ptr<const Program> build_program(const ModuleData& module, const Function& entry);

}  // namespace fovea::emulator
