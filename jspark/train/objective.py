"""The DSpark objective (arXiv 2607.05147, equations 8 to 12), and DFlash's as a part of it.

Knows: cross-entropy, total variation and confidence losses of drafted blocks, their weights and figures, and how
to take them through a large vocabulary in chunks. Does not know: attention, optimisers, where blocks come from.

The vocabulary is where training spends its time and memory: [rows, V] logits of drafter and target. They exist
for one chunk of blocks at a time, and the chunk's gradients are taken in the same visit, so that no logits are
computed a second time in the backward pass; what is left for it is a product with the incoming gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark.models.heads import ConfidenceHead, MarkovHead
from jspark.models.layers import Embed, Head


@dataclass(frozen=True)
class Weights:
    """Of the losses, and the decay of positions: w_k = exp(−(k − 1)/decay). soft: cross-entropy against the whole
    distribution of the target, EAGLE-3's."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    soft: float = 0.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """What the losses of blocks need.

    hidden: of the drafter. taught: the target's final hidden states at the rows whose logits the drafted tokens
    are judged by. previous: the token before each drafted one. weight: 0 where there is nothing to predict, else
    w_k.
    """

    hidden: Float[Array, "b n g h"]
    taught: Float[Array, "b n g h"]
    previous: Int[Array, "b n g"]
    target: Int[Array, "b n g"]
    weight: Float[Array, "b n g"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """The trainable parts after the backbone; None where the drafter has none. with_markov: whether the confidence
    head reads W1[x_{k−1}]."""

    markov: MarkovHead | None
    confidence: ConfidenceHead | None


def gather_blocks(
    hidden: Float[Array, "b n g h"],
    taught: Float[Array, "b s h"],
    tokens: Int[Array, "b s"],
    usable: Array,
    anchors: Int[Array, "b n"],
    keep: Array,
    decay: float,
) -> Blocks:
    """Rows of every block: position k predicts the token at anchor + k, judged by the target's row before it.

    usable: [b, s], tokens that may be predicted; a block ends at the first that may not be (or at another
    conversation, whose tokens the caller has made unusable).
    """
    size, count, gamma, _ = hidden.shape
    length = tokens.shape[1]
    offsets = jnp.arange(gamma, dtype=jnp.int32)
    place = anchors[:, :, None] + offsets[None, None]
    inside = place + 1 < length
    place = jnp.minimum(place, length - 1)
    after = jnp.minimum(place + 1, length - 1)

    def at(values: Array, index: Array) -> Array:
        flat = index.reshape(size, count * gamma)
        if values.ndim == 3:
            return jnp.take_along_axis(values, flat[:, :, None], axis=1).reshape(size, count, gamma, -1)
        return jnp.take_along_axis(values, flat, axis=1).reshape(size, count, gamma)

    good = jnp.cumprod((at(usable, after) & inside & keep[:, :, None]).astype(jnp.float32), axis=2)
    return Blocks(
        hidden=hidden,
        taught=at(taught, place),
        previous=at(tokens, place),
        target=at(tokens, after),
        weight=good * jnp.exp(-offsets.astype(jnp.float32) / decay)[None, None],
    )


def _before_vocabulary(
    heads: Heads, hidden: Array, previous: Array, with_markov: bool
) -> tuple[Array | None, Array | None]:
    """W2's inputs [r, g, k] and confidence logits [r, g]: what depends on the heads' small parts."""
    rows, gamma = previous.shape
    mixed = raw = features = None
    if heads.markov is not None:
        state, each = heads.markov.start(rows), []
        for k in range(gamma):
            state, e = heads.markov.mix(state, hidden[:, k], previous[:, k])
            each.append(e)
        mixed = jnp.stack(each, axis=1)
        if with_markov:
            features = heads.markov.embed(previous).reshape(rows * gamma, -1)
    if heads.confidence is not None:
        raw = heads.confidence(hidden.reshape(rows * gamma, -1), features).reshape(rows, gamma)
    return mixed, raw


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    """Losses of rows [r, g], and the gradient of their weighted sum with respect to the logits."""

    ce: Array
    distance: Array
    soft: Array
    by_logits: Array


def _rows(logits: Array, taught: Array, target: Array, w: Weights) -> _Rows:
    """The losses that look at whole distributions; logits and taught: float32 [r, g, v].

    Written out rather than differentiated: every visit of arrays of this size counts. There are four (maxima,
    sums, distances, gradient), and the probabilities are made anew in each instead of being stored.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_y = jax.nn.logsumexp(taught, axis=-1, keepdims=True)
    q, p = jnp.exp(logits - log_z), jnp.exp(taught - log_y)
    distance = jnp.sum(jnp.abs(q - p), axis=-1)
    lean = jnp.sum(q * jnp.sign(q - p), axis=-1, keepdims=True)
    soft = log_z[..., 0] - jnp.sum(p * logits, axis=-1) if w.soft else jnp.zeros_like(distance)
    ce = log_z[..., 0] - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    # Else the compiler stores q and p for the last visit.
    logits, taught = jax.lax.optimization_barrier((logits, taught))
    q, p = jnp.exp(logits - log_z), jnp.exp(taught - log_y)
    hit = jnp.arange(logits.shape[-1], dtype=target.dtype)[None, None] == target[..., None]
    by_logits = w.ce * (q - hit.astype(q.dtype)) + w.tv * q * (jnp.sign(q - p) - lean)
    if w.soft:
        by_logits = by_logits + w.soft * (q - p)
    return _Rows(ce, distance, soft, by_logits)


def _matrix(head: Embed | Head) -> Float[Array, "v h"]:
    return head.embedding[...] if isinstance(head, Embed) else head.kernel[...].T


def chunk_gradients(
    heads: Heads,
    hidden: Array,
    blocks: Blocks,
    draft_head: Embed | Head,
    target_head: Embed | Head,
    w: Weights,
    with_markov: bool,
) -> tuple[Float[Array, ""], dict[str, Array], Heads, Array]:
    """Σ over rows of w_k (0.1·CE + 0.9·‖q − p‖₁ + 1.0·BCE), sums for the figures, and the gradients of the loss
    with respect to `heads` and `hidden`."""
    shape = hidden.shape
    hidden, blocks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (hidden, blocks))
    dtype, width, weight = hidden.dtype, hidden.shape[-1], blocks.weight
    (mixed, raw), back = jax.vjp(
        lambda heads, hidden: _before_vocabulary(heads, hidden, blocks.previous, with_markov), heads, hidden
    )
    # One product for U_k + B: the low-rank factor stands beside the output projection.
    matrix, inputs = _matrix(draft_head), hidden
    if heads.markov is not None and mixed is not None:
        matrix = jnp.concatenate([matrix, heads.markov.w2[...].T], axis=1)
        inputs = jnp.concatenate([hidden, mixed], axis=-1)
    logits = jnp.einsum("rgc,vc->rgv", inputs, matrix, preferred_element_type=jnp.float32)
    rows = _rows(logits, target_head.attend(blocks.taught), blocks.target, w)

    accept = 1 - 0.5 * rows.distance
    total = w.ce * rows.ce + w.tv * rows.distance + w.soft * rows.soft
    real = (weight > 0).astype(jnp.float32)
    sums = {
        "ce": jnp.sum(weight * rows.ce),
        "tv": jnp.sum(weight * rows.distance),
        "weight": jnp.sum(weight),
        "accept": jnp.sum(real * accept, axis=0),
        "rows": jnp.sum(real, axis=0),
        "tau": jnp.sum(jnp.cumprod(accept * real, axis=1)),
        "blocks": jnp.sum(real[:, 0]),
    }
    by_raw = None
    if raw is not None:
        bce = jax.nn.softplus(raw) - accept * raw
        total = total + w.confidence * bce
        sure = jax.nn.sigmoid(raw)
        by_raw = w.confidence * weight * (sure - accept)
        sums |= {
            "confidence": jnp.sum(weight * bce),
            "confidence_error": jnp.sum(weight * jnp.abs(sure - accept)),
            "confidence_bias": jnp.sum(weight * (sure - accept)),
            "survival_bias": jnp.sum(weight * (jnp.cumprod(sure, axis=1) - jnp.cumprod(accept, axis=1))),
        }

    # Rounded before its products: a float32 operand of this size would halve their rate.
    by_logits = (weight[..., None] * rows.by_logits).astype(dtype)
    by_inputs = jnp.einsum("rgv,vc->rgc", by_logits, matrix)
    by_mixed = None if heads.markov is None else by_inputs[..., width:]
    by_heads, by_hidden = back((by_mixed, by_raw))
    if heads.markov is not None:
        by_w2 = jnp.einsum("rgk,rgv->kv", mixed, by_logits)
        held = by_heads.markov.w2
        held.set_value(held.get_value() + by_w2)
    by_hidden = (by_hidden + by_inputs[..., :width]).reshape(shape)
    return jnp.sum(weight * total), sums, by_heads, by_hidden


def summed_loss(
    heads: Heads,
    blocks: Blocks,
    draft_head: Embed | Head,
    target_head: Embed | Head,
    w: Weights,
    *,
    with_markov: bool,
    chunk: int,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of all blocks, about `chunk` of them at a time; gradients go to `heads` and to `blocks.hidden`.

    The two output projections are frozen: they get none. Divide by the sum of weights for the mean.
    """

    def forward(heads: Heads, hidden: Array, rest: Blocks) -> tuple[Any, Any]:
        # Along the blocks of a sequence: a batch that is spread over devices stays where it is.
        batch, count = hidden.shape[:2]
        size = max(d for d in range(1, count + 1) if count % d == 0 and (d == 1 or d * batch <= chunk))

        def pieces(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(batch, count // size, size, *x.shape[2:]), 1, 0)

        cut = jax.tree.map(pieces, (hidden, rest))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), heads)

        def visit(carry, piece):
            loss, gradient = carry
            hidden, rest = piece
            own, sums, by_heads, by_hidden = chunk_gradients(
                heads, hidden, rest, draft_head, target_head, w, with_markov
            )
            gradient = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), gradient, by_heads)
            return (loss + own, gradient), (sums, by_hidden)

        (loss, by_heads), (sums, by_hidden) = jax.lax.scan(visit, (jnp.zeros(()), zero), cut)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        return (loss, sums), (by_heads, jnp.moveaxis(by_hidden, 0, 1).reshape(hidden.shape))

    @jax.custom_vjp
    def whole(heads: Heads, hidden: Array, rest: Blocks) -> tuple[Array, dict[str, Array]]:
        return forward(heads, hidden, rest)[0]

    def backward(kept, incoming):
        scale = incoming[0]
        by_heads, by_hidden = kept
        by_heads = jax.tree.map(lambda g, x: (g * scale).astype(x.dtype), by_heads, heads)
        return by_heads, by_hidden * scale.astype(by_hidden.dtype), None

    whole.defvjp(forward, backward)
    return whole(heads, blocks.hidden, blocks)


def figures(sums: dict[str, Array], w: Weights) -> dict[str, Array]:
    """Means of one step: losses, acceptance by position (teacher-forced, 1 − TV), accept length with the bonus."""
    weight = jnp.maximum(sums["weight"], 1e-6)
    rows = jnp.maximum(sums["rows"], 1e-6)
    out = {
        "ce": sums["ce"] / weight,
        "tv": sums["tv"] / weight,
        "accept": sums["accept"] / rows,
        "accept_length": 1 + sums["tau"] / jnp.maximum(sums["blocks"], 1.0),
    }
    if "confidence" in sums:
        out["confidence"] = sums["confidence"] / weight
        for name in ("confidence_error", "confidence_bias", "survival_bias"):
            out[name] = sums[name] / weight
    return out
