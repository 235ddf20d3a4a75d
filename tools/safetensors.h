// The .safetensors format (github.com/huggingface/safetensors, "Format"):
//
//   header length: u64 | header: JSON | tensor bytes
//
// The header maps a tensor's name to {"dtype": "F32", "shape": [...], "data_offsets": [begin,
// end]}, offsets counted from the end of the header, and "__metadata__" to strings.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include "tools/array.h"

namespace fovea::tools {

struct Safetensors {
  std::map<std::string, Array> tensors;
  std::map<std::string, std::string> metadata;
};

// The tensors of a whole file in memory; their bytes stay within `file`. Any bytes give a value or
// an Error whose message continues "FILE ...". As the format asks: tensors lie within the file, do
// not overlap, and their bytes match their shape.
[[nodiscard]] Safetensors parse_safetensors(std::span<const std::byte> file);

}  // namespace fovea::tools
