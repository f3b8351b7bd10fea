"""Results on their way to the host, in a way that lets the process end at any moment.

Knows: that a CPU's arrays need no copy, and that XLA hands one which is not ready yet to NumPy on a thread of its
own. That thread needs the interpreter: where it is gone by then, after an interrupt or a `break`, the process
aborts. So on a CPU nothing is handed over before it is ready.
Does not know: what the results are.
"""

from __future__ import annotations

import numpy as np
from jax import Array


def fetch_later(x: Array) -> None:
    """Starts the copy of `x` to the host, where one is needed; returns at once."""
    if next(iter(x.sharding.device_set)).platform != "cpu":
        x.copy_to_host_async()


def fetch(x: Array) -> np.ndarray:
    """`x` as an array of NumPy; waits for it, and may be interrupted there."""
    return np.asarray(x.block_until_ready())
