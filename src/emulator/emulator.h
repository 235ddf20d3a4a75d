// Runs PTX on a CPU: parse a module, give it memory, launch, read a report of faults and counters.
//
// Nothing here prints, aborts or exits. Text that is not PTX, and PTX that this emulator does not
// know, is an Error with the line; what a running kernel does wrong is a Fault in the Report.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::emulator {

// PTX line (1-based, 0 when there is none) and one sentence.
class Error : public std::runtime_error {
 public:
  Error(int line, const std::string& sentence)
      : std::runtime_error(line > 0 ? "PTX line " + std::to_string(line) + ": " + sentence
                                    : sentence),
        line_(line) {}
  int line() const { return line_; }

 private:
  int line_;
};

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;
  std::uint64_t count() const { return std::uint64_t{x} * y * z; }
};

// What a kernel can observe of a chip.
struct Chip {
  std::string name;
  std::string arch;
  int sm_count = 0;
  std::uint32_t shared_bytes_per_cta = 0;
  std::uint32_t registers_per_sm = 65536;
  std::uint32_t tensor_columns = 0;  // tensor memory, 128 lanes of 32 bit each; 0 on Hopper
  std::uint32_t max_cluster = 16;
};

Chip chip_h100();
Chip chip_h200();
Chip chip_b200();
Chip chip_b300();
// "sm_90a", "sm_100a", "sm_103a" or a chip name; throws Error with the names known.
Chip find_chip(std::string_view name_or_arch);

struct KernelInfo {
  std::string name;
  std::vector<std::uint32_t> parameter_offsets;
  std::vector<std::uint32_t> parameter_sizes;
  std::uint32_t parameter_bytes = 0;
  std::uint32_t static_shared_bytes = 0;
  std::uint32_t max_threads = 0;                    // .maxntid product, 0 when not given
  std::uint32_t virtual_registers = 0;              // 32-bit words after slot allocation
  std::array<std::uint32_t, 3> required_cluster{};  // zeros when not given
};

struct ModuleData;

class Module {
 public:
  // Throws Error; never reads past the text, never crashes on bytes that are not PTX.
  static Module parse(std::string_view ptx);

  std::string target() const;
  std::vector<std::string> kernels() const;
  KernelInfo kernel(std::string_view name) const;
  const std::shared_ptr<ModuleData>& data() const { return data_; }

 private:
  std::shared_ptr<ModuleData> data_;
};

// When asynchronous work (copies, tensor products, commits) completes.
//   eager   as soon as it may            lazy    only when no warp can go on
//   random  at seeded random moments, in seeded random order
enum class Policy { eager, lazy, random };

struct Schedule {
  Policy policy = Policy::eager;
  std::uint64_t seed = 0;
  bool checks = true;
  // tcgen05 as hardware is seen to do it, for programs that count on that: products complete in
  // issue order, plain synchronisation orders tensor memory without tcgen05.fence, and registers of
  // tcgen05.ld are valid without a wait. Otherwise only what the manual promises holds.
  bool in_order_tensor = false;
  // Sums of floating-point numbers in global memory depend on their order: additions to one word
  // that nothing orders are a race, as for a kernel that promises equal bits. In turns between
  // clusters, asynchronous additions also need fence.proxy.async behind the acquiring load.
  bool ordered_sums = false;
  std::uint64_t step_limit = std::uint64_t{1} << 34;  // warp instructions before "runs for ever"
  std::size_t max_faults = 32;
  std::uint64_t cta_limit = 0;  // only the first clusters that make up so many CTAs run; 0: all
};

enum class FaultKind {
  none,
  race,
  missing_proxy_fence,
  missing_fence,
  uninitialised,
  in_flight,
  deadlock,
  transaction_bytes,
  arrivals,
  barrier_misuse,
  tensor_memory,
  out_of_bounds,
  misaligned,
  divergent,
  resources,
  trap,
  bad_argument,
  step_limit,
};

std::string_view name(FaultKind kind);

struct Fault {
  FaultKind kind = FaultKind::none;
  int line = 0;        // PTX line
  std::string source;  // "file:line" from .loc, empty when unknown
  std::array<std::uint32_t, 3> cta{};
  int warp = -1;
  int lane = -1;
  std::string agent;  // "warp 3", "tma load", "wgmma", ...
  std::string instruction;
  std::string sentence;
  std::string text() const;
};

// Counts of one warp or of a sum of warps. Lane counts are threads, not warp instructions.
struct Counters {
  std::uint64_t warp_instructions = 0;
  std::uint64_t tensor_flops_f16 = 0;  // f16 and bf16 inputs
  std::uint64_t tensor_flops_tf32 = 0;
  std::uint64_t tensor_flops_fp8 = 0;  // f8f6f4 kinds and 8-bit wgmma
  std::uint64_t tensor_flops_fp4 = 0;
  std::uint64_t tensor_ops_int8 = 0;
  std::uint64_t mufu_lanes = 0;
  std::uint64_t fma_lanes = 0;
  std::uint64_t alu_lanes = 0;
  std::uint64_t other_lanes = 0;
  std::uint64_t shared_tensor_read_bytes = 0;
  std::uint64_t shared_read_bytes = 0;
  std::uint64_t shared_write_bytes = 0;
  std::uint64_t bank_conflicts = 0;  // extra shared-memory cycles of thread accesses
  std::uint64_t global_read_bytes = 0;
  std::uint64_t global_write_bytes = 0;
  std::uint64_t cp_async_bytes = 0;  // written into shared memory, zeros that fill up too
  std::uint64_t tma_load_bytes = 0;  // by copies and bulk copies out of global memory
  std::uint64_t tma_store_bytes = 0;
  std::uint64_t dsmem_bytes = 0;  // between CTAs of a cluster, bulk copies of shared memory too
  std::uint64_t tensor_memory_read_bytes = 0;
  std::uint64_t tensor_memory_write_bytes = 0;
  // Of these two: operand A, and the accumulator of each product that adds to it, or writes it.
  std::uint64_t tensor_memory_operand_bytes = 0;
  std::uint64_t accumulator_read_bytes = 0;
  std::uint64_t accumulator_write_bytes = 0;
  std::uint64_t barrier_waits = 0;
  std::uint64_t barrier_blocks = 0;  // waits that did not pass at once
  std::uint64_t atomics = 0;

  Counters& operator+=(const Counters& other);
};

struct Report {
  std::string kernel;
  std::vector<Fault> faults;
  std::uint64_t faults_not_listed = 0;
  std::uint64_t ctas = 0;  // that ran
  // The fault that a GPU would not survive and that ended the launch before its grid was done.
  FaultKind stopped_by = FaultKind::none;
  Counters total;
  std::vector<Counters> per_warp;  // by warp index in the CTA, summed over CTAs
  std::string output;              // what the kernel printed
  bool ok() const { return faults.empty(); }
  bool has(FaultKind kind) const;
  std::string table() const;
  std::string json() const;
};

enum class TensorType {
  uint8,
  uint16,
  uint32,
  int32,
  uint64,
  int64,
  float16,
  float32,
  float64,
  bfloat16,
  float32_ftz,
  tfloat32,
  tfloat32_ftz
};
enum class Swizzle { none, b32, b64, b128 };

// A tiled tensor map. Dimension 0 is the contiguous one; strides are in bytes, of dimensions 1...
struct TensorMapSpec {
  TensorType type = TensorType::uint8;
  int rank = 1;
  std::uint64_t address = 0;
  std::array<std::uint64_t, 5> dimensions{1, 1, 1, 1, 1};
  std::array<std::uint64_t, 4> strides_bytes{};
  std::array<std::uint32_t, 5> box{1, 1, 1, 1, 1};
  std::array<std::uint32_t, 5> element_strides{1, 1, 1, 1, 1};
  Swizzle swizzle = Swizzle::none;
  bool nan_fill = false;
};
using TensorMap = std::array<std::byte, 128>;

// The emulator's own self-describing 128 bytes. Throws Error naming the value a real encoder would
// refuse (alignment, box and stride limits).
TensorMap encode_tensor_map(const TensorMapSpec& spec);
// False where the bytes were not made by encode_tensor_map.
bool decode_tensor_map(std::span<const std::byte, 128> bytes, TensorMapSpec& spec);

struct LaunchConfig {
  Dim3 grid, block;
  Dim3 cluster;  // 1,1,1: none
  std::uint32_t dynamic_shared_bytes = 0;
};

struct MachineData;

// Device memory and launches. Not safe for use by several threads at once.
class Machine {
 public:
  explicit Machine(const Chip& chip);
  ~Machine();
  Machine(Machine&&) noexcept;
  Machine& operator=(Machine&&) noexcept;

  const Chip& chip() const;

  // Addresses are the emulator's own; unmapped space lies between allocations, so an access past an
  // end is a fault. Fresh memory is filled with 0xcd.
  std::uint64_t allocate(std::size_t bytes);
  void free(std::uint64_t address);
  void write(std::uint64_t address, const void* source, std::size_t bytes);
  void read(void* destination, std::uint64_t address, std::size_t bytes) const;
  void fill(std::uint64_t address, int byte, std::size_t bytes);
  // Makes host memory visible to kernels at its own address, until free() of that address. The
  // memory stays its owner's. Throws Error where it would cover an allocation or a window of the
  // machine.
  void adopt(void* memory, std::size_t bytes);
  // The allocation around an address; bytes is 0 where there is none.
  struct Range {
    std::uint64_t address = 0;
    std::size_t bytes = 0;
  };
  Range allocation(std::uint64_t address) const;
  // Host pointer to emulated memory, valid until it is freed; throws Error outside an allocation.
  void* host_pointer(std::uint64_t address, std::size_t bytes);
  // Address of a module-scope .global or .const variable; 0 when there is none of that name.
  std::uint64_t symbol(const Module& module, std::string_view name);

  // Parameters are the bytes of the kernel's parameter block, laid out as the driver does.
  // Throws Error for a launch that a driver would refuse.
  Report launch(const Module& module, std::string_view kernel, const LaunchConfig& config,
                std::span<const std::byte> parameters, const Schedule& schedule = {});

 private:
  std::unique_ptr<MachineData> data_;
};

}  // namespace fovea::emulator
