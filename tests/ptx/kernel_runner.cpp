#include "tests/ptx/kernel_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <vector>

#include "emulator/numeric.h"

namespace fovea::emulator::testing {
namespace {

constexpr int kRows = 256, kColumns = 256, kDepth = 256;

std::vector<u16> random_bf16(int count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<u16> values(static_cast<std::size_t>(count));
  for (u16& value : values) value = static_cast<u16>(float_to_bfloat16(normal(generator)));
  return values;
}

TensorMap map_of(Device& device, u64 address, int columns, int rows, u32 box_rows) {
  TensorMapSpec spec;
  spec.type = TensorType::bfloat16;
  spec.rank = 2;
  spec.address = address;
  spec.dimensions[0] = static_cast<u64>(columns);
  spec.dimensions[1] = static_cast<u64>(rows);
  spec.strides_bytes[0] = static_cast<u64>(columns) * 2;
  spec.box[0] = 64;
  spec.box[1] = box_rows;
  spec.swizzle = Swizzle::b128;
  return device.encode(spec);
}

// Parameter blocks, laid out as nvcc lays out the kernels' arguments.
struct alignas(64) Hopper {
  TensorMap a, b, c;
  int steps;
};
struct alignas(64) Blackwell {
  TensorMap a, b;
  u64 c;
  int steps, ld;
};

template <class T>
std::span<const std::byte> bytes_of(const T& value, std::size_t bytes) {
  return {reinterpret_cast<const std::byte*>(&value), bytes};
}

double element(const std::vector<u16>& values, int i) {
  return bfloat16_to_float(values[static_cast<std::size_t>(i)]);
}

}  // namespace

std::string read_text(const std::string& path) {
  std::ifstream file(std::string(FOVEA_PTX_TESTS) + "/" + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string kernel_path(Kernel kernel) {
  switch (kernel) {
    case Kernel::gemm_sm90: return "kernels/gemm_sm90.ptx";
    case Kernel::attention_sm90: return "kernels/attention_sm90.ptx";
    case Kernel::attention_sm100: return "kernels/attention_sm100.ptx";
    default: return "kernels/gemm_sm100.ptx";
  }
}

std::string kernel_entry(Kernel kernel) {
  switch (kernel) {
    case Kernel::gemm_sm90: return "gemm";
    case Kernel::gemm_single: return "gemm_single";
    case Kernel::gemm_pair: return "gemm_pair";
    default: return "attention";
  }
}

namespace {

KernelResult run_gemm(Kernel kernel, const std::string& ptx, Device& device) {
  const bool hopper = kernel == Kernel::gemm_sm90, pair = kernel == Kernel::gemm_pair;
  const std::vector<u16> a = random_bf16(kRows * kDepth, 1), b = random_bf16(kColumns * kDepth, 2);
  const u64 address_a = device.allocate(a.size() * 2), address_b = device.allocate(b.size() * 2);
  const std::size_t out_bytes = std::size_t{kRows} * kColumns * (hopper ? 2 : 4);
  const u64 address_c = device.allocate(out_bytes);
  device.write(address_a, a.data(), a.size() * 2);
  device.write(address_b, b.data(), b.size() * 2);
  const std::vector<u8> nothing(out_bytes, 0xff);
  device.write(address_c, nothing.data(), out_bytes);
  LaunchConfig config;
  config.grid.x = kRows / 128;
  KernelResult result;
  if (hopper) {
    Hopper p{};
    p.a = map_of(device, address_a, kDepth, kRows, 128);
    p.b = map_of(device, address_b, kDepth, kColumns, 128);
    p.c = map_of(device, address_c, kColumns, kRows, 64);
    p.steps = kDepth / 64;
    config.block.x = 384;
    config.dynamic_shared_bytes = 132096;
    result.report = device.launch(ptx, "gemm", config, bytes_of(p, 388));
  } else {
    Blackwell p{};
    p.a = map_of(device, address_a, kDepth, kRows, 128);
    p.b = map_of(device, address_b, kDepth, kColumns, pair ? 64 : 128);
    p.c = address_c;
    p.steps = kDepth / 64;
    p.ld = kColumns;
    config.block.x = 256;
    config.dynamic_shared_bytes = pair ? 74752 : 99328;
    result.report =
        device.launch(ptx, pair ? "gemm_pair" : "gemm_single", config, bytes_of(p, 272));
  }
  std::vector<u8> c(out_bytes);
  device.read(c.data(), address_c, out_bytes);
  bool finite = true;
  for (int row = 0; row < kRows; row += 5) {
    for (int column = 0; column < kColumns; ++column) {
      double sum = 0;
      for (int k = 0; k < kDepth; ++k)
        sum += element(a, row * kDepth + k) * element(b, column * kDepth + k);
      const std::size_t at = static_cast<std::size_t>(row * kColumns + column);
      float value = 0;
      u16 half = 0;
      if (hopper)
        std::memcpy(&half, &c[2 * at], 2);
      else
        std::memcpy(&value, &c[4 * at], 4);
      if (hopper) value = bfloat16_to_float(half);
      result.output.push_back(value);
      const double error = std::fabs(static_cast<double>(value) - sum) / (1 + std::fabs(sum));
      finite = finite && std::isfinite(value);
      result.max_error = std::max(result.max_error, error);
    }
  }
  result.correct = finite && result.max_error < (hopper ? 4e-3 : 1e-4);
  return result;
}

struct alignas(64) Attention {
  TensorMap q, k, v;
  u64 out;
  int blocks;
  float scale_log2;
};

double attention_error(const std::vector<u16>& q, const std::vector<u16>& k,
                       const std::vector<u16>& v, const std::vector<float>& out, int keys) {
  double worst = 0;
  const int queries = static_cast<int>(q.size()) / 64;
  for (int row = 0; row < queries; row += 3) {
    std::vector<double> weight(static_cast<std::size_t>(keys));
    double total = 0;
    for (int j = 0; j < keys; ++j) {
      double dot = 0;
      for (int d = 0; d < 64; ++d) dot += element(q, row * 64 + d) * element(k, j * 64 + d);
      weight[static_cast<std::size_t>(j)] = std::exp(dot / 8);
      total += weight[static_cast<std::size_t>(j)];
    }
    for (int d = 0; d < 64; ++d) {
      double sum = 0;
      for (int j = 0; j < keys; ++j)
        sum += weight[static_cast<std::size_t>(j)] * element(v, j * 64 + d);
      const double value = static_cast<double>(out[static_cast<std::size_t>(row * 64 + d)]);
      const double error = std::fabs(value - sum / total) / (1 + std::fabs(sum / total));
      worst = error <= worst ? worst : error;  // also takes over a NaN
    }
  }
  return worst;
}

KernelResult run_attention(Kernel kernel, const std::string& ptx, Device& device) {
  const bool hopper = kernel == Kernel::attention_sm90;
  const int queries = 128, blocks = 5, keys = 64 * blocks;
  const std::vector<u16> q = random_bf16(queries * 64, 1), k = random_bf16(keys * 64, 2),
                         v = random_bf16(keys * 64, 3);
  auto upload = [&](const std::vector<u16>& values) {
    const u64 address = device.allocate(values.size() * 2);
    device.write(address, values.data(), values.size() * 2);
    return address;
  };
  Attention p{};
  p.q = map_of(device, upload(q), 64, queries, hopper ? 64 : 128);
  p.k = map_of(device, upload(k), 64, keys, 64);
  p.v = map_of(device, upload(v), 64, keys, 64);
  std::vector<float> out(static_cast<std::size_t>(queries) * 64);
  p.out = device.allocate(out.size() * 4);
  std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
  device.write(p.out, out.data(), out.size() * 4);
  p.blocks = blocks;
  p.scale_log2 = 1.4426950409f / 8;
  LaunchConfig config;
  config.grid.x = hopper ? 2 : 1;
  config.block.x = 160;
  config.dynamic_shared_bytes = hopper ? 41984 : 50176;
  KernelResult result;
  result.report = device.launch(ptx, "attention", config, bytes_of(p, 400));
  device.read(out.data(), p.out, out.size() * 4);
  result.max_error = attention_error(q, k, v, out, keys);
  result.output = out;
  result.correct = result.max_error < 1e-2;  // P is rounded to bf16
  return result;
}

}  // namespace

namespace {

class Emulated : public Device {
 public:
  Emulated(const Chip& chip, const Schedule& schedule) : machine_(chip), schedule_(schedule) {}
  std::uint64_t allocate(std::size_t bytes) override { return machine_.allocate(bytes); }
  void write(std::uint64_t address, const void* source, std::size_t bytes) override {
    machine_.write(address, source, bytes);
  }
  void read(void* destination, std::uint64_t address, std::size_t bytes) override {
    machine_.read(destination, address, bytes);
  }
  TensorMap encode(const TensorMapSpec& spec) override { return encode_tensor_map(spec); }
  Report launch(const std::string& ptx, const std::string& entry, const LaunchConfig& config,
                std::span<const std::byte> parameters) override {
    return machine_.launch(Module::parse(ptx), entry, config, parameters, schedule_);
  }

 private:
  Machine machine_;
  Schedule schedule_;
};

}  // namespace

KernelResult run_kernel(Kernel kernel, const std::string& ptx, const Schedule& schedule) {
  const bool hopper = kernel == Kernel::gemm_sm90 || kernel == Kernel::attention_sm90;
  Emulated device(hopper ? chip_h200() : chip_b200(), schedule);
  return run_kernel(kernel, ptx, device);
}

KernelResult run_kernel(Kernel kernel, const std::string& ptx, Device& device) {
  return kernel == Kernel::attention_sm90 || kernel == Kernel::attention_sm100
             ? run_attention(kernel, ptx, device)
             : run_gemm(kernel, ptx, device);
}

}  // namespace fovea::emulator::testing
