"""Small arrays of one pytree in one buffer of 32-bit words, so that a transfer or a call handles a single array.

Knows: shapes, dtypes and offsets. Does not know: what the arrays mean.

Every array that a call passes costs the host time, however small it is: on a CPU a placed array takes 30 to 50 µs,
an array of a call's result 1 µs (benchmarks/cpu/host.json has the sums). Offsets are static, so unpacking inside
a program is slicing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

type _Leaf = tuple[slice, tuple[int, ...], np.dtype, Any]


class Layout[T]:
    """Where the leaves of a pytree lie in an int32 buffer [n]; in buffers [*, n] each row holds one.

    example: a dataclass of arrays of int32, uint32, float32 (kept bit by bit) or bool (0 or 1), of other such
    dataclasses, and of None; its values are what `blank` begins with.
    """

    def __init__(self, example: T):
        leaves, self._tree = jax.tree.flatten(example)
        self._leaves: list[_Leaf] = []
        start = 0
        for leaf in leaves:
            size, dtype = math.prod(leaf.shape), np.dtype(leaf.dtype)
            self._leaves.append((slice(start, start + size), leaf.shape, dtype, _held(dtype)))
            start += size
        self.size = start
        self._fields = _named(example, iter(self._leaves))
        self._example = np.zeros(start, np.int32)
        for (where, _, _, held), leaf in zip(self._leaves, leaves, strict=True):
            self._example[where].view(held)[:] = np.asarray(leaf).reshape(-1)

    def blank(self, *rows: int) -> np.ndarray:
        """A new buffer with the example's values."""
        return np.tile(self._example, (*rows, 1)) if rows else self._example.copy()

    def view(self, words: Int[np.ndarray, "*r n"]) -> Any:
        """What lies in `words`, by the names of `T`: NumPy arrays (bool as int32), made when asked for."""
        return View(words, self._fields)

    def unpack(self, words: Int[Array, "*r n"]) -> T:
        """The pytree in `words`, inside a program."""
        leaves = []
        for where, shape, dtype, _ in self._leaves:
            part = words[..., where].reshape(words.shape[:-1] + shape)
            leaves.append(part != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(part, dtype))
        return jax.tree.unflatten(self._tree, leaves)

    def pack(self, tree: T) -> Int[Array, "*r n"]:
        """The buffer of `tree`, inside a program."""
        parts = []
        for (_, shape, dtype, _), leaf in zip(self._leaves, jax.tree.leaves(tree), strict=True):
            words = leaf.astype(jnp.int32) if dtype.kind == "b" else jax.lax.bitcast_convert_type(leaf, jnp.int32)
            parts.append(words.reshape(*leaf.shape[: leaf.ndim - len(shape)], -1))
        return jnp.concatenate(parts, axis=-1)


class View:
    """The arrays that lie in a buffer, as attributes."""

    def __init__(self, words: np.ndarray, fields: dict[str, Any]):
        self._words, self._fields = words, fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(name)
        field = self._fields[name]
        if isinstance(field, dict):
            field = View(self._words, field)
        elif field is not None:
            where, shape, _, held = field
            field = self._words[..., where]
            if held is not np.int32:
                field = field.view(held)
            if len(shape) != 1:
                field = field.reshape(self._words.shape[:-1] + shape)
        # Looked up once.
        setattr(self, name, field)
        return field


def _named(example: Any, leaves: Iterator[_Leaf]) -> dict[str, Any]:
    """By name of a dataclass's field: a leaf, None, or such a dict; in the order of JAX's leaves."""
    parts: dict[str, Any] = {}
    for f in fields(example):
        if f.metadata.get("static"):
            continue
        part = getattr(example, f.name)
        parts[f.name] = _named(part, leaves) if is_dataclass(part) else None if part is None else next(leaves)
    return parts


def _held(dtype: np.dtype) -> Any:
    """The type that a leaf has in the buffer."""
    if dtype.kind == "b" or dtype == np.int32:
        return np.int32
    if dtype.itemsize != 4:
        raise TypeError(f"{dtype} has no place in a buffer of 32-bit words")
    return dtype
