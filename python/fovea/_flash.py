"""flash-attention's functions: the signature of version 3, the keywords of 2, the extras of 4."""

from __future__ import annotations

from fovea import _libraries, _native
from fovea._core import Window, attend, with_names
from fovea._libraries import Array, host_int32, library_of
from fovea._options import check_scales, chunk_mask, integer, join_qv, none_beside_key_scale

no_qv = "codes of 8 bits have scales of their own and cannot be joined, so leave it None"

_names = {
    "window_left": "window_size",
    "window_right": "window_size",
    "dropout.probability": "dropout_p",
    "alibi": "alibi_slopes",
    "sink": "learnable_sink",
}


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Array = None,
    q_descale: Array = None,
    k_descale: Array = None,
    v_descale: Array = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Array = None,
    learnable_sink: Array = None,
    return_lse: bool = False,
    key_scale: Array = None,
) -> Array:
    """Attention over dense batches.

    q: (batch, seqlen_q, heads, head_dim)
    k: (batch, seqlen_k, heads_kv, head_dim), where heads_kv divides heads
    v: (batch, seqlen_k, heads_kv, head_dim_v)
    softmax_scale: default 1 / sqrt(head_dim), with qv 1 / sqrt(head_dim + head_dim_v)
    causal: bottom-right aligned: the last query sees all keys
    qv: (batch, seqlen_q, heads, head_dim_v): scores are q k + qv v
    window_size: (left, right) keys seen beside the diagonal, inclusive; -1 or None is unbounded
    q_descale, k_descale, v_descale: (batch, heads_kv) float32, of float8_e4m3fn or float8_e5m2, or
        of int8 with v in float8_e4m3fn: an
        element is its code times that; q's may be (batch, heads), and each may have a third
        dimension, a scale for every 32 rows (quantize_fp8). out is then bfloat16
    key_scale: (blocks of 32 keys, 4) float32, in place of k_descale and v_descale: of k and v as
        quantize_fp8 makes them with values="transposed", which nothing is made of in front of the
        kernels; v is (batch, heads_kv, head_dim_v, keys padded to a multiple of 32)
    attention_chunk: queries see keys of their own chunk of that many positions alone; 0 is off
    softcap: scores become softcap * tanh(score / softcap); 0 is off
    dropout_p: probability of dropping a weight
    alibi_slopes: (heads) or (batch, heads), float32
    learnable_sink: (heads): one extra logit per head, which no value belongs to
    num_splits, pack_gqa, sm_margin: scheduling; no result depends on them

    Returns out (batch, seqlen_q, heads, head_dim_v), and with return_lse (or return_attn_probs)
    also lse (batch, heads, seqlen_q), float32: the natural log-sum-exp of each row. A row that sees
    no key has out = 0 and lse = -inf.
    """
    del pack_gqa, sm_margin
    scales = check_scales(q, q_descale, k_descale, v_descale, key_scale)
    if key_scale is not None:
        none_beside_key_scale("qv", qv, no_qv)
    q, k, softmax_scale = join_qv(q, k, v, qv, softmax_scale)
    mask = None
    if attention_chunk:
        for name, tensor in (("q", q), ("k", k)):
            if library_of(tensor, name) and len(tensor.shape) != 4:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; it must be "
                    "(batch, seqlen, heads, head_dim)"
                )
        mask = chunk_mask(attention_chunk, q, q.shape[1], k.shape[1])
    need_lse = return_attn_probs or return_lse
    out, lse = attend(
        q, k, v, mask=mask, sink=learnable_sink, alibi=alibi_slopes, softmax_scale=softmax_scale,
        causal=causal, window=window_size, softcap=softcap, dropout_p=dropout_p,
        num_splits=num_splits, deterministic=deterministic, need_lse=need_lse, names=_names,
        scales=scales,
    )
    return (out, lse) if need_lse else out


def flash_attn_qkvpacked_func(
    qkv: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Array = None,
    k_descale: Array = None,
    v_descale: Array = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Array = None,
    learnable_sink: Array = None,
    return_lse: bool = False,
) -> Array:
    """flash_attn_func on one tensor.

    qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, heads + 2 *
    heads_kv, head_dim). The rest and the returns are those of flash_attn_func.
    """
    q, k, v = split_qkv(qkv, num_heads_q, 5)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
        return_lse=return_lse,
    )


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Array = None,
    learnable_sink: Array = None,
    return_lse: bool = False,
) -> Array:
    """flash_attn_func with kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    k, v = split_kv(kv, 5)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, return_lse=return_lse,
    )


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array = None,
    cu_seqlens_k: Array = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Array = None,
    seqused_k: Array = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Array = None,
    q_descale: Array = None,
    k_descale: Array = None,
    v_descale: Array = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    page_table: Array = None,
    block_table: Array = None,
    dropout_p: float = 0.0,
    alibi_slopes: Array = None,
    learnable_sink: Array = None,
    return_lse: bool = False,
    key_scale: Array = None,
) -> Array:
    """Attention over sequences packed one after the other.

    q: (total_q, heads, head_dim)
    k: (total_k, heads_kv, head_dim); with a table (pages, page_size, heads_kv, head_dim)
    v: as k, with head_dim_v
    cu_seqlens_q, cu_seqlens_k: (batch + 1) int32: where each sequence begins, and the last one
        ends. With None, that side is dense: (batch, seqlen, heads, head_dim).
    max_seqlen_q, max_seqlen_k: bounds on the lengths; None takes the longest
    seqused_q, seqused_k: (batch) int32: only the first so many rows of a sequence count
    page_table, block_table (two names of one argument): (batch, pages of a sequence) int32; the
        lengths are seqused_k, or else the differences of cu_seqlens_k
    key_scale: of packed k, v is (heads_kv, head_dim_v, keys as quantised); with a table they are
        the tensors of QuantizedPages

    The other arguments are those of flash_attn_func. Returns out (total_q, heads, head_dim_v), and
    with return_lse (or return_attn_probs) also lse (heads, total_q), float32.
    """
    del pack_gqa, sm_margin
    scales = check_scales(q, q_descale, k_descale, v_descale, key_scale)
    if key_scale is not None:
        none_beside_key_scale("qv", qv, no_qv)
    table = block_table if page_table is None else page_table
    if page_table is not None and block_table is not None:
        raise ValueError("block_table and page_table are two names of one argument; give one")
    if table is not None and cu_seqlens_k is not None:
        if seqused_k is None:
            cu_seqlens_k = host_int32(cu_seqlens_k, q, "cu_seqlens_k")
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    if table is not None:
        max_seqlen_k = None  # the table's columns bound it, and a run may use them all
    q, k, softmax_scale = join_qv(q, k, v, qv, softmax_scale)
    mask = None
    if attention_chunk:
        for name, cu, bound in (
            ("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
            ("max_seqlen_k", cu_seqlens_k, max_seqlen_k),
        ):
            if cu is not None and not bound:
                raise ValueError(f"{name} is {bound}; attention_chunk needs it for its mask")
        mask = chunk_mask(
            attention_chunk, q, max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1],
            cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, table,
        )
    need_lse = return_attn_probs or return_lse
    out, lse = attend(
        q, k, v, mask=mask, sink=learnable_sink, alibi=alibi_slopes, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, block_table=table,
        max_seqlen_q=max_seqlen_q or 0, max_seqlen_k=max_seqlen_k or 0,
        softmax_scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        dropout_p=dropout_p, num_splits=num_splits, deterministic=deterministic,
        need_lse=need_lse, names=_names,
        scales=scales,
    )
    return (out, lse) if need_lse else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Array = None,
    learnable_sink: Array = None,
    return_lse: bool = False,
) -> Array:
    """flash_attn_varlen_func with qkv (total, 3, heads, head_dim), or with num_heads_q
    (total, heads + 2 * heads_kv, head_dim)."""
    q, k, v = split_qkv(qkv, num_heads_q, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, None, None, softmax_scale, causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic,
        return_attn_probs=return_attn_probs, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
        learnable_sink=learnable_sink, return_lse=return_lse,
    )


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Array = None,
    learnable_sink: Array = None,
    return_lse: bool = False,
) -> Array:
    """flash_attn_varlen_func with kv (total_k, 2, heads_kv, head_dim)."""
    k, v = split_kv(kv, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None, softmax_scale,
        causal, window_size=window_size, softcap=softcap, deterministic=deterministic,
        return_attn_probs=return_attn_probs, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
        learnable_sink=learnable_sink, return_lse=return_lse,
    )


_part_names = {
    "parts[0].out": "out_partial", "parts[0].lse": "lse_partial", "result.out": "out",
    "sink": "learnable_sink",
}


def _dtype_name(dtype: object) -> str | None:
    """What numpy's, torch's and jax's dtypes, and names of them, are called."""
    if dtype is None:
        return None
    name = getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"out_dtype is {dtype!r}; it must be float32, bfloat16 or float16")
    return name


def flash_attn_combine(
    out_partial: Array,
    lse_partial: Array,
    out: Array = None,
    out_dtype: object = None,
    *,
    learnable_sink: Array = None,
) -> tuple[Array, Array]:
    """Attention over parts of the keys, combined into attention over all of them.

    out_partial: (splits, batch, seqlen, heads, head_dim_v)
    lse_partial: (splits, batch, seqlen, heads) float32, natural, without the sink
    out: where to write; default a new tensor of out_dtype, default that of out_partial
    learnable_sink: (heads), counted once

    Returns out (batch, seqlen, heads, head_dim_v) and lse (batch, seqlen, heads). A part with
    lse = -inf is neutral, whatever its out holds.
    """
    library = library_of(out_partial, "out_partial")
    library_of(lse_partial, "lse_partial")
    if len(out_partial.shape) != 5:
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)}; it must be "
            "(splits, batch, seqlen, heads, head_dim)"
        )
    if tuple(lse_partial.shape) != tuple(out_partial.shape[:4]):
        raise ValueError(
            f"lse_partial has shape {tuple(lse_partial.shape)}; it must be "
            f"{tuple(out_partial.shape[:4])}, that of out_partial without the last extent"
        )
    if "float32" not in str(lse_partial.dtype):
        raise ValueError(f"lse_partial has dtype {lse_partial.dtype}; it must be float32")
    _, batch, seqlen, heads, width = out_partial.shape
    shape = (batch, seqlen, heads, width)
    if out is None:
        out = library.empty(out_partial, shape, _dtype_name(out_dtype))
    elif library_of(_libraries.writable(out, "out"), "out") and tuple(out.shape) != shape:
        raise ValueError(
            f"out has shape {tuple(out.shape)}; it must be {shape}, that of out_partial without the"
            " splits"
        )
    if _libraries.is_torch(out_partial) and out_partial.is_cuda:
        from fovea import _torch_device

        return out, _torch_device.combine(out_partial, lse_partial, out, learnable_sink)
    lse = library.empty(lse_partial, (batch, heads, seqlen), "float32")
    parts = range(out_partial.shape[0])
    try:
        _native.merge(
            [out_partial[i] for i in parts],
            [lse_partial[i].swapaxes(1, 2) for i in parts],
            out, lse, learnable_sink,
        )
    except (ValueError, TypeError, NotImplementedError) as error:
        raise with_names(error, _part_names) from None
    return library.finish(out, out_partial), library.finish(lse, out_partial).swapaxes(1, 2)


def get_scheduler_metadata(*args: object, **kwargs: object) -> None:
    """None: fovea needs no metadata. Takes flash-attention's arguments, so that code that passes
    the result on as scheduler_metadata keeps working."""
    del args, kwargs


def split_qkv(qkv: Array, heads_q: int | None, rank: int) -> tuple[Array, Array, Array]:
    """Views of q, k and v: of (..., 3, heads, dim) with `rank` dimensions, or of one fewer."""
    library_of(qkv, "qkv")
    if heads_q is None:
        if len(qkv.shape) != rank or qkv.shape[-3] != 3:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}; it must be (..., 3, heads, head_dim) with "
                f"{rank} dimensions"
            )
        return qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]
    heads_q = integer(heads_q, "num_heads_q")
    heads = qkv.shape[-2] if len(qkv.shape) == rank - 1 else 0
    heads_kv, rest = divmod(heads - heads_q, 2)
    if heads_q < 1 or rest or heads_kv < 1:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; with num_heads_q={heads_q} it must be "
            "(..., heads + 2 * heads_kv, head_dim)"
        )
    middle = heads_q + heads_kv
    return qkv[..., :heads_q, :], qkv[..., heads_q:middle, :], qkv[..., middle:, :]


def split_kv(kv: Array, rank: int) -> tuple[Array, Array]:
    library_of(kv, "kv")
    if len(kv.shape) != rank or kv.shape[-3] != 2:
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}; it must be (..., 2, heads_kv, head_dim) with {rank} "
            "dimensions"
        )
    return kv[..., 0, :, :], kv[..., 1, :, :]
