"""include/fovea/fovea.h through ctypes: as much of it as timing a call needs. Tensors are numpy
arrays in host memory, or those of PyTorch on a GPU."""

import ctypes
from pathlib import Path

import numpy as np

F32, BF16 = 0, 1
E4M3 = 3
S8 = 6
DEVICE_CPU, DEVICE_CUDA = 1, 2
MEMORY_DEVICE = 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("present", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]


class Lengths(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_int64)]


class Problem(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, Tensor) for name in ("q", "k", "v", "out", "lse")),
        *((name, Tensor) for name in ("bias", "mask", "sink", "alibi")),
        *((name, Lengths) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("block_table", Lengths),
        ("block_table_columns", ctypes.c_int64),
        ("softmax_scale", ctypes.c_float),
        ("has_softmax_scale", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_float),
        ("dropout_probability", ctypes.c_float),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_offset", ctypes.c_uint64),
        ("num_splits", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("memory", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        *((name, Tensor) for name in ("q_scale", "k_scale", "v_scale", "key_scale")),
    ]


class Quantization(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("scales", ctypes.c_int),
        ("rotate", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("rotary", ctypes.c_void_p),
    ]


class Quantized(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, Tensor) for name in ("q", "q_scale", "k", "v", "key_scale", "k_scale", "v_scale")),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("device", ctypes.c_int),
        ("threads", ctypes.c_int32),
        ("softmax", ctypes.c_int),
        ("own_workspace", ctypes.c_int32),
        ("configuration", ctypes.c_char_p),
        ("eight_bits", ctypes.c_int32),
        ("quantization", Quantization),
        ("promote_keys", ctypes.c_int64),
    ]


class Gradients(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, Tensor) for name in ("dout", "dlse", "dq", "dk", "dv", "dsink", "dbias")),
    ]


class Library:
    """The shared object that bench/CMakeLists.txt builds."""

    def __init__(self, path: Path):
        self._lib = ctypes.CDLL(str(path.resolve()))
        self._lib.fovea_last_error.restype = ctypes.c_char_p
        self._lib.fovea_version.restype = ctypes.c_char_p
        self._lib.fovea_plan_run.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        ]
        self._lib.fovea_plan_destroy.argtypes = [ctypes.c_void_p]
        self._lib.fovea_backward_plan_run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t]
        self._lib.fovea_backward_plan_destroy.argtypes = [ctypes.c_void_p]
        self.run = self._lib.fovea_plan_run
        self.read = self._lib.fovea_bench_read  # bench/stream_read.cpp
        self.read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self.read.restype = ctypes.c_uint64

    def version(self) -> str:
        return self._lib.fovea_version().decode()

    def check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self._lib.fovea_last_error().decode())

    def problem(self, q, k, v, out, causal: bool) -> Problem:
        """q, k, v, out: numpy arrays (batch, seqlen, heads, head_dim) of float32, or uint16 that
        holds bf16, with any strides. They have to outlive the problem."""
        problem = Problem()
        self.check(self._lib.fovea_problem_init(ctypes.byref(problem), ctypes.sizeof(problem)))
        problem.q, problem.k, problem.v, problem.out = (_tensor(a) for a in (q, k, v, out))
        problem.causal = causal
        return problem

    def device_problem(self, q, k, v, out, causal: bool, window_left: int, cu_seqlens, seqlen: int,
                       stream: int) -> Problem:
        """q, k, v, out: PyTorch tensors on one GPU, (batch, heads, seqlen, head_dim) with any
        strides, or (rows, heads, head_dim) with the int32 cu_seqlens of q and k alike and the
        longest of them. They have to outlive the problem."""
        problem = Problem()
        self.check(self._lib.fovea_problem_init(ctypes.byref(problem), ctypes.sizeof(problem)))
        problem.q, problem.k, problem.v, problem.out = (_device_tensor(t) for t in (q, k, v, out))
        problem.causal = causal
        problem.window_left = window_left
        if cu_seqlens is not None:
            lengths = Lengths(cu_seqlens.data_ptr(), cu_seqlens.numel())
            problem.cu_seqlens_q = problem.cu_seqlens_k = lengths
            problem.max_seqlen_q = problem.max_seqlen_k = seqlen
        problem.memory = MEMORY_DEVICE
        problem.stream = stream
        return problem

    def options(self, device: int) -> Options:
        options = Options()
        self.check(self._lib.fovea_options_init(ctypes.byref(options), ctypes.sizeof(options)))
        options.device = device
        return options

    def plan(self, problem: Problem, threads: int) -> "Plan":
        options = self.options(DEVICE_CPU)
        options.threads = threads
        return Plan(self, problem, options)

    def gradients(self, dout, dq, dk, dv) -> Gradients:
        """Numpy arrays laid out as problem() takes them, or PyTorch tensors on one GPU, laid out as
        device_problem() takes them."""
        view = _tensor if isinstance(dout, np.ndarray) else _device_tensor
        gradients = Gradients()
        size = ctypes.sizeof(gradients)
        self.check(self._lib.fovea_gradients_init(ctypes.byref(gradients), size))
        gradients.dout, gradients.dq, gradients.dk, gradients.dv = map(view, (dout, dq, dk, dv))
        return gradients

    def backward_plan(self, problem: Problem, gradients: Gradients,
                      threads: int) -> "BackwardPlan":
        options = self.options(DEVICE_CPU)
        options.threads = threads
        return BackwardPlan(self, problem, gradients, options)

    def device_backward_plan(self, problem: Problem, gradients: Gradients) -> "BackwardPlan":
        options = self.options(DEVICE_CUDA)
        options.own_workspace = 1
        return BackwardPlan(self, problem, gradients, options)

    def device_plan(self, problem: Problem, promote_keys: int | None = None,
                    configuration: str = "") -> "Plan":
        """promote_keys: keys that one accumulator of 8-bit products sums; None: not in 8 bits."""
        options = self.options(DEVICE_CUDA)
        options.own_workspace = 1
        options.configuration = configuration.encode()
        if promote_keys is not None:
            options.eight_bits = 1
            options.promote_keys = promote_keys
        return Plan(self, problem, options)

    def quantize_plan(self, problem: Problem, dtype: int = E4M3) -> "QuantizePlan":
        return QuantizePlan(self, problem, dtype)

    def attend(self, problem: Problem, operands: Quantized) -> Problem:
        """The problem with these operands in place of its q, k and v."""
        attending = Problem.from_buffer_copy(problem)
        status = self._lib.fovea_problem_attend(ctypes.byref(attending), ctypes.byref(operands))
        self.check(status)
        return attending


class Plan:
    """A plan with its workspace."""

    def __init__(self, library: Library, problem: Problem, options: Options):
        lib = library._lib
        handle = ctypes.c_void_p()
        library.check(
            lib.fovea_plan_create(
                ctypes.byref(problem), ctypes.byref(options), ctypes.byref(handle)
            )
        )
        self._handle, self._destroy = handle, lib.fovea_plan_destroy
        size = ctypes.c_size_t()
        library.check(lib.fovea_plan_workspace_bytes(handle, ctypes.byref(size)))
        self.workspace_bytes = 0 if options.own_workspace else size.value
        self._workspace = np.empty(self.workspace_bytes, dtype=np.uint8)
        self._library = library

    def run(self, problem: Problem) -> None:
        status = self._library.run(
            self._handle,
            ctypes.addressof(problem),
            self._workspace.ctypes.data,
            self.workspace_bytes,
            None,
        )
        if status != 0:
            self._library.check(status)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._destroy(self._handle)


class QuantizePlan:
    """Quantisation of a device_problem()'s operands with scales for blocks; values transposed."""

    OPERANDS = ("q", "q_scale", "k", "v", "key_scale")

    def __init__(self, library: Library, problem: Problem, dtype: int):
        self._library, lib = library, library._lib
        lib.fovea_quantization_default.restype = Quantization
        quantization = lib.fovea_quantization_default()
        quantization.dtype = dtype
        options = library.options(DEVICE_CUDA)
        handle = ctypes.c_void_p()
        library.check(
            lib.fovea_quantize_plan_create(
                ctypes.byref(problem), ctypes.byref(quantization), 0, ctypes.byref(options),
                ctypes.byref(handle),
            )
        )
        self._handle = handle
        lib.fovea_quantize_plan_destroy.argtypes = [ctypes.c_void_p]
        self._destroy, self._run = lib.fovea_quantize_plan_destroy, lib.fovea_quantize_plan_run

    def operands(self) -> Quantized:
        """Shapes and dtypes, without data."""
        operands = Quantized()
        self._library.check(
            self._library._lib.fovea_quantize_plan_operands(
                self._handle, ctypes.byref(operands), ctypes.c_size_t(ctypes.sizeof(operands))
            )
        )
        return operands

    def run(self, problem: Problem, to: Quantized) -> None:
        """Scales of blocks need no workspace."""
        status = self._run(
            self._handle, ctypes.byref(problem), ctypes.byref(to), None, ctypes.c_size_t(0)
        )
        if status != 0:
            self._library.check(status)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._destroy(self._handle)


class BackwardPlan:
    """A plan of the backward pass with its workspace."""

    def __init__(self, library: Library, problem: Problem, gradients: Gradients, options: Options):
        lib = library._lib
        handle = ctypes.c_void_p()
        library.check(
            lib.fovea_backward_plan_create(
                ctypes.byref(problem), ctypes.byref(gradients), ctypes.byref(options),
                ctypes.byref(handle),
            )
        )
        self._handle, self._destroy = handle, lib.fovea_backward_plan_destroy
        self._library, self._run = library, lib.fovea_backward_plan_run
        size = ctypes.c_size_t()
        library.check(lib.fovea_backward_plan_workspace_bytes(handle, ctypes.byref(size)))
        self._workspace = np.empty(0 if options.own_workspace else size.value, dtype=np.uint8)

    def run(self, problem: Problem, gradients: Gradients) -> None:
        status = self._run(
            self._handle, ctypes.addressof(problem), ctypes.addressof(gradients),
            self._workspace.ctypes.data, self._workspace.size,
        )
        if status != 0:
            self._library.check(status)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._destroy(self._handle)


def _tensor(array: np.ndarray) -> Tensor:
    tensor = Tensor()
    tensor.data = array.ctypes.data
    tensor.dtype = {np.dtype(np.float32): F32, np.dtype(np.uint16): BF16}[array.dtype]
    tensor.present = 1
    tensor.shape[:] = array.shape
    tensor.stride[:] = [stride // array.itemsize for stride in array.strides]
    return tensor


def host_lse(array: np.ndarray) -> Tensor:
    """A float32 array (batch, heads, seqlen) as the lse of a problem()."""
    return _tensor(array[..., None])


def _device_tensor(tensor) -> Tensor:
    import torch

    view = Tensor()
    view.data = tensor.data_ptr()
    view.dtype = {torch.float32: F32, torch.bfloat16: BF16}[tensor.dtype]
    view.present = 1
    # The library's order of dimensions is (batch, seqlen, heads, head_dim).
    rows = tensor.transpose(1, 2) if tensor.dim() == 4 else tensor.unsqueeze(0)
    view.shape[:] = rows.shape
    view.stride[:] = rows.stride()
    return view


def set_pages(problem: Problem, block_table, lengths) -> None:
    """Keys and values of a device_problem() are pages: int32 PyTorch tensors (batch, pages of a
    sequence) and (batch)."""
    problem.block_table = Lengths(block_table.data_ptr(), block_table.numel())
    problem.block_table_columns = block_table.shape[1]
    problem.seqused_k = Lengths(lengths.data_ptr(), lengths.numel())


def device_lse(tensor) -> Tensor:
    """An fp32 PyTorch tensor (batch, heads, seqlen) as the lse of a device_problem()."""
    view = Tensor()
    view.data = tensor.data_ptr()
    view.dtype = F32
    view.present = 1
    view.shape[:] = (*tensor.shape, 1)
    view.stride[:] = (*tensor.stride(), 1)
    return view
