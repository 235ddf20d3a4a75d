#include "runtime/staging.h"

#include <cstring>

#include "runtime/layout.h"
#include "runtime/tensor.h"

namespace fovea::runtime {

namespace {

// Where a tensor goes: what the copy engine reads into rows for it, the rest without gaps.
Tensor staged(const Tensor& tensor, bool streamed, void* data) {
  return streamed ? dense_rows(tensor, data) : contiguous(data, tensor.dtype, tensor.shape);
}

bool is_streamed(const Argument& argument) {
  return argument.tensor == &Problem::q || argument.tensor == &Problem::k ||
         argument.tensor == &Problem::v;
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

constexpr std::span<const std::int32_t> Problem::*lists[] = {
    &Problem::cu_seqlens_q, &Problem::cu_seqlens_k, &Problem::seqused_q, &Problem::seqused_k,
    &Problem::block_table};

}  // namespace

void* Stage::allocate(std::size_t bytes) {
  return reinterpret_cast<void*>(buffers_.emplace_back(device_, bytes).address());
}

Tensor Stage::place(const Tensor& tensor, bool streamed) {
  Tensor target = staged(tensor, streamed, nullptr);
  target.data = allocate(bytes_of(target));
  return target;
}

Tensor Stage::upload(const Tensor& tensor, bool streamed) {
  const Tensor target = place(tensor, streamed);
  const std::size_t bytes = bytes_of(target);
  if (bytes == 0) return target;
  std::vector<std::byte>& dense = hosts_.emplace_back(bytes);
  copy_elements(tensor, staged(tensor, streamed, dense.data()));
  device_.copy_to_device(reinterpret_cast<DeviceAddress>(target.data), dense.data(), bytes);
  return target;
}

void Stage::upload_lists(Problem& problem) {
  for (const auto list : lists) {
    const std::span<const std::int32_t> host = problem.*list;
    if (!is_given(host)) continue;
    void* target = allocate(host.size_bytes());
    device_.copy_to_device(reinterpret_cast<DeviceAddress>(target), host.data(), host.size_bytes());
    problem.*list = {static_cast<const std::int32_t*>(target), host.size()};
  }
}

void Stage::download(const Tensor& from, const Tensor& to) {
  const std::size_t bytes = bytes_of(from);
  if (bytes == 0) return;
  std::vector<std::byte> dense(bytes);
  device_.copy_to_host(dense.data(), reinterpret_cast<DeviceAddress>(from.data), bytes);
  device_.synchronize(Stream{});
  Tensor source = from;
  source.data = dense.data();
  copy_elements(source, to);
}

Tensor staged_tensor(const Tensor& tensor, bool streamed) {
  return tensor.present ? staged(tensor, streamed, reinterpret_cast<void*>(256)) : tensor;
}

Problem staged_layout(const Problem& problem) {
  Problem result = problem;
  result.memory = Memory::device;
  for (const Argument& argument : arguments) {
    Tensor& tensor = result.*argument.tensor;
    tensor = staged_tensor(tensor, is_streamed(argument));
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
    if (!tensor.present) continue;
    there.*argument.tensor = argument.is_output ? stage.place(tensor, is_streamed(argument))
                                                : stage.upload(tensor, is_streamed(argument));
  }
  stage.upload_lists(there);
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
