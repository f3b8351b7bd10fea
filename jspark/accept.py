"""Which tokens of a verified block are committed: exact acceptance, then stop tokens and length limits.

Knows: target logits, drafts, windows and sampling parameters of a step. Does not know: how windows were
chosen (they must not look ahead: whether a token is tested may depend on earlier tokens only), models,
caches.

Every rule commits the accepted drafts plus one token of the target's. The target's token at the end of a
window shorter than the draft is decided by the ordinary test on the next drafted token, which was not sent
but is at hand with its q: a block under a window is the fully verified block, cut short.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspark.sampling import ACCEPT, BONUS, RESIDUAL, RowSampling, coupled_gumbel, gumbel, log_probs, uniform

#: The smallest q that a test divides by, and the residual mass up to which the target itself is drawn from.
TINY = 1e-8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What a step commits.

    tokens: committed tokens, −1 after the last. count: how many, 0 to w. accepted: drafted tokens accepted
    within the window, before stops and limits. finished: the row ended in this step by a stop token or its
    limit. anchor_position: absolute position of the row's anchor after the step.
    """

    tokens: Int[Array, "r w"]
    count: Int[Array, " r"]
    accepted: Int[Array, " r"]
    finished: Bool[Array, " r"]
    anchor_position: Int[Array, " r"]


def accept_probability(p: Float[Array, "*r"], q: Float[Array, "*r"]) -> Float[Array, "*r"]:
    """The chance min(1, p/q) that a drafted token is kept: its probabilities under target and draft."""
    return jnp.minimum(p / jnp.maximum(q, TINY), 1.0)


def residual(p: Float[Array, "*r v"], q: Float[Array, "*r v"]) -> Float[Array, "*r v"]:
    """The distribution norm(max(p − q, 0)) that replaces a refused token; p where it has almost no mass."""
    rest = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > TINY, rest / jnp.maximum(mass, TINY), p)


def leading_accepts(passed: Bool[Array, "r g"], window: Int[Array, " r"]) -> Int[Array, " r"]:
    """How many tests passed before the first that failed, counting those within the window only."""
    within = jnp.arange(passed.shape[1])[None] < window[:, None]
    return jnp.sum(jnp.cumprod((passed & within).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def judge(
    logits: Float[Array, "r w v"],
    drafts: Int[Array, "r g"],
    log_q: Float[Array, "r g v"] | None,
    window: Int[Array, " r"],
    drafted: Int[Array, " r"],
    rows: RowSampling,
    anchor_position: Int[Array, " r"],
    *,
    sampled: bool,
    filtered: bool,
) -> tuple[Int[Array, "r w"], Int[Array, " r"], Int[Array, " r"]]:
    """Committed tokens (−1 after the last), their count in 1..w, and accepted drafts (count − 1); w = γ + 1.

    logits: the target's at offsets 0..γ from the anchor; those beyond a row's window may be anything, NaN
    too. drafts, log_q: the drafted tokens and the distributions that they were drawn from, as drawn. drafted:
    how many of them are valid, 0 or γ. window: how many were sent to the target, at most `drafted`. γ may be
    0: plain decoding.

    Greedy and coupled rows compute the target's own token at every offset and keep the drafts that equal it
    (Gumbel coupling: the token is what plain decoding with this seed emits). Rejection rows follow the DSpark
    paper's section on speculative decoding (arXiv 2607.05147) with the window rule of this module's heading,
    and draw from the target directly where nothing was drafted. log_q None promises no rejection row with
    drafts; one that is there all the same ignores its drafts, which is exact. `sampled` False promises greedy
    rows only, `filtered` False that no row uses a filter; what is promised away is not in the program.
    """
    target = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not sampled:
        return _committed(drafts, *_match(target, drafts, window))

    log_p = log_probs(logits, rows, filtered=filtered)
    rejection = ~rows.greedy & ~rows.coupled
    coupled = ~rows.greedy & rows.coupled
    # Noise for every offset and token is the dear part: it is skipped when no row of this step is coupled.
    target = jax.lax.cond(
        jnp.any(coupled),
        lambda: jnp.where(coupled[:, None], _coupled_tokens(log_p, rows, anchor_position), target),
        lambda: target,
    )
    accepted, last = _match(target, drafts, window)
    accepted, last = jax.lax.cond(
        jnp.any(rejection),
        lambda: jax.tree.map(
            lambda ours, theirs: jnp.where(rejection, ours, theirs),
            _reject(log_p, drafts, log_q, window, drafted, rows, anchor_position),
            (accepted, last),
        ),
        lambda: (accepted, last),
    )
    return _committed(drafts, accepted, last)


def _coupled_tokens(log_p, rows, anchor_position):
    """The token that plain decoding with the row's seed emits at every offset, [r, w]."""
    position = anchor_position[:, None] + 1 + jnp.arange(log_p.shape[1])[None]
    noise = coupled_gumbel(rows.seed[:, None], position, log_p.shape[-1])
    return jnp.argmax(log_p + noise, axis=-1).astype(jnp.int32)


def _match(target, drafts, window):
    """Leading drafts equal to the target's tokens [r, w], and the target's token after them."""
    accepted = leading_accepts(target[:, : drafts.shape[1]] == drafts, window)
    return accepted, _at(target, accepted)


def _reject(log_p, drafts, log_q, window, drafted, rows, anchor_position):
    """Rejection sampling of a block: accepted drafts and the token after them."""
    if log_q is None or drafts.shape[1] == 0:
        accepted = jnp.zeros_like(window)
        weight, purpose = jnp.exp(log_p[:, 0]), BONUS
        kept, draft = False, accepted
    else:
        size = drafts.shape[1]
        p = jnp.exp(jnp.take_along_axis(log_p[:, :size], drafts[..., None], axis=-1)[..., 0])
        q = jnp.exp(jnp.take_along_axis(log_q, drafts[..., None], axis=-1)[..., 0])
        chance = uniform(rows.seed[:, None], anchor_position[:, None], jnp.arange(size)[None], ACCEPT)
        passed = chance < accept_probability(p, q)
        accepted = leading_accepts(passed, window)
        # One token a row is drawn at most: the rest works on that one offset.
        direct = accepted >= drafted
        here = jnp.minimum(accepted, size - 1)
        kept = (accepted == window) & ~direct & _at(passed, here)
        draft = _at(drafts, here)
        p, q = jnp.exp(_at(log_p, accepted)), jnp.exp(_at(log_q, here))
        weight = jnp.where(direct[:, None], p, residual(p, q))
        purpose = jnp.where(direct, BONUS, RESIDUAL)
    noise = gumbel(rows.seed, anchor_position, accepted, purpose, log_p.shape[-1])
    drawn = jnp.argmax(jnp.log(weight) + noise, axis=-1).astype(jnp.int32)
    return accepted, jnp.where(kept, draft, drawn)


def _at(values, offset):
    """values[r, offset[r]] of every row."""
    index = offset.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _committed(drafts, accepted, last):
    """Accepted drafts, then `last`, then −1: (tokens [r, w], count, accepted)."""
    place = jnp.arange(drafts.shape[1] + 1)[None]
    tokens = jnp.where(place < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), -1)
    tokens = jnp.where(place == accepted[:, None], last[:, None], tokens)
    return tokens.astype(jnp.int32), accepted + 1, accepted


def commit(
    tokens: Int[Array, "r w"],
    count: Int[Array, " r"],
    anchor_position: Int[Array, " r"],
    *,
    remaining: Int[Array, " r"],
    stop_ids: Int[Array, "r s"],
    active: Bool[Array, " r"],
) -> Verdict:
    """Cuts what `judge` returned after the first stop token, which stays, and at the length limit.

    remaining: tokens that the row may still emit. stop_ids: padded with −1. Inactive rows commit nothing and
    are not reported as finished; a row that has nothing remaining commits nothing and is.
    """
    place = jnp.arange(tokens.shape[1])[None]
    stops = jnp.any((tokens[:, :, None] == stop_ids[:, None, :]) & (stop_ids >= 0)[:, None, :], axis=-1)
    stops &= place < count[:, None]
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, count)
    kept = jnp.where(active, jnp.clip(jnp.minimum(until_stop, remaining), 0), 0).astype(jnp.int32)
    stopped = jnp.any(stops & (place < kept[:, None]), axis=1)
    return Verdict(
        tokens=jnp.where(place < kept[:, None], tokens, -1),
        count=kept,
        accepted=jnp.where(active, count - 1, 0),
        finished=active & (stopped | (kept >= remaining)),
        anchor_position=anchor_position + kept,
    )
