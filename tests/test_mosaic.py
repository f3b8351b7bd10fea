"""The Mosaic kernel without a GPU: it lowers for every shape it claims, and runs right and free of races in the
interpreter; with one (`-m gpu`): the shared cases, and its plans on both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from support import mesh, run

from jspark import engine, weights
from jspark.config import DecoderConfig, EngineConfig, RopeConfig
from jspark.engine import Engine
from jspark.pallas.ragged_attention import Attention, mosaic, reference
from jspark.pallas.ragged_attention.mosaic import Config
from jspark.pallas.ragged_attention.segments import HeadShape, Segments
from jspark.pallas.ragged_attention.shapes import BARS, EDGES, Case, make
from jspark.request import Request, SamplingParams

ROUNDING = 3.5e-3  # of one case, relative to float32; bfloat16 outputs and probabilities make about 2.5e-3


def heads_of(case: Case) -> HeadShape:
    return HeadShape(case.heads, case.kv_heads, case.head_dim, case.page_size, "bfloat16")


def error(case: Case, out, arrays) -> float:
    """Relative to the reference in float32; also checks that rows of no segment are zeros."""
    q, k, v = (x.astype(jnp.float32) for x in (arrays.q, arrays.k_pool, arrays.v_pool))
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(
            reference.attend(
                q, k, v, arrays.table, arrays.segments, causal=case.causal, window=case.window, scale=None
            )
        )
    out = np.asarray(out.astype(jnp.float32))
    assert not out[int(arrays.segments.start[-1]) :].any()
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def interpreted(case: Case, config: Config, *, ctas: int = 2, seed: int = 0) -> tuple[float, list[list[int]]]:
    """Error of a case in the interpreter, which starts from NaN everywhere; and the work of each worker."""
    arrays = make(case, jnp.bfloat16, seed=seed)
    plan = mosaic.make_plan(
        arrays.segments,
        heads_of(case),
        tokens=arrays.q.shape[0],
        causal=case.causal,
        window=case.window,
        config=config,
        ctas=ctas,
    )
    out = mosaic.attend(
        arrays.q,
        arrays.k_pool,
        arrays.v_pool,
        arrays.table,
        arrays.segments,
        plan,
        causal=case.causal,
        window=case.window,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    wrong = error(case, out, arrays)
    assert not gpu_callbacks.get_races().races_found
    return wrong, np.asarray(plan.cuts.work).tolist()


def lower(case: Case, config: Config | None = None):
    heads = heads_of(case)
    tokens, rows = case.requests * case.max_rows + case.pad_rows, case.requests + case.pad_segments

    def run(q, k, v, table, segments):
        plan = mosaic.make_plan(
            segments, heads, tokens=tokens, causal=case.causal, window=case.window, config=config
        )
        options = {"causal": case.causal, "window": case.window}
        return [mosaic.attend(x, k, v, table, segments, plan, **options) for x in (q, q + 1)]

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    segments = Segments(ints(rows + 1), ints(rows), ints(rows), case.max_rows)
    pool = jax.ShapeDtypeStruct((64, case.kv_heads, case.page_size, case.head_dim), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((tokens, case.heads, case.head_dim), jnp.bfloat16)
    traced = jax.jit(run).trace(q, pool, pool, ints(rows, 9), segments)
    return traced.lower(lowering_platforms=("cuda",))


LOWERED = (
    Case("verification", 4, 100, 8),
    Case("group 3 page 16 window", 4, 100, 8, heads=9, kv_heads=3, head_dim=64, page_size=16, window=70),
    Case("group 8 page 128, tiles in pairs", 4, 100, 16, heads=16, kv_heads=2, page_size=128),
    Case("one token", 1, 100, 1, heads=5, kv_heads=1, page_size=32),
    Case("chunks", 2, 600, 512, pad_rows=7),
    Case("draft block", 4, 100, 7, causal=False),
)


@pytest.mark.parametrize("case", LOWERED, ids=lambda c: c.name)
def test_lowers_for_a_gpu(case: Case):
    text = lower(case).as_text()
    # Two layers share one kernel: compile time does not grow with depth.
    assert text.count("mosaic_gpu_v2") == 1 or text.count("@mosaic_gpu") == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [*BARS, *EDGES], ids=lambda c: c.name)
def test_lowers_every_shared_case(case: Case):
    lower(case)


INTERPRETED = {
    "cut tasks, a part of one block that early rows do not see": (
        Case("", 2, (65, 66), (2, 8), heads=3, kv_heads=1, head_dim=64, pad_rows=2, pad_segments=1),
        Config(least=1),
    ),
    "tiles that share keys": (
        Case("", 2, (40, 150), (2, 30), heads=4, kv_heads=1, head_dim=64, pad_rows=2),
        Config(shared=True, block=64, least=1),
    ),
}
INTERPRETED_TOO = {
    "window over small pages": (
        Case("", 1, (150, 190), 3, heads=2, kv_heads=1, head_dim=64, page_size=16, window=70),
        Config(stages=3, least=1),
    ),
    "draft block": (Case("", 2, (30, 140), 7, heads=4, kv_heads=2, causal=False), Config(least=1)),
    "three warpgroups": (
        Case("", 3, (1, 200), (0, 8), heads=9, kv_heads=3, head_dim=64, page_size=32),
        Config(stages=3, warpgroups=3, least=1),
    ),
    "blocks of 128 over pages of 128": (
        Case("", 2, (140, 300), (1, 40), heads=8, kv_heads=1, page_size=128),
        Config(shared=True, block=128, least=1),
    ),
    "window of a draft block": (
        Case("", 3, (16, 300), 16, heads=2, kv_heads=2, head_dim=64, causal=False, window=9),
        Config(),
    ),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str):
    case, config = INTERPRETED[name]
    wrong, work = interpreted(case, config)
    assert wrong < ROUNDING
    if "cut" in name:
        assert any(parts > 1 for *_, parts in work)


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED_TOO)
@pytest.mark.parametrize("seed", range(3))
def test_interpreted_at_random(name: str, seed: int):
    case, config = INTERPRETED_TOO[name]
    wrong, _ = interpreted(case, config, ctas=1 + seed, seed=seed)
    assert wrong < ROUNDING


@pytest.mark.slow
def test_an_engine_in_the_interpreter(monkeypatch):
    """Prompts of several chunks, drafts and padding: the engine's own plans and page tables reach the kernel."""
    config = DecoderConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        max_position=1024,
        rope=RopeConfig(theta=1e4),
    )
    draft = weights.untrained_drafter_config(config, block_size=3)
    model = weights.random_decoder(config, jnp.bfloat16, mesh())
    drafter = weights.random_drafter(draft, jnp.bfloat16, mesh())
    engine_config = EngineConfig(
        max_running_requests=4, context_length=128, chunked_prefill_size=64, dtype="bfloat16", single_shapes=True
    )
    rng = np.random.default_rng(0)
    requests = [
        Request(i, tuple(rng.integers(500, size=n).tolist()), SamplingParams(temperature=0, max_tokens=6))
        for i, n in enumerate((1, 17, 70, 33))
    ]

    def answers() -> tuple[list[list[int]], np.ndarray]:
        """What the requests gave, and all that was drafted for them."""
        made, drafts = Engine(engine_config, (model, config), (drafter, draft), mesh=mesh()), []
        propose = made.programs.propose

        def seen(shape, pools, slots, args, tables):
            pools, proposal = propose(shape, pools, slots, args, tables)
            step = args.layout.view(np.asarray(args.words))
            drafts.append(np.asarray(proposal.tokens)[np.asarray(step.decode) > 0])
            return pools, proposal

        made.programs.propose = seen
        return [result.tokens for result in run(made, requests)], np.concatenate(drafts)

    without, drafted = answers()
    launches = []
    attend, make_plan = mosaic.attend, mosaic.make_plan

    def launch(*args, **options):
        launches.append(args[0].shape)
        return attend(*args, **options, interpret=plgpu.InterpretGPUParams())

    monkeypatch.setattr(engine, "attention", lambda *_: Attention("mosaic", "mosaic", "mosaic"))
    monkeypatch.setattr(mosaic, "attend", launch)
    monkeypatch.setattr(mosaic, "make_plan", lambda *args, **options: make_plan(*args, **options, ctas=2))
    tokens, drafts = answers()
    assert tokens == without
    assert len(set(launches)) > 1
    # Products are rounded in another order, and random weights tie often.
    assert np.mean(drafts == drafted) > 0.9


def units(work: np.ndarray, tiles: np.ndarray, kv_heads: int) -> list[tuple[int, int, int]]:
    """Every (tile, head, block) that the workers take, walked as the kernel walks."""
    taken = []
    for t, h, b, left, tasks, *_ in work.tolist():
        for _ in range(tasks):
            end = min(b + left, tiles[t, 6])
            taken += [(t, h, block) for block in range(b, end)]
            left, b = left - (end - b), 0
            t, h = (t + 1, 0) if h + 1 == kv_heads else (t, h + 1)
        assert left == 0
    return taken


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_covers_every_block_once(seed: int):
    """And every part of a cut task is merged by exactly one other worker, towards the one that opens it."""
    rng = np.random.default_rng(seed)
    requests, kv_heads = int(rng.integers(1, 40)), int(rng.integers(1, 5))
    rows = rng.integers(0, 40, requests) * rng.integers(0, 2, requests)
    length = rows + rng.integers(0, 3000, requests) ** rng.integers(0, 2)
    window = None if seed % 2 else int(rng.integers(1, 300))
    segments = Segments(
        jnp.asarray(np.concatenate([[0], np.cumsum(rows)]), jnp.int32),
        jnp.arange(requests, dtype=jnp.int32),
        jnp.asarray(length, jnp.int32),
        40,
    )
    heads = HeadShape(4 * kv_heads, kv_heads, 128, 64, "bfloat16")
    plan = mosaic.make_plan(
        segments, heads, tokens=int(rows.sum()) + 3, causal=True, window=window, config=Config(least=2), ctas=30
    )
    tiles, work = np.asarray(plan.cuts.tiles), np.asarray(plan.cuts.work)
    assert tiles[:, 1].sum() == rows.sum()
    expected = [(t, h, b) for t in range(len(tiles)) for h in range(kv_heads) for b in range(tiles[t, 6])]
    assert units(work, tiles, kv_heads) == expected
    first, last = tiles[:, 3], tiles[:, 4]
    low = np.zeros_like(first) if window is None else np.maximum(tiles[:, 7] - window, 0) // 64
    used = tiles[:, 1] > 0
    assert (tiles[used, 5] == low[used]).all()
    assert (tiles[used, 6] == -(-last[used] // 64) - low[used]).all()

    begins = {(int(t), int(h)) for t, h, b, n, *_ in work if n and b}
    merged = [int(w + 2**i) for w, record in enumerate(work) for i in range(record[5])]
    assert sorted(merged) == [w for w, (_, _, b, n, *_) in enumerate(work) if n and b]
    assert len(begins) <= len(merged)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*EDGES, *BARS], ids=lambda c: c.name)
def test_on_the_device(case: Case):
    heads = heads_of(case)
    assert mosaic.supports(heads, case.max_rows, case.causal)
    arrays = make(case, jnp.bfloat16)
    plan = mosaic.make_plan(
        arrays.segments, heads, tokens=arrays.q.shape[0], causal=case.causal, window=case.window
    )
    # The allocator hands the next output this memory.
    jnp.full(arrays.q.shape, jnp.nan, arrays.q.dtype).block_until_ready()
    out = mosaic.attend(
        arrays.q,
        arrays.k_pool,
        arrays.v_pool,
        arrays.table,
        arrays.segments,
        plan,
        causal=case.causal,
        window=case.window,
    )
    assert error(case, out, arrays) < ROUNDING
