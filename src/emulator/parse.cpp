// PTX text to syntax tree: a hand-written scanner and a recursive-descent parser.
//
// Any byte string ends in a module or in an Error. Recursion is bounded by kMaxNesting and sizes by
// the constants below, so hostile text cannot exhaust the stack or memory.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "emulator/syntax.h"

namespace fovea::emulator {
namespace {

constexpr int kMaxNesting = 32;
constexpr u64 kMaxRegisters = 1u << 20;
constexpr u64 kMaxVariableBytes = u64{1} << 32;
constexpr u64 kMaxInitialisedBytes = u64{1} << 26;

bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_char(char c) { return is_name_start(c) || is_digit(c); }

int hex_value(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) { skip_space(); }

  int line() const { return line_; }
  bool at_end() const { return at_ >= text_.size(); }
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }

  [[noreturn]] void fail(const std::string& sentence) const { throw Error(line_, sentence); }

  bool accept(char c) {
    if (peek() != c || at_end()) return false;
    ++at_;
    skip_space();
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "' but found " + here() + ".");
  }

  // A name, or empty.
  std::string_view accept_name() {
    if (!is_name_start(peek())) return {};
    const std::size_t begin = at_;
    while (is_name_char(peek())) ++at_;
    const std::string_view name = text_.substr(begin, at_ - begin);
    skip_space();
    return name;
  }
  std::string_view expect_name(const char* what) {
    const std::string_view name = accept_name();
    if (name.empty()) fail(std::string("expected ") + what + " but found " + here() + ".");
    return name;
  }

  // ".word" with "::" inside, as in ".shared::cluster"; empty when there is no '.'.
  std::string_view accept_modifier() {
    if (peek() != '.' || !is_name_char(peek(1))) return {};
    const std::size_t begin = ++at_;
    while (is_name_char(peek()) || (peek() == ':' && peek(1) == ':' && is_name_char(peek(2)))) {
      at_ += peek() == ':' ? 2 : 1;
    }
    const std::string_view word = text_.substr(begin, at_ - begin);
    skip_space();
    return word;
  }

  // The ".x" of "%tid.x"; no space is allowed before it, which accept_name has already skipped.
  std::string_view accept_component() {
    if (peek() == '.' && peek(1) >= 'w' && peek(1) <= 'z' && !is_name_char(peek(2))) {
      const std::string_view word = text_.substr(at_, 2);
      at_ += 2;
      skip_space();
      return word;
    }
    return {};
  }

  bool at_number() const { return is_digit(peek()) || (peek() == '-' && is_digit(peek(1))); }

  // Integer or real literal with its sign.
  Operand number() {
    Operand operand;
    const bool negative = peek() == '-';
    if (negative) ++at_;
    if (peek() == '0' && (peek(1) == 'f' || peek(1) == 'F') && hex_value(peek(2)) >= 0) {
      hex_real(operand, 8, Type::f32);
      if (negative) operand.bits ^= 0x80000000u;
    } else if (peek() == '0' && (peek(1) == 'd' || peek(1) == 'D') && hex_value(peek(2)) >= 0) {
      hex_real(operand, 16, Type::f64);
      if (negative) operand.bits ^= u64{1} << 63;
    } else if (looks_decimal_real()) {
      decimal_real(operand);
      if (negative) operand.bits ^= u64{1} << 63;
    } else {
      operand.kind = Operand::Kind::integer;
      operand.bits = integer_digits();
      if (negative) operand.bits = ~operand.bits + 1;
    }
    if (is_name_char(peek())) fail("a number is followed by " + here() + ".");
    skip_space();
    return operand;
  }

  std::string_view string() {
    if (peek() != '"') fail("expected a string but found " + here() + ".");
    const std::size_t begin = ++at_;
    while (!at_end() && peek() != '"') {
      if (peek() == '\n') fail("a string does not end on its line.");
      at_ += peek() == '\\' && at_ + 1 < text_.size() ? 2 : 1;
    }
    if (at_end()) fail("a string does not end.");
    const std::string_view word = text_.substr(begin, at_ - begin);
    ++at_;
    skip_space();
    return word;
  }

  // Skips to the end of the line: .file and .loc carry fields that nothing here needs.
  void skip_line() {
    while (!at_end() && peek() != '\n') ++at_;
    skip_space();
  }

  std::string here() const {
    if (at_end()) return "the end of the text";
    const unsigned char c = static_cast<unsigned char>(peek());
    if (c < 32 || c > 126) return "a byte that is not printable ASCII";
    return std::string("'") + peek() + "'";
  }

 private:
  void skip_space() {
    for (;;) {
      const char c = peek();
      if (at_end()) return;
      if (c == '\n') ++line_;
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v') {
        ++at_;
      } else if (c == '/' && peek(1) == '/') {
        while (!at_end() && peek() != '\n') ++at_;
      } else if (c == '/' && peek(1) == '*') {
        at_ += 2;
        while (!at_end() && !(peek() == '*' && peek(1) == '/')) {
          if (peek() == '\n') ++line_;
          ++at_;
        }
        at_ = std::min(at_ + 2, text_.size());
      } else {
        return;
      }
    }
  }

  void hex_real(Operand& operand, int digits, Type type) {
    at_ += 2;
    operand.kind = Operand::Kind::real;
    operand.real_type = type;
    for (int i = 0; i < digits; ++i) {
      const int value = hex_value(peek());
      if (value < 0) fail("a hexadecimal real number has too few digits.");
      operand.bits = operand.bits << 4 | static_cast<u64>(value);
      ++at_;
    }
  }

  bool looks_decimal_real() const {
    std::size_t i = 0;
    while (is_digit(peek(i))) ++i;
    return (peek(i) == '.' && is_digit(peek(i + 1))) ||
           ((peek(i) == 'e' || peek(i) == 'E') &&
            (is_digit(peek(i + 1)) || peek(i + 1) == '-' || peek(i + 1) == '+') && peek(0) != '0');
  }

  void decimal_real(Operand& operand) {
    const std::size_t begin = at_;
    while (is_digit(peek()) || peek() == '.') ++at_;
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '-' || peek() == '+') ++at_;
      while (is_digit(peek())) ++at_;
    }
    const std::string word(text_.substr(begin, at_ - begin));
    operand.kind = Operand::Kind::real;
    operand.real_type = Type::f64;
    operand.bits = std::bit_cast<u64>(std::strtod(word.c_str(), nullptr));
  }

  u64 integer_digits() {
    u64 base = 10;
    if (peek() == '0') {
      const char next = peek(1);
      if (next == 'x' || next == 'X') {
        base = 16;
        at_ += 2;
      } else if (next == 'b' || next == 'B') {
        base = 2;
        at_ += 2;
      } else if (is_digit(next)) {
        base = 8;
        ++at_;
      }
    }
    u64 value = 0;
    int digits = 0;
    for (;; ++digits) {
      const int digit = hex_value(peek());
      if (digit < 0 || static_cast<u64>(digit) >= base) break;
      value = value * base + static_cast<u64>(digit);
      ++at_;
    }
    if (digits == 0) fail("an integer has no digits.");
    if (peek() == 'U') ++at_;
    return value;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1;
};

bool has_components(std::string_view name) {
  constexpr std::array<std::string_view, 8> vectors{
      "%tid",       "%ntid",       "%ctaid",         "%nctaid",
      "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid"};
  return std::find(vectors.begin(), vectors.end(), name) != vectors.end();
}

// One pair of braces in a body: registers, labels and local variables are visible inside only.
struct BlockScope {
  struct Range {
    u32 first, count;
  };
  std::unordered_map<std::string_view, Range> ranges;   // "%r<73>"
  std::unordered_map<std::string_view, u32> registers;  // single names
  std::unordered_map<std::string_view, u32> variables;
  std::unordered_map<std::string_view, u32> labels;
  std::unordered_map<std::string_view, std::vector<std::string_view>> targets;
  struct Pending {
    u32 instruction;
    std::string_view name;
    int line;
  };
  std::vector<Pending> pending;
};

class Parser {
 public:
  Parser(std::string_view text, ModuleData& module) : scan_(text), module_(module) {}

  void run() {
    while (!scan_.at_end()) top_level();
    if (module_.version.empty()) scan_.fail("the text has no .version directive: it is not PTX.");
    if (module_.target.empty()) scan_.fail("the text has no .target directive.");
  }

 private:
  void top_level() {
    const std::string_view word = scan_.accept_modifier();
    if (word.empty()) scan_.fail("expected a directive but found " + scan_.here() + ".");
    if (word == "version") {
      version();
    } else if (word == "target") {
      module_.target = std::string(scan_.expect_name("a target"));
      while (scan_.accept(',')) scan_.expect_name("a target option");
    } else if (word == "address_size") {
      if (scan_.number().bits != 64) scan_.fail("only .address_size 64 is supported.");
    } else if (word == "file") {
      file();
    } else if (word == "section") {
      skip_section();
    } else if (word == "pragma") {
      scan_.string();
      scan_.expect(';');
    } else if (word == "alias") {
      scan_.fail(".alias is not supported.");
    } else {
      linkage_item(word);
    }
  }

  void version() {
    const Operand number = scan_.number();
    module_.version = number.kind == Operand::Kind::real
                          ? std::to_string(std::bit_cast<double>(number.bits))
                          : std::to_string(number.bits);
  }

  void file() {
    const Operand index = scan_.number();
    const std::string_view path = scan_.string();
    module_.files[static_cast<int>(index.bits & 0x7fffffff)] = std::string(path);
    while (scan_.accept(',')) scan_.number();
  }

  void skip_section() {
    scan_.accept_modifier();
    if (scan_.peek() != '{') scan_.expect_name("a section name");
    scan_.expect('{');
    while (!scan_.at_end() && scan_.peek() != '}') scan_.skip_line();
    scan_.expect('}');
  }

  void linkage_item(std::string_view word) {
    bool external = false;
    while (word == "visible" || word == "extern" || word == "weak" || word == "common") {
      external = external || word == "extern";
      word = scan_.accept_modifier();
    }
    if (word == "entry" || word == "func") {
      function(word == "entry", external);
    } else if (word == "global" || word == "const" || word == "shared") {
      declare_variables(space_of(word), external, module_.variables, Scope::module, nullptr);
    } else {
      scan_.fail("." + std::string(word) + " is not a directive known here.");
    }
  }

  static Space space_of(std::string_view word) {
    if (word == "global") return Space::global;
    if (word == "const") return Space::constant;
    if (word == "shared") return Space::shared;
    if (word == "local") return Space::local;
    return Space::param;
  }

  // After ".shared" and the like: [.align N] .type name[dims] [= init] {, name...};
  void declare_variables(Space space, bool external, std::vector<Variable>& list, Scope scope,
                         BlockScope* block) {
    Variable common = variable_type(space);
    common.external = external;
    do {
      Variable variable = common;
      const std::string_view name = variable_name(variable);
      if (scan_.accept('=')) initialiser(variable);
      add_variable(std::move(variable), name, list, scope, block);
    } while (scan_.accept(','));
    scan_.expect(';');
  }

  void add_variable(Variable variable, std::string_view name, std::vector<Variable>& list,
                    Scope scope, BlockScope* block) {
    if (list.size() >= 0xffffff) scan_.fail("too many variables.");
    const u32 index = static_cast<u32>(scope) << 24 | static_cast<u32>(list.size());
    list.push_back(std::move(variable));
    if (block != nullptr) {
      block->variables[name] = index;
    } else {
      module_variables_[name] = index;
    }
  }

  Variable variable_type(Space space) {
    Variable variable;
    variable.space = space;
    for (;;) {
      const std::string_view word = scan_.accept_modifier();
      if (word.empty()) scan_.fail("expected a type but found " + scan_.here() + ".");
      if (word == "align") {
        variable.align = static_cast<u32>(scan_.number().bits);
        if (variable.align == 0 || variable.align > 4096 || !std::has_single_bit(variable.align)) {
          scan_.fail(".align must be a power of two up to 4096.");
        }
      } else if (word == "ptr" || word == "attribute" || word == "unified") {
        if (word == "attribute") scan_.fail(".attribute is not supported.");
      } else if (word == "global" || word == "shared" || word == "const" || word == "local") {
        continue;  // ".ptr .global": where the pointer points
      } else if (word == "v2" || word == "v4" || word == "v8") {
        vector_width_ = static_cast<u32>(word[1] - '0');
      } else {
        variable.type = type_from_word(word);
        if (variable.type == Type::none) {
          scan_.fail("." + std::string(word) + " is not a type.");
        }
        break;
      }
    }
    // ".param .u64 .ptr .global .align 1 name": attributes may follow the type.
    for (;;) {
      if (scan_.peek() != '.') break;
      const std::string_view word = scan_.accept_modifier();
      if (word == "align") {
        scan_.number();
      } else if (word != "ptr" && word != "global" && word != "shared" && word != "const" &&
                 word != "local") {
        scan_.fail("." + std::string(word) + " is not expected in a declaration.");
      }
    }
    return variable;
  }

  std::string_view variable_name(Variable& variable) {
    const std::string_view name = scan_.expect_name("a variable name");
    variable.name = std::string(name);
    u64 count = vector_width_;
    vector_width_ = 1;
    bool sized = true;
    while (scan_.accept('[')) {
      if (scan_.accept(']')) {
        sized = false;
        continue;
      }
      const u64 size = scan_.number().bits;
      if (size > kMaxVariableBytes) scan_.fail("a variable is larger than 4 GiB.");
      count *= size;
      if (count > kMaxVariableBytes) scan_.fail("a variable is larger than 4 GiB.");
      scan_.expect(']');
    }
    const u32 element = std::max(type_bytes(variable.type), 1u);
    variable.bytes = sized ? count * element : 0;
    variable.align = std::max(variable.align, element);
    return name;
  }

  void initialiser(Variable& variable) {
    if (variable.space != Space::global && variable.space != Space::constant) {
      scan_.fail("only .global and .const variables take an initial value.");
    }
    initial_values(variable, 0);
    const u64 bytes = std::max<u64>(variable.bytes, variable.initial.size());
    if (bytes > kMaxInitialisedBytes) scan_.fail("an initialised variable exceeds 64 MiB.");
    variable.bytes = bytes;
    variable.initial.resize(bytes);
  }

  void initial_values(Variable& variable, int depth) {
    if (depth > kMaxNesting) scan_.fail("an initialiser is nested too deeply.");
    if (scan_.accept('{')) {
      if (scan_.accept('}')) return;
      do {
        initial_values(variable, depth + 1);
      } while (scan_.accept(','));
      scan_.expect('}');
      return;
    }
    if (variable.initial.size() > kMaxInitialisedBytes) {
      scan_.fail("an initialised variable exceeds 64 MiB.");
    }
    const u32 bytes = std::max(type_bytes(variable.type), 1u);
    u64 bits = 0;
    if (scan_.at_number()) {
      const Operand value = scan_.number();
      bits = value.bits;
      if (value.kind == Operand::Kind::real && variable.type == Type::f32 &&
          value.real_type == Type::f64) {
        bits = std::bit_cast<u32>(static_cast<float>(std::bit_cast<double>(value.bits)));
      }
    } else {
      address_initialiser(variable);
    }
    for (u32 i = 0; i < bytes; ++i) {
      variable.initial.push_back(i < 8 ? static_cast<u8>(bits >> (8 * i)) : u8{0});
    }
  }

  void address_initialiser(Variable& variable) {
    std::string_view name = scan_.expect_name("an initial value");
    bool generic = false;
    if (name == "generic" && scan_.accept('(')) {
      generic = true;
      name = scan_.expect_name("a variable");
    }
    i64 addend = 0;
    if (scan_.accept('+')) addend = static_cast<i64>(scan_.number().bits);
    if (generic) scan_.expect(')');
    if (type_bytes(variable.type) != 8) scan_.fail("an address needs a 64-bit element.");
    variable.addresses.push_back({variable.initial.size(), std::string(name), addend});
  }

  void function(bool entry, bool external) {
    auto owner = std::make_unique<Function>();
    function_ = owner.get();
    function_->entry = entry;
    function_->external = external;
    function_->line = scan_.line();
    blocks_.clear();
    blocks_.emplace_back();
    if (scan_.peek() == '(') parameter_list(function_->results, Scope::results);
    function_->name = std::string(scan_.expect_name("a function name"));
    if (scan_.peek() == '(') parameter_list(function_->parameters, Scope::parameters);
    function_directives();
    if (scan_.accept(';')) {
      function_->external = true;
    } else {
      body();
    }
    store(std::move(owner));
  }

  // A definition replaces an earlier declaration of the same name.
  void store(std::unique_ptr<Function> owner) {
    for (auto& existing : module_.functions) {
      if (existing->name != owner->name) continue;
      if (owner->external) return;
      if (!existing->external) {
        throw Error(owner->line, "function " + owner->name + " is defined twice.");
      }
      existing = std::move(owner);
      return;
    }
    module_.functions.push_back(std::move(owner));
  }

  void parameter_list(std::vector<Variable>& list, Scope scope) {
    scan_.expect('(');
    if (scan_.accept(')')) return;
    do {
      const std::string_view word = scan_.accept_modifier();
      if (word != "param" && word != "reg") {
        scan_.fail("expected .param but found " +
                   (word.empty() ? scan_.here() : "." + std::string(word)) + ".");
      }
      if (word == "reg") scan_.fail("parameters in .reg are not supported; use .param.");
      Variable variable = variable_type(Space::param);
      const std::string_view name = variable_name(variable);
      add_variable(std::move(variable), name, list, scope, &blocks_.front());
    } while (scan_.accept(','));
    scan_.expect(')');
  }

  void function_directives() {
    while (scan_.peek() == '.') {
      const std::string_view word = scan_.accept_modifier();
      if (word == "noreturn" || word == "explicitcluster" || word == "blocksareclusters" ||
          word == "abi_preserve" || word == "abi_preserve_control") {
        if (scan_.at_number()) scan_.number();
        continue;
      }
      if (word == "pragma") {
        scan_.string();
        scan_.expect(';');
        continue;
      }
      std::array<u64, 3> values{1, 1, 1};
      std::size_t count = 0;
      do {
        const u64 value = scan_.number().bits;
        if (count < 3) values[count++] = value;
      } while (scan_.accept(','));
      if (word == "maxntid" || word == "reqntid") {
        const u64 threads = values[0] * values[1] * values[2];
        function_->max_threads = static_cast<u32>(std::min<u64>(threads, 1u << 20));
      } else if (word == "reqnctapercluster") {
        for (std::size_t i = 0; i < 3; ++i) {
          function_->required_cluster[i] = static_cast<u32>(std::min<u64>(values[i], 1u << 16));
        }
      } else if (word != "minnctapersm" && word != "maxnreg" && word != "maxnctapersm" &&
                 word != "maxclusterrank" && word != "local_maxnreg") {
        scan_.fail("." + std::string(word) + " is not a performance directive known here.");
      }
    }
  }

  void body() {
    scan_.expect('{');
    int depth = 1;
    while (depth > 0) {
      if (scan_.at_end()) scan_.fail("the body of " + function_->name + " does not end.");
      if (scan_.accept('{')) {
        if (++depth > kMaxNesting) scan_.fail("braces are nested too deeply.");
        blocks_.emplace_back();
      } else if (scan_.accept('}')) {
        close_block();
        --depth;
      } else {
        statement();
      }
    }
  }

  void close_block() {
    BlockScope block = std::move(blocks_.back());
    const bool outermost = blocks_.size() == 1;
    for (const BlockScope::Pending& pending : block.pending) {
      const auto label = block.labels.find(pending.name);
      if (label != block.labels.end()) {
        bind(pending, label->second);
        continue;
      }
      if (const auto list = block.targets.find(pending.name); list != block.targets.end()) {
        bind_targets(pending, list->second, block);
        continue;
      }
      if (outermost) {
        throw Error(pending.line,
                    "'" + std::string(pending.name) + "' is not a register, variable or label.");
      }
      blocks_[blocks_.size() - 2].pending.push_back(pending);
    }
    if (!outermost) blocks_.pop_back();
  }

  void bind(const BlockScope::Pending& pending, u32 target) {
    for (Operand& operand : function_->code[pending.instruction].operands) {
      if (operand.kind == Operand::Kind::label && operand.text == pending.name) {
        operand.index = target;
      }
    }
  }

  void bind_targets(const BlockScope::Pending& pending, const std::vector<std::string_view>& names,
                    const BlockScope& block) {
    for (Operand& operand : function_->code[pending.instruction].operands) {
      if (operand.kind != Operand::Kind::label || operand.text != pending.name) continue;
      operand.kind = Operand::Kind::vector;
      for (const std::string_view name : names) {
        const auto label = block.labels.find(name);
        if (label == block.labels.end()) {
          throw Error(pending.line, "branch target '" + std::string(name) + "' is not a label.");
        }
        Operand item;
        item.kind = Operand::Kind::label;
        item.text = name;
        item.index = label->second;
        operand.items.push_back(std::move(item));
      }
    }
  }

  void statement() {
    if (scan_.peek() == '.') {
      directive();
      return;
    }
    if (scan_.accept(';')) return;
    Instruction instruction;
    instruction.line = scan_.line();
    instruction.source_file = source_file_;
    instruction.source_line = source_line_;
    if (scan_.accept('@')) {
      instruction.guard_not = scan_.accept('!');
      const Operand guard = name_operand(scan_.expect_name("a predicate"));
      if (guard.kind != Operand::Kind::reg ||
          function_->registers[guard.index].type != Type::pred) {
        scan_.fail("a guard must be a predicate register.");
      }
      instruction.guard = static_cast<i32>(guard.index);
    }
    const std::string_view word = scan_.expect_name("an instruction");
    if (instruction.guard < 0 && scan_.peek() == ':' && scan_.peek(1) != ':') {
      scan_.accept(':');
      label(word);
      return;
    }
    instruction.mnemonic = word;
    for (;;) {
      const std::string_view modifier = scan_.accept_modifier();
      if (modifier.empty()) break;
      instruction.modifiers.push_back(modifier);
    }
    if (function_->code.size() >= (1u << 24)) scan_.fail("a function has too many instructions.");
    while (!scan_.accept(';')) {
      instruction.operands.push_back(operand(0));
      if (!scan_.accept(',') && !scan_.accept('|')) {
        scan_.expect(';');
        break;
      }
    }
    function_->code.push_back(std::move(instruction));
  }

  void label(std::string_view name) {
    if (scan_.peek() == '.') {
      const std::string_view word = scan_.accept_modifier();
      if (word == "branchtargets") {
        std::vector<std::string_view>& list = blocks_.back().targets[name];
        do {
          list.push_back(scan_.expect_name("a label"));
        } while (scan_.accept(','));
        scan_.expect(';');
        return;
      }
      if (word == "callprototype") scan_.fail("indirect calls are not supported.");
      if (word == "pragma") {
        scan_.string();
        scan_.expect(';');
      } else if (word == "loc") {
        location();
      } else if (word == "reg" || word == "local" || word == "shared" || word == "param") {
        local_declaration(word);
      } else {
        scan_.fail("." + std::string(word) + " is not expected after a label.");
      }
    }
    const u32 at = static_cast<u32>(function_->code.size());
    if (!blocks_.back().labels.emplace(name, at).second) {
      scan_.fail("label '" + std::string(name) + "' is defined twice.");
    }
  }

  void directive() {
    const std::string_view word = scan_.accept_modifier();
    if (word == "loc") {
      location();
    } else if (word == "pragma") {
      scan_.string();
      while (scan_.accept(',')) scan_.string();
      scan_.expect(';');
    } else {
      local_declaration(word);
    }
  }

  void location() {
    source_file_ = static_cast<int>(scan_.number().bits & 0x7fffffff);
    source_line_ = static_cast<u32>(scan_.number().bits);
    scan_.number();
    while (scan_.accept(',')) {
      const std::string_view word = scan_.expect_name("a .loc attribute");
      if (word == "function_name") {
        scan_.expect_name("a label");
        if (scan_.accept('+')) scan_.number();
      } else if (word == "inlined_at") {
        for (int i = 0; i < 3; ++i) scan_.number();
      } else {
        scan_.fail("'" + std::string(word) + "' is not a .loc attribute.");
      }
    }
  }

  void local_declaration(std::string_view word) {
    if (word == "reg") {
      declare_registers();
    } else if (word == "shared" || word == "local" || word == "param") {
      declare_variables(space_of(word), false, function_->locals, Scope::locals, &blocks_.back());
    } else {
      scan_.fail("." + std::string(word) + " is not a directive known in a body.");
    }
  }

  void declare_registers() {
    Variable declared = variable_type(Space::reg);
    vector_width_ = 1;
    do {
      const std::string_view name = scan_.expect_name("a register name");
      u64 count = 1;
      const bool range = scan_.accept('<');
      if (range) {
        count = scan_.number().bits;
        scan_.expect('>');
      }
      if (count > kMaxRegisters || function_->registers.size() + count > kMaxRegisters) {
        scan_.fail("a function declares more than 2^20 registers.");
      }
      const u32 first = static_cast<u32>(function_->registers.size());
      function_->registers.resize(first + count, Register{name, declared.type});
      if (range) {
        blocks_.back().ranges[name] = {first, static_cast<u32>(count)};
      } else {
        blocks_.back().registers[name] = first;
      }
    } while (scan_.accept(','));
    scan_.expect(';');
  }

  Operand operand(int depth) {
    if (depth > 3) scan_.fail("an operand is nested too deeply.");
    Operand result;
    if (scan_.accept('!')) {
      result = name_operand(scan_.expect_name("a predicate"));
      result.negated = true;
      return result;
    }
    if (scan_.accept('{')) return list(Operand::Kind::vector, '}', depth);
    if (scan_.accept('(')) return list(Operand::Kind::vector, ')', depth);
    if (scan_.accept('[')) return memory(depth);
    if (scan_.at_number()) return scan_.number();
    if (scan_.accept('-')) {
      scan_.fail("only numbers can be negated in an operand.");
    }
    result = name_operand(scan_.expect_name("an operand"));
    if (result.kind == Operand::Kind::variable || result.kind == Operand::Kind::reg) {
      if (scan_.accept('+')) result.offset = static_cast<i64>(scan_.number().bits);
    }
    return result;
  }

  Operand list(Operand::Kind kind, char close, int depth) {
    Operand result;
    result.kind = kind;
    if (scan_.accept(close)) return result;
    do {
      result.items.push_back(operand(depth + 1));
      if (result.items.size() > 512) scan_.fail("a vector has more than 512 elements.");
    } while (scan_.accept(','));
    scan_.expect(close);
    return result;
  }

  Operand memory(int depth) {
    Operand result;
    result.kind = Operand::Kind::memory;
    Operand base = operand(depth + 1);
    result.offset = base.offset;
    base.offset = 0;
    if (scan_.accept('+')) result.offset += static_cast<i64>(scan_.number().bits);
    if (scan_.peek() == '-' && scan_.at_number()) {
      result.offset += static_cast<i64>(scan_.number().bits);
    }
    result.items.push_back(std::move(base));
    while (scan_.accept(',')) {
      result.items.push_back(operand(depth + 1));
      if (result.items.size() > 8) scan_.fail("an address has too many parts.");
    }
    scan_.expect(']');
    return result;
  }

  Operand name_operand(std::string_view name) {
    Operand result;
    result.text = name;
    if (name == "_") {
      result.kind = Operand::Kind::sink;
      return result;
    }
    if (find_register(name, result.index)) {
      result.kind = Operand::Kind::reg;
      return result;
    }
    if (find_variable(name, result.index)) {
      result.kind = Operand::Kind::variable;
      return result;
    }
    if (name[0] == '%') {
      if (has_components(name)) {
        const std::string_view component = scan_.accept_component();
        if (component.empty()) {
          scan_.fail("'" + std::string(name) + "' needs a component such as .x.");
        }
        result.text = std::string_view(name.data(), name.size() + component.size());
      }
      result.kind = Operand::Kind::special;
      return result;
    }
    if (name == "WARP_SZ") {
      result.kind = Operand::Kind::integer;
      result.bits = 32;
      return result;
    }
    for (u32 i = 0; i < module_.functions.size(); ++i) {
      if (module_.functions[i]->name != name) continue;
      result.kind = Operand::Kind::function;
      result.index = i;
      return result;
    }
    result.kind = Operand::Kind::label;
    blocks_.back().pending.push_back(
        {static_cast<u32>(function_->code.size()), name, scan_.line()});
    return result;
  }

  bool find_register(std::string_view name, u32& index) const {
    std::size_t digits = name.size();
    while (digits > 0 && is_digit(name[digits - 1])) --digits;
    const std::string_view prefix = name.substr(0, digits);
    u64 number = 0;
    const bool numbered = digits < name.size() && name.size() - digits < 9 &&
                          (name[digits] != '0' || name.size() - digits == 1);
    for (std::size_t i = digits; i < name.size() && numbered; ++i) {
      number = number * 10 + static_cast<u64>(name[i] - '0');
    }
    for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
      if (const auto it = block->registers.find(name); it != block->registers.end()) {
        index = it->second;
        return true;
      }
      if (!numbered) continue;
      const auto it = block->ranges.find(prefix);
      if (it == block->ranges.end() || number >= it->second.count) continue;
      index = it->second.first + static_cast<u32>(number);
      return true;
    }
    return false;
  }

  bool find_variable(std::string_view name, u32& index) const {
    for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
      if (const auto it = block->variables.find(name); it != block->variables.end()) {
        index = it->second;
        return true;
      }
    }
    const auto it = module_variables_.find(name);
    if (it == module_variables_.end()) return false;
    index = it->second;
    return true;
  }

  Scanner scan_;
  ModuleData& module_;
  Function* function_ = nullptr;
  std::vector<BlockScope> blocks_;
  std::unordered_map<std::string_view, u32> module_variables_;
  u32 vector_width_ = 1;
  int source_file_ = 0;
  u32 source_line_ = 0;
};

u64 align_up(u64 value, u64 alignment) { return (value + alignment - 1) & ~(alignment - 1); }

u64 layout(std::vector<Variable>& variables, Space space, u64 begin) {
  for (Variable& variable : variables) {
    if (variable.space != space || variable.external) continue;
    begin = align_up(begin, variable.align);
    variable.offset = begin;
    begin += variable.bytes;
  }
  return begin;
}

}  // namespace

Module Module::parse(std::string_view ptx) {
  static u64 next_serial = 1;
  Module result;
  result.data_ = std::make_shared<ModuleData>();
  ModuleData& module = *result.data_;
  module.text = std::string(ptx);
  module.serial = next_serial++;
  Parser(module.text, module).run();
  module.static_shared_bytes = layout(module.variables, Space::shared, 0);
  for (auto& function : module.functions) {
    layout(function->parameters, Space::param, 0);
    function->shared_bytes = layout(function->locals, Space::shared, 0);
  }
  return result;
}

std::string Module::target() const { return data_->target; }

std::vector<std::string> Module::kernels() const {
  std::vector<std::string> names;
  for (const auto& function : data_->functions) {
    if (function->entry && !function->external) names.push_back(function->name);
  }
  return names;
}

}  // namespace fovea::emulator
