// Configurations set by hand: lists of "name=value,...".
#pragma once

#include <algorithm>
#include <string_view>

#include "runtime/text.h"

namespace fovea::runtime {

// Calls set(name, value) for each entry. Throws Error for an entry without '='.
template <typename Set>
void for_each_setting(std::string_view list, const Set& set) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    const std::string_view entry = list.substr(0, comma);
    list.remove_prefix(std::min(comma + 1, list.size()));
    const std::size_t equals = entry.find('=');
    require(equals != std::string_view::npos, "configuration has '", entry,
            "'; it is a list of name=value");
    set(entry.substr(0, equals), entry.substr(equals + 1));
  }
}

}  // namespace fovea::runtime
