#!/usr/bin/env python3
"""fovea in 8 bits on a GPU: the tables of docs/kernels/fp8.md.

    bench/gpu_fp8.py                       both tables: forward, and quantisation beside a copy
    bench/gpu_fp8.py --lab DIR             beside the kernel DIR/lab8, in turns
    bench/gpu_fp8.py --cases d64-full-16k  some rows; --list names them, quantize the second table
    bench/gpu_fp8.py --s8                  two more columns: q and k as integers
    bench/gpu_fp8.py --also 192:warpgroups=2,tile_k=128    another interval and configuration
    bench/gpu_fp8.py --json FILE           every time measured, as JSON

Needs a GPU, PyTorch with CUDA, and the bench library (scripts/bench builds it).

Method: that of gpu_peers.py. Operands are standard normal, quantised before with scales for blocks
and rotated; "from bf16" quantises in front of every run. "Promoted" moves what the tensor cores
have summed into fp32 every 768 keys, the default; "plain" never does. "s8" is plain with q and k as
integers, "s8 promoted" the other. TFLOPS: 4 x batch x
heads x pairs that the mask leaves x head_dim / time. Outputs are compared with PyTorch's in bf16:
rms of the difference over rms of the output.

The lab kernel computes full attention at head dimension 128 and lengths that its tiles divide; of
its configurations the fastest counts.

A quantising pass reads 16 bits an element and writes 8 and the scales; the copy beside it moves
equally many bytes, half of them read and half written.
"""

import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu_peers import Case, Inputs, cell
from gpu_timing import (
    chosen, command_line, cool_times, milliseconds, open_library, torch, warm_time, write_times,
)
from fovea_c import E4M3, S8, Library, Problem, Quantized, QuantizePlan

PROMOTE_KEYS = 768
TURNS = 3  # of all engines, the lab among them
TOLERANCE = 0.1  # of the difference to bf16, over the output
LAB_SHARE = 0.95  # floor of fovea over the lab
QUANTIZE = "quantize"  # the second table, among the cases


@dataclass(frozen=True)
class Row:
    case: Case
    floor: float = 0.0  # TFLOPS
    of_full: float = 0.0  # floor over the full row of the same length

    @property
    def in_lab(self) -> bool:
        return self.case.head_dim == 128 and not self.case.causal


ROWS = [
    Row(cell(128, 4096, False)),
    Row(cell(128, 16384, False)),
    Row(cell(128, 16384, False, warm=True)),
    Row(cell(128, 32768, False)),
    Row(cell(128, 4096, True), of_full=0.8),
    Row(cell(128, 16384, True), of_full=0.92),
    Row(cell(128, 32768, True), of_full=0.96),
    Row(cell(64, 16384, False), floor=730),
    Row(cell(64, 16384, True), floor=690),
    Row(cell(256, 4096, False), floor=1200),
    Row(cell(256, 16384, False), floor=1100),
]


class Operands:
    """Inputs in bf16 and the same quantised."""

    def __init__(self, library: Library, inputs: Inputs, dtype: int = E4M3):
        case = inputs.case
        self.inputs, self.out = inputs, torch.empty_like(inputs.q)
        self.problem = library.device_problem(
            inputs.q, inputs.k, inputs.v, self.out, case.causal, case.window, None, case.seqlen,
            torch.cuda.current_stream().cuda_stream,
        )
        self.quantizer = library.quantize_plan(self.problem, dtype)
        self.codes, self._memory = self.quantizer.operands(), []
        for name in QuantizePlan.OPERANDS:
            view = getattr(self.codes, name)
            elements = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride))
            # The scales of keys have some behind the last that a kernel may read.
            memory = torch.zeros(4 * elements + 4096, device="cuda", dtype=torch.uint8)
            view.data = memory.data_ptr()
            self._memory.append(memory)

    def only(self, *names: str) -> Quantized:
        chosen = self.quantizer.operands()
        for name in names:
            getattr(chosen, name).data = getattr(self.codes, name).data
        return chosen

    def difference(self) -> float:
        i = self.inputs
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            truth = torch.nn.functional.scaled_dot_product_attention(
                i.q, i.k, i.v, is_causal=i.case.causal
            )
        squares = [x.float().square().mean().item() for x in (self.out - truth, truth)]
        return (squares[0] / squares[1]) ** 0.5


class Forward:
    def __init__(self, library: Library, operands: Operands, problem: Problem, promote_keys: int,
                 configuration: str = ""):
        self._operands, self._problem = operands, problem
        self._plan = library.device_plan(problem, promote_keys, configuration)

    def __call__(self):
        self._plan.run(self._problem)


def lab_tflops(lab: Path, seqlen: int, launches: int, warm: bool) -> float:
    """Of the lab's fastest configuration, in a process of its own while this one rests."""
    command = [lab / "lab8", str(seqlen), str(launches), "0" if warm else "5"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return max(float(rate) for rate in re.findall(r"tflops=([\d.]+)", text))


def engines_of(library: Library, operands: Operands, integers: Operands | None, also):
    """name -> a launch; what ptxas refuses is left out, with its reason."""
    codes = library.attend(operands.problem, operands.codes)
    wanted = [("plain", codes, 0, ""), ("promoted", codes, PROMOTE_KEYS, ""),
              ("from bf16", operands.problem, PROMOTE_KEYS, "")]
    if integers:
        s8 = library.attend(operands.problem, integers.codes)
        wanted += [("s8", s8, 0, ""), ("s8 promoted", s8, PROMOTE_KEYS, "")]
    for text in also:
        keys, _, configuration = text.partition(":")
        wanted.append((text, codes, int(keys), configuration))
    found, missing = {}, []
    for name, problem, keys, configuration in wanted:
        try:
            found[name] = Forward(library, operands, problem, keys, configuration)
        except RuntimeError as error:
            missing.append(f"{name}: {str(error).splitlines()[0][:90]}")
    return found, missing


def measure(library: Library, row: Row, rounds: int, lab: Path | None, s8: bool, also):
    """name -> every time in ms and the lab's TFLOPS; name -> difference to bf16; notes."""
    inputs = Inputs(row.case)
    operands = Operands(library, inputs)
    operands.quantizer.run(operands.problem, operands.codes)
    integers = Operands(library, inputs, S8) if s8 else None
    if integers:
        integers.quantizer.run(integers.problem, integers.codes)
    engines, missing = engines_of(library, operands, integers, also)
    difference = {}
    for name, engine in engines.items():
        operands.out.fill_(float("nan"))
        engine()
        difference[name] = operands.difference()
        milliseconds(engine, 2)
    times = {name: [] for name in engines}
    lab_rates = []
    for _ in range(TURNS):
        for name, engine in engines.items():
            times[name] += [warm_time(engine)] if row.case.warm else cool_times(engine, rounds)
        if lab and row.in_lab:
            launches = 40 if row.case.warm else rounds
            lab_rates.append(lab_tflops(lab, row.case.seqlen, launches, row.case.warm))
    rates = {n: inputs.flops / statistics.median(t) * 1e-9 for n, t in times.items()}
    if lab_rates:
        rates["lab"] = statistics.median(lab_rates)
    return rates, times, difference, missing


def judge(row: Row, rates, full):
    """The floor as text, and whether it holds: None where what it needs was not measured."""
    plain = rates["plain"]
    if row.floor:
        return f"{plain / row.floor:.2f} of {row.floor:.0f}", plain >= row.floor
    if row.of_full and row.case.seqlen in full:
        share = plain / full[row.case.seqlen]
        return f"{share:.2f} of full, floor {row.of_full}", share >= row.of_full
    if "lab" in rates:
        share = plain / rates["lab"]
        return f"{share:.2f} of lab, floor {LAB_SHARE}", share >= LAB_SHARE
    return "", None


def forward_table(library: Library, rows, arguments):
    integers = ["s8", "s8 promoted"] if arguments.s8 else []
    columns = ["plain", "promoted", "from bf16", *integers, "lab", *arguments.also]
    print(f"| TFLOPS | {' | '.join(columns)} | promoted over plain | plain | errors |")
    print("|---" * (len(columns) + 4) + "|")
    everything, full, below = {}, {}, []
    for row in rows:
        rates, times, difference, notes = measure(
            library, row, arguments.rounds, arguments.lab, arguments.s8, arguments.also
        )
        everything[row.case.name] = {"ms": times, "tflops": rates}
        if row.case.head_dim == 128 and not row.case.causal and not row.case.warm:
            full[row.case.seqlen] = rates["plain"]
        floor, holds = judge(row, rates, full)
        if holds is False:
            below.append(row.case.name)
        below += [f"{row.case.name}, {name}: error {d:.1e}" for name, d in difference.items()
                  if not d < TOLERANCE]
        errors = " ".join(f"{difference[n]:.1e}" for n in ("plain", "s8") if n in difference)
        cells = [f"{rates[name]:.0f}" if name in rates else "" for name in columns]
        print(f"| {row.case.name} | {' | '.join(cells)} | "
              f"{rates.get('promoted', float('nan')) / rates['plain']:.2f} | {floor} | "
              f"{errors} |{' ' + '; '.join(notes) if notes else ''}", flush=True)
        torch.cuda.empty_cache()
    return everything, below


def quantize_table(library: Library, rounds: int):
    print("\n| quantise, bytes a second | TB/s | copy | of copy, floor 0.7 |\n|---|---|---|---|")
    everything, below = {}, []
    for head_dim in (64, 128, 256):
        inputs = Inputs(cell(head_dim, 4096, False))
        operands = Operands(library, inputs)
        elements = inputs.q.numel()
        for label, names, count in (("q, rotated", ("q", "q_scale"), elements),
                                    ("k rotated, v", ("k", "v", "key_scale"), 2 * elements)):
            size = 3 * count
            to = operands.only(*names)
            source, target = (
                torch.randint(0, 255, (size // 2,), device="cuda", dtype=torch.uint8)
                for _ in range(2)
            )
            engines = {
                "fovea": lambda to=to: operands.quantizer.run(operands.problem, to),
                "copy": lambda source=source, target=target: target.copy_(source),
            }
            times = {name: [] for name in engines}
            for engine in engines.values():
                milliseconds(engine, 2)
            for _ in range(3 * rounds):
                for name, engine in engines.items():
                    times[name] += cool_times(engine, 1)
            rate = {n: size / statistics.median(t) * 1e-9 for n, t in times.items()}
            share = rate["fovea"] / rate["copy"]
            name = f"d={head_dim} {label}"
            everything[name] = times
            if share < 0.7:
                below.append(name)
            print(f"| {name} | {rate['fovea']:.2f} | {rate['copy']:.2f} | {share:.2f} |",
                  flush=True)
    return everything, below


def main() -> int:
    parser = command_line(__doc__, rounds=4, rounds_are="launches of each engine and turn")
    parser.add_argument("--lab", type=Path, metavar="DIR", help="folder of lab8")
    parser.add_argument("--s8", action="store_true", help="and q and k as integers")
    parser.add_argument("--also", action="append", default=[], metavar="KEYS[:FIELD=VALUE,...]")
    arguments = parser.parse_args()
    wanted = chosen(arguments, [*(row.case.name for row in ROWS), QUANTIZE])
    library = open_library(arguments.library)
    everything, below = {}, []
    rows = [row for row in ROWS if row.case.name in wanted]
    if rows:
        everything, below = forward_table(library, rows, arguments)
    if QUANTIZE in wanted:
        passes, slow = quantize_table(library, arguments.rounds)
        everything[QUANTIZE] = passes
        below += slow
    print(f"\nBelow the floor: {'; '.join(below) or 'none'}")
    write_times(arguments.json, everything)
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
