"""Sequential temperature scaling: the fit.

Knows: confidence logits and how much of each block survived. Does not know: files (calibration.py), models.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

#: Bins of equal width over [0, 1] of the calibration error, as SGLang counts them.
BINS = 15

#: Temperatures that are tried: COARSE over the whole range, then FINE around the best one.
LOWEST, HIGHEST = 0.05, 20.0
COARSE, FINE = 121, 41


def conditional(
    logits: Float[np.ndarray, "n g"], temperatures: Float[np.ndarray, " g"] | None = None
) -> np.ndarray:
    """σ(logit_k / T_k), float64 [n, γ]: that a token survives given that those before it did."""
    scaled = logits.astype(np.float64)
    if temperatures is not None:
        scaled = scaled / np.asarray(temperatures)[None]
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-scaled))


def calibrated(
    logits: Float[np.ndarray, "n g"],
    sampled: Int[np.ndarray, " n"],
    temperatures: Float[np.ndarray, "2 g"] | None,
) -> Float[np.ndarray, "n g"]:
    """`conditional` of rows of both classes (0 greedy, 1 sampled), in the logits' dtype; NaN stays NaN."""
    scaled = logits if temperatures is None else logits / temperatures[sampled]
    # The logistic function, without overflow.
    return 0.5 + 0.5 * np.tanh(0.5 * scaled)


def survived(block_accepted: Int[np.ndarray, " n"], block_size: int) -> Bool[np.ndarray, "n g"]:
    """Whether the first k drafted tokens were all accepted, k = 1..γ."""
    return np.asarray(block_accepted)[:, None] > np.arange(block_size)[None]


def fit(
    logits: Float[np.ndarray, "n g"],
    block_accepted: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None = None,
) -> tuple[float, ...]:
    """Temperatures T₁ … T_γ (DSpark, its section on sequential temperature scaling).

    For k = 1..γ in order, T_k minimises the ECE of Π_{i≤k} σ(ℓ_i / T_i) against whether the first k drafted
    tokens all survived, with the earlier temperatures fixed: a search over a logarithmic grid and a finer one
    around its best. Of equally good ones the nearest to 1 wins. A positive temperature keeps the order of a
    position's logits, so no ranking within a position changes. weights: of the blocks; None is all alike.
    """
    weights = np.ones(len(logits)) if weights is None else weights
    outcome = survived(block_accepted, logits.shape[1])
    before = np.ones(len(logits))
    temperatures = []
    for k in range(logits.shape[1]):
        column = logits[:, k : k + 1]
        grid = np.geomspace(LOWEST, HIGHEST, COARSE)
        best = _best(grid, column, before, outcome[:, k], weights)
        ratio = grid[1] / grid[0]
        best = _best(np.geomspace(best / ratio, best * ratio, FINE), column, before, outcome[:, k], weights)
        temperatures.append(float(best))
        before = before * conditional(column, np.array([best]))[:, 0]
    return tuple(temperatures)


def _best(grid, column, before, outcome, weights):
    errors = np.array([_ece(before * conditional(column, np.array([t]))[:, 0], outcome, weights) for t in grid])
    good = np.flatnonzero(errors <= errors.min())
    return grid[good[np.argmin(np.abs(np.log(grid[good])))]]


def _ece(prediction, outcome, weights):
    """As `confidence.bins(…).ece`: only the differences of sums are needed here."""
    place = np.minimum((prediction * BINS).astype(np.int64), BINS - 1)
    return np.abs(np.bincount(place, weights * (prediction - outcome), BINS)).sum() / weights.sum()
