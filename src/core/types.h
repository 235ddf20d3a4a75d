// Vocabulary shared by every backend: element types, strided views, and the validated attention
// problem that runtime/ hands to a backend.
//
// core/ is compiled by g++, clang and NVRTC alike: no standard library, no CUDA headers, no heap.
#pragma once

namespace fovea::core {

using int8 = signed char;
using uint8 = unsigned char;
using uint16 = unsigned short;
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;
static_assert(sizeof(int32) == 4 && sizeof(int64) == 8 && sizeof(uint16) == 2);

enum class DType : uint8 { f32, bf16, f16, e4m3, e5m2, boolean, s8 };

constexpr int size_bytes(DType type) {
  switch (type) {
    case DType::f32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::e4m3:
    case DType::e5m2:
    case DType::boolean:
    case DType::s8: return 1;
  }
  return 0;
}

// A strided view of at most four dimensions. For q, k, v and out the dimensions are
// (batch, sequence, head, head_dim); for bias and mask (batch, head, query, key). Strides count
// elements, may be zero (broadcast) or negative, and promise no alignment beyond the element's own.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64 stride[4] = {0, 0, 0, 0};

  constexpr int64 offset(int64 i0, int64 i1, int64 i2, int64 i3 = 0) const {
    return i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
  }
  constexpr explicit operator bool() const { return data != nullptr; }
};

// Which keys a query may see by position alone. Bounds are inclusive distances from the
// bottom-right diagonal; -1 is unbounded. Causal is right = 0 (see core/mask.h).
struct Window {
  int64 left = -1;
  int64 right = -1;
};

struct Dropout {
  float probability = 0.0f;  // of dropping; 0 switches dropout off
  uint64 seed = 0;
  uint64 offset = 0;
};

// One attention problem after validation: everything a backend needs and nothing it must check.
//
// Dense: batch sequences of seqlen_q queries and seqlen_k keys, each optionally shortened by
// seqused_q / seqused_k (first n rows count). Varlen: cu_seqlens_q / cu_seqlens_k give the rows
// [cu[b], cu[b + 1]) of sequence b in packed tensors whose batch stride is not used. Paged:
// block_table[b * block_table_stride + key / page_size] is the page (batch index of k and v) that
// holds the key, and seqused_k the number of valid keys. Lengths and tables live where the backend
// computes.
//
// Eight-bit q, k and v are codes: an element is code x scale (core/fp8.h). Scales are fp32 at
// (sequence, head, block of 32 rows), with strides of 0 where they are shared; absent ones are 1.
struct Problem {
  View q, k, v, out;
  View lse;    // fp32 (batch, head, query) dense, (0, head, row) varlen; may be absent
  View bias;   // added after softcap; (batch, head, query, key); may be absent
  View mask;   // boolean, nonzero = visible; may be absent
  View sink;   // fp32, one extra logit per query head at stride[0]; may be absent
  View alibi;  // fp32 slopes at (batch, head); may be absent
  View q_scale, k_scale, v_scale;

  int64 batch = 0;
  int64 seqlen_q = 0;  // rows per sequence (dense), longest sequence (varlen)
  int64 seqlen_k = 0;
  int64 total_q = 0;  // rows of q and out in all, slack included (varlen only)
  int64 total_k = 0;  // rows of k and v in all (varlen only)
  int64 pages = 0;    // of k and v (paged only)
  int32 heads_q = 0;
  int32 heads_kv = 0;
  int32 head_dim = 0;    // of q and k
  int32 head_dim_v = 0;  // of v and out

  const int32* cu_seqlens_q = nullptr;
  const int32* cu_seqlens_k = nullptr;
  const int32* seqused_q = nullptr;
  const int32* seqused_k = nullptr;
  const int32* block_table = nullptr;
  int64 block_table_stride = 0;
  int32 page_size = 0;        // 0: not paged
  int32 q_scale_heads = 1;    // query heads that share an entry of q_scale
  bool v_transposed = false;  // v lies as the 8-bit kernels read it (core/fp8.h)

  float softmax_scale = 1.0f;
  float softcap = 0.0f;  // 0: off
  Window window;         // causal already folded into right
  Dropout dropout;
  int32 num_splits = 0;  // 0: the backend decides
  bool deterministic = false;

  constexpr int32 group_size() const { return heads_q / heads_kv; }
  constexpr bool is_varlen_q() const { return cu_seqlens_q != nullptr; }
  constexpr bool is_varlen_k() const { return cu_seqlens_k != nullptr; }
  constexpr bool is_paged() const { return page_size > 0; }
};

constexpr bool is_float8(DType type) { return type == DType::e4m3 || type == DType::e5m2; }
constexpr bool is_eight_bit(DType type) { return is_float8(type) || type == DType::s8; }
// What v is where q and k have this type: there are integers for these two alone.
constexpr DType value_type(DType type) { return type == DType::s8 ? DType::e4m3 : type; }

// The gradients of a problem, and what they are computed from beside it. The out and lse of the
// problem, results of the forward pass, are inputs here.
struct Gradients {
  View dout;   // as out
  View dlse;   // fp32, as lse; may be absent
  View dq;     // as q
  View dk;     // as k
  View dv;     // as v
  View dsink;  // fp32, one per query head at stride[0]; may be absent
  View dbias;  // as bias, summed over what broadcasts; may be absent
  int64 dbias_extent[4] = {0, 0, 0, 0};
  int64 rows_k = 0;  // rows of k and v in each entry of their first dimension, slack included
};

// Where one sequence of the batch lies: rows of q and of (unpaged) k and v, and their valid
// lengths.
struct Sequence {
  int64 batch_q = 0;  // batch coordinate for q and out
  int64 batch_k = 0;
  int64 row_q = 0;  // first row of q and out
  int64 row_k = 0;
  int64 capacity_q = 0;  // rows that belong to the sequence in out, valid or not
  int64 length_q = 0;
  int64 length_k = 0;
};

constexpr Sequence sequence_at(const Problem& p, int64 b) {
  Sequence s;
  if (p.cu_seqlens_q != nullptr) {
    s.row_q = p.cu_seqlens_q[b];
    s.capacity_q = p.cu_seqlens_q[b + 1] - s.row_q;
  } else {
    s.batch_q = b;
    s.capacity_q = p.seqlen_q;
  }
  s.length_q = p.seqused_q != nullptr ? p.seqused_q[b] : s.capacity_q;
  int64 capacity_k = p.seqlen_k;
  if (p.cu_seqlens_k != nullptr) {
    s.row_k = p.cu_seqlens_k[b];
    capacity_k = p.cu_seqlens_k[b + 1] - s.row_k;
  } else {
    s.batch_k = b;
  }
  s.length_k = p.seqused_k != nullptr ? p.seqused_k[b] : capacity_k;
  return s;
}

// Where a key lies among pages: in which, a batch index of k and v, and at which of its rows.
struct KeyPlace {
  int32 page, row;
};

// Of key `key` of sequence b, by anything that has a block table and a page size. It divides in the
// type of `key`: 32 bits are enough on a device. There b lies in shared memory: by reference, it
// takes no register before it is used.
template <typename Paged, typename Index>
constexpr KeyPlace page_of(const Paged& p, const auto& b, Index key) {
  const auto size = static_cast<Index>(p.page_size);
  const Index entry = key / size;
  return {p.block_table[b * p.block_table_stride + entry], static_cast<int32>(key - entry * size)};
}

// Element offset of key row `key` of a sequence in k or v, head coordinate included.
constexpr int64 key_offset(const Problem& p, const View& view, const Sequence& s, int64 b,
                           int64 key, int64 head) {
  if (p.is_paged()) {
    const KeyPlace at = page_of(p, b, key);
    return view.offset(at.page, at.row, head);
  }
  return view.offset(s.batch_k, s.row_k + key, head);
}

}  // namespace fovea::core
