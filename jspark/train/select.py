"""Which written conversations are kept, and the figures of the report.

Knows: duplicates, near duplicates, overlap with evaluation texts, loops; all from token ids.
Does not know: how text is written or stored.

Duplicate: a whole conversation that was there before. Near duplicate: a question whose four smallest 5-gram hashes
were there before. Overlap: any 13 tokens in a row that an evaluation text has. Loop: a token whose preceding 16
tokens (itself included) occurred before in the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jspark.train.writer import Written

OVERLAP_NGRAM = 13
LOOP_NGRAM = 16
_QUESTION_NGRAM = 5
_SKETCH = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def ngrams(tokens: np.ndarray, n: int) -> np.ndarray:
    """A 64-bit hash of every n tokens in a row, [len − n + 1]."""
    if len(tokens) < n:
        return np.zeros(0, np.uint64)
    ids = tokens.astype(np.uint64) + np.uint64(1)
    out = np.zeros(len(ids) - n + 1, np.uint64)
    for i in range(n):
        out = (out ^ (out >> np.uint64(29))) * _FACTOR + ids[i : i + len(out)]
    return out ^ (out >> np.uint64(32))


def looping(answer: np.ndarray) -> np.ndarray:
    """Which tokens of an answer end a 16-gram that occurred before in it, [n]."""
    hashes = ngrams(answer, LOOP_NGRAM)
    again = np.ones(len(hashes), bool)
    again[np.unique(hashes, return_index=True)[1]] = False
    return np.concatenate([np.zeros(len(answer) - len(again), bool), again])


@dataclass
class Selection:
    """Keeps or refuses conversations one by one and counts.

    min_question, min_answer: tokens. near: whether questions are compared (not for given prompts). template:
    tokens of the template before the question, which are no part of it.
    """

    min_question: int = 0
    min_answer: int = 8
    near: bool = True
    template: int = 0
    _seen: set[int] = field(default_factory=set)
    _sketches: set[tuple[int, ...]] = field(default_factory=set)
    _evaluation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    refused: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    loops: int = 0
    stopped: int = 0
    lengths: list[int] = field(default_factory=list)

    def exclude(self, texts: Iterable[Sequence[int]]) -> int:
        """Evaluation texts that must not appear; returns how many n-grams they have."""
        own = [ngrams(np.asarray(t, np.int64), OVERLAP_NGRAM) for t in texts]
        self._evaluation = np.unique(np.concatenate([self._evaluation, *own]))
        return len(self._evaluation)

    def keep(self, written: Written, *, known: bool = False) -> bool:
        """Whether `written` is kept. known: it was kept by an earlier run, so it only counts."""
        question = written.tokens[self.template : written.answer_start]
        answer = written.tokens[written.answer_start :]
        why = None if known else self._why_not(written.tokens, question, answer)
        if why is not None:
            self.refused[why] += 1
            return False
        self._seen.add(hash(written.tokens.tobytes()))
        if self.near:
            self._sketches.add(_sketch(question))
        self.kept += 1
        self.tokens += len(written.tokens)
        self.answer_tokens += len(answer)
        self.loops += int(looping(answer).sum())
        self.stopped += written.stopped
        self.lengths.append(len(answer))
        return True

    def _why_not(self, tokens: np.ndarray, question: np.ndarray, answer: np.ndarray) -> str | None:
        if len(question) < self.min_question or len(answer) < self.min_answer:
            return "short"
        if hash(tokens.tobytes()) in self._seen:
            return "duplicate"
        if self.near and _sketch(question) in self._sketches:
            return "near_duplicate"
        if len(self._evaluation):
            own = ngrams(tokens, OVERLAP_NGRAM)
            place = np.minimum(np.searchsorted(self._evaluation, own), len(self._evaluation) - 1)
            if (self._evaluation[place] == own).any():
                return "evaluation_overlap"
        return None

    def report(self) -> dict[str, Any]:
        """The figures so far."""
        lengths = np.asarray(self.lengths or [0])
        return {
            "conversations": self.kept,
            "tokens": self.tokens,
            "answer_tokens": self.answer_tokens,
            "answer_length": {
                "mean": float(lengths.mean()),
                **{f"p{q}": float(np.percentile(lengths, q)) for q in (10, 50, 90)},
                "max": int(lengths.max()),
            },
            "ended_by_stop_token": self.stopped / max(self.kept, 1),
            "looping_share": self.loops / max(self.answer_tokens, 1),
            "refused": {
                key: self.refused[key] for key in ("short", "duplicate", "near_duplicate", "evaluation_overlap")
            },
            "evaluation_ngrams_checked": len(self._evaluation),
            "rules": {"overlap_ngram": OVERLAP_NGRAM, "loop_ngram": LOOP_NGRAM},
        }


def _sketch(question: np.ndarray) -> tuple[int, ...]:
    hashes = ngrams(question, _QUESTION_NGRAM)
    if len(hashes) < _SKETCH:
        return tuple(int(t) for t in question)
    return tuple(int(h) for h in np.partition(hashes, _SKETCH - 1)[:_SKETCH])
