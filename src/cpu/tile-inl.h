// The tile itself (see forward_tile.cpp). Included once per instruction set.

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

// What packed and streamed tiles share: the rows, their softmax, and the way out.
template <int exp2_degree>
class TileRows {
 public:
  TileRows(const core::Problem& problem, const ForwardConfig& config, const core::Tile& tile,
           const TileScratch& scratch, ForwardStatistics& statistics)
      : p_(problem),
        config_(config),
        tile_(tile),
        scratch_(scratch),
        statistics_(statistics),
        sequence_(core::sequence_at(problem, tile.batch)),
        group_(problem.group_size()),
        rows_per_head_(tile.row_end - tile.row_begin),
        rows_(rows_per_head_ * tile.head_count),
        modifies_(modifies_scores(problem)),
        score_unit_(modifies_ ? 1.0f : problem.softmax_scale),
        scale_log2_(score_unit_ * core::log2_e) {}

  // Keys of this tile's split that any of its rows sees.
  core::KeyRange keys() const {
    const core::KeyRange all = union_range(0, rows_per_head_);
    return core::split_range(all, config_.splits, tile_.split, config_.block_k);
  }

 protected:
  // Rows of the tile are those of its first KV head, then of the next.
  core::int32 head_kv(int64 row) const {
    return tile_.head_kv + static_cast<core::int32>(row / rows_per_head_);
  }
  core::PackedRow packed(int64 row) const {
    return core::packed_row(tile_.row_begin + row % rows_per_head_, group_, head_kv(row));
  }
  int64 query(int64 row) const { return (tile_.row_begin + row % rows_per_head_) / group_; }

  // Of rows of one head.
  core::KeyRange union_range(int64 row_begin, int64 row_end) const {
    return core::union_range(p_.window, sequence_.length_q, sequence_.length_k, query(row_begin),
                             query(row_end - 1) + 1);
  }

  KeyRows key_rows(const core::View& view, int64 head) const {
    return {p_, view, sequence_, tile_.batch, head};
  }

  RowMemory memory(int64 row) const {
    return {scores(row), scratch_.sums + row * max_lanes, scratch_.reference + row,
            scratch_.out + row * scratch_.out_stride, padded_columns(p_.head_dim_v)};
  }

  float* scores(int64 row) const {
    return scratch_.scores + (row - strip_begin_) * scratch_.score_stride;
  }

  void start_rows() const {
    const auto bytes = [](int64 count) { return static_cast<std::size_t>(count) * sizeof(float); };
    std::memset(scratch_.sums, 0, bytes(rows_ * max_lanes));
    std::memset(scratch_.out, 0, bytes(rows_ * scratch_.out_stride));
    for (int64 r = 0; r < rows_; ++r) scratch_.reference[r] = -core::infinity;
  }

  // Turns the scores [begin, end) of a row into weights. Bounds are on vectors, relative to
  // first_key; there are count keys, all visible if full. recompute(row) puts the raw products back
  // when the guard spent them.
  template <class Recompute>
  void softmax_row(int64 row, int64 first_key, int64 begin, int64 end, int64 count, bool full,
                   const Recompute& recompute) const {
    const RowMemory m = memory(row);
    const bool prepared = full && count == end && !modifies_;
    if (!prepared) prepare_scores(row, first_key, begin, end, count, m.scores);
    const bool guard = config_.softmax == core::SoftmaxPolicy::sum_guard;
    bool done = false;
    if (guard && *m.reference > -core::infinity) {
      done = softmax_step_with_guard<exp2_degree>(m, begin, end, scale_log2_, statistics_) ==
             GuardOutcome::done;
      if (!done) {
        ++statistics_.recomputed_tiles;
        recompute(row);
        if (!prepared) prepare_scores(row, first_key, begin, end, count, m.scores);
      }
    }
    if (!done) {
      const float threshold =
          config_.softmax == core::SoftmaxPolicy::conditional ? core::rescale_threshold_log2 : 0.0f;
      softmax_step_with_maximum<exp2_degree>(m, begin, end, scale_log2_, threshold, statistics_);
    }
    if (p_.dropout.probability > 0.0f)
      drop_weights(score_row(row), first_key, begin, core::min64(end, count), m.scores);
  }

  // Divides by the sums, folds the sink in, and stores the rows.
  void finish(const Partials& partials) const {
    const FloatTag d;
    const float keep = 1.0f / (1.0f - p_.dropout.probability);
    for (int64 r = 0; r < rows_; ++r) {
      const RowMemory m = memory(r);
      const core::PackedRow at = packed(r);
      const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, m.sums)));
      float lse = core::row_lse({*m.reference * scale_log2_, sum});
      float factor = lse == -core::infinity ? 0.0f : keep / sum;
      if (partials.out != nullptr) {
        const int64 index =
            partial_row(p_, sequence_, at.query, at.head) * config_.splits + tile_.split;
        scale_row(m.out, 0, m.out_columns, factor);
        std::memcpy(partials.out + index * partials.out_columns, m.out,
                    static_cast<std::size_t>(m.out_columns) * sizeof(float));
        partials.lse[index] = lse;
        continue;
      }
      if (p_.sink) {
        const core::Merge merged = core::merge_parts(lse, sink(at.head));
        factor *= merged.weight_a;
        lse = merged.lse;
      }
      if (factor != 0.0f) {
        scale_row(m.out, 0, m.out_columns, factor);
      } else {
        fill_row(m.out, 0, m.out_columns, 0.0f);
      }
      store_row(m.out, p_.head_dim_v, p_.out,
                p_.out.offset(sequence_.batch_q, sequence_.row_q + at.query, at.head));
      if (p_.lse) {
        static_cast<float*>(
            p_.lse.data)[p_.lse.offset(sequence_.batch_q, at.head, sequence_.row_q + at.query)] =
            lse;
      }
    }
  }

  float sink(int32_t head) const {
    return static_cast<const float*>(p_.sink.data)[head * p_.sink.stride[0]];
  }

  // O += P V for weights [begin, end) of one row, skipping keys of weight zero: for blocks where V
  // holds infinities or NaN and some rows must not meet them.
  void add_values_selectively(int64 row, int64 first_key, int64 begin, int64 end) const {
    const FloatTag d;
    const RowMemory m = memory(row);
    const KeyRows rows = key_rows(p_.v, head_kv(row));
    float* values = scratch_.staging;
    fill_row(values, p_.head_dim_v, m.out_columns, 0.0f);
    for (int64 key = begin; key < end; ++key) {
      const float weight = m.scores[key];
      if (weight == 0.0f) continue;
      load_row(p_.v, rows.offset(first_key + key), p_.v.stride[3], p_.head_dim_v, values);
      for (int64 i = 0; i < m.out_columns; i += lanes) {
        const FloatVec sum =
            hn::MulAdd(hn::Set(d, weight), hn::Load(d, values + i), hn::Load(d, m.out + i));
        hn::Store(sum, d, m.out + i);
      }
    }
  }

  // True if any of rows [begin, begin + count) of a head of V holds an infinity or NaN.
  bool has_nonfinite_values(int64 head, int64 begin, int64 count) const {
    const FloatTag d;
    const KeyRows rows = key_rows(p_.v, head);
    const int64 columns = padded_columns(p_.head_dim_v);
    float* staging = scratch_.staging;
    fill_row(staging, p_.head_dim_v, columns, 0.0f);
    FloatVec nonfinite = hn::Zero(d);
    for (int64 key = 0; key < count; ++key) {
      load_row(p_.v, rows.offset(begin + key), p_.v.stride[3], p_.head_dim_v, staging);
      for (int64 i = 0; i < columns; i += lanes) {
        const FloatVec x = hn::Load(d, staging + i);
        nonfinite = hn::Add(nonfinite, hn::Sub(x, x));
      }
    }
    return !hn::AllTrue(d, hn::Eq(nonfinite, hn::Zero(d)));
  }

  ScoreRow score_row(int64 row) const {
    const core::PackedRow at = packed(row);
    return {p_, tile_.batch, at.head, at.query, sequence_.length_q, sequence_.length_k};
  }

  const core::Problem& p_;
  const ForwardConfig& config_;
  const core::Tile& tile_;
  const TileScratch& scratch_;
  ForwardStatistics& statistics_;
  const core::Sequence sequence_;
  const core::int32 group_;
  const int64 rows_per_head_;
  const int64 rows_;
  const bool modifies_;
  const float score_unit_;  // of scores as the softmax sees them, in natural units
  const float scale_log2_;  // the same in log2 units
  int64 strip_begin_ = 0;   // first row whose scores are in scratch_.scores

 private:
  // Modifies the visible scores and hides the others.
  void prepare_scores(int64 row, int64 first_key, int64 begin, int64 end, int64 count,
                      float* scores) const {
    const core::KeyRange seen =
        core::key_range(p_.window, sequence_.length_q, sequence_.length_k, query(row));
    const int64 last = core::min64(end, count);
    const int64 visible_begin = core::min64(last, core::max64(begin, seen.begin - first_key));
    const int64 visible_end = core::max64(visible_begin, core::min64(last, seen.end - first_key));
    if (modifies_) modify_scores(score_row(row), first_key, visible_begin, visible_end, scores);
    fill_row(scores, begin, visible_begin, -core::infinity);
    fill_row(scores, visible_end, end, -core::infinity);
  }
};

template <class Products>
void pack(const KeyRows& keys, const KeyRows& values, const KeyPart& part, float* staging,
          float* packed_keys, float* packed_values) {
  using Element = typename Products::Element;
  Products::pack_keys(keys, part, keys.problem.head_dim, staging,
                      reinterpret_cast<Element*>(packed_keys));
  Products::pack_values(values, part, values.problem.head_dim_v, staging,
                        reinterpret_cast<Element*>(packed_values));
}

// A tile whose K and V are packed: many rows.
template <class Products, int exp2_degree>
class PackedTile : TileRows<exp2_degree> {
 public:
  using TileRows<exp2_degree>::TileRows;
  using Element = typename Products::Element;

  void run(const Packs& packs, const Partials& partials) {
    this->start_rows();
    load_queries();
    const core::KeyRange all = this->keys();
    const int64 block_k = this->config_.block_k;
    for (int64 block = all.begin / block_k; block * block_k < all.end; ++block) {
      run_block(packs, block);
    }
    this->finish(partials);
  }

 private:
  // The rows of the strip in blocks of at most kernel_rows.
  int64 row_blocks() const { return core::ceil_div(strip_end_ - this->strip_begin_, kernel_rows); }
  core::RowBlock row_block(int64 index) const {
    const core::RowBlock block =
        core::row_block(strip_end_ - this->strip_begin_, row_blocks(), index);
    return {this->strip_begin_ + block.begin, this->strip_begin_ + block.end};
  }

  void load_queries() const {
    const core::Problem& p = this->p_;
    const auto offset = [&](int64 row) {
      const core::PackedRow at = this->packed(row);
      return p.q.offset(this->sequence_.batch_q, this->sequence_.row_q + at.query, at.head);
    };
    for (int64 r = 0; r < this->rows_; ++r) {
      if (r + rows_ahead < this->rows_) prefetch_row(p.q, offset(r + rows_ahead), p.head_dim);
      Products::pack_query(
          p.q, offset(r), p.head_dim,
          reinterpret_cast<Element*>(this->scratch_.queries + r * this->scratch_.query_stride));
    }
  }

  void run_block(const Packs& packs, int64 block) {
    const core::Problem& p = this->p_;
    const ForwardConfig& c = this->config_;
    const int64 first_key = block * c.block_k;
    const int64 count = core::min64(c.block_k, this->sequence_.length_k - first_key);
    next_key_ = first_key + count;
    nonfinite_ = Answer::unknown;
    float* keys = this->scratch_.keys;
    float* values = this->scratch_.values;
    if (c.pack_slots > 0) {
      keys = packs.slots + (this->tile_.pack_slot + block) * Packs::slot_floats(p, c);
      values = keys + Packs::key_floats(p, c);
    } else {
      pack<Products>(this->key_rows(p.k, this->tile_.head_kv),
                     this->key_rows(p.v, this->tile_.head_kv), {first_key, count, 0, count},
                     this->scratch_.staging, keys, values);
    }
    const int64 strips = core::ceil_div(this->rows_, this->config_.strip_q);
    for (int64 strip = 0; strip < strips; ++strip) {
      const core::RowBlock rows = core::row_block(this->rows_, strips, strip);
      this->strip_begin_ = rows.begin;
      strip_end_ = rows.end;
      run_strip(first_key, count, reinterpret_cast<const Element*>(keys),
                reinterpret_cast<const Element*>(values));
    }
  }

  void run_strip(int64 first_key, int64 count, const Element* keys, const Element* values) {
    const bool partial = find_visible(first_key, count);
    multiply_queries(count, keys);
    for (int64 b = 0; b < row_blocks(); ++b) {
      const VisibleKeys& visible = this->scratch_.visible[b];
      const core::RowBlock rows = visible.rows;
      const core::KeyRange seen = visible.keys;
      if (seen.empty()) continue;
      for (int64 r = rows.begin; r < rows.end; ++r) {
        this->softmax_row(r, first_key, seen.begin, core::round_up(seen.end, lanes), count,
                          visible.full, [&](int64 row) { multiply_row(row, seen, keys); });
      }
    }
    if (partial && has_nonfinite(values, count)) {
      add_values_row_by_row(first_key);
    } else {
      for (int64 b = 0; b < row_blocks(); ++b) convert_weights(b);
      multiply_values(count, values);
    }
  }

  // Of the block's values; looked at once, and only where some row hides some of them.
  bool has_nonfinite(const Element* values, int64 count) {
    if (nonfinite_ == Answer::unknown) {
      const bool found = Products::has_nonfinite(values, packed_depth(count) * columns_of_values());
      nonfinite_ = found ? Answer::yes : Answer::no;
    }
    return nonfinite_ == Answer::yes;
  }

  // Fills scratch.visible with each row block's keys; true if any row sees less than all.
  bool find_visible(int64 first_key, int64 count) {
    bool partial = this->modifies_ && (this->p_.mask || this->p_.bias);
    for (int64 b = 0; b < row_blocks(); ++b) {
      const core::RowBlock rows = row_block(b);
      const core::KeyRange any = this->union_range(rows.begin, rows.end);
      const int64 begin = core::max64(0, any.begin - first_key);
      const int64 end = core::min64(count, any.end - first_key);
      VisibleKeys seen;
      seen.rows = rows;
      if (begin < end) {
        seen.keys = {begin / lanes * lanes, end};
        const core::KeyRange all =
            core::common_range(this->p_.window, this->sequence_.length_q, this->sequence_.length_k,
                               this->query(rows.begin), this->query(rows.end - 1) + 1);
        seen.full = all.begin <= first_key && all.end >= first_key + count;
        partial = partial || !seen.full;
        ++(seen.full ? this->statistics_.tiles_full : this->statistics_.tiles_partial);
      }
      this->scratch_.visible[b] = seen;
    }
    return partial;
  }

  int64 depth_of_queries() const {
    return core::ceil_div(this->p_.head_dim, Products::depth_multiple) * Products::depth_multiple;
  }

  static constexpr int64 elements_per_float = sizeof(float) / sizeof(Element);

  ProductArguments query_arguments(int64 row, const Element* panel, float* scores) const {
    const TileScratch& s = this->scratch_;
    return {.a = s.queries + row * s.query_stride,
            .a_stride = s.query_stride * elements_per_float,
            .panel = panel,
            .depth = depth_of_queries(),
            .c = scores,
            .c_stride = s.score_stride,
            .accumulate = false};
  }

  // Called beside each of the 2 * panels * row_blocks() products of a block: fetches the next
  // block's rows of one of K and V, spread evenly.
  void prefetch_next(const core::View& view, int64 columns, int64 product, int64 products) const {
    if (this->config_.pack_slots > 0) return;
    const KeyRows rows = this->key_rows(view, this->tile_.head_kv);
    const core::RowBlock share = core::row_block(this->config_.block_k, products, product);
    for (int64 i = share.begin; i < share.end; ++i) prefetch_key(rows, next_key_ + i, columns);
  }

  void multiply_queries(int64 count, const Element* keys) const {
    const TileScratch& s = this->scratch_;
    const int64 depth = depth_of_queries();
    const int64 products = core::ceil_div(count, panel_width) * row_blocks();
    int64 product = 0;
    for (int64 key = 0; key < count; key += panel_width) {
      for (int64 b = 0; b < row_blocks(); ++b) {
        prefetch_next(this->p_.k, this->p_.head_dim, product++, products);
        const core::KeyRange seen = s.visible[b].keys;
        if (seen.begin >= key + panel_width || seen.end <= key) continue;
        const core::RowBlock rows = s.visible[b].rows;
        const int64 vectors = core::ceil_div(core::min64(seen.end - key, panel_width), lanes);
        Products::template multiply<true>(
            rows.end - rows.begin, vectors,
            query_arguments(rows.begin, keys + key * depth, this->scores(rows.begin) + key));
      }
    }
  }

  // One row's products again, for the guard.
  void multiply_row(int64 row, core::KeyRange seen, const Element* keys) const {
    const int64 depth = depth_of_queries();
    for (int64 key = seen.begin / panel_width * panel_width; key < seen.end; key += panel_width) {
      Products::template multiply<true>(
          1, panel_vectors, query_arguments(row, keys + key * depth, this->scores(row) + key));
    }
  }

  void convert_weights(int64 b) const {
    const TileScratch& s = this->scratch_;
    const core::RowBlock rows = s.visible[b].rows;
    const core::KeyRange seen = s.visible[b].keys;
    for (int64 r = rows.begin; r < rows.end; ++r) {
      Products::convert_weights(this->scores(r), seen.begin, core::round_up(seen.end, lanes));
    }
  }

  static int64 packed_depth(int64 count) { return core::round_up(count, Products::depth_multiple); }
  int64 columns_of_values() const { return padded_columns(this->p_.head_dim_v); }

  void multiply_values(int64 count, const Element* values) const {
    const TileScratch& s = this->scratch_;
    const int64 depth = packed_depth(count);
    const int64 columns = columns_of_values();
    const int64 products = core::ceil_div(columns, panel_width) * row_blocks();
    int64 product = 0;
    for (int64 column = 0; column < columns; column += panel_width) {
      const int64 width = core::min64(panel_width, columns - column);
      for (int64 b = 0; b < row_blocks(); ++b) {
        prefetch_next(this->p_.v, this->p_.head_dim_v, product++, products);
        const core::KeyRange seen = s.visible[b].keys;
        if (seen.empty()) continue;
        const core::RowBlock rows = s.visible[b].rows;
        const auto* weights = reinterpret_cast<const Element*>(this->scores(rows.begin));
        Products::template multiply<false>(rows.end - rows.begin, width / lanes,
                                           {.a = weights + seen.begin,
                                            .a_stride = s.score_stride * elements_per_float,
                                            .panel = values + column * depth + seen.begin * width,
                                            .depth = packed_depth(seen.end) - seen.begin,
                                            .c = s.out + rows.begin * s.out_stride + column,
                                            .c_stride = s.out_stride,
                                            .accumulate = true});
      }
    }
  }

  enum class Answer { unknown, no, yes };
  Answer nonfinite_ = Answer::unknown;
  int64 next_key_ = 0;  // first key of the block after this one
  int64 strip_end_ = 0;

  void add_values_row_by_row(int64 first_key) const {
    for (int64 b = 0; b < row_blocks(); ++b) {
      const core::RowBlock rows = this->scratch_.visible[b].rows;
      const core::KeyRange seen = this->scratch_.visible[b].keys;
      for (int64 r = rows.begin; r < rows.end; ++r) {
        this->add_values_selectively(r, first_key, seen.begin, seen.end);
      }
    }
  }
};

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
