"""Slots, pages, prefix cache and preemption, against a simulated device that checks every entry it reads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from jspark.errors import UserError
from jspark.kv import PageAllocator
from jspark.prefix_cache import PrefixCache
from jspark.request import Request, SamplingParams
from jspark.scheduler import Running, Scheduler

PAGE, BLOCK, CONTEXT = 4, 3, 48


@dataclass
class Row:
    """What the device knows of a slot."""

    tokens: list[int]
    remaining: int
    live: bool = True


class Device:
    """Runs planned steps in order. An entry of the pool holds what keys and values would depend on: all tokens up
    to its position, and the next one where the drafter looks ahead."""

    def __init__(self, rng: np.random.Generator, lookahead: int):
        self.rng, self.lookahead = rng, lookahead
        self.pool: dict[tuple[int, int], tuple] = {}
        self.slots: dict[int, Row] = {}

    def write(self, table: np.ndarray, text: list[int], start: int, stop: int) -> None:
        for i in range(start, stop):
            self.pool[int(table[i // PAGE]), i % PAGE] = tuple(text[: i + 1 + self.lookahead])

    def read(self, table: np.ndarray, text: list[int], stop: int) -> None:
        for i in range(stop):
            assert table[i // PAGE] > 0, "a row reads the bin"
            assert self.pool[int(table[i // PAGE]), i % PAGE] == tuple(text[: i + 1 + self.lookahead])

    def decode(self, slot: int, table: np.ndarray) -> tuple[list[int], bool]:
        """Commits 1 to BLOCK + 1 tokens, after it has scribbled over the places of a whole window."""
        row = self.slots[slot]
        if not row.live:
            return [], False
        position = len(row.tokens) - 1
        self.read(table, row.tokens, position)
        noise = row.tokens + [-9] * (BLOCK + 1)
        self.write(table, noise, position, position + BLOCK + 1)
        new = self.rng.integers(3, size=min(int(self.rng.integers(1, BLOCK + 2)), row.remaining)).tolist()
        row.tokens, row.remaining = row.tokens + new, row.remaining - len(new)
        self.write(table, row.tokens, position, len(row.tokens) - 1)
        row.live = row.remaining > 0
        return new, not row.live


class Loop:
    """The engine's order of events around a scheduler: dispatch a step, collect the one before it."""

    def __init__(self, rng: np.random.Generator, pages: int, slots: int, lookahead: int | None, overlap: bool):
        self.scheduler = Scheduler(slots, PageAllocator(pages + 1, PAGE), CONTEXT, 8, BLOCK, lookahead)
        self.device = Device(rng, lookahead or 0)
        self.overlap = overlap
        self.flights: deque[list[tuple[Running, int, list[int], bool]]] = deque()
        self.done: dict[int, list[int]] = {}
        self.order: list[int] = []

    def step(self) -> None:
        scheduler, device = self.scheduler, self.device
        for running in scheduler.admit(0.0):
            device.slots[running.slot] = Row(list(running.tokens), running.limit - running.committed)
            if running.request.id not in self.order:
                self.order.append(running.request.id)
        work = scheduler.plan(2, 8)
        for chunk in work.chunks:
            table = scheduler.table[chunk.running.slot]
            device.read(table, chunk.running.tokens, chunk.start)
            device.write(table, chunk.running.tokens, chunk.start, chunk.stop)
        results = []
        for running in work.decode:
            tokens, finished = device.decode(running.slot, scheduler.table[running.slot])
            results.append((running, running.admission, tokens, finished))
            running.in_flight += 1
        if work.rows:
            self.flights.append(results)
        keep = 1 if self.overlap and work.rows else 0
        while len(self.flights) > keep:
            self.collect(self.flights.popleft())

    def collect(self, results: list[tuple[Running, int, list[int], bool]]) -> None:
        for running, admission, tokens, finished in results:
            if not running.holds(admission):
                continue
            running.in_flight -= 1
            running.tokens += tokens
            if finished:
                self.done[running.request.id] = running.tokens
                self.scheduler.release(running)

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running or self.flights)


def check_books(scheduler: Scheduler) -> None:
    """Every page is free, cached or owned, and counted right."""
    allocator = scheduler.allocator
    owned: dict[int, int] = {}
    for running in scheduler.running.values():
        for page in running.pages:
            owned[page] = owned.get(page, 0) + 1
    cached = set() if scheduler.cache is None else {n.page for n in nodes(scheduler.cache)}
    for page in range(1, allocator.capacity + 1):
        assert allocator.references(page) == owned.get(page, 0) + (page in cached)
    assert allocator.free == allocator.capacity - len(owned.keys() | cached)
    assert allocator.idle == len(cached - owned.keys())
    assert allocator.in_use == len(owned)
    for running in scheduler.running.values():
        row = scheduler.table[running.slot]
        assert row[: len(running.pages)].tolist() == running.pages
        assert not row[len(running.pages) :].any()


def nodes(cache: PrefixCache) -> list:
    found, todo = [], [cache._root]
    while todo:
        node = todo.pop()
        found += node.children.values()
        todo += node.children.values()
    assert len(found) == len(cache)
    return found


@pytest.mark.parametrize("lookahead", [None, 0, 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_random_interleavings(rng, lookahead, overlap):
    """Arrive, finish, abort, preempt, evict in any order: right entries, right order, no page lost."""
    loop = Loop(rng, pages=20, slots=5, lookahead=lookahead, overlap=overlap)
    scheduler, number, aborted, asked = loop.scheduler, 0, set(), {}
    beginnings = [rng.integers(3, size=int(rng.integers(1, 20))).tolist() for _ in range(4)]
    for _ in range(3400):
        event = rng.random()
        if event < 0.3 and len(scheduler.waiting) < 10:
            prompt = beginnings[rng.integers(4)] + rng.integers(3, size=int(rng.integers(1, 12))).tolist()
            request = Request(number, tuple(prompt), SamplingParams(max_tokens=int(rng.integers(1, 17))))
            scheduler.add(request, scheduler.check(request), 0.0)
            asked[number] = request
            number += 1
        elif event < 0.34 and number:
            victim = int(rng.integers(number))
            scheduler.drop(victim)
            aborted.add(victim)
        elif event < 0.345 and scheduler.cache is not None:
            scheduler.cache.clear()
        else:
            loop.step()
        check_books(scheduler)
    for _ in range(2000):
        if loop.idle:
            break
        loop.step()
    assert loop.idle
    check_books(scheduler)
    assert scheduler.allocator.in_use == 0
    for i, request in asked.items():
        if i not in aborted:
            assert tuple(loop.done[i][: len(request.prompt)]) == request.prompt
            assert len(loop.done[i]) == len(request.prompt) + (request.params.max_tokens or 0)
    assert loop.order == sorted(loop.order), "a request overtook another"
    assert scheduler.preemptions > 10
    if scheduler.cache is not None:
        assert scheduler.cache.stats.found > 500
        assert scheduler.cache.stats.evicted > 20
        scheduler.cache.clear()
        assert scheduler.allocator.free == scheduler.allocator.capacity


def test_the_first_request_is_never_preempted(rng):
    loop = Loop(rng, pages=14, slots=4, lookahead=0, overlap=True)
    for i in range(4):
        request = Request(i, tuple(rng.integers(3, size=10).tolist()), SamplingParams(max_tokens=36))
        loop.scheduler.add(request, loop.scheduler.check(request), 0.0)
    first = loop.scheduler.waiting[0]
    while not loop.idle:
        loop.step()
    assert first.stats.preemptions == 0
    assert loop.scheduler.preemptions > 0
    assert sorted(loop.done) == [0, 1, 2, 3]


def test_lookahead_shares_only_what_the_next_token_allows():
    for lookahead, shared in [(0, 2), (1, 1)]:
        allocator = PageAllocator(9, PAGE)
        cache = PrefixCache(allocator, lookahead)
        pages = allocator.take(2)
        cache.insert([1, 2, 3, 4, 5, 6, 7, 8, 9], pages)
        assert len(cache) == 2
        found = cache.match([1, 2, 3, 4, 5, 6, 7, 8, 0], 2)
        assert found == pages[:shared]
        allocator.give_back(found)
        allocator.give_back(pages)
        assert allocator.idle == 2
        assert cache.clear() == 2


def test_least_recently_used_goes_first():
    allocator = PageAllocator(5, PAGE)
    cache = PrefixCache(allocator)
    texts = [[i] * PAGE for i in range(4)]
    for text in texts:
        page = allocator.take(1)
        cache.insert(text, page)
        allocator.give_back(page)
    allocator.give_back(cache.match(texts[0], 1))
    assert cache.make_room(2)
    assert [len(cache.match(text, 1)) for text in texts] == [1, 0, 0, 1]


def test_pages_given_back_twice():
    allocator = PageAllocator(4, PAGE)
    pages = allocator.take(2)
    allocator.give_back(pages)
    with pytest.raises(RuntimeError, match="given back twice"):
        allocator.give_back(pages[:1])
    with pytest.raises(RuntimeError, match="nobody holds it"):
        allocator.retain(pages[:1])
    with pytest.raises(UserError, match="4 KV pages"):
        allocator.take(4)


def test_ages_stay_small():
    """Hits without evictions must not make the books grow."""
    allocator = PageAllocator(5, PAGE)
    cache = PrefixCache(allocator)
    page = allocator.take(1)
    cache.insert([1] * PAGE, page)
    for _ in range(10_000):
        allocator.give_back(cache.match([1] * PAGE, 1))
    assert len(cache._ages) < 100
