#include "runtime/forward_program.h"

#include "runtime/devices.h"
#include "runtime/forward_gpu.h"
#include "runtime/plan.h"
#include "runtime/text.h"

namespace fovea::runtime::forward_program {

namespace {

class ForwardProgram final : public GpuProgram {
 public:
  explicit ForwardProgram(std::shared_ptr<const ForwardKernel> kernel)
      : kernel_(std::move(kernel)) {}

  // The counters that hand out tiles.
  std::size_t zeroed_bytes() const override { return 2 * sizeof(core::uint32); }

  void run(const core::Problem& problem, const GpuCall& call) const override {
    kernel_->run({problem, call.zeroed, call.counters}, call.stream);
  }

  std::string explain() const override {
    return std::visit(
        [](const auto& c) {
          return text("tiles      ", core::rows_of(c), " rows x ", c.tile_k, " keys, ",
                      core::threads_of(c), " threads, ", core::shared_bytes(c),
                      " bytes of shared memory\n",  //
                      "softmax    ", policy_name(c.softmax), "\n", "config     ",
                      forward_expression(c), "\n");
        },
        kernel_->config());
  }

 private:
  std::shared_ptr<const ForwardKernel> kernel_;
};

}  // namespace

std::vector<std::string> supports(const core::Problem& problem, const GpuTarget& target) {
  return forward_supports(problem, target.arch);
}

std::shared_ptr<const GpuProgram> prepare(const core::Problem& problem, Device& device,
                                          const Options& options) {
  static auto* const kernels = new SharedPrograms<ForwardKernel>;
  const ForwardConfig config =
      choose_forward(problem, softmax_policy(options.softmax), device.properties().arch);
  return std::make_shared<const ForwardProgram>(kernels->get(device, forward_text(config), [&] {
    return std::make_shared<const ForwardKernel>(device, config);
  }));
}

}  // namespace fovea::runtime::forward_program
