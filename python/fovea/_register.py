"""fovea as an attention implementation of torch and of Hugging Face transformers."""

from __future__ import annotations

import sys
from typing import Any


def register() -> list[str]:
    """Tell torch and transformers, as far as they can be imported, that fovea exists.

    After it, ``attn_implementation="fovea"`` makes a transformers model attend through fovea, and
    ``torch.nn.attention.activate_flash_attention_impl("fovea")`` makes
    torch.nn.functional.scaled_dot_product_attention do so where it would take flash attention.
    Returns what it registered with. Registering twice changes nothing.
    """
    done = []
    if _register_torch():
        done.append("torch")
    if _register_transformers():
        done.append("transformers")
    return done


def _register_torch() -> bool:
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:  # no torch, or one before 2.10
        return False
    from fovea._torch_sdpa import Override

    register_flash_attention_impl("fovea", register_fn=Override)
    return True


def _register_transformers() -> bool:
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:
        return False
    if "torch" not in sys.modules:
        return False
    AttentionInterface.register("fovea", transformers_attention)
    AttentionMaskInterface.register("fovea", sdpa_mask)
    return True


def transformers_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """What transformers calls: query, key, value (batch, heads, seqlen, head_dim), key and value
    with the model's own number of heads. Returns (batch, seqlen, heads, head_dim_v), no weights.

    Without a mask, the causal one is aligned to the bottom right: queries are the last tokens.
    """
    from fovea import _libraries
    from fovea._core import attend

    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions asks for weights, which fovea never has in memory; "
            "attn_implementation='eager' does"
        )
    if not _libraries.is_torch(query):
        raise TypeError("query must be a torch.Tensor")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None
    is_mask = attention_mask is not None and _libraries.is_boolean(attention_mask)
    bias = None if is_mask else attention_mask
    mask = attention_mask if is_mask else None
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    window = (sliding_window - 1, 0) if causal and sliding_window else (-1, -1)
    out, _ = attend(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        bias=bias, mask=mask, sink=s_aux, softmax_scale=scaling, causal=causal, window=window,
        softcap=softcap or 0.0, dropout_p=dropout,
    )
    return out, None
