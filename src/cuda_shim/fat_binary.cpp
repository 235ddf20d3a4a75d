#include "cuda_shim/fat_binary.h"

#include <charconv>
#include <cstring>

#include "cuda_shim/inflate.h"
#include "emulator/emulator.h"

namespace fovea::cuda_shim {
namespace {

constexpr std::uint32_t kMagic = 0xBA55ED50;
constexpr std::uint64_t kFlagLz4 = 0x2000, kFlagZstd = 0x8000;
constexpr std::size_t kEntryHeaderBytes = 0x40;  // of which these fields are read
constexpr std::size_t kLargestText = std::size_t{1} << 30;

template <typename T>
T field(const std::uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::string architecture(const FatEntry& entry) {
  return (entry.kind == FatEntry::Kind::ptx ? "PTX for sm_" : "machine code for sm_") +
         std::to_string(entry.arch);
}

}  // namespace

bool is_fat_binary(const void* image) {
  return field<std::uint32_t>(static_cast<const std::uint8_t*>(image)) == kMagic;
}

std::vector<FatEntry> read_fat_binary(const void* image) {
  const auto* bytes = static_cast<const std::uint8_t*>(image);
  if (!is_fat_binary(image)) {
    throw emulator::Error(0, "the program registers device code that is not a fat binary.");
  }
  const std::size_t header = field<std::uint16_t>(bytes + 6);
  const std::size_t end = header + field<std::uint64_t>(bytes + 8);
  std::vector<FatEntry> entries;
  for (std::size_t at = header; at + kEntryHeaderBytes <= end;) {
    const std::uint8_t* entry = bytes + at;
    const std::size_t entry_header = field<std::uint32_t>(entry + 4);
    const std::uint64_t payload = field<std::uint64_t>(entry + 8);
    if (entry_header < kEntryHeaderBytes || entry_header > end - at ||
        payload > end - at - entry_header) {
      throw emulator::Error(0, "an entry of the program's fat binary passes its end.");
    }
    FatEntry result;
    result.kind = FatEntry::Kind{field<std::uint16_t>(entry)};
    result.compressed_bytes = field<std::uint32_t>(entry + 0x10);
    result.arch = field<std::uint32_t>(entry + 0x1c);
    result.flags = field<std::uint64_t>(entry + 0x28);
    result.uncompressed_bytes = field<std::uint64_t>(entry + 0x38);
    result.payload = {entry + entry_header, payload};
    entries.push_back(result);
    at += entry_header + payload;
  }
  return entries;
}

std::string ptx_of(const FatEntry& entry) {
  std::string text;
  if ((entry.flags & (kFlagLz4 | kFlagZstd)) != 0) {
    if (entry.compressed_bytes > entry.payload.size() || entry.uncompressed_bytes > kLargestText) {
      throw emulator::Error(0,
                            "an entry of the program's fat binary declares sizes it cannot have.");
    }
    const Bytes packed = entry.payload.first(entry.compressed_bytes);
    text = (entry.flags & kFlagLz4) != 0 ? inflate_lz4(packed, entry.uncompressed_bytes)
                                         : inflate_zstd(packed, entry.uncompressed_bytes);
  } else {
    text.assign(entry.payload.begin(), entry.payload.end());
  }
  return text.substr(0, text.find('\0'));  // padding
}

std::string target_of(std::string_view ptx) {
  constexpr std::string_view directive = ".target";
  const std::size_t at = ptx.find(directive);
  if (at == std::string_view::npos) return {};
  const std::size_t begin = ptx.find_first_not_of(" \t", at + directive.size());
  if (begin == std::string_view::npos) return {};
  return std::string(ptx.substr(begin, ptx.find_first_of(", \t\r\n", begin) - begin));
}

int suitability(std::string_view target, std::string_view arch) {
  constexpr std::string_view prefix = "sm_";
  const auto number = [&](std::string_view name) {
    int value = 0;
    if (name.starts_with(prefix)) {
      std::from_chars(name.data() + prefix.size(), name.data() + name.size(), value);
    }
    return value;
  };
  const int wanted = number(arch), given = number(target);
  if (given == 0) return 0;
  if (target == arch) return 3000;
  // A family's PTX runs on every later member, a plain one on every later chip.
  if (target.back() == 'f') {
    return given <= wanted && given / 10 == wanted / 10 ? 2000 + given : 0;
  }
  if (target.back() == 'a') return 0;
  return given <= wanted ? 1000 + given : 0;
}

std::string choose_ptx(std::span<const FatEntry> entries, std::string_view arch) {
  std::string best, held;
  int best_score = 0;
  for (const FatEntry& entry : entries) {
    std::string what = architecture(entry);
    if (entry.kind == FatEntry::Kind::ptx) {
      std::string text = ptx_of(entry);
      const std::string target = target_of(text);
      what = "PTX for " + (target.empty() ? "no target" : target);
      if (const int score = suitability(target, arch); score > best_score) {
        best_score = score;
        best = std::move(text);
      }
    }
    held += (held.empty() ? "" : ", ") + what;
  }
  if (best_score != 0) return best;
  const std::string number(arch.substr(arch.find('_') + 1));
  throw emulator::Error(0, "the program carries no PTX for " + std::string(arch) + " but " +
                               (held.empty() ? "nothing" : held) +
                               "; compile it with -gencode arch=compute_" + number +
                               ",code=compute_" + number + ".");
}

}  // namespace fovea::cuda_shim
