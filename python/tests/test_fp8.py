"""8-bit tensors through the functions of flash-attention, and fovea.quantize_fp8."""

from __future__ import annotations

import numpy as np
import pytest
from eight_bits import FORMATS, KINDS, Cuda, tensors, widened
from reference import attention

import fovea


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("of_q", [2, 4])
def test_descales_of_heads(kind, rng, dtype, of_q):
    q, k, v = (kind.codes(x, dtype) for x in tensors(rng))
    scales = [rng.uniform(0.5, 2.0, (2, n)).astype(np.float32) for n in (of_q, 2, 2)]
    descales = [kind.make(s) for s in scales]
    out, lse = fovea.flash_attn_func(
        q, k, v, causal=True, return_lse=True,
        q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
    )
    assert "bfloat16" in str(out.dtype)
    wide = [widened(kind, x, s) for x, s in zip((q, k, v), descales, strict=True)]
    expected_out, expected_lse = attention(*wide, causal=True)
    kind.close(out, expected_out)
    np.testing.assert_allclose(kind.back(lse), expected_lse, atol=kind.lse_atol, rtol=1e-5)


def test_codes_without_descales(kind, rng):
    q, k, v = (kind.codes(x, "float8_e4m3fn") for x in tensors(rng))
    out = fovea.flash_attn_func(q, k, v)
    expected, _ = attention(*(kind.back(x) for x in (q, k, v)))
    kind.close(out, expected)


def test_descales_through_varlen_and_cache(kind, rng):
    q, k, v = tensors(rng, batch=2, rows=8, keys=8)
    codes = [kind.codes(x, "float8_e4m3fn") for x in (q, k, v)]
    scales = [kind.make(rng.uniform(0.5, 2.0, (2, 2)).astype(np.float32)) for _ in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    expected, _ = attention(*(widened(kind, x, s) for x, s in zip(codes, scales, strict=True)))
    cu = kind.make(np.array([0, 8, 16], np.int32))
    packed = [x.reshape(16, *x.shape[2:]) for x in codes]
    out = fovea.flash_attn_varlen_func(*packed, cu, cu, 8, 8, **named)
    kind.close(out.reshape(expected.shape), expected)
    out = fovea.flash_attn_with_kvcache(*codes, cache_seqlens=8, **named)
    kind.close(out, expected)


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", [*FORMATS, "int8"])
def test_quantize_fp8(kind, rng, scales, dtype):
    q, k, v = tensors(rng, dim=40)
    k[:, 5, :, 3] = 30.0
    made = fovea.quantize_fp8(*(kind.make(x) for x in (q, k, v)), dtype=dtype, scales=scales)
    assert dtype in str(made.q.dtype)
    assert made.q.shape[-1] == 64 and made.v.shape[-1] == 40
    assert tuple(made.k_descale.shape) == (2, 2, 3)
    step = 2.0**-3 if dtype == "float8_e5m2" else 2.0**-4  # with integers, v is float8_e4m3fn
    np.testing.assert_allclose(
        widened(kind, made.v, made.v_descale), v, rtol=step, atol=np.abs(v).max() * 2.0**-14
    )
    out = fovea.flash_attn_func(**made._asdict(), causal=True)
    expected, _ = attention(q, k, v, causal=True)
    error = np.sqrt(np.mean((kind.back(out) - expected) ** 2))
    assert 1e-3 < error < (0.12 if dtype == "float8_e5m2" else 0.06)


def test_integers_beside_float8_values(kind, rng):
    q, k, v = tensors(rng)
    q, k = (kind.make(np.round(30 * x).astype(np.int8)) for x in (q, k))
    v = kind.codes(v, "float8_e4m3fn")
    scales = [kind.make(rng.uniform(0.02, 0.05, (2, 2)).astype(np.float32)) for _ in range(3)]
    out = fovea.flash_attn_func(
        q, k, v, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]
    )
    expected, _ = attention(*(widened(kind, x, s) for x, s in zip((q, k, v), scales, strict=True)))
    np.testing.assert_allclose(kind.back(out), expected, atol=1e-3, rtol=2e-2)
    with pytest.raises(ValueError, match="^v has dtype s8; with q in s8 it must be e4m3"):
        fovea.flash_attn_func(q, k, k)


def test_quantize_packed(kind, rng):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in tensors(rng, batch=1, rows=70, keys=70))
    cu = kind.make(np.array([0, 33, 70], np.int32))
    made = fovea.quantize_fp8(
        *(kind.make(x) for x in (q, k, v)), cu_seqlens_q=cu, cu_seqlens_k=cu
    )
    assert tuple(made.q.shape) == (70, 4, 32) and tuple(made.q_descale.shape) == (1, 4, 5)
    out = fovea.flash_attn_varlen_func(**made._asdict(), cu_seqlens_q=cu, cu_seqlens_k=cu)
    for first, last in ((0, 33), (33, 70)):
        expected, _ = attention(*(x[None, first:last] for x in (q, k, v)))
        error = np.sqrt(np.mean((kind.back(out)[first:last] - expected[0]) ** 2))
        assert error < 0.06


def turned(x, cos, sin, first, interleaved):
    x, pairs = x.astype(np.float64), cos.shape[1]
    one = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    two = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    c, s = (t[first : first + x.shape[1], None].astype(np.float64) for t in (cos, sin))
    result = x.copy()
    result[..., one] = x[..., one] * c - x[..., two] * s
    result[..., two] = x[..., one] * s + x[..., two] * c
    return result.astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_quantize_turns(kind, rng, interleaved):
    q, k, v = tensors(rng, dim=40)
    angles = np.arange(k.shape[1] + 4)[:, None] / 10.0 ** (np.arange(16) / 8)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    made = fovea.quantize_fp8(
        *(kind.make(x) for x in (q, k, v)), rotary_cos=kind.make(cos), rotary_sin=kind.make(sin),
        rotary_interleaved=interleaved, first_position=4,
    )
    out = kind.back(fovea.flash_attn_func(**made._asdict(), causal=True))
    first = 4 + k.shape[1] - q.shape[1]
    q_turned = turned(q, cos, sin, first, interleaved)
    k_turned = turned(k, cos, sin, 4, interleaved)
    expected, _ = attention(q_turned, k_turned, v, causal=True)
    assert np.sqrt(np.mean((out - expected) ** 2)) < 0.06
    unturned, _ = attention(q, k, v, causal=True)
    assert np.sqrt(np.mean((out - unturned) ** 2)) > 0.1


def test_faults_are_named(kind, rng):
    q, k, v = (kind.codes(x, "float8_e4m3fn") for x in tensors(rng))
    with pytest.raises(ValueError, match="^k_descale has shape"):
        fovea.flash_attn_func(q, k, v, k_descale=kind.make(np.ones((2, 3), np.float32)))
    if not isinstance(kind, Cuda):  # where the values are for the kernels alone to see
        with pytest.raises(ValueError, match="^v_descale is 0"):
            fovea.flash_attn_func(q, k, v, v_descale=kind.make(np.zeros((2, 2), np.float32)))
    x, table = (kind.make(np.ones(n, np.float32)) for n in ((1, 9, 2, 16), (8, 8)))
    with pytest.raises(ValueError, match="^rotary.cos has 8 rows but the last key"):
        fovea.quantize_fp8(x, x, x, rotary_cos=table, rotary_sin=table)
    with pytest.raises(ValueError, match="^rotary_cos has 4 dimensions; it must have 2"):
        fovea.quantize_fp8(x, x, x, rotary_cos=x, rotary_sin=x)
    with pytest.raises(ValueError, match="^dtype is float32"):
        fovea.quantize_fp8(q, k, v, dtype="float32")
    with pytest.raises(ValueError, match="^q has dtype .*float8"):
        fovea.quantize_fp8(q, k, v)
