"""Wrong input: the exception Python users expect, with the argument's name, and nothing written."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import fovea


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


Q, K = ones(1, 4, 4, 8), ones(1, 6, 2, 8)

WRONG = [
    (ValueError, "k", lambda: fovea.flash_attn_func(Q, ones(1, 6, 2, 9), K)),
    (ValueError, "k", lambda: fovea.flash_attn_func(Q, ones(1, 6, 3, 8), ones(1, 6, 3, 8))),
    (ValueError, "v", lambda: fovea.flash_attn_func(Q, K, ones(1, 5, 2, 8))),
    (ValueError, "q", lambda: fovea.flash_attn_func(ones(4, 8), K, K)),
    (ValueError, "k", lambda: fovea.flash_attn_func(Q, ones(1, 6, 2, 8, dtype="float16"), K)),
    (TypeError, "q", lambda: fovea.flash_attn_func(ones(1, 4, 4, 8, dtype="float64"), K, K)),
    (TypeError, "q", lambda: fovea.flash_attn_func(ones(1, 4, 4, 8, dtype="int32"), K, K)),
    (TypeError, "q", lambda: fovea.flash_attn_func("text", K, K)),
    (TypeError, "k", lambda: fovea.flash_attn_func(Q, [1.0], K)),
    (TypeError, "causal", lambda: fovea.flash_attn_func(Q, K, K, 0.0, None)),
    (ValueError, "softmax_scale", lambda: fovea.flash_attn_func(Q, K, K, float("nan"))),
    (ValueError, "window_size", lambda: fovea.flash_attn_func(Q, K, K, window_size=(-2, 0))),
    (ValueError, "window_size", lambda: fovea.flash_attn_func(Q, K, K, window_size=5)),
    (ValueError, "softcap", lambda: fovea.flash_attn_func(Q, K, K, softcap=-1.0)),
    (ValueError, "dropout_p", lambda: fovea.flash_attn_func(Q, K, K, dropout_p=1.0)),
    (ValueError, "num_splits", lambda: fovea.flash_attn_func(Q, K, K, num_splits=-1)),
    (ValueError, "alibi_slopes", lambda: fovea.flash_attn_func(Q, K, K, alibi_slopes=ones(3))),
    (ValueError, "learnable_sink", lambda: fovea.flash_attn_func(Q, K, K, learnable_sink=ones(3))),
    (ValueError, "qv", lambda: fovea.flash_attn_func(Q, K, K, qv=ones(1, 4, 4, 7))),
    (ValueError, "attention_chunk", lambda: fovea.flash_attn_func(Q, K, K, attention_chunk=-1)),
    (ValueError, "q_descale", lambda: fovea.flash_attn_func(Q, K, K, q_descale=ones(1, 2))),
    (ValueError, "qkv", lambda: fovea.flash_attn_qkvpacked_func(ones(1, 4, 2, 4, 8))),
    (ValueError, "kv", lambda: fovea.flash_attn_kvpacked_func(Q, ones(1, 4, 3, 4, 8))),
    (
        ValueError, "cu_seqlens_q",
        lambda: fovea.flash_attn_varlen_func(Q[0], K[0], K[0], [0, 5], [0, 6], 5, 6),
    ),
    (
        TypeError, "cu_seqlens_q",
        lambda: fovea.flash_attn_varlen_func(Q[0], K[0], K[0], ones(2), np.int32([0, 6]), 4, 6),
    ),
    (ValueError, "cache_seqlens", lambda: fovea.flash_attn_with_kvcache(Q, K, K, cache_seqlens=7)),
    (
        ValueError, "cache_seqlens",
        lambda: fovea.flash_attn_with_kvcache(Q, K, K, K, K, cache_seqlens=1),
    ),
    (ValueError, "k_cache", lambda: fovea.flash_attn_with_kvcache(Q, *(ones(2, 6, 2, 8),) * 2)),
    (
        ValueError, "block_table",
        lambda: fovea.flash_attn_with_kvcache(
            Q, K, K, cache_seqlens=6, block_table=np.array([[1]], np.int32)
        ),
    ),
    (ValueError, "attn_mask", lambda: fovea.sdpa(Q, Q, Q, ones(4, 4, dtype=bool), is_causal=True)),
    (ValueError, "key", lambda: fovea.sdpa(ones(1, 4, 4, 8), ones(1, 2, 4, 8), ones(1, 2, 4, 8))),
    (ValueError, "out_partial", lambda: fovea.flash_attn_combine(Q, Q)),
    (ValueError, "lse_partial", lambda: fovea.flash_attn_combine(Q[None], Q[None])),
    (TypeError, "out", lambda: fovea.plan(Q, K, K, None)),
    (ValueError, "out", lambda: fovea.plan(Q, K, K, Q)),
    (ValueError, "device", lambda: fovea.plan(Q, K, K, Q.copy(), device="tpu")),
    (TypeError, "soft", lambda: fovea.plan(Q, K, K, Q.copy(), soft=1)),
    (ValueError, "layout", lambda: fovea.plan(Q, K, K, Q.copy(), layout="bsdh")),
    (ValueError, "threads", lambda: fovea.plan(Q, K, K, Q.copy(), threads=-1)),
    (TypeError, "threads", lambda: fovea.plan(Q, K, K, Q.copy(), threads="two")),
    (TypeError, "device", lambda: fovea.plan(Q, K, K, Q.copy(), device=0)),
    (ValueError, "dropout_seed", lambda: fovea.plan(Q, K, K, Q.copy(), dropout_seed=-1)),
    (TypeError, "softmax_scale", lambda: fovea.flash_attn_func(Q, K, K, "big")),
    (TypeError, "softcap", lambda: fovea.flash_attn_func(Q, K, K, softcap=None)),
    (TypeError, "dropout_p", lambda: fovea.flash_attn_func(Q, K, K, dropout_p="half")),
    (TypeError, "num_splits", lambda: fovea.flash_attn_func(Q, K, K, num_splits=2.5)),
    (ValueError, "num_splits", lambda: fovea.flash_attn_func(Q, K, K, num_splits=2**40)),
    (TypeError, "deterministic", lambda: fovea.flash_attn_func(Q, K, K, deterministic=None)),
    (TypeError, "window_size", lambda: fovea.flash_attn_func(Q, K, K, window_size=(1.5, 0))),
    (TypeError, "attention_chunk", lambda: fovea.flash_attn_func(Q, K, K, attention_chunk=2.5)),
    (TypeError, "q", lambda: fovea.flash_attn_func([1.0], K, K, attention_chunk=2)),
    (TypeError, "k", lambda: fovea.flash_attn_func(Q, [1.0], K, qv=Q)),
    (TypeError, "qv", lambda: fovea.flash_attn_func(Q, K, K, qv=[1.0])),
    (TypeError, "qkv", lambda: fovea.flash_attn_qkvpacked_func([1.0])),
    (ValueError, "qkv", lambda: fovea.flash_attn_qkvpacked_func(Q[0], num_heads_q=2)),
    (TypeError, "num_heads_q", lambda: fovea.flash_attn_qkvpacked_func(Q, num_heads_q="two")),
    (TypeError, "kv", lambda: fovea.flash_attn_kvpacked_func(Q, [1.0])),
    (
        TypeError, "max_seqlen_q",
        lambda: fovea.flash_attn_varlen_func(Q[0], K[0], K[0], [0, 4], [0, 6], "four", 6),
    ),
    (TypeError, "q", lambda: fovea.flash_attn_with_kvcache("text", K, K)),
    (TypeError, "k_cache", lambda: fovea.flash_attn_with_kvcache(Q, [1.0], K)),
    (ValueError, "k_cache", lambda: fovea.flash_attn_with_kvcache(Q, K[0], K)),
    *(
        (kind, "cache_seqlens", lambda n=n: fovea.flash_attn_with_kvcache(Q, K, K, cache_seqlens=n))
        for kind, n in (
            (TypeError, "six"), (TypeError, 2.0), (TypeError, [2.5]), (TypeError, np.ones(1)),
            (ValueError, -1), (ValueError, [1, 2]),
        )
    ),
    *(
        (kind, name, lambda o={name: n}: fovea.flash_attn_with_kvcache(Q, K, K, **o))
        for kind, name, n in (
            (ValueError, "cache_batch_idx", [5]), (ValueError, "cache_batch_idx", [-1]),
            (ValueError, "cache_batch_idx", [0, 0]), (TypeError, "cache_batch_idx", "first"),
            (ValueError, "cache_leftpad", [1, 2]), (TypeError, "cache_leftpad", "one"),
            (TypeError, "block_table", "pages"), (ValueError, "block_table", np.zeros(1, "int32")),
        )
    ),
    (TypeError, "out_partial", lambda: fovea.flash_attn_combine([1.0], Q)),
    *(
        (ValueError, name, lambda o=o, lse=lse: fovea.flash_attn_combine(Q[None], lse, **o))
        for name, lse, o in (
            ("lse_partial", ones(1, 1, 4, 4, dtype="float16"), {}),
            ("out", ones(1, 1, 4, 4), {"out": ones(1, 4, 4, 9)}),
            ("out_dtype", ones(1, 1, 4, 4), {"out_dtype": "int8"}),
            ("learnable_sink", ones(1, 1, 4, 4), {"learnable_sink": ones(3)}),
        )
    ),
    (TypeError, "query", lambda: fovea.sdpa("text", Q, Q)),
    (TypeError, "key", lambda: fovea.sdpa(Q, [1.0], Q)),
    (TypeError, "attn_mask", lambda: fovea.sdpa(Q, Q, Q, [[True]])),
    (TypeError, "attn_mask", lambda: fovea.sdpa(Q, Q, Q, ones(4, 4, dtype="int32"))),
    (TypeError, "scale", lambda: fovea.sdpa(Q, Q, Q, scale="big")),
    (TypeError, "is_causal", lambda: fovea.sdpa(Q, Q, Q, is_causal=None)),
    (ValueError, "key", lambda: fovea.sdpa(Q[None, None], *(ones(1, 2, 1, 4, 4, 8),) * 2)),
    (ValueError, "seed", lambda: fovea.quantize_fp8(Q, K, K, seed=-1)),
    (ValueError, "scales", lambda: fovea.quantize_fp8(Q, K, K, scales="rows")),
]


@pytest.mark.parametrize(
    "kind, argument, call", WRONG, ids=[f"{i}-{wrong[1]}" for i, wrong in enumerate(WRONG)]
)
def test_says_which_argument(kind, argument, call):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value).split()[0] == argument, caught.value


def test_says_both_names_as_the_function_knows_them():
    with pytest.raises(ValueError, match="^cache_seqlens is -1 at entry 0, but k_cache has room"):
        fovea.flash_attn_with_kvcache(Q, K, K, cache_seqlens=-1)
    with pytest.raises(ValueError, match="^key has .* but query has"):
        fovea.sdpa(Q, ones(1, 4, 4, 9), Q)


def test_numbers_of_numpy_are_numbers():
    expected = fovea.flash_attn_func(Q, K, K, 0.5, True, window_size=(2, 0))
    np.testing.assert_array_equal(
        fovea.flash_attn_func(
            Q, K, K, np.float32(0.5), np.bool_(True), window_size=np.array([2, 0]),
            num_splits=np.int64(1),
        ),
        expected,
    )
    np.testing.assert_array_equal(
        fovea.flash_attn_with_kvcache(Q, K, K, cache_seqlens=np.int64(5)),
        fovea.flash_attn_with_kvcache(Q, K, K, cache_seqlens=5),
    )


def test_refused_append_writes_nothing():
    k_cache, v_cache = ones(2, 4, 2, 8), ones(2, 4, 2, 8)
    with pytest.raises(ValueError, match="cache_seqlens leaves no room at entry 1"):
        fovea.flash_attn_with_kvcache(
            ones(2, 1, 2, 8), k_cache, v_cache, 7 * ones(2, 1, 2, 8), 7 * ones(2, 1, 2, 8),
            cache_seqlens=np.array([0, 4], np.int32),
        )
    assert (k_cache == 1).all() and (v_cache == 1).all()


def test_read_only_output():
    out = Q.copy()
    out.flags.writeable = False
    with pytest.raises(TypeError, match="^out is read-only"):
        fovea.plan(Q, K, K, out)


def test_tensors_freed_early():
    call = fovea._native.Call(
        *(ones(1, 64, 4, 64) for _ in range(3)), np.empty((1, 64, 4, 64), "float32"), *(None,) * 10,
        0, 0, None, False, -1, -1, 0.0, 0.0, 0, 0, 0, False, 0, False,
    )
    gc.collect()
    junk = [np.full((1, 64, 4, 64), np.nan, np.float32) for _ in range(8)]
    fovea._native.attention(call)
    del call, junk


def test_tracers_are_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="q is traced by jax"):
        jax.jit(fovea.flash_attn_func)(*(jax.numpy.ones((1, 4, 2, 8)) for _ in range(3)))
