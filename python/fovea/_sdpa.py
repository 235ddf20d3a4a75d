"""torch.nn.functional.scaled_dot_product_attention, for tensors of any library."""

from __future__ import annotations

from fovea import _libraries
from fovea._core import attend
from fovea._libraries import Array, library_of
from fovea._options import flag

_names = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attn_mask",
    "bias": "attn_mask",
    "softmax_scale": "scale",
    "dropout.probability": "dropout_p",
}


def sdpa(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Scaled dot-product attention with PyTorch's signature and semantics.

    query: (..., heads, seqlen_q, head_dim), with any number of batch dimensions, also none
    key: (..., heads_kv, seqlen_k, head_dim), value: (..., heads_kv, seqlen_k, head_dim_v)
    attn_mask: broadcasts to (..., heads, seqlen_q, seqlen_k); boolean, True keeps; or a float that
        is added to the scores
    is_causal: query i sees keys 0 to i (top-left aligned, also where seqlen_q != seqlen_k)
    scale: default 1 / sqrt(head_dim)
    enable_gqa: heads may be a multiple of heads_kv

    Returns (..., heads, seqlen_q, head_dim_v). A row that sees no key is 0.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        library_of(tensor, name)
    if attn_mask is not None:
        library_of(attn_mask, "attn_mask")
    is_causal = flag(is_causal, "is_causal")
    rank = len(query.shape)
    if rank < 2:
        raise ValueError(
            f"query has shape {tuple(query.shape)}; it must be (..., heads, seqlen, head_dim)"
        )
    for name, tensor in (("key", key), ("value", value)):
        if len(tensor.shape) != rank:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but query {tuple(query.shape)}; they must "
                "have equally many dimensions"
            )
    if rank > 2 and not enable_gqa and key.shape[-3] != query.shape[-3]:
        raise ValueError(
            f"key has {key.shape[-3]} heads but query {query.shape[-3]}; enable_gqa=True lets them "
            "differ"
        )
    leading = tuple(query.shape[:-3])
    for name, tensor in (("key", key), ("value", value)):
        if rank > 4 and tuple(tensor.shape[:-3]) != leading:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but query {tuple(query.shape)}; all before"
                " the heads must be equal"
            )
    query, key, value = (_four_dimensions(t) for t in (query, key, value))
    if attn_mask is not None:
        attn_mask = _four_dimensions(attn_mask)
    out, _ = sdpa_with_lse(
        query, key, value, attn_mask, dropout_p, is_causal, scale, need_lse=False
    )
    if rank == 4:
        return out
    return out[0, 0] if rank == 2 else out.reshape(*leading, *out.shape[1:])


def sdpa_with_lse(
    query: Array, key: Array, value: Array, attn_mask: Array, dropout_p: float, is_causal: bool,
    scale: float | None, need_lse: bool = True,
) -> tuple[Array, Array]:
    """sdpa of four dimensions each; (out, lse), lse (batch, heads, seqlen_q) if needed."""
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given with is_causal=True; make the mask causal instead")
    causal, window = False, (-1, -1)
    if is_causal:
        rows, keys = query.shape[2], key.shape[2]
        if rows < keys:  # keys behind the last query's are nobody's
            key, value = key[:, :, :rows], value[:, :, :rows]
            causal = True
        else:
            window = (-1, rows - keys)  # from the bottom right to the top left
    is_mask = attn_mask is not None and _libraries.is_boolean(attn_mask)
    options = {
        "mask": attn_mask if is_mask else None,
        "bias": None if is_mask else attn_mask,
        "softmax_scale": scale,
        "causal": causal,
        "window": window,
        "dropout_p": dropout_p,
        "need_lse": need_lse,
        "names": _names,
    }
    if _libraries.is_torch(query):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out, lse = attend(q, k, v, **options)
        return out.transpose(1, 2), lse
    return attend(query, key, value, heads_first=True, **options)


def _four_dimensions(tensor: Array) -> Array:
    """(batch, heads, seqlen, width): missing dimensions in front are 1, surplus ones are merged."""
    shape = tuple(tensor.shape)
    if len(shape) == 4:
        return tensor
    if len(shape) < 4:
        return tensor.reshape((1,) * (4 - len(shape)) + shape)
    return tensor.reshape(-1, *shape[-3:])
