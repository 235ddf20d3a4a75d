// The two formats in which fat binaries hold compressed PTX. Both decoders take hostile bytes: what
// does not follow the format is an emulator::Error, and no byte outside the input is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace fovea::cuda_shim {

using Bytes = std::span<const std::uint8_t>;

// One LZ4 block (no frame), as nvcc wrote up to CUDA 12 and writes with --compress-mode=speed.
std::string inflate_lz4(Bytes block, std::size_t size);

// One Zstandard frame (RFC 8878) without a dictionary, as nvcc writes since CUDA 12.8. `limit`
// bounds what a hostile frame may ask for.
std::string inflate_zstd(Bytes frame, std::size_t limit);

}  // namespace fovea::cuda_shim
