"""A closed loop of requests on an engine in this process, and what its steps looked like.

Knows: how a number of requests is kept going, what counts and what does not, how the host's part is seen.
Does not know: arms, models, flags (engine.py has them).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jspark.bench.device_trace import DeviceTime, traced
from jspark.budget import Policy
from jspark.engine import Engine
from jspark.record import StepRecord
from jspark.request import Request, SamplingParams
from jspark.results import Flight
from jspark.step import Sampling
from jspark.warmup import compile_now, loop_set


class WatchedEngine(Engine):
    """An engine that keeps its steps' records and the time that its loop spent waiting for the device."""

    def __init__(self, *args, **kwargs):
        self.records: list[StepRecord] = []
        self.waited = 0.0
        super().__init__(*args, observer=self.records.append, **kwargs)

    def compile(self, rows: int, sampled: bool, coupled: bool) -> None:
        """Makes all programs ready that a closed loop of `rows` requests of one kind can need."""
        kind = Sampling(sampled=sampled, coupled=sampled and coupled, rejection=sampled and not coupled)
        compile_now((self, shape) for shape in loop_set(self, rows, kind))

    def switch_overlap(self, overlap: bool) -> None:
        """Dispatches a step before the last one is collected, or not; of an idle engine."""
        assert self.idle
        self.overlap = self._cost.overlap = overlap

    def _collect(self, flight: Flight):
        started = time.perf_counter()
        flight.packet.result().words.block_until_ready()
        self.waited += time.perf_counter() - started
        return super()._collect(flight)


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the workload that they belong to."""

    tokens: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Load:
    """What the loop asks for: `concurrency` requests at a time, `new_tokens` each whatever the model says.

    seed: None is the rejection sampler, a number the coupled one with that seed and those after it. speculative:
    whether the requests may draft.
    """

    concurrency: int
    new_tokens: int
    temperature: float
    seed: int | None = None
    speculative: bool = True


@dataclass(frozen=True)
class Turn:
    """What was seen of one arm for a while. Seconds.

    prefill: from the first step until every one of the first requests had its first token; prompt_tokens: of
    these. records: of the steps after that, as long as the loop was full. seconds: over these steps; host: of
    them, outside of waiting for the device. owners: (kind, tokens of the prompt) of each request by its id.
    compiled: programs compiled within; a turn with any is no measurement.
    """

    prefill: float
    prompt_tokens: int
    records: list[StepRecord]
    seconds: float
    host: float
    owners: dict[int, tuple[str, int]]
    compiled: int
    device: DeviceTime | None = None


def turn(
    engine: WatchedEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    load: Load,
    seconds: float,
    *,
    first_id: int = 0,
    most_steps: int | None = None,
    profile: bool = False,
) -> Turn:
    """Runs a closed loop under `policy` for `seconds` of full load, then aborts what is left.

    The first requests end at staggered lengths, as if the loop had run for long. most_steps: ends the loop
    after so many steps too. profile: looks at the device's own trace of the same steps, which slows them.
    """
    engine.policy = policy
    engine.records.clear()
    programs = engine.programs.report.programs
    owners: dict[int, tuple[str, int]] = {}

    def add(share: float = 1.0) -> None:
        number = first_id + len(owners)
        prompt = prompts[number % len(prompts)]
        owners[number] = prompt.kind, len(prompt.tokens)
        tokens = max(2, round(load.new_tokens * share))
        params = SamplingParams(
            temperature=load.temperature,
            max_tokens=tokens,
            ignore_eos=True,
            seed=None if load.seed is None else load.seed + number,
            speculative=load.speculative,
        )
        engine.add(Request(number, prompt.tokens, params))

    for i in range(load.concurrency):
        add((i + 1) / load.concurrency)
    started, waiting = time.perf_counter(), set(owners)
    while waiting:
        for update in engine.step():
            waiting.discard(update.id)
            if update.finish_reason:
                add()
    prefill, prompt_tokens = time.perf_counter() - started, sum(n for _, n in list(owners.values()))
    with traced(profile) as trace:
        begin, waited, done = time.perf_counter(), engine.waited, len(engine.records)
        while True:
            finished = sum(update.finish_reason is not None for update in engine.step())
            steps = len(engine.records) - done
            if time.perf_counter() - begin >= seconds or (most_steps is not None and steps >= most_steps):
                break
            for _ in range(finished):
                add()
        total = time.perf_counter() - begin
        host = total - (engine.waited - waited)
        records = engine.records[done:]
    for number in owners:
        engine.abort(number)
    while not engine.idle:
        engine.step()
    compiled = engine.programs.report.programs - programs
    return Turn(prefill, prompt_tokens, records, total, host, owners, compiled, trace.time)


@dataclass(frozen=True)
class Steps:
    """Steps of several turns of one arm, one entry a request row that committed after its first token."""

    request: np.ndarray
    kind: np.ndarray
    window: np.ndarray
    accepted: np.ndarray
    block_accepted: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Steps:
        """Rows of all turns; requests are numbered anew, since turns use the same ids."""
        columns: list[list] = [[] for _ in range(6)]
        for number, t in enumerate(turns):
            for r in t.records:
                for i, request in enumerate(r.request.tolist()):
                    kind, prompt = t.owners[request]
                    if r.position[i] < prompt:
                        continue  # its first token
                    row = (number, request), kind, r.window[i], r.accepted[i], r.block_accepted[i], r.count[i]
                    for column, value in zip(columns, row, strict=True):
                        column.append(value)
        ids = {key: i for i, key in enumerate(dict.fromkeys(columns[0]))}
        request = np.array([ids[key] for key in columns[0]], int)
        return cls(request, np.array(columns[1]), *(np.array(c, int) for c in columns[2:]))


def rates(t: Turn) -> list[float]:
    """Tokens a second of every request of a turn, between its first and its last step there."""
    seen: dict[int, list[tuple[float, int]]] = {}
    for r in t.records:
        for request, count in zip(r.request.tolist(), r.count.tolist(), strict=True):
            seen.setdefault(request, []).append((r.collected, count))
    return [sum(count for _, count in own[1:]) / (own[-1][0] - own[0][0]) for own in seen.values() if len(own) > 1]


def step_seconds(t: Turn) -> list[tuple[StepRecord, float]]:
    """Steps without prompt rows, as the step before was, and the time between the two."""
    pairs = zip(t.records, t.records[1:], strict=False)
    return [(b, b.collected - a.collected) for a, b in pairs if not (a.prefill_tokens or b.prefill_tokens)]
