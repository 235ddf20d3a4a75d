#include "tests/jit/jit_support.h"

#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "runtime/source.h"

namespace fovea::tests {

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "fovea-test-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder: " + name);
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ScopedEnvironment::ScopedEnvironment(const char* name, const char* value) : name_(name) {
  const char* old = std::getenv(name);
  was_set_ = old != nullptr;
  if (was_set_) old_ = old;
  if (value != nullptr) {
    setenv(name, value, 1);
  } else {
    unsetenv(name);
  }
}

ScopedEnvironment::~ScopedEnvironment() {
  if (was_set_) {
    setenv(name_.c_str(), old_.c_str(), 1);
  } else {
    unsetenv(name_.c_str());
  }
}

std::vector<std::string> test_devices() {
  const char* value = std::getenv("FOVEA_TEST_DEVICES");
  std::istringstream list(value != nullptr ? value : "emulated:sm_90a,emulated:sm_100a");
  std::vector<std::string> names;
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

std::shared_ptr<runtime::Kernel> build_kernel(runtime::Device& device, const std::string& text) {
  return runtime::load_kernel(device, runtime::default_jit(), text);
}

}  // namespace fovea::tests
