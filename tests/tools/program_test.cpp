// The built program, as a script sees it: exit status, one line on standard error, files.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tests/tools/tools_support.h"
#include "tools/npy.h"
#include "tools/tensor_files.h"

#ifdef FOVEA_PROGRAM

namespace fovea::test {
namespace {

using Json = nlohmann::json;

std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class Program : public ::testing::Test {
 protected:
  struct Ended {
    int status = -1;
    std::string out;
    std::string err;
  };

  // Runs the program with `arguments`, as a shell reads them, in a directory of its own.
  Ended run(const std::string& arguments) const {
    const std::string command =
        fmt::format("cd '{}' && '{}' {} >'{}' 2>'{}' </dev/null", files_.path("."), FOVEA_PROGRAM,
                    arguments, console_.path("out"), console_.path("err"));
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text_of(read_file(console_.path("out"))),
            text_of(read_file(console_.path("err")))};
  }

  static std::string example(const std::string& name) {
    return (std::filesystem::path(FOVEA_TEST_DATA) / "../../examples/minilm" / name)
        .lexically_normal()
        .string();
  }

  TemporaryDirectory files_;
  TemporaryDirectory console_;
};

TEST_F(Program, SaysOneSentenceAboutWrongInputAndWritesNothing) {
  const Bytes good = small_problem_file(3);
  write_file(files_.path("good.safetensors"), good);
  write_file(files_.path("short.safetensors"), Bytes(good.begin(), good.end() - 1));
  write_file(files_.path("text.safetensors"), to_bytes("this is not a tensor file\n"));
  write_file(files_.path("no_q.safetensors"), safetensors_file("{}", {}));
  const Bytes q(1 * 3 * 2 * 4 * 4);
  write_file(files_.path("q.npy"), npy_file("<f4", "(1, 3, 2, 4)", q));
  write_file(files_.path("half.npy"), npy_file("<f2", "(1, 3, 2, 4)", Bytes(48)));
  write_file(files_.path("double.npy"), npy_file("<f8", "(1, 3, 2, 4)", Bytes(192)));
  write_file(files_.path("fortran.npy"), npy_file("<f4", "(1, 3, 2, 4)", q, 1, "True"));
  write_file(files_.path("big_endian.npy"), npy_file(">f4", "(1, 3, 2, 4)", q));
  write_file(files_.path("cut.npy"), npy_file("<f4", "(1, 3, 2, 4)", Bytes(95)));
  write_file(files_.path("flat.npy"), npy_file("<f4", "(24,)", q));
  write_file(files_.path("heads.npy"), npy_file("<f4", "(1, 2, 3, 4)", q));
  write_file(files_.path("dim.npy"), npy_file("<f4", "(1, 3, 1, 8)", q));
  const auto offsets = [](std::vector<std::int32_t> values) {
    return npy_file("<i4", fmt::format("({},)", values.size()), bytes_of_values(values));
  };
  write_file(files_.path("packed.npy"), npy_file("<f4", "(3, 2, 4)", q));
  write_file(files_.path("cu.npy"), offsets({0, 1, 3}));
  write_file(files_.path("falls.npy"), offsets({0, 2, 1}));
  write_file(files_.path("overruns.npy"), offsets({0, 2, 9}));
  write_file(files_.path("late.npy"), offsets({1, 2, 3}));
  const std::vector<std::string> before = files_.entries();

  const std::string input = "run --input good.safetensors --out o.npy ";
  const std::string qkv = "run --out o.npy --q q.npy --k q.npy --v ";
  const std::string varlen = "run --out o.npy --q packed.npy --k packed.npy --v packed.npy ";
  const std::string check = "check --shape 1,2,2,4,4,8 ";
  const std::string commands[] = {
      "",
      "frobnicate",
      "run",
      "run --out o.npy",
      "run --input missing --out o.npy",
      "run --input . --out o.npy",
      "run --input short.safetensors --out o.npy",
      "run --input text.safetensors --out o.npy",
      "run --input no_q.safetensors --out o.npy",
      "run --input q.npy --out o.npy",
      "run --q q.npy --k q.npy --out o.npy",
      qkv + "cut.npy",
      qkv + "fortran.npy",
      qkv + "big_endian.npy",
      qkv + "double.npy",
      qkv + "half.npy",
      qkv + "flat.npy",
      qkv + "heads.npy",
      qkv + "missing.npy",
      qkv + "good.safetensors",
      "run --out o.npy --q q.npy --k dim.npy --v q.npy",
      varlen + "--cu-seqlens-q cu.npy --cu-seqlens-k falls.npy",
      varlen + "--cu-seqlens-q overruns.npy --cu-seqlens-k cu.npy",
      varlen + "--cu-seqlens-q late.npy --cu-seqlens-k cu.npy",
      varlen + "--cu-seqlens-q q.npy --cu-seqlens-k cu.npy",
      varlen + "--cu-seqlens-q cu.npy --cu-seqlens-k cu.npy --layout bhsd",
      input + "--scale nan",
      input + "--scale inf",
      input + "--window -3,0",
      input + "--softcap -1",
      input + "--softcap nan",
      input + "--dropout 1",
      input + "--dtype f64",
      input + "--sink",
      input + "--device cuda",
      input + "--threads 0",
      input + "--expected nothing",
      input + "--expected q.npy --tolerance nan",
      input + "--tolerance 1e-5",
      input + "--out second.npy",
      input + "--lse o.npy",
      input + "--out-dtype f16",
      input + "--json missing/j.json",
      "run --input good.safetensors --out missing/o.npy",
      "run --input good.safetensors --out .",
      "run --input good.safetensors --out /proc/o.npy",
      "run --input good.safetensors --out o.npy --lse missing/lse.npy",
      "run --input good.safetensors good.safetensors --out o.npy",
      "check",
      check + "--scale nan",
      check + "--window -3,0",
      check + "--dtype e4m3 --backward",
      check + "--device emulated:sm_90a",
      check + "--json missing/j.json",
      "check --shape 1,3,2,4,4,8",
      "check --shape 1,0,0,4,4,8",
      "check --shape 1,2,2,4,4,0",
      "check --shape 1,2,2,4,4,600",
      "check --shape 1,2147483647,1,2147483647,1,8",
      "check --shape 2147483647,9,3,2147483647,1,8",
      "explain",
      "explain --shape 1,3,2,4,4,8",
      "bench --grid gpu",
      "bench --d 0",
      "bench --d 600",
      "bench --grid cpu --d 64",
      "bench --grid decode --queries 4",
      "bench --d 32 --quantized-pages 48",
      "bench --d 32 --quantized-pages 32 --dtype e4m3",
      "bench --d 32 --quantized-pages 32 --backward",
      "bench --d 32 --quantized-pages 32 --beside gather=1",
      "info --threads x",
  };
  for (const std::string& command : commands) {
    const Ended ended = run(command);
    EXPECT_EQ(ended.status, 2) << command << "\n" << ended.out << ended.err;
    EXPECT_EQ(ended.out, "") << command;
    EXPECT_TRUE(ended.err.starts_with("fovea: ")) << command << "\n" << ended.err;
    EXPECT_EQ(ended.err.find('\n'), ended.err.size() - 1) << command << "\n" << ended.err;
    EXPECT_EQ(files_.entries(), before) << command;
  }
}

TEST_F(Program, RunsARealModel) {
  for (const char* const name :
       {"layer0.safetensors", "layer5.safetensors", "ragged_layer5.safetensors"}) {
    const Ended ended =
        run(fmt::format("run --input '{}' --out o.npy --lse l.npy --expected out_expected "
                        "--tolerance 1e-5",
                        example(name)));
    EXPECT_EQ(ended.status, 0) << ended.err;
    EXPECT_EQ(ended.out.find('\n'), ended.out.size() - 1) << ended.out;
    const Bytes file = read_file(files_.path("o.npy"));
    const tools::Array out = tools::parse_npy(file);
    tools::TensorFiles input;
    input.add_safetensors(example(name));
    EXPECT_EQ(out.shape, input.get("out_expected").shape);
    EXPECT_EQ(out.type, tools::ElementType::f32);
    const auto values = tools::to_doubles("out", out);
    const auto expected = tools::to_doubles("out_expected", input.get("out_expected"));
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-5);
    const Bytes lse_file = read_file(files_.path("l.npy"));
    const tools::Array lse = tools::parse_npy(lse_file);
    EXPECT_EQ(lse.rank(), out.rank() - 1);
    EXPECT_EQ(lse.elements(), out.elements() / out.shape.back());
  }
}

TEST_F(Program, FailsACheckThatFails) {
  const Ended ended = run(fmt::format("run --input '{}' --expected out_expected --tolerance 1e-9",
                                      example("layer0.safetensors")));
  EXPECT_EQ(ended.status, 1);
  EXPECT_TRUE(ended.err.starts_with("fovea: "));
}

TEST_F(Program, ReadsNpyInEveryPrecisionAndLayout) {
  // Constant values: every output is the same constant, whatever the weights.
  const std::size_t count = 2 * 5 * 3 * 4;
  write_file(files_.path("f4.npy"),
             npy_file("<f4", "(2, 5, 3, 4)", bytes_of_values(std::vector<float>(count, 1.5f))));
  write_file(
      files_.path("f2.npy"),
      npy_file("<f2", "(2, 5, 3, 4)", bytes_of_values(std::vector<std::uint16_t>(count, 0x3e00))));
  write_file(
      files_.path("bf16.npy"),
      npy_file("<V2", "(2, 5, 3, 4)", bytes_of_values(std::vector<std::uint16_t>(count, 0x3fc0))));
  for (const char* const name : {"f4.npy", "f2.npy", "bf16.npy"}) {
    for (const char* const extra : {"", "--layout bhsd", "--dtype f32", "--dtype bf16 --causal"}) {
      const Ended ended =
          run(fmt::format("run --q {0} --k {0} --v {0} --out o.npy {1}", name, extra));
      ASSERT_EQ(ended.status, 0) << name << " " << extra << ended.err;
      const Bytes file = read_file(files_.path("o.npy"));
      const tools::Array out = tools::parse_npy(file);
      EXPECT_EQ(out.shape, (std::vector<std::int64_t>{2, 5, 3, 4}));
      EXPECT_EQ(out.type, tools::ElementType::f32);
      for (const double value : tools::to_doubles("out", out)) ASSERT_NEAR(value, 1.5, 1e-6);
    }
  }
  EXPECT_EQ(run("run --q f2.npy --k f2.npy --v f2.npy --out o.npy --out-dtype f16").status, 0);
  const Bytes file = read_file(files_.path("o.npy"));
  EXPECT_EQ(tools::parse_npy(file).type, tools::ElementType::f16);
}

TEST_F(Program, KeepsTheOldFileUntilTheNewOneIsWhole) {
  write_file(files_.path("good.safetensors"), small_problem_file(3));
  write_file(files_.path("o.npy"), to_bytes("old"));
  EXPECT_EQ(run("run --input good.safetensors --out o.npy --expected nothing").status, 2);
  EXPECT_EQ(read_file(files_.path("o.npy")), to_bytes("old"));
  // A link stays a link: what it names is replaced.
  std::filesystem::create_symlink("o.npy", files_.path("link.npy"));
  EXPECT_EQ(run("run --input good.safetensors --out link.npy").status, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(files_.path("link.npy")));
  const Bytes file = read_file(files_.path("o.npy"));
  EXPECT_EQ(tools::parse_npy(file).elements(), 3 * 2 * 4);
  EXPECT_EQ(files_.entries(), (std::vector<std::string>{"good.safetensors", "link.npy", "o.npy"}));
}

TEST_F(Program, WritesToWhatIsNoRegularFile) {
  write_file(files_.path("good.safetensors"), small_problem_file(3));
  EXPECT_EQ(run("run --input good.safetensors --out /dev/null").status, 0);
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST_F(Program, ChecksAnyCombinationOfOptions) {
  for (const char* const options :
       {"", "--causal", "--dtype bf16 --sink --softcap 20", "--dtype f16 --alibi --layout bhsd",
        "--window 5,3 --deterministic", "--dropout 0.2 --dropout-seed 9 --splits 3",
        "--softmax online", "--softmax conditional", "--softmax sum_guard --scale 2",
        "--quantize block --rotary 16 --causal",
        "--dtype f16 --ragged --rotary 24,500 --rotary-interleaved", "--page-size 16 --rotary 8",
        "--quantized-pages 32 --causal --sink", "--ragged --quantized-pages 64 --rotary 12",
        "--ragged --causal", "--page-size 16 --sink", "--ragged --page-size 5 --window 4,0",
        "--dtype bf16 --causal --window 30,0 --softcap 30 --sink --alibi --dropout 0.1 --seed 3"}) {
    const Ended ended = run(fmt::format("check --shape 2,6,2,37,61,24,40 {}", options));
    EXPECT_EQ(ended.status, 0) << options << "\n" << ended.out << ended.err;
    EXPECT_NE(ended.out.find("PASS\n"), std::string::npos);
    EXPECT_EQ(ended.err, "") << "a progress bar in a pipe?";
  }
}

TEST_F(Program, RefusesARotaryEmbeddingThatDoesNotFit) {
  const std::string shape = "check --shape 1,2,2,9,9,16 ";
  const auto said = [&](const char* options) { return run(shape + options).err; };
  EXPECT_NE(said("--rotary 18").find("which turn more than the head dimension 16"),
            std::string::npos);
  EXPECT_NE(said("--quantize block --backward").find("leave out --quantize"), std::string::npos);
  EXPECT_NE(said("--rotary 16 --dtype e4m3").find("q is in 8 bits"), std::string::npos);
  const Ended bench = run("bench --d 32 --seqs 64 --heads 2,2 --repeat 1 --rotary 32");
  EXPECT_EQ(bench.status, 0) << bench.err;
  EXPECT_NE(bench.out.find("rotary 32,10000"), std::string::npos) << bench.out;
}

TEST_F(Program, ExplainsWhatBecomesOfQuantisedPages) {
  const std::string command = "explain --dtype bf16 --shape 1,2,2,40,90,32 --quantized-pages ";
  const Ended cpu = run(command + "32");
  EXPECT_EQ(cpu.status, 0) << cpu.err;
  EXPECT_NE(cpu.out.find("operands   of 8 bits"), std::string::npos) << cpu.out;
  EXPECT_NE(run(command + "48").err.find("pool.page_size is 48"), std::string::npos);
  const Ended hopper = run(command + "32 --device emulated:sm_90a");
  if (hopper.err.find("NVRTC") != std::string::npos) GTEST_SKIP() << "no NVRTC here";
  EXPECT_NE(hopper.out.find("pages      read in place: a key meets 40 query rows, and a copy pays"),
            std::string::npos)
      << hopper.out << hopper.err;
}

TEST_F(Program, TimesQuantisedPages) {
  const Ended bench = run(
      "bench --d 32 --seqs 80 --queries 3,40 --heads 4,2 --batch 2 --repeat 1 --quantized-pages 32 "
      "--rotary 16 --json b.json");
  EXPECT_EQ(bench.status, 0) << bench.err;
  EXPECT_NE(bench.out.find("rotary 16,10000 in pages of 32"), std::string::npos) << bench.out;
  const Bytes file = read_file(files_.path("b.json"));
  const Json results = Json::parse(text_of(file)).at("results");
  ASSERT_EQ(results.size(), 2u);
  // Of pages that no sequence reads nothing counts, and codes have one byte: three pages of each
  // sequence and head, keys and values.
  const double read = results[0].at("kv_gb_per_second").get<double>() *
                      results[0].at("median_seconds").get<double>() * 1e9;
  EXPECT_NEAR(read, 2 * 2 * 2 * 96 * 32, 1.0);
  EXPECT_EQ(results[1].at("shape"), "2,4,2,40,80,32");
  EXPECT_FALSE(results[1].contains("kv_gb_per_second"));
}

TEST_F(Program, SpeaksJson) {
  const auto json_of = [&](const std::string& command) {
    const Ended ended = run(command + " --json -");
    EXPECT_EQ(ended.status, 0) << ended.err;
    return Json::parse(ended.out);
  };
  EXPECT_GE(json_of("info").at("threads").get<int>(), 1);
  EXPECT_TRUE(json_of("check --shape 1,2,1,9,9,16").at("passed").get<bool>());
  EXPECT_EQ(json_of("explain --shape 1,2,1,9,9,16").at("device"), "cpu");
  const Json run_json = json_of(fmt::format("run --input '{}' --expected out_expected --repeat 2",
                                            example("layer0.safetensors")));
  EXPECT_EQ(run_json.at("results").at(0).at("runs"), 2);
  EXPECT_LT(run_json.at("results").at(0).at("max_error").get<double>(), 1e-5);
  const Json bench = json_of("bench --d 16 --seqs 32 --heads 2 --repeat 3");
  EXPECT_GT(bench.at("results").at(0).at("gflops").get<double>(), 0.0);
  EXPECT_GT(bench.at("peak_gflops").at("f32").get<double>(), 0.0);
}

TEST_F(Program, ExplainsWithoutTouchingMemory) {
  const Ended ended = run("explain --shape 1,1,1,131072,131072,64 --causal");
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_NE(ended.out.find("cpu"), std::string::npos);
}

TEST_F(Program, KeepsQuiet) {
  const Ended ended = run("check --shape 1,2,1,9,9,16 --quiet");
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.out + ended.err, "");
}

TEST_F(Program, CompilesKernelsBesideItself) {
  if (run("compile --only 'no kernel'").status != 0) GTEST_SKIP() << "no NVRTC here";
  const std::string one =
      fmt::format("FOVEA_CACHE_DIR='{}' '{}' compile --only 'bf16 d64 full long'",
                  files_.path("cache"), FOVEA_PROGRAM);
  const std::string two = fmt::format("{0} >'{1}' & {0} >'{2}' && wait $!", one,
                                      console_.path("first"), console_.path("second"));
  ASSERT_EQ(std::system(("sh -c \"" + two + "\"").c_str()), 0);
  for (const char* const name : {"first", "second"}) {
    const std::string said = text_of(read_file(console_.path(name)));
    EXPECT_NE(said.find("1 kernels in"), std::string::npos) << said;
    EXPECT_NE(said.find("0 faults"), std::string::npos) << said;
  }
  std::size_t entries = 0;
  for (const auto& file : std::filesystem::directory_iterator(files_.path("cache"))) {
    EXPECT_EQ(file.path().extension(), ".kernel") << file.path();
    ++entries;
  }
  EXPECT_EQ(entries, 1u);
  EXPECT_EQ(run("compile --arch sm_80").status, 2);
}

}  // namespace
}  // namespace fovea::test

#endif
