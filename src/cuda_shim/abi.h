// The binary interface of CUDA's runtime and driver as far as it is served: structures by their
// documented members, enumerators by their documented values. Declared here so that building needs
// no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::cuda_shim::abi {

struct Dim3 {
  unsigned x, y, z;
};

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    Dim3 cluster;
    int flag;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

inline constexpr int kAttributeCluster = 4;

struct RuntimeLaunch {  // cudaLaunchConfig_t
  Dim3 grid, block;
  std::size_t dynamic_shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(RuntimeLaunch) == 56);

struct DriverLaunch {  // CUlaunchConfig
  Dim3 grid, block;
  unsigned dynamic_shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(DriverLaunch) == 56);

struct FunctionAttributes {  // cudaFuncAttributes
  std::size_t shared_bytes, constant_bytes, local_bytes;
  int max_threads, registers, ptx_version, binary_version, cache_mode_ca;
  int max_dynamic_shared_bytes, shared_carveout;
  int cluster_must_be_set, required_cluster[3];
  int cluster_scheduling, non_portable_cluster;
  int reserved[16];
};

struct PointerAttributes {  // cudaPointerAttributes
  int type;                 // 0 unregistered, 1 host, 2 device, 3 managed
  int device;
  void *device_pointer, *host_pointer;
  long reserved[8];
};

struct Pitched {  // cudaPitchedPtr
  void* pointer;
  std::size_t pitch, width, height;
};
struct Extent {  // cudaExtent
  std::size_t width, height, depth;
};
struct Copy3d {  // cudaMemcpy3DParms
  void* source_array;
  std::size_t source_at[3];
  Pitched source;
  void* target_array;
  std::size_t target_at[3];
  Pitched target;
  Extent extent;
  int direction;
};

// The wrapper that __cudaRegisterFatBinary is given.
struct FatWrapper {
  std::uint32_t magic, version;
  const void* data;
  void* prelinked;
};
inline constexpr std::uint32_t kFatWrapperMagic = 0x466243b1;
inline constexpr std::uint32_t kFatWrapperLinked = 2;

// cudaFuncAttribute and CUfunction_attribute.
enum FunctionAttribute : int {
  function_max_threads = 0,
  function_shared_bytes = 1,
  function_constant_bytes = 2,
  function_local_bytes = 3,
  function_registers = 4,
  function_ptx_version = 5,
  function_binary_version = 6,
  function_max_dynamic_shared = 8,
  function_shared_carveout = 9,
  function_cluster_must_be_set = 10,
  function_required_cluster_x = 11,
  function_required_cluster_z = 13,
  function_non_portable_cluster = 14,
  function_cluster_scheduling = 15,
};

// cudaDeviceProp, which version 13 of the runtime shortened.
struct DeviceProperties13 {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_node_mask;
  std::size_t global_bytes, shared_bytes_per_block;
  int registers_per_block, warp_size;
  std::size_t memory_pitch;
  int max_threads_per_block, max_block[3], max_grid[3];
  std::size_t constant_bytes;
  int major, minor;
  std::size_t texture_alignment, texture_pitch_alignment;
  int sm_count, integrated, can_map_host_memory;
  int textures_and_surfaces[39];
  std::size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines;
  int unified_addressing, memory_bus_bits, l2_bytes, persisting_l2_bytes, threads_per_sm;
  int stream_priorities, global_l1, local_l1;
  std::size_t shared_bytes_per_sm;
  int registers_per_sm, managed_memory, multi_gpu_board, multi_gpu_board_group;
  int host_native_atomics, pageable_access, concurrent_managed_access, preemption;
  int registered_host_pointer, cooperative_launch;
  std::size_t shared_bytes_per_block_optin;
  int pageable_access_host_tables, direct_managed_access, blocks_per_sm, policy_window_bytes;
  std::size_t reserved_shared_bytes_per_block;
  int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools;
  int rdma;
  unsigned rdma_flush;
  int rdma_ordering;
  unsigned pool_handle_types;
  int deferred_arrays, ipc_events, cluster_launch, unified_function_pointers;
  int numa_config, numa_id, mps, host_numa_id;
  unsigned pci_gpu_id, pci_subsystem_id;
  int host_numa_ipc;
  int reserved[56];
};
static_assert(offsetof(DeviceProperties13, sm_count) == 384);
static_assert(sizeof(DeviceProperties13) == 1008);

struct DeviceProperties12 {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_node_mask;
  std::size_t global_bytes, shared_bytes_per_block;
  int registers_per_block, warp_size;
  std::size_t memory_pitch;
  int max_threads_per_block, max_block[3], max_grid[3];
  int clock_khz;
  std::size_t constant_bytes;
  int major, minor;
  std::size_t texture_alignment, texture_pitch_alignment;
  int device_overlap, sm_count, kernel_timeout, integrated, can_map_host_memory, compute_mode;
  int textures_and_surfaces[40];
  std::size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines;
  int unified_addressing, memory_clock_khz, memory_bus_bits, l2_bytes, persisting_l2_bytes;
  int threads_per_sm, stream_priorities, global_l1, local_l1;
  std::size_t shared_bytes_per_sm;
  int registers_per_sm, managed_memory, multi_gpu_board, multi_gpu_board_group;
  int host_native_atomics, single_to_double, pageable_access, concurrent_managed_access;
  int preemption, registered_host_pointer, cooperative_launch, cooperative_multi_device;
  std::size_t shared_bytes_per_block_optin;
  int pageable_access_host_tables, direct_managed_access, blocks_per_sm, policy_window_bytes;
  std::size_t reserved_shared_bytes_per_block;
  int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools;
  int rdma;
  unsigned rdma_flush;
  int rdma_ordering;
  unsigned pool_handle_types;
  int deferred_arrays, ipc_events, cluster_launch, unified_function_pointers;
  int reserved_more[2], reserved[61];
};
static_assert(sizeof(DeviceProperties12) == 1032);

}  // namespace fovea::cuda_shim::abi
