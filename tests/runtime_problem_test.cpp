// Every fault of the input is one sentence that names the argument and its value, through C++ and C
// alike, and nothing is written. What looks odd but is legal is accepted and computed.
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/fovea.hpp"
#include "fovea/fp8.hpp"
#include "runtime/problem.h"
#include "tests/runtime_setup.h"
#include "tests/sentence.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float inf = std::numeric_limits<float>::infinity();
constexpr std::int64_t large = std::int64_t{1} << 40;

struct BadInput {
  const char* name;
  Kind kind;
  std::function<void(SmallCall&, Problem&)> spoil;
  std::vector<std::string> fragments;  // of the sentence
};

void* shifted(void* data, std::ptrdiff_t bytes) { return static_cast<std::byte*>(data) + bytes; }

const BadInput shape_faults[] = {
    {"no_q", Kind::dense, [](SmallCall&, Problem& p) { p.q = {}; }, {"q is absent"}},
    {"no_out", Kind::dense, [](SmallCall&, Problem& p) { p.out = {}; }, {"out is absent"}},
    {"bias_marked_absent",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.bias.present = false; },
     {"bias has data but is marked absent"}},
    {"negative_extent",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.shape[1] = -5; },
     {"k has shape (2, -5, 2, 8)", "0..2147483647"}},
    {"huge_extent",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.shape[1] = large; },
     {"q has shape (2, 1099511627776, 4, 8)"}},
    {"null_data",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.v.data = nullptr; },
     {"v has null data", "(2, 5, 2, 6)"}},
    {"misaligned",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.data = shifted(p.k.data, 2); },
     {"k has data at address", "aligned to 4 bytes"}},
    {"stride_overflow",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.stride[0] = std::numeric_limits<std::int64_t>::max(); },
     {"q has strides (9223372036854775807, 32, 8, 1)", "address space"}},
    {"stride_least",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.stride[0] = std::numeric_limits<std::int64_t>::min(); },
     {"q has strides (-9223372036854775808"}},
    {"below_address_zero",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.stride[0] = -(large << 8); },
     {"q has strides", "address space"}},
    {"absurd_helper_shape",
     Kind::dense,
     [](SmallCall& c, Problem& p) {
       p.q = bshd(c.q.tensor().data, DType::f32, large, large, large, 8);
     },
     {"q has shape (1099511627776,"}},
    {"heads_not_divisible",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.shape[2] = p.v.shape[2] = 3; },
     {"k has 3 heads but q has 4", "multiple of the number of key/value heads"}},
    {"more_kv_heads",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.shape[2] = p.v.shape[2] = 12; },
     {"k has 12 heads but q has 4"}},
    {"zero_heads",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.shape[2] = 0; },
     {"q has 0 heads"}},
    {"zero_kv_heads",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.shape[2] = 0; },
     {"k has 0 heads"}},
    {"zero_head_dim",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.shape[3] = 0; },
     {"q has head dimension 0", "1..576"}},
    {"large_head_dim",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.shape[3] = 577; },
     {"q has head dimension 577", "1..576"}},
    {"large_head_dim_v",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.v.shape[3] = 513; },
     {"v has head dimension 513", "1..512"}},
    {"head_dim_mismatch",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.shape[3] = 7; },
     {"k has head dimension 7 but q has 8"}},
    {"v_rows",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.v.shape[1] = 4; },
     {"v has shape (2, 4, 2, 6) but k has (2, 5, 2, 8)"}},
    {"v_heads", Kind::dense, [](SmallCall&, Problem& p) { p.v.shape[2] = 1; }, {"v has shape"}},
    {"k_batch",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.shape[0] = p.v.shape[0] = 1; },
     {"k holds 1 sequences", "number of query sequences is 2"}},
    {"out_rows",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.out.shape[1] = 2; },
     {"out has shape (2, 2, 4, 6)", "must be (2, 3, 4, 6)"}},
    {"out_head_dim",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.out.shape[3] = 5; },
     {"out has shape (2, 3, 4, 5)"}},
    {"lse_layout",
     Kind::dense,
     [](SmallCall&, Problem& p) {
       p.lse.shape = {2, 3, 4, 1};
     },
     {"lse has shape (2, 3, 4, 1)", "must be (2, 4, 3, 1)"}},
    {"bias_keys",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.bias.shape[3] = 4; },
     {"bias has shape (2, 4, 3, 4)", "must be (2, 4, 3, 5)", "broadcast"}},
    {"mask_heads",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.mask.shape[1] = 2; },
     {"mask has shape (1, 2, 3, 5)", "broadcast"}},
    {"sink_heads",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.sink.shape[3] = 2; },
     {"sink has shape (1, 1, 1, 2)", "must be (1, 1, 1, 4)"}},
    {"alibi_heads",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.alibi.shape[1] = 1; },
     {"alibi has shape (2, 1, 1, 1)", "first extent may be 1"}},
};

const BadInput dtype_faults[] = {
    {"q_boolean",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.dtype = DType::boolean; },
     {"q has dtype boolean", "f32 or bf16 or f16"}},
    {"unknown_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.dtype = static_cast<DType>(9); },
     {"q", "dtype", "9"}},
    {"k_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.k.dtype = DType::bf16; },
     {"k has dtype bf16", "q in f32", "must be f32"}},
    {"v_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.v.dtype = DType::f16; },
     {"v has dtype f16"}},
    {"out_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.out.dtype = DType::bf16; },
     {"out has dtype bf16"}},
    {"out_other_half",
     Kind::dense,
     [](SmallCall&, Problem& p) {
       p.q.dtype = p.k.dtype = p.v.dtype = DType::bf16;
       p.out.dtype = DType::f16;
     },
     {"out has dtype f16", "q in bf16", "f32 or bf16"}},
    {"out_fp8",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::e4m3; },
     {"out has dtype e4m3", "f32 or bf16 or f16"}},
    {"lse_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.lse.dtype = DType::f16; },
     {"lse has dtype f16", "must be f32"}},
    {"bias_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.bias.dtype = DType::bf16; },
     {"bias has dtype bf16"}},
    {"mask_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.mask.dtype = DType::e4m3; },
     {"mask has dtype e4m3", "must be boolean"}},
    {"sink_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.sink.dtype = DType::bf16; },
     {"sink has dtype bf16"}},
    {"alibi_dtype",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.alibi.dtype = DType::f16; },
     {"alibi has dtype f16"}},
};

const BadInput option_faults[] = {
    {"scale_nan",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softmax_scale = nan; },
     {"softmax_scale is nan", "finite"}},
    {"scale_infinite",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softmax_scale = -inf; },
     {"softmax_scale is -inf"}},
    {"scale_near_overflow",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softmax_scale = 3e38f; },
     {"softmax_scale is 3e+38", "2^127"}},
    {"softcap_negative",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softcap = -1.5f; },
     {"softcap is -1.5", "0 for none"}},
    {"softcap_nan",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softcap = nan; },
     {"softcap is nan"}},
    {"softcap_infinite",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softcap = inf; },
     {"softcap is inf"}},
    {"softcap_subnormal",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.softcap = 1e-40f; },
     {"softcap is 9.99995e-41"}},
    {"softcap_quotient",
     Kind::dense,
     [](SmallCall&, Problem& p) {
       p.softmax_scale = 1e9f;
       p.softcap = 1e-37f;
     },
     {"softcap is 1e-37", "softmax_scale 1e+09"}},
    {"window_left",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.window_left = -3, p.window_right = 0; },
     {"window_left is -3", "-1 for unbounded"}},
    {"window_right",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.window_left = 3, p.window_right = -2; },
     {"window_right is -2"}},
    {"window_causal",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.causal = true, p.window_right = -2; },
     {"window_right is -2"}},
    {"dropout_one",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.dropout.probability = 1.0f; },
     {"dropout.probability is 1", "[0, 1)"}},
    {"dropout_negative",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.dropout.probability = -0.1f; },
     {"dropout.probability is -0.1"}},
    {"dropout_nan",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.dropout.probability = nan; },
     {"dropout.probability is nan"}},
    {"num_splits",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.num_splits = -2; },
     {"num_splits is -2"}},
    {"max_seqlen_negative",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.max_seqlen_q = -1; },
     {"max_seqlen_q is -1", "0..2147483647"}},
    {"max_seqlen_huge",
     Kind::varlen,
     [](SmallCall&, Problem& p) { p.max_seqlen_k = large; },
     {"max_seqlen_k is 1099511627776", "0..2147483647"}},
    {"max_seqlen_paged",
     Kind::paged,
     [](SmallCall&, Problem& p) { p.max_seqlen_k = -1; },
     {"max_seqlen_k is -1", "0..2147483647"}},
    {"max_seqlen_dense",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.max_seqlen_k = 7; },
     {"max_seqlen_k is 7", "k is dense with 5 rows"}},
};

const BadInput length_faults[] = {
    {"cu_start",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_q = c.keep({1, 2, 5});
     },
     {"cu_seqlens_q starts at 1", "start at 0"}},
    {"cu_decreases",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_k = c.keep({0, 4, 3});
     },
     {"cu_seqlens_k decreases from 4 to 3 at entry 2"}},
    {"cu_negative",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_k = c.keep({0, -4, 3});
     },
     {"cu_seqlens_k decreases from 0 to -4 at entry 1"}},
    {"cu_overruns",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_q = c.keep({0, 2, 7});
     },
     {"cu_seqlens_q ends at 7 but q has 6 rows"}},
    {"cu_k_overruns",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_k = c.keep({0, 4, 2147483647});
     },
     {"cu_seqlens_k ends at 2147483647 but k has 10 rows"}},
    {"cu_empty",
     Kind::varlen,
     [](SmallCall&, Problem& p) { p.cu_seqlens_q = p.cu_seqlens_q.subspan(3); },
     {"cu_seqlens_q has 0 entries", "B + 1"}},
    {"cu_count",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_k = c.keep({0, 4, 5, 9});
     },
     {"cu_seqlens_k has 4 entries", "must have 3"}},
    {"cu_k_alone",
     Kind::varlen,
     [](SmallCall&, Problem& p) { p.cu_seqlens_q = {}; },
     {"cu_seqlens_k has 3 entries", "number of query sequences is 1"}},
    {"cu_dense_q",
     Kind::dense,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_q = c.keep({0, 2, 3});
     },
     {"q has shape (2, 3, 4, 8)", "cu_seqlens_q", "must be 1"}},
    {"max_seqlen_small",
     Kind::varlen,
     [](SmallCall&, Problem& p) { p.max_seqlen_k = 4; },
     {"max_seqlen_k is 4", "has 5 rows"}},
    {"varlen_bias",
     Kind::varlen,
     [](SmallCall&, Problem& p) { p.max_seqlen_k = 6; },
     {"bias has shape (2, 4, 3, 5)", "must be (2, 4, 3, 6)"}},
    {"used_beyond",
     Kind::dense,
     [](SmallCall& c, Problem& p) {
       p.seqused_k = c.keep({5, 6});
     },
     {"seqused_k is 6 at entry 1", "room for 5"}},
    {"used_negative",
     Kind::dense,
     [](SmallCall& c, Problem& p) {
       p.seqused_q = c.keep({-1, 3});
     },
     {"seqused_q is -1 at entry 0"}},
    {"used_count",
     Kind::dense,
     [](SmallCall& c, Problem& p) {
       p.seqused_q = c.keep({1, 2, 3});
     },
     {"seqused_q has 3 entries", "2 sequences"}},
    {"used_beyond_sequence",
     Kind::varlen,
     [](SmallCall& c, Problem& p) {
       p.seqused_q = c.keep({3, 3});
     },
     {"seqused_q is 3 at entry 0", "room for 2"}},
    {"table_entry_high",
     Kind::paged,
     [](SmallCall& c, Problem& p) {
       p.block_table = c.keep({5, 1, 0, 0, 7, 2});
     },
     {"block_table is 7 at row 1, column 1", "k has 7 pages"}},
    {"table_entry_negative",
     Kind::paged,
     [](SmallCall& c, Problem& p) {
       p.block_table = c.keep({5, -1, 0, 0, 6, 2});
     },
     {"block_table is -1 at row 0, column 1"}},
    {"table_count",
     Kind::paged,
     [](SmallCall& c, Problem& p) {
       p.block_table = c.keep({5, 1, 0, 0, 6});
     },
     {"block_table has 5 entries", "block_table_columns = 3"}},
    {"table_columns_negative",
     Kind::paged,
     [](SmallCall&, Problem& p) { p.block_table_columns = -3; },
     {"block_table_columns is -3"}},
    {"table_missing",
     Kind::dense,
     [](SmallCall& c, Problem& p) {
       p.block_table_columns = 3;
       p.seqused_k = c.keep({1, 1});
     },
     {"block_table has 0 entries"}},
    {"beyond_table",
     Kind::paged,
     [](SmallCall& c, Problem& p) {
       p.seqused_k = c.keep({5, 13});
     },
     {"seqused_k is 13 at entry 1", "a row of block_table has room for 12"}},
    {"beyond_max_seqlen",
     Kind::paged,
     [](SmallCall&, Problem& p) { p.max_seqlen_k = 8; },
     {"seqused_k is 9 at entry 1", "max_seqlen_k has room for 8"}},
    {"page_size",
     Kind::paged,
     [](SmallCall&, Problem& p) { p.k.shape[1] = p.v.shape[1] = 0; },
     {"page size of 0"}},
    {"paged_without_lengths",
     Kind::paged,
     [](SmallCall&, Problem& p) { p.seqused_k = {}; },
     {"seqused_k is absent", "block_table"}},
    {"paged_varlen_keys",
     Kind::paged,
     [](SmallCall& c, Problem& p) {
       p.cu_seqlens_k = c.keep({0, 4, 9});
     },
     {"cu_seqlens_k and block_table are both given"}},
};

const BadInput overlap_faults[] = {
    {"out_stride_zero",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.out.stride[1] = 0; },
     {"out has strides (72, 0, 6, 1)", "share memory"}},
    {"out_strides_equal",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.out.stride[1] = 6; },
     {"out has strides (72, 6, 6, 1)"}},
    {"out_rows_too_close",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.out.stride[1] = 23; },
     {"out has strides (72, 23, 6, 1)"}},
    {"lse_stride_zero",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.lse.stride[0] = 0; },
     {"lse has strides (0, 3, 1, 1)"}},
    {"out_is_q",
     Kind::dense,
     [](SmallCall&, Problem& p) {
       p.out.data = p.q.data;
       p.lse = {};
     },
     {"out shares memory with q"}},
    {"out_inside_k",
     Kind::dense,
     [](SmallCall&, Problem& p) {
       p.k.stride = {0, 0, 0, 0};
       p.k.data = shifted(p.out.data, 4 * 17);
     },
     {"out shares memory with k"}},
    {"lse_in_out",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.lse.data = p.out.data; },
     {"out shares memory with lse"}},
    {"out_in_sink",
     Kind::dense,
     [](SmallCall&, Problem& p) { p.sink.data = p.out.data; },
     {"out shares memory with sink"}},
};

// What C and C++ say, and that both left the outputs alone.
void expect_refused(const BadInput& bad) {
  SCOPED_TRACE(bad.name);
  SmallCall call(bad.kind);
  const std::vector<std::byte> out_before = call.out.buffer();
  const std::vector<std::byte> lse_before = call.lse.buffer();
  const Plan good = plan(call.problem);
  std::vector<std::byte> workspace(good.workspace_bytes());
  bad.spoil(call, call.problem);

  std::string sentence;
  try {
    attention(call.problem);
    ADD_FAILURE() << "accepted";
  } catch (const Unsupported& error) {
    ADD_FAILURE() << "called unsupported: " << error.what();
  } catch (const Error& error) {
    sentence = error.what();
  }
  for (const std::string& fragment : bad.fragments) {
    EXPECT_NE(sentence.find(fragment), std::string::npos)
        << '"' << fragment << "\" is not in \"" << sentence << '"';
  }
  EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
  EXPECT_THROW(static_cast<void>(plan(call.problem)), Error);
  EXPECT_THROW(good.run(call.problem, workspace), Error);

  const fovea_problem in_c = to_c(call.problem);
  EXPECT_EQ(fovea_attention(&in_c, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  for (const std::string& fragment : bad.fragments) {
    EXPECT_NE(std::string(fovea_last_error()).find(fragment), std::string::npos)
        << '"' << fragment << "\" is not in \"" << fovea_last_error() << '"';
  }
  EXPECT_TRUE(same_bits(call.out.buffer(), out_before));
  EXPECT_TRUE(same_bits(call.lse.buffer(), lse_before));
}

TEST(BadInput, Shapes) {
  for (const BadInput& bad : shape_faults) expect_refused(bad);
}
TEST(BadInput, Dtypes) {
  for (const BadInput& bad : dtype_faults) expect_refused(bad);
}
TEST(BadInput, Options) {
  for (const BadInput& bad : option_faults) expect_refused(bad);
}
TEST(BadInput, Lengths) {
  for (const BadInput& bad : length_faults) expect_refused(bad);
}
TEST(BadInput, Overlaps) {
  for (const BadInput& bad : overlap_faults) expect_refused(bad);
}

TEST(BadInput, NullLengthsWithEntries) {
  SmallCall call;
  call.problem.seqused_k = {static_cast<const std::int32_t*>(nullptr), 2};
  try {
    static_cast<void>(validate(call.problem));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("seqused_k has null data but 2 entries"),
              std::string::npos)
        << error.what();
  }
}

struct LegalInput {
  const char* name;
  Kind kind;
  std::function<void(SmallCall&, Problem&)> change;
};

void without_extras(Problem& p) { p.bias = p.mask = p.sink = p.alibi = {}; }

const LegalInput legal_inputs[] = {
    {"dense", Kind::dense, [](SmallCall&, Problem&) {}},
    {"varlen_with_slack", Kind::varlen, [](SmallCall&, Problem&) {}},
    {"paged_with_garbage_entry", Kind::paged, [](SmallCall&, Problem&) {}},
    {"no_batch", Kind::dense,
     [](SmallCall&, Problem& p) {
       without_extras(p);
       for (Tensor* t : {&p.q, &p.k, &p.v, &p.out, &p.lse}) t->shape[0] = 0, t->data = nullptr;
     }},
    {"no_queries", Kind::dense,
     [](SmallCall&, Problem& p) {
       without_extras(p);
       p.q.shape[1] = p.out.shape[1] = p.lse.shape[2] = 0;
     }},
    {"no_keys", Kind::dense,
     [](SmallCall&, Problem& p) {
       p.bias = p.mask = {};
       p.k.shape[1] = p.v.shape[1] = 0;
       p.k.data = p.v.data = nullptr;
     }},
    {"no_sequences_varlen", Kind::varlen,
     [](SmallCall& c, Problem& p) {
       without_extras(p);
       p.cu_seqlens_q = p.cu_seqlens_k = c.keep({0});
     }},
    {"empty_sequences_varlen", Kind::varlen,
     [](SmallCall& c, Problem& p) {
       without_extras(p);
       p.cu_seqlens_q = c.keep({0, 0, 0});
       p.cu_seqlens_k = c.keep({0, 0, 7});
     }},
    {"full_table", Kind::paged,
     [](SmallCall& c, Problem& p) {
       p.seqused_k = c.keep({0, 12});
     }},
    {"bounded_page_lengths", Kind::paged,
     [](SmallCall&, Problem& p) {
       p.bias = p.mask = {};
       p.max_seqlen_k = 9;
     }},
    {"varlen_queries_dense_keys", Kind::dense,
     [](SmallCall& c, Problem& p) {
       without_extras(p);
       c.q = HostTensor(DType::f32, {1, 6, 4, 8});
       c.q.fill([](Index, Index b, Index, Index d) { return static_cast<double>(b - d) / 8; });
       c.out = HostTensor(DType::f32, {1, 6, 4, 6});
       p.q = c.q.tensor();
       p.out = c.out.tensor();
       p.lse = {};
       p.cu_seqlens_q = c.keep({0, 1, 6});
     }},
    {"window_zero", Kind::dense,
     [](SmallCall&, Problem& p) { p.window_left = p.window_right = 0; }},
    {"window_huge", Kind::dense,
     [](SmallCall&, Problem& p) {
       p.window_left = p.window_right = std::numeric_limits<std::int64_t>::max();
     }},
    {"window_and_causal", Kind::dense,
     [](SmallCall&, Problem& p) {
       p.causal = true;
       p.window_left = 2;
       p.window_right = 3;
     }},
    {"scale_zero", Kind::dense, [](SmallCall&, Problem& p) { p.softmax_scale = 0.0f; }},
    {"scale_negative", Kind::dense, [](SmallCall&, Problem& p) { p.softmax_scale = -2.0f; }},
    {"broadcast_keys", Kind::dense,
     [](SmallCall&, Problem& p) { p.k.stride[0] = p.v.stride[2] = 0; }},
    {"keys_backwards", Kind::dense,
     [](SmallCall& c, Problem& p) {
       p.k = c.k.reversed(1).tensor();
       p.v = c.v.reversed(3).tensor();
     }},
    {"v_inside_k", Kind::dense,
     [](SmallCall&, Problem& p) {
       p.v.data = p.k.data;
       p.v.stride = p.k.stride;
     }},
    {"out_beside_q", Kind::dense,
     [](SmallCall& c, Problem& p) {
       // Both in rows of 64 elements: 32 of q, then 24 of out.
       c.q = HostTensor(DType::f32, {2, 3, 1, 64});
       c.q.fill(
           [](Index a, Index b, Index, Index d) { return static_cast<double>(a + b * d % 7) / 8; });
       p.q = c.q.tensor();
       p.q.shape = {2, 3, 4, 8};
       p.q.stride = {192, 64, 8, 1};
       p.out.data = shifted(p.q.data, 32 * 4);
       p.out.stride = {192, 64, 6, 1};
     }},
    {"out_interleaved", Kind::dense,
     [](SmallCall& c, Problem& p) {
       // Strides 4 and 6 for extents 3 and 2: no two sums are equal, though neither nests.
       c.out = HostTensor(DType::f32, {1, 1, 1, 1024});
       p.out.data = c.out.tensor().data;
       p.out.stride = {6, 4, 36, 144};
     }},
};

TEST(LegalInput, IsAcceptedAndTranslated) {
  for (const LegalInput& legal : legal_inputs) {
    SCOPED_TRACE(legal.name);
    SmallCall call(legal.kind);
    legal.change(call, call.problem);
    core::Problem ours;
    ASSERT_NO_THROW(ours = validate(call.problem));
    const core::Problem theirs = to_core(call.problem);
    EXPECT_EQ(ours.batch, theirs.batch);
    EXPECT_EQ(ours.total_q, theirs.total_q);
    EXPECT_EQ(ours.heads_q, theirs.heads_q);
    EXPECT_EQ(ours.heads_kv, theirs.heads_kv);
    EXPECT_EQ(ours.head_dim, theirs.head_dim);
    EXPECT_EQ(ours.head_dim_v, theirs.head_dim_v);
    EXPECT_EQ(ours.page_size, theirs.page_size);
    EXPECT_EQ(ours.softmax_scale, theirs.softmax_scale);
    EXPECT_EQ(ours.window.left, theirs.window.left);
    EXPECT_EQ(ours.window.right, theirs.window.right);
    for (core::int64 b = 0; b < ours.batch; ++b) {
      const core::Sequence x = core::sequence_at(ours, b);
      const core::Sequence y = core::sequence_at(theirs, b);
      EXPECT_EQ(x.row_q, y.row_q);
      EXPECT_EQ(x.row_k, y.row_k);
      EXPECT_EQ(x.capacity_q, y.capacity_q);
      EXPECT_EQ(x.length_q, y.length_q);
      EXPECT_EQ(x.length_k, y.length_k);
      EXPECT_LE(x.length_q, ours.seqlen_q);
      EXPECT_LE(x.length_k, ours.seqlen_k);
    }
  }
}

// Read there, addresses of a device would end the program.
TEST(Reference, ReadsHostMemoryAlone) {
  SmallCall call(Kind::dense);
  call.problem.memory = Memory::device;
  const std::string fault = "memory is not host, where the reference reads";
  expect_in(sentence_of([&] { static_cast<void>(reference(call.problem)); }), fault);
  expect_in(sentence_of([&] { static_cast<void>(reference_backward(call.problem, {})); }), fault);
  expect_in(sentence_of([&] { static_cast<void>(reference_fp8(call.problem)); }), fault);
}

// The values: computed and compared with the oracle, which takes the test's own translation.
TEST(LegalInput, IsComputed) {
  for (const LegalInput& legal : legal_inputs) {
    SCOPED_TRACE(legal.name);
    SmallCall call(legal.kind);
    legal.change(call, call.problem);
    const Reference exact = reference(call.problem);
    const Reference naive = reference(call.problem, Precision::same);
    ASSERT_NO_THROW(attention(call.problem));
    std::vector<double> result;
    const Tensor& out = call.problem.out;
    for (Index a = 0; a < out.shape[0]; ++a) {
      for (Index b = 0; b < out.shape[1]; ++b) {
        for (Index c = 0; c < out.shape[2]; ++c) {
          for (Index d = 0; d < out.shape[3]; ++d) {
            result.push_back(
                static_cast<const float*>(out.data)[a * out.stride[0] + b * out.stride[1] +
                                                    c * out.stride[2] + d * out.stride[3]]);
          }
        }
      }
    }
    EXPECT_TRUE(
        close_to(result, exact.out, naive.out, out_floor(DType::f32, DType::f32, exact.out)));
  }
}

TEST(Tensor, HelpersMakeTheLayoutsTheyName) {
  int data = 0;
  const Tensor a = bshd(&data, DType::bf16, 2, 3, 4, 5);
  EXPECT_EQ(a.shape, (Shape{2, 3, 4, 5}));
  EXPECT_EQ(a.stride, (Shape{60, 20, 5, 1}));
  const Tensor b = bhsd(&data, DType::bf16, 2, 3, 4, 5);
  EXPECT_EQ(b.shape, (Shape{2, 3, 4, 5}));
  EXPECT_EQ(b.stride, (Shape{60, 5, 15, 1}));
  const Tensor c = packed(&data, DType::bf16, 7, 4, 5);
  EXPECT_EQ(c.shape, (Shape{1, 7, 4, 5}));
  EXPECT_EQ(c.stride, (Shape{140, 20, 5, 1}));
  EXPECT_TRUE(a.present && b.present && c.present);
  EXPECT_EQ(a.data, &data);
}

TEST(Names, OfDtypesAndTheirSizes) {
  EXPECT_EQ(name(DType::f32), "f32");
  EXPECT_EQ(name(DType::e5m2), "e5m2");
  EXPECT_EQ(name(DType::boolean), "boolean");
  EXPECT_EQ(size_bytes(DType::f32), 4u);
  EXPECT_EQ(size_bytes(DType::f16), 2u);
  EXPECT_EQ(size_bytes(DType::boolean), 1u);
  EXPECT_EQ(name(Device::emulated_sm100a), "emulated:sm_100a");
  EXPECT_EQ(name(Softmax::sum_guard), "sum_guard");
}

}  // namespace
}  // namespace fovea::test
