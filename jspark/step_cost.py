"""The cost table of an engine: where it comes from, and how it follows the engine's own steps.

Knows: tables that are given, kept or measured, and which steps' times say something about one.
Does not know: how programs are timed (profile.py), or what policies make of a table (budget.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jspark.budget import Auto, Policy
from jspark.config import EngineConfig
from jspark.cost import CostFigures, CostTable, LiveCost
from jspark.errors import UserError
from jspark.profile import Launches, Profile, Profiler, Tell, warn_if_flat
from jspark.programs import Programs
from jspark.scheduler import Scheduler
from jspark.step import Pools

if TYPE_CHECKING:
    from jspark.results import Flight

#: Seconds after which measuring at the start begins no further program, by kind of device.
_LIMIT = {"cpu": 20}
_LIMIT_ELSEWHERE = 120


class StepCost:
    """What steps cost, as far as the engine knows; no table at first.

    overlap: a step is dispatched before the last one is collected. page_steps: the ladder of page counts.
    """

    def __init__(
        self,
        config: EngineConfig,
        programs: Programs,
        scheduler: Scheduler,
        page_steps: tuple[int, ...],
        overlap: bool,
    ):
        self._config, self._programs, self._scheduler, self.overlap = config, programs, scheduler, overlap
        self._profiler = Profiler(programs, config, page_steps, scheduler.context_length)
        self._live: LiveCost | None = None
        # When the last step was collected, and how many programs there were.
        self._collected, self._count = 0.0, 0

    @property
    def table(self) -> CostTable | None:
        """The table as corrected so far."""
        return None if self._live is None else self._live.table

    @property
    def figures(self) -> CostFigures | None:
        """How well the table predicts; None without a table."""
        return None if self._live is None else self._live.figures

    # ── where it comes from ───────────────────────────────────────────────────────────────────────────────────

    def install(self, table: CostTable) -> None:
        """Takes a table; warns of one that says nothing."""
        warn_if_flat(table)
        self._live = LiveCost(table, frozen=self._config.freeze_cost_table)

    def provide(self, policy: Policy | None, measure: bool, tell: Tell, pools: Pools) -> Pools:
        """Sees to the table that `policy` needs or may use: one that was kept or, within the limit, a new one.

        measure: whether `Auto` is worth measuring for. Returns the pools, which measuring uses up.
        """
        if getattr(policy, "needs_cost", False) or (measure and policy == Auto()):
            platform = self._programs.mesh.devices.flat[0].platform
            limit = self._config.profile_seconds or _LIMIT.get(platform, _LIMIT_ELSEWHERE)
            return self.profile(pools, fresh=False, limit=limit, tell=tell)[1]
        if policy == Auto() and (kept := self._profiler.kept()) is not None:
            self.install(kept.table)
        return pools

    def profile(self, pools: Pools, *, fresh: bool, limit: float | None, tell: Tell) -> tuple[Profile, Pools]:
        """The table of the engine's own programs, kept or measured, installed; and the pools, which that uses up.

        The engine is idle. Raises UserError without a drafter.
        """
        if self._programs.spec.drafter is None:
            raise UserError("a cost table weighs drafts, and there is no drafter; name one")
        profile = None if fresh else self._profiler.kept()
        if profile is None:
            profile, pools = self._measure(pools, limit, tell)
            self._profiler.keep(profile)
        self.install(profile.table)
        return profile, pools

    def _measure(self, pools: Pools, limit: float | None, tell: Tell) -> tuple[Profile, Pools]:
        allocator, cache = self._scheduler.allocator, self._scheduler.cache
        wanted = min(self._profiler.pages_wanted, allocator.free + allocator.idle)
        if cache is not None and allocator.free < wanted:
            cache.make_room(wanted)
        pages = allocator.take(wanted)
        slots = self._config.max_running_requests
        launches = Launches(self._programs, pools, slots, pages, np.random.default_rng(0))
        try:
            profile = self._profiler.measure(launches, limit, tell)
        finally:
            allocator.give_back(pages)
        return profile, launches.pools

    # ── how it follows ────────────────────────────────────────────────────────────────────────────────────────

    def compare(self, flight: Flight, now: float) -> None:
        """Holds a step that was collected `now` against the table.

        A step took the time since the step before was collected, which kept the device busy until then; in a loop
        that waits, the time since its dispatch. Steps say nothing of their programs when the device had a pause
        before, when they had prompt chunks or grammars, and when something was compiled beside them.
        """
        before, self._collected = self._collected, now
        count, self._count = self._count, self._programs.report.programs
        live, shape = self._live, flight.shape
        if live is None or shape.prefill or shape.masked:
            return
        if count != self._count or self._programs.background.busy or (self.overlap and flight.dispatched > before):
            return
        context = sum(r.position for r in flight.rows)
        predicted = live.table.seconds(shape.rows, shape.verify_tokens, context, drafts=shape.drafts)
        live.observe(shape.verify_tokens, predicted, now - (before if self.overlap else flight.dispatched))
