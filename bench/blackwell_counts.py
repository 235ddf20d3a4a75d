#!/usr/bin/env python3
"""What fovea's Blackwell kernels and another one do for a tile of 128 x 128 scores.

Counts, not times: both run on the PTX emulator, at two lengths of keys that differ by one tile, and
the counters are subtracted, so that what a kernel does once does not count. The other kernel is
that of CUTLASS's example 77, or of any program that takes its options. It is built outside this
repository (docs/emulator.md) for sm_100a with nvcc -cudart shared; behind -- stands what starts it:

    bench/blackwell_counts.py --build build -- ./77_blackwell_fmha
    bench/blackwell_counts.py --backward --build build -- ./77_blackwell_fmha_bwd

Ends with an error where what fovea chooses for such rows, CTA pairs (backward: and each of its
Blackwell forms), does more of what it claims to do no more of.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

# As in BACKWARD_ROWS.
ROWS = (
    ("tensor FLOP", lambda c: c["tensor_flops_f16"] + c.get("tensor_flops_fp8", 0), 0),
    ("exponentials, special function unit", lambda c: c["mufu_lanes"], 0),
    ("FMA instructions, lanes", lambda c: c["fma_lanes"], None),
    ("ALU instructions, lanes", lambda c: c["alu_lanes"], None),
    ("warp instructions", lambda c: c["warp_instructions"], None),
    ("shared memory, bytes", lambda c: c["shared_tensor_read_bytes"] + c["shared_read_bytes"]
     + c["shared_write_bytes"] + c["tma_load_bytes"] + c["cp_async_bytes"], 0),
    ("  of these read by products", lambda c: c["shared_tensor_read_bytes"], 0),
    ("  of these written by copies", lambda c: c["tma_load_bytes"] + c["cp_async_bytes"], 0),
    ("tensor memory read, bytes", lambda c: c["tensor_memory_read_bytes"], None),
    ("tensor memory written, bytes", lambda c: c["tensor_memory_write_bytes"], None),
)

def by_threads(counts: dict[str, int], total: str, *products: str) -> int:
    return counts[total] - sum(counts[name] for name in products)


def shared_in_all(c: dict[str, int]) -> int:
    return (c["shared_tensor_read_bytes"] + c["shared_write_bytes"] + c["shared_read_bytes"]
            + c["tma_store_bytes"] + 2 * c["dsmem_bytes"])


# dS^T, 16 bits each of 128 x 128, which dk takes from tensor memory and example 77's from shared
# memory: written there once and read once, for the bytes less that products read in shared memory.
DSCORES = 2 * 128 * 128

# Name, count, and by how much it may be above the other's; None: it is no claim.
BACKWARD_ROWS = (
    ("tensor FLOP", lambda c: c["tensor_flops_f16"], 0),
    ("exponentials", lambda c: c["mufu_lanes"], 0),
    ("FMA instructions, lanes", lambda c: c["fma_lanes"], 0),
    ("ALU instructions, lanes", lambda c: c["alu_lanes"], 0),
    ("warp instructions", lambda c: c["warp_instructions"], 0),
    ("shared memory: read by products", lambda c: c["shared_tensor_read_bytes"], 0),
    ("  written by threads", lambda c: c["shared_write_bytes"], 0),
    ("  read by threads", lambda c: c["shared_read_bytes"], 0),
    ("  read by bulk reductions", lambda c: c["tma_store_bytes"], 0),
    ("  distributed, read and written", lambda c: 2 * c["dsmem_bytes"], None),
    ("  all of these", shared_in_all, 0),
    ("copies into shared memory", lambda c: c["tma_load_bytes"] + c["cp_async_bytes"], 0),
    ("dq into global memory", lambda c: c["tma_store_bytes"] + 4 * c["atomics"], 0),
    ("tensor memory: read by threads", lambda c: by_threads(
        c, "tensor_memory_read_bytes", "accumulator_read_bytes", "tensor_memory_operand_bytes"), 0),
    ("  written by threads", lambda c: by_threads(
        c, "tensor_memory_write_bytes", "accumulator_write_bytes"), DSCORES),
    ("  read as operand A", lambda c: c["tensor_memory_operand_bytes"], DSCORES),
    ("  accumulators, read", lambda c: c["accumulator_read_bytes"], None),
    ("  accumulators, written", lambda c: c["accumulator_write_bytes"], 0),
    ("  read in all", lambda c: c["tensor_memory_read_bytes"], DSCORES),
    ("  written in all", lambda c: c["tensor_memory_write_bytes"], DSCORES),
    ("shared and tensor memory, without accumulators", lambda c: shared_in_all(c)
     + c["tensor_memory_read_bytes"] - c["accumulator_read_bytes"]
     + c["tensor_memory_write_bytes"] - c["accumulator_write_bytes"], 0),
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


def claims(variant: str, backward: bool) -> bool:
    return "Hopper" not in variant if backward else variant.endswith("pair")


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
    for name, count, allowed in BACKWARD_ROWS if options.backward else ROWS:
        print(f"| {name} | {count(peer)} |", " | ".join(str(count(c)) for c in own.values()), "|")
        worse += [f"{variant}: {name}" for variant, c in own.items()
                  if allowed is not None and claims(variant, options.backward)
                  and count(c) > count(peer) + allowed]
    if worse:
        print("more than the other: " + "; ".join(worse), file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
