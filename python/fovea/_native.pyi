from collections.abc import Callable
from typing import Any

class Call:
    """One attention call: its tensors, lengths and settings."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        bias: Any,
        mask: Any,
        sink: Any,
        alibi: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_q: Any,
        seqused_k: Any,
        block_table: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None,
        causal: bool,
        window_left: int,
        window_right: int,
        softcap: float,
        dropout_p: float,
        dropout_seed: int,
        dropout_offset: int,
        num_splits: int,
        deterministic: bool,
        stream: int,
        heads_first: bool,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        key_scale: Any = None,
    ) -> None: ...

class DeviceMemory:
    """Memory of a GPU, or of an emulated one."""

    def __init__(self, device: str, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    def upload(self, source: Any) -> None: ...
    def download(self, target: Any) -> None: ...

class Plan:
    """A validated call with its chosen configuration."""

    @property
    def workspace_bytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def explain(self) -> str: ...
    def run(self, call: Call, workspace: Any) -> None: ...

class Quantization:
    """How tensors become eight bits."""

    def __init__(
        self,
        dtype: str,
        scales: str,
        rotate: bool,
        seed: int,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        rotary_interleaved: bool = False,
        first_position: int = 0,
    ) -> None: ...

class QuantizePlan:
    """Quantisation of the tensors of a call."""

    @property
    def workspace_bytes(self) -> int: ...
    @property
    def shapes(self) -> list[list[int] | None]: ...
    def run(
        self,
        call: Call,
        tensors: list[Any],
        block_table: Any = None,
        first_keys: Any = None,
        workspace: Any = None,
    ) -> None: ...

def plan_quantize(
    call: Call,
    settings: Quantization,
    values: str = "transposed",
    pages: int = 0,
    page_size: int = 0,
    device: str = "auto",
) -> QuantizePlan: ...
def plan(call: Call, device: str, threads: int) -> Plan: ...
def attention(
    call: Call, allocate: Callable[[int], Any] | None = None, device: str = "auto"
) -> None: ...
def attention_backward(
    call: Call,
    dout: Any,
    dlse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dsink: Any,
    dbias: Any,
    allocate: Callable[[int], Any] | None = None,
    device: str = "auto",
) -> None: ...
def seconds_of_attention(
    call: Call, repeat: int, allocate: Callable[[int], Any] | None = None
) -> float: ...
def merge(outs: list[Any], lses: list[Any], out: Any, lse: Any, sink: Any) -> None: ...
def append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cache_seqlens: Any,
    block_table: Any,
    cu_seqlens_k_new: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_interleaved: bool,
) -> None: ...
def rotate(
    q: Any,
    out: Any,
    positions: Any,
    cu_seqlens_q: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_interleaved: bool,
    one_position: bool,
) -> None: ...
def run_program(arguments: list[str]) -> int: ...
def version() -> str: ...
def cpu_instruction_set() -> str: ...
