// The device seam: memory, launches, tensor maps, streams and events, the same on every device. The
// kernels here also pin the layouts of device/tile.h to what the device does.
//
// FOVEA_TEST_DEVICES=cuda runs all of it on a GPU.
#include "runtime/device.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <span>

#include "core/numeric.h"
#include "device/tile.h"
#include "fovea/device.hpp"
#include "fovea/fovea.hpp"
#include "runtime/source.h"
#include "tests/jit/jit_support.h"

namespace fovea::tests {
namespace {

using runtime::Device;
using runtime::DeviceAddress;
using runtime::DeviceBuffer;
using runtime::DeviceError;
using runtime::Dim3;
using runtime::LaunchConfig;
using Bytes = std::vector<unsigned char>;

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

class DeviceTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { device_ = runtime::open_device(GetParam()); }

  Device& device() { return *device_; }

  template <typename T>
  DeviceBuffer upload(const std::vector<T>& values) {
    DeviceBuffer buffer(device(), values.size() * sizeof(T));
    device().copy_to_device(buffer.address(), values.data(), buffer.bytes());
    device().synchronize();
    return buffer;
  }

  template <typename T>
  std::vector<T> download(const DeviceBuffer& buffer) {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    device().copy_to_host(values.data(), buffer.address(), values.size() * sizeof(T));
    device().synchronize();
    return values;
  }

  std::unique_ptr<Device> device_;
};

TEST_P(DeviceTest, HasPlausibleProperties) {
  const runtime::DeviceProperties& p = device().properties();
  EXPECT_FALSE(p.name.empty());
  EXPECT_TRUE(p.arch == "sm_90a" || p.arch == "sm_100a" || p.arch == "sm_103a") << p.arch;
  EXPECT_GE(p.sm_count, 1);
  EXPECT_GE(p.shared_bytes_per_block, 227u * 1024u);
  EXPECT_EQ(p.emulated, p.driver_version == 0);
}

TEST_P(DeviceTest, CopiesAndFills) {
  std::vector<int> values(1000);
  std::iota(values.begin(), values.end(), 7);
  const DeviceBuffer a = upload(values);
  const DeviceBuffer b(device(), a.bytes());
  EXPECT_EQ(a.address() % 256, 0u);
  device().copy(b.address(), a.address(), a.bytes());
  device().fill(b.address() + 4, 0x11, 8);
  const std::vector<int> back = download<int>(b);
  EXPECT_EQ(back[0], 7);
  EXPECT_EQ(back[1], 0x11111111);
  EXPECT_EQ(back[2], 0x11111111);
  EXPECT_EQ(back[3], 10);
  EXPECT_EQ(back[999], 1006);
}

TEST_P(DeviceTest, AllocatesNothingAndFreesNothing) {
  const DeviceBuffer empty(device(), 0);
  EXPECT_NE(empty.address(), 0u);
  device().copy_to_device(empty.address(), nullptr, 0);
  device().free(0);
}

TEST_P(DeviceTest, PassesParametersByValue) {
  struct Params {
    DeviceAddress out;
    float factor;
    int first;
  };
  const auto kernel = build_kernel(device(), R"(
    struct Params { float* out; float factor; int first; };
    extern "C" __global__ void fovea_kernel(const __grid_constant__ Params p) {
      const int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
      p.out[i] = p.factor * (p.first + i);
    })");
  const DeviceBuffer out(device(), 6 * 64 * sizeof(float));
  const Params params{out.address(), 0.5f, 100};
  LaunchConfig launch;
  launch.grid = {3, 2, 1};
  launch.block = {64, 1, 1};
  device().launch(*kernel, launch, bytes_of(params));
  const std::vector<float> values = download<float>(out);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i], 0.5f * static_cast<float>(100 + i));
  }
}

TEST_P(DeviceTest, GivesLargeDynamicSharedMemory) {
  const auto kernel = build_kernel(device(), R"(
    struct Params { int* out; int words; };
    extern "C" __global__ void __launch_bounds__(256)
    fovea_kernel(const __grid_constant__ Params p) {
      extern __shared__ __align__(1024) int words[];
      for (int i = threadIdx.x; i < p.words; i += 256) words[i] = i;
      __syncthreads();
      int sum = 0;
      for (int i = threadIdx.x; i < p.words; i += 256) sum += words[p.words - 1 - i];
      atomicAdd(p.out, sum);
      unsigned address = __cvta_generic_to_shared(words);
      asm volatile("" : "+r"(address));  // not what the declaration says, but what the launch gave
      if (threadIdx.x == 0) p.out[1] = address % 1024;
    })");
  struct Params {
    DeviceAddress out;
    int words;
  };
  const DeviceBuffer out = upload(std::vector<int>{0, -1});
  const Params params{out.address(), 50000};
  LaunchConfig launch;
  launch.block = {256, 1, 1};
  launch.dynamic_shared_bytes = 200000;
  device().launch(*kernel, launch, bytes_of(params));
  const std::vector<int> result = download<int>(out);
  EXPECT_EQ(result[0], 49999 * 25000);
  EXPECT_EQ(result[1], 0) << "kernels rely on shared memory that starts at a multiple of 1024";
}

// ---- Tensor maps
// --------------------------------------------------------------------------------------

// Loads a box of 8-bit elements at `at` and dumps shared memory as it lies.
constexpr const char* load_2d_text = R"(
  #include "device/tma.h"
  using namespace fovea::device;
  struct Params { TensorMap map; uint8* out; int c0, c1; int bytes; };
  extern "C" __global__ void fovea_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8 tile[];
    Barrier& full = *reinterpret_cast<Barrier*>(tile + 4096);
    if (threadIdx.x == 0) {
      mbarrier_init(full, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_bytes(full, p.bytes);
      tma_load(shared_address(tile), &p.map, full, {p.c0, p.c1}, cache_policy_evict_first());
    }
    __syncthreads();
    mbarrier_wait(full, 0);
    for (int i = threadIdx.x; i < p.bytes; i += 32) p.out[i] = tile[i];
  })";

TEST_P(DeviceTest, LoadsSwizzledTilesWithZerosOutside) {
  constexpr int columns = 140;
  constexpr int pitch = 144;
  constexpr int rows = 20;
  std::vector<unsigned char> matrix(pitch * rows);
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    matrix[i] = static_cast<unsigned char>(1 + i * 7 % 251);
  }
  const DeviceBuffer source = upload(matrix);
  const auto kernel = build_kernel(device(), load_2d_text);
  struct Params {
    core::TensorMap map;
    DeviceAddress out;
    int c0, c1, bytes;
  };
  for (const auto swizzle :
       {device::Swizzle::none, device::Swizzle::b32, device::Swizzle::b64, device::Swizzle::b128}) {
    const int width = static_cast<int>(device::swizzle_bytes(swizzle));
    constexpr int box_rows = 16;
    for (const auto& [c0, c1] : {std::pair{16, 2}, {-16, -3}, {128, rows - 5}}) {
      runtime::TensorMapSpec spec;
      spec.type = runtime::MapType::u8;
      spec.address = source.address();
      spec.extent = {columns, rows};
      spec.stride_bytes = {0, pitch};
      spec.box = {static_cast<std::uint32_t>(width), box_rows};
      spec.swizzle = static_cast<runtime::MapSwizzle>(swizzle);
      const DeviceBuffer out(device(), static_cast<std::size_t>(width * box_rows));
      Params params{device().encode_tensor_map(spec), out.address(), c0, c1, width * box_rows};
      LaunchConfig launch;
      launch.block = {32, 1, 1};
      launch.dynamic_shared_bytes = 4096 + sizeof(device::uint64);
      device().launch(*kernel, launch, bytes_of(params));
      const Bytes got = download<unsigned char>(out);
      for (int r = 0; r < box_rows; ++r) {
        for (int c = 0; c < width; ++c) {
          const bool inside = c0 + c >= 0 && c0 + c < columns && c1 + r >= 0 && c1 + r < rows;
          const int want = inside ? matrix[static_cast<std::size_t>((c1 + r) * pitch + c0 + c)] : 0;
          const device::uint32 at =
              device::swizzled(swizzle, static_cast<device::uint32>(r * width + c));
          ASSERT_EQ(got[at], want) << "swizzle " << width << " at " << c0 << "," << c1 << " row "
                                   << r << " column " << c;
        }
      }
    }
  }
}

// The chips stop at it as at an illegal instruction, which ends the process's use of the device: so
// only an emulated one is asked.
TEST_P(DeviceTest, RefusesBoxesThatBeginBetweenSixteenBytes) {
  if (!device().properties().emulated) GTEST_SKIP() << "would lose the device";
  const DeviceBuffer source = upload(std::vector<unsigned char>(4096));
  const DeviceBuffer out(device(), 256);
  const auto kernel = build_kernel(device(), load_2d_text);
  struct Params {
    core::TensorMap map;
    DeviceAddress out;
    int c0, c1, bytes;
  };
  runtime::TensorMapSpec spec;
  spec.type = runtime::MapType::u8;
  spec.address = source.address();
  spec.extent = {128, 32};
  spec.stride_bytes = {0, 128};
  spec.box = {16, 16};
  Params params{device().encode_tensor_map(spec), out.address(), 8, 0, 256};
  LaunchConfig launch;
  launch.block = {32, 1, 1};
  launch.dynamic_shared_bytes = 4096 + sizeof(device::uint64);
  try {
    device().launch(*kernel, launch, bytes_of(params));
    ADD_FAILURE();
  } catch (const DeviceError& fault) {
    EXPECT_NE(std::string(fault.what()).find("byte 8 of its rows"), std::string::npos)
        << fault.what();
  }
}

TEST_P(DeviceTest, StoresAndAddsTilesClippedInFourDimensions) {
  const auto kernel = build_kernel(device(), R"(
    #include "device/tma.h"
    using namespace fovea::device;
    struct Params { TensorMap map; int c[4]; };
    extern "C" __global__ void fovea_kernel(const __grid_constant__ Params p) {
      __shared__ __align__(128) float tile[2][3][4];
      if (threadIdx.x < 24) (&tile[0][0][0])[threadIdx.x] = 1.0f + threadIdx.x;
      fence_proxy_async_shared();
      __syncthreads();
      if (threadIdx.x == 0) {
        tma_store(&p.map, shared_address(tile), {p.c[0], p.c[1], p.c[2], p.c[3]});
        bulk_commit();
        bulk_wait<0>();
        tma_reduce_add(&p.map, shared_address(tile), {p.c[0], p.c[1], p.c[2], p.c[3]});
        bulk_commit();
        bulk_wait_read<0>();
      }
    })");
  struct Params {
    core::TensorMap map;
    int c[4];
  };
  // (d, row, head, batch) with extents 8, 4, 2, 2; the box is 4 x 3 x 2 x 1.
  const DeviceBuffer out = upload(std::vector<float>(8 * 4 * 2 * 2, -1.0f));
  runtime::TensorMapSpec spec;
  spec.type = runtime::MapType::f32;
  spec.rank = 4;
  spec.address = out.address();
  spec.extent = {8, 4, 2, 2};
  spec.stride_bytes = {0, 32, 128, 256};
  spec.box = {4, 3, 2, 1};
  Params params{device().encode_tensor_map(spec), {4, 2, 1, 1}};
  LaunchConfig launch;
  launch.block = {32, 1, 1};
  device().launch(*kernel, launch, bytes_of(params));
  const std::vector<float> got = download<float>(out);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t d = i % 8;
    const std::size_t row = i / 8 % 4;
    const bool written =
        d >= 4 && row >= 2 && i / 32 == 3;  // head 1 of batch 1; rows 4.. are clipped
    const auto word = static_cast<float>((row - 2) * 4 + d - 4);
    EXPECT_EQ(got[i], written ? 2.0f * (1.0f + word) : -1.0f) << i;
  }
}

TEST_P(DeviceTest, RefusesTensorMapsNoChipTakes) {
  const DeviceBuffer memory(device(), 4096);
  runtime::TensorMapSpec good;
  good.type = runtime::MapType::bf16;
  good.address = memory.address();
  good.extent = {64, 16};
  good.stride_bytes = {0, 128};
  good.box = {64, 16};
  good.swizzle = runtime::MapSwizzle::b128;
  EXPECT_NO_THROW(device().encode_tensor_map(good));
  const auto refused = [&](auto change, const std::string& word) {
    runtime::TensorMapSpec spec = good;
    change(spec);
    try {
      device().encode_tensor_map(spec);
      ADD_FAILURE() << "taken: " << word;
    } catch (const Error& fault) {
      EXPECT_NE(std::string(fault.what()).find(word), std::string::npos) << fault.what();
    }
  };
  refused([](auto& s) { s.address += 8; }, "address");
  refused([](auto& s) { s.stride_bytes[1] = 136; }, "stride_bytes[1]");
  refused([](auto& s) { s.box[1] = 257; }, "box[1]");
  refused([](auto& s) { s.box[0] = 0; }, "box[0]");
  refused([](auto& s) { s.box[0] = 128; }, "swizzle");
  refused([](auto& s) { s.extent[0] = 0; }, "extent[0]");
  refused([](auto& s) { s.rank = 6; }, "rank");
}

// ---- Clusters
// -----------------------------------------------------------------------------------------

TEST_P(DeviceTest, RunsClustersWithMulticastAndRemoteArrivals) {
  const auto kernel = build_kernel(device(), R"(
    #include "device/tma.h"
    using namespace fovea::device;
    struct Params { TensorMap map; int* out; };
    extern "C" __global__ void fovea_kernel(const __grid_constant__ Params p) {
      __shared__ __align__(128) int tile[2][32];  // [sender][column]
      __shared__ Barrier full;
      __shared__ Barrier met;
      const uint32 rank = cluster_rank();
      if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(met, 2);
        fence_mbarrier_init();
      }
      cluster_arrive();
      cluster_wait();
      if (threadIdx.x == 0) {
        // Each CTA sends one row of two to both.
        mbarrier_arrive_expect_bytes(full, 256);
        const int row = 2 * (blockIdx.x / 2) + rank;
        tma_load_multicast(shared_address(tile[rank]), &p.map, full, {0, row}, 3,
                           cache_policy_evict_last());
        for (uint32 to = 0; to < 2; ++to) {
          mbarrier_arrive_remote(map_to_rank(shared_address(&met), to));
        }
      }
      mbarrier_wait(full, 0);
      mbarrier_wait_cluster(met, 0);
      p.out[blockIdx.x * 64 + threadIdx.x] = tile[0][threadIdx.x];
      p.out[blockIdx.x * 64 + 32 + threadIdx.x] = tile[1][threadIdx.x];
      cluster_arrive();
      cluster_wait();  // nobody leaves while its memory may still be written
    })");
  std::vector<int> matrix(4 * 32);
  std::iota(matrix.begin(), matrix.end(), 1000);
  const DeviceBuffer source = upload(matrix);
  const DeviceBuffer out(device(), 4 * 64 * sizeof(int));
  runtime::TensorMapSpec spec;
  spec.type = runtime::MapType::s32;
  spec.address = source.address();
  spec.extent = {32, 4};
  spec.stride_bytes = {0, 128};
  spec.box = {32, 1};
  struct Params {
    core::TensorMap map;
    DeviceAddress out;
  };
  const Params params{device().encode_tensor_map(spec), out.address()};
  LaunchConfig launch;
  launch.grid = {4, 1, 1};
  launch.block = {32, 1, 1};
  launch.cluster = {2, 1, 1};
  device().launch(*kernel, launch, bytes_of(params));
  const std::vector<int> got = download<int>(out);
  for (int cta = 0; cta < 4; ++cta) {
    for (int i = 0; i < 64; ++i) {
      EXPECT_EQ(got[static_cast<std::size_t>(cta * 64 + i)], 1000 + 64 * (cta / 2) + i);
    }
  }
}

// ---- Streams and events
// ---------------------------------------------------------------------------------

TEST_P(DeviceTest, OrdersWorkByStreamsAndEvents) {
  const auto kernel = build_kernel(device(), R"(
    struct Params { int* value; int add; int spin; };
    extern "C" __global__ void fovea_kernel(const __grid_constant__ Params p) {
      for (int i = 0; i < p.spin; ++i) __nanosleep(1000);
      *p.value = *p.value * 3 + p.add;
    })");
  struct Params {
    DeviceAddress value;
    int add;
    int spin;
  };
  const DeviceBuffer value = upload(std::vector<int>{1});
  const runtime::Stream first = device().create_stream();
  const runtime::Stream second = device().create_stream();
  const runtime::Event begin = device().create_event();
  const runtime::Event end = device().create_event();
  const LaunchConfig launch;
  device().record(begin, first);
  device().launch(*kernel, launch, bytes_of(Params{value.address(), 1, 100}), first);
  device().record(end, first);
  device().wait(second, end);
  device().launch(*kernel, launch, bytes_of(Params{value.address(), 2, 0}), second);
  device().synchronize(second);
  EXPECT_EQ(download<int>(value).front(), 14);
  EXPECT_GE(device().elapsed_ms(begin, end), 0.0f);
  device().destroy(begin);
  device().destroy(end);
  device().destroy(first);
  device().destroy(second);
}

// ---- Faults
// -------------------------------------------------------------------------------------------

TEST_P(DeviceTest, SaysWhatTheDeviceRefuses) {
  EXPECT_THROW(device().allocate(std::size_t{1} << 60), DeviceError);
  EXPECT_THROW(device().load("this is no kernel", "fovea_kernel"), DeviceError);
  const auto kernel = build_kernel(device(), R"(
    extern "C" __global__ void fovea_kernel(const __grid_constant__ int p) {})");
  LaunchConfig launch;
  launch.block = {2048, 1, 1};
  EXPECT_THROW(device().launch(*kernel, launch, bytes_of(1)), DeviceError);
  launch.block = {32, 1, 1};
  launch.dynamic_shared_bytes = 1 << 20;
  EXPECT_THROW(device().launch(*kernel, launch, bytes_of(1)), DeviceError);
  launch.dynamic_shared_bytes = 0;
  EXPECT_NO_THROW(device().launch(*kernel, launch, bytes_of(1)));
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceTest, testing::ValuesIn(test_devices()),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           for (char& c : name) {
                             if (c == ':') c = '_';
                           }
                           return name;
                         });

TEST(DeviceTimer, LeavesOutTheHeadStart) {
  const bool on_gpu = test_devices().front().starts_with("cuda");
  DeviceTimer timer(on_gpu ? fovea::Device::cuda : fovea::Device::emulated_sm90a);
  timer.start();
  timer.give_head_start();
  timer.stop();
  const double with = timer.milliseconds();
  timer.give_head_start();
  timer.start();
  timer.stop();
  EXPECT_GT(with, on_gpu ? 0.49 : 0.0);
  EXPECT_LT(timer.milliseconds(), with);
}

TEST(OpenDevice, SaysWhichNamesThereAre) {
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", "emulated", ""}) {
    try {
      runtime::open_device(name);
      ADD_FAILURE() << name;
    } catch (const Error& fault) {
      EXPECT_NE(std::string(fault.what()).find("emulated:sm_90a"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace fovea::tests
