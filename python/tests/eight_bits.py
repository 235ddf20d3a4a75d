"""What tests of 8-bit tensors share: libraries to make them with, and what their codes mean."""

from __future__ import annotations

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

FORMATS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


class Numpy:
    lse_atol = 1e-5

    # The CPU computes the weights in fp32; kernels have them in 8 bits, and so by the root of the
    # mean square of the error.
    def close(self, out, expected):
        np.testing.assert_allclose(self.back(out), expected, atol=2e-2, rtol=2e-2)

    def codes(self, array, dtype):
        return np.asarray(array).astype(FORMATS[dtype])

    def make(self, array):
        return np.asarray(array)

    def back(self, tensor):
        return np.asarray(tensor).astype(np.float64)


class Torch(Numpy):
    device = "cpu"

    def codes(self, array, dtype):
        import torch

        return torch.from_numpy(np.asarray(array)).to(self.device, getattr(torch, dtype))

    def make(self, array):
        import torch

        return torch.from_numpy(np.asarray(array)).to(self.device)

    def back(self, tensor):
        return tensor.cpu().double().numpy()


class Cuda(Torch):
    device = "cuda"
    lse_atol = 2e-3  # its exponentials are of the precision that the weights have

    def close(self, out, expected):
        error = self.back(out) - expected
        assert np.sqrt(np.mean(error**2)) < 2**-4 * np.sqrt(np.mean(expected**2))
        assert np.abs(error).max() < 2**-3 * np.abs(expected).max()


KINDS = [
    pytest.param(Numpy, id="numpy"),
    pytest.param(Torch, id="torch", marks=pytest.mark.torch),
    pytest.param(Cuda, id="cuda", marks=[pytest.mark.torch, pytest.mark.gpu]),
]


def tensors(rng, batch=2, rows=70, keys=90, heads=4, heads_kv=2, dim=32):
    return (
        rng.standard_normal((batch, rows, heads, dim)).astype(np.float32),
        rng.standard_normal((batch, keys, heads_kv, dim)).astype(np.float32),
        rng.standard_normal((batch, keys, heads_kv, dim)).astype(np.float32),
    )


def widened(kind, codes, descale):
    """Codes times scales, in double precision."""
    x, scale = kind.back(codes), kind.back(descale)
    if scale.ndim == 2:
        scale = scale[:, :, None]
    scale = np.repeat(scale, x.shape[2] // scale.shape[1], 1)
    rows = np.arange(x.shape[1]) // 32 if scale.shape[2] > 1 else np.zeros(x.shape[1], int)
    return x * scale[:, :, rows].transpose(0, 2, 1)[..., None]
