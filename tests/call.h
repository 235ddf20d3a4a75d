// One attention call of the tests: described by a CaseSpec, built with hostile memory, set and read
// by logical coordinates whatever the layout and the entry point, and checked against the oracle.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "fovea/fovea.hpp"
#include "tests/support.h"

namespace fovea::test {

enum class Layout {
  bshd,
  bhsd,
  padded,      // rows with a gap behind them, base one element off: aligned to nothing
  strided,     // every other element of a row
  transposed,  // (batch, sequence, head_dim, head) in memory
  reversed,    // sequence and head_dim run backwards
  expanded,    // q shared by all heads, k and v by the whole batch, with stride 0
  fused,       // q, k, v are slices of one buffer where their shapes allow it, else k and v are
};

enum class Entry {
  dense,
  seqused,       // dense storage, fewer rows used
  varlen,        // packed, with slack rows at the end
  varlen_holes,  // packed, with unused rows after every sequence
  paged,         // dense q, paged k and v
  varlen_paged,  // packed q, paged k and v
};

enum class Bias { none, full, per_key, per_head, with_minus_infinity };
enum class Mask { none, random, per_key, empty_rows, late };
// Of 8-bit q, k and v: none; one for each tensor; for each (sequence, KV head); for q (sequence,
// query head); for each 32 rows, where pages do not forbid it.
enum class Scales { none, one, per_head, per_query_head, per_block };

struct CaseSpec {
  std::string name;
  Index batch = 2;
  Index hq = 2;
  Index hkv = 2;
  Index sq = 64;
  Index sk = 64;
  Index d = 64;
  Index dv = 0;  // 0: as d
  DType dtype = DType::f32;
  std::optional<DType> out_dtype = std::nullopt;
  Layout layout = Layout::bshd;
  Entry entry = Entry::dense;
  // Of each sequence; empty: sq and sk, or a ragged pattern with 0 and 1 in it.
  std::vector<Index> lengths_q = {};
  std::vector<Index> lengths_k = {};
  Index page_size = 16;
  bool causal = false;
  Index window_left = -1;
  Index window_right = -1;
  float softcap = 0.0f;
  std::optional<float> scale = std::nullopt;
  bool sink = false;
  bool alibi = false;
  Bias bias = Bias::none;
  Mask mask = Mask::none;
  Scales scales = Scales::none;
  float dropout = 0.0f;
  bool lse = true;
  std::int32_t num_splits = 0;
  Softmax softmax = Softmax::automatic;
  double logits = 1.0;  // standard deviation of the scaled scores
};

inline constexpr Entry every_entry[] = {Entry::dense,        Entry::seqused, Entry::varlen,
                                        Entry::varlen_holes, Entry::paged,   Entry::varlen_paged};
inline constexpr Softmax every_softmax[] = {Softmax::online, Softmax::conditional,
                                            Softmax::sum_guard};

// The spec through an entry point, every sequence with sq rows in use and sk keys.
[[nodiscard]] CaseSpec with_entry(CaseSpec spec, Entry entry, Index sq, Index sk);

// The spec's fields that differ from their defaults, as "sq=1 sk=300 causal".
[[nodiscard]] std::string describe(const CaseSpec& spec);
void PrintTo(const CaseSpec& spec, std::ostream* out);  // for GoogleTest, which prescribes the name

class Call {
 public:
  // Allocates, and fills every element of the problem with random normal numbers. Elements outside
  // the problem (slack, holes, unused pages) stay NaN.
  explicit Call(const CaseSpec& spec);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] Index length_q(Index b) const { return lengths_q_[static_cast<std::size_t>(b)]; }
  [[nodiscard]] Index length_k(Index b) const { return lengths_k_[static_cast<std::size_t>(b)]; }

  // function(b, i, h, d) for every row in use.
  template <typename Function>
  void fill_q(const Function& function) {
    fill(q, lengths_q_, &Call::row_q, function);
  }
  template <typename Function>
  void fill_k(const Function& function) {
    fill(k, lengths_k_, &Call::row_k, function);
  }
  template <typename Function>
  void fill_v(const Function& function) {
    fill(v, lengths_k_, &Call::row_k, function);
  }
  void set_k(Index b, Index j, Index h, Index d, double value);
  void set_v(Index b, Index j, Index h, Index d, double value);
  [[nodiscard]] double out_at(Index b, Index i, Index h, Index d) const;
  [[nodiscard]] double lse_at(Index b, Index h, Index i) const;

  // Whether the definition of attention lets row i of a head see key j.
  [[nodiscard]] bool visible(Index b, Index h, Index i, Index j) const;
  // Overwrites with NaN the keys that no row sees and the queries that see no key.
  void poison_unseen();

  // Computes with plan() and run() in a guarded workspace, after poisoning the outputs; softmax is
  // the spec's.
  Statistics run();

  // EXPECTs, after run(): results within the tolerance of the oracle, every element written, no
  // byte beside them changed, inputs untouched.
  void expect_matches_oracle() const;
  void expect_memory_respected() const;

  // Where a row of a sequence lies in q and out, or in k and v.
  struct Place {
    Index batch;
    Index row;
  };
  [[nodiscard]] Place row_q(Index b, Index i) const;
  [[nodiscard]] Place row_k(Index b, Index j) const;

  CaseSpec spec;
  HostTensor q, k, v, out, lse, bias, mask, sink, alibi;
  HostTensor q_scale, k_scale, v_scale;
  Problem problem;  // refers to this object's memory
  Device device = test_device();

 private:
  template <typename Function>
  void fill(HostTensor& tensor, const std::vector<Index>& lengths,
            Place (Call::*place)(Index, Index) const, const Function& function) {
    for (Index b = 0; b < spec.batch; ++b) {
      for (Index i = 0; i < lengths[static_cast<std::size_t>(b)]; ++i) {
        const Place p = (this->*place)(b, i);
        for (Index h = 0; h < tensor.shape()[2]; ++h) {
          for (Index d = 0; d < tensor.shape()[3]; ++d) {
            tensor.set(p.batch, p.row, h, d, function(b, i, h, d));
          }
        }
      }
    }
  }

  [[nodiscard]] bool is_varlen_q() const;
  [[nodiscard]] bool is_varlen_k() const;
  [[nodiscard]] bool is_paged() const;
  void place_rows();
  void place_pages(Random& random);
  void allocate();
  void allocate_fused(Shape shape_q, Shape shape_k, Shape shape_v);
  void describe_problem();
  void fill_extras(Random& random);
  void add_scales(Random& random);
  void remember_inputs();

  std::vector<Index> lengths_q_, lengths_k_;
  std::vector<std::int32_t> cu_q_, cu_k_, used_q_, used_k_, table_;
  Index total_q_ = 0, total_k_ = 0, pages_ = 0, columns_ = 0;
  Index scores_q_ = 0, scores_k_ = 0;  // extents of bias and mask
  std::vector<std::vector<std::byte>> inputs_before_;
};

// A tensor in the memory order of a layout.
[[nodiscard]] HostTensor laid_out(DType dtype, Shape shape, Layout layout);

// Builds the call, poisons what nobody sees, runs it twice and checks all of it.
void check_case(const CaseSpec& spec);

}  // namespace fovea::test
