"""The engine: prompts in, tokens out, many requests at a time, in token ids only.

Knows: the loop. Each step admits requests, plans rows and budget, dispatches propose and verify, and collects the
results of the step before; nothing in it waits for the step in flight.
Does not know: text, HTTP, model internals; the arithmetic of a step is in step.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspark import axes, kv
from jspark.budget import Plan, Policy
from jspark.calibration import Temperatures
from jspark.config import DecoderConfig, DrafterConfig, EngineConfig
from jspark.cost import CostTable
from jspark.intake import MAX_STOP_IDS, SlotTables, check_ids
from jspark.logprobs import Logprobs, told
from jspark.mask import Mask, host_mask
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.pallas.ragged_attention import Segments, Tiles
from jspark.planner import Planner
from jspark.programs import Programs, ProposeShape, VerifyShape, at_least, ladder
from jspark.propose import Proposal
from jspark.record import Observer, StepRecord
from jspark.request import LOGPROB_STEPS, FinishReason, Request, Update
from jspark.scheduler import Chunk, Running, Scheduler, Work
from jspark.sizing import attention, least_tokens, run_time_block_size, sized
from jspark.state import Packet, Prefill, StepArgs, empty_slots
from jspark.step import Pools, Sampling, Spec

#: Rows of a prefill tile in the attention fallback, when several prompts share a chunk.
TILE = 32


@dataclass(frozen=True)
class Flight:
    """A dispatched step whose results are still on their way."""

    number: int
    shape: VerifyShape
    dispatched: float
    packet: Packet
    rows: list[Running]
    admissions: list[int]
    chunks: list[Chunk]


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
        self._kernels = spec.attention.kernels
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
        self._chain = spec.drafter is not None and spec.drafter.eagle3 is not None
        carried = (target_config.hidden_size, dtype) if self._chain else None
        self._slots = self.programs.place(empty_slots(slots, MAX_STOP_IDS, carried))
        self._dummy = slots
        self._tables = SlotTables(self.programs, slots, target_config.vocab_size)
        self.scheduler = Scheduler(
            slots,
            kv.PageAllocator(pages, size),
            config.context_length,
            config.chunked_prefill_size,
            overhang=self.block_size,
            lookahead=int(self._chain) if config.prefix_cache else None,
        )
        self._vocab_size = target_config.vocab_size
        most_pages, chunk = self.scheduler.table.shape[1], config.chunked_prefill_size
        self.least_tokens = least_tokens(self.mesh)
        self._tile = min(TILE, chunk)
        # The reference gathers whole tables; a kernel reads only what it needs of one.
        widest = config.single_shapes or self._kernels
        self._page_steps = ladder(most_pages if widest else max(1, 256 // size), most_pages)
        self._chunk_steps = ladder(chunk if config.single_shapes else self._tile, chunk)
        self._overlap = (
            config.overlap if config.overlap is not None else self.mesh.devices.flat[0].platform != "cpu"
        )
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._planner = Planner(config, self.block_size, self.least_tokens, policy, cost, sts, _drafts)

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
            self._place(admitted)
        flight, updates = self._dispatch()
        if flight is not None:
            self._flights.append(flight)
        keep = 1 if self._overlap and flight is not None else 0
        while len(self._flights) > keep:
            updates += self._collect(self._flights.popleft())
        return updates

    def _place(self, admitted: list[Running]) -> None:
        """Writes new requests into the device's slot table, padded to a power of two with the dummy slot."""
        count = at_least(ladder(1, self.config.max_running_requests), len(admitted))
        index = np.full(count, self._dummy, np.int32)
        values = jax.tree.map(lambda x: np.zeros((count, *x.shape[1:]), x.dtype), self._slots)
        values.stop_ids[:] = -1
        values.adjust.repetition[:] = 1
        for i, running in enumerate(admitted):
            request, params = running.request, running.request.params
            index[i] = running.slot
            values.anchor[i], values.position[i] = running.tokens[-1], running.position
            values.remaining[i] = running.limit - running.committed
            values.live[i] = values.fresh[i] = True
            values.speculative[i] = params.speculative
            values.stop_ids[i, : len(request.stop_ids)] = request.stop_ids
            s = values.sampling
            s.temperature[i], s.top_p[i], s.min_p[i] = params.temperature, params.top_p, params.min_p
            s.top_k[i] = min(max(params.top_k, 0), self._vocab_size)
            s.seed[i], s.coupled[i] = running.seed, _coupled(running)
            a = values.adjust
            a.repetition[i], a.presence[i] = params.repetition_penalty, params.presence_penalty
            a.frequency[i] = params.frequency_penalty
            a.min_position[i] = len(request.prompt) + params.min_tokens if params.min_tokens else 0
            a.biased[i], a.worded[i] = bool(params.logit_bias or request.bad_words), bool(request.bad_words)
            if request.grammar and running.matcher is None:
                running.matcher = request.grammar.matcher()
            self._planner.admit(running)
            self._tables.admit(request, running.tokens[len(request.prompt) :], running.slot)
        index, values = self.programs.place((index, values))
        self._slots = self.programs.admit(self._slots, index, values)

    def _dispatch(self) -> tuple[Flight | None, list[Update]]:
        """The step that was dispatched, if any, and the results of earlier ones that had to be known for it."""
        now = time.perf_counter()
        work = self.scheduler.plan(self._tile, self._tiles(self._chunk_steps[-1]))
        rows = work.rows
        if not rows:
            return None, []
        count = at_least(self.config.row_buckets, len(rows))
        sampling = _sampling(rows)
        # A fresh row has no features to draft from: its first token comes from its anchor alone.
        drafts = self.block_size > 0 and any(not r.fresh and _drafts(r) for r in work.decode)
        plan, verify_tokens = Plan(0, drafts=False), max(count, self.least_tokens)
        if drafts:
            plan, verify_tokens = self._planner.plan(self._step, work.decode, count)
            drafts = plan.drafts
        args, pages, prefill = self._arguments(work, count, plan, verify_tokens)
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
            logprobs=_most(r.request.params.logprobs for r in work.decode),
            prompt_logprobs=_most(c.running.request.params.prompt_logprobs for c in work.chunks),
            masked=0 if mask is None else mask.bits.shape[0],
        )
        self._pools, self._slots, tables, packet = self.programs.verify(
            shape, self._pools, self._slots, args, proposal, tables, mask
        )
        self._tables.update(tables)
        for array in jax.tree.leaves(packet):
            array.copy_to_host_async()
        for running in work.decode:
            running.in_flight += 1
            running.fresh = False
        self._step += 1
        admissions = [r.admission for r in work.decode]
        return Flight(self._step, shape, now, packet, work.decode, admissions, work.chunks), updates

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
            may = [r.has_features and _drafts(r) for r in work.decode]
            drafts = [own if drafts else [] for own, drafts in zip(tokens, may, strict=False)]
        width = 1 if proposal is None else proposal.tokens.shape[1] + 1
        return self.programs.place(host_mask(matchers, drafts, count, width, self._vocab_size)), updates

    def _arguments(
        self, work: Work, count: int, plan: Plan, verify_tokens: int
    ) -> tuple[StepArgs, int, tuple[int, int, int] | None]:
        """The step's arrays on the device, the page count they look at, and the prefill shape."""
        rows, decode = work.rows, len(work.decode)
        slot = np.full(count, self._dummy, np.int32)
        slot[: len(rows)] = [r.slot for r in rows]
        reach = 1
        for running in work.decode:
            last = running.position + (running.in_flight + 1) * (self.block_size + 1)
            reach = max(reach, min(self.scheduler.allocator.pages_for(last), len(running.pages)))
        for chunk in work.chunks:
            reach = max(reach, self.scheduler.allocator.pages_for(chunk.stop))
        pages = at_least(self._page_steps, reach)
        prefill, prefill_shape = self._prefill(work, count, verify_tokens)
        # NumPy here, arrays of the device once placed.
        fields: dict[str, Any] = {
            "slot": slot,
            "decode": np.arange(count) < decode,
            "table": self.scheduler.table[slot, :pages],
            "budget": np.int32(plan.budget),
            "threshold": np.float32(plan.threshold),
            "min_window": _per_row(plan.min_window, 0, count, decode),
            "max_window": _per_row(plan.max_window, self.block_size, count, decode),
            "prefill": prefill,
        }
        return self.programs.place(StepArgs(**fields)), pages, prefill_shape

    def _tiles(self, tokens: int) -> int:
        """Tiles of a program with so many prefill rows: twice what they fill, since prompts end inside tiles."""
        return 2 * -(-tokens // self._tile)

    def _prefill(
        self, work: Work, count: int, verify_tokens: int
    ) -> tuple[Prefill | None, tuple[int, int, int] | None]:
        chunks = work.chunks
        if not chunks:
            return None, None
        sizes = [c.stop - c.start for c in chunks]
        tile = self._tile
        needed = sum(-(-size // tile) for size in sizes)
        # Many short prompts need more tiles than their tokens alone would.
        enough = (s for s in self._chunk_steps if self._kernels or self._tiles(s) >= needed)
        total = next(s for s in enough if s >= sum(sizes))
        row_of = {id(r): i for i, r in enumerate(work.rows)}
        rows = [row_of[id(c.running)] for c in chunks]
        ends = np.cumsum(sizes)
        tokens = np.zeros(total, np.int32)
        positions, following = np.zeros(total, np.int32), np.zeros(total, np.int32)
        row = np.full(total, count, np.int32)
        for chunk, r, end in zip(chunks, rows, ends, strict=True):
            where = slice(end - (chunk.stop - chunk.start), end)
            tokens[where] = chunk.running.tokens[chunk.start : chunk.stop]
            positions[where] = np.arange(chunk.start, chunk.stop)
            following[where] = chunk.running.tokens[chunk.start + 1 : chunk.stop + 1]
            row[where] = r
        fields: dict[str, Any] = {"tokens": tokens, "positions": positions, "row": row}
        if self._chain or any(c.running.request.params.prompt_logprobs is not None for c in chunks):
            fields["following"] = following
        if self._kernels:
            pads = (0, count - len(chunks))
            arrays: dict[str, Any] = {
                "start": np.pad(np.concatenate([[0], ends]), pads, mode="edge").astype(np.int32),
                "row": np.pad(rows, pads).astype(np.int32),
                "length": np.pad([c.stop for c in chunks], pads).astype(np.int32),
            }
            segments = Segments(**arrays, max_rows=total)
            return Prefill(**fields, tiles=None, segments=segments), (total, 0, 0)
        tiles = self._tiles(total)
        if len(chunks) == 1 and total > tile:
            # One prompt: its pages are gathered once, not once a tile.
            tiles, tile = 1, total
        index = np.full((tiles, tile), verify_tokens + total, np.int32)
        tile_row = np.zeros(tiles, np.int32)
        used = 0
        for size, r, end in zip(sizes, rows, ends, strict=True):
            for first in range(0, size, tile):
                here = min(tile, size - first)
                index[used, :here] = verify_tokens + end - size + first + np.arange(here)
                tile_row[used] = r
                used += 1
        rectangles: dict[str, Any] = {"index": index, "row": tile_row}
        return Prefill(**fields, tiles=Tiles(**rectangles), segments=None), (total, tiles, tile)

    def _collect(self, flight: Flight) -> list[Update]:
        """Results of a step: tokens out, figures, finished requests' slots and pages back."""
        packet: Any = jax.tree.map(np.asarray, flight.packet)
        now = time.perf_counter()
        self._planner.tell(flight.number, flight.rows, flight.admissions, packet)
        self._collect_prompts(flight.chunks, packet.prompt_logprobs)
        if self._observer is not None:
            self._observer(self._record(flight, packet, now))
        updates = []
        for i, (running, admission) in enumerate(zip(flight.rows, flight.admissions, strict=True)):
            if not running.holds(admission):
                continue
            running.in_flight -= 1
            count = int(packet.count[i])
            if not (count or packet.finished[i]):
                continue
            tokens = tuple(packet.tokens[i, :count].tolist())
            stats = running.stats
            if running.committed == 0:
                running.first_token = now
                stats.prefill_seconds = now - running.admitted
            elif count:
                stats.steps += 1
                stats.windows[int(packet.window[i])] += 1
                stats.accepted[int(packet.accepted[i])] += 1
                stats.block_accepted[int(packet.block_accepted[i])] += 1
                stats.decode_seconds = now - running.first_token
            running.tokens += tokens
            reason: FinishReason | None = None
            problem = None
            if packet.finished[i]:
                stopped = bool(tokens) and tokens[-1] in running.request.stop_ids
                full = running.committed >= running.limit
                if running.matcher and not (stopped or full):  # nothing was legal any more
                    problem = running.matcher.why_stopped(tokens)
                reason = "abort" if problem else "length" if full and not stopped else "stop"
                self.scheduler.release(running)
            elif running.matcher:
                running.matcher.advance(tokens)
            k = running.request.params.logprobs
            asked = () if k is None or packet.logprobs is None else told(tokens, packet.logprobs, i, k)
            prompt = tuple(running.prompt_logprobs)
            running.prompt_logprobs.clear()
            updates.append(Update(running.request.id, tokens, reason, stats, asked, prompt, problem))
        return updates

    def _collect_prompts(self, chunks: list[Chunk], logprobs: Logprobs | None) -> None:
        """Log-probabilities of prompt tokens, kept until the first tokens of their request."""
        start = 0
        for chunk in chunks:
            size = chunk.stop - chunk.start
            k = chunk.running.request.params.prompt_logprobs
            if k is not None and logprobs is not None:
                tokens = tuple(chunk.running.tokens[chunk.start + 1 : chunk.stop + 1])
                chunk.running.prompt_logprobs += told(tokens, logprobs, slice(start, start + size), k)
            start += size

    def _record(self, flight: Flight, packet: Any, now: float) -> StepRecord:
        """What an observer sees of a step, from its packet on the host and the rows as they were before it."""
        owners = zip(flight.rows, flight.admissions, packet.count, strict=False)
        kept = [i for i, (r, admission, count) in enumerate(owners) if r.holds(admission) and count > 0]
        rows = [flight.rows[i] for i in kept]
        confidence = np.full((len(kept), self.block_size), np.nan, np.float32)
        drafted = np.where([r.has_features and _drafts(r) for r in rows], self.block_size, 0)
        if packet.confidence.shape[1]:
            confidence[drafted > 0] = packet.confidence[kept][drafted > 0]
        return StepRecord(
            number=flight.number,
            rows=flight.shape.rows,
            verify_tokens=flight.shape.verify_tokens,
            prefill_tokens=flight.shape.prefill[0] if flight.shape.prefill else 0,
            dispatched=flight.dispatched,
            collected=now,
            request=np.array([r.request.id for r in rows], np.int64),
            position=np.array([r.position for r in rows], np.int64),
            sampled=np.array([r.request.params.temperature > 0 for r in rows], bool),
            drafted=drafted.astype(np.int32),
            window=packet.window[kept],
            accepted=packet.accepted[kept],
            block_accepted=packet.block_accepted[kept],
            count=packet.count[kept],
            confidence=confidence,
        )


def _most(asked: Iterable[int | None]) -> int | None:
    """The step of likeliest tokens that serves all who ask; None when nobody does."""
    most = max((k for k in asked if k is not None), default=None)
    return None if most is None else at_least(LOGPROB_STEPS, most)


def _drafts(running: Running) -> bool:
    return running.request.params.speculative


def _sampling(rows: list[Running]) -> Sampling:
    hot = [r for r in rows if r.request.params.temperature > 0]
    return Sampling(
        sampled=bool(hot),
        filtered=any(r.request.params.filtered for r in hot),
        coupled=any(_coupled(r) for r in hot),
        rejection=any(not _coupled(r) for r in hot),
        penalties=any(r.request.params.penalized for r in rows),
        steering=any(r.request.steered for r in rows),
    )


def _coupled(running: Running) -> bool:
    params = running.request.params
    if params.speculative_sampling == "auto":
        return params.seed is not None
    return params.speculative_sampling == "coupled"


def _per_row(value: int | np.ndarray | None, default: int, count: int, decode: int) -> np.ndarray:
    out = np.full(count, default, np.int32)
    if value is not None:
        out[:decode] = value
    return out
