"""Steps around attention on a device, in torch's own operators: queued, waiting for nothing.

The CPU has these in the native library (python/src/kv_cache.cpp).
"""

from __future__ import annotations

import torch


def _rows(
    rows: int, first_position: torch.Tensor, cu_seqlens: torch.Tensor | None, one_position: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence, position) of every row: (batch, rows) each, or with cu_seqlens (rows) each."""
    device = first_position.device
    row = torch.arange(rows, device=device)
    if cu_seqlens is None:
        sequence = torch.arange(len(first_position), device=device)[:, None].expand(-1, rows)
        index = row.expand_as(sequence)
    else:
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
        sequence = sequence.clamp(max=len(first_position) - 1)
        index = row - cu_seqlens[sequence]
    position = first_position[sequence].long()
    return sequence, position if one_position else position + index


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    cos, sin = (table[position].float().unsqueeze(-2) for table in (cos, sin))
    pairs = cos.shape[-1]
    one = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    two = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = x[..., one].float(), x[..., two].float()
    result = x.clone()
    result[..., one] = (a * cos - b * sin).to(x.dtype)
    result[..., two] = (a * sin + b * cos).to(x.dtype)
    return result


def append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_k_new: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_interleaved: bool,
) -> None:
    """fovea::append. A row beyond the cache is an error of the device, as any index in torch."""
    rows = k.shape[1] if cu_seqlens_k_new is None else k.shape[0]
    sequence, position = _rows(rows, cache_seqlens, cu_seqlens_k_new, False)
    if rotary_cos is not None:
        k = _turned(k, rotary_cos, rotary_sin, position, rotary_interleaved)
    page_size = k_cache.shape[1]
    page = block_table[sequence, position // page_size].long()
    k_cache[page, position % page_size] = k
    v_cache[page, position % page_size] = v


def rotate(
    q: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    rotary_cos: torch.Tensor,
    rotary_sin: torch.Tensor,
    rotary_interleaved: bool,
    one_position: bool,
) -> torch.Tensor:
    """fovea::rotate."""
    rows = q.shape[1] if cu_seqlens_q is None else q.shape[0]
    _, position = _rows(rows, positions, cu_seqlens_q, one_position)
    return _turned(q, rotary_cos, rotary_sin, position, rotary_interleaved).contiguous()


def combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Writes out; returns lse (batch, seqlen, heads). A weight of zero selects: NaN in its part
    goes nowhere."""
    logits = lse_partial if sink is None else torch.cat(
        [lse_partial, sink.float().expand(1, *lse_partial.shape[1:])]
    )
    lse = torch.logsumexp(logits, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    parts = torch.where(weights == 0, 0.0, out_partial.float() * weights)
    out.copy_(parts.sum(0))
    return lse
