"""How the blocks of keys of one step are cut over the workers of the Mosaic kernel.

Knows: query tiles, blocks of keys, stream-K cuts. Made from run-time lengths with a few small array operations, on
the device and once a step: every layer with the same mask reads the same plan.
Does not know: how a worker computes, or what the rows mean.

Words: a *tile* is up to `tile` consecutive query rows (tokens) of one segment; a *task* is a tile and one KV head;
a *unit* is one block of keys of a task. All units lie in one line, tile by tile and head by head, and each worker
takes a contiguous range. So a task is whole on one worker, or opens on one worker and goes on at the start of the
next ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

# How far a cut may move to the next border of a task, as a share of a worker's load, and how many candidates for
# the number of busy workers are compared: a split costs about the time of one block to the worker that merges.
SNAP = 0.04
CANDIDATES = 16
SPARE = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MosaicPlan:
    """What each worker reads.

    tiles: [tiles, 8] first packed row, rows, row of the page table, keys seen by the first row, keys seen by the
    last row, first block, blocks, 0. work: [workers, 8] tile, head and block (from the tile's first) where the
    worker starts, units, tasks, parts of the task that it opens last, 0, 0.
    """

    tiles: Int[Array, "tiles 8"]
    work: Int[Array, "workers 8"]
    tile: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})
    shared: bool = field(metadata={"static": True})


def _tiles(start, row, length, *, tokens: int, tile: int, block: int, causal: bool, window: int | None):
    """The tiles of all segments, in order; unused ones at the end have no rows and no blocks."""
    count = start.shape[0] - 1 + tokens // tile
    rows = start[1:] - start[:-1]
    per_segment = (rows + tile - 1) // tile
    ends = jnp.cumsum(per_segment)
    index = jnp.arange(count, dtype=jnp.int32)
    segment = jnp.minimum(jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32), rows.shape[0] - 1)
    offset = (index - (ends - per_segment)[segment]) * tile
    used = index < ends[-1]
    taken = jnp.where(used, jnp.minimum(rows[segment] - offset, tile), 0)
    seen = length[segment]
    first = seen - rows[segment] + offset + 1 if causal else seen
    last = first + taken - 1 if causal else seen
    low = jnp.zeros_like(first) if window is None else jnp.maximum(first - window, 0) // block
    blocks = jnp.where(used, jnp.maximum((last + block - 1) // block - low, 1), 0)
    fields = (start[:-1][segment] + offset, taken, row[segment], first, last, low, blocks, jnp.zeros_like(first))
    return jnp.stack(fields, axis=1)


def _locate(position, starts, blocks, kv_heads: int):
    """Tile, head and block of a unit of the line; `position` has any shape."""
    tile = jnp.searchsorted(starts, position, side="right", method="compare_all").astype(jnp.int32) - 1
    inside = position - starts[tile]
    per_head = jnp.maximum(blocks[tile], 1)
    return tile, inside // per_head, inside % per_head, per_head


def make_plan(
    start: Int[Array, " s+1"],
    row: Int[Array, " s"],
    length: Int[Array, " s"],
    *,
    tokens: int,
    kv_heads: int,
    workers: int,
    tile: int,
    block: int,
    shared: bool = False,
    causal: bool = True,
    window: int | None = None,
) -> MosaicPlan:
    """Cut the step's work over `workers`.

    start, row, length: as in `Segments`. tokens: packed rows of the step (static). tile: rows of a tile; block:
    keys of a block.
    """
    start, row, length = (x.astype(jnp.int32) for x in (start, row, length))
    tiles = _tiles(start, row, length, tokens=tokens, tile=tile, block=block, causal=causal, window=window)
    blocks = tiles[:, 6]
    ends = jnp.cumsum(blocks * kv_heads)
    starts, total = ends - blocks * kv_heads, ends[-1]
    # The merge of a task is serial in its parts, so a long task gets about sqrt(blocks / 3) of them and no more.
    parts = jnp.maximum(jnp.sqrt(blocks.astype(jnp.float32) * 0.4), 1.0)
    most = jnp.sum(jnp.where(blocks > 0, parts, 0.0)) * kv_heads
    busy = jnp.maximum(jnp.minimum(jnp.minimum(most.astype(jnp.int32), total), workers), 1)

    candidate = busy - busy * jnp.arange(CANDIDATES, dtype=jnp.int32)[:, None] // SPARE
    which = jnp.arange(workers + 1, dtype=jnp.int32)[None, :]
    cuts = jnp.where(which < candidate, which * total // candidate, total)
    _, _, inside, per_task = _locate(cuts, starts, blocks, kv_heads)
    reach = (SNAP * total.astype(jnp.float32) / candidate.astype(jnp.float32)).astype(jnp.int32)
    middle = (inside != 0) & (cuts < total)
    back, ahead = inside <= reach, per_task - inside <= reach
    move = jnp.where(back & (~ahead | (inside <= per_task - inside)), -inside, jnp.where(ahead, per_task - inside, 0))
    cuts = cuts + jnp.where(middle, move, 0)
    split = (middle & ~back & ~ahead).astype(jnp.int32)
    load = 2 * (cuts[:, 1:] - cuts[:, :-1]) + split[:, :-1] + 2 * split[:, 1:]
    best = jnp.argmin(jnp.max(load, axis=1))
    cuts = cuts[best]

    tile_at, head, offset, _ = _locate(cuts[:-1], starts, blocks, kv_heads)
    final = jnp.maximum(cuts[1:] - 1, 0)
    tile_end, head_end, offset_end, per_task = _locate(final, starts, blocks, kv_heads)
    units = cuts[1:] - cuts[:-1]
    tasks = jnp.where(units > 0, (tile_end - tile_at) * kv_heads + head_end - head + 1, 0)
    task_end = final - offset_end + per_task
    following = jnp.sum(cuts[None, :-1] < task_end[:, None], axis=1, dtype=jnp.int32) - 1
    parts = jnp.where(units > 0, following - jnp.arange(workers, dtype=jnp.int32) + 1, 0)
    zero = jnp.zeros_like(units)
    work = jnp.stack((tile_at, head, offset, units, tasks, parts, zero, zero), axis=1)
    return MosaicPlan(tiles, work, tile=tile, block=block, shared=shared)
