// Run-time compilation: the caches, what the compiler reports, and what is said when it is missing.
#include "runtime/jit.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "fovea/fovea.hpp"
#include "runtime/sha256.h"
#include "runtime/source.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

namespace fs = std::filesystem;
using runtime::CompileError;
using runtime::CompileRequest;
using runtime::CompileResult;
using runtime::DiskCache;
using runtime::ImageFormat;
using runtime::Jit;
using runtime::Origin;

constexpr std::uint64_t unlimited = 1'000'000'000;

CompileRequest small_request(int constant = 1) {
  CompileRequest request;
  request.text =
      "extern \"C\" __global__ void fovea_kernel(int* out) { *out = " + std::to_string(constant) +
      "; }";
  return request;
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  return files;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

template <typename Fault, typename Action>
std::string sentence(Action action) {
  try {
    action();
  } catch (const Fault& fault) {
    return fault.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// ---- Hash
// -----------------------------------------------------------------------------------------------

std::string sha256(std::string_view bytes) {
  runtime::Sha256 hash;
  hash.add(bytes);
  return hash.hex();
}

// FIPS 180-4 examples.
TEST(Sha256, GivesThePublishedDigests) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, IsTheSameInPiecesAndKeepsFieldsApart) {
  const std::string text(200, 'x');
  for (std::size_t cut = 0; cut <= text.size(); cut += 13) {
    runtime::Sha256 hash;
    hash.add(text.substr(0, cut));
    hash.add(text.substr(cut));
    EXPECT_EQ(hash.hex(), sha256(text));
  }
  runtime::Sha256 a;
  a.add_field("ab");
  a.add_field("c");
  runtime::Sha256 b;
  b.add_field("a");
  b.add_field("bc");
  EXPECT_NE(a.hex(), b.hex());
}

// ---- ptxas's report
// ---------------------------------------------------------------------------------------

TEST(PtxasReport, ReadsResourcesAndAdvisories) {
  const runtime::ResourceReport report = runtime::parse_ptxas_report(
      "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
      "serialized due to non wgmma instructions in function 'f'\n"
      "ptxas info    : 80 bytes gmem\n"
      "ptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
      "ptxas info    : Function properties for f\n"
      "ptxas         .     256 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 9 barriers, 256 bytes cumulative stack size, 4096 "
      "bytes smem\n"
      "ptxas info    : Compile time = 19.739 ms\n"
      "ptxas info    : Compiling entry function 'g' for 'sm_90a'\n"
      "ptxas info    : Used 8 registers, used 1 barriers");
  ASSERT_EQ(report.kernels.size(), 2u);
  EXPECT_EQ(report.kernels[0].name, "f");
  EXPECT_EQ(report.kernels[0].registers, 168);
  EXPECT_EQ(report.kernels[0].barriers, 9);
  EXPECT_EQ(report.kernels[0].stack_bytes, 256);
  EXPECT_EQ(report.kernels[0].spill_store_bytes, 16);
  EXPECT_EQ(report.kernels[0].spill_load_bytes, 24);
  EXPECT_EQ(report.kernels[0].static_shared_bytes, 4096);
  EXPECT_EQ(report.kernels[1].name, "g");
  EXPECT_EQ(report.kernels[1].registers, 8);
  ASSERT_EQ(report.advisories.size(), 1u);
  EXPECT_NE(report.advisories[0].find("C7515"), std::string::npos);
}

TEST(PtxasReport, TakesAnyText) {
  EXPECT_TRUE(runtime::parse_ptxas_report("").kernels.empty());
  EXPECT_TRUE(runtime::parse_ptxas_report("\n\n registers bytes stack frame\n").kernels.empty());
}

// ---- Emitted text
// -----------------------------------------------------------------------------------------

TEST(Source, NamesShapesByWhatTheyAre) {
  EXPECT_EQ(runtime::wgmma_name({.n = 128}), "wgmma_m64n128k16_f32_bf16_ss_kk");
  EXPECT_EQ(runtime::wgmma_name({.n = 64,
                                 .a = core::DType::f16,
                                 .b = core::DType::f16,
                                 .a_in_registers = true,
                                 .b_mn_major = true}),
            "wgmma_m64n64k16_f32_f16_rs_km");
  EXPECT_EQ(runtime::wgmma_name({.n = 8, .a = core::DType::e4m3, .b = core::DType::e5m2}),
            "wgmma_m64n8k32_f32_e4m3_e5m2_ss_kk");
  EXPECT_EQ(runtime::tcgen05_mma_name({true, true, 2}), "tcgen05_mma_f8f6f4_ts_cta2");
}

TEST(Source, NamesKernelsByWhatTheyDo) {
  EXPECT_EQ(runtime::operand_name(core::DType::bf16, 128, 128), "bf16_d128");
  EXPECT_EQ(runtime::operand_name(core::DType::e4m3, 192, 128), "e4m3_d192_128");
  runtime::KernelSource source;
  source.name = "combine_f16";
  source.include = "device/combine.cuh";
  source.call = "fovea::device::combine<fovea::core::DType::f16>";
  source.params = "fovea::core::CombineParams";
  source.threads = 128;
  EXPECT_EQ(runtime::kernel_name(runtime::kernel_text(source)), "fovea_combine_f16");
  EXPECT_EQ(runtime::kernel_name("extern \"C\" __global__ void one(float* p) { *p = (1); }"),
            "one");
  EXPECT_EQ(runtime::kernel_name("__global__ void __launch_bounds__(128, 1)\n  two(int i) {}"),
            "two");
}

TEST(Source, RefusesShapesTheInstructionSetLacks) {
  using Fault = std::invalid_argument;
  using core::DType;
  EXPECT_NE(sentence<Fault>([] { runtime::wgmma_text({.n = 12}); }).find("12"), std::string::npos);
  EXPECT_THROW(runtime::wgmma_text({.n = 264}), Fault);
  EXPECT_THROW(runtime::wgmma_text({.n = 0}), Fault);
  EXPECT_THROW(runtime::wgmma_text({.n = 64, .a = DType::bf16, .b = DType::f16}), Fault);
  EXPECT_THROW(runtime::wgmma_text({.n = 64, .a = DType::e4m3, .b = DType::bf16}), Fault);
  EXPECT_THROW(runtime::wgmma_text({.n = 64, .a = DType::f32, .b = DType::f32}), Fault);
  EXPECT_THROW(
      runtime::wgmma_text({.n = 64, .a = DType::e4m3, .b = DType::e4m3, .b_mn_major = true}),
      Fault);
  EXPECT_THROW(runtime::wgmma_text({.n = 64, .a_in_registers = true, .a_mn_major = true}), Fault);
  EXPECT_THROW(runtime::tcgen05_mma_text({.cta_group = 3}), Fault);
  EXPECT_THROW(runtime::tcgen05_load_text(48), Fault);
  EXPECT_THROW(runtime::tcgen05_store_text(256), Fault);
}

// ---- Caches
// -----------------------------------------------------------------------------------------------

TEST(Jit, ComesFromCompilerThenMemoryThenDisk) {
  const TemporaryFolder folder;
  Jit first({folder.path(), unlimited});
  const CompileResult compiled = first.compile(small_request());
  EXPECT_EQ(compiled.origin, Origin::compiler);
  EXPECT_GT(compiled.image->bytes.size(), 500u);
  EXPECT_EQ(compiled.image->bytes.substr(1, 3), "ELF");
  ASSERT_EQ(compiled.image->report.kernels.size(), 1u);
  EXPECT_EQ(compiled.image->report.kernels[0].name, "fovea_kernel");
  EXPECT_GT(compiled.image->report.kernels[0].registers, 0);
  const CompileResult remembered = first.compile(small_request());
  EXPECT_EQ(remembered.origin, Origin::memory);
  EXPECT_EQ(remembered.image, compiled.image);

  Jit second({folder.path(), unlimited});
  const CompileResult loaded = second.compile(small_request());
  EXPECT_EQ(loaded.origin, Origin::disk);
  EXPECT_TRUE(loaded.image->bytes == compiled.image->bytes);
  EXPECT_EQ(loaded.image->log, compiled.image->log);
  EXPECT_EQ(loaded.image->report.kernels[0].registers, compiled.image->report.kernels[0].registers);
}

TEST(Jit, KeepsApartWhatCompilesDifferently) {
  const TemporaryFolder folder;
  Jit jit({folder.path(), unlimited});
  std::vector<CompileRequest> requests(7, small_request());
  for (CompileRequest& request : requests) {
    request.text = "#include \"own.h\"\n" + request.text;
    request.headers = {{"own.h", "// nothing\n"}};
  }
  requests[1].text += "\n";
  requests[2].headers[0].text = "// something\n";
  requests[3].options = {"--maxrregcount=32"};
  requests[4].arch = "sm_100a";
  requests[5].format = ImageFormat::ptx;
  requests[6].headers.push_back({"unused.h", ""});
  for (const CompileRequest& request : requests) {
    EXPECT_EQ(jit.compile(request).origin, Origin::compiler);
  }
  EXPECT_EQ(files_in(folder.path()).size(), requests.size());
  for (const CompileRequest& request : requests) {
    EXPECT_EQ(jit.compile(request).origin, Origin::memory);
  }
}

TEST(Jit, GivesPtxWithSourceLines) {
  const TemporaryFolder folder;
  Jit jit({folder.path(), unlimited});
  CompileRequest request = small_request();
  request.format = ImageFormat::ptx;
  const std::string ptx = jit.compile(request).image->bytes;
  EXPECT_NE(ptx.find(".target sm_90a"), std::string::npos);
  EXPECT_NE(ptx.find(".entry fovea_kernel"), std::string::npos);
  EXPECT_NE(ptx.find(".loc"), std::string::npos);
  EXPECT_EQ(ptx.find('\0'), std::string::npos);
}

TEST(Jit, NoticesDamagedEntriesAndReplacesThem) {
  const TemporaryFolder folder;
  const std::string good = Jit({folder.path(), unlimited}).compile(small_request()).image->bytes;
  const std::vector<fs::path> files = files_in(folder.path());
  ASSERT_EQ(files.size(), 1u);
  const std::string entry = read_file(files[0]);
  std::vector<std::string> damaged = {"", "x", entry.substr(0, 40),
                                      entry.substr(0, entry.size() - 1), entry + "x"};
  for (std::size_t at = 0; at < entry.size(); at += 1 + entry.size() / 40) {
    std::string flipped = entry;
    flipped[at] = static_cast<char>(flipped[at] ^ 1);
    damaged.push_back(flipped);
  }
  for (const std::string& bytes : damaged) {
    write_file(files[0], bytes);
    Jit jit({folder.path(), unlimited});
    const CompileResult result = jit.compile(small_request());
    EXPECT_EQ(result.origin, Origin::compiler);
    EXPECT_TRUE(result.image->bytes == good);
    Jit next({folder.path(), unlimited});
    EXPECT_EQ(next.compile(small_request()).origin, Origin::disk) << "the entry is whole again";
  }
}

TEST(Jit, DoesNotTakeAnotherKernelsEntry) {
  const TemporaryFolder folder;
  Jit({folder.path(), unlimited}).compile(small_request(1));
  const fs::path one = files_in(folder.path()).at(0);
  const std::string entry = read_file(one);
  Jit({folder.path(), unlimited}).compile(small_request(2));
  for (const fs::path& file : files_in(folder.path())) write_file(file, entry);
  EXPECT_EQ(Jit({folder.path(), unlimited}).compile(small_request(1)).origin, Origin::disk);
  EXPECT_EQ(Jit({folder.path(), unlimited}).compile(small_request(2)).origin, Origin::compiler);
}

TEST(Jit, WorksWithoutAFolder) {
  Jit off({{}, unlimited});
  EXPECT_EQ(off.compile(small_request()).origin, Origin::compiler);
  const TemporaryFolder folder;
  write_file(folder.path() / "file", "");
  Jit blocked({folder.path() / "file" / "cache", unlimited});
  EXPECT_EQ(blocked.compile(small_request()).origin, Origin::compiler);
}

TEST(Jit, CompilesOnceForManyThreads) {
  const TemporaryFolder folder;
  Jit jit({folder.path(), unlimited});
  std::vector<CompileResult> results(8);
  std::vector<std::thread> threads;
  for (CompileResult& result : results) {
    threads.emplace_back([&] { result = jit.compile(small_request()); });
  }
  for (std::thread& thread : threads) thread.join();
  int compiled = 0;
  for (const CompileResult& result : results) {
    EXPECT_EQ(result.image, results[0].image);
    if (result.origin == Origin::compiler) ++compiled;
  }
  EXPECT_EQ(compiled, 1);
}

TEST(DiskCache, StaysWithinItsBoundAndDropsWhatWentUnused) {
  const TemporaryFolder folder;
  const DiskCache cache(folder.path(), 10'000);
  const std::string image(3000, 'i');
  const auto age = [&](const std::string& key, int hours) {
    fs::last_write_time(folder.path() / (key + "-c.kernel"),
                        fs::file_time_type::clock::now() - std::chrono::hours(hours));
  };
  for (const char* key : {"1", "2", "3"}) ASSERT_TRUE(cache.store(key, "c", {image, ""}));
  age("1", 3);
  age("2", 2);
  age("3", 1);
  ASSERT_TRUE(cache.load("1", "c"));  // used now, so "2" has gone unused longest
  ASSERT_TRUE(cache.store("4", "c", {image, ""}));
  EXPECT_TRUE(cache.load("1", "c"));
  EXPECT_FALSE(cache.load("2", "c"));
  EXPECT_TRUE(cache.load("3", "c"));
  EXPECT_TRUE(cache.load("4", "c"));
  EXPECT_LE(cache.trim(), 10'000u);
}

TEST(DiskCache, ClearsWhatDeadWritersLeft) {
  const TemporaryFolder folder;
  const DiskCache cache(folder.path(), unlimited);
  const fs::path dead = folder.path() / "k-c.1.0.partial";
  const fs::path alive = folder.path() / "k-c.2.0.partial";
  write_file(dead, "half");
  write_file(alive, "half");
  fs::last_write_time(dead, fs::file_time_type::clock::now() - std::chrono::hours(2));
  ASSERT_TRUE(cache.store("k", "c", {"image", "log"}));
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(alive));
}

TEST(DiskCache, IsWholeWhenAWriterIsKilled) {
  const TemporaryFolder folder;
  const DiskCache cache(folder.path(), unlimited);
  const DiskCache::Entry entry{std::string(1'000'000, 'i'), "log"};
  for (int round = 0; round < 20; ++round) {
    const pid_t writer = fork();
    if (writer == 0) {
      for (;;) cache.store("k", "c", entry);
    }
    // The first writer gets as long as it needs for one entry; the others are killed anywhere.
    for (int i = 0; i < 6000 && round == 0 && !fs::exists(folder.path() / "k-c.kernel"); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2 + 3 * round));
    kill(writer, SIGKILL);
    waitpid(writer, nullptr, 0);
    const auto loaded = cache.load("k", "c");
    ASSERT_TRUE(loaded.has_value()) << "round " << round;
    EXPECT_TRUE(loaded->image == entry.image);
  }
}

// ---- Processes
// ----------------------------------------------------------------------------------------------

// What a child process of the two tests below does; run by name, never by itself.
TEST(JitChild, DISABLED_Compiles) {
  const char* folder = std::getenv("FOVEA_TEST_CHILD_FOLDER");
  ASSERT_NE(folder, nullptr);
  Jit jit({folder, unlimited});
  EXPECT_GT(jit.compile(small_request()).image->bytes.size(), 500u);
}

pid_t spawn_child() {
  std::string program = fs::read_symlink("/proc/self/exe").string();
  std::string filter = "--gtest_filter=JitChild.DISABLED_Compiles";
  std::string disabled = "--gtest_also_run_disabled_tests";
  std::string brief = "--gtest_brief=1";
  char* arguments[] = {program.data(), filter.data(), disabled.data(), brief.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  pid_t child = -1;
  if (posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environ) != 0) child = -1;
  posix_spawn_file_actions_destroy(&actions);
  return child;
}

bool succeeded(pid_t child) {
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

TEST(Jit, ServesManyProcesses) {
  const TemporaryFolder folder;
  const ScopedEnvironment environment("FOVEA_TEST_CHILD_FOLDER", folder.path().c_str());
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i) children.push_back(spawn_child());
  for (const pid_t child : children) EXPECT_TRUE(succeeded(child));
  const std::vector<fs::path> files = files_in(folder.path());
  ASSERT_EQ(files.size(), 1u) << "one entry, nothing half-written";
  EXPECT_EQ(Jit({folder.path(), unlimited}).compile(small_request()).origin, Origin::disk);
}

// Times are printed, not asserted: the machine may be busy.
TEST(Jit, StartsQuickly) {
  const TemporaryFolder folder;
  const ScopedEnvironment environment("FOVEA_TEST_CHILD_FOLDER", folder.path().c_str());
  for (const char* what : {"cold", "warm", "warm"}) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(succeeded(spawn_child()));
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    std::printf("%s start of a process with a small kernel: %.1f ms\n", what, taken.count());
  }
}

// ---- Faults
// -------------------------------------------------------------------------------------------------

TEST(Jit, SaysHowToGetACompiler) {
  const TemporaryFolder folder;
  const ScopedEnvironment environment("FOVEA_NVRTC", "/nowhere/libnvrtc.so");
  Jit jit({folder.path(), unlimited});
  const std::string said = sentence<Unsupported>([&] { jit.compile(small_request()); });
  EXPECT_NE(said.find("FOVEA_NVRTC is '/nowhere/libnvrtc.so'"), std::string::npos) << said;
}

TEST(Jit, RefusesALibraryThatIsNoCompiler) {
  const TemporaryFolder folder;
  write_file(folder.path() / "libnvrtc.so", "no library");
  const ScopedEnvironment environment("FOVEA_NVRTC", folder.path().c_str());
  Jit jit({{}, unlimited});
  const std::string said = sentence<Unsupported>([&] { jit.compile(small_request()); });
  EXPECT_NE(said.find("scripts/setup --cuda"), std::string::npos) << said;
}

TEST(Jit, UsesAFilledCacheWithoutACompiler) {
  const TemporaryFolder folder;
  const std::string bytes = Jit({folder.path(), unlimited}).compile(small_request()).image->bytes;
  const ScopedEnvironment environment("FOVEA_NVRTC", "/nowhere/libnvrtc.so");
  Jit jit({folder.path(), unlimited});
  const CompileResult result = jit.compile(small_request());
  EXPECT_EQ(result.origin, Origin::disk);
  EXPECT_TRUE(result.image->bytes == bytes);
  EXPECT_THROW(jit.compile(small_request(2)), Unsupported);
}

TEST(Jit, QuotesTheFirstErrorAndTriesAgain) {
  const TemporaryFolder folder;
  Jit jit({folder.path(), unlimited});
  CompileRequest request;
  request.text = "extern \"C\" __global__ void fovea_kernel() { undeclared = 1; }";
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      jit.compile(request);
      ADD_FAILURE();
    } catch (const CompileError& fault) {
      EXPECT_NE(std::string(fault.what()).find("undeclared"), std::string::npos) << fault.what();
      EXPECT_NE(fault.log().find("kernel.cu(1)"), std::string::npos) << fault.log();
    }
  }
  EXPECT_TRUE(!fs::exists(folder.path()) || files_in(folder.path()).empty());
}

TEST(Jit, RefusesSpillsInStrictUse) {
  const TemporaryFolder folder;
  Jit jit({folder.path(), unlimited});
  CompileRequest request;
  request.text = R"(
    extern "C" __global__ void fovea_kernel(float* p) {
      float v[64];
      #pragma unroll
      for (int i = 0; i < 64; ++i) v[i] = p[i * 32 + threadIdx.x];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 64; ++i) p[i * 32 + threadIdx.x] = v[i] * v[(i + 17) % 64];
    })";
  request.options = {"--maxrregcount=32"};
  const std::string said = sentence<CompileError>([&] { jit.compile(request); });
  EXPECT_NE(said.find("spills"), std::string::npos) << said;
  request.strict = false;
  const CompileResult result = jit.compile(request);
  EXPECT_GT(result.image->report.kernels.at(0).spill_store_bytes, 0);
}

TEST(Jit, RefusesSerialisedProductsInStrictUse) {
  const TemporaryFolder folder;
  Jit jit({folder.path(), unlimited});
  CompileRequest request;
  // The accumulator is read before the product that writes it has been waited for.
  request.text = "#include \"device/wgmma.h\"\nnamespace fovea::device {\n" +
                 runtime::wgmma_text({.n = 8}, "product") + R"(
      extern "C" __global__ void __launch_bounds__(128) fovea_kernel(float* p) {
        float sum[4] = {};
        wgmma_fence();
        product(sum, 1, 2, true);
        wgmma_commit();
        p[threadIdx.x] = sum[0];
        wgmma_wait<0>();
      }
      })";
  const std::string said = sentence<CompileError>([&] { jit.compile(request); });
  EXPECT_NE(said.find("(C75"), std::string::npos) << said;
}

TEST(Jit, RefusesAnImageWithoutAReportInStrictUse) {
  const TemporaryFolder folder;
  Jit jit({folder.path(), unlimited});
  CompileRequest request;
  request.text = "__device__ int nothing_that_ptxas_reports_on;";
  const std::string said = sentence<CompileError>([&] { jit.compile(request); });
  EXPECT_NE(said.find("ptxas reports no registers"), std::string::npos) << said;
  request.strict = false;
  EXPECT_FALSE(jit.compile(request).image->bytes.empty());
  request.strict = true;
  request.format = runtime::ImageFormat::ptx;  // which ptxas has not seen
  EXPECT_FALSE(jit.compile(request).image->bytes.empty());
}

TEST(Jit, CompilesAgainWhatWasCachedWithoutAReport) {
  const TemporaryFolder folder;
  const CompileRequest request = small_request();
  const CompileResult first = Jit({folder.path(), unlimited}).compile(request);
  ASSERT_FALSE(first.image->report.kernels.empty());
  const std::vector<fs::path> files = files_in(folder.path());
  ASSERT_EQ(files.size(), 1u);
  const std::string name = files[0].stem().string();
  const std::size_t dash = name.find('-');
  const runtime::DiskCache cache(folder.path(), unlimited);
  ASSERT_TRUE(
      cache.store(name.substr(0, dash), name.substr(dash + 1), {first.image->bytes, "no report"}));
  const CompileResult again = Jit({folder.path(), unlimited}).compile(request);
  EXPECT_EQ(again.origin, Origin::compiler);
  EXPECT_FALSE(again.image->report.kernels.empty());
  EXPECT_EQ(Jit({folder.path(), unlimited}).compile(request).origin, Origin::disk);
}

TEST(Jit, NamesTheArchsThereAre) {
  Jit jit({{}, unlimited});
  CompileRequest request = small_request();
  for (const char* arch : {"sm_80", "90a", "", "sm_90"}) {
    request.arch = arch;
    const std::string said = sentence<Error>([&] { jit.compile(request); });
    EXPECT_NE(said.find("sm_100a"), std::string::npos) << said;
  }
}

TEST(CacheFolder, ComesFromTheEnvironment) {
  const ScopedEnvironment home("HOME", "/home/someone");
  const ScopedEnvironment xdg("XDG_CACHE_HOME", nullptr);
  const ScopedEnvironment none("FOVEA_CACHE_DIR", nullptr);
  EXPECT_EQ(runtime::default_cache_folder(), "/home/someone/.cache/fovea");
  {
    const ScopedEnvironment set("XDG_CACHE_HOME", "/cache");
    EXPECT_EQ(runtime::default_cache_folder(), "/cache/fovea");
    const ScopedEnvironment named("FOVEA_CACHE_DIR", "/kernels");
    EXPECT_EQ(runtime::default_cache_folder(), "/kernels");
    const ScopedEnvironment off("FOVEA_CACHE_DIR", "off");
    EXPECT_EQ(runtime::default_cache_folder(), "");
  }
  const ScopedEnvironment homeless("HOME", nullptr);
  EXPECT_EQ(runtime::default_cache_folder(), "");
}

TEST(CacheLimit, ComesFromTheEnvironment) {
  {
    const ScopedEnvironment none("FOVEA_CACHE_MB", nullptr);
    EXPECT_EQ(runtime::default_cache_limit_bytes(), 512'000'000u);
  }
  {
    const ScopedEnvironment set("FOVEA_CACHE_MB", "20");
    EXPECT_EQ(runtime::default_cache_limit_bytes(), 20'000'000u);
  }
  for (const char* wrong : {"0", "-1", "1.5", "many", "99999999999999999999"}) {
    const ScopedEnvironment set("FOVEA_CACHE_MB", wrong);
    EXPECT_NE(sentence<Error>([] { runtime::default_cache_limit_bytes(); }).find(wrong),
              std::string::npos);
  }
}

}  // namespace
}  // namespace fovea::tests
