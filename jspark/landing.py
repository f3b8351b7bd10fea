"""Results on their way to the host, in a way that lets the process end at any moment.

Knows: that XLA hands a result which is not ready yet to NumPy on a thread of its own, and brings a copy that was
begun with `copy_to_host_async` home on one too. Such a thread needs the interpreter: where it is gone by then,
after an interrupt or a `break`, the process aborts. So a CPU's results are handed over once they are ready, and
copies from other devices are landed before the interpreter goes.
Does not know: what the results are.
"""

from __future__ import annotations

import atexit
import contextlib

import numpy as np
from jax import Array

#: Copies under way, oldest first; what nobody fetches falls out at the front.
_under_way: dict[int, Array] = {}
_MOST = 64


def fetch_later(x: Array) -> None:
    """Starts the copy of `x` to the host, where one is needed; returns at once.

    A copy that is begun later, when another program has been launched, waits for that program on a GPU.
    """
    if next(iter(x.sharding.device_set)).platform == "cpu":
        return
    x.copy_to_host_async()
    _under_way[id(x)] = x
    while len(_under_way) > _MOST:
        np.asarray(_under_way.pop(next(iter(_under_way))))


def fetch(x: Array) -> np.ndarray:
    """`x` as an array of NumPy; waits for it, and may be interrupted there."""
    host = np.asarray(x.block_until_ready())
    _under_way.pop(id(x), None)
    return host


@atexit.register
def _land() -> None:
    for x in list(_under_way.values()):
        # A device that died has said so where its results were wanted.
        with contextlib.suppress(Exception):
            np.asarray(x)
