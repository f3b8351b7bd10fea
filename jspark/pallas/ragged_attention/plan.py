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

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from jspark.pallas.ragged_attention.segments import HeadShape, Segments

# How far a cut may move to the next border of a task, as a share of a worker's load; how many numbers of busy
# workers are compared (down to 94% of them); the time of a merge, and of leaving a part, in blocks.
SNAP = 0.04
CANDIDATES = 16
MERGE = 1.0
LEAVE = 0.5


ROWS = 64  # query rows × heads of one wgmma tile


@dataclass(frozen=True)
class Config:
    """Static choices of one kernel.

    block: keys of a block. stages: blocks in flight in each ring. warpgroups: compute warpgroups of an SM.
    shared: they share a task and its keys, each taking its part of the rows; else each takes tasks of its own.
    least: blocks that a worker has at least.
    """

    block: int = 64
    stages: int = 2
    warpgroups: int = 2
    shared: bool = False
    least: int = 4

    @property
    def workers(self) -> int:
        """Workers of an SM, each with a ring of its own."""
        return 1 if self.shared else self.warpgroups

    def tile(self, group: int) -> int:
        """Query rows (tokens) of a task."""
        return ROWS // group * (self.warpgroups if self.shared else 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cuts:
    """What each worker of the kernel reads.

    tiles: [tiles, 8] first packed row, rows, row of the page table, keys seen by the first row, keys seen by the
    last row, first block, blocks, position of the first row and one.
    work: [workers, 8] tile, head and block (from the tile's first) where the worker starts, units, tasks, merges
    of the task that it does not finish, packed rows of all segments, parts of its last task from this worker on.
    """

    tiles: Int[Array, "tiles 8"]
    work: Int[Array, "workers 8"]


def _tiles(
    segments: Segments, *, tokens: int, tile: int, block: int, causal: bool, window: int | None
) -> Int[Array, "tiles 8"]:
    """The tiles of all segments, in order; unused ones at the end have no rows and no blocks."""
    start, row, length = (x.astype(jnp.int32) for x in (segments.start, segments.row, segments.length))
    count = row.shape[0] * -(-segments.max_rows // tile)
    count = min(count, row.shape[0] + tokens // tile)
    rows = start[1:] - start[:-1]
    per_segment = (rows + tile - 1) // tile
    ends = _running_sum(per_segment)
    index = jnp.arange(count, dtype=jnp.int32)
    segment = jnp.minimum(_last_at_most(ends, index) + 1, rows.shape[0] - 1)
    offset = (index - (ends - per_segment)[segment]) * tile
    used = index < ends[-1]
    taken = jnp.where(used, jnp.minimum(rows[segment] - offset, tile), 0)
    seen = length[segment]
    own = seen - rows[segment] + offset + 1
    first, last = (own, own + taken - 1) if causal else (seen, seen)
    low = jnp.zeros_like(own) if window is None else jnp.maximum(own - window, 0) // block
    blocks = jnp.where(used, jnp.maximum((last + block - 1) // block - low, 1), 0)
    fields = (start[:-1][segment] + offset, taken, row[segment], first, last, low, blocks, own)
    return jnp.stack(fields, axis=1)


def _running_sum(x: Int[Array, " n"]) -> Int[Array, " n"]:
    """By comparing: one small kernel on a GPU, where a scan takes several."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], x[None, :], 0), axis=1, dtype=jnp.int32)


def _last_at_most(ordered: Int[Array, " n"], x: Int[Array, " *b"]) -> Int[Array, " *b"]:
    """The last index of `ordered` with a value of at most x."""
    return jnp.searchsorted(ordered, x, side="right", method="compare_all").astype(jnp.int32) - 1


def _locate(position: Int[Array, " *b"], starts: Int[Array, " n"], blocks: Int[Array, " n"], kv_heads: int):
    """Tile, head and block of units of the line, and the blocks of their tasks."""
    tile = _last_at_most(starts, position)
    inside = position - starts[tile]
    per_head = jnp.maximum(blocks[tile], 1)
    return tile, inside // per_head, inside % per_head, per_head


def cut(
    segments: Segments,
    heads: HeadShape,
    config: Config,
    *,
    tokens: int,
    ctas: int,
    causal: bool,
    window: int | None = None,
) -> Cuts:
    """Cut the step's work over the workers of `ctas` SMs, or as many of them as have enough to do.

    tokens: packed rows of the step (static).
    """
    kv_heads, workers = heads.kv_heads, ctas * config.workers
    tile = config.tile(heads.group)
    tiles = _tiles(segments, tokens=tokens, tile=tile, block=config.block, causal=causal, window=window)
    blocks = tiles[:, 6]
    ends = _running_sum(blocks * kv_heads)
    starts, total = ends - blocks * kv_heads, ends[-1]
    busy = jnp.clip(total // config.least, 1, workers)

    candidate = busy - busy * jnp.arange(CANDIDATES, dtype=jnp.int32)[:, None] // 256
    which = jnp.arange(workers + 1, dtype=jnp.int32)[None, :]
    cuts = jnp.where(which < candidate, which * total // candidate, total)
    _, _, inside, per_task = _locate(cuts, starts, blocks, kv_heads)
    reach = (SNAP * total.astype(jnp.float32) / candidate.astype(jnp.float32)).astype(jnp.int32)
    back, ahead = inside, per_task - inside
    move = jnp.where(back <= ahead, -back, ahead)
    split = (inside != 0) & (cuts < total) & (jnp.abs(move) > reach)
    cuts = jnp.where(split | (cuts >= total), cuts, cuts + move)
    load = (cuts[:, 1:] - cuts[:, :-1]).astype(jnp.float32)
    load = load + jnp.where(split[:, :-1], LEAVE, 0.0) + jnp.where(split[:, 1:], MERGE, 0.0)
    longest = jnp.max(load, axis=1)
    if not config.shared:
        # Memory is the limit: a few idle workers cost nothing as long as the busy ones end together.
        longest = longest * candidate[:, 0].astype(jnp.float32)
    cuts = cuts[jnp.argmin(longest)]

    units = cuts[1:] - cuts[:-1]
    ends_of = jnp.stack((cuts[:-1], jnp.maximum(cuts[1:] - 1, 0)))
    (tile_at, tile_end), (head, head_end), (offset, offset_end), (_, per_task) = _locate(
        ends_of, starts, blocks, kv_heads
    )
    tasks = jnp.where(units > 0, (tile_end - tile_at) * kv_heads + head_end - head + 1, 0)
    # The last task of a worker spreads over the workers `opener` to `closer`, which merge as a binary tree.
    begin = ends_of[1] - offset_end
    opener, closer = _last_at_most(cuts, jnp.stack((begin, begin + per_task - 1)))
    index = jnp.arange(workers, dtype=jnp.int32) - opener
    step = 1 << jnp.arange(10, dtype=jnp.int32)[None, :]
    merging = (index[:, None] % (2 * step) == 0) & (index[:, None] + step <= (closer - opener)[:, None])
    merges = jnp.where(units > 0, jnp.sum(merging, axis=1, dtype=jnp.int32), 0)
    used = jnp.broadcast_to(segments.start[-1].astype(jnp.int32), units.shape)
    work = jnp.stack((tile_at, head, offset, units, tasks, merges, used, closer - opener - index + 1), axis=1)
    return Cuts(tiles, work)
