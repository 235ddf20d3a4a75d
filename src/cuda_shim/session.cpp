#include "cuda_shim/session.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_shim/fat_binary.h"

namespace fovea::cuda_shim {
namespace {

// Pinned and managed memory lies where neither the machine's own memory nor its windows are.
constexpr std::uint64_t kHostBase = 0x200000000000;
constexpr std::uint64_t kPageBytes = 4096;
// What a kernel may have without asking for more (cudaFuncAttributeMaxDynamicSharedMemorySize).
constexpr std::uint32_t kDefaultSharedBytes = 48 * 1024;
constexpr std::uint32_t kPortableCluster = 8;
// Of an SM of both generations; each CTA costs the system's KiB on top of its own.
constexpr std::uint32_t kThreadsPerSm = 2048, kCtasPerSm = 32, kSystemSharedBytes = 1024;
constexpr std::uint32_t kSharedBytesPerSm = 228 * 1024;

std::uint64_t as_address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

emulator::Chip chip_of(const Settings& settings) {
  constexpr std::string_view prefix = "emulated:";
  std::string_view device = settings.device;
  if (device.starts_with(prefix)) device.remove_prefix(prefix.size());
  emulator::Chip chip = emulator::find_chip(device);
  if (settings.sm_count > 0) chip.sm_count = settings.sm_count;
  return chip;
}

Status status_of(const emulator::Report& report) {
  switch (report.stopped_by) {
    case emulator::FaultKind::out_of_bounds: return Status::illegal_address;
    case emulator::FaultKind::misaligned: return Status::misaligned_address;
    case emulator::FaultKind::deadlock:
    case emulator::FaultKind::step_limit: return Status::timeout;
    default: return Status::launch_failure;
  }
}

std::string text(const emulator::Dim3& d) {
  return "[" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + "]";
}

[[noreturn]] void stop_process(const std::string& sentence) {
  std::fprintf(stderr, "fovea emulate: %s\n", sentence.c_str());
  std::_Exit(1);
}

}  // namespace

const emulator::Module& Image::module(const std::string& arch) {
  if (module_.has_value()) return *module_;
  std::string ptx;
  try {
    ptx = is_fat_binary(data_) ? choose_ptx(read_fat_binary(data_), arch)
                               : std::string(static_cast<const char*>(data_));
  } catch (const emulator::Error& fault) {
    throw Failure(Status::no_image_for_device, fault.what());
  }
  if (ptx.find(".version") == std::string::npos) {
    throw Failure(Status::invalid_image,
                  "a module is neither PTX nor a fat binary; machine code cannot be emulated.");
  }
  try {
    module_ = emulator::Module::parse(ptx);
  } catch (const emulator::Error& fault) {
    throw Failure(Status::invalid_ptx, fault.what());
  }
  return *module_;
}

Session& Session::get() {
  static Session* const session = [] {
    const char* text = std::getenv(kSettingsVariable);
    try {
      return new Session(parse_settings(text == nullptr ? "" : text));
    } catch (const emulator::Error& fault) {
      // There is nobody yet to whom a status would mean anything.
      stop_process(fault.what());
    }
  }();
  return *session;
}

Session::Session(Settings settings)
    : settings_(std::move(settings)),
      machine_(chip_of(settings_)),
      capability_(std::atoi(machine_.chip().arch.c_str() + 3)),
      next_host_address_(kHostBase) {
  append_report("{\"device\": \"" + chip().name + "\", \"arch\": \"" + arch() + "\"}");
}

void Session::say(const std::string& sentence) const {
  std::fflush(stdout);
  std::fprintf(stderr, "fovea emulate: %s\n", sentence.c_str());
}

const emulator::Chip& Session::chip() const { return machine_.chip(); }

void Session::refuse_static_runtime() {
  if (refused_static_runtime_) return;
  refused_static_runtime_ = true;
  say("the program carries the CUDA runtime inside, which is nvcc's default; link it with "
      "-cudart shared.");
}

// ---- memory

emulator::Machine::Range Session::allocation(std::uint64_t address) const {
  return machine_.allocation(address);
}

std::uint64_t Session::allocate(std::size_t bytes) {
  const std::uint64_t address = machine_.allocate(bytes);
  used_bytes_ += bytes;
  return address;
}

void Session::free(std::uint64_t address) {
  if (address == 0) return;
  if (host_memory(address) != nullptr) {
    free_host(reinterpret_cast<void*>(address));
    return;
  }
  const emulator::Machine::Range range = machine_.allocation(address);
  machine_.free(address);
  used_bytes_ -= range.bytes;
}

void* Session::allocate_host(std::size_t bytes, bool managed) {
  const std::size_t size =
      (std::max<std::size_t>(bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* memory = mmap(reinterpret_cast<void*>(next_host_address_), size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Failure(Status::out_of_memory,
                  "the host has no " + std::to_string(bytes) + " bytes of memory.");
  }
  next_host_address_ += size + kPageBytes;
  machine_.adopt(memory, bytes);
  host_memory_[as_address(memory)] = {bytes, managed, false};
  return memory;
}

void Session::free_host(void* memory) {
  if (memory == nullptr) return;
  const auto found = host_memory_.find(as_address(memory));
  if (found == host_memory_.end() || found->second.registered) {
    throw Failure(Status::invalid_value, "free of host memory that was not allocated here.");
  }
  machine_.free(found->first);
  munmap(memory, std::max<std::size_t>(found->second.bytes, 1));
  host_memory_.erase(found);
}

void Session::register_host(void* memory, std::size_t bytes) {
  try {
    machine_.adopt(memory, bytes);
  } catch (const emulator::Error& fault) {
    throw Failure(Status::already_registered, fault.what());
  }
  host_memory_[as_address(memory)] = {bytes, false, true};
}

void Session::unregister_host(void* memory) {
  const auto found = host_memory_.find(as_address(memory));
  if (found == host_memory_.end() || !found->second.registered) {
    throw Failure(Status::not_registered, "host memory that was not registered is unregistered.");
  }
  machine_.free(found->first);
  host_memory_.erase(found);
}

const HostMemory* Session::host_memory(std::uint64_t address) const {
  const auto next = host_memory_.upper_bound(address);
  if (next == host_memory_.begin()) return nullptr;
  const auto found = std::prev(next);
  return address - found->first < std::max<std::size_t>(found->second.bytes, 1) ? &found->second
                                                                                : nullptr;
}

// What the host has to touch for an address of either side.
std::uint8_t* Session::host_view(const void* address, std::size_t bytes, bool* on_device) const {
  const std::uint64_t at = as_address(address);
  const emulator::Machine::Range range = machine_.allocation(at);
  *on_device = range.bytes != 0;
  if (range.bytes == 0) return static_cast<std::uint8_t*>(const_cast<void*>(address));
  if (bytes > range.bytes - (at - range.address)) {
    throw Failure(Status::invalid_value, "a copy of " + std::to_string(bytes) +
                                             " bytes passes the end of an allocation of " +
                                             std::to_string(range.bytes) + ".");
  }
  auto& machine = const_cast<emulator::Machine&>(machine_);
  return static_cast<std::uint8_t*>(machine.host_pointer(at, bytes));
}

void Session::copy(void* target, const void* source, std::size_t bytes, Direction direction) {
  if (bytes == 0) return;
  bool to_device = false, from_device = false;
  std::uint8_t* to = host_view(target, bytes, &to_device);
  const std::uint8_t* from = host_view(source, bytes, &from_device);
  const bool wants_to =
      direction == Direction::host_to_device || direction == Direction::device_to_device;
  const bool wants_from =
      direction == Direction::device_to_host || direction == Direction::device_to_device;
  if ((wants_to && !to_device) || (wants_from && !from_device)) {
    throw Failure(Status::invalid_value,
                  std::string("the ") + (wants_to && !to_device ? "target" : "source") +
                      " of a copy is not device memory, as the copy's direction says.");
  }
  std::memmove(to, from, bytes);
}

void Session::fill(void* target, int byte, std::size_t bytes) {
  if (bytes == 0) return;
  bool on_device = false;
  std::memset(host_view(target, bytes, &on_device), byte, bytes);
}

void Session::fill_pattern(void* target, std::uint32_t pattern, std::size_t pattern_bytes,
                           std::size_t count) {
  if (count == 0) return;
  bool on_device = false;
  std::uint8_t* at = host_view(target, count * pattern_bytes, &on_device);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(at + i * pattern_bytes, &pattern, pattern_bytes);
  }
}

// ---- device code

Image* Session::add_image(const void* data) {
  auto image = std::make_unique<Image>(data);
  Image* const handle = image.get();
  images_[handle] = std::move(image);
  return handle;
}

void Session::remove_image(Image* image) {
  std::erase_if(by_host_function_, [&](const auto& e) { return e.second->image == image; });
  std::erase_if(kernels_, [&](const auto& e) { return e.second->image == image; });
  std::erase_if(variables_, [&](const auto& e) { return e.second.image == image; });
  images_.erase(image);
}

Kernel* Session::add_kernel(Image* image, std::string name, const void* host_function) {
  auto kernel = std::make_unique<Kernel>();
  kernel->image = image;
  kernel->name = std::move(name);
  Kernel* const handle = kernel.get();
  kernels_[handle] = std::move(kernel);
  if (host_function != nullptr) by_host_function_[host_function] = handle;
  return handle;
}

void Session::add_variable(Image* image, std::string name, std::size_t bytes,
                           const void* host_variable) {
  variables_[host_variable] = {image, std::move(name), bytes};
}

Kernel& Session::kernel(const void* function) {
  if (const auto found = by_host_function_.find(function); found != by_host_function_.end()) {
    return *found->second;
  }
  if (const auto found = kernels_.find(function); found != kernels_.end()) return *found->second;
  throw Failure(Status::invalid_device_function,
                "the program names a kernel that it has not registered.");
}

Kernel* Session::kernel_of(Image* image, const std::string& name) {
  for (const auto& [handle, kernel] : kernels_) {
    if (kernel->image == image && kernel->name == name) return kernel.get();
  }
  const std::vector<std::string> names = image->module(arch()).kernels();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    throw Failure(Status::not_found, "the module has no kernel named '" + name + "'.");
  }
  return add_kernel(image, name, nullptr);
}

Kernel& Session::prepared(Kernel& kernel) {
  if (kernel.info.has_value()) return kernel;
  const emulator::Module& module = kernel.image->module(arch());
  try {
    kernel.info = module.kernel(kernel.name);
  } catch (const emulator::Error& fault) {
    throw Failure(Status::invalid_device_function, fault.what());
  }
  return kernel;
}

const Variable& Session::variable(const void* host_variable) const {
  const auto found = variables_.find(host_variable);
  if (found == variables_.end()) {
    throw Failure(Status::invalid_symbol,
                  "the program names a device variable that it has not registered.");
  }
  return found->second;
}

std::uint64_t Session::address_of(const Variable& variable) {
  const std::uint64_t address = machine_.symbol(variable.image->module(arch()), variable.name);
  if (address == 0) {
    throw Failure(Status::invalid_symbol,
                  "the module has no variable named '" + variable.name + "'.");
  }
  return address;
}

// ---- launches

std::vector<std::byte> Session::pack(Kernel& kernel, void** arguments, void** extra) const {
  const emulator::KernelInfo& info = *kernel.info;
  std::vector<std::byte> block(info.parameter_bytes);
  if (extra != nullptr && arguments == nullptr) {
    // CU_LAUNCH_PARAM_BUFFER_POINTER (1), the block, ..._SIZE (2), a pointer to its size, END (0).
    const void* buffer = nullptr;
    std::size_t bytes = 0;
    for (void** at = extra; *at != nullptr; at += 2) {
      if (as_address(at[0]) == 1) buffer = at[1];
      if (as_address(at[0]) == 2) bytes = *static_cast<const std::size_t*>(at[1]);
    }
    if (buffer == nullptr || bytes < block.size()) {
      throw Failure(Status::invalid_value, "the parameter buffer has " + std::to_string(bytes) +
                                               " bytes; kernel " + short_name(kernel.name) +
                                               " takes " + std::to_string(block.size()) + ".");
    }
    std::memcpy(block.data(), buffer, block.size());
    return block;
  }
  if (info.parameter_sizes.empty()) return block;
  if (arguments == nullptr) {
    throw Failure(Status::invalid_value,
                  "kernel " + short_name(kernel.name) + " is launched without arguments.");
  }
  for (std::size_t i = 0; i < info.parameter_sizes.size(); ++i) {
    std::memcpy(block.data() + info.parameter_offsets[i], arguments[i], info.parameter_sizes[i]);
  }
  return block;
}

std::uint32_t Session::dynamic_shared_limit(Kernel& kernel) {
  if (kernel.max_dynamic_shared_bytes != 0) return kernel.max_dynamic_shared_bytes;
  const std::uint32_t used = prepared(kernel).info->static_shared_bytes;
  return used >= kDefaultSharedBytes ? 0 : kDefaultSharedBytes - used;
}

void Session::check_launch(Kernel& kernel, const emulator::LaunchConfig& config) {
  const std::uint32_t limit = dynamic_shared_limit(kernel);
  if (config.dynamic_shared_bytes > limit) {
    throw Failure(Status::invalid_value,
                  "kernel " + short_name(kernel.name) + " is launched with " +
                      std::to_string(config.dynamic_shared_bytes) +
                      " bytes of dynamic shared memory; " + std::to_string(limit) +
                      " is what its attribute allows.");
  }
  if (config.cluster.count() > kPortableCluster && !kernel.non_portable_cluster) {
    throw Failure(Status::invalid_value,
                  "kernel " + short_name(kernel.name) + " is launched with clusters of " +
                      std::to_string(config.cluster.count()) +
                      " CTAs; more than 8 need the attribute for non-portable sizes.");
  }
}

void Session::launch(Kernel& kernel, const emulator::LaunchConfig& config, void** arguments,
                     void** extra) {
  const emulator::Module& module = prepared(kernel).image->module(arch());
  check_launch(kernel, config);
  const std::vector<std::byte> parameters = pack(kernel, arguments, extra);
  const auto begin = std::chrono::steady_clock::now();
  emulator::Report report;
  try {
    report = machine_.launch(module, kernel.name, config, parameters, settings_.schedule);
  } catch (const emulator::Error& fault) {
    // Nothing ran: the launch is refused, or the kernel holds what the emulator does not know.
    throw Failure(fault.line() > 0 ? Status::invalid_ptx : Status::invalid_configuration,
                  "kernel " + short_name(kernel.name) + ": " + fault.what());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  conclude(kernel, config, report, seconds.count());
}

void Session::conclude(const Kernel& kernel, const emulator::LaunchConfig& config,
                       const emulator::Report& report, double seconds) {
  if (!report.output.empty()) {
    std::fwrite(report.output.data(), 1, report.output.size(), stdout);
  }
  append_report("{\"name\": \"" + short_name(kernel.name) + "\", \"grid\": " + text(config.grid) +
                ", \"block\": " + text(config.block) + ", \"cluster\": " + text(config.cluster) +
                ", \"dynamic_shared_bytes\": " + std::to_string(config.dynamic_shared_bytes) +
                ", \"ctas\": " + std::to_string(report.ctas) + ", \"seconds\": " +
                std::to_string(seconds) + ", \"report\": " + report.json() + "}");
  say_findings(short_name(kernel.name), report);
  if (!report.ok() && settings_.stop_at_first) {
    std::fflush(nullptr);
    stop_process("the program is stopped at its first launch with a finding.");
  }
  if (report.stopped_by != emulator::FaultKind::none) sticky_ = status_of(report);
}

// A few of each kind; kernels that do one thing wrong do it on many lines.
void Session::say_findings(const std::string& kernel, const emulator::Report& report) const {
  constexpr int of_a_kind = 3;
  std::map<emulator::FaultKind, int> said;
  std::uint64_t more = report.faults_not_listed;
  for (const emulator::Fault& fault : report.faults) {
    const bool last = &fault == &report.faults.back();
    if (++said[fault.kind] > of_a_kind && !(last && fault.kind == report.stopped_by)) {
      ++more;
      continue;
    }
    say(kernel + ": " + fault.text());
  }
  if (more != 0) say(kernel + ": and " + std::to_string(more) + " more findings.");
}

int Session::resident_ctas(Kernel& kernel, int threads, std::size_t dynamic_shared_bytes) {
  const emulator::KernelInfo& info = *prepared(kernel).info;
  if (threads <= 0 || threads > 1024) return 0;
  if (info.max_threads != 0 && static_cast<std::uint32_t>(threads) > info.max_threads) return 0;
  const std::size_t shared = info.static_shared_bytes + dynamic_shared_bytes;
  if (shared > chip().shared_bytes_per_cta) return 0;
  const std::uint32_t warps = (static_cast<std::uint32_t>(threads) + 31) / 32;
  const std::size_t by_shared = kSharedBytesPerSm / (shared + kSystemSharedBytes);
  return static_cast<int>(
      std::min<std::size_t>({kThreadsPerSm / (warps * 32), by_shared, kCtasPerSm}));
}

void Session::append_report(const std::string& line) const {
  if (settings_.report.empty()) return;
  const int file = open(settings_.report.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file < 0) return;
  const std::string whole = line + "\n";
  std::size_t done = 0;
  while (done < whole.size()) {
    const ssize_t written = write(file, whole.data() + done, whole.size() - done);
    if (written <= 0) break;
    done += static_cast<std::size_t>(written);
  }
  close(file);
}

}  // namespace fovea::cuda_shim
