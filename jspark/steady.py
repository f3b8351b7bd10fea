"""Free memory of a GPU arranged so that programs find their temporary buffers where they were.

Knows: that a program is a CUDA graph that holds addresses, so that the host updates its kernels one by one where
the temporary buffer moved; that XLA's allocator takes the smallest free piece that is large enough, and joins
what becomes free with its free neighbours. Results that live from one step to the next would otherwise come and
go at the edge of the free memory, and move what is allocated behind them.
Does not know: what is allocated.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: Bytes of the holes: results and arguments of a step are as large, and a piece is split where half would do.
_SIZES = tuple(2**i for i in range(8, 21))
#: Holes of a size: of two steps in flight, with room.
_EACH = 8


def keep_holes(mesh: Mesh) -> list[Array]:
    """Makes free holes for small arrays on every device; returns what keeps them apart, to be held on to."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    holes, guards = [], []
    for size in _SIZES:
        for _ in range(_EACH):
            holes.append(jax.device_put(np.zeros(size, np.uint8), everywhere))
            guards.append(jax.device_put(np.zeros(1, np.uint8), everywhere))
    jax.block_until_ready((holes, guards))
    for hole in holes:
        hole.delete()
    return guards
