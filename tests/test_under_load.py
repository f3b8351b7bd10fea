"""Exactness under load: mixed requests with aborts, preemption, shared pages and probes; and replayed windows."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from support import check_equals_plain, drafter, mesh, plain, prompts, run, target
from test_lossless import DRAFTERS, MODES, Erratic

from jspark.budget import BatchState, Plan
from jspark.config import EngineConfig, VerifyMode
from jspark.engine import Engine
from jspark.record import StepRecord
from jspark.request import Request, SamplingParams


def requests(rng: np.random.Generator, count: int, sampler: str, longest: int = 40) -> list[Request]:
    """Greedy and sampled ones by turns, whose prompts begin in one of two ways."""
    beginnings = [(base * 4)[:37] for base in prompts(DRAFTERS[0])[:2]]
    return [
        Request(
            i,
            (*beginnings[i % 2], *rng.integers(0, 319, int(rng.integers(1, 12))).tolist()),
            SamplingParams(
                temperature=float(i // 2 % 2),
                seed=i,
                max_tokens=int(rng.integers(4, longest)),
                speculative_sampling=sampler if i // 2 % 2 else "auto",  # type: ignore[arg-type]
            ),
        )
        for i in range(count)
    ]


def engine(mode: VerifyMode, policy, slots: int, pages: int, page_size: int = 16, **options) -> Engine:
    observer = options.pop("observer", None)
    config = EngineConfig(
        max_running_requests=slots,
        page_size=page_size,
        context_length=128,
        max_total_tokens=pages * page_size,
        chunked_prefill_size=32,
        verify_mode=mode,
        single_shapes=True,
        token_tiers=(3 * slots,),
    )
    config = replace(config, **options)
    models = target("qwen3_tiny"), drafter(DRAFTERS[0])
    return Engine(config, *models, policy=policy, mesh=mesh(), observer=observer)


def check_load(rng, mode: VerifyMode, overlap: bool, count: int, slots: int, pages: int, page_size: int) -> list:
    """Some requests are there from the start, the others come while these run; one in eight is aborted.

    pages: fewer than the requests need between them, so that some are preempted.
    """
    options = {"online_calibration": "on", "probe_share": 0.2, "overlap": overlap}
    e = engine(mode, Erratic(rng), slots, pages, page_size, chunked_prefill_size=8 * slots, **options)
    everything = requests(rng, count, "coupled", longest=min(16 * slots, 90))
    got: dict[int, list[int]] = {r.id: [] for r in everything}
    waiting, aborted = list(everything), set()
    while waiting or not e.idle:
        for request in waiting[: slots if len(waiting) == count else int(rng.integers(0, max(3, slots // 2)))]:
            e.add(request)
            waiting.remove(request)
        for update in e.step():
            assert update.id not in aborted
            got[update.id] += update.tokens
        if len(aborted) < count // 8 and rng.random() < 0.2:
            victim = int(rng.integers(count))
            if everything[victim] not in waiting:
                e.abort(victim)
                aborted.add(victim)
    assert e.scheduler.allocator.in_use == 0
    assert aborted
    assert e.scheduler.preemptions
    assert e.scheduler.cache is not None
    assert e.scheduler.cache.stats.found
    excused: list = []
    for request in everything:
        if request.id not in aborted:
            check_equals_plain(request, got[request.id], plain(request), excused)
    return excused


def test_mixed_requests_under_load_equal_plain_decoding(rng, record_property):
    record_property("excused_ties", check_load(rng, "compact", True, count=16, slots=4, pages=12, page_size=16))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [False, True])
def test_64_mixed_requests_under_load_equal_plain_decoding(rng, mode, overlap, record_property):
    record_property("excused_ties", check_load(rng, mode, overlap, count=128, slots=64, pages=448, page_size=4))


@dataclass(frozen=True)
class Replay:
    """The windows of a recorded run, by request and position of the anchor."""

    windows: dict[tuple[int, int], int]

    def plan(self, state: BatchState) -> Plan:
        keys = zip(state.requests, state.positions, strict=True)
        windows = np.array([self.windows.get((int(r), int(p)), 0) for r, p in keys], int)
        return Plan(int(windows.sum()), min_window=windows, max_window=windows)


@pytest.mark.slow
def test_rejection_under_load_equals_a_replay_of_its_windows(rng):
    """The sample depends on the windows, and on nothing else of the load: not on batch, order, overlap or mode.

    A preempted request comes back with nothing to draft from, which no window says, so those are left out.
    """
    records: list[StepRecord] = []
    everything = requests(rng, 8, "rejection")
    options = {"online_calibration": "frozen", "probe_share": 0.2, "overlap": True, "observer": records.append}
    loaded = run(engine("compact", Erratic(rng), 4, pages=14, **options), everything)
    windows = {
        (request, position): window
        for record in records
        for request, position, window in zip(
            record.request.tolist(), record.position.tolist(), record.window.tolist(), strict=True
        )
    }
    assert len(set(windows.values())) > 3
    same = [i for i, result in enumerate(loaded) if not result.stats.preemptions]
    assert len(same) > 4
    # One that reads positions must not be told them a step late.
    for mode in ("compact", "cap-accept"):
        again = run(engine(mode, Replay(windows), 4, pages=40, overlap=False), everything[::-1])[::-1]
        assert [again[i].tokens for i in same] == [loaded[i].tokens for i in same]
