#include "tests/tools/tools_support.h"

#include <fmt/format.h>
#include <stdlib.h>  // NOLINT: mkdtemp() is POSIX's

#include <algorithm>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "fovea/fovea.hpp"

namespace fovea::test {
namespace {

void append_little_endian(Bytes& bytes, std::uint64_t value, int count) {
  for (int i = 0; i < count; ++i) bytes.push_back(static_cast<std::byte>(value >> (8 * i)));
}

void append(Bytes& bytes, const Bytes& more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

}  // namespace

Bytes to_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Bytes npy_file_with_header(std::string_view header, const Bytes& elements, int version) {
  Bytes file = to_bytes("\x93NUMPY");
  file.push_back(static_cast<std::byte>(version));
  file.push_back(std::byte{0});
  append_little_endian(file, header.size(), version == 1 ? 2 : 4);
  append(file, to_bytes(header));
  append(file, elements);
  return file;
}

Bytes npy_file(std::string_view descr, std::string_view shape, const Bytes& elements, int version,
               std::string_view fortran_order) {
  return npy_file_with_header(fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}\n",
                                          descr, fortran_order, shape),
                              elements, version);
}

Bytes safetensors_file(std::string_view header, const Bytes& data) {
  Bytes file;
  append_little_endian(file, header.size(), 8);
  append(file, to_bytes(header));
  append(file, data);
  return file;
}

Bytes small_problem_file(std::int64_t rows) {
  const std::int64_t count = rows * 2 * 4;
  std::vector<float> values;
  for (std::int64_t i = 0; i < 3 * count; ++i) {
    values.push_back(static_cast<float>(i % 7) * 0.25f - 0.75f);
  }
  std::string header;
  for (int i = 0; i < 3; ++i) {
    header += fmt::format(
        "{}\"{}\":{{\"dtype\":\"F32\",\"shape\":[1,{},2,4],"
        "\"data_offsets\":[{},{}]}}",
        i == 0 ? "{" : ",", "qkv"[i], rows, i * count * 4, (i + 1) * count * 4);
  }
  return safetensors_file(header + "}", bytes_of_values(values));
}

void write_file(const std::filesystem::path& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("cannot write " + path.string());
}

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return to_bytes(text);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "fovea-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryDirectory::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace fovea::test
