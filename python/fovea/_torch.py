"""torch: operators with fake implementations and gradients, so that torch.compile sees one node."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from fovea import _core, _libraries, _native, _torch_device

_here = contextlib.nullcontext()
_dtypes = {
    name: getattr(torch, name)
    for name in (
        "float32", "bfloat16", "float16", "uint8", "int8", "float8_e4m3fn", "float8_e5m2",
    )
}


class Torch:
    """torch as one of fovea._libraries."""

    @staticmethod
    def empty(like: torch.Tensor, shape: Sequence[int], dtype: str | None = None) -> torch.Tensor:
        if dtype is None:
            return like.new_empty(shape)
        return like.new_empty(shape, dtype=_dtypes[dtype])

    @staticmethod
    def finish(array: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return array

    @staticmethod
    def device(array: torch.Tensor) -> int | None:
        return array.get_device() if array.is_cuda else None

    @staticmethod
    def stream(device: int) -> int:
        return torch._C._cuda_getCurrentRawStream(device)

    @staticmethod
    def current(device: int) -> Any:
        return _here if torch._C._cuda_getDevice() == device else torch.cuda.device(device)

    @staticmethod
    def wait(device: int | None) -> None:
        if device is not None:
            torch.cuda.synchronize(device)


_library = torch.library.Library("fovea", "DEF")  # keeps the definitions alive

_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? sink,"
    " Tensor? alibi, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q,"
    " Tensor? seqused_k, Tensor? block_table, SymInt max_seqlen_q, SymInt max_seqlen_k,"
    " float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap,"
    " float dropout_p, int num_splits, bool deterministic)"
    " -> (Tensor out, Tensor lse, Tensor rng_state)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out,"
    " Tensor lse, Tensor rng_state, Tensor? bias, Tensor? mask, Tensor? sink, Tensor? alibi,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k,"
    " Tensor? block_table, SymInt max_seqlen_q, SymInt max_seqlen_k, float? softmax_scale,"
    " bool causal, SymInt window_left, SymInt window_right, float softcap, float dropout_p,"
    " bool deterministic, bool need_dsink, bool need_dbias)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens,"
    " Tensor block_table, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, Tensor? rotary_sin,"
    " bool rotary_interleaved) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "rotate(Tensor q, Tensor positions, Tensor? cu_seqlens_q, Tensor rotary_cos, Tensor rotary_sin,"
    " bool rotary_interleaved, bool one_position) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# attend()'s tensors, and places among them.
_tensor_names = (
    "bias", "mask", "sink", "alibi", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
    "block_table",
)
_float32_arguments = (2, 3)
_first_lengths = 4


def _draw_seed(dropout_p: float) -> int:
    """Of torch's generator, so that torch.manual_seed and checkpointing reach it."""
    return int(torch.randint(2**62, ())) if dropout_p else 0


def _attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, *rest = arguments
    tensors, numbers = tuple(rest[:9]), tuple(rest[9:16])
    dropout_p, num_splits, deterministic = rest[16:]
    seed = _draw_seed(dropout_p)
    settings = (*numbers, dropout_p, seed, 0, num_splits, deterministic)
    out, lse = _core.native_attend(Torch, q, k, v, tensors, settings, False, True)
    rng_state = torch.tensor([seed, 0] if dropout_p else [], dtype=torch.int64)
    return out, lse, rng_state


def _attention_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, _, v, *_ = arguments
    dropout_p = arguments[19]
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape, dtype=torch.float32),
        torch.empty(2 if dropout_p else 0, dtype=torch.int64),
    )


def _append(k_cache: torch.Tensor, *arguments: Any) -> None:
    if k_cache.is_cuda:
        _torch_device.append(k_cache, *arguments)
    else:
        _native.append(k_cache, *arguments)


def _rotate(
    q: torch.Tensor, positions: torch.Tensor, cu_seqlens_q: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    if q.is_cuda:
        return _torch_device.rotate(q, positions, cu_seqlens_q, *rest)
    turned = q.new_empty(q.shape)
    _native.rotate(q, turned, positions, cu_seqlens_q, *rest)
    return turned


def _backward_kernel(*arguments: Any) -> tuple[torch.Tensor, ...]:
    dout, dlse, q, k, v, out, lse, rng_state, *rest = arguments
    tensors, numbers = tuple(rest[:9]), tuple(rest[9:16])
    dropout_p, deterministic = rest[16:18]
    seed, offset = rng_state.tolist() if dropout_p else (0, 0)
    device = Torch.device(q)
    stream = 0 if device is None else Torch.stream(device)
    call = _native.Call(
        q, k, v, out, lse, *tensors, *numbers, dropout_p, seed, offset, 0, deterministic, stream,
        False,
    )
    gradients = _backward_fake(*arguments)
    dq, dk, dv, dsink, dbias = gradients
    need_dsink, need_dbias = rest[18:]
    results = (dq, dk, dv, dsink if need_dsink else None, dbias if need_dbias else None)
    if device is None:
        _native.attention_backward(call, dout, dlse, *results)
    else:
        with Torch.current(device):
            _native.attention_backward(
                call, dout, dlse, *results, lambda size: Torch.empty(q, (size,), "uint8")
            )
    return gradients


def _backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    q, k, v = arguments[2:5]
    bias, sink = arguments[8], arguments[10]
    need_dsink, need_dbias = arguments[26:]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        sink.new_empty(sink.shape) if need_dsink else q.new_empty(0),
        bias.new_empty(bias.shape) if need_dbias else q.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:12], *output)
    ctx.numbers = inputs[12:20]
    ctx.deterministic = inputs[21]


def _attention_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, *tensors, out, lse, rng_state = ctx.saved_tensors
    nothing = (None,) * 22
    if dout is None and dlse is None:
        return nothing
    need_dbias, need_dsink = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    if ctx.needs_input_grad[6]:
        raise NotImplementedError(
            "alibi_slopes requires a gradient, which fovea does not compute; alibi_slopes.detach() "
            "goes without, a bias can have one"
        )
    dq, dk, dv, dsink, dbias = _backward_op(
        torch.zeros_like(out) if dout is None else dout, dlse, q, k, v, out, lse, rng_state,
        *tensors, *ctx.numbers, ctx.deterministic, need_dsink, need_dbias,
    )
    dbias, dsink = dbias if need_dbias else None, dsink if need_dsink else None
    return (dq, dk, dv, dbias, None, dsink, *nothing[6:])


def _second_backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
    raise NotImplementedError("dout requires a gradient; fovea computes first derivatives alone")


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
    _library.impl("attention_backward", _backward_kernel, _key)
    _library.impl("append", _append, _key)
    _library.impl("rotate", _rotate, _key)
torch.library.register_fake("fovea::attention", _attention_fake, lib=_library)
torch.library.register_fake("fovea::append", lambda *arguments: None, lib=_library)
torch.library.register_fake(
    "fovea::rotate", lambda q, *arguments: q.new_empty(q.shape), lib=_library
)
torch.library.register_fake("fovea::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "fovea::attention", _attention_backward, setup_context=_save, lib=_library
)
torch.library.register_autograd("fovea::attention_backward", _second_backward, lib=_library)

_attention_op = torch.ops.fovea.attention.default
_backward_op = torch.ops.fovea.attention_backward.default
_append_op = torch.ops.fovea.append.default
_rotate_op = torch.ops.fovea.rotate.default

_plain_types = (torch.Tensor, torch.nn.Parameter)


def _is_eager(*tensors: torch.Tensor) -> bool:
    """Would the operator's dispatch only lead to its kernel? Then it can be left out."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return False
    needs_gradient = torch.is_grad_enabled()
    for tensor in tensors:
        if (
            type(tensor) not in _plain_types
            or not (tensor.is_cpu or tensor.is_cuda)
            or (needs_gradient and tensor.requires_grad)
        ):
            return False
    return True


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    dropout_p: float,
    num_splits: int,
    deterministic: bool,
    need_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse); lse is None where nobody needs it and leaving it out saves time."""
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        name, tensor = ("v", v) if isinstance(k, torch.Tensor) else ("k", k)
        raise TypeError(f"{name} is a {type(tensor).__name__} but q a torch.Tensor")
    device = "cuda" if q.is_cuda else "cpu" if q.is_cpu else None
    if device is not None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    given = [tensor for tensor in tensors if tensor is not None]
    if given:
        tensors = _converted(q, tensors)
        given = [tensor for tensor in tensors if tensor is not None]
    if _is_eager(q, k, v, *given):
        settings = (*numbers, dropout_p, _draw_seed(dropout_p), 0, num_splits, deterministic)
        return _core.native_attend(
            Torch, q, k, v, tensors, settings, False, need_lse
        )
    out, lse, _ = _attention_op(
        q, k, v, *tensors, *numbers, dropout_p, num_splits, deterministic
    )
    return out, lse


def _converted(q: torch.Tensor, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lengths as int32 tensors; sink and slopes, which models keep in their own dtype, in float32;
    a bias in q's dtype unless it is float32."""
    converted: list[torch.Tensor | None] = []
    for place, tensor in enumerate(tensors):
        if tensor is None:
            pass
        elif place >= _first_lengths:
            if not isinstance(tensor, torch.Tensor):
                tensor = _libraries.host_int32(tensor, q, _tensor_names[place])
            elif tensor.dtype is torch.int64 and tensor.is_cuda:
                tensor = tensor.to(torch.int32)  # the CPU's are converted where they are checked
        elif not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{_tensor_names[place]} is a {type(tensor).__name__} but q a torch.Tensor"
            )
        elif place in _float32_arguments:
            tensor = tensor.to(torch.float32)
        elif place == 0 and tensor.dtype is not torch.float32:
            if not tensor.is_floating_point():
                raise TypeError(f"bias has dtype {tensor.dtype}; it must be a float or bool")
            tensor = tensor.to(q.dtype)
        converted.append(tensor)
    return tuple(converted)


def int32(numbers: Any, like: torch.Tensor, argument: str) -> torch.Tensor:
    """Numbers of any sequence beside `like`; lists of the host are on their way to a device without
    anybody waiting for it."""
    if isinstance(numbers, range):
        return torch.arange(
            numbers.start, numbers.stop, dtype=torch.int32, device=like.device
        )
    to_device = like.is_cuda and not torch.compiler.is_compiling()
    there = isinstance(numbers, torch.Tensor) and numbers.is_cuda
    if to_device and not there and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{argument} is on the host, and a graph would keep the numbers of now; while one is "
            "captured it must be a tensor on the device"
        )
    if isinstance(numbers, torch.Tensor):
        return numbers.to(like.device, torch.int32)
    if not to_device:
        return torch.as_tensor(numbers, dtype=torch.int32, device=like.device)
    pinned = torch.as_tensor(numbers, dtype=torch.int32).pin_memory()
    return pinned.to(like.device, non_blocking=True)


def append(*arguments: Any) -> None:
    if _is_eager(*(a for a in arguments if isinstance(a, torch.Tensor))):
        _append(*arguments)
    else:
        _append_op(*arguments)


def rotate(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if _is_eager(q):
        return _rotate(q, *arguments)
    return _rotate_op(q, *arguments)
