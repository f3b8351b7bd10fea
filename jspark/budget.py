"""How many drafted tokens a step verifies: the cost of a step, and policies that weigh it against the gain.

Knows: host numbers only (NumPy). Does not know: the device, the engine, how windows are shared out
(allocate.py). The engine, the simulator and the notebooks call the same objects.

Non-anticipating: a plan is made before its step from the confidence of two steps ago. It may search globally
over that, since nothing in it depends on the tokens that it decides about. A policy must never read the
confidence of the step that it plans; what depends on that (a threshold) goes into the plan, and the device
applies it token by token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jspark.errors import UserError
from jspark.files import MAX_JSON, UnreadableError, read_text

#: Dearest over cheapest verification up to which a table says nothing about the budget.
FLAT = 1.02


@dataclass(frozen=True)
class CostTable:
    """Measured cost of a step in seconds: draft(R) + verify(T) + context · KV tokens read.

    draft: seconds by rows R. verify: seconds by packed tokens T (anchors included). context: seconds a KV
    token. Programs exist for the measured sizes only, so a size costs what the next larger measured one does
    (a staircase); beyond the largest, cost grows in proportion to size. Raises UserError when a part is empty
    or not positive.
    """

    draft: Mapping[int, float]
    verify: Mapping[int, float]
    context: float = 0.0

    def __post_init__(self) -> None:
        for name in ("draft", "verify"):
            steps = getattr(self, name)
            positive = all(size > 0 and 0 < cost < math.inf for size, cost in steps.items())
            if not steps or not positive:
                raise UserError(
                    f"the cost table's {name!r} must map at least one positive size to positive seconds; "
                    "measure the table again"
                )
            object.__setattr__(self, name, dict(sorted(steps.items())))
        if not 0 <= self.context < math.inf:
            raise UserError(
                f"the cost table's 'context' is {self.context}; it must be seconds per KV token, 0 or more"
            )

    def seconds(self, rows: int, tokens: int, context_tokens: int = 0) -> float:
        """Cost of a step of `rows` requests and `tokens` packed tokens that reads `context_tokens` of KV."""
        return _stair(self.draft, rows) + _stair(self.verify, tokens) + self.context * context_tokens

    @property
    def is_flat(self) -> bool:
        """Whether verifying more tokens costs (almost) nothing, so that any search verifies everything."""
        return max(self.verify.values()) <= FLAT * min(self.verify.values())

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Reads what `to_json` wrote; raises UserError for anything else."""
        try:
            raw = json.loads(text)
            draft, verify = ({int(k): float(v) for k, v in raw[name].items()} for name in ("draft", "verify"))
            context = float(raw.get("context", 0.0))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise UserError(
                'a cost table must be JSON of the form {"draft": {rows: seconds}, "verify": {tokens: seconds}, '
                '"context": seconds}, which this text is not; correct it'
            ) from None
        return cls(draft, verify, context)

    def to_json(self) -> str:
        """The table as JSON text."""
        return json.dumps({"draft": self.draft, "verify": self.verify, "context": self.context}, indent=2)


def _stair(steps: Mapping[int, float], size: int) -> float:
    for measured, cost in steps.items():
        if measured >= size:
            return cost
    largest = max(steps)
    return steps[largest] * size / largest


@dataclass(frozen=True)
class BatchState:
    """What a policy may know when it plans a step of at least one row.

    rows: R, requests that decode in the step. block_size: γ. tiers: token tiers T that can run, in increasing
    order. survival, conditional: [rows, γ] of two steps ago; a row without such history is NaN and counts as
    certain to survive. cost: the engine's own table, None before it is measured. context_tokens: KV tokens
    that the step reads. requests, positions: who the rows are and where their anchors stood when the last
    results came in, for policies that treat requests differently.
    """

    rows: int
    block_size: int
    tiers: tuple[int, ...]
    survival: np.ndarray
    conditional: np.ndarray
    cost: CostTable | None = None
    context_tokens: int = 0
    requests: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a policy decides; allocate.py shares it out.

    budget: K, drafted tokens that the step verifies at most. threshold: windows end before the first
    conditional confidence below it. min_window, max_window: of every row, or one a row; max_window None is γ.
    """

    budget: int
    threshold: float = 0.0
    min_window: int | np.ndarray = 0
    max_window: int | np.ndarray | None = None


class Policy(Protocol):
    """Chooses the plan of a step from what was known two steps before."""

    def plan(self, state: BatchState) -> Plan:
        """The plan of the next step."""
        ...


@dataclass(frozen=True)
class Full:
    """Verifies every drafted token."""

    def plan(self, state: BatchState) -> Plan:
        """K = rows · γ."""
        return Plan(state.rows * state.block_size)


@dataclass(frozen=True)
class Fixed:
    """Verifies the first `window` drafted tokens of every row, γ at most; 0 is no speculation."""

    window: int

    def plan(self, state: BatchState) -> Plan:
        """K = rows · window; UserError for a window longer than the block."""
        if self.window > state.block_size:
            raise UserError(
                f"the policy fixed:{self.window} verifies more than the {state.block_size} tokens of a block; "
                f"write fixed:{state.block_size} or less"
            )
        return Plan(state.rows * self.window, max_window=self.window)


@dataclass(frozen=True)
class Threshold:
    """Verifies a row's drafted tokens up to the first whose conditional confidence is below `value`.

    The confidence is the step's own: the device compares, and position k's reads tokens before k only.
    """

    value: float

    def plan(self, state: BatchState) -> Plan:
        """K = rows · γ; the threshold alone cuts."""
        return Plan(state.rows * state.block_size, threshold=self.value)


@dataclass(frozen=True)
class GlobalArgmax:
    """Maximises expected committed tokens a second over all budgets, the paper's production rule (its section
    on hardware-aware scheduling; Algorithm 1 without the early stop, which old confidence makes unnecessary).

    A budget K commits τ(K) = rows + the K largest survivals of the batch and costs the tier that holds rows +
    K tokens. Tokens that fill a tier are free, so only K = T − rows and K = rows · γ are candidates; of
    equally good ones the smallest wins. cost: the table to plan with; None is the engine's own,
    BatchState.cost.
    """

    cost: CostTable | None = None

    def plan(self, state: BatchState) -> Plan:
        """The budget of the best tier; raises UserError when there is no cost table at all."""
        cost = self.cost or state.cost
        if cost is None:
            raise UserError(
                "the argmax policy has no cost table; pass argmax:FILE with one, or give the engine its cost"
            )
        most = state.rows * state.block_size
        survival = np.where(np.isnan(state.survival), 1.0, state.survival).astype(np.float64)
        gain = np.concatenate([[0.0], np.cumsum(np.sort(survival, axis=None)[::-1])])
        budgets = sorted({min(tier - state.rows, most) for tier in state.tiers if tier >= state.rows} | {most})

        def tokens_per_second(budget: int) -> float:
            tokens = state.rows + budget
            tier = next((tier for tier in state.tiers if tier >= tokens), tokens)
            return (state.rows + gain[budget]) / cost.seconds(state.rows, tier, state.context_tokens)

        return Plan(max(budgets, key=tokens_per_second))


def parse_policy(text: str) -> Policy:
    """The policy named on a command line: full, fixed:3, threshold:0.5, argmax, argmax:table.json.

    `argmax` alone plans with the engine's own cost table. Raises UserError for anything else.
    """
    name, _, value = text.partition(":")
    if text == "full":
        return Full()
    if text == "argmax":
        return GlobalArgmax()
    if name == "fixed" and value.isdecimal():
        return Fixed(int(value))
    if name == "threshold":
        try:
            threshold = float(value)
        except ValueError:
            threshold = math.nan
        if not 0 <= threshold <= 1:
            raise UserError(f"{text!r}: a threshold is a probability; write threshold:0.5, say")
        return Threshold(threshold)
    if name == "argmax" and value:
        try:
            table = read_text(Path(value), MAX_JSON)
        except UnreadableError as error:
            raise UserError(f"the cost table {value} cannot be read ({error}); pass a file that exists") from None
        return GlobalArgmax(CostTable.from_json(table))
    raise UserError(f"unknown verify policy {text!r}; write full, fixed:K, threshold:X or argmax:FILE")
