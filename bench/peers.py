#!/usr/bin/env python3
"""fovea's CPU engine beside ONNX Runtime and PyTorch, and beside what the machine can do at most.

    scripts/bench                        everything, at one thread and at all of them
    scripts/bench --threads 2            at two threads
    scripts/bench --cases fp32-full      one case; --list names them
    scripts/bench --json FILE            every time measured, as JSON

Method: standard normal inputs; one process; every engine at the same number of threads. The engines
take turns, one call each a round, after one uncounted call each, so that a machine that slows down
slows all of them; between two calls is a pause in which the threads of the last one go to sleep.
The median counts, the fastest is printed beside it. A call is attention and nothing else: planning,
sessions and layouts are prepared before, each engine has the layout that suits it, and outputs are
allocated before wherever the engine lets one (not in PyTorch, whose allocations are kept from
returning pages to the system). Decoding goes round copies of the keys and values that no cache
holds; fovea reads them as (batch, seqlen, heads, head_dim), and in the cases called by-head as
(batch, heads, seqlen, head_dim), which the peers always have. Outputs are compared: engines that
did not compute the same thing are no peers.

Peaks of the vector units come from `fovea bench`, at the same number of threads; the best of all
readings counts. Memory bandwidth is shared with whatever else the machine does: the reading of the
keys and values that decoding is compared with takes its turn among the engines, median for median.
"""

import argparse
import ctypes
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

try:
    import numpy as np
    import engines
    from engines import Case
    from fovea_c import Library
except ImportError as error:
    sys.exit(f"bench: {error}; scripts/setup --bench installs what is missing into .venv")

CASES = [
    Case("fp32-full", "fp32", 8, 8, 2048, 2048, 128),
    Case("fp32-causal", "fp32", 8, 8, 2048, 2048, 128, causal=True),
    Case("bf16-full", "bf16", 8, 8, 2048, 2048, 128),
    Case("bf16-causal", "bf16", 8, 8, 2048, 2048, 128, causal=True),
    *(
        Case(f"{dtype}-d{d}", dtype, 8, 8, 2048, 2048, d)
        for dtype in ("fp32", "bf16")
        for d in (64, 72, 80)
    ),
    *(
        Case(f"{dtype}-{rows}-queries", dtype, 8, 8, rows, 2048, 128)
        for dtype in ("fp32", "bf16")
        for rows in (63, 64)
    ),
    *(
        Case(f"{dtype}-decode{suffix}", dtype, 32, 8, 1, 8192, 128, kv_by_head=bool(suffix))
        for dtype in ("fp32", "bf16")
        for suffix in ("", "-by-head")
    ),
    *(
        Case(f"fp32-backward-{mask}", "fp32", 8, 8, 2048, 2048, 128, mask == "causal",
             backward=True)
        for mask in ("full", "causal")
    ),
]
LONG = Case("fp32-long", "fp32", 1, 1, 131072, 131072, 64, causal=True)
LONG_MEMORY_MB = 64.0

FEWEST_RUNS, MOST_RUNS = 7, 300
PAUSE_SECONDS = 0.01
# Largest difference between two right answers: rounding of P to bf16, and of the output.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def cold_bytes() -> int:
    """Bytes of which no cache holds any after a pass over them."""
    try:
        cache = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        cache = 0
    return min(8 * max(cache, 32 << 20), 2 << 30)


# ---------------------------------------------------------------------------------------- measuring


def time_in_turns(prepared: dict, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call of each engine. `seconds` is what an engine may take all in all."""
    times: dict[str, list[float]] = {name: [] for name in prepared}
    begin = time.perf_counter()
    step = 0
    while True:
        rounds = len(next(iter(times.values())))
        spent = time.perf_counter() - begin
        if rounds >= MOST_RUNS or (rounds >= FEWEST_RUNS and spent > seconds * len(prepared)):
            return times
        for name, work in prepared.items():
            call = work.calls[step % len(work.calls)]
            step += 1
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)


def measure(case: Case, contestants: list, seconds: float) -> dict:
    """Median, fastest and agreement of every engine that does the case."""
    copies = math.ceil(cold_bytes() / case.kv_bytes) if case.is_decode else 1
    inputs = engines.make_inputs(case, copies)
    prepared, results, reference = {}, {}, None
    for engine in contestants:
        try:
            work = engine.prepare(inputs)
            work.calls[0]()
        except Exception as error:  # whatever a peer raises is why it has no figure
            if engine.name == "fovea":
                raise
            if reason := str(error):
                results[engine.name] = {"unsupported": reason.splitlines()[0][:100]}
            continue
        prepared[engine.name] = work
        results[engine.name] = {}
        output = work.output()
        if output is not None:
            output = np.array(output)
            reference = output if reference is None else reference
            difference = float(np.abs(output - reference).max())
            agrees = difference <= TOLERANCE[case.dtype]  # false for a NaN
            results[engine.name] = {"max_difference": difference, "agrees": agrees}
    for name, times in time_in_turns(prepared, seconds).items():
        median = statistics.median(times)
        results[name] |= {
            "median_seconds": median,
            "fastest_seconds": min(times),
            "runs": len(times),
            "gflops": case.flops / median * 1e-9,
        }
        if case.is_decode:
            results[name]["kv_gb_per_second"] = case.kv_bytes / median * 1e-9
    return results


class Peaks:
    """What the machine can do at most at a number of threads: the best of all readings."""

    def __init__(self, program: Path, threads: int):
        self._command = [
            str(program), "bench", "--d", "64", "--seqs", "64", "--repeat", "1",
            "--threads", str(threads), "--quiet", "--json", "-",
        ]  # fmt: skip
        self.fp32_gflops = self.bf16_gflops = 0.0

    def read(self) -> None:
        text = subprocess.run(self._command, check=True, capture_output=True, text=True).stdout
        answer = json.loads(text)
        self.fp32_gflops = max(self.fp32_gflops, answer["peak_gflops"]["f32"])
        self.bf16_gflops = max(self.bf16_gflops, answer["peak_gflops"]["bf16"])


# ------------------------------------------------------------------------ one long sequence, memory


def status_kib(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1])


def probe_long(make_engine) -> dict:
    """In a process of its own: time, and the most memory at any moment of planning and running,
    over what was there when inputs and output existed. One run: the first, cold as it is."""
    case, engine = LONG, make_engine()
    inputs = engines.make_inputs(case, 1)
    output_bytes = inputs.q.nbytes
    before = status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts over
    work = engine.prepare(inputs)
    start = time.perf_counter()
    work.calls[0]()
    seconds = time.perf_counter() - start
    peak = status_kib("VmHWM") - before
    return {
        "median_seconds": seconds,
        "fastest_seconds": seconds,
        "runs": 1,
        "gflops": case.flops / seconds * 1e-9,
        "memory_beyond_mb": (peak * 1024 - output_bytes) / 1e6,
        "sample": work.output()[:: case.seqlen_q // 64, 0].tolist(),
    }


def measure_long(threads: int, build: Path, with_torch: bool) -> dict:
    results, reference = {}, None
    for engine in ["fovea"] + ["torch sdpa"] * with_torch:
        command = [sys.executable, __file__, "--probe", engine, "--threads", str(threads)]
        command += ["--build", str(build)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            if engine == "fovea":
                sys.exit(f"bench: {LONG.name}: {reason}")
            results[engine] = {"unsupported": reason[:100]}
            continue
        result = json.loads(done.stdout)
        sample = np.array(result.pop("sample"))
        reference = sample if reference is None else reference
        difference = float(np.abs(sample - reference).max())
        agrees = difference <= TOLERANCE[LONG.dtype]
        results[engine] = result | {"max_difference": difference, "agrees": agrees}
    return results


# --------------------------------------------------------------------------------------- the floors


def rate(result: dict) -> float:
    return result["kv_gb_per_second"] if "kv_gb_per_second" in result else result["gflops"]


def rate_text(result: dict) -> str:
    unit = "GB/s" if "kv_gb_per_second" in result else "GFLOP/s"
    return f"{rate(result):.1f} {unit}"


def time_ratio(own: dict, beside: dict, which: str) -> float:
    """How many times as fast `own` is: of the "median" or the "fastest" calls."""
    return beside[which + "_seconds"] / own[which + "_seconds"]


class Floors:
    """Rows: case, what fovea did, beside what, the ratio of the medians (which the verdict is
    about) and that of the fastest calls, floor, goal, verdict."""

    def __init__(self, results: dict, threads: int):
        self._results, self._threads = results, threads
        self.rows: list[dict] = []

    def fovea(self, case: str) -> dict | None:
        return self._results.get(case, {}).get("fovea")

    def add(self, case, own, beside, ratio, floor=None, goal=None, percent=False, fastest=None):
        verdict = "ok" if ratio >= (1.0 if floor is None else floor) else "below"
        if floor is None:
            verdict = {"ok": "faster", "below": "slower"}[verdict]
        if goal is not None and ratio >= goal:
            verdict = "goal"
        self.rows.append(
            {"case": case, "threads": self._threads, "fovea": own, "beside": beside,
             "ratio": ratio, "fastest": fastest, "floor": floor, "goal": goal, "verdict": verdict,
             "percent": percent}
        )  # fmt: skip

    def against_peak(self, case: str, peak: float, name: str, floor, goal) -> None:
        own = self.fovea(case)
        if own and peak > 0.0:
            ratio = own["gflops"] / peak
            fastest = ratio * own["median_seconds"] / own["fastest_seconds"]
            beside = f"{name} {peak:.1f} GFLOP/s"
            self.add(case, rate_text(own), beside, ratio, floor, goal, True, fastest)
            if floor is None and ratio < goal:
                self.rows[-1]["verdict"] = "below"

    def against_reading(self, case: str, floor: float, goal: float) -> None:
        own, reading = (self._results.get(case, {}).get(n) for n in ("fovea", "stream read"))
        if own and reading:
            beside = f"stream read {rate_text(reading)}"
            self.add(case, rate_text(own), beside, time_ratio(own, reading, "median"), floor, goal,
                     True, time_ratio(own, reading, "fastest"))

    def against_own(self, case: str, other: str, floor: float, goal) -> None:
        own, beside = self.fovea(case), self.fovea(other)
        if own and beside:
            ratio = own["gflops"] / beside["gflops"]
            fastest = ratio * (own["median_seconds"] / own["fastest_seconds"])
            fastest *= beside["fastest_seconds"] / beside["median_seconds"]
            self.add(case, rate_text(own), f"own {other} {rate_text(beside)}", ratio, floor, goal,
                     fastest=fastest)

    def against_peers(self, case: str, floors: dict) -> None:
        """The best operator of each peer; `floors` maps the start of its name to (floor, goal)."""
        own = self.fovea(case)
        if not own:
            return
        for peer in ("ORT", "torch"):
            times = {
                name: result
                for name, result in self._results[case].items()
                if name.startswith(peer) and "gflops" in result
            }
            if times:
                name, best = max(times.items(), key=lambda item: item[1]["gflops"])
                floor, goal = floors.get(peer, (None, None))
                self.add(case, rate_text(own), f"{name} {rate_text(best)}",
                         time_ratio(own, best, "median"), floor, goal,
                         fastest=time_ratio(own, best, "fastest"))


def floors_of(results: dict, peaks: Peaks, threads: int) -> list[dict]:
    floors = Floors(results, threads)
    floors.against_peak("fp32-full", peaks.fp32_gflops, "FMA peak", 0.75, 0.85)
    floors.against_peers("fp32-full", {"ORT": (1.0, None)})
    floors.against_peers("fp32-causal", {"ORT": (1.3, 1.6)})
    for mask in ("full", "causal"):
        floors.against_own(f"bf16-{mask}", f"fp32-{mask}", 1.5, None)
        floors.against_peers(f"bf16-{mask}", {})
    floors.against_peak("bf16-full", peaks.bf16_gflops, "bf16 dot peak", None, 0.65)
    for dtype in ("fp32", "bf16"):
        floors.against_own(f"{dtype}-d72", f"{dtype}-d80", 0.85, 0.95)
        floors.against_own(f"{dtype}-63-queries", f"{dtype}-64-queries", 0.85, 0.95)
        for case in ("d64", "d72", "d80", "63-queries", "64-queries"):
            floors.against_peers(f"{dtype}-{case}", {})
    for case in ("fp32-decode", "fp32-decode-by-head", "bf16-decode", "bf16-decode-by-head"):
        floors.against_reading(case, 0.60, 0.85)
        floors.against_peers(case, {})
    for mask in ("full", "causal"):
        floors.against_peers(f"fp32-backward-{mask}", {"torch": (1.2, None)})
    floors.against_peak("fp32-backward-full", peaks.fp32_gflops, "FMA peak", None, 0.6)
    long_own = floors.fovea(LONG.name)
    if long_own:
        used = long_own["memory_beyond_mb"]
        # The floor is a bound from above; as a ratio, bound over use.
        floors.add(LONG.name, f"{used:.1f} MB", f"bound {LONG_MEMORY_MB:.0f} MB",
                   LONG_MEMORY_MB / max(used, 0.1), 1.0)
        floors.against_peers(LONG.name, {})
    return floors.rows


def scaling_of(by_threads: dict[int, dict]) -> list[dict]:
    if 1 not in by_threads or 2 not in by_threads:
        return []
    floors = Floors({}, 2)
    for case in ("fp32-full", "fp32-causal", "bf16-full", "bf16-causal"):
        one, two = (by_threads[n].get(case, {}).get("fovea") for n in (1, 2))
        if one and two:
            floors.add(case, rate_text(two), f"own, 1 thread {rate_text(one)}",
                       time_ratio(two, one, "median"), 1.8, 1.95,
                       fastest=time_ratio(two, one, "fastest"))
    return floors.rows


# ----------------------------------------------------------------------------------------- printing


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |")
    print(flush=True)


def print_times(results: dict, threads: int) -> None:
    print(f"Times, {threads} thread{'s' * (threads > 1)}:\n")
    rows, left_out = [], {}
    for case, of_case in results.items():
        for name, r in of_case.items():
            if "unsupported" in r:
                left_out.setdefault(f"{name}: {r['unsupported']}", []).append(case)
                continue
            note = f"{r['memory_beyond_mb']:.1f} MB" if "memory_beyond_mb" in r else ""
            if r.get("agrees") is False:
                note = "WRONG " + note
            times = [f"{1e3 * r[which + '_seconds']:.3f}" for which in ("median", "fastest")]
            difference = r.get("max_difference")
            off = "" if difference is None else f"{difference:.1e}"
            rows.append([case, name, *times, rate_text(r), off, note])
    print_table(["case", "engine", "median ms", "fastest ms", "rate", "max diff", "note"], rows)
    for reason, cases in left_out.items():
        print(f"{reason} ({', '.join(cases)})")
    print()


def print_floors(rows: list[dict], title: str) -> None:
    print(title + "\n")

    def number(row: dict, key: str) -> str:
        if row[key] is None:
            return ""
        return f"{100 * row[key]:.1f} %" if row["percent"] else f"{row[key]:.2f}x"

    print_table(
        ["case", "fovea", "beside", "ratio", "of fastest", "floor", "goal", "verdict"],
        [
            [r["case"], r["fovea"], r["beside"], number(r, "ratio"), number(r, "fastest"),
             number(r, "floor"), number(r, "goal"), r["verdict"]]
            for r in rows
        ],
    )  # fmt: skip


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.*)$", info.read_text(), re.M) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


# --------------------------------------------------------------------------------------------- main


def keep_pages() -> None:
    """A malloc that gives no pages back: an engine that allocates its output in every call would
    otherwise be measured faulting them in. Larger blocks than any output stay with mmap."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_mmap_threshold, 16 << 20)
        libc.mallopt(m_trim_threshold, 1 << 30)


def make_contestants(library: Library, threads: int) -> list:
    """fovea first: it is what the others are compared with."""
    found = [engines.Fovea(library, threads), engines.StreamRead(library, threads)]
    try:
        import onnx  # noqa: F401  models are built with it

        for operator in ("MultiHeadAttention", "Attention", "GroupQueryAttention"):
            found.append(engines.OnnxRuntime(operator, threads))
    except ImportError as error:
        print(f"without ONNX Runtime: {error}")
    try:
        found.append(engines.Torch(threads))
    except (ImportError, OSError) as error:
        print(f"without PyTorch: {error}")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 2)[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    count = len(os.sched_getaffinity(0))
    default = "1" if count == 1 else f"1,{count}"
    parser.add_argument("--threads", default=default, help=f"numbers of threads ({default})")
    parser.add_argument("--cases", default="", help="names, separated by commas (all)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--seconds", type=float, default=1.5, help="per engine and case (1.5)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build folder (build)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if below a floor")
    parser.add_argument("--probe", choices=["fovea", "torch sdpa"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = [case.name for case in CASES] + [LONG.name]
    arguments.cases = arguments.cases.split(",") if arguments.cases else names
    if unknown := [name for name in arguments.cases if name not in names]:
        parser.error(f"--cases: no case is called '{unknown[0]}'; --list names them")
    try:
        arguments.threads = [int(text) for text in arguments.threads.split(",")]
    except ValueError:
        parser.error(f"--threads is '{arguments.threads}'; numbers separated by commas are needed")
    if min(arguments.threads) < 1:
        parser.error("--threads: at least 1 is needed")
    return arguments


def load_library(build: Path) -> Library:
    path = build / "bench" / "libfovea_bench.so"
    if not path.exists():
        sys.exit(f"bench: {path} is missing; `make build` builds it")
    return Library(path)


def run_cases(arguments, contestants: list, threads: int) -> tuple[dict, Peaks]:
    peaks = Peaks(arguments.build / "fovea", threads)
    results = {}
    for case in CASES:
        if case.name in arguments.cases:
            show_progress(f"{case.name}, {threads} threads")
            if case.name.endswith("-full"):
                peaks.read()
            results[case.name] = measure(case, contestants, arguments.seconds)
    if LONG.name in arguments.cases:
        show_progress(f"{LONG.name}, {threads} threads")
        with_torch = any(engine.name == "torch sdpa" for engine in contestants)
        results[LONG.name] = measure_long(threads, arguments.build, with_torch)
    peaks.read()
    show_progress("")
    return results, peaks


def main() -> int:
    arguments = parse_arguments()
    if arguments.list:
        print("\n".join(case.name for case in [*CASES, LONG]))
        return 0
    library = load_library(arguments.build)
    if arguments.probe:
        threads = arguments.threads[0]
        make = {"fovea": lambda: engines.Fovea(library, threads),
                "torch sdpa": lambda: engines.Torch(threads)}  # fmt: skip
        print(json.dumps(probe_long(make[arguments.probe])))
        return 0
    keep_pages()

    command = [str(arguments.build / "fovea"), "info", "--quiet", "--json", "-"]
    info = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    machine = {"cpu": cpu_model(), "processors": len(os.sched_getaffinity(0)),
               "instruction_set": info["instruction_set"]}  # fmt: skip
    print(f"{machine['cpu']}, {machine['processors']} processors, {machine['instruction_set']}")

    by_threads, rows, all_peaks, versions = {}, [], {}, {}
    for threads in arguments.threads:
        contestants = make_contestants(library, threads)
        if not versions:
            versions = {e.product: e.version for e in contestants if hasattr(e, "version")}
            print(", ".join(f"{name} {version}" for name, version in versions.items()) + "\n")
        results, peaks = run_cases(arguments, contestants, threads)
        by_threads[threads] = results
        print_times(results, threads)
        all_peaks[threads] = {"fp32_gflops": peaks.fp32_gflops, "bf16_gflops": peaks.bf16_gflops}
        own = floors_of(results, peaks, threads)
        print_floors(own, f"Floors and goals, {threads} thread{'s' * (threads > 1)}:")
        rows += own
    scaling = scaling_of(by_threads)
    if scaling:
        print_floors(scaling, "From 1 thread to 2:")
        rows += scaling
    if arguments.json:
        document = {"machine": machine, "versions": versions, "peaks": all_peaks,
                    "results": by_threads, "floors": rows}  # fmt: skip
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")
    wrong = [
        f"{case} by {name}"
        for results in by_threads.values()
        for case, of_case in results.items()
        for name, result in of_case.items()
        if result.get("agrees") is False
    ]
    if wrong:
        print("bench: outputs differ from fovea's: " + ", ".join(wrong), file=sys.stderr)
        return 1
    return int(arguments.strict and any(row["verdict"] == "below" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
