"""Tests of array libraries run with all of them; those with torch are a tier apart."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest


def pytest_report_header() -> str:
    import fovea

    return f"fovea {fovea.__version__} from {os.path.dirname(fovea.__file__)}"


def there_is_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config, items) -> None:
    """Without torch, its tests are skipped by name; FOVEA_NEED_TORCH=1 makes that an error. Without
    a GPU, so are the tests of one."""
    torch_tests = [item for item in items if item.get_closest_marker("torch")]
    if importlib.util.find_spec("torch") is None:
        if torch_tests and os.environ.get("FOVEA_NEED_TORCH") == "1":
            raise pytest.UsageError("FOVEA_NEED_TORCH=1, and torch is not installed")
        for item in torch_tests:
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))
        return
    gpu_tests = [item for item in torch_tests if item.get_closest_marker("gpu")]
    if gpu_tests and not there_is_a_gpu():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))


class Numpy:
    name = "numpy"
    dtype = "float32"  # that tensors get where a test asks for none

    def make(self, array, dtype=None):
        dtype = dtype or self.dtype
        if dtype == "bfloat16":
            import ml_dtypes

            return np.asarray(array).astype(ml_dtypes.bfloat16)
        return np.asarray(array).astype(dtype)

    def back(self, tensor):
        return np.asarray(tensor)


class Jax(Numpy):
    name = "jax"

    def make(self, array, dtype=None):
        import jax.numpy as jnp

        return jnp.asarray(super().make(array, dtype))


class Torch(Numpy):
    name = "torch"
    device = "cpu"

    def make(self, array, dtype=None):
        import torch

        tensor = torch.from_numpy(np.array(array))
        return tensor.to(self.device, getattr(torch, dtype or self.dtype))

    def back(self, tensor):
        import torch

        tensor = tensor.cpu()
        return tensor.to(torch.float64).numpy() if tensor.is_floating_point() else tensor.numpy()


class Cuda(Torch):
    name = "cuda"
    device = "cuda"
    dtype = "float16"  # kernels have no float32


TORCH = pytest.param(Torch, marks=pytest.mark.torch)
CUDA = pytest.param(Cuda, marks=[pytest.mark.torch, pytest.mark.gpu])


@pytest.fixture(params=[Numpy, Jax, TORCH, CUDA], ids=lambda c: c.name)
def library(request):
    return request.param()


@pytest.fixture(params=[Numpy, TORCH, CUDA], ids=lambda c: c.name)
def writable_library(request):
    return request.param()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Of torch's tensors. On "cuda" they are half precision: kernels have no float32."""
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(7)
