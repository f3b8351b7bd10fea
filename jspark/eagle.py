"""EAGLE-3's two jobs: draft a chain (propose), and take in what the target saw (inject).

Knows: which token a feature is paired with, the chain over paged context, and the one hidden state a request
carries from step to step. Does not know: what is verified or accepted, or the model's inside (models/eagle3.py).

The cache holds an entry a position, as the target's does. The entry of position i needs token i + 1, so it is
written when that token is committed: after acceptance, with the features of the same step. The entry before the
anchor is the last one, and its output, which predicts the token after the anchor, is what the request carries.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark import kv
from jspark.batch import Batch
from jspark.config import DrafterConfig
from jspark.models.eagle3 import Eagle3
from jspark.models.layers import Rotary, Vocabulary
from jspark.pallas.ragged_attention import Tiles, ragged_attention
from jspark.pallas.ragged_attention.reference import block_attention
from jspark.propose import Adjust, Proposal
from jspark.sampling import RowSampling, draft_token, log_probs
from jspark.state import Prefill


def propose(
    drafter: Eagle3,
    vocabulary: Vocabulary,
    config: DrafterConfig,
    pool: kv.Pool,
    carried: Float[Array, "r h"],
    position: Int[Array, " r"],
    table: Int[Array, "r p"],
    sampling: RowSampling,
    *,
    block_size: int,
    sampled: bool,
    filtered: bool,
    keep_q: bool,
    adjust: Adjust | None = None,
) -> tuple[Proposal, None]:
    """Drafts `block_size` tokens a row, one after the other (EAGLE-3, section 3.1); see propose.propose.

    carried: what `inject` returned for the row. The chain's own keys and values are dropped afterwards, and never
    written.
    """
    tokens, log_q, output = [], [], carried
    chain: list[list[tuple[Array, Array]]] = [[] for _ in range(config.backbone.num_layers)]
    for k in range(block_size):
        if k:
            output = chain_step(drafter, vocabulary, config, pool, output, tokens[-1], position, table, chain)
        logits = drafter.logits(vocabulary, output)
        if adjust is not None:
            logits = adjust(logits, tokens)
        q = log_probs(logits, sampling, filtered=filtered) if sampled else logits
        tokens.append(draft_token(q, sampling, position, k, sampled=sampled))
        log_q.append(q)
    drafts = jnp.stack(tokens, axis=1)
    proposal = Proposal(
        tokens=drafts,
        confidence=jnp.full(drafts.shape, jnp.inf),
        log_q=jnp.stack(log_q, axis=1) if keep_q else None,
    )
    return proposal, None


def chain_step(
    drafter: Eagle3,
    vocabulary: Vocabulary,
    config: DrafterConfig,
    pool: kv.Pool,
    output: Float[Array, "r h"],
    token: Int[Array, " r"],
    position: Int[Array, " r"],
    table: Int[Array, "r p"],
    chain: list[list[tuple[Array, Array]]],
) -> Float[Array, "r h"]:
    """The next slot's output, given the last one's and the token it predicted.

    chain: keys and values of the slots before in this chain, by layer; the new slot's are added to it.
    """
    b = config.backbone
    slot = position[:, None] + len(chain[0])
    rotary = Rotary(b.rope, b.head_dim, b.max_position, slot)

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        chain[i].append((k, v))
        keys, values = (jnp.concatenate(parts, axis=1) for parts in zip(*chain[i], strict=True))
        return block_attention(q, keys, values, pool.k[i], pool.v[i], table, position, window=b.window(i))

    hidden = drafter.feedback(output)[:, None]
    return drafter(vocabulary.embed(token[:, None]), hidden, rotary, attend)[:, 0]


def inject(
    drafter: Eagle3,
    vocabulary: Vocabulary,
    config: DrafterConfig,
    pool: kv.Pool,
    features: Float[Array, "t f"],
    batch: Batch,
    committed: Int[Array, "r w"],
    count: Int[Array, " r"],
    prefill: Prefill | None,
) -> tuple[kv.Pool, Float[Array, "r h"]]:
    """Features of the packed rows, each with the token after it → entries of the cache, same slots.

    committed, count: what the step commits. Returns the pool, and for each row the output of its last entry,
    to be carried; anything where nothing was committed. Entries of rows whose next token is not known are
    written too: they are behind the new anchor, and a later step writes them before anything reads them.
    """
    b, rows = config.backbone, features.shape[0]
    following = jnp.zeros(rows, jnp.int32).at[batch.index].set(jnp.maximum(committed, 0), mode="drop")
    if prefill is not None:
        assert prefill.following is not None
        following = following.at[rows - prefill.tokens.shape[0] :].set(prefill.following)
    last = jnp.take_along_axis(batch.index, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.minimum(last, rows - 1)
    every = jnp.arange(count.shape[0], dtype=jnp.int32)

    embedded, x = vocabulary.embed(following), drafter.fuse(features)
    positions, tiles = batch.positions, batch.tiles
    rotary = Rotary(b.rope, b.head_dim, b.max_position, positions)
    for i, block in enumerate(drafter.layers):
        y, residual = drafter.inputs(i, embedded, x)
        k, v = block.attn.keys_values(y, rotary)
        pool = pool.write(i, batch.page, batch.offset, k, v)
        if i == b.num_layers - 1:
            # Nothing reads the last layer's output but what is carried.
            y, residual, positions = y[last], residual[last], positions[last]
            rotary = Rotary(b.rope, b.head_dim, b.max_position, positions)
            tiles = (Tiles(every[:, None], every),)
        q = block.attn.queries(y, rotary)
        seen = ragged_attention(q, pool.k[i], pool.v[i], batch.table, positions, tiles, window=b.window(i))
        x = block.finish(residual, seen)
    return pool, x
