"""What every version of the op reads: which packed query rows belong together, and how far they see.

Knows: cumulative rows, page-table rows, lengths, positions; the shape of heads and pages. Does not know: tensors,
kernels or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int


@dataclass(frozen=True)
class HeadShape:
    """What layers must have in common to share a plan."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.heads // self.kv_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Runs of packed query rows, each run of one request at consecutive positions.

    start: [s+1], cumulative packed rows: segment i holds rows start[i] to start[i+1]−1, none if it is padding.
    row: [s], its row of the page table. length: [s], keys that its last query row sees when causal, that row's
    own included; so row i of m stands at position length − m + i. Packed rows from start[s] on are padding.
    max_rows: rows that a segment has at most; static.
    """

    start: Int[Array, " s1"]
    row: Int[Array, " s"]
    length: Int[Array, " s"]
    max_rows: int = field(metadata={"static": True})

    @property
    def rows(self) -> Int[Array, " s"]:
        """Query rows of each segment."""
        return self.start[1:] - self.start[:-1]

    def split(self, rows: int, tokens: int) -> Segments:
        """The same rows cut into segments of at most `rows` rows, for causal attention, which does not notice.

        tokens: packed rows in all, which bounds how many segments come out: tokens // rows + s.
        """
        if rows >= self.max_rows:
            return self
        count = tokens // rows + self.row.shape[0]
        tiles = -(-self.rows // rows)
        first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles)])
        which = jnp.arange(count, dtype=jnp.int32)
        owner = jnp.minimum(jnp.searchsorted(first[1:], which, side="right"), self.row.shape[0] - 1)
        begin = jnp.minimum(self.start[owner] + (which - first[owner]) * rows, self.start[owner + 1])
        start = jnp.concatenate([begin, self.start[-1:]])
        end = start[1:]
        return Segments(
            start=start.astype(jnp.int32),
            row=self.row[owner],
            length=(self.length[owner] - (self.start[owner + 1] - end)).astype(jnp.int32),
            max_rows=rows,
        )

    def key_range(self, window: int | None) -> tuple[Int[Array, " s"], Int[Array, " s"]]:
        """First and past-the-last position that any row of each segment sees; both 0 where it has no rows."""
        first = jnp.zeros_like(self.length)
        if window is not None:
            first = jnp.maximum(self.length - self.rows - window + 1, 0)
        real = self.rows > 0
        return jnp.where(real, first, 0), jnp.where(real, self.length, 0)

    def rectangle(self, tokens: int) -> tuple[Int[Array, "s b"], Int[Array, "s b"]]:
        """Packed rows [s, max_rows] of each segment, `tokens` where there is none; and the positions of rows."""
        offsets = jnp.arange(self.max_rows, dtype=jnp.int32)[None, :]
        real: Bool[Array, "s b"] = offsets < self.rows[:, None]
        index = jnp.where(real, self.start[:-1, None] + offsets, tokens)
        return index, (self.length - self.rows)[:, None] + offsets
