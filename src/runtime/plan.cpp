#include "runtime/plan.h"

#include <cstdint>
#include <memory>

#include "cpu/quantize.h"
#include "runtime/devices.h"
#include "runtime/eight_bits.h"
#include "runtime/gpu.h"
#include "runtime/staging.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {
namespace {

std::vector<std::string> cpu_supports(Device, const Request& request) {
  std::vector<std::string> reasons;
  if (in_eight_bits(request.validated, request.options)) {
    reasons = quantization_objections(request.validated);
  }
  if (request.given.memory != Memory::host) {
    reasons.emplace_back("it computes in host memory and the problem is in device memory");
  }
  return reasons;
}

constexpr std::size_t widened_alignment = 64;

// Where operands in fp32 go, which are in front of the engine's own memory.
std::byte* widened_place(std::byte* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return workspace + (widened_alignment - address % widened_alignment) % widened_alignment;
}

// The engine computes in fp32 whatever 8 bits stand for.
core::Problem as_computed(const Plan::Choice& choice, const core::Problem& problem,
                          std::byte* workspace) {
  return choice.widened_bytes == 0 ? problem : cpu::widened(problem, widened_place(workspace));
}

void configure_cpu(Plan::Choice& choice, const Request& request) {
  if (in_eight_bits(choice.problem, request.options)) {
    choice.quantize =
        quantize_options(request.options.eight_bits.value_or(EightBits{}).quantization);
    choice.widened_bytes = cpu::widened_bytes(choice.problem) + widened_alignment;
  }
  // Any aligned address stands for that of the workspace.
  auto* const anywhere = reinterpret_cast<std::byte*>(widened_alignment);
  choice.cpu =
      cpu::configure_forward(as_computed(choice, choice.problem, anywhere), request.options.threads,
                             softmax_policy(request.options.softmax));
  choice.workspace_bytes = choice.widened_bytes + choice.cpu.workspace_bytes;
}

void run_cpu(const Plan::Choice& choice, const Problem&, const core::Problem& validated,
             std::span<std::byte> workspace, Statistics* statistics) {
  cpu::ForwardStatistics counts;
  if (choice.widened_bytes > 0) {
    cpu::widen(validated, choice.quantize, widened_place(workspace.data()), choice.cpu.threads);
  }
  cpu::forward(as_computed(choice, validated, workspace.data()), choice.cpu,
               workspace.data() + choice.widened_bytes, counts);
  if (statistics == nullptr) return;
  statistics->tiles_full = counts.tiles_full;
  statistics->tiles_partial = counts.tiles_partial;
  statistics->rescales = counts.rescales;
  statistics->repairs = counts.repairs;
  statistics->recomputed_tiles = counts.recomputed_tiles;
  statistics->splits = counts.splits;
}

std::string explain_splits(const core::Problem& problem, core::int64 splits) {
  if (problem.num_splits == 0) {
    return splits == 1 ? "1"
                       : text(splits, ", because the queries alone do not occupy the threads");
  }
  return splits == problem.num_splits
             ? text(splits, ", as asked for")
             : text(splits, " of the ", problem.num_splits,
                    " asked for, as a part holds at least one tile of keys");
}

std::string explain_cpu(const Plan::Choice& choice) {
  const cpu::ForwardConfig& config = choice.cpu;
  const core::int32 group = choice.problem.group_size();
  const char* keys = config.few_rows
                         ? "read once as they lie, since packing does not pay for so few rows"
                         : "packed tile by tile, for all rows of a tile to share";
  return text(
      "device     cpu, ", cpu::instruction_set(), ", ", config.threads,
      config.threads == 1 ? " thread\n" : " threads\n",                                     //
      "tiles      ", config.block_q, " rows (queries of ", group,                           //
      group == 1 ? " head) x " : " heads that share a key/value head) x ", config.block_k,  //
      " keys\n",                                                                            //
      "keys       ", keys, "\n",                                                            //
      "splits     ", explain_splits(choice.problem, config.splits), "\n",                   //
      "products   ", config.bf16_products ? "bf16 dot-product instructions\n" : "fp32\n",   //
      "operands   ",
      choice.widened_bytes == 0 ? "as they are\n" : "of 8 bits, brought into fp32 first\n",  //
      "softmax    ", policy_name(config.softmax), "\n",                                      //
      "workspace  ", choice.workspace_bytes, " bytes, of which ", config.thread_workspace_bytes,
      " per thread\n");
}

constexpr Engine cpu_engine{configure_cpu, run_cpu, explain_cpu};

// The problem as a GPU gets it.
Problem on_device(const Problem& problem) {
  return problem.memory == Memory::device ? problem : runtime::staged_layout(problem);
}

core::Problem on_device(const Problem& there, const core::Problem& validated) {
  return translate(there, {validated.batch, validated.seqlen_q, validated.seqlen_k});
}

std::vector<std::string> gpu_supports(Device device, const Request& request) {
  const Problem there = on_device(request.given);
  std::string arch(runtime::emulated_arch(device));
  try {
    if (arch.empty()) arch = runtime::shared_device(device).properties().arch;
  } catch (const Unsupported& fault) {
    return {fault.what()};
  }
  return runtime::gpu_supports(there, on_device(there, request.validated), {arch, request.options});
}

void configure_gpu(Plan::Choice& choice, const Request& request) {
  Options options = request.options;
  const Problem there = on_device(request.given);
  if (choice.memory == Memory::host) options.own_workspace = false;  // one for each run
  choice.gpu = std::make_shared<const runtime::GpuPlan>(
      runtime::shared_device(choice.device), there, on_device(there, choice.problem), options);
  choice.workspace_bytes =
      choice.memory == Memory::device ? choice.gpu->workspace_bytes() : std::size_t{0};
}

void run_gpu(const Plan::Choice& choice, const Problem& given, const core::Problem& validated,
             std::span<std::byte> workspace, Statistics* statistics) {
  if (choice.memory == Memory::device) {
    choice.gpu->run(given, validated, workspace, statistics);
  } else {
    runtime::run_staged(*choice.gpu, given, validated, statistics);
  }
}

std::string explain_gpu(const Plan::Choice& choice) {
  return choice.gpu->explain() +
         (choice.memory == Memory::host
              ? "memory     host: every run copies the tensors there and the results back\n"
              : "");
}

constexpr Engine gpu_engine{configure_gpu, run_gpu, explain_gpu};

constexpr std::array<Candidate, 5> all_candidates{{
    {Device::cuda, gpu_supports, &gpu_engine, Memory::device},
    {Device::cpu, cpu_supports, &cpu_engine, Memory::host},
    {Device::emulated_sm90a, gpu_supports, &gpu_engine, std::nullopt},
    {Device::emulated_sm100a, gpu_supports, &gpu_engine, std::nullopt},
    {Device::emulated_sm103a, gpu_supports, &gpu_engine, std::nullopt},
}};

std::string joined(const std::vector<std::string>& reasons) {
  std::string result;
  for (const std::string& reason : reasons) result += (result.empty() ? "" : "; ") + reason;
  return result;
}

}  // namespace

void check_options(const Options& options) {
  require(options.device <= Device::emulated_sm103a, "options.device is ",
          static_cast<int>(options.device), ", which is no fovea::Device");
  require(options.softmax <= Softmax::sum_guard, "options.softmax is ",
          static_cast<int>(options.softmax), ", which is no fovea::Softmax");
  require(options.threads >= 0 && options.threads <= max_threads, "options.threads is ",
          options.threads, "; it must lie in 0..", max_threads, ", where 0 is the OpenMP default");
  if (options.eight_bits) check_eight_bits(*options.eight_bits);
}

namespace {

// No device that was asked for computes the problem: say why, and which one does.
[[noreturn]] void refuse(Device asked, const std::vector<Refusal>& refusals,
                         const std::vector<Device>& able) {
  std::string message;
  if (asked == Device::automatic) {
    message = "no device computes this problem";
    const char* separator = ": not ";
    for (const Refusal& refusal : refusals) {
      message += text(separator, name(refusal.device), " (", refusal.reasons, ")");
      separator = ", not ";
    }
  }
  for (const Refusal& refusal : refusals) {
    if (refusal.device != asked) continue;
    message = text("device ", name(asked), " does not compute this problem: ", refusal.reasons);
  }
  for (const Device device : able) message += text("; device ", name(device), " does");
  throw Unsupported(message);
}

// Fills in the device and the reasons against the others.
void choose_device(const Request& request, Plan::Choice& choice) {
  const Device asked = request.options.device;
  const bool automatic = asked == Device::automatic;
  bool chosen = false;
  std::vector<Device> able;
  for (const Candidate& candidate : candidates()) {
    const bool wanted =
        automatic ? candidate.automatic_for == request.given.memory : candidate.device == asked;
    if (candidate.device == Device::cuda && !wanted) {
      // Not even looked for: that alone would take the driver's memory and time.
      choice.refusals.push_back({candidate.device, "it was not asked for"});
      continue;
    }
    const std::vector<std::string> reasons = candidate.supports(candidate.device, request);
    if (!reasons.empty()) {
      choice.refusals.push_back({candidate.device, joined(reasons)});
    } else if (wanted && !chosen) {
      choice.device = candidate.device;
      choice.engine = candidate.engine;
      chosen = true;
    } else {
      able.push_back(candidate.device);
      choice.refusals.push_back({candidate.device, !automatic ? "another device was asked for"
                                                              : "it runs only when asked for"});
    }
  }
  if (!chosen) refuse(asked, choice.refusals, able);
}

// What run() may not change, beside the shapes and dtypes of the tensors.
struct Trait {
  std::string_view name;
  double (*value)(const core::Problem& problem);
};
constexpr Trait fixed_traits[] = {
    {"the number of sequences", [](const core::Problem& p) { return double(p.batch); }},
    {"presence of cu_seqlens_q", [](const core::Problem& p) { return double(p.is_varlen_q()); }},
    {"presence of cu_seqlens_k", [](const core::Problem& p) { return double(p.is_varlen_k()); }},
    {"presence of block_table", [](const core::Problem& p) { return double(p.is_paged()); }},
    {"block_table_columns", [](const core::Problem& p) { return double(p.block_table_stride); }},
    {"softmax_scale", [](const core::Problem& p) { return double(p.softmax_scale); }},
    {"softcap", [](const core::Problem& p) { return double(p.softcap); }},
    {"window_left", [](const core::Problem& p) { return double(p.window.left); }},
    {"window_right (0 if causal)", [](const core::Problem& p) { return double(p.window.right); }},
    {"dropout.probability", [](const core::Problem& p) { return double(p.dropout.probability); }},
    {"num_splits", [](const core::Problem& p) { return double(p.num_splits); }},
    {"deterministic", [](const core::Problem& p) { return double(p.deterministic); }},
};

}  // namespace

void check_matches(const Plan::Choice& planned, const Problem& problem,
                   const core::Problem& validated) {
  require(problem.memory == planned.memory, "memory is ",
          problem.memory == Memory::device ? "device" : "host",
          " but the plan was made for the other; plan again");
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const Tensor& tensor = problem.*arguments[i].tensor;
    const Tensor& before = planned.signature[i];
    require(tensor.present == before.present, arguments[i].name,
            tensor.present ? " is present but the plan was made without it; plan again"
                           : " is absent but the plan was made with it; plan again");
    if (!tensor.present) continue;
    require(tensor.shape == before.shape, arguments[i].name, " has shape ", Tuple{tensor.shape},
            " but the plan was made for ", Tuple{before.shape}, "; plan again for a new shape");
    require(tensor.dtype == before.dtype, arguments[i].name, " has dtype ", tensor.dtype,
            " but the plan was made for ", before.dtype, "; plan again for a new dtype");
  }
  for (const Trait& trait : fixed_traits) {
    const double value = trait.value(validated);
    const double before = trait.value(planned.problem);
    require(value == before, trait.name, " is ", value, " but the plan was made for ", before,
            "; plan again");
  }
  require(validated.seqlen_q <= planned.problem.seqlen_q, "the longest query sequence has ",
          validated.seqlen_q, " rows but the plan was made for at most ", planned.problem.seqlen_q,
          "; plan with max_seqlen_q at the largest length to come");
  require(validated.seqlen_k <= planned.problem.seqlen_k, "the longest key sequence has ",
          validated.seqlen_k, " keys but the plan was made for at most ", planned.problem.seqlen_k,
          "; plan with max_seqlen_k at the largest length to come");
}

namespace {

void check_workspace(const Problem& problem, std::span<std::byte> workspace, std::size_t needed) {
  require(workspace.size() >= needed && (workspace.data() != nullptr || needed == 0),
          "workspace has ", workspace.data() != nullptr ? workspace.size() : 0,
          " bytes; it must have at least ", needed, " (Plan::workspace_bytes)");
  const Tensor bytes =
      contiguous(workspace.data(), DType::boolean, {1, 1, 1, static_cast<std::int64_t>(needed)});
  for (const Argument& argument : arguments) {
    require(!share_memory(bytes, problem.*argument.tensor), "workspace shares memory with ",
            argument.name, "; it must lie apart from every tensor");
  }
}

const Plan::Choice& checked(const std::shared_ptr<const Plan::Choice>& choice) {
  require(choice != nullptr, "the plan is empty, as a moved-from one is; use one from plan()");
  return *choice;
}

}  // namespace

std::span<const Candidate> candidates() { return all_candidates; }

core::SoftmaxPolicy softmax_policy(Softmax softmax) {
  switch (softmax) {
    case Softmax::automatic: break;
    case Softmax::online: return core::SoftmaxPolicy::online;
    case Softmax::conditional: return core::SoftmaxPolicy::conditional;
    case Softmax::sum_guard: return core::SoftmaxPolicy::sum_guard;
  }
  return core::SoftmaxPolicy::sum_guard;
}

std::string_view policy_name(core::SoftmaxPolicy policy) {
  switch (policy) {
    case core::SoftmaxPolicy::online: return name(Softmax::online);
    case core::SoftmaxPolicy::conditional: return name(Softmax::conditional);
    case core::SoftmaxPolicy::sum_guard: return name(Softmax::sum_guard);
  }
  return "unknown";
}

std::string_view name(Device device) {
  constexpr std::array<std::string_view, 6> names{
      "auto", "cpu", "cuda", "emulated:sm_90a", "emulated:sm_100a", "emulated:sm_103a"};
  const auto index = static_cast<std::size_t>(device);
  return index < names.size() ? names[index] : "unknown";
}

std::string_view name(Softmax softmax) {
  constexpr std::array<std::string_view, 4> names{"auto", "online", "conditional", "sum_guard"};
  const auto index = static_cast<std::size_t>(softmax);
  return index < names.size() ? names[index] : "unknown";
}

std::string_view version() { return FOVEA_VERSION; }

std::string_view cpu_instruction_set() { return cpu::instruction_set(); }

Plan::Plan(std::shared_ptr<const Choice> choice) : choice_(std::move(choice)) {}

std::size_t Plan::workspace_bytes() const { return checked(choice_).workspace_bytes; }

Device Plan::device() const { return checked(choice_).device; }

std::string Plan::explain() const {
  const Choice& choice = checked(choice_);
  std::string result = choice.engine->explain(choice);
  for (const Refusal& refusal : choice.refusals) {
    result += text("not ", name(refusal.device), ": ", refusal.reasons, "\n");
  }
  return result;
}

void Plan::run(const Problem& problem, std::span<std::byte> workspace,
               Statistics* statistics) const {
  const Choice& choice = checked(choice_);
  core::Problem validated = validate(problem);
  check_matches(choice, problem, validated);
  check_workspace(problem, workspace, choice.workspace_bytes);
  // The bounds that the configuration was made for.
  validated.seqlen_q = choice.problem.seqlen_q;
  validated.seqlen_k = choice.problem.seqlen_k;
  if (statistics != nullptr) *statistics = {};
  choice.engine->run(choice, problem, validated, workspace, statistics);
}

Plan plan(const Problem& problem, const Options& options) {
  check_options(options);
  auto choice = std::make_shared<Plan::Choice>();
  choice->problem = validate(problem);
  if (options.eight_bits) check_rotary(options.eight_bits->quantization.rotary, choice->problem);
  choice->memory = problem.memory;
  require(!options.own_workspace || problem.memory == Memory::device,
          "options.own_workspace is set but memory is host; there the workspace is the caller's");
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    choice->signature[i] = problem.*arguments[i].tensor;
  }
  const Request request{problem, choice->problem, options};
  choose_device(request, *choice);
  choice->engine->configure(*choice, request);
  return Plan(std::move(choice));
}

void attention(const Problem& problem, const Options& options, Statistics* statistics) {
  if (problem.memory == Memory::device) {
    Options own = options;
    own.own_workspace = true;
    Statistics counts;  // asking for them waits for the stream, before the workspace goes
    plan(problem, own).run(problem, {}, statistics != nullptr ? statistics : &counts);
    return;
  }
  const Plan chosen = plan(problem, options);
  const std::size_t bytes = chosen.workspace_bytes();
  const auto workspace = std::make_unique_for_overwrite<std::byte[]>(bytes);
  chosen.run(problem, {workspace.get(), bytes}, statistics);
}

}  // namespace fovea
