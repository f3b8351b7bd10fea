"""Paged keys and values: the pools on the device, and who owns which page on the host.

Knows: the layout `[pages, kv_heads, page, head_dim]`, one pair of arrays a layer, K and V apart; page 0 is the
bin that padded rows write to and is never read unmasked.
Does not know: what is stored. The drafter's pool has the target's page numbers, so one table serves both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jspark import axes
from jspark.config import DecoderConfig
from jspark.errors import UserError

#: The page that padded rows write to.
BIN = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """Keys and values of every layer of one model: tuples of [pages, kv_heads, page, head_dim]."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held on all devices together."""
        return sum(x.nbytes for x in (*self.k, *self.v))

    def write(
        self,
        layer: int,
        pages: Int[Array, " t"],
        offsets: Int[Array, " t"],
        k: Float[Array, "t k d"],
        v: Float[Array, "t k d"],
    ) -> Pool:
        """The pool with rows of one layer at (page, offset)."""
        keys, values = list(self.k), list(self.v)
        keys[layer] = write(keys[layer], pages, offsets, k)
        values[layer] = write(values[layer], pages, offsets, v)
        return Pool(tuple(keys), tuple(values))


def make_pool(config: DecoderConfig, pages: int, page_size: int, dtype, mesh: Mesh) -> Pool:
    """An empty pool of `pages` pages (the bin included), sharded by KV head where the mesh allows."""
    shape = (pages, config.num_kv_heads, page_size, config.head_dim)
    placement = axes.sharding(mesh, (None, "kv_heads", None, None), shape)

    def array() -> Array:
        return jnp.zeros(shape, dtype, device=placement)

    layers = range(config.num_layers)
    return Pool(tuple(array() for _ in layers), tuple(array() for _ in layers))


def bytes_per_token(config: DecoderConfig, dtype) -> int:
    """Bytes one token takes in a pool of this model."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def write(
    pool: Float[Array, "pages k s d"],
    pages: Int[Array, " t"],
    offsets: Int[Array, " t"],
    rows: Float[Array, "t k d"],
) -> Float[Array, "pages k s d"]:
    """The pool with `rows` at (page, offset): in place when the pool is donated."""
    return pool.at[pages, :, offsets].set(rows.astype(pool.dtype), mode="promise_in_bounds")


class PageAllocator:
    """Pages of a pool and how many hold a reference to each. Host side; raises on a reference given back twice,
    so a leak cannot hide."""

    def __init__(self, pages: int, page_size: int):
        self.page_size = page_size
        self.capacity = pages - 1
        self._free = list(range(pages - 1, BIN, -1))
        self._references: dict[int, int] = {}
        self._cached: set[int] = set()
        self._idle = 0

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that only the prefix cache holds: it can give up as many, or a few less when some of them lie
        above pages in use."""
        return self._idle

    @property
    def in_use(self) -> int:
        """Pages that somebody other than the prefix cache holds."""
        return self.capacity - self.free - self.idle

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def references(self, page: int) -> int:
        """How many hold `page`."""
        return self._references.get(page, 0)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each; the caller has checked `free`.

        Raises:
            UserError: more pages than are free.
        """
        if count > self.free:
            raise UserError(
                f"{count} KV pages were asked for and {self.free} of {self.capacity} are free; "
                "raise max_total_tokens or lower max_tokens"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each of `pages`.

        Raises:
            RuntimeError: a page that nobody holds.
        """
        for page in pages:
            held = self._references.get(page, 0)
            if not held:
                raise RuntimeError(f"KV page {page} was shared and nobody holds it")
            self._references[page] = held + 1
            self._idle -= held == 1 and page in self._cached

    def give_back(self, pages: Iterable[int]) -> None:
        """One reference less to each of `pages`; a page that nobody holds is free.

        Raises:
            RuntimeError: a page that nobody holds (freed twice, or never taken).
        """
        for page in pages:
            held = self._references.get(page, 0)
            if not held:
                raise RuntimeError(f"KV page {page} was given back twice or never taken")
            if held > 1:
                self._references[page] = held - 1
                self._idle += held == 2 and page in self._cached
            else:
                del self._references[page]
                self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """Says that one reference to `page` is the prefix cache's."""
        self._cached.add(page)
        self._idle += self.references(page) == 1

    def unmark_cached(self, page: int) -> None:
        """Says that the prefix cache is about to give `page` back."""
        self._cached.remove(page)
        self._idle -= self.references(page) == 1
