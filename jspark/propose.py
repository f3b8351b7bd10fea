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
from jspark.pallas.ragged_attention import Backend, HeadShape, block_attend, make_block_plan
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
) -> Float[Array, "r g h"]:
    """The final-norm hidden rows that predict positions position+1 … position+γ.

    The block is the anchor and masks, attends to all context before the anchor and both ways to itself
    (DFlash, section 4), within a window in layers that have one; its own keys and values are dropped afterwards.
    """
    rows = block_size if config.predicts_from_anchor else block_size + 1
    masks = jnp.full((anchor.shape[0], rows - 1), config.mask_token_id, jnp.int32)
    x = vocabulary.embed(jnp.concatenate([anchor[:, None], masks], axis=1))
    positions = position[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    b = config.backbone
    rotary = Rotary(b.rope, b.head_dim, b.max_position, positions)
    heads = HeadShape(b.num_heads, b.num_kv_heads, b.head_dim, pool.k[0].shape[2], x.dtype.name)
    windows = [b.window(i) for i in range(b.num_layers)]
    kinds = [(window, window is not None and config.causal_windows) for window in windows]
    plans = {
        (window, causal): make_block_plan(attention, position, rows, heads, window=window, causal=causal)
        for window, causal in set(kinds)
    }
    for i, (window, causal) in enumerate(kinds):
        layer = drafter.layers.layer(i)
        q, k, v = layer.qkv(x, rotary)
        plan = plans[window, causal]
        attended = block_attend(q, k, v, pool.k[i], pool.v[i], table, position, plan, window=window, causal=causal)
        x = layer.finish(x, attended)
    return drafter.norm(x[:, rows - block_size :])


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
) -> Proposal:
    """Drafts `block_size` tokens a row (DSpark, equations 4 to 7; without heads, DFlash).

    Greedy rows draft by argmax, coupled rows with the target's own noise, the rest from q. adjust: the logits as
    the target will have them changed, given the tokens of the block so far; None leaves them alone.
    """
    hidden = block_hidden(drafter, vocabulary, config, pool, anchor, position, table, block_size, attention)
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
    return Proposal(
        tokens=jnp.stack(tokens, axis=1),
        confidence=jnp.stack(confidence, axis=1) if head is not None else jnp.full(hidden.shape[:2], jnp.inf),
        log_q=jnp.stack(log_q, axis=1) if keep_q else None,
    )


def inject(
    drafter: Drafter, config: DrafterConfig, pool: kv.Pool, features: Float[Array, "t f"], batch: Batch
) -> kv.Pool:
    """KV injection (DFlash, equation 3): features of the packed rows → draft keys and values, same slots."""
    b = config.backbone
    context = drafter.context(features)
    rotary = Rotary(b.rope, b.head_dim, b.max_position, batch.positions)
    keys, values = list(pool.k), list(pool.v)
    for i in range(b.num_layers):
        k, v = drafter.layers.layer(i).attn.keys_values(context, rotary)
        keys[i] = kv.write(keys[i], batch.page, batch.offset, k)
        values[i] = kv.write(values[i], batch.page, batch.offset, v)
    return kv.Pool(tuple(keys), tuple(values))
