"""For engines: validate and choose once, run many times, allocate nothing."""

from __future__ import annotations

import contextlib
from typing import Any

from fovea import _libraries, _native
from fovea._core import Window, descale_names, value_width, window_bounds, with_names
from fovea._libraries import Array
from fovea._options import flag, integer, real

_tensors = ("q", "k", "v", "out", "lse", "bias", "mask", "sink", "alibi")
_scales = ("q_descale", "k_descale", "v_descale", "key_scale")
_lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table")
_defaults: dict[str, Any] = {
    "max_seqlen_q": 0,
    "max_seqlen_k": 0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "dropout_p": 0.0,
    "dropout_seed": 0,
    "dropout_offset": 0,
    "num_splits": 0,
    "deterministic": False,
    "layout": "bshd",
}


_names = {"options.threads": "threads", "window_left": "window_size", "window_right": "window_size",
          "dropout.probability": "dropout_p", **descale_names}
_known = frozenset((*_tensors, *_scales, *_lengths, *_defaults))


def _stream(q: Array) -> int:
    library = _libraries.library_of(q, "q")
    device = library.device(q)
    return 0 if device is None else library.stream(device)


def _current(q: Array) -> Any:
    library = _libraries.library_of(q, "q")
    device = library.device(q)
    return contextlib.nullcontext() if device is None else library.current(device)


def _call(arguments: dict[str, Any]) -> _native.Call:
    for name in arguments:
        if name not in _known:
            raise TypeError(f"{name} is no argument of an attention call")
    for name in ("q", "k", "v", "out"):
        if arguments.get(name) is None:
            raise TypeError(f"{name} is missing; a call needs q, k, v and out")
    for name in ("out", "lse"):
        _libraries.writable(arguments.get(name), name)
    options = {name: arguments.get(name, default) for name, default in _defaults.items()}
    layout = options.pop("layout")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}; it must be 'bshd' or 'bhsd'")
    left, right = window_bounds(options["window_size"])
    scale = options["softmax_scale"]
    return _native.Call(
        *(arguments.get(name) for name in _tensors),
        *(arguments.get(name) for name in _lengths),
        integer(options["max_seqlen_q"], "max_seqlen_q"),
        integer(options["max_seqlen_k"], "max_seqlen_k"),
        None if scale is None else real(scale, "softmax_scale"),
        flag(options["causal"], "causal"),
        left,
        right,
        real(options["softcap"], "softcap"),
        real(options["dropout_p"], "dropout_p"),
        integer(options["dropout_seed"], "dropout_seed", 0, 2**64 - 1),
        integer(options["dropout_offset"], "dropout_offset", 0, 2**64 - 1),
        integer(options["num_splits"], "num_splits", -(2**31), 2**31 - 1),
        flag(options["deterministic"], "deterministic"),
        _stream(arguments["q"]),
        layout == "bhsd",
        *(arguments.get(name) for name in _scales),
    )


class Plan:
    """A validated call with its chosen configuration; plan() makes it."""

    def __init__(self, arguments: dict[str, Any], device: str, threads: int) -> None:
        if not isinstance(device, str):
            raise TypeError(f"device is {device!r}; it must be text, as 'auto' or 'cpu'")
        self._arguments = arguments
        threads = integer(threads, "threads", -(2**31), 2**31 - 1)
        try:
            call = _call(arguments)
            with _current(arguments["q"]):
                self._plan = _native.plan(call, device, threads)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise with_names(error, _names) from None

    @property
    def workspace_bytes(self) -> int:
        """Bytes that run() needs as workspace."""
        return self._plan.workspace_bytes

    @property
    def device(self) -> str:
        """Where the plan runs: "cpu", "cuda", ..."""
        return self._plan.device

    def explain(self) -> str:
        """The choice, its reasons, and the reasons against the other devices."""
        return self._plan.explain()

    def run(self, workspace: Array = None, **arguments: Any) -> None:
        """Compute; outputs are written in place and nothing is allocated.

        workspace: workspace_bytes elements of 8 bits, one-dimensional. None makes one for this run.
        arguments: what differs from the planned call: tensors of the planned shapes, lengths and
            page numbers within the planned bounds, dropout_seed, dropout_offset.
        """
        call = _call({**self._arguments, **arguments})
        q = arguments.get("q", self._arguments["q"])
        if workspace is None and self.workspace_bytes:
            library = _libraries.library_of(q, "q")
            workspace = library.empty(q, (self.workspace_bytes,), "uint8")
        with _current(q):
            self._plan.run(call, workspace)


def plan(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array = None,
    *,
    device: str = "auto",
    threads: int = 0,
    **arguments: Any,
) -> Plan:
    """Validate a call and choose how to compute it.

    q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim) with cu_seqlens_q
    k, v: likewise, or (pages, page_size, heads_kv, head_dim) with block_table and seqused_k
    out: as q, with the head dimension of v; of 8-bit inputs bfloat16, float16 or float32
    lse: (batch, heads, seqlen_q) or (heads, total_q), float32
    device: "auto", "cpu", "cuda", "emulated:sm_90a", "emulated:sm_100a" or "emulated:sm_103a"
    threads: of a CPU run; 0 takes the default

    Further keywords: bias, mask (batch, heads, seqlen_q, seqlen_k; 1 broadcasts), sink (heads),
    alibi (heads) or (batch, heads), cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table,
    max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap, dropout_p,
    dropout_seed, dropout_offset, num_splits, deterministic, layout ("bshd" or "bhsd"); of 8-bit
    inputs q_descale, k_descale, v_descale, or key_scale (QuantizedPages).
    """
    return Plan({"q": q, "k": k, "v": v, "out": out, "lse": lse, **arguments}, device, threads)


def explain(q: Array, k: Array, v: Array, **arguments: Any) -> str:
    """Plan.explain() of a call on these tensors; takes the keywords of plan()."""
    if arguments.get("out") is None:
        library = _libraries.library_of(q, "q")
        _libraries.library_of(v, "v")
        width = value_width(v, arguments.get("key_scale"))
        dtype = "bfloat16" if _libraries.is_eight_bit(q) else None
        arguments["out"] = library.empty(q, (*q.shape[:-1], width), dtype)
    return plan(q, k, v, **arguments).explain()
