"""What a request changes about the target's logits before temperature and filters: one pure stage.

Knows: penalties, logit bias, bad words and minimum lengths, how each advances inside a window, and the tables that
a request's own tokens leave behind. Does not know: who asks for what (request.py), sampling, or acceptance.

The order is: penalties, bias, bad words, minimum length. What a later part forbids no earlier one allows. The
token after offset k of a block is decided as if the drafted tokens up to k had been committed: so the result is
plain decoding's, whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

#: Bad words of several tokens that a request can have, and tokens in each.
MAX_WORDS, MAX_WORD_TOKENS = 256, 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowAdjust:
    """A row's own numbers; the defaults of `neutral` change nothing and leave the tables unread.

    repetition: divides positive logits and multiplies negative ones of tokens in prompt or output; 1 is off.
    presence, frequency: subtracted once, or once an occurrence, for tokens in the output; 0 is off. min_position:
    no stop id stands before this absolute position. biased, worded: the row has entries in the tables.
    """

    repetition: Float[Array, "*r"]
    presence: Float[Array, "*r"]
    frequency: Float[Array, "*r"]
    min_position: Int[Array, "*r"]
    biased: Array
    worded: Array


def neutral(rows: int) -> RowAdjust:
    """`rows` rows that adjust nothing."""
    zero, off = jnp.zeros(rows, jnp.float32), jnp.zeros(rows, bool)
    return RowAdjust(jnp.ones(rows, jnp.float32), zero, zero, jnp.zeros(rows, jnp.int32), off, off)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """What is as wide as the vocabulary, or grows with the output: an entry a slot, made when first needed.

    seen: twice the number of times a token stands in the output, plus 1 if it stands in the prompt (penalties).
    bias: added to the logits; −inf forbids. words: bad words of several tokens, padded with −1 on the left.
    tail: the last tokens of prompt and output, −2 before the beginning (these three: steering).
    """

    seen: Int[Array, "s v"] | None = None
    bias: Float[Array, "s v"] | None = None
    words: Int[Array, "s n l"] | None = None
    tail: Int[Array, "s l-1"] | None = None

    def only(self, *, penalties: bool, steering: bool) -> Tables:
        """The tables that a program with these parts reads."""
        if self.seen is None and self.bias is None:
            return self
        kept = self if penalties else replace(self, seen=None)
        return kept if steering else replace(kept, bias=None, words=None, tail=None)

    def update(self, new: Tables) -> Tables:
        """These tables with those that `new` has."""
        return Tables(*(a if b is None else b for a, b in zip(self._all(), new._all(), strict=True)))

    def _all(self) -> tuple[Array | None, ...]:
        return self.seen, self.bias, self.words, self.tail


def empty_tables(slots: int, vocab: int) -> Tables:
    """Tables of `slots` slots and the dummy, as views on the host."""
    row = row_tables((), (), {}, (), vocab)
    return jax.tree.map(lambda x: np.broadcast_to(x, (slots + 1, *x.shape)), row)


def row_tables(
    prompt: Sequence[int],
    output: Sequence[int],
    bias: dict[int, float],
    bad_words: tuple[tuple[int, ...], ...],
    vocab: int,
) -> Tables:
    """One slot's entries when a request gets it, on the host; `output` is not empty after a preemption."""
    seen = 2 * np.bincount(np.asarray(output, np.int64), minlength=vocab).astype(np.int32)
    seen[list(prompt)] += 1
    biases = np.zeros(vocab, np.float32)
    biases[list(bias)] = list(bias.values())
    biases[[word[0] for word in bad_words if len(word) == 1]] = -np.inf
    words = np.full((MAX_WORDS, MAX_WORD_TOKENS), -1, np.int32)
    for i, word in enumerate(w for w in bad_words if len(w) > 1):
        words[i, -len(word) :] = word
    tail = np.full(MAX_WORD_TOKENS - 1, -2, np.int32)
    last = [*prompt, *output][-len(tail) :]
    tail[len(tail) - len(last) :] = last
    return Tables(seen, biases, words, tail)  # type: ignore[arg-type]


def write_row(tables: Tables, slot: Int[Array, ""], row: Tables) -> Tables:
    """The tables with one slot's entries replaced."""
    return jax.tree.map(lambda x, y: x.at[slot].set(y), tables, row)


def adjust(
    logits: Float[Array, "t v"],
    row: Int[Array, " t"],
    offset: Int[Array, " t"],
    *,
    rows: RowAdjust,
    stop_ids: Int[Array, "r n"],
    position: Int[Array, " r"],
    slot: Int[Array, " r"],
    drafts: Int[Array, "r g"],
    tables: Tables,
    penalties: bool,
    steering: bool,
) -> Float[Array, "t v"]:
    """Logits of packed rows as their requests want them, float32; −inf where a token is impossible.

    row, offset: the request row of each packed row, and how many of its `drafts` come before the token that the
    logits are for (0: right after the anchor). position: of the anchors. stop_ids: padded with −1. `penalties`,
    `steering` False promise that no row uses that part and leave it out of the program.
    """
    z = logits.astype(jnp.float32)
    vocab = z.shape[-1]
    own = jax.tree.map(lambda x: x[row][:, None], rows)
    at = jnp.arange(z.shape[0], dtype=jnp.int32)[:, None]
    if penalties:
        assert tables.seen is not None
        before = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < offset[:, None]
        seen = tables.seen[slot[row]].at[at, drafts[row]].add(jnp.where(before, 2, 0))
        count = (seen >> 1).astype(jnp.float32)
        z = jnp.where(seen > 0, jnp.where(z > 0, z / own.repetition, z * own.repetition), z)
        z = z - own.frequency * count - jnp.where(count > 0, own.presence, 0.0)
    if steering:
        assert tables.bias is not None
        assert tables.words is not None
        assert tables.tail is not None
        z = z + jnp.where(own.biased, tables.bias[slot[row]], 0.0)
        history = jnp.concatenate([tables.tail[slot], drafts], axis=1)[row]
        reach = jnp.arange(MAX_WORD_TOKENS - 1, dtype=jnp.int32)[None]
        recent = jnp.take_along_axis(history, offset[:, None] + reach, axis=1)
        words = tables.words[slot[row]]
        begin, last = words[..., :-1], words[..., -1]
        matches = jnp.all((begin == recent[:, None]) | (begin < 0), axis=-1) & (last >= 0) & own.worded
        z = z.at[at, jnp.where(matches, last, vocab)].set(-jnp.inf, mode="drop")
        early = (position[row] + 1 + offset)[:, None] < own.min_position
        stops = stop_ids[row]
        z = z.at[at, jnp.where(early & (stops >= 0), stops, vocab)].set(-jnp.inf, mode="drop")
    return z


def record(tables: Tables, slot: Int[Array, " r"], tokens: Int[Array, "r w"], count: Int[Array, " r"]) -> Tables:
    """The tables after a step committed `tokens` (−1 after the first `count`)."""
    seen, tail = tables.seen, tables.tail
    if seen is not None:
        seen = seen.at[slot[:, None], jnp.where(tokens >= 0, tokens, seen.shape[1])].add(2, mode="drop")
    if tail is not None:
        reach = jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
        history = jnp.concatenate([tail[slot], tokens], axis=1)
        tail = tail.at[slot].set(jnp.take_along_axis(history, count[:, None] + reach, axis=1))
    return replace(tables, seen=seen, tail=tail)
