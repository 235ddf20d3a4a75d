#include "runtime/backward.h"

#include <memory>
#include <optional>

#include "cpu/attention.h"
#include "runtime/devices.h"
#include "runtime/gpu_backward.h"
#include "runtime/staging.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {
namespace {

using runtime::BackwardRequest;

std::vector<std::string> cpu_supports(Device, const BackwardRequest& request) {
  std::vector<std::string> reasons;
  const core::Problem& problem = request.validated;
  if (request.problem.memory != Memory::host) {
    reasons.emplace_back("it computes in host memory and the problem is in device memory");
  }
  if (core::is_eight_bit(problem.q.dtype)) {
    reasons.push_back(text("gradients are computed in f32, bf16 and f16 but q, k and v are ",
                           static_cast<DType>(problem.q.dtype),
                           ", so convert them to one of those"));
  }
  if (problem.is_paged()) {
    reasons.emplace_back(
        "k and v are paged, and a page may serve several sequences, so gather the pages into dense "
        "or packed tensors and drop block_table");
  }
  return reasons;
}

// A request as it will be on a GPU.
struct OnDevice {
  Problem problem;
  Gradients gradients;
  core::Problem validated;
  core::Gradients validated_gradients;

  explicit OnDevice(const BackwardRequest& r) : problem(r.problem), gradients(r.gradients) {
    if (problem.memory == Memory::host) {
      problem = runtime::staged_layout(problem);
      gradients = runtime::staged_layout(gradients);
    }
    validated = translate(problem, {r.validated.batch, r.validated.seqlen_q, r.validated.seqlen_k});
    validated_gradients = translate(problem, gradients);
  }
  [[nodiscard]] BackwardRequest request() const {
    return {problem, gradients, validated, validated_gradients};
  }
};

std::vector<std::string> gpu_supports(Device device, const BackwardRequest& request) {
  std::string arch(runtime::emulated_arch(device));
  try {
    if (arch.empty()) arch = runtime::shared_device(device).properties().arch;
  } catch (const Unsupported& fault) {
    return {fault.what()};
  }
  return runtime::gpu_backward_supports(OnDevice(request).request(), arch);
}

struct BackwardCandidate {
  Device device;
  std::vector<std::string> (*supports)(Device device, const BackwardRequest& request);
  std::optional<Memory> automatic_for;  // chosen without being asked for
};

// In order of preference.
constexpr BackwardCandidate backward_candidates[] = {
    {Device::cuda, gpu_supports, Memory::device},
    {Device::cpu, cpu_supports, Memory::host},
    {Device::emulated_sm90a, gpu_supports, std::nullopt},
    {Device::emulated_sm100a, gpu_supports, std::nullopt},
    {Device::emulated_sm103a, gpu_supports, std::nullopt}};

void choose_device(Device asked, const BackwardRequest& request, Plan::Choice& choice) {
  const bool automatic = asked == Device::automatic;
  bool chosen = false;
  std::string refused;
  for (const BackwardCandidate& candidate : backward_candidates) {
    const bool wanted =
        automatic ? candidate.automatic_for == request.problem.memory : candidate.device == asked;
    if (!wanted) {
      choice.refusals.push_back({candidate.device, "it was not asked for"});
      continue;
    }
    std::string reasons;
    for (const std::string& reason : candidate.supports(candidate.device, request)) {
      reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    if (reasons.empty()) {
      choice.device = candidate.device;
      chosen = true;
      continue;
    }
    refused +=
        text(refused.empty() ? "" : ", ", "not ", name(candidate.device), " (", reasons, ")");
    choice.refusals.push_back({candidate.device, reasons});
  }
  if (!chosen) throw Unsupported(text("no device asked for computes these gradients: ", refused));
}

void check_matches(const BackwardPlan::Choice& planned, const Gradients& gradients) {
  for (std::size_t i = 0; i < gradient_arguments.size(); ++i) {
    const std::string_view what = gradient_arguments[i].name;
    const Tensor& tensor = gradients.*gradient_arguments[i].tensor;
    const Tensor& before = planned.signature[i];
    require(tensor.present == before.present, what,
            tensor.present ? " is present but the plan was made without it; plan again"
                           : " is absent but the plan was made with it; plan again");
    if (!tensor.present) continue;
    require(tensor.dtype == before.dtype, what, " has dtype ", tensor.dtype,
            " but the plan was made for ", before.dtype, "; plan again for a new dtype");
  }
}

void check_workspace(const Problem& problem, const Gradients& gradients,
                     std::span<std::byte> workspace, std::size_t needed) {
  require(workspace.size() >= needed && (workspace.data() != nullptr || needed == 0),
          "workspace has ", workspace.data() != nullptr ? workspace.size() : 0,
          " bytes; it must have at least ", needed, " (BackwardPlan::workspace_bytes)");
  const Tensor bytes =
      contiguous(workspace.data(), DType::boolean, {1, 1, 1, static_cast<std::int64_t>(needed)});
  const auto check = [&](std::string_view what, const Tensor& tensor) {
    require(!share_memory(bytes, tensor), "workspace shares memory with ", what,
            "; it must lie apart from every tensor");
  };
  for (const Argument& argument : arguments) check(argument.name, problem.*argument.tensor);
  for (const GradientArgument& argument : gradient_arguments) {
    check(argument.name, gradients.*argument.tensor);
  }
}

const BackwardPlan::Choice& checked(const std::shared_ptr<const BackwardPlan::Choice>& choice) {
  require(choice != nullptr,
          "the plan is empty, as a moved-from one is; use one from plan_backward()");
  return *choice;
}

std::string explain_cpu(const BackwardPlan::Choice& choice) {
  const cpu::BackwardConfig& config = choice.cpu;
  return text("device     cpu, ", cpu::instruction_set(), ", ", config.threads,
              config.threads == 1 ? " thread\n" : " threads\n",                                 //
              "tiles      ", config.block_k, " keys x ", config.strip_q, " rows of queries\n",  //
              "parts      ", config.splits, " of the keys of a sequence and head\n",            //
              "workspace  ", choice.workspace_bytes, " bytes, of which ",
              config.thread_workspace_bytes, " per thread\n");
}

}  // namespace

BackwardPlan::BackwardPlan(std::shared_ptr<const Choice> choice) : choice_(std::move(choice)) {}

std::size_t BackwardPlan::workspace_bytes() const { return checked(choice_).workspace_bytes; }

Device BackwardPlan::device() const { return checked(choice_).problem.device; }

std::string BackwardPlan::explain() const {
  const Choice& choice = checked(choice_);
  std::string result = choice.gpu != nullptr ? choice.gpu->explain() : explain_cpu(choice);
  if (choice.gpu != nullptr && choice.problem.memory == Memory::host) {
    result += "memory     host: every run copies the tensors there and the gradients back\n";
  }
  for (const Refusal& refusal : choice.problem.refusals) {
    result += text("not ", name(refusal.device), ": ", refusal.reasons, "\n");
  }
  return result;
}

void BackwardPlan::run(const Problem& problem, const Gradients& gradients,
                       std::span<std::byte> workspace) const {
  const Choice& choice = checked(choice_);
  core::Problem validated = validate(problem);
  const core::Gradients validated_gradients = validate(problem, gradients);
  check_matches(choice.problem, problem, validated);
  check_matches(choice, gradients);
  check_workspace(problem, gradients, workspace, choice.workspace_bytes);
  // The bounds that the configuration was made for.
  validated.seqlen_q = choice.problem.problem.seqlen_q;
  validated.seqlen_k = choice.problem.problem.seqlen_k;
  if (choice.gpu == nullptr) {
    cpu::backward(validated, validated_gradients, choice.cpu, workspace.data());
  } else if (choice.problem.memory == Memory::device) {
    choice.gpu->run({problem, gradients, validated, validated_gradients}, workspace);
  } else {
    runtime::run_staged(*choice.gpu, problem, gradients, validated);
  }
}

BackwardPlan plan_backward(const Problem& problem, const Gradients& gradients,
                           const Options& options) {
  check_options(options);
  auto choice = std::make_shared<BackwardPlan::Choice>();
  Plan::Choice& planned = choice->problem;
  planned.problem = validate(problem);
  planned.memory = problem.memory;
  require(!options.own_workspace || problem.memory == Memory::device,
          "options.own_workspace is set but memory is host; there the workspace is the caller's");
  const core::Gradients validated = validate(problem, gradients);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    planned.signature[i] = problem.*arguments[i].tensor;
  }
  for (std::size_t i = 0; i < gradient_arguments.size(); ++i) {
    choice->signature[i] = gradients.*gradient_arguments[i].tensor;
  }
  const BackwardRequest request{problem, gradients, planned.problem, validated};
  choose_device(options.device, request, planned);
  if (planned.device == Device::cpu) {
    choice->cpu = cpu::configure_backward(planned.problem, validated, options.threads);
    choice->workspace_bytes = choice->cpu.workspace_bytes;
    return BackwardPlan(std::move(choice));
  }
  const bool on_device = problem.memory == Memory::device;
  choice->gpu = std::make_shared<const runtime::GpuBackwardPlan>(
      runtime::shared_device(planned.device), OnDevice(request).request(),
      on_device && options.own_workspace, options.configuration);
  choice->workspace_bytes = on_device ? choice->gpu->workspace_bytes() : std::size_t{0};
  return BackwardPlan(std::move(choice));
}

void attention_backward(const Problem& problem, const Gradients& gradients,
                        const Options& options) {
  if (problem.memory == Memory::device) {
    Options own = options;
    own.own_workspace = true;
    const BackwardPlan chosen = plan_backward(problem, gradients, own);
    chosen.run(problem, gradients, {});
    // Before the workspace goes.
    runtime::shared_device(chosen.device()).synchronize(runtime::Stream{problem.stream});
    return;
  }
  const BackwardPlan chosen = plan_backward(problem, gradients, options);
  const std::size_t bytes = chosen.workspace_bytes();
  const auto workspace = std::make_unique_for_overwrite<std::byte[]>(bytes);
  chosen.run(problem, gradients, {workspace.get(), bytes});
}

}  // namespace fovea
