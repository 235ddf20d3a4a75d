// Results for programs: one JSON document, to a file or standard output.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/file.h"

namespace fovea::tools {

using Json = nlohmann::ordered_json;

class JsonOutput {
 public:
  // destination: a file, "-" for standard output, empty for none. Finds out whether the file can be
  // written; throws Error.
  explicit JsonOutput(const std::string& destination);

  [[nodiscard]] bool on_standard_output() const { return standard_output_; }
  // Writes the document and ends it with a line break. Numbers that JSON lacks (NaN) become null.
  void write(const Json& document);

 private:
  bool standard_output_ = false;
  std::unique_ptr<OutputFile> file_;
};

}  // namespace fovea::tools
