// Shared by the tests of run-time compilation and of devices.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/device.h"
#include "runtime/jit.h"

namespace fovea::tests {

// A folder of its own under the system's temporary one, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Sets an environment variable while it lives; nullptr unsets it.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value);
  ~ScopedEnvironment();
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  std::string name_;
  std::string old_;
  bool was_set_;
};

// The devices to test on: FOVEA_TEST_DEVICES, names separated by commas; the emulated chips when
// unset.
std::vector<std::string> test_devices();

// Compiles text, which defines the kernel fovea_kernel, for the device and loads it.
std::shared_ptr<runtime::Kernel> build_kernel(runtime::Device& device, const std::string& text);

}  // namespace fovea::tests
