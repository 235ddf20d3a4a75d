// Status codes of the CUDA interfaces. Where both have a code for a fault, the runtime and the
// driver use the same number.
#pragma once

#include <stdexcept>
#include <string>

namespace fovea::cuda_shim {

enum class Status : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  invalid_configuration = 9,
  invalid_symbol = 13,
  invalid_device_pointer = 17,
  invalid_copy_direction = 21,
  invalid_device_function = 98,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  no_image_for_device = 209,
  invalid_ptx = 218,
  file_not_found = 301,
  invalid_handle = 400,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  out_of_resources = 701,
  timeout = 702,
  assertion = 710,
  already_registered = 712,
  not_registered = 713,
  misaligned_address = 716,
  launch_failure = 719,
  cooperative_too_large = 720,
  not_supported = 801,
  unknown = 999,
};

// "cudaErrorInvalidValue" or "CUDA_ERROR_INVALID_VALUE", and a sentence; null for a number that is
// not a status.
const char* runtime_name(int code);
const char* driver_name(int code);
const char* description(int code);

// A call that fails: the status the program gets, and why.
class Failure : public std::runtime_error {
 public:
  Failure(Status code, const std::string& sentence) : std::runtime_error(sentence), status(code) {}
  Status status;
};

// The same without a word: the program was told before.
struct Quiet {
  Status status;
};

// A mangled kernel name for people, without template arguments and parameters: "ns::kernel".
std::string short_name(const std::string& mangled);

}  // namespace fovea::cuda_shim
