"""Results on their way to the host, in a way that lets the process end at any moment.

Knows: that XLA hands a result which is not ready yet to NumPy on a thread of its own, and likewise a copy that was
begun with `copy_to_host_async`. That thread needs the interpreter: where it is gone by then, after an interrupt or
a `break`, the process aborts. So nothing is handed over before it is ready.
Does not know: what the results are.
"""

from __future__ import annotations

import numpy as np
from jax import Array


def fetch(x: Array) -> np.ndarray:
    """`x` as an array of NumPy; waits for it, and may be interrupted there."""
    return np.asarray(x.block_until_ready())
