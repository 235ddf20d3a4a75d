"""Attention by its definition, in double precision."""

from __future__ import annotations

import numpy as np


def attention(
    q, k, v, *, softmax_scale=None, causal=False, window=(-1, -1), softcap=0.0, bias=None,
    mask=None, sink=None, alibi=None,
):
    """(out, lse) of q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv); lse (B, Hq, Sq)."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    rows, keys = q.shape[1], k.shape[1]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = scale * np.einsum("bqhd,bkhd->bhqk", q, k)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position = np.arange(rows)[:, None] + keys - rows
    key = np.arange(keys)[None, :]
    if bias is not None:
        scores = scores + np.asarray(bias).astype(np.float64)
    if alibi is not None:
        slopes = np.asarray(alibi, np.float64).reshape(-1, q.shape[2], 1, 1)
        scores = scores - slopes * abs(position - key)
    visible = np.ones_like(scores, bool)
    left, right = (-1 if bound is None else bound for bound in window)
    if causal:
        right = 0
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    if mask is not None:
        visible &= np.asarray(mask)
    scores = np.where(visible, scores, -np.inf)
    extra = np.full((1, q.shape[2], 1, 1), -np.inf)
    if sink is not None:
        extra = np.asarray(sink, np.float64).reshape(1, -1, 1, 1)
    extra = np.broadcast_to(extra, (*scores.shape[:3], 1))
    logits = np.concatenate([scores, extra], -1)
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, largest + np.log(total), -np.inf)[..., 0]
    weights = weights[..., :keys] / np.where(total > 0, total, 1.0)
    return np.einsum("bhqk,bkhd->bqhd", weights, v), lse


def rotate(x, cos, sin, positions, interleaved):
    """x (B, S, H, D) turned by the angles of positions (B, S)."""
    x = np.asarray(x).astype(np.float64)
    cos, sin = (np.asarray(t).astype(np.float64)[positions][:, :, None, :] for t in (cos, sin))
    pairs = cos.shape[-1]
    one = np.arange(pairs) * 2 if interleaved else np.arange(pairs)
    two = one + 1 if interleaved else one + pairs
    result = x.copy()
    result[..., one] = x[..., one] * cos - x[..., two] * sin
    result[..., two] = x[..., one] * sin + x[..., two] * cos
    return result
