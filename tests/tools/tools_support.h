// Files as bytes, for the tests of the readers and of the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/array.h"

namespace fovea::test {

using Bytes = std::vector<std::byte>;

[[nodiscard]] Bytes to_bytes(std::string_view text);

template <typename Value>
Bytes bytes_of_values(const std::vector<Value>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// A .npy file of the given version, with a header as numpy writes it.
[[nodiscard]] Bytes npy_file(std::string_view descr, std::string_view shape, const Bytes& elements,
                             int version = 1, std::string_view fortran_order = "False");
// ... with any text as the header.
[[nodiscard]] Bytes npy_file_with_header(std::string_view header, const Bytes& elements,
                                         int version = 1);

// A .safetensors file of the given header and data.
[[nodiscard]] Bytes safetensors_file(std::string_view header, const Bytes& data);

// One with fp32 tensors q, k and v of shape (1, rows, 2, 4), filled with small numbers.
[[nodiscard]] Bytes small_problem_file(std::int64_t rows);

void write_file(const std::filesystem::path& path, const Bytes& bytes);
[[nodiscard]] Bytes read_file(const std::filesystem::path& path);

// The message of the Error that `call` throws; empty when it throws none.
[[nodiscard]] std::string error_of(const std::function<void()>& call);

// A directory of its own that goes with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  [[nodiscard]] std::string path(const std::string& name) const { return (path_ / name).string(); }
  // Names of what lies in it, sorted.
  [[nodiscard]] std::vector<std::string> entries() const;

 private:
  std::filesystem::path path_;
};

}  // namespace fovea::test
