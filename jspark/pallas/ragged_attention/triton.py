"""Ragged attention in Triton, called through jax-triton: a baseline for the Mosaic version and a check on it.

Knows: how the work is cut into equal stretches (stream-K, arXiv 2301.03598), block sizes, launches.
Does not know: when it is the right version (dispatch.py), or the arithmetic (triton_kernels.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jspark.pallas.ragged_attention.segments import HeadShape, Segments

#: Query rows × heads that one program holds at most.
_MOST = 128
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Blocks:
    """Sizes of a launch. n: keys a block. programs: stretches the work is cut into. least: blocks that a stretch
    has at least, so that small batches are not cut to pieces. two_loops: leave the mask out where it is not
    needed. part_dtype: of parts of split tasks. merge_rows, merge_parts: what a merging program takes at a time.
    """

    n: int
    programs: int
    least: int
    num_warps: int
    num_stages: int
    two_loops: bool
    part_dtype: str = "float32"
    merge_rows: int = 2
    merge_parts: int = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Who computes what; made on the device.

    tiles: segments of at most M // G rows. units: [s+1], cumulative key blocks of the tiles, of one KV head.
    cut: [programs+1], the first unit of each program. share: (units a program, how many have one more).
    first_tile: [programs+1], the tile that each cut falls in.
    """

    tiles: Segments
    units: Int[Array, " s1"]
    cut: Int[Array, " p1"]
    share: Int[Array, " 2"]
    first_tile: Int[Array, " p1"]
    blocks: Blocks = field(metadata={"static": True})


@cache
def available() -> bool:
    """Triton and jax-triton are installed."""
    return find_spec("triton") is not None and find_spec("jax_triton") is not None


def supports(heads: HeadShape, max_rows: int, causal: bool) -> bool:
    """Whether this version computes such shapes."""
    whole = causal or max_rows * heads.group <= _MOST
    page = heads.page_size
    return whole and heads.head_dim in (16, 32, 64, 128) and page & (page - 1) == 0 and heads.group <= 16


def blocks_for(heads: HeadShape, max_rows: int) -> Blocks:
    """The tuned block sizes of a class of shapes."""
    kind = "prefill" if tile_size(heads, max_rows) == _MOST else "decode"
    tuned: dict[str, Any] = _tuned()[f"{kind} {max(heads.head_dim, 64)}"]
    if heads.dtype == "float32":
        # Twice the bytes: what is tuned for two-byte numbers would not fit in shared memory.
        tuned = {**tuned, "n": 64, "num_stages": 2}
    return Blocks(**tuned)


@cache
def _tuned() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parent / "tuned" / "h200.json"
    return json.loads(path.read_text(encoding="utf-8"))["triton"]


def tile_size(heads: HeadShape, max_rows: int) -> int:
    """M: query rows × heads of a tile, padded to a power of two."""
    return min(_MOST, max(16, 1 << (max_rows * heads.group - 1).bit_length()))


def make_plan(
    segments: Segments,
    heads: HeadShape,
    *,
    tokens: int,
    causal: bool,
    window: int | None = None,
    blocks: Blocks | None = None,
) -> Plan:
    """Cuts the units of all segments into stretches of equal length.

    tokens: packed rows of the queries. blocks: in place of the tuned ones.
    """
    blocks = blocks or blocks_for(heads, segments.max_rows)
    rows = tile_size(heads, segments.max_rows) // heads.group
    if rows < segments.max_rows:
        assert causal
        segments = segments.split(rows, tokens)
    first, last = segments.key_range(window)
    count = -(-last // blocks.n) - first // blocks.n
    # Sums over comparisons: one fused kernel each, where a scan and a binary search take many.
    tile = jnp.arange(count.shape[0] + 1, dtype=jnp.int32)
    units = jnp.sum(jnp.where(tile[None, :-1] < tile[:, None], count[None, :], 0), axis=1, dtype=jnp.int32)
    total = units[-1] * heads.kv_heads
    active = jnp.clip(-(-total // blocks.least), 1, blocks.programs)
    each, longer = total // active, total % active
    program = jnp.arange(blocks.programs + 1, dtype=jnp.int32)
    cut = jnp.where(program < active, program * each + jnp.minimum(program, longer), total)
    ends = units[1:] * heads.kv_heads
    first_tile = jnp.sum(ends[None, :] <= cut[:, None], axis=1, dtype=jnp.int32)
    return Plan(
        tiles=segments,
        units=units,
        cut=cut,
        share=jnp.stack([each, longer]),
        first_tile=jnp.minimum(first_tile, count.shape[0] - 1),
        blocks=blocks,
    )


def attend(
    q: Float[Array, "t n d"],
    k_pool: Float[Array, "pages k s d"],
    v_pool: Float[Array, "pages k s d"],
    table: Int[Array, "r p"],
    segments: Segments,
    plan: Plan,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "t n d"]:
    """The op (dispatch.attend) with a plan of `make_plan` for the same segments, `causal` and `window`."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    from jspark.pallas.ragged_attention import triton_kernels as kernels

    t, n, d = q.shape
    kv_heads, page_size = k_pool.shape[1:3]
    heads = HeadShape(n, kv_heads, d, page_size, q.dtype.name)
    m, blocks, tiles = tile_size(heads, segments.max_rows), plan.blocks, plan.tiles
    count = tiles.row.shape[0]
    slots = 2 * blocks.programs
    common = {"KV_HEADS": kv_heads, "G": heads.group, "D": d, "M": m, "num_warps": blocks.num_warps}
    out, part, level = jax_triton.triton_call(
        q,
        k_pool,
        v_pool,
        table,
        tiles.start,
        tiles.row,
        tiles.length,
        plan.units,
        plan.cut,
        plan.first_tile,
        t,
        count,
        table.shape[1],
        np.float32((d**-0.5 if scale is None else scale) * _LOG2_E),
        kernel=kernels.attend,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((slots, m, d), jnp.dtype(blocks.part_dtype)),
            jax.ShapeDtypeStruct((slots, m), jnp.float32),
        ],
        grid=(blocks.programs,),
        num_stages=blocks.num_stages,
        name="ragged_attention",
        PAGE=page_size,
        N=blocks.n,
        CAUSAL=causal,
        WINDOW=window or 0,
        TWO_LOOPS=blocks.two_loops and not window,
        ROW_SIZE=1 << (n * d - 1).bit_length(),
        **common,
    )
    rows = min(blocks.merge_rows, m)
    return jax_triton.triton_call(
        part,
        level,
        tiles.start,
        plan.units,
        plan.cut,
        plan.share,
        plan.first_tile,
        out,
        count,
        kernel=kernels.merge,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(blocks.programs - 1, m // rows),
        num_stages=1,
        name="ragged_attention_merge",
        input_output_aliases={7: 0},
        ROWS=rows,
        PARTS=blocks.merge_parts,
        **common,
    )
