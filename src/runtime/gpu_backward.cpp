#include "runtime/gpu_backward.h"

#include <array>

#include "runtime/backward_tuning.h"
#include "runtime/devices.h"
#include "runtime/gradients.h"
#include "runtime/problem.h"
#include "runtime/staging.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea::runtime {

namespace {

constexpr std::size_t granule = 256;  // of addresses within the workspace

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + granule - 1) / granule * granule;
}

// What the copy engine reads, in the order of GpuBackwardPlan's arrays.
struct Streamed {
  std::string_view name;
  const Tensor& tensor;
};
std::array<Streamed, 4> streamed(const BackwardRequest& r) {
  return {{{"q", r.problem.q}, {"k", r.problem.k}, {"v", r.problem.v}, {"dout", r.gradients.dout}}};
}

core::View& view_of(core::Problem& problem, core::Gradients& gradients, std::size_t index) {
  core::View* const views[] = {&problem.q, &problem.k, &problem.v, &gradients.dout};
  return *views[index];
}

DeviceAddress address_of(const void* pointer) { return reinterpret_cast<DeviceAddress>(pointer); }

// Any aligned address stands for that of the copy.
struct AsCopied {
  core::Problem problem;
  core::Gradients gradients;

  explicit AsCopied(const BackwardRequest& request)
      : problem(request.validated), gradients(request.validated_gradients) {
    const auto tensors = streamed(request);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (copy_engine_objection(tensors[i].tensor).empty()) continue;
      view_of(problem, gradients, i) =
          to_view(dense_rows(tensors[i].tensor, reinterpret_cast<void*>(granule)));
    }
  }
};

std::shared_ptr<const BackwardKernels> kernels_for(Device& device, const core::BwdConfig& config,
                                                   const core::Gradients& gradients) {
  static auto* const programs = new SharedPrograms<BackwardKernels>;
  const std::string name = backward_text(config, BackwardPart::main) +
                           (gradients.dsink ? " dsink" : "") + (gradients.dbias ? " dbias" : "");
  return programs->get(device, name, [&] {
    return std::make_shared<const BackwardKernels>(device, config, gradients);
  });
}

}  // namespace

std::vector<std::string> gpu_backward_supports(const BackwardRequest& request,
                                               std::string_view arch) {
  const AsCopied copied(request);
  return backward_supports(copied.problem, copied.gradients, arch);
}

GpuBackwardPlan::GpuBackwardPlan(Device& device, const BackwardRequest& request, bool own_workspace,
                                 std::string_view by_hand)
    : device_(device) {
  const AsCopied copied(request);
  const core::BwdConfig config =
      choose_backward(copied.problem, copied.gradients, device.properties().arch, by_hand);
  kernels_ = kernels_for(device, config, copied.gradients);
  total_bytes_ = aligned(
      backward_workspace_bytes({copied.problem, copied.gradients}, config, device.properties()));
  const auto tensors = streamed(request);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (copy_engine_objection(tensors[i].tensor).empty()) continue;
    copies_[i] = true;
    copy_offsets_[i] = total_bytes_;
    total_bytes_ += aligned(dense_rows_bytes(tensors[i].tensor));
    if (copy_kernel_ == nullptr) copy_kernel_ = std::make_shared<const CopyKernel>(device, 2);
  }
  if (own_workspace) {
    own_ = DeviceBuffer(device, total_bytes_);
  } else {
    total_bytes_ += granule - 1;  // the caller's address needs no alignment
  }
}

void GpuBackwardPlan::check_addresses(const BackwardRequest& r) const {
  const auto check = [this](std::string_view name, const void* data) {
    require(data == nullptr || device_.reaches(address_of(data)), name, " is at address ",
            address_of(data), ", which is not memory of ", device_.properties().name,
            "; with memory = device every pointer must be");
  };
  for (const Argument& argument : arguments) {
    const Tensor& tensor = r.problem.*argument.tensor;
    if (has_elements(tensor)) check(argument.name, tensor.data);
  }
  for (const GradientArgument& argument : gradient_arguments) {
    const Tensor& tensor = r.gradients.*argument.tensor;
    if (has_elements(tensor)) check(argument.name, tensor.data);
  }
  if (!r.problem.cu_seqlens_q.empty()) check("cu_seqlens_q", r.problem.cu_seqlens_q.data());
  if (!r.problem.cu_seqlens_k.empty()) check("cu_seqlens_k", r.problem.cu_seqlens_k.data());
  if (!r.problem.seqused_q.empty()) check("seqused_q", r.problem.seqused_q.data());
  if (!r.problem.seqused_k.empty()) check("seqused_k", r.problem.seqused_k.data());
}

void GpuBackwardPlan::run(const BackwardRequest& request, std::span<std::byte> workspace) const {
  const Stream stream{request.problem.stream};
  BackwardCall call;
  call.problem = request.validated;
  call.gradients = request.validated_gradients;
  call.workspace = own_.address() != 0 ? own_.address() : aligned(address_of(workspace.data()));
  const auto tensors = streamed(request);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (copies_[i]) {
      view_of(call.problem, call.gradients, i) = to_view(dense_rows(
          tensors[i].tensor, reinterpret_cast<void*>(call.workspace + copy_offsets_[i])));
      continue;
    }
    const std::string objection = copy_engine_objection(tensors[i].tensor);
    require(objection.empty(), tensors[i].name,
            " is laid out in a way that the copy engine does not take (", objection,
            "), but the plan was made for one that it does; plan again");
  }
  check_addresses(request);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!copies_[i]) continue;
    const Tensor& tensor = tensors[i].tensor;
    copy_kernel_->run(
        tensor, dense_rows(tensor, reinterpret_cast<void*>(call.workspace + copy_offsets_[i])),
        stream);
  }
  kernels_->run(call, stream);
}

std::string GpuBackwardPlan::explain() const {
  constexpr std::array<std::string_view, 4> names{"q", "k", "v", "dout"};
  std::string copied;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (copies_[i]) copied += (copied.empty() ? "" : ", ") + std::string(names[i]);
  }
  const core::BwdConfig& config = kernels_->config();
  return text("device     ", device_.properties().name, ", ", device_.properties().sm_count,
              " multiprocessors\n",  //
              "kernel     ", config.tensor_memory ? "bwd_sm100" : "bwd_sm90",
              config.pair ? ", CTA pairs\n" : "\n", "tiles      ", core::keys_of(config),
              " keys x ", core::rows_of(config),  //
              " rows of queries, head dimensions padded to ", config.head_dim, " and ",
              config.head_dim_v, "\n",                                                    //
              "schedule   ", backward_switches(config), "\n",                             //
              "dq         added ",                                                        //
              config.deterministic ? "in the order of the keys\n" : "as tiles finish\n",  //
              "copied     ", copied.empty() ? "nothing" : copied, "\n",                   //
              "workspace  ", total_bytes_, " bytes", own_.address() != 0 ? " of the plan" : "",
              " on the device\n");
}

Gradients staged_layout(const Gradients& gradients) {
  Gradients result;
  for (const GradientArgument& argument : gradient_arguments) {
    const bool is_dout = argument.tensor == &Gradients::dout;
    result.*argument.tensor = staged_tensor(gradients.*argument.tensor, is_dout);
  }
  return result;
}

void run_staged(const GpuBackwardPlan& plan, const Problem& problem, const Gradients& gradients,
                const core::Problem& validated) {
  Device& device = plan.device();
  Stage stage(device);
  Problem there = problem;
  there.memory = Memory::device;
  for (const Argument& argument : arguments) {
    const Tensor& tensor = problem.*argument.tensor;
    const bool streamed = argument.tensor == &Problem::q || argument.tensor == &Problem::k ||
                          argument.tensor == &Problem::v;
    if (tensor.present) there.*argument.tensor = stage.upload(tensor, streamed);
  }
  stage.upload_lists(there);
  Gradients gradients_there;
  for (const GradientArgument& argument : gradient_arguments) {
    const Tensor& tensor = gradients.*argument.tensor;
    if (!tensor.present) continue;
    gradients_there.*argument.tensor =
        argument.is_output ? stage.place(tensor, false)
                           : stage.upload(tensor, argument.tensor == &Gradients::dout);
  }
  const core::Problem translated =
      translate(there, {validated.batch, validated.seqlen_q, validated.seqlen_k});
  const core::Gradients validated_gradients = translate(there, gradients_there);
  const std::size_t bytes = plan.workspace_bytes();
  auto* workspace = static_cast<std::byte*>(stage.allocate(bytes));
  plan.run({there, gradients_there, translated, validated_gradients}, {workspace, bytes});
  // Faults of the kernels come to light here, before anything of the caller's is written.
  device.synchronize(Stream{});
  for (const GradientArgument& argument : gradient_arguments) {
    const Tensor& tensor = gradients.*argument.tensor;
    if (argument.is_output && tensor.present) {
      stage.download(gradients_there.*argument.tensor, tensor);
    }
  }
}

}  // namespace fovea::runtime
