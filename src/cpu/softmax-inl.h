// Softmax of one score row at a time, in place: exponentials, the running reference and its repair,
// and everything that changes a score before the exponential.
//
// A row lives in memory as scores[0 .. n), vector aligned; positions that the row does not see hold
// -infinity, put there by selection, and come out as weight zero. Sums are kept per lane and added
// across lanes once, at the end.
//
// Included once per instruction set (see forward_tile.cpp).

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

// The polynomial of core/numeric.h, 2^r for r in [-1/2, 1/2].
template <int degree>
HWY_INLINE FloatVec exp2_fraction(FloatVec r) {
  const FloatTag d;
  FloatVec p = hn::Set(d, core::Exp2Polynomial<degree>::coefficient[degree - 1]);
  for (int i = degree - 2; i >= 0; --i) {
    p = hn::MulAdd(p, r, hn::Set(d, core::Exp2Polynomial<degree>::coefficient[i]));
  }
  return hn::MulAdd(p, r, hn::Set(d, 1.0f));
}

// 2^x: exactly zero below -126, infinity from 128 on, NaN kept. At x = +infinity NaN or infinity,
// as the instructions have it: no sum that holds either is used.
template <int degree>
HWY_INLINE FloatVec exp2_vector(FloatVec x) {
  const FloatTag d;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  // One instruction multiplies by 2^n whatever n, and takes the mask along.
  const FloatVec n{_mm512_roundscale_ps(x.raw, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  const FloatVec p = exp2_fraction<degree>(hn::Sub(x, n));
  const __mmask16 remains = _mm512_cmp_ps_mask(x.raw, hn::Set(d, -126.0f).raw, _CMP_NLT_UQ);
  return FloatVec{_mm512_maskz_scalef_ps(remains, p.raw, n.raw)};
#else
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum, where the exponent
  // takes it from.
  const hn::RebindToSigned<FloatTag> di;
  const auto vanishes = hn::Lt(x, hn::Set(d, -126.0f));
  // The bound first: where an operand is NaN, x86 returns the second.
  const FloatVec bounded = hn::Max(hn::Set(d, -126.0f), hn::Min(hn::Set(d, 128.0f), x));
  const FloatVec shift = hn::Set(d, 0x1.8p23f);
  const FloatVec shifted = hn::Add(bounded, shift);
  const FloatVec p = exp2_fraction<degree>(hn::Sub(bounded, hn::Sub(shifted, shift)));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  const FloatVec scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  return hn::IfThenZeroElse(vanishes, scaled);
#endif
}

// tanh to about two units in the last place: an odd polynomial near zero, where 1 - 2 / (e^2x + 1)
// would cancel.
HWY_INLINE FloatVec tanh_vector(FloatVec x) {
  const FloatTag d;
  const FloatVec square = hn::Mul(x, x);
  // Taylor series to x^13: below 2e-8 relative for |x| < 0.35.
  FloatVec p = hn::Set(d, 21844.0f / 6081075.0f);
  p = hn::MulAdd(p, square, hn::Set(d, -1382.0f / 155925.0f));
  p = hn::MulAdd(p, square, hn::Set(d, 62.0f / 2835.0f));
  p = hn::MulAdd(p, square, hn::Set(d, -17.0f / 315.0f));
  p = hn::MulAdd(p, square, hn::Set(d, 2.0f / 15.0f));
  p = hn::MulAdd(p, square, hn::Set(d, -1.0f / 3.0f));
  const FloatVec near_zero = hn::MulAdd(hn::Mul(p, square), x, x);
  // e^(2 * 32) is far beyond where tanh is 1.
  const FloatVec bounded = hn::Min(hn::Set(d, 32.0f), x);
  const FloatVec e = exp2_vector<6>(hn::Mul(bounded, hn::Set(d, 2.0f * core::log2_e)));
  const FloatVec far =
      hn::Sub(hn::Set(d, 1.0f), hn::Div(hn::Set(d, 2.0f), hn::Add(e, hn::Set(d, 1.0f))));
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(d, 0.35f)), near_zero, far);
}

// scores[i] = value for i in [begin, end).
HWY_INLINE void fill_row(float* scores, int64 begin, int64 end, float value) {
  for (int64 i = begin; i < end; ++i) scores[i] = value;
}

HWY_INLINE void scale_row(float* row, int64 begin, int64 end, float factor) {
  const FloatTag d;
  const FloatVec f = hn::Set(d, factor);
  for (int64 i = begin; i < end; i += lanes)
    hn::Store(hn::Mul(hn::Load(d, row + i), f), d, row + i);
}

// Replaces a vector of scores by weights, 2^((scores - reference) * scale_log2), and returns them.
// Subtracting first loses nothing where scores are huge, and the largest score's exponent is
// exactly zero.
template <int degree>
HWY_INLINE FloatVec exponentiate(FloatVec reference, FloatVec scale_log2, float* scores) {
  const FloatTag d;
  const FloatVec x = hn::Mul(hn::Sub(hn::Load(d, scores), reference), scale_log2);
  const FloatVec weights = exp2_vector<degree>(x);
  hn::Store(weights, d, scores);
  return weights;
}

// The same for a row; returns the sum of each lane.
template <int degree>
HWY_INLINE FloatVec exponentiate_row(float* HWY_RESTRICT scores, int64 begin, int64 end,
                                     float scale_log2, float reference) {
  const FloatTag d;
  const FloatVec c = hn::Set(d, scale_log2);
  const FloatVec m = hn::Set(d, reference);
  FloatVec sum0 = hn::Zero(d);
  FloatVec sum1 = hn::Zero(d);
  int64 i = begin;
  for (; i + 2 * lanes <= end; i += 2 * lanes) {
    sum0 = hn::Add(sum0, exponentiate<degree>(m, c, scores + i));
    sum1 = hn::Add(sum1, exponentiate<degree>(m, c, scores + i + lanes));
  }
  for (; i < end; i += lanes) sum0 = hn::Add(sum0, exponentiate<degree>(m, c, scores + i));
  return hn::Add(sum0, sum1);
}

// The largest score; NaN if that is all there is to see.
HWY_INLINE float row_maximum(const float* scores, int64 begin, int64 end) {
  const FloatTag d;
  FloatVec top = hn::Set(d, -core::infinity);
  for (int64 i = begin; i < end; i += lanes) {
    // Where a score is NaN, x86 returns the second operand: the maximum of the others survives.
    top = hn::Max(hn::Load(d, scores + i), top);
  }
  const float maximum = hn::GetLane(hn::MaxOfLanes(d, top));
  if (maximum > -core::infinity) return maximum;
  for (int64 i = begin; i < end; ++i) {
    if (core::is_nan(scores[i])) return scores[i];
  }
  return -core::infinity;
}

// What one row carries from tile to tile.
struct RowMemory {
  float* scores;     // of this tile; becomes the weights
  float* sums;       // one per lane
  float* reference;  // a score, before scale_log2
  float* out;        // unnormalised output, whole vectors
  int64 out_columns;
};

HWY_INLINE void rescale_row(const RowMemory& row, float factor) {
  scale_row(row.sums, 0, lanes, factor);
  scale_row(row.out, 0, row.out_columns, factor);
}

HWY_INLINE void add_sums(const RowMemory& row, FloatVec tile_sums) {
  const FloatTag d;
  hn::Store(hn::Add(hn::Load(d, row.sums), tile_sums), d, row.sums);
}

// The step of core::SoftmaxPolicy::online and ::conditional, and of every policy for a row that has
// seen no key: true maximum first.
template <int degree>
HWY_INLINE void softmax_step_with_maximum(const RowMemory& row, int64 begin, int64 end,
                                          float scale_log2, float threshold_log2,
                                          ForwardStatistics& statistics) {
  const float maximum = row_maximum(row.scores, begin, end);
  if (maximum == -core::infinity) {
    fill_row(row.scores, begin, end, 0.0f);
    return;
  }
  const float before = *row.reference;
  if (core::is_nan(maximum)) {
    *row.reference = maximum;
  } else {
    *row.reference = core::raise_reference(before, maximum, threshold_log2 / scale_log2).reference;
    if (before > -core::infinity && *row.reference != before) {
      ++statistics.rescales;
      rescale_row(row, core::exp2_polynomial<6>((before - *row.reference) * scale_log2));
    }
  }
  add_sums(row, exponentiate_row<degree>(row.scores, begin, end, scale_log2, *row.reference));
}

// How large a lane's sum may be for a repair; beyond, 2^-k would leave the normal range.
inline constexpr float repairable_sum = 0x1p120f;

enum class GuardOutcome { done, recompute };

// The step of core::SoftmaxPolicy::sum_guard (core/softmax.h). The row must have a finite
// reference. A repair divides by 2^k, k the exponent of the largest sum, and raises the reference
// by k over the scale; what the reference's rounding leaves of k is the factor, so that both stay
// consistent. On recompute the scores are lost and nothing else has changed.
template <int degree>
HWY_INLINE GuardOutcome softmax_step_with_guard(const RowMemory& row, int64 begin, int64 end,
                                                float scale_log2, ForwardStatistics& statistics) {
  const FloatTag d;
  FloatVec sums = exponentiate_row<degree>(row.scores, begin, end, scale_log2, *row.reference);
  if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Le(sums, hn::Set(d, core::rescale_threshold))))) {
    if (!hn::AllTrue(d, hn::Lt(sums, hn::Set(d, repairable_sum)))) return GuardOutcome::recompute;
    const float largest = hn::GetLane(hn::MaxOfLanes(d, sums));
    const auto exponent = static_cast<float>(core::guard_exponent(largest));
    const float raised = *row.reference + exponent / scale_log2;
    const float factor = core::exp2_polynomial<6>((*row.reference - raised) * scale_log2);
    scale_row(row.scores, begin, end, factor);
    rescale_row(row, factor);
    sums = hn::Mul(sums, hn::Set(d, factor));
    *row.reference = raised;
    ++statistics.repairs;
  }
  add_sums(row, sums);
  return GuardOutcome::done;
}

// Everything that changes a score before the exponential. Replaces raw products [begin, end) by
// scores in natural units; hidden ones become -infinity. Row and keys are positions in the
// sequence.
struct ScoreRow {
  const core::Problem& problem;
  int64 batch;
  int64 head;
  int64 query;
  int64 length_q;
  int64 length_k;
};

// Also true where multiplying a hidden score, -infinity, by the scale would not keep it hidden.
constexpr bool modifies_scores(const core::Problem& p) {
  return p.softcap != 0.0f || p.bias || p.mask || p.alibi || !(p.softmax_scale > 1e-30f);
}

inline void modify_scores(const ScoreRow& row, int64 first_key, int64 begin, int64 end,
                          float* scores) {
  const FloatTag d;
  const core::Problem& p = row.problem;
  const int64 vector_begin = begin / lanes * lanes;
  const float cap = p.softcap;
  for (int64 i = vector_begin; i < end; i += lanes) {
    FloatVec x = hn::Mul(hn::Load(d, scores + i), hn::Set(d, p.softmax_scale));
    if (cap != 0.0f) {
      x = hn::Mul(tanh_vector(hn::Div(x, hn::Set(d, cap))), hn::Set(d, cap));
    }
    hn::Store(x, d, scores + i);
  }
  if (p.bias) {
    const int64 base = p.bias.offset(row.batch, row.head, row.query, first_key);
    for (int64 i = begin; i < end; ++i) {
      const float bias = core::load_element(p.bias.data, p.bias.dtype, base + i * p.bias.stride[3]);
      // A bias of -infinity hides the key, by selection, as a mask does.
      scores[i] = bias == -core::infinity ? bias : scores[i] + bias;
    }
  }
  if (p.alibi) {
    const float slope =
        core::load_element(p.alibi.data, p.alibi.dtype, p.alibi.offset(row.batch, row.head, 0));
    const int64 diagonal = row.query + row.length_k - row.length_q - first_key;
    for (int64 i = begin; i < end; ++i) {
      scores[i] -= slope * static_cast<float>(i < diagonal ? diagonal - i : i - diagonal);
    }
  }
  if (p.mask) {
    const int64 base = p.mask.offset(row.batch, row.head, row.query, first_key);
    const auto* visible = static_cast<const core::uint8*>(p.mask.data);
    for (int64 i = begin; i < end; ++i) {
      if (visible[base + i * p.mask.stride[3]] == 0) scores[i] = -core::infinity;
    }
  }
}

// Zeroes the weights of dropped elements. Sums and LSE keep them; 1 / (1 - p) enters at the end.
inline void drop_weights(const ScoreRow& row, int64 first_key, int64 begin, int64 end,
                         float* weights) {
  const core::Dropout& dropout = row.problem.dropout;
  const uint32 threshold = core::dropout_threshold(dropout.probability);
  core::Philox4 words{};
  for (int64 i = begin; i < end; ++i) {
    const int64 key = first_key + i;
    if (i == begin || key % 4 == 0) {
      words = core::dropout_words(dropout, row.batch, row.head, row.query, key / 4);
    }
    if (words.word[key % 4] < threshold) weights[i] = 0.0f;
  }
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
