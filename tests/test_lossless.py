"""Invariants 1 to 6 of docs/architecture.md on whole runs of the engine, with trained tiny drafters so that
windows and acceptances of every length occur.
"""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from support import Result, check_equals_plain, drafter, make_engine, plain, prompts, run, target

from jspark import axes
from jspark.budget import BatchState, Fixed, Full, GlobalArgmax, Plan, Threshold
from jspark.config import EngineConfig, VerifyMode
from jspark.cost import CostTable
from jspark.engine import Engine
from jspark.request import Request, SamplingParams

DRAFTERS = [
    "dspark_qwen3_tiny_vanilla_trained",
    "dspark_qwen3_tiny_gated_trained",
    "dspark_qwen3_tiny_rnn_trained",
    "dspark_qwen3_tiny_nomarkov",
    "dflash_qwen3_tiny_trained",
    "eagle3_qwen3_tiny_trained",
]
MODES: list[VerifyMode] = ["static", "compact", "cap-accept"]


@dataclass(frozen=True)
class Schedule:
    """Windows fixed by request and anchor position alone: the same in every mode, batch and load."""

    seed: int

    def plan(self, state: BatchState) -> Plan:
        windows = np.array(
            [
                np.random.default_rng((self.seed, r, p)).integers(0, state.block_size + 1)
                for r, p in zip(state.requests, state.positions, strict=True)
            ],
            int,
        )
        if not windows.size:
            return Plan(state.rows * state.block_size)
        return Plan(int(windows.sum()), min_window=windows, max_window=windows)


@dataclass(frozen=True)
class Erratic:
    """A budget that changes without reason from step to step."""

    rng: np.random.Generator

    def plan(self, state: BatchState) -> Plan:
        return Plan(int(self.rng.integers(0, state.rows * state.block_size + 1)))


def random_requests(rng: np.random.Generator, count: int, kinds: str = "greedy coupled") -> list[Request]:
    seeds = prompts("dspark_qwen3_tiny_vanilla_trained") + prompts("dflash_qwen3_tiny_trained")
    filtered = rng.random() < 0.5
    requests = []
    for i in range(count):
        base = seeds[rng.integers(len(seeds))]
        prompt = (base * 4)[: rng.integers(1, 60)]
        kind = rng.choice(kinds.split())
        filters = {"top_k": int(rng.integers(2, 30)), "top_p": float(rng.uniform(0.5, 1)), "min_p": 0.02}
        params = SamplingParams(
            temperature=0 if kind == "greedy" else float(rng.uniform(0.3, 1.5)),
            max_tokens=int(rng.integers(1, 40)),
            seed=int(rng.integers(2**40)) if kind == "coupled" else None,
            **(filters if filtered and kind != "greedy" else {}),
        )
        stop = tuple(rng.integers(0, 319, 3).tolist()) if rng.random() < 0.3 else ()
        requests.append(Request(i, prompt, params, stop))
    return requests


def random_engine(rng: np.random.Generator, name: str) -> Engine:
    block = int(rng.integers(1, drafter(name)[1].block_size + 1))
    table = CostTable({1: 1e-3}, {t: 1e-3 * (1 + t // 8) for t in range(1, 80)})
    policies = [
        Full(),
        Fixed(int(rng.integers(0, block + 1))),
        Threshold(float(rng.uniform(0.1, 0.9))),
        GlobalArgmax(table),
    ]
    policies += [Schedule(int(rng.integers(99))), Erratic(rng)]
    slots = int(rng.choice([1, 3, 4, 6]))
    # Few programs a case, since each is a compilation; all ladders at once are in the bucket-edge test below.
    buckets = (slots,) if rng.random() < 0.7 else tuple(sorted({max(slots // 2, 1), slots}))
    config = EngineConfig(
        max_running_requests=slots,
        page_size=int(rng.choice([4, 8, 16])),
        context_length=128,
        # Not every slot can be full at once: admission waits for pages.
        max_total_tokens=int(rng.choice([144, 400, 1000])),
        chunked_prefill_size=int(rng.choice([3, 16, 48])),
        block_size=block,
        row_buckets=buckets,
        token_tiers=(slots + block,),
        verify_mode=MODES[int(rng.integers(3))],
        overlap=bool(rng.integers(2)),
    )
    policy = policies[rng.integers(len(policies))]
    return make_engine(config, target("qwen3_tiny"), drafter(name), policy=policy)


def check_random_case(seed: int) -> list:
    rng = np.random.default_rng(seed)
    engine = random_engine(rng, DRAFTERS[seed % len(DRAFTERS)])
    requests = random_requests(rng, 14)
    excused: list = []
    for request, result in zip(requests, run(engine, requests), strict=True):
        check_equals_plain(request, result.tokens, plain(request), excused)
        assert isinstance(request.params.max_tokens, int)
        assert len(result.tokens) <= request.params.max_tokens
        if result.reason == "stop":
            assert result.tokens[-1] in request.stop_ids
        stats = result.stats
        committed = sum(n * (a + 1) for a, n in stats.accepted.items())
        # The last step may be cut by a stop token or the limit; every other token is accounted for.
        assert len(result.tokens) - 1 <= committed <= len(result.tokens) + engine.block_size
    return excused


@pytest.mark.parametrize("seed", range(3))
def test_greedy_and_coupled_equal_plain_decoding(seed, record_property):
    record_property("excused_ties", check_random_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 63))
def test_greedy_and_coupled_equal_plain_decoding_at_length(seed, record_property):
    record_property("excused_ties", check_random_case(seed))


def small_engine(mode: VerifyMode = "compact", policy=None, name=DRAFTERS[0], slots=4, **options) -> Engine:
    config = EngineConfig(
        max_running_requests=slots,
        page_size=16,
        context_length=128,
        chunked_prefill_size=32,
        verify_mode=mode,
        row_buckets=(slots,),
        token_tiers=(3 * slots,),
    )
    config = replace(config, **options)
    return make_engine(config, target("qwen3_tiny"), drafter(name), policy=policy)


def tokens_of(results: list[Result]) -> list[list[int]]:
    return [r.tokens for r in results]


def test_rejection_under_one_schedule_is_the_same_in_every_verify_mode(rng):
    """Invariant 4, at any temperature. Seeds are given, the sampler is the rejection sampler."""
    requests = [
        replace(r, params=replace(r.params, seed=i, speculative_sampling="rejection"))
        for i, r in enumerate(random_requests(rng, 10, "greedy sampled sampled"))
    ]
    # Without overlap: the schedule reads positions, which overlap reports a step later.
    runs = [
        tokens_of(run(small_engine(mode, Schedule(3), overlap=False), requests))
        for mode in ("compact", "cap-accept")
    ]
    assert runs[0] == runs[1]
    # static ignores windows: under full windows it equals the other two.
    runs = [tokens_of(run(small_engine(mode, Full()), requests)) for mode in MODES]
    assert runs[0] == runs[1] == runs[2]


def test_overlap_gives_the_same_tokens_and_windows(rng):
    requests = random_requests(rng, 10, "greedy")
    table = CostTable({1: 1e-6}, {t: 1e-3 * (1 + t / 4) for t in range(1, 80)})
    # One row at a time: with more, overlap admits a step later and so changes the batch that shares a budget.
    engine = {"policy": GlobalArgmax(table, min_gain=0), "slots": 1, "token_tiers": (1, 2, 4, 6)}
    runs = [run(small_engine(overlap=on, **engine), requests) for on in (False, True)]
    assert tokens_of(runs[0]) == tokens_of(runs[1])
    assert [r.stats.windows for r in runs[0]] == [r.stats.windows for r in runs[1]]
    assert len(set().union(*(r.stats.windows for r in runs[0]))) > 2, "windows of several lengths occurred"


def test_sampling_depends_on_own_seed_only(rng):
    """Invariant 5: coupled and greedy rows do not notice who shares the batch, rejection rows included."""
    requests = random_requests(rng, 6)
    company = [
        replace(r, id=100 + r.id, params=replace(r.params, temperature=1.0, seed=None))
        for r in random_requests(rng, 6, "sampled")
    ]
    alone = tokens_of(run(small_engine(), requests))
    mixed = [x for pair in zip(requests, company, strict=True) for x in pair]
    assert tokens_of(run(small_engine(), mixed))[::2] == alone


def test_a_seed_repeats_and_seeds_differ():
    prompt = prompts(DRAFTERS[0])[0]

    def once(seed, sampler):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, speculative_sampling=sampler)
        return run(small_engine(slots=1), [Request(0, prompt, params)])[0].tokens

    for sampler in ("coupled", "rejection"):
        assert once(7, sampler) == once(7, sampler) != once(8, sampler)
    unseeded = [
        run(small_engine(slots=1), [Request(0, prompt, SamplingParams(max_tokens=24))])[0] for _ in range(2)
    ]
    assert unseeded[0].tokens != unseeded[1].tokens


def test_every_bucket_and_tier_edge():
    """Default ladders, and as many requests as cross each edge of R, T and the prefill chunk."""
    greedy = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 9, 17, 26, 33)]
    requests = [
        Request(i, (prompts(DRAFTERS[0])[i % 4] * 3)[:n], greedy[i]) for i, n in enumerate((1, 17, 33, 34, 50))
    ]
    engine = small_engine(policy=Schedule(1), slots=5, row_buckets=(), token_tiers=(), chunked_prefill_size=64)
    for request, result in zip(requests, run(engine, requests), strict=True):
        check_equals_plain(request, result.tokens, plain(request), [])


def test_windows_of_every_length_are_verified_and_accepted():
    greedy = SamplingParams(temperature=0, max_tokens=48)
    requests = [Request(i, p, greedy) for i, p in enumerate(prompts(DRAFTERS[0]))]
    results = run(small_engine(policy=Schedule(5)), requests)
    windows = set().union(*(r.stats.windows for r in results))
    accepted = set().union(*(r.stats.accepted for r in results))
    assert windows == set(range(8))
    assert {0, 1, 2, 3} <= accepted


def test_cap_accept_records_what_the_trim_gave_up():
    greedy = SamplingParams(temperature=0, max_tokens=48)
    requests = [Request(i, p, greedy) for i, p in enumerate(prompts(DRAFTERS[0]))]
    compact, cap = (run(small_engine(m, Fixed(2)), requests) for m in ("compact", "cap-accept"))
    for a, b in zip(compact, cap, strict=True):
        assert a.tokens == b.tokens
        assert a.stats.accepted == b.stats.accepted
        assert max(a.stats.block_accepted) <= 2
    assert max(max(b.stats.block_accepted) for b in cap) > 2


def test_abort_at_any_moment_leaves_the_others_alone(rng):
    requests = random_requests(rng, 12)
    engine = small_engine(overlap=True, chunked_prefill_size=8)
    for request in requests:
        engine.add(request)
    got: dict[int, list[int]] = {r.id: [] for r in requests}
    aborted: set[int] = set()
    while not engine.idle:
        for update in engine.step():
            assert update.id not in aborted
            got[update.id] += update.tokens
        if rng.random() < 0.2:
            victim = int(rng.integers(12))
            engine.abort(victim)
            aborted.add(victim)
    assert engine.scheduler.allocator.in_use == 0
    assert aborted
    for request in requests:
        if request.id not in aborted:
            check_equals_plain(request, got[request.id], plain(request), [])


@pytest.mark.slow
@pytest.mark.parametrize("name", [DRAFTERS[0], DRAFTERS[-1]])
def test_preempted_and_cached_requests_equal_plain_decoding(name, rng):
    """A pool far too small for its requests, which begin alike: pages are shared, evicted and computed again, and
    penalties go on where they were."""
    beginnings = [(base * 4)[:37] for base in prompts(DRAFTERS[0])[:2]]
    requests = [
        Request(
            i,
            (*beginnings[i % 2], *rng.integers(0, 319, int(rng.integers(1, 9))).tolist()),
            SamplingParams(
                temperature=float(i % 2),
                seed=i,
                max_tokens=30,
                frequency_penalty=0.4 if i % 4 > 1 else 0.0,
                repetition_penalty=1.2 if i % 4 > 1 else 1.0,
            ),
        )
        for i in range(8)
    ]
    engine = small_engine(name=name, overlap=True, max_total_tokens=128)
    excused: list = []
    for _ in range(2):
        for request, result in zip(requests, run(engine, requests), strict=True):
            check_equals_plain(request, result.tokens, plain(request), excused)
    assert engine.scheduler.preemptions
    cache = engine.scheduler.cache
    assert cache is not None
    assert cache.stats.found > 100
    assert cache.stats.evicted
    cache.clear()
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


def test_two_devices_give_the_same_tokens():
    if len(jax.devices()) < 2:
        pytest.skip("one device only")
    pair = jax.make_mesh((1, 2), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    from support import GOLDENS

    from jspark.checkpoint import open_drafter, open_target
    from jspark.weights import load_decoder, load_drafter

    checkpoint = open_target(str(GOLDENS / "qwen3_tiny"))
    model = load_decoder(checkpoint, checkpoint.config, np.float32, pair)
    q = model.layers.layer(0).attn.q
    assert q is not None
    assert len(q.kernel.get_value().sharding.device_set) == 2
    source = open_drafter(str(GOLDENS / DRAFTERS[0]))
    draft = load_drafter(source, source.config, np.float32, pair, model)
    config = EngineConfig(max_running_requests=4, page_size=16, context_length=128)
    engine = Engine(config, (model, checkpoint.config), (draft, source.config), mesh=pair)
    greedy = SamplingParams(temperature=0, max_tokens=32)
    requests = [Request(i, p, greedy) for i, p in enumerate(prompts(DRAFTERS[0]))]
    for request, result in zip(requests, run(engine, requests), strict=True):
        check_equals_plain(request, result.tokens, plain(request), [])
    assert axes.sharding(pair, ("kv_heads",), (3,)).spec == jax.sharding.PartitionSpec(None)
