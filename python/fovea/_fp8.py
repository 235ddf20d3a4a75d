"""Tensors in 8 bits with scales, for the functions that take descales."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from fovea import _libraries, _native
from fovea._libraries import Array, host_int32
from fovea._options import flag, integer, real


class Quantized(NamedTuple):
    """What the functions of flash-attention take: flash_attn_func(**quantized._asdict())."""

    q: Array
    k: Array
    v: Array
    q_descale: Array
    k_descale: Array
    v_descale: Array
    softmax_scale: float


def quantize_fp8(
    q: Array,
    k: Array,
    v: Array,
    *,
    dtype: object = "float8_e4m3fn",
    scales: str = "block",
    rotate: bool = True,
    seed: int = 0,
    cu_seqlens_q: Array = None,
    cu_seqlens_k: Array = None,
    softmax_scale: float | None = None,
    rotary_cos: Array = None,
    rotary_sin: Array = None,
    rotary_interleaved: bool = False,
    first_position: int = 0,
) -> Quantized:
    """Codes of 8 bits and their scales, powers of two but for int8.

    q, k, v: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with cu_seqlens;
        head dimensions up to 256, that of v a multiple of 8
    dtype: float8_e4m3fn, float8_e5m2, or int8: q and k as integers, v in float8_e4m3fn, the most
        accurate where they are rotated; on GPUs Hopper's alone
    scales: what shares one: "tensor", "head" (the rows of a sequence and head) or "block" (32 rows)
    rotate: multiply q and k by random signs (of `seed`) and a Hadamard matrix, which leaves q k^T
        alone and spreads outliers over all columns; columns are then padded to a multiple of 32
    softmax_scale: default 1 / sqrt(head_dim), of the head dimension before that
    rotary_cos, rotary_sin: (positions, rotary_dim / 2): turn q and k first. Key j of a sequence
        stands at first_position + j, and its last query where its last key does
    rotary_interleaved: turn the pairs (0, 1), (2, 3), ...; else (0, rotary_dim / 2), ...

    Returns tensors of the same rank, descales (batch, heads, blocks) or, for packed tensors,
    (1, heads, blocks), and the softmax_scale to pass on. q and k must be rotated with one seed.
    """
    name = str(dtype).removeprefix("torch.").removeprefix("<class '").removesuffix("'>")
    name = name.removeprefix("ml_dtypes.").removeprefix("numpy.")
    if name not in ("float8_e4m3fn", "float8_e5m2", "int8"):
        raise ValueError(f"dtype is {dtype}; it must be float8_e4m3fn, float8_e5m2 or int8")
    if not isinstance(scales, str):
        raise TypeError(f"scales is {scales!r}; it must be 'tensor', 'head' or 'block'")
    library = _libraries.library_of(q, "q")
    _libraries.library_of(v, "v")
    if _libraries.is_eight_bit(q):
        raise ValueError(f"q has dtype {q.dtype}; it must be float32, bfloat16 or float16")
    device = library.device(q)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = real(softmax_scale, "softmax_scale")
    cu = [
        None if c is None else host_int32(c, q, which)
        for which, c in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    ]
    out = library.empty(q, (*q.shape[:-1], v.shape[-1]))  # a call has one; it is not written
    settings: tuple[Any, ...] = (
        0, 0, softmax_scale, False, -1, -1, 0.0, 0.0, 0, 0, 0, False,
        0 if device is None else library.stream(device), False,
    )
    call = _native.Call(
        q, k, v, out, None, None, None, None, None, *cu, None, None, None, *settings
    )
    names = (name, name, "float8_e4m3fn" if name == "int8" else name)
    rotate, seed = flag(rotate, "rotate"), integer(seed, "seed", 0, 2**64 - 1)
    rotary_interleaved = flag(rotary_interleaved, "rotary_interleaved")
    first_position = integer(first_position, "first_position", 0, 2**31 - 1)
    with contextlib.nullcontext() if device is None else library.current(device):
        plan = _native.plan_quantize(
            call, name, scales, rotate, seed, rotary_cos, rotary_sin, rotary_interleaved,
            first_position,
        )
        made = [
            library.empty(q, shape, of) for shape, of in zip(plan.shapes[:3], names, strict=True)
        ]
        made += [library.empty(q, shape, "float32") for shape in plan.shapes[3:]]
        need = plan.workspace_bytes
        plan.run(call, made, library.empty(q, (need,), "uint8") if need else None)
    for place, like in enumerate((q, k, v)):
        if len(like.shape) == 3:
            made[place] = made[place][0]
    return Quantized(*(library.finish(tensor, q) for tensor in made), softmax_scale)
