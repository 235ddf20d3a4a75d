#!/usr/bin/env python3
"""fovea on a GPU, few queries beside many keys, beside cuDNN and PyTorch's flash kernels.

    bench/gpu_decode.py                              the whole table, in microseconds
    bench/gpu_decode.py --cases 16x32:8-8192-d128    some rows; --list names them
    bench/gpu_decode.py --json FILE                  every time measured, as JSON

Needs a GPU, PyTorch with CUDA, and the bench library (scripts/bench builds it).

Method: bf16, standard normal inputs; one process. A row is named batch x heads : heads of keys -
keys - head_dim, and where it has them, queries of a sequence and keys of a page. The engines take
turns in random order, a round 12 launches back to back, each on the next of several copies of the
keys and values, three times as large as the L2 in all, so that every byte comes from memory; the
median of the rounds. Times are the stream's, between two events; the GPU spins before the first, so
that no launch waits for the host. Engines are checked against fp32 first; bytes are those of keys
and values.
"""

import itertools
import random
import statistics
import sys
from dataclasses import dataclass

from gpu_timing import (
    HEAD_START_CYCLES, chosen, command_line, largest_difference, milliseconds, open_library, torch,
    write_times,
)
from fovea_c import Library, set_pages

TOLERANCE = 1e-2  # in parts of the largest number
LAUNCHES = 12  # of a round
CUDNN, FLASH = "cuDNN", "PyTorch flash"


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    heads_kv: int
    keys: int
    head_dim: int = 128
    queries: int = 1
    page: int = 0  # keys of a page; 0: none

    @property
    def name(self) -> str:
        return (f"{self.batch}x{self.heads}:{self.heads_kv}-{self.keys}-d{self.head_dim}"
                + (f"-q{self.queries}" if self.queries > 1 else "")
                + (f"-pages{self.page}" if self.page else ""))

    @property
    def bytes(self) -> int:
        return 4 * self.batch * self.keys * self.heads_kv * self.head_dim


CASES = [
    Case(1, 32, 8, 32768),
    Case(1, 32, 8, 131072),
    Case(4, 32, 8, 4096),
    Case(8, 64, 8, 16384),
    Case(16, 32, 8, 8192),
    Case(16, 32, 32, 2048),
    Case(64, 32, 8, 4096),
    Case(128, 32, 8, 1024),
    Case(4, 16, 1, 16384, head_dim=64, queries=2),
    Case(8, 32, 8, 16384, head_dim=64),
    Case(8, 16, 8, 8192, head_dim=256),
    Case(16, 32, 8, 8192, page=64),
    Case(16, 32, 8, 8192, page=16),
]


class Inputs:
    """Queries, and copies of keys and values that the L2 does not hold: (batch, heads, seqlen,
    head_dim) stored as (batch, seqlen, heads, head_dim), or with pages (pages, heads, page,
    head_dim) stored likewise, in random order."""

    def __init__(self, case: Case):
        generator = torch.Generator("cuda").manual_seed(7)

        def normal(*shape):
            rows = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
            return rows.transpose(1, 2)

        self.case = case
        self.q = normal(case.batch, case.queries, case.heads, case.head_dim)
        page = case.page or case.keys
        shape = (case.batch * case.keys // page, page, case.heads_kv, case.head_dim)
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self.copies = [
            (normal(*shape), normal(*shape)) for _ in range(max(2, -(-3 * l2_bytes // case.bytes)))
        ]
        if case.page:
            order = torch.randperm(shape[0], device="cuda", generator=generator)
            self.block_table = order.int().view(case.batch, -1)
            self.lengths = torch.full((case.batch,), case.keys, device="cuda", dtype=torch.int32)

    def expected(self):
        """Of the first copy, in fp32."""
        case = self.case
        k, v = self.copies[0]
        out = torch.empty(self.q.shape, device="cuda")
        for b in range(case.batch):
            pages = self.block_table[b].long() if case.page else torch.tensor([b], device="cuda")
            keys, values = (
                x[pages].transpose(0, 1).reshape(case.heads_kv, case.keys, -1).float()
                for x in (k, v)
            )
            q = self.q[b].float().reshape(case.heads_kv, -1, case.head_dim)
            weights = torch.softmax(q @ keys.mT * case.head_dim**-0.5, dim=-1)
            out[b] = (weights @ values).view(out[b].shape)
        return out


class Fovea:
    name = "fovea"

    def __init__(self, library: Library, inputs: Inputs):
        self._out = torch.empty_like(inputs.q)
        stream = torch.cuda.current_stream().cuda_stream
        self._problems = []
        for k, v in inputs.copies:
            problem = library.device_problem(
                inputs.q, k, v, self._out, False, -1, None, inputs.case.keys, stream
            )
            if inputs.case.page:
                set_pages(problem, inputs.block_table, inputs.lengths)
            self._problems.append(problem)
        self._plan = library.device_plan(self._problems[0])
        self._problem = itertools.cycle(self._problems)

    def __call__(self):
        self._plan.run(next(self._problem))
        return self._out


class PyTorch:
    def __init__(self, name: str, backend, inputs: Inputs):
        if inputs.case.page:
            raise NotImplementedError("PyTorch offers no pages")
        self.name, self._backend, self._q = name, backend, inputs.q
        self._grouped = inputs.case.heads != inputs.case.heads_kv
        self._copy = itertools.cycle(inputs.copies)

    def __call__(self):
        k, v = next(self._copy)
        with torch.nn.attention.sdpa_kernel(self._backend):
            return torch.nn.functional.scaled_dot_product_attention(
                self._q, k, v, enable_gqa=self._grouped
            )


def engines_of(library: Library, inputs: Inputs):
    """Those that compute what fp32 does."""
    backends = torch.nn.attention.SDPBackend
    makers = {
        Fovea.name: lambda: Fovea(library, inputs),
        CUDNN: lambda: PyTorch(CUDNN, backends.CUDNN_ATTENTION, inputs),
        FLASH: lambda: PyTorch(FLASH, backends.FLASH_ATTENTION, inputs),
    }
    expected = inputs.expected()
    found, missing = [], []
    for name, make in makers.items():
        try:
            engine = make()
            difference = largest_difference((engine(),), (expected,))
        except NotImplementedError:
            continue
        except RuntimeError as error:
            missing.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        if difference < TOLERANCE:
            found.append(engine)
        else:
            missing.append(f"{name} is off by {difference:.1e}")
    return found, missing


def print_table(library: Library, cases, rounds: int) -> dict:
    """Gives every time in milliseconds, by case and engine."""
    names = (Fovea.name, CUDNN, FLASH)
    print(f"| batch x heads, keys, head_dim | {' | '.join(names)} | TB/s | to the fastest peer |")
    print("|---|---|---|---|---|---|")
    everything = {}
    for case in cases:
        engines, notes = engines_of(library, Inputs(case))
        for engine in engines:
            milliseconds(engine, 2)
        times = {engine.name: [] for engine in engines}
        for _ in range(rounds):
            for engine in random.sample(engines, len(engines)):
                times[engine.name].append(
                    milliseconds(engine, LAUNCHES, head_start=3 * HEAD_START_CYCLES)
                )
        everything[case.name] = times
        medians = {name: statistics.median(t) for name, t in times.items()}
        columns = [f"{1000 * medians[n]:.1f}" if n in medians else "" for n in names]
        own = medians.pop(Fovea.name, float("nan"))
        peer = min(medians.values(), default=float("nan"))
        to_peer = f"{peer / own:.3f}x" if peer == peer else ""
        print(f"| {case.name} | {' | '.join(columns)} | {case.bytes / own * 1e-9:.2f} | {to_peer} |"
              f"{' ' + '; '.join(notes) if notes else ''}", flush=True)
        torch.cuda.empty_cache()
    print("\nMicroseconds of a launch; TB/s: keys and values over fovea's time.")
    return everything


def main() -> int:
    arguments = command_line(__doc__, rounds=9, rounds_are="turns of all engines").parse_args()
    wanted = chosen(arguments, [case.name for case in CASES])
    library = open_library(arguments.library)
    cases = [case for case in CASES if case.name in wanted]
    write_times(arguments.json, print_table(library, cases, arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
