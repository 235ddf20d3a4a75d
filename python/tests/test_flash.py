"""The functions of flash-attention, against the definition, with every array library."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from reference import attention, rotate

import fovea
import fovea.flash_attn_2

TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 2e-2}


def normal(rng, *shape):
    """Numbers that float16 has, too."""
    return (np.round(rng.standard_normal(shape) * 128) / 128).astype(np.float32)


def tensors(rng, batch=2, rows=7, keys=9, heads=4, heads_kv=2, dim=16, dim_v=None):
    return (
        normal(rng, batch, rows, heads, dim),
        normal(rng, batch, keys, heads_kv, dim),
        normal(rng, batch, keys, heads_kv, dim_v or dim),
    )


def close(library, result, expected, dtype=None):
    tolerance = TOLERANCE[dtype or library.dtype]
    np.testing.assert_allclose(
        library.back(result).astype(np.float64), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes_and_lse(library, rng, dtype):
    q, k, v = (library.make(x, dtype) for x in tensors(rng))
    if library.name == "cuda" and dtype == "float32":
        with pytest.raises(NotImplementedError, match="bf16 and f16"):
            fovea.flash_attn_func(q, k, v)
        return
    out, lse = fovea.flash_attn_func(q, k, v, causal=True, return_lse=True)
    expected_out, expected_lse = attention(*(library.back(x) for x in (q, k, v)), causal=True)
    assert out.dtype == q.dtype and "float32" in str(lse.dtype)
    assert type(out) is type(q)
    close(library, out, expected_out, dtype)
    close(library, lse, expected_lse)


OPTIONS = {
    "softmax_scale": (dict(softmax_scale=0.1), dict(softmax_scale=0.1)),
    "scale 0": (dict(softmax_scale=0.0), dict(softmax_scale=0.0)),
    "causal": (dict(causal=True), dict(causal=True)),
    "window": (dict(window_size=(3, 1)), dict(window=(3, 1))),
    "window 0": (dict(window_size=(0, 0)), dict(window=(0, 0))),
    "window None": (dict(window_size=(None, 2)), dict(window=(-1, 2))),
    "softcap": (dict(softcap=0.5), dict(softcap=0.5)),
    "alibi": (dict(alibi_slopes=[0.5, 0.25, 0.125, 1.0]), dict(alibi=[0.5, 0.25, 0.125, 1.0])),
    "sink": (dict(learnable_sink=[1.0, -1.0, 3.0, -np.inf]), dict(sink=[1.0, -1.0, 3.0, -np.inf])),
    "num_splits": (dict(num_splits=3), dict()),
    "pack_gqa": (dict(pack_gqa=True), dict()),
    "deterministic": (dict(deterministic=True), dict()),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", ["func", "varlen", "kvcache", "qkvpacked", "kvpacked", "paged"])
def test_every_option_on_every_form(library, rng, form, option):
    given, meant = (dict(x) for x in OPTIONS[option])
    rows, keys = (9, 9) if form == "qkvpacked" else (7, 9)
    heads_kv = 4 if form == "qkvpacked" else 2
    q, k, v = tensors(rng, rows=rows, keys=keys, heads_kv=heads_kv)
    expected, expected_lse = attention(q, k, v, **meant)
    for name in ("alibi_slopes", "learnable_sink"):
        if name in given:
            given[name] = library.make(given[name])
    make = library.make
    flat = [make(x.reshape(-1, *x.shape[2:])) for x in (q, k, v)]
    cu = [make(np.array([0, n, 2 * n]), "int32") for n in (rows, keys)]
    if form in ("qkvpacked", "kvpacked", "kvcache"):
        for name in ("num_splits", "pack_gqa", "deterministic"):
            if form != "kvcache" or name == "deterministic":
                given.pop(name, None)
    if form == "func":
        out, lse = fovea.flash_attn_func(make(q), make(k), make(v), return_lse=True, **given)
    elif form == "qkvpacked":
        qkv = make(np.stack([q, k, v], 2))
        out, lse = fovea.flash_attn_qkvpacked_func(qkv, return_lse=True, **given)
    elif form == "kvpacked":
        kv = make(np.stack([k, v], 2))
        out, lse = fovea.flash_attn_kvpacked_func(make(q), kv, return_lse=True, **given)
    elif form == "kvcache":
        out, lse = fovea.flash_attn_with_kvcache(
            make(q), make(k), make(v), cache_seqlens=keys, return_softmax_lse=True, **given
        )
    elif form == "varlen":
        out, lse = fovea.flash_attn_varlen_func(*flat, *cu, rows, keys, return_lse=True, **given)
    else:
        pages = [np.full((9, 4, 2, 16), np.nan, np.float32) for _ in range(2)]
        table = np.array([[5, 2, 7], [1, 8, 0]])
        for b in range(2):
            for key in range(keys):
                pages[0][table[b, key // 4], key % 4] = k[b, key]
                pages[1][table[b, key // 4], key % 4] = v[b, key]
        out, lse = fovea.flash_attn_varlen_func(
            flat[0], make(pages[0]), make(pages[1]), cu[0], cu[1], rows, keys,
            block_table=make(table, "int32"), return_lse=True, **given,
        )
    if form in ("varlen", "paged"):
        expected = expected.reshape(-1, *expected.shape[2:])
        expected_lse = np.concatenate(list(expected_lse), 1)
    close(library, out, expected)
    close(library, lse, expected_lse)
    if meant:
        plain, _ = attention(q, k, v)
        assert np.abs(plain.reshape(expected.shape) - expected).max() > 1e-4


def test_ragged_and_used_lengths(library, rng):
    lengths_q, lengths_k = [3, 0, 5], [4, 6, 2]
    q, k, v = (
        normal(rng, sum(lengths), heads, 8)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    cu = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths_q, lengths_k)]
    used = np.array([2, 6, 1], np.int32)
    out, lse = fovea.flash_attn_varlen_func(
        library.make(q), library.make(k), library.make(v), library.make(cu[0], "int32"),
        library.make(cu[1], "int64"), 5, 6, seqused_k=library.make(used, "int32"), causal=True,
        return_attn_probs=True,
    )
    for b in range(3):
        here = slice(cu[0][b], cu[0][b + 1])
        keys = slice(cu[1][b], cu[1][b] + used[b])
        expected, expected_lse = attention(q[None, here], k[None, keys], v[None, keys], causal=True)
        close(library, out[here], expected[0])
        close(library, lse[:, here], expected_lse[0])


def test_qv_and_chunks(library, rng):
    q, k, v = tensors(rng, dim_v=8)
    qv = normal(rng, 2, 7, 4, 8)
    out = fovea.flash_attn_func(*map(library.make, (q, k, v)), qv=library.make(qv))
    expected, _ = attention(np.concatenate([q, qv], -1), np.concatenate([k, v], -1), v)
    close(library, out, expected)
    out = fovea.flash_attn_func(*map(library.make, (q, k, v)), attention_chunk=4)
    position = np.arange(7)[:, None] + 2
    mask = (np.arange(9)[None] // 4) == position // 4
    close(library, out, attention(q, k, v, mask=mask)[0])


def test_rows_without_keys(library):
    q, k = np.zeros((1, 6, 1, 8), np.float32), np.zeros((1, 2, 1, 8), np.float32)
    v = np.ones_like(k)
    out, lse = fovea.flash_attn_func(*map(library.make, (q, k, v)), causal=True, return_lse=True)
    assert (library.back(out)[0, :, 0, 0] == [0, 0, 0, 0, 1, 1]).all()
    assert np.allclose(library.back(lse)[0, 0], [-np.inf] * 4 + [0, np.log(2)])
    out, lse = fovea.flash_attn_func(
        *map(library.make, (q, k[:, :0], v[:, :0])), return_lse=True,
        learnable_sink=library.make([0.5]),
    )
    assert (library.back(out) == 0).all() and (library.back(lse) == 0.5).all()


def test_strided_and_unaligned_views(rng):
    q, k, v = tensors(rng)
    expected = fovea.flash_attn_func(q, k, v, causal=True)
    wide = np.full((2, 9, 5, 40), np.nan, np.float32)
    wide[:, ::-1, 1:3, 8:40:2] = k
    flat = np.zeros(q.size + 1, np.float32)
    shifted = flat[1:].reshape(q.shape)
    shifted[:] = q
    result = fovea.flash_attn_func(
        shifted, wide[:, ::-1, 1:3, 8:40:2], np.asfortranarray(v), causal=True
    )
    np.testing.assert_array_equal(result, expected)
    k.flags.writeable = False
    np.testing.assert_array_equal(fovea.flash_attn_func(q, k, v, causal=True), expected)


def test_combine(library, rng):
    q, k, v = tensors(rng, keys=12)
    parts = [
        fovea.flash_attn_func(q, k[:, part], v[:, part], return_lse=True)
        for part in (slice(0, 5), slice(5, 12))
    ]
    outs = np.stack([*(out for out, _ in parts), np.full_like(q, np.nan)])
    lses = np.stack([*(lse for _, lse in parts), np.full_like(parts[0][1], -np.inf)])
    lses = library.make(lses.transpose(0, 1, 3, 2), "float32")
    out, lse = fovea.flash_attn_combine(library.make(outs), lses)
    expected, expected_lse = attention(q, k, v)
    close(library, out, expected)
    close(library, lse, expected_lse.transpose(0, 2, 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", ["slots", "batch index", "pages", "rows of pages"])
def test_kv_cache_appends_and_rotates(writable_library, rng, where, causal, interleaved):
    library = writable_library
    make, back = library.make, library.back
    batch, rows, capacity, dim = 2, 3, 12, 16
    q = normal(rng, batch, rows, 4, dim)
    new_k, new_v = (normal(rng, batch, rows, 2, dim) for _ in range(2))
    held = [normal(rng, batch, capacity, 2, dim) for _ in range(2)]
    lengths = np.array([4, 7], np.int32)
    angles = rng.uniform(0, 6, (capacity, 6))
    cos, sin = (back(make(f(angles))) for f in (np.cos, np.sin))
    options: dict = {}
    if where == "slots":
        slots = [x.copy() for x in held]
        place = lambda b, key: (b, key)  # noqa: E731
    elif where == "batch index":
        slots = [np.full((5, capacity, 2, dim), np.nan, np.float32) for _ in held]
        options["cache_batch_idx"] = make([3, 1], "int32")
        place = lambda b, key: ((3, 1)[b], key)  # noqa: E731
    else:
        slots = [np.full((8, 4, 2, dim), np.nan, np.float32) for _ in held]
        table = np.array([[6, 0, 3], [2, 5, 7]], np.int32)
        options["page_table"] = make(table, "int32")
        if where == "rows of pages":
            rows_of_pages = np.stack([table[1], [-1, -1, -1], table[0]])
            options["page_table"] = make(rows_of_pages, "int32")
            options["cache_batch_idx"] = make([2, 0], "int32")
        place = lambda b, key: (table[b, key // 4], key % 4)  # noqa: E731
    for b in range(batch):
        for key in range(lengths[b]):
            for slot, x in zip(slots, held, strict=True):
                slot[place(b, key)] = x[b, key]
    caches = [make(slot) for slot in slots]
    out, lse = fovea.flash_attn_with_kvcache(
        make(q), *caches, make(new_k), make(new_v), rotary_cos=make(cos), rotary_sin=make(sin),
        cache_seqlens=make(lengths, "int32"), causal=causal, rotary_interleaved=interleaved,
        return_softmax_lse=True, **options,
    )
    slots = [back(cache) for cache in caches]
    positions = lengths[:, None] + np.arange(rows)
    turned_k = rotate(new_k, cos, sin, positions, interleaved)
    turned_q = rotate(
        q, cos, sin, positions if causal else np.repeat(lengths[:, None], rows, 1), interleaved
    )
    for b in range(batch):
        keys = np.concatenate([held[0][b, : lengths[b]], turned_k[b]])[None]
        values = np.concatenate([held[1][b, : lengths[b]], new_v[b]])[None]
        expected, expected_lse = attention(turned_q[b : b + 1], keys, values, causal=causal)
        close(library, out[b], expected[0])
        close(library, lse[b], expected_lse[0])
        for key in range(lengths[b], lengths[b] + rows):
            at = key - lengths[b]
            tolerance = TOLERANCE[library.dtype]
            np.testing.assert_allclose(
                slots[0][place(b, key)], turned_k[b, at], atol=tolerance, rtol=tolerance
            )
            np.testing.assert_array_equal(slots[1][place(b, key)], new_v[b, at])


def test_kv_cache_ragged_queries_padding_and_scalars(writable_library, rng):
    make = writable_library.make
    q = normal(rng, 5, 4, 8)
    k, v = (normal(rng, 2, 10, 2, 8) for _ in range(2))
    out = fovea.flash_attn_with_kvcache(
        make(q), make(k), make(v), cache_seqlens=7, cu_seqlens_q=make([0, 2, 5], "int32"),
        max_seqlen_q=3, causal=True, cache_leftpad=make([0, 2], "int32"),
    )
    for b, (rows, first) in enumerate(((slice(0, 2), 0), (slice(2, 5), 2))):
        expected, _ = attention(
            q[None, rows], k[b : b + 1, first:7], v[b : b + 1, first:7], causal=True
        )
        close(writable_library, out[rows], expected[0])


def test_chunks_begin_behind_the_padding(writable_library, rng):
    make = writable_library.make
    q = normal(rng, 2, 6, 4, 8)
    k, v = (normal(rng, 2, 12, 2, 8) for _ in range(2))
    pads, lengths, chunk = (2, 5), (9, 7), 4
    out = fovea.flash_attn_with_kvcache(
        make(q), make(k), make(v), cache_seqlens=make(lengths, "int32"), attention_chunk=chunk,
        window_size=(5, 2), cache_leftpad=make(pads, "int32"),
    )
    for b, (pad, length) in enumerate(zip(pads, lengths, strict=True)):
        position = np.arange(6)[:, None] + length - pad - 6  # from the first key that counts
        expected, _ = attention(
            q[b : b + 1], k[b : b + 1, pad:length], v[b : b + 1, pad:length], window=(5, 2),
            mask=np.arange(length - pad)[None] // chunk == position // chunk,
        )
        close(writable_library, out[b], expected[0])


def test_dropout_mask():
    q = np.zeros((2, 64, 4, 64), np.float32)
    v = np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None], (2, 64, 4, 64))
    fovea.manual_seed(3)
    first, second = (fovea.flash_attn_func(q, q, v, dropout_p=0.5) for _ in range(2))
    fovea.manual_seed(3)
    np.testing.assert_array_equal(first, fovea.flash_attn_func(q, q, v, dropout_p=0.5))
    assert set(np.unique(first)) == {0, np.float32(1 / 32)}
    assert (first != second).any()
    assert abs((first > 0).mean() - 0.5) < 0.02
    assert (first[0, :, 0] != first[0, :, 1]).any() and (first[0] != first[1]).any()


def test_second_version_has_its_order_and_returns(rng):
    q, k, v = tensors(rng)
    expected, expected_lse = attention(q, k, v, softmax_scale=0.3, causal=True)
    out, lse, weights = fovea.flash_attn_2.flash_attn_func(
        q, k, v, 0.0, 0.3, True, return_attn_probs=True
    )
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
    assert weights is None


def test_signature_is_the_third_versions():
    names = list(inspect.signature(fovea.flash_attn_func).parameters)
    assert names[:17] == [
        "q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale",
        "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic",
        "sm_margin", "return_attn_probs",
    ]
