"""`jspark bench host`: what the loop costs the host in a step, stage by stage.

Knows: how to put a device in place that has nothing to compute, which stages there are, how they are timed.
Does not know: flags, records.

The loop, its planning, its arguments and its results are the engine's own, on a steady load: requests arrive as
others end. Only the two programs of a step differ. They are compiled and take and return all that the engine's own
do (weights, pools, slots, buffers; what is donated comes back in place), so a call costs what a call with these
arrays costs, and they compute nothing. The tokens that a step would have brought are counted on the host, while
the clock stands still.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspark import engine as engine_module
from jspark import weights
from jspark.adjust import Tables
from jspark.bench import report
from jspark.budget import GlobalArgmax
from jspark.config import DecoderConfig, EngineConfig, RopeConfig
from jspark.cost import CostTable
from jspark.engine import Engine
from jspark.kv import PageAllocator
from jspark.mask import Mask
from jspark.programs import Programs
from jspark.propose import Proposal
from jspark.request import Request, SamplingParams
from jspark.scheduler import Running, Scheduler
from jspark.shapes import ProposeShape, VerifyShape
from jspark.state import PackedArgs, PackedPacket, SlotTable, packet_layout
from jspark.step import Pools

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Time of this thread alone: what else runs on the machine makes it longer by cold caches only.
now = time.thread_time
#: The bar: microseconds a step at R = 64, all stages together.
BAR_US, BAR_ROWS = 300.0, 64
STAGES = ("admit", "rows", "budget", "arguments", "dispatch", "collect", "rest")
PROMPT, CONTEXT, BLOCK = 16, 1024, 7
#: Tokens of an answer: uniform between these.
ANSWER = (64, 256)


@dataclass(frozen=True)
class Settings:
    """rows: R of each measurement; every row always has a request. layers: of the target; more of them are more
    arrays in a call. steps: that count. scheduler_rows: of the scheduler alone."""

    rows: tuple[int, ...]
    layers: int
    steps: int
    scheduler_rows: int


class Clock:
    """Seconds by stage in the step that is running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, stage: str, function: Callable) -> Callable:
        """`function`, whose time counts as `stage`'s."""

        def call(*args: Any, **more: Any) -> Any:
            started = now()
            try:
                return function(*args, **more)
            finally:
                self.seconds[stage] += now() - started

        return call


class StandIns(Programs):
    """In the place of an engine's programs: calls with the same arrays, and nothing computed."""

    def __init__(self, real: Programs, clock: Clock, slots: int, rng: np.random.Generator):
        self.__dict__.update(real.__dict__)
        self._rng, self._stand_ins = rng, {}
        self.remaining = np.zeros(slots + 1, np.int32)
        self._launch = clock.timed("dispatch", lambda program, *args: program(*args))
        self._count = clock.timed("", self._count)

    def propose(
        self, shape: ProposeShape, pools: Pools, slots: SlotTable, args: PackedArgs, tables: Tables
    ) -> tuple[Pools, Proposal]:
        """The same block every time."""
        size = self.spec.block_size

        def run(*_):
            # No step reads the block: what came of it is counted.
            tokens, confidence = (jnp.zeros((shape.rows, size), d) for d in (jnp.int32, jnp.float32))
            return Proposal(tokens, confidence, None)

        call = (self._drafter, self._vocabulary, pools.drafter, slots, args.words, args.table, tables)
        return pools, self._run(shape, run, (), lambda: self._replicated, *call)

    def verify(
        self,
        shape: VerifyShape,
        pools: Pools,
        slots: SlotTable,
        args: PackedArgs,
        proposal: Proposal | None,
        tables: Tables,
        mask: Mask | None = None,
    ) -> tuple[Pools, SlotTable, Tables, PackedPacket]:
        """Some tokens for every row, until none remain."""
        size = self.spec.block_size if shape.drafts else 0
        layout = packet_layout(shape.rows, size, None, None, 0)

        def run(target, drafter, pools, slots, tables, *_):
            return pools, slots, tables, jnp.zeros(layout.size, jnp.int32)

        def placement() -> Any:
            return jax.tree.map(lambda x: x.sharding, pools), *(self._replicated,) * 3

        call = (self._target, self._drafter, pools, slots, tables, args.arrays, proposal, self._sts, mask)
        *state, words = self._run(shape, run, (2, 3, 4), placement, *call)
        return *state, _Counted(words, layout, self._count(args, size))

    def _count(self, args: PackedArgs, size: int) -> dict[str, np.ndarray]:
        """What the rows of a step would have got."""
        step = args.layout.view(np.asarray(args.words))
        left = self.remaining[step.slot] * step.decode
        count = np.minimum(self._rng.integers(1, size + 2, len(left)), left).astype(np.int32)
        np.subtract.at(self.remaining, step.slot, count)
        accepted, window = np.maximum(count - 1, 0), np.full(len(left), size, np.int32)
        finished = ((count >= left) & (step.decode > 0)).astype(np.int32)
        confidence = self._rng.normal(1.5, 1.0, (len(left), size)).astype(np.float32)
        return {
            "count": count,
            "accepted": accepted,
            "block_accepted": accepted,
            "window": window,
            "finished": finished,
            "confidence": confidence,
        }

    def _run(self, key: Any, function: Callable, donated: tuple[int, ...], placement: Callable, *args: Any) -> Any:
        program = self._stand_ins.get(key)
        if program is None:
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=placement(), keep_unused=True)
            program = self._stand_ins[key] = jitted.lower(*args).compile()
        return self._launch(program, *args)


@dataclass(frozen=True)
class _Counted(PackedPacket):
    """A packet whose buffer comes from the device, and its contents from the host."""

    content: dict[str, np.ndarray]

    def host(self) -> Any:
        """The packet."""
        packet = super().host()
        for name, values in self.content.items():
            setattr(packet, name, values)
        return packet


def measure(settings: Settings, mesh: Mesh) -> report.Record:
    """Everything that the record's `results` holds (benchmarks/README.md)."""
    engines = [_measure_engine(settings, rows, mesh) for rows in settings.rows]
    return {
        "layers": settings.layers,
        "block_size": BLOCK,
        "prompt_tokens": PROMPT,
        "answer_tokens": list(ANSWER),
        "steps": settings.steps,
        "sum_of_10000_us": _median_us(_seconds(partial(sum, range(10_000))) for _ in range(50)),
        "bar": {"rows": BAR_ROWS, "microseconds": BAR_US},
        "engine": engines,
        "scheduler": _measure_scheduler(settings),
    }


def _measure_engine(settings: Settings, rows: int, mesh: Mesh) -> report.Record:
    rng = np.random.default_rng(rows)
    clock = Clock()
    engine = _engine(settings, rows, mesh, clock, rng)
    _instrument(engine, clock)
    steps: list[dict[str, float]] = []
    admitted = []
    number, warm = 0, 3 * ANSWER[1] // (BLOCK // 2)
    take_in = engine_module.take_in
    engine_module.take_in = clock.timed("collect", take_in)
    try:
        while len(steps) < settings.steps + warm:
            while len(engine.scheduler.waiting) < rows:
                engine.add(_request(number, rng))
                number += 1
            clock.seconds.clear()
            held = len(engine.scheduler.waiting)
            started = now()
            engine.step()
            whole = now() - started - clock.seconds.pop("", 0.0)
            admitted.append(held - len(engine.scheduler.waiting))
            known = sum(clock.seconds.values())
            steps.append({**clock.seconds, "rest": whole - known, "step": whole})
    finally:
        engine_module.take_in = take_in
    counted = steps[warm:]
    stages = {stage: _median_us(s.get(stage, 0.0) for s in counted) for stage in STAGES}
    return {
        "rows": rows,
        "step_us": _median_us(s["step"] for s in counted),
        "stages_us": stages,
        "admit_us_when_any": _median_us(
            s.get("admit", 0.0) for s, n in zip(counted, admitted[warm:], strict=True) if n
        ),
        "admitted_a_step": float(np.mean(admitted[warm:])),
        "p10_us": float(np.quantile([s["step"] for s in counted], 0.1) * 1e6),
        "p90_us": float(np.quantile([s["step"] for s in counted], 0.9) * 1e6),
    }


def _engine(settings: Settings, rows: int, mesh: Mesh, clock: Clock, rng: np.random.Generator) -> Engine:
    target = DecoderConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_layers=settings.layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position=CONTEXT,
        rope=RopeConfig(theta=1e4),
        tie_embeddings=True,
    )
    drafter = weights.untrained_drafter_config(target, block_size=BLOCK)
    drafter = replace(drafter, backbone=replace(drafter.backbone, num_layers=1))
    models = (
        weights.random_decoder(target, jnp.float32, mesh),
        weights.random_drafter(drafter, jnp.float32, mesh),
    )
    config = EngineConfig(
        max_running_requests=rows,
        context_length=CONTEXT,
        max_total_tokens=rows * 512,
        chunked_prefill_size=64,
        row_buckets=(rows,),
        single_shapes=True,
        overlap=True,
    )
    tiers = sorted({rows * m for m in (1, 2, 4, BLOCK + 1)})
    cost = CostTable({rows: 1e-3}, {tier: 1e-3 + 1e-5 * tier for tier in tiers})
    engine = Engine(config, (models[0], target), (models[1], drafter), policy=GlobalArgmax(cost), mesh=mesh)
    stand_ins = StandIns(engine.programs, clock, rows, rng)
    engine.programs = stand_ins
    # In the loop's thread, so that every stage has its own time.
    engine._launch = partial(engine._launcher.run, False)  # type: ignore[method-assign]
    admit = engine._admit

    def admit_and_note(admitted: list[Running]) -> None:
        admit(admitted)
        for running in admitted:
            stand_ins.remaining[running.slot] = running.limit - running.committed

    engine._admit = admit_and_note  # type: ignore[method-assign]
    return engine


def _instrument(engine: Engine, clock: Clock) -> None:
    """Puts the clock around the engine's parts."""
    owned: Any = engine
    for owner, name, stage in (
        (engine.scheduler, "admit", "admit"),
        (owned, "_admit", "admit"),
        (engine.scheduler, "plan", "rows"),
        (owned._planner, "plan", "budget"),
        (owned.arguments, "wanted", "arguments"),
        (owned.arguments, "step", "arguments"),
        (owned._planner, "tell", "collect"),
    ):
        setattr(owner, name, clock.timed(stage, getattr(owner, name)))


def _request(number: int, rng: np.random.Generator) -> Request:
    prompt = tuple(rng.integers(64, size=PROMPT).tolist())
    return Request(number, prompt, SamplingParams(temperature=0.0, max_tokens=int(rng.integers(*ANSWER))))


def _measure_scheduler(settings: Settings) -> report.Record:
    """Admission and planning alone, with tokens handed out by chance."""
    rows, rng = settings.scheduler_rows, np.random.default_rng(0)
    page = EngineConfig.page_size
    scheduler = Scheduler(rows, PageAllocator(rows * 8 + 1, page), CONTEXT, 512, overhang=BLOCK)
    clock, steps, number = Clock(), [], 0
    admit, plan = clock.timed("admit", scheduler.admit), clock.timed("rows", scheduler.plan)
    warm = 3 * ANSWER[1] // (BLOCK // 2)
    for _ in range(settings.steps + warm):
        while len(scheduler.waiting) < 64:
            request = _request(number, rng)
            scheduler.add(request, scheduler.check(request), 0.0)
            number += 1
        clock.seconds.clear()
        admit(0.0)
        work = plan(32, 32)
        steps.append(dict(clock.seconds))
        counts = rng.integers(1, BLOCK + 2, len(work.decode)).tolist()
        for running, count in zip(work.decode, counts, strict=True):
            running.tokens += [0] * min(count, running.limit - running.committed)
            if running.committed == running.limit:
                scheduler.release(running)
    stages = {stage: _median_us(s[stage] for s in steps[warm:]) for stage in ("admit", "rows")}
    return {"rows": rows, "step_us": _median_us(sum(s.values()) for s in steps[warm:]), "stages_us": stages}


def _median_us(seconds) -> float:
    values = list(seconds)
    return float(np.median(values) * 1e6) if values else 0.0


def _seconds(function: Callable[[], Any]) -> float:
    started = now()
    function()
    return now() - started


def show(results: report.Record) -> None:
    """Prints the results."""
    report.show(
        f"Host time of a step in µs, γ {results['block_size']}: medians of {results['steps']} steps",
        ("R", *STAGES, "step", "10%", "90%"),
        [
            [f"{value:.0f}" for value in (e["rows"], *times, *(e[k] for k in ("step_us", "p10_us", "p90_us")))]
            for e in results["engine"]
            for times in [[e["stages_us"][stage] for stage in STAGES]]
        ],
        (
            f"The scheduler alone at R {results['scheduler']['rows']}: {results['scheduler']['step_us']:.0f} µs. "
            f"The bar: {BAR_US:.0f} µs at R {BAR_ROWS}.",
            f"Python sums 10,000 numbers in {results['sum_of_10000_us']:.0f} µs here.",
        ),
    )


def draw(results: report.Record, axes: Axes) -> None:
    """Stages of a step, one bar an R, beside the bar that they must stay under."""
    labels = [f"R {e['rows']}" for e in results["engine"]]
    left = np.zeros(len(labels))
    colors = ("#2a6f97", "#61a5c2", "#a9d6e5", "#d1495b", "#edae49", "#66a182", "#a9b4c2")
    for stage, color in zip(STAGES, colors, strict=True):
        widths = np.array([e["stages_us"][stage] for e in results["engine"]])
        axes.barh(labels, widths, left=left, color=color, label=stage)
        left += widths
    label = f"{BAR_US:.0f} µs, the bar at R {BAR_ROWS}"
    axes.axvline(BAR_US, color="black", linewidth=1, linestyle="--", label=label)
    axes.invert_yaxis()
    axes.set_xlabel("µs of the host's time a step, medians")
    axes.set_title("Host cost of the loop by stage, device and text left out", loc="left")
    axes.legend(frameon=False, fontsize=8)
