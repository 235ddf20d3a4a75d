#include "runtime/forward_program.h"

#include "runtime/devices.h"
#include "runtime/eight_bits.h"
#include "runtime/forward_config.h"
#include "runtime/forward_fp8.h"
#include "runtime/forward_gpu.h"
#include "runtime/forward_tuning.h"
#include "runtime/plan.h"
#include "runtime/text.h"

namespace fovea::runtime::forward_program {

namespace {

class ForwardProgram final : public GpuProgram {
 public:
  ForwardProgram(std::shared_ptr<const ForwardKernel> kernel, const core::Problem& problem,
                 int sm_count)
      : kernel_(std::move(kernel)),
        scratch_bytes_(forward_workspace_bytes(problem, kernel_->config(), sm_count)),
        arrivals_(forward_arrivals(problem, kernel_->config(), sm_count)) {
    if (const auto* hopper = std::get_if<core::FwdConfig>(&kernel_->config())) {
      tail_ = forward_tail(problem, *hopper, sm_count);
    }
    splits_ = std::visit(
        [&](const auto& c) { return c.split ? forward_splits(problem, c, sm_count) : 1; },
        kernel_->config());
  }

  // The counters that hand out tiles, and those that count parts.
  std::size_t zeroed_bytes() const override {
    return scheduler_bytes + arrivals_ * sizeof(core::uint32);
  }
  // The results of parts, where keys are split.
  std::size_t scratch_bytes() const override { return scratch_bytes_; }

  void run(const core::Problem& problem, const GpuCall& call) const override {
    ForwardCall launch;
    launch.problem = problem;
    launch.scheduler = call.zeroed;
    launch.workspace = scratch_bytes_ > 0 ? call.scratch : 0;
    launch.arrivals = arrivals_ > 0 ? call.zeroed + scheduler_bytes : 0;
    launch.counters = call.counters;
    kernel_->run(launch, call.stream);
  }

  std::string explain() const override {
    const std::string tail = tail_.tiles == 0
                                 ? std::string()
                                 : text("tail       the last ", tail_.tiles, " tiles, each in ",
                                        tail_.parts, " parts of its keys\n");
    const std::string parts =
        splits_ == 1 ? std::string() : text("parts      ", splits_, " of the keys of each tile\n");
    return std::visit(
        [&](const auto& c) {
          return text("tiles      ", core::rows_of(c), " rows x ", c.tile_k, " keys, ",
                      core::threads_of(c), " threads, ", core::shared_bytes(c),
                      " bytes of shared memory\n",  //
                      parts, tail, "softmax    ", policy_name(c.softmax), "\n", "config     ",
                      forward_expression(c), "\n");
        },
        kernel_->config());
  }

 private:
  static constexpr std::size_t scheduler_bytes = 2 * sizeof(core::uint32);

  std::shared_ptr<const ForwardKernel> kernel_;
  std::size_t scratch_bytes_;
  std::size_t arrivals_;
  Tail tail_;
  core::int32 splits_ = 1;
};

// The kernel of a configuration, or of the nearest that fits the registers. Where none does, one
// that spills: slow, but right.
std::shared_ptr<const ForwardKernel> fitting_kernel(Device& device, const ForwardConfig& chosen) {
  std::vector<ForwardConfig> ladder = leaner_forwards(chosen);
  ladder.insert(ladder.begin(), chosen);
  for (const ForwardConfig& config : ladder) {
    try {
      return std::make_shared<const ForwardKernel>(device, config);
    } catch (const CompileError&) {
      continue;
    }
  }
  return std::make_shared<const ForwardKernel>(device, chosen, default_jit(), true);
}

}  // namespace

std::vector<std::string> supports(const core::Problem& problem, const GpuTarget& target) {
  if (in_eight_bits(problem, target.options)) {
    // The nearest kernel is the 8-bit one: its reasons, and one more.
    std::vector<std::string> reasons = forward_fp8_supports(problem, target.arch);
    reasons.emplace_back("its 16-bit kernel does not compute in 8 bits");
    return reasons;
  }
  return forward_supports(problem, target.arch);
}

std::shared_ptr<const GpuProgram> prepare(const core::Problem& problem, Device& device,
                                          const Options& options) {
  static auto* const kernels = new SharedPrograms<ForwardKernel>;
  const DeviceProperties& chip = device.properties();
  ForwardConfig config =
      choose_forward(problem, softmax_policy(options.softmax), chip.arch, chip.sm_count);
  override_forward(config, options.configuration);
  const bool by_hand = !options.configuration.empty();
  auto kernel = kernels->get(device, forward_text(config), [&] {
    return by_hand ? std::make_shared<const ForwardKernel>(device, config)
                   : fitting_kernel(device, config);
  });
  return std::make_shared<const ForwardProgram>(std::move(kernel), problem, chip.sm_count);
}

}  // namespace fovea::runtime::forward_program
