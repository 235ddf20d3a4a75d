// What the tests that launch a kernel by itself share: how the tensors of a case lie, and device
// memory that goes when the call ends. A case is any struct with the fields of a problem; tensors
// lie in memory order (batch, row, head, column).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "core/numeric.h"
#include "core/types.h"
#include "runtime/device.h"

namespace fovea::tests {

// A contiguous tensor without its data.
inline core::View rows_of_heads(core::int64 rows, core::int32 heads, core::int32 columns,
                                core::DType type) {
  const core::int64 row = static_cast<core::int64>(heads) * columns;
  return {nullptr, type, {rows * row, row, columns, 1}};
}

inline const core::int32* pointer_of(const std::vector<core::int32>& list) {
  return list.empty() ? nullptr : list.data();
}

// The rows of a case: those of each batch, or of all sequences one behind the other and `slack`
// rows more, as it has some or no cu_seqlens.
struct CaseRows {
  bool packed = false;
  core::int64 sequences = 0;
  core::int64 batches = 0;  // of tensors
  core::int64 q = 0;
  core::int64 k = 0;

  template <typename Case>
  static CaseRows of(const Case& c, core::int64 slack_k = 0) {
    if (c.cu_seqlens_q.empty()) return {false, c.batch, c.batch, c.seqlen_q, c.seqlen_k};
    return {true, static_cast<core::int64>(c.cu_seqlens_q.size()) - 1, 1,
            c.cu_seqlens_q.back() + c.slack, c.cu_seqlens_k.back() + slack_k};
  }
};

// All of a problem but data, and what only some cases have.
template <typename Case>
core::Problem describe_problem(const Case& c, const CaseRows& rows, core::DType in,
                               core::DType out) {
  core::Problem p;
  p.q = rows_of_heads(rows.q, c.heads_q, c.head_dim, in);
  p.k = rows_of_heads(rows.k, c.heads_kv, c.head_dim, in);
  p.v = rows_of_heads(rows.k, c.heads_kv, c.head_dim_v, in);
  p.out = rows_of_heads(rows.q, c.heads_q, c.head_dim_v, out);
  p.lse = {nullptr, core::DType::f32, {c.heads_q * rows.q, rows.q, 1, 0}};
  p.sink.stride[0] = 1;
  p.batch = rows.sequences;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_k = c.seqlen_k;
  p.total_q = rows.packed ? rows.q : 0;
  p.total_k = rows.packed ? rows.k : 0;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.softmax_scale = c.scale != 0.0f ? c.scale : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  p.window = c.window;
  p.cu_seqlens_q = pointer_of(c.cu_seqlens_q);
  p.cu_seqlens_k = pointer_of(c.cu_seqlens_k);
  p.seqused_q = pointer_of(c.seqused_q);
  p.seqused_k = pointer_of(c.seqused_k);
  return p;
}

class DeviceMemory {
 public:
  explicit DeviceMemory(runtime::Device& device) : device_(device) {}

  template <typename T>
  T* upload(const std::vector<T>& values) {
    buffers_.emplace_back(device_, values.size() * sizeof(T));
    const runtime::DeviceAddress address = buffers_.back().address();
    if (!values.empty()) {
      device_.copy_to_device(address, values.data(), values.size() * sizeof(T));
    }
    return reinterpret_cast<T*>(address);
  }

  template <typename T>
  runtime::DeviceAddress upload_address(const std::vector<T>& values) {
    return reinterpret_cast<runtime::DeviceAddress>(upload(values));
  }

  const core::int32* upload_list(const std::vector<core::int32>& list) {
    return list.empty() ? nullptr : upload(list);
  }

  // The lists of a case, for its problem on the device.
  template <typename Case>
  void upload_lengths(const Case& c, core::Problem& p) {
    p.cu_seqlens_q = upload_list(c.cu_seqlens_q);
    p.cu_seqlens_k = upload_list(c.cu_seqlens_k);
    p.seqused_q = upload_list(c.seqused_q);
    p.seqused_k = upload_list(c.seqused_k);
  }

  template <typename T>
  std::vector<T> download(runtime::DeviceAddress address, std::size_t count) {
    std::vector<T> values(count);
    device_.copy_to_host(values.data(), address, count * sizeof(T));
    device_.synchronize();
    return values;
  }

  // Place for elements: poison, with a guard behind it.
  void* output(core::DType type, std::size_t elements) {
    return upload(std::vector<unsigned char>(bytes_of(type, elements) + guard_bytes, poison));
  }

  // What an output holds now; what was written behind its end shows.
  std::vector<double> read(const core::View& view, std::size_t elements) {
    const std::size_t end = bytes_of(view.dtype, elements);
    const auto bytes = download<unsigned char>(reinterpret_cast<runtime::DeviceAddress>(view.data),
                                               end + guard_bytes);
    std::vector<double> values;
    for (std::size_t i = 0; i < elements; ++i) {
      values.push_back(core::load_element(bytes.data(), view.dtype, static_cast<core::int64>(i)));
    }
    for (std::size_t i = end; i < bytes.size(); ++i) EXPECT_EQ(bytes[i], poison);
    return values;
  }

 private:
  static constexpr std::size_t guard_bytes = 256;
  static constexpr unsigned char poison = 0xff;  // NaN in every floating-point type of results

  static std::size_t bytes_of(core::DType type, std::size_t elements) {
    return static_cast<std::size_t>(core::size_bytes(type)) * elements;
  }

  runtime::Device& device_;
  std::vector<runtime::DeviceBuffer> buffers_;
};

}  // namespace fovea::tests
