// What a person sees: a progress bar while work lasts and tables of results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fovea::tools {

// A bar on standard error, drawn only when that is a terminal. Erased when it goes out of scope.
class Progress {
 public:
  Progress(std::int64_t steps, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Announces the work that comes next; the steps announced before it are done.
  void step(const std::string& what);
  // Takes the bar away so that a line can be printed; the next step() draws it again.
  void clear() const;

 private:
  std::int64_t steps_;
  std::int64_t begun_ = 0;
  bool shown_;
};

// Rows of text in columns as wide as their widest cell; the first column is aligned to the left,
// the others to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  [[nodiscard]] std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace fovea::tools
