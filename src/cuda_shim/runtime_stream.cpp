// Streams, events, and work that the host is to do.
#include "cuda_shim/events.h"
#include "cuda_shim/runtime.h"

namespace fovea::cuda_shim {
namespace {

Event& event_at(void* handle) {
  if (handle == nullptr) throw Failure(Status::invalid_handle, "an event is null.");
  return *static_cast<Event*>(handle);
}

bool own(const void* stream) {
  // 0, 1 and 2 are the default streams.
  return reinterpret_cast<std::uintptr_t>(stream) > 2;
}

int create_stream(void** target, unsigned flags, int priority) {
  return runtime_call([&](Session&) { *target = new Stream{flags, priority}; });
}

int finished() {
  return static_cast<int>(guarded([](Session&) {}));
}

}  // namespace
}  // namespace fovea::cuda_shim

using namespace fovea::cuda_shim;

extern "C" {

int cudaStreamCreate(void** stream) { return create_stream(stream, 0, 0); }
int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  return create_stream(stream, flags, 0);
}
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}
int cudaStreamDestroy(void* stream) {
  if (own(stream)) delete static_cast<Stream*>(stream);
  return 0;
}
int cudaStreamSynchronize(void*) { return finished(); }
int cudaStreamQuery(void*) { return finished(); }
int cudaStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cudaStreamGetFlags(void* stream, unsigned* flags) {
  *flags = own(stream) ? static_cast<Stream*>(stream)->flags : 0;
  return 0;
}
int cudaStreamGetPriority(void* stream, int* priority) {
  *priority = own(stream) ? static_cast<Stream*>(stream)->priority : 0;
  return 0;
}
int cudaStreamGetId(void* stream, unsigned long long* id) {
  *id = reinterpret_cast<std::uintptr_t>(stream);
  return 0;
}
int cudaStreamGetDevice(void*, int* device) {
  *device = 0;
  return 0;
}
int cudaStreamSetAttribute(void*, int, const void*) { return 0; }
int cudaStreamCopyAttributes(void*, void*) { return 0; }
// No stream is ever being captured; capture itself is not served.
int cudaStreamIsCapturing(void*, int* status) {
  *status = 0;
  return 0;
}
int cudaStreamGetCaptureInfo(void*, int* status) {
  *status = 0;
  return 0;
}
int cudaStreamGetCaptureInfo_v2(void*, int* status) {
  *status = 0;
  return 0;
}
int cudaStreamGetCaptureInfo_v3(void*, int* status) {
  *status = 0;
  return 0;
}
int cudaThreadExchangeStreamCaptureMode(int*) { return 0; }
int cudaStreamAddCallback(void* stream, void (*callback)(void*, int, void*), void* data, unsigned) {
  callback(stream, finished(), data);
  return 0;
}
int cudaLaunchHostFunc(void*, void (*function)(void*), void* data) {
  function(data);
  return 0;
}

int cudaEventCreate(void** event) {
  return runtime_call([&](Session&) { *event = new Event; });
}
int cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
int cudaEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int cudaEventRecord(void* event, void*) {
  return runtime_call([&](Session&) {
    event_at(event) = {std::chrono::steady_clock::now(), true};
  });
}
int cudaEventRecordWithFlags(void* event, void* stream, unsigned) {
  return cudaEventRecord(event, stream);
}
int cudaEventQuery(void*) { return finished(); }
int cudaEventSynchronize(void*) { return finished(); }
int cudaEventElapsedTime(float* milliseconds, void* begin, void* end) {
  return runtime_call(
      [&](Session&) { *milliseconds = elapsed_ms(event_at(begin), event_at(end)); });
}
int cudaEventElapsedTime_v2(float* milliseconds, void* begin, void* end) {
  return cudaEventElapsedTime(milliseconds, begin, end);
}
}
