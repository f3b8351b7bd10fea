"""Grammar masks on the device: illegal tokens cannot be chosen, and a row with nothing legal ends.

Knows: bit masks of some rows of a step, and what acceptance said. Does not know: how a grammar tells what is
legal (grammar.py), or which answers have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, UInt

from jspark.accept import Judgement

if TYPE_CHECKING:
    from jspark.grammar import Matcher


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Legal tokens of the constrained rows of a step, for every offset from the anchor.

    row: the entry of a row in `bits`, −1 for a row without a grammar. legal: how many drafted tokens, from the
    first, are legal; γ for a row without a grammar. bits: token t is bit t % 32 of word t // 32.
    """

    row: Int[Array, " r"]
    legal: Int[Array, " r"]
    bits: UInt[Array, "g w m"]


def mask_size(matchers: int, rows: int) -> int:
    """Entries of a mask for so many matchers: few different numbers, since each is a program."""
    size = 4
    while size < matchers:
        size *= 4
    return min(size, rows) if matchers else 0


def host_mask(
    matchers: Sequence[Matcher | None],
    drafts: Sequence[Sequence[int]],
    rows: int,
    width: int,
    vocab: int,
    masked: int,
) -> Mask:
    """The mask of a step, on the host.

    matchers, drafts: an entry a row, None and anything for rows without a grammar; a row may draft nothing. rows,
    width, vocab: r, w and v of the step. masked: entries of `bits`, as many as there are matchers at least.
    """
    own = [i for i, matcher in enumerate(matchers) if matcher is not None]
    padded = np.zeros((masked, width, -(-vocab // 32)), np.uint32)
    row, most = np.full(rows, -1, np.int32), np.full(rows, width - 1, np.int32)
    if own:
        from jspark.grammar import masks

        bits, legal = masks([m for m in matchers if m is not None], [drafts[i] for i in own], width)
        padded[: len(own)] = bits[:, :, : padded.shape[2]]
        row[own], most[own] = np.arange(len(own)), legal
    return Mask(row, most, padded)  # type: ignore[arg-type]  # NumPy, until it is placed


def restrict(
    logits: Float[Array, "t v"], row: Int[Array, " t"], offset: Int[Array, " t"], mask: Mask
) -> tuple[Float[Array, "t v"], Bool[Array, " t"]]:
    """(logits with −inf at illegal tokens, whether nothing is left).

    Where nothing is left, logits stay as they were: finite numbers for a row whose token `cut` drops.

    row, offset: the request row and the offset from its anchor of every packed row.
    """
    entry = mask.row[row]
    words = mask.bits[jnp.maximum(entry, 0), offset]
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & jnp.uint32(1)
    legal = bits.reshape(len(words), -1)[:, : logits.shape[1]] > 0
    masked = jnp.where(legal, logits, -jnp.inf)
    dead = (entry >= 0) & (jnp.max(masked, axis=1) == -jnp.inf)
    return jnp.where(((entry >= 0) & ~dead)[:, None], masked, logits), dead


def cut(
    verdict: Judgement, dead: Bool[Array, " t"], index: Int[Array, "r w"]
) -> tuple[Judgement, Bool[Array, " r"]]:
    """Drops the tokens from the first offset where nothing was legal; also, which rows end for that reason.

    index: the packed row of each offset, anything where there is none.
    """
    place = jnp.arange(index.shape[1])[None]
    stuck = dead[jnp.minimum(index, len(dead) - 1)] & (place < verdict.count[:, None])
    ended = jnp.any(stuck, axis=1)
    first = jnp.where(ended, jnp.argmax(stuck, axis=1), verdict.count).astype(jnp.int32)
    return replace(
        verdict,
        tokens=jnp.where(place < first[:, None], verdict.tokens, -1),
        count=first,
        accepted=jnp.minimum(verdict.accepted, first),
        block_accepted=jnp.where(ended, jnp.minimum(verdict.block_accepted, first), verdict.block_accepted),
    ), ended
