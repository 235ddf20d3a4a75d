#!/usr/bin/env python3
"""What fovea's Blackwell forward kernel and another one do for a tile of 128 x 128 scores.

Counts, not times: both run on the PTX emulator, at two lengths of keys that differ by one tile, and
the counters are subtracted, so that what a kernel does once does not count. The other kernel is
that of CUTLASS's example 77, or of any program that takes its options. It is built outside this
repository (docs/emulator.md) for sm_100a with nvcc -cudart shared; behind -- stands what starts it:

    bench/blackwell_counts.py --build build -- ./77_blackwell_fmha

Ends with an error where what fovea chooses for such rows, CTA pairs, does more of what it claims to
do no more of.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROWS = (
    ("tensor FLOP", lambda c: c["tensor_flops_f16"] + c.get("tensor_flops_fp8", 0), True),
    ("exponentials, special function unit", lambda c: c["mufu_lanes"], True),
    ("FMA instructions, lanes", lambda c: c["fma_lanes"], False),
    ("ALU instructions, lanes", lambda c: c["alu_lanes"], False),
    ("warp instructions", lambda c: c["warp_instructions"], False),
    ("shared memory, bytes", lambda c: c["shared_tensor_read_bytes"] + c["shared_read_bytes"]
     + c["shared_write_bytes"] + c["tma_load_bytes"], True),
    ("  of these read by products", lambda c: c["shared_tensor_read_bytes"], True),
    ("  of these written by copies", lambda c: c["tma_load_bytes"], True),
    ("tensor memory read, bytes", lambda c: c["tensor_memory_read_bytes"], False),
    ("tensor memory written, bytes", lambda c: c["tensor_memory_write_bytes"], False),
)


def peer_counts(build: pathlib.Path, command: list[str]) -> dict[str, int]:
    totals = []
    for keys in (384, 512):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            subprocess.run(
                [build / "fovea", "emulate", "--device", "emulated:sm_100a", "--in-order-tensor",
                 "--sms", "1", "--no-check", "--quiet", "--json", report, "--", *command,
                 "--b=1", "--h=1", "--q=256", f"--k={keys}", "--d=128", "--iterations=0"],
                check=True, stdout=subprocess.DEVNULL)
            launches = json.loads(report.read_text())["launches"]
        totals.append(next(launch["report"]["total"] for launch in launches
                           if launch["report"]["total"].get("tensor_flops_f16", 0) > 0))
    return {name: (totals[1].get(name, 0) - totals[0].get(name, 0)) // 2
            for name in totals[1].keys() | totals[0].keys()}


def own_counts(build: pathlib.Path) -> dict[str, dict[str, int]]:
    said = "".join(
        subprocess.run([build / "tests" / program, f"--gtest_filter={tests}"],
                       check=True, capture_output=True, text=True).stdout
        for program, tests in (("gpu_fwd_sm100_test", "Budget/Counts*"),
                               ("gpu_fp8_test", "Fp8Counts*")))
    variants = re.findall(r"^counts (\w+) 128 (\w+) (\d+/16) (\{.*\})$", said, re.MULTILINE)
    return {f"fovea, {policy}, {share}{', CTA pair' if ctas == 'pair' else ''}": json.loads(counts)
            for ctas, policy, share, counts in variants}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"))
    parser.add_argument("program", nargs="+", help="-- PROGRAM: the other kernel's")
    options = parser.parse_args()
    peer = peer_counts(options.build, options.program)
    own = own_counts(options.build)
    print("| 128 rows x 128 keys, d = 128 | other |", " | ".join(own), "|")
    print("|---" * (len(own) + 2) + "|")
    worse = []
    for name, count, claimed in ROWS:
        print(f"| {name} | {count(peer)} |", " | ".join(str(count(c)) for c in own.values()), "|")
        worse += [f"{variant}: {name}" for variant, c in own.items()
                  if claimed and variant.endswith("CTA pair") and count(c) > count(peer)]
    if worse:
        print("more than the other: " + "; ".join(worse), file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
