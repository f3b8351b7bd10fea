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
    """

    def __init__(self, block_size: int, half_life: float = 2000.0, least: float = 16.0):
        self._reached = np.zeros((2, block_size))
        self._accepted = np.zeros((2, block_size))
        self._half_life, self._least = half_life, least

    def observe(self, sampled: np.ndarray, window: np.ndarray, accepted: np.ndarray) -> None:
        """Takes in the rows of a step: [n] class, drafted tokens verified, drafted tokens accepted."""
        place = np.arange(self._reached.shape[1])[None, :]
        reached = (place < window[:, None]) & (place <= accepted[:, None])
        kept = place < np.minimum(accepted, window)[:, None]
        for kind in (0, 1):
            mine = sampled == bool(kind)
            seen = reached[mine].sum(axis=0)
            fade = 0.5 ** (seen / self._half_life)
            self._reached[kind] = self._reached[kind] * fade + seen
            self._accepted[kind] = self._accepted[kind] * fade + kept[mine].sum(axis=0)

    def conditional(self, sampled: np.ndarray) -> np.ndarray:
        """[n, γ]: the chance that a position is accepted when the one before was; NaN before enough is known.

        A position that is hardly ever reached takes the estimate of the last one that is.
        """
        rates = np.full(self._reached.shape, np.nan)
        for kind in (0, 1):
            known = self._reached[kind] >= self._least
            last = np.nan
            for k in range(known.size):
                last = self._accepted[kind, k] / self._reached[kind, k] if known[k] else last
                rates[kind, k] = last
        return rates[sampled.astype(int)]
