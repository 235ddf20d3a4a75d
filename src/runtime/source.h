// From a configuration to kernel text: the wide instructions that a kernel uses, written out as one
// function each because an asm string must be a literal, and the entry point around the kernel.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"

namespace fovea::runtime {

class Device;
class Jit;
class Kernel;

// A warpgroup product of 64 x n, fp32 accumulator; k is 16 for 16-bit and 32 for 8-bit types.
struct WgmmaShape {
  int n = 0;  // multiple of 8 in 8..256
  core::DType a = core::DType::bf16;
  core::DType b = core::DType::bf16;
  bool a_in_registers = false;
  bool a_mn_major = false;  // 16-bit types in shared memory only
  bool b_mn_major = false;  // 16-bit types only

  bool operator==(const WgmmaShape&) const = default;
};

// "wgmma_m64n128k16_f32_bf16_ss_kk". Functions below throw std::invalid_argument with one sentence
// for a shape that the instruction set does not have.
std::string wgmma_name(const WgmmaShape& shape);
// A kernel whose configuration decides the shape calls it by a name of its own, given here.
std::string wgmma_text(const WgmmaShape& shape, std::string_view name = {});

// A tcgen05 product: kind f16 (f16 and bf16) or f8f6f4 (e4m3 and e5m2); types, sizes and majorness
// are in the instruction descriptor (device/tile.h).
struct Tcgen05Mma {
  bool eight_bit = false;
  bool a_in_tensor_memory = false;
  int cta_group = 1;  // 1 or 2

  bool operator==(const Tcgen05Mma&) const = default;
};

std::string tcgen05_mma_name(const Tcgen05Mma& product);
std::string tcgen05_mma_text(const Tcgen05Mma& product);

// tcgen05.ld / tcgen05.st .32x32b of `words` columns (a power of two, 1..128), for each of 32
// lanes.
std::string tcgen05_load_text(int words);
// The same with the largest of the words as a float, NaN if one is (sm_103a).
std::string tcgen05_load_max_text(int words);
std::string tcgen05_store_text(int words);

// One kernel as a translation unit.
struct KernelSource {
  std::string name;                       // "forward_sm90_bf16_d128": how profilers list it
  std::string include;                    // file with the kernel: "device/fwd_sm90.cuh"
  std::vector<std::string> instructions;  // texts of the functions above that it calls
  std::string call;    // name of the device function to run: "fovea::device::fwd<FwdConfig{...}>"
  std::string params;  // type of its one argument, passed by value as a __grid_constant__
  int threads = 0;     // of a CTA
  int ctas = 1;        // that a multiprocessor must be able to hold: bounds their registers
};

// "bf16_d128", "e4m3_d192_128": the part of a kernel's name that operands decide.
std::string operand_name(core::DType dtype, int head_dim, int head_dim_v);

// The kernel is called "fovea_" and the source's name.
std::string kernel_text(const KernelSource& source);

// The name of the one kernel that a text defines.
std::string kernel_name(std::string_view text);

// The kernel of such a text on the device, compiled for its architecture unless a cache has it.
// Throws what Jit::compile() does.
std::shared_ptr<Kernel> load_kernel(Device& device, Jit& jit, std::string text, bool strict = true);

}  // namespace fovea::runtime
