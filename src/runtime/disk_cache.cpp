#include "runtime/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "fovea/fovea.hpp"
#include "runtime/sha256.h"

namespace fovea::runtime {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view magic = "fovea kernel 1\n";
constexpr std::string_view suffix = ".kernel";
constexpr std::string_view partial_suffix = ".partial";
constexpr std::size_t digest_digits = 64;

// A writer that has not renamed its file after an hour is gone.
constexpr auto partial_lifetime = std::chrono::hours(1);

class File {
 public:
  File(const fs::path& path, int flags)
      : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(descriptor, bytes.data(), bytes.size());
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

std::optional<std::string> read_all(int descriptor) {
  struct stat status {};
  if (fstat(descriptor, &status) != 0) return std::nullopt;
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t count = read(descriptor, bytes.data() + filled, bytes.size() - filled);
    if (count <= 0) return std::nullopt;
    filled += static_cast<std::size_t>(count);
  }
  return bytes;
}

std::string digest(std::string_view bytes) {
  Sha256 hash;
  hash.add(bytes);
  return hash.hex();
}

// File: magic, digest of the rest, then the key, the image's size in 16 hexadecimal digits, the
// image, the log.
std::string encode(const std::string& key, const DiskCache::Entry& entry) {
  std::string size(16, '0');
  char digits[16];
  const auto end = std::to_chars(digits, digits + 16, entry.image.size(), 16).ptr;
  std::copy_backward(digits, end, size.end());
  std::string body = key + size + entry.image + entry.log;
  return std::string(magic) + digest(body) + body;
}

std::optional<DiskCache::Entry> decode(const std::string& key, std::string_view file) {
  const std::size_t head = magic.size() + digest_digits;
  if (file.size() < head + key.size() + 16 || !file.starts_with(magic)) return std::nullopt;
  const std::string_view body = file.substr(head);
  if (digest(body) != file.substr(magic.size(), digest_digits)) return std::nullopt;
  if (!body.starts_with(key)) return std::nullopt;
  std::size_t image_size = 0;
  const char* size = body.data() + key.size();
  std::from_chars(size, size + 16, image_size, 16);
  const std::string_view rest = body.substr(key.size() + 16);
  if (image_size > rest.size()) return std::nullopt;
  return DiskCache::Entry{std::string(rest.substr(0, image_size)),
                          std::string(rest.substr(image_size))};
}

// The newest file of this key, whichever compiler made it.
fs::path newest_of(const fs::path& folder, const std::string& key) {
  fs::path newest;
  fs::file_time_type newest_time{};
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(key + "-") || !name.ends_with(suffix)) continue;
    const auto time = entry.last_write_time(error);
    if (newest.empty() || time > newest_time) {
      newest = entry.path();
      newest_time = time;
    }
  }
  return newest;
}

}  // namespace

DiskCache::DiskCache(fs::path folder, std::uint64_t limit_bytes)
    : folder_(std::move(folder)), limit_bytes_(limit_bytes) {}

std::optional<DiskCache::Entry> DiskCache::load(const std::string& key,
                                                const std::string& compiler) const {
  if (folder_.empty()) return std::nullopt;
  const fs::path path = compiler.empty() ? newest_of(folder_, key)
                                         : folder_ / (key + "-" + compiler + std::string(suffix));
  const File file(path, O_RDONLY);
  if (!file.is_open()) return std::nullopt;
  const std::optional<std::string> bytes = read_all(file.descriptor());
  std::optional<Entry> entry = bytes ? decode(key, *bytes) : std::nullopt;
  if (entry) {
    futimens(file.descriptor(), nullptr);  // used now: trim() removes it last
  } else {
    std::error_code ignored;
    fs::remove(path, ignored);
  }
  return entry;
}

bool DiskCache::store(const std::string& key, const std::string& compiler,
                      const Entry& entry) const {
  if (folder_.empty()) return false;
  std::error_code error;
  fs::create_directories(folder_, error);
  static std::atomic<unsigned> serial{0};
  const std::string name = key + "-" + compiler;
  const fs::path partial = folder_ / (name + "." + std::to_string(getpid()) + "." +
                                      std::to_string(serial++) + std::string(partial_suffix));
  bool written = false;
  {
    const File file(partial, O_WRONLY | O_CREAT | O_EXCL);
    // Without fsync a crash of the machine could leave the new name with the old length.
    written = file.is_open() && write_all(file.descriptor(), encode(key, entry)) &&
              fsync(file.descriptor()) == 0;
  }
  if (written) {
    fs::rename(partial, folder_ / (name + std::string(suffix)), error);
    written = !error;
  }
  if (!written) fs::remove(partial, error);
  trim();
  return written;
}

std::uint64_t DiskCache::trim() const {
  struct Found {
    fs::path path;
    fs::file_time_type time;
    std::uint64_t bytes;
  };
  std::vector<Found> found;
  std::uint64_t total = 0;
  std::error_code error;
  const auto now = fs::file_time_type::clock::now();
  for (const auto& item : fs::directory_iterator(folder_, error)) {
    const std::string name = item.path().filename().string();
    const auto time = item.last_write_time(error);
    if (error) continue;  // another process has just removed it
    if (name.ends_with(partial_suffix) && now - time > partial_lifetime) {
      fs::remove(item.path(), error);
    } else if (name.ends_with(suffix)) {
      const std::uint64_t bytes = item.file_size(error);
      if (error) continue;
      found.push_back({item.path(), time, bytes});
      total += bytes;
    }
  }
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return a.time < b.time; });
  for (const Found& file : found) {
    if (total <= limit_bytes_) break;
    fs::remove(file.path, error);
    total -= file.bytes;
  }
  return total;
}

fs::path default_cache_folder() {
  const auto get = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  if (const std::string folder = get("FOVEA_CACHE_DIR"); !folder.empty()) {
    return folder == "off" ? fs::path() : fs::path(folder);
  }
  if (const std::string cache = get("XDG_CACHE_HOME"); !cache.empty()) {
    return fs::path(cache) / "fovea";
  }
  if (const std::string home = get("HOME"); !home.empty()) {
    return fs::path(home) / ".cache" / "fovea";
  }
  return {};
}

std::uint64_t default_cache_limit_bytes() {
  constexpr std::uint64_t megabyte = 1'000'000;
  const char* value = std::getenv("FOVEA_CACHE_MB");
  if (value == nullptr || *value == '\0') return 512 * megabyte;
  std::uint64_t megabytes = 0;
  const char* end = value + std::strlen(value);
  const auto parsed = std::from_chars(value, end, megabytes);
  if (parsed.ec != std::errc() || parsed.ptr != end || megabytes == 0 ||
      megabytes > 1'000'000'000) {
    throw Error("FOVEA_CACHE_MB is '" + std::string(value) +
                "', but must be a number of megabytes from 1 to 1000000000");
  }
  return megabytes * megabyte;
}

}  // namespace fovea::runtime
