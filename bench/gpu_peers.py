#!/usr/bin/env python3
"""fovea on a GPU beside cuDNN and the other kernels that PyTorch brings.

    bench/gpu_peers.py                         the whole table of the forward pass
    bench/gpu_peers.py --backward              that of the gradients, and of those in a fixed order
    bench/gpu_peers.py --cases d128-full-4k    some cells; --list names them
    bench/gpu_peers.py --lab DIR               beside the lab kernel in DIR, too (full attention)
    bench/gpu_peers.py --json FILE             every time measured, as JSON

Needs a GPU, PyTorch with CUDA, and the bench library (scripts/bench builds it). No compiler beside
the CUDA toolkit's NVRTC. Few queries beside many keys are gpu_decode.py's.

Method: bf16, standard normal inputs, 32,768 tokens and 2,048 = heads x head_dim unless the name
says otherwise; one process, the engines take turns, one launch each a round, after two uncounted
ones. "Cool": 5 ms of pause before every launch, so that the card stays below its power limit; the
median of the rounds counts. "Warm": launches back to back for a quarter of a second, half of it
uncounted, three rounds of turns; the median round counts. Times are the stream's, between two
events; the GPU spins before the first, so that no launch waits for the host. The column "idle" has
the ratio of cool launches once more, into an idle stream: what a pause and two events measure
without more, the host's way through each library from Python included. TFLOPS: 4 x batch x heads x
pairs that the mask leaves x head_dim / time, backward 10 for 4. Outputs are compared: engines that
did not compute the same thing are no peers.

The lab kernel is a program of its own, `lab SEQLEN ITERATIONS PAUSE_MS`, which prints a line for
each of its configurations and rounds lengths up to whole tiles. It runs three times, between the
rounds of the others; the fastest configuration of the head dimension counts, by its own TFLOPS.
"""

import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu_timing import (
    PAUSE_SECONDS, chosen, command_line, cool_times, largest_difference, milliseconds,
    open_library, torch, warm_time, write_times,
)
from fovea_c import Library, device_lse

TOLERANCE = 2e-2
BLOCKS = 3  # of rounds, with the lab kernel between them


@dataclass(frozen=True)
class Case:
    name: str
    head_dim: int
    seqlen: int
    causal: bool = False
    warm: bool = False
    heads: int = 0  # 0: 2048 / head_dim
    heads_kv: int = 0
    window: int = -1  # keys to the left
    ragged: bool = False  # sequences of 128 to seqlen keys, packed
    floor: float = 0.0  # of fovea over cuDNN
    lab_floor: float = 0.0  # of fovea over the lab kernel
    turns_floor: float = 0.0  # of fovea in turns over fovea
    least: float = 0.0  # TFLOPS

    @property
    def heads_q(self) -> int:
        return self.heads or 2048 // self.head_dim

    @property
    def kv(self) -> int:
        return self.heads_kv or self.heads_q

    @property
    def batch(self) -> int:
        return max(1, 32768 // self.seqlen)


def size(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)


def cell(head_dim: int, seqlen: int, causal: bool, floor: float = 0.0, warm: bool = False,
         lab_floor: float = 0.0) -> Case:
    mask = "causal" if causal else "full"
    name = f"d{head_dim}-{mask}-{size(seqlen)}{'-warm' if warm else ''}"
    return Case(name, head_dim, seqlen, causal, warm, floor=floor, lab_floor=lab_floor)


CASES = [
    *(cell(128, s, False, f) for s, f in ((512, 1.15), (1024, 1.1), (2048, 1.1))),
    *(cell(128, s, False, lab_floor=1.0) for s in (4096, 8192, 16384)),
    cell(128, 16384, False, 1.06, warm=True, lab_floor=1.0),
    cell(128, 32768, False, 1.1, warm=True),
    *(cell(128, s, True, f) for s, f in ((4096, 1.2), (16384, 1.08), (32768, 1.12))),
    *(cell(64, s, False, lab_floor=1.0) for s in (4096, 16384)),
    *(cell(64, s, True, f) for s, f in ((4096, 1.15), (16384, 1.2))),
    *(cell(256, s, False, lab_floor=1.0) for s in (4096, 8192, 16384)),
    *(cell(256, s, True, f) for s, f in ((4096, 1.08), (16384, 1.02))),
    Case("gqa-32-8-full-4k", 128, 4096, heads=32, heads_kv=8, floor=1.0),
    Case("gqa-32-8-causal-4k", 128, 4096, True, heads=32, heads_kv=8, floor=1.0),
    Case("window-1024-16k", 128, 16384, True, window=1023, floor=1.0),
    Case("ragged-64-sequences", 128, 8192, True, ragged=True, floor=1.0),
]


BACKWARD_CASES = [
    *(cell(128, s, False, 1.05) for s in (4096, 16384, 32768)),
    cell(128, 4096, True, 1.12),
    Case("d128-causal-8k", 128, 8192, True, floor=1.1, turns_floor=0.85),
    *(cell(128, s, True, 1.1) for s in (16384, 32768)),
    *(cell(64, s, False, 1.12) for s in (4096, 16384)),
    *(cell(64, s, True, f) for s, f in ((4096, 1.2), (16384, 1.12))),
    Case("d256-full-16k", 256, 16384, least=480.0),
]


class Inputs:
    """Tensors (batch, heads, seqlen, head_dim) stored as (batch, seqlen, heads, head_dim), or
    (rows, heads, head_dim) where sequences are packed."""

    def __init__(self, case: Case):
        generator = torch.Generator("cuda").manual_seed(7)

        def normal(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        self.case = case
        self.lengths = None
        if case.ragged:
            lengths = torch.randint(128, case.seqlen + 1, (64,), device="cuda", generator=generator)
            self.lengths = lengths.tolist()
            self.cu_seqlens = torch.zeros(65, device="cuda", dtype=torch.int32)
            self.cu_seqlens[1:] = lengths.cumsum(0)
            total = sum(self.lengths)
            self.q = normal(total, case.heads_q, case.head_dim)
            self.k, self.v = (normal(total, case.kv, case.head_dim) for _ in range(2))
        else:
            shape = (case.batch, case.seqlen)
            self.q = normal(*shape, case.heads_q, case.head_dim).transpose(1, 2)
            self.k, self.v = (
                normal(*shape, case.kv, case.head_dim).transpose(1, 2) for _ in range(2)
            )
        self.flops = 4 * case.heads_q * case.head_dim * self.pairs()

    def add_gradient(self):
        """The gradient of out, for a backward pass of two and a half times the products."""
        generator = torch.Generator("cuda").manual_seed(8)
        shape = self.q.transpose(1, 2).shape
        self.dout = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.dout = self.dout.transpose(1, 2)
        self.flops = self.flops * 5 // 2

    def pairs(self) -> int:
        case = self.case
        lengths = self.lengths or [case.seqlen] * case.batch
        if case.window >= 0:
            return sum(
                sum(min(row + 1, case.window + 1) for row in range(length)) for length in lengths
            )
        return sum(length * length // (2 if case.causal else 1) for length in lengths)


class Fovea:
    name = "fovea"

    def __init__(self, library: Library, inputs: Inputs):
        case = inputs.case
        self.out = torch.empty_like(inputs.q)
        packed = inputs.cu_seqlens if case.ragged else None
        self._problem = library.device_problem(
            inputs.q, inputs.k, inputs.v, self.out, case.causal, case.window, packed,
            case.seqlen, torch.cuda.current_stream().cuda_stream,
        )
        self._plan = library.device_plan(self._problem)

    def __call__(self):
        self._plan.run(self._problem)
        return self.out


class Cudnn:
    name = "cuDNN"

    def __init__(self, inputs: Inputs):
        case = inputs.case
        if case.window >= 0 or case.ragged:
            raise NotImplementedError("PyTorch offers it no windows and no packed sequences")
        self._inputs = inputs

    def __call__(self):
        i = self._inputs
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                i.q, i.k, i.v, is_causal=i.case.causal, enable_gqa=i.case.kv != i.case.heads_q
            )


class TorchFlash:
    """The FlashAttention kernels inside PyTorch: all it has for windows and packed sequences."""

    name = "PyTorch flash"

    def __init__(self, inputs: Inputs):
        case = inputs.case
        if not (case.window >= 0 or case.ragged):
            raise NotImplementedError("cuDNN is the peer")
        self._inputs = inputs

    def __call__(self):
        i, case = self._inputs, self._inputs.case
        if case.ragged:
            cu = i.cu_seqlens
            return torch.ops.aten._flash_attention_forward(
                i.q, i.k, i.v, cu, cu, max(i.lengths), max(i.lengths), 0.0, case.causal, False
            )[0]
        q, k, v = (x.transpose(1, 2) for x in (i.q, i.k, i.v))
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, case.seqlen, case.seqlen, 0.0, case.causal, False,
            window_size_left=case.window, window_size_right=0,
        )[0]
        return out.transpose(1, 2)


class FoveaBackward:
    name = "fovea"

    def __init__(self, library: Library, inputs: Inputs, deterministic: bool = False):
        case = inputs.case
        if deterministic:
            self.name = "fovea in turns"
        self._out = torch.empty_like(inputs.q)
        self._lse = torch.empty(inputs.q.shape[:3], device="cuda", dtype=torch.float32)
        self._results = tuple(torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v))
        self._problem = library.device_problem(
            inputs.q, inputs.k, inputs.v, self._out, case.causal, case.window, None, case.seqlen,
            torch.cuda.current_stream().cuda_stream,
        )
        self._problem.lse = device_lse(self._lse)
        self._problem.deterministic = deterministic
        library.device_plan(self._problem).run(self._problem)
        torch.cuda.synchronize()
        self._gradients = library.gradients(inputs.dout, *self._results)
        self._plan = library.device_backward_plan(self._problem, self._gradients)

    def __call__(self):
        self._plan.run(self._problem, self._gradients)
        return self._results


class CudnnBackward:
    name = "cuDNN"

    def __init__(self, inputs: Inputs):
        self._dout = inputs.dout
        self._inputs = tuple(x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        case = inputs.case
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            self._out = torch.nn.functional.scaled_dot_product_attention(
                *self._inputs, is_causal=case.causal, enable_gqa=case.kv != case.heads_q
            )

    def __call__(self):
        return torch.autograd.grad(self._out, self._inputs, self._dout, retain_graph=True)


def backward_engines_of(library: Library, inputs: Inputs):
    found = [FoveaBackward(library, inputs), FoveaBackward(library, inputs, deterministic=True)]
    try:
        engine = CudnnBackward(inputs)
        engine()
        return [*found, engine], []
    except RuntimeError as error:
        return found, [f"cuDNN: {str(error).splitlines()[0]}"]


def engines_of(library: Library, inputs: Inputs):
    found, missing = [Fovea(library, inputs)], []
    for kind in (Cudnn, TorchFlash):
        try:
            engine = kind(inputs)
            engine()
            found.append(engine)
        except NotImplementedError:
            pass
        except RuntimeError as error:
            missing.append(f"{kind.name}: {str(error).splitlines()[0]}")
    return found, missing


class Lab:
    """The program of the lab kernel, beside which full attention is held."""

    name = "lab"
    line = re.compile(r"lab d(\d+) .* tflops=([\d.]+) err=([\d.e+-]+)")

    def __init__(self, folder: Path):
        self._program = folder / "lab"

    def tflops(self, case: Case) -> float:
        """Of its fastest configuration that computed the right thing."""
        torch.cuda.synchronize()
        launches = 40 if case.warm else 3
        pause = 0 if case.warm else round(1000 * PAUSE_SECONDS)
        text = subprocess.run(
            [self._program, str(case.seqlen), str(launches), str(pause)],
            check=True, capture_output=True, text=True,
        ).stdout
        lines = (self.line.match(line) for line in text.splitlines())
        found = [(float(m[2]), float(m[3])) for m in lines if m and int(m[1]) == case.head_dim]
        return max((rate for rate, error in found if error < 4e-3), default=float("nan"))


def measure_cool(engines, rounds: int, idle: bool, times):
    for _ in range(rounds):
        for engine in engines:
            times[engine.name] += cool_times(engine, 1, idle)


def measure_warm(engines, times):
    for engine in engines:
        times[engine.name].append(warm_time(engine))


@dataclass
class Row:
    """A case: median TFLOPS and every time in milliseconds, by name; the largest difference."""

    rates: dict
    idle_rates: dict  # of launches into an idle stream; none of warm cases
    times: dict
    idle_times: dict
    difference: float
    notes: list


def ratio(rates: dict, peers) -> float:
    """Of fovea to the fastest of the peers, NaN without one."""
    peer = max((rates[name] for name in peers if name in rates), default=0.0)
    return rates[Fovea.name] / peer if peer else float("nan")


def measure(library: Library, case: Case, arguments) -> Row:
    inputs = Inputs(case)
    if arguments.backward:
        inputs.add_gradient()
        engines, missing = backward_engines_of(library, inputs)
    else:
        engines, missing = engines_of(library, inputs)
    outputs = [engine() for engine in engines]
    difference = max(
        [largest_difference(outputs[0], other) for other in outputs[1:]], default=float("nan")
    )
    if not difference < TOLERANCE:
        missing.append(f"outputs differ by {difference:.1e}")
    for engine in engines:
        milliseconds(engine, 2)
    lab = Lab(arguments.lab) if arguments.lab and case.lab_floor else None
    times, idle_times = ({engine.name: [] for engine in engines} for _ in range(2))
    lab_rates = []
    rounds = max(1, arguments.rounds // BLOCKS)
    for _ in range(BLOCKS):
        if case.warm:
            measure_warm(engines, times)
        else:
            measure_cool(engines, rounds, False, times)
        if lab:
            lab_rates.append(lab.tflops(case))
    if not case.warm:  # last, or the card would be warmer for the others
        measure_cool(engines, BLOCKS * rounds, True, idle_times)

    def rates_of(measured: dict) -> dict:
        return {n: inputs.flops / statistics.median(t) * 1e-9 for n, t in measured.items() if t}

    rates = rates_of(times)
    if lab:
        rates[Lab.name] = statistics.median(lab_rates)
    return Row(rates, rates_of(idle_times), times, idle_times, difference, missing)


def print_table(library: Library, cases, arguments):
    """Gives every time in milliseconds, by case, and the cases below a floor."""
    third = "fovea in turns" if arguments.backward else TorchFlash.name
    names = (Fovea.name, Cudnn.name, third, Lab.name)
    second = "in turns" if arguments.backward else "to lab"
    print(f"| case | {' | '.join(names)} | ratio | idle | floor | {second} | floor | max diff |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    peers = (Cudnn.name, TorchFlash.name)
    everything, below, below_idle = {}, [], []
    for case in cases:
        row = measure(library, case, arguments)
        everything[case.name] = {"device": row.times, "idle": row.idle_times}
        ratios = {
            "ratio": ratio(row.rates, peers),
            "idle": ratio(row.idle_rates, peers) if row.idle_rates else float("nan"),
            second: (row.rates[third] / row.rates[Fovea.name] if arguments.backward
                     else ratio(row.rates, (Lab.name,))),
        }
        second_floor = case.turns_floor or (case.lab_floor if Lab.name in row.rates else 0.0)
        if (case.floor and not ratios["ratio"] >= case.floor
                or second_floor and not ratios[second] >= second_floor
                or row.rates[Fovea.name] < case.least):
            below.append(case.name)
        if case.floor and ratios["idle"] < case.floor:
            below_idle.append(case.name)
        shown = {name: f"{value:.3f}x" if value == value else "" for name, value in ratios.items()}
        floor = f"{case.least:.0f} TFLOPS" if case.least else f"{case.floor:.2f}x"
        columns = [
            *(f"{row.rates[name]:.0f}" if name in row.rates else "" for name in names),
            shown["ratio"], shown["idle"], floor if case.floor or case.least else "",
            shown[second], f"{second_floor:.2f}x" if second_floor else "",
            f"{row.difference:.1e}",
        ]
        print(f"| {case.name} | {' | '.join(columns)} |"
              f"{' ' + '; '.join(row.notes) if row.notes else ''}", flush=True)
        torch.cuda.empty_cache()
    print(f"\nTFLOPS. Below the floor: {', '.join(below) or 'none'}; "
          f"into an idle stream, of those to cuDNN: {', '.join(below_idle) or 'none'}")
    return everything, below


def main() -> int:
    parser = command_line(__doc__, rounds=9, rounds_are="launches of each engine, cool")
    parser.add_argument("--backward", action="store_true", help="gradients, not the forward pass")
    parser.add_argument("--lab", type=Path, metavar="DIR", help="folder of the program lab")
    arguments = parser.parse_args()
    cases = BACKWARD_CASES if arguments.backward else CASES
    wanted = chosen(arguments, [case.name for case in cases])
    library = open_library(arguments.library)
    everything, below = print_table(library, [c for c in cases if c.name in wanted], arguments)
    write_times(arguments.json, everything)
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
