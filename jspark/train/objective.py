"""The DSpark objective (arXiv 2607.05147, equations 8 to 12), and DFlash's as a part of it.

Knows: cross-entropy, total variation and confidence losses of drafted blocks, their weights and figures, and how to
take them through a large vocabulary in chunks. Does not know: attention, optimisers, or where blocks come from.

The vocabulary is where training spends its time and memory: [rows, V] logits of drafter and target. They exist for
one chunk of blocks at a time, and the chunk's gradients are taken in the same visit, so that no logits are computed
a second time in the backward pass; what is left for it is a multiplication by the incoming gradient.
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
    """Of the three losses, and the decay of positions: w_k = exp(−(k − 1)/decay)."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """What the losses of blocks need. hidden: of the drafter. taught: the target's final hidden states at the rows
    whose logits the drafted tokens are judged by. previous: the token before each drafted one. weight: 0 where there
    is nothing to predict, else w_k."""

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


@jax.custom_vjp
def _frozen_logits(x: Float[Array, "*r h"], head: Embed | Head) -> Float[Array, "*r v"]:
    """Float32 logits of a frozen projection. The incoming gradient is rounded to x's dtype before its product: a
    float32 operand of that size would halve the rate."""
    return head.attend(x)


def _frozen_logits_forward(x, head):
    return head.attend(x), (head, jnp.zeros((), x.dtype))


def _frozen_logits_backward(kept, incoming):
    head, like = kept
    incoming = incoming.astype(like.dtype)
    if isinstance(head, Embed):
        return jnp.einsum("...v,vh->...h", incoming, head.embedding[...]), None
    return jnp.einsum("...v,hv->...h", incoming, head.kernel[...]), None


_frozen_logits.defvjp(_frozen_logits_forward, _frozen_logits_backward)


@jax.custom_vjp
def _low_rank(e: Float[Array, "r g k"], w2: Float[Array, "k v"]) -> Float[Array, "r g v"]:
    """`MarkovHead.bias`, with the gradient rounded as in `_frozen_logits`."""
    return jnp.einsum("rgk,kv->rgv", e, w2, preferred_element_type=jnp.float32)


def _low_rank_forward(e, w2):
    return _low_rank(e, w2), (e, w2)


def _low_rank_backward(kept, incoming):
    e, w2 = kept
    incoming = incoming.astype(e.dtype)
    return jnp.einsum("rgv,kv->rgk", incoming, w2), jnp.einsum("rgk,rgv->kv", e, incoming)


_low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def chunk_loss(
    heads: Heads, hidden: Array, blocks: Blocks, draft_head: Embed | Head, target_head: Embed | Head, w: Weights,
    with_markov: bool,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Σ over rows of w_k (0.1·CE + 0.9·‖q − p‖₁ + 1.0·BCE), and sums for the figures."""
    hidden, blocks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (hidden, blocks))
    logits = _frozen_logits(hidden, draft_head)
    rows, gamma = blocks.previous.shape
    features = None
    if heads.markov is not None:
        state, mixed = heads.markov.start(rows), []
        for k in range(gamma):
            state, e = heads.markov.mix(state, hidden[:, k], blocks.previous[:, k])
            mixed.append(e)
        logits = logits + _low_rank(jnp.stack(mixed, axis=1), heads.markov.w2[...])
        if with_markov:
            features = heads.markov.embed(blocks.previous)
    log_q = jax.nn.log_softmax(logits)
    p = jax.lax.stop_gradient(jax.nn.softmax(target_head.attend(blocks.taught)))
    ce = -jnp.take_along_axis(log_q, blocks.target[..., None], axis=-1)[..., 0]
    distance = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)
    accept = jax.lax.stop_gradient(1 - 0.5 * distance)
    total = w.ce * ce + w.tv * distance
    weight = blocks.weight
    real = (weight > 0).astype(jnp.float32)
    sums = {
        "ce": jnp.sum(weight * ce),
        "tv": jnp.sum(weight * distance),
        "weight": jnp.sum(weight),
        "accept": jnp.sum(real * accept, axis=0),
        "rows": jnp.sum(real, axis=0),
        "tau": jnp.sum(jnp.cumprod(accept * real, axis=1)),
        "blocks": jnp.sum(real[:, 0]),
    }
    if heads.confidence is not None:
        flat = None if features is None else features.reshape(rows * gamma, -1)
        raw = heads.confidence(hidden.reshape(rows * gamma, -1), flat).reshape(rows, gamma)
        bce = jax.nn.softplus(raw) - accept * raw
        total = total + w.confidence * bce
        sure = jax.nn.sigmoid(raw)
        sums |= {
            "confidence": jnp.sum(weight * bce),
            "confidence_error": jnp.sum(weight * jnp.abs(sure - accept)),
            "confidence_bias": jnp.sum(weight * (sure - accept)),
            "survival_bias": jnp.sum(weight * (jnp.cumprod(sure, axis=1) - jnp.cumprod(accept, axis=1))),
        }
    return jnp.sum(weight * total), jax.lax.stop_gradient(sums)


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
    """`chunk_loss` over all blocks, about `chunk` at a time; gradients go to `heads` and to `blocks.hidden`.

    The two output projections are frozen: they get none. Divide by the sum of weights for the mean.
    """

    def one(heads: Heads, hidden: Array, rest: Blocks) -> tuple[Array, dict[str, Array]]:
        return chunk_loss(heads, hidden, rest, draft_head, target_head, w, with_markov)

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
            (own, sums), (by_heads, by_hidden) = jax.value_and_grad(one, argnums=(0, 1), has_aux=True)(
                heads, hidden, rest
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
    out["loss"] = w.ce * out["ce"] + w.tv * out["tv"]
    if "confidence" in sums:
        out["confidence"] = sums["confidence"] / weight
        out["loss"] = out["loss"] + w.confidence * out["confidence"]
        for name in ("confidence_error", "confidence_bias", "survival_bias"):
            out[name] = sums[name] / weight
    return out
