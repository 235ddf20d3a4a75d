"""Tensors in 8 bits with scales, for the functions that take descales."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from fovea import _libraries, _native
from fovea._libraries import Array, Library, host_int32
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
    key_scale: Array = None


def code_name(dtype: object) -> str:
    """What the dtypes of codes of torch, ml_dtypes and numpy, and names of them, are called."""
    name = str(dtype).removeprefix("torch.").removeprefix("<class '").removesuffix("'>")
    name = name.removeprefix("ml_dtypes.").removeprefix("numpy.")
    if name not in ("float8_e4m3fn", "float8_e5m2", "int8"):
        raise ValueError(f"dtype is {dtype}; it must be float8_e4m3fn, float8_e5m2 or int8")
    return name


def value_name(name: str) -> str:
    """The dtype of v beside q and k in that one."""
    return "float8_e4m3fn" if name == "int8" else name


def not_quantized(tensor: Array, argument: str) -> Library:
    library = _libraries.library_of(tensor, argument)
    if _libraries.is_eight_bit(tensor):
        raise ValueError(
            f"{argument} has dtype {tensor.dtype}; it must be float32, bfloat16 or float16"
        )
    return library


def settings(
    name: str, scales: str, rotate: bool, seed: int, rotary_cos: Array, rotary_sin: Array,
    rotary_interleaved: bool, first_position: int,
) -> _native.Quantization:
    return _native.Quantization(
        name, scales, flag(rotate, "rotate"), integer(seed, "seed", 0, 2**64 - 1), rotary_cos,
        rotary_sin, flag(rotary_interleaved, "rotary_interleaved"),
        integer(first_position, "first_position", 0, 2**31 - 1),
    )


def call_of(
    library: Library, q: Array, k: Array, v: Array, lengths: tuple[Array, ...], scale: float | None
) -> _native.Call:
    """lengths: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k."""
    device = library.device(q)
    out = library.empty(q, (*q.shape[:-1], v.shape[-1]))  # a call has one; it is not written
    numbers: tuple[Any, ...] = (
        0, 0, scale, False, -1, -1, 0.0, 0.0, 0, 0, 0, False,
        0 if device is None else library.stream(device), False,
    )
    return _native.Call(q, k, v, out, None, None, None, None, None, *lengths, None, *numbers)


def current(library: Library, like: Array) -> Any:
    device = library.device(like)
    return contextlib.nullcontext() if device is None else library.current(device)


def workspace_of(library: Library, like: Array, plan: _native.QuantizePlan) -> Array:
    need = plan.workspace_bytes
    return library.empty(like, (need,), "uint8") if need else None


def operands(library: Library, like: Array, shapes: list[list[int] | None], name: str) -> list[Any]:
    """New tensors of QuantizePlan.shapes, None for what has none."""
    dtypes = (name, "float32", name, value_name(name), "float32", "float32", "float32")
    return [
        None if shape is None else library.empty(like, shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


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
    values: str = "rows",
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
    values: "rows", v as it comes, for any reader; or "transposed", as fovea's kernels read it, so
        that they make nothing of k and v in front of every call: v is (batch, heads_kv, head_dim_v,
        keys padded to a multiple of 32), packed (heads_kv, head_dim_v, ...)

    Returns tensors of the same rank, descales (batch, heads, blocks) or, for packed tensors,
    (1, heads, blocks), and the softmax_scale to pass on; with values="transposed" key_scale in
    place of k_descale and v_descale. q and k must be rotated with one seed.
    """
    name = code_name(dtype)
    if not isinstance(scales, str):
        raise TypeError(f"scales is {scales!r}; it must be 'tensor', 'head' or 'block'")
    if not isinstance(values, str):
        raise TypeError(f"values is {values!r}; it must be 'rows' or 'transposed'")
    library = not_quantized(q, "q")
    _libraries.library_of(v, "v")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = real(softmax_scale, "softmax_scale")
    cu = [
        None if c is None else host_int32(c, q, which)
        for which, c in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    ]
    call = call_of(library, q, k, v, (*cu, None, None), softmax_scale)
    how = settings(
        name, scales, rotate, seed, rotary_cos, rotary_sin, rotary_interleaved, first_position
    )
    with current(library, q):
        plan = _native.plan_quantize(call, how, values)
        made = operands(library, q, plan.shapes, name)
        plan.run(call, made, workspace=workspace_of(library, q, plan))
    for place, like in ((0, q), (2, k), (3, v)):
        if len(like.shape) == 3:
            made[place] = made[place][0]
    made = [None if tensor is None else library.finish(tensor, q) for tensor in made]
    q, q_scale, k, v, key_scale, k_scale, v_scale = made
    return Quantized(q, k, v, q_scale, k_scale, v_scale, softmax_scale, key_scale)
