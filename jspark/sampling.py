"""Target and draft distributions of a row, and the noise that tokens are drawn with.

Knows: temperature, top-k, top-p and min-p, and how each draw is keyed by seed, position and purpose.
Does not know: models, windows or acceptance (accept.py); where the sampling parameters come from.

Two samplers share the filters. *Coupled*: the noise of a token is keyed by its absolute position alone, so
that drafter and target use the same and the output is the seed's plain decoding whatever was drafted.
*Rejection*: every draw is keyed by the block's anchor, the offset in the block and the purpose, never by the
drawn position alone; else the discarded tail of one block would share its noise with a later block, and a
budget made from that tail would look ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

# Purposes: what a draw is for. They are part of what a seed means, so their values never change.
COUPLED = 0
DRAFT = 1
ACCEPT = 2
RESIDUAL = 3
BONUS = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters on the device, one entry a row (any leading shape).

    temperature: 0 is greedy and leaves the other fields unread. top_k: 0, or the vocabulary's size and more,
    is off. top_p: 1 is off. min_p: 0 is off. seed: of the request. coupled: the coupled sampler instead of
    rejection.
    """

    temperature: Float[Array, "*r"]
    top_k: Int[Array, "*r"]
    top_p: Float[Array, "*r"]
    min_p: Float[Array, "*r"]
    seed: UInt[Array, "*r"]
    coupled: Bool[Array, "*r"]

    @property
    def greedy(self) -> Bool[Array, "*r"]:
        """Rows that take the argmax."""
        return self.temperature <= 0

    def take(self, index: Int[Array, "*n"]) -> RowSampling:
        """The rows at `index` of the first axis."""
        return jax.tree.map(lambda field: field[index], self)


def log_probs(logits: Float[Array, "*r v"], rows: RowSampling, *, filtered: bool) -> Float[Array, "*r v"]:
    """log p of every token, float32: temperature, then top-k, then top-p over what is left, then min-p.

    The fields of `rows` may have fewer axes than `logits` has before v; they then hold for all further axes
    ([r] with [r, w, v]). Filtered-out tokens get −inf and the rest is normalised. top-k keeps a token when
    fewer than k are strictly larger, top-p when the mass of the strictly larger ones is below p (so all
    tokens tied with the last one kept stay), min-p when its probability is at least min_p times the largest.
    The argmax always stays. Greedy rows get the plain distribution at temperature 1. `filtered` False
    promises that no row uses a filter and leaves the filters out of the program.
    """
    wide = jax.tree.map(lambda field: field.reshape(field.shape + (1,) * (logits.ndim - field.ndim)), rows)
    z = logits.astype(jnp.float32)
    # The maximum goes first: a tiny temperature then drives the others to −inf and never makes inf − inf.
    z = (z - jnp.max(z, axis=-1, keepdims=True)) / jnp.where(wide.greedy, 1.0, wide.temperature)
    if not filtered:
        return jax.nn.log_softmax(z)

    key = _ordered(z)
    top_k_off = wide.greedy | (wide.top_k <= 0) | (wide.top_k >= z.shape[-1])
    limit = jnp.where(top_k_off, jnp.inf, wide.top_k.astype(jnp.float32))
    z = jnp.where(key >= _threshold(key, jnp.ones_like(z), limit), z, -jnp.inf)

    limit = jnp.where(wide.greedy | (wide.top_p >= 1), jnp.inf, wide.top_p)
    z = jnp.where(key >= _threshold(key, jax.nn.softmax(z), limit), z, -jnp.inf)

    floor = jnp.where(wide.greedy, -jnp.inf, jnp.minimum(jnp.log(wide.min_p), 0.0))
    return jax.nn.log_softmax(jnp.where(z >= floor, z, -jnp.inf))


def _ordered(x: Float[Array, "*r v"]) -> Int[Array, "*r v"]:
    """int32 in the order of the floats, with −0 equal to 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _threshold(
    key: Int[Array, "*r v"], weight: Float[Array, "*r v"], limit: Float[Array, "*#r 1"]
) -> Int[Array, "*r 1"]:
    """The smallest t at which the tokens with key > t weigh less than `limit`; at most the largest key.

    Bisection over all of int32: exact after 32 passes, and cheaper than a sort.
    """

    def halve(_, bounds):
        low, high = bounds  # the answer is in (low, high]
        middle = (low & high) + ((low ^ high) >> 1)  # the average, without overflow
        above = jnp.sum(jnp.where(key > middle, weight, 0.0), axis=-1, keepdims=True)
        enough = above < limit
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    high = jnp.max(key, axis=-1, keepdims=True)
    low = jnp.full_like(high, jnp.iinfo(jnp.int32).min)
    return jax.lax.fori_loop(0, 32, halve, (low, high))[1]


def gumbel(
    seed: UInt[Array, "*#r"],
    position: Int[Array, "*#r"],
    offset: Int[Array, "*#r"] | int,
    purpose: Int[Array, "*#r"] | int,
    vocab: int,
) -> Float[Array, "*r v"]:
    """Gumbel(0, 1) noise for `vocab` tokens a key; the keys broadcast against each other.

    The high dynamic range: the default stops at about 16, which a vocabulary of 150,000 reaches (log V is
    12).
    """
    return _keyed(lambda k: jax.random.gumbel(k, (vocab,), mode="high"), seed, position, offset, purpose)


def coupled_gumbel(seed: UInt[Array, "*#r"], position: Int[Array, "*#r"], vocab: int) -> Float[Array, "*r v"]:
    """The coupled sampler's noise for the token at absolute position `position`."""
    return gumbel(seed, position, 0, COUPLED, vocab)


def uniform(
    seed: UInt[Array, "*#r"],
    position: Int[Array, "*#r"],
    offset: Int[Array, "*#r"] | int,
    purpose: Int[Array, "*#r"] | int,
) -> Float[Array, "*r"]:
    """A uniform number in [0, 1) a key; the keys broadcast against each other."""
    return _keyed(lambda k: jax.random.uniform(k), seed, position, offset, purpose)


def _keyed(draw, seed, position, offset, purpose):
    index = (jnp.asarray(part, jnp.int32) for part in (position, offset, purpose))
    parts = jnp.broadcast_arrays(seed, *index)

    def one(seed, position, offset, purpose):
        key = jax.random.key(seed, impl="threefry2x32")
        for part in (position, offset, purpose):
            key = jax.random.fold_in(key, part)
        return draw(key)

    flat = jax.vmap(one)(*(part.reshape(-1) for part in parts))
    return flat.reshape(parts[0].shape + flat.shape[1:])


def draft_token(
    log_q: Float[Array, "r v"],
    rows: RowSampling,
    anchor_position: Int[Array, " r"],
    offset: int | Int[Array, ""],
    *,
    sampled: bool,
) -> Int[Array, " r"]:
    """The drafted token at `offset` (0..γ−1) of the block whose anchor is at absolute position
    `anchor_position`.

    `sampled` False promises that every row is greedy and leaves the noise out of the program.
    """
    if not sampled:
        return jnp.argmax(log_q, axis=-1).astype(jnp.int32)
    position = jnp.where(rows.coupled, anchor_position + 1 + offset, anchor_position)
    noise = gumbel(
        rows.seed,
        position,
        jnp.where(rows.coupled, 0, offset),
        jnp.where(rows.coupled, COUPLED, DRAFT),
        log_q.shape[-1],
    )
    noise = jnp.where(rows.greedy[:, None], 0.0, noise)
    return jnp.argmax(log_q + noise, axis=-1).astype(jnp.int32)
