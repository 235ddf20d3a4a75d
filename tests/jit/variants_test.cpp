// The list of kernels that are compiled ahead of calls.
#include "runtime/variants.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "fovea/fovea.hpp"
#include "fovea/kernels.hpp"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

TEST(Variants, AreDifferentAndGrowWithAll) {
  for (const char* arch : {"sm_90a", "sm_100a", "sm_103a"}) {
    std::set<std::string> usual;
    for (const bool all : {false, true}) {
      std::set<std::string> names, texts;
      for (const runtime::Variant& variant : runtime::kernel_variants(arch, all)) {
        EXPECT_TRUE(names.insert(variant.name).second) << variant.name << " twice";
        EXPECT_TRUE(texts.insert(variant.text).second) << variant.name << " is another one again";
      }
      EXPECT_TRUE(std::includes(texts.begin(), texts.end(), usual.begin(), usual.end())) << arch;
      EXPECT_GT(texts.size(), usual.size()) << arch;
      usual = texts;
    }
  }
  EXPECT_THROW(runtime::kernel_variants("sm_80", false), Error);
}

TEST(Variants, CompileOnceIntoTheCache) {
  CompileKernels which;
  which.only = "bf16 d64 full long";
  int kernels = 0;
  const auto look = [&](const CompiledKernel& kernel) {
    ++kernels;
    EXPECT_EQ(kernel.fault, "");
    EXPECT_GT(kernel.registers, 0);
    EXPECT_EQ(kernel.spill_bytes, 0);
    EXPECT_EQ(kernel.arch, "sm_90a");
  };
  EXPECT_EQ(compile_kernels(which, look), 0);
  EXPECT_EQ(kernels, 1);
  EXPECT_EQ(compile_kernels(which,
                            [&](const CompiledKernel& kernel) {
                              look(kernel);
                              EXPECT_TRUE(kernel.cached);
                            }),
            0);
  which.only = "no kernel of this name";
  EXPECT_EQ(compile_kernels(which, look), 0);
  EXPECT_EQ(kernels, 2);
  // Of two kernels the first.
  which.only = "fwd bf16 d64 full";
  which.every = 2;
  EXPECT_EQ(compile_kernels(which,
                            [&](const CompiledKernel& kernel) {
                              look(kernel);
                              EXPECT_EQ(kernel.name, "fwd bf16 d64 full");
                            }),
            0);
  EXPECT_EQ(kernels, 3);
  which.every = 0;
  EXPECT_THROW(compile_kernels(which, look), Error);
}

TEST(Variants, StopsAtWhatTheCallerThrows) {
  CompileKernels which;
  which.only = "bf16 d64 full long";
  EXPECT_THROW(compile_kernels(which, [](const CompiledKernel&) { throw Error("enough"); }), Error);
}

}  // namespace
}  // namespace fovea::tests
