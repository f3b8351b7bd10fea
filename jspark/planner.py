"""How much a step verifies: the policy, and what it is told.

Knows: confidence of two steps ago, acceptance so far, when to draft nothing and when to try again.
Does not know: arrays on the device, programs, or how windows are shared out (allocate.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jspark.budget import BatchState, Full, Plan, Policy
from jspark.config import EngineConfig
from jspark.online import AcceptanceByPosition
from jspark.online_sts import OnlineCalibration
from jspark.results import Flight
from jspark.scheduler import Running, Work
from jspark.shapes import at_least, verify_ends
from jspark.step_cost import StepCost
from jspark.sts import calibrated

#: Steps of plain decoding after which a block is drafted all the same, to see whether it would pay.
PROBE_EVERY = 64


class _Result(NamedTuple):
    """A step's results as far as plans need them, of the rows that drafted."""

    step: int
    slots: np.ndarray
    admissions: np.ndarray
    window: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray


class Planner:
    """Makes the plan of each step.

    least_tokens: packed rows below which a program gets no cheaper. temperatures: of confidence, [2, γ]; they may
    be replaced between steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_size: int,
        least_tokens: int,
        policy: Policy | None,
        cost: StepCost,
        temperatures: np.ndarray | None,
        calibration: OnlineCalibration | None,
    ):
        self.policy = policy or Full()
        self.acceptance = AcceptanceByPosition(block_size)
        self.block_size = block_size
        self._config, self._cost = config, cost
        self.temperatures, self._calibration = temperatures, calibration
        self._least, self._undrafted = least_tokens, 0
        # By slot: who has it, its class, whether it may draft, and its confidence as of two steps ago, NaN where
        # there is none. Results younger than that wait.
        slots = config.max_running_requests + 1
        self._admission, self._request = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._sampled, self._drafts = np.zeros(slots, np.int64), np.zeros(slots, bool)
        self._confidence = np.full((slots, block_size), np.nan, np.float32)
        self._younger: deque[_Result] = deque()
        if block_size:
            # A policy that cannot plan says so here, not in the middle of a batch.
            unknown = np.full((1, block_size), np.nan)
            self.policy.plan(BatchState(1, block_size, (block_size + 1,), unknown, unknown, cost.table))

    def admit(self, running: Running) -> None:
        """Notes the slot's new owner."""
        slot = running.slot
        self._admission[slot], self._request[slot] = running.admission, running.request.id
        self._sampled[slot], self._drafts[slot] = running.sampled, running.drafts
        self._confidence[slot] = np.nan

    def tell(self, flight: Flight, packet: Any) -> None:
        """Takes a step's results (NumPy arrays); they count from two steps later on, so that a loop that waits for
        its results plans as one that does not."""
        if not packet.confidence.shape[1]:
            return
        if self._calibration is not None:
            self._calibrate(self._calibration, flight, packet)
        own = np.flatnonzero(flight.drafted)
        admissions = np.array(flight.admissions, np.int64)[own]
        figures = packet.window[own], packet.accepted[own], packet.confidence[own]
        self._younger.append(_Result(flight.number, flight.slots[own], admissions, *figures))

    def plan(self, step: int, work: Work, count: int) -> tuple[Plan, int]:
        """The plan of step `step` + 1 with its tier filled, and the packed verify rows, for `count` bucketed rows.

        static verifies whole blocks whatever the policy says, and cap-accept packs them whole.
        """
        while self._younger and self._younger[0].step <= step - 1:
            result = self._younger.popleft()
            held = self._admission[result.slots] == result.admissions
            slots = result.slots[held]
            self.acceptance.observe(self._sampled[slots], result.window[held], result.accepted[held])
            self._confidence[slots] = result.confidence[held]
        mode = self._config.verify_mode
        fewest, most = verify_ends(count, self.block_size, self._least)
        tiers = (*(t for t in self._config.token_tiers if fewest <= t < most), most)
        decode = work.decode
        slots = work.slots[: len(decode)]
        drafting = self._drafts[slots]
        positions = np.array([len(r.tokens) - 1 for r in decode])
        conditional = self._conditional(slots)
        all_draft = bool(drafting.all())
        if not all_draft:
            # Nothing of a row that does not draft survives.
            conditional[~drafting] = 0.0
        plan = self.policy.plan(
            BatchState(
                rows=len(decode),
                cost=self._cost.table,
                block_size=self.block_size,
                tiers=tiers,
                conditional=conditional,
                survival=np.cumprod(conditional, axis=1),
                context_tokens=int(positions.sum()),
                requests=self._request[slots],
                positions=positions,
            )
        )
        if not plan.drafts and mode != "static":
            self._undrafted += 1
            # What the last block was believed to be worth says little of the next one's, elsewhere in the text.
            self._confidence[slots] = np.nan
            if self._undrafted < PROBE_EVERY:
                return plan, fewest
            # Without drafts nothing is learnt; a whole block says whether drafting would pay by now.
            plan = Full().plan(BatchState(len(decode), self.block_size, tiers, conditional, conditional))
        self._undrafted = 0
        if self._calibration is not None and mode == "compact" and plan.drafts:
            plan = self._with_probes(self._calibration, plan, slots)
        least, able = 0, len(decode) if all_draft else int(drafting.sum())
        if not isinstance(plan.min_window, int) or plan.min_window:
            least = np.broadcast_to(np.minimum(plan.min_window, self.block_size), len(decode))[drafting].sum()
        wanted = min(max(plan.budget, int(least), 0), able * self.block_size)
        tier = at_least(tiers, len(decode) + wanted)
        # The tier is filled: rows that padding would take cost nothing.
        plan = replace(plan, budget=tier - len(decode))
        return plan, tier if mode == "compact" else most

    def _with_probes(self, calibration: OnlineCalibration, plan: Plan, slots: np.ndarray) -> Plan:
        """The plan with whole blocks of the rows that are probes; nothing of this step has been drafted yet."""
        probe = calibration.probes(slots, len(self._drafts))
        if not probe.any():
            return plan
        size = self.block_size
        most = size if plan.max_window is None else plan.max_window
        lows, highs = np.where(probe, size, plan.min_window), np.where(probe, size, most)
        return replace(plan, min_window=lows, max_window=highs, probe=probe)

    def _calibrate(self, calibration: OnlineCalibration, flight: Flight, packet: Any) -> None:
        """Hands on the blocks whose fate is known to the end: of probes, or all where all are verified whole."""
        whole, weight = flight.drafted, 1.0
        if self._config.verify_mode == "compact":
            if flight.probe is None:
                return
            whole, weight = whole & flight.probe, 1.0 / calibration.share
        n = len(whole)
        # A row that commits nothing had ended before.
        whole = whole & (packet.count[:n] > 0) & np.isfinite(packet.confidence[:n]).all(axis=1)
        classes = np.array([r.sampled for r in flight.rows], np.int64)[whole]
        calibration.observe(packet.confidence[:n][whole], classes, packet.block_accepted[:n][whole], weight)

    def _conditional(self, slots: np.ndarray) -> np.ndarray:
        """[rows, γ]: calibrated confidence; without one, the acceptance of late; NaN before there is any."""
        sampled, logits = self._sampled[slots], self._confidence[slots]
        known = np.isfinite(logits)
        confident = calibrated(logits, sampled, self.temperatures)
        return confident if known.all() else np.where(known, confident, self.acceptance.conditional(sampled))
