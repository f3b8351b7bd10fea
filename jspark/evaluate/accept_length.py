"""Accept length τ and its intervals, acceptance by position, and what a confidence threshold would have done.

Knows: steps as arrays. Does not know: how they came about, or how figures are shown.

τ is the paper's: tokens committed a target step, the bonus counted, over the steps after an answer's first token
(which comes from the prefill). The last step of an answer counts as far as its tokens are part of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jspark.sts import conditional

#: Resamples of a bootstrap, and the shares of them below the interval's two ends.
RESAMPLES, ENDS = 2000, (0.025, 0.975)
#: Thresholds of a sweep, on the conditional confidence.
THRESHOLDS = np.round(np.linspace(0.0, 0.95, 20), 2)


@dataclass(frozen=True)
class Figure:
    """An estimate with its 95% interval, from a bootstrap over prompts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resampled: Float[np.ndarray, " b"]) -> Figure:
        """The estimate and the percentiles of its resamples; NaN where nothing can be said."""
        known = np.sort(resampled[~np.isnan(resampled)])
        if not len(known):
            return cls(float(value), float("nan"), float("nan"))
        # Resamples themselves, nothing between two: a gain over nothing is infinite.
        low, high = (known[round(end * (len(known) - 1))] for end in ENDS)
        return cls(float(value), float(low), float(high))


@dataclass(frozen=True)
class Counts:
    """Tokens committed and steps taken, by prompt: all that τ needs."""

    tokens: Float[np.ndarray, " p"]
    steps: Float[np.ndarray, " p"]

    @classmethod
    def of(
        cls,
        prompt: Int[np.ndarray, " n"],
        count: Int[np.ndarray, " n"],
        prompts: int,
        keep: Bool[np.ndarray, " n"] | None = None,
    ) -> Counts:
        """From single steps: the prompt each belongs to, and the tokens it committed; `keep`: which ones count."""
        kept = np.ones(len(prompt), bool) if keep is None else keep
        return cls(
            np.bincount(prompt[kept], count[kept], prompts).astype(float),
            np.bincount(prompt[kept], minlength=prompts).astype(float),
        )

    def tau(self) -> float:
        """Σ tokens / Σ steps; NaN without a step."""
        return float(_ratio(self.tokens.sum(), self.steps.sum()))

    def resampled(self, seed: int) -> Float[np.ndarray, " b"]:
        """τ of RESAMPLES draws of prompts with replacement; the same seed draws the same prompts."""
        prompts = len(self.steps)
        rng = np.random.default_rng([seed, prompts])
        weights = rng.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES).astype(float)
        return _ratio(weights @ self.tokens, weights @ self.steps)


def _ratio(a, b):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.divide(a, b)


@dataclass(frozen=True)
class Macro:
    """τ of several data sets and of their mean, which gives every data set the same weight."""

    values: dict[str, float]
    draws: dict[str, np.ndarray]

    @classmethod
    def of(cls, counts: Mapping[str, Counts]) -> Macro:
        """From the counts of each data set; data sets are resampled apart from each other."""
        seeds = {name: i for i, name in enumerate(sorted(counts))}
        return cls(
            {name: c.tau() for name, c in counts.items()},
            {name: c.resampled(seeds[name]) for name, c in counts.items()},
        )

    def figure(self, name: str | None = None) -> Figure:
        """Of one data set, or of the mean."""
        return Figure.of(*self._pair(name))

    def over(self, other: Macro, name: str | None = None, minus: float = 0.0) -> Figure:
        """(τ − minus) of this over that of `other`, less 1: a gain, from a bootstrap paired by prompt.

        Both must be of the same data sets with the same prompts.
        """
        known = [n for n in self._known() if n in other._known()]
        (mine, my_draws), (theirs, their_draws) = self._pair(name, known), other._pair(name, known)
        return Figure.of(
            float(_ratio(mine - minus, theirs - minus)) - 1, _ratio(my_draws - minus, their_draws - minus) - 1
        )

    def _known(self):
        return [n for n, v in self.values.items() if np.isfinite(v)]

    def _pair(self, name, known=None):
        """(the estimate, its resamples); data sets without a step are left out of the mean."""
        if name is not None:
            return self.values[name], self.draws[name]
        known = self._known() if known is None else known
        if not known:
            return np.float64("nan"), np.full(RESAMPLES, np.nan)
        return np.mean([self.values[n] for n in known]), np.mean([self.draws[n] for n in known], axis=0)


def conditional_acceptance(block_accepted: Int[np.ndarray, " n"], block_size: int) -> list[float]:
    """The share of drafted tokens accepted where those before them were, by position; NaN where none was."""
    alive = np.array([np.sum(block_accepted >= k) for k in range(block_size + 1)], float)
    return _ratio(alive[1:], alive[:-1]).tolist()


def threshold_sweep(
    confidence: Float[np.ndarray, "n g"],
    block_accepted: Int[np.ndarray, " n"],
    temperatures: Sequence[float] | None = None,
) -> list[dict[str, float]]:
    """What cutting each block before its first conditional confidence below a threshold would have done to it.

    Replayed on fully verified blocks: mean window, share of the sent drafts that are accepted (NaN where none is
    sent), tokens a step, and the share of the accepted drafts of full blocks that remain.
    """
    sure = conditional(confidence, None if temperatures is None else np.asarray(temperatures))
    everything = block_accepted.sum()
    rows = []
    for threshold in THRESHOLDS:
        window = np.sum(np.cumprod(sure >= threshold, axis=1), axis=1)
        accepted = np.minimum(block_accepted, window)
        rows.append(
            {
                "threshold": float(threshold),
                "window": float(np.mean(window)),
                "acceptance_rate": float(_ratio(accepted.sum(), window.sum())),
                "tokens_per_step": float(np.mean(accepted) + 1),
                "kept": float(_ratio(accepted.sum(), everything)),
            }
        )
    return rows
