"""torch.nn.functional.scaled_dot_product_attention through fovea: activate_flash_attention_impl."""

from __future__ import annotations

from typing import Any

import torch

from fovea._sdpa import sdpa_with_lse


def _flash_for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return sdpa_with_lse(query, key, value, attn_mask, dropout_p, is_causal, scale)


class Override:
    """As long as it exists, fovea computes what torch's CPU flash attention would. The backward
    pass stays torch's own: it takes the same out and log-sum-exp."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        self._library.impl(
            "_scaled_dot_product_flash_attention_for_cpu", _flash_for_cpu, "CPU",
            allow_override=True,
        )

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None
