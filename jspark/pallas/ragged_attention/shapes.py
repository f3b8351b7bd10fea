"""Cases that tests, benchmark and tuning share: shapes, lengths, and the bars that kernels are held to.

Knows: how a case becomes random arrays, and the fewest bytes and operations it takes. Does not know: versions.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspark.pallas.ragged_attention.segments import Segments


@dataclass(frozen=True)
class Case:
    """One shape of the op.

    context: keys each request has, or the (least, most) of lengths drawn at random; rows likewise, its query rows.
    pad_rows, pad_segments: packed rows in no segment and segments without rows. bar: a target, in `unit`.
    """

    name: str
    requests: int
    context: int | tuple[int, int]
    rows: int | tuple[int, int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    causal: bool = True
    window: int | None = None
    pad_rows: int = 0
    pad_segments: int = 0
    bar: float | None = None
    unit: str = "TB/s"

    @property
    def max_rows(self) -> int:
        """Rows a request has at most."""
        return self.rows if isinstance(self.rows, int) else self.rows[1]

    def lengths(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(keys, query rows) of every request; the same for the same seed."""
        rng = np.random.default_rng(seed)

        def draw(bounds: int | tuple[int, int]) -> np.ndarray:
            low, high = (bounds, bounds) if isinstance(bounds, int) else bounds
            return rng.integers(low, high + 1, size=self.requests)

        rows = draw(self.rows)
        return np.maximum(draw(self.context), rows), rows


@dataclass(frozen=True)
class Arrays:
    """Random inputs of a case. Pages are scattered over the pool; `table` rows in random order."""

    q: Array
    k_pool: Array
    v_pool: Array
    table: Array
    segments: Segments


#: The bars of one H200: bytes of keys and values a second, or operations where arithmetic is the limit.
BARS = (
    Case("r32 c4096 q8", 32, 4096, 8, bar=4.0),
    Case("r128 c2048 q8", 128, 2048, 8, bar=4.0),
    Case("r256 c1024 q8", 256, 1024, 8, bar=4.0),
    Case("mixed r32", 32, (64, 8191), (1, 8), bar=3.8),
    Case("mixed r128", 128, (64, 8191), (1, 8), bar=3.8),
    Case("r1 c4096 q8", 1, 4096, 8, bar=20.0, unit="µs"),
    Case("d64 g3 r128 c2048 q8", 128, 2048, 8, heads=9, kv_heads=3, head_dim=64, bar=3.2),
    Case("d64 g3 mixed r32", 32, (64, 8191), (1, 8), heads=9, kv_heads=3, head_dim=64, bar=2.3),
    Case("prefill 8x512 c4096", 8, 4096, 512, bar=450.0, unit="TFLOP/s"),
    Case("draft block r32 c4096 q7", 32, 4096, 7, causal=False, bar=4.0),
)

#: Shapes at the edges; what they check is results, not speed.
EDGES = (
    Case("one row each", 5, (1, 300), 1),
    Case("rows 16", 3, (40, 500), (1, 16)),
    Case("group 1", 4, (1, 200), (1, 8), heads=4, kv_heads=4, head_dim=64),
    Case("group 3 page 16", 6, (1, 400), (1, 8), heads=9, kv_heads=3, head_dim=64, page_size=16),
    Case("group 8 page 128", 4, (1, 700), (1, 6), heads=16, kv_heads=2, page_size=128),
    Case("group 7 page 32", 3, (1, 300), (1, 5), heads=14, kv_heads=2, head_dim=64, page_size=32),
    Case("window 40", 5, (1, 600), (1, 8), window=40),
    Case("window 1", 3, (1, 100), (1, 4), window=1, heads=8, kv_heads=2),
    Case("pads", 3, (1, 300), (1, 8), pad_rows=37, pad_segments=5),
    Case("part of a split masked", 2, (65, 66), (2, 8)),
    Case("chunks", 3, (200, 900), (30, 200), pad_rows=11, pad_segments=1),
    Case("chunk in a window", 2, (300, 700), (100, 150), window=130, heads=6, kv_heads=2, head_dim=64),
    Case("draft block", 5, (7, 500), 7, causal=False, pad_segments=3),
    Case("draft block in a window", 4, (16, 500), 16, causal=False, window=100),
)


def random_case(rng: np.random.Generator) -> Case:
    """Any shape that kernels must serve: odd lengths, one huge request among tiny ones, windows, pads."""
    head_dim, group, kv_heads = int(rng.choice([64, 128])), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    kind = rng.choice(["verify", "chunks", "block"], p=[0.6, 0.2, 0.2])
    most = {"verify": 16, "chunks": 600, "block": 16}[kind]
    requests = int(rng.choice([1, 2, 7, 33, 128])) if kind != "chunks" else int(rng.integers(1, 5))
    longest = int(rng.choice([1, 65, 700, 8000]))
    rows = int(rng.integers(1, most + 1))
    return Case(
        name=f"random {kind}",
        requests=requests,
        context=(1, max(longest, rows)) if requests < 33 else (1, min(max(longest, rows), 1500)),
        rows=rows if kind == "block" else (1, rows),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=int(rng.choice([16, 32, 64, 128])),
        causal=kind != "block",
        window=int(rng.integers(1, 1000)) if rng.random() < 0.25 else None,
        pad_rows=int(rng.integers(0, 20)),
        pad_segments=int(rng.integers(0, 5)),
    )


def make(case: Case, dtype, *, seed: int = 0, pool_pages: int = 0, poison: bool = True) -> Arrays:
    """Random normal arrays of a case on the default device.

    pool_pages: pages of the pool, 0 for as many as are needed and one more. poison: what no row sees is NaN.
    """
    rng = np.random.default_rng(seed)
    length, rows = case.lengths(seed)
    needed = -(-length // case.page_size)
    pages = max(pool_pages, int(needed.sum()) + 1)
    order = rng.permutation(pages - 1)[: needed.sum()] + 1
    table = np.zeros((case.requests, int(needed.max())), np.int32)
    table[np.arange(table.shape[1])[None, :] < needed[:, None]] = order
    # The table's rows are not in the order of the segments.
    shuffled = rng.permutation(case.requests)
    placed = np.empty_like(table)
    placed[shuffled] = table
    pads = (0, case.pad_segments)
    start = np.pad(np.concatenate([[0], np.cumsum(rows)]), pads, mode="edge")
    segments = Segments(
        start=jnp.asarray(start, jnp.int32),
        row=jnp.asarray(np.pad(shuffled, pads), jnp.int32),
        length=jnp.asarray(np.pad(length, pads), jnp.int32),
        max_rows=case.max_rows,
    )
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (pages, case.kv_heads, case.page_size, case.head_dim)
    used = np.zeros(pages, np.int32)
    used[order] = case.page_size
    used[table[np.arange(case.requests), needed - 1]] = length - (needed - 1) * case.page_size
    filled = jnp.asarray(used)[:, None, None, None] > jnp.arange(case.page_size)[None, None, :, None]
    k_pool, v_pool = (_pool(key, shape, dtype, filled if poison else None) for key in keys[:2])
    q = jax.random.normal(keys[2], (int(rows.sum()) + case.pad_rows, case.heads, case.head_dim), dtype)
    return Arrays(q, k_pool, v_pool, jnp.asarray(placed), segments)


def _pool(key: Array, shape: tuple[int, ...], dtype, filled: Array | None) -> Array:
    values = jax.random.normal(key, shape, dtype)
    return values if filled is None else jnp.where(filled, values, jnp.asarray(jnp.nan, dtype))


def kv_bytes(case: Case, itemsize: int = 2, seed: int = 0) -> int:
    """Bytes of the keys and values that some row sees, read once."""
    length, rows = case.lengths(seed)
    if case.window is not None:
        length = np.minimum(length, rows + case.window - 1)
    return int(length.sum()) * 2 * case.kv_heads * case.head_dim * itemsize


def flops(case: Case, seed: int = 0) -> int:
    """Operations of both products, masked pairs left out."""
    length, rows = case.lengths(seed)
    pairs = 0
    for keys, m in zip(length.tolist(), rows.tolist(), strict=True):
        position = keys - m + np.arange(m)
        last = position if case.causal else np.full(m, keys - 1)
        first = np.zeros(m, int) if case.window is None else np.maximum(position - case.window + 1, 0)
        pairs += int((last - first + 1).sum())
    return 4 * pairs * case.heads * case.head_dim
