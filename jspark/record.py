"""What observers of the engine see: of each step host arrays, one entry a row; and who is ended from outside.

Knows: the record. Does not know: how it is gathered (engine.py), or who reads it (evaluation, traces).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jspark.request import FinishReason


@dataclass(frozen=True)
class StepRecord:
    """What one step did to the rows that committed tokens in it.

    number: counts the engine's steps from 1. rows: R, the bucket. verify_tokens, prefill_tokens: packed rows of
    the target's forward for verification and for prompts, padding included. dispatched, collected: seconds on
    `time.perf_counter`'s clock; a step's own time is the difference of two records' `collected`.

    Arrays of n rows. request: ids. position: where the anchor stood. sampled: temperature above 0. drafted: γ, or
    0 for the step of a request's first token. window: drafted tokens that might be committed. accepted: of these,
    accepted. block_accepted: accepted of the whole block, where it was verified whole (static and cap-accept);
    under compact as far as the window. count: tokens committed, stop tokens and limits applied. finished: these
    were its last. confidence [n, γ]: raw logits, +inf where the drafter has no such head, NaN where nothing was
    drafted. survival [n, γ]: what windows were chosen by, 1 or NaN likewise. prompt: its tokens. arrived: seconds
    on the same clock.
    """

    number: int
    rows: int
    verify_tokens: int
    prefill_tokens: int
    dispatched: float
    collected: float
    request: np.ndarray
    position: np.ndarray
    sampled: np.ndarray
    drafted: np.ndarray
    window: np.ndarray
    accepted: np.ndarray
    block_accepted: np.ndarray
    count: np.ndarray
    finished: np.ndarray
    confidence: np.ndarray
    survival: np.ndarray
    prompt: np.ndarray
    arrived: np.ndarray

    @property
    def context(self) -> int:
        """Keys and values of earlier tokens that the step's rows read, a row's own ones once."""
        return int(self.position.sum())


#: Called after every collected step, on the thread that steps the engine; what it raises fails the step.
Observer = Callable[[StepRecord], None]
#: Called with the id of a request that is ended from outside, maybe an unknown one, and why; by whoever ends it.
OnAbort = Callable[[int, FinishReason], None]
