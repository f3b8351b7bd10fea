"""Calibration while serving: probe rows, how honest confidence is, and new temperatures where it drifts.

Knows: blocks that were verified whole, their confidence and what became of them. Does not know: the engine,
programs, or how windows are chosen.

What windows show is biased: a block is verified deep where it was believed in. So a small share of rows, chosen by
a random stream of their own before anything is drafted, is verified whole whatever the policy says (probes). Only
they count, each with the inverse of its chance; under static and cap-accept all rows do. Positions beyond a window
are censored, never failures.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jspark.calibration import CLASSES
from jspark.config import DrafterConfig, EngineConfig
from jspark.errors import UserError
from jspark.sts import BINS, conditional, fit, survived


@dataclass(frozen=True)
class CalibrationFigures:
    """How honest confidence has been of late, by class (greedy, sampled) and position, [2, γ]; NaN before anything
    is known.

    blocks: probes and other whole blocks that counted, by class. predicted, observed: shares of blocks that
    survive up to a position. ece: expected calibration error. refits: temperatures replaced, in all. temperatures:
    in use.
    """

    mode: str
    blocks: tuple[int, int]
    predicted: Float[np.ndarray, "2 g"]
    observed: Float[np.ndarray, "2 g"]
    ece: Float[np.ndarray, "2 g"]
    refits: int
    temperatures: Float[np.ndarray, "2 g"]


class OnlineCalibration:
    """Keeps track of calibration and refits it in a thread.

    temperatures: [2, γ] to begin with. share: chance of a row to be a probe. frozen: figures only, no refits.
    bound: the mean ECE over positions that calls for a refit. least: blocks of a class that one needs, since the
    last one. memory: blocks of a class that it is made from; also the half-life of the figures.
    """

    def __init__(
        self,
        temperatures: Float[np.ndarray, "2 g"],
        share: float,
        *,
        frozen: bool,
        seed: int = 0,
        bound: float = 0.05,
        least: int = 512,
        memory: int = 2048,
    ):
        self.temperatures = temperatures
        self.share, self._frozen, self._bound, self._least, self._memory = share, frozen, bound, least, memory
        self._rng = np.random.default_rng(seed)
        size = temperatures.shape[1]
        #: Blocks that wait to be counted: logits, class, accepted, weight.
        self._new: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]] = []
        self._waiting = 0
        #: Weight, Σ predicted, Σ observed of each bin.
        self._bins = np.zeros((3, 2, size, BINS))
        self._kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [
            (np.zeros((0, size)), np.zeros(0, np.int64), np.zeros(0)) for _ in CLASSES
        ]
        self._blocks, self._since = [0, 0], [0, 0]
        self.refits = 0
        self._thread: threading.Thread | None = None
        self._fitted: tuple[int, np.ndarray] | None = None

    def probes(self, slots: Int[np.ndarray, " n"], count: int) -> Bool[np.ndarray, " n"]:
        """Which rows of a step are probes; drawn for all `count` slots, whoever has them."""
        return self._rng.random(count)[slots] < self.share

    def observe(
        self,
        logits: Float[np.ndarray, "n g"],
        sampled: Int[np.ndarray, " n"],
        accepted: Int[np.ndarray, " n"],
        weight: float,
    ) -> None:
        """Takes in blocks that were verified whole: confidence logits, class, drafted tokens accepted.

        weight: the inverse of the chance with which such a block was verified whole.
        """
        if not len(logits):
            return
        self._new.append((logits, sampled, accepted, weight))
        self._waiting += len(logits)
        if self._waiting >= min(64, self._least):
            self._count()

    def poll(self) -> Float[np.ndarray, "2 g"] | None:
        """New temperatures, once, when a refit has ended; begins one where it is due. Called between steps."""
        if self._thread is None:
            if not self._frozen:
                self._begin()
            return None
        if self._thread.is_alive():
            return None
        self._thread, fitted = None, self._fitted
        if fitted is None:
            return None
        kind, values = fitted
        self.temperatures = self.temperatures.copy()
        self.temperatures[kind] = values
        # What was predicted with the old ones says nothing of the new ones: the kept blocks are counted anew.
        self._bins[:, kind] = self._binned(kind, *self._kept[kind])
        self.refits += 1
        return self.temperatures

    @property
    def figures(self) -> CalibrationFigures:
        """As of now; for the thread that steps the engine."""
        if self._new:
            self._count()
        weight, predicted, observed = self._bins
        with np.errstate(invalid="ignore", divide="ignore"):
            total = weight.sum(axis=-1)
            return CalibrationFigures(
                mode="frozen" if self._frozen else "on",
                blocks=(self._blocks[0], self._blocks[1]),
                predicted=predicted.sum(axis=-1) / total,
                observed=observed.sum(axis=-1) / total,
                ece=np.abs(predicted - observed).sum(axis=-1) / total,
                refits=self.refits,
                temperatures=self.temperatures,
            )

    def _count(self) -> None:
        logits, sampled, accepted = (np.concatenate(part) for part in list(zip(*self._new, strict=True))[:3])
        weights = np.concatenate([np.full(len(new[0]), new[3]) for new in self._new])
        self._new.clear()
        self._waiting = 0
        for kind in range(len(CLASSES)):
            own = sampled == kind
            block = logits[own].astype(np.float64), accepted[own].astype(np.int64), weights[own]
            n = len(block[0])
            self._bins[:, kind] *= 0.5 ** (n / self._memory)
            self._bins[:, kind] += self._binned(kind, *block)
            old = self._kept[kind]
            self._kept[kind] = tuple(  # type: ignore[assignment]
                np.concatenate(pair)[-self._memory :] for pair in zip(old, block, strict=True)
            )
            self._blocks[kind] += n
            self._since[kind] += n

    def _binned(self, kind: int, logits: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> np.ndarray:
        size = logits.shape[1]
        predicted = np.cumprod(conditional(logits, self.temperatures[kind]), axis=1)
        place = np.minimum((predicted * BINS).astype(np.int64), BINS - 1) + BINS * np.arange(size)
        wide = np.broadcast_to(weights[:, None], predicted.shape)
        parts = (wide, wide * predicted, wide * survived(accepted, size))
        return np.stack(
            [np.bincount(place.ravel(), part.ravel(), BINS * size).reshape(size, BINS) for part in parts]
        )

    def _begin(self) -> None:
        """Starts a refit of a class that has drifted and has blocks enough."""
        for kind in range(len(CLASSES)):
            if self._since[kind] < self._least or np.nanmean(self.figures.ece[kind]) <= self._bound:
                continue
            self._since[kind], self._fitted = 0, None
            call = (kind, *self._kept[kind], self.temperatures[kind])
            self._thread = threading.Thread(target=self._refit, args=call, name="jspark-calibration", daemon=True)
            self._thread.start()
            return

    def _refit(
        self, kind: int, logits: np.ndarray, accepted: np.ndarray, weights: np.ndarray, current: np.ndarray
    ) -> None:
        """Fits one half of the blocks; kept where the other half says that it is better."""
        odd = np.arange(len(logits)) % 2 == 1
        values = np.array(fit(logits[odd], accepted[odd], weights[odd]))
        test = logits[~odd], accepted[~odd], weights[~odd]
        if mean_ece(*test, values) < mean_ece(*test, current):
            self._fitted = kind, values


def mean_ece(
    logits: Float[np.ndarray, "n g"],
    accepted: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"],
    temperatures: Float[np.ndarray, " g"],
) -> float:
    """Expected calibration error of prefix survival, the mean over positions."""
    predicted = np.cumprod(conditional(logits, temperatures), axis=1)
    gap = (predicted - survived(accepted, logits.shape[1])) * weights[:, None]
    errors = []
    for k in range(logits.shape[1]):
        place = np.minimum((predicted[:, k] * BINS).astype(np.int64), BINS - 1)
        errors.append(np.abs(np.bincount(place, gap[:, k], BINS)).sum() / weights.sum())
    return float(np.mean(errors))


def online_calibration(
    config: EngineConfig, drafter: DrafterConfig | None, block_size: int, temperatures: np.ndarray | None
) -> OnlineCalibration | None:
    """What an engine's configuration asks for; UserError where there is no confidence to calibrate."""
    if config.online_calibration == "off":
        return None
    if drafter is None or drafter.confidence == "none":
        what = "a drafter" if drafter is None else "a confidence head, which this drafter does not have"
        raise UserError(f"online_calibration needs {what}; leave it off")
    table = np.ones((len(CLASSES), block_size), np.float32) if temperatures is None else temperatures
    return OnlineCalibration(table, config.probe_share, frozen=config.online_calibration == "frozen")
