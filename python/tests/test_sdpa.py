"""fovea.sdpa: PyTorch's semantics."""

from __future__ import annotations

import numpy as np
import pytest
from reference import attention

import fovea


def normal(rng, *shape):
    """Numbers that float16 has, too."""
    return (np.round(rng.standard_normal(shape) * 128) / 128).astype(np.float32)


def heads_first(rng, batch=2, rows=5, keys=5, heads=4, heads_kv=4, dim=8):
    return (
        normal(rng, batch, heads, rows, dim),
        normal(rng, batch, heads_kv, keys, dim),
        normal(rng, batch, heads_kv, keys, dim),
    )


def close(library, result, expected):
    tolerance = 2e-6 if library.dtype == "float32" else 2e-3
    np.testing.assert_allclose(library.back(result), expected, atol=tolerance, rtol=tolerance)


def expected(q, k, v, **options):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return attention(q, k, v, **options)[0].swapaxes(1, 2)


@pytest.mark.parametrize("rows, keys", [(5, 5), (3, 8), (8, 3)])
def test_causal_is_top_left(library, rng, rows, keys):
    q, k, v = heads_first(rng, rows=rows, keys=keys)
    mask = np.tril(np.ones((rows, keys), bool))
    out = fovea.sdpa(*map(library.make, (q, k, v)), is_causal=True)
    assert tuple(out.shape) == q.shape
    close(library, out, expected(q, k, v, mask=mask))


@pytest.mark.parametrize("shape", [(5, 5), (1, 1, 5, 5), (2, 1, 1, 5), (2, 4, 5, 5)])
def test_masks(library, rng, shape):
    q, k, v = heads_first(rng)
    mask = rng.random(shape) < 0.5
    bias = normal(rng, *shape)
    tensors = [library.make(x) for x in (q, k, v)]
    out = fovea.sdpa(*tensors, library.make(mask, "bool"))
    close(library, out, expected(q, k, v, mask=mask))
    out = fovea.sdpa(*tensors, library.make(bias), scale=0.7)
    close(library, out, expected(q, k, v, bias=bias, softmax_scale=0.7))
    minus_infinity = np.where(mask, 0, -np.inf).astype(np.float32)
    out = fovea.sdpa(*tensors, library.make(minus_infinity))
    close(library, out, expected(q, k, v, mask=mask))


def test_ranks_and_groups(library, rng):
    q, k, v = heads_first(rng, heads_kv=2)
    out = fovea.sdpa(*map(library.make, (q, k, v)), enable_gqa=True)
    close(library, out, expected(q, k, v))
    q, k, v = (x.reshape(2, 1, 4, 5, 8) for x in heads_first(rng))
    out = fovea.sdpa(*map(library.make, (q, k, v)))
    assert tuple(out.shape) == q.shape
    for b in range(2):
        close(library, out[b], expected(q[b], k[b], v[b]))
    single = fovea.sdpa(*(library.make(x[0, 0, 0]) for x in (q, k, v)))
    np.testing.assert_allclose(library.back(single), library.back(out)[0, 0, 0], atol=2e-6)
    three = fovea.sdpa(*(library.make(x[0, 0]) for x in (q, k, v)))
    np.testing.assert_allclose(library.back(three), library.back(out)[0, 0], atol=2e-6)
