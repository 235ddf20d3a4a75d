#!/usr/bin/env python3
"""What fovea's Blackwell kernels and another one do for a tile of 128 x 128 scores.

Counts, not times: both run on the PTX emulator, at two lengths of keys that differ by one tile, and
the counters are subtracted, so that what a kernel does once does not count. The other kernel is
that of CUTLASS's example 77, or of any program that takes its options. It is built outside this
repository (docs/emulator.md) for sm_100a with nvcc -cudart shared; behind -- stands what starts it:

    bench/blackwell_counts.py --build build -- ./77_blackwell_fmha
    bench/blackwell_counts.py --backward --build build -- ./77_blackwell_fmha_bwd

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

# The other kernel brings the numbers of rows, 1 KB a tile, by cp.async, which no counter has.
BACKWARD_ROWS = (
    ("tensor FLOP", lambda c: c["tensor_flops_f16"], True),
    ("exponentials", lambda c: c["mufu_lanes"], True),
    ("warp instructions", lambda c: c["warp_instructions"], True),
    ("shared memory: read by products", lambda c: c["shared_tensor_read_bytes"], True),
    ("  written by threads", lambda c: c["shared_write_bytes"], True),
    ("  read by threads", lambda c: c["shared_read_bytes"], True),
    ("  read by bulk reductions", lambda c: c["tma_store_bytes"], True),
    ("  distributed, read and written", lambda c: 2 * c["dsmem_bytes"], False),
    ("  all of these", lambda c: c["shared_tensor_read_bytes"] + c["shared_write_bytes"]
     + c["shared_read_bytes"] + c["tma_store_bytes"] + 2 * c["dsmem_bytes"], True),
    ("copies into shared memory", lambda c: c["tma_load_bytes"], False),
    ("tensor memory read, bytes", lambda c: c["tensor_memory_read_bytes"], False),
    ("tensor memory written, bytes", lambda c: c["tensor_memory_write_bytes"], False),
)


def peer_counts(build: pathlib.Path, command: list[str], backward: bool) -> dict[str, int]:
    # Two tiles of keys more for two of rows; or, backward, one of rows more for one of keys.
    shapes = ((256, 128), (384, 128)) if backward else ((256, 384), (256, 512))
    tiles = 1 if backward else 2
    totals = []
    for rows, keys in shapes:
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            subprocess.run(
                [build / "fovea", "emulate", "--device", "emulated:sm_100a", "--in-order-tensor",
                 "--sms", "1", "--no-check", "--quiet", "--json", report, "--", *command,
                 "--b=1", "--h=1", f"--q={rows}", f"--k={keys}", "--d=128", "--iterations=0"],
                check=True, stdout=subprocess.DEVNULL)
            launches = json.loads(report.read_text())["launches"]
        totals.append(next(launch["report"]["total"] for launch in launches
                           if launch["report"]["total"].get("tensor_flops_f16", 0) > 0))
    return {name: (totals[1].get(name, 0) - totals[0].get(name, 0)) // tiles
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


def own_backward_counts(build: pathlib.Path) -> dict[str, dict[str, int]]:
    said = subprocess.run(
        [build / "tests/gpu_bwd_sm100_test", "--gtest_filter=BackwardCounts*"],
        check=True, capture_output=True, text=True).stdout
    found = [json.loads(line) for line in re.findall(r"^counts (\{.*\})$", said, re.MULTILINE)]
    return {"fovea, " + one["name"]: {name: round(value) for name, value in one["counts"].items()}
            for one in found if one["name"] in ("d=128", "d=128, pair", "Hopper, d=128")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"))
    parser.add_argument("--backward", action="store_true", help="the gradients' kernels")
    parser.add_argument("program", nargs="+", help="-- PROGRAM: the other kernel's")
    options = parser.parse_args()
    peer = peer_counts(options.build, options.program, options.backward)
    own = (own_backward_counts if options.backward else own_counts)(options.build)
    print("| 128 rows x 128 keys, d = 128 | other |", " | ".join(own), "|")
    print("|---" * (len(own) + 2) + "|")
    worse = []
    for name, count, claimed in BACKWARD_ROWS if options.backward else ROWS:
        print(f"| {name} | {count(peer)} |", " | ".join(str(count(c)) for c in own.values()), "|")
        worse += [f"{variant}: {name}" for variant, c in own.items()
                  if claimed and variant.endswith("pair") and count(c) > count(peer)]
    if worse:
        print("more than the other: " + "; ".join(worse), file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
