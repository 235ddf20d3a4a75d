// Compiled kernels on disk, shared by all processes of a user.
//
// An entry is one file, <key>-<compiler>.kernel, written under another name and renamed when it is
// complete, so that a reader sees all of it or nothing. It carries its key and a checksum; a file
// that does not match them is removed and counts as absent. When the files together exceed the
// limit, those that have gone unused longest are removed. A folder that cannot be read or written
// is no error: the cache is then empty.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace fovea::runtime {

class DiskCache {
 public:
  // An empty folder name switches the cache off.
  DiskCache(std::filesystem::path folder, std::uint64_t limit_bytes);

  struct Entry {
    std::string image;
    std::string log;
  };
  // Both parts of the name are hexadecimal digits. With an empty `compiler`, the newest entry of
  // the key made by any compiler.
  std::optional<Entry> load(const std::string& key, const std::string& compiler) const;

  // False when the entry could not be written.
  bool store(const std::string& key, const std::string& compiler, const Entry& entry) const;

  // Total of the entries. Removes the oldest until they fit into the limit, and what writers that
  // died have left behind.
  std::uint64_t trim() const;

  const std::filesystem::path& folder() const { return folder_; }
  std::uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  std::filesystem::path folder_;
  std::uint64_t limit_bytes_;
};

// FOVEA_CACHE_DIR, else XDG_CACHE_HOME/fovea, else HOME/.cache/fovea; empty (no cache) when none of
// them is set or FOVEA_CACHE_DIR is "off".
std::filesystem::path default_cache_folder();

// FOVEA_CACHE_MB, else 512 MB. Throws Error when the variable is no positive number.
std::uint64_t default_cache_limit_bytes();

}  // namespace fovea::runtime
