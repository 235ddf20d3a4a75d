#include "tests/fuzz/seeds.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/tools/tools_support.h"

namespace fovea::test {
namespace {

std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Seeds npy_seeds() {
  Seeds seeds;
  for (const int version : {1, 2, 3}) {
    seeds.inputs.push_back(text_of(npy_file("<f4", "(2, 3)", Bytes(24), version)));
  }
  for (const char* const descr : {"<f2", "|V2", "<i4", "<i8", ">f4", "|b1"}) {
    seeds.inputs.push_back(text_of(npy_file(descr, "(4,)", Bytes(8))));
  }
  seeds.inputs.push_back(text_of(npy_file("<f4", "()", Bytes(4), 1, "True")));
  seeds.inputs.push_back(text_of(npy_file("<f4", "(0, 5)", {})));
  seeds.words = {"<f4",
                 "<f8",
                 "|V2",
                 "'descr'",
                 "'shape'",
                 "'fortran_order'",
                 "True",
                 "False",
                 "(",
                 ")",
                 ",",
                 "{",
                 "}",
                 "'",
                 ":",
                 "4294967296",
                 "9223372036854775807",
                 "\x93NUMPY"};
  return seeds;
}

Seeds safetensors_seeds() {
  Seeds seeds;
  seeds.inputs.push_back(text_of(small_problem_file(1)));
  seeds.inputs.push_back(text_of(safetensors_file("{}   ", {})));
  seeds.inputs.push_back(text_of(safetensors_file(
      R"({"__metadata__":{"a":"b"},"x":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})",
      Bytes(12))));
  Bytes packed(3 * 24);
  const Bytes offsets = bytes_of_values(std::vector<std::int32_t>{0, 1, 3, 0, 2, 3});
  packed.insert(packed.end(), offsets.begin(), offsets.end());
  seeds.inputs.push_back(text_of(
      safetensors_file(R"({"q":{"dtype":"F16","shape":[3,1,4],"data_offsets":[0,24]},)"
                       R"("k":{"dtype":"F16","shape":[3,1,4],"data_offsets":[24,48]},)"
                       R"("v":{"dtype":"F16","shape":[3,1,4],"data_offsets":[48,72]},)"
                       R"("cu_seqlens_q":{"dtype":"I32","shape":[3],"data_offsets":[72,84]},)"
                       R"("cu_seqlens_k":{"dtype":"I32","shape":[3],"data_offsets":[84,96]}})",
                       packed)));
  Bytes paged(3 * 32);
  const Bytes table = bytes_of_values(std::vector<std::int32_t>{1, 0, 3});
  paged.insert(paged.end(), table.begin(), table.end());
  seeds.inputs.push_back(text_of(
      safetensors_file(R"({"q":{"dtype":"F32","shape":[1,1,2,4],"data_offsets":[0,32]},)"
                       R"("k":{"dtype":"F32","shape":[2,2,1,2],"data_offsets":[32,64]},)"
                       R"("v":{"dtype":"F32","shape":[2,2,1,2],"data_offsets":[64,96]},)"
                       R"("block_table":{"dtype":"I32","shape":[1,2],"data_offsets":[96,104]},)"
                       R"("seqused_k":{"dtype":"I32","shape":[1],"data_offsets":[104,108]}})",
                       paged)));
  seeds.words = {"\"dtype\"",
                 "\"shape\"",
                 "\"data_offsets\"",
                 "\"__metadata__\"",
                 "F32",
                 "BF16",
                 "I32",
                 "I64",
                 "BOOL",
                 "F8_E4M3",
                 "bias",
                 "mask",
                 "sink",
                 "alibi",
                 "seqused_q",
                 "block_table",
                 "[",
                 "]",
                 "{",
                 "}",
                 ",",
                 ":",
                 "-1",
                 "0",
                 "4294967296",
                 "9223372036854775807",
                 "1e9",
                 "\\u0000",
                 "null"};
  return seeds;
}

Seeds options_seeds() {
  Seeds seeds;
  seeds.inputs = {
      "run\n--input\na.safetensors\n--out\no.npy\n--causal\n--window\n-1,3\n--softcap\n30\n--"
      "scale\n"
      "-0.5\n--expected\nout",
      "run\n--q\nq.npy\n--k\nk.npy\n--v\nv.npy\n--dtype\nbf16\n--layout\nbhsd\n--repeat\n5\n--peak",
      "check\n--shape\n2,8,2,100,150,72\n--dropout\n0.1\n--dropout-seed\n7\n--splits\n3\n--seed\n1",
      "check\n--shape=1,2,1,4,5,6,7\n--sink\n--alibi\n--deterministic\n--softmax\nsum_guard\n--"
      "json\n-",
      "bench\n--grid\npaper\n--d\n64,128\n--seqs\n512\n--threads\n2\n--device\ncpu\n--quiet",
      "explain\n--shape\n1,1,1,1,1,1\n--device\nemulated:sm_90a",
      "info\n--threads\n2",
      "--help",
      "run\n--help",
      "--version",
      "",
  };
  seeds.words = {
      "\n",     "--",        "-",       "=",      ",",   "--shape",   "--window",
      "--json", "--threads", "--input", "--help", "-h",  "nan",       "inf",
      "-1",     "1e39",      "0x10",    "check",  "run", "bench",     "18446744073709551615",
      "[",      "]",         "\"",      "'",      "%%",  "--help-all"};
  return seeds;
}

// The emulator's test programs, and pieces of its language.
Seeds ptx_seeds() {
  Seeds seeds;
  const std::filesystem::path folder =
      (std::filesystem::path(FOVEA_TEST_DATA) / "../ptx/programs").lexically_normal();
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path());
    seeds.inputs.emplace_back(std::istreambuf_iterator<char>(file),
                              std::istreambuf_iterator<char>());
  }
  std::sort(seeds.inputs.begin(), seeds.inputs.end());
  seeds.words = {";",
                 ",",
                 "{",
                 "}",
                 "[",
                 "]",
                 "(",
                 ")",
                 "<",
                 ">",
                 "|",
                 "_",
                 "@%p1 ",
                 "@!%p1 ",
                 "%r1",
                 "%d1",
                 "%p1",
                 "%tid.x",
                 "%clock",
                 "-1",
                 "0x",
                 "4294967296",
                 "0f7fc00000",
                 "0d",
                 "L:",
                 "bra L;",
                 ".reg ",
                 ".b32",
                 ".f32",
                 ".f16x2",
                 ".bf16x2",
                 ".e4m3x2",
                 ".pred",
                 ".b64",
                 ".v4",
                 ".param ",
                 ".shared ",
                 ".global ",
                 ".align 16",
                 ".entry f()",
                 ".func (",
                 ".loc 1 1 1",
                 ".relaxed",
                 ".acquire",
                 ".release",
                 ".cluster",
                 ".cta",
                 ".sync",
                 ".aligned",
                 "ld",
                 "st",
                 "atom",
                 "mbarrier",
                 "wgmma",
                 "tcgen05",
                 "cp.async",
                 ".tensor.2d",
                 ".shared::cluster",
                 ".L2::cache_hint",
                 ".multicast::cluster",
                 "ret;",
                 "exit;"};
  return seeds;
}

}  // namespace fovea::test
