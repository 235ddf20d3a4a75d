#include "runtime/jit.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>

#include "device/files.h"
#include "fovea/fovea.hpp"
#include "runtime/sha256.h"

namespace fovea::runtime {

namespace {

constexpr std::string_view known_archs[] = {"sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_103f"};

void check_arch(const std::string& arch) {
  if (std::find(std::begin(known_archs), std::end(known_archs), arch) == std::end(known_archs)) {
    throw Error("arch is '" + arch + "', but must be sm_90a, sm_100a, sm_100f, sm_103a or sm_103f");
  }
}

std::vector<std::string> compiler_options(const CompileRequest& request) {
  std::vector<std::string> options = {"--std=c++20", "--device-as-default-execution-space"};
  if (request.format == ImageFormat::ptx) {
    // compute_90a for sm_90a; line information becomes .loc lines, which the emulator reports.
    options.push_back("--gpu-architecture=compute_" + request.arch.substr(3));
    options.push_back("--generate-line-info");
  } else {
    options.push_back("--gpu-architecture=" + request.arch);
    options.push_back("--ptxas-options=-v");
  }
  options.insert(options.end(), request.options.begin(), request.options.end());
  return options;
}

// The carried headers never change while the process lives.
const std::string& carried_headers_digest() {
  static const std::string digest = [] {
    Sha256 hash;
    for (const device::File& file : device::files()) {
      hash.add_field(file.name);
      hash.add_field(file.text);
    }
    return hash.hex();
  }();
  return digest;
}

// Everything that decides the image, but for the compiler, whose name is the other half of an
// entry's.
std::string cache_key(const CompileRequest& request) {
  Sha256 hash;
  hash.add_field(carried_headers_digest());
  hash.add_field(request.format == ImageFormat::ptx ? "ptx" : "cubin");
  for (const std::string& option : compiler_options(request)) hash.add_field(option);
  hash.add_field("text");
  hash.add_field(request.text);
  for (const SourceFile& header : request.headers) {
    hash.add_field(header.name);
    hash.add_field(header.text);
  }
  return hash.hex();
}

std::string compiler_key(const std::filesystem::path& library) {
  Sha256 hash;
  hash.add(Nvrtc::identity(library));
  return hash.hex().substr(0, 16);
}

// The number that stands right before `label` in the line; 0 where the label does not occur.
int number_before(std::string_view line, std::string_view label) {
  const std::size_t end = line.find(label);
  if (end == std::string_view::npos) return 0;
  const std::size_t space = end == 0 ? std::string_view::npos : line.find_last_of(' ', end - 1);
  const std::size_t begin = space == std::string_view::npos ? 0 : space + 1;
  int number = 0;
  std::from_chars(line.data() + begin, line.data() + end, number);
  return number;
}

std::shared_ptr<const KernelImage> make_image(const CompileRequest& request, std::string bytes,
                                              std::string log) {
  auto image = std::make_shared<KernelImage>();
  image->bytes = std::move(bytes);
  image->format = request.format;
  image->arch = request.arch;
  image->log = std::move(log);
  image->report = parse_ptxas_report(image->log);
  return image;
}

// Whether ptxas said what the image's kernels use. It does not where its result came from a cache
// of NVRTC's own.
bool has_report(const KernelImage& image) {
  const auto& kernels = image.report.kernels;
  return image.format == ImageFormat::ptx ||
         (!kernels.empty() && std::all_of(kernels.begin(), kernels.end(),
                                          [](const auto& kernel) { return kernel.registers > 0; }));
}

void check_strict(const KernelImage& image) {
  if (!has_report(image)) {
    throw CompileError(
        "ptxas reports no registers and spills of this kernel, so that nobody knows whether it is "
        "fit for use; where NVRTC answers from a cache of its own, set CUDA_CACHE_DISABLE=1",
        image.log);
  }
  if (!image.report.advisories.empty()) {
    throw CompileError("ptxas slows this kernel down: " + image.report.advisories.front(),
                       image.log);
  }
  for (const KernelResources& kernel : image.report.kernels) {
    if (kernel.spill_store_bytes + kernel.spill_load_bytes == 0) continue;
    throw CompileError("kernel " + kernel.name + " spills " +
                           std::to_string(kernel.spill_store_bytes) +
                           " bytes of registers, but must spill none",
                       image.log);
  }
}

std::string first_error(std::string_view log) {
  const std::size_t at = std::min(log.find("error"), log.size());
  const std::size_t begin = at == 0 ? 0 : log.rfind('\n', at) + 1;
  return std::string(log.substr(begin, log.find('\n', at) - begin));
}

}  // namespace

ResourceReport parse_ptxas_report(std::string_view log) {
  constexpr std::string_view entry = "Compiling entry function '";
  ResourceReport report;
  while (!log.empty()) {
    const std::size_t end = std::min(log.find('\n'), log.size());
    const std::string_view line = log.substr(0, end);
    log.remove_prefix(std::min(end + 1, log.size()));
    if (line.find("(C75") != std::string_view::npos ||
        line.find("Potential Performance Loss") != std::string_view::npos) {
      report.advisories.emplace_back(line);
    } else if (const std::size_t at = line.find(entry); at != std::string_view::npos) {
      const std::string_view name = line.substr(at + entry.size());
      report.kernels.emplace_back();
      report.kernels.back().name = name.substr(0, name.find('\''));
    } else if (!report.kernels.empty()) {
      KernelResources& kernel = report.kernels.back();
      if (line.find("stack frame") != std::string_view::npos) {
        kernel.stack_bytes = number_before(line, " bytes stack frame");
        kernel.spill_store_bytes = number_before(line, " bytes spill stores");
        kernel.spill_load_bytes = number_before(line, " bytes spill loads");
      } else if (line.find(" registers") != std::string_view::npos) {
        kernel.registers = number_before(line, " registers");
        kernel.barriers = number_before(line, " barriers");
        kernel.static_shared_bytes = number_before(line, " bytes smem");
      }
    }
  }
  return report;
}

Jit::Jit(const JitOptions& options) : disk_(options.cache_folder, options.cache_limit_bytes) {}

CompileResult Jit::compile(const CompileRequest& request) {
  const auto start = std::chrono::steady_clock::now();
  check_arch(request.arch);
  const std::string key = cache_key(request);
  std::promise<std::shared_ptr<const KernelImage>> promise;
  std::shared_future<std::shared_ptr<const KernelImage>> known;
  {
    const std::lock_guard lock(mutex_);
    const auto [slot, inserted] = memory_.try_emplace(key);
    if (inserted) {
      slot->second = promise.get_future().share();
    } else {
      known = slot->second;
    }
  }
  CompileResult result;
  if (known.valid()) {
    result = {known.get(), Origin::memory, 0.0};
  } else {
    try {
      result = load_or_compile(request, key);
      promise.set_value(result.image);
    } catch (...) {
      promise.set_exception(std::current_exception());
      const std::lock_guard lock(mutex_);
      memory_.erase(key);
      throw;
    }
  }
  if (request.strict) check_strict(*result.image);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

CompileResult Jit::load_or_compile(const CompileRequest& request, const std::string& key) {
  std::filesystem::path library;
  std::optional<Unsupported> no_compiler;
  try {
    library = Nvrtc::find();
  } catch (const Unsupported& fault) {
    no_compiler = fault;
  }
  // Without a compiler, a cache that was filled ahead of time still serves.
  const std::string compiler_name = no_compiler ? "" : compiler_key(library);
  if (auto entry = disk_.load(key, compiler_name)) {
    auto image = make_image(request, std::move(entry->image), std::move(entry->log));
    // One without a report is compiled again where it can be, to get it.
    if (has_report(*image) || no_compiler) return {std::move(image), Origin::disk, 0.0};
  }
  if (no_compiler) throw *no_compiler;

  std::vector<SourceFile> headers = request.headers;
  for (const device::File& file : device::files()) {
    headers.push_back({std::string(file.name), std::string(file.text)});
  }
  Nvrtc::Result compiled =
      compiler()->compile(request.text, headers, compiler_options(request), request.format);
  if (!compiled.ok) {
    throw CompileError(
        "a kernel for " + request.arch + " does not compile: " + first_error(compiled.log),
        compiled.log);
  }
  disk_.store(key, compiler_name, {compiled.image, compiled.log});
  return {make_image(request, std::move(compiled.image), std::move(compiled.log)), Origin::compiler,
          0.0};
}

std::shared_ptr<const Nvrtc> Jit::compiler() {
  const std::lock_guard lock(mutex_);
  if (!nvrtc_) nvrtc_ = std::make_shared<const Nvrtc>(Nvrtc::find());
  return nvrtc_;
}

std::string Jit::compiler_version() {
  const auto nvrtc = compiler();
  return std::to_string(nvrtc->major()) + "." + std::to_string(nvrtc->minor()) + ", " +
         Nvrtc::find().string();
}

Jit& default_jit() {
  static Jit jit;
  return jit;
}

}  // namespace fovea::runtime
