"""The target's forward over one packed buffer.

Knows: how layers, rotary embedding, paged attention and the KV pool fit together, and which hidden states the
drafter wants.
Does not know: which rows are drafts or prompts, and what is accepted (accept.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jspark import kv
from jspark.batch import Batch
from jspark.config import DecoderConfig
from jspark.models.decoder import Decoder
from jspark.models.layers import Rotary
from jspark.pallas.ragged_attention import ragged_attention


def forward(
    decoder: Decoder,
    config: DecoderConfig,
    pool: kv.Pool,
    batch: Batch,
    *,
    logit_rows: int,
    feature_layers: tuple[int, ...] = (),
) -> tuple[Float[Array, "l v"], Float[Array, "t f"] | None, kv.Pool]:
    """Logits of the first `logit_rows` rows, float32; features and pool as `run_layers` returns them."""
    x, features, pool = run_layers(decoder, config, pool, batch, feature_layers=feature_layers)
    return head(decoder, x[:logit_rows]), features, pool


def head(decoder: Decoder, hidden: Float[Array, "l h"]) -> Float[Array, "l v"]:
    """Float32 logits of outputs of the last layer."""
    return decoder.vocabulary.head.attend(decoder.norm(hidden))


def run_layers(
    decoder: Decoder,
    config: DecoderConfig,
    pool: kv.Pool,
    batch: Batch,
    *,
    feature_layers: tuple[int, ...] = (),
) -> tuple[Float[Array, "t h"], Float[Array, "t f"] | None, kv.Pool]:
    """Runs every packed row through the target and writes its keys and values.

    Returns the output of the last layer, the outputs of `feature_layers` side by side (layer id l: after layer
    l; −1: the embedding; None when no layer is asked for), and the pool.
    """
    rotary = Rotary(config.rope, config.head_dim, config.max_position, batch.positions)
    x = decoder.embed(batch.tokens)
    outputs = {-1: x}
    keys, values = list(pool.k), list(pool.v)
    for i in range(config.num_layers):
        layer = decoder.layers.layer(i)
        q, k, v = layer.qkv(x, rotary)
        keys[i] = kv.write(keys[i], batch.page, batch.offset, k)
        values[i] = kv.write(values[i], batch.page, batch.offset, v)
        attended = ragged_attention(
            q, keys[i], values[i], batch.table, batch.positions, batch.tiles, window=config.window(i)
        )
        x = outputs[i] = layer.finish(x, attended)
    features = jnp.concatenate([outputs[i] for i in feature_layers], axis=-1) if feature_layers else None
    return x, features, kv.Pool(tuple(keys), tuple(values))
