"""Exact attention as fast as the chip allows, for tensors of torch, numpy, jax and cupy.

Functions of flash-attention, with its names and argument order (tensors are (batch, seqlen, heads,
head_dim), or packed (total, heads, head_dim)):

    flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
    flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func,
    flash_attn_with_kvcache, flash_attn_combine, get_scheduler_metadata

``fovea.flash_attn_2`` has them with the argument order and the returns of flash-attention 2.

PyTorch's function, with its layout (batch, heads, seqlen, head_dim) and its causal mask: ``sdpa``.
For engines: ``plan`` and ``explain``. ``quantize_fp8`` makes float8 tensors with scales of others,
``QuantizedPages`` is a paged cache of them.
``register()`` makes fovea an attention implementation of torch and of Hugging Face transformers.
``bench()`` measures.

A wrong argument raises ValueError or TypeError, what no device can compute NotImplementedError; the
sentence begins with the argument's name, and nothing has been written.
"""

from fovea import _native
from fovea._bench import bench
from fovea._flash import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    get_scheduler_metadata,
)
from fovea._fp8 import Quantized, quantize_fp8
from fovea._kv_cache import flash_attn_with_kvcache
from fovea._libraries import manual_seed
from fovea._pages import QuantizedPages
from fovea._plan import Plan, explain, plan
from fovea._register import register
from fovea._sdpa import sdpa

__version__: str = _native.version()

__all__ = [
    "Plan",
    "Quantized",
    "QuantizedPages",
    "__version__",
    "bench",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "manual_seed",
    "plan",
    "quantize_fp8",
    "register",
    "sdpa",
]
