// How one row of isa.def turns an instruction's text into an Inst.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/program.h"

namespace fovea::emulator {

class ProgramBuilder;

class Builder {
 public:
  Builder(ProgramBuilder& owner, const Function& function, const Instruction& instruction,
          Inst& result);

  const Instruction& text;
  Inst& inst;
  std::vector<Type> types;  // type modifiers, in order

  [[noreturn]] void fail(const std::string& sentence) const;
  bool has(std::string_view modifier) const;
  // Position in `words` of the one that is present, or -1.
  int which(std::initializer_list<std::string_view> words) const;
  // First modifier that begins with `prefix`, without it; empty when there is none.
  std::string_view after(std::string_view prefix) const;
  Type type(std::size_t i) const;

  std::size_t count() const { return text.operands.size(); }
  const Operand& operand(std::size_t i) const;
  void expect_count(std::size_t low, std::size_t high) const;
  bool is_sink(const Operand& operand) const { return operand.kind == Operand::Kind::sink; }

  // Outputs first, then inputs, in the order the handler reads them.
  void output(const Operand& operand, Type type);
  void input(const Operand& operand, Type type);
  void output_any(const Operand& operand);  // a register as wide as it was declared
  void input_any(const Operand& operand);
  void output_list(const Operand& operand, Type type);
  void input_list(const Operand& operand, Type type);
  void keep(const Operand& operand, Type type);  // after all inputs: must stay alive
  void none_output();
  void none_input();
  void address(const Operand& operand, Space space);
  void address_of(const Operand& operand);    // the value of a variable's address
  u64 integer(const Operand& operand) const;  // a literal
  Space space() const;                        // from modifiers; none means generic
  Rounding rounding() const;

  void lane(std::string_view name);  // binds the arithmetic of lanes.def; fails if absent
  bool has_lane(std::string_view name) const;
  const Register& reg(const Operand& operand) const;
  u32 label(const Operand& operand) const { return operand.index; }
  std::string_view target() const;  // of the module: sm_90a
  // Refuses the instruction unless the module's target begins with `chips`: "sm_90a", "sm_10".
  void only_for(std::string_view chips) const;
  // All tcgen05 instructions of a kernel that name a .cta_group name the same one.
  void agree_on_cta_group();
  u32 call_target(const Operand& operand);
  void add_table(const Operand& targets);
  const Variable& variable(const Operand& operand) const;
  u64 variable_offset(const Operand& operand);
  bool in_entry() const { return function_.entry; }
  // Whether the operand is a parameter of the kernel itself, not of a device function.
  bool is_entry_parameter(const Operand& operand) const;

 private:
  OperandRef reference(const Operand& operand, Type type, bool checked_width);
  void push(const OperandRef& reference, bool is_output);
  ProgramBuilder& owner_;
  const Function& function_;
};

// u and s variants share an operation where the sign does not matter
std::string unsigned_name(Type type);
std::string bits_name(Type type);
std::string exact_name(Type type);

}  // namespace fovea::emulator
