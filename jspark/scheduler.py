"""Host-side planning of one step: who runs, which prompt tokens are prefilled, which pages each row owns.

Knows: waiting and running requests, slots, pages ahead of need, the prefix cache, preemption; first come, first
served.
Does not know: arrays on the device, programs, policies or results (engine.py).
"""

from __future__ import annotations

import bisect
import itertools
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from jspark.errors import UserError
from jspark.kv import PageAllocator
from jspark.prefix_cache import PrefixCache
from jspark.request import AUTO_TOKENS, Request, Stats, TokenLogprob

if TYPE_CHECKING:
    from jspark.grammar import Matcher


@dataclass(eq=False)
class Running:
    """A request from its arrival to its end. It waits without slot and pages, at first and after preemption.

    tokens: the prompt and what was committed. limit: tokens it may commit in all. admission: a number of its own
    for every time it gets a slot, so that results from before a preemption are recognised. start: tokens it had
    then. fresh: no decode step was dispatched since, so there is nothing to draft from. prefilled: tokens whose
    keys and values are in its pages as far as dispatched; the last token is the anchor, so n tokens have n − 1
    to prefill. in_flight: decode steps dispatched and not collected. matcher: where the answer stands in
    its grammar, which has taken in all collected tokens. most: pages it can need. drafts, sampled, traits,
    special (asks for log-probabilities, or has a grammar): of its request, looked up once.
    """

    request: Request
    limit: int
    arrival: int
    tokens: list[int]
    seed: int
    arrived: float
    slot: int = -1
    admission: int = 0
    pages: list[int] = field(default_factory=list)
    start: int = 0
    prefilled: int = 0
    in_flight: int = 0
    decoding: bool = False
    fresh: bool = True
    admitted: float = 0.0
    first_token: float = 0.0
    stats: Stats = field(default_factory=Stats)
    matcher: Matcher | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        params = self.request.params
        self.drafts, self.sampled, self.traits = params.speculative, params.temperature > 0, self.request.traits
        self.special = params.logprobs is not None or self.request.grammar is not None

    def holds(self, admission: int) -> bool:
        """Whether the request still has the slot that it got with `admission`."""
        return self.slot >= 0 and self.admission == admission

    @property
    def has_features(self) -> bool:
        """It has committed something since it got its slot, so there are features to draft from."""
        return len(self.tokens) > self.start

    @property
    def left(self) -> int:
        """Tokens still to prefill."""
        return self.start - 1 - self.prefilled

    @property
    def committed(self) -> int:
        """Tokens committed so far, as far as the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def position(self) -> int:
        """Where the anchor stands, as far as the host knows."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Chunk:
    """Tokens start..stop of a row, to be prefilled in this step."""

    running: Running
    start: int
    stop: int


@dataclass(frozen=True)
class Work:
    """A step's rows: those that decode first, then those that only prefill. pages: of its tables that any of them
    can look at. slots: of all rows, in their order."""

    decode: list[Running]
    prefill_only: list[Running]
    chunks: list[Chunk]
    pages: int
    slots: np.ndarray

    @cached_property
    def rows(self) -> list[Running]:
        """All rows, in the order of the step's arrays."""
        return self.decode + self.prefill_only


class Scheduler:
    """Slots, pages and the queue.

    Requests are admitted in the order they came, and none overtakes another: the first one waits until its prompt
    fits. Pages are taken ahead of need, a step at a time. When they run out, the prefix cache gives up its
    longest unused ones, then the request that came last is preempted: it waits at its place in the queue and
    computes its tokens' keys and values again. The request that came first is never preempted, so every request
    ends. lookahead: see PrefixCache; None is no prefix cache.
    """

    def __init__(
        self,
        slots: int,
        allocator: PageAllocator,
        context_length: int,
        chunk: int,
        overhang: int,
        lookahead: int | None = 0,
    ):
        self.allocator = allocator
        self.context_length = context_length
        self.cache = None if lookahead is None else PrefixCache(allocator, lookahead)
        self.waiting: list[Running] = []
        self.running: dict[int, Running] = {}
        self.preemptions = 0
        self.table = np.zeros((slots + 1, allocator.pages_for(context_length + overhang)), np.int32)
        self._lookahead = lookahead or 0
        self._chunk = chunk
        # Windows reach past the last token that can be committed; their rows need a place too.
        self._overhang = overhang
        self._free_slots = list(range(slots - 1, -1, -1))
        self._arrivals = itertools.count()
        self._admissions = itertools.count(1)
        #: Running requests that may need more pages than they have.
        self._growing = 0

    def check(self, request: Request) -> int:
        """The number of tokens `request` may commit.

        Raises:
            UserError: it can never run, with the numbers.
        """
        prompt, params = len(request.prompt), request.params
        room = self.context_length - prompt
        if prompt == 0:
            raise UserError("the prompt is empty; give at least one token")
        if room < 1:
            raise UserError(
                f"the prompt has {prompt} tokens and the context holds {self.context_length}: "
                "shorten it or raise the context length"
            )
        if isinstance(params.max_tokens, int) and params.max_tokens > room:
            raise UserError(
                f"a prompt of {prompt} tokens leaves room for {room} more in a context of {self.context_length}, "
                f"and max_tokens is {params.max_tokens}: lower it, or shorten the prompt"
            )
        if params.max_tokens == "auto":
            held = self.allocator.capacity * self.allocator.page_size - prompt - self._overhang
            limit = max(1, min(AUTO_TOKENS, room, held))
        else:
            limit = room if params.max_tokens is None else params.max_tokens
        if params.min_tokens > limit:
            raise UserError(
                f"min_tokens is {params.min_tokens} and this prompt of {prompt} tokens gets {limit} at most: "
                "lower it, or give max_tokens"
            )
        pages = self.allocator.pages_for(prompt + limit + self._overhang)
        if pages > self.allocator.capacity:
            raise UserError(
                f"a prompt of {prompt} tokens with {limit} to generate needs {pages} KV pages and the pool has "
                f"{self.allocator.capacity}: lower max_tokens or raise max_total_tokens"
            )
        return limit

    def add(self, request: Request, limit: int, now: float) -> None:
        """Queues a request that `check` let through."""
        seed, prompt = _seed(request.params.seed), list(request.prompt)
        most = self.allocator.pages_for(len(prompt) + limit + self._overhang)
        self.waiting.append(Running(request, limit, next(self._arrivals), prompt, seed, now, most=most))

    # ── slots and pages ───────────────────────────────────────────────────────────────────────────────────────

    def admit(self, now: float) -> list[Running]:
        """Moves waiting requests into free slots while the pages of their first step are free.

        A page for each running request that may need more is left over, so that the newcomer is not preempted at
        once.
        """
        admitted = []
        while self.waiting and self._free_slots:
            running = self.waiting[0]
            known, size = len(running.tokens), self.allocator.page_size
            need = min(self.allocator.pages_for(known + self._overhang), running.most)
            # A prompt's log-probabilities need all of its rows.
            skip = self.cache is None or running.request.params.prompt_logprobs is not None
            shared = [] if self.cache is None or skip else self.cache.match(running.tokens, (known - 1) // size)
            own = need - len(shared)
            if not self._make_room(own + self._growing):
                self.allocator.give_back(shared)
                break
            del self.waiting[0]
            running.slot, running.admission = self._free_slots.pop(), next(self._admissions)
            running.pages = shared + self.allocator.take(own)
            running.start, running.prefilled = known, len(shared) * size
            running.in_flight, running.decoding, running.fresh = 0, False, True
            running.admitted = running.admitted or now
            if self.cache is not None:
                self.cache.count(known, running.prefilled)
            if running.committed == 0:
                running.stats.cached_tokens = running.prefilled
            self.table[running.slot] = 0
            self.table[running.slot, :need] = running.pages
            self.running[running.request.id] = running
            self._growing += need < running.most
            admitted.append(running)
        return admitted

    def drop(self, request_id: int) -> None:
        """Forgets a request wherever it is; unknown ids are ignored."""
        if request_id in self.running:
            self.release(self.running[request_id])
        self.waiting = [r for r in self.waiting if r.request.id != request_id]

    def release(self, running: Running) -> None:
        """Gives slot and pages back; a step in flight may still write there, before any later owner does."""
        self._remember(running, running.position if running.decoding else running.prefilled)
        self.allocator.give_back(running.pages)
        self._growing -= len(running.pages) < running.most
        self._free_slots.append(running.slot)
        running.slot, running.pages = -1, []
        del self.running[running.request.id]

    def _remember(self, running: Running, computed: int) -> None:
        """Caches the whole pages of the first `computed` tokens: no later step writes there."""
        if self.cache is not None:
            whole = running.pages[: computed // self.allocator.page_size]
            self.cache.insert(running.tokens[: computed + self._lookahead], whole)

    def _make_room(self, pages: int) -> bool:
        if self.allocator.free >= pages:
            return True
        if self.cache is None or self.allocator.free + self.allocator.idle < pages:
            return False
        return self.cache.make_room(pages)

    def _grow(self, running: Running, reach: int) -> bool:
        """Takes the pages of the row's first `reach` tokens; False when the row itself had to go."""
        more = min(self.allocator.pages_for(reach), running.most) - len(running.pages)
        while not self._make_room(more):
            # Rows are in the order of arrival: none overtakes another, and the last one goes first.
            last = next(reversed(self.running.values()))
            self._preempt(last)
            if last is running:
                return False
        held = len(running.pages)
        running.pages += self.allocator.take(more)
        self.table[running.slot, held : held + more] = running.pages[held:]
        self._growing -= len(running.pages) == running.most
        return True

    def _preempt(self, running: Running) -> None:
        self.release(running)
        self.preemptions += 1
        running.stats.preemptions += 1
        bisect.insort(self.waiting, running, key=lambda r: r.arrival)

    # ── rows of a step ────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, tile: int, tiles: int) -> Work:
        """Rows of the next step. Prefill takes `chunk` prompt tokens at most, in `tiles` tiles of `tile` rows.

        A prompt whose last chunk is in the step decodes its first token in the same step.
        """
        size, width, pages, preempted = self.allocator.page_size, self._overhang + 1, 1, self.preemptions
        decode = []
        # Many rows and every step: no properties and no calls here.
        for running in list(self.running.values()):
            tokens, in_flight = len(running.tokens), running.in_flight
            if not (running.decoding and tokens - len(running.request.prompt) + in_flight < running.limit):
                continue
            reach, held = tokens - 1 + (in_flight + 1) * width, len(running.pages)
            if reach > held * size and held < running.most:
                if running.slot < 0 or not self._grow(running, reach):
                    continue
                held = len(running.pages)
            decode.append(running)
            if pages < held:
                pages = max(pages, min(-(-reach // size), held))
        if self.preemptions > preempted:
            decode = [r for r in decode if r.slot >= 0]
        budget, chunks, prefill_only = self._chunk, [], []
        for running in self.running.values():
            if running.decoding or budget == 0:
                continue
            take = min(running.left, budget)
            needed = -(-take // tile)
            if take and chunks and sum(-(-(c.stop - c.start) // tile) for c in chunks) + needed > tiles:
                break
            if take:
                chunks.append(Chunk(running, running.prefilled, running.prefilled + take))
                running.prefilled += take
                budget -= take
            if running.left == 0:
                running.decoding = True
                self._remember(running, running.position)
                decode.append(running)
                pages = max(pages, min(-(-(len(running.tokens) + self._overhang) // size), len(running.pages)))
            else:
                prefill_only.append(running)
        pages = max([pages, *(self.allocator.pages_for(chunk.stop) for chunk in chunks)])
        slots = np.array([r.slot for r in decode] + [r.slot for r in prefill_only], np.int32)
        return Work(decode, prefill_only, chunks, pages, slots)


def _seed(seed: int | None) -> int:
    """32 bits for the device: a 64-bit seed folded, or fresh ones."""
    if seed is None:
        return secrets.randbits(32)
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF
