// Fat binaries: what is chosen from them, how it is decompressed, and what damaged ones get.
#include "cuda_shim/fat_binary.h"

#include <gtest/gtest.h>

#include "cuda_shim/inflate.h"
#include "cuda_shim/settings.h"
#include "cuda_shim/status.h"
#include "tests/cuda_shim/guest/fat_binary_writer.h"

namespace fovea::test {
namespace {

using namespace cuda_shim;

Bytes view(const std::string& bytes) {
  return {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

FatEntryToWrite plain(const std::string& target) {
  FatEntryToWrite entry;
  entry.payload = ".version 8.6\n.target " + target + "\n";
  return entry;
}

std::string chosen(const std::vector<FatEntryToWrite>& entries, std::string_view arch) {
  const std::vector<std::uint64_t> image = fat_binary(entries);
  return target_of(choose_ptx(read_fat_binary(image.data()), arch));
}

std::string refusal(const std::vector<FatEntryToWrite>& entries, std::string_view arch) {
  try {
    chosen(entries, arch);
  } catch (const emulator::Error& fault) {
    return fault.what();
  }
  return {};
}

TEST(FatBinary, ChoosesTheClosestPtx) {
  const std::vector<FatEntryToWrite> all = {plain("sm_80"),   plain("sm_90"),   plain("sm_90a"),
                                            plain("sm_100f"), plain("sm_100a"), plain("sm_120")};
  EXPECT_EQ(chosen(all, "sm_90a"), "sm_90a");
  EXPECT_EQ(chosen(all, "sm_100a"), "sm_100a");
  EXPECT_EQ(chosen(all, "sm_103a"), "sm_100f");
  EXPECT_EQ(chosen({plain("sm_80"), plain("sm_90")}, "sm_100a"), "sm_90");
}

TEST(FatBinary, SaysWhatItHoldsInstead) {
  FatEntryToWrite code;
  code.kind = 2;
  const std::string sentence = refusal({code, plain("sm_100a")}, "sm_90a");
  EXPECT_NE(sentence.find("machine code for sm_90, PTX for sm_100a"), std::string::npos);
  EXPECT_NE(sentence.find("arch=compute_90a,code=compute_90a"), std::string::npos);
  EXPECT_NE(refusal({}, "sm_90a").find("but nothing"), std::string::npos);
}

TEST(FatBinary, IsRefusedWhenAnEntryPassesTheEnd) {
  std::vector<std::uint64_t> image = fat_binary({plain("sm_90a")});
  image[3] += 8;  // the payload's size
  EXPECT_THROW(read_fat_binary(image.data()), emulator::Error);
  image[0] += 1;
  EXPECT_THROW(read_fat_binary(image.data()), emulator::Error);
}

TEST(Inflate, GivesTheTextBack) {
  const std::string text = file_text(FOVEA_GUEST_FOLDER "/guest.ptx");
  ASSERT_GT(text.size(), 3000u);
  EXPECT_EQ(inflate_lz4(view(lz4_block(text)), text.size()), text);
  // Made by `zstd -19` of guest.ptx: Huffman literals, FSE tables, repeated distances.
  EXPECT_EQ(
      inflate_zstd(view(bytes_of_hex(file_text(FOVEA_GUEST_FOLDER "/guest.zst.hex"))), text.size()),
      text);
}

// The smallest frames of each kind of block: raw, and one repeated byte.
TEST(Inflate, TakesRawAndRepeatedBlocks) {
  EXPECT_EQ(inflate_zstd(view(bytes_of_hex("28b52ffd2003190000414243")), 100), "ABC");
  EXPECT_EQ(inflate_zstd(view(bytes_of_hex("28b52ffd20052b000041")), 100), "AAAAA");
}

// Every truncation and every flipped bit: an Error or some text, but nothing worse.
TEST(Inflate, SurvivesDamage) {
  const std::string text = file_text(FOVEA_GUEST_FOLDER "/guest.ptx");
  const std::string lz4 = lz4_block(text);
  const std::string zstd = bytes_of_hex(file_text(FOVEA_GUEST_FOLDER "/guest.zst.hex"));
  int errors = 0, tries = 0;
  const auto attempt = [&](const std::string& bytes, bool is_lz4) {
    ++tries;
    try {
      if (is_lz4)
        inflate_lz4(view(bytes), text.size());
      else
        inflate_zstd(view(bytes), text.size());
    } catch (const emulator::Error&) {
      ++errors;
    }
  };
  for (const auto& [packed, is_lz4] : {std::pair{lz4, true}, std::pair{zstd, false}}) {
    for (std::size_t at = 0; at < packed.size(); ++at) {
      attempt(packed.substr(0, at), is_lz4);
      for (int bit = 0; bit < 8; ++bit) {
        std::string damaged = packed;
        damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
        attempt(damaged, is_lz4);
      }
    }
  }
  EXPECT_GT(errors, tries / 4);
}

TEST(Settings, AreReadAndRefusedByName) {
  const Settings settings =
      parse_settings("device=sm_100a,order=random,seed=7,checks=off,ctas=3,report=/a,b=c");
  EXPECT_EQ(settings.device, "sm_100a");
  EXPECT_EQ(settings.schedule.policy, emulator::Policy::random);
  EXPECT_EQ(settings.schedule.seed, 7u);
  EXPECT_FALSE(settings.schedule.checks);
  EXPECT_EQ(settings.schedule.cta_limit, 3u);
  EXPECT_EQ(settings.report, "/a,b=c");
  for (const char* wrong : {"seed=x", "order=late", "checks=maybe", "speed=9", "seed"}) {
    EXPECT_THROW(parse_settings(wrong), emulator::Error) << wrong;
  }
}

TEST(ShortName, LeavesOutTemplateArguments) {
  EXPECT_EQ(short_name("_Z5scalePfi"), "scale");
  EXPECT_EQ(short_name("_ZN7cutlass13device_kernelIN5flash1AEEEvT_"), "cutlass::device_kernel");
  EXPECT_EQ(short_name("plain"), "plain");
  EXPECT_EQ(short_name("_Z99short"), "_Z99short");
}

}  // namespace
}  // namespace fovea::test
