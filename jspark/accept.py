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
class Judgement:
    """What acceptance says of a block, before stop tokens and limits.

    tokens: −1 after the last. count: 1..w. accepted: drafted tokens accepted within the window. block_accepted:
    the same without the window's cut, as far as rows were verified.
    """

    tokens: Int[Array, "r w"]
    count: Int[Array, " r"]
    accepted: Int[Array, " r"]
    block_accepted: Int[Array, " r"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Commit:
    """What a step commits. tokens: −1 after the last. count: 0..w. finished: the row ended in this step."""

    tokens: Int[Array, "r w"]
    count: Int[Array, " r"]
    finished: Bool[Array, " r"]


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
    logits: Float[Array, "t v"],
    index: Int[Array, "r w"],
    drafts: Int[Array, "r g"],
    log_q: Float[Array, "r g v"] | None,
    window: Int[Array, " r"],
    verified: Int[Array, " r"],
    drafted: Int[Array, " r"],
    rows: RowSampling,
    anchor_position: Int[Array, " r"],
    *,
    sampled: bool,
    filtered: bool,
    coupled: bool,
    rejection: bool,
) -> Judgement:
    """Accepted drafts and the target's token after them, for every row of a step.

    logits: the target's at the packed rows; index: the packed row of each offset 0..γ from the anchor, anything
    where there is none. drafts, log_q: the drafted tokens and the distributions they were drawn from, as drawn;
    log_q may be None without rejection rows. drafted: valid drafts of a row, 0 or γ. window: drafts that may be
    committed; verified: drafts that were sent to the target, window ≤ verified ≤ drafted. γ may be 0.

    Greedy and coupled rows compute the target's own token at every offset and keep the drafts that equal it
    (Gumbel coupling: the token is what plain decoding with this seed emits). Rejection rows follow the DSpark
    paper's section on speculative decoding (arXiv 2607.05147) with the window rule of this module's heading, and
    draw from the target directly where nothing was drafted.

    `sampled`, `filtered`, `coupled`, `rejection` False promise that no row is of that kind and leave its code out
    of the program.
    """
    total = logits.shape[0]
    here = jnp.minimum(index, total - 1)
    target = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not sampled:
        return _judged(drafts, *_match(target[here], drafts, window, verified))

    row, offset = owners(index, total)
    own = rows.take(row)
    log_p = log_probs(logits, own, filtered=filtered)
    if coupled:
        noise = coupled_gumbel(own.seed, anchor_position[row] + 1 + offset, logits.shape[-1])
        drawn = jnp.argmax(log_p + noise, axis=-1).astype(jnp.int32)
        target = jnp.where(own.coupled & ~own.greedy, drawn, target)
    verdict = _match(target[here], drafts, window, verified)
    if rejection:
        ours = _reject(log_p, here, drafts, log_q, window, verified, drafted, rows, anchor_position)
        choose = ~rows.greedy & ~rows.coupled
        verdict = jax.tree.map(lambda a, b: jnp.where(choose, a, b), ours, verdict)
    return _judged(drafts, *verdict)


def owners(index: Int[Array, "r w"], total: int) -> tuple[Int[Array, " t"], Int[Array, " t"]]:
    """(request row, offset from its anchor) of `total` packed rows; 0 for padding."""
    rows, width = index.shape
    flat = jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
    flat = jnp.zeros(total, jnp.int32).at[index].set(flat, mode="drop")
    return flat // width, flat % width


def _match(target, drafts, window, verified):
    """Leading drafts equal to the target's tokens [r, w], the target's token after them, and the uncut count."""
    block = leading_accepts(target[:, : drafts.shape[1]] == drafts, verified)
    accepted = jnp.minimum(block, window)
    return accepted, _at(target, accepted), block


def _reject(log_p, index, drafts, log_q, window, verified, drafted, rows, anchor_position):
    """Rejection sampling of a block: accepted drafts, the token after them, and the uncut count."""
    size = drafts.shape[1]
    if size == 0 or log_q is None:
        accepted = block = jnp.zeros_like(window)
        kept, draft = jnp.zeros_like(window, dtype=bool), accepted
        weight, purpose = jnp.exp(log_p[index[:, 0]]), jnp.full_like(window, BONUS)
    else:
        p = jnp.exp(log_p[index[:, :size], drafts])
        q = jnp.exp(jnp.take_along_axis(log_q, drafts[..., None], axis=-1)[..., 0])
        chance = uniform(rows.seed[:, None], anchor_position[:, None], jnp.arange(size)[None], ACCEPT)
        passed = chance < accept_probability(p, q)
        block = leading_accepts(passed, verified)
        accepted = jnp.minimum(block, window)
        # One token a row is drawn at most: the rest works on that one offset.
        direct = accepted >= drafted
        here = jnp.minimum(accepted, size - 1)
        kept = (accepted == window) & ~direct & _at(passed, here)
        draft = _at(drafts, here)
        p, q = jnp.exp(log_p[_at(index, accepted)]), jnp.exp(_at(log_q, here))
        weight = jnp.where(direct[:, None], p, residual(p, q))
        purpose = jnp.where(direct, BONUS, RESIDUAL)
    noise = gumbel(rows.seed, anchor_position, accepted, purpose, log_p.shape[-1])
    drawn = jnp.argmax(jnp.log(weight) + noise, axis=-1).astype(jnp.int32)
    return accepted, jnp.where(kept, draft, drawn), block


def _at(values, offset):
    """values[r, offset[r]] of every row."""
    index = offset.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _judged(drafts, accepted, last, block):
    """Accepted drafts, then `last`, then −1."""
    place = jnp.arange(drafts.shape[1] + 1)[None]
    tokens = jnp.where(place < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), -1)
    tokens = jnp.where(place == accepted[:, None], last[:, None], tokens)
    return Judgement(tokens.astype(jnp.int32), accepted + 1, accepted, block)


def commit(
    tokens: Int[Array, "r w"],
    count: Int[Array, " r"],
    *,
    remaining: Int[Array, " r"],
    stop_ids: Int[Array, "r s"],
    active: Bool[Array, " r"],
) -> Commit:
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
    return Commit(
        tokens=jnp.where(place < kept[:, None], tokens, -1),
        count=kept,
        finished=active & (stopped | (kept >= remaining)),
    )
