// Every mnemonic of isa.def, and every modifier and type of it, occurs in a test program, a case or
// a test kernel; what does not is listed here.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace fovea::emulator::testing {
namespace {

using Words = std::set<std::string>;

struct Row {
  std::string mnemonic, modifiers, types, builder;
};

const std::vector<Row> rows = {
#define ISA(mnemonic, modifiers, types, builder) {#mnemonic, modifiers, types, #builder},
#include "emulator/isa.def"
#undef ISA
};

// Without a program. "*": all of the mnemonic, which traps or is refused with a sentence.
const std::map<std::string, std::string> untested = {
    {"cvt", "scaled::n2::ue8m0 rs e2m1x2 e2m3x2 e3m2x2 ue8m0x2"},
    {"cvta", "u32"},
    {"isspacep", "param param::entry"},
    {"ld", "unified"},
    {"atom", "b128"},
    {"red", "shared::cluster async mbarrier::complete_tx::bytes"},
    {"prefetch", "local tensormap const param"},
    {"stmatrix", "m16n8 b8"},
    {"ldmatrix", "m16n16 m8n16 b8"},
    {"brkpt", "*"},
    {"pmevent", "mask"},
    {"fence", "shared::cluster tensormap to_proxy::async from_proxy::generic"},
    {"cp",
     "1d 3d 4d 5d tile::gather4 tile::scatter4 im2col im2col::w im2col::w::128 "
     "im2col_no_offs cta_group::1 cp_mask"},
    {"tensormap", "*"},
    {"mma", "m16n8k4 m16n8k8 m16n8k32 kind::f8f6f4 bf16 tf32 e4m3 e5m2 s8 u8 s32"},
    {"tcgen05", "collector::a::use"},
};

Words words_in(const std::string& text) {
  std::istringstream stream(text);
  Words words;
  for (std::string word; stream >> word;) words.insert(word);
  return words;
}

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == ':';
}

// Adds "add.rn.f32" to used["add"] for each instruction of a statement: the first dotted word that
// is no label, guard or directive.
void read_statement(const std::string& statement, std::map<std::string, Words>& used) {
  std::size_t at = statement.find_first_not_of(" \t");
  if (at == std::string::npos || statement[at] == '.' || statement[at] == '/') return;
  if (statement[at] == '@') {
    at = statement.find_first_not_of(" \t", statement.find(' ', at));
    if (at == std::string::npos) return;
  }
  std::string part;
  std::string mnemonic;
  const auto take = [&] {
    if (mnemonic.empty()) {
      mnemonic = part;
      used[mnemonic];
    } else {
      used[mnemonic].insert(part);
    }
    part.clear();
  };
  for (; at < statement.size() && (is_word(statement[at]) || statement[at] == '.'); ++at) {
    if (statement[at] == '.') {
      take();
    } else {
      part += statement[at];
    }
  }
  take();
}

std::map<std::string, Words> words_of_all_programs() {
  std::map<std::string, Words> used;
  for (const char* folder : {"/programs", "/kernels", "/instructions"}) {
    for (const auto& file :
         std::filesystem::directory_iterator(std::string(FOVEA_PTX_TESTS) + folder)) {
      const std::string suffix = file.path().extension().string();
      if (suffix != ".ptx" && suffix != ".cases") continue;
      std::ifstream stream(file.path());
      for (std::string line; std::getline(stream, line);) {
        if (line.starts_with("@100 ")) line.erase(0, 5);
        if (suffix == ".cases") line = line.substr(0, line.find(" | "));
        std::string statement;
        for (const char c : line + ";") {
          if (c == ';' || c == '{' || c == '}') {
            read_statement(statement, used);
            statement.clear();
          } else {
            statement += c;
          }
        }
      }
    }
  }
  return used;
}

TEST(Coverage, EveryFormOfTheInstructionSetHasAProgram) {
  const std::map<std::string, Words> used = words_of_all_programs();
  int forms = 0, tested = 0;
  for (const Row& row : rows) {
    if (row.builder == "unsupported") continue;
    const auto found = used.find(row.mnemonic);
    const auto listed = untested.find(row.mnemonic);
    const Words excused = listed == untested.end() ? Words{} : words_in(listed->second);
    if (excused.contains("*")) {
      EXPECT_TRUE(found == used.end()) << row.mnemonic << " has a program: take it off the list";
      continue;
    }
    ASSERT_TRUE(found != used.end()) << row.mnemonic << " has no program";
    for (const std::string& word : words_in(row.modifiers + " " + row.types)) {
      ++forms;
      const bool has = found->second.contains(word);
      tested += has ? 1 : 0;
      EXPECT_NE(has, excused.contains(word))
          << row.mnemonic << "." << word
          << (has ? " has a program: take it off the list" : " has no program");
    }
  }
  std::printf("%d of %d modifiers and types of the instruction set have a program\n", tested,
              forms);
}

}  // namespace
}  // namespace fovea::emulator::testing
