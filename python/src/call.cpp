#include "python/call.h"

#include <numeric>

namespace fovea::python {
namespace {

constexpr std::array<const char*, slot_count> slot_names{
    "q",    "k",     "v",       "out",     "lse",     "bias",     "mask",
    "sink", "alibi", "q_scale", "k_scale", "v_scale", "key_scale"};
constexpr std::array<const char*, length_slot_count> length_names{
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table"};

[[noreturn]] void refuse_value(const std::string& sentence) {
  throw nb::value_error(sentence.c_str());
}

// Which of fovea's four dimensions an array's are, by its rank.
std::span<const std::size_t> dims_of(Slot slot, std::size_t rank, bool heads_first) {
  static constexpr std::size_t as_they_are[]{0, 1, 2, 3};
  static constexpr std::size_t heads_then_rows[]{0, 2, 1, 3};
  static constexpr std::size_t head[]{3};
  static constexpr std::size_t slope[]{0, 1};
  const std::span<const std::size_t> all{as_they_are};
  switch (slot) {
    case q:
    case k:
    case v:
    case out:
      if (rank == 4) return heads_first ? std::span<const std::size_t>{heads_then_rows} : all;
      if (rank == 3) return all.subspan(1);  // (total, heads, head_dim)
      break;
    case lse:
      if (rank == 3) return all.first(3);       // (batch, heads, rows)
      if (rank == 2) return all.subspan(1, 2);  // (heads, total)
      break;
    case bias:
    case mask:
      if (rank >= 1 && rank <= 4) return all.subspan(4 - rank);
      break;
    case sink:
      if (rank == 1) return head;
      break;
    case alibi:
      if (rank == 1) return all.subspan(1, 1);
      if (rank == 2) return slope;
      break;
    case q_scale:
    case k_scale:
    case v_scale:
      if (rank == 2 || rank == 3) return all.first(rank);
      break;
    case key_scale:
      if (rank == 2) return all.subspan(2);
      break;
    case slot_count: break;
  }
  return {};
}

const char* right_rank(Slot slot) {
  switch (slot) {
    case lse: return "(batch, heads, seqlen) or (heads, total)";
    case bias:
    case mask: return "at most four dimensions, (batch, heads, seqlen_q, seqlen_k)";
    case sink: return "(heads)";
    case alibi: return "(heads) or (batch, heads)";
    case q_scale:
    case k_scale:
    case v_scale: return "(batch, heads) or (batch, heads, blocks of 32 rows)";
    case key_scale: return "(blocks of 32 keys, 4), as quantised";
    default: return "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)";
  }
}

std::string shape_text(const Array& array) {
  std::string text = "(";
  for (const std::int64_t extent : array.shape()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  }
  return text + ")";
}

// A list or tuple of integers.
std::span<const std::int32_t> from_sequence(nb::handle sequence, const char* argument,
                                            std::vector<std::int32_t>& storage) {
  storage.clear();
  storage.reserve(nb::len(sequence) + 1);
  for (const nb::handle item : sequence) {
    std::int32_t value = 0;
    if (!nb::try_cast(item, value)) {
      throw nb::type_error(
          (std::string(argument) + " holds " + nb::repr(item).c_str() + "; it must hold integers")
              .c_str());
    }
    storage.push_back(value);
  }
  return {storage.data(), storage.size()};
}

}  // namespace

const char* name(Slot slot) { return slot_names.at(slot); }
const char* name(LengthSlot slot) { return length_names.at(slot); }

Tensor to_tensor(const Array& array, const char* argument, std::span<const std::size_t> dims) {
  Tensor tensor;
  tensor.data = array.data();
  tensor.dtype = to_dtype(array, argument);
  tensor.shape.fill(1);
  tensor.present = true;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    tensor.shape[dims[i]] = array.shape()[i];
    tensor.stride[dims[i]] = array.strides()[i];
  }
  return tensor;
}

Call::Call(const std::array<nb::handle, slot_count>& tensors,
           const std::array<nb::handle, length_slot_count>& lengths, const Settings& settings) {
  heads_first_ = settings.heads_first;
  take_tensors(tensors);
  take_lengths(lengths);
  take_device(settings.stream);
  problem_.max_seqlen_q = settings.max_seqlen_q;
  problem_.max_seqlen_k = settings.max_seqlen_k;
  if (settings.softmax_scale) problem_.softmax_scale = static_cast<float>(*settings.softmax_scale);
  problem_.causal = settings.causal;
  problem_.window_left = settings.window_left;
  problem_.window_right = settings.window_right;
  problem_.softcap = static_cast<float>(settings.softcap);
  problem_.dropout = {static_cast<float>(settings.dropout_p), settings.dropout_seed,
                      settings.dropout_offset};
  problem_.num_splits = settings.num_splits;
  problem_.deterministic = settings.deterministic;
}

Tensor Call::tensor_like(Slot slot, const Array& array, const char* argument) const {
  if (!array.present()) return {};
  // Values beside key_scale are (batch, heads, head_dim, keys) in any layout.
  const bool heads_first = heads_first_ && !(slot == v && arrays_[key_scale].present());
  const auto dims = dims_of(slot, array.shape().size(), heads_first);
  if (dims.empty()) {
    refuse_value(std::string(argument) + " has shape " + shape_text(array) + "; it must be " +
                 right_rank(slot));
  }
  return to_tensor(array, argument, dims);
}

void Call::take_tensors(const std::array<nb::handle, slot_count>& tensors) {
  static constexpr std::array<Tensor Problem::*, slot_count> fields{
      &Problem::q,       &Problem::k,       &Problem::v,        &Problem::out,   &Problem::lse,
      &Problem::bias,    &Problem::mask,    &Problem::sink,     &Problem::alibi, &Problem::q_scale,
      &Problem::k_scale, &Problem::v_scale, &Problem::key_scale};
  for (std::size_t i = 0; i < slot_count; ++i) {
    const auto slot = static_cast<Slot>(i);
    const Access access = slot == out || slot == lse ? Access::write : Access::read;
    arrays_[i] = Array(tensors[i], name(slot), access);
  }
  for (std::size_t i = 0; i < slot_count; ++i) {
    const auto slot = static_cast<Slot>(i);
    problem_.*fields[i] = tensor_like(slot, arrays_[i], name(slot));
  }
}

void Call::take_lengths(const std::array<nb::handle, length_slot_count>& lengths) {
  static constexpr std::array<std::span<const std::int32_t> Problem::*, length_slot_count> fields{
      &Problem::cu_seqlens_q, &Problem::cu_seqlens_k, &Problem::seqused_q, &Problem::seqused_k,
      &Problem::block_table};
  for (std::size_t i = 0; i < length_slot_count; ++i) {
    const auto slot = static_cast<LengthSlot>(i);
    if (slot != block_table &&
        (nb::isinstance<nb::list>(lengths[i]) || nb::isinstance<nb::tuple>(lengths[i]))) {
      problem_.*fields[i] = from_sequence(lengths[i], name(slot), storage_[i]);
      continue;
    }
    length_arrays_[i] = Array(lengths[i], name(slot));
    const Array& array = length_arrays_[i];
    if (!array.present()) continue;
    const int right = slot == block_table ? 2 : 1;
    if (array.rank() != right) {
      refuse_value(std::string(name(slot)) + " has " + std::to_string(array.rank()) +
                   " dimensions; it must have " + std::to_string(right));
    }
    problem_.*fields[i] = to_int32(array, name(slot), storage_[i]);
    if (slot == block_table) problem_.block_table_columns = array.shape()[1];
  }
}

void Call::take_device(std::uintptr_t stream) {
  const Array& first = arrays_[q];
  const auto check = [&](const Array& array, const char* argument) {
    if (!array.present() || same_device(array.device(), first.device())) return;
    refuse_value(std::string(argument) + " is on " + device_name(array.device()) + " but q is on " +
                 device_name(first.device()) + "; all tensors must be on one device");
  };
  for (std::size_t i = 0; i < slot_count; ++i) check(arrays_[i], name(static_cast<Slot>(i)));
  for (std::size_t i = 0; i < length_slot_count; ++i) {
    check(length_arrays_[i], name(static_cast<LengthSlot>(i)));
  }
  if (!first.present() || on_host(first.device())) return;
  if (first.device().type != dlpack::cuda && first.device().type != dlpack::cuda_managed) {
    throw Unsupported("q is on " + device_name(first.device()) +
                      "; fovea computes on the CPU and on CUDA devices");
  }
  problem_.memory = Memory::device;
  problem_.stream = reinterpret_cast<void*>(stream);
}

}  // namespace fovea::python
