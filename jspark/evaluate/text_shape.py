"""What the text alone says: where it runs in a loop, and what looking up its own past would have drafted.

Knows: token ids. Does not know: models or engines.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

#: A context is in a loop when its last max(REPEATS · n, SHORTEST) tokens have period n, for an n up to LONGEST.
REPEATS, SHORTEST, LONGEST = 3, 12, 64
#: Length of the longest n-gram that prompt lookup looks for.
LOOKUP_NGRAM = 3

LOOP_RULE = (
    f"a step is in a loop when, for some n from 1 to {LONGEST}, the last max({REPEATS}·n, {SHORTEST}) tokens of "
    "its context (prompt included, anchor last) have period n"
)
LOOKUP_RULE = (
    f"the longest n-gram (n from {LOOKUP_NGRAM} down to 1) that ends the context and occurs earlier in it, at its "
    "latest earlier place; the tokens that followed there are the draft"
)


def in_loop(tokens: Int[np.ndarray, " t"]) -> Bool[np.ndarray, " t"]:
    """Whether the context that ends with each token is in a loop (LOOP_RULE)."""
    found = np.zeros(len(tokens), bool)
    places = np.arange(len(tokens))
    for n in range(1, min(LONGEST, len(tokens) // 2) + 1):
        same = np.zeros(len(tokens), bool)
        same[n:] = tokens[n:] == tokens[:-n]
        # Length of the run of agreements that ends here.
        run = places - np.maximum.accumulate(np.where(same, -1, places))
        found |= run >= max(REPEATS * n, SHORTEST) - n
    return found


def lookup_accepts(tokens: Int[np.ndarray, " t"], block_size: int) -> Int[np.ndarray, " t"]:
    """Drafted tokens that prompt lookup (LOOKUP_RULE) would have had accepted with each token as the anchor.

    The text decides: a draft is accepted as far as it equals what follows. For greedy and coupled decoding, whose
    output no drafter changes, that is exactly what a run would have done; for rejection sampling of a draft
    without randomness it has exactly its distribution, since such a token x is accepted with chance p(x).
    """
    source = _sources(tokens)
    length = len(tokens)
    offset = np.arange(1, block_size + 1)
    drafted_from = source[:, None] + offset[None]
    compared_with = np.arange(length)[:, None] + offset[None]
    # A draft ends where the known text does.
    known = (source[:, None] >= 0) & (drafted_from <= np.arange(length)[:, None]) & (compared_with < length)
    drafted_from, compared_with = np.minimum(drafted_from, length - 1), np.minimum(compared_with, length - 1)
    equal = known & (tokens[drafted_from] == tokens[compared_with])
    return np.sum(np.cumprod(equal, axis=1), axis=1)


def _sources(tokens):
    """The place that each place's longest n-gram ended at before, −1 where even its token is new."""
    source = np.full(len(tokens), -1)
    code = np.zeros(len(tokens), np.int64)
    many = int(tokens.max(initial=0)) + 2
    for n in range(1, LOOKUP_NGRAM + 1):
        # Equal codes ⇔ equal n-grams; where there are fewer than n tokens, the missing one is −1.
        added = np.concatenate([np.full(n - 1, -1), tokens])[: len(tokens)]
        _, code = np.unique(code * many + added + 1, return_inverse=True)
        order = np.argsort(code, kind="stable")
        repeated = code[order][1:] == code[order][:-1]
        source[order[1:][repeated]] = order[:-1][repeated]
    return source


def walk(accepts: Int[np.ndarray, " t"], start: int) -> tuple[np.ndarray, np.ndarray]:
    """(anchor positions, tokens committed) of the steps from the anchor at `start` to the end of the text.

    accepts: drafted tokens accepted at every anchor; a step commits one more, as far as there is text.
    """
    positions, counts = [], []
    last = len(accepts) - 1
    accepted = accepts.tolist()
    while start < last:
        count = min(accepted[start] + 1, last - start)
        positions.append(start)
        counts.append(count)
        start += count
    return np.array(positions, np.int64), np.array(counts, np.int64)
