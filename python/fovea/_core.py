"""The one call behind all functions: outputs are made, the native library computes."""

from __future__ import annotations

from typing import Any

from fovea import _libraries, _native
from fovea._libraries import Array
from fovea._options import flag, integer, real

Window = tuple[int | None, int | None]


_unbounded = (-1, -1)


def window_bounds(window: Window) -> tuple[int, int]:
    """(left, right) with -1 for unbounded, which None means too."""
    if window is _unbounded:
        return window
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window_size is {window!r}; it must be (left, right)") from None
    left = -1 if left is None else integer(left, "window_size")
    right = -1 if right is None else integer(right, "window_size")
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size is {window!r}; each side must be -1 or None for unbounded, or the number "
            "of keys to see on that side"
        )
    return left, right


def with_names(error: Exception, names: dict[str, str]) -> Exception:
    """The same error with the caller's names of arguments: 'k has ...' -> 'k_cache has ...'."""
    words = str(error).split(" ")
    words[0] = names.get(words[0], words[0])
    for place, word in enumerate(words):
        if word in ("q", "k", "v"):
            words[place] = names.get(word, word)
    return type(error)(" ".join(words))


def value_width(v: Array, key_scale: Array) -> int:
    """The head dimension of v, which is its last extent, or beside key_scale the last but one."""
    place = 1 if key_scale is None else 2
    if len(v.shape) < place:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must have 3 or 4 dimensions")
    return v.shape[-place]


descale_names = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale"}
no_scales: tuple[Array, ...] = (None, None, None, None)


def native_attend(
    library: _libraries.Library,
    q: Array,
    k: Array,
    v: Array,
    tensors: tuple[Array, ...],
    settings: tuple[Any, ...],
    heads_first: bool,
    need_lse: bool,
    scales: tuple[Array, ...] = no_scales,
) -> tuple[Array, Array]:
    """(out, lse) of the native library; lse is None unless needed. out of 8 bits is bfloat16.

    tensors: bias, mask, sink, alibi, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table.
    settings: what Call takes after the tensors, but for heads_first.
    scales: q_descale, k_descale, v_descale, key_scale
    """
    shape = q.shape
    width = value_width(v, scales[3])
    if len(shape) == 4:
        batch, rows, heads = shape[0], shape[1], shape[2]
        if heads_first:
            rows, heads = heads, rows
            out_shape = (batch, heads, rows, width)
        else:
            out_shape = (batch, rows, heads, width)
        lse_shape = (batch, heads, rows)
    elif len(shape) == 3:
        out_shape = (shape[0], shape[1], width)
        lse_shape = (shape[1], shape[0])
    else:
        raise ValueError(
            f"q has shape {tuple(shape)}; it must be (batch, seqlen, heads, head_dim) or "
            "(total, heads, head_dim)"
        )
    out = library.empty(q, out_shape, "bfloat16" if _libraries.is_eight_bit(q) else None)
    lse = library.empty(q, lse_shape, "float32") if need_lse else None
    device = library.device(q)
    if device is None:
        call = _native.Call(
            q, k, v, out, lse, *tensors, *settings, 0, heads_first, *scales
        )
        _native.attention(call)
    else:
        call = _native.Call(
            q, k, v, out, lse, *tensors, *settings, library.stream(device), heads_first, *scales
        )
        with library.current(device):
            _native.attention(call, lambda size: library.empty(q, (size,), "uint8"))
    return library.finish(out, q), None if lse is None else library.finish(lse, q)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array = None,
    mask: Array = None,
    sink: Array = None,
    alibi: Array = None,
    cu_seqlens_q: Array = None,
    cu_seqlens_k: Array = None,
    seqused_q: Array = None,
    seqused_k: Array = None,
    block_table: Array = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    num_splits: int = 0,
    deterministic: bool = False,
    heads_first: bool = False,
    need_lse: bool = False,
    names: dict[str, str] | None = None,
    scales: tuple[Array, ...] = no_scales,
) -> tuple[Array, Array]:
    """(out, lse). lse may be None unless needed. `names` renames arguments in errors."""
    left, right = window_bounds(window)
    tensors = (
        bias, mask, sink, alibi, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table,
    )
    try:
        numbers = (
            integer(max_seqlen_q, "max_seqlen_q"),
            integer(max_seqlen_k, "max_seqlen_k"),
            None if softmax_scale is None else real(softmax_scale, "softmax_scale"),
            flag(causal, "causal"),
            left,
            right,
            real(softcap, "softcap"),
        )
        dropout_p = real(dropout_p, "dropout_p")
        num_splits = integer(num_splits, "num_splits", -(2**31), 2**31 - 1)
        deterministic = flag(deterministic, "deterministic")
        if _libraries.is_torch(q) and not _libraries.is_eight_bit(q):
            return _libraries.torch_backend.attend(
                q, k, v, tensors, numbers, dropout_p, num_splits, deterministic, need_lse
            )
        library = _libraries.library_of(q, "q")
        _libraries.library_of(v, "v")
        seed = _libraries.next_seed() if dropout_p else 0
        settings = (*numbers, dropout_p, seed, 0, num_splits, deterministic)
        return native_attend(
            library, q, k, v, tensors, settings, heads_first, need_lse, scales
        )
    except (ValueError, TypeError, NotImplementedError) as error:
        if names is None:
            raise
        raise with_names(error, {**names, **descale_names}) from None
