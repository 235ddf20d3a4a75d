// numpy's .npy format, versions 1 to 3 (numpy.lib.format).
//
//   \x93NUMPY | major minor | header length: u16 (version 1), u32 (2, 3) | header | array bytes
//
// The header is a Python dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tools/array.h"

namespace fovea::tools {

// The array of a whole .npy file in memory; its bytes stay within `file`. Any bytes give an array
// or an Error whose message continues "FILE ...". bfloat16 is '<V2', as ml_dtypes writes it.
[[nodiscard]] Array parse_npy(std::span<const std::byte> file);

// The bytes that precede the elements of an array in a version 1.0 file, padded so that the
// elements start at a multiple of 64.
[[nodiscard]] std::string npy_header(ElementType type, std::span<const std::int64_t> shape);

}  // namespace fovea::tools
