"""How honest a confidence is: calibration error, ranking, squared error.

Knows: predictions in [0, 1] and what came of them. Does not know: where either comes from.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jspark.sts import BINS, conditional, survived


@dataclass(frozen=True)
class Bins:
    """A reliability diagram: the number of predictions in each bin, their mean, and the share that came true.

    Both are NaN in empty bins.
    """

    count: Int[np.ndarray, " b"]
    predicted: Float[np.ndarray, " b"]
    observed: Float[np.ndarray, " b"]

    @property
    def ece(self) -> float:
        """Expected calibration error: mean of |predicted − observed| over the bins, weighted by their counts."""
        total = self.count.sum()
        gap = np.nan_to_num(np.abs(self.predicted - self.observed))
        return float(np.sum(gap * self.count) / total) if total else float("nan")


def bins(prediction: Float[np.ndarray, " n"], outcome: Bool[np.ndarray, " n"], number: int = BINS) -> Bins:
    """The reliability diagram of predictions."""
    place = np.minimum((prediction * number).astype(np.int64), number - 1)
    count = np.bincount(place, minlength=number)
    with np.errstate(invalid="ignore"):
        predicted = np.bincount(place, prediction, number) / count
        observed = np.bincount(place, outcome, number) / count
    return Bins(count, predicted, observed)


def auc(prediction: Float[np.ndarray, " n"], outcome: Bool[np.ndarray, " n"]) -> float:
    """Area under the ROC curve: the chance that a true case is ranked above a false one, ties counting half.

    NaN where all outcomes are the same.
    """
    _, inverse, count = np.unique(prediction, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # mean rank from 1 of equal predictions
    true = int(np.sum(outcome))
    false = len(outcome) - true
    if not true or not false:
        return float("nan")
    return float((np.sum(rank[inverse][outcome]) - true * (true + 1) / 2) / (true * false))


def brier(prediction: Float[np.ndarray, " n"], outcome: Bool[np.ndarray, " n"]) -> float:
    """Mean squared error of the predictions."""
    return float(np.mean((prediction - outcome) ** 2)) if len(prediction) else float("nan")


@dataclass(frozen=True)
class Scores:
    """ECE, AUC and Brier score of one set of predictions, with the shares predicted and observed.

    ece_noise: the ECE that these predictions would read on average if each were exactly right, from chance alone.
    """

    ece: float
    ece_noise: float
    auc: float
    brier: float
    predicted: float
    observed: float


def scores(prediction: Float[np.ndarray, " n"], outcome: Bool[np.ndarray, " n"], seed: int = 0) -> Scores:
    """All scores of one set of predictions."""
    rng = np.random.default_rng(seed)
    ideal = [bins(prediction, rng.random(len(prediction)) < prediction).ece for _ in range(5)]
    return Scores(
        ece=bins(prediction, outcome).ece,
        ece_noise=float(np.mean(ideal)),
        auc=auc(prediction, outcome),
        brier=brier(prediction, outcome),
        predicted=float(np.mean(prediction)) if len(prediction) else float("nan"),
        observed=float(np.mean(outcome)) if len(prediction) else float("nan"),
    )


def survival(logits: Float[np.ndarray, "n g"], temperatures: Float[np.ndarray, " g"] | None = None) -> np.ndarray:
    """Π_{i≤k} σ(logit_i / T_i) of every position, float64 [n, γ] (DSpark, its section on calibration)."""
    return np.cumprod(conditional(logits, temperatures), axis=1)


def by_position(
    logits: Float[np.ndarray, "n g"], block_accepted: Int[np.ndarray, " n"], temperatures=None
) -> tuple[list[dict], dict]:
    """Scores of prefix survival: of every position, and of all positions pooled, as plain dicts."""
    predicted = survival(logits, temperatures)
    outcome = survived(block_accepted, logits.shape[1])
    each = [asdict(scores(predicted[:, k], outcome[:, k], seed=k)) for k in range(logits.shape[1])]
    return each, asdict(scores(predicted.reshape(-1), outcome.reshape(-1)))
