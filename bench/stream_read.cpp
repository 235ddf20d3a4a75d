// The yardstick of decoding: the time to read keys and values once, in order, doing next to nothing
// with them. bench/peers.py calls it in turn with the engines.
#include <omp.h>

#include <cstdint>

extern "C" std::uint64_t fovea_bench_read(const std::uint64_t* data, std::int64_t count,
                                          int threads);

// Reads `count` words on `threads` threads, each a contiguous part; returns their sum, so that no
// compiler leaves the reading out. Sums of integers, since those may be reordered into vectors.
std::uint64_t fovea_bench_read(const std::uint64_t* data, std::int64_t count, int threads) {
  std::uint64_t sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
  {
    const std::int64_t thread = omp_get_thread_num();
    const std::int64_t first = count * thread / omp_get_num_threads();
    const std::int64_t last = count * (thread + 1) / omp_get_num_threads();
    std::uint64_t part = 0;
    for (std::int64_t i = first; i < last; ++i) part += data[i];
    sum += part;
  }
  return sum;
}
