"""Small arrays of one pytree in one buffer of 32-bit words, so that a transfer or a call handles a single array.

Knows: shapes, dtypes and offsets. Does not know: what the arrays mean.

Every array that a call passes costs the host time, however small it is: on a CPU a placed array takes 30 to 50 µs,
an array of a call's result 1 µs (benchmarks/cpu/host.json has the sums). Offsets are static, so unpacking inside
a program is slicing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int


class Layout[T]:
    """Where the leaves of a pytree lie in an int32 buffer.

    example: a pytree of arrays of int32, uint32, float32 (kept bit by bit) or bool (0 or 1); its values are what
    `blank` begins with.
    """

    def __init__(self, example: T):
        leaves, self._tree = jax.tree.flatten(example)
        self._leaves: list[tuple[slice, tuple[int, ...], np.dtype]] = []
        start = 0
        for leaf in leaves:
            size = math.prod(leaf.shape)
            self._leaves.append((slice(start, start + size), leaf.shape, np.dtype(leaf.dtype)))
            start += size
        self.size = start
        self._example = np.zeros(start, np.int32)
        for (where, _, dtype), leaf in zip(self._leaves, leaves, strict=True):
            self._example[where].view(_held(dtype))[:] = np.asarray(leaf).reshape(-1)

    def blank(self) -> tuple[np.ndarray, Any]:
        """A new buffer with the example's values, and the pytree of NumPy arrays in it (bool as int32)."""
        words = self._example.copy()
        return words, self.view(words)

    def view(self, words: np.ndarray) -> Any:
        """The pytree of NumPy arrays that lie in `words` (bool as int32)."""
        leaves = [words[where].view(_held(dtype)).reshape(shape) for where, shape, dtype in self._leaves]
        return jax.tree.unflatten(self._tree, leaves)

    def unpack(self, words: Int[Array, " n"]) -> T:
        """The pytree in `words`, inside a program."""
        return jax.tree.unflatten(self._tree, [_leaf(words, *leaf) for leaf in self._leaves])

    def pack(self, tree: T) -> Int[Array, " n"]:
        """The buffer of `tree`, inside a program."""
        parts = [_words(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)]
        return jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.int32)


def _held(dtype: np.dtype) -> Any:
    """The type that a leaf has in the buffer."""
    if dtype.kind == "b":
        return np.int32
    if dtype.itemsize != 4:
        raise TypeError(f"{dtype} has no place in a buffer of 32-bit words")
    return dtype


def _leaf(words, where, shape, dtype):
    part = words[where].reshape(shape)
    return part != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(part, dtype)


def _words(leaf):
    return leaf.astype(jnp.int32) if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, jnp.int32)
