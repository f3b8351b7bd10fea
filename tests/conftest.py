"""Settings of every test: strict promotion and ranks, two virtual CPU devices, array annotations checked."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Two virtual devices for the mesh test; one compute thread pool each, shared by all tests.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import numpy as np
import pytest

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder with the reference models and outputs."""
    return GOLDENS


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name, so that a failure repeats."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
