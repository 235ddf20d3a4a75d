// Kernel text to machine code (or to PTX, for the emulator), through a memory cache, a disk cache
// and NVRTC.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/disk_cache.h"
#include "runtime/nvrtc.h"

namespace fovea::runtime {

// What ptxas says of one kernel.
struct KernelResources {
  std::string name;
  int registers = 0;
  int barriers = 0;
  int stack_bytes = 0;
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  int static_shared_bytes = 0;
};

struct ResourceReport {
  std::vector<KernelResources> kernels;
  // Lines in which ptxas admits to have slowed the kernel down: wgmma serialised (C7510, C7512,
  // C7514, C7515), waits injected (C7517, C7519), setmaxnreg ignored (C7508).
  std::vector<std::string> advisories;
};

// Reads what ptxas prints with -v.
ResourceReport parse_ptxas_report(std::string_view log);

struct KernelImage {
  std::string bytes;  // cubin, or PTX text
  ImageFormat format = ImageFormat::cubin;
  std::string arch;
  std::string log;
  ResourceReport report;  // empty for PTX
};

struct CompileRequest {
  std::string text;                 // a translation unit; may include "core/..." and "device/..."
  std::vector<SourceFile> headers;  // what else it includes
  std::string arch = "sm_90a";      // sm_90a, sm_100a, sm_100f, sm_103a
  ImageFormat format = ImageFormat::cubin;
  std::vector<std::string> options;  // to NVRTC, besides those of every kernel
  // Spills and advisories are errors: a kernel that is used for its speed must not have them, and
  // must have a report that says so.
  bool strict = true;
};

class CompileError : public std::runtime_error {
 public:
  CompileError(const std::string& sentence, std::string log)
      : std::runtime_error(sentence), log_(std::move(log)) {}
  const std::string& log() const { return log_; }

 private:
  std::string log_;
};

enum class Origin { memory, disk, compiler };

struct CompileResult {
  std::shared_ptr<const KernelImage> image;
  Origin origin = Origin::compiler;
  double seconds = 0.0;
};

struct JitOptions {
  std::filesystem::path cache_folder = default_cache_folder();
  std::uint64_t cache_limit_bytes = default_cache_limit_bytes();
};

// Safe for several threads, and several processes on one cache folder. Two threads that ask for the
// same kernel compile it once.
class Jit {
 public:
  explicit Jit(const JitOptions& options = {});

  // Throws CompileError when the text does not compile or is not fit for strict use, Unsupported
  // when there is no NVRTC and no cached image, Error when the arch is not one of those above.
  CompileResult compile(const CompileRequest& request);

  // "13.0, /usr/local/cuda/lib64/libnvrtc.so.13"; opens the compiler. Throws Unsupported without
  // one.
  std::string compiler_version();

  const DiskCache& disk() const { return disk_; }

 private:
  CompileResult load_or_compile(const CompileRequest& request, const std::string& key);
  std::shared_ptr<const Nvrtc> compiler();

  DiskCache disk_;
  std::mutex mutex_;
  std::shared_ptr<const Nvrtc> nvrtc_;
  std::unordered_map<std::string, std::shared_future<std::shared_ptr<const KernelImage>>> memory_;
};

// The process's own, with default options.
Jit& default_jit();

}  // namespace fovea::runtime
