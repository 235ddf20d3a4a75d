// Text that is not PTX, and PTX that is not known: always an Error with a line, never a crash.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>

#include "emulator/emulator.h"
#include "tests/ptx/kernel_runner.h"

namespace fovea::emulator::testing {
namespace {

std::string kernel(const std::string& body, const std::string& target = "sm_90a") {
  return ".version 9.0\n.target " + target +
         "\n.address_size 64\n.visible .entry test()\n{\n.reg .pred %p<4>;\n.reg .b32 %r<8>;\n" +
         body + "\nret;\n}\n";
}

// Line of the Error of parsing and launching, or 0 when there is none.
int error_line(const std::string& ptx, std::string& sentence, const char* chip = "sm_90a") {
  try {
    const Module module = Module::parse(ptx);
    Machine machine(find_chip(chip));
    machine.launch(module, "test", LaunchConfig{}, {});
  } catch (const Error& error) {
    sentence = error.what();
    return error.line();
  }
  return 0;
}

TEST(Parser, NamesTheLineOfWhatItDoesNotKnow) {
  const std::pair<const char*, const char*> cases[] = {
      {"frobnicate.u32 %r1, %r2;", "not an instruction"},
      {"add.funny.u32 %r1, %r2, %r3;", "modifier .funny"},
      {"add.u32 %r1, %r2;", "operands"},
      {"add.u64 %r1, %r2, %r3;", "32 bit wide where 64"},
      {"add.u32 %r1, %r2, %q3;", "%q3"},
      {"bra NOWHERE;", "NOWHERE"},
      {"mov.u32 %r1, 0x;", "no digits"},
      {"wgmma.mma_async.sync.aligned.m64n20k16.f32.bf16.bf16 {%r1}, 0, 0, 1, 1, 1, 0, 0;",
       "m64n20k16"},
      {"wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8 {%r1}, 0, 0, 1;", "m64n40k32"},
      {"wgmma.mma_async.sync.aligned.m64n16k32.f32.s8.s8 {%r1}, 0, 0, 1;", "in .s32"},
      {"tensormap.replace.tile.global_address.global.b1024.b64 [%r1], %r2;", "modifier"},
      {"mov.u32 %r1, %made_up;", "made_up"},
  };
  for (const auto& [body, part] : cases) {
    std::string sentence;
    const int line = error_line(kernel(body), sentence);
    EXPECT_TRUE(line == 8 || std::string(body).find("made_up") != std::string::npos)
        << body << " -> line " << line << ": " << sentence;
    EXPECT_NE(sentence.find(part), std::string::npos) << body << " -> " << sentence;
  }
}

// What ptxas refuses of Blackwell's instructions is refused here too.
TEST(Parser, NamesWhatTensorMemoryDoesNotTake) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"sm_100a", "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%r1, %r2}, %r3, [%r4];",
       "of sm_103, not of sm_100a"},
      {"sm_103a", "tcgen05.ld.red.sync.aligned.32x32b.x1.max.f32 {%r1}, %r3, [%r4];", ".x2"},
      {"sm_103a", "tcgen05.ld.red.sync.aligned.16x64b.x2.max.f32 {%r1, %r2}, %r3, [%r4];",
       ".16x32bx2"},
      {"sm_103a", "tcgen05.ld.red.sync.aligned.32x32b.x2.max.abs.u32 {%r1, %r2}, %r3, [%r4];",
       "belong to .f32"},
      {"sm_103a", "tcgen05.ld.red.sync.aligned.32x32b.x2.pack::16b.max.f32 {%r1, %r2}, %r3, [%r4];",
       "does not pack"},
      {"sm_103a", "tcgen05.ld.red.sync.aligned.32x32b.x2.f32 {%r1, %r2}, %r3, [%r4];",
       ".min or .max"},
      {"sm_103a", "tcgen05.ld.sync.aligned.32x32b.x2.max.b32 {%r1, %r2}, [%r4];", "without .red"},
      {"sm_90a", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "of sm_10,"},
      {"sm_100a", "wgmma.fence.sync.aligned;", "of sm_90a, not of sm_100a"},
      {"sm_100a", "tcgen05.relinquish_alloc_permit.sync.aligned;", "needs .cta_group::1 or"},
      {"sm_100a",
       "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; "
       "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;",
       "line 8 has the other"},
  };
  for (const auto& [target, body, part] : cases) {
    std::string sentence;
    EXPECT_EQ(error_line(kernel(body, target), sentence, target), 8) << body << ": " << sentence;
    EXPECT_NE(sentence.find(part), std::string::npos) << body << " -> " << sentence;
  }
}

TEST(Parser, RefusesBrokenText) {
  for (const char* text :
       {"", "\n", "hello", ".version 9.0", "\xff\xfe", ".entry f(", "/*",
        ".version 9.0\n.target sm_90a\n.visible .entry f(){",
        ".version 9.0\n.target sm_90a\n.global .b8 x[99999999999999];",
        ".version 9.0\n.target sm_90a\n.visible .entry f(){.reg .b32 %r<99999999>;}"}) {
    EXPECT_THROW(Module::parse(text), Error) << text;
  }
}

// Cuts, repeats and flips bytes of real kernels. Whatever still parses is also decoded.
TEST(Parser, SurvivesMutatedKernels) {
  std::mt19937 random(1);
  int parsed = 0, refused = 0;
  for (const char* path :
       {"kernels/attention_sm90.ptx", "programs/call.ptx", "programs/bulk_copy.ptx",
        "programs/tensor_pack.ptx", "programs/constants.ptx"}) {
    const std::string original = read_text(path);
    ASSERT_FALSE(original.empty());
    for (int round = 0; round < 300; ++round) {
      std::string text = original;
      for (unsigned edits = 1 + random() % 4; edits > 0; --edits) {
        const std::size_t at = random() % text.size();
        switch (random() % 4) {
          case 0: text[at] = static_cast<char>(random()); break;
          case 1: text.erase(at, 1 + random() % 20); break;
          case 2: text.insert(at, text.substr(random() % text.size(), random() % 30)); break;
          default: text.resize(at + 1); break;
        }
        if (text.empty()) text = " ";
      }
      try {
        const Module module = Module::parse(text);
        Machine machine(chip_b200());
        for (const std::string& name : module.kernels()) {
          Schedule schedule;
          schedule.step_limit = 2000;
          try {
            std::vector<std::byte> parameters(module.kernel(name).parameter_bytes);
            machine.launch(module, name, LaunchConfig{}, parameters, schedule);
          } catch (const Error&) {
          }
        }
        ++parsed;
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(parsed, 0);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace fovea::emulator::testing
