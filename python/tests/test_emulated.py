"""Calls on device memory, as those of torch and cupy go, on the emulator: no GPU is needed."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
from reference import attention

import fovea
from fovea import _native

DEVICE = "emulated:sm_90a"


class Tensor(ctypes.Structure):
    """DLTensor of DLPack."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),  # of DLManagedTensor
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


lent: list[DeviceArray] = []


class DeviceArray:
    """A numpy array in the emulator's memory, laid out as the array is, `shift` elements from an
    aligned address; NaN where the array has gaps. code: of the elements in DLPack."""

    def __init__(self, array, shift=0, code=None):
        self.like = array
        steps = [s // array.itemsize for s in array.strides]
        count = 1 + sum(s * (n - 1) for s, n in zip(steps, array.shape, strict=True))
        self.buffer = np.full(count + shift, np.nan if array.dtype.kind == "f" else 0, array.dtype)
        self.view = np.lib.stride_tricks.as_strided(
            self.buffer[shift:], array.shape, array.strides
        )
        self.view[...] = array
        self.memory = _native.DeviceMemory(DEVICE, max(self.buffer.nbytes, 1))
        self.memory.upload(self.buffer.view(np.uint8))
        kind = array.dtype.kind
        self.tensor = Tensor(
            self.memory.address + shift * array.itemsize, 2, 0, array.ndim,
            {"f": 2, "i": 0, "u": 1}[kind] if code is None else code, 8 * array.itemsize, 1,
            (ctypes.c_int64 * array.ndim)(*array.shape), (ctypes.c_int64 * array.ndim)(*steps),
        )

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        lent.append(self)  # there is no deleter to say how long
        return new_capsule(ctypes.addressof(self.tensor), b"dltensor", None)

    def back(self):
        self.memory.download(self.buffer.view(np.uint8))
        return self.view.astype(np.float64)


def call(q, k, v, out, lse=None, causal=False):
    return _native.Call(
        q, k, v, out, lse, *(None,) * 9, 0, 0, None, causal, -1, -1, 0.0, 0.0, 0, 0, 1, False, 0,
        False,
    )


@pytest.fixture
def allocate():
    try:
        _native.DeviceMemory(DEVICE, 1)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    held = []

    def make(size):
        held.append(DeviceArray(np.empty(size, np.uint8)))
        return held[-1]

    make.held = held
    yield make
    gc.collect()  # calls first, then what was lent to them
    lent.clear()


def tensors(rng):
    shapes = (1, 33, 4, 32), (1, 70, 2, 32), (1, 70, 2, 32)
    return tuple((rng.standard_normal(s) / 2).astype(np.float16) for s in shapes)


def run(function, *arguments):
    """Skips where kernels cannot be compiled: NVRTC is no dependency of the tests."""
    try:
        return function(*arguments)
    except NotImplementedError as refusal:
        if "NVRTC" not in str(refusal):
            raise
        pytest.skip(str(refusal))


def test_layouts_of_one_shape(rng, allocate):
    """Plans are kept from call to call, and depend on more than shapes."""
    q, k, v = tensors(rng)
    expected, expected_lse = attention(q, k, v, causal=True)
    wide = np.zeros((1, 70, 2, 33), np.float16)[..., :32]
    wide[...] = k
    heads_first = np.ascontiguousarray(v.swapaxes(1, 2)).swapaxes(1, 2)
    for k_there, v_there in (
        (DeviceArray(k), DeviceArray(v)),
        (DeviceArray(wide), DeviceArray(v)),
        (DeviceArray(k, shift=1), DeviceArray(heads_first)),
        (DeviceArray(k), DeviceArray(v)),
    ):
        out = DeviceArray(np.zeros_like(q))
        lse = DeviceArray(np.zeros((1, 4, 33), np.float32))
        made = call(DeviceArray(q), k_there, v_there, out, lse, causal=True)
        run(_native.attention, made, allocate, DEVICE)
        np.testing.assert_allclose(out.back(), expected, atol=2e-3, rtol=2e-3)
        np.testing.assert_allclose(lse.back(), expected_lse, atol=1e-4)
    assert allocate.held, "the workspace is the caller's"


def test_backward(rng, allocate):
    q, k, v = tensors(rng)
    _, expected_lse = attention(q, k, v)
    out = DeviceArray(np.zeros_like(q))
    lse = DeviceArray(np.zeros((1, 4, 33), np.float32))
    made = call(*map(DeviceArray, (q, k, v)), out, lse)
    run(_native.attention, made, allocate, DEVICE)
    count = len(allocate.held)
    dout = rng.standard_normal(q.shape).astype(np.float16)
    results = [DeviceArray(np.zeros_like(x)) for x in (q, k, v)]
    run(
        _native.attention_backward, made, DeviceArray(dout), None, *results, None, None, allocate,
        DEVICE,
    )
    assert len(allocate.held) > count, "the workspace is the caller's"
    wide_q, wide_k, wide_v, wide_dout = (x.astype(np.float64) for x in (q, k, v, dout))
    wide_k, wide_v = (np.repeat(x, 2, 2) for x in (wide_k, wide_v))
    scale = 32**-0.5
    weights = np.exp(
        scale * np.einsum("bqhd,bkhd->bhqk", wide_q, wide_k) - expected_lse[..., None]
    )
    d_weights = np.einsum("bqhd,bkhd->bhqk", wide_dout, wide_v)
    d_scores = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    expected = (
        np.einsum("bhqk,bkhd->bqhd", d_scores, wide_k),
        np.einsum("bhqk,bqhd->bkhd", d_scores, wide_q).reshape(1, 70, 2, 2, 32).sum(3),
        np.einsum("bhqk,bqhd->bkhd", weights, wide_dout).reshape(1, 70, 2, 2, 32).sum(3),
    )
    for mine, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(mine.back(), other, atol=5e-3, rtol=5e-3)


def test_pages_of_eight_bits(rng, allocate):
    """Keys go into pages, and attention reads them there: as on the CPU, to the byte."""
    float8_e4m3fn = 10
    q, k, v = tensors(rng)
    # Here a sequence has its last key in the middle of a block.
    table, first, used = (np.array(x, np.int32) for x in ([[2, 0, 5]], [32], [38]))
    made = []
    for there in (False, True):
        def put(array, code=None, there=there):
            return DeviceArray(array, code=code) if there else array

        def back(array, there=there):
            if there:
                array.back()
            return (array.view if there else array).copy()

        def codes(shape, there=there):
            made = np.full(shape, 77, np.uint8)
            return DeviceArray(made, code=float8_e4m3fn) if there else made

        shapes = fovea.QuantizedPages.shapes(6, 32, 2, 32)
        pool = [codes(shapes[0]), codes(shapes[1]), put(np.full(shapes[2], 77.0, np.float32))]
        queries = [codes((1, 33, 4, 32)), put(np.zeros((1, 4, 2), np.float32))]
        if not there:
            ml_dtypes = pytest.importorskip("ml_dtypes")
            pool[:2] = (x.view(ml_dtypes.float8_e4m3fn) for x in pool[:2])
            queries[0] = queries[0].view(ml_dtypes.float8_e4m3fn)
        how = _native.Quantization("float8_e4m3fn", "block", True, 0)
        device = DEVICE if there else "auto"
        block_table = put(table)
        for begin, end, where, count in ((0, 32, None, None), (32, 70, first, used)):
            step = _native.Call(
                put(q), put(k[:, begin:end].copy()), put(v[:, begin:end].copy()),
                put(np.zeros_like(q)), *(None,) * 8, None if count is None else put(count), None,
                0, 0, None, False, -1, -1, 0.0, 0.0, 0, 0, 0, False, 0, False,
            )
            plan = run(
                lambda *a: _native.plan_quantize(*a, pages=6, page_size=32, device=device), step,
                how,
            )
            assert plan.workspace_bytes == 0
            tensors_of = [*queries, *pool, None, None]
            plan.run(step, tensors_of, block_table, None if where is None else put(where))
        out = put(np.zeros((1, 33, 4, 32), np.float32))
        attended = _native.Call(
            queries[0], pool[0], pool[1], out, *(None,) * 8, put(np.array([70], np.int32)),
            block_table, 0, 0, 32**-0.5, True, -1, -1, 0.0, 0.0, 0, 0, 0, False, 0, False,
            queries[1], None, None, pool[2],
        )
        run(_native.attention, attended, allocate, device)
        made.append([back(x) for x in (*pool, *queries, out)])
    for here, there in zip(made[0][:5], made[1][:5], strict=True):
        np.testing.assert_array_equal(here.view(np.uint8), there.view(np.uint8))
    expected, _ = attention(q, k, v, causal=True)
    for results in made:
        assert np.sqrt(np.mean((results[5] - expected) ** 2)) < 0.04
    np.testing.assert_allclose(made[1][5], made[0][5], atol=0.05)


def test_devices_do_not_mix(rng, allocate):
    q, k, v = tensors(rng)
    out = DeviceArray(np.zeros_like(q))
    with pytest.raises(ValueError, match="^k is on cpu but q is on cuda:0"):
        call(DeviceArray(q), k, DeviceArray(v), out)
