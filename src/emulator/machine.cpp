// Launches: sets up clusters of CTAs and runs their warps and asynchronous work in seeded order.
#include <algorithm>
#include <cstring>

#include "emulator/async.h"
#include "emulator/execute.h"

namespace fovea::emulator {
namespace {

// Rounds over all warps in which nothing happened that another agent could see: another cluster may
// be needed. After kSpinLimit warp instructions of that, nobody will ever help.
constexpr u64 kIdleRounds = 64;
constexpr u64 kSpinLimit = 10'000'000;
// Answers "not yet" of try_wait in a row that bring nobody on are no polling: it is a deadlock.
constexpr u32 kFailedWaits = 1024;

u64 align_up(u64 value, u64 to) { return (value + to - 1) / to * to; }

const Function* find_kernel(const ModuleData& module, std::string_view name) {
  for (const auto& function : module.functions) {
    if (function->entry && !function->external && function->name == name) return function.get();
  }
  std::string known;
  for (const auto& function : module.functions) {
    if (function->entry) known += (known.empty() ? "" : ", ") + function->name;
  }
  throw Error(0, "the module has no kernel named '" + std::string(name) +
                     "'; it has: " + (known.empty() ? "none" : known) + ".");
}

const Program& program_of(MachineData& machine, ModuleData& module, std::string_view name) {
  machine.place_variables(module);
  const Function* function = find_kernel(module, name);
  auto& program = module.programs[std::string(name)];
  if (program == nullptr) program = build_program(module, *function);
  return *program;
}

u32 special_component(const std::string& name, const std::array<u32, 3>& values) {
  return values[static_cast<std::size_t>(name.back() - 'x') % 3];
}

std::array<u32, 3> unflatten(u64 index, const Dim3& dims) {
  return {static_cast<u32>(index % dims.x), static_cast<u32>(index / dims.x % dims.y),
          static_cast<u32>(index / dims.x / dims.y)};
}

std::array<u32, 3> as_array(const Dim3& d) { return {d.x, d.y, d.z}; }

// Value of a special register that is the same for all lanes; false when it is not known.
bool uniform_special(const Warp& warp, const std::string& name, u64& value) {
  const Launch& launch = *warp.launch;
  const Cta& cta = *warp.cta;
  const LaunchConfig& config = launch.config;
  const std::string base = name.substr(0, name.find('.'));
  std::array<u32, 3> clusters{}, cluster_id{}, in_cluster{};
  const std::array<u32, 3> grid = as_array(config.grid), dims = launch.cluster_dims;
  for (std::size_t i = 0; i < 3; ++i) {
    clusters[i] = grid[i] / dims[i];
    cluster_id[i] = cta.id[i] / dims[i];
    in_cluster[i] = cta.id[i] % dims[i];
  }
  const u32 cluster_size = dims[0] * dims[1] * dims[2];
  if (base == "%ntid") {
    value = special_component(name, as_array(config.block));
  } else if (base == "%ctaid") {
    value = special_component(name, cta.id);
  } else if (base == "%nctaid") {
    value = special_component(name, grid);
  } else if (base == "%clusterid") {
    value = special_component(name, cluster_id);
  } else if (base == "%nclusterid") {
    value = special_component(name, clusters);
  } else if (base == "%cluster_ctaid") {
    value = special_component(name, in_cluster);
  } else if (base == "%cluster_nctaid") {
    value = special_component(name, dims);
  } else if (name == "%cluster_ctarank") {
    value = cta.rank;
  } else if (name == "%cluster_nctarank") {
    value = cluster_size;
  } else if (name == "%warpid") {
    value = warp.index;
  } else if (name == "%nwarpid") {
    value = launch.warps;
  } else if (name == "%smid") {
    value = cta.linear % static_cast<u64>(launch.machine->chip.sm_count);
  } else if (name == "%nsmid") {
    value = static_cast<u64>(launch.machine->chip.sm_count);
  } else if (name == "%gridid") {
    value = 1;
  } else if (name == "%dynamic_smem_size") {
    value = config.dynamic_shared_bytes;
  } else if (name == "%total_smem_size") {
    value = launch.shared_bytes;
  } else if (name == "%reserved_smem_offset_begin") {
    value = 0;
  } else if (name == "%reserved_smem_offset_cap" || name == "%reserved_smem_offset_end") {
    value = kSharedStart;
  } else {
    return false;
  }
  return true;
}

u64 lane_special(const Warp& warp, const std::string& name, u32 lane, bool& known) {
  const u32 thread = warp.index * 32 + lane;
  if (name.substr(0, 5) == "%tid.") {
    return special_component(name, unflatten(thread, warp.launch->config.block));
  }
  if (name == "%laneid") return lane;
  if (name == "%lanemask_eq") return 1u << lane;
  if (name == "%lanemask_lt") return (1u << lane) - 1;
  if (name == "%lanemask_le") return (2u << lane) - 1;
  if (name == "%lanemask_gt") return ~((2u << lane) - 1);
  if (name == "%lanemask_ge") return ~((1u << lane) - 1);
  known = false;
  return 0;
}

void fill_specials(Warp& warp) {
  for (const SpecialRow& special : warp.program->specials) {
    const bool wide = (special.slot & 1) != 0;
    u8* row = warp.registers + (special.slot & ~1u);
    u64 value = 0;
    const bool uniform = uniform_special(warp, special.name, value);
    bool known = true;
    for (u32 lane = 0; lane < 32; ++lane) {
      if (!uniform) value = lane_special(warp, special.name, lane, known);
      if (!known) {
        throw Error(0, "special register " + special.name + " is not supported.");
      }
      std::memcpy(row + lane * (wide ? 8 : 4), &value, wide ? 8 : 4);
    }
  }
}

void start_warp(Launch& launch, Cta& cta, u32 index) {
  auto warp = std::make_unique<Warp>();
  warp->cta = &cta;
  warp->cluster = cta.cluster;
  warp->launch = &launch;
  warp->program = launch.program;
  warp->index = index;
  warp->registers = cta.register_file.data() + std::size_t{index} * launch.program->register_bytes;
  warp->predicates.assign(launch.program->predicates, 0);
  warp->carry.assign(1, 0);
  const u32 left = launch.threads - index * 32;
  warp->live = left >= 32 ? ~0u : (1u << left) - 1;
  Fragment fragment;
  fragment.mask = warp->live;
  warp->fragments.push_back(fragment);
  fill_specials(*warp);
  cta.warps.push_back(std::move(warp));
}

std::unique_ptr<Cta> start_cta(Launch& launch, Cluster& cluster, u32 rank,
                               const std::array<u32, 3>& id) {
  auto cta = std::make_unique<Cta>();
  cta->cluster = &cluster;
  cta->rank = rank;
  cta->id = id;
  cta->linear = id[0] + u64{launch.config.grid.x} * (id[1] + u64{launch.config.grid.y} * id[2]);
  cta->shared.assign(launch.shared_bytes, 0xcd);
  cta->register_file.resize(std::size_t{launch.warps} * launch.program->register_bytes);
  cta->local.resize(std::size_t{launch.warps} * 32 * launch.program->local_bytes);
  cta->groups.resize((launch.warps + 3) / 4);
  const Chip& chip = launch.machine->chip;
  if (chip.tensor_columns != 0) {
    cta->tensor.cells.assign(std::size_t{chip.tensor_columns} * 128, 0xcdcdcdcdu);
    cta->tensor.owner.assign(chip.tensor_columns, -1);
  }
  cta->live_warps = launch.warps;
  for (u32 i = 0; i < launch.warps; ++i) start_warp(launch, *cta, i);
  return cta;
}

std::unique_ptr<Cluster> start_cluster(Launch& launch, u64 index) {
  auto cluster = std::make_unique<Cluster>();
  cluster->launch = &launch;
  cluster->serial = index + 1;
  cluster->random.seed(launch.schedule.seed * 0x9e3779b97f4a7c15u + index + 1);
  const std::array<u32, 3>& dims = launch.cluster_dims;
  Dim3 grid{launch.config.grid.x / dims[0], launch.config.grid.y / dims[1],
            launch.config.grid.z / dims[2]};
  const std::array<u32, 3> base = unflatten(index, grid);
  const Dim3 inner{dims[0], dims[1], dims[2]};
  for (u32 rank = 0; rank < inner.count(); ++rank) {
    const std::array<u32, 3> in = unflatten(rank, inner);
    std::array<u32, 3> id{};
    for (std::size_t i = 0; i < 3; ++i) id[i] = base[i] * dims[i] + in[i];
    cluster->ctas.push_back(start_cta(launch, *cluster, rank, id));
  }
  if (launch.checks) check_start_cluster(*cluster);
  return cluster;
}

// What a finished CTA must not leave behind.
void check_end_of_cta(Launch& launch, Cta& cta) {
  for (const auto& [first, columns] : cta.tensor.allocations) {
    if (columns == 0) continue;
    launch.fault(FaultKind::tensor_memory, &cta, -1, -1, nullptr, "CTA",
                 std::to_string(columns) + " columns of tensor memory, from column " +
                     std::to_string(first) + ", were not deallocated before the CTA ended.");
  }
  for (const auto& [offset, barrier] : cta.barriers) {
    if (!barrier.valid || barrier.bytes == 0) continue;
    launch.fault(FaultKind::transaction_bytes, &cta, -1, -1, nullptr, "mbarrier " + hex(offset),
                 "the CTA ends with " + std::to_string(barrier.bytes) +
                     " transaction bytes outstanding on the mbarrier at " + hex(offset) +
                     " (initialised at line " + std::to_string(barrier.line) + ").");
  }
}

void finish_cluster(Launch& launch, Cluster& cluster) {
  while (cluster.run_pending(1000)) {
  }
  for (const auto& op : cluster.pending) {
    if (launch.stopped || !launch.report->faults.empty()) break;
    launch.fault(FaultKind::deadlock, op->cta, static_cast<int>(op->warp->index), op->lane,
                 op->inst, op->name(),
                 "the operation can never complete: what it waits for was "
                 "never issued or committed.");
  }
  if (!launch.stopped) {
    for (auto& cta : cluster.ctas) check_end_of_cta(launch, *cta);
  }
  Report& report = *launch.report;
  if (report.per_warp.size() < launch.warps) report.per_warp.resize(launch.warps);
  for (auto& cta : cluster.ctas) {
    for (auto& warp : cta->warps) {
      report.per_warp[warp->index] += warp->counters;
      report.total += warp->counters;
    }
  }
}

std::string waiting_text(const Warp& warp) {
  std::string text;
  for (const Fragment& fragment : warp.fragments) {
    const Inst& inst = warp.program->code[fragment.pc];
    if (!text.empty()) text += ", ";
    text += "warp " + std::to_string(warp.index);
    if (fragment.mask != ~0u) text += " lanes " + hex(fragment.mask);
    text += " at line " + std::to_string(inst.line);
    if (inst.text != nullptr) {
      text += " (" + std::string(inst.text->mnemonic);
      for (std::size_t i = 0; i < inst.text->modifiers.size() && i < 3; ++i) {
        text += "." + std::string(inst.text->modifiers[i]);
      }
      text += ")";
    }
  }
  return text;
}

void report_deadlock(Launch& launch, Cluster& cluster) {
  for (auto& cta : cluster.ctas) {
    std::string text;
    const Warp* first = nullptr;
    for (const auto& warp : cta->warps) {
      if (warp->done()) continue;
      if (first == nullptr) first = warp.get();
      text += (text.empty() ? "" : "; ") + waiting_text(*warp);
    }
    if (first == nullptr || first->fragments.empty()) continue;
    const Inst& inst = launch.program->code[first->fragments[0].pc];
    launch.fault(FaultKind::deadlock, cta.get(), static_cast<int>(first->index), -1, &inst,
                 "warp " + std::to_string(first->index),
                 "nothing can make progress: " + text + ". " + describe_barriers(*cta));
  }
}

void validate(const Launch& launch, const Function& kernel) {
  const Chip& chip = launch.machine->chip;
  const LaunchConfig& c = launch.config;
  if (c.grid.count() == 0 || c.block.count() == 0) {
    throw Error(0, "the grid and the block must not be empty.");
  }
  if (c.block.count() > 1024) {
    throw Error(0, "a block of " + std::to_string(c.block.count()) +
                       " threads is too large; 1024 is the limit.");
  }
  if (kernel.max_threads != 0 && c.block.count() > kernel.max_threads) {
    throw Error(0, "kernel " + kernel.name + " was compiled for at most " +
                       std::to_string(kernel.max_threads) + " threads per block, not " +
                       std::to_string(c.block.count()) + ".");
  }
  const std::array<u32, 3> grid = as_array(c.grid), dims = launch.cluster_dims;
  for (std::size_t i = 0; i < 3; ++i) {
    if (dims[i] == 0 || grid[i] % dims[i] != 0) {
      throw Error(0, "grid dimension " + std::to_string(grid[i]) +
                         " is not a multiple of the cluster dimension " + std::to_string(dims[i]) +
                         ".");
    }
  }
  if (u64{dims[0]} * dims[1] * dims[2] > chip.max_cluster) {
    throw Error(0, "a cluster may have at most " + std::to_string(chip.max_cluster) + " CTAs.");
  }
  if (launch.shared_bytes - kSharedStart > chip.shared_bytes_per_cta) {
    throw Error(0, "the kernel needs " + std::to_string(launch.shared_bytes - kSharedStart) +
                       " bytes of shared memory; " + chip.name + " has " +
                       std::to_string(chip.shared_bytes_per_cta) + " per CTA.");
  }
  if (launch.program->parameter_bytes != launch.parameters.size()) {
    throw Error(
        0, "kernel " + kernel.name + " takes " + std::to_string(launch.program->parameter_bytes) +
               " bytes of parameters, not " + std::to_string(launch.parameters.size()) + ".");
  }
}

void require_target(const Chip& chip, const std::string& target) {
  const auto number = [](const std::string& t) {
    return t.size() > 3 ? std::atoi(t.c_str() + 3) : 0;
  };
  const bool family =
      !target.empty() && target.back() == 'f' && number(target) / 10 == number(chip.arch) / 10;
  const bool plain = !target.empty() && target.back() >= '0' && target.back() <= '9' &&
                     number(target) <= number(chip.arch);
  if (target == chip.arch || family || plain) return;
  throw Error(0, "PTX for " + target + " cannot run on " + chip.name + " (" + chip.arch + ").");
}

// Runs clusters one after another; when one can only spin, the next is started beside it, as a GPU
// with free SMs would.
void run_grid(Launch& launch) {
  std::vector<std::unique_ptr<Cluster>> running;
  const u64 limit = static_cast<u64>(launch.machine->chip.sm_count);
  auto start = [&] { running.push_back(start_cluster(launch, launch.next_cluster++)); };
  while (!launch.stopped) {
    if (running.empty()) {
      if (launch.next_cluster >= launch.clusters) break;
      start();
    }
    bool worked = false, busy = false;
    for (auto& cluster : running) {
      if (!cluster->round()) continue;
      worked = true;
      if (!cluster->idle()) busy = true;
      if (launch.stopped) break;
    }
    for (std::size_t i = 0; i < running.size();) {
      if (!running[i]->finished) {
        ++i;
        continue;
      }
      finish_cluster(launch, *running[i]);
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
      busy = true;
    }
    if (busy) {
      launch.last_busy = launch.steps;
      for (auto& cluster : running) cluster->failed_waits = 0;  // it may be another's turn to help
    }
    if (busy || launch.stopped || running.empty()) continue;
    if (launch.next_cluster < launch.clusters && running.size() < limit) {
      start();
    } else if (!worked || launch.steps - launch.last_busy > kSpinLimit) {
      for (auto& cluster : running) report_deadlock(launch, *cluster);
      launch.stopped = true;
    }
  }
  for (auto& cluster : running) finish_cluster(launch, *cluster);
}

}  // namespace

void Cluster::enqueue(std::unique_ptr<AsyncOp> op, Warp& warp, const Inst& inst, int lane) {
  op->cta = warp.cta;
  op->warp = &warp;
  op->inst = &inst;
  op->lane = lane;
  op->serial = next_op++;
  if (launch->checks) check_fork(*op, warp);
  pending.push_back(std::move(op));
  changed();
  if (launch->schedule.policy == Policy::eager) {
    while (run_pending(64)) {
    }
  }
}

// Executes phases of operations that are ready: the oldest first when eager, else in random order.
bool Cluster::run_pending(std::size_t at_most) {
  bool any = false;
  for (std::size_t n = 0; n < at_most && !pending.empty() && !launch->stopped; ++n) {
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < pending.size(); ++i) {
      if (!pending[i]->ready(*this)) continue;
      ready.push_back(i);
      if (launch->schedule.policy == Policy::eager) break;
    }
    if (ready.empty()) return any;
    const std::size_t pick = ready[ready.size() == 1 ? 0 : random() % ready.size()];
    any = true;
    AsyncOp* op = pending[pick].get();
    const bool finished_now = op->execute(*this);
    changed();
    if (!finished_now) continue;
    // Operations may have been added meanwhile, so the position is looked up again.
    for (std::size_t i = 0; i < pending.size(); ++i) {
      if (pending[i].get() != op) continue;
      pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  }
  return any;
}

bool Cluster::idle() const { return idle_rounds >= kIdleRounds; }

bool Cluster::round() {
  if (finished) return false;
  std::vector<Warp*> order;
  bool all_done = true;
  for (auto& cta : ctas) {
    for (auto& warp : cta->warps) {
      if (warp->done()) continue;
      all_done = false;
      if (warp->runnable()) order.push_back(warp.get());
    }
  }
  if (all_done) {
    finished = true;
    return false;
  }
  const bool shuffled = launch->schedule.policy != Policy::eager || launch->schedule.seed != 0;
  if (shuffled) std::shuffle(order.begin(), order.end(), random);
  bool worked = false;
  const u64 changes_before = changes + stores;
  for (Warp* warp : order) {
    const u64 quantum = launch->schedule.policy == Policy::random ? 1 + random() % 512 : 4096;
    worked = warp->run(quantum) || worked;
    if (launch->stopped) return false;
    if (launch->schedule.policy == Policy::random && random() % 2 == 0) {
      worked = run_pending(1 + random() % 3) || worked;
    }
  }
  if (launch->steps > launch->schedule.step_limit) {
    launch->fault(FaultKind::step_limit, ctas[0].get(), -1, -1, nullptr, "launch",
                  "the launch executed " + std::to_string(launch->steps) +
                      " warp instructions without ending.");
    launch->stopped = true;
    return false;
  }
  // Spinning on memory or test_wait changes nothing that others see.
  idle_rounds = changes + stores == changes_before ? idle_rounds + 1 : 0;
  if (worked && !idle()) {
    failing_waits = false;
    return true;
  }
  if (run_pending(1)) return true;
  const bool may_poll = failed_waits < kFailedWaits;
  if (!failing_waits && may_poll) {
    // try_wait may give up; a program that polls several barriers counts on it.
    failing_waits = true;
    changed();
    return true;
  }
  if (!may_poll) failing_waits = false;
  return worked;
}

void Launch::add_fault(Fault fault) {
  const u64 key = static_cast<u64>(fault.kind) << 32 | static_cast<u32>(fault.line);
  u32& seen = seen_faults[key];
  ++seen;
  report->stopped_by = fault.kind;
  unlisted.reset();
  if (seen > 1 || report->faults.size() >= schedule.max_faults) {
    ++report->faults_not_listed;
    if (seen == 1) unlisted = std::move(fault);
    return;
  }
  report->faults.push_back(std::move(fault));
}

void Launch::conclude() {
  if (!stopped) {
    report->stopped_by = FaultKind::none;
    return;
  }
  if (!unlisted.has_value()) return;
  report->faults.push_back(std::move(*unlisted));
  --report->faults_not_listed;
}

void Launch::fault(FaultKind kind, const Cta* cta, int warp, int lane, const Inst* inst,
                   const std::string& agent, const std::string& sentence) {
  Fault result;
  result.kind = kind;
  result.warp = warp;
  result.lane = lane;
  result.agent = agent;
  result.sentence = sentence;
  if (cta != nullptr) result.cta = cta->id;
  if (inst != nullptr) {
    result.line = inst->line;
    if (inst->source_line != 0) {
      const auto file = program->module->files.find(inst->source_file);
      result.source =
          (file == program->module->files.end() ? "file " + std::to_string(inst->source_file)
                                                : file->second) +
          ":" + std::to_string(inst->source_line);
    }
    if (inst->text != nullptr) {
      result.instruction = std::string(inst->text->mnemonic);
      for (const std::string_view word : inst->text->modifiers) {
        result.instruction += "." + std::string(word);
      }
    }
  }
  add_fault(std::move(result));
}

Machine::Machine(const Chip& chip) : data_(std::make_unique<MachineData>()) { data_->chip = chip; }
Machine::~Machine() = default;
Machine::Machine(Machine&&) noexcept = default;
Machine& Machine::operator=(Machine&&) noexcept = default;

const Chip& Machine::chip() const { return data_->chip; }

u64 Machine::allocate(std::size_t bytes) { return data_->allocate(bytes); }

void Machine::free(u64 address) {
  auto& list = data_->allocations;
  for (auto it = list.begin(); it != list.end(); ++it) {
    if ((*it)->base != address) continue;
    if (data_->last == it->get()) data_->last = nullptr;
    list.erase(it);
    return;
  }
  throw Error(0, "free of " + hex(address) + ", which is not the start of an allocation.");
}

void Machine::adopt(void* memory, std::size_t bytes) {
  data_->adopt(static_cast<u8*>(memory), bytes);
}

Machine::Range Machine::allocation(u64 address) const {
  const Allocation* found = data_->find(address, 0);
  if (found == nullptr || address == found->base + found->bytes) return {};
  return {found->base, found->bytes};
}

void* Machine::host_pointer(u64 address, std::size_t bytes) {
  Allocation* allocation = data_->find(address, bytes);
  if (allocation == nullptr) {
    throw Error(
        0, std::to_string(bytes) + " bytes at " + hex(address) + " are not inside an allocation.");
  }
  return allocation->data + (address - allocation->base);
}

void Machine::write(u64 address, const void* source, std::size_t bytes) {
  if (bytes != 0) std::memcpy(host_pointer(address, bytes), source, bytes);
}

void Machine::read(void* destination, u64 address, std::size_t bytes) const {
  if (bytes == 0) return;
  std::memcpy(destination, const_cast<Machine*>(this)->host_pointer(address, bytes), bytes);
}

void Machine::fill(u64 address, int byte, std::size_t bytes) {
  if (bytes != 0) std::memset(host_pointer(address, bytes), byte, bytes);
}

u64 Machine::symbol(const Module& module, std::string_view name) {
  return data_->symbol(*module.data(), std::string(name));
}

KernelInfo Module::kernel(std::string_view name) const {
  const Function* function = find_kernel(*data_, name);
  KernelInfo info;
  info.name = function->name;
  for (const Variable& parameter : function->parameters) {
    info.parameter_offsets.push_back(static_cast<u32>(parameter.offset));
    info.parameter_sizes.push_back(static_cast<u32>(parameter.bytes));
    info.parameter_bytes = static_cast<u32>(parameter.offset + parameter.bytes);
  }
  info.static_shared_bytes =
      static_cast<u32>(align_up(data_->static_shared_bytes, 16) + function->shared_bytes);
  info.max_threads = function->max_threads;
  info.required_cluster = function->required_cluster;
  const auto program = data_->programs.find(name);
  if (program != data_->programs.end()) {
    info.virtual_registers = program->second->register_bytes / 128;
  }
  return info;
}

Report Machine::launch(const Module& module, std::string_view kernel, const LaunchConfig& config,
                       std::span<const std::byte> parameters, const Schedule& schedule) {
  require_target(data_->chip, module.target());
  Report report;
  report.kernel = std::string(kernel);
  Launch launch;
  launch.machine = data_.get();
  launch.program = &program_of(*data_, *module.data(), kernel);
  launch.config = config;
  launch.parameters.resize(parameters.size());
  if (!parameters.empty()) {
    std::memcpy(launch.parameters.data(), parameters.data(), parameters.size());
  }
  launch.schedule = schedule;
  launch.checks = schedule.checks;
  launch.serial = ++data_->launches;
  launch.report = &report;
  launch.cluster_dims = as_array(config.cluster);
  const Function& function = *launch.program->entry;
  if (function.required_cluster[0] != 0) launch.cluster_dims = function.required_cluster;
  launch.threads = static_cast<u32>(config.block.count());
  launch.warps = (launch.threads + 31) / 32;
  launch.shared_bytes =
      static_cast<u32>(kSharedStart + align_up(launch.program->static_shared_bytes, 16) +
                       config.dynamic_shared_bytes);
  validate(launch, function);
  const u64 cluster_size =
      u64{launch.cluster_dims[0]} * launch.cluster_dims[1] * launch.cluster_dims[2];
  launch.clusters = config.grid.count() / cluster_size;
  if (schedule.cta_limit != 0) {
    launch.clusters =
        std::min(launch.clusters, (schedule.cta_limit + cluster_size - 1) / cluster_size);
  }
  run_grid(launch);
  report.ctas = launch.next_cluster * cluster_size;
  launch.conclude();
  return report;
}

}  // namespace fovea::emulator
