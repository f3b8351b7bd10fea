"""Host-side planning of one step: who runs, which prompt tokens are prefilled, how many pages are looked at.

Knows: waiting and running requests, slots, pages; first come, first served.
Does not know: arrays on the device, programs, policies or results (engine.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jspark.errors import UserError
from jspark.kv import PageAllocator
from jspark.request import AUTO_TOKENS, Request, Stats, TokenLogprob

if TYPE_CHECKING:
    from jspark.grammar import Matcher


@dataclass(eq=False)
class Running:
    """A request that holds a slot and its pages.

    prefilled: prompt tokens handed to the device; the last prompt token is the first anchor, so a prompt of n
    has n − 1 to prefill. in_flight: decode steps dispatched and not collected. matcher: where the answer stands in
    its grammar, which has taken in all collected tokens.
    """

    request: Request
    slot: int
    pages: list[int]
    limit: int
    admitted: float
    prefilled: int = 0
    in_flight: int = 0
    decoding: bool = False
    finished: bool = False
    tokens: int = 0
    first_token: float = 0.0
    stats: Stats = field(default_factory=Stats)
    matcher: Matcher | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Prompt tokens still to prefill."""
        return len(self.request.prompt) - 1 - self.prefilled

    @property
    def position(self) -> int:
        """Where the anchor stands, as far as the host knows."""
        return len(self.request.prompt) - 1 + self.tokens

    @property
    def may_commit(self) -> bool:
        """Another step can commit something: every step in flight commits at least one token."""
        return self.tokens + self.in_flight < self.limit


class Waiting(NamedTuple):
    """A request in the queue; limit: the tokens it may commit."""

    request: Request
    limit: int


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens start..stop of a row, to be prefilled in this step."""

    running: Running
    start: int
    stop: int


@dataclass(frozen=True)
class Work:
    """A step's rows: those that decode first, then those that only prefill."""

    decode: list[Running]
    prefill_only: list[Running]
    chunks: list[Chunk]

    @property
    def rows(self) -> list[Running]:
        """All rows, in the order of the step's arrays."""
        return self.decode + self.prefill_only


class Scheduler:
    """Slots, pages and the queue."""

    def __init__(self, slots: int, allocator: PageAllocator, context_length: int, chunk: int, overhang: int):
        self.allocator = allocator
        self.context_length = context_length
        self.waiting: deque[Waiting] = deque()
        self.running: dict[int, Running] = {}
        self.generation = np.zeros(slots + 1, np.int64)
        self.table = np.zeros((slots + 1, allocator.pages_for(context_length + overhang)), np.int32)
        self._chunk = chunk
        # Windows reach past the last token that can be committed; their rows need a place too.
        self._overhang = overhang
        self._free_slots = list(range(slots - 1, -1, -1))

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
        pages = self._pages(request, limit)
        if pages > self.allocator.capacity:
            raise UserError(
                f"a prompt of {prompt} tokens with {limit} to generate needs {pages} KV pages and the pool has "
                f"{self.allocator.capacity}: lower max_tokens or raise max_total_tokens"
            )
        return limit

    def _pages(self, request: Request, limit: int) -> int:
        return self.allocator.pages_for(len(request.prompt) + limit + self._overhang)

    def admit(self, now: float) -> list[Running]:
        """Moves waiting requests into free slots while pages for their whole length are free."""
        admitted = []
        while self.waiting and self._free_slots:
            request, limit = self.waiting[0]
            need = self._pages(request, limit)
            if need > self.allocator.free:
                break
            self.waiting.popleft()
            slot = self._free_slots.pop()
            running = Running(request, slot, self.allocator.take(need), limit, now)
            self.generation[slot] += 1
            self.table[slot] = 0
            self.table[slot, : len(running.pages)] = running.pages
            self.running[request.id] = running
            admitted.append(running)
        return admitted

    def release(self, running: Running) -> None:
        """Gives slot and pages back; a step in flight may still write there, before any later owner does."""
        running.finished = True
        del self.running[running.request.id]
        self.allocator.give_back(running.pages)
        self._free_slots.append(running.slot)

    def plan(self, tile: int, tiles: int) -> Work:
        """Rows of the next step. Prefill takes `chunk` prompt tokens at most, in `tiles` tiles of `tile` rows.

        A prompt whose last chunk is in the step decodes its first token in the same step.
        """
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
            else:
                prefill_only.append(running)
        decode = [r for r in self.running.values() if r.decoding and r.may_commit]
        return Work(decode, prefill_only, chunks)
