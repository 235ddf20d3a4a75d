"""Tests of array libraries run with all of them; those with torch are a tier apart."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest


def pytest_report_header() -> str:
    import fovea

    return f"fovea {fovea.__version__} from {os.path.dirname(fovea.__file__)}"


def pytest_collection_modifyitems(config, items) -> None:
    """Without torch, its tests are skipped by name; FOVEA_NEED_TORCH=1 makes that an error."""
    if importlib.util.find_spec("torch") is not None:
        return
    torch_tests = [item for item in items if item.get_closest_marker("torch")]
    if torch_tests and os.environ.get("FOVEA_NEED_TORCH") == "1":
        raise pytest.UsageError("FOVEA_NEED_TORCH=1, and torch is not installed")
    for item in torch_tests:
        item.add_marker(pytest.mark.skip(reason="torch is not installed"))


class Numpy:
    name = "numpy"

    def make(self, array, dtype="float32"):
        if dtype == "bfloat16":
            import ml_dtypes

            return np.asarray(array).astype(ml_dtypes.bfloat16)
        return np.asarray(array).astype(dtype)

    def back(self, tensor):
        return np.asarray(tensor)


class Jax(Numpy):
    name = "jax"

    def make(self, array, dtype="float32"):
        import jax.numpy as jnp

        return jnp.asarray(super().make(array, dtype))


class Torch(Numpy):
    name = "torch"

    def make(self, array, dtype="float32"):
        import torch

        return torch.from_numpy(np.asarray(array)).to(getattr(torch, dtype))

    def back(self, tensor):
        import torch

        return tensor.to(torch.float64).numpy() if tensor.is_floating_point() else tensor.numpy()


TORCH = pytest.param(Torch, marks=pytest.mark.torch)


@pytest.fixture(params=[Numpy, Jax, TORCH], ids=lambda c: c.name)
def library(request):
    return request.param()


@pytest.fixture
def rng():
    return np.random.default_rng(7)
