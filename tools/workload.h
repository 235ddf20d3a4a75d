// A problem together with the memory that it points to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fovea/fovea.hpp"
#include "tools/problem_options.h"

namespace fovea::tools {

// Page-aligned memory, zero until written and not taken from the machine before that.
class Buffer {
 public:
  explicit Buffer(std::size_t size_bytes);  // throws std::bad_alloc
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

// Moves but does not copy: problem points into the buffers.
struct Workload {
  Problem problem;
  Gradients gradients;  // after add_gradients()
  std::vector<Buffer> buffers;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
  std::vector<std::int32_t> seqused_q, seqused_k;
  std::vector<std::int32_t> block_table;

  // Memory for `elements` of dtype that lives as long as the workload. Throws Error when the count
  // overflows or exceeds the machine's memory.
  std::byte* allocate(std::int64_t elements, DType dtype);
};

// How the sequences of random data lie in memory.
struct Packing {
  bool ragged = false;         // packed sequences of random lengths up to those of the shape
  std::int64_t page_size = 0;  // K and V in pages of this many rows, in random order; 0: not paged
};

// Memory for a problem's tensors, with lengths and tables but no values yet: enough for plan(),
// which finds what is wrong with a shape before memory is touched.
[[nodiscard]] Workload make_workload(const Shape& shape, const ProblemOptions& options,
                                     bool with_lse = false, const Packing& packing = {},
                                     std::uint64_t seed = 0);

// Memory for the gradients of a workload with lse: dout standard normal, the others without values.
void add_gradients(Workload& workload, std::uint64_t seed);

// Standard normal q, k, v and sink, and ALiBi slopes. Equal arguments give equal values.
void fill_inputs(Workload& workload, std::uint64_t seed);

// Fills count elements with standard normal values, a function of (seed, index) alone.
void fill_normal(std::byte* data, DType dtype, std::int64_t count, std::uint64_t seed);

// 0 to count - 1 in an order that the seed decides.
[[nodiscard]] std::vector<std::int32_t> random_order(std::int64_t count, std::uint64_t seed);

// The slopes of the ALiBi paper (Press et al., section 3) for any number of heads: powers of
// 2^(-8/n) for n heads, n the power of two below, and every other one of the next power for the
// rest.
void fill_alibi_slopes(float* slopes, std::int64_t heads);

// Attaches slopes to a problem.
void add_alibi(Workload& workload, std::int64_t heads);

}  // namespace fovea::tools
