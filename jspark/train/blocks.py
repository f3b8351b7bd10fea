"""A block drafter's forward in training: many blocks at once, each from its own anchor.

Knows: which context a block sees, KV injection over a whole sequence, and blocks in groups so that attention is
dense inside a group. Does not know: losses, or how anchors are chosen.

The inference counterpart is propose.py; here the context's keys and values are made for all positions at once and
a mask cuts them off before each anchor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark.config import DrafterConfig
from jspark.models.drafter import Drafter
from jspark.models.layers import Embed, Rotary
from jspark.train.attention import Implementation, attend
from jspark.train.pipeline import Batch

#: Query rows a group: context keys are copied once a group, own keys of other blocks are masked out in it.
_GROUP_ROWS = 256


def block_hidden(
    drafter: Drafter,
    embed: Embed,
    config: DrafterConfig,
    batch: Batch,
    features: Float[Array, "b s f"],
    anchors: Int[Array, "b n"],
    how: Implementation,
    *,
    remat: bool = False,
) -> Float[Array, "b n g h"]:
    """Final-norm hidden rows that predict positions anchor + 1 … anchor + γ of every block.

    A block is the anchor and masks, sees its conversation before the anchor and itself both ways (DFlash,
    section 4; DSpark, section 3.3). remat: layers are computed again in the backward pass.
    """
    count, (size, length) = anchors.shape[1], batch.tokens.shape
    rows = config.block_rows
    blocks = _group(count, rows)
    groups = count // blocks
    width = blocks * rows

    context = drafter.context(features)
    b = config.backbone
    context_rotary = Rotary(b.rope, b.head_dim, b.max_position, batch.positions)
    here = jnp.take_along_axis(batch.positions, anchors, axis=1)
    offsets = jnp.arange(rows, dtype=jnp.int32)
    positions = (here[:, :, None] + offsets[None, None]).reshape(size, groups, width)
    block_rotary = Rotary(b.rope, b.head_dim, b.max_position, positions)

    first = jnp.take_along_axis(batch.tokens, anchors, axis=1)[:, :, None]
    masks = jnp.full((size, count, rows - 1), config.mask_token_id, jnp.int32)
    x = embed(jnp.concatenate([first, masks], axis=2).reshape(size, groups, width))

    # [b, groups, width, s + width]: before the anchor in the same conversation, then the own block.
    mine = jnp.take_along_axis(batch.segments, anchors, axis=1)
    before = jnp.arange(length, dtype=jnp.int32)[None, None] < anchors[:, :, None]
    seen = before & (batch.segments[:, None] == mine[:, :, None])
    seen = jnp.repeat(seen, rows, axis=1).reshape(size, groups, width, length)
    block = jnp.arange(width, dtype=jnp.int32) // rows
    own = jnp.broadcast_to(block[:, None] == block[None], (size, groups, width, width))
    mask = jnp.concatenate([seen, own], axis=-1).reshape(size * groups, 1, width, length + width)

    def spread(past: Array, own: Array) -> Array:
        """Context keys of the sequence before the block's own, a copy a group."""
        past = jnp.broadcast_to(past[:, None], (size, groups, *past.shape[1:]))
        return jnp.concatenate([past, own], axis=2).reshape(size * groups, length + width, *own.shape[3:])

    def layer(x, weights):
        past_k, past_v = weights.attn.keys_values(context, context_rotary)
        q, k, v = weights.qkv(x, block_rotary)
        flat = q.reshape(size * groups, width, *q.shape[3:])
        attended = attend(flat, spread(past_k, k), spread(past_v, v), mask, how)
        return weights.finish(x, attended.reshape(q.shape))

    run = jax.checkpoint(layer) if remat else layer
    for i in range(b.num_layers):
        x = run(x, drafter.layers.layer(i))
    hidden = drafter.norm(x).reshape(size, count, rows, -1)
    return hidden[:, :, rows - config.block_size :]


def _group(count: int, rows: int) -> int:
    """Blocks a group: the largest divisor of `count` that keeps a group within its rows."""
    return max(d for d in range(1, count + 1) if count % d == 0 and (d == 1 or d * rows <= _GROUP_ROWS))
