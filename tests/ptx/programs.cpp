#include "tests/ptx/programs.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace fovea::emulator::testing {

std::map<std::string, std::string> header_of(const std::string& ptx) {
  std::map<std::string, std::string> header;
  std::stringstream stream(ptx);
  for (std::string line; std::getline(stream, line) && line.substr(0, 3) == "// ";) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    std::string& value = header[line.substr(3, colon - 3)];
    value += (value.empty() ? "" : " ") + line.substr(colon + 2);
  }
  return header;
}

std::uint32_t number(const std::map<std::string, std::string>& header, const char* key,
                     std::uint32_t otherwise) {
  const auto it = header.find(key);
  return it == header.end() ? otherwise
                            : static_cast<std::uint32_t>(std::stoul(it->second, nullptr, 0));
}

std::vector<std::uint32_t> words_of(const std::string& text) {
  std::vector<std::uint32_t> words;
  std::stringstream stream(text);
  for (std::string word; stream >> word;) {
    const std::size_t star = word.find('*');
    const unsigned long count = star == std::string::npos ? 1 : std::stoul(word);
    const std::string value = star == std::string::npos ? word : word.substr(star + 1);
    words.insert(words.end(), count, static_cast<std::uint32_t>(std::stoll(value, nullptr, 0)));
  }
  return words;
}

std::vector<std::string> program_files() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(FOVEA_PTX_TESTS) + "/programs")) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace fovea::emulator::testing
