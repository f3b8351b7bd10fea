"""How much a step verifies: the policy, and what it is told.

Knows: confidence of two steps ago, acceptance so far, when to draft nothing and when to try again.
Does not know: arrays on the device, programs, or how windows are shared out (allocate.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jspark.budget import BatchState, Full, Plan, Policy
from jspark.calibration import Temperatures
from jspark.config import EngineConfig
from jspark.cost import CostTable
from jspark.online import AcceptanceByPosition
from jspark.programs import at_least
from jspark.scheduler import Running

#: Steps of plain decoding after which a block is drafted again, to see whether it would pay.
PROBE_EVERY = 64


@dataclass(frozen=True)
class _Result:
    """A step's results as far as plans need them. seen: class, windows and acceptance of the rows that drafted."""

    step: int
    rows: list[Running]
    admissions: list[int]
    confidence: np.ndarray
    seen: tuple[np.ndarray, np.ndarray, np.ndarray] | None


class Planner:
    """Makes the plan of each step.

    least_tokens: packed rows below which a program gets no cheaper. drafts: whether a request may draft at all.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_size: int,
        least_tokens: int,
        policy: Policy | None,
        cost: CostTable | None,
        sts: Temperatures | Sequence[float] | None,
        drafts: Callable[[Running], bool],
    ):
        self.policy = policy or Full()
        self.acceptance = AcceptanceByPosition(block_size)
        self.block_size = block_size
        self.cost = cost
        self._config, self._drafts = config, drafts
        self._sts = None if sts is None else Temperatures.of(sts).table(block_size)
        self._least, self._undrafted = least_tokens, 0
        # Confidence by slot as of two steps ago, NaN where there is none; results younger than that wait here.
        self._confidence = np.full((config.max_running_requests + 1, block_size), np.nan, np.float32)
        self._younger: deque[_Result] = deque()
        if block_size:
            # A policy that cannot plan says so here, not in the middle of a batch.
            unknown = np.full((1, block_size), np.nan)
            self.policy.plan(BatchState(1, block_size, (block_size + 1,), unknown, unknown, cost))

    def admit(self, running: Running) -> None:
        """Forgets the slot's previous owner."""
        self._confidence[running.slot] = np.nan

    def tell(self, step: int, rows: list[Running], admissions: list[int], packet: Any) -> None:
        """Takes a step's results (NumPy arrays), drafts or not; they count from two steps later on, so that a loop
        that waits for its results plans as one that does not."""
        held = [i for i, (r, admission) in enumerate(zip(rows, admissions, strict=True)) if r.holds(admission)]
        drafted = [i for i in held if rows[i].has_features and self._drafts(rows[i])]
        sampled = np.array([rows[i].request.params.temperature > 0 for i in drafted], bool)
        seen = (sampled, packet.window[drafted], packet.accepted[drafted]) if packet.confidence.shape[1] else None
        self._younger.append(_Result(step, rows, admissions, packet.confidence, seen))

    def plan(self, step: int, decode: list[Running], count: int) -> tuple[Plan, int]:
        """The plan of step `step` + 1 with its tier filled, and the packed verify rows, for `count` bucketed rows.

        static verifies whole blocks whatever the policy says, and cap-accept packs them whole.
        """
        while self._younger and self._younger[0].step <= step - 1:
            result = self._younger.popleft()
            if result.seen is None:
                continue
            self.acceptance.observe(*result.seen)
            for running, admission, values in zip(result.rows, result.admissions, result.confidence, strict=False):
                if running.holds(admission):
                    self._confidence[running.slot] = values
        mode, width = self._config.verify_mode, self.block_size + 1
        fewest, most = max(count, self._least), max(count * width, self._least)
        tiers = (*(t for t in self._config.token_tiers if fewest <= t < most), most)
        drafting = np.array([self._drafts(r) for r in decode], bool)
        conditional = self._conditional(decode)
        # Nothing of a row that does not draft survives.
        conditional[~drafting] = 0.0
        plan = self.policy.plan(
            BatchState(
                rows=len(decode),
                cost=self.cost,
                block_size=self.block_size,
                tiers=tiers,
                conditional=conditional,
                survival=np.cumprod(conditional, axis=1),
                context_tokens=sum(r.position for r in decode),
                requests=tuple(r.request.id for r in decode),
                positions=tuple(r.position for r in decode),
            )
        )
        if not plan.drafts and mode != "static":
            self._undrafted += 1
            if self._undrafted < PROBE_EVERY:
                return plan, fewest
            # Without drafts nothing is learnt; a whole block says whether drafting would pay by now.
            plan = Full().plan(BatchState(len(decode), self.block_size, tiers, conditional, conditional))
        self._undrafted = 0
        least = int(np.sum(np.broadcast_to(np.minimum(plan.min_window, self.block_size), len(decode))[drafting]))
        wanted = min(max(plan.budget, least, 0), int(drafting.sum()) * self.block_size)
        tier = at_least(tiers, len(decode) + wanted)
        # The tier is filled: rows that padding would take cost nothing.
        plan = replace(plan, budget=tier - len(decode))
        return plan, tier if mode == "compact" else most

    def _conditional(self, decode: list[Running]) -> np.ndarray:
        """[rows, γ]: calibrated confidence; without one, the acceptance of late; NaN before there is any."""
        sampled = np.array([r.request.params.temperature > 0 for r in decode], bool)
        logits = self._confidence[[r.slot for r in decode]]
        known = np.isfinite(logits)
        if self._sts is not None:
            logits = logits / self._sts[sampled.astype(int)]
        with np.errstate(over="ignore"):
            confident = 1.0 / (1.0 + np.exp(-logits))
        return np.where(known, confident, self.acceptance.conditional(sampled))
