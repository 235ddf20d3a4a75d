#include "fovea/fovea.hpp"
#include "tests/fuzz/fuzz_targets.h"
#include "tools/safetensors.h"
#include "tools/tensor_files.h"

namespace fovea::test {
namespace {

void check_array(const tools::Array& array, std::span<const std::byte> file) {
  require(array.elements() >= 0, "a negative number of elements");
  if (array.type != tools::ElementType::other) {
    require(array.bytes.size() ==
                static_cast<std::size_t>(array.elements()) * tools::size_bytes(array.type),
            "bytes that do not match the shape");
  }
  require(
      array.bytes.empty() || (array.bytes.data() >= file.data() &&
                              array.bytes.data() + array.bytes.size() <= file.data() + file.size()),
      "elements outside the file");
}

}  // namespace

// Parses, and goes on as far as a plan: what a file says about lengths and pages is checked there.
void fuzz_safetensors(std::span<const std::byte> bytes) {
  try {
    const tools::Safetensors parsed = tools::parse_safetensors(bytes);
    for (const auto& [name, array] : parsed.tensors) check_array(array, bytes);
    tools::TensorFiles files;
    files.add(parsed.tensors);
    const tools::Workload workload = tools::load_workload(files, {}, DType::f32, true);
    static_cast<void>(plan(workload.problem));
  } catch (const Error& error) {
    require_sentence(error.what());
  }
}

}  // namespace fovea::test

FOVEA_FUZZ_ENTRY(fuzz_safetensors)
