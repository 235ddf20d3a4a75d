// The item itself (see backward_tile.cpp). Included once per instruction set.

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

// C[rows x columns] += A^T B for A[depth x rows] and B[depth x columns], both row-major: the sums
// over query rows in dV += P^T dO and dK += dS^T Q. The twin of multiply_f32().
struct TransposedArguments {
  const float* a;
  int64 a_stride;
  const float* b;
  int64 b_stride;
  int64 depth;
  float* c;
  int64 c_stride;
};

template <int rows, int vectors>
HWY_NOINLINE void multiply_transposed(const TransposedArguments& arguments) {
  const FloatTag d;
  const float* HWY_RESTRICT a = arguments.a;
  const float* HWY_RESTRICT b = arguments.b;
  const int64 a_stride = arguments.a_stride;
  const int64 b_stride = arguments.b_stride;
  FloatVec sum[rows][vectors];
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sum[r][v] = hn::Zero(d);
      __builtin_prefetch(arguments.c + r * arguments.c_stride + v * lanes, 1);
    }
  }
  for (int64 i = 0; i < arguments.depth; ++i, a += a_stride, b += b_stride) {
    FloatVec column[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) column[v] = hn::Load(d, b + v * lanes);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const FloatVec left = hn::Set(d, a[r]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[r][v] = hn::MulAdd(left, column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      float* c = arguments.c + r * arguments.c_stride + v * lanes;
      hn::Store(hn::Add(hn::Load(d, c), sum[r][v]), d, c);
    }
  }
}

using TransposedKernel = void (*)(const TransposedArguments&);
using TransposedKernels = std::array<std::array<TransposedKernel, panel_vectors>, kernel_rows>;

template <int rows, int... vector>
constexpr std::array<TransposedKernel, panel_vectors> transposed_kernels_of_rows(
    std::integer_sequence<int, vector...>) {
  return {multiply_transposed<rows, vector + 1>...};
}

template <int... row>
constexpr TransposedKernels transposed_kernels(std::integer_sequence<int, row...>) {
  return {transposed_kernels_of_rows<row + 1>(std::make_integer_sequence<int, panel_vectors>())...};
}

// Products a[r] b[r] of four pairs of rows, each summed in the order of multiply_f32(): where a row
// sees one key alone, delta is dP to the bit, and dS exactly zero.
HWY_INLINE void dot_four_rows(const float* const* a, const float* const* b, int64 count,
                              float* products) {
  const hn::CappedTag<float, 1> d1;
  auto sum0 = hn::Zero(d1);
  auto sum1 = hn::Zero(d1);
  auto sum2 = hn::Zero(d1);
  auto sum3 = hn::Zero(d1);
  const auto at = [&](const float* row, int64 i) HWY_ATTR { return hn::Set(d1, row[i]); };
  for (int64 i = 0; i < count; ++i) {
    sum0 = hn::MulAdd(at(a[0], i), at(b[0], i), sum0);
    sum1 = hn::MulAdd(at(a[1], i), at(b[1], i), sum1);
    sum2 = hn::MulAdd(at(a[2], i), at(b[2], i), sum2);
    sum3 = hn::MulAdd(at(a[3], i), at(b[3], i), sum3);
  }
  products[0] = hn::GetLane(sum0);
  products[1] = hn::GetLane(sum1);
  products[2] = hn::GetLane(sum2);
  products[3] = hn::GetLane(sum3);
}

// to[i] += factor * from[i] over whole vectors.
HWY_INLINE void add_scaled_row(float* HWY_RESTRICT to, float factor, const float* HWY_RESTRICT from,
                               int64 columns) {
  const FloatTag d;
  const FloatVec f = hn::Set(d, factor);
  for (int64 i = 0; i < columns; i += lanes) {
    hn::Store(hn::MulAdd(f, hn::Load(d, from + i), hn::Load(d, to + i)), d, to + i);
  }
}

// True if any of count floats, whole vectors, is an infinity or NaN.
HWY_INLINE bool has_nonfinite(const float* values, int64 count) {
  return Float32Products::has_nonfinite(values, count);
}

class BackwardRows {
 public:
  BackwardRows(const core::Problem& problem, const core::Gradients& gradients,
               const BackwardConfig& config, const BackwardItem& item,
               const BackwardScratch& scratch, const BackwardShared& shared)
      : p_(problem),
        g_(gradients),
        config_(config),
        item_(item),
        scratch_(scratch),
        shared_(shared),
        sequence_(core::sequence_at(problem, item.batch)),
        group_(problem.group_size()),
        rows_(sequence_.length_q * group_),
        first_row_(first_row(problem, sequence_, item.head_kv)) {}

  // All heads of the queries that are this item's to prepare, four queries at a time: heads of one
  // query often lie side by side.
  void prepare() const {
    const int64 parts = int64{p_.heads_kv} * config_.splits;
    const core::RowBlock own =
        core::row_block(sequence_.length_q, parts, item_.head_kv * config_.splits + item_.split);
    for (int64 query = own.begin; query < own.end; query += 4) {
      const int64 count = core::min64(4, own.end - query);
      for (core::int32 head = 0; head < p_.heads_q; ++head) prepare_rows(query, count, head);
    }
  }

  void finish() const {
    const core::RowBlock own = core::row_block(rows_, config_.splits, item_.split);
    float* sum = scratch_.staging;
    const int64 columns = padded_columns(p_.head_dim);
    for (int64 r = own.begin; r < own.end; ++r) {
      prefetch_query(g_.dq, p_.head_dim, r + rows_ahead);
      std::memset(sum, 0, static_cast<std::size_t>(columns) * sizeof(float));
      for (int64 split = 0; split < config_.splits; ++split) {
        add_scaled_row(sum, 1.0f, dq_row(split, r), columns);
      }
      scale_row(sum, 0, columns, p_.softmax_scale);
      store_row(sum, p_.head_dim, g_.dq, offset(g_.dq, r));
    }
  }

 protected:
  core::PackedRow packed(int64 row) const { return core::packed_row(row, group_, item_.head_kv); }
  int64 query(int64 row) const { return row / group_; }

  int64 offset(const core::View& view, int64 row) const {
    const core::PackedRow at = packed(row);
    return view.offset(sequence_.batch_q, sequence_.row_q + at.query, at.head);
  }

  void prefetch_query(const core::View& view, int64 columns, int64 row) const {
    if (row < rows_) prefetch_row(view, offset(view, row), columns);
  }

  float* queries(int64 row) const {
    return shared_.queries + (first_row_ + row) * shared_.query_stride;
  }
  float* douts(int64 row) const { return shared_.douts + (first_row_ + row) * shared_.dout_stride; }
  float* dq_row(int64 split, int64 row) const {
    return shared_.dq + (split * shared_.rows + first_row_ + row) * shared_.dq_stride;
  }

  const core::Problem& p_;
  const core::Gradients& g_;
  const BackwardConfig& config_;
  const BackwardItem& item_;
  const BackwardScratch& scratch_;
  const BackwardShared& shared_;
  const core::Sequence sequence_;
  const core::int32 group_;
  const int64 rows_;
  const int64 first_row_;

 private:
  // Brings q and dout of up to four queries of a head into fp32 and finds lse and delta.
  void prepare_rows(int64 first_query, int64 count, core::int32 head) const {
    const int64 columns_v = padded_columns(p_.head_dim_v);
    const int64 row =
        first_row(p_, sequence_, head / group_) + first_query * group_ + head % group_;
    const float* douts[4];
    const float* outs[4];
    for (int64 i = 0; i < 4; ++i) {
      const int64 loaded = core::min64(i, count - 1);
      float* out = scratch_.staging + loaded * columns_v;
      float* dout = shared_.douts + (row + loaded * group_) * shared_.dout_stride;
      outs[i] = out;
      douts[i] = dout;
      if (loaded < i) continue;
      const int64 query = first_query + i;
      load_padded(p_.q, p_.head_dim, query, head,
                  shared_.queries + (row + i * group_) * shared_.query_stride);
      load_padded(g_.dout, p_.head_dim_v, query, head, dout);
      load_padded(p_.out, p_.head_dim_v, query, head, out);
    }
    float products[4];
    dot_four_rows(douts, outs, p_.head_dim_v, products);
    for (int64 i = 0; i < count; ++i) {
      const auto of_row = [&](const core::View& view) {
        return static_cast<const float*>(
            view.data)[view.offset(sequence_.batch_q, head, sequence_.row_q + first_query + i)];
      };
      const float lse = of_row(p_.lse);
      const bool has_gradient = g_.dlse && lse != -core::infinity;
      shared_.lse[row + i * group_] = lse;
      shared_.delta[row + i * group_] = has_gradient ? products[i] - of_row(g_.dlse) : products[i];
    }
  }

  // Loads a row and asks for that of the head's next four queries.
  void load_padded(const core::View& view, int64 columns, int64 query, core::int32 head,
                   float* to) const {
    const auto at = [&](int64 of_query) {
      return view.offset(sequence_.batch_q, sequence_.row_q + of_query, head);
    };
    if (query + 4 < sequence_.length_q) prefetch_row(view, at(query + 4), columns);
    load_row(view, at(query), view.stride[3], columns, to);
    fill_row(to, columns, padded_columns(columns), 0.0f);
  }
};

// Rows of floats to be asked for, a share before each call of a product's kernel: the exponentials
// are too short a time to ask for all, and products then still waited for them.
struct RowsAhead {
  const float* from = nullptr;
  int64 stride = 0;
  int64 columns = 0;
  int64 rows = 0;

  void ask(int64 call, int64 calls) const {
    const core::RowBlock share = core::row_block(rows, calls, call);
    for (int64 r = share.begin; r < share.end; ++r) {
      for (int64 i = 0; i < columns; i += 16) __builtin_prefetch(from + r * stride + i, 0, 2);
    }
  }
};

template <int exp2_degree>
class BackwardBlocks : BackwardRows {
 public:
  BackwardBlocks(const core::Problem& problem, const core::Gradients& gradients,
                 const BackwardConfig& config, const BackwardItem& item,
                 const BackwardScratch& scratch, const BackwardShared& shared)
      : BackwardRows(problem, gradients, config, item, scratch, shared),
        modifies_(modifies_scores(problem)),
        plain_(!modifies_ && problem.dropout.probability == 0.0f && !shared.dbias),
        scale_log2_((modifies_ ? 1.0f : problem.softmax_scale) * core::log2_e) {}

  void run() {
    std::memset(dq_row(item_.split, 0), 0,
                static_cast<std::size_t>(rows_ * shared_.dq_stride) * sizeof(float));
    const int64 blocks = core::ceil_div(sequence_.length_k, config_.block_k);
    for (int64 block = item_.split; block < blocks; block += config_.splits) run_block(block);
  }

 private:
  int64 row_blocks() const { return core::ceil_div(strip_.end - strip_.begin, kernel_rows); }
  core::RowBlock row_block(int64 index) const {
    const core::RowBlock block = core::row_block(strip_.end - strip_.begin, row_blocks(), index);
    return {strip_.begin + block.begin, strip_.begin + block.end};
  }
  float* weights(int64 row) const {
    return scratch_.weights + (row - strip_.begin) * scratch_.score_stride;
  }
  float* dscores(int64 row) const {
    return scratch_.dscores + (row - strip_.begin) * scratch_.score_stride;
  }
  int64 columns() const { return padded_columns(p_.head_dim); }
  int64 columns_v() const { return padded_columns(p_.head_dim_v); }

  void run_block(int64 block) {
    first_key_ = block * config_.block_k;
    count_ = core::min64(config_.block_k, sequence_.length_k - first_key_);
    const KeyRows keys{p_, p_.k, sequence_, item_.batch, item_.head_kv};
    const KeyRows values{p_, p_.v, sequence_, item_.batch, item_.head_kv};
    const KeyPart whole{first_key_, count_, 0, count_};
    Float32Products::pack_keys(keys, whole, p_.head_dim, scratch_.staging,
                               scratch_.transposed_keys);
    Float32Products::pack_keys(values, whole, p_.head_dim_v, scratch_.staging,
                               scratch_.transposed_values);
    Float32Products::pack_values(keys, whole, p_.head_dim, scratch_.staging, scratch_.keys);
    nonfinite_keys_ = has_nonfinite(scratch_.keys, count_ * columns());
    const auto clear = [this](float* rows, int64 stride) {
      std::memset(rows, 0, static_cast<std::size_t>(count_ * stride) * sizeof(float));
    };
    clear(scratch_.dkeys, scratch_.dkey_stride);
    clear(scratch_.dvalues, scratch_.dvalue_stride);
    for (int64 begin = 0; begin < rows_; begin += config_.strip_q) {
      strip_ = {begin, core::min64(begin + config_.strip_q, rows_)};
      run_strip();
    }
    for (int64 key = 0; key < count_; ++key) {
      float* dkey = scratch_.dkeys + key * scratch_.dkey_stride;
      scale_row(dkey, 0, columns(), p_.softmax_scale);
      const int64 row = sequence_.row_k + first_key_ + key;
      const auto at = [&](const core::View& view, int64 ahead) {
        return view.offset(sequence_.batch_k, row + ahead, item_.head_kv);
      };
      if (key + rows_ahead < count_) {
        prefetch_row(g_.dk, at(g_.dk, rows_ahead), p_.head_dim);
        prefetch_row(g_.dv, at(g_.dv, rows_ahead), p_.head_dim_v);
      }
      store_row(dkey, p_.head_dim, g_.dk, at(g_.dk, 0));
      store_row(scratch_.dvalues + key * scratch_.dvalue_stride, p_.head_dim_v, g_.dv,
                at(g_.dv, 0));
    }
  }

  void run_strip() {
    hides_ = find_visible();
    if (!any_visible_) return;
    const float* q = queries(strip_.begin);
    const float* dout = douts(strip_.begin);
    const int64 rows = strip_.end - strip_.begin;
    const RowsAhead dq{dq_row(item_.split, strip_.begin), shared_.dq_stride, columns(), rows};
    multiply_scores(q, shared_.query_stride, p_.head_dim, scratch_.transposed_keys,
                    scratch_.weights, dq);
    multiply_scores(dout, shared_.dout_stride, p_.head_dim_v, scratch_.transposed_values,
                    scratch_.dscores, {});
    for (int64 b = 0; b < row_blocks(); ++b) {
      const core::RowBlock block = scratch_.visible[b].rows;
      for (int64 r = block.begin; r < block.end; ++r) find_gradients(r, scratch_.visible[b]);
    }
    // A weight of zero must not meet an infinity or NaN that its row or key does not see.
    if (hides_ && (nonfinite_keys_ || nonfinite_rows())) {
      add_selectively();
      return;
    }
    const int64 next = strip_.end < rows_ ? strip_.end : 0;
    const int64 next_count = core::min64(config_.strip_q, rows_ - next);
    multiply_transposed_by(scratch_.weights, dout, shared_.dout_stride, columns_v(),
                           scratch_.dvalues, scratch_.dvalue_stride,
                           {queries(next), shared_.query_stride, columns(), next_count});
    multiply_transposed_by(scratch_.dscores, q, shared_.query_stride, columns(), scratch_.dkeys,
                           scratch_.dkey_stride,
                           {douts(next), shared_.dout_stride, columns_v(), next_count});
    multiply_keys();
  }

  // Fills scratch.visible with each row block's keys; true if any row does not see all.
  bool find_visible() {
    bool hides = modifies_ && (p_.mask || p_.bias);
    any_visible_ = false;
    for (int64 b = 0; b < row_blocks(); ++b) {
      const core::RowBlock rows = row_block(b);
      const int64 q_begin = query(rows.begin);
      const int64 q_end = query(rows.end - 1) + 1;
      const core::KeyRange any =
          core::union_range(p_.window, sequence_.length_q, sequence_.length_k, q_begin, q_end);
      const int64 begin = core::max64(0, any.begin - first_key_);
      const int64 end = core::min64(count_, any.end - first_key_);
      VisibleKeys seen;
      seen.rows = rows;
      if (begin < end) {
        any_visible_ = true;
        seen.keys = {begin / lanes * lanes, core::round_up(end, lanes)};
        const core::KeyRange all =
            core::common_range(p_.window, sequence_.length_q, sequence_.length_k, q_begin, q_end);
        seen.full = all.begin <= first_key_ && all.end >= first_key_ + count_;
      }
      hides = hides || !seen.full;
      scratch_.visible[b] = seen;
    }
    return hides;
  }

  // C = A B for the row blocks and panels of keys that see each other.
  void multiply_scores(const float* a, int64 a_stride, int64 depth, const float* panels, float* c,
                       const RowsAhead& ahead) const {
    const int64 calls = core::ceil_div(count_, panel_width) * row_blocks();
    for (int64 key = 0; key < count_; key += panel_width) {
      for (int64 b = 0; b < row_blocks(); ++b) {
        ahead.ask(key / panel_width * row_blocks() + b, calls);
        const core::KeyRange seen = scratch_.visible[b].keys;
        if (seen.begin >= key + panel_width || seen.end <= key) continue;
        const core::RowBlock rows = scratch_.visible[b].rows;
        const int64 row = rows.begin - strip_.begin;
        Float32Products::multiply<false>(rows.end - rows.begin, panel_vectors,
                                         {.a = a + row * a_stride,
                                          .a_stride = a_stride,
                                          .panel = panels + key * depth,
                                          .depth = depth,
                                          .c = c + row * scratch_.score_stride + key,
                                          .c_stride = scratch_.score_stride,
                                          .accumulate = false});
      }
    }
  }

  void find_gradients(int64 row, const VisibleKeys& visible) const {
    const bool whole = visible.full && visible.keys.end == count_;
    if (plain_ && whole && shared_.lse[first_row_ + row] != -core::infinity) {
      find_plain_gradients(row);
    } else {
      find_score_gradients(row, visible);
    }
  }

  // Row S, dP -> P, dS where there are whole vectors of keys, and nothing to hide, drop or bend. A
  // score of -infinity has a weight of zero, and a gradient of zero whatever dP is.
  void find_plain_gradients(int64 row) const {
    const FloatTag d;
    float* HWY_RESTRICT p = weights(row);
    float* HWY_RESTRICT ds = dscores(row);
    const FloatVec hidden = hn::Set(d, -core::infinity);
    const FloatVec unit = hn::Set(d, scale_log2_);
    const FloatVec reference = hn::Set(d, shared_.lse[first_row_ + row] * core::log2_e);
    const FloatVec delta = hn::Set(d, shared_.delta[first_row_ + row]);
    for (int64 i = 0; i < count_; i += lanes) {
      const FloatVec score = hn::Load(d, p + i);
      const FloatVec weight = exp2_vector<exp2_degree>(hn::MulSub(score, unit, reference));
      const FloatVec dscore = hn::Mul(weight, hn::Sub(hn::Load(d, ds + i), delta));
      hn::Store(weight, d, p + i);
      hn::Store(hn::IfThenZeroElse(hn::Eq(score, hidden), dscore), d, ds + i);
    }
  }

  // Row S, dP -> P (with dropout), dS (with the softcap's slope). Hidden elements, and those beyond
  // what the row block sees, become zero, whatever they were.
  void find_score_gradients(int64 row, const VisibleKeys& visible) const {
    const FloatTag d;
    float* HWY_RESTRICT p = weights(row);
    float* HWY_RESTRICT ds = dscores(row);
    const int64 begin = visible.keys.begin;
    const int64 end = visible.keys.end;
    const float lse = shared_.lse[first_row_ + row];
    const int64 width = core::round_up(count_, lanes);
    const bool seen = !visible.keys.empty() && lse != -core::infinity;
    fill_row(p, 0, seen ? begin : width, 0.0f);
    fill_row(ds, 0, seen ? begin : width, 0.0f);
    if (!seen) return;
    fill_row(p, end, width, 0.0f);
    fill_row(ds, end, width, 0.0f);

    if (!visible.full || count_ != end || modifies_) prepare_scores(row, begin, end, p);
    const float* kept = p_.dropout.probability > 0.0f ? kept_row(row, begin, end) : nullptr;
    const float* slopes = p_.softcap != 0.0f ? scratch_.slopes : nullptr;
    const FloatVec hidden = hn::Set(d, -core::infinity);
    const FloatVec unit = hn::Set(d, scale_log2_);
    const FloatVec reference = hn::Set(d, lse * core::log2_e);
    const FloatVec delta = hn::Set(d, shared_.delta[first_row_ + row]);
    for (int64 i = begin; i < end; i += lanes) {
      const FloatVec score = hn::Load(d, p + i);
      const auto is_hidden = hn::Eq(score, hidden);
      FloatVec weight = exp2_vector<exp2_degree>(hn::MulSub(score, unit, reference));
      FloatVec dweight = hn::Load(d, ds + i);
      FloatVec dropped = weight;
      if (kept != nullptr) {
        dropped = hn::Mul(weight, hn::Load(d, kept + i));
        dweight = hn::Mul(dweight, hn::Load(d, kept + i));
      }
      const FloatVec dscore = hn::Mul(weight, hn::Sub(dweight, delta));
      hn::Store(hn::IfThenZeroElse(is_hidden, dropped), d, p + i);
      hn::Store(hn::IfThenZeroElse(is_hidden, dscore), d, ds + i);
    }
    if (shared_.dbias) add_bias_gradient(row, begin, core::min64(end, count_), ds);
    if (slopes == nullptr) return;
    for (int64 i = begin; i < end; i += lanes) {
      const FloatVec dscore = hn::Load(d, ds + i);
      const FloatVec bent = hn::Mul(dscore, hn::Load(d, slopes + i));
      // The slope of a hidden element may be NaN.
      hn::Store(hn::IfThenZeroElse(hn::Eq(dscore, hn::Zero(d)), bent), d, ds + i);
    }
  }

  ScoreRow score_row(int64 row) const {
    const core::PackedRow at = packed(row);
    return {p_, item_.batch, at.head, at.query, sequence_.length_q, sequence_.length_k};
  }

  // Modifies the visible scores and hides the others; fills scratch.slopes if there is a softcap.
  void prepare_scores(int64 row, int64 begin, int64 end, float* scores) const {
    const FloatTag d;
    const core::KeyRange seen =
        core::key_range(p_.window, sequence_.length_q, sequence_.length_k, query(row));
    const int64 last = core::min64(end, count_);
    const int64 visible_begin = core::min64(last, core::max64(begin, seen.begin - first_key_));
    const int64 visible_end = core::max64(visible_begin, core::min64(last, seen.end - first_key_));
    if (p_.softcap != 0.0f) {
      const FloatVec inner = hn::Set(d, p_.softmax_scale / p_.softcap);
      for (int64 i = begin; i < end; i += lanes) {
        const FloatVec bent = tanh_vector(hn::Mul(hn::Load(d, scores + i), inner));
        hn::Store(hn::NegMulAdd(bent, bent, hn::Set(d, 1.0f)), d, scratch_.slopes + i);
      }
    }
    if (modifies_) modify_scores(score_row(row), first_key_, visible_begin, visible_end, scores);
    fill_row(scores, begin, visible_begin, -core::infinity);
    fill_row(scores, visible_end, end, -core::infinity);
  }

  // The dropout mask over its keep probability.
  const float* kept_row(int64 row, int64 begin, int64 end) const {
    const int64 last = core::min64(end, count_);
    fill_row(scratch_.kept, begin, last, 1.0f / (1.0f - p_.dropout.probability));
    fill_row(scratch_.kept, last, end, 0.0f);
    drop_weights(score_row(row), first_key_, begin, last, scratch_.kept);
    return scratch_.kept;
  }

  void add_bias_gradient(int64 row, int64 begin, int64 end, const float* ds) const {
    const core::PackedRow at = packed(row);
    const core::View& view = shared_.dbias;
    auto* sum =
        static_cast<float*>(view.data) + view.offset(item_.batch, at.head, at.query, first_key_);
    for (int64 i = begin; i < end; ++i) sum[i * view.stride[3]] += ds[i];
  }

  // Rows of the strip that meet keys [begin, end) of the block: a range, whose other rows hold
  // zeros there.
  core::RowBlock rows_that_see(int64 begin, int64 end) const {
    if (!hides_) return strip_;
    core::RowBlock rows{strip_.end, strip_.begin};
    for (int64 b = 0; b < row_blocks(); ++b) {
      const core::KeyRange seen = scratch_.visible[b].keys;
      if (seen.empty() || seen.begin >= end || seen.end <= begin) continue;
      const core::RowBlock block = scratch_.visible[b].rows;
      rows = {core::min64(rows.begin, block.begin), core::max64(rows.end, block.end)};
    }
    return rows;
  }

  // C[keys x columns] += A^T B, A the weights or the gradients of the scores.
  void multiply_transposed_by(const float* a, const float* b, int64 b_stride, int64 b_columns,
                              float* c, int64 c_stride, const RowsAhead& ahead) const {
    static constexpr auto kernels =
        transposed_kernels(std::make_integer_sequence<int, kernel_rows>());
    const int64 key_blocks = core::ceil_div(count_, kernel_rows);
    const int64 calls = core::ceil_div(b_columns, panel_width) * key_blocks;
    for (int64 column = 0; column < b_columns; column += panel_width) {
      const int64 vectors = core::min64(panel_width, b_columns - column) / lanes;
      for (int64 block = 0; block < key_blocks; ++block) {
        ahead.ask(column / panel_width * key_blocks + block, calls);
        const core::RowBlock keys = core::row_block(count_, key_blocks, block);
        const core::RowBlock rows = rows_that_see(keys.begin, keys.end);
        if (rows.begin >= rows.end) continue;
        const int64 row = rows.begin - strip_.begin;
        kernels[static_cast<std::size_t>(keys.end - keys.begin - 1)][static_cast<std::size_t>(
            vectors - 1)]({.a = a + row * scratch_.score_stride + keys.begin,
                           .a_stride = scratch_.score_stride,
                           .b = b + row * b_stride + column,
                           .b_stride = b_stride,
                           .depth = rows.end - rows.begin,
                           .c = c + keys.begin * c_stride + column,
                           .c_stride = c_stride});
      }
    }
  }

  // dQ += dS K.
  void multiply_keys() const {
    for (int64 column = 0; column < columns(); column += panel_width) {
      const int64 width = core::min64(panel_width, columns() - column);
      for (int64 b = 0; b < row_blocks(); ++b) {
        const core::KeyRange seen = scratch_.visible[b].keys;
        if (seen.empty()) continue;
        const core::RowBlock rows = scratch_.visible[b].rows;
        for (int64 r = rows.begin; r < rows.end; ++r) {
          const float* dq = dq_row(item_.split, r) + column;
          for (int64 i = 0; i < width; i += 16) __builtin_prefetch(dq + i, 0, 3);
        }
        Float32Products::multiply<false>(
            rows.end - rows.begin, width / lanes,
            {.a = dscores(rows.begin) + seen.begin,
             .a_stride = scratch_.score_stride,
             .panel = scratch_.keys + column * count_ + seen.begin * width,
             .depth = core::min64(count_, seen.end) - seen.begin,
             .c = dq_row(item_.split, rows.begin) + column,
             .c_stride = shared_.dq_stride,
             .accumulate = true});
      }
    }
  }

  bool nonfinite_rows() const {
    for (int64 r = strip_.begin; r < strip_.end; ++r) {
      if (has_nonfinite(queries(r), columns()) || has_nonfinite(douts(r), columns_v())) return true;
    }
    return false;
  }

  // The last three products, element by element, without those of weight zero.
  void add_selectively() const {
    const KeyRows keys{p_, p_.k, sequence_, item_.batch, item_.head_kv};
    for (int64 key = 0; key < count_; ++key) {
      float* key_row = scratch_.staging;
      load_row(p_.k, keys.offset(first_key_ + key), p_.k.stride[3], p_.head_dim, key_row);
      fill_row(key_row, p_.head_dim, columns(), 0.0f);
      for (int64 r = strip_.begin; r < strip_.end; ++r) {
        const float weight = weights(r)[key];
        const float ds = dscores(r)[key];
        if (weight != 0.0f) {
          add_scaled_row(scratch_.dvalues + key * scratch_.dvalue_stride, weight, douts(r),
                         columns_v());
        }
        if (ds == 0.0f) continue;
        add_scaled_row(scratch_.dkeys + key * scratch_.dkey_stride, ds, queries(r), columns());
        add_scaled_row(dq_row(item_.split, r), ds, key_row, columns());
      }
    }
  }

  const bool modifies_;
  const bool plain_;  // scores are taken as they are, and so are weights
  const float scale_log2_;
  int64 first_key_ = 0;  // of the block
  int64 count_ = 0;      // keys in the block
  core::RowBlock strip_{0, 0};
  bool any_visible_ = false;  // to a row of the strip
  bool hides_ = false;        // a row of the strip sees less than the block
  bool nonfinite_keys_ = false;
};

inline void run_prepare_rows(const core::Problem& problem, const core::Gradients& gradients,
                             const BackwardConfig& config, const BackwardItem& item,
                             const BackwardScratch& scratch, const BackwardShared& shared) {
  BackwardRows(problem, gradients, config, item, scratch, shared).prepare();
}

// The exponential is as precise as the dtype needs, as in the forward pass.
inline void run_backward_item(const core::Problem& problem, const core::Gradients& gradients,
                              const BackwardConfig& config, const BackwardItem& item,
                              const BackwardScratch& scratch, const BackwardShared& shared) {
  if (problem.q.dtype == core::DType::f32) {
    return BackwardBlocks<6>(problem, gradients, config, item, scratch, shared).run();
  }
  BackwardBlocks<4>(problem, gradients, config, item, scratch, shared).run();
}

inline void run_finish_rows(const core::Problem& problem, const core::Gradients& gradients,
                            const BackwardConfig& config, const BackwardItem& item,
                            const BackwardScratch& scratch, const BackwardShared& shared) {
  BackwardRows(problem, gradients, config, item, scratch, shared).finish();
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
