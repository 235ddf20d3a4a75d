// Runs the sample kernel on a device and checks its result against a product in double precision.
//
//   gemm [--device cuda|emulated:sm_90a|emulated:sm_100a] [--m M] [--n N] [--k K] [--tile-n T]
//        [--stages S] [--order eager|lazy|random] [--seed N] [--repeat R]
//
// Exit status: 0 right, 1 wrong or the device reports a fault, 2 a wrong command or no such device.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "device/files.h"
#include "examples/gemm/gemm.h"
#include "fovea/fovea.hpp"
#include "runtime/device.h"
#include "runtime/jit.h"
#include "runtime/source.h"

namespace fovea::device {

std::span<const File> gemm_files();  // the two kernels and gemm.h, embedded by CMake

}  // namespace fovea::device

namespace fovea::examples {

namespace {

using runtime::Device;
using runtime::DeviceBuffer;

struct Arguments {
  std::string device = "emulated:sm_90a";
  int m = 256;
  int n = 256;
  int k = 256;
  GemmConfig config;
  runtime::EmulationOptions emulation;
  int repeat = 0;
};

int parse_number(const std::string& option, const std::string& value, int low, int high) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  if (value.empty() || *end != '\0' || number < low || number > high) {
    throw Error(option + " is '" + value + "', but must be a number from " + std::to_string(low) +
                " to " + std::to_string(high));
  }
  return static_cast<int>(number);
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments a;
  const std::map<std::string, runtime::EmulationOptions::Order> orders = {
      {"eager", runtime::EmulationOptions::Order::eager},
      {"lazy", runtime::EmulationOptions::Order::lazy},
      {"random", runtime::EmulationOptions::Order::random}};
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const std::string& option = words[i];
    if (i + 1 == words.size()) throw Error(option + " needs a value");
    const std::string& value = words[i + 1];
    if (option == "--device") {
      a.device = value;
    } else if (option == "--m") {
      a.m = parse_number(option, value, 1, 1 << 20);
    } else if (option == "--n") {
      a.n = parse_number(option, value, 8, 1 << 20);
    } else if (option == "--k") {
      a.k = parse_number(option, value, 8, 1 << 20);
    } else if (option == "--tile-n") {
      a.config.tile_n = parse_number(option, value, 64, 256);
    } else if (option == "--stages") {
      a.config.stages = parse_number(option, value, 2, 8);
    } else if (option == "--order" && orders.contains(value)) {
      a.emulation.order = orders.at(value);
    } else if (option == "--seed") {
      a.emulation.seed = static_cast<std::uint64_t>(parse_number(option, value, 0, 1 << 30));
    } else if (option == "--repeat") {
      a.repeat = parse_number(option, value, 0, 1000);
    } else {
      throw Error("there is no option " + option + " " + value);
    }
  }
  if (a.n % 8 != 0 || a.k % 8 != 0) {
    throw Error("--n and --k must be multiples of 8: rows start at multiples of 16 bytes");
  }
  return a;
}

// Values in [-1, 1), exact in bf16, from a fixed sequence.
std::vector<core::uint16> random_matrix(std::size_t count, std::uint64_t seed) {
  std::vector<core::uint16> values(count);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (core::uint16& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto draw = static_cast<int>(state >> 56) - 128;  // -128 .. 127
    value = core::float_to_bf16(static_cast<float>(draw) / 128.0f);
  }
  return values;
}

// ---- The kernel
// ---------------------------------------------------------------------------------------

// Text for the device's chip: the wide instructions this configuration uses, the kernel, its entry.
std::string kernel_text(bool blackwell, const GemmConfig& config) {
  runtime::KernelSource source;
  if (blackwell) {
    source.name = "gemm_sm100";
    source.include = "examples/gemm/gemm_sm100.cuh";
    source.instructions = {runtime::tcgen05_mma_text({}), runtime::tcgen05_load_text(32)};
    source.threads = 256;
  } else {
    source.name = "gemm_sm90";
    source.include = "examples/gemm/gemm_sm90.cuh";
    source.instructions = {runtime::wgmma_text({.n = config.tile_n}, "gemm_product")};
    source.threads = 384;
  }
  source.call = "fovea::examples::gemm<fovea::examples::GemmConfig{.tile_n = " +
                std::to_string(config.tile_n) + ", .stages = " + std::to_string(config.stages) +
                "}>";
  source.params = "fovea::examples::GemmParams";
  return runtime::kernel_text(source);
}

// Plan in either kernel: ring, C, a few barriers.
std::size_t shared_bytes(const GemmConfig& c) {
  const auto stages = static_cast<std::size_t>(c.stages);
  const auto sides = static_cast<std::size_t>((c.tile_m + c.tile_n) * c.tile_k);
  const auto result = static_cast<std::size_t>(c.tile_m * c.tile_n);
  return 2 * (stages * sides + result) + 1024;
}

// A row-major [rows][columns] bf16 matrix, in boxes of box_rows x 64.
core::TensorMap encode_map(Device& device, const DeviceBuffer& matrix, int rows, int columns,
                           int box_rows) {
  runtime::TensorMapSpec spec;
  spec.type = runtime::MapType::bf16;
  spec.rank = 2;
  spec.address = matrix.address();
  spec.extent = {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)};
  spec.stride_bytes = {0, 2 * static_cast<std::uint64_t>(columns)};
  spec.box = {64, static_cast<std::uint32_t>(box_rows)};
  spec.swizzle = runtime::MapSwizzle::b128;
  return device.encode_tensor_map(spec);
}

std::uint32_t ceil_div(int a, int b) { return static_cast<std::uint32_t>((a + b - 1) / b); }

// ---- The check
// ----------------------------------------------------------------------------------------

struct Check {
  double worst = 0.0;  // largest error as a share of what is allowed
  double largest_error = 0.0;
  std::size_t compared = 0;
  bool guard_intact = true;
};

constexpr std::size_t guard_bytes = 4096;
constexpr unsigned char poison = 0xff;  // a NaN in bf16: an element not written cannot pass

// Every element for small products, the rows at tile borders and a sample of others for large ones.
Check check(const Arguments& arguments, const std::vector<core::uint16>& a,
            const std::vector<core::uint16>& b, const std::vector<unsigned char>& bytes) {
  const auto m = static_cast<std::size_t>(arguments.m);
  const auto n = static_cast<std::size_t>(arguments.n);
  const auto k = static_cast<std::size_t>(arguments.k);
  const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const auto stride = static_cast<std::size_t>(std::max(1.0, work / 1e9));
  Check result;
  for (std::size_t row = 0; row < m; ++row) {
    if (row % stride != 0 && row + 1 != m) continue;
    for (std::size_t column = 0; column < n; ++column) {
      double exact = 0.0;
      double magnitude = 0.0;
      for (std::size_t i = 0; i < k; ++i) {
        const double product = static_cast<double>(core::bf16_to_float(a[row * k + i])) *
                               static_cast<double>(core::bf16_to_float(b[column * k + i]));
        exact += product;
        magnitude += std::fabs(product);
      }
      core::uint16 bits = 0;
      std::memcpy(&bits, bytes.data() + 2 * (row * n + column), sizeof bits);
      const double error = std::fabs(static_cast<double>(core::bf16_to_float(bits)) - exact);
      // Rounding to bf16, and fp32 sums in an order of the hardware's choice.
      const double allowed = std::fabs(exact) * 0x1p-8 + magnitude * 0x1p-20 + 1e-30;
      // Written so that a NaN counts as wrong.
      if (!(error <= result.largest_error)) result.largest_error = error;
      if (!(error / allowed <= result.worst)) result.worst = error / allowed;
      ++result.compared;
    }
  }
  for (std::size_t i = 2 * m * n; i < bytes.size(); ++i) {
    result.guard_intact = result.guard_intact && bytes[i] == poison;
  }
  return result;
}

// ---- The run
// ------------------------------------------------------------------------------------------

void print_resources(const runtime::CompileResult& compiled) {
  constexpr const char* origins[] = {"memory cache", "disk cache", "compiler"};
  std::printf("kernel        from %s in %.1f ms", origins[static_cast<int>(compiled.origin)],
              1e3 * compiled.seconds);
  for (const runtime::KernelResources& kernel : compiled.image->report.kernels) {
    std::printf("; %d registers, %d bytes spilled, %d barriers", kernel.registers,
                kernel.spill_store_bytes, kernel.barriers);
  }
  std::printf("\n");
}

double median_ms(Device& device, const std::function<void()>& launch, int repeat) {
  std::vector<float> times;
  const runtime::Event begin = device.create_event();
  const runtime::Event end = device.create_event();
  for (int i = 0; i < 3; ++i) launch();
  for (int i = 0; i < repeat; ++i) {
    device.record(begin);
    launch();
    device.record(end);
    times.push_back(device.elapsed_ms(begin, end));
  }
  device.destroy(begin);
  device.destroy(end);
  std::nth_element(times.begin(), times.begin() + repeat / 2, times.end());
  return static_cast<double>(times[static_cast<std::size_t>(repeat / 2)]);
}

bool run(const Arguments& arguments) {
  const auto device = runtime::open_device(arguments.device, arguments.emulation);
  const runtime::DeviceProperties& chip = device->properties();
  const GemmConfig& config = arguments.config;
  if (shared_bytes(config) > chip.shared_bytes_per_block) {
    throw Error("tile-n " + std::to_string(config.tile_n) + " with " +
                std::to_string(config.stages) + " stages needs " +
                std::to_string(shared_bytes(config)) + " bytes of shared memory, but " + chip.name +
                " has " + std::to_string(chip.shared_bytes_per_block));
  }

  runtime::CompileRequest request;
  const bool blackwell = chip.arch != "sm_90a";
  request.text = kernel_text(blackwell, config);
  for (const device::File& file : device::gemm_files()) {
    request.headers.push_back({std::string(file.name), std::string(file.text)});
  }
  request.arch = chip.arch;
  request.format = chip.image_format;
  const runtime::CompileResult compiled = runtime::default_jit().compile(request);
  std::printf("device        %s\n", chip.name.c_str());
  print_resources(compiled);
  const auto kernel = device->load(compiled.image->bytes, runtime::kernel_name(request.text));

  const auto m = static_cast<std::size_t>(arguments.m);
  const auto n = static_cast<std::size_t>(arguments.n);
  const auto k = static_cast<std::size_t>(arguments.k);
  const std::vector<core::uint16> a = random_matrix(m * k, 1);
  const std::vector<core::uint16> b = random_matrix(n * k, 2);
  const DeviceBuffer a_memory(*device, 2 * a.size());
  const DeviceBuffer b_memory(*device, 2 * b.size());
  const DeviceBuffer c_memory(*device, 2 * m * n + guard_bytes);
  device->copy_to_device(a_memory.address(), a.data(), a_memory.bytes());
  device->copy_to_device(b_memory.address(), b.data(), b_memory.bytes());
  device->fill(c_memory.address(), poison, c_memory.bytes());

  GemmParams params;
  params.a = encode_map(*device, a_memory, arguments.m, arguments.k, config.tile_m);
  params.b = encode_map(*device, b_memory, arguments.n, arguments.k, config.tile_n);
  params.c = encode_map(*device, c_memory, arguments.m, arguments.n, blackwell ? 128 : 64);
  params.k = arguments.k;
  runtime::LaunchConfig launch;
  launch.grid = {ceil_div(arguments.m, config.tile_m), ceil_div(arguments.n, config.tile_n)};
  launch.block = {blackwell ? 256u : 384u};
  launch.dynamic_shared_bytes = static_cast<std::uint32_t>(shared_bytes(config));
  const auto launch_once = [&] {
    device->launch(*kernel, launch, std::as_bytes(std::span(&params, 1)));
  };
  launch_once();
  std::vector<unsigned char> c(c_memory.bytes());
  device->copy_to_host(c.data(), c_memory.address(), c.size());
  device->synchronize();

  const Check checked = check(arguments, a, b, c);
  const bool right = checked.worst <= 1.0 && checked.guard_intact;
  std::printf("product       %d x %d x %d, tile 128 x %d x 64, %d stages\n", arguments.m,
              arguments.n, arguments.k, config.tile_n, config.stages);
  std::printf("check         %zu elements, largest error %.3g, %.2f of what is allowed, %s: %s\n",
              checked.compared, checked.largest_error, checked.worst,
              checked.guard_intact ? "nothing written behind C" : "memory behind C overwritten",
              right ? "right" : "WRONG");
  if (arguments.repeat > 0) {
    const double ms = median_ms(*device, launch_once, arguments.repeat);
    const double flop =
        2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    std::printf("time          %.4f ms, median of %d: %.1f TFLOPS\n", ms, arguments.repeat,
                flop / ms / 1e9);
  }
  if (const std::string report = device->report(false); !report.empty()) {
    std::printf("\n%s", report.c_str());
  }
  return right;
}

}  // namespace

}  // namespace fovea::examples

int main(int count, char** words) {
  using namespace fovea;
  try {
    return examples::run(examples::parse({words + 1, words + count})) ? 0 : 1;
  } catch (const Error& fault) {
    std::fprintf(stderr, "gemm: %s\n", fault.what());
    return 2;
  } catch (const runtime::CompileError& fault) {
    std::fprintf(stderr, "gemm: %s\n%s\n", fault.what(), fault.log().c_str());
    return 1;
  } catch (const std::exception& fault) {
    std::fprintf(stderr, "gemm: %s\n", fault.what());
    return 1;
  }
}
