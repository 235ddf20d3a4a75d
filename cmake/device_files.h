#pragma once

#include <span>
#include <string_view>

namespace fovea::device {

// One file of kernel text. `name` is what an #include in another file says: "core/mask.h".
struct File {
  std::string_view name;
  std::string_view text;
};

// Every file of src/device and src/core, as it stood when the library was built, sorted by name.
std::span<const File> files();

}  // namespace fovea::device
