// The running machine: memory, warps with their divergence, CTAs, clusters, asynchronous work.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/check.h"
#include "emulator/emulator.h"
#include "emulator/program.h"

namespace fovea::emulator {

// Generic addresses. Shared memory of CTA rank r in a cluster starts at kSharedWindow + (r << 24);
// the low 32 bits are the shared::cluster address.
inline constexpr u64 kSharedWindow = u64{0x7f0000000000};
inline constexpr u64 kLocalWindow = u64{0x7e0000000000};
inline constexpr u64 kParamWindow = u64{0x7d0000000000};
inline constexpr u64 kDeviceBase = u64{0x100000000000};
inline constexpr u32 kSharedStart = 0x400;  // the first KiB belongs to the system
inline constexpr int kRankShift = 24;

struct Allocation {
  u64 base = 0;
  u64 bytes = 0;
  u8* data = nullptr;
  std::unique_ptr<u8[]> own;  // none for memory of the host
  std::unique_ptr<GlobalShadow> shadow;
  bool constant = false;  // of a .const variable
};

struct MachineData {
  Chip chip;
  std::vector<std::unique_ptr<Allocation>> allocations;  // by base
  u64 next_address = kDeviceBase;
  std::unordered_map<u64, std::unordered_map<std::string, u64>> symbols;  // by module serial
  mutable Allocation* last = nullptr;
  u64 launches = 0;

  Allocation* find(u64 address, u64 bytes) const;
  u64 allocate(u64 bytes);
  void adopt(u8* memory, u64 bytes);
  void place_variables(const ModuleData& module);
  u64 symbol(const ModuleData& module, const std::string& name);
};

struct Cta;
struct Cluster;
struct Launch;

// Lanes of a warp that run together.
struct Fragment {
  u32 pc = 0;
  u32 mask = 0;
  i32 join = -1;
  bool blocked = false;
  u64 token = 0;             // a handler's own note while it is blocked
  u64 blocked_at = 0;        // Cluster::changes when it last failed
  std::vector<u32> returns;  // call stack
};

// A place where fragments that parted meet again.
struct Join {
  u32 pc = 0;
  u32 waiting_for = 0;
  u32 arrived = 0;
  i32 parent = -1;
  bool used = false;
  std::vector<u32> returns;  // call stack of the lanes that meet
};

// An operation that has ended but that its thread has not yet waited for.
struct Finished {
  bool bulk = false;
  u64 group = 0;
  u32 agent = 0, tick = 0;
};

class Warp {
 public:
  Cta* cta = nullptr;
  Cluster* cluster = nullptr;
  Launch* launch = nullptr;
  const Program* program = nullptr;
  u32 index = 0;
  u32 agent = 0, lone_agent = 0;
  u32 live = 0;  // lanes that have not exited
  u8* registers = nullptr;
  std::vector<u32> predicates;
  std::vector<u32> carry;  // condition code of add.cc: one mask
  std::vector<Fragment> fragments;
  std::vector<Join> joins;
  std::size_t current = 0;
  u32 active = 0;  // lanes executing the current instruction
  Counters counters;
  WarpCheck check;         // per-register and clock state of the checker
  u64 sequence = 0;        // instructions executed
  u64 picks = 0;           // choices between fragments
  bool turn_over = false;  // the instruction ends this warp's turn: others may see what it saw

  // asynchronous state of this warp
  u64 bulk_group = 0;  // number of the open group of bulk copies
  u64 copy_group = 0;  // the same of cp.async
  std::vector<Finished> finished;
  u64 cluster_generation = 0;             // of barrier.cluster at this warp's last arrival
  u64 matrix_group = 0;                   // wgmma groups committed
  u64 matrix_waited = 0;                  // groups below this one are known to be done
  u32 tensor_flight = 0x80000000;         // number of the open batch of tcgen05.ld
  std::vector<Finished> tensor_finished;  // tcgen05.ld (bulk false) and st ended, not waited for
  u32 register_quota = 0;                 // setmaxnreg

  Fragment& fragment() { return fragments[current]; }
  bool done() const { return live == 0; }
  u32 mask_of(const OperandRef& operand) const {
    const u32 mask = operand.kind == OperandRef::Kind::constant
                         ? static_cast<u32>(operand.slot)
                         : predicates[static_cast<u32>(operand.slot)];
    return operand.negated ? ~mask : mask;
  }
  void* row(const OperandRef& operand);
  const void* source(const OperandRef& operand) const;
  u32* words(const OperandRef& operand) { return static_cast<u32*>(row(operand)); }
  const OperandRef* operands(const Inst& inst) const {
    return program->operands.data() + inst.first;
  }
  u64 value(const OperandRef& operand, int lane) const;
  u32 value32(const OperandRef& operand, int lane) const;
  void set(const OperandRef& operand, int lane, u64 value);
  u64 address(const OperandRef& operand, int lane) const;
  int first_lane() const { return std::countr_zero(active); }

  // Runs until it blocks, ends, or has spent the quantum; true when anything was executed.
  bool run(u64 quantum);
  bool runnable() const;
  void branch(const Inst& inst, u32 taken) {
    split(taken, inst.target, fragment().pc + 1, inst.join);
  }
  // Lanes `taken` of the current fragment go to `target`, the rest to `rest`; they meet at `join`.
  void split(u32 taken, u32 target, u32 rest, u32 join);
  void jump(u32 pc) { fragment().pc = pc; }
  void exit_lanes(u32 mask);
  void fault(FaultKind kind, const Inst& inst, int lane, const std::string& sentence);
  const Inst& instruction() const { return program->code[fragments[current].pc]; }

 private:
  bool pick_fragment();
  bool step();
  void arrive_join();
  void release_join(i32 index);
  i32 new_join(u32 pc, const Fragment& fragment);
};

struct Mbarrier {
  u32 expected = 0;
  i64 pending = 0;
  i64 bytes = 0;  // transaction count: expected minus received
  u64 phase = 0;
  u32 init_agent = 0;
  u32 init_clock = 0;
  bool visible_to_async = false;
  bool valid = false;
  int line = 0;
  u64 bytes_expected_total = 0, bytes_received_total = 0;
  Clock arriving, done;
};

struct NamedBarrier {
  u32 expected = 0;
  u32 arrived = 0;
  u64 generation = 0;
  u32 reduce_and = ~0u, reduce_or = 0, reduce_count = 0;
  u32 result_and = 0, result_or = 0, result_count = 0;
  Clock arriving, done;
};

// What a warp asks of tensor memory together with a warp of the peer CTA.
struct TensorRequest {
  enum class Kind : u8 { allocate, free, relinquish };
  Kind kind = Kind::allocate;
  bool done = false;
  Warp* warp = nullptr;  // null: nobody asks
  const Inst* inst = nullptr;
  u32 columns = 0;
  u32 address = 0;  // free: of what; allocate: the answer
};

// What the tensor unit of a CTA holds.
struct TensorMemory {
  std::vector<u32> cells;                        // [column][lane]
  std::vector<i32> owner;                        // per column: allocation number or -1
  std::vector<std::pair<u32, u32>> allocations;  // first column, columns; columns 0 when freed
  bool may_allocate = true;
  TensorRequest request;  // of cta_group::2
};

class AsyncOp;

// Products of a warpgroup between two commits, from all four warps.
struct MatrixStep {
  const Inst* inst = nullptr;
  std::array<u64, 2> descriptors{};  // a (when from shared memory) and b
  bool accumulate = false;
  std::vector<u32> a_registers;  // [warp][register][lane], as they were at issue
};
struct MatrixGroup {
  u64 serial = 0;
  std::vector<MatrixStep> steps;
  std::array<u32, 4> issued{};  // steps, by warp
  u32 committed = 0;            // mask of warps
  bool done = false;
  u32 agent = 0, agent_clock = 0;
  Clock clock;
};
struct WarpGroup {
  std::deque<MatrixGroup> groups;
  u64 first_serial = 0;  // of groups.front()
};

struct Cta {
  Cluster* cluster = nullptr;
  u32 rank = 0;
  std::array<u32, 3> id{};
  u64 linear = 0;
  std::vector<u8> shared;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<u8> register_file;
  std::vector<u8> local;  // [warp][lane][byte]
  std::unordered_map<u32, Mbarrier> barriers;
  std::array<NamedBarrier, 16> named;
  std::vector<WarpGroup> groups;
  TensorMemory tensor;
  SharedShadow shadow;
  u32 live_warps = 0;
  u32 free_registers = 0;
  bool pool_started = false;
};

// Something that completes later. Runs as its own agent.
class AsyncOp {
 public:
  virtual ~AsyncOp() = default;
  virtual bool ready(const Cluster&) const { return true; }
  // One phase; true when nothing is left to do.
  virtual bool execute(Cluster& cluster) = 0;
  virtual const char* name() const = 0;
  virtual bool through_async_proxy() const { return true; }

  Cta* cta = nullptr;  // of the issuer
  Warp* warp = nullptr;
  const Inst* inst = nullptr;
  int lane = 0;
  u64 serial = 0;
  u32 agent = 0, agent_clock = 0;
  Clock clock;  // what it may rely on
  AccessView view() const;
};

struct Cluster {
  Launch* launch = nullptr;
  u64 serial = 0;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<AsyncOp>> pending;
  u64 next_op = 0;
  u64 changes = 1;       // counts events that can unblock somebody
  u64 stores = 0;        // ordinary stores: progress, but nobody waits for them
  NamedBarrier barrier;  // barrier.cluster, counted in threads
  ClusterCheck check;
  std::mt19937_64 random;
  bool finished = false;
  bool cancel_failed = false;  // it has seen that no launch is left to cancel
  bool failing_waits = false;  // try_wait may answer false: nothing else can make progress
  u32 failed_waits = 0;        // since something happened in the grid
  u64 idle_rounds = 0;

  void enqueue(std::unique_ptr<AsyncOp> op, Warp& warp, const Inst& inst, int lane);
  bool run_pending(std::size_t at_most);
  bool round();       // false when the cluster is finished or stuck
  bool idle() const;  // for long nothing has happened that others could see
  void changed() { ++changes; }
  Cta* cta_of(u64 shared_address);
};

struct Launch {
  MachineData* machine = nullptr;
  const Program* program = nullptr;
  LaunchConfig config;
  std::vector<u8> parameters;
  Schedule schedule;
  Report* report = nullptr;
  std::array<u32, 3> cluster_dims{1, 1, 1};
  u32 threads = 0, warps = 0;
  u32 shared_bytes = 0;  // static and dynamic, from kSharedStart
  u64 dynamic_start = 0;
  bool checks = false;
  u64 serial = 0;        // tells launches apart in the shadow of global memory
  bool stopped = false;  // a fault that a GPU would not survive
  u64 steps = 0;
  u64 next_cluster = 0;  // first that has neither started nor been cancelled
  u64 last_busy = 0;     // steps when something visible last happened
  u64 clusters = 0;
  std::unordered_map<u64, u32> seen_faults;
  std::unordered_map<u64, GlobalSync> global_sync;

  std::optional<Fault> unlisted;  // the last fault, when there was no room for it

  void add_fault(Fault fault);
  // Sees to it that what stopped the launch is named and listed.
  void conclude();
  void fault(FaultKind kind, const Cta* cta, int warp, int lane, const Inst* inst,
             const std::string& agent, const std::string& sentence);
};

// Bytes behind an address, or null after reporting a fault.
struct Place {
  u8* data = nullptr;
  Space space = Space::none;
  Cta* cta = nullptr;                // shared
  u32 offset = 0;                    // shared
  Allocation* allocation = nullptr;  // global
  u64 address = 0;
};
Place resolve(Warp& warp, const Inst& inst, Space space, u64 address, u32 bytes, int lane,
              bool write);
// The same for asynchronous work.
Place resolve_global(const AsyncOp& op, u64 address, u64 bytes, const char* what);
Place resolve_shared(const AsyncOp& op, u32 address, u32 bytes, const char* what);

// mbarrier events, shared by instructions and asynchronous work
Mbarrier* find_barrier(Cta& cta, u32 offset);
bool barrier_arrive(Launch& launch, Cta& cta, Mbarrier& barrier, u32 count, std::string& problem);
void barrier_advance(Cta& cta, Mbarrier& barrier);
void barrier_receive(const AsyncOp& op, u32 shared_address, u64 bytes);
void barrier_signal(const AsyncOp& op, u32 shared_address);
std::string describe_barriers(const Cta& cta);

}  // namespace fovea::emulator
