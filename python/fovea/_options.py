"""Options of flash-attention that fovea expresses through others."""

from __future__ import annotations

from typing import Any

from fovea import _libraries
from fovea._libraries import Array


def check_descales(q: Array, *descales: Array) -> tuple[Array, ...]:
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if descale is not None and not _libraries.is_fp8(q):
            raise ValueError(f"{name} belongs to fp8 inputs, and q has dtype {q.dtype}")
    return descales


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
    if not hasattr(qv, "shape") or tuple(qv.shape) != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(
            f"qv has shape {tuple(getattr(qv, 'shape', ()))}; it must be "
            f"{(*q.shape[:-1], v.shape[-1])}, that of q with the head dimension of v"
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
) -> Array:
    """(batch or 1, 1, rows, keys): True where a key lies in the chunk of the query's position."""
    if chunk < 0:
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
    first = position - position % chunk
    return (key >= first) & (key < first + chunk)
