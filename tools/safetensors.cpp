#include "tools/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fovea/fovea.hpp"
#include "tools/text.h"

namespace fovea::tools {
namespace {

using Json = nlohmann::json;

constexpr std::size_t prefix_bytes = 8;
constexpr std::uint64_t max_header_bytes = 100'000'000;  // the format's own limit
constexpr int max_depth = 3;                             // {name: {"shape": [ ... ]}}
constexpr std::size_t name_limit = 40;                   // characters of a name in a message

struct KnownType {
  std::string_view text;
  ElementType type;
  std::size_t size_bytes;
};
constexpr KnownType known_types[] = {
    {"F32", ElementType::f32, 4},      {"F16", ElementType::f16, 2},
    {"BF16", ElementType::bf16, 2},    {"F64", ElementType::f64, 8},
    {"F8_E4M3", ElementType::e4m3, 1}, {"F8_E5M2", ElementType::e5m2, 1},
    {"I64", ElementType::i64, 8},      {"I32", ElementType::i32, 4},
    {"I16", ElementType::other, 2},    {"I8", ElementType::i8, 1},
    {"U64", ElementType::other, 8},    {"U32", ElementType::other, 4},
    {"U16", ElementType::other, 2},    {"U8", ElementType::u8, 1},
    {"BOOL", ElementType::boolean, 1}, {"C64", ElementType::other, 8},
};

std::string in_quotes(std::string_view name) { return "'" + printable(name, name_limit) + "'"; }

// Refuses what a DOM would hide (a name given twice: the last would win) or make expensive (depth).
class HeaderGuard {
 public:
  bool operator()(int depth, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) {
      if (depth >= max_depth) throw Error("has a header that nests deeper than the format does");
    }
    if (event == Json::parse_event_t::object_start) keys_.emplace_back();
    if (event == Json::parse_event_t::object_end && !keys_.empty()) keys_.pop_back();
    if (event == Json::parse_event_t::key && !keys_.empty()) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) {
        throw Error(fmt::format("has {} twice in its header", in_quotes(key)));
      }
    }
    return true;
  }

 private:
  std::vector<std::set<std::string>> keys_;
};

Json parse_header(std::string_view text) {
  HeaderGuard guard;
  try {
    Json header = Json::parse(text.begin(), text.end(), std::ref(guard));
    if (!header.is_object()) throw Error("has a header that is not a JSON object");
    return header;
  } catch (const Json::parse_error& error) {
    throw Error(
        fmt::format("has a header that is not valid JSON (byte {}); is it a .safetensors "
                    "file?",
                    prefix_bytes + error.byte));
  } catch (const Json::exception&) {
    throw Error("has a header that is not valid JSON; is it a .safetensors file?");
  }
}

// A list of non-negative integers, such as a shape.
std::vector<std::int64_t> integers(const Json& entry, const char* key, const std::string& tensor) {
  const auto found = entry.find(key);
  if (found == entry.end() || !found->is_array()) {
    throw Error(fmt::format("has no list '{}' for tensor {}", key, in_quotes(tensor)));
  }
  std::vector<std::int64_t> values;
  for (const Json& value : *found) {
    const bool fits = value.is_number_unsigned() &&
                      value.get<std::uint64_t>() <=
                          static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (!fits) {
      throw Error(
          fmt::format("has an entry of '{}' of tensor {} that is not an integer from 0 to "
                      "2^63 - 1",
                      key, in_quotes(tensor)));
    }
    values.push_back(value.get<std::int64_t>());
  }
  return values;
}

struct Extent {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::string name;
};

Array parse_tensor(const std::string& tensor, const Json& entry, std::span<const std::byte> data,
                   std::vector<Extent>& extents) {
  if (!entry.is_object())
    throw Error(fmt::format("describes tensor {} by no object", in_quotes(tensor)));
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) {
    throw Error(fmt::format("has no string 'dtype' for tensor {}", in_quotes(tensor)));
  }
  Array array;
  std::size_t element_bytes = 0;
  for (const KnownType& known : known_types) {
    if (dtype->get_ref<const std::string&>() != known.text) continue;
    array.type = known.type;
    element_bytes = known.size_bytes;
  }
  array.shape = integers(entry, "shape", tensor);
  const std::vector<std::int64_t> offsets = integers(entry, "data_offsets", tensor);
  if (offsets.size() != 2 || offsets[0] > offsets[1] ||
      static_cast<std::uint64_t>(offsets[1]) > data.size()) {
    throw Error(
        fmt::format("is truncated or damaged: the data_offsets {} of tensor {} do not lie "
                    "within the file's {} bytes of data",
                    printable(shape_text(offsets), 80), in_quotes(tensor), data.size()));
  }
  const std::int64_t elements =
      checked_elements(array.shape, std::max<std::size_t>(element_bytes, 1));
  if (elements < 0) {
    throw Error(fmt::format("has tensor {} of shape {}, more than 64-bit sizes can hold",
                            in_quotes(tensor), printable(shape_text(array.shape), 80)));
  }
  const auto found = static_cast<std::uint64_t>(offsets[1] - offsets[0]);
  // A type that this reader does not know has a size that it does not know either.
  const std::uint64_t expected = static_cast<std::uint64_t>(elements) * element_bytes;
  if (element_bytes != 0 && found != expected) {
    throw Error(
        fmt::format("is damaged: tensor {} of shape {} and dtype {} needs {} bytes, its "
                    "data_offsets span {}",
                    in_quotes(tensor), printable(shape_text(array.shape), 80),
                    dtype->get_ref<const std::string&>(), expected, found));
  }
  array.bytes = data.subspan(static_cast<std::size_t>(offsets[0]), static_cast<std::size_t>(found));
  if (found > 0) extents.push_back({offsets[0], offsets[1], tensor});
  return array;
}

std::map<std::string, std::string> parse_metadata(const Json& entry) {
  std::map<std::string, std::string> metadata;
  if (!entry.is_object()) throw Error("has a '__metadata__' that is not an object of strings");
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) throw Error("has a '__metadata__' that is not an object of strings");
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

}  // namespace

Safetensors parse_safetensors(std::span<const std::byte> file) {
  if (file.size() < prefix_bytes) {
    throw Error(
        fmt::format("is truncated: it has {} bytes, a .safetensors file at least 8", file.size()));
  }
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < prefix_bytes; ++i) {
    header_bytes |= static_cast<std::uint64_t>(file[i]) << (8 * i);
  }
  if (header_bytes > max_header_bytes || header_bytes > file.size() - prefix_bytes) {
    throw Error(
        fmt::format("is truncated or not a .safetensors file: it announces a header of {} "
                    "bytes, {} follow and {} are the limit",
                    header_bytes, file.size() - prefix_bytes, max_header_bytes));
  }
  const auto header_size = static_cast<std::size_t>(header_bytes);
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + prefix_bytes,
                              header_size);
  const std::span<const std::byte> data = file.subspan(prefix_bytes + header_size);

  const Json header = parse_header(text);
  Safetensors result;
  std::vector<Extent> extents;
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") {
      result.metadata = parse_metadata(entry);
    } else {
      result.tensors[key] = parse_tensor(key, entry, data, extents);
    }
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin < extents[i - 1].end) {
      throw Error(fmt::format("is damaged: the bytes of tensors {} and {} overlap",
                              in_quotes(extents[i - 1].name), in_quotes(extents[i].name)));
    }
  }
  return result;
}

}  // namespace fovea::tools
