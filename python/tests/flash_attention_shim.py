"""The modules that flash-attention's own tests import, made of fovea.

scripts/test-flash-attention copies those tests from a checkout to a temporary folder and runs them
there with this file as a pytest plugin. Nothing of flash-attention is in this repository.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
from pathlib import Path

import pytest
import torch

import fovea
import fovea.flash_attn_2

CHECKOUT = Path(os.environ["FLASH_ATTENTION"])
DEVICE = os.environ.get("FLASH_ATTENTION_DEVICE", "cpu")
SAMPLE = int(os.environ.get("FLASH_ATTENTION_SAMPLE", "0"))
SEED = int(os.environ.get("FLASH_ATTENTION_SEED", "0"))
MAX_ROWS = int(os.environ.get("FLASH_ATTENTION_MAX_ROWS", "0"))

# Tests, or values of their parameters, that ask for what is not there, and why.
LEFT_OUT = {
    "test_flash3_bw_compatibility": "compares schemas of flash-attention's own operators",
    "test_flash_attn_generator_arg_must_be_none": "calls flash-attention's C++ extension",
    "test_flash_attn_varlen_paged_kv_num_splits": "calls an internal function of flash-attention",
    "test_flash_attn_kvcache_paged_block_table_bounds": "calls flash-attention's C++ extension",
}
LEFT_OUT_ON_CPU = {
    "test_flash_attn_race_condition": "looks for races between thread blocks of a GPU",
    "test_flash_attn_cluster": "is about clusters of thread blocks of a GPU",
    "test_flash_attn_bwd_overflow": "is about the GPU's fp16 accumulators",
    "test_flash_attn_varlen_combine_linearize": "allows 0.002 between bfloat16 results with and"
    " without splits; two of them lie one rounding, 0.004, apart",
}
if DEVICE == "cpu":
    LEFT_OUT |= LEFT_OUT_ON_CPU
NO_WEIGHTS = "reads flash-attention's matrix of dropped weights, which fovea never has in memory"


def module(name: str, **contents: object) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(contents)
    sys.modules[name] = made
    return made


def load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None,
    max_seqlen=None,
):
    """x (batch, seqlen, heads, head_dim), turned at seqlen_offsets, seqlen_offsets + 1, ..."""
    assert not inplace and cu_seqlens is None
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    positions = offsets + torch.arange(x.shape[1], device=x.device)
    cos, sin = (table.float()[positions].unsqueeze(2) for table in (cos, sin))
    pairs = cos.shape[-1]
    turned = x.float().clone()
    one = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    two = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = x.float()[..., one], x.float()[..., two]
    turned[..., one] = a * cos - b * sin
    turned[..., two] = a * sin + b * cos
    return turned.to(x.dtype)


second = fovea.flash_attn_2
package = module("flash_attn", **{name: getattr(second, name) for name in second.__all__})
package.__path__ = []
module("flash_attn.flash_attn_interface", _get_block_size_n=None, USE_TRITON_ROCM=False)
module("flash_attn.layers", __path__=[])
module("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)
load("flash_attn.bert_padding", CHECKOUT / "flash_attn" / "bert_padding.py")
module(
    "flash_attn_interface",
    **{name: getattr(fovea, name) for name in fovea.__all__ if name.startswith("flash_attn")},
    get_scheduler_metadata=fovea.get_scheduler_metadata,
)
if DEVICE == "cpu":  # the tests ask what GPU there is, to leave out what old ones cannot do
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=80 << 30)


def skips_itself(parameters: dict) -> bool:
    """Would the test, in its first lines, call pytest.skip()?"""
    given = parameters.get
    if given("has_qv"):
        return parameters["d"] != 64
    new_kv, pages = given("new_kv", True), given("paged_kv_block_size") or given("page_size")
    return (
        (not new_kv and given("rotary_fraction", 0) > 0)
        or (new_kv and "new_kv" in parameters and parameters["seqlen_q"] > parameters["seqlen_k"])
        or (given("paged_kv_block_size") and (given("has_batch_idx") or given("has_leftpad")))
        or ("page_size" in parameters and pages and parameters["seqlen_k"] % pages != 0)
    )


def reason_to_leave_out(name: str, parameters: dict) -> str | None:
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    if parameters.get("dropout_p"):
        return NO_WEIGHTS
    if "float8" in str(parameters.get("dtype")):
        return "fp8 has tests of its own, python/tests/test_fp8.py"
    if skips_itself(parameters):
        return "the test itself skips them"
    if parameters.get("has_qv") and DEVICE == "cuda":
        return "q and qv joined are 320 or 576 wide, and kernels go to 256"
    rows = max(parameters.get(name, 0) for name in ("seqlen", "seqlen_q", "seqlen_k"))
    if MAX_ROWS and rows > MAX_ROWS:
        return f"more than {MAX_ROWS} rows take a CPU too long"
    return None


report: list[str] = []  # what is collected and what is left out


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """What fovea says no device does is skipped, with its words as the reason."""
    try:
        return (yield)
    except NotImplementedError as refusal:
        pytest.skip(f"not implemented: {refusal}")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Of each test, SAMPLE of the parameter sets that make sense. Here, since there are up to a
    million of them, and pytest takes its time to make items."""
    yield
    name = metafunc.function.__name__
    calls, skipped = [], {}
    for call in metafunc._calls:
        reason = reason_to_leave_out(name, call.params)
        if reason is None:
            calls.append(call)
        else:
            skipped[reason] = skipped.get(reason, 0) + 1
    if not metafunc._calls:
        return
    some = calls if not SAMPLE else random.Random(SEED).sample(calls, min(SAMPLE, len(calls)))
    if calls:
        report.append(f"{name}: {len(some)} of {len(calls)} parameter sets")
    report.extend(f"{name}: {n} left out: {reason}" for reason, n in skipped.items())
    metafunc._calls = some


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = []
    for item in items:
        name = getattr(item, "originalname", item.name)
        is_set = hasattr(item, "callspec")
        if is_set or not hasattr(item, "function"):
            kept.append(item)
        elif name not in LEFT_OUT and not item.get_closest_marker("parametrize"):
            kept.append(item)
        elif name in LEFT_OUT:
            report.append(f"{name}: left out: {LEFT_OUT[name]}")
    items[:] = kept


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist, whose workers collect
        session.config.workeroutput["report"] = report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if not report:
        report.extend(node.workeroutput.get("report", []))


def pytest_terminal_summary(terminalreporter):
    for line in report:
        terminalreporter.write_line(line)
    reasons: dict[str, int] = {}
    for skipped in terminalreporter.stats.get("skipped", []):
        reason = skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else "?"
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{count} skipped: {reason}")
