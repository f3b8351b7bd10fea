"""The target's forward over one packed buffer.

Knows: how layers, rotary embedding, paged attention and the KV pool fit together, and which hidden states the
drafter wants.
Does not know: which rows are drafts or prompts, and what is accepted (accept.py).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jspark import kv
from jspark.batch import Batch
from jspark.config import DecoderConfig
from jspark.models.decoder import Decoder
from jspark.models.layers import Rotary
from jspark.pallas.ragged_attention import (
    REFERENCE,
    Attention,
    Backend,
    HeadShape,
    Segments,
    attend,
    make_plan,
    ragged_attention,
)


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
    attention: Attention = REFERENCE,
) -> tuple[Float[Array, "t h"], Float[Array, "t f"] | None, kv.Pool]:
    """Runs every packed row through the target and writes its keys and values.

    Returns the output of the last layer, the outputs of `feature_layers` side by side (layer id l: after layer
    l; −1: the embedding; None when no layer is asked for), and the pool.
    """
    rotary = Rotary(config.rope, config.head_dim, config.max_position, batch.positions)
    x = decoder.embed(batch.tokens)
    outputs = {-1: x}
    attend_layer = _attention(attention, config, pool, batch, x.dtype.name)
    for i in range(config.num_layers):
        layer = decoder.layers.layer(i)
        q, k, v = layer.qkv(x, rotary)
        pool = pool.write(i, batch.page, batch.offset, k, v)
        attended = attend_layer(q, pool.k[i], pool.v[i], config.window(i))
        x = outputs[i] = layer.finish(x, attended)
    features = jnp.concatenate([outputs[i] for i in feature_layers], axis=-1) if feature_layers else None
    return x, features, pool


def _attention(
    attention: Attention, config: DecoderConfig, pool: kv.Pool, batch: Batch, dtype: str
) -> Callable[[Array, Array, Array, int | None], Array]:
    """(queries, keys, values, window) → what the packed rows of `batch` attend to; plans are made once, here."""
    if not attention.kernels:
        return lambda q, k, v, window: ragged_attention(
            q, k, v, batch.table, batch.positions, batch.tiles, window=window
        )
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, pool.k[0].shape[2], dtype)
    first, total = batch.verify_tokens, batch.tokens.shape[0]
    parts: list[tuple[Backend, Segments, slice, int]]
    parts = [(attention.verify, batch.verify, slice(0, first), first)]
    if batch.prefill is not None:
        parts.append((attention.prefill, batch.prefill, slice(first, total), total - first))
    windows = {config.window(i) for i in range(config.num_layers)}
    plans = {
        window: [
            make_plan(backend, segments, heads, tokens=tokens, causal=True, window=window)
            for backend, segments, _, tokens in parts
        ]
        for window in windows
    }

    def attend_layer(q: Array, k: Array, v: Array, window: int | None) -> Array:
        out = [
            attend(q[rows], k, v, batch.table, segments, plan, causal=True, window=window)
            for (_, segments, rows, _), plan in zip(parts, plans[window], strict=True)
        ]
        return out[0] if len(out) == 1 else jnp.concatenate(out)

    return attend_layer
