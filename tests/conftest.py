"""Settings of every test: strict promotion and ranks, two virtual CPU devices, a compilation cache of its own."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Nothing is asked of the real Hub: a typing error in a path would be.
os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Two virtual devices for the mesh test. Tests compile far more than they compute: less optimisation is faster.
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=2",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
        ]
    )
# Engines of equal shape compile once a worker. Not shared between workers: JAX does not write entries atomically.
# Every run starts empty, so a stale cache cannot hide a fault.
_cache = Path(tempfile.mkdtemp(prefix="jspark-tests-"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import gc
import json
import shutil
import sys

import numpy as np
import pytest

# Tracing makes and drops millions of small objects; looking for cycles among them takes a twentieth of the time.
gc.set_threshold(20_000, 20, 20)

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(autouse=True, scope="module")
def _programs_end_with_their_module():
    """Every loaded program holds memory maps, of which a process may have 65,530 (Linux's default)."""
    yield
    if "support" in sys.modules:
        sys.modules["support"].forget_programs()
    gc.collect()


def pytest_sessionfinish():
    """Removes this process's compilation cache."""
    shutil.rmtree(_cache, ignore_errors=True)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder with the reference models and outputs."""
    return GOLDENS


@pytest.fixture
def copy(goldens, tmp_path):
    """Copies a golden's files, with changes to its config.json; a value of None deletes the key."""

    def make(name: str, **changes) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        shutil.copy(goldens / name / "model.safetensors", folder)
        config = json.loads((goldens / name / "config.json").read_text()) | changes
        config = {k: v for k, v in config.items() if k not in changes or v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name, so that a failure repeats."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
