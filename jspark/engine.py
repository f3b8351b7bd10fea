"""The engine: prompts in, tokens out, many requests at a time, in token ids only.

Knows: the loop. Each step admits requests, plans rows and budget, dispatches propose and verify, and collects the
results of the step before; nothing in it waits for the step in flight.
Does not know: text, HTTP, model internals; the arithmetic of a step is in step.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspark import axes, kv
from jspark.arguments import Arguments
from jspark.budget import Plan, Policy
from jspark.calibration import Temperatures
from jspark.config import DecoderConfig, DrafterConfig, EngineConfig
from jspark.cost import CostTable
from jspark.intake import SlotTables, check_ids
from jspark.mask import Mask, host_mask
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.planner import Planner
from jspark.programs import Programs, ProposeShape, VerifyShape, at_least
from jspark.propose import Proposal
from jspark.record import Observer
from jspark.request import LOGPROB_STEPS, Request, Update
from jspark.results import Flight, record, take_in
from jspark.scheduler import Running, Scheduler, Work
from jspark.sizing import attention, least_tokens, run_time_block_size, sized
from jspark.state import empty_slots
from jspark.step import Pools, Sampling, Spec


class Engine:
    """Continuous batching of lossless speculative decoding over fixed slots.

    observer: called with a `StepRecord` of every collected step, before its results are handed out.

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
        mesh: Mesh | None = None,
        sts: Temperatures | Sequence[float] | None = None,
        observer: Observer | None = None,
    ):
        self.mesh = mesh or axes.single_device_mesh()
        model, target_config = target
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
        self._observer = observer
        table = None if sts is None else Temperatures.of(sts).table(self.block_size)
        self.programs = Programs(spec, model, drafter[0] if drafter else None, self.mesh, table)
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
        self._arguments = Arguments(config, spec, self.scheduler)
        self._overlap = (
            config.overlap if config.overlap is not None else self.mesh.devices.flat[0].platform != "cpu"
        )
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._planner = Planner(config, self.block_size, self.least_tokens, policy, cost, sts)

    @property
    def policy(self) -> Policy:
        """What decides how much each step verifies; may be changed between steps."""
        return self._planner.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._planner.policy = policy

    @property
    def cost(self) -> CostTable | None:
        """The engine's own cost table, for policies that bring none."""
        return self._planner.cost

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

    def abort(self, request_id: int) -> None:
        """Ends a request now, wherever it is; its pages are free at once. Unknown ids are ignored."""
        self.scheduler.drop(request_id)

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
        admitted = self.scheduler.admit(time.perf_counter())
        if admitted:
            self._admit(admitted)
        flight, updates = self._dispatch()
        if flight is not None:
            self._flights.append(flight)
        keep = 1 if self._overlap and flight is not None else 0
        while len(self._flights) > keep:
            updates += self._collect(self._flights.popleft())
        return updates

    def _admit(self, admitted: list[Running]) -> None:
        """Writes new requests into the device's slot table."""
        for running in admitted:
            request = running.request
            if request.grammar and running.matcher is None:
                running.matcher = request.grammar.matcher()
            self._planner.admit(running)
            self._tables.admit(request, running.tokens[len(request.prompt) :], running.slot)
        self._slots = self.programs.admit(self._slots, self._arguments.admission(admitted))

    def _dispatch(self) -> tuple[Flight | None, list[Update]]:
        """The step that was dispatched, if any, and the results of earlier ones that had to be known for it."""
        now = time.perf_counter()
        work = self.scheduler.plan(self._arguments.tile, self._arguments.most_tiles)
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
        args, pages, prefill = self._arguments.step(work, count, plan, verify_tokens)
        tables = self._tables.take(penalties=sampling.penalties, steering=sampling.steering)
        proposal = None
        if drafts:
            propose = ProposeShape(count, pages, sampling)
            proposal = self.programs.propose(propose, self._pools, self._slots, args, tables)
        mask, updates = self._mask(work, count, proposal)
        shape = VerifyShape(
            count,
            pages,
            sampling,
            verify_tokens,
            drafts,
            prefill,
            logprobs=_most(r.request.params.logprobs for r in work.decode if r.asks_logprobs),
            prompt_logprobs=_most(c.running.request.params.prompt_logprobs for c in work.chunks),
            masked=0 if mask is None else mask.bits.shape[0],
        )
        self._pools, self._slots, tables, packet = self.programs.verify(
            shape, self._pools, self._slots, args, proposal, tables, mask
        )
        self._tables.update(tables)
        packet.words.copy_to_host_async()
        for running in work.decode:
            running.in_flight += 1
            running.fresh = False
        self._step += 1
        admissions = [r.admission for r in work.decode]
        slots = work.slots[: len(admissions)]
        flight = Flight(self._step, shape, now, packet, work.decode, slots, admissions, drafted, work.chunks)
        return flight, updates

    def _mask(self, work: Work, count: int, proposal: Proposal | None) -> tuple[Mask | None, list[Update]]:
        """Legal tokens of the rows that have a grammar; None without such rows.

        The exception to a loop that never waits: a grammar has to take in the tokens of the step before, whose
        results are returned, and to see this step's drafts. Both come to the host while the device drafts.
        """
        if not any(r.matcher for r in work.decode):
            return None, []
        updates = [update for flight in self._flights for update in self._collect(flight)]
        self._flights.clear()
        matchers = [r.matcher if r.slot >= 0 else None for r in work.decode]
        if not any(matchers):
            return None, updates
        drafts: list[list[int]] = [[] for _ in matchers]
        if proposal is not None:
            tokens = np.asarray(proposal.tokens).tolist()
            may = [r.has_features and r.drafts for r in work.decode]
            drafts = [own if drafts else [] for own, drafts in zip(tokens, may, strict=False)]
        width = 1 if proposal is None else proposal.tokens.shape[1] + 1
        return self.programs.place(host_mask(matchers, drafts, count, width, self._vocab_size)), updates

    def _collect(self, flight: Flight) -> list[Update]:
        """Results of a step: plans and an observer learn of them, then the requests."""
        packet = flight.packet.host()
        now = time.perf_counter()
        self._planner.tell(flight, packet)
        if self._observer is not None:
            self._observer(record(flight, packet, now, self.block_size))
        return take_in(flight, packet, now, self.scheduler.release)


def _most(asked: Iterable[int | None]) -> int | None:
    """The step of likeliest tokens that serves all who ask; None when nobody does."""
    most = max((k for k in asked if k is not None), default=None)
    return None if most is None else at_least(LOGPROB_STEPS, most)


def _sampling(rows: list[Running]) -> Sampling:
    traits = 0
    for running in rows:
        traits |= running.traits
    return Sampling.of(traits)
