"""fovea and its peers behind one interface, for bench/peers.py.

An engine's prepare() turns inputs into calls: one for each copy of the keys and values, so that a
caller who goes round them reads memory and not a cache. Everything that is done once (planning,
sessions, binding, conversion of layouts) happens in prepare; a call is attention and nothing else.
Every engine gets its keys and values in the layout that suits it, unless a case says otherwise.
"""

import contextlib
from dataclasses import dataclass
from typing import Callable

import numpy as np

from fovea_c import Library, host_lse


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str  # fp32 or bf16
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    # fovea too has its keys and values by head, (batch, heads, seqlen, head_dim).
    kv_by_head: bool = False
    # The gradients of q, k and v, not the output.
    backward: bool = False

    @property
    def flops(self) -> float:
        """Two products, or five for gradients, halved when causal (seqlen_q == seqlen_k then)."""
        scores = self.seqlen_q * self.seqlen_k * (0.5 if self.causal else 1.0)
        return (10.0 if self.backward else 4.0) * self.heads_q * scores * self.head_dim

    @property
    def kv_bytes(self) -> int:
        size = 4 if self.dtype == "fp32" else 2
        return 2 * self.heads_kv * self.seqlen_k * self.head_dim * size

    @property
    def is_decode(self) -> bool:
        return self.seqlen_q == 1


@dataclass
class Inputs:
    """(batch 1, seqlen, heads, head_dim), float32 or uint16 holding bf16; one k and v per copy."""

    case: Case
    q: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]
    # The same keys and values as (batch, heads, seqlen, head_dim), contiguous.
    k_by_head: list[np.ndarray]
    v_by_head: list[np.ndarray]
    dout: np.ndarray | None = None  # laid out as q, if gradients are asked for


@dataclass
class Prepared:
    calls: list[Callable[[], None]]
    # Of the last call: (seqlen_q, heads_q, head_dim) float32; gradients of q, k and v as columns.
    output: Callable[[], np.ndarray | None]


class Unsupported(Exception):
    """The engine does not do this case; the message says why, if anybody could wonder."""


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Finite float32 to bf16 bits, to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def by_head(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))


def make_inputs(case: Case, copies: int) -> Inputs:
    """Standard normal values, the same for every run of a case."""
    rng = np.random.default_rng(1)

    def normal(seqlen: int, heads: int) -> np.ndarray:
        x = rng.standard_normal((1, seqlen, heads, case.head_dim), dtype=np.float32)
        return x if case.dtype == "fp32" else to_bf16(x)

    q = normal(case.seqlen_q, case.heads_q)
    k = normal(case.seqlen_k, case.heads_kv)
    v = normal(case.seqlen_k, case.heads_kv)
    dout = normal(case.seqlen_q, case.heads_q) if case.backward else None
    # With one head both layouts are the same, and numpy makes no copy.
    ks, vs = [[by_head(x) for _ in range(copies)] for x in (k, v)]
    if case.kv_by_head:
        views_k, views_v = [[x.transpose(0, 2, 1, 3) for x in xs] for xs in (ks, vs)]
        return Inputs(case, q, views_k, views_v, ks, vs, dout)
    return Inputs(case, q, copies_of(k, copies), copies_of(v, copies), ks, vs, dout)


def copies_of(x: np.ndarray, count: int) -> list[np.ndarray]:
    return [x] + [x.copy() for _ in range(count - 1)]


class Fovea:
    name = product = "fovea"

    def __init__(self, library: Library, threads: int):
        self._library, self._threads = library, threads
        self.version = library.version()

    def prepare(self, inputs: Inputs) -> Prepared:
        case = inputs.case
        out = np.empty((1, case.seqlen_q, case.heads_q, case.head_dim), inputs.q.dtype)
        problems = [
            self._library.problem(inputs.q, k, v, out, case.causal)
            for k, v in zip(inputs.k, inputs.v)
        ]
        if case.backward:
            return self._prepare_backward(inputs, problems[0], out)
        plan = self._library.plan(problems[0], self._threads)
        result = lambda: out[0] if case.dtype == "fp32" else from_bf16(out[0])
        return Prepared([lambda p=p: plan.run(p) for p in problems], result)

    def _prepare_backward(self, inputs: Inputs, problem, out: np.ndarray) -> Prepared:
        """`out` is what the problem writes, kept by the calls."""
        case = inputs.case
        lse = np.empty((1, case.heads_q, case.seqlen_q), np.float32)
        problem.lse = host_lse(lse)
        self._library.plan(problem, self._threads).run(problem)
        results = [np.empty_like(x) for x in (inputs.q, inputs.k[0], inputs.v[0])]
        gradients = self._library.gradients(inputs.dout, *results)
        plan = self._library.backward_plan(problem, gradients, self._threads)
        kept = (out, lse)
        return Prepared([lambda kept=kept: plan.run(problem, gradients)],
                        lambda: np.concatenate([x[0] for x in results], axis=-1))


class StreamRead:
    """Not attention: reads the keys and values once, in order. What decoding can reach at most."""

    name = "stream read"

    def __init__(self, library: Library, threads: int):
        self._library, self._threads = library, threads

    def prepare(self, inputs: Inputs) -> Prepared:
        if not inputs.case.is_decode:
            raise Unsupported("")

        def call(k: np.ndarray, v: np.ndarray) -> None:
            for x in (k, v):
                self._library.read(x.ctypes.data, x.nbytes // 8, self._threads)

        pairs = zip(inputs.k_by_head, inputs.v_by_head)
        return Prepared([lambda p=p: call(*p) for p in pairs], lambda: None)


class Torch:
    """torch.nn.functional.scaled_dot_product_attention."""

    name, product = "torch sdpa", "PyTorch"

    def __init__(self, threads: int):
        import torch

        torch.set_num_threads(threads)
        # Raises when a pool was started before; what it is then does not matter to one operator.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
        self._torch = torch
        self.version = torch.__version__

    def _tensor(self, x: np.ndarray):
        if x.dtype == np.uint16:
            return self._torch.from_numpy(x.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(x)

    def prepare(self, inputs: Inputs) -> Prepared:
        torch, case = self._torch, inputs.case
        attention = torch.nn.functional.scaled_dot_product_attention
        q = self._tensor(by_head(inputs.q))
        options = {"is_causal": case.causal, "enable_gqa": case.heads_q != case.heads_kv}
        last = [None]
        if case.backward:
            of = [self._tensor(x[0]) for x in (inputs.k_by_head, inputs.v_by_head)]
            of = [x.detach().requires_grad_() for x in (q, *of)]
            out, dout = attention(*of, **options), self._tensor(by_head(inputs.dout))

            def call_backward() -> None:
                last[0] = torch.autograd.grad(out, of, dout, retain_graph=True)

            return Prepared(
                [call_backward],
                lambda: torch.cat(last[0], -1).float().numpy()[0].transpose(1, 0, 2),
            )

        def call(k, v) -> None:
            with torch.inference_mode():
                last[0] = attention(q, k, v, **options)

        pairs = [
            (self._tensor(k), self._tensor(v))
            for k, v in zip(inputs.k_by_head, inputs.v_by_head)
        ]
        result = lambda: last[0].float().numpy()[0].transpose(1, 0, 2)
        return Prepared([lambda p=p: call(*p) for p in pairs], result)


class OnnxRuntime:
    """One attention operator of ONNX Runtime's CPU provider, as a model of one node."""

    product = "ONNX Runtime"

    def __init__(self, operator: str, threads: int):
        import onnxruntime

        onnxruntime.set_default_logger_severity(3)
        self._ort, self._operator, self._threads = onnxruntime, operator, threads
        self.name = "ORT " + operator
        self.version = onnxruntime.__version__

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.case.dtype == "bf16":
            raise Unsupported("no bf16 on the CPU")
        if inputs.case.backward:
            raise Unsupported("no gradients")
        build = {
            "MultiHeadAttention": self._multi_head,
            "Attention": self._standard,
            "GroupQueryAttention": self._group_query,
        }[self._operator]
        return build(inputs)

    def _multi_head(self, inputs: Inputs) -> Prepared:
        """com.microsoft.MultiHeadAttention: (batch, seqlen, heads * head_dim)."""
        case = inputs.case
        if case.heads_q != case.heads_kv:
            raise Unsupported("as many key as query heads only")
        attributes = {"num_heads": case.heads_q, "unidirectional": int(case.causal)}
        session = self._session(
            "com.microsoft", ["query", "key", "value"], ["output"], attributes
        )
        out = np.empty((1, case.seqlen_q, case.heads_q * case.head_dim), np.float32)
        feeds = [
            {"query": flat(inputs.q), "key": flat(k), "value": flat(v)}
            for k, v in zip(inputs.k, inputs.v)
        ]
        calls = [self._call(session, feed, {"output": out}) for feed in feeds]
        return Prepared(calls, lambda: out.reshape(case.seqlen_q, case.heads_q, case.head_dim))

    def _standard(self, inputs: Inputs) -> Prepared:
        """Attention of ONNX itself (opset 23): (batch, heads, seqlen, head_dim)."""
        case = inputs.case
        session = self._session("", ["Q", "K", "V"], ["Y"], {"is_causal": int(case.causal)})
        out = np.empty((1, case.heads_q, case.seqlen_q, case.head_dim), np.float32)
        q = by_head(inputs.q)
        feeds = [{"Q": q, "K": k, "V": v} for k, v in zip(inputs.k_by_head, inputs.v_by_head)]
        calls = [self._call(session, feed, {"Y": out}) for feed in feeds]
        return Prepared(calls, lambda: out[0].transpose(1, 0, 2))

    def _group_query(self, inputs: Inputs) -> Prepared:
        """com.microsoft.GroupQueryAttention: causal, writes its keys and values to a cache.

        Decoding, the cache is present_key and past_key at once, as in a generating program, and
        the newest key is the last row of it.
        """
        case = inputs.case
        if not case.causal and not case.is_decode:
            raise Unsupported("causal only")
        past = ["past_key", "past_value"] if case.is_decode else ["", ""]
        session = self._session(
            "com.microsoft",
            ["query", "key", "value", *past, "seqlens_k", "total_sequence_length"],
            ["output", "present_key", "present_value"],
            {"num_heads": case.heads_q, "kv_num_heads": case.heads_kv},
        )
        out = np.empty((1, case.seqlen_q, case.heads_q * case.head_dim), np.float32)
        calls = []
        for i, (k, v) in enumerate(zip(inputs.k, inputs.v)):
            feed = {
                "query": flat(inputs.q),
                "key": flat(k[:, -case.seqlen_q :]),
                "value": flat(v[:, -case.seqlen_q :]),
                "seqlens_k": np.array([case.seqlen_k - 1], np.int32),
                "total_sequence_length": np.array([case.seqlen_k], np.int32),
            }
            if case.is_decode:
                present = (inputs.k_by_head[i], inputs.v_by_head[i])
                feed |= {"past_key": present[0], "past_value": present[1]}
            else:
                present = (np.empty_like(inputs.k_by_head[i]), np.empty_like(inputs.v_by_head[i]))
            fetch = {"output": out, "present_key": present[0], "present_value": present[1]}
            calls.append(self._call(session, feed, fetch))
        return Prepared(calls, lambda: out.reshape(case.seqlen_q, case.heads_q, case.head_dim))

    def _session(self, domain: str, inputs: list[str], outputs: list[str], attributes: dict):
        from onnx import TensorProto, helper

        integers = {"seqlens_k", "total_sequence_length"}

        def value(name: str):
            kind = TensorProto.INT32 if name in integers else TensorProto.FLOAT
            return helper.make_tensor_value_info(name, kind, None)

        node = helper.make_node(self._operator, inputs, outputs, domain=domain, **attributes)
        named = [name for name in inputs if name]
        graph = helper.make_graph(
            [node], "attention", [value(n) for n in named], [value(n) for n in outputs]
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        # Its threads spin while a call runs, and stop when it ends: they are not to slow the next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return self._ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def _call(self, session, feed: dict, fetch: dict) -> Callable[[], None]:
        """Binds arrays by address: neither inputs nor outputs are copied or allocated in a call."""
        binding = session.io_binding()
        for name, array in feed.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in fetch.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        # The default argument keeps the arrays alive as long as the call.
        return lambda arrays=(feed, fetch): session.run_with_iobinding(binding)


def flat(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(1, x.shape[1], x.shape[2] * x.shape[3])
