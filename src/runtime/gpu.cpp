#include "runtime/gpu.h"

#include <algorithm>
#include <array>

#include "runtime/devices.h"
#include "runtime/forward_program.h"
#include "runtime/fp8_program.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea::runtime {

namespace {

constexpr std::size_t granule = 256;  // of addresses within the workspace
constexpr std::size_t counter_bytes = 2 * sizeof(std::uint64_t);

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + granule - 1) / granule * granule;
}

// q, k and v, which kernels read by the copy engine.
std::span<const Argument> streamed() { return std::span(arguments).first(3); }

core::View& view_of(core::Problem& problem, const Argument& argument) {
  return argument.tensor == &Problem::q   ? problem.q
         : argument.tensor == &Problem::k ? problem.k
                                          : problem.v;
}

// The problem with those tensors in another layout that the copy engine does not take.
core::Problem copied(const Problem& problem, const core::Problem& validated) {
  core::Problem result = validated;
  for (const Argument& argument : streamed()) {
    const Tensor& tensor = problem.*argument.tensor;
    if (copy_engine_objection(tensor).empty()) continue;
    // Any aligned address stands for that of the copy.
    view_of(result, argument) = to_view(dense_rows(tensor, reinterpret_cast<void*>(granule)));
  }
  return result;
}

struct Selection {
  const GpuKernel* kernel = nullptr;
  core::Problem problem;  // as the kernel will see it
  bool copies = false;
  std::vector<std::string> reasons = {};  // against the nearest, where none does it
};

Selection select(const core::Problem& problem, const GpuTarget& target) {
  Selection nearest{.problem = problem};
  for (const GpuKernel& kernel : gpu_kernels()) {
    std::vector<std::string> reasons = kernel.supports(problem, target);
    if (reasons.empty()) return {.kernel = &kernel, .problem = problem};
    if (nearest.reasons.empty() || reasons.size() < nearest.reasons.size()) {
      nearest.reasons = std::move(reasons);
    }
  }
  return nearest;
}

// A copy costs its bytes twice, and pays where several tiles of queries read them. A pool of pages
// is as large as it likes and is never copied.
bool prefers_copies(const core::Problem& p) {
  constexpr core::int64 rows_of_a_tile = 128;
  return !p.is_paged() && p.seqlen_q * p.group_size() > 2 * rows_of_a_tile;
}

Selection select(const Problem& problem, const core::Problem& validated, const GpuTarget& target) {
  Selection in_place = select(validated, target);
  const bool suits = std::ranges::all_of(streamed(), [&](const Argument& argument) {
    return copy_engine_objection(problem.*argument.tensor).empty();
  });
  const bool any_layout = in_place.kernel != nullptr && in_place.kernel->any_layout;
  if (suits || any_layout || (in_place.kernel != nullptr && !prefers_copies(validated))) {
    return in_place;
  }
  Selection after_copies = select(copied(problem, validated), target);
  if (after_copies.kernel == nullptr) return in_place;
  after_copies.copies = true;
  return after_copies;
}

DeviceAddress address_of(const void* pointer) { return reinterpret_cast<DeviceAddress>(pointer); }

std::shared_ptr<const CopyKernel> copy_kernel_for(Device& device, const Tensor& tensor) {
  static auto* const kernels = new SharedPrograms<CopyKernel>;
  const std::size_t bytes = size_bytes(tensor.dtype);
  return kernels->get(device, std::to_string(bytes),
                      [&] { return std::make_shared<const CopyKernel>(device, bytes); });
}

}  // namespace

std::span<const GpuKernel> gpu_kernels() {
  static constexpr std::array kernels{fp8_kernel, forward_kernel};
  return kernels;
}

std::vector<std::string> gpu_supports(const Problem& problem, const core::Problem& validated,
                                      const GpuTarget& target) {
  return select(problem, validated, target).reasons;
}

GpuPlan::GpuPlan(Device& device, const Problem& problem, const core::Problem& validated,
                 const Options& options)
    : device_(device) {
  const Selection selection = select(problem, validated, {device.properties().arch, options});
  if (selection.kernel == nullptr) throw Unsupported("no kernel: " + selection.reasons.front());
  kernel_name_ = selection.kernel->name;
  program_ = selection.kernel->prepare(selection.problem, device, options);
  counters_offset_ = program_->zeroed_bytes();
  scratch_offset_ = aligned(counters_offset_ + counter_bytes);
  total_bytes_ = aligned(scratch_offset_ + program_->scratch_bytes());
  for (const Argument& argument : std::span(arguments).first(4)) {  // out is written by it
    const Tensor& tensor = problem.*argument.tensor;
    if (selection.kernel->any_layout && !argument.is_output) continue;
    if (copy_engine_objection(tensor).empty()) {
      engine_read_.push_back(&argument);
      continue;
    }
    if (!selection.copies || argument.is_output) continue;
    copies_.push_back({&argument, total_bytes_});
    total_bytes_ += aligned(dense_rows_bytes(tensor));
    copy_kernel_ = copy_kernel_for(device, tensor);
  }
  if (!options.own_workspace) {
    total_bytes_ += granule - 1;  // the caller's address needs no alignment
    return;
  }
  own_ = DeviceBuffer(device, total_bytes_);
  device.fill(own_.address(), 0, scratch_offset_);
  device.synchronize(Stream{});
}

void GpuPlan::check_addresses(const Problem& problem) const {
  for (const Argument& argument : arguments) {
    const Tensor& tensor = problem.*argument.tensor;
    require(!has_elements(tensor) || device_.reaches(address_of(tensor.data)), argument.name,
            " has data at address ", address_of(tensor.data), ", which is not memory of ",
            device_.properties().name, "; with memory = device every pointer must be");
  }
  const std::pair<std::string_view, std::span<const std::int32_t>> lists[] = {
      {"cu_seqlens_q", problem.cu_seqlens_q},
      {"cu_seqlens_k", problem.cu_seqlens_k},
      {"seqused_q", problem.seqused_q},
      {"seqused_k", problem.seqused_k},
      {"block_table", problem.block_table}};
  for (const auto& [name, list] : lists) {
    require(list.empty() || device_.reaches(address_of(list.data())), name, " is at address ",
            address_of(list.data()), ", which is not memory of ", device_.properties().name,
            "; with memory = device every pointer must be");
  }
}

// The problem over copies where there are some, whose place must be written before the kernel runs.
core::Problem GpuPlan::placed(const Problem& problem, const core::Problem& validated,
                              DeviceAddress workspace) const {
  core::Problem result = validated;
  for (const Copy& copy : copies_) {
    view_of(result, *copy.argument) = to_view(dense_rows(
        problem.*copy.argument->tensor, reinterpret_cast<void*>(workspace + copy.offset)));
  }
  for (const Argument* argument : engine_read_) {
    const std::string objection = copy_engine_objection(problem.*argument->tensor);
    require(objection.empty(), argument->name,
            " is laid out in a way that the copy engine does not", " take (", objection,
            "), but the plan was made for one that it does; plan again");
  }
  return result;
}

void GpuPlan::run(const Problem& problem, const core::Problem& validated,
                  std::span<std::byte> workspace, Statistics* statistics) const {
  const Stream stream{problem.stream};
  const bool is_own = own_.address() != 0;
  const DeviceAddress base = is_own ? own_.address() : aligned(address_of(workspace.data()));
  const core::Problem placed_problem = placed(problem, validated, base);
  check_addresses(problem);
  GpuCall call;
  call.zeroed = base;
  call.scratch = base + scratch_offset_;
  call.stream = stream;
  // Counts are from zero for whoever asks; nobody else pays for them.
  const std::size_t zeroed = is_own ? 0 : program_->zeroed_bytes();
  if (statistics != nullptr) {
    call.counters = base + counters_offset_;
    device_.fill(call.counters, 0, counter_bytes, stream);
  }
  if (zeroed > 0) device_.fill(base, 0, zeroed, stream);
  for (const Copy& copy : copies_) {
    const Tensor& tensor = problem.*copy.argument->tensor;
    copy_kernel_->run(tensor, dense_rows(tensor, reinterpret_cast<void*>(base + copy.offset)),
                      stream);
  }
  program_->run(placed_problem, call);
  if (statistics == nullptr) return;
  std::array<std::uint64_t, 2> counts{};
  device_.copy_to_host(counts.data(), call.counters, counter_bytes, stream);
  device_.synchronize(stream);
  statistics->repairs = static_cast<std::int64_t>(counts[0]);
  statistics->recomputed_tiles = static_cast<std::int64_t>(counts[1]);
}

std::string GpuPlan::explain() const {
  std::string copies;
  for (const Copy& copy : copies_) {
    copies += (copies.empty() ? "" : ", ") + std::string(copy.argument->name);
  }
  return text("device     ", device_.properties().name, ", ", device_.properties().sm_count,
              " multiprocessors\n",                                    //
              "kernel     ", kernel_name_, "\n", program_->explain(),  //
              "copied     ", copies.empty() ? "nothing" : copies,
              "\n",  //
              "workspace  ", total_bytes_, " bytes", own_.address() != 0 ? " of the plan" : "",
              " on the device\n");
}

}  // namespace fovea::runtime
