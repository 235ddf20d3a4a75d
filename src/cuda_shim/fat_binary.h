// Fat binaries: the container in which a CUDA program carries its device code.
//
//   header   magic u32, version u16, header bytes u16, bytes of all entries u64
//   entry    kind u16 (1 PTX, 2 machine code), version u16, header bytes u32, payload bytes u64
//            (padded), compressed bytes u32, -, PTX version u16 + u16, architecture u32, -, -,
//            flags u64 at 0x28, -, uncompressed bytes u64 at 0x38; then the payload
//
// The format is not documented; these are the fields that programs made by CUDA 12 and 13 show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::cuda_shim {

struct FatEntry {
  enum class Kind : std::uint16_t { ptx = 1, machine_code = 2 };
  Kind kind = Kind::ptx;
  std::uint32_t arch = 0;  // 90, 100, ...
  std::uint64_t flags = 0;
  std::size_t compressed_bytes = 0;
  std::size_t uncompressed_bytes = 0;
  std::span<const std::uint8_t> payload;
};

// The entries of a fat binary in memory, or none for an empty one. Its size stands in its header,
// so the caller vouches for the memory. Throws emulator::Error for what is not a fat binary.
std::vector<FatEntry> read_fat_binary(const void* image);
bool is_fat_binary(const void* image);

// The text of an entry that holds PTX, decompressed.
std::string ptx_of(const FatEntry& entry);

// What `.target` of the text says, as "sm_90a"; empty when there is no such directive.
std::string target_of(std::string_view ptx);
// Whether a chip of architecture `arch` ("sm_90a") runs PTX for `target`; greater is a closer
// match, 0 is no.
int suitability(std::string_view target, std::string_view arch);

// The best PTX for `arch`. Throws emulator::Error that says what the fat binary holds instead.
std::string choose_ptx(std::span<const FatEntry> entries, std::string_view arch);

}  // namespace fovea::cuda_shim
