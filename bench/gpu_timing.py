"""What the tables of a GPU share: PyTorch where there is one, launches timed on the stream, results
compared, and the command line."""

import argparse
import json
import sys
import time
from pathlib import Path

PROGRAM = Path(sys.argv[0]).stem

try:
    from fovea_c import Library
except ImportError as error:
    sys.exit(f"{PROGRAM}: {error}")
try:
    import torch
except ImportError:
    torch = None  # --help and --list do without

ROOT = Path(__file__).resolve().parent.parent
PAUSE_SECONDS = 0.005
WARM_SECONDS = 0.25
HEAD_START_CYCLES = 1_000_000


def milliseconds(
    engine, launches: int, idle: bool = False, head_start: int = HEAD_START_CYCLES
) -> float:
    """Of a launch. The GPU spins for head_start cycles first, unless the stream is to be idle: long
    enough for the host to bring all launches into the queue."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if not idle:
        torch.cuda._sleep(head_start)
    begin.record()
    for _ in range(launches):
        engine()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / launches


def cool_times(engine, launches: int, idle: bool = False) -> list[float]:
    """Milliseconds of each launch, a pause before it."""
    times = []
    for _ in range(launches):
        torch.cuda.synchronize()
        time.sleep(PAUSE_SECONDS)
        times.append(milliseconds(engine, 1, idle))
    return times


def warm_time(engine) -> float:
    """Milliseconds of a launch, back to back, after as many that do not count."""
    launches = max(3, int(500 * WARM_SECONDS / milliseconds(engine, 3)))
    for _ in range(launches):
        engine()
    return milliseconds(engine, launches)


def largest_difference(a, b) -> float:
    """Of two tensors, or of two tuples of them, in parts of the largest number of each: what
    16 bits round depends on it. An output has weights that sum to 1 and counts as it is."""
    if not isinstance(a, tuple):
        return (a.float() - b.float()).abs().max().item()
    return max(
        ((x.float() - y.float()).abs().max() / y.float().abs().max()).item() for x, y in zip(a, b)
    )


def command_line(document: str, rounds: int, rounds_are: str) -> argparse.ArgumentParser:
    """What every table takes; `rounds` is the default of --rounds, `rounds_are` its meaning."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="names, separated by commas")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--rounds", type=int, default=rounds, help=rounds_are)
    parser.add_argument("--library", type=Path, metavar="FILE", help="that scripts/bench builds",
                        default=ROOT / "build/bench/libfovea_bench.so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time measured")
    return parser


def chosen(arguments, names: list[str]) -> list[str]:
    """The names that --cases has, all without it. --list prints them and ends the program."""
    if arguments.list:
        print("\n".join(names))
        sys.exit(0)
    wanted = arguments.cases.split(",") if arguments.cases else names
    unknown = set(wanted) - set(names)
    if unknown:
        sys.exit(f"{PROGRAM}: --cases has {', '.join(sorted(unknown))}; --list names the cases")
    return wanted


def open_library(path: Path) -> Library:
    """Of a machine that can measure; prints what is measured on."""
    if torch is None or not torch.cuda.is_available():
        reason = "PyTorch with CUDA is needed" if torch is None else "PyTorch sees no CUDA device"
        sys.exit(f"{PROGRAM}: {reason}")
    library = Library(path)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, "
          f"cuDNN {torch.backends.cudnn.version()}, fovea {library.version()}\n")
    return library


def write_times(path: Path | None, everything: dict) -> None:
    if path:
        path.write_text(json.dumps(everything, indent=1))
