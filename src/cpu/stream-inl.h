// A tile of few rows (decode): K and V stream past once, in place, without being packed.
//
// What binds is memory: at 4 rows and head_dim 128 a key and its value are 1 KiB in fp32 and cost
// about 100 vector instructions. Scores are dot products along the rows of K, O += P V adds scaled
// rows of V, both for eight keys at a time.
//
// Included once per instruction set (see forward_tile.cpp).

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

// Vectors of fp32 from rows of each element type.
struct LoadF32 {
  using Element = float;
  static HWY_INLINE FloatVec load(const Element* from) { return hn::LoadU(FloatTag(), from); }
};

struct LoadBf16 {
  using Element = uint16;
  static HWY_INLINE FloatVec load(const Element* from) {
    const hn::Rebind<uint16, FloatTag> d16;
    const hn::Rebind<uint32, FloatTag> d32;
    return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
  }
};

struct LoadF16 {
  using Element = hwy::float16_t;
  static HWY_INLINE FloatVec load(const Element* from) {
    const hn::Rebind<hwy::float16_t, FloatTag> d16;
    return hn::PromoteTo(FloatTag(), hn::LoadU(d16, from));
  }
};

// to[0..3] = the sums over the lanes of a, b, c and e.
HWY_INLINE void store_lane_sums(FloatVec a, FloatVec b, FloatVec c, FloatVec e, float* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = hn::GetLane(a);
  to[1] = hn::GetLane(b);
  to[2] = hn::GetLane(c);
  to[3] = hn::GetLane(e);
#else
  const FloatTag d;
  const hn::Repartition<double, FloatTag> pairs;
  // Within each 128-bit block: a0+a2 b0+b2 a1+a3 b1+b3, then a b c e.
  const auto ab =
      hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  const auto ce =
      hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
  const FloatVec blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab, ce)),
                                  hn::BitCast(d, hn::InterleaveUpper(pairs, ab, ce)));
  const hn::Full128<float> quad;
  alignas(64) float lane[static_cast<std::size_t>(lanes)];
  hn::Store(blocks, d, lane);
  auto sum = hn::Load(quad, lane);
  for (int64 i = 4; i < lanes; i += 4) sum = hn::Add(sum, hn::Load(quad, lane + i));
  hn::StoreU(sum, quad, to);
#endif
}

// How many keys the products take in one call, and how many of them fit the registers together.
inline constexpr int keys_at_once = 8;
inline constexpr int keys_in_registers = 4;

// Rows of keys_at_once keys, of one head that lies `offset` elements behind the rows listed.
template <class Element>
struct RowsAtOnce {
  const void* const* first;
  int64 offset;

  HWY_INLINE const Element* operator[](int j) const {
    return static_cast<const Element*>(first[j]) + offset;
  }
};

// The two products of streamed rows in fp32, on rows that Load reads.
template <class Load>
struct Float32Stream {
  using Element = typename Load::Element;
  using Query = float;
  static constexpr int64 columns_multiple = lanes;

  // Rows are padded with zeros to whole vectors.
  static void load_query(const core::View& view, int64 offset, int64 columns, float* row) {
    load_row(view, offset, view.stride[3], columns, row);
    fill_row(row, columns, padded_columns(columns), 0.0f);
  }
  static void stage_row(const core::View& view, int64 offset, int64 columns, float* row) {
    load_query(view, offset, columns, row);
  }

  // scores[r][j] = queries[r] . keys[j]
  template <int rows>
  static HWY_INLINE void multiply(RowsAtOnce<Element> keys, const float* queries,
                                  int64 query_stride, int64 columns, float* scores,
                                  int64 score_stride) {
    const FloatTag d;
    for (int first = 0; first < keys_at_once; first += keys_in_registers) {
      FloatVec sum[rows][keys_in_registers];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < keys_in_registers; ++j) sum[r][j] = hn::Zero(d);
      }
      for (int64 i = 0; i < columns; i += lanes) {
        FloatVec column[keys_in_registers];
#pragma GCC unroll 4
        for (int j = 0; j < keys_in_registers; ++j) column[j] = Load::load(keys[first + j] + i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const FloatVec q = hn::Load(d, queries + r * query_stride + i);
#pragma GCC unroll 4
          for (int j = 0; j < keys_in_registers; ++j) {
            sum[r][j] = hn::MulAdd(q, column[j], sum[r][j]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        store_lane_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3],
                        scores + r * score_stride + first);
      }
    }
  }

  static void convert_weights(float*, int64) {}

  // out[r] += sum over j of scores[r][key + j] values[j], once convert_weights() has seen the rows.
  template <int rows>
  static HWY_INLINE void add(RowsAtOnce<Element> values, const float* scores, int64 key,
                             int64 score_stride, int64 columns, float* out, int64 out_stride) {
    const FloatTag d;
    for (int first = 0; first < keys_at_once; first += keys_in_registers) {
      FloatVec weight[rows][keys_in_registers];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < keys_in_registers; ++j)
          weight[r][j] = hn::Set(d, scores[r * score_stride + key + first + j]);
      }
      for (int64 i = 0; i < columns; i += lanes) {
        FloatVec value[keys_in_registers];
#pragma GCC unroll 4
        for (int j = 0; j < keys_in_registers; ++j) value[j] = Load::load(values[first + j] + i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          FloatVec sum = hn::Load(d, out + r * out_stride + i);
#pragma GCC unroll 4
          for (int j = 0; j < keys_in_registers; ++j) sum = hn::MulAdd(weight[r][j], value[j], sum);
          hn::Store(sum, d, out + r * out_stride + i);
        }
      }
    }
  }

  // The output's columns lie in memory in their own order.
  static void to_stored_order(float*, int64) {}
  static void to_natural_order(float*, int64) {}
};

// Direct reads rows where they lie; Staged reads the copies of those that vectors cannot read
// there.
template <class Direct, class Staged, int exp2_degree>
class StreamedTile : TileRows<exp2_degree> {
 public:
  using TileRows<exp2_degree>::TileRows;

  void run(const Packs&, const Partials& partials) {
    this->start_rows();
    load_queries();
    const core::KeyRange all = this->keys();
    const int64 block = this->config_.block_k;
    for (int64 first = all.begin / block * block; first < all.end; first += block) {
      const int64 begin = core::max64(first, all.begin);
      run_block(begin, core::min64(first + block, all.end) - begin);
    }
    for (int64 r = 0; r < this->rows_; ++r) {
      Direct::to_natural_order(this->memory(r).out, this->p_.head_dim_v);
    }
    this->finish(partials);
  }

 private:
  static constexpr int rows_at_once = 4;
  static constexpr int64 bytes_ahead = 8192;

  // Where the rows of K or V of one block of keys lie: scratch.key_rows points at each key's row of
  // the tile's first head.
  struct Located {
    bool in_place;             // to be read by Direct; otherwise by Staged
    int64 head_stride;         // elements from one head's row to the next
    int64 row_bytes;           // of one key and all heads of the tile; 0: not to be asked for ahead
    const void* const* ahead;  // row that is asked for beside the products of the first key
    const void* const* end;
  };

  void load_queries() const {
    const core::View& q = this->p_.q;
    for (int64 r = 0; r < this->rows_; ++r) {
      const core::PackedRow at = this->packed(r);
      Direct::load_query(
          q, q.offset(this->sequence_.batch_q, this->sequence_.row_q + at.query, at.head),
          this->p_.head_dim,
          reinterpret_cast<typename Direct::Query*>(this->scratch_.queries +
                                                    r * this->scratch_.query_stride));
    }
  }

  void run_block(int64 first_key, int64 count) {
    const core::Problem& p = this->p_;
    const core::KeyRange all =
        core::common_range(p.window, this->sequence_.length_q, this->sequence_.length_k,
                           this->query(0), this->query(this->rows_per_head_ - 1) + 1);
    const bool full = all.begin <= first_key && all.end >= first_key + count;
    ++(full ? this->statistics_.tiles_full : this->statistics_.tiles_partial);

    translate_pages(p.k, first_key + count, this->config_.block_k);
    translate_pages(p.v, first_key + count, this->config_.block_k);
    const Located keys = locate(p.k, p.head_dim, first_key, count, this->scratch_.keys);
    multiply_queries(keys, count, 0, this->rows_);
    // Weights past count are zero up to here, so that products may run over whole groups of keys.
    constexpr int64 step = lanes < keys_at_once ? keys_at_once : lanes;
    const int64 end = core::ceil_div(count, step) * step;
    for (int64 r = 0; r < this->rows_; ++r) {
      this->softmax_row(r, first_key, 0, end, count, full,
                        [&](int64 row) { multiply_queries(keys, count, row, row + 1); });
    }
    const bool hides = !full || (this->modifies_ && (p.mask || p.bias));
    if (hides && any_nonfinite_values(first_key, count)) {
      for (int64 r = 0; r < this->rows_; ++r) {
        float* out = this->memory(r).out;
        Direct::to_natural_order(out, p.head_dim_v);
        this->add_values_selectively(r, first_key, 0, count);
        Direct::to_stored_order(out, p.head_dim_v);
      }
      return;
    }
    const Located values = locate(p.v, p.head_dim_v, first_key, count, this->scratch_.values);
    multiply_values(values, count);
  }

  bool any_nonfinite_values(int64 first_key, int64 count) const {
    for (core::int32 head = 0; head < this->tile_.head_count; ++head) {
      if (this->has_nonfinite_values(this->tile_.head_kv + head, first_key, count)) return true;
    }
    return false;
  }

  // Reads one byte in each page of the next block's rows. Where the address of a page has to be
  // looked up in memory, asking for its lines ahead holds everything up, page after page; reads
  // side by side have their pages looked up side by side (docs/performance.md).
  void translate_pages(const core::View& view, int64 first_key, int64 count) const {
    constexpr int64 page_bytes = 4096;
    const KeyRows rows = this->key_rows(view, this->tile_.head_kv);
    const int64 bytes = core::size_bytes(view.dtype);
    const int64 row_bytes = std::abs(view.stride[1]) * bytes;
    const int64 step = core::max64(1, page_bytes / core::max64(1, row_bytes));
    const int64 end = core::min64(first_key + count, this->sequence_.length_k);
    for (int64 key = first_key; key < end; key += step) {
      static_cast<void>(static_cast<const volatile char*>(view.data)[rows.offset(key) * bytes]);
    }
  }

  // Rows that vectors can read where they lie are left there; others are copied to block.
  Located locate(const core::View& view, int64 columns, int64 first_key, int64 count,
                 float* buffer) const {
    auto* block = reinterpret_cast<typename Staged::Element*>(buffer);
    const KeyRows rows = this->key_rows(view, this->tile_.head_kv);
    const bool in_place = view.stride[3] == 1 && columns % Direct::columns_multiple == 0;
    const bool paged = this->p_.is_paged();
    const int64 stride = padded_columns(columns);
    const int64 first = paged || count == 0 ? 0 : rows.offset(first_key);
    const int64 row_elements =
        (this->tile_.head_count - 1) * view.stride[2] + core::round_up(columns, lanes);
    // Heads in falling order are read, but not asked for.
    const int64 row_bytes =
        in_place ? core::max64(0, row_elements) * core::size_bytes(view.dtype) : 0;
    const int64 ahead =
        row_bytes == 0
            ? 0
            : core::min64(most_keys_ahead,
                          core::round_up(core::ceil_div(bytes_ahead, row_bytes), keys_at_once));
    const int64 known = core::min64(count + ahead, this->sequence_.length_k - first_key);
    const void** to = this->scratch_.key_rows;
    const bool steady = in_place && !paged;  // the usual case, worth a loop that vectors take
    if (steady) {
      const int64 bytes = core::size_bytes(view.dtype);
      const char* row = static_cast<const char*>(view.data) + first * bytes;
      for (int64 key = 0; key < known; ++key) to[key] = row + key * view.stride[1] * bytes;
    }
    for (int64 key = steady ? known : 0; key < known; ++key) {
      const int64 offset = paged ? rows.offset(first_key + key) : first + key * view.stride[1];
      if (in_place) {
        to[key] = static_cast<const char*>(view.data) + offset * core::size_bytes(view.dtype);
        continue;
      }
      to[key] = block;
      for (int64 head = 0; head < this->tile_.head_count; ++head, block += stride) {
        Staged::stage_row(view, offset + head * view.stride[2], columns, block);
      }
    }
    // Products run over whole groups of keys: weights past count are zero, rows must be readable.
    const int64 end = count + ahead + keys_at_once;
    for (int64 key = known; key < end; ++key) to[key] = to[known - 1];
    return {in_place, in_place ? view.stride[2] : stride, row_bytes, to + ahead, to + end};
  }

  // Asks for memory ahead of a pass over a block. Rows read side by side are no stream to the
  // hardware's prefetchers, and what misses of the first-level cache alone can have in flight is a
  // third of the bandwidth. So rows are asked for in memory's own order, into the second level.
  class Prefetcher {
   public:
    Prefetcher(const Located& rows, int64 head_count)
        : next_(rows.ahead),
          end_(rows.end),
          row_bytes_(rows.row_bytes),
          lines_per_step_(core::ceil_div(keys_at_once * rows.row_bytes, 64 * head_count)) {}

    // One head's share of keys_at_once keys.
    HWY_INLINE void step() {
      for (int64 i = 0; i < lines_per_step_ && next_ != end_; ++i) {
        __builtin_prefetch(static_cast<const char*>(*next_) + at_, 0, 2);
        at_ += 64;
        if (at_ >= row_bytes_) {
          at_ = 0;
          ++next_;
        }
      }
    }

   private:
    const void* const* next_;
    const void* const* end_;
    int64 row_bytes_;
    int64 lines_per_step_;
    int64 at_ = 0;
  };

  // Calls body.operator()<rows>(first row) for the rows [begin, end) of one head, a few at a time.
  template <class Body>
  static void for_rows(int64 begin, int64 end, const Body& body) {
    for (int64 r = begin; r < end; r += rows_at_once) {
      switch (core::min64(rows_at_once, end - r)) {
        case 1: body.template operator()<1>(r); break;
        case 2: body.template operator()<2>(r); break;
        case 3: body.template operator()<3>(r); break;
        default: body.template operator()<4>(r); break;
      }
    }
  }

  // S = Q K^T for rows [row_begin, row_end). Keys outside, heads inside: where the heads of a key
  // lie side by side, memory is read in its own order.
  void multiply_queries(Located keys, int64 count, int64 row_begin, int64 row_end) const {
    keys.in_place ? multiply_queries_as<Direct>(keys, count, row_begin, row_end)
                  : multiply_queries_as<Staged>(keys, count, row_begin, row_end);
  }

  template <class Stream>
  void multiply_queries_as(Located keys, int64 count, int64 row_begin, int64 row_end) const {
    const int64 per_head = this->rows_per_head_;
    Prefetcher prefetcher(keys, this->tile_.head_count);
    for (int64 key = 0; key < count; key += keys_at_once) {
      for (int64 head = row_begin / per_head; head * per_head < row_end; ++head) {
        prefetcher.step();
        for_rows(core::max64(row_begin, head * per_head),
                 core::min64(row_end, (head + 1) * per_head), [&]<int rows>(int64 row) {
                   multiply_keys<rows, Stream>(row, key, head * keys.head_stride);
                 });
      }
    }
  }

  template <int rows, class Stream>
  HWY_INLINE void multiply_keys(int64 row, int64 key, int64 head_offset) const {
    const TileScratch& s = this->scratch_;
    constexpr int64 per_float = sizeof(float) / sizeof(typename Stream::Query);
    const auto* queries =
        reinterpret_cast<const typename Stream::Query*>(s.queries + row * s.query_stride);
    Stream::template multiply<rows>(rows_at<Stream>(key, head_offset), queries,
                                    s.query_stride * per_float, padded_columns(this->p_.head_dim),
                                    this->scores(row) + key, s.score_stride);
  }

  template <int rows, class Stream>
  HWY_INLINE void add_values(int64 row, int64 key, int64 head_offset) const {
    const TileScratch& s = this->scratch_;
    Stream::template add<rows>(rows_at<Stream>(key, head_offset), this->scores(row), key,
                               s.score_stride, padded_columns(this->p_.head_dim_v),
                               s.out + row * s.out_stride, s.out_stride);
  }

  template <class Stream>
  HWY_INLINE RowsAtOnce<typename Stream::Element> rows_at(int64 key, int64 offset) const {
    return {this->scratch_.key_rows + key, offset};
  }

  // O += P V, in the same order.
  void multiply_values(Located values, int64 count) const {
    for (int64 r = 0; r < this->rows_; ++r) Direct::convert_weights(this->scores(r), count);
    values.in_place ? multiply_values_as<Direct>(values, count)
                    : multiply_values_as<Staged>(values, count);
  }

  template <class Stream>
  void multiply_values_as(Located values, int64 count) const {
    const int64 per_head = this->rows_per_head_;
    Prefetcher prefetcher(values, this->tile_.head_count);
    for (int64 key = 0; key < count; key += keys_at_once) {
      for (int64 head = 0; head < this->tile_.head_count; ++head) {
        prefetcher.step();
        for_rows(head * per_head, (head + 1) * per_head, [&]<int rows>(int64 row) {
          add_values<rows, Stream>(row, key, head * values.head_stride);
        });
      }
    }
  }
};

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
