"""What a step costs: the measured table, its file forms, and its correction while the engine runs.

Knows: host numbers only.
Does not know: how programs are timed (profile.py) or what is done with the cost (budget.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jspark.errors import UserError
from jspark.files import MAX_JSON, UnreadableError, read_text

#: Dearest over cheapest verification up to which a table says nothing about the budget.
FLAT = 1.02

_FORMS = (
    'a cost table must be JSON of the form {"draft": {rows: seconds}, "verify": {tokens: seconds}, "context": '
    "seconds}, or one of SGLang's (sample_batch_tokens with sample_steps_per_sec; bias_seconds with bs_probes, "
    "alpha_seconds, m_probes, theta_seconds)"
)


@dataclass(frozen=True)
class CostTable:
    """Measured cost of a step in seconds: draft(R) + verify(T) + context · KV tokens read.

    draft: seconds by rows R. verify: seconds by packed tokens T (anchors included). context: seconds a KV token.
    lookup: `up`: programs exist for the measured sizes only, so a size costs what the next larger measured one
    does, and beyond the largest, cost grows in proportion to size. SGLang's tables read otherwise: `down` takes
    the largest measured size that is not larger, `linear` interpolates; both stay level outside. Raises UserError
    when a part is empty or costs are not numbers of 0 and more.
    """

    draft: Mapping[int, float]
    verify: Mapping[int, float]
    context: float = 0.0
    lookup: Literal["up", "down", "linear"] = "up"

    def __post_init__(self) -> None:
        for name in ("draft", "verify"):
            steps = getattr(self, name)
            if not steps or not all(size > 0 and 0 <= cost < math.inf for size, cost in steps.items()):
                raise UserError(
                    f"the cost table's {name!r} must map at least one positive size to seconds of 0 or more; "
                    "measure the table again"
                )
            object.__setattr__(self, name, dict(sorted(steps.items())))
        if min(self.draft.values()) + min(self.verify.values()) <= 0:
            raise UserError("the cost table has steps that take no time; measure the table again")
        if not 0 <= self.context < math.inf:
            raise UserError(
                f"the cost table's 'context' is {self.context}; it must be seconds per KV token, 0 or more"
            )

    def seconds(self, rows: int, tokens: int, context_tokens: int = 0, *, drafts: bool = True) -> float:
        """Cost of a step of `rows` requests and `tokens` packed tokens that reads `context_tokens` of KV."""
        draft = self._look_up(self.draft, rows) if drafts else 0.0
        return draft + self._look_up(self.verify, tokens) + self.context * context_tokens

    def _look_up(self, steps: Mapping[int, float], size: int) -> float:
        sizes = list(steps)
        if self.lookup == "linear":
            return float(np.interp(size, sizes, list(steps.values())))
        if self.lookup == "down":
            return steps[max((s for s in sizes if s <= size), default=sizes[0])]
        fits = next((s for s in sizes if s >= size), None)
        return steps[fits] if fits is not None else steps[sizes[-1]] * size / sizes[-1]

    @property
    def is_flat(self) -> bool:
        """Whether verifying more tokens costs (almost) nothing, so that any search verifies everything."""
        return max(self.verify.values()) <= FLAT * min(self.verify.values())

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Reads what `to_json` wrote, and both of SGLang's forms; raises UserError for anything else."""
        try:
            raw = json.loads(text)
            if "sample_batch_tokens" in raw:
                sizes, rates = _numbers(raw, "sample_batch_tokens", "sample_steps_per_sec")
                return cls(
                    {1: 0.0}, {int(t): 1.0 / rate for t, rate in zip(sizes, rates, strict=True)}, lookup="down"
                )
            if "bias_seconds" in raw:
                rows, alpha = _numbers(raw, "bs_probes", "alpha_seconds")
                sizes, theta = _numbers(raw, "m_probes", "theta_seconds")
                bias = float(raw["bias_seconds"])
                draft = {int(r): bias + a for r, a in zip(rows, alpha, strict=True)}
                return cls(draft, {int(t): s for t, s in zip(sizes, theta, strict=True)}, lookup="linear")
            draft, verify = ({int(k): float(v) for k, v in raw[name].items()} for name in ("draft", "verify"))
            return cls(draft, verify, float(raw.get("context", 0.0)), raw.get("lookup", "up"))
        except UserError:
            raise
        except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{_FORMS}; this text is neither, correct it") from None

    @classmethod
    def from_file(cls, path: str) -> CostTable:
        """Reads a table; raises UserError when there is none."""
        try:
            text = read_text(Path(path), MAX_JSON)
        except UnreadableError as error:
            raise UserError(f"the cost table {path} cannot be read ({error}); pass a file that exists") from None
        return cls.from_json(text)

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON knows it."""
        return {"draft": self.draft, "verify": self.verify, "context": self.context, "lookup": self.lookup}

    def to_json(self) -> str:
        """The table as JSON text."""
        return json.dumps(self.to_dict(), indent=2)


def _numbers(raw: dict[str, Any], sizes: str, values: str) -> tuple[list[float], list[float]]:
    probes, costs = [float(x) for x in raw[sizes]], [float(x) for x in raw[values]]
    if len(probes) != len(costs) or probes != sorted(set(probes)):
        raise ValueError(f"{sizes} must increase and be as many as {values}")
    return probes, costs


def additive(draft: Mapping[int, float], verify: Mapping[tuple[int, int], float]) -> CostTable:
    """A table from measured programs: draft by R, verify by (R, T).

    A tier that several row counts reach costs its median; what rows cost beyond that goes to the draft side.
    Both sides are made monotone: noise must not make a larger step look cheaper.
    """
    tokens = sorted({t for _, t in verify})
    by_tier = {t: float(np.median([s for (_, x), s in verify.items() if x == t])) for t in tokens}
    by_tier = _monotone(by_tier)
    rows = sorted(set(draft) | {r for r, _ in verify})
    by_rows = {}
    for r in rows:
        beyond = [s - by_tier[t] for (x, t), s in verify.items() if x == r]
        by_rows[r] = max(0.0, draft.get(r, 0.0) + (float(np.median(beyond)) if beyond else 0.0))
    return CostTable(_monotone(by_rows), by_tier)


def _monotone(steps: dict[int, float]) -> dict[int, float]:
    sizes = sorted(steps)
    return dict(zip(sizes, np.maximum.accumulate([steps[s] for s in sizes]).tolist(), strict=True))


class Correction:
    """Follows measured step times: one factor a tier, moved slowly and never far.

    A step's time says how wrong the table is at its tier. The factor moves by `rate` of the difference in
    logarithms, a measurement counts for at most `outlier` times the prediction either way, and a factor stays
    within 1/limit … limit: a pause of the machine cannot turn the policy over. A tier not seen yet follows the
    nearest one that was.
    """

    def __init__(self, rate: float = 0.02, limit: float = 4.0, outlier: float = 2.0):
        self._rate, self._limit, self._outlier = rate, math.log(limit), math.log(outlier)
        self._log_factor: dict[int, float] = {}
        self.frozen = False

    def observe(self, tier: int, predicted: float, measured: float) -> None:
        """Takes in a step of tier `tier`; `predicted` is the corrected prediction."""
        if self.frozen or not (predicted > 0 and measured > 0):
            return
        error = math.log(measured / predicted)
        step = self._rate * max(-self._outlier, min(self._outlier, error))
        factor = self._nearest(tier) + step
        self._log_factor[tier] = max(-self._limit, min(self._limit, factor))

    def _nearest(self, tier: int) -> float:
        if not self._log_factor:
            return 0.0
        return self._log_factor[min(self._log_factor, key=lambda t: abs(math.log(t / tier)))]

    def apply(self, table: CostTable) -> CostTable:
        """The table as measured steps have corrected it. Monotone again, so a lone factor makes no cheap tier."""
        if not self._log_factor:
            return table
        verify = {t: s * math.exp(self._nearest(t)) for t, s in table.verify.items()}
        return CostTable(table.draft, _monotone(verify), table.context, table.lookup)

    @property
    def factors(self) -> dict[int, float]:
        """Measured over predicted, by tier."""
        return {t: math.exp(f) for t, f in sorted(self._log_factor.items())}


#: Measured steps between two corrections of the table that policies see.
_APPLY_EVERY = 16
#: Share of a step in the figures of late.
_RECENT = 0.02


@dataclass(frozen=True)
class CostFigures:
    """How well the table predicts. steps: measured ones. predicted, measured: seconds of a step, means of late.

    factors: what correction has made of each tier's verification, 1 where it never ran. frozen: nothing is
    corrected.
    """

    steps: int
    predicted: float
    measured: float
    factors: dict[int, float]
    frozen: bool


class LiveCost:
    """The table that policies see: `measured` at first, then corrected by the times of the engine's own steps.

    frozen: the table stays as it is; predictions are compared with measurements all the same.
    """

    def __init__(self, measured: CostTable, frozen: bool = False):
        self.measured = self.table = measured
        self._correction = Correction()
        self._correction.frozen = frozen
        self._steps, self._means = 0, np.zeros(2)

    def observe(self, tokens: int, predicted: float, seconds: float) -> None:
        """Takes in a step of tier `tokens` that took `seconds`; predicted: by `table`."""
        self._correction.observe(tokens, predicted, seconds)
        pair = np.array([predicted, seconds])
        # A plain mean until there are enough steps for one of late.
        self._steps += 1
        self._means += max(_RECENT, 1 / self._steps) * (pair - self._means)
        if self._steps % _APPLY_EVERY == 0:
            self.table = self._correction.apply(self.measured)

    @property
    def figures(self) -> CostFigures:
        """What came of it so far."""
        predicted, measured = self._means.tolist()
        factors = dict.fromkeys(self.measured.verify, 1.0) | self._correction.factors
        return CostFigures(self._steps, predicted, measured, factors, self._correction.frozen)
