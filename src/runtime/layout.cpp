#include "runtime/layout.h"

#include <algorithm>

#include "core/config.h"
#include "runtime/jit.h"
#include "runtime/source.h"
#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea::runtime {

namespace {

constexpr std::int64_t engine_bytes = 16;  // granule of addresses and steps

std::int64_t element_bytes(const Tensor& tensor) {
  return static_cast<std::int64_t>(size_bytes(tensor.dtype));
}

std::int64_t padded_columns(const Tensor& tensor) {
  const std::int64_t granule = engine_bytes / element_bytes(tensor);
  return (tensor.shape[3] + granule - 1) / granule * granule;
}

std::int64_t rows(const Tensor& tensor) {
  return tensor.shape[0] * tensor.shape[1] * tensor.shape[2];
}

const char* element_type(std::size_t bytes) {
  switch (bytes) {
    case 1: return "fovea::core::uint8";
    case 2: return "fovea::core::uint16";
    default: return "fovea::core::uint32";
  }
}

}  // namespace

std::string copy_engine_objection(const Tensor& tensor) {
  if (!has_elements(tensor)) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (address % engine_bytes != 0) {
    return text("its address ", address, " is no multiple of 16 bytes");
  }
  if (tensor.stride[3] != 1 && tensor.shape[3] > 1) {
    return text("its last stride is ", tensor.stride[3], ", not 1");
  }
  for (std::size_t i = 0; i < 3; ++i) {
    if (tensor.shape[i] <= 1) continue;
    const std::int64_t granule = engine_bytes / element_bytes(tensor);
    const std::int64_t stride = tensor.stride[i];
    if (stride <= 0 || stride % granule != 0 ||
        stride >= (std::int64_t{1} << 40) / element_bytes(tensor)) {
      return text("its stride ", i, " is ", stride, ", no positive multiple of ", granule,
                  " elements");
    }
  }
  return {};
}

Tensor dense_rows(const Tensor& tensor, void* data) {
  Tensor dense = tensor;
  dense.data = data;
  dense.stride[3] = 1;
  dense.stride[2] = padded_columns(tensor);
  dense.stride[1] = dense.stride[2] * tensor.shape[2];
  dense.stride[0] = dense.stride[1] * tensor.shape[1];
  return dense;
}

std::size_t dense_rows_bytes(const Tensor& tensor) {
  return static_cast<std::size_t>(rows(tensor) * padded_columns(tensor) * element_bytes(tensor));
}

CopyKernel::CopyKernel(Device& device, std::size_t element_bytes) : device_(device) {
  KernelSource source;
  source.name = text("copy_rows_", 8 * element_bytes);
  source.include = "device/copy.cuh";
  source.call = text("fovea::device::copy_rows<", element_type(element_bytes), ">");
  source.params = "fovea::core::CopyParams";
  source.threads = core::copy_threads;
  kernel_ = load_kernel(device, default_jit(), kernel_text(source));
}

void CopyKernel::run(const Tensor& from, const Tensor& to, Stream stream) const {
  if (!has_elements(from)) return;
  core::CopyParams params;
  params.from = from.data;
  params.to = to.data;
  params.padded = to.stride[2];
  for (std::size_t i = 0; i < 4; ++i) {
    params.extent[i] = from.shape[i];
    params.stride[i] = from.stride[i];
  }
  const std::int64_t threads = rows(from) * params.padded * element_bytes(from) / engine_bytes;
  const std::int64_t most = std::int64_t{32} * device_.properties().sm_count;
  LaunchConfig launch;
  launch.block.x = core::copy_threads;
  launch.grid.x = static_cast<std::uint32_t>(
      std::min((threads + core::copy_threads - 1) / core::copy_threads, most));
  device_.launch(*kernel_, launch, std::as_bytes(std::span(&params, 1)), stream);
}

}  // namespace fovea::runtime
