#include "emulator/allocate.h"

#include <algorithm>
#include <map>

namespace fovea::emulator {
namespace {

struct Block {
  u32 begin = 0, end = 0;
  std::vector<u32> successors;  // the exit is block count
};

bool ends_block(const Inst& inst) {
  return inst.unit == Unit::control && inst.mode != kCallMode && inst.mode != 0;
}

std::vector<u32> targets_of(const Program& program, const Inst& inst) {
  std::vector<u32> targets;
  if (inst.unit != Unit::control) return targets;
  if (inst.mode == kBranchMode) targets.push_back(inst.target);
  if (inst.mode == kTableMode) {
    for (u32 i = 1; i <= inst.extra; ++i) {
      targets.push_back(static_cast<u32>(program.operands[inst.first + i].offset));
    }
  }
  if (inst.mode == kReturnMode && inst.target != ~0u) targets.push_back(inst.target);
  return targets;
}

// Whether a return inside the function is a jump to its last instruction.
bool falls_through(const Inst& inst) {
  if (inst.guard >= 0) return true;
  return !ends_block(inst);
}

std::vector<Block> find_blocks(const Program& program, u32 begin, u32 end) {
  std::vector<bool> leader(end - begin + 1, false);
  leader[0] = true;
  for (u32 at = begin; at < end; ++at) {
    const Inst& inst = program.code[at];
    if (!ends_block(inst)) continue;
    leader[at + 1 - begin] = true;
    for (const u32 target : targets_of(program, inst)) {
      if (target >= begin && target < end) leader[target - begin] = true;
    }
  }
  std::vector<Block> blocks;
  std::vector<u32> block_of(end - begin + 1, 0);
  for (u32 at = begin; at < end; ++at) {
    if (leader[at - begin]) {
      blocks.emplace_back();
      blocks.back().begin = at;
    }
    blocks.back().end = at + 1;
    block_of[at - begin] = static_cast<u32>(blocks.size() - 1);
  }
  const u32 exit = static_cast<u32>(blocks.size());
  for (Block& block : blocks) {
    const Inst& last = program.code[block.end - 1];
    for (const u32 target : targets_of(program, last)) {
      block.successors.push_back(target < end ? block_of[target - begin] : exit);
    }
    if (falls_through(last)) {
      block.successors.push_back(block.end < end ? block_of[block.end - begin] : exit);
    }
    if (block.successors.empty()) block.successors.push_back(exit);
  }
  return blocks;
}

// Immediate post-dominators by the iterative algorithm of Cooper, Harvey and Kennedy on the
// reversed graph. Blocks from which the exit cannot be reached keep ~0.
std::vector<u32> post_dominators(const std::vector<Block>& blocks) {
  const u32 count = static_cast<u32>(blocks.size());
  std::vector<std::vector<u32>> predecessors(count + 1);
  for (u32 b = 0; b < count; ++b) {
    for (const u32 s : blocks[b].successors) predecessors[s].push_back(b);
  }
  std::vector<u32> order;  // reverse graph, postorder from the exit
  std::vector<u32> number(count + 1, ~0u);
  std::vector<std::pair<u32, std::size_t>> stack{{count, 0}};
  std::vector<bool> seen(count + 1, false);
  seen[count] = true;
  while (!stack.empty()) {
    auto& [block, next] = stack.back();
    if (next < predecessors[block].size()) {
      const u32 p = predecessors[block][next++];
      if (!seen[p]) {
        seen[p] = true;
        stack.emplace_back(p, 0);
      }
    } else {
      number[block] = static_cast<u32>(order.size());
      order.push_back(block);
      stack.pop_back();
    }
  }
  std::vector<u32> dominator(count + 1, ~0u);
  dominator[count] = count;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = order.rbegin(); it != order.rend(); ++it) {
      if (*it == count) continue;
      u32 best = ~0u;
      for (u32 s : blocks[*it].successors) {
        if (dominator[s] == ~0u) continue;
        while (best != ~0u && s != best) {
          while (number[s] < number[best]) s = dominator[s];
          while (number[best] < number[s]) best = dominator[best];
        }
        best = s;
      }
      if (best != dominator[*it]) {
        dominator[*it] = best;
        changed = true;
      }
    }
  }
  return dominator;
}

class BitSet {
 public:
  explicit BitSet(std::size_t bits) : words_((bits + 63) / 64, 0) {}
  void set(std::size_t i) { words_[i / 64] |= u64{1} << (i % 64); }
  void reset(std::size_t i) { words_[i / 64] &= ~(u64{1} << (i % 64)); }
  bool test(std::size_t i) const { return (words_[i / 64] >> (i % 64) & 1) != 0; }
  bool join(const BitSet& other) {
    u64 changed = 0;
    for (std::size_t i = 0; i < words_.size(); ++i) {
      changed |= other.words_[i] & ~words_[i];
      words_[i] |= other.words_[i];
    }
    return changed != 0;
  }
  // this = gen | (out & ~kill)
  void transfer(const BitSet& gen, const BitSet& kill, const BitSet& out) {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      words_[i] = gen.words_[i] | (out.words_[i] & ~kill.words_[i]);
    }
  }
  template <class F>
  void each(F f) const {
    for (std::size_t w = 0; w < words_.size(); ++w) {
      for (u64 bits = words_[w]; bits != 0; bits &= bits - 1) {
        f(w * 64 + static_cast<std::size_t>(std::countr_zero(bits)));
      }
    }
  }

 private:
  std::vector<u64> words_;
};

struct Range {
  u32 begin = ~0u, end = 0;
  void cover(u32 at) {
    begin = std::min(begin, at);
    end = std::max(end, at);
  }
};

template <class Read, class Write>
void visit_registers(const Program& program, const Inst& inst, Read read, Write write) {
  if (inst.guard >= 0) read(static_cast<u32>(inst.guard_vreg));
  for (u32 i = 0; i < static_cast<u32>(inst.outputs) + inst.inputs + inst.kept; ++i) {
    const OperandRef& operand = program.operands[inst.first + i];
    if (operand.vreg < 0) continue;
    if (i < inst.outputs) {
      write(static_cast<u32>(operand.vreg));
    } else {
      read(static_cast<u32>(operand.vreg));
    }
  }
}

std::vector<Range> live_ranges(const Program& program, const std::vector<Block>& blocks, u32 first,
                               u32 last) {
  const std::size_t n = last - first;
  std::vector<BitSet> gen(blocks.size(), BitSet(n)), kill(gen), in(gen), out(gen);
  std::vector<Range> ranges(n);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (u32 at = blocks[b].begin; at < blocks[b].end; ++at) {
      const Inst& inst = program.code[at];
      auto read = [&](u32 r) {
        ranges[r - first].cover(at);
        if (!kill[b].test(r - first)) gen[b].set(r - first);
      };
      // A guarded write keeps the old value in some lanes.
      auto write = [&](u32 r) {
        ranges[r - first].cover(at);
        if (inst.guard >= 0) {
          if (!kill[b].test(r - first)) gen[b].set(r - first);
        } else {
          kill[b].set(r - first);
        }
      };
      visit_registers(program, inst, read, [](u32) {});
      visit_registers(
          program, inst, [](u32) {}, write);
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t b = blocks.size(); b-- > 0;) {
      for (const u32 s : blocks[b].successors) {
        if (s < blocks.size()) changed |= out[b].join(in[s]);
      }
      BitSet next(n);
      next.transfer(gen[b], kill[b], out[b]);
      changed |= in[b].join(next);
    }
  }
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    in[b].each([&](std::size_t r) { ranges[r].cover(blocks[b].begin); });
    out[b].each([&](std::size_t r) { ranges[r].cover(blocks[b].end); });
  }
  return ranges;
}

}  // namespace

void find_joins(Program& program, u32 begin, u32 end) {
  const std::vector<Block> blocks = find_blocks(program, begin, end);
  const std::vector<u32> dominator = post_dominators(blocks);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    Inst& last = program.code[blocks[b].end - 1];
    if (!ends_block(last)) continue;
    const u32 meeting = dominator[b];
    last.join = meeting < blocks.size() ? blocks[meeting].begin : ~0u;
  }
}

void allocate_slots(Program& program, u32 begin, u32 end, u32 first, u32 last, u32& row_bytes,
                    u32& predicate_count) {
  const std::vector<Block> blocks = find_blocks(program, begin, end);
  const std::vector<Range> ranges = live_ranges(program, blocks, first, last);
  std::vector<u32> order;
  for (u32 r = 0; r < last - first; ++r) {
    if (ranges[r].begin != ~0u) order.push_back(r);
  }
  std::sort(order.begin(), order.end(), [&](u32 a, u32 b) {
    return ranges[a].begin != ranges[b].begin ? ranges[a].begin < ranges[b].begin : a < b;
  });
  // Per width: slots in use by end of range, and free ones. Width 0 are predicates.
  std::map<u32, std::multimap<u32, u32>> active;
  std::map<u32, std::vector<u32>> free_slots;
  std::vector<u32> slot(last - first, 0);
  for (const u32 r : order) {
    const u32 bytes = type_bytes(program.registers[first + r].type);
    const u32 width = program.registers[first + r].type == Type::pred ? 0 : std::max(bytes, 4u);
    auto& in_use = active[width];
    auto& free_list = free_slots[width];
    while (!in_use.empty() && in_use.begin()->first < ranges[r].begin) {
      free_list.push_back(in_use.begin()->second);
      in_use.erase(in_use.begin());
    }
    if (!free_list.empty()) {
      slot[r] = free_list.back();
      free_list.pop_back();
    } else if (width == 0) {
      slot[r] = predicate_count++;
    } else {
      slot[r] = row_bytes;
      row_bytes += 32 * width;
    }
    in_use.emplace(ranges[r].end, slot[r]);
  }
  for (u32 at = begin; at < end; ++at) {
    Inst& inst = program.code[at];
    if (inst.guard >= 0) {
      inst.guard = static_cast<i32>(slot[static_cast<u32>(inst.guard_vreg) - first]);
    }
    for (u32 i = 0; i < static_cast<u32>(inst.outputs) + inst.inputs + inst.kept; ++i) {
      OperandRef& operand = program.operands[inst.first + i];
      if (operand.vreg < 0) continue;
      operand.slot = static_cast<i32>(slot[static_cast<u32>(operand.vreg) - first]);
    }
  }
}

}  // namespace fovea::emulator
