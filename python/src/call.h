// fovea::Problem from Python's arguments, together with what keeps its memory alive.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "python/array.h"

namespace fovea::python {

// Numbers and switches of a call, in the order Python passes them.
struct Settings {
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
  std::optional<double> softmax_scale;
  bool causal = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::uint64_t dropout_seed = 0;
  std::uint64_t dropout_offset = 0;
  int num_splits = 0;
  bool deterministic = false;
  std::uintptr_t stream = 0;  // cudaStream_t of tensors on a device
  bool heads_first = false;   // tensors of rank 4 are (batch, heads, seqlen, head_dim)
};

// Tensors in the order Python passes them; q to out are needed.
enum Slot : std::size_t {
  q,
  k,
  v,
  out,
  lse,
  bias,
  mask,
  sink,
  alibi,
  q_scale,
  k_scale,
  v_scale,
  key_scale,
  slot_count
};
// Lengths likewise.
enum LengthSlot : std::size_t {
  cu_seqlens_q,
  cu_seqlens_k,
  seqused_q,
  seqused_k,
  block_table,
  length_slot_count
};

class Call {
 public:
  Call(const std::array<nb::handle, slot_count>& tensors,
       const std::array<nb::handle, length_slot_count>& lengths, const Settings& settings);
  Call(const Call&) = delete;  // problem_ points into this
  Call& operator=(const Call&) = delete;

  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] dlpack::Device device() const { return arrays_[q].device(); }
  [[nodiscard]] const Array& array(Slot slot) const { return arrays_.at(slot); }

  // A further tensor of the layout that the one in `slot` has; absent if its array is.
  [[nodiscard]] Tensor tensor_like(Slot slot, const Array& array, const char* argument) const;

 private:
  void take_tensors(const std::array<nb::handle, slot_count>& tensors);
  void take_lengths(const std::array<nb::handle, length_slot_count>& lengths);
  void take_device(std::uintptr_t stream);

  std::array<Array, slot_count> arrays_;
  std::array<Array, length_slot_count> length_arrays_;
  std::array<std::vector<std::int32_t>, length_slot_count> storage_;
  Problem problem_;
  bool heads_first_ = false;
};

// "q", "cu_seqlens_k": what messages call them.
[[nodiscard]] const char* name(Slot slot);
[[nodiscard]] const char* name(LengthSlot slot);

// A tensor whose array may have fewer dimensions: those named in `dims` in turn, e.g. {1, 2, 3} for
// (total, heads, head_dim); the others get the extent 1.
[[nodiscard]] Tensor to_tensor(const Array& array, const char* argument,
                               std::span<const std::size_t> dims);

}  // namespace fovea::python
