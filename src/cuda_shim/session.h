// The emulated GPU of this process: one machine, the device code that the program registered, and
// what both libraries (the runtime's and the driver's replacement) need of them.
//
// Work is done when it is asked for, so that streams are in order by themselves. Findings of the
// checker go to standard error as soon as their launch ends.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_shim/settings.h"
#include "cuda_shim/status.h"
#include "emulator/emulator.h"

namespace fovea::cuda_shim {

// Device code as the program gave it; text is chosen and parsed when it is first needed.
class Image {
 public:
  // A fat binary, PTX text or a file's bytes that are either. The memory has to stay until then.
  explicit Image(const void* data) : data_(data) {}
  // Throws Failure.
  const emulator::Module& module(const std::string& arch);

 private:
  const void* data_;
  std::optional<emulator::Module> module_;
};

struct Kernel {
  Image* image = nullptr;
  std::string name;
  std::optional<emulator::KernelInfo> info;    // once prepared
  std::uint32_t max_dynamic_shared_bytes = 0;  // 0: what every kernel may have without asking
  bool non_portable_cluster = false;
};

struct Variable {
  Image* image = nullptr;
  std::string name;
  std::size_t bytes = 0;
};

enum class Direction : int { host_to_host, host_to_device, device_to_host, device_to_device, any };

// Memory of the host that kernels see at the same address: pinned and managed.
struct HostMemory {
  std::size_t bytes = 0;
  bool managed = false;
  bool registered = false;  // the program's own
};

class Session {
 public:
  // Made at the first call; its settings come from the environment. Never destroyed: programs call
  // the runtime from destructors of their own.
  static Session& get();

  std::recursive_mutex& mutex() { return mutex_; }
  const Settings& settings() const { return settings_; }
  const emulator::Chip& chip() const;
  const std::string& arch() const { return chip().arch; }
  int capability() const { return capability_; }  // 90, 100, 103

  // ---- memory
  std::uint64_t allocate(std::size_t bytes);
  void free(std::uint64_t address);
  void* allocate_host(std::size_t bytes, bool managed);
  void free_host(void* memory);
  void register_host(void* memory, std::size_t bytes);
  void unregister_host(void* memory);
  // Null for memory that is not the session's.
  const HostMemory* host_memory(std::uint64_t address) const;
  emulator::Machine::Range allocation(std::uint64_t address) const;
  std::size_t used_bytes() const { return used_bytes_; }
  void copy(void* target, const void* source, std::size_t bytes, Direction direction);
  void fill(void* target, int byte, std::size_t bytes);
  // Repeats a pattern of 1, 2 or 4 bytes.
  void fill_pattern(void* target, std::uint32_t pattern, std::size_t pattern_bytes,
                    std::size_t count);

  // ---- device code
  Image* add_image(const void* data);
  void remove_image(Image* image);
  Kernel* add_kernel(Image* image, std::string name, const void* host_function);
  void add_variable(Image* image, std::string name, std::size_t bytes, const void* host_variable);
  // By the host's function or by the handle that kernel() gave out; throws Failure.
  Kernel& kernel(const void* function);
  Kernel* kernel_of(Image* image, const std::string& name);
  // With `info` filled in.
  Kernel& prepared(Kernel& kernel);
  const Variable& variable(const void* host_variable) const;
  std::uint64_t address_of(const Variable& variable);

  // ---- launches
  void launch(Kernel& kernel, const emulator::LaunchConfig& config, void** arguments, void** extra);
  // CTAs of the kernel that fit an SM, by threads and shared memory. Registers are not known: they
  // are the assembler's.
  int resident_ctas(Kernel& kernel, int threads, std::size_t dynamic_shared_bytes);
  std::uint32_t dynamic_shared_limit(Kernel& kernel);

  // Status of a launch that ended the context; all further calls return it.
  Status sticky() const { return sticky_; }
  void reset() { sticky_ = Status::success; }

  // Says once that the program carries the vendor's runtime inside, which needs the real driver.
  void refuse_static_runtime();

  // One line on standard error.
  void say(const std::string& sentence) const;

 private:
  explicit Session(Settings settings);
  std::uint8_t* host_view(const void* address, std::size_t bytes, bool* on_device) const;
  std::vector<std::byte> pack(Kernel& kernel, void** arguments, void** extra) const;
  void check_launch(Kernel& kernel, const emulator::LaunchConfig& config);
  void conclude(const Kernel& kernel, const emulator::LaunchConfig& config,
                const emulator::Report& report, double seconds);
  void say_findings(const std::string& kernel, const emulator::Report& report) const;
  void append_report(const std::string& line) const;

  std::recursive_mutex mutex_;
  Settings settings_;
  emulator::Machine machine_;
  int capability_ = 0;
  std::size_t used_bytes_ = 0;
  std::map<std::uint64_t, HostMemory> host_memory_;
  std::uint64_t next_host_address_;
  std::map<Image*, std::unique_ptr<Image>> images_;
  std::unordered_map<const void*, std::unique_ptr<Kernel>> kernels_;  // by their own address
  std::unordered_map<const void*, Kernel*> by_host_function_;
  std::unordered_map<const void*, Variable> variables_;
  Status sticky_ = Status::success;
  bool refused_static_runtime_ = false;
};

// Runs `action` under the session's lock and turns what it throws into a status; says why.
template <typename Action>
Status guarded(Action action) noexcept {
  try {
    Session& session = Session::get();
    const std::lock_guard lock(session.mutex());
    if (session.sticky() != Status::success) return session.sticky();
    try {
      action(session);
      return Status::success;
    } catch (const Failure& failure) {
      session.say(failure.what());
      return failure.status;
    } catch (const Quiet& quiet) {
      return quiet.status;
    } catch (const std::bad_alloc&) {
      return Status::out_of_memory;
    } catch (const std::exception& fault) {
      session.say(fault.what());
      return Status::invalid_value;
    }
  } catch (...) {
    return Status::not_initialized;
  }
}

}  // namespace fovea::cuda_shim
