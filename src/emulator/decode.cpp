// From syntax to program: matches every instruction against isa.def, links called functions,
// assigns registers to slots and finds where divergent branches meet again.
#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>

#include "emulator/allocate.h"
#include "emulator/builder.h"
#include "emulator/builders.h"
#include "emulator/machine.h"

namespace fovea::emulator {
namespace {

struct IsaRow {
  std::string_view mnemonic, modifiers, types;
  void (*build)(Builder&);
};

constexpr IsaRow kIsa[] = {
#define ISA(mnemonic, modifiers, types, builder) {#mnemonic, modifiers, types, build_##builder},
#include "emulator/isa.def"
#undef ISA
};

bool list_contains(std::string_view list, std::string_view word) {
  std::size_t at = 0;
  while (at < list.size()) {
    const std::size_t end = std::min(list.find(' ', at), list.size());
    if (list.substr(at, end - at) == word) return true;
    at = end + 1;
  }
  return false;
}

bool known_special(std::string_view name) {
  constexpr std::string_view names =
      "%tid %ntid %ctaid %nctaid %clusterid %nclusterid %cluster_ctaid %cluster_nctaid %laneid "
      "%lanemask_eq %lanemask_lt %lanemask_le %lanemask_gt %lanemask_ge %cluster_ctarank "
      "%cluster_nctarank %warpid %nwarpid %smid %nsmid %gridid %dynamic_smem_size "
      "%total_smem_size %reserved_smem_offset_begin %reserved_smem_offset_cap "
      "%reserved_smem_offset_end";
  return list_contains(names, name.substr(0, name.find('.')));
}

const std::unordered_map<std::string_view, LaneOp>& lane_names() {
  static const std::unordered_map<std::string_view, LaneOp> names = {
#define UNARY(name, ...) {#name, LaneOp::name},
#define BINARY(name, ...) {#name, LaneOp::name},
#define TERNARY(name, ...) {#name, LaneOp::name},
#define COMPARE(name, ...) {#name, LaneOp::name},
#include "emulator/lanes.def"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef COMPARE
  };
  return names;
}

}  // namespace

// Holds the program while it grows; one per kernel.
class ProgramBuilder {
 public:
  ProgramBuilder(const ModuleData& module, const Function& entry) : module_(module) {
    program_ = std::make_shared<Program>();
    program_->module = &module;
    program_->entry = &entry;
  }

  std::shared_ptr<const Program> run() {
    const Function& entry = *program_->entry;
    program_->parameter_bytes = 0;
    for (const Variable& parameter : entry.parameters) {
      program_->parameter_bytes =
          std::max(program_->parameter_bytes, parameter.offset + parameter.bytes);
    }
    program_->static_shared_bytes = align(module_.static_shared_bytes, 16) + entry.shared_bytes;
    add_function(entry);
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const Function& function = *order_[i];
      if (i > 0) add_function(function);
    }
    for (const auto& [at, function] : calls_) {
      program_->code[at].target = starts_.at(function);
    }
    finish();
    return program_;
  }

  Program& program() { return *program_; }
  const ModuleData& module() const { return module_; }
  u32 register_base() const { return register_base_; }

  u32 constant(u64 bits, u32 words) {
    const auto key = std::make_pair(bits, words);
    const auto [it, added] = constants_.emplace(key, 0);
    if (added) {
      it->second = static_cast<u32>(program_->constants.size() * 4);
      for (u32 lane = 0; lane < 32; ++lane) {
        program_->constants.push_back(static_cast<u32>(bits));
        if (words == 2) program_->constants.push_back(static_cast<u32>(bits >> 32));
        for (u32 extra = 2; extra < words; ++extra) program_->constants.push_back(0);
        if (words == 4) {
          program_->constants[program_->constants.size() - 3] = static_cast<u32>(bits >> 32);
        }
      }
    }
    return it->second;
  }

  i32 special(std::string_view name, u32 words) {
    const std::string key = std::string(name) + (words == 2 ? "/2" : "");
    const auto [it, added] = specials_.emplace(key, static_cast<i32>(special_bytes_));
    if (added) {
      program_->specials.push_back({std::string(name), special_bytes_ | (words == 2 ? 1u : 0u)});
      special_bytes_ += 128 * words;
    }
    return it->second;
  }

  // 0, or the line that asked for another group before.
  int cta_group(int group, int line) {
    if (cta_group_ == 0) {
      cta_group_ = group;
      cta_group_line_ = line;
    }
    return cta_group_ == group ? 0 : cta_group_line_;
  }

  u32 call(const Function* function) {
    if (std::find(order_.begin(), order_.end(), function) == order_.end()) {
      order_.push_back(function);
    }
    calls_.emplace_back(program_->code.size(), function);
    return 0;
  }

  // Offset of a variable in its space: shared from the start of the window, local in the frame.
  u64 variable_offset(const Function& function, const Variable& variable, u32 index) {
    const Scope scope = static_cast<Scope>(index >> 24);
    if (variable.space == Space::shared) {
      if (variable.external) return kSharedStart + align(program_->static_shared_bytes, 16);
      return kSharedStart + variable.offset +
             (scope == Scope::module ? 0 : align(module_.static_shared_bytes, 16));
    }
    if (scope == Scope::parameters && function.entry) return variable.offset;
    return frame_offset(variable);
  }

  u64 frame_offset(const Variable& variable) {
    const auto [it, added] = frame_.emplace(&variable, 0);
    if (added) {
      program_->local_bytes = align(program_->local_bytes, std::max(variable.align, 16u));
      it->second = program_->local_bytes;
      program_->local_bytes += variable.bytes;
      if (program_->local_bytes > (u64{1} << 24)) {
        throw Error(0, "a thread's local memory exceeds 16 MiB.");
      }
    }
    return it->second;
  }

 private:
  static u64 align(u64 value, u64 to) { return (value + to - 1) / to * to; }

  // A caller's argument variables are the callee's parameters: both sides share the place.
  void share_arguments(const Function& function) {
    for (const Instruction& instruction : function.code) {
      if (instruction.mnemonic != "call") continue;
      std::size_t at = 0;
      const std::vector<Operand>& operands = instruction.operands;
      const bool results = !operands.empty() && operands[0].kind == Operand::Kind::vector;
      if (results) ++at;
      if (at >= operands.size() || operands[at].kind != Operand::Kind::function) continue;
      const Function& callee = *module_.functions[operands[at].index];
      if (results) share(function, operands[0], callee.results, instruction.line);
      if (at + 1 < operands.size()) {
        share(function, operands[at + 1], callee.parameters, instruction.line);
      }
    }
  }

  void share(const Function& caller, const Operand& list, const std::vector<Variable>& formal,
             int line) {
    if (list.items.size() != formal.size()) {
      throw Error(line, "a call passes " + std::to_string(list.items.size()) +
                            " values where the function takes " + std::to_string(formal.size()) +
                            ".");
    }
    for (std::size_t i = 0; i < formal.size(); ++i) {
      if (list.items[i].kind != Operand::Kind::variable) {
        throw Error(line, "a call passes something other than a .param variable.");
      }
      frame_[&variable_at(module_, caller, list.items[i].index)] = frame_offset(formal[i]);
    }
  }

  void refuse_recursion(const Function& function, int depth) {
    if (depth > 64) throw Error(function.line, "recursive functions are not supported.");
    for (const Instruction& instruction : function.code) {
      if (instruction.mnemonic != "call") continue;
      for (const Operand& operand : instruction.operands) {
        if (operand.kind != Operand::Kind::function) continue;
        refuse_recursion(*module_.functions[operand.index], depth + 1);
      }
    }
  }

  void add_function(const Function& function) {
    if (order_.empty()) {
      order_.push_back(&function);
      refuse_recursion(function, 0);
    }
    share_arguments(function);
    const u32 begin = static_cast<u32>(program_->code.size());
    starts_[&function] = begin;
    register_base_ = static_cast<u32>(program_->registers.size());
    program_->registers.insert(program_->registers.end(), function.registers.begin(),
                               function.registers.end());
    for (const Instruction& instruction : function.code) add(function, instruction);
    Inst end;  // falling off the end, and the place where returning lanes meet
    end.text = nullptr;
    end.run = function.entry ? end_of_entry : end_of_function;
    end.line = function.code.empty() ? function.line : function.code.back().line;
    program_->code.push_back(end);
    const u32 stop = static_cast<u32>(program_->code.size());
    for (u32 at = begin; at < stop; ++at) {
      Inst& inst = program_->code[at];
      if (inst.unit == Unit::control && inst.mode == kReturnMode && !function.entry) {
        inst.target = stop - 1 - begin;
      }
    }
    for (u32 at = begin; at < stop; ++at) rebase(program_->code[at], begin);
    regions_.push_back({begin, stop, register_base_, static_cast<u32>(program_->registers.size())});
  }

  // Labels are numbered within their function.
  void rebase(Inst& inst, u32 begin) {
    if (inst.unit != Unit::control) return;
    inst.target += begin;
    if (inst.mode == kTableMode) {
      const OperandRef* table = &program_->operands[inst.first];
      for (u32 i = 1; i <= inst.extra; ++i) {
        const_cast<OperandRef*>(table)[i].offset += begin;
      }
    }
  }

  void add(const Function& function, const Instruction& instruction) {
    const IsaRow* row = nullptr;
    for (const IsaRow& candidate : kIsa) {
      if (candidate.mnemonic == instruction.mnemonic) row = &candidate;
    }
    if (row == nullptr) {
      throw Error(instruction.line,
                  "'" + std::string(instruction.mnemonic) + "' is not an instruction known here.");
    }
    Inst inst;
    inst.text = &instruction;
    inst.line = instruction.line;
    inst.source_file = instruction.source_file;
    inst.source_line = instruction.source_line;
    inst.first = static_cast<u32>(program_->operands.size());
    if (instruction.guard >= 0) {
      inst.guard = 0;
      inst.guard_vreg = instruction.guard + static_cast<i32>(register_base_);
      inst.guard_not = instruction.guard_not;
    }
    Builder builder(*this, function, instruction, inst);
    for (const std::string_view modifier : instruction.modifiers) {
      const Type type = type_from_word(modifier);
      if (type != Type::none && list_contains(row->types, modifier)) {
        builder.types.push_back(type);
      } else if (!list_contains(row->modifiers, modifier) && !shape_word(*row, modifier)) {
        builder.fail("modifier ." + std::string(modifier) + " is not known for " +
                     std::string(instruction.mnemonic) + ".");
      }
    }
    row->build(builder);
    program_->code.push_back(inst);
  }

  // "m64n128k16" of wgmma: too many to list.
  static bool shape_word(const IsaRow& row, std::string_view word) {
    return row.mnemonic == "wgmma" && word.substr(0, 4) == "m64n";
  }

  void finish() {
    for (const Region& region : regions_) {
      find_joins(*program_, region.begin, region.end);
    }
    u32 row_bytes = special_bytes_;
    u32 predicate_count = 0;
    for (const Region& region : regions_) {
      allocate_slots(*program_, region.begin, region.end, region.first_register,
                     region.last_register, row_bytes, predicate_count);
    }
    program_->register_bytes = row_bytes;
    program_->predicates = predicate_count;
  }

  struct Region {
    u32 begin, end, first_register, last_register;
  };
  const ModuleData& module_;
  std::shared_ptr<Program> program_;
  std::vector<const Function*> order_;
  std::map<const Function*, u32> starts_;
  std::vector<std::pair<std::size_t, const Function*>> calls_;
  std::map<std::pair<u64, u32>, u32> constants_;
  std::map<std::string, i32> specials_;
  std::map<const Variable*, u64> frame_;
  std::vector<Region> regions_;
  u32 special_bytes_ = 0;
  u32 register_base_ = 0;
  int cta_group_ = 0;  // of tcgen05, 0 while none is named
  int cta_group_line_ = 0;
};

Builder::Builder(ProgramBuilder& owner, const Function& function, const Instruction& instruction,
                 Inst& result)
    : text(instruction), inst(result), owner_(owner), function_(function) {}

void Builder::fail(const std::string& sentence) const { throw Error(text.line, sentence); }

bool Builder::has(std::string_view modifier) const {
  return std::find(text.modifiers.begin(), text.modifiers.end(), modifier) != text.modifiers.end();
}

int Builder::which(std::initializer_list<std::string_view> words) const {
  int position = 0;
  for (const std::string_view word : words) {
    if (has(word)) return position;
    ++position;
  }
  return -1;
}

std::string_view Builder::after(std::string_view prefix) const {
  for (const std::string_view modifier : text.modifiers) {
    if (modifier.substr(0, prefix.size()) == prefix) return modifier.substr(prefix.size());
  }
  return {};
}

Type Builder::type(std::size_t i) const {
  if (i >= types.size()) fail(std::string(text.mnemonic) + " needs a type here.");
  return types[i];
}

const Operand& Builder::operand(std::size_t i) const {
  if (i >= text.operands.size()) {
    fail(std::string(text.mnemonic) + " has too few operands.");
  }
  return text.operands[i];
}

void Builder::expect_count(std::size_t low, std::size_t high) const {
  if (count() < low || count() > high) {
    fail(std::string(text.mnemonic) + " takes " + std::to_string(low) +
         (low == high ? "" : " to " + std::to_string(high)) + " operands, not " +
         std::to_string(count()) + ".");
  }
}

void Builder::push(const OperandRef& reference, bool is_output) {
  owner_.program().operands.push_back(reference);
  if (is_output) {
    ++inst.outputs;
  } else {
    ++inst.inputs;
  }
}

const Register& Builder::reg(const Operand& operand) const {
  if (operand.kind != Operand::Kind::reg) {
    fail("expected a register, not '" + std::string(operand.text) + "'.");
  }
  return function_.registers[operand.index];
}

OperandRef Builder::reference(const Operand& operand, Type type, bool checked_width) {
  OperandRef result;
  const u32 bytes = type_bytes(type);
  result.words = static_cast<u8>(bytes <= 4 ? 1 : bytes / 4);
  switch (operand.kind) {
    case Operand::Kind::reg: {
      const Register& declared = function_.registers[operand.index];
      if (operand.offset != 0) fail("a register with an offset is only allowed in an address.");
      if (declared.type == Type::pred) {
        if (type != Type::pred) fail("a predicate stands where a value is needed.");
        result.kind = OperandRef::Kind::predicate;
      } else {
        if (type == Type::pred) fail("a value stands where a predicate is needed.");
        const u32 width = type_bytes(declared.type);
        if (checked_width && width != bytes && !(width <= 2 && bytes <= 2)) {
          fail("register '" + std::string(operand.text) + "' is " + std::to_string(width * 8) +
               " bit wide where " + std::to_string(bytes * 8) + " are needed.");
        }
        result.kind = OperandRef::Kind::row;
        result.words = static_cast<u8>(width <= 4 ? 1 : width / 4);
      }
      result.negated = operand.negated;
      result.vreg = static_cast<i32>(operand.index + owner_.register_base());
      return result;
    }
    case Operand::Kind::integer:
    case Operand::Kind::real: {
      if (type == Type::pred) {  // a literal truth value: all lanes or none
        result.kind = OperandRef::Kind::constant;
        result.slot = operand.bits != 0 ? -1 : 0;
        return result;
      }
      u64 bits = operand.bits;
      if (operand.kind == Operand::Kind::real && operand.real_type == Type::f64 && bytes == 4) {
        bits = std::bit_cast<u32>(static_cast<float>(std::bit_cast<double>(bits)));
      }
      if (operand.kind == Operand::Kind::integer && type == Type::f32) {
        bits = static_cast<u32>(bits);
      }
      if (bytes < 8) bits &= (u64{1} << (8 * bytes)) - 1;
      result.kind = OperandRef::Kind::constant;
      result.slot = static_cast<i32>(owner_.constant(bits, result.words));
      return result;
    }
    case Operand::Kind::special: {
      if (operand.text.substr(0, 6) == "%clock" || operand.text == "%globaltimer") break;
      if (!known_special(operand.text)) {
        fail("'" + std::string(operand.text) +
             "' is neither a register nor a special register known here.");
      }
      result.kind = OperandRef::Kind::row;
      result.slot = owner_.special(operand.text, result.words);
      result.vreg = -2;  // fixed slot
      return result;
    }
    default: break;
  }
  fail("operand '" + std::string(operand.text) + "' is of a kind not allowed here.");
}

void Builder::output(const Operand& operand, Type type) {
  if (is_sink(operand)) {
    none_output();
    return;
  }
  if (operand.kind != Operand::Kind::reg) fail("a result must be a register.");
  push(reference(operand, type, true), true);
}

void Builder::input(const Operand& operand, Type type) {
  push(reference(operand, type, true), false);
}

void Builder::output_any(const Operand& operand) {
  if (is_sink(operand)) {
    none_output();
    return;
  }
  push(reference(operand, reg(operand).type, false), true);
}

void Builder::input_any(const Operand& operand) {
  if (operand.kind == Operand::Kind::reg) {
    push(reference(operand, reg(operand).type, false), false);
  } else {
    push(reference(operand, Type::b64, false), false);
  }
}

void Builder::output_list(const Operand& operand, Type type) {
  if (operand.kind != Operand::Kind::vector) {
    output(operand, type);
    return;
  }
  for (const Operand& item : operand.items) output(item, type);
}

void Builder::input_list(const Operand& operand, Type type) {
  if (operand.kind != Operand::Kind::vector) {
    input(operand, type);
    return;
  }
  for (const Operand& item : operand.items) input(item, type);
}

void Builder::keep(const Operand& operand, Type type) {
  owner_.program().operands.push_back(reference(operand, type, true));
  ++inst.kept;
}

void Builder::none_output() { push(OperandRef{}, true); }
void Builder::none_input() { push(OperandRef{}, false); }

void Builder::address(const Operand& operand, Space space) {
  if (operand.kind != Operand::Kind::memory || operand.items.empty()) {
    fail("expected an address in brackets.");
  }
  const Operand& base = operand.items[0];
  OperandRef result;
  result.kind = OperandRef::Kind::memory;
  result.slot = -1;
  result.offset = operand.offset;
  if (base.kind == Operand::Kind::reg) {
    const u32 width = type_bytes(reg(base).type);
    if (width != 4 && width != 8) fail("an address register must have 32 or 64 bit.");
    result.slot = 0;
    result.words = static_cast<u8>(width / 4);
    result.vreg = static_cast<i32>(base.index + owner_.register_base());
  } else if (base.kind == Operand::Kind::variable) {
    const Variable& target = variable(base);
    result.offset += static_cast<i64>(variable_offset(base));
    result.shared_base = target.space == Space::shared;
    if (space == Space::none && target.space == Space::shared) {
      result.offset += static_cast<i64>(kSharedWindow);
    }
  } else if (base.kind == Operand::Kind::integer) {
    result.offset += static_cast<i64>(base.bits);
  } else {
    fail("'" + std::string(base.text) + "' cannot be an address.");
  }
  push(result, false);
}

void Builder::address_of(const Operand& operand) {
  const Variable& target = variable(operand);
  OperandRef result;
  result.kind = OperandRef::Kind::memory;
  result.slot = -1;
  result.offset = operand.offset + static_cast<i64>(variable_offset(operand));
  result.shared_base = target.space == Space::shared;
  push(result, false);
}

const Variable& Builder::variable(const Operand& operand) const {
  if (operand.kind != Operand::Kind::variable) {
    fail("'" + std::string(operand.text) + "' is not a variable.");
  }
  return variable_at(owner_.module(), function_, operand.index);
}

u64 Builder::variable_offset(const Operand& operand) {
  const Variable& target = variable(operand);
  if (target.space == Space::global || target.space == Space::constant) {
    return target.offset;  // placed in device memory before decoding
  }
  return owner_.variable_offset(function_, target, operand.index);
}

u64 Builder::integer(const Operand& operand) const {
  if (operand.kind != Operand::Kind::integer) fail("an integer literal is needed here.");
  return operand.bits;
}

Space Builder::space() const {
  for (const std::string_view modifier : text.modifiers) {
    if (modifier == "shared" || modifier == "shared::cta") return Space::shared;
    if (modifier == "shared::cluster") return Space::shared_cluster;
    if (modifier == "global") return Space::global;
    if (modifier == "const") return Space::constant;
    if (modifier == "local") return Space::local;
    if (modifier == "param" || modifier == "param::entry" || modifier == "param::func") {
      return Space::param;
    }
  }
  return Space::none;
}

Rounding Builder::rounding() const {
  if (has("rz") || has("rzi")) return Rounding::zero;
  if (has("rm") || has("rmi")) return Rounding::down;
  if (has("rp") || has("rpi")) return Rounding::up;
  if (has("rna")) return Rounding::nearest_away;
  return Rounding::nearest_even;
}

bool Builder::has_lane(std::string_view name) const {
  return lane_names().find(name) != lane_names().end();
}

void Builder::lane(std::string_view name) {
  const auto it = lane_names().find(name);
  if (it == lane_names().end()) {
    fail("this combination of type and modifiers of " + std::string(text.mnemonic) +
         " is not supported (" + std::string(name) + ").");
  }
  inst.lane = lane_function(it->second);
}

bool Builder::is_entry_parameter(const Operand& operand) const {
  return in_entry() && operand.kind == Operand::Kind::variable &&
         static_cast<Scope>(operand.index >> 24) == Scope::parameters;
}

void Builder::only_for(std::string_view chips) const {
  if (target().starts_with(chips)) return;
  fail(std::string(text.mnemonic) + " is an instruction of " + std::string(chips) + ", not of " +
       std::string(target()) + ".");
}

void Builder::agree_on_cta_group() {
  const int group = which({"cta_group::1", "cta_group::2"}) + 1;
  if (group == 0) {
    if (which({"alloc", "dealloc", "relinquish_alloc_permit", "mma", "cp", "commit"}) >= 0) {
      fail("this tcgen05 instruction needs .cta_group::1 or .cta_group::2.");
    }
    return;
  }
  const int other = owner_.cta_group(group, text.line);
  if (other != 0) {
    fail("a kernel uses one .cta_group; line " + std::to_string(other) + " has the other.");
  }
}

std::string_view Builder::target() const { return owner_.module().target; }

u32 Builder::call_target(const Operand& operand) {
  const Function& callee = *owner_.module().functions[operand.index];
  if (callee.external) fail("function " + callee.name + " has no body in this module.");
  owner_.call(&callee);
  return 0;
}

void Builder::add_table(const Operand& targets) {
  for (const Operand& item : targets.items) {
    OperandRef reference;
    reference.kind = OperandRef::Kind::none;
    reference.offset = item.index;
    owner_.program().operands.push_back(reference);
    ++inst.extra;
  }
}

std::string exact_name(Type type) { return std::string(type_word(type)); }

std::string unsigned_name(Type type) {
  std::string word(type_word(type));
  if (word[0] == 's') word[0] = 'u';
  return word;
}

std::string bits_name(Type type) { return "b" + std::to_string(8 * type_bytes(type)); }

std::shared_ptr<const Program> build_program(const ModuleData& module, const Function& entry) {
  return ProgramBuilder(module, entry).run();
}

}  // namespace fovea::emulator
