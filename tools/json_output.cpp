#include "tools/json_output.h"

#include <fmt/format.h>

#include <cstdio>
#include <span>

namespace fovea::tools {

JsonOutput::JsonOutput(const std::string& destination)
    : standard_output_(destination == "-"),
      file_(destination.empty() || destination == "-" ? nullptr
                                                      : std::make_unique<OutputFile>(destination)) {
}

void JsonOutput::write(const Json& document) {
  if (!standard_output_ && file_ == nullptr) return;
  // Names of files and tensors need not be UTF-8.
  const std::string text = document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (standard_output_) {
    fmt::print("{}", text);
    return;
  }
  file_->write({std::as_bytes(std::span(text))});
  file_->commit();
}

}  // namespace fovea::tools
