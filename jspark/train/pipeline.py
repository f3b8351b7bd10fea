"""Stored text → batches: several conversations packed into each sequence, shuffled and resumable.

Knows: packing, and grain's random access and prefetching. Does not know: files (text.py), models or losses.

The packing plan is made once from the lengths, in a seeded order; grain shuffles the sequences anew every epoch.
A batch is a function of the seed and its number alone, so the number is all that a checkpoint has to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jspark.errors import UserError
from jspark.train.text import Conversation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Packed sequences. segments: 0 is padding, conversations count from 1. positions: within the conversation.
    mask: tokens of the target's own answers, which are trained on."""

    tokens: Int[Array, "b s"]
    positions: Int[Array, "b s"]
    segments: Int[Array, "b s"]
    mask: Bool[Array, "b s"]


class Packed(Sequence):
    """Sequences of `length` tokens, each with the conversations of one entry of the plan.

    Conversations are placed whole, the longest first into the fullest sequence they fit (best fit): nothing is
    cut, so positions and context are as in inference. Raises UserError where one does not fit at all.
    """

    def __init__(self, text: Sequence[Conversation], length: int, seed: int):
        self._text, self._length = text, length
        sizes = np.array([len(c.tokens) for c in text], np.int64)
        if sizes.max() > length:
            raise UserError(
                f"a conversation of {int(sizes.max())} tokens is longer than a sequence of {length}; raise "
                "--sequence-length, or leave such conversations out"
            )
        self.tokens = int(sizes.sum())
        self.plan = _best_fit(sizes, length, np.random.default_rng(seed))

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        row = {
            "tokens": np.zeros(self._length, np.int32),
            "positions": np.zeros(self._length, np.int32),
            "segments": np.zeros(self._length, np.int32),
            "mask": np.zeros(self._length, bool),
        }
        place = 0
        for segment, i in enumerate(self.plan[int(index)], 1):
            c = self._text[i]
            here = slice(place, place + len(c.tokens))
            row["tokens"][here] = c.tokens
            row["positions"][here] = np.arange(len(c.tokens))
            row["segments"][here] = segment
            row["mask"][here] = c.mask()
            place += len(c.tokens)
        return row


def batches(packed: Packed, size: int, seed: int, start: int, threads: int = 4) -> Iterator[Batch]:
    """Batches number `start`, `start` + 1, … without end; every epoch is shuffled differently."""
    if len(packed) < size:
        raise UserError(
            f"the text fills {len(packed)} sequences, fewer than a batch of {size}; write more text, or lower "
            "--batch-size or --sequence-length"
        )
    data = grain.MapDataset.source(packed).shuffle(seed=seed % 2**32).repeat().batch(size)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)
    # Batches are looked up by number, so a resumed run makes none of the earlier ones.
    stream = data[start:].to_iter_dataset(options)
    for row in stream:
        yield Batch(**row)


def _best_fit(sizes: np.ndarray, length: int, rng: np.random.Generator) -> list[list[int]]:
    """Conversations of each sequence. Ties are broken by a seeded order, so like lengths do not stay together."""
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    # The smallest room that holds a size, found through a bitmap of rooms that exist.
    exists = np.zeros(length + 1, bool)
    plan: list[list[int]] = []
    for i in order:
        size = int(sizes[i])
        fits = np.argmax(exists[size:]) + size if exists[size:].any() else -1
        if fits < 0:
            where, room = len(plan), length
            plan.append([])
        else:
            where, room = by_room[fits].pop(), int(fits)
            exists[fits] = bool(by_room[fits])
        plan[where].append(int(i))
        by_room[room - size].append(where)
        exists[room - size] = True
    for members in plan:
        rng.shuffle(members)
    return plan
