#include "fovea/fovea.hpp"
#include "tests/fuzz/fuzz_targets.h"
#include "tools/npy.h"

namespace fovea::test {

void fuzz_npy(std::span<const std::byte> bytes) {
  tools::Array array;
  try {
    array = tools::parse_npy(bytes);
  } catch (const Error& error) {
    require_sentence(error.what());
    return;
  }
  require(array.type != tools::ElementType::other, "an array of no type");
  require(array.elements() >= 0, "a negative number of elements");
  require(array.bytes.size() ==
              static_cast<std::size_t>(array.elements()) * tools::size_bytes(array.type),
          "bytes that do not match the shape");
  require(array.bytes.size() <= bytes.size(), "an array larger than its file");
  require(array.bytes.empty() ||
              (array.bytes.data() >= bytes.data() &&
               array.bytes.data() + array.bytes.size() == bytes.data() + bytes.size()),
          "elements outside the file");
}

}  // namespace fovea::test

FOVEA_FUZZ_ENTRY(fuzz_npy)
