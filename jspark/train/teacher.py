"""The frozen target's side of training: features and final hidden states of packed sequences, on the fly.

Knows: one forward over whole sequences, conversations apart from each other. Does not know: drafters, losses.
Nothing of it is ever written to disk, and no logits are made here: the objective takes them where it needs them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jspark.config import DecoderConfig
from jspark.models.decoder import Decoder
from jspark.models.layers import Block, Rotary
from jspark.train.attention import Implementation, attend
from jspark.train.pipeline import Batch


def causal(segments: Int[Array, "b s"]) -> Bool[Array, "b 1 s s"]:
    """Who sees whom: earlier tokens of the same conversation and oneself; padding sees itself."""
    length = segments.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)
    same = segments[:, :, None] == segments[:, None, :]
    return (same & (place[:, None] >= place[None, :])[None])[:, None]


def teach(
    decoder: Decoder,
    config: DecoderConfig,
    batch: Batch,
    feature_layers: tuple[int, ...],
    how: Implementation,
) -> tuple[Float[Array, "b s f"], Float[Array, "b s h"]]:
    """Outputs of `feature_layers` side by side, and the final-norm hidden states, without gradients.

    The layers run in a scan where their weights are stacked: one compiled layer, and its copies of weights cost
    nothing beside a whole batch of tokens.
    """
    rotary = Rotary(config.rope, config.head_dim, config.max_position, batch.positions)
    mask = causal(batch.segments)
    x = decoder.embed(batch.tokens)
    slots = {layer: i for i, layer in enumerate(feature_layers)}
    kept = jnp.zeros((len(feature_layers), *x.shape), x.dtype)
    if -1 in slots:
        kept = kept.at[slots[-1]].set(x)

    def layer(carry, inputs):
        x, kept = carry
        block, slot, window = inputs
        q, k, v = block.qkv(x, rotary)
        seen = mask & (distance < window) if config.windows else mask
        x = block.finish(x, attend(q, k, v, seen, how))
        # A slot beyond the last is dropped.
        return (x, kept.at[slot].set(x, mode="drop")), None

    numbers = range(config.num_layers)
    where = jnp.asarray([slots.get(i, len(feature_layers)) for i in numbers], jnp.int32)
    windows = jnp.asarray([config.window(i) or config.max_position for i in numbers], jnp.int32)
    distance = (batch.positions[:, :, None] - batch.positions[:, None])[:, None]
    blocks = decoder.layers.blocks
    if isinstance(blocks, Block):
        (x, kept), _ = jax.lax.scan(layer, (x, kept), (blocks, where, windows))
    else:
        for i in numbers:
            (x, kept), _ = layer((x, kept), (decoder.layers.layer(i), where[i], windows[i]))
    features = jnp.moveaxis(kept, 0, 2).reshape(*x.shape[:2], -1)
    return jax.lax.stop_gradient((features, decoder.norm(x)))


def choose_anchors(key: Array, batch: Batch, count: int) -> tuple[Int[Array, "b n"], Bool[Array, "b n"]]:
    """`count` random anchors a sequence without replacement, in order, and which of them are real.

    An anchor is an answer's token whose successor is one too: what an engine drafts from.
    """
    follows = jnp.pad(batch.mask[:, 1:] & (batch.segments[:, 1:] == batch.segments[:, :-1]), ((0, 0), (0, 1)))
    score = jnp.where(batch.mask & follows, jax.random.uniform(key, batch.mask.shape), -1.0)
    best, index = jax.lax.top_k(score, count)
    order = jnp.argsort(jnp.where(best >= 0, index, batch.mask.shape[1] + index), axis=1)
    index = jnp.take_along_axis(index, order, axis=1).astype(jnp.int32)
    return index, jnp.take_along_axis(best, order, axis=1) >= 0
