#include "tools/console.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>

namespace fovea::tools {
namespace {

constexpr std::int64_t bar_width = 30;

}  // namespace

Progress::Progress(std::int64_t steps, bool quiet)
    : steps_(std::max<std::int64_t>(steps, 1)), shown_(!quiet && ::isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::step(const std::string& what) {
  if (shown_) {
    const auto filled = static_cast<std::size_t>(std::min(begun_, steps_) * bar_width / steps_);
    const std::size_t rest = static_cast<std::size_t>(bar_width) - filled;
    fmt::print(stderr, "\r\033[K[{}{}] {}/{} {}", std::string(filled, '#'), std::string(rest, ' '),
               begun_, steps_, what);
    std::fflush(stderr);
  }
  ++begun_;
}

void Progress::clear() const {
  if (!shown_) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      out += i == 0 ? fmt::format("{:<{}}", row[i], widths[i])
                    : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    out += '\n';
  }
  return out;
}

}  // namespace fovea::tools
