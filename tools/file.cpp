#include "tools/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>

#include "fovea/fovea.hpp"
#include "tools/text.h"

namespace fovea::tools {
namespace {

constexpr std::size_t first_pipe_bytes = std::size_t{1} << 16;
constexpr std::size_t max_path_shown = 200;

// Closes a descriptor when an Error leaves the scope.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return value_; }
  [[nodiscard]] int release() {
    const int value = value_;
    value_ = -1;
    return value;
  }

 private:
  int value_;
};

std::string reason() { return std::generic_category().message(errno); }

std::string shown(const std::string& path) { return one_line(path.substr(0, max_path_shown)); }

[[noreturn]] void fail_to_write(const std::string& path, const std::string& why) {
  throw Error(
      fmt::format("cannot write {}: {}; give a path in a writable directory", shown(path), why));
}

void write_all(int descriptor, std::span<const std::byte> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_to_write(path, reason());
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

}  // namespace

void FileBytes::Free::operator()(std::byte* data) const { std::free(data); }

FileBytes::FileBytes(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    throw Error(fmt::format("cannot read {}: {}", shown(path), reason()));
  }
  if (S_ISDIR(status.st_mode)) {
    throw Error(fmt::format("cannot read {}: it is a directory, not a file", shown(path)));
  }
  // One byte more than the file has, so that its end is seen without another allocation.
  std::size_t capacity =
      S_ISREG(status.st_mode) ? static_cast<std::size_t>(status.st_size) + 1 : first_pipe_bytes;
  data_.reset(static_cast<std::byte*>(std::malloc(capacity)));
  while (data_ != nullptr) {
    const ssize_t got = ::read(file.get(), data_.get() + size_, capacity - size_);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(fmt::format("cannot read {}: {}", shown(path), reason()));
    if (got == 0) return;
    size_ += static_cast<std::size_t>(got);
    if (size_ < capacity) continue;
    capacity *= 2;
    auto* const grown = static_cast<std::byte*>(std::realloc(data_.get(), capacity));
    if (grown == nullptr) break;
    static_cast<void>(data_.release());
    data_.reset(grown);
  }
  throw Error(fmt::format("cannot read {}: not enough memory for {} bytes", shown(path), capacity));
}

OutputFile::OutputFile(const std::string& path) : path_(path) {
  std::error_code error;
  target_ = std::filesystem::weakly_canonical(path, error).string();
  if (error || target_.empty()) target_ = path;
  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) fail_to_write(path_, "it is a directory");
    if (::access(target_.c_str(), W_OK) != 0) fail_to_write(path_, reason());
    direct_ = !S_ISREG(status.st_mode);
  }
  if (direct_) return;
  ::close(open_temporary());
  ::unlink(temporary_.c_str());
  temporary_.clear();
}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

int OutputFile::open_temporary() {
  temporary_ = target_ + ".XXXXXX";
  const int descriptor = ::mkstemp(temporary_.data());
  if (descriptor < 0) {
    temporary_.clear();
    fail_to_write(path_, reason());
  }
  return descriptor;
}

void OutputFile::write(std::initializer_list<std::span<const std::byte>> parts) {
  if (direct_) {
    const Descriptor file(::open(target_.c_str(), O_WRONLY | O_CLOEXEC));
    if (file.get() < 0) fail_to_write(path_, reason());
    for (const auto part : parts) write_all(file.get(), part, path_);
    return;
  }
  Descriptor file(open_temporary());
  for (const auto part : parts) write_all(file.get(), part, path_);
  // mkstemp() makes a private file; give it the mode of the one it replaces, or a new file's.
  struct stat status {};
  mode_t mode = 0;
  if (::stat(target_.c_str(), &status) == 0) {
    mode = status.st_mode & 07777u;
  } else {
    const mode_t mask = ::umask(0);
    ::umask(mask);
    mode = 0666u & ~mask;
  }
  ::fchmod(file.get(), mode);
  if (::close(file.release()) != 0) fail_to_write(path_, reason());
}

void OutputFile::commit() {
  if (direct_ || temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail_to_write(path_, reason());
  temporary_.clear();
}

}  // namespace fovea::tools
