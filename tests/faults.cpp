#include "tests/faults.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

namespace fovea::tests {

namespace {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// What removing the line would remove, or empty when it synchronises nothing.
std::string removal_kind(const std::string& line) {
  if (contains(line, "mbarrier.try_wait")) return "wait: mbarrier";
  if (contains(line, "mbarrier.arrive.expect_tx")) return "arrive: expect_tx";
  if (contains(line, "tcgen05.commit")) return "commit: tcgen05";
  if (contains(line, "mbarrier.arrive")) return "arrive: mbarrier";
  if (contains(line, "wgmma.wait_group")) return "wait: wgmma";
  if (contains(line, "wgmma.commit_group")) return "commit: wgmma";
  if (contains(line, "wgmma.fence")) return "fence: wgmma";
  if (contains(line, "fence.proxy.async")) return "fence: proxy";
  if (contains(line, "fence.mbarrier_init")) return "fence: mbarrier_init";
  if (contains(line, "tcgen05.fence::before")) return "fence: tcgen05 before";
  if (contains(line, "tcgen05.fence::after")) return "fence: tcgen05 after";
  if (contains(line, "tcgen05.wait")) return "wait: tcgen05";
  if (contains(line, "tcgen05.dealloc")) return "dealloc";
  if (contains(line, "cp.async.bulk.commit_group")) return "commit: bulk";
  if (contains(line, "cp.async.bulk.wait_group")) return "wait: bulk";
  if (contains(line, "bar.warp.sync")) return "barrier: warp";
  for (const char* barrier : {"bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive",
                              "barrier.cluster.arrive", "barrier.cluster.wait"}) {
    if (contains(line, barrier)) return "barrier";
  }
  return {};
}

// "P, [%r1], %r2;" becomes a wait for the other parity.
std::string flipped(const std::string& line) {
  const std::size_t wait = line.find("mbarrier.try_wait");
  const std::size_t comma = line.find("], ", wait), end = line.find(';', wait);
  if (wait == std::string::npos || comma == std::string::npos) return {};
  const std::string parity = line.substr(comma + 3, end - comma - 3);
  const std::size_t open = line.find('{');
  return line.substr(0, open + 1) + " .reg .b32 Flipped; xor.b32 Flipped, " + parity + ", 1;" +
         line.substr(open + 1, comma + 3 - open - 1) + "Flipped" + line.substr(end);
}

// "mbarrier.try_wait.parity.shared.b64 done, [%r1], %r2;" -> "done"
std::string predicate_of(const std::string& line) {
  const std::size_t comma = line.find(", [");
  const std::size_t space = line.rfind(' ', comma - 1);
  return line.substr(space + 1, comma - space - 1);
}

// Where the lines of a text come from. .loc lines name a file's number, line and column, and, for
// what was inlined, those of the call; of calls inside calls only some are named.
class SourcePlaces {
 public:
  explicit SourcePlaces(const std::vector<std::string>& lines) {
    for (const std::string& line : lines) {
      int number = 0;
      char name[256];
      if (std::sscanf(line.c_str(), " .file %d \"%255[^\"]\"", &number, name) != 2) continue;
      const std::string path = name;
      files_[number] = path.substr(path.rfind('/') + 1);
    }
  }

  // In the order of the text.
  void read(const std::string& line) {
    int file = 0, number = 0;
    const std::size_t inlined = line.find("inlined_at");
    if (inlined != std::string::npos &&
        std::sscanf(line.c_str() + inlined, "inlined_at %d %d", &file, &number) == 2) {
      add(file, number);
    }
    if (std::sscanf(line.c_str(), " .loc %d %d", &file, &number) == 2) add(file, number);
  }

  // The last few, the newest first: "mbarrier.h:82, pipeline.h:36, fwd_sm100.cuh:724".
  std::string text() const {
    std::string text;
    for (const std::string& place : last_) text += (text.empty() ? "" : ", ") + place;
    return text;
  }

 private:
  void add(int file, int number) {
    std::string place = files_[file] + ":" + std::to_string(number);
    last_.erase(std::remove(last_.begin(), last_.end(), place), last_.end());
    last_.insert(last_.begin(), std::move(place));
    if (last_.size() > 6) last_.pop_back();
  }

  std::map<int, std::string> files_;
  std::vector<std::string> last_;
};

}  // namespace

std::vector<Mutant> mutants_of(const std::string& ptx, const std::string& entry) {
  const std::vector<std::string> lines = split_lines(ptx);
  std::vector<Mutant> mutants;
  SourcePlaces places(lines);
  bool inside = false;
  auto add = [&](const std::string& kind, std::size_t at, const std::string& replacement) {
    std::vector<std::string> copy = lines;
    copy[at] = replacement;
    std::string broken = joined(copy);
    copy[at] = "trap;";
    mutants.push_back({kind, static_cast<int>(at) + 1, lines[at], std::move(broken), places.text(),
                       joined(copy)});
  };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (contains(lines[i], ".entry")) inside = contains(lines[i], (entry + "(").c_str());
    if (!inside) continue;
    places.read(lines[i]);
    const std::string kind = removal_kind(lines[i]);
    if (kind.empty()) continue;
    // Where the wait's answer is used on another line, it is yes.
    const bool answers = kind == "wait: mbarrier" && !contains(lines[i], "{");
    add(kind, i, answers ? "setp.eq.u32 " + predicate_of(lines[i]) + ", 0, 0;" : "");
    if (kind == "wait: mbarrier") add("parity", i, flipped(lines[i]));
    if (kind == "arrive: expect_tx") {
      const std::size_t comma = lines[i].rfind(", "), end = lines[i].rfind(';');
      const std::string bytes = lines[i].substr(comma + 2, end - comma - 2);
      for (const char* change : {"16", "-16"}) {
        add("transaction bytes", i,
            "{ .reg .b32 Bytes; add.s32 Bytes, " + bytes + ", " + change + "; " +
                lines[i].substr(0, comma + 2) + "Bytes; }");
      }
    }
  }
  return mutants;
}

const char* name(FaultOutcome outcome) {
  switch (outcome) {
    case FaultOutcome::reported: return "reported";
    case FaultOutcome::unnoticed: return "not reported, result right";
    case FaultOutcome::wrong: return "not reported, result wrong";
    default: return "never reached";
  }
}

void FaultTable::add(const std::string& kind, FaultOutcome outcome, bool explained) {
  auto row = std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.kind == kind; });
  if (row == rows.end()) row = rows.insert(rows.end(), Row{kind});
  if (outcome == FaultOutcome::unreached) {
    ++row->unreached;
    return;
  }
  ++row->total;
  row->reported += outcome == FaultOutcome::reported ? 1 : 0;
  row->wrong_only += outcome == FaultOutcome::wrong ? 1 : 0;
  row->explained += outcome == FaultOutcome::unnoticed && explained ? 1 : 0;
}

FaultTable::Row FaultTable::all() const {
  Row sum{"all"};
  for (const Row& row : rows) {
    sum.total += row.total;
    sum.reported += row.reported;
    sum.wrong_only += row.wrong_only;
    sum.unreached += row.unreached;
    sum.explained += row.explained;
  }
  return sum;
}

std::string FaultTable::text() const {
  std::vector<Row> shown = rows;
  std::sort(shown.begin(), shown.end(), [](const Row& a, const Row& b) { return a.kind < b.kind; });
  shown.push_back(all());
  char line[120];
  std::snprintf(line, sizeof line, "%-24s %8s %10s %10s %10s\n", "fault", "injected", "reported",
                "explained", "unreached");
  std::string text = line;
  for (const Row& row : shown) {
    std::snprintf(line, sizeof line, "%-24s %8d %10d %10d %10d\n", row.kind.c_str(), row.total,
                  row.reported, row.explained, row.unreached);
    text += line;
  }
  return text;
}

}  // namespace fovea::tests
