"""The engine: prompts in, tokens out, many requests at a time, in token ids only.

Knows: the loop. Each step admits requests, plans rows and budget, dispatches propose and verify, and collects the
results of the step before; nothing in it waits for the step in flight.
Does not know: text, HTTP, model internals; the arithmetic of a step is in step.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspark import axes, kv
from jspark.arguments import Arguments
from jspark.budget import Plan, Policy
from jspark.calibration import Temperatures
from jspark.config import DecoderConfig, DrafterConfig, EngineConfig
from jspark.cost import CostFigures, CostTable
from jspark.errors import UserError
from jspark.intake import SlotTables, check_ids
from jspark.landing import fetch, fetch_later
from jspark.launcher import Launcher
from jspark.mask import Mask, host_mask, mask_size
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.online_sts import CalibrationFigures, online_calibration
from jspark.planner import Planner
from jspark.profile import Profile, Tell, tell_nobody
from jspark.programs import Programs
from jspark.propose import Proposal
from jspark.record import Observer, OnAbort
from jspark.request import LOGPROB_STEPS, FinishReason, Request, Stats, Update
from jspark.results import Flight, record, take_in
from jspark.scheduler import Running, Scheduler, Work
from jspark.shapes import VerifyShape, at_least
from jspark.sizing import attention, least_tokens, run_time_block_size, sized
from jspark.state import PackedArgs, PackedPacket, empty_slots
from jspark.step import Pools, Sampling, Spec
from jspark.step_cost import StepCost


class Engine:
    """Continuous batching of lossless speculative decoding over fixed slots.

    cost: the table for policies that bring none. Without it, one is measured where the policy has `needs_cost`,
    and under `Auto` where `measure_cost` says so; `Auto` also takes one that was kept. tell: see `profile`.
    observer: called with a `StepRecord` of every collected step, before its results are handed out. on_abort: with
    what `abort` is asked for.

    Raises:
        UserError: a drafter that does not fit the target, or sizes that contradict each other.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: tuple[Decoder, DecoderConfig],
        drafter: tuple[AnyDrafter, DrafterConfig] | None = None,
        *,
        policy: Policy | None = None,
        cost: CostTable | None = None,
        measure_cost: bool = False,
        tell: Tell = tell_nobody,
        mesh: Mesh | None = None,
        sts: Temperatures | Sequence[float] | None = None,
        observer: Observer | None = None,
        on_abort: OnAbort | None = None,
    ):
        self.mesh = mesh or axes.single_device_mesh()
        model, target_config = target
        self.drafter = drafter[0] if drafter else None
        self.block_size = run_time_block_size(config, drafter[1] if drafter else None, target_config)
        spec = Spec(
            target=target_config,
            drafter=drafter[1] if drafter else None,
            block_size=self.block_size,
            verify_mode=config.verify_mode,
            page_size=config.page_size,
        )
        self.config = config = sized(config, spec, self.mesh)
        spec = replace(spec, attention=attention(config, spec, self.mesh))
        self._observer, self._on_abort = observer, on_abort
        table = None if sts is None else Temperatures.of(sts).table(self.block_size)
        self._calibration = online_calibration(config, spec.drafter, self.block_size, table)
        if self._calibration is not None:
            table = self._calibration.temperatures
        background = config.background_compile
        self.programs = Programs(spec, model, self.drafter, self.mesh, table, background)
        pages = -(-config.max_total_tokens // config.page_size) + 1
        dtype = jnp.dtype(config.dtype)
        size = config.page_size
        self._pools = Pools(
            target=kv.make_pool(target_config, pages, size, dtype, self.mesh),
            drafter=kv.make_pool(drafter[1].backbone, pages, size, dtype, self.mesh) if drafter else None,
        )
        slots = config.max_running_requests
        chain = spec.drafter is not None and spec.drafter.eagle3 is not None
        carried = (target_config.hidden_size, dtype) if chain else None
        self._slots = self.programs.place(empty_slots(slots, carried))
        self._tables = SlotTables(self.programs, slots, target_config.vocab_size)
        self.scheduler = Scheduler(
            slots,
            kv.PageAllocator(pages, size),
            config.context_length,
            config.chunked_prefill_size,
            overhang=self.block_size,
            lookahead=int(chain) if config.prefix_cache else None,
        )
        self._vocab_size = target_config.vocab_size
        self.least_tokens = least_tokens(self.mesh)
        self.arguments = Arguments(config, spec, self.scheduler)
        #: Whether a step is dispatched before the one before it is collected.
        self.overlap = (
            config.overlap if config.overlap is not None else self.mesh.devices.flat[0].platform != "cpu"
        )
        self._flights: deque[Flight] = deque()
        # Pools, slots and tables belong to what it runs.
        self._launcher = Launcher()
        #: Figures of the requests that have ended.
        self.totals = Stats()
        self._step = 0
        self.programs.expect(self._pools, self._slots, self.arguments.blank)
        self._cost = StepCost(config, self.programs, self.scheduler, self.arguments.page_steps, self.overlap)
        if cost is not None:
            self._cost.install(cost)
        elif drafter:
            self._pools = self._cost.provide(policy, measure_cost, tell, self._pools)
        of_confidence = table, self._calibration
        self._planner = Planner(config, self.block_size, self.least_tokens, policy, self._cost, *of_confidence)

    @property
    def temperatures(self) -> np.ndarray | None:
        """Of confidence, [2, γ], as they are now; None without any."""
        return self._planner.temperatures

    @property
    def policy(self) -> Policy:
        """What decides how much each step verifies; may be changed between steps."""
        return self._planner.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._planner.policy = policy

    # ── the cost of a step ────────────────────────────────────────────────────────────────────────────────────

    @property
    def cost(self) -> CostTable | None:
        """The engine's own cost table as corrected so far, for policies that bring none."""
        return self._cost.table

    @property
    def cost_figures(self) -> CostFigures | None:
        """How well the cost table predicts the engine's steps; None without a table."""
        return self._cost.figures

    def profile(self, *, fresh: bool = False, limit: float | None = None, tell: Tell = tell_nobody) -> Profile:
        """The cost table of the engine's own programs, which policies see from now on; it is kept between runs.

        fresh: measures even where one was kept. limit: see `Profiler.measure`; None is for all programs. tell:
        hears how far that is. Raises UserError without a drafter, or while there are requests.
        """
        if not self.idle:
            raise UserError("the cost table cannot be measured while requests run; wait until they have ended")
        profile, self._pools = self._cost.profile(self._pools, fresh=fresh, limit=limit, tell=tell)
        return profile

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: Request) -> int:
        """How many tokens `request` may commit.

        Raises:
            UserError: it can never run: prompt empty or too long, ids out of range, too many of something.
        """
        limit = self.scheduler.check(request)
        check_ids(request, self._vocab_size)
        return limit

    def add(self, request: Request, limit: int | None = None) -> None:
        """Queues a request. limit: what `check` said of it; None asks `check`, whose UserError passes on."""
        limit = self.check(request) if limit is None else limit
        self.scheduler.add(request, limit, time.perf_counter())

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request now, wherever it is; its pages are free at once. Unknown ids are ignored.

        reason: for `on_abort`; stop where its text has come to a stop string, of which the engine knows nothing.
        """
        if request_id in self.scheduler.running:
            self.totals.add(self.scheduler.running[request_id].stats)
        self.scheduler.drop(request_id)
        if self._on_abort is not None:
            self._on_abort(request_id, reason)

    @property
    def calibration(self) -> CalibrationFigures | None:
        """How honest confidence is of late, for the thread that steps to ask; None where nothing watches it."""
        return None if self._calibration is None else self._calibration.figures

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not (self.scheduler.waiting or self.scheduler.running or self._flights)

    @property
    def kv_bytes(self) -> int:
        """Bytes of both page pools."""
        drafter = self._pools.drafter
        return self._pools.target.nbytes + (drafter.nbytes if drafter else 0)

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> list[Update]:
        """Dispatches one step, then handles the results of the step before it.

        Without overlap the results of the step itself are handled; budgets are two steps old in both cases, so
        the tokens are the same.
        """
        self._recalibrate()
        admitted = self.scheduler.admit(time.perf_counter())
        if admitted:
            self._admit(admitted)
        flight, updates = self._dispatch()
        if flight is not None:
            self._flights.append(flight)
        keep = 1 if self.overlap and flight is not None else 0
        while len(self._flights) > keep:
            updates += self._collect(self._flights.popleft())
        return updates

    def _recalibrate(self) -> None:
        """New temperatures of confidence, if a refit has ended; steps in flight keep theirs."""
        table = None if self._calibration is None else self._calibration.poll()
        if table is not None:
            self._launch(self.programs.use_temperatures, table)
            self._planner.temperatures = table

    def _admit(self, admitted: list[Running]) -> None:
        """Sees to what new requests need before their first step, which brings their state to the slot table."""
        for running in admitted:
            request = running.request
            if request.grammar and running.matcher is None:
                running.matcher = request.grammar.matcher()
            self._planner.admit(running)
            if request.params.penalized or request.steered:
                output = running.tokens[len(request.prompt) :]
                self._launch(self._tables.admit, request, output, running.slot).result()

    def _dispatch(self) -> tuple[Flight | None, list[Update]]:
        """The step that was dispatched, if any, and the results of earlier ones that had to be known for it."""
        now = time.perf_counter()
        work = self.scheduler.plan(self.arguments.tile, self.arguments.most_tiles)
        rows = work.rows
        if not rows:
            return None, []
        count = at_least(self.config.row_buckets, len(rows))
        sampling = _sampling(rows)
        # A fresh row has no features to draft from: its first token comes from its anchor alone.
        drafted = np.array([r.drafts and not r.fresh for r in work.decode], bool)
        drafts = self.block_size > 0 and bool(drafted.any())
        plan, verify_tokens = Plan(0, drafts=False), max(count, self.least_tokens)
        if drafts:
            plan, verify_tokens = self._planner.plan(self._step, work, count)
            drafts = plan.drafts
        pages, prefill = self.arguments.wanted(work)
        special = [r for r in work.decode if r.special]
        wanted = VerifyShape(
            count,
            pages,
            sampling,
            verify_tokens,
            drafts,
            prefill,
            logprobs=_most(r.request.params.logprobs for r in special),
            prompt_logprobs=_most(c.running.request.params.prompt_logprobs for c in work.chunks),
            masked=mask_size(sum(r.matcher is not None for r in special), count),
        )
        shape = self.programs.choose(wanted, [c.stop - c.start for c in work.chunks])
        args = self.arguments.step(work, shape, plan)
        updates: list[Update] = []
        if shape.masked:
            proposal = self._launch(self._propose, shape, args).result()
            mask, updates = self._mask(work, shape, proposal)
            packet = self._launch(self._verify, shape, args, proposal, mask)
        else:
            packet = self._launch(lambda: self._verify(shape, args, self._propose(shape, args), None))
        for running in work.decode:
            running.in_flight += 1
            running.fresh = False
        self._step += 1
        admissions = [r.admission for r in work.decode]
        slots = work.slots[: len(admissions)]
        flight = Flight(
            self._step,
            shape,
            now,
            packet,
            work.decode,
            slots,
            admissions,
            drafted & shape.drafts,
            work.chunks,
            self._planner.temperatures,
            plan.probe,
        )
        return flight, updates

    def _launch[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `call` after all that was launched before; beside the loop where steps overlap."""
        return self._launcher.run(self.overlap, call, *args, **kwargs)

    def _propose(self, shape: VerifyShape, args: PackedArgs) -> Proposal | None:
        """Launches the drafter, if the step drafts."""
        if shape.propose is None:
            return None
        tables = self._tables.take(penalties=shape.sampling.penalties, steering=shape.sampling.steering)
        self._pools, proposal = self.programs.propose(shape.propose, self._pools, self._slots, args, tables)
        return proposal

    def _verify(
        self, shape: VerifyShape, args: PackedArgs, proposal: Proposal | None, mask: Mask | None
    ) -> PackedPacket:
        """Launches the target, and the way of the results to the host."""
        tables = self._tables.take(penalties=shape.sampling.penalties, steering=shape.sampling.steering)
        self._pools, self._slots, tables, packet = self.programs.verify(
            shape, self._pools, self._slots, args, proposal, tables, mask
        )
        self._tables.update(tables)
        fetch_later(packet.words)
        return packet

    def _mask(self, work: Work, shape: VerifyShape, proposal: Proposal | None) -> tuple[Mask, list[Update]]:
        """Legal tokens of the rows that have a grammar.

        The exception to a loop that never waits: a grammar has to take in the tokens of the step before, whose
        results are returned, and to see this step's drafts. Both come to the host while the device drafts.
        """
        updates: list[Update] = []
        if any(r.matcher for r in work.decode):
            updates = [update for flight in self._flights for update in self._collect(flight)]
            self._flights.clear()
        matchers = [r.matcher if r.slot >= 0 else None for r in work.decode]
        drafts: list[list[int]] = [[] for _ in matchers]
        if proposal is not None and any(matchers):
            tokens = fetch(proposal.tokens).tolist()
            may = [r.has_features and r.drafts for r in work.decode]
            drafts = [own if drafts else [] for own, drafts in zip(tokens, may, strict=False)]
        width = 1 if proposal is None else proposal.tokens.shape[1] + 1
        mask = host_mask(matchers, drafts, shape.rows, width, self._vocab_size, shape.masked)
        return self.programs.place(mask), updates

    def _collect(self, flight: Flight) -> list[Update]:
        """Results of a step: plans and an observer learn of them, then the requests."""
        packet = flight.packet.result().host()
        now = time.perf_counter()
        self._cost.compare(flight, now)
        self._planner.tell(flight, packet)
        if self._observer is not None:
            self._observer(record(flight, packet, now, self.block_size))
        updates = take_in(flight, packet, now, self.scheduler.release)
        for update in updates:
            if update.finish_reason is not None:
                self.totals.add(update.stats)
        return updates


def _most(asked: Iterable[int | None]) -> int | None:
    """The step of likeliest tokens that serves all who ask; None when nobody does."""
    most = max((k for k in asked if k is not None), default=None)
    return None if most is None else at_least(LOGPROB_STEPS, most)


def _sampling(rows: list[Running]) -> Sampling:
    traits = 0
    for running in rows:
        traits |= running.traits
    return Sampling.of(traits)
