// Files as the program needs them: read whole, written whole or not at all.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

namespace fovea::tools {

// The bytes of a file, shared by the arrays that lie in them.
class FileBytes {
 public:
  // Reads a regular file or, to its end, a pipe. Throws Error.
  explicit FileBytes(const std::string& path);

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;  // from malloc, so that it can grow without being zeroed
  std::size_t size_ = 0;
};

// A file to be written. The constructor finds out whether that will work, before anything is
// computed, and leaves no trace; write() puts the bytes into a temporary file beside the target and
// commit() renames it, so that the target is the old file or the new one and never half of it. What
// is not a regular file (a pipe, /dev/null) is written directly.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::initializer_list<std::span<const std::byte>> parts);
  void commit();

 private:
  int open_temporary();

  std::string path_;    // as given, for messages
  std::string target_;  // symbolic links followed
  std::string temporary_;
  bool direct_ = false;
};

}  // namespace fovea::tools
