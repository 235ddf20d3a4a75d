// The checker: happens-before by vector clocks, and what every byte and register has seen.
//
// Agents are warps and asynchronous operations (a CTA lends its operations kAsyncSlots numbers in
// turn). An access is an epoch: agent and tick. Agent B may touch what A wrote at tick t when B's
// clock holds at least t for A. Each clock has six parts, because the manual has five kinds of
// "before":
//   ordered   plain happens-before: barriers, mbarriers, waits, commits
//   proxied   the part of it that a proxy fence has made visible to the async proxy, in shared
//             memory
//   proxied_global  the same in global memory
//   released  tensor-memory operations followed by tcgen05.fence::before_thread_sync (or a commit)
//   inits     initialisations of mbarriers published by fence.mbarrier_init, which a relaxed
//   arrival
//             at the cluster's barrier passes on
//   tensor    released operations taken over by tcgen05.fence::after_thread_sync
//
// Lanes. A warp has two agents: one for what several of its lanes do in an instruction, one for
// what a lane does alone. What a lane releases alone, by an arrival or as the issuer of an
// asynchronous operation, is what lanes did alone and what all did before they last met: at
// bar.warp.sync or another barrier, at elect.sync or an aligned instruction of the tensor cores;
// votes and shuffles order no memory. The warp's clock holds, for its agent of several lanes, when
// they last met, and for the other one the present.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/numeric.h"

namespace fovea::emulator {

struct Inst;
struct Cta;
struct Cluster;
struct Launch;
struct Mbarrier;
struct Allocation;
struct OperandRef;
class Warp;
class AsyncOp;

// Agents of a CTA: its warps, operations, its warps' single lanes.
inline constexpr u32 kAsyncSlots = 64;
inline constexpr u32 kTickBits = 21;

enum ClockPart : u32 {
  clock_ordered,
  clock_proxied,
  clock_proxied_global,
  clock_released,
  clock_inits,
  clock_tensor,
  clock_parts
};

// Of another cluster: how many releases to global memory are known, and how many of them lie before
// a fence.proxy.async of global memory.
struct Releases {
  u32 seen = 0, proxied = 0;
};
using OtherClusters = std::map<u32, Releases>;

class Clock {
 public:
  bool empty() const { return ticks_.empty(); }
  void resize(u32 agents) {
    agents_ = agents;
    ticks_.assign(std::size_t{agents} * clock_parts, 0);
  }
  u32 at(ClockPart part, u32 agent) const { return ticks_[part * agents_ + agent]; }
  void set(ClockPart part, u32 agent, u32 tick) { ticks_[part * agents_ + agent] = tick; }
  void raise(ClockPart part, u32 agent, u32 tick) {
    u32& value = ticks_[part * agents_ + agent];
    value = value < tick ? tick : value;
  }
  // Takes over the first `parts` parts, and what is known of other clusters.
  void join(const Clock& other, u32 parts = clock_tensor);
  void join_part(ClockPart to, const Clock& other, ClockPart from);

  // Other clusters, whose agents have no ticks here.
  Releases releases_of(u32 cluster) const;
  void join_clusters(const Clock& other);
  void see_release(u32 cluster, u32 count);
  void fence_clusters();            // what is seen is also proxied
  void clear() { ticks_.clear(); }  // of the ticks alone
  u32 agents() const { return agents_; }

 private:
  u32 agents_ = 0;
  std::vector<u32> ticks_;
  std::shared_ptr<const OtherClusters> clusters_;  // shared by those who know the same; may be null
};

// State of one 32-bit word of shared memory, or of 16 lanes of a tensor-memory column.
struct Cell {
  u32 write = 0;               // epoch; 0 = never
  std::array<u32, 3> reads{};  // epochs of concurrent readers
  int write_line = 0;
  u8 written_bytes = 0;  // of the last write
  u8 defined_bytes = 0;
  u8 flags = 0;
  u8 strong_reads = 0;  // bit i: reads[i] is of a strong load
  u32 chain = 0;        // tensor memory: which accumulator chain wrote it
};
inline constexpr u8 kAsyncWrite = 1;
inline constexpr u8 kStrongWrite = 2;  // of an atomic or a strong store
inline constexpr u8 kStrongRead = 4;
inline constexpr u8 kFloatSum = 8;  // global memory: an addition whose order counts

struct SharedShadow {
  std::vector<Cell> cells;
};

// Global words know the cluster and its release count at the time of the access.
struct GlobalCell {
  u32 write = 0, write_cluster = 0, write_time = 0;
  u32 read = 0, read_cluster = 0, read_time = 0;
  int write_line = 0;
  u8 written_bytes = 0, flags = 0;
};
inline constexpr u64 kShadowPageBytes = 16384;
struct GlobalShadow {
  std::vector<std::unique_ptr<std::array<GlobalCell, kShadowPageBytes / 4>>> pages;
  u64 launch = 0;  // cells of an older launch count as untouched
};

// A word of global memory used for synchronisation.
struct GlobalSync {
  Clock clock;
  u64 cluster = 0;  // whose ticks they are
};

// What a warp knew of an operation before all lanes together waited for it.
struct Withheld {
  u32 agent = 0;
  std::array<u32, clock_parts> before{};
};

struct WarpCheck {
  Clock clock;
  std::vector<Withheld> withheld;  // since its lanes last met: a lane alone does not pass it on
  std::vector<u32> defined;        // per virtual register: lanes
  // The same of the low and the high word of 64-bit registers that hold one alone in some lanes.
  std::unordered_map<std::size_t, std::array<u32, 2>> defined_words;
  std::vector<u32> in_flight;  // per virtual register: number of the operation, 0 none
  std::vector<u64> written;    // per virtual register: when, in warp instructions
  Clock tensor_done;           // tcgen05 operations of this warp that have ended
  u64 matrix_fence = 0;        // last wgmma.fence
  bool matrix_fence_seen = false;
  Clock fenced;    // clock at the last memory fence
  Clock acquired;  // taken by relaxed loads, valid after the next fence
  u32 fenced_time = 0;
  std::unordered_map<u32, std::vector<i32>> flights;  // operation -> its registers
};

struct ClusterCheck {
  bool on = false;
  u32 agents = 0, agents_per_cta = 0, warps = 0;
  std::vector<u32> ticks;      // of asynchronous slots
  std::vector<u32> next_slot;  // per CTA
  u32 time = 1;                // releases to global memory
  u32 next_flight = 1;
  std::vector<std::vector<Cell>> tensor;  // per CTA
};

// Who touches memory.
struct AccessView {
  Launch* launch = nullptr;
  Cluster* cluster = nullptr;
  const Cta* cta = nullptr;  // of the agent
  int warp = -1;
  int lane = -1;
  const Inst* inst = nullptr;
  const char* agent_name = "warp";
  const Clock* clock = nullptr;
  u32 agent = 0;
  u32 twin = 0;  // the warp's other agent
  u32 tick = 0;
  bool async = false;  // through the async proxy
};

// Strong loads and stores, and atomics, do not race with one another.
enum class Access : u8 { read, write, atomic, strong_read, strong_write };

constexpr bool is_strong(Access access) { return access >= Access::atomic; }
constexpr bool is_write(Access access) {
  return access != Access::read && access != Access::strong_read;
}
constexpr bool is_read(Access access) {
  return access != Access::write && access != Access::strong_write;
}

inline u32 epoch_of(u32 agent, u32 tick) { return agent << kTickBits | tick; }

void check_start_cluster(Cluster& cluster);
void check_start_warp(Warp& warp);
AccessView view_of(Warp& warp, const Inst& inst, int lane);

// Registers
void check_registers_before(Warp& warp, const Inst& inst);
void check_registers_after(Warp& warp, const Inst& inst);
// Of the `written` lanes of a register, those of `defined` hold a value.
void check_define(Warp& warp, const OperandRef& operand, u32 written, u32 defined);
void check_mark_flight(Warp& warp, const OperandRef& operand, u32 flight);
void check_land_flight(Warp& warp, u32 flight);

// Memory
void check_shared(const AccessView& view, Cta& target, u32 offset, u32 bytes, Access access);
void check_global(const AccessView& view, Allocation& allocation, u64 address, u64 bytes,
                  Access access);
// Lanes [lane, lane + lanes) of columns [column, column + columns). Accesses of one chain are in
// order by themselves; for kOrderedByBarriers plain happens-before is enough.
inline constexpr u32 kOrderedByBarriers = ~0u;
void check_tensor(const AccessView& view, Cta& target, u32 column, u32 columns, u32 lane, u32 lanes,
                  Access access, u32 chain);
void check_forget_shared(Cta& target, u32 offset, u32 bytes);

// Synchronisation
// All lanes of the warp, or those of a member mask, are here.
void check_lanes_meet(Warp& warp);
// All lanes have waited for an operation.
void check_join_together(Warp& warp, u32 agent, u32 tick);
void check_release(Warp& warp, Clock& object);
// To an operation that several warps issue together.
void check_share(Warp& warp, Clock& operation);
// A relaxed arrival: passes on what fences before it have released.
void check_release_relaxed(Warp& warp, Clock& object);
void check_acquire(Warp& warp, const Clock& object);
void check_release_async(const AsyncOp& op, Clock& object);
void check_proxy_fence(Warp& warp, bool shared, bool global);
void check_memory_fence(Warp& warp);
void check_tensor_fence(Warp& warp, bool before);
void check_global_sync(Warp& warp, u64 address, bool release, bool acquire, bool store, bool load);
void check_barrier_init(Warp& warp, Mbarrier& barrier);
void check_barrier_fence(Warp& warp);
void check_barrier_use(const AccessView& view, Mbarrier& barrier, bool async_or_remote);
// Starts an asynchronous agent that knows what the warp knows.
void check_fork(AsyncOp& op, Warp& warp);
// The warp takes over what an operation has done.
void check_join(Warp& warp, const Clock& clock);

}  // namespace fovea::emulator
