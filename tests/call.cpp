#include "tests/call.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "core/mask.h"
#include "cpu/reference.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr Index slack_rows = 5;
constexpr Index hole_rows = 3;

// Lengths that a ragged batch meets: whole, half, none, one, one short.
std::vector<Index> lengths_or_pattern(const std::vector<Index>& given, Index batch, Index longest,
                                      bool ragged, Index start) {
  if (!given.empty()) return given;
  std::vector<Index> lengths;
  for (Index b = 0; b < batch; ++b) {
    const Index pattern[] = {longest, longest / 2, 0, std::min<Index>(longest, 1),
                             std::max<Index>(longest - 1, 0)};
    lengths.push_back(ragged ? pattern[(b + start) % 5] : longest);
  }
  return lengths;
}

Placement placement(Layout layout) {
  Placement result;
  switch (layout) {
    case Layout::bshd:
    case Layout::reversed:
    case Layout::expanded:
    case Layout::fused: break;
    case Layout::bhsd: result.order = {0, 2, 1, 3}; break;
    case Layout::padded:
      result.row_padding = 3;
      result.offset = 1;
      break;
    case Layout::strided: result.element_stride = 2; break;
    case Layout::transposed: result.order = {0, 1, 3, 2}; break;
  }
  return result;
}

std::uint64_t seed_of(const std::string& name) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

const char* text(Layout layout) {
  constexpr const char* names[] = {"bshd",       "bhsd",     "padded",   "strided",
                                   "transposed", "reversed", "expanded", "fused"};
  return names[static_cast<int>(layout)];
}

const char* text(Entry entry) {
  constexpr const char* names[] = {"dense",        "seqused", "varlen",
                                   "varlen_holes", "paged",   "varlen_paged"};
  return names[static_cast<int>(entry)];
}

}  // namespace

HostTensor laid_out(DType dtype, Shape shape, Layout layout) {
  const HostTensor tensor(dtype, shape, placement(layout));
  return layout == Layout::reversed ? tensor.reversed(1).reversed(3) : tensor;
}

CaseSpec with_entry(CaseSpec spec, Entry entry, Index sq, Index sk) {
  const Index spare = entry == Entry::seqused ? 3 : 0;
  spec.entry = entry;
  spec.sq = sq + spare;
  spec.sk = sk + spare;
  spec.lengths_q.assign(static_cast<std::size_t>(spec.batch), sq);
  spec.lengths_k.assign(static_cast<std::size_t>(spec.batch), sk);
  return spec;
}

std::string describe(const CaseSpec& s) {
  std::ostringstream out;
  out << s.name << ": batch=" << s.batch << " heads=" << s.hq << "/" << s.hkv << " sq=" << s.sq
      << " sk=" << s.sk << " d=" << s.d << "/" << (s.dv > 0 ? s.dv : s.d) << " "
      << fovea::name(s.dtype) << " " << text(s.layout) << " " << text(s.entry);
  if (s.out_dtype) out << " out=" << fovea::name(*s.out_dtype);
  if (s.entry == Entry::paged || s.entry == Entry::varlen_paged) out << " page=" << s.page_size;
  if (s.causal) out << " causal";
  if (s.window_left != -1 || s.window_right != -1) {
    out << " window=(" << s.window_left << "," << s.window_right << ")";
  }
  if (s.softcap > 0) out << " softcap=" << s.softcap;
  if (s.scale) out << " scale=" << *s.scale;
  if (s.sink) out << " sink";
  if (s.alibi) out << " alibi";
  if (s.bias != Bias::none) out << " bias=" << static_cast<int>(s.bias);
  if (s.mask != Mask::none) out << " mask=" << static_cast<int>(s.mask);
  if (s.scales != Scales::none) out << " scales=" << static_cast<int>(s.scales);
  if (s.dropout > 0) out << " dropout=" << s.dropout;
  if (!s.lse) out << " no_lse";
  if (s.num_splits != 0) out << " splits=" << s.num_splits;
  if (s.softmax != Softmax::automatic) out << " softmax=" << static_cast<int>(s.softmax);
  if (s.logits != 1.0) out << " logits=" << s.logits;
  return out.str();
}

void PrintTo(const CaseSpec& spec, std::ostream* out) { *out << describe(spec); }

Call::Call(const CaseSpec& given) : spec(given) {
  if (spec.dv == 0) spec.dv = spec.d;
  Random random(seed_of(spec.name));
  place_rows();
  if (is_paged()) place_pages(random);
  allocate();
  describe_problem();
  const double root = std::sqrt(static_cast<double>(spec.d));
  const double scale = spec.scale ? std::abs(*spec.scale) : 1.0 / root;
  const double size_q = scale > 0.0 ? spec.logits / (scale * root) : 1.0;
  const auto normal = [&](double size) {
    return [&random, size](Index, Index, Index, Index) { return size * random.normal(); };
  };
  fill_q(normal(size_q));
  fill_k(normal(1.0));
  fill_v(normal(1.0));
  fill_extras(random);
  if (spec.scales != Scales::none) add_scales(random);
}

bool Call::is_varlen_q() const {
  return spec.entry == Entry::varlen || spec.entry == Entry::varlen_holes ||
         spec.entry == Entry::varlen_paged;
}

bool Call::is_varlen_k() const {
  return spec.entry == Entry::varlen || spec.entry == Entry::varlen_holes;
}

bool Call::is_paged() const {
  return spec.entry == Entry::paged || spec.entry == Entry::varlen_paged;
}

void Call::place_rows() {
  const bool ragged = spec.entry != Entry::dense;
  const bool ragged_q = ragged && spec.entry != Entry::paged;
  lengths_q_ = lengths_or_pattern(spec.lengths_q, spec.batch, spec.sq, ragged_q, 0);
  // Half a turn against the queries: empty and one-row sequences meet long ones on either side.
  lengths_k_ =
      lengths_or_pattern(spec.lengths_k, spec.batch, spec.sk, ragged, spec.batch > 2 ? 4 : 0);
  const auto pack = [this](const std::vector<Index>& lengths, std::vector<std::int32_t>& cu) {
    const Index hole = spec.entry == Entry::varlen_holes ? hole_rows : 0;
    cu.assign(1, 0);
    for (const Index length : lengths) {
      cu.push_back(cu.back() + static_cast<std::int32_t>(length + hole));
    }
    return cu.back() + slack_rows;
  };
  if (is_varlen_q()) total_q_ = pack(lengths_q_, cu_q_);
  if (is_varlen_k()) total_k_ = pack(lengths_k_, cu_k_);
  if (spec.entry == Entry::seqused || spec.entry == Entry::varlen_holes) {
    used_q_.assign(lengths_q_.begin(), lengths_q_.end());
  }
  if (spec.entry == Entry::seqused || spec.entry == Entry::varlen_holes || is_paged()) {
    used_k_.assign(lengths_k_.begin(), lengths_k_.end());
  }
}

// Pages in random physical order among spare ones that nobody owns; table entries beyond the used
// pages are garbage.
void Call::place_pages(Random& random) {
  std::vector<Index> needed;
  for (const Index length : lengths_k_) needed.push_back(core::ceil_div(length, spec.page_size));
  columns_ = 1 + std::accumulate(needed.begin(), needed.end(), Index{0},
                                 [](Index a, Index b) { return std::max(a, b); });
  const Index used = std::accumulate(needed.begin(), needed.end(), Index{0});
  pages_ = used + 3;
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages_));
  std::iota(order.begin(), order.end(), 0);
  for (Index i = pages_ - 1; i > 0; --i) {
    std::swap(order[static_cast<std::size_t>(i)],
              order[static_cast<std::size_t>(random.below(i + 1))]);
  }
  table_.assign(static_cast<std::size_t>(spec.batch * columns_), 1 << 30);
  auto next = order.begin();
  for (Index b = 0; b < spec.batch; ++b) {
    const Index count = needed[static_cast<std::size_t>(b)];
    std::copy_n(next, count, table_.begin() + b * columns_);
    next += count;
  }
}

void Call::allocate() {
  const Shape shape_q = is_varlen_q() ? Shape{1, total_q_, spec.hq, spec.d}
                                      : Shape{spec.batch, spec.sq, spec.hq, spec.d};
  Shape shape_k{spec.batch, spec.sk, spec.hkv, spec.d};
  if (is_varlen_k()) shape_k = {1, total_k_, spec.hkv, spec.d};
  if (is_paged()) shape_k = {pages_, spec.page_size, spec.hkv, spec.d};
  Shape shape_v = shape_k;
  shape_v[3] = spec.dv;
  if (spec.layout == Layout::fused) {
    allocate_fused(shape_q, shape_k, shape_v);
  } else if (spec.layout == Layout::expanded) {
    q = HostTensor(spec.dtype, shape_q, {.broadcast = {false, false, true, false}});
    k = HostTensor(spec.dtype, shape_k, {.broadcast = {true, false, false, false}});
    v = HostTensor(spec.dtype, shape_v, {.broadcast = {true, false, false, false}});
  } else {
    q = laid_out(spec.dtype, shape_q, spec.layout);
    k = laid_out(spec.dtype, shape_k, spec.layout);
    v = laid_out(spec.dtype, shape_v, spec.layout);
  }
  const DType out_dtype = spec.out_dtype.value_or(spec.dtype);
  out = laid_out(out_dtype, {shape_q[0], shape_q[1], spec.hq, spec.dv}, spec.layout);
  if (spec.lse) {
    lse = laid_out(DType::f32, {shape_q[0], spec.hq, shape_q[1], 1}, spec.layout);
  }
}

void Call::allocate_fused(Shape shape_q, Shape shape_k, Shape shape_v) {
  if (shape_q[0] == shape_k[0] && shape_q[1] == shape_k[1] && spec.d == spec.dv) {
    const HostTensor all(spec.dtype, {shape_q[0], shape_q[1], spec.hq + 2 * spec.hkv, spec.d});
    q = all.slice(2, 0, spec.hq);
    k = all.slice(2, spec.hq, spec.hkv);
    v = all.slice(2, spec.hq + spec.hkv, spec.hkv);
    return;
  }
  q = HostTensor(spec.dtype, shape_q);
  const HostTensor both(spec.dtype, {shape_k[0], shape_k[1], spec.hkv, spec.d + spec.dv});
  k = both.slice(3, 0, spec.d);
  v = both.slice(3, spec.d, shape_v[3]);
}

void Call::describe_problem() {
  problem.q = q.tensor();
  problem.k = k.tensor();
  problem.v = v.tensor();
  problem.out = out.tensor();
  problem.lse = lse.tensor();
  problem.cu_seqlens_q = cu_q_;
  problem.cu_seqlens_k = cu_k_;
  problem.seqused_q = used_q_;
  problem.seqused_k = used_k_;
  problem.block_table = table_;
  problem.block_table_columns = columns_;
  problem.softmax_scale = spec.scale;
  problem.causal = spec.causal;
  problem.window_left = spec.window_left;
  problem.window_right = spec.window_right;
  problem.softcap = spec.softcap;
  problem.dropout = {spec.dropout, seed_of(spec.name), 7};
  problem.num_splits = spec.num_splits;
  const core::Problem p = to_core(problem);
  scores_q_ = p.seqlen_q;
  scores_k_ = p.seqlen_k;
}

void Call::fill_extras(Random& random) {
  const DType float_dtype = spec.layout == Layout::bhsd ? spec.dtype : DType::f32;
  if (spec.bias != Bias::none) {
    const Shape shape = spec.bias == Bias::per_key ? Shape{spec.batch, 1, 1, scores_k_}
                        : spec.bias == Bias::per_head
                            ? Shape{1, spec.hq, scores_q_, scores_k_}
                            : Shape{spec.batch, spec.hq, scores_q_, scores_k_};
    bias = laid_out(float_dtype, shape, spec.layout);
    const bool holes = spec.bias == Bias::with_minus_infinity;
    bias.fill([&](Index, Index, Index i, Index) {
      const double value = random.normal();
      return holes && (i % 7 == 3 || random.below(3) == 0) ? -HUGE_VAL : value;
    });
  }
  if (spec.mask != Mask::none) {
    const Shape shape = spec.mask == Mask::per_key ? Shape{spec.batch, 1, 1, scores_k_}
                        : spec.mask == Mask::late
                            ? Shape{1, 1, scores_q_, scores_k_}
                            : Shape{spec.batch, spec.hq, scores_q_, scores_k_};
    mask = laid_out(DType::boolean, shape, spec.layout);
    mask.fill([&](Index, Index, Index i, Index j) {
      bool seen = random.below(3) != 0;
      if (spec.mask == Mask::empty_rows && i % 5 < 2) seen = false;
      if (spec.mask == Mask::late) seen = 2 * j + i >= scores_k_;  // hides whole early blocks
      return seen ? 1.0 : 0.0;
    });
  }
  if (spec.sink) {
    sink = laid_out(DType::f32, {1, 1, 1, spec.hq}, spec.layout);
    sink.fill([&](Index, Index, Index, Index) { return 2.0 * random.normal(); });
  }
  if (spec.alibi) {
    alibi =
        laid_out(DType::f32, {spec.batch % 2 == 0 ? spec.batch : 1, spec.hq, 1, 1}, spec.layout);
    alibi.fill([&](Index, Index, Index, Index) { return random.uniform(); });
  }
  problem.bias = bias.tensor();
  problem.mask = mask.tensor();
  problem.sink = sink.tensor();
  problem.alibi = alibi.tensor();
}

// Values between a half and two, which elements are divided by on average.
void Call::add_scales(Random& random) {
  const auto scales = [&](Index rows, Index heads, bool varlen, bool paged) {
    Shape shape{spec.batch, heads, 1, 1};
    if (spec.scales == Scales::one) shape = {1, 1, 1, 1};
    if (spec.scales == Scales::per_block && !paged) {
      shape[2] = varlen ? rows / 32 + spec.batch + 1 : (rows + 31) / 32;
      if (varlen) shape[0] = 1;
    }
    HostTensor tensor = laid_out(DType::f32, shape, spec.layout);
    tensor.fill(
        [&](Index, Index, Index, Index) { return std::exp2(2.0 * random.uniform() - 1.0); });
    return tensor;
  };
  const Index heads_q = spec.scales == Scales::per_head ? spec.hkv : spec.hq;
  q_scale = scales(q.shape()[1], heads_q, is_varlen_q(), false);
  k_scale = scales(k.shape()[1], spec.hkv, is_varlen_k(), is_paged());
  v_scale = scales(k.shape()[1], spec.hkv, is_varlen_k(), is_paged());
  problem.q_scale = q_scale.tensor();
  problem.k_scale = k_scale.tensor();
  problem.v_scale = v_scale.tensor();
}

Call::Place Call::row_q(Index b, Index i) const {
  if (is_varlen_q()) return {0, cu_q_[static_cast<std::size_t>(b)] + i};
  return {b, i};
}

Call::Place Call::row_k(Index b, Index j) const {
  if (is_varlen_k()) return {0, cu_k_[static_cast<std::size_t>(b)] + j};
  if (is_paged()) {
    const Index entry = b * columns_ + j / spec.page_size;
    return {table_[static_cast<std::size_t>(entry)], j % spec.page_size};
  }
  return {b, j};
}

void Call::set_k(Index b, Index j, Index h, Index d, double value) {
  const Place place = row_k(b, j);
  k.set(place.batch, place.row, h, d, value);
}

void Call::set_v(Index b, Index j, Index h, Index d, double value) {
  const Place place = row_k(b, j);
  v.set(place.batch, place.row, h, d, value);
}

double Call::out_at(Index b, Index i, Index h, Index d) const {
  const Place place = row_q(b, i);
  return out.at(place.batch, place.row, h, d);
}

double Call::lse_at(Index b, Index h, Index i) const {
  const Place place = row_q(b, i);
  return lse.at(place.batch, h, place.row, 0);
}

bool Call::visible(Index b, Index h, Index i, Index j) const {
  const core::Window window =
      core::effective_window({spec.window_left, spec.window_right}, spec.causal);
  if (!core::allowed(window, length_q(b), length_k(b), i, j)) return false;
  const auto value = [&](const HostTensor& tensor) {
    const auto& n = tensor.shape();
    return tensor.at(n[0] == 1 ? 0 : b, n[1] == 1 ? 0 : h, n[2] == 1 ? 0 : i, n[3] == 1 ? 0 : j);
  };
  if (mask.present() && value(mask) == 0.0) return false;
  return !bias.present() || value(bias) != -HUGE_VAL;
}

void Call::poison_unseen() {
  if (spec.layout == Layout::expanded) return;  // what one sequence does not see, another may
  const Index group = spec.hq / spec.hkv;
  for (Index b = 0; b < spec.batch; ++b) {
    for (Index h = 0; h < spec.hkv; ++h) {
      std::vector<bool> seen(static_cast<std::size_t>(length_k(b)), false);
      for (Index head = h * group; head < (h + 1) * group; ++head) {
        for (Index i = 0; i < length_q(b); ++i) {
          bool any = false;
          for (Index j = 0; j < length_k(b); ++j) {
            if (!visible(b, head, i, j)) continue;
            any = true;
            seen[static_cast<std::size_t>(j)] = true;
          }
          if (any) continue;
          const Place place = row_q(b, i);
          for (Index d = 0; d < spec.d; ++d) q.set(place.batch, place.row, head, d, nan);
        }
      }
      for (Index j = 0; j < length_k(b); ++j) {
        if (seen[static_cast<std::size_t>(j)]) continue;
        for (Index d = 0; d < spec.d; ++d) set_k(b, j, h, d, nan);
        for (Index d = 0; d < spec.dv; ++d) set_v(b, j, h, d, nan);
      }
    }
  }
}

void Call::remember_inputs() {
  inputs_before_.clear();
  for (const HostTensor* tensor :
       {&q, &k, &v, &bias, &mask, &sink, &alibi, &q_scale, &k_scale, &v_scale}) {
    inputs_before_.push_back(tensor->buffer());
  }
}

Statistics Call::run() {
  out.poison();
  if (lse.present()) lse.poison();
  remember_inputs();
  Options options;
  options.device = device;
  options.softmax = spec.softmax;
  const Plan plan = fovea::plan(problem, options);
  const HostTensor workspace(DType::boolean, {1, 1, 1, static_cast<Index>(plan.workspace_bytes())},
                             {.offset = 1});
  Statistics statistics;
  plan.run(problem, {static_cast<std::byte*>(workspace.tensor().data), plan.workspace_bytes()},
           &statistics);
  EXPECT_EQ(workspace.foreign_bytes_changed(), 0) << "beside the workspace";
  return statistics;
}

void Call::expect_memory_respected() const {
  EXPECT_EQ(out.foreign_bytes_changed(), 0) << "beside out";
  EXPECT_EQ(lse.foreign_bytes_changed(), 0) << "beside lse";
  const HostTensor* inputs[] = {&q,    &k,     &v,       &bias,    &mask,
                                &sink, &alibi, &q_scale, &k_scale, &v_scale};
  for (std::size_t i = 0; i < std::size(inputs); ++i) {
    EXPECT_TRUE(inputs[i]->buffer() == inputs_before_[i]) << "input " << i << " was written";
  }
}

void Call::expect_matches_oracle() const {
  const core::Problem p = to_core(problem);
  const cpu::ReferenceResult exact = cpu::reference_forward(p);
  const cpu::ReferenceResult naive = cpu::naive_forward(p);
  EXPECT_TRUE(
      close_to(out.values(), exact.out, naive.out, out_floor(q.dtype(), out.dtype(), exact.out)))
      << "out";
  if (lse.present()) {
    EXPECT_TRUE(close_to(lse.values(), exact.lse, naive.lse, lse_floor(q.dtype()))) << "lse";
  }
}

void check_case(const CaseSpec& spec) {
  SCOPED_TRACE(describe(spec));
  Call call(spec);
  call.poison_unseen();
  call.run();
  call.expect_memory_respected();
  call.expect_matches_oracle();
  const std::vector<std::byte> out = call.out.bytes();
  const std::vector<std::byte> lse = call.lse.bytes();
  call.run();
  EXPECT_TRUE(same_bits(call.out.bytes(), out)) << "out of a second run";
  EXPECT_TRUE(same_bits(call.lse.bytes(), lse)) << "lse of a second run";
}

}  // namespace fovea::test
