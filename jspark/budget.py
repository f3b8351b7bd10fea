"""How many drafted tokens a step verifies: the cost of a step, and policies that weigh it against the gain.

Knows: host numbers only (NumPy). Does not know: the device, the engine, how windows are shared out
(allocate.py). The engine, the simulator and the notebooks call the same objects.

Non-anticipating: a plan is made before its step from the confidence of two steps ago. It may search globally
over that, since nothing in it depends on the tokens that it decides about. A policy must never read the
confidence of the step that it plans; what depends on that (a threshold) goes into the plan, and the device
applies it token by token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jspark.cost import CostTable
from jspark.errors import UserError


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
    requests: np.ndarray | tuple[int, ...] = ()
    positions: np.ndarray | tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a policy decides; allocate.py shares it out.

    budget: K, drafted tokens that the step verifies at most. threshold: windows end before the first
    conditional confidence below it. min_window, max_window: of every row, or one a row; max_window None is γ.
    drafts: whether the step drafts at all; without, it is a step of plain decoding. probe: rows whose whole block
    is verified for calibration; the engine's, no policy sets it.
    """

    budget: int
    threshold: float = 0.0
    min_window: int | np.ndarray = 0
    max_window: int | np.ndarray | None = None
    drafts: bool = True
    probe: np.ndarray | None = None


class Policy(Protocol):
    """Chooses the plan of a step from what was known two steps before.

    A policy with an attribute `needs_cost` that is true gets an engine that measures its cost table.
    """

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
class Auto:
    """`GlobalArgmax` once the engine has a cost table, `Full` before."""

    def plan(self, state: BatchState) -> Plan:
        """The plan of whichever it is."""
        return (Full() if state.cost is None else GlobalArgmax()).plan(state)


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
        return Plan(state.rows * self.window, max_window=self.window, drafts=self.window > 0)


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
    equally good ones the smallest wins. Drafting nothing is a candidate too: it saves the draft's cost.
    cost: the table to plan with; None is the engine's own, BatchState.cost. min_gain: what trimming, or not
    drafting, must promise over the alternative; less than that is noise.
    """

    cost: CostTable | None = None
    min_gain: float = 0.02

    @property
    def needs_cost(self) -> bool:
        """It has no table of its own, so the engine must have one."""
        return self.cost is None

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

        def tokens_per_second(budget: int, *, drafts: bool = True) -> float:
            tokens = state.rows + budget
            tier = next((tier for tier in state.tiers if tier >= tokens), tokens)
            seconds = cost.seconds(state.rows, tier, state.context_tokens, drafts=drafts)
            return (state.rows + gain[budget]) / seconds

        rates = {budget: tokens_per_second(budget) for budget in budgets}
        best = max(budgets, key=lambda budget: rates[budget])
        if rates[best] < (1 + self.min_gain) * rates[most]:
            best = most
        if tokens_per_second(0, drafts=False) > (1 + self.min_gain) * rates[best]:
            return Plan(0, drafts=False)
        return Plan(best)


def parse_policy(text: str) -> Policy:
    """The policy named on a command line: auto, full, fixed:3, threshold:0.5, argmax, argmax:table.json.

    `argmax` alone plans with the engine's own cost table. Raises UserError for anything else.
    """
    name, _, value = text.partition(":")
    if text == "auto":
        return Auto()
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
        return GlobalArgmax(CostTable.from_file(value))
    raise UserError(
        f"unknown verify policy {text!r}; write auto, full, fixed:K, threshold:X, argmax or argmax:FILE"
    )
