#include "cuda_shim/status.h"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace fovea::cuda_shim {
namespace {

struct Row {
  Status status;
  const char *runtime, *driver, *text;
};

constexpr Row kRows[] = {
    {Status::success, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {Status::invalid_value, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE",
     "invalid argument"},
    {Status::out_of_memory, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY",
     "out of memory"},
    {Status::not_initialized, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED",
     "initialization error"},
    {Status::invalid_configuration, "cudaErrorInvalidConfiguration", "CUDA_ERROR_UNKNOWN",
     "invalid configuration argument"},
    {Status::invalid_symbol, "cudaErrorInvalidSymbol", "CUDA_ERROR_UNKNOWN",
     "invalid device symbol"},
    {Status::invalid_device_pointer, "cudaErrorInvalidDevicePointer", "CUDA_ERROR_UNKNOWN",
     "invalid device pointer"},
    {Status::invalid_copy_direction, "cudaErrorInvalidMemcpyDirection", "CUDA_ERROR_UNKNOWN",
     "invalid copy direction for memcpy"},
    {Status::invalid_device_function, "cudaErrorInvalidDeviceFunction", "CUDA_ERROR_UNKNOWN",
     "invalid device function"},
    {Status::no_device, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE",
     "no CUDA-capable device is detected"},
    {Status::invalid_device, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE",
     "invalid device ordinal"},
    {Status::invalid_image, "cudaErrorInvalidKernelImage", "CUDA_ERROR_INVALID_IMAGE",
     "device kernel image is invalid"},
    {Status::invalid_context, "cudaErrorDeviceUninitialized", "CUDA_ERROR_INVALID_CONTEXT",
     "invalid device context"},
    {Status::no_image_for_device, "cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {Status::invalid_ptx, "cudaErrorInvalidPtx", "CUDA_ERROR_INVALID_PTX",
     "a PTX compilation failed"},
    {Status::file_not_found, "cudaErrorFileNotFound", "CUDA_ERROR_FILE_NOT_FOUND",
     "file not found"},
    {Status::invalid_handle, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE",
     "invalid resource handle"},
    {Status::not_found, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND",
     "named symbol not found"},
    {Status::not_ready, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {Status::illegal_address, "cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {Status::out_of_resources, "cudaErrorLaunchOutOfResources",
     "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {Status::timeout, "cudaErrorLaunchTimeout", "CUDA_ERROR_LAUNCH_TIMEOUT",
     "the launch timed out and was terminated"},
    {Status::assertion, "cudaErrorAssert", "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {Status::already_registered, "cudaErrorHostMemoryAlreadyRegistered",
     "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {Status::not_registered, "cudaErrorHostMemoryNotRegistered",
     "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {Status::misaligned_address, "cudaErrorMisalignedAddress", "CUDA_ERROR_MISALIGNED_ADDRESS",
     "misaligned address"},
    {Status::launch_failure, "cudaErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED",
     "unspecified launch failure"},
    {Status::cooperative_too_large, "cudaErrorCooperativeLaunchTooLarge",
     "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {Status::not_supported, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported"},
    {Status::unknown, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Row* find(int code) {
  const auto* row = std::find_if(std::begin(kRows), std::end(kRows), [code](const Row& r) {
    return static_cast<int>(r.status) == code;
  });
  return row == std::end(kRows) ? nullptr : row;
}

}  // namespace

// Itanium names begin _Z<length><name> or _ZN<length><name><length><name>...; a demangler gives up
// on the longest of them.
std::string short_name(const std::string& mangled) {
  if (!mangled.starts_with("_Z")) return mangled;
  const bool nested = mangled.starts_with("_ZN");
  std::string result;
  for (std::size_t at = nested ? 3 : 2; at < mangled.size();) {
    std::size_t length = 0;
    const char* begin = mangled.data() + at;
    const auto [end, fault] = std::from_chars(begin, mangled.data() + mangled.size(), length);
    if (fault != std::errc()) break;
    at += static_cast<std::size_t>(end - begin);
    if (length > mangled.size() - at) return mangled;
    result += (result.empty() ? "" : "::") + mangled.substr(at, length);
    at += length;
    if (!nested) break;
  }
  return result.empty() ? mangled : result;
}

const char* runtime_name(int code) {
  const Row* row = find(code);
  return row == nullptr ? nullptr : row->runtime;
}

const char* driver_name(int code) {
  const Row* row = find(code);
  return row == nullptr ? nullptr : row->driver;
}

const char* description(int code) {
  const Row* row = find(code);
  return row == nullptr ? nullptr : row->text;
}

}  // namespace fovea::cuda_shim
