"""Packing: anchors, windows and prefill chunks of all requests into one buffer of T rows.

Knows: which packed row holds which token of which request, and where its keys and values go.
Does not know: what the rows are for, nor any model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jspark.kv import BIN
from jspark.pallas.ragged_attention import Segments, Tiles
from jspark.state import Prefill


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One packed buffer: first the verify rows, then the prefill rows; padding writes to the bin page.

    tokens, positions, page, offset: [t]. table: [r, p]. tiles: rectangles over the packed rows, for the
    reference. verify, prefill: the same rows as segments, for kernels; each counts its packed rows from 0.
    index: [r, w], the packed row of each request's window offset, T where there is none. verify_tokens: how many
    of the packed rows, the first ones, are not prefill rows.
    """

    tokens: Int[Array, " t"]
    positions: Int[Array, " t"]
    page: Int[Array, " t"]
    offset: Int[Array, " t"]
    table: Int[Array, "r p"]
    tiles: tuple[Tiles, ...]
    verify: Segments
    prefill: Segments | None
    index: Int[Array, "r w"]
    verify_tokens: int = field(metadata={"static": True})


def pack(
    block: Int[Array, "r w"],
    position: Int[Array, " r"],
    window: Int[Array, " r"],
    active: Bool[Array, " r"],
    table: Int[Array, "r p"],
    prefill: Prefill | None,
    *,
    verify_tokens: int,
    page_size: int,
) -> Batch:
    """Packs `window + 1` rows of each active request's block (its anchor first), then the prefill rows.

    Σ (window + 1) over active rows must not exceed `verify_tokens`: the scheduler sees to it.
    """
    rows, width = block.shape
    total = verify_tokens + (0 if prefill is None else prefill.tokens.shape[0])
    count = jnp.where(active, window + 1, 0)
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    ends = jnp.cumsum(count)
    index = (ends - count)[:, None] + offsets
    index = jnp.where(offsets < count[:, None], index, total)

    def scatter(values: Int[Array, "r w"], fill: int) -> Int[Array, " v"]:
        return jnp.full(verify_tokens, fill, jnp.int32).at[index].set(values, mode="drop")

    tokens = scatter(block, 0)
    positions = scatter(position[:, None] + offsets, 0)
    row = scatter(jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], block.shape), rows)
    every = jnp.arange(rows, dtype=jnp.int32)
    tiles = (Tiles(index, every),)
    if prefill is not None:
        tokens = jnp.concatenate([tokens, prefill.tokens])
        positions = jnp.concatenate([positions, prefill.positions])
        row = jnp.concatenate([row, prefill.row])
        tiles = tiles if prefill.tiles is None else (*tiles, prefill.tiles)
    real = row < rows
    page = table[jnp.where(real, row, 0), positions // page_size]
    return Batch(
        tokens=tokens,
        positions=positions,
        page=jnp.where(real, page, BIN),
        offset=jnp.where(real, positions % page_size, 0),
        table=table,
        tiles=tiles,
        verify=Segments(
            start=jnp.concatenate([jnp.zeros(1, jnp.int32), ends.astype(jnp.int32)]),
            row=every,
            length=position + count,
            max_rows=width,
        ),
        prefill=None if prefill is None else prefill.segments,
        index=index,
        verify_tokens=verify_tokens,
    )
