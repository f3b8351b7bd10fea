"""Training text written by the target itself, and the training of drafters on it."""

from __future__ import annotations

from importlib.util import find_spec

from jspark.errors import UserError

_NEEDED = ("array_record", "grain", "optax", "orbax", "tensorboardX")


def check_installed() -> None:
    """Raises UserError where the packages of the extra `train` are missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"training needs {', '.join(missing)}; install jspark with its extra: jspark[train]")
