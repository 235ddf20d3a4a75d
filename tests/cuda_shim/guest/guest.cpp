// A program of the CUDA runtime, as nvcc would make it but without nvcc: it declares what it calls,
// registers a fat binary that it writes itself, launches its kernels and verifies what they do.
//
//   guest plain|lz4|zstd [racy]
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/cuda_shim/guest/fat_binary_writer.h"

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct Attribute {
  int id;
  char padding[4];
  Dim3 cluster;
  char rest[52];
};
struct LaunchConfig {
  Dim3 grid, block;
  std::size_t shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};
struct FatWrapper {
  std::uint32_t magic, version;
  const void* data;
  void* nothing;
};

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaUnregisterFatBinary(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*,
                            void*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int);
unsigned __cudaPushCallConfiguration(Dim3, Dim3, std::size_t, void*);
int __cudaPopCallConfiguration(Dim3*, Dim3*, std::size_t*, void**);
int cudaLaunchKernel(const void*, Dim3, Dim3, void**, std::size_t, void*);
int cudaLaunchKernelExC(const LaunchConfig*, const void*, void**);
int cudaMalloc(void**, std::size_t);
int cudaMallocManaged(void**, std::size_t, unsigned);
int cudaFree(void*);
int cudaMemset(void*, int, std::size_t);
int cudaMemcpy(void*, const void*, std::size_t, int);
int cudaMemcpy2D(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int);
int cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, int);
int cudaMemcpyFromSymbol(void*, const void*, std::size_t, std::size_t, int);
int cudaDeviceGetAttribute(int*, int, int);
int cudaDeviceSynchronize();
int cudaGetLastError();
const char* cudaGetErrorString(int);
int cudaStreamCreate(void**);
int cudaStreamDestroy(void*);
int cudaEventCreate(void**);
int cudaEventRecord(void*, void*);
int cudaEventElapsedTime(float*, void*, void*);
int cudaEventDestroy(void*);
int cudaFuncSetAttribute(const void*, int, int);
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int*, const void*, int, std::size_t);
int cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long, int*);
}

namespace {

constexpr int host_to_device = 1, device_to_host = 2;

// Their addresses are what the program launches and copies by.
char scale, copy_tile, neighbours, racy, launches, factors;

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  std::exit(3);
}

void good(int code, const char* what) {
  if (code == 0) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(code));
  std::exit(3);
}

template <typename T>
T* room(std::size_t count) {
  void* memory = nullptr;
  good(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(memory);
}

std::vector<std::uint64_t> image_of(const std::string& packing) {
  using namespace fovea::test;
  const std::string text = file_text(FOVEA_GUEST_FOLDER "/guest.ptx");
  FatEntryToWrite ptx;
  ptx.payload = text;
  ptx.text_bytes = text.size();
  if (packing == "lz4") {
    ptx.packing = Packing::lz4;
    ptx.payload = lz4_block(text);
  } else if (packing == "zstd") {
    ptx.packing = Packing::zstd;
    ptx.payload = bytes_of_hex(file_text(FOVEA_GUEST_FOLDER "/guest.zst.hex"));
  }
  FatEntryToWrite machine_code;  // beside it, as programs for several chips have it
  machine_code.kind = 2;
  machine_code.payload = "not for an emulator";
  return fat_binary({machine_code, ptx});
}

void run_scale() {
  constexpr unsigned count = 1000;
  std::vector<float> in(count), out(count);
  for (unsigned i = 0; i < count; ++i) in[i] = static_cast<float>(i);
  const std::array<float, 2> values{1.0f, 3.0f};
  good(cudaMemcpyToSymbol(&factors, values.data(), sizeof values, 0, host_to_device), "to symbol");
  float* device_in = room<float>(count);
  void* managed = nullptr;
  good(cudaMallocManaged(&managed, count * 4, 1), "cudaMallocManaged");
  good(cudaMemcpy(device_in, in.data(), count * 4, host_to_device), "copy");
  // What the compiler makes of scale<<<4, 256>>>(managed, device_in, count, 0.5f).
  __cudaPushCallConfiguration({4, 1, 1}, {256, 1, 1}, 0, nullptr);
  Dim3 grid, block;
  std::size_t shared = 0;
  void* stream = nullptr;
  good(__cudaPopCallConfiguration(&grid, &block, &shared, &stream), "pop");
  unsigned n = count;
  float offset = 0.5f;
  void* arguments[] = {&managed, &device_in, &n, &offset};
  good(cudaLaunchKernel(&scale, grid, block, arguments, shared, stream), "launch of scale");
  good(cudaDeviceSynchronize(), "synchronise");
  const auto* result = static_cast<const float*>(managed);  // the host reads it in place
  for (unsigned i = 0; i < count; ++i) {
    require(result[i] == 3.0f * static_cast<float>(i) + 0.5f, "scale");
  }
  int launched = 0;
  good(cudaMemcpyFromSymbol(&launched, &launches, 4, 0, device_to_host), "from symbol");
  require(launched == 1, "the counter of launches");
  good(cudaFree(managed), "free of managed memory");
  good(cudaFree(device_in), "free");
}

void run_tile() {
  constexpr std::size_t rows = 64, columns = 40, pitch = 256;
  using Encode =
      int (*)(void*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*,
              const std::uint32_t*, const std::uint32_t*, int, int, int, int);
  void* function = nullptr;
  int found = -1;
  good(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, 0, &found),
       "entry point");
  require(found == 0 && function != nullptr, "cuTensorMapEncodeTiled");
  std::vector<float> host(rows * columns);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i);
  char* tensor = room<char>(rows * pitch);
  good(cudaMemcpy2D(tensor, pitch, host.data(), columns * 4, columns * 4, rows, host_to_device),
       "2D copy");
  struct alignas(64) Map {
    unsigned char bytes[128];
  } map{};
  const std::uint64_t extent[] = {columns, rows}, strides[] = {pitch};
  const std::uint32_t box[] = {16, 16}, steps[] = {1, 1};
  constexpr int float32 = 7;
  good(reinterpret_cast<Encode>(function)(&map, float32, 2, tensor, extent, strides, box, steps, 0,
                                          0, 0, 0),
       "encoding");
  float* out = room<float>(256);
  void* arguments[] = {&map, &out};
  good(cudaLaunchKernel(&copy_tile, {1, 1, 1}, {32, 1, 1}, arguments, 0, nullptr), "launch");
  std::vector<float> tile(256);
  good(cudaMemcpy(tile.data(), out, 1024, device_to_host), "copy back");
  for (std::size_t i = 0; i < 256; ++i) {
    require(tile[i] == host[(32 + i / 16) * columns + 16 + i % 16], "the tile");
  }
}

void run_cluster() {
  int* out = room<int>(4);
  Attribute cluster{};
  cluster.id = 4;
  cluster.cluster = {2, 1, 1};
  LaunchConfig config{{4, 1, 1}, {32, 1, 1}, 0, nullptr, &cluster, 1};
  void* arguments[] = {&out};
  good(cudaLaunchKernelExC(&config, &neighbours, arguments), "launch of a cluster");
  std::array<int, 4> ranks{};
  good(cudaMemcpy(ranks.data(), out, 16, device_to_host), "copy back");
  require(ranks == std::array<int, 4>{1, 0, 1, 0}, "the neighbours' ranks");
}

void run_rest() {
  int major = 0, sm_count = 0, blocks = 0;
  good(cudaDeviceGetAttribute(&major, 75, 0), "attribute");
  good(cudaDeviceGetAttribute(&sm_count, 16, 0), "attribute");
  require(major == 9 && sm_count > 0, "the device");
  good(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, &scale, 256, 0), "occupancy");
  require(blocks == 8, "2048 threads are 8 blocks of 256");
  void *stream = nullptr, *begin = nullptr, *end = nullptr;
  good(cudaStreamCreate(&stream), "stream");
  good(cudaEventCreate(&begin), "event");
  good(cudaEventCreate(&end), "event");
  good(cudaEventRecord(begin, stream), "record");
  good(cudaEventRecord(end, stream), "record");
  float milliseconds = -1;
  good(cudaEventElapsedTime(&milliseconds, begin, end), "elapsed");
  require(milliseconds >= 0, "time goes on");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  // What a GPU refuses is refused: more dynamic shared memory than the attribute allows.
  void* out = room<int>(1);
  void* arguments[] = {&out};
  require(cudaLaunchKernel(&racy, {1, 1, 1}, {64, 1, 1}, arguments, 100 << 10, nullptr) == 1,
          "100 KiB without the attribute");
  require(cudaGetLastError() == 1 && cudaGetLastError() == 0, "the last error");
  good(cudaFuncSetAttribute(&racy, 8, 100 << 10), "the attribute");
  require(cudaFuncSetAttribute(&racy, 8, 300 << 10) == 1, "300 KiB");
  cudaGetLastError();
}

}  // namespace

int main(int count, char** values) {
  const std::string packing = count > 1 ? values[1] : "plain";
  const std::vector<std::uint64_t> image = image_of(packing);
  FatWrapper wrapper{0x466243b1, 1, image.data(), nullptr};
  void** handle = __cudaRegisterFatBinary(&wrapper);
  const auto kernel = [&](char& host, const char* name) {
    __cudaRegisterFunction(handle, &host, nullptr, name, -1, nullptr, nullptr, nullptr, nullptr,
                           nullptr);
  };
  kernel(scale, "scale");
  kernel(copy_tile, "copy_tile");
  kernel(neighbours, "neighbours");
  kernel(racy, "racy");
  __cudaRegisterVar(handle, &launches, nullptr, "launches", 0, 4, 0, 0);
  __cudaRegisterVar(handle, &factors, nullptr, "factors", 0, 8, 1, 0);
  __cudaRegisterFatBinaryEnd(handle);
  run_scale();
  run_tile();
  run_cluster();
  run_rest();
  if (count > 2) {
    void* out = room<int>(1);
    void* arguments[] = {&out};
    good(cudaLaunchKernel(&racy, {1, 1, 1}, {64, 1, 1}, arguments, 0, nullptr), "launch of racy");
  }
  __cudaUnregisterFatBinary(handle);
  std::puts("passed");
  return 0;
}
