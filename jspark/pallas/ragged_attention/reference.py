"""The reference, which is also the XLA fallback on every device.

Knows: how to bring ragged rows into rectangles so that each request's pages are gathered once a rectangle, not
once a packed token; softmax in float32.
Does not know: where tiles come from, or what the rows mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jspark.pallas.ragged_attention.segments import Segments


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """A rectangle of query rows: tile i holds the packed rows `index[i]` of request row `row[i]`.

    index: [m, b], packed positions; values of T or more are padding. row: [m], rows of the page table.
    """

    index: Int[Array, "m b"]
    row: Int[Array, " m"]


def _gather(pool: Float[Array, "pages k s d"], table: Int[Array, "m p"]) -> Float[Array, "m k c d"]:
    pages = pool.at[table].get(mode="promise_in_bounds")
    m, p, k, s, d = pages.shape
    return jnp.moveaxis(pages, 2, 1).reshape(m, k, p * s, d)


def _grouped(q: Float[Array, "m b n d"], kv_heads: int) -> Float[Array, "m k gb d"]:
    m, b, n, d = q.shape
    return q.reshape(m, b, kv_heads, n // kv_heads, d).transpose(0, 2, 3, 1, 4).reshape(m, kv_heads, -1, d)


def _ungrouped(o: Float[Array, "m k gb d"], rows: int) -> Float[Array, "m b n d"]:
    m, k, _, d = o.shape
    return o.reshape(m, k, -1, rows, d).transpose(0, 3, 1, 2, 4).reshape(m, rows, -1, d)


def _scores(q: Float[Array, "m k q d"], k: Float[Array, "m k c d"]) -> Float[Array, "m k q c"]:
    scores = jnp.einsum("mkqd,mkcd->mkqc", q, k, preferred_element_type=jnp.float32)
    return scores * (q.shape[-1] ** -0.5)


def _within(key: Int[Array, "*#m"], query: Int[Array, "*#m"], window: int | None) -> Bool[Array, "*m"]:
    """Whether the query's position sees the key's: not later, and less than `window` back."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _masked(scores: Float[Array, "m k q c"], seen: Bool[Array, "#m b c"]) -> Float[Array, "m k q c"]:
    """−inf where a query does not see a key; `seen` is the same for the query heads of a group."""
    if seen.shape[1] > 1:
        seen = jnp.tile(seen, (1, scores.shape[2] // seen.shape[1], 1))
    return jnp.where(seen[:, None], scores, -jnp.inf)


def ragged_attention(
    q: Float[Array, "t n d"],
    k_pool: Float[Array, "pages k s d"],
    v_pool: Float[Array, "pages k s d"],
    table: Int[Array, "r p"],
    positions: Int[Array, " t"],
    tiles: tuple[Tiles, ...],
    *,
    window: int | None = None,
) -> Float[Array, "t n d"]:
    """Causal attention of packed rows over their own pages.

    Row t sees the positions 0..positions[t] of its request, its own included: the caller writes keys and values
    first. With a sliding window it sees the last `window` of these. Packed rows in no tile come out as zeros.
    """
    out = jnp.zeros_like(q)
    for tile in tiles:
        keys = _gather(k_pool, table[tile.row])
        values = _gather(v_pool, table[tile.row])
        rows = tile.index.shape[1]
        index = jnp.minimum(tile.index, q.shape[0] - 1)
        scores = _scores(_grouped(q[index], k_pool.shape[1]), keys)
        seen = _within(jnp.arange(keys.shape[2])[None, None, :], positions[index][:, :, None], window)
        scores = _masked(scores, seen)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        tile_out = _ungrouped(jnp.einsum("mkqc,mkcd->mkqd", weights, values), rows)
        out = out.at[tile.index].set(tile_out.astype(q.dtype), mode="drop")
    return out


def block_attention(
    q: Float[Array, "r b n d"],
    k: Float[Array, "r s k d"],
    v: Float[Array, "r s k d"],
    k_pool: Float[Array, "pages k p d"],
    v_pool: Float[Array, "pages k p d"],
    table: Int[Array, "r n_pages"],
    context: Int[Array, " r"],
    *,
    window: int | None = None,
    causal: bool = False,
) -> Float[Array, "r b n d"]:
    """Attention of a draft block: every row sees positions 0..context−1 from the pages and the whole block.

    The block stands at positions context.., and the queries are its last b rows (all of them, if b = s). With a
    sliding window a row sees what is less than `window` positions away; if `causal`, no later row of the block.
    """
    block_k, block_v = (jnp.moveaxis(x, 1, 2) for x in (k, v))
    queries = _grouped(q, k_pool.shape[1])
    values = _gather(v_pool, table)
    key, start = jnp.arange(values.shape[2])[None, None, :], context[:, None, None]
    own = jnp.arange(k.shape[1])[None, None, :]
    row = own[:, :, -q.shape[1] :].swapaxes(1, 2)
    seen = key < start
    if window is not None:
        seen &= _within(key, start + row, window)
    scores = _masked(_scores(queries, _gather(k_pool, table)), seen)
    block_scores = _scores(queries, block_k)
    if causal or window is not None:
        seen = _within(own, row, window)
        block_scores = _masked(block_scores, seen if causal else seen | _within(row, own, window))
    scores = jnp.concatenate([scores, block_scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    past, own = jnp.split(weights, [values.shape[2]], axis=-1)
    out = jnp.einsum("mkqc,mkcd->mkqd", past, values) + jnp.einsum("mkqc,mkcd->mkqd", own, block_v)
    return _ungrouped(out, q.shape[1]).astype(q.dtype)


def attend(
    q: Float[Array, "t n d"],
    k_pool: Float[Array, "pages k s d"],
    v_pool: Float[Array, "pages k s d"],
    table: Int[Array, "r p"],
    segments: Segments,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "t n d"]:
    """The op (dispatch.attend) in XLA: each segment is one row of a rectangle `segments.max_rows` wide."""
    index, positions = segments.rectangle(q.shape[0])
    keys, values = _gather(k_pool, table[segments.row]), _gather(v_pool, table[segments.row])
    key = jnp.arange(keys.shape[2], dtype=jnp.int32)
    # What no row sees may hold anything, NaN too: a weight of 0 would not silence it.
    values = jnp.where((key[None, :] < segments.length[:, None])[:, None, :, None], values, 0)
    queries = q.at[index].get(mode="fill", fill_value=0)
    scores = jnp.einsum(
        "mkqd,mkcd->mkqc", _grouped(queries, k_pool.shape[1]), keys, preferred_element_type=jnp.float32
    )
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    last = positions if causal else jnp.broadcast_to(segments.length[:, None] - 1, positions.shape)
    seen = key[None, None, :] <= last[:, :, None]
    if window is not None:
        seen &= jnp.abs(key[None, None, :] - positions[:, :, None]) < window
    seen = jnp.tile(seen, (1, scores.shape[2] // seen.shape[1], 1))[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(values.dtype)
    rows = _ungrouped(jnp.einsum("mkqc,mkcd->mkqd", weights, values), segments.max_rows)
    return jnp.zeros_like(q).at[index].set(rows.astype(q.dtype), mode="drop")
