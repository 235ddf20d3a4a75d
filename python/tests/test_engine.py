"""plan and explain, the command line, the benchmark, and what importing costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reference import attention

import fovea


def tensors(rng, rows=3, keys=6):
    return (
        rng.standard_normal((2, rows, 4, 8)).astype(np.float32),
        rng.standard_normal((2, keys, 2, 8)).astype(np.float32),
        rng.standard_normal((2, keys, 2, 8)).astype(np.float32),
    )


def test_plan_once_run_with_other_tensors(rng):
    q, k, v = tensors(rng)
    out, lse = np.empty_like(q), np.empty((2, 4, 3), np.float32)
    plan = fovea.plan(q, k, v, out, lse, causal=True, seqused_k=[6, 6])
    assert plan.device == "cpu" and "cpu" in plan.explain()
    workspace = np.empty(plan.workspace_bytes, np.uint8)
    others = tensors(rng)
    plan.run(workspace, q=others[0], k=others[1], v=others[2], seqused_k=np.array([4, 5]))
    for b, length in enumerate((4, 5)):
        expected, expected_lse = attention(
            others[0][b : b + 1], others[1][b : b + 1, :length], others[2][b : b + 1, :length],
            causal=True,
        )
        np.testing.assert_allclose(out[b], expected[0], atol=2e-6)
        np.testing.assert_allclose(lse[b], expected_lse[0], atol=2e-6)
    with pytest.raises(ValueError, match="^workspace"):
        plan.run(workspace[:-1])
    heads_first = [x.swapaxes(1, 2).copy() for x in (q, k, v)]
    other_out = np.empty_like(heads_first[0])
    fovea.plan(*heads_first, other_out, layout="bhsd").run()
    np.testing.assert_allclose(other_out.swapaxes(1, 2), attention(q, k, v)[0], atol=2e-6)


def test_explain(rng):
    assert "cpu" in fovea.explain(*tensors(rng), causal=True)


def program(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fovea", *arguments], capture_output=True, text=True, check=False
    )


def test_command_line(tmp_path, rng):
    assert program("--version").stdout.strip() == fovea.__version__
    done = program("check", "--shape", "1,2,2,9,9,16", "--causal")
    assert done.returncode == 0, done.stderr
    wrong = program("check", "--shape", "nonsense")
    assert wrong.returncode == 2 and wrong.stderr.startswith("fovea: ")
    q, k, v = tensors(rng)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        np.save(tmp_path / name, tensor)
    files = [f(n) for n in "qkv" for f in ("--{}".format, lambda n: str(tmp_path / f"{n}.npy"))]
    assert program("run", *files, "--out", str(tmp_path / "out.npy")).returncode == 0
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), attention(q, k, v)[0], atol=2e-6)


def test_bench_returns_a_table():
    table = fovea.bench("--d", "64", "--seqs", "128", "--threads", "1")
    assert table and all(isinstance(row, dict) for row in table)
    assert len(str(table).splitlines()) == len(table) + 1


def test_stubs_are_up_to_date():
    """The names of the native module and of its functions' arguments are those of _native.pyi."""
    stub = ast.parse((Path(fovea.__file__).parent / "_native.pyi").read_text())

    def functions(body, of):
        for node in body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                yield node, getattr(of, node.name)

    classes = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    found = list(functions(stub.body, fovea._native))
    for node in classes:
        found += functions(node.body, getattr(fovea._native, node.name))
    for node, function in found:
        arguments = re.findall(r"(\w+):", function.__doc__.splitlines()[0].split(" ->")[0])
        if arguments[:1] == ["arg"]:  # nanobind's name for one that has none
            continue
        stubs = [a.arg for a in node.args.args if a.arg != "self"]
        assert stubs == arguments, node.name
    public = {name for name in dir(fovea._native) if not name.startswith("_")}
    assert public == {n.name for n, f in found if f in vars(fovea._native).values()} | {
        node.name for node in classes
    }


def test_import_brings_nothing_big():
    code = "import sys, fovea; print(*(m in sys.modules for m in ('torch', 'numpy', 'jax')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3


def test_readme_example(capsys):
    readme = Path(__file__).resolve().parents[2] / "README.md"
    if not readme.exists():
        pytest.skip("these tests stand outside the repository")
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.startswith("(2, 1000, 8, 64)\n(2, 8, 1000)\n(2, 8, 1000, 64)\n")
