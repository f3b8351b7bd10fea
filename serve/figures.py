"""What the engine's thread counts, as the event loop reads it.

Knows: records of steps, and the engine as it is after one. Does not know: which thread's turn it is (loop.py), or
the names that figures are exported under (metrics.py).
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jspark.calibration import CLASSES
from jspark.record import StepRecord

if TYPE_CHECKING:
    from jspark.cost import CostFigures
    from jspark.online_sts import CalibrationFigures

#: Share of a step in the recent accept length.
_RECENT = 0.01
#: Upper bounds of the histogram of step times, in seconds: two to four a doubling where steps of GPUs lie.
STEP_SECONDS = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064)
STEP_SECONDS += (0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
#: drafted: some row had drafts. plain: rows went on and none had drafts. prompt: only prompts and first tokens.
StepKind = Literal["drafted", "plain", "prompt"]


class Speculation:
    """Drafts and their fate since the start. The engine's thread counts, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        with self._lock:
            self.drafts = self.draft_tokens = self.accepted = self.block_accepted = 0
            self.per_position = np.zeros(0, np.int64)
            self._recent: float | None = None

    def observe(self, record: StepRecord) -> None:
        """Counts a step; rows that had nothing to verify, such as those of a first token, are left out."""
        drafted = record.window > 0
        rows, block_accepted = int(drafted.sum()), int(record.block_accepted.sum())
        accepted = record.accepted[drafted]
        size = record.confidence.shape[1]
        with self._lock:
            self.block_accepted += block_accepted
            if not rows:
                return
            if len(self.per_position) < size:
                self.per_position = np.pad(self.per_position, (0, size - len(self.per_position)))
            self.per_position[:size] += (accepted[:, None] > np.arange(size)).sum(0)
            self.drafts += rows
            self.draft_tokens += int(record.window[drafted].sum())
            self.accepted += int(accepted.sum())
            length = 1 + float(accepted.mean())
            self._recent = length if self._recent is None else self._recent + _RECENT * (length - self._recent)

    @property
    def accept_length(self) -> float | None:
        """Tokens a draft brought on average, the target's own one included; None before the first draft."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def recent_accept_length(self) -> float | None:
        """The same of the last hundred steps or so."""
        return self._recent

    @property
    def utilisation(self) -> float | None:
        """Accepted drafts over those that whole blocks would have had, where these are verified (static and
        cap-accept; else it says nothing); None before any was accepted."""
        return self.accepted / self.block_accepted if self.block_accepted else None

    def snapshot(self) -> tuple[int, int, int, list[int]]:
        """Drafts, tokens in them, accepted ones, and these by position."""
        with self._lock:
            return self.drafts, self.draft_tokens, self.accepted, self.per_position.tolist()


class StepCounts(NamedTuple):
    """Steps by kind and verify tier, and by the first of STEP_SECONDS that holds them, longer ones last; their
    seconds together."""

    kinds: dict[tuple[StepKind, int], int]
    buckets: list[int]
    seconds: float


class Steps:
    """Steps since the start: kinds, tiers, times. The engine's thread counts, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        with self._lock:
            self._kinds: Counter[tuple[StepKind, int]] = Counter()
            self._buckets, self._seconds = [0] * (len(STEP_SECONDS) + 1), 0.0

    def observe(self, record: StepRecord) -> None:
        """Counts a step."""
        kind: StepKind = "prompt"
        if record.drafted.any():
            kind = "drafted"
        elif (record.position >= record.prompt).any():
            kind = "plain"
        seconds = record.collected - record.dispatched
        with self._lock:
            self._kinds[kind, record.verify_tokens] += 1
            self._buckets[bisect_left(STEP_SECONDS, seconds)] += 1
            self._seconds += seconds

    def snapshot(self) -> StepCounts:
        """The counts as of now."""
        with self._lock:
            return StepCounts(dict(self._kinds), self._buckets.copy(), self._seconds)


@dataclass(frozen=True)
class Load:
    """The engine after a step. pages: of the KV pool; free: of these, or kept only for prompts to come.

    cache_asked, cache_found: tokens that the prefix cache was asked for, and that it held. cpu_seconds: of the
    engine's thread. calibration, cost: the engine's figures, up to a second old while it is busy.
    """

    running: int = 0
    waiting: int = 0
    free: int = 0
    pages: int = 0
    steps: int = 0
    cache_asked: int = 0
    cache_found: int = 0
    cpu_seconds: float = 0.0
    calibration: CalibrationFigures | None = None
    cost: CostFigures | None = None

    @property
    def usage(self) -> float:
        """Share of the pages in use."""
        return 1 - self.free / self.pages if self.pages else 0.0


def calibration_errors(figures: CalibrationFigures) -> dict[str, float]:
    """Expected calibration error by class, the mean over positions; without classes of which nothing is known."""
    means = zip(CLASSES, figures.ece.mean(axis=1).tolist(), strict=True)
    return {kind: error for kind, error in means if math.isfinite(error)}


def calibration_fields(figures: CalibrationFigures) -> dict[str, Any]:
    """As JSON knows it: classes by name, None where nothing is known."""
    errors = calibration_errors(figures)
    classes = {
        kind: {
            "blocks": figures.blocks[i],
            "mean_calibration_error": errors.get(kind),
            "calibration_error": _known(figures.ece[i]),
            "predicted": _known(figures.predicted[i]),
            "observed": _known(figures.observed[i]),
            "temperatures": figures.temperatures[i].tolist(),
        }
        for i, kind in enumerate(CLASSES)
    }
    return {"mode": figures.mode, "refits": figures.refits, "classes": classes}


def cost_fields(figures: CostFigures) -> dict[str, Any]:
    """As JSON knows it; None for the means before there is a step."""
    return {
        "frozen": figures.frozen,
        "compared_steps": figures.steps,
        "predicted_step_seconds": figures.predicted if figures.steps else None,
        "measured_step_seconds": figures.measured if figures.steps else None,
        "corrections": figures.factors,
    }


def _known(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
