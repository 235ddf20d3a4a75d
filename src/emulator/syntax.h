// What the parser makes of PTX text: names resolved to registers, variables and instruction
// indices, modifiers kept as words. Nothing here knows what an instruction means.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/numeric.h"

namespace fovea::emulator {

enum class Type : u8 {
  none,
  pred,
  b8,
  b16,
  b32,
  b64,
  b128,
  uint8,
  uint16,
  uint32,
  uint64,
  int8,
  int16,
  int32,
  int64,
  f16,
  f16x2,
  bf16,
  bf16x2,
  f32,
  f32x2,
  f64,
  tf32,
  e4m3,
  e5m2,
  e4m3x2,
  e5m2x2,
  e2m3,
  e3m2,
  e2m1,
  e2m3x2,
  e3m2x2,
  e2m1x2,
  e4m3x4,
  e5m2x4,
  ue8m0,
  ue4m3,
  ue8m0x2,
  uint16x2,
  int16x2,
};

// Type::none for a word that is not a type.
Type type_from_word(std::string_view word);
std::string_view type_word(Type type);
// Bytes in memory, and of the register that holds it (predicates: 0).
u32 type_bytes(Type type);
bool is_float(Type type);
bool is_signed(Type type);

enum class Space : u8 { none, reg, shared, shared_cluster, global, constant, local, param };

struct Variable {
  std::string name;
  Space space = Space::none;
  Type type = Type::none;
  u32 align = 1;
  u64 bytes = 0;
  u64 offset = 0;           // within its space; filled by layout
  bool external = false;    // extern .shared x[]: starts where the static part ends
  std::vector<u8> initial;  // .global and .const
  struct Address {
    u64 at;
    std::string symbol;
    i64 addend;
  };
  std::vector<Address> addresses;  // initialisers that name other variables
};

struct Register {
  std::string_view name;
  Type type = Type::none;
};

struct Operand {
  enum class Kind : u8 {
    none,
    reg,
    special,
    integer,
    real,
    variable,
    label,
    function,
    sink,
    vector,
    memory,
    pair
  };
  Kind kind = Kind::none;
  bool negated = false;         // !p
  Type real_type = Type::none;  // real: f32 for 0f, f64 for 0d and decimal
  u32 index = 0;                // register; label: instruction index; variable: see Scope
  u64 bits = 0;                 // integer and real
  i64 offset = 0;               // memory and variable + constant
  std::string_view text;
  std::vector<Operand> items;  // vector; pair; memory: [base, coordinates...]
};

struct Instruction {
  int line = 0;
  int source_file = 0;  // .loc, 0 when none
  u32 source_line = 0;
  i32 guard = -1;  // register index
  bool guard_not = false;
  std::string_view mnemonic;
  std::vector<std::string_view> modifiers;
  std::vector<Operand> operands;
};

struct Function {
  std::string name;
  bool entry = false;
  bool external = false;
  int line = 0;
  std::vector<Variable> results, parameters;
  std::vector<Register> registers;
  std::vector<Variable> locals;  // function-scope .local, .param and .shared
  std::vector<Instruction> code;
  std::map<std::string, std::vector<u32>, std::less<>> branch_targets;  // .branchtargets lists
  u32 max_threads = 0;
  std::array<u32, 3> required_cluster{};
  u64 shared_bytes = 0, local_bytes = 0;
};

struct Program;

struct ModuleData {
  std::string text;  // everything below views into it
  std::string version, target;
  std::vector<Variable> variables;  // module scope
  std::vector<std::unique_ptr<Function>> functions;
  std::map<int, std::string> files;
  u64 static_shared_bytes = 0;
  std::map<std::string, std::shared_ptr<const Program>, std::less<>> programs;  // decoded kernels
  u64 serial = 0;  // tells modules apart for symbol placement
};

// Top byte of a variable's number: which list it is in.
enum class Scope : u8 { module, results, parameters, locals };
const Variable& variable_at(const ModuleData& module, const Function& function, u32 index);

}  // namespace fovea::emulator
