// Where fuzzing starts: small inputs that reach every branch of a reader, and words worth
// inserting.
#pragma once

#include <string>
#include <vector>

namespace fovea::test {

struct Seeds {
  std::vector<std::string> inputs;
  std::vector<std::string> words;
};

[[nodiscard]] Seeds npy_seeds();
[[nodiscard]] Seeds safetensors_seeds();
[[nodiscard]] Seeds options_seeds();
[[nodiscard]] Seeds ptx_seeds();

}  // namespace fovea::test
