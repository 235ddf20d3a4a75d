#include "cuda_shim/launch.h"

#include <algorithm>
#include <limits>

namespace fovea::cuda_shim {
namespace {

constexpr int kSharedBytesPerSm = 228 * 1024, kSystemSharedBytes = 1024;
constexpr int kRegistersPerSm = 65536, kMostRegisters = 255, kMostThreads = 1024;

// PTX does not say how many registers the assembler will use; this is what it may at most.
int register_bound(const emulator::KernelInfo& info) {
  const int threads = info.max_threads == 0 ? kMostThreads : static_cast<int>(info.max_threads);
  return std::min(kMostRegisters, kRegistersPerSm / threads / 8 * 8);
}

}  // namespace

emulator::LaunchConfig launch_config(abi::Dim3 grid, abi::Dim3 block, std::size_t shared_bytes,
                                     std::span<const abi::LaunchAttribute> attributes) {
  emulator::LaunchConfig config;
  config.grid = {grid.x, grid.y, grid.z};
  config.block = {block.x, block.y, block.z};
  config.dynamic_shared_bytes = static_cast<std::uint32_t>(
      std::min<std::size_t>(shared_bytes, std::numeric_limits<std::uint32_t>::max()));
  for (const abi::LaunchAttribute& attribute : attributes) {
    if (attribute.id != abi::kAttributeCluster) continue;
    const abi::Dim3 d = attribute.value.cluster;
    config.cluster = {d.x, d.y, d.z};
  }
  return config;
}

int function_attribute(Session& session, Kernel& kernel, int attribute) {
  const emulator::KernelInfo& info = *session.prepared(kernel).info;
  switch (attribute) {
    case abi::function_max_threads:
      return info.max_threads == 0 ? kMostThreads : static_cast<int>(info.max_threads);
    case abi::function_shared_bytes: return static_cast<int>(info.static_shared_bytes);
    case abi::function_constant_bytes:
    case abi::function_local_bytes: return 0;
    case abi::function_registers: return register_bound(info);
    case abi::function_ptx_version:
    case abi::function_binary_version: return session.capability();
    case abi::function_max_dynamic_shared:
      return static_cast<int>(session.dynamic_shared_limit(kernel));
    case abi::function_shared_carveout: return -1;
    case abi::function_cluster_must_be_set:
    case abi::function_cluster_scheduling: return 0;
    case abi::function_required_cluster_x:
    case abi::function_required_cluster_x + 1:
    case abi::function_required_cluster_z:
      return static_cast<int>(info.required_cluster[static_cast<std::size_t>(
          attribute - abi::function_required_cluster_x)]);
    case abi::function_non_portable_cluster: return kernel.non_portable_cluster ? 1 : 0;
    default:
      throw Failure(Status::invalid_value,
                    "function attribute " + std::to_string(attribute) + " is not known.");
  }
}

void set_function_attribute(Session& session, Kernel& kernel, int attribute, int value) {
  const emulator::KernelInfo& info = *session.prepared(kernel).info;
  const int limit = static_cast<int>(session.chip().shared_bytes_per_cta) -
                    static_cast<int>(info.static_shared_bytes);
  switch (attribute) {
    case abi::function_max_dynamic_shared:
      if (value < 0 || value > limit) {
        throw Failure(Status::invalid_value, "kernel " + short_name(kernel.name) + " asks for " +
                                                 std::to_string(value) +
                                                 " bytes of dynamic shared memory; 0 to " +
                                                 std::to_string(limit) + " can be had.");
      }
      kernel.max_dynamic_shared_bytes = static_cast<std::uint32_t>(value);
      return;
    case abi::function_non_portable_cluster: kernel.non_portable_cluster = value != 0; return;
    case abi::function_shared_carveout:
    case abi::function_cluster_scheduling:
    case abi::function_cluster_must_be_set: return;
    default:
      throw Failure(Status::invalid_value,
                    "function attribute " + std::to_string(attribute) + " cannot be set.");
  }
}

void parameter_info(Session& session, Kernel& kernel, std::size_t index, std::size_t* offset,
                    std::size_t* bytes) {
  const emulator::KernelInfo& info = *session.prepared(kernel).info;
  if (index >= info.parameter_sizes.size()) {
    throw Failure(Status::invalid_value, "kernel " + short_name(kernel.name) +
                                             " has no parameter " + std::to_string(index) + ".");
  }
  if (offset != nullptr) *offset = info.parameter_offsets[index];
  if (bytes != nullptr) *bytes = info.parameter_sizes[index];
}

int resident_clusters(Session& session, Kernel& kernel, const emulator::LaunchConfig& config) {
  const int ctas = session.resident_ctas(kernel, static_cast<int>(config.block.count()),
                                         config.dynamic_shared_bytes);
  return ctas * session.chip().sm_count / static_cast<int>(config.cluster.count());
}

std::size_t shared_bytes_for(Session& session, Kernel& kernel, int ctas) {
  const int used = static_cast<int>(session.prepared(kernel).info->static_shared_bytes);
  const int share = kSharedBytesPerSm / std::max(ctas, 1) - kSystemSharedBytes;
  const int most = static_cast<int>(session.chip().shared_bytes_per_cta);
  return static_cast<std::size_t>(std::max(0, std::min(share, most) - used));
}

int device_attribute(const Session& session, int attribute) {
  struct Row {
    int attribute, value;
  };
  constexpr int most_int = std::numeric_limits<int>::max();
  const emulator::Chip& chip = session.chip();
  const int optin = static_cast<int>(chip.shared_bytes_per_cta);
  const bool blackwell = session.capability() >= 100;
  const Row rows[] = {
      {1, kMostThreads},  // threads of a block, and by dimension
      {2, kMostThreads},
      {3, kMostThreads},
      {4, 64},
      {5, most_int},  // blocks of a grid by dimension
      {6, 65535},
      {7, 65535},
      {8, 48 * 1024},  // shared memory of a block without asking
      {9, 64 * 1024},  // constant memory
      {10, 32},        // threads of a warp
      {11, most_int},  // pitch
      {12, kRegistersPerSm},
      {13, blackwell ? 1'965'000 : 1'980'000},  // kHz
      {14, 512},                                // texture alignment
      {15, 1},                                  // copies beside kernels
      {16, chip.sm_count},
      {19, 1},                                  // pinned memory can be mapped
      {30, 512},                                // surface alignment
      {31, 1},                                  // concurrent kernels
      {32, 1},                                  // ECC
      {36, blackwell ? 3'996'000 : 3'201'000},  // memory clock, kHz
      {37, blackwell ? 8192 : 6144},            // memory bus, bits
      {38, (blackwell ? 126 : 50) << 20},       // L2
      {39, 2048},                               // threads of an SM
      {40, 3},                                  // copy engines
      {41, 1},                                  // unified addresses
      {51, 32},                                 // texture pitch alignment
      {75, session.capability() / 10},
      {76, session.capability() % 10},
      {78, 1},  // stream priorities
      {79, 1},  // L1 caches global memory
      {80, 1},  // and local memory
      {81, kSharedBytesPerSm},
      {82, kRegistersPerSm},
      {83, 1},  // managed memory
      {87, 2},  // f32 operations per f64 operation
      {89, 1},  // host and device use managed memory together
      {90, 1},  // preemption
      {91, 1},  // registered host pointers are device pointers
      {95, 1},  // cooperative launch
      {97, optin},
      {99, 1},    // host memory can be registered
      {106, 32},  // blocks of an SM
      {111, kSystemSharedBytes},
      {115, 1},  // memory pools
      {120, 1},  // clusters
      {126, 4},  // memory synchronisation domains
      {133, 0},
  };
  for (const Row& row : rows) {
    if (row.attribute == attribute) return row.value;
  }
  return 0;
}

}  // namespace fovea::cuda_shim
