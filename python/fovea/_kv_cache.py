"""Decoding: attention over a KV cache that the call extends."""

from __future__ import annotations

from fovea import _libraries, _native
from fovea._core import Window, attend, window_bounds
from fovea._flash import no_qv
from fovea._libraries import Array, host_int32, library_of, same_int32
from fovea._options import check_scales, chunk_mask, integer, join_qv, none_beside_key_scale

_names = {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "window_left": "window_size",
    "window_right": "window_size",
    "alibi": "alibi_slopes",
    "sink": "learnable_sink",
}


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array = None,
    v: Array = None,
    qv: Array = None,
    rotary_cos: Array = None,
    rotary_sin: Array = None,
    cache_seqlens: Array | int | None = None,
    cache_batch_idx: Array = None,
    cache_leftpad: Array = None,
    page_table: Array = None,
    cu_seqlens_q: Array = None,
    cu_seqlens_k_new: Array = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Array = None,
    q_descale: Array = None,
    k_descale: Array = None,
    v_descale: Array = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: object = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Array = None,
    alibi_slopes: Array = None,
    learnable_sink: Array = None,
    key_scale: Array = None,
) -> Array:
    """Attention of new queries over a cache, to which k and v are appended first, in place.

    q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q (total_q, heads, head_dim)
    k_cache: (slots, capacity, heads_kv, head_dim); with a table (pages, page_size, heads_kv,
        head_dim)
    v_cache: as k_cache, with head_dim_v
    k, v: (batch, seqlen_new, heads_kv, head_dim), or with cu_seqlens_k_new packed: written to the
        cache at cache_seqlens, cache_seqlens + 1, ...
    rotary_cos, rotary_sin: (positions, rotary_dim / 2): turn k at its position in the cache, and q
        at cache_seqlens, cache_seqlens + 1, ... if causal or windowed, else all rows at
        cache_seqlens
    rotary_interleaved: turn the pairs (0, 1), (2, 3), ...; else (0, rotary_dim / 2), ...
    rotary_seqlens: (batch): first positions for rotary instead of cache_seqlens
    cache_seqlens: int or (batch): keys in the cache before this call; default all of its capacity
    cache_batch_idx: (batch): the slot, or row of the table, of each sequence, default 0, 1, ...
    cache_leftpad: (batch): the first key of each sequence that counts, where chunks begin, too
    page_table, block_table (two names of one argument): (batch, pages of a sequence)
    key_scale: (blocks of 32 keys, 4) float32: scales of k_cache and v_cache, which are pages of
        QuantizedPages, v_cache (pages, heads_kv, head_dim_v, page_size); its append() adds keys
    num_splits, pack_gqa, sm_margin, scheduler_metadata: scheduling; no result depends on them

    The rest as flash_attn_func. Returns out like q with head_dim_v, and with return_softmax_lse
    also lse (batch, heads, seqlen_q), or packed (heads, total_q).
    """
    del scheduler_metadata, pack_gqa, sm_margin
    scales = check_scales(q, q_descale, k_descale, v_descale, key_scale)
    if key_scale is not None:
        none_beside_key_scale("qv", qv, no_qv)
        none_beside_key_scale(
            "k", k,
            "32 keys of a quantised cache share scales, so QuantizedPages.append() adds them",
        )
    if page_table is not None and block_table is not None:
        raise ValueError("block_table and page_table are two names of one argument; give one")
    table = block_table if page_table is None else page_table
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin belong together; give both or none")
    if (k is None) != (v is None):
        raise ValueError("k and v belong together; give both or none")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        library_of(tensor, name)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if len(tensor.shape) != 4:
            transposed = name == "v_cache" and key_scale is not None
            extents = "heads_kv, head_dim, rows" if transposed else "rows, heads_kv, head_dim"
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be (slots or pages, {extents})"
            )
    if table is not None and library_of(table, "block_table") and len(table.shape) != 2:
        raise ValueError(
            f"block_table has shape {tuple(table.shape)}; it must be (batch, pages of a sequence)"
        )
    if cu_seqlens_q is not None:
        cu_seqlens_q = host_int32(cu_seqlens_q, q, "cu_seqlens_q")
    if cu_seqlens_k_new is not None:
        cu_seqlens_k_new = host_int32(cu_seqlens_k_new, q, "cu_seqlens_k_new")
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    lengths = _lengths(cache_seqlens, batch, q)
    if lengths is None and (k is not None or rotary_cos is not None):
        raise ValueError("cache_seqlens is None; k, v and rotary_cos need to know where keys go")

    if table is None and cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has {k_cache.shape[0]} slots but q {batch} sequences; cache_batch_idx says "
            "which slot each one has"
        )
    if cache_batch_idx is not None:
        slots = host_int32(cache_batch_idx, q, "cache_batch_idx")
        _check_slots(slots, batch, (k_cache if table is None else table).shape[0])
        # A slot without a table is a page as long as the capacity.
        table = slots.reshape(-1, 1) if table is None else table[slots]
    if k is not None:
        lengths = _append(
            q, k_cache, v_cache, k, v, lengths, table, cu_seqlens_k_new, rotary_cos, rotary_sin,
            rotary_seqlens, rotary_interleaved,
        )
    if rotary_cos is not None and k is not None:
        added = _new_keys(k, cu_seqlens_k_new)
        start = lengths - added if rotary_seqlens is None else rotary_seqlens
        still = not causal and window_bounds(window_size) == (-1, -1)
        q = _rotate(q, start, cu_seqlens_q, rotary_cos, rotary_sin, rotary_interleaved, still)
    elif rotary_cos is not None:
        raise ValueError("rotary_cos is given without k and v, whose positions it turns")

    q, keys, softmax_scale = join_qv(q, k_cache, v_cache, qv, softmax_scale)
    if lengths is None and table is not None:
        lengths = same_int32(table.shape[1] * k_cache.shape[1], batch, q)
    if cache_leftpad is not None:
        cache_leftpad = host_int32(cache_leftpad, q, "cache_leftpad")
        if tuple(cache_leftpad.shape) != (batch,):
            raise ValueError(
                f"cache_leftpad has shape {tuple(cache_leftpad.shape)}; it must be ({batch},), one "
                "for each sequence of q"
            )
    mask = _mask(
        q, k_cache, table, lengths, cu_seqlens_q, max_seqlen_q, attention_chunk, cache_leftpad
    )
    if cache_leftpad is not None:
        visible = _behind_padding(cache_leftpad, _capacity(k_cache, table), q)
        mask = visible if mask is None else mask & visible
    out, lse = attend(
        q, keys, v_cache, mask=mask, sink=learnable_sink, alibi=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q, seqused_k=lengths, block_table=table,
        max_seqlen_q=0 if cu_seqlens_q is None else max_seqlen_q or 0,
        softmax_scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        num_splits=num_splits, need_lse=return_softmax_lse, names=_names, scales=scales,
    )
    return (out, lse) if return_softmax_lse else out


def _lengths(cache_seqlens: Array | int | None, batch: int, like: Array) -> Array:
    if cache_seqlens is None:
        return None
    if not hasattr(cache_seqlens, "__len__") or getattr(cache_seqlens, "shape", None) == ():
        return same_int32(integer(cache_seqlens, "cache_seqlens"), batch, like)
    lengths = host_int32(cache_seqlens, like, "cache_seqlens")
    if tuple(lengths.shape) != (batch,):
        raise ValueError(
            f"cache_seqlens has shape {tuple(lengths.shape)}; it must be ({batch},), one length for"
            " each sequence of q"
        )
    return lengths


def _check_slots(slots: Array, batch: int, count: int) -> None:
    if tuple(slots.shape) != (batch,):
        raise ValueError(
            f"cache_batch_idx has shape {tuple(slots.shape)}; it must be ({batch},), one slot for "
            "each sequence of q"
        )
    if _libraries.is_torch(slots) and (
        slots.is_cuda or _libraries.torch_backend.torch.compiler.is_compiling()
    ):
        return  # whose values are not known yet
    if batch and not 0 <= int(slots.min()) <= int(slots.max()) < count:
        raise ValueError(
            f"cache_batch_idx holds {slots.tolist()}; each must lie in 0..{count - 1}"
        )


def _new_keys(k: Array, cu_seqlens_k_new: Array) -> Array | int:
    if cu_seqlens_k_new is None:
        return k.shape[1]
    return cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1]


def _capacity(k_cache: Array, table: Array) -> int:
    return k_cache.shape[1] * (1 if table is None else table.shape[1])


def _append(
    q: Array, k_cache: Array, v_cache: Array, k: Array, v: Array, lengths: Array, table: Array,
    cu_seqlens_k_new: Array, rotary_cos: Array, rotary_sin: Array, rotary_seqlens: Array,
    rotary_interleaved: bool,
) -> Array:
    """Writes k and v into the cache; returns the lengths with them."""
    if len(lengths) == 0:
        return lengths
    if rotary_cos is not None and rotary_seqlens is not None:
        k = _rotate(
            k, rotary_seqlens, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, False
        )
        rotary_cos = rotary_sin = None
    places = host_int32(range(len(lengths)), q).reshape(-1, 1) if table is None else table
    arguments = (
        k_cache, v_cache, k, v, lengths, places, cu_seqlens_k_new, rotary_cos, rotary_sin,
        rotary_interleaved,
    )
    if _libraries.is_torch(k_cache):
        _libraries.torch_backend.append(*arguments)
    else:
        _libraries.writable(k_cache, "k_cache")
        _libraries.writable(v_cache, "v_cache")
        _native.append(*arguments)
    return lengths + _new_keys(k, cu_seqlens_k_new)


def _rotate(
    q: Array, positions: Array, cu_seqlens: Array, cos: Array, sin: Array, interleaved: bool,
    one_position: bool,
) -> Array:
    if _libraries.is_torch(q):
        return _libraries.torch_backend.rotate(
            q, positions, cu_seqlens, cos, sin, interleaved, one_position
        )
    library = _libraries.library_of(q, "q")
    turned = library.empty(q, q.shape)
    _native.rotate(q, turned, positions, cu_seqlens, cos, sin, interleaved, one_position)
    return turned


def _mask(
    q: Array, k_cache: Array, table: Array, lengths: Array, cu_seqlens_q: Array,
    max_seqlen_q: int | None, attention_chunk: int, leftpad: Array,
) -> Array:
    if not attention_chunk:
        return None
    if cu_seqlens_q is not None and not max_seqlen_q:
        raise ValueError(f"max_seqlen_q is {max_seqlen_q}; attention_chunk needs it for its mask")
    rows = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    return chunk_mask(
        attention_chunk, q, rows, k_cache.shape[1], cu_seqlens_q, None, None, lengths, table,
        leftpad,
    )


def _behind_padding(leftpad: Array, capacity: int, like: Array) -> Array:
    """(batch, 1, 1, capacity): True from the first key that counts."""
    if _libraries.is_torch(like):
        import torch as namespace

        key = namespace.arange(capacity, device=like.device)
    else:
        import numpy as namespace

        key = namespace.arange(capacity)
    return key.reshape(1, 1, 1, -1) >= leftpad.reshape(-1, 1, 1, 1)
