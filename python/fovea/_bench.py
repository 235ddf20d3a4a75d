"""fovea.bench(): the command line's benchmark, and what a call from Python costs on top."""

from __future__ import annotations

import time
from typing import Any

from fovea import _libraries, _native


class Table(list[dict[str, Any]]):
    """Rows by column name; prints as a table."""

    def __str__(self) -> str:
        columns = list(dict.fromkeys(name for row in self for name in row))
        cells = [columns] + [[_text(row.get(name)) for name in columns] for row in self]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in cells
        )


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def bench(*options: str) -> Table:
    """Run ``fovea bench`` with these options of the command line, e.g. bench("--grid", "cpu").

    Returns a table, a list of one dict per cell of the grid.
    """
    import json  # here, since importing fovea should take no time
    import tempfile
    from pathlib import Path

    for option in options:
        if not isinstance(option, str):
            raise TypeError(f"{option!r} is no option; each must be text, as in a shell")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        status = _native.run_program(["bench", "--quiet", "--json", str(path), *options])
        if status != 0:
            raise ValueError(f"fovea bench failed with status {status}; it has said why")
        document = json.loads(path.read_text())
    rows = document if isinstance(document, list) else document.get("results", [document])
    return Table(rows)


def overhead(tensors: Any = None, repeat: int = 500) -> Table:
    """Microseconds of a small call, from Python and from C++, and their difference.

    tensors: (q, k, v) of one library, (batch, seqlen, heads, head_dim); default one query, 16 keys.
    On a GPU: of the calling thread, until the work is queued. repeat: calls in a row, which a
    device's queue must hold.
    """
    import fovea

    if tensors is None:
        import numpy

        tensors = tuple(numpy.ones((1, rows, 1, 64), "float32") for rows in (1, 16, 16))
    q, k, v = tensors
    library = _libraries.library_of(q, "q")
    device = library.device(q)
    out = library.empty(q, q.shape)
    nothing = (None,) * 10
    stream = 0 if device is None else library.stream(device)
    call = _native.Call(
        q, k, v, out, *nothing, 0, 0, None, False, -1, -1, 0.0, 0.0, 0, 0, 1, False, stream, False
    )
    best_native = best_python = float("inf")
    for _ in range(10):  # alternately, so that both see the same machine
        library.wait(device)
        seconds = _native.seconds_of_attention(
            call, repeat, lambda size: library.empty(q, (size,), "uint8")
        )
        best_native = min(best_native, seconds)
        library.wait(device)
        start = time.perf_counter()
        for _ in range(repeat):
            fovea.flash_attn_func(q, k, v)
        best_python = min(best_python, (time.perf_counter() - start) / repeat)
    row = {
        "tensors": type(q).__module__.split(".")[0],
        "device": "cpu" if device is None else "cuda",
        "python": best_python * 1e6,
        "c++": best_native * 1e6,
        "overhead": (best_python - best_native) * 1e6,
    }
    return Table([row])


def _numpy() -> Any:
    import numpy

    return lambda rows: numpy.ones((1, rows, 1, 64), "float32")


def _jax() -> Any:
    import jax

    cpu = jax.devices("cpu")[0]
    return lambda rows: jax.device_put(_numpy()(rows), cpu)


def _torch() -> Any:
    import torch

    return lambda rows: torch.ones(1, rows, 1, 64)


def _torch_cuda() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("there is no GPU")
    return lambda rows: torch.ones(1, rows, 1, 64, dtype=torch.float16, device="cuda")


def _cupy() -> Any:
    import cupy

    if not cupy.cuda.is_available():
        raise ImportError("there is no GPU")
    return lambda rows: cupy.ones((1, rows, 1, 64), "float16")


def overheads() -> Table:
    """overhead() with every array library that is here, on the CPU and on the GPU."""
    table = Table()
    for maker in (_numpy, _jax, _torch, _torch_cuda, _cupy):
        try:
            make = maker()
        except ImportError:
            continue
        table += overhead(tuple(make(rows) for rows in (1, 16, 16)))
    return table
