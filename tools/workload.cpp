#include "tools/workload.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numbers>
#include <numeric>
#include <utility>

#include "tools/convert.h"

namespace fovea::tools {
namespace {

constexpr std::int64_t max_sequences = std::int64_t{1} << 24;
constexpr std::int64_t max_pages = std::int64_t{1} << 26;

// Streams of the random generator, one per tensor.
enum class Stream : std::uint64_t { q = 1, k, v, sink, lengths, pages, dout };

// The output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection that mixes every bit.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint64_t stream_seed(std::uint64_t seed, Stream stream) {
  return mix(seed ^ mix(static_cast<std::uint64_t>(stream)));
}

std::size_t machine_memory_bytes() {
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// A product of extents; Error when it leaves 64 bits.
std::int64_t product(std::initializer_list<std::int64_t> extents) {
  std::int64_t result = 1;
  for (const std::int64_t extent : extents) {
    if (extent != 0 && result > std::numeric_limits<std::int64_t>::max() / 8 / extent) {
      throw Error("the shape has more elements than 64-bit sizes can hold");
    }
    result *= extent;
  }
  return result;
}

Tensor tensor_of(Workload& workload, DType dtype, Layout layout, std::int64_t batch,
                 std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  std::byte* const data = workload.allocate(product({batch, rows, heads, dim}), dtype);
  return layout == Layout::bshd ? bshd(data, dtype, batch, rows, heads, dim)
                                : bhsd(data, dtype, batch, rows, heads, dim);
}

std::int64_t elements(const Tensor& tensor) {
  return product({tensor.shape[0], tensor.shape[1], tensor.shape[2], tensor.shape[3]});
}

// Random lengths from 0 to `longest`, as offsets of packed rows.
std::vector<std::int32_t> random_offsets(std::int64_t batch, std::int64_t longest,
                                         std::uint64_t seed) {
  if (batch > max_sequences ||
      product({batch, longest}) > std::numeric_limits<std::int32_t>::max()) {
    throw Error("--ragged takes at most 2^24 sequences and 2^31 rows; give a smaller --shape");
  }
  std::vector<std::int32_t> offsets{0};
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto length =
        mix(seed + static_cast<std::uint64_t>(b)) % (static_cast<std::uint64_t>(longest) + 1);
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
  }
  return offsets;
}

// Pages of all sequences in random order, so that a page number taken for a row number shows.
void make_pages(Workload& workload, const Shape& shape, std::int64_t page_size,
                std::uint64_t seed) {
  const std::int64_t columns = (shape.seqlen_k + page_size - 1) / page_size;
  const std::int64_t pages = product({shape.batch, columns});
  if (shape.batch > max_sequences || pages > max_pages) {
    throw Error("--page-size takes at most 2^24 sequences and 2^26 pages; give larger pages");
  }
  workload.block_table = random_order(pages, seed);
  workload.problem.block_table_columns = columns;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    workload.seqused_k.push_back(static_cast<std::int32_t>(shape.seqlen_k));
  }
}

void allocate_inputs(Workload& w, const Shape& shape, const ProblemOptions& options,
                     std::uint64_t seed, const Packing& packing) {
  const DType dtype = options.dtype.value_or(DType::f32);
  Layout layout = options.layout;
  std::int64_t batch_q = shape.batch;
  std::int64_t batch_k = shape.batch;
  std::int64_t rows_q = shape.seqlen_q;
  std::int64_t rows_k = shape.seqlen_k;
  if (packing.ragged) {
    if (layout == Layout::bhsd) {
      throw Error(
          "--ragged packs rows of (heads, dim); --layout bhsd has no such form, leave one out");
    }
    const std::uint64_t lengths = stream_seed(seed, Stream::lengths);
    w.cu_seqlens_q = random_offsets(shape.batch, shape.seqlen_q, lengths);
    rows_q = w.cu_seqlens_q.back();
    batch_q = 1;
    if (packing.page_size == 0) {
      w.cu_seqlens_k = random_offsets(shape.batch, shape.seqlen_k, mix(lengths));
      rows_k = w.cu_seqlens_k.back();
      batch_k = 1;
    }
  }
  if (packing.page_size > 0) {
    make_pages(w, shape, packing.page_size, stream_seed(seed, Stream::pages));
    batch_k = static_cast<std::int64_t>(w.block_table.size());
    rows_k = packing.page_size;
  }
  Problem& p = w.problem;
  p.q = tensor_of(w, dtype, layout, batch_q, rows_q, shape.heads_q, shape.head_dim);
  p.k = tensor_of(w, dtype, layout, batch_k, rows_k, shape.heads_kv, shape.head_dim);
  const bool integers = dtype == DType::s8;
  p.v = tensor_of(w, integers ? DType::e4m3 : dtype, layout, batch_k, rows_k, shape.heads_kv,
                  shape.head_dim_v);
  // There is no output in 8 bits: their range is that of scaled blocks.
  const bool eight_bits = integers || dtype == DType::e4m3 || dtype == DType::e5m2;
  p.out = tensor_of(w, eight_bits ? DType::bf16 : dtype, layout, batch_q, rows_q, shape.heads_q,
                    shape.head_dim_v);
  if (options.alibi) add_alibi(w, shape.heads_q);
  if (options.sink) {
    p.sink =
        contiguous(w.allocate(shape.heads_q, DType::f32), DType::f32, {1, 1, 1, shape.heads_q});
  }
  p.cu_seqlens_q = w.cu_seqlens_q;
  p.cu_seqlens_k = w.cu_seqlens_k;
  p.seqused_k = w.seqused_k;
  p.block_table = w.block_table;
}

void add_lse(Workload& w) {
  const Tensor& q = w.problem.q;
  std::byte* const data = w.allocate(product({q.shape[0], q.shape[1], q.shape[2]}), DType::f32);
  w.problem.lse = contiguous(data, DType::f32, {q.shape[0], q.shape[2], q.shape[1], 1});
}

}  // namespace

Buffer::Buffer(std::size_t size_bytes) : size_bytes_(std::max<std::size_t>(size_bytes, 1)) {
  void* const data = ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(data);
}

Buffer::~Buffer() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(other.size_bytes_) {}

std::byte* Workload::allocate(std::int64_t count, DType dtype) {
  const auto bytes = static_cast<std::size_t>(product({count})) * size_bytes(dtype);
  std::size_t total = bytes;
  for (const Buffer& buffer : buffers) total += buffer.size_bytes();
  if (total > machine_memory_bytes()) {
    throw Error(
        fmt::format("the tensors need {:.1f} GiB or more, this machine has {:.1f} GiB of "
                    "memory; give a smaller shape",
                    static_cast<double>(total) / (1 << 30),
                    static_cast<double>(machine_memory_bytes()) / (1 << 30)));
  }
  return buffers.emplace_back(bytes).data();
}

std::vector<std::int32_t> random_order(std::int64_t count, std::uint64_t seed) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[mix(seed + i) % i]);
  return order;
}

void fill_normal(std::byte* data, DType dtype, std::int64_t count, std::uint64_t seed) {
  constexpr std::int64_t block = 1024;
  const std::int64_t blocks = (count + block - 1) / block;
  const std::size_t element_bytes = size_bytes(dtype);
#pragma omp parallel for schedule(static)
  for (std::int64_t b = 0; b < blocks; ++b) {
    float values[block];
    // Box and Muller: two uniform numbers give two normal ones. The first is never 0.
    for (std::int64_t i = 0; i < block; i += 2) {
      const std::uint64_t bits = mix(seed + static_cast<std::uint64_t>(b * block + i));
      const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
      const float angle =
          static_cast<float>(bits & 0xffffffu) * 0x1p-24f * 2.0f * std::numbers::pi_v<float>;
      const float radius = std::sqrt(-2.0f * std::log(u));
      values[i] = radius * std::cos(angle);
      values[i + 1] = radius * std::sin(angle);
    }
    const std::int64_t begin = b * block;
    convert(reinterpret_cast<const std::byte*>(values), DType::f32,
            data + static_cast<std::size_t>(begin) * element_bytes, dtype,
            std::min(block, count - begin));
  }
}

void fill_alibi_slopes(float* slopes, std::int64_t heads) {
  if (heads <= 0) return;
  const auto whole = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(heads)));
  const auto slope = [](std::int64_t index, std::int64_t count) {
    return static_cast<float>(
        std::exp2(-8.0 * static_cast<double>(index) / static_cast<double>(count)));
  };
  for (std::int64_t h = 0; h < whole; ++h) slopes[h] = slope(h + 1, whole);
  for (std::int64_t h = whole; h < heads; ++h) slopes[h] = slope(2 * (h - whole) + 1, 2 * whole);
}

void add_alibi(Workload& workload, std::int64_t heads) {
  std::byte* const data = workload.allocate(heads, DType::f32);
  workload.problem.alibi = contiguous(data, DType::f32, {1, heads, 1, 1});
}

Workload make_workload(const Shape& shape, const ProblemOptions& options, bool with_lse,
                       const Packing& packing, std::uint64_t seed) {
  Workload workload;
  apply_options(options, workload.problem);
  allocate_inputs(workload, shape, options, seed, packing);
  if (with_lse) add_lse(workload);
  return workload;
}

void add_gradients(Workload& w, std::uint64_t seed) {
  const auto like = [&w](const Tensor& tensor) {
    Tensor result = tensor;
    if (tensor.present) result.data = w.allocate(elements(tensor), tensor.dtype);
    return result;
  };
  const Problem& p = w.problem;
  w.gradients.dout = like(p.out);
  w.gradients.dq = like(p.q);
  w.gradients.dk = like(p.k);
  w.gradients.dv = like(p.v);
  w.gradients.dsink = like(p.sink);
  const Tensor& dout = w.gradients.dout;
  fill_normal(static_cast<std::byte*>(dout.data), dout.dtype, elements(dout),
              stream_seed(seed, Stream::dout));
}

void fill_inputs(Workload& workload, std::uint64_t seed) {
  const Problem& p = workload.problem;
  const auto fill = [&](const Tensor& tensor, Stream stream) {
    if (!tensor.present) return;
    fill_normal(static_cast<std::byte*>(tensor.data), tensor.dtype, elements(tensor),
                stream_seed(seed, stream));
  };
  fill(p.q, Stream::q);
  fill(p.k, Stream::k);
  fill(p.v, Stream::v);
  fill(p.sink, Stream::sink);
  if (p.alibi.present) fill_alibi_slopes(static_cast<float*>(p.alibi.data), p.alibi.shape[1]);
}

}  // namespace fovea::tools
