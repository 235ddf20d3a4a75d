// Memory: device, pinned, managed, pooled; copies and fills.
#include <cstring>

#include "cuda_shim/abi.h"
#include "cuda_shim/runtime.h"

namespace fovea::cuda_shim {
namespace {

constexpr std::size_t kPitchBytes = 512;
constexpr std::size_t kMemoryBytes = std::size_t{141} << 30;

int allocate_to(void** target, std::size_t bytes) {
  return runtime_call([&](Session& session) {
    if (target == nullptr) throw Failure(Status::invalid_value, "an allocation has no target.");
    *target = bytes == 0 ? nullptr : reinterpret_cast<void*>(session.allocate(bytes));
  });
}

int allocate_host_to(void** target, std::size_t bytes, bool managed) {
  return runtime_call([&](Session& session) {
    if (target == nullptr) throw Failure(Status::invalid_value, "an allocation has no target.");
    *target = bytes == 0 ? nullptr : session.allocate_host(bytes, managed);
  });
}

int free_at(void* pointer) {
  return runtime_call(
      [&](Session& session) { session.free(reinterpret_cast<std::uintptr_t>(pointer)); });
}

int copy(void* target, const void* source, std::size_t bytes, int direction) {
  return runtime_call([&](Session& session) {
    if (direction < 0 || direction > 4) {
      throw Failure(Status::invalid_copy_direction,
                    "a copy's direction is " + std::to_string(direction) + ", not 0 to 4.");
    }
    session.copy(target, source, bytes, Direction{direction});
  });
}

int copy_2d(void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch,
            std::size_t width, std::size_t height, int direction) {
  return runtime_call([&](Session& session) {
    for (std::size_t row = 0; row < height; ++row) {
      session.copy(static_cast<char*>(target) + row * target_pitch,
                   static_cast<const char*>(source) + row * source_pitch, width,
                   Direction{direction});
    }
  });
}

int copy_3d(const abi::Copy3d* p) {
  return runtime_call([&](Session& session) {
    if (p->source_array != nullptr || p->target_array != nullptr) {
      throw Failure(Status::not_supported, "CUDA arrays are not emulated.");
    }
    const auto at = [](const abi::Pitched& area, const std::size_t(&offset)[3], std::size_t y,
                       std::size_t z) {
      return static_cast<char*>(area.pointer) + offset[0] +
             ((offset[2] + z) * area.height + offset[1] + y) * area.pitch;
    };
    for (std::size_t z = 0; z < p->extent.depth; ++z) {
      for (std::size_t y = 0; y < p->extent.height; ++y) {
        session.copy(at(p->target, p->target_at, y, z), at(p->source, p->source_at, y, z),
                     p->extent.width, Direction{p->direction});
      }
    }
  });
}

int fill_2d(void* target, std::size_t pitch, int byte, std::size_t width, std::size_t height) {
  return runtime_call([&](Session& session) {
    for (std::size_t row = 0; row < height; ++row) {
      session.fill(static_cast<char*>(target) + row * pitch, byte, width);
    }
  });
}

void* symbol_address(Session& session, const void* symbol, std::size_t offset, std::size_t bytes) {
  const Variable& variable = session.variable(symbol);
  if (offset > variable.bytes || bytes > variable.bytes - offset) {
    throw Failure(Status::invalid_value, "a copy of " + std::to_string(bytes) +
                                             " bytes at offset " + std::to_string(offset) +
                                             " passes the end of variable " + variable.name +
                                             " of " + std::to_string(variable.bytes) + " bytes.");
  }
  return reinterpret_cast<void*>(session.address_of(variable) + offset);
}

int copy_to_symbol(const void* symbol, const void* source, std::size_t bytes, std::size_t offset,
                   int) {
  return runtime_call([&](Session& session) {
    session.copy(symbol_address(session, symbol, offset, bytes), source, bytes, Direction::any);
  });
}

int copy_from_symbol(void* target, const void* symbol, std::size_t bytes, std::size_t offset, int) {
  return runtime_call([&](Session& session) {
    session.copy(target, symbol_address(session, symbol, offset, bytes), bytes, Direction::any);
  });
}

char pool;  // the one memory pool; its address is its handle

}  // namespace
}  // namespace fovea::cuda_shim

using namespace fovea::cuda_shim;

extern "C" {

int cudaMalloc(void** target, std::size_t bytes) { return allocate_to(target, bytes); }
int cudaMallocAsync(void** target, std::size_t bytes, void*) { return allocate_to(target, bytes); }
int cudaMallocFromPoolAsync(void** target, std::size_t bytes, void*, void*) {
  return allocate_to(target, bytes);
}
int cudaMallocManaged(void** target, std::size_t bytes, unsigned) {
  return allocate_host_to(target, bytes, true);
}
int cudaMallocHost(void** target, std::size_t bytes) {
  return allocate_host_to(target, bytes, false);
}
int cudaHostAlloc(void** target, std::size_t bytes, unsigned) {
  return allocate_host_to(target, bytes, false);
}
int cudaMallocPitch(void** target, std::size_t* pitch, std::size_t width, std::size_t height) {
  *pitch = (width + kPitchBytes - 1) / kPitchBytes * kPitchBytes;
  return allocate_to(target, *pitch * height);
}
int cudaMalloc3D(abi::Pitched* target, abi::Extent extent) {
  target->pitch = (extent.width + kPitchBytes - 1) / kPitchBytes * kPitchBytes;
  target->width = extent.width;
  target->height = extent.height;
  return allocate_to(&target->pointer, target->pitch * extent.height * extent.depth);
}
int cudaFree(void* pointer) { return free_at(pointer); }
int cudaFreeAsync(void* pointer, void*) { return free_at(pointer); }
int cudaFreeHost(void* pointer) {
  return runtime_call([&](Session& session) { session.free_host(pointer); });
}
int cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  return runtime_call([&](Session& session) { session.register_host(memory, bytes); });
}
int cudaHostUnregister(void* memory) {
  return runtime_call([&](Session& session) { session.unregister_host(memory); });
}
int cudaHostGetDevicePointer(void** target, void* memory, unsigned) {
  *target = memory;
  return 0;
}
int cudaHostGetFlags(unsigned* flags, void*) {
  *flags = 0;
  return 0;
}

int cudaMemcpy(void* target, const void* source, std::size_t bytes, int direction) {
  return copy(target, source, bytes, direction);
}
int cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, int direction, void*) {
  return copy(target, source, bytes, direction);
}
int cudaMemcpyPeer(void* target, int, const void* source, int, std::size_t bytes) {
  return copy(target, source, bytes, static_cast<int>(Direction::device_to_device));
}
int cudaMemcpyPeerAsync(void* target, int, const void* source, int, std::size_t bytes, void*) {
  return copy(target, source, bytes, static_cast<int>(Direction::device_to_device));
}
int cudaMemcpy2D(void* target, std::size_t target_pitch, const void* source,
                 std::size_t source_pitch, std::size_t width, std::size_t height, int direction) {
  return copy_2d(target, target_pitch, source, source_pitch, width, height, direction);
}
int cudaMemcpy2DAsync(void* target, std::size_t target_pitch, const void* source,
                      std::size_t source_pitch, std::size_t width, std::size_t height,
                      int direction, void*) {
  return copy_2d(target, target_pitch, source, source_pitch, width, height, direction);
}
int cudaMemcpy3D(const abi::Copy3d* parameters) { return copy_3d(parameters); }
int cudaMemcpy3DAsync(const abi::Copy3d* parameters, void*) { return copy_3d(parameters); }
int cudaMemset(void* target, int byte, std::size_t bytes) {
  return runtime_call([&](Session& session) { session.fill(target, byte, bytes); });
}
int cudaMemsetAsync(void* target, int byte, std::size_t bytes, void*) {
  return cudaMemset(target, byte, bytes);
}
int cudaMemset2D(void* target, std::size_t pitch, int byte, std::size_t width, std::size_t height) {
  return fill_2d(target, pitch, byte, width, height);
}
int cudaMemset2DAsync(void* target, std::size_t pitch, int byte, std::size_t width,
                      std::size_t height, void*) {
  return fill_2d(target, pitch, byte, width, height);
}
int cudaMemset3D(abi::Pitched target, int byte, abi::Extent extent) {
  return runtime_call([&](Session& session) {
    for (std::size_t row = 0; row < extent.depth * target.height; ++row) {
      if (row % target.height >= extent.height) continue;
      session.fill(static_cast<char*>(target.pointer) + row * target.pitch, byte, extent.width);
    }
  });
}
int cudaMemset3DAsync(abi::Pitched target, int byte, abi::Extent extent, void*) {
  return cudaMemset3D(target, byte, extent);
}

int cudaMemcpyToSymbol(const void* symbol, const void* source, std::size_t bytes,
                       std::size_t offset, int direction) {
  return copy_to_symbol(symbol, source, bytes, offset, direction);
}
int cudaMemcpyToSymbolAsync(const void* symbol, const void* source, std::size_t bytes,
                            std::size_t offset, int direction, void*) {
  return copy_to_symbol(symbol, source, bytes, offset, direction);
}
int cudaMemcpyFromSymbol(void* target, const void* symbol, std::size_t bytes, std::size_t offset,
                         int direction) {
  return copy_from_symbol(target, symbol, bytes, offset, direction);
}
int cudaMemcpyFromSymbolAsync(void* target, const void* symbol, std::size_t bytes,
                              std::size_t offset, int direction, void*) {
  return copy_from_symbol(target, symbol, bytes, offset, direction);
}
int cudaGetSymbolAddress(void** target, const void* symbol) {
  return runtime_call([&](Session& session) { *target = symbol_address(session, symbol, 0, 0); });
}
int cudaGetSymbolSize(std::size_t* bytes, const void* symbol) {
  return runtime_call([&](Session& session) { *bytes = session.variable(symbol).bytes; });
}

int cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return runtime_call([&](Session& session) {
    *total_bytes = kMemoryBytes;
    *free_bytes = kMemoryBytes - std::min(kMemoryBytes, session.used_bytes());
  });
}
int cudaPointerGetAttributes(abi::PointerAttributes* attributes, const void* pointer) {
  return runtime_call([&](Session& session) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    std::memset(attributes, 0, sizeof *attributes);
    if (const HostMemory* memory = session.host_memory(address)) {
      attributes->type = memory->managed ? 3 : 1;
    } else if (session.allocation(address).bytes != 0) {
      attributes->type = 2;
    } else {
      attributes->device = -2;  // cudaInvalidDeviceId
    }
    auto* plain = const_cast<void*>(pointer);
    if (attributes->type != 0) attributes->device_pointer = plain;
    if (attributes->type != 2) attributes->host_pointer = plain;
  });
}
// Hints, of which nothing that can be seen depends.
int cudaMemAdvise() { return 0; }
int cudaMemAdvise_v2() { return 0; }
int cudaMemPrefetchAsync() { return 0; }
int cudaMemPrefetchAsync_v2() { return 0; }
int cudaStreamAttachMemAsync() { return 0; }

int cudaDeviceGetDefaultMemPool(void** handle, int) {
  *handle = &pool;
  return 0;
}
int cudaDeviceGetMemPool(void** handle, int) {
  *handle = &pool;
  return 0;
}
int cudaDeviceSetMemPool(int, void*) { return 0; }
int cudaMemPoolCreate(void** handle, const void*) {
  *handle = &pool;
  return 0;
}
int cudaMemPoolDestroy(void*) { return 0; }
int cudaMemPoolTrimTo(void*, std::size_t) { return 0; }
int cudaMemPoolSetAttribute(void*, int, void*) { return 0; }
int cudaMemPoolSetAccess(void*, const void*, std::size_t) { return 0; }
}
