"""Options of flash-attention that fovea expresses through others."""

from __future__ import annotations

import operator
from typing import Any

from fovea import _libraries
from fovea._libraries import Array, library_of

# Each takes what numpy and torch have for a number, too; what torch.compile traces as a number of
# Python's stays that.


def integer(value: Any, name: str, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    if type(value) is not int:
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must lie in {least}..{most}")
    return value


def real(value: Any, name: str) -> float:
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    return float(value)


def flag(value: Any, name: str) -> bool:
    if type(value) is bool:
        return value
    if not isinstance(value, int) and type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def check_scales(q: Array, *scales: Array) -> tuple[Array, ...]:
    """q_descale, k_descale, v_descale and key_scale of a call."""
    if scales[0] is scales[1] is scales[2] is scales[3] is None:
        return scales
    for name, scale in zip(
        ("q_descale", "k_descale", "v_descale", "key_scale"), scales, strict=True
    ):
        if scale is not None and library_of(q, "q") and not _libraries.is_eight_bit(q):
            raise ValueError(f"{name} belongs to 8-bit inputs, and q has dtype {q.dtype}")
    return scales


def none_beside_key_scale(name: str, value: Array, instead: str) -> None:
    if value is not None:
        raise ValueError(f"{name} is given beside key_scale; {instead}")


def _concat(a: Array, b: Array) -> Array:
    if _libraries.is_torch(a):
        import torch

        return torch.cat([a, b], -1)
    if type(a).__module__.split(".")[0] in ("jax", "jaxlib"):
        import jax

        return jax.numpy.concatenate([a, b], -1)
    if type(a).__module__.split(".")[0] == "cupy":
        import cupy

        return cupy.concatenate([a, b], -1)
    import numpy

    return numpy.concatenate([a, b], -1)


def join_qv(
    q: Array, k: Array, v: Array, qv: Array, softmax_scale: float | None
) -> tuple[Array, Array, float | None]:
    """(q, k, softmax_scale) whose scores are q k + qv v. Copies q and k when there is a qv."""
    if qv is None:
        return q, k, softmax_scale
    for name, tensor in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        library_of(tensor, name)
    expected = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != expected:
        raise ValueError(
            f"qv has shape {tuple(qv.shape)}; it must be {expected}, that of q with the head "
            "dimension of v"
        )
    if tuple(k.shape[:-1]) != tuple(v.shape[:-1]):
        raise ValueError(
            f"v has shape {tuple(v.shape)} but k {tuple(k.shape)}; all but the last extents must "
            "be equal"
        )
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + v.shape[-1]) ** -0.5
    return _concat(q, qv), _concat(k, v), softmax_scale


def _lengths(namespace: Any, cu: Array, used: Array, rows: int) -> Array:
    """Lengths to broadcast over (batch, 1, rows, keys), or one number."""
    lengths = used if used is not None else None if cu is None else cu[1:] - cu[:-1]
    return rows if lengths is None else namespace.asarray(lengths).reshape(-1, 1, 1, 1)


def chunk_mask(
    chunk: int,
    q: Array,
    rows: int,
    keys: int,
    cu_seqlens_q: Array = None,
    cu_seqlens_k: Array = None,
    seqused_q: Array = None,
    seqused_k: Array = None,
    table: Array = None,
    leftpad: Array = None,
) -> Array:
    """(batch or 1, 1, rows, keys): True where a key lies in the chunk of the query's position,
    which counts from the first key behind leftpad."""
    if integer(chunk, "attention_chunk") < 0:
        raise ValueError(f"attention_chunk is {chunk}; it must be positive, or 0 for none")
    if table is not None:
        keys = keys * table.shape[1] if cu_seqlens_k is None else keys
    if _libraries.is_torch(q):
        import torch as namespace

        row = namespace.arange(rows, device=q.device).reshape(1, 1, -1, 1)
        key = namespace.arange(keys, device=q.device).reshape(1, 1, 1, -1)
    else:
        import numpy as namespace

        row = namespace.arange(rows).reshape(1, 1, -1, 1)
        key = namespace.arange(keys).reshape(1, 1, 1, -1)
    position = (
        row
        + _lengths(namespace, cu_seqlens_k, seqused_k, keys)
        - _lengths(namespace, cu_seqlens_q, seqused_q, rows)
    )
    if leftpad is None:
        first = position - position % chunk
    else:
        pad = namespace.asarray(leftpad).reshape(-1, 1, 1, 1)
        first = position - (position - pad) % chunk
    return (key >= first) & (key < first + chunk)
