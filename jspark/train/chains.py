"""EAGLE-3's forward in training: the training-time test (arXiv 2503.01840, section 3.2).

Knows: chains unrolled from their anchors on the drafter's own hidden states, and what each link sees.
Does not know: losses, or how anchors are chosen. The inference counterpart is eagle.py.

A chain starts at the slot before its anchor, whose hidden state comes from the target's features; every further
slot takes the output of the one before it, paired with the text's own token. As in inference, it sees the slots
with features up to its start, and its own.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark.config import DrafterConfig
from jspark.models.eagle3 import Eagle3
from jspark.models.layers import Embed, Rotary
from jspark.train.attention import Implementation, attend
from jspark.train.pipeline import Batch


def chain_hidden(
    drafter: Eagle3,
    embed: Embed,
    config: DrafterConfig,
    batch: Batch,
    features: Float[Array, "b s f"],
    anchors: Int[Array, "b n"],
    how: Implementation,
) -> Float[Array, "b n g h"]:
    """Final-norm hidden rows that predict positions anchor + 1 … anchor + γ of every chain."""
    b = config.backbone
    length, count = batch.tokens.shape[1], anchors.shape[1]
    fused = drafter.fuse(features)
    following = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    rotary = Rotary(b.rope, b.head_dim, b.max_position, batch.positions)
    y, _ = drafter.inputs(0, embed(following), fused)
    keys, values = ([x] for x in drafter.layers[0].attn.keys_values(y, rotary))

    start = jnp.maximum(anchors - 1, 0)
    mine = jnp.take_along_axis(batch.segments, anchors, axis=1)
    upto = jnp.arange(length, dtype=jnp.int32)[None, None] <= start[:, :, None]
    seen = upto & (batch.segments[:, None] == mine[:, :, None])
    own = jnp.broadcast_to(jnp.eye(count, dtype=bool)[None], (anchors.shape[0], count, count))
    masks = [seen]
    here = jnp.take_along_axis(batch.positions, anchors, axis=1) - 1
    x = jnp.take_along_axis(fused, start[:, :, None], axis=1)
    rows = []
    for k in range(config.block_size):

        def look(layer: int, q: Array, k_own: Array, v_own: Array, first: bool = k == 0) -> Array:
            # The first slot is one of those with features already.
            if not first:
                keys.append(k_own)
                values.append(v_own)
                masks.append(own)
            mask = jnp.concatenate(masks, axis=-1)[:, None]
            return attend(q, jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1), mask, how)

        place = jnp.minimum(anchors + k, length - 1)
        token = jnp.take_along_axis(batch.tokens, place, axis=1)
        x = drafter(embed(token), x, Rotary(b.rope, b.head_dim, b.max_position, here + k), look)
        rows.append(drafter.norm(x))
        x = drafter.feedback(x)
    return jnp.stack(rows, axis=2)
