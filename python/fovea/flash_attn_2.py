"""flash-attention 2's functions with its argument order (dropout_p is the fourth) and its returns.

Code written for ``flash_attn`` runs with ``from fovea.flash_attn_2 import flash_attn_func``. The
attention itself, shapes and errors included, is that of the functions of the same names in fovea.
With return_attn_probs they return (out, lse, None): the matrix of weights that flash-attention
gives for its own tests is never in memory here.
"""

from __future__ import annotations

import fovea
from fovea._core import Window
from fovea._libraries import Array

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _returns(result: Array, return_attn_probs: bool) -> Array:
    return (*result, None) if return_attn_probs else result


def flash_attn_func(
    q: Array, k: Array, v: Array, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Array = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Array:
    """fovea.flash_attn_func; q (batch, seqlen_q, heads, head_dim)."""
    result = fovea.flash_attn_func(
        q, k, v, softmax_scale, causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )
    return _returns(result, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Array, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Array = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Array:
    """fovea.flash_attn_qkvpacked_func; qkv (batch, seqlen, 3, heads, head_dim)."""
    result = fovea.flash_attn_qkvpacked_func(
        qkv, softmax_scale, causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )
    return _returns(result, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Array, kv: Array, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Array = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Array:
    """fovea.flash_attn_kvpacked_func; kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    result = fovea.flash_attn_kvpacked_func(
        q, kv, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )
    return _returns(result, return_attn_probs)


def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Array = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Array = None,
) -> Array:
    """fovea.flash_attn_varlen_func; q (total_q, heads, head_dim)."""
    result = fovea.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs, block_table=block_table,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )
    return _returns(result, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Array, cu_seqlens: Array, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Array = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Array:
    """fovea.flash_attn_varlen_qkvpacked_func; qkv (total, 3, heads, head_dim)."""
    result = fovea.flash_attn_varlen_qkvpacked_func(
        qkv, cu_seqlens, max_seqlen, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs=return_attn_probs, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )
    return _returns(result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Array, kv: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Array = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Array:
    """fovea.flash_attn_varlen_kvpacked_func; kv (total_k, 2, heads_kv, head_dim)."""
    result = fovea.flash_attn_varlen_kvpacked_func(
        q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window_size, softcap, deterministic, return_attn_probs, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )
    return _returns(result, return_attn_probs)


def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, k: Array = None, v: Array = None,
    rotary_cos: Array = None, rotary_sin: Array = None, cache_seqlens: Array | int | None = None,
    cache_batch_idx: Array = None, cache_leftpad: Array = None, block_table: Array = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Array = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> Array:
    """fovea.flash_attn_with_kvcache; q (batch, seqlen_q, heads, head_dim)."""
    return fovea.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved,
        num_splits=num_splits, return_softmax_lse=return_softmax_lse, alibi_slopes=alibi_slopes,
    )
