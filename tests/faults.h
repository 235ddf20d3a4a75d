// Fault injection: a correct kernel, broken in one synchronising instruction at a time.
#pragma once

#include <string>
#include <vector>

namespace fovea::tests {

struct Mutant {
  std::string kind;  // "wait: mbarrier"
  int line = 0;      // of the PTX, from 1
  std::string before, ptx;
  std::string where;    // in the source and in front of it: "mbarrier.h:82, pipeline.h:36"
  std::string trapped;  // the kernel with a trap in that line: who never meets it, has no fault
};

// Every wait, arrive, commit, fence, barrier and dealloc of the entry removed, every parity
// flipped, every count of bytes changed by 16 either way.
std::vector<Mutant> mutants_of(const std::string& ptx, const std::string& entry);

// What the schedules made of a mutant; `wrong`: nothing was reported, but the result differs.
enum class FaultOutcome { reported, unnoticed, wrong, unreached };
const char* name(FaultOutcome outcome);

// Injected and reported faults, by kind; those in lines that no run reaches are none.
struct FaultTable {
  struct Row {
    std::string kind;
    int total = 0, reported = 0, wrong_only = 0, unreached = 0, explained = 0;
  };
  std::vector<Row> rows;
  void add(const std::string& kind, FaultOutcome outcome, bool explained = false);
  std::string text() const;
  Row all() const;
};

}  // namespace fovea::tests
