"""Requests on their way into the engine: what is refused, and what of them goes into the device's tables.

Knows: limits of the slot table and of adjust.py's tables. Does not know: lengths, pages and slots (scheduler.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jspark.adjust import MAX_WORD_TOKENS, MAX_WORDS, Tables, empty_tables, row_tables
from jspark.errors import UserError
from jspark.programs import Programs
from jspark.request import Request
from jspark.state import MAX_STOP_IDS


def check_ids(request: Request, vocab: int) -> None:
    """Raises UserError when a token id of `request` is not one of `vocab`, or there are too many of them."""
    words, bias = request.bad_words, request.params.logit_bias or {}
    for what, ids in (
        ("token id", request.prompt),
        ("stop token id", request.stop_ids),
        ("logit_bias: token id", bias),
        ("bad_words: token id", itertools.chain.from_iterable(words)),
    ):
        bad = next((t for t in ids if not 0 <= t < vocab), None)
        if bad is not None:
            raise UserError(
                f"{what} {bad} is outside the vocabulary of {vocab}; pass ids of this model's tokenizer"
            )
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise UserError(
            f"{len(request.stop_ids)} stop token ids were given; at most {MAX_STOP_IDS} are supported, drop some"
        )
    if request.params.structured_outputs is not None and request.grammar is None:
        raise UserError("structured_outputs were given without their grammar; compile it for this model's tokens")
    longer = [len(word) for word in words if len(word) > 1]
    if len(longer) > MAX_WORDS or max(longer, default=0) > MAX_WORD_TOKENS:
        raise UserError(
            f"bad_words can have {MAX_WORDS} entries of more than one token and {MAX_WORD_TOKENS} tokens in each; "
            f"{len(longer)} of up to {max(longer)} were given, drop some"
        )
    if len({word[-1] for word in words} | set(request.stop_ids)) >= vocab:
        raise UserError("bad_words and stop tokens together leave no token to choose; drop some bad words")


class SlotTables:
    """adjust.py's tables on the device: made for the first request that needs them, an entry a slot."""

    def __init__(self, programs: Programs, slots: int, vocab: int):
        self._programs, self._slots, self._vocab = programs, slots, vocab
        self._tables = Tables()

    def admit(self, request: Request, output: Sequence[int], slot: int) -> None:
        """Writes what a penalized or steered request needs; output: what it committed before a preemption."""
        penalties, steering = request.params.penalized, request.steered
        have = self._tables
        missing = empty_tables(self._slots, self._vocab).only(
            penalties=penalties and have.seen is None, steering=steering and have.bias is None
        )
        self.update(self._programs.place(missing))
        row = row_tables(
            request.prompt, output, dict(request.params.logit_bias or {}), request.bad_words, self._vocab
        )
        row = row.only(penalties=penalties, steering=steering)
        tables = self.take(penalties=penalties, steering=steering)
        self.update(self._programs.write_row(tables, *self._programs.place((np.int32(slot), row))))

    def take(self, *, penalties: bool, steering: bool) -> Tables:
        """The tables for a program with these parts, which may use them up."""
        return self._tables.only(penalties=penalties, steering=steering)

    def update(self, tables: Tables) -> None:
        """Keeps what a program has made of the tables that it was given."""
        self._tables = self._tables.update(tables)
