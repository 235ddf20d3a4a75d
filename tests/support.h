// Tensors in memory that is hostile on purpose, and the way from a public Problem to the oracle's.
//
// Every byte of a tensor's buffer starts as 0xff, which is NaN in every float format: what lies
// between rows, before the base and after the end is NaN for a reader, and a changed byte there
// convicts a writer. Elements that a test does not set stay NaN, too, outputs among them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/types.h"
#include "fovea/fovea.hpp"

namespace fovea::test {

using Index = std::int64_t;
using Shape = std::array<Index, 4>;

// How the elements of a tensor lie in its buffer.
struct Placement {
  std::array<int, 4> order{0, 1, 2, 3};  // dimensions, slowest first
  Index element_stride = 1;              // of the fastest dimension
  Index row_padding = 0;                 // elements after each run of the fastest dimension
  Index offset = 0;                      // elements before the first; 1 takes the alignment away
  std::array<bool, 4> broadcast{};       // these dimensions are stored once, with stride 0
};

class HostTensor {
 public:
  HostTensor() = default;  // absent
  HostTensor(DType dtype, Shape shape, const Placement& placement = {});

  [[nodiscard]] bool present() const { return buffer_ != nullptr; }
  [[nodiscard]] DType dtype() const { return view_.dtype; }
  [[nodiscard]] const std::array<std::int64_t, 4>& shape() const { return view_.shape; }
  [[nodiscard]] Index size() const;
  [[nodiscard]] const Tensor& tensor() const { return view_; }

  [[nodiscard]] double at(Index i0, Index i1, Index i2, Index i3) const;
  void set(Index i0, Index i1, Index i2, Index i3, double value);  // rounded to the dtype

  // Sets every stored element to function(i0, i1, i2, i3), in row-major order.
  template <typename Function>
  void fill(const Function& function) {
    for_each([&](Index a, Index b, Index c, Index d) { set(a, b, c, d, function(a, b, c, d)); });
  }

  // Part of a dimension, and a dimension backwards; both share the buffer.
  [[nodiscard]] HostTensor slice(int dimension, Index begin, Index count) const;
  [[nodiscard]] HostTensor reversed(int dimension) const;

  // All elements in row-major order of the shape.
  [[nodiscard]] std::vector<double> values() const;
  // The same as bytes of the dtype.
  [[nodiscard]] std::vector<std::byte> bytes() const;
  // The whole buffer, to see whether a reader wrote.
  [[nodiscard]] std::vector<std::byte> buffer() const;

  // Bytes outside the elements that are not 0xff any more.
  [[nodiscard]] Index foreign_bytes_changed() const;
  // Makes every byte 0xff again.
  void poison();

 private:
  template <typename Visit>
  void for_each(const Visit& visit) const {
    const auto extent = [this](std::size_t i) {
      return view_.stride[i] == 0 ? std::min<Index>(view_.shape[i], 1) : view_.shape[i];
    };
    for (Index a = 0; a < extent(0); ++a) {
      for (Index b = 0; b < extent(1); ++b) {
        for (Index c = 0; c < extent(2); ++c) {
          for (Index d = 0; d < extent(3); ++d) visit(a, b, c, d);
        }
      }
    }
  }
  [[nodiscard]] Index offset(Index i0, Index i1, Index i2, Index i3) const;

  std::shared_ptr<std::vector<std::byte>> buffer_;
  Tensor view_;
};

// Reproducible on every platform, unlike the distributions of <random>.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits();
  double uniform();          // [0, 1)
  Index below(Index limit);  // [0, limit)
  double normal();
  double cauchy();

 private:
  std::uint64_t state_;
};

// Device of the tests, from FOVEA_TEST_DEVICE: cpu (default), cuda, emulated:sm_90a,
// emulated:sm_100a.
[[nodiscard]] Device test_device();

// The problem as the oracle takes it, written apart from the runtime's own translation.
[[nodiscard]] core::Problem to_core(const Problem& problem);

}  // namespace fovea::test
