"""The drafter's two jobs: draft a block (propose), and take in what the target saw (inject).

Knows: the block of anchor and mask rows, the sequential scan over it, and KV injection.
Does not know: what is verified or accepted, nor where features come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark import kv
from jspark.batch import Batch
from jspark.config import DrafterConfig
from jspark.models.drafter import Drafter
from jspark.models.layers import Rotary, Vocabulary
from jspark.pallas.ragged_attention import (
    Backend,
    HeadShape,
    attend,
    block_attention,
    block_segments,
    make_plan,
)
from jspark.sampling import RowSampling, draft_token, log_probs

#: Logits of the next row of a block and the tokens of the block before it → the logits as the target changes them.
Adjust = Callable[[Float[Array, "r v"], list[Int[Array, " r"]]], Float[Array, "r v"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """A drafted block. tokens: [r, γ]. confidence: [r, γ] logits, +inf where the drafter has no such head.

    log_q: [r, γ, v], the distribution each token was drawn from, as it was drawn from; None when nobody needs it.
    """

    tokens: Int[Array, "r g"]
    confidence: Float[Array, "r g"]
    log_q: Float[Array, "r g v"] | None


def block_hidden(
    drafter: Drafter,
    vocabulary: Vocabulary,
    config: DrafterConfig,
    pool: kv.Pool,
    anchor: Int[Array, " r"],
    position: Int[Array, " r"],
    table: Int[Array, "r p"],
    block_size: int,
    attention: Backend = "xla",
) -> tuple[Float[Array, "r g h"], kv.Pool | None]:
    """The final-norm hidden rows that predict positions position+1 … position+γ.

    The block is the anchor and masks, attends to all context before the anchor and both ways to itself
    (DFlash, section 4), within a window in layers that have one. Its own keys and values are of no use afterwards.
    Kernels find them in the row's pages, behind its context, where injection writes over them: the pool comes back
    with them; None where nothing was written.
    """
    rows = block_size if config.predicts_from_anchor else block_size + 1
    masks = jnp.full((anchor.shape[0], rows - 1), config.mask_token_id, jnp.int32)
    x = vocabulary.embed(jnp.concatenate([anchor[:, None], masks], axis=1))
    positions = position[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    b = config.backbone
    rotary = Rotary(b.rope, b.head_dim, b.max_position, positions)
    if attention == "xla":
        attend_layer = _beside_pages(config, position, table)
    else:
        attend_layer = _in_pages(config, attention, pool, position, positions, table, x.dtype.name)
    for i in range(b.num_layers):
        layer = drafter.layers.layer(i)
        attended, pool = attend_layer(i, pool, *layer.qkv(x, rotary))
        x = layer.finish(x, attended)
    hidden = drafter.norm(x[:, rows - block_size :])
    return hidden, None if attention == "xla" else pool


#: Layer, pool, queries, keys and values of the block [r, b, …] → what the queries attend to, and the pool.
_AttendLayer = Callable[[int, kv.Pool, Array, Array, Array], tuple[Array, kv.Pool]]


def _sight(config: DrafterConfig, layer: int) -> tuple[int | None, bool]:
    """(window, whether later rows of the block are hidden) of a draft layer."""
    window = config.backbone.window(layer)
    return window, window is not None and config.causal_windows


def _beside_pages(config: DrafterConfig, position: Int[Array, " r"], table: Int[Array, "r p"]) -> _AttendLayer:
    """XLA's way: the block's keys and values are taken as they are."""

    def attend_layer(i: int, pool: kv.Pool, q: Array, k: Array, v: Array) -> tuple[Array, kv.Pool]:
        window, causal = _sight(config, i)
        own = block_attention(q, k, v, pool.k[i], pool.v[i], table, position, window=window, causal=causal)
        return own, pool

    return attend_layer


def _in_pages(
    config: DrafterConfig,
    attention: Backend,
    pool: kv.Pool,
    position: Int[Array, " r"],
    positions: Int[Array, "r b"],
    table: Int[Array, "r p"],
    dtype: str,
) -> _AttendLayer:
    """A kernel's way: they are written first. Plans are made once, for all layers alike."""
    b, size = config.backbone, pool.k[0].shape[2]
    index = positions // size
    own = jnp.take_along_axis(table, jnp.minimum(index, table.shape[1] - 1), axis=1)
    page = jnp.where(index < table.shape[1], own, kv.BIN).reshape(-1)
    offset = (positions % size).reshape(-1)
    segments = block_segments(position, positions.shape[1])
    heads = HeadShape(b.num_heads, b.num_kv_heads, b.head_dim, size, dtype)
    plans = {
        (window, causal): make_plan(
            attention, segments, heads, tokens=positions.size, causal=causal, window=window
        )
        for window, causal in {_sight(config, i) for i in range(b.num_layers)}
    }

    def attend_layer(i: int, pool: kv.Pool, q: Array, k: Array, v: Array) -> tuple[Array, kv.Pool]:
        rows, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        pool = pool.write(i, page, offset, k, v)
        window, causal = _sight(config, i)
        plan = plans[window, causal]
        out = attend(rows, pool.k[i], pool.v[i], table, segments, plan, causal=causal, window=window)
        return out.reshape(q.shape), pool

    return attend_layer


def propose(
    drafter: Drafter,
    vocabulary: Vocabulary,
    config: DrafterConfig,
    pool: kv.Pool,
    anchor: Int[Array, " r"],
    position: Int[Array, " r"],
    table: Int[Array, "r p"],
    sampling: RowSampling,
    *,
    block_size: int,
    sampled: bool,
    filtered: bool,
    keep_q: bool,
    attention: Backend = "xla",
    adjust: Adjust | None = None,
) -> tuple[Proposal, kv.Pool | None]:
    """Drafts `block_size` tokens a row (DSpark, equations 4 to 7; without heads, DFlash).

    Greedy rows draft by argmax, coupled rows with the target's own noise, the rest from q. adjust: the logits as
    the target will have them changed, given the tokens of the block so far; None leaves them alone.
    """
    hidden, written = block_hidden(
        drafter, vocabulary, config, pool, anchor, position, table, block_size, attention
    )
    base = vocabulary.head.attend(hidden)
    if drafter.vocab_mask is not None:
        base = base + drafter.vocab_mask[...].astype(base.dtype)[None, None, :]
    markov, head = drafter.markov, drafter.confidence
    with_markov = config.confidence == "hidden+markov"
    state = jnp.zeros(()) if markov is None else markov.start(anchor.shape[0])
    previous, tokens, confidence, log_q = anchor, [], [], []
    for k in range(block_size):
        logits = base[:, k]
        if markov is not None:
            state, bias = markov(state, hidden[:, k], previous)
            logits = logits + bias
        if head is not None:
            feature = markov.embed(previous) if markov is not None and with_markov else None
            confidence.append(head(hidden[:, k], feature))
        if adjust is not None:
            logits = adjust(logits, tokens)
        q = log_probs(logits, sampling, filtered=filtered) if sampled else logits
        previous = draft_token(q, sampling, position, k, sampled=sampled)
        tokens.append(previous)
        log_q.append(q)
    proposal = Proposal(
        tokens=jnp.stack(tokens, axis=1),
        confidence=jnp.stack(confidence, axis=1) if head is not None else jnp.full(hidden.shape[:2], jnp.inf),
        log_q=jnp.stack(log_q, axis=1) if keep_q else None,
    )
    return proposal, written


def inject(
    drafter: Drafter, config: DrafterConfig, pool: kv.Pool, features: Float[Array, "t f"], batch: Batch
) -> kv.Pool:
    """KV injection (DFlash, equation 3): features of the packed rows → draft keys and values, same slots."""
    b = config.backbone
    context = drafter.context(features)
    rotary = Rotary(b.rope, b.head_dim, b.max_position, batch.positions)
    for i in range(b.num_layers):
        k, v = drafter.layers.layer(i).attn.keys_values(context, rotary)
        pool = pool.write(i, batch.page, batch.offset, k, v)
    return pool
