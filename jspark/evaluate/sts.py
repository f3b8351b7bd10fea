"""Sequential temperature scaling: the fit.

Knows: confidence logits and how much of each block survived. Does not know: files (calibration.py), models.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from jspark.evaluate.confidence import BINS, conditional, survived

#: Temperatures that are tried: COARSE over the whole range, then FINE around the best one.
LOWEST, HIGHEST = 0.05, 20.0
COARSE, FINE = 121, 41


def fit(logits: Float[np.ndarray, "n g"], block_accepted: Int[np.ndarray, " n"]) -> tuple[float, ...]:
    """Temperatures T₁ … T_γ (DSpark, its section on sequential temperature scaling).

    For k = 1..γ in order, T_k minimises the ECE of Π_{i≤k} σ(ℓ_i / T_i) against whether the first k drafted
    tokens all survived, with the earlier temperatures fixed: a search over a logarithmic grid and a finer one
    around its best. Of equally good ones the nearest to 1 wins. A positive temperature keeps the order of a
    position's logits, so no ranking within a position changes.
    """
    outcome = survived(block_accepted, logits.shape[1])
    before = np.ones(len(logits))
    temperatures = []
    for k in range(logits.shape[1]):
        column = logits[:, k : k + 1]
        grid = np.geomspace(LOWEST, HIGHEST, COARSE)
        best = _best(grid, column, before, outcome[:, k])
        ratio = grid[1] / grid[0]
        best = _best(np.geomspace(best / ratio, best * ratio, FINE), column, before, outcome[:, k])
        temperatures.append(float(best))
        before = before * conditional(column, np.array([best]))[:, 0]
    return tuple(temperatures)


def _best(grid, column, before, outcome):
    errors = np.array([_ece(before * conditional(column, np.array([t]))[:, 0], outcome) for t in grid])
    good = np.flatnonzero(errors <= errors.min())
    return grid[good[np.argmin(np.abs(np.log(grid[good])))]]


def _ece(prediction, outcome):
    """As `confidence.bins(…).ece`: only the differences of sums are needed here."""
    place = np.minimum((prediction * BINS).astype(np.int64), BINS - 1)
    return np.abs(np.bincount(place, prediction - outcome, BINS)).sum() / len(prediction)
