// One tensor-core product of every operand layout: element types, swizzles,
// majorness, operands in shared memory, registers and tensor memory. The inputs
// are small integers, so results are exact; the images of shared memory are
// built here, from the manual's canonical layouts, element by element.
//
// FOVEA_TEST_DEVICES=cuda runs it on a GPU.
#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <vector>

#include "core/numeric.h"
#include "device/tile.h"
#include "runtime/device.h"
#include "runtime/source.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using core::DType;
using device::Swizzle;
using device::uint32;
using device::uint64;
using runtime::Device;
using runtime::DeviceAddress;
using runtime::DeviceBuffer;
using Bytes = std::vector<unsigned char>;

struct Operand {
  DType type = DType::bf16;
  Swizzle swizzle = Swizzle::b128;
  bool mn_major = false;
};

struct Case {
  Operand a;
  Operand b;
  bool a_not_shared = false;  // registers on Hopper, tensor memory on Blackwell
};

int size_of(DType type) { return core::size_bytes(type); }

// A small integer for element (row, k) of an operand; exact in every type used.
float value_at(int salt, int row, int k) {
  return static_cast<float>((row * 5 + k * 3 + salt) % 7 - 3);
}

unsigned element_bits(DType type, float value) {
  switch (type) {
    case DType::bf16: return core::float_to_bf16(value);
    case DType::f16: return core::float_to_f16(value);
    case DType::e4m3: return core::float_to_e4m3(value);
    default: return core::float_to_e5m2(value);
  }
}

// Shared memory of one operand [rows][depth], its strides and the bytes from
// one instruction's k to the next's.
struct Image {
  Bytes bytes;
  uint32 leading = 0;
  uint32 stride = 0;
  uint32 step = 0;
};

// k that one image holds: a pattern row if K-major and swizzled, else two
// instructions' worth.
int depth_of(const Operand &o) {
  if (o.mn_major || o.swizzle == Swizzle::none) return 64 / size_of(o.type);
  return static_cast<int>(device::swizzle_bytes(o.swizzle)) / size_of(o.type);
}

Image make_image(const Operand &o, int salt, int rows, int depth) {
  const int size = size_of(o.type);
  const int width = static_cast<int>(device::swizzle_bytes(o.swizzle));
  const int chunk = width / size;  // elements of one pattern row, or of 16 bytes without swizzle
  Image image;
  image.bytes.assign(static_cast<std::size_t>(rows * depth * size), 0);
  const bool plain = o.swizzle == Swizzle::none;
  int group_bytes = 0;   // from 8 rows (k) to the next 8
  int column_bytes = 0;  // from one chunk to the next
  if (!o.mn_major) {
    column_bytes = plain ? rows * 16 : 0;
    group_bytes = 8 * width;
    image.leading = static_cast<uint32>(column_bytes);
    image.stride = static_cast<uint32>(group_bytes);
    image.step = static_cast<uint32>(plain ? 2 * column_bytes : 32);
  } else {
    group_bytes = 8 * width;
    column_bytes = depth * width;
    // Without swizzle the two strides change places.
    image.leading = static_cast<uint32>(plain ? group_bytes : column_bytes);
    image.stride = static_cast<uint32>(plain ? column_bytes : group_bytes);
    image.step = static_cast<uint32>(32 / size / 8 * group_bytes);
  }
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < depth; ++k) {
      const int along = o.mn_major ? row : k;   // contiguous direction
      const int across = o.mn_major ? k : row;  // in groups of 8
      const auto at = static_cast<uint32>(across / 8 * group_bytes + across % 8 * width +
                                          along / chunk * column_bytes + along % chunk * size);
      const unsigned bits = element_bits(o.type, value_at(salt, row, k));
      std::memcpy(image.bytes.data() + device::swizzled(o.swizzle, at), &bits,
                  static_cast<std::size_t>(size));
    }
  }
  return image;
}

float exact(int row, int column, int depth) {
  float sum = 0.0f;
  for (int k = 0; k < depth; ++k) sum += value_at(1, row, k) * value_at(2, column, k);
  return sum;
}

std::string describe(const Case &c) {
  constexpr const char *swizzles[] = {"none", "32", "64", "128"};
  const auto one = [&](const Operand &o) {
    return "type " + std::to_string(static_cast<int>(o.type)) + " swizzle " +
           swizzles[static_cast<int>(o.swizzle)] + (o.mn_major ? " MN-major" : " K-major");
  };
  return "a: " + (c.a_not_shared ? std::string("not in shared memory") : one(c.a)) +
         ", b: " + one(c.b);
}

// bf16 in every layout; the other types where they differ.
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Swizzle swizzle : {Swizzle::none, Swizzle::b32, Swizzle::b64, Swizzle::b128}) {
    constexpr DType bf16 = DType::bf16;
    constexpr DType e4m3 = DType::e4m3;
    for (int major = 0; major < 4; ++major) {
      cases.push_back({{bf16, swizzle, (major & 1) != 0}, {bf16, swizzle, (major & 2) != 0}});
    }
    cases.push_back({{bf16}, {bf16, swizzle, false}, true});
    cases.push_back({{bf16}, {bf16, swizzle, true}, true});
    cases.push_back({{e4m3, swizzle}, {e4m3, swizzle}});
    cases.push_back({{e4m3}, {e4m3, swizzle}, true});
  }
  cases.push_back({{DType::f16}, {DType::f16}});
  cases.push_back({{DType::f16}, {DType::f16}, true});
  cases.push_back({{DType::e5m2}, {DType::e5m2}});
  cases.push_back({{DType::e4m3}, {DType::e5m2}});
  return cases;
}

// The k of a case: both operands cover it.
int common_depth(const Case &c) {
  return std::min(c.a_not_shared ? 1 << 20 : depth_of(c.a), depth_of(c.b));
}

struct Params {
  DeviceAddress a, b, out;
  uint64 a_descriptor, b_descriptor;  // without the address
  uint32 a_bytes, b_bytes, a_step, b_step, instruction;
};

constexpr int n = 128;

constexpr const char *common_text = R"(
  #include "device/mbarrier.h"
  #include "device/tile.h"
  namespace fovea::device {
  struct Params {
    const uint8* a; const uint8* b; float* out;
    uint64 a_descriptor, b_descriptor;
    uint32 a_bytes, b_bytes, a_step, b_step, instruction;
  };
  extern __shared__ __align__(1024) uint8 shared_memory[];
  inline uint8* b_tile() { return shared_memory + 32768; }
  inline void fill(const Params& p) {
    for (uint32 i = threadIdx.x; i < p.a_bytes; i += 128) shared_memory[i] = p.a[i];
    for (uint32 i = threadIdx.x; i < p.b_bytes; i += 128) b_tile()[i] = p.b[i];
    fence_proxy_async_shared();
    __syncthreads();
  }
  inline uint64 at(uint64 descriptor, const void* tile, uint32 bytes) {
    return descriptor + ((shared_address(tile).value + bytes) >> 4);
  }
  }
)";

// Instructions to cover the depth: a constant, so that the products stand in
// straight code.
std::string steps_text(const Case &c, int depth) {
  return "inline constexpr unsigned steps = " + std::to_string(depth * size_of(c.a.type) / 32) +
         ";\n";
}

class ProductTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { device_ = runtime::open_device(GetParam()); }

  // Runs the case and compares all of D [rows x n].
  void run(const Case &c, const std::string &text, Params params, const Bytes &a, const Bytes &b,
           int rows, int depth) {
    const auto kernel = build_kernel(*device_, text);
    const DeviceBuffer a_memory(*device_, a.size());
    const DeviceBuffer b_memory(*device_, b.size());
    const DeviceBuffer out(*device_, static_cast<std::size_t>(rows * n) * sizeof(float));
    device_->copy_to_device(a_memory.address(), a.data(), a.size());
    device_->copy_to_device(b_memory.address(), b.data(), b.size());
    device_->fill(out.address(), 0xff, out.bytes());
    params.a = a_memory.address();
    params.b = b_memory.address();
    params.out = out.address();
    params.b_bytes = static_cast<uint32>(b.size());
    runtime::LaunchConfig launch;
    launch.block = {128, 1, 1};
    launch.dynamic_shared_bytes = 65536;
    try {
      device_->launch(*kernel, launch, std::as_bytes(std::span(&params, 1)));
    } catch (const runtime::DeviceError &fault) {
      FAIL() << describe(c) << ": " << fault.what();
    }
    std::vector<float> got(out.bytes() / sizeof(float));
    device_->copy_to_host(got.data(), out.address(), out.bytes());
    device_->synchronize();
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < n; ++column) {
        ASSERT_EQ(got[static_cast<std::size_t>(row * n + column)], exact(row, column, depth))
            << describe(c) << ", row " << row << " column " << column;
      }
    }
  }

  std::unique_ptr<Device> device_;
};

// ---- Hopper
// -------------------------------------------------------------------------------------------

// Registers of operand A as threads hold them: [step][thread][4].
Bytes register_image(DType type, int depth) {
  const int size = size_of(type);
  const int per_step = 32 / size;
  Bytes bytes;
  for (int step = 0; step < depth / per_step; ++step) {
    for (int t = 0; t < 128; ++t) {
      for (int e = 0; e < 16 / size; ++e) {
        const int row =
            size == 2 ? device::WgmmaOperandA::row(t, e) : device::WgmmaOperandA8::row(t, e);
        const int k =
            size == 2 ? device::WgmmaOperandA::col(t, e) : device::WgmmaOperandA8::col(t, e);
        const unsigned bits = element_bits(type, value_at(1, row, step * per_step + k));
        for (int byte = 0; byte < size; ++byte) {
          bytes.push_back(static_cast<unsigned char>(bits >> (8 * byte)));
        }
      }
    }
  }
  return bytes;
}

std::string hopper_text(const Case &c, int depth) {
  const runtime::WgmmaShape shape{.n = n,
                                  .a = c.a.type,
                                  .b = c.b.type,
                                  .a_in_registers = c.a_not_shared,
                                  .a_mn_major = c.a.mn_major && !c.a_not_shared,
                                  .b_mn_major = c.b.mn_major};
  const std::string load = c.a_not_shared ? R"(
        uint32 a[steps][4];
        for (uint32 i = 0; i < steps; ++i) {
          for (int j = 0; j < 4; ++j) {
            a[i][j] = reinterpret_cast<const uint32*>(p.a)[(i * 128 + threadIdx.x) * 4 + j];
          }
        })"
                                          : "";
  const std::string a = c.a_not_shared ? "a[i]" : "at(p.a_descriptor, shared_memory, i * p.a_step)";
  return std::string(common_text) + steps_text(c, depth) +
         "#include \"device/wgmma.h\"\nnamespace fovea::device {\n" +
         runtime::wgmma_text(shape, "product") + R"(
      extern "C" __global__ void __launch_bounds__(128)
      fovea_kernel(const __grid_constant__ Params p) {
        float sum[64];
        fill(p);)" +
         load + R"(
        wgmma_fence();
        #pragma unroll
        for (uint32 i = 0; i < steps; ++i) {
          product(sum, )" +
         a + R"(, at(p.b_descriptor, b_tile(), i * p.b_step), i > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(sum);
        for (int i = 0; i < 64; ++i) {
          const int row = WgmmaAccumulator::row(threadIdx.x, i);
          p.out[row * 128 + WgmmaAccumulator::col(threadIdx.x, i)] = sum[i];
        }
      }
      })";
}

TEST_P(ProductTest, WgmmaReadsEveryLayout) {
  if (device_->properties().arch != "sm_90a") GTEST_SKIP() << "wgmma is Hopper's";
  for (const Case &c : all_cases()) {
    const int depth = common_depth(c);
    const Image a = make_image(c.a, 1, 64, depth_of(c.a));
    const Image b = make_image(c.b, 2, n, depth_of(c.b));
    Params params{};
    params.a_descriptor = device::wgmma_descriptor(c.a.swizzle, 0, a.leading, a.stride);
    params.b_descriptor = device::wgmma_descriptor(c.b.swizzle, 0, b.leading, b.stride);
    params.a_step = a.step;
    params.b_step = b.step;

    const Bytes registers = register_image(c.a.type, depth);
    params.a_bytes = c.a_not_shared ? 0 : static_cast<uint32>(a.bytes.size());
    run(c, hopper_text(c, depth), params, c.a_not_shared ? registers : a.bytes, b.bytes, 64, depth);
    if (HasFatalFailure()) return;
  }
}

// ---- Blackwell
// ------------------------------------------------------------------------------------------

// Operand A as tensor memory holds it: [lane][32-bit column].
Bytes tensor_memory_image(DType type, int depth) {
  const int size = size_of(type);
  Bytes bytes;
  for (int row = 0; row < 128; ++row) {
    for (int k = 0; k < depth; ++k) {
      const unsigned bits = element_bits(type, value_at(1, row, k));
      for (int byte = 0; byte < size; ++byte) {
        bytes.push_back(static_cast<unsigned char>(bits >> (8 * byte)));
      }
    }
  }
  return bytes;
}

// Columns 0 .. 127 hold D, 128 .. 159 operand A where it is in tensor memory.
std::string blackwell_text(const Case &c, int depth) {
  const runtime::Tcgen05Mma product{size_of(c.a.type) == 1, c.a_not_shared, 1};
  const std::string store = c.a_not_shared ? R"(
        uint32 a[32];
        for (int i = 0; i < 32; ++i) {
          const uint32* row = reinterpret_cast<const uint32*>(p.a) + threadIdx.x * 8 * steps;
          a[i] = i < 8 * steps ? row[i] : 0;
        }
        tcgen05_store_32x32b_x32(base.lane(32 * (threadIdx.x / 32)) + 128, a);
        tcgen05_wait_store();
        tcgen05_fence_before();
        __syncthreads();
        tcgen05_fence_after();)"
                                           : "";
  const std::string a =
      c.a_not_shared ? "base + 128 + 8 * i" : "at(p.a_descriptor, shared_memory, i * p.a_step)";
  return std::string(common_text) + steps_text(c, depth) +
         "#include \"device/tcgen05.h\"\nnamespace fovea::device {\n" +
         runtime::tcgen05_mma_text(product) + runtime::tcgen05_load_text(128) +
         runtime::tcgen05_store_text(32) + R"(
      extern "C" __global__ void __launch_bounds__(128)
      fovea_kernel(const __grid_constant__ Params p) {
        // Behind the tiles, since static variables would come before them.
        uint32& address = *reinterpret_cast<uint32*>(b_tile() + 16384);
        Barrier& done = *reinterpret_cast<Barrier*>(b_tile() + 16384 + 8);
        if (threadIdx.x < 32) {
          tcgen05_allocate<1>(&address, 256);
          tcgen05_allocated_all<1>();
        }
        if (threadIdx.x == 0) {
          mbarrier_init(done, 1);
          fence_mbarrier_init();
        }
        fill(p);
        tcgen05_fence_before();
        __syncthreads();
        tcgen05_fence_after();
        const TensorAddress base{address};)" +
         store + R"(
        if (warp_index() == 0 && elect_one()) {
          for (uint32 i = 0; i < steps; ++i) {
            )" +
         runtime::tcgen05_mma_name(product) + "(base, " + a + R"(,
                at(p.b_descriptor, b_tile(), i * p.b_step), p.instruction, i > 0);
          }
          tcgen05_commit(done);
        }
        __syncwarp();
        mbarrier_wait(done, 0);
        tcgen05_fence_after();
        uint32 sum[128];
        tcgen05_load_32x32b_x128(sum, base.lane(32 * (threadIdx.x / 32)));
        tcgen05_wait_load();
        for (int i = 0; i < 128; ++i) p.out[threadIdx.x * 128 + i] = __uint_as_float(sum[i]);
        tcgen05_fence_before();
        __syncthreads();
        tcgen05_fence_after();
        if (threadIdx.x < 32) tcgen05_free<1>(base, 256);
      }
      })";
}

device::TensorType tensor_type(DType type) {
  switch (type) {
    case DType::bf16: return device::TensorType::bf16;
    case DType::f16: return device::TensorType::f16;
    case DType::e4m3: return device::TensorType::e4m3;
    default: return device::TensorType::e5m2;
  }
}

TEST_P(ProductTest, Tcgen05ReadsEveryLayout) {
  if (device_->properties().arch == "sm_90a") GTEST_SKIP() << "tcgen05 is Blackwell's";
  for (const Case &c : all_cases()) {
    const int depth = common_depth(c);
    const Image a = make_image(c.a, 1, 128, depth_of(c.a));
    const Image b = make_image(c.b, 2, n, depth_of(c.b));
    Params params{};
    params.a_descriptor = device::tcgen05_descriptor(c.a.swizzle, 0, a.leading, a.stride);
    params.b_descriptor = device::tcgen05_descriptor(c.b.swizzle, 0, b.leading, b.stride);
    params.a_step = a.step;
    params.b_step = b.step;

    params.instruction = device::tcgen05_instruction({.a = tensor_type(c.a.type),
                                                      .b = tensor_type(c.b.type),
                                                      .m = 128,
                                                      .n = n,
                                                      .a_mn_major = c.a.mn_major && !c.a_not_shared,
                                                      .b_mn_major = c.b.mn_major});
    const Bytes cells = tensor_memory_image(c.a.type, depth);
    params.a_bytes = c.a_not_shared ? 0 : static_cast<uint32>(a.bytes.size());
    run(c, blackwell_text(c, depth), params, c.a_not_shared ? cells : a.bytes, b.bytes, 128, depth);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ProductTest, testing::ValuesIn(test_devices()),
                         [](const auto &tested) {
                           std::string name = tested.param;
                           for (char &letter : name) {
                             if (letter == ':') letter = '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace fovea::tests
