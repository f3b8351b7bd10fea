"""What the engine learns about acceptance while it runs.

Knows: how often each position was reached and accepted, of late. Does not know: confidence heads or policies.
"""

from __future__ import annotations

import numpy as np


class AcceptanceByPosition:
    """Conditional acceptance by position, one estimate for greedy and one for sampled rows.

    It stands in for the confidence of rows that have none: drafters without a confidence head, and rows that are
    new. Older steps fade: a position's counts halve every `half_life` observations of it. Positions beyond a
    window are censored: they count as not seen, never as failures. Where a window is chosen by confidence, its
    deep positions are seen for likely rows only, so the estimate leans upwards there.

    least: observations from which a position's share is believed. batch: steps that are taken in together, once
    the first positions are known; each step alone would cost more time than its news is worth.
    """

    def __init__(self, block_size: int, half_life: float = 2000.0, least: float = 16.0, batch: int = 8):
        self._reached = np.zeros((2, block_size))
        self._accepted = np.zeros((2, block_size))
        self._half_life, self._least, self._batch = half_life, least, batch
        self._new: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._rates = np.full((2, block_size), np.nan)

    def observe(self, sampled: np.ndarray, window: np.ndarray, accepted: np.ndarray) -> None:
        """Takes in the rows of a step: [n] class, drafted tokens verified, drafted tokens accepted."""
        self._new.append((sampled, window, accepted))
        if len(self._new) < self._batch and not np.isnan(self._rates[sampled.astype(np.int64), 0]).any():
            return
        sampled, window, accepted = (np.concatenate(parts) for parts in zip(*self._new, strict=True))
        self._new.clear()
        kind = sampled.astype(np.int64)
        seen = _beyond(kind, np.minimum(window, accepted + 1), self._reached.shape)
        fade = 0.5 ** (seen / self._half_life)
        self._reached = self._reached * fade + seen
        self._accepted = self._accepted * fade + _beyond(kind, np.minimum(window, accepted), seen.shape)
        rates = np.full(seen.shape, np.nan)
        np.divide(self._accepted, self._reached, out=rates, where=self._reached >= self._least)
        for k in range(1, rates.shape[1]):
            rates[:, k] = np.where(np.isnan(rates[:, k]), rates[:, k - 1], rates[:, k])
        self._rates = rates

    def conditional(self, sampled: np.ndarray) -> np.ndarray:
        """[n, γ]: the chance that a position is accepted when the one before was; NaN before enough is known.

        A position that is hardly ever reached takes the estimate of the last one that is.
        """
        return self._rates[sampled.astype(np.int64)]


def _beyond(kind: np.ndarray, depth: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """[2, γ]: how many rows of each class have a depth above k."""
    kinds, size = shape
    flat = np.bincount(kind * (size + 1) + depth, minlength=kinds * (size + 1)).reshape(kinds, size + 1)
    return flat[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
