#include "tests/cases.h"

#include <cmath>
#include <string>
#include <tuple>
#include <utility>

namespace fovea::test {
namespace {

using Cases = std::vector<CaseSpec>;

constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr Softmax policies[] = {Softmax::automatic, Softmax::online, Softmax::conditional,
                                Softmax::sum_guard};
constexpr Layout layouts[] = {Layout::bshd,     Layout::bhsd,       Layout::padded,
                              Layout::strided,  Layout::transposed, Layout::reversed,
                              Layout::expanded, Layout::fused};
constexpr Entry entries[] = {Entry::dense,        Entry::seqused, Entry::varlen,
                             Entry::varlen_holes, Entry::paged,   Entry::varlen_paged};

std::string number(Index value) { return std::to_string(value); }

// Every class of head dim: below, at and beyond each vector width and tile, for every dtype.
void add_head_dims(Cases& cases) {
  constexpr std::pair<Index, Index> dims[] = {
      {1, 1},     {2, 2},     {3, 3},     {7, 7},     {8, 8},     {15, 15},   {16, 16},
      {17, 17},   {31, 31},   {32, 32},   {40, 40},   {46, 46},   {64, 64},   {72, 72},
      {80, 80},   {96, 96},   {100, 100}, {104, 104}, {120, 120}, {128, 128}, {129, 129},
      {136, 136}, {160, 160}, {192, 192}, {256, 256}, {320, 320}, {512, 512}, {192, 128},
      {576, 512}, {128, 64},  {64, 128},  {1, 256},   {256, 1},   {40, 3},    {5, 33}};
  for (const auto& [d, dv] : dims) {
    for (const DType dtype : dtypes) {
      CaseSpec s;
      s.name = "heads_" + number(d) + "_" + number(dv) + "_" + std::string(name(dtype));
      s.batch = 1;
      s.hq = 4;
      s.sq = 37;
      s.sk = 70;
      s.d = d;
      s.dv = dv;
      s.dtype = dtype;
      s.causal = d % 2 == 0;
      s.softmax = policies[cases.size() % 4];
      cases.push_back(s);
    }
  }
}

// Lengths at and around every block border, against each other.
void add_lengths(Cases& cases) {
  for (const Index sq : {1, 2, 3, 17, 63, 64, 65, 127, 129, 200}) {
    for (const Index sk : {1, 2, 31, 63, 64, 65, 127, 128, 129, 257, 1000}) {
      CaseSpec s;
      const std::size_t i = cases.size();
      s.name = "lengths_" + number(sq) + "_" + number(sk);
      s.batch = 1;
      s.hq = 2;
      s.hkv = 1 + static_cast<Index>(i % 2);
      s.sq = sq;
      s.sk = sk;
      s.d = 32;
      s.dtype = dtypes[i % 3];
      s.causal = i % 2 == 0;
      s.softmax = policies[i % 4];
      cases.push_back(s);
    }
  }
}

// Few queries against many keys, for every grouping of heads; the splits are scheduling only.
void add_decode(Cases& cases) {
  constexpr std::pair<Index, Index> heads[] = {{1, 1}, {4, 1}, {7, 1}, {16, 2}, {24, 3}, {6, 6}};
  for (const auto& [hq, hkv] : heads) {
    for (const Index sq : {1, 2, 5}) {
      for (const std::int32_t splits : {0, 1, 3, 8}) {
        CaseSpec s;
        const std::size_t i = cases.size();
        s.name =
            "decode_" + number(hq) + "_" + number(hkv) + "_" + number(sq) + "_" + number(splits);
        s.batch = 2;
        s.hq = hq;
        s.hkv = hkv;
        s.sq = sq;
        s.sk = i % 2 == 0 ? 777 : 1500;
        s.d = i % 3 == 0 ? 128 : 40;
        s.dtype = dtypes[i % 3];
        s.entry = entries[i % 6];
        s.causal = i % 4 < 2;
        s.sink = i % 5 == 0;
        s.num_splits = splits;
        s.window_left = i % 7 == 0 ? 100 : -1;
        s.softmax = policies[i % 4];
        cases.push_back(s);
      }
    }
  }
}

// Every layout through every entry point.
void add_layouts(Cases& cases) {
  for (const Layout layout : layouts) {
    for (const Entry entry : entries) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        CaseSpec s;
        s.name = "layout_" + number(static_cast<Index>(layout)) + "_" +
                 number(static_cast<Index>(entry)) + "_" + std::string(name(dtype));
        s.batch = 5;
        s.hq = 4;
        s.sq = entry == Entry::paged ? 33 : 70;
        s.sk = 70;
        s.d = 24;
        s.dtype = dtype;
        s.layout = layout;
        s.entry = entry;
        s.causal = true;
        s.alibi = true;
        s.sink = entry == Entry::varlen;
        s.bias = layout == Layout::reversed ? Bias::full : Bias::none;
        s.mask = layout == Layout::strided ? Mask::random : Mask::none;
        cases.push_back(s);
      }
    }
  }
}

void add_page_sizes(Cases& cases) {
  for (const Index page_size : {1, 2, 3, 16, 48, 64, 96, 128, 256, 512}) {
    for (const bool windowed : {false, true}) {
      CaseSpec s;
      s.name = "page_" + number(page_size) + (windowed ? "_window" : "");
      s.batch = 3;
      s.hq = 6;
      s.sq = 3;
      s.lengths_k = {1, 37, 300};
      s.dtype = DType::bf16;
      s.entry = Entry::paged;
      s.page_size = page_size;
      s.window_left = windowed ? 20 : -1;
      s.window_right = windowed ? 0 : -1;
      cases.push_back(s);
    }
  }
}

void add_scales(Cases& cases) {
  constexpr std::pair<const char*, float> scales[] = {
      {"zero", 0.0f}, {"negative", -0.2f}, {"large", 3.0f}, {"tiny", 1e-6f}};
  for (const auto& [label, scale] : scales) {
    for (const Softmax policy : policies) {
      CaseSpec s;
      s.name = std::string("scale_") + label + "_" + number(static_cast<Index>(policy));
      s.batch = 1;
      s.sq = 50;
      s.sk = 300;
      s.scale = scale;
      s.softmax = policy;
      s.dtype = dtypes[cases.size() % 3];
      s.softcap = policy == Softmax::online ? 5.0f : 0.0f;
      cases.push_back(s);
    }
  }
}

// Random combinations: with this many samples every pair of options meets, most triples too.
void add_mixtures(Cases& cases) {
  constexpr std::pair<Index, Index> windows[] = {{-1, -1}, {-1, -1}, {-1, -1}, {0, 0},   {3, 0},
                                                 {-1, 0},  {0, -1},  {17, 5},  {64, 64}, {200, -1},
                                                 {-1, 2},  {5, 300}, {0, 40},  {1, 1}};
  constexpr Index groups[] = {1, 1, 2, 3, 5};
  constexpr Index dims[] = {16, 24, 32, 40, 64, 72, 80, 128};
  Random random(20);
  const auto one_in = [&random](Index n) { return random.below(n) == 0; };
  const auto pick = [&random](const auto& list) {
    return list[static_cast<std::size_t>(random.below(static_cast<Index>(std::size(list))))];
  };
  for (int i = 0; i < 220; ++i) {
    CaseSpec s;
    s.name = "mixture_" + number(i);
    s.batch = 1 + random.below(5);
    s.hkv = 1 + random.below(3);
    s.hq = s.hkv * pick(groups);
    s.sq = one_in(4) ? 1 + random.below(4) : 1 + random.below(150);
    s.sk = one_in(3) ? 1 + random.below(600) : 1 + random.below(150);
    s.d = pick(dims);
    s.dv = one_in(4) ? pick(dims) : s.d;
    s.dtype = pick(dtypes);
    if (one_in(5)) s.out_dtype = DType::f32;
    s.layout = pick(layouts);
    s.entry = pick(entries);
    s.page_size = 1 + random.below(70);
    s.causal = one_in(2);
    std::tie(s.window_left, s.window_right) = pick(windows);
    s.softcap = one_in(4) ? 3.0f + static_cast<float>(random.below(30)) : 0.0f;
    if (one_in(4)) s.scale = static_cast<float>(0.05 + random.uniform());
    s.sink = one_in(3);
    s.alibi = one_in(4);
    s.bias = one_in(3) ? static_cast<Bias>(1 + random.below(4)) : Bias::none;
    s.mask = one_in(3) ? static_cast<Mask>(1 + random.below(4)) : Mask::none;
    s.dropout = one_in(5) ? 0.25f : 0.0f;
    s.lse = !one_in(6);
    s.num_splits = one_in(3) ? static_cast<std::int32_t>(1 + random.below(9)) : 0;
    s.softmax = pick(policies);
    s.logits = one_in(4) ? 8.0 : 1.0;
    cases.push_back(s);
  }
}

}  // namespace

std::vector<CaseSpec> eight_bit_cases() {
  Cases cases;
  constexpr Scales scales[] = {Scales::none, Scales::one, Scales::per_head, Scales::per_query_head,
                               Scales::per_block};
  constexpr DType results[] = {DType::bf16, DType::f16, DType::f32};
  constexpr std::pair<Index, Index> dims[] = {{64, 64}, {128, 128}, {80, 80}, {32, 48}, {40, 24}};
  for (std::size_t i = 0; i < 42; ++i) {
    CaseSpec s;
    s.name = "eight_bits_" + number(static_cast<Index>(i));
    s.batch = 1 + static_cast<Index>(i % 3);
    s.hkv = 1 + static_cast<Index>(i % 2);
    s.hq = s.hkv * (i % 4 == 1 ? 3 : 1);
    s.sq = i % 5 == 0 ? 1 : 40 + 31 * static_cast<Index>(i % 4);
    s.sk = 33 + 67 * static_cast<Index>(i % 7 % 5);
    std::tie(s.d, s.dv) = dims[i / 2 % 5];
    s.dtype = i % 4 == 3 ? DType::e5m2 : DType::e4m3;
    s.out_dtype = results[i % 3];
    s.layout = layouts[i % 8];
    s.entry = entries[i % 6];
    s.scales = scales[i % 5];
    s.page_size = i % 2 == 0 ? 16 : 24;
    s.causal = i % 2 == 1;
    if (i % 7 == 2) s.window_left = 50;
    if (i % 9 == 4) s.softcap = 8.0f;
    s.sink = i % 6 == 5;
    s.softmax = policies[i % 4];
    cases.push_back(s);
  }
  return cases;
}

std::vector<CaseSpec> all_cases() {
  Cases cases;
  add_head_dims(cases);
  add_lengths(cases);
  add_decode(cases);
  add_layouts(cases);
  add_page_sizes(cases);
  add_scales(cases);
  add_mixtures(cases);
  return cases;
}

}  // namespace fovea::test
