#include "tools/cpu_peak.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tools/workload.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/cpu_peak.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first: it includes this file again for each instruction set.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fovea::tools::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Twelve sums hide a latency of six cycles at two instructions a cycle and leave four of sixteen
// registers. Returns the operations done.
double multiply_add(std::int64_t iterations, float* sink) {
  const hn::ScalableTag<float> tag;
  const auto a = hn::Set(tag, 1.0f + sink[0] * 1e-3f);
  const auto b = hn::Set(tag, sink[0] * 1e-3f);
  // They start apart: of sums that stay equal a compiler would keep a single one.
  auto s0 = hn::Set(tag, 0.0f), s1 = hn::Set(tag, 1.0f), s2 = hn::Set(tag, 2.0f);
  auto s3 = hn::Set(tag, 3.0f), s4 = hn::Set(tag, 4.0f), s5 = hn::Set(tag, 5.0f);
  auto s6 = hn::Set(tag, 6.0f), s7 = hn::Set(tag, 7.0f), s8 = hn::Set(tag, 8.0f);
  auto s9 = hn::Set(tag, 9.0f), s10 = hn::Set(tag, 10.0f), s11 = hn::Set(tag, 11.0f);
  for (std::int64_t i = 0; i < iterations; ++i) {
    s0 = hn::MulAdd(a, b, s0);
    s1 = hn::MulAdd(a, b, s1);
    s2 = hn::MulAdd(a, b, s2);
    s3 = hn::MulAdd(a, b, s3);
    s4 = hn::MulAdd(a, b, s4);
    s5 = hn::MulAdd(a, b, s5);
    s6 = hn::MulAdd(a, b, s6);
    s7 = hn::MulAdd(a, b, s7);
    s8 = hn::MulAdd(a, b, s8);
    s9 = hn::MulAdd(a, b, s9);
    s10 = hn::MulAdd(a, b, s10);
    s11 = hn::MulAdd(a, b, s11);
  }
  const auto left = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), hn::Add(s4, s5));
  const auto right = hn::Add(hn::Add(hn::Add(s6, s7), hn::Add(s8, s9)), hn::Add(s10, s11));
  sink[1] = hn::GetLane(hn::SumOfLanes(tag, hn::Add(left, right)));
  return static_cast<double>(iterations) * 12.0 * 2.0 * static_cast<double>(hn::Lanes(tag));
}

// Reads `count` floats, a multiple of four vectors or fewer are left out.
float read_all(const float* data, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  auto s0 = hn::Zero(tag), s1 = s0, s2 = s0, s3 = s0;
  for (std::int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(tag, data + i));
    s1 = hn::Add(s1, hn::LoadU(tag, data + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(tag, data + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(tag, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(tag, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

}  // namespace fovea::tools::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::tools {
namespace {

HWY_EXPORT(multiply_add);
HWY_EXPORT(read_all);

constexpr int rounds = 20;  // enough that one is undisturbed
constexpr double round_seconds = 0.02;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bf16"))) double dot_bf16(std::int64_t iterations,
                                                              float* sink) {
  // The instruction takes its operands' bits as they are; moving integers keeps this independent of
  // how a compiler spells a vector of bf16.
  const __m512i bits = _mm512_set1_epi32(0x3f803f80);
  __m512bh a;
  std::memcpy(&a, &bits, sizeof a);
  __m512 s[12];
  for (int i = 0; i < 12; ++i) s[i] = _mm512_set1_ps(static_cast<float>(i));  // apart, as above
  for (std::int64_t i = 0; i < iterations; ++i) {
    s[0] = _mm512_dpbf16_ps(s[0], a, a);
    s[1] = _mm512_dpbf16_ps(s[1], a, a);
    s[2] = _mm512_dpbf16_ps(s[2], a, a);
    s[3] = _mm512_dpbf16_ps(s[3], a, a);
    s[4] = _mm512_dpbf16_ps(s[4], a, a);
    s[5] = _mm512_dpbf16_ps(s[5], a, a);
    s[6] = _mm512_dpbf16_ps(s[6], a, a);
    s[7] = _mm512_dpbf16_ps(s[7], a, a);
    s[8] = _mm512_dpbf16_ps(s[8], a, a);
    s[9] = _mm512_dpbf16_ps(s[9], a, a);
    s[10] = _mm512_dpbf16_ps(s[10], a, a);
    s[11] = _mm512_dpbf16_ps(s[11], a, a);
  }
  __m512 sum = _mm512_setzero_ps();
  for (const __m512& part : s) sum = _mm512_add_ps(sum, part);
  sink[1] = _mm512_cvtss_f32(sum);
  return static_cast<double>(iterations) * 12.0 * 64.0;  // 32 products and 32 additions each
}

bool has_dot_bf16() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bf16") != 0;
}
#else
double dot_bf16(std::int64_t, float*) { return 0.0; }
bool has_dot_bf16() { return false; }
#endif

// One thread's part of a round.
struct Span {
  double begin = 0.0;
  double end = 0.0;
  double operations = 0.0;
};

// Operations per second of `work(iterations, sink)` on all threads at once; the best round. A round
// lasts from the first thread's begin to the last one's end: starting and joining threads, which
// take a scheduler's time on a busy machine, are no part of it.
template <typename Work>
double measure_peak(int threads, Work work) {
  const int requested = thread_count(threads);
  std::vector<Span> spans(static_cast<std::size_t>(requested));
  double best = 0.0;
  std::int64_t iterations = 1 << 14;
  int round = 0;
  while (round < rounds) {
    int team = 1;
#pragma omp parallel num_threads(requested)
    {
      const int thread = omp_get_thread_num();
      if (thread == 0) team = omp_get_num_threads();
      volatile float start = 0.0f;
      float sink[2] = {start, 0.0f};
#pragma omp barrier
      Span span;
      span.begin = now();
      span.operations = work(iterations, sink);
      span.end = now();
      spans[static_cast<std::size_t>(thread)] = span;
      start = sink[1];
    }
    Span all{spans[0].begin, spans[0].end, 0.0};
    double shortest = spans[0].end - spans[0].begin;
    for (int thread = 0; thread < team; ++thread) {
      const Span& span = spans[static_cast<std::size_t>(thread)];
      all.begin = std::min(all.begin, span.begin);
      all.end = std::max(all.end, span.end);
      all.operations += span.operations;
      shortest = std::min(shortest, span.end - span.begin);
    }
    if (shortest < round_seconds) {
      iterations *= 2;
      continue;
    }
    best = std::max(best, all.operations / (all.end - all.begin));
    ++round;
  }
  return best;
}

}  // namespace

int thread_count(int requested) { return requested > 0 ? requested : omp_get_max_threads(); }

double cold_bytes() {
  double cache = 32.0 * (1 << 20);
#if defined(_SC_LEVEL3_CACHE_SIZE)
  cache = std::max(cache, static_cast<double>(::sysconf(_SC_LEVEL3_CACHE_SIZE)));
#endif
  return std::min(8.0 * cache, 2.0 * (1 << 30));
}

CpuPeaks measure_peaks(int threads) {
  const auto work = HWY_DYNAMIC_DISPATCH(multiply_add);
  return {measure_peak(threads, work), has_dot_bf16() ? measure_peak(threads, dot_bf16) : 0.0};
}

double measure_read_bandwidth(int threads) {
  const int team = thread_count(threads);
  const auto count = static_cast<std::int64_t>(cold_bytes()) / 4;
  const Buffer buffer(static_cast<std::size_t>(count) * sizeof(float));
  auto* const data = reinterpret_cast<float*>(buffer.data());
  const auto read = HWY_DYNAMIC_DISPATCH(read_all);
  double best = 0.0;
  for (int round = 0; round <= rounds; ++round) {
    float sum = 0.0f;
    const double begin = now();
#pragma omp parallel num_threads(team) reduction(+ : sum)
    {
      const std::int64_t thread = omp_get_thread_num();
      const std::int64_t first = count * thread / omp_get_num_threads();
      const std::int64_t last = count * (thread + 1) / omp_get_num_threads();
      // The first round writes, so that every page exists.
      if (round == 0) std::fill(data + first, data + last, 1.0f);
      if (round > 0) sum += read(data + first, last - first);
    }
    volatile float keep = sum;
    static_cast<void>(keep);
    if (round > 0) best = std::max(best, static_cast<double>(count) * 4.0 / (now() - begin));
  }
  return best;
}

}  // namespace fovea::tools
#endif  // HWY_ONCE
