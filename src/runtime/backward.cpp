#include "runtime/backward.h"

#include <memory>

#include "cpu/attention.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {
namespace {

std::vector<std::string> cpu_supports(const core::Problem& problem) {
  std::vector<std::string> reasons;
  if (problem.q.dtype == core::DType::e4m3 || problem.q.dtype == core::DType::e5m2) {
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

std::vector<std::string> gpu_supports(const core::Problem&) {
  return {"this build has no GPU kernels of the backward pass"};
}

struct BackwardCandidate {
  Device device;
  std::vector<std::string> (*supports)(const core::Problem& problem);
};

// In order of preference.
constexpr BackwardCandidate backward_candidates[] = {{Device::cuda, gpu_supports},
                                                     {Device::cpu, cpu_supports},
                                                     {Device::emulated_sm90a, gpu_supports},
                                                     {Device::emulated_sm100a, gpu_supports}};

void choose_device(const Options& options, Plan::Choice& choice) {
  bool chosen = false;
  std::string refused;
  for (const BackwardCandidate& candidate : backward_candidates) {
    std::string reasons;
    for (const std::string& reason : candidate.supports(choice.problem)) {
      reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    const bool wanted = options.device == Device::automatic || options.device == candidate.device;
    if (wanted && reasons.empty() && !chosen) {
      choice.device = candidate.device;
      chosen = true;
      continue;
    }
    if (wanted && !reasons.empty()) {
      refused +=
          text(refused.empty() ? "" : ", ", "not ", name(candidate.device), " (", reasons, ")");
    }
    if (reasons.empty()) reasons = "another device was asked for or comes before it";
    choice.refusals.push_back({candidate.device, reasons});
  }
  if (!chosen) throw Unsupported(text("no device computes these gradients: ", refused));
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
  std::string result = explain_cpu(choice);
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
  cpu::backward(validated, validated_gradients, choice.cpu, workspace.data());
}

BackwardPlan plan_backward(const Problem& problem, const Gradients& gradients,
                           const Options& options) {
  check_options(options);
  auto choice = std::make_shared<BackwardPlan::Choice>();
  Plan::Choice& planned = choice->problem;
  planned.problem = validate(problem);
  const core::Gradients validated = validate(problem, gradients);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    planned.signature[i] = problem.*arguments[i].tensor;
  }
  for (std::size_t i = 0; i < gradient_arguments.size(); ++i) {
    choice->signature[i] = gradients.*gradient_arguments[i].tensor;
  }
  choose_device(options, planned);
  choice->cpu = cpu::configure_backward(planned.problem, validated, options.threads);
  choice->workspace_bytes = choice->cpu.workspace_bytes;
  return BackwardPlan(std::move(choice));
}

void attention_backward(const Problem& problem, const Gradients& gradients,
                        const Options& options) {
  const BackwardPlan chosen = plan_backward(problem, gradients, options);
  const std::size_t bytes = chosen.workspace_bytes();
  const auto workspace = std::make_unique_for_overwrite<std::byte[]>(bytes);
  chosen.run(problem, gradients, {workspace.get(), bytes});
}

}  // namespace fovea
