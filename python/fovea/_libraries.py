"""What differs between the libraries whose tensors fovea computes with: how to make new ones."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections.abc import Sequence
from typing import Any

Array = Any  # a tensor of torch, numpy, jax or cupy


class NoTensor:
    """Stands for torch.Tensor as long as torch is not imported: nothing is an instance."""


torch_tensor: type = NoTensor
torch_backend: Any = None  # fovea._torch, once torch is there
_seeds = random.Random()
_here = contextlib.nullcontext()
_ml_dtypes = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # which numpy has from there


def manual_seed(seed: int) -> None:
    """Seed the dropout of numpy, jax and cupy calls. Calls on torch follow torch.manual_seed."""
    _seeds.seed(seed)


def next_seed() -> int:
    return _seeds.getrandbits(63)


def use_torch() -> None:
    """Define the operators, and let calls on torch tensors go through them."""
    global torch_tensor, torch_backend
    import torch

    from fovea import _torch

    torch_tensor, torch_backend = torch.Tensor, _torch


def is_torch(tensor: Array) -> bool:
    if isinstance(tensor, torch_tensor):
        return True
    if torch_tensor is NoTensor and type(tensor).__module__.split(".")[0] == "torch":
        use_torch()
        return isinstance(tensor, torch_tensor)
    return False


def _root(tensor: Array) -> str:
    return type(tensor).__module__.split(".")[0]


def _is_jax(tensor: Array) -> bool:
    return _root(tensor) in ("jax", "jaxlib")


class Numpy:
    """numpy, and what is computed on the CPU for a library whose arrays cannot be written to."""

    @staticmethod
    def empty(like: Array, shape: Sequence[int], dtype: str | None = None) -> Array:
        import numpy

        if dtype in _ml_dtypes:
            import ml_dtypes

            dtype = getattr(ml_dtypes, dtype)
        return numpy.empty(tuple(shape), like.dtype if dtype is None else dtype)

    @staticmethod
    def finish(array: Array, like: Array) -> Array:
        return array

    @staticmethod
    def device(array: Array) -> int | None:
        """The number of the CUDA device; None on the CPU."""
        return None

    @staticmethod
    def stream(device: int) -> int:
        """The current stream of the device, where work goes."""
        return 0

    @staticmethod
    def current(device: int) -> Any:
        """A context in which the device is the current one, as the native library expects."""
        return _here

    @staticmethod
    def wait(device: int | None) -> None:
        """Until the device has done what was queued."""


class _Jax(Numpy):
    @staticmethod
    def finish(array: Array, like: Array) -> Array:
        import jax

        return jax.numpy.asarray(array)

    @staticmethod
    def device(array: Array) -> int | None:
        platform = next(iter(array.devices())).platform
        if platform != "cpu":
            raise NotImplementedError(
                f"q is a jax array on a {platform}; fovea computes on jax's CPU arrays, and on the "
                "GPU with torch and cupy"
            )
        return None


class _Cupy:
    @staticmethod
    def empty(like: Array, shape: Sequence[int], dtype: str | None = None) -> Array:
        import cupy

        with like.device:
            return cupy.empty(tuple(shape), like.dtype if dtype is None else dtype)

    @staticmethod
    def finish(array: Array, like: Array) -> Array:
        return array

    @staticmethod
    def device(array: Array) -> int | None:
        return array.device.id

    @staticmethod
    def stream(device: int) -> int:
        import cupy

        return cupy.cuda.get_current_stream(device).ptr

    @staticmethod
    def current(device: int) -> Any:
        import cupy

        return cupy.cuda.Device(device)

    @staticmethod
    def wait(device: int | None) -> None:
        import cupy

        cupy.cuda.Device(device).synchronize()


Library = Any  # one of these classes, or fovea._torch.Torch
_known: dict[type, Library] = {}


def library_of(tensor: Array, argument: str) -> Library:
    """How to make tensors like this one. TypeError names the argument."""
    kind = type(tensor)
    found = _known.get(kind)
    if found is not None:
        return found
    if is_torch(tensor):
        library: Library = torch_backend.Torch
    elif _is_jax(tensor):
        if "Tracer" in kind.__name__:
            raise TypeError(
                f"{argument} is traced by jax, and fovea computes on arrays; "
                "jax.pure_callback calls it from a traced function"
            )
        library = _Jax
    elif _root(tensor) == "cupy":
        library = _Cupy
    elif hasattr(tensor, "__array_interface__"):
        library = Numpy
    else:
        raise TypeError(
            f"{argument} is a {kind.__name__}; it must be a tensor of torch, numpy, jax or cupy"
        )
    _known[kind] = library
    return library


def is_eight_bit(tensor: Array) -> bool:
    dtype = tensor.dtype
    if dtype.itemsize != 1:  # asked first, since numpy takes 3 us for a dtype's name
        return False
    return str(dtype).removeprefix("torch.").startswith(("float8", "int8"))


def is_boolean(tensor: Array) -> bool:
    if is_torch(tensor):
        return tensor.dtype is torch_backend.torch.bool
    return str(tensor.dtype) == "bool"


def writable(tensor: Array, argument: str) -> Array:
    if _is_jax(tensor):
        raise TypeError(f"{argument} is a jax array, which cannot be written to; numpy's can")
    return tensor


def same_int32(number: int, count: int, like: Array) -> Array:
    """(count) times one number, as host_int32."""
    if is_torch(like):
        return like.new_full((count,), number, dtype=torch_backend.torch.int32)
    return host_int32([number] * count, like)


def _indices(numbers: Any) -> Any:
    """Integers, and lists of them, made Python's own."""
    if isinstance(numbers, (list, tuple)):
        return [_indices(number) for number in numbers]
    return operator.index(numbers)


def _length(row: Any) -> int | None:
    return len(row) if isinstance(row, list) else None


def host_int32(numbers: Array, like: Array, argument: str = "") -> Array:
    """int32 numbers beside `like`, of any sequence of integers. TypeError names the argument."""
    dtype = getattr(numbers, "dtype", None)
    if dtype is None and type(numbers) is not range:
        try:
            numbers = _indices(numbers)
        except TypeError:
            raise TypeError(f"{argument} is {numbers!r}; it must hold integers") from None
        if isinstance(numbers, list) and len({_length(row) for row in numbers}) > 1:
            raise ValueError(f"{argument} is {numbers}; its rows must be of one length")
    elif dtype is not None and "int" not in str(dtype):
        raise TypeError(f"{argument} has dtype {dtype}; it must be int32 or int64")
    if is_torch(like):
        return torch_backend.int32(numbers, like, argument)
    if _root(like) == "cupy":
        import cupy

        return cupy.asarray(numbers, dtype="int32")
    import numpy

    return numpy.asarray(numbers, dtype="int32")


if "torch" in sys.modules:
    use_torch()
