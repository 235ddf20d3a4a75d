#include "tools/npy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "fovea/fovea.hpp"
#include "tools/text.h"

namespace fovea::tools {
namespace {

constexpr std::string_view magic = "\x93NUMPY";
constexpr std::size_t max_rank = 32;  // numpy's own limit before version 2

struct Descriptor {
  std::string_view text;
  ElementType type;
};
// Types of one byte carry '|', but '<' and '=' are seen too, and so is '|' before V2.
constexpr std::array<Descriptor, 9> descriptors = {{{"f4", ElementType::f32},
                                                    {"f2", ElementType::f16},
                                                    {"V2", ElementType::bf16},
                                                    {"f8", ElementType::f64},
                                                    {"i4", ElementType::i32},
                                                    {"i8", ElementType::i64},
                                                    {"u1", ElementType::u8},
                                                    {"b1", ElementType::boolean},
                                                    {"?", ElementType::boolean}}};

// Reads the header's dictionary: string keys, and values that are a string, True, False or a tuple
// of integers. Nothing else stands in the header of a plain array.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  struct Header {
    std::optional<std::string> descr;
    std::optional<bool> fortran_order;
    std::optional<std::vector<std::int64_t>> shape;
  };

  Header parse() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr" && !header.descr) {
        header.descr = descr();
      } else if (key == "fortran_order" && !header.fortran_order) {
        header.fortran_order = boolean();
      } else if (key == "shape" && !header.shape) {
        header.shape = tuple();
      } else {
        fail();
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (position_ != text_.size()) fail();
    return header;
  }

 private:
  [[noreturn]] void fail() const {
    throw Error(fmt::format(
        "is not a .npy file that numpy would write: its header is malformed at byte {}; write it "
        "with numpy.save",
        position_));
  }

  void skip_space() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n')) {
      ++position_;
    }
  }

  bool accept(char wanted) {
    skip_space();
    if (position_ >= text_.size() || text_[position_] != wanted) return false;
    ++position_;
    return true;
  }

  void expect(char wanted) {
    if (!accept(wanted)) fail();
  }

  bool accept_word(std::string_view word) {
    skip_space();
    if (text_.substr(position_, word.size()) != word) return false;
    position_ += word.size();
    return true;
  }

  std::string string() {
    skip_space();
    if (position_ >= text_.size()) fail();
    const char quote = text_[position_];
    if (quote != '\'' && quote != '"') fail();
    const std::size_t end = text_.find(quote, position_ + 1);
    if (end == std::string_view::npos) fail();
    std::string value(text_.substr(position_ + 1, end - position_ - 1));
    position_ = end + 1;
    return value;
  }

  std::string descr() {
    if (accept('[')) {
      throw Error(
          "holds records (a structured dtype); an array of float32, float16 or bfloat16 is "
          "needed");
    }
    return string();
  }

  bool boolean() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    fail();
  }

  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> values;
    expect('(');
    while (!accept(')')) {
      if (values.size() == max_rank) fail();
      values.push_back(integer());
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

  std::int64_t integer() {
    skip_space();
    const std::size_t begin = position_;
    constexpr std::int64_t limit = std::numeric_limits<std::int64_t>::max();
    std::int64_t value = 0;
    while (position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9') {
      const std::int64_t digit = text_[position_] - '0';
      if (value > (limit - digit) / 10) {
        throw Error("has a shape that does not fit 64 bits; its header is damaged");
      }
      value = value * 10 + digit;
      ++position_;
    }
    if (position_ == begin) fail();
    return value;
  }

  std::string_view text_;
  std::size_t position_ = 0;
};

ElementType element_type(const std::string& descr) {
  if (descr.size() >= 2) {
    const char order = descr.front();
    const std::string_view rest = std::string_view(descr).substr(1);
    for (const Descriptor& known : descriptors) {
      if (rest != known.text) continue;
      if (order == '<' || order == '=' || order == '|') return known.type;
      if (order == '>' && size_bytes(known.type) == 1) return known.type;
      if (order == '>') {
        throw Error(
            fmt::format("is big-endian (dtype '{}'); little-endian is needed: array.astype('<{}')",
                        descr, known.text));
      }
    }
  }
  throw Error(
      fmt::format("has dtype '{}'; '<f4', '<f2' or '<V2' (bfloat16) is needed, or '<i4' "
                  "where integers are",
                  printable(descr, 24)));
}

// The header's text and the offset of the elements.
std::pair<std::string_view, std::size_t> header_of(std::string_view text) {
  if (text.substr(0, magic.size()) != magic) {
    throw Error("is not a .npy file: it does not start with \\x93NUMPY");
  }
  const auto byte_at = [&](std::size_t i) {
    if (i >= text.size()) throw Error("is truncated within its header");
    return static_cast<std::size_t>(static_cast<unsigned char>(text[i]));
  };
  const std::size_t major = byte_at(magic.size());
  if (major < 1 || major > 3) {
    throw Error(fmt::format("is of .npy version {}; 1, 2 and 3 can be read", major));
  }
  const std::size_t length_at = magic.size() + 2;
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  std::size_t length = 0;
  for (std::size_t i = 0; i < length_bytes; ++i) length |= byte_at(length_at + i) << (8 * i);
  const std::size_t begin = length_at + length_bytes;
  if (length > text.size() - begin) {
    throw Error(fmt::format("is truncated: its header has {} bytes, of which {} are there", length,
                            text.size() - begin));
  }
  return {text.substr(begin, length), begin + length};
}

}  // namespace

Array parse_npy(std::span<const std::byte> file) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  const auto [header_text, data_begin] = header_of(text);
  const HeaderParser::Header header = HeaderParser(header_text).parse();
  if (!header.descr || !header.fortran_order || !header.shape) {
    throw Error(
        "lacks one of 'descr', 'fortran_order' and 'shape' in its header; write it with "
        "numpy.save");
  }
  Array array;
  array.type = element_type(*header.descr);
  array.shape = *header.shape;
  const std::int64_t elements = checked_elements(array.shape, size_bytes(array.type));
  if (elements < 0) {
    throw Error(fmt::format("has shape {}, more than 64-bit sizes can hold; its header is damaged",
                            shape_text(array.shape)));
  }
  // An array of at most one row or column has the same bytes in both orders.
  const auto longer = std::count_if(array.shape.begin(), array.shape.end(),
                                    [](std::int64_t extent) { return extent > 1; });
  if (*header.fortran_order && longer > 1 && elements > 0) {
    throw Error("is in Fortran order; C order is needed: numpy.ascontiguousarray(array)");
  }
  const std::size_t expected = static_cast<std::size_t>(elements) * size_bytes(array.type);
  const std::size_t found = file.size() - data_begin;
  if (found != expected) {
    throw Error(fmt::format("{}: shape {} of {} needs {} bytes, {} are there",
                            found < expected ? "is truncated" : "has bytes behind the array",
                            shape_text(array.shape), name(array.type), expected, found));
  }
  array.bytes = file.subspan(data_begin);
  return array;
}

std::string npy_header(ElementType type, std::span<const std::int64_t> shape) {
  const auto* known = std::find_if(descriptors.begin(), descriptors.end(),
                                   [&](const Descriptor& d) { return d.type == type; });
  if (known == descriptors.end()) {
    throw Error(
        fmt::format("{} cannot be written to a .npy file; f32, f16 or bf16 can", name(type)));
  }
  const char order = size_bytes(type) == 1 ? '|' : '<';
  std::string header = fmt::format("{{'descr': '{}{}', 'fortran_order': False, 'shape': {}, }}",
                                   order, known->text, shape_text(shape));
  const std::size_t prefix = magic.size() + 4;
  header.append(63 - (prefix + header.size()) % 64, ' ');
  header.push_back('\n');
  std::string out(magic);
  out.push_back('\x01');
  out.push_back('\x00');
  out.push_back(static_cast<char>(header.size() & 0xffu));
  out.push_back(static_cast<char>(header.size() >> 8));
  return out + header;
}

}  // namespace fovea::tools
