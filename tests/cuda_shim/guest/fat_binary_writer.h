// Makes fat binaries as nvcc does, and LZ4 blocks, for the tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace fovea::test {

inline std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string bytes_of_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t at = 0; at + 1 < hex.size();) {
    if (std::isspace(static_cast<unsigned char>(hex[at])) != 0) {
      ++at;
      continue;
    }
    bytes += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
    at += 2;
  }
  return bytes;
}

// Greedy: the latest earlier place with the same four bytes.
inline std::string lz4_block(const std::string& text) {
  std::string block;
  const auto length = [&](std::size_t rest) {
    for (; rest >= 255; rest -= 255) block += '\xff';
    block += static_cast<char>(rest);
  };
  const auto sequence = [&](std::size_t from, std::size_t end, std::size_t back,
                            std::size_t match) {
    const std::size_t literals = end - from, more = match == 0 ? 0 : match - 4;
    block += static_cast<char>(std::min<std::size_t>(literals, 15) << 4 |
                               std::min<std::size_t>(more, 15));
    if (literals >= 15) length(literals - 15);
    block.append(text, from, literals);
    if (match == 0) return;
    block += static_cast<char>(back & 255);
    block += static_cast<char>(back >> 8);
    if (more >= 15) length(more - 15);
  };
  std::map<std::string, std::size_t> seen;
  std::size_t from = 0, at = 0;
  while (at + 12 < text.size()) {  // the format ends every block with literals
    const std::string key = text.substr(at, 4);
    const auto found = seen.find(key);
    const std::size_t earlier = found == seen.end() ? text.size() : found->second;
    seen[key] = at;
    if (earlier == text.size() || at - earlier > 65535) {
      ++at;
      continue;
    }
    std::size_t match = 4;
    while (at + match + 5 < text.size() && text[earlier + match] == text[at + match]) ++match;
    sequence(from, at, at - earlier, match);
    at += match;
    from = at;
  }
  sequence(from, text.size(), 0, 0);
  return block;
}

enum class Packing { plain, lz4, zstd };

struct FatEntryToWrite {
  std::uint16_t kind = 1;  // 1 PTX, 2 machine code
  std::uint32_t arch = 90;
  Packing packing = Packing::plain;
  std::string payload;  // as it is stored
  std::size_t text_bytes = 0;
};

inline std::vector<std::uint64_t> fat_binary(const std::vector<FatEntryToWrite>& entries) {
  std::string body;
  const auto put = [](std::string& to, std::size_t at, auto value) {
    std::memcpy(to.data() + at, &value, sizeof value);
  };
  for (const FatEntryToWrite& entry : entries) {
    constexpr std::size_t header_bytes = 0x48;
    std::string header(header_bytes, '\0');
    const std::size_t padded = (entry.payload.size() + 1 + 7) / 8 * 8;
    put(header, 0, entry.kind);
    put(header, 2, std::uint16_t{0x0101});
    put(header, 4, static_cast<std::uint32_t>(header_bytes));
    put(header, 8, static_cast<std::uint64_t>(padded));
    put(header, 0x1c, entry.arch);
    std::uint64_t flags = 0x11;
    if (entry.packing != Packing::plain) {
      put(header, 0x10, static_cast<std::uint32_t>(entry.payload.size()));
      put(header, 0x38, static_cast<std::uint64_t>(entry.text_bytes));
      flags |= entry.packing == Packing::lz4 ? 0x2000u : 0x8000u;
    }
    put(header, 0x28, flags);
    body += header + entry.payload + std::string(padded - entry.payload.size(), '\0');
  }
  std::vector<std::uint64_t> image(2 + body.size() / 8);
  image[0] = 0x00100001ba55ed50;  // magic, version, bytes of this header
  image[1] = body.size();
  std::memcpy(image.data() + 2, body.data(), body.size());
  return image;
}

}  // namespace fovea::test
