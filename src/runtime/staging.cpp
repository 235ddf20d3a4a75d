#include "runtime/staging.h"

#include <cstring>
#include <deque>

#include "runtime/layout.h"
#include "runtime/tensor.h"

namespace fovea::runtime {

namespace {

// Where a tensor goes: q, k and v into rows for the copy engine, the rest without gaps.
Tensor staged(const Argument& argument, const Tensor& tensor, void* data) {
  const bool streamed = argument.tensor == &Problem::q || argument.tensor == &Problem::k ||
                        argument.tensor == &Problem::v;
  return streamed ? dense_rows(tensor, data) : contiguous(data, tensor.dtype, tensor.shape);
}

std::size_t bytes_of(const Tensor& staged) {
  return static_cast<std::size_t>(staged.stride[0] * staged.shape[0]) * size_bytes(staged.dtype);
}

// Copies every element of one view to its place in another of the same shape and dtype.
void copy_elements(const Tensor& from, const Tensor& to) {
  const std::size_t element = size_bytes(from.dtype);
  const auto at = [element](const Tensor& t, std::int64_t i0, std::int64_t i1, std::int64_t i2) {
    return static_cast<std::byte*>(t.data) +
           (i0 * t.stride[0] + i1 * t.stride[1] + i2 * t.stride[2]) *
               static_cast<std::int64_t>(element);
  };
  const bool whole_rows = from.stride[3] == 1 && to.stride[3] == 1;
  const auto columns = static_cast<std::size_t>(from.shape[3]);
  for (std::int64_t i0 = 0; i0 < from.shape[0]; ++i0) {
    for (std::int64_t i1 = 0; i1 < from.shape[1]; ++i1) {
      for (std::int64_t i2 = 0; i2 < from.shape[2]; ++i2) {
        const std::byte* source = at(from, i0, i1, i2);
        std::byte* target = at(to, i0, i1, i2);
        if (whole_rows) {
          std::memcpy(target, source, columns * element);
          continue;
        }
        for (std::int64_t i3 = 0; i3 < from.shape[3]; ++i3) {
          std::memcpy(target + i3 * to.stride[3] * static_cast<std::int64_t>(element),
                      source + i3 * from.stride[3] * static_cast<std::int64_t>(element), element);
        }
      }
    }
  }
}

// Device memory of one call, and the host memory that copies are in flight from.
class Stage {
 public:
  explicit Stage(Device& device) : device_(device) {}

  void* allocate(std::size_t bytes) {
    return reinterpret_cast<void*>(buffers_.emplace_back(device_, bytes).address());
  }

  Tensor upload(const Argument& argument, const Tensor& tensor) {
    Tensor target = staged(argument, tensor, nullptr);
    const std::size_t bytes = bytes_of(target);
    target.data = allocate(bytes);
    if (argument.is_output || bytes == 0) return target;
    std::vector<std::byte>& dense = hosts_.emplace_back(bytes);
    copy_elements(tensor, staged(argument, tensor, dense.data()));
    device_.copy_to_device(reinterpret_cast<DeviceAddress>(target.data), dense.data(), bytes);
    return target;
  }

  std::span<const std::int32_t> upload(std::span<const std::int32_t> list) {
    if (!is_given(list)) return list;
    void* target = allocate(list.size_bytes());
    device_.copy_to_device(reinterpret_cast<DeviceAddress>(target), list.data(), list.size_bytes());
    return {static_cast<const std::int32_t*>(target), list.size()};
  }

  void download(const Tensor& from, const Tensor& to) {
    const std::size_t bytes = bytes_of(from);
    if (bytes == 0) return;
    std::vector<std::byte> dense(bytes);
    device_.copy_to_host(dense.data(), reinterpret_cast<DeviceAddress>(from.data), bytes);
    device_.synchronize(Stream{});
    Tensor source = from;
    source.data = dense.data();
    copy_elements(source, to);
  }

 private:
  Device& device_;
  std::deque<DeviceBuffer> buffers_;
  std::deque<std::vector<std::byte>> hosts_;
};

constexpr std::span<const std::int32_t> Problem::*lists[] = {
    &Problem::cu_seqlens_q, &Problem::cu_seqlens_k, &Problem::seqused_q, &Problem::seqused_k,
    &Problem::block_table};

}  // namespace

Problem staged_layout(const Problem& problem) {
  Problem result = problem;
  result.memory = Memory::device;
  for (const Argument& argument : arguments) {
    Tensor& tensor = result.*argument.tensor;
    if (tensor.present) tensor = staged(argument, tensor, reinterpret_cast<void*>(256));
  }
  return result;
}

void run_staged(const GpuPlan& plan, const Problem& problem, const core::Problem& validated,
                Statistics* statistics) {
  Device& device = plan.device();
  Stage stage(device);
  Problem there = problem;
  there.memory = Memory::device;
  for (const Argument& argument : arguments) {
    const Tensor& tensor = problem.*argument.tensor;
    if (tensor.present) there.*argument.tensor = stage.upload(argument, tensor);
  }
  for (const auto list : lists) there.*list = stage.upload(problem.*list);
  const std::size_t bytes = plan.workspace_bytes();
  auto* workspace = static_cast<std::byte*>(stage.allocate(bytes));
  const Extents extents{validated.batch, validated.seqlen_q, validated.seqlen_k};
  plan.run(there, translate(there, extents), {workspace, bytes}, statistics);
  // Faults of the kernel come to light here, before anything of the caller's is written.
  device.synchronize(Stream{});
  for (const Argument& argument : arguments) {
    const Tensor& tensor = problem.*argument.tensor;
    if (argument.is_output && tensor.present) stage.download(there.*argument.tensor, tensor);
  }
}

}  // namespace fovea::runtime
