"""`jspark bench step`: time of the engine's own compiled programs, and of a whole engine step around them.

Knows: how to bring an engine into the middle of decoding without a prefill, and how to time asynchronous launches.
Does not know: what the programs compute, flags, or how a record is kept (report.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspark import weights
from jspark.bench import ceilings, report
from jspark.bench.ceilings import Ceilings, Work
from jspark.config import DecoderConfig, DrafterConfig, DType, EngineConfig, RopeConfig
from jspark.engine import Engine
from jspark.errors import UserError
from jspark.loading import load_target
from jspark.models.decoder import Decoder
from jspark.models.drafter import Drafter
from jspark.programs import Programs, ProposeShape, VerifyShape, at_least, use_compilation_cache
from jspark.propose import Proposal
from jspark.request import Request, SamplingParams
from jspark.state import Packet, Slots, StepArgs
from jspark.step import Pools, Sampling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = {
    "qwen3-8b": DecoderConfig(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position=40_960,
        rope=RopeConfig(theta=1_000_000.0),
        qk_norm=True,
        model_type="qwen3",
    )
}
#: Timed batches of launches; the median of them is reported.
_BATCHES = 5
#: Engine steps before the first that counts: the one without features to draft from, and two more.
_WARM = 3
#: Room for committed tokens in an engine step; an untrained drafter's guesses are hardly ever right.
_TOKENS_A_STEP = 3


@dataclass(frozen=True)
class Settings:
    """What is measured. rows: one measurement each. context: tokens a request has, its window included.

    steps: launches in a timed batch, and engine steps that count. shape: in place of model_path.
    """

    model_path: str
    shape: str | None
    dtype: DType
    rows: tuple[int, ...]
    context: int
    block_size: int
    steps: int


@dataclass(frozen=True)
class Models:
    """The target and its untrained drafter."""

    name: str
    target: tuple[Decoder, DecoderConfig]
    drafter: tuple[Drafter, DrafterConfig]


class WarmEngine(Engine):
    """An engine that begins in the middle: caches full of random numbers, requests that need no prefill."""

    def fill(self) -> None:
        """Random keys and values in both pools; zeros would flatter the time."""
        self._pools = jax.tree.map(_random_like, self._pools)

    def begin(self, requests: list[Request]) -> None:
        """Admits `requests` as if their prompts were in the cache."""
        for request in requests:
            self.add(request)
        admitted = self.scheduler.admit(time.perf_counter())
        assert len(admitted) == len(requests)
        self._place(admitted)
        for running in admitted:
            running.prefilled = len(running.request.prompt) - 1

    def launches(self, context: int, rng: np.random.Generator) -> Launches:
        """Direct calls of the programs; the engine itself is of no use afterwards, its pools are donated."""
        pages = at_least(self._page_steps, self.scheduler.allocator.pages_for(context))
        slots = jax.tree.map(np.asarray, self._slots)
        return Launches(self.programs, self._pools, slots, self.config.page_size, pages, context, rng)


class Launches:
    """Calls of an engine's programs with random tokens, all rows alike. Pools are donated from call to call.

    context: tokens of every row, the last row of its window included. pages: of the tables that programs see.
    """

    def __init__(
        self,
        programs: Programs,
        pools: Pools,
        slots: Slots,
        page_size: int,
        pages: int,
        context: int,
        rng: np.random.Generator,
    ):
        self.programs, self.pages = programs, pages
        self.rows = rows = slots.anchor.shape[0] - 1
        self._pools, self._empty, self._rng = pools, slots, rng
        self._vocab_size = programs.spec.target.vocab_size
        self._position = context - programs.spec.block_size - 1
        own = -(-context // page_size)
        self._table = np.zeros((rows, pages), np.int32)
        self._table[:, :own] = 1 + np.arange(rows * own).reshape(rows, own)

    def slots(self) -> Slots:
        """A slot table in the middle of decoding; a verify program uses it up."""
        n = self._empty.anchor.shape[0]
        table = replace(
            self._empty,
            anchor=self._tokens(n),
            position=np.full(n, self._position, np.int32),
            remaining=np.full(n, 1 << 20, np.int32),
            live=np.ones(n, bool),
        )
        return self.programs.place(table)

    def args(self, tokens: int) -> StepArgs:
        """Arguments of a step whose tier is `tokens`, filled."""
        rows = self.rows
        args = StepArgs(
            slot=jnp.arange(rows, dtype=jnp.int32),
            decode=jnp.ones(rows, bool),
            table=jnp.asarray(self._table),
            budget=jnp.asarray(tokens - rows, jnp.int32),
            threshold=jnp.zeros((), jnp.float32),
            min_window=jnp.zeros(rows, jnp.int32),
            max_window=jnp.full(rows, self.programs.spec.block_size, jnp.int32),
            prefill=None,
        )
        return self.programs.place(args)

    def proposal(self) -> Proposal | None:
        """A random block with random confidence; None without a drafter."""
        shape = (self.rows, self.programs.spec.block_size)
        if not shape[1]:
            return None
        confidence = jnp.asarray(self._rng.normal(size=shape), jnp.float32)
        return self.programs.place(Proposal(jnp.asarray(self._tokens(shape)), confidence, None))

    def propose(self, slots: Slots, args: StepArgs) -> Proposal:
        """Launches the propose program."""
        return self.programs.propose(ProposeShape(self.rows, self.pages, Sampling()), self._pools, slots, args)

    def verify(self, tokens: int, slots: Slots, args: StepArgs, proposal: Proposal | None) -> Packet:
        """Launches the verify program of the tier `tokens`."""
        shape = VerifyShape(self.rows, self.pages, Sampling(), tokens, proposal is not None, None)
        self._pools, _, packet = self.programs.verify(shape, self._pools, slots, args, proposal)
        return packet

    def _tokens(self, shape: int | tuple[int, ...]) -> np.ndarray:
        return self._rng.integers(self._vocab_size, size=shape, dtype=np.int32)


def measure(settings: Settings, mesh: Mesh) -> report.Record:
    """Everything that the record's `results` holds (benchmarks/README.md).

    Raises UserError for sizes that do not fit.
    """
    models = _models(settings, mesh)
    limits = ceilings.measure(mesh, settings.dtype)
    programs, engines = [], []
    for rows in settings.rows:
        for drafter in (None, models.drafter):
            engine, launches_of = _measure_engine(settings, models, drafter, mesh, rows, limits)
            engines.append(engine)
            programs += launches_of
    memory = mesh.devices.flat[0].memory_stats() or {}
    return {
        "model": models.name,
        "dtype": settings.dtype,
        "context": settings.context,
        "block_size": settings.block_size,
        "steps": settings.steps,
        "batches": _BATCHES,
        "weight_bytes": ceilings.weight_bytes(models.target[0]),
        "drafter_weight_bytes": ceilings.weight_bytes(models.drafter[0]),
        "peak_device_bytes": memory.get("peak_bytes_in_use"),
        "ceilings": {
            "read_bytes_per_second": limits.read_bandwidth,
            "matmul_flops_per_second": limits.matmul_rate,
        },
        "programs": programs,
        "engine": engines,
    }


def _models(settings: Settings, mesh: Mesh) -> Models:
    if settings.steps < 1 or settings.block_size < 1 or not all(r > 0 for r in settings.rows):
        raise UserError("--rows, --steps and --block-size must be at least 1; correct the one that is not")
    least = settings.block_size + 2 + _TOKENS_A_STEP * (settings.steps + _WARM)
    if settings.context < least:
        raise UserError(
            f"--context {settings.context} leaves no room for {settings.steps} steps; give at least {least}, or "
            "fewer steps"
        )
    use_compilation_cache()
    dtype = jnp.dtype(settings.dtype)
    if settings.shape is None:
        loaded = load_target(settings.model_path, settings.dtype, mesh)
        name, target = loaded.name, (loaded.model, loaded.config)
    else:
        config = SHAPES[settings.shape]
        name, target = f"{settings.shape} (random weights)", (weights.random_decoder(config, dtype, mesh), config)
    config = weights.untrained_drafter_config(target[1], block_size=settings.block_size)
    return Models(name, target, (weights.random_drafter(config, dtype, mesh), config))


def _measure_engine(
    settings: Settings,
    models: Models,
    drafter: tuple[Drafter, DrafterConfig] | None,
    mesh: Mesh,
    rows: int,
    limits: Ceilings,
) -> tuple[report.Record, list[report.Record]]:
    """An engine's step, and each of its programs, at `rows` rows."""
    width = settings.block_size + 1 if drafter else 1
    page_size = EngineConfig.page_size
    config = EngineConfig(
        max_running_requests=rows,
        context_length=settings.context,
        max_total_tokens=rows * page_size * -(-(settings.context + width - 1) // page_size),
        dtype=settings.dtype,
        row_buckets=(rows,),
    )
    engine = WarmEngine(config, models.target, drafter, mesh=mesh)
    engine.fill()
    rng = np.random.default_rng(rows)
    whole = _engine_steps(engine, settings, rng)
    launches = engine.launches(settings.context, rng)
    measured = _programs(launches, settings, models, drafter, limits)
    # The step that the engine took: propose, if there is one, and the full tier.
    step = [p for p in measured if p["program"] in ("propose", "verify plain", "verify full")]
    record = {
        "rows": rows,
        "algorithm": "DSPARK" if drafter else "NONE",
        "step_ms": statistics.median(whole) * 1e3,
        "steps_counted": len(whole),
        "programs_ms": sum(p["ms"] for p in step),
        "dispatch_ms": _dispatch(launches, rows * width, bool(drafter)) * 1e3,
        "floor_ms": sum(p["floor_ms"] for p in step),
        "kv_pool_bytes": engine.kv_bytes,
        "compile_seconds": engine.programs.report.seconds,
    }
    return record, measured


def _engine_steps(engine: WarmEngine, settings: Settings, rng: np.random.Generator) -> list[float]:
    """Seconds of engine steps in which every row decodes."""
    rows = engine.config.max_running_requests
    room = _TOKENS_A_STEP * (settings.steps + _WARM)
    params = SamplingParams(temperature=0.0, max_tokens=room)
    prompts = rng.integers(engine.programs.spec.target.vocab_size, size=(rows, settings.context - room))
    engine.begin([Request(i, tuple(prompt.tolist()), params) for i, prompt in enumerate(prompts)])
    seconds = []
    while len(seconds) < settings.steps + _WARM and len(engine.scheduler.running) == rows:
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    if len(seconds) <= _WARM:
        raise UserError("requests ended before a step could be timed; raise --context or lower --block-size")
    for i in range(rows):
        engine.abort(i)
    while not engine.idle:
        engine.step()
    return seconds[_WARM:]


def _programs(
    launches: Launches,
    settings: Settings,
    models: Models,
    drafter: tuple[Drafter, DrafterConfig] | None,
    limits: Ceilings,
) -> list[report.Record]:
    rows, context = launches.rows, settings.context
    model, config = models.target
    measured = []

    def add(name: str, tokens: int, work: Work, launch: Callable[[Slots], Any]) -> None:
        batches = _batches(launch, launches.slots, settings.steps)
        floor, ms = limits.floor(work), statistics.median(batches) * 1e3
        measured.append(
            {
                "program": name,
                "rows": rows,
                "tokens": tokens,
                "pages": launches.pages,
                "ms": ms,
                "ms_of_batches": [b * 1e3 for b in batches],
                "bytes": work.bytes,
                "flops": work.flops,
                "floor_ms": floor.seconds * 1e3,
                "floor_bound": floor.bound,
                "ratio": ms / (floor.seconds * 1e3),
            }
        )

    size = settings.block_size
    if drafter:
        work = ceilings.propose_pass(*drafter, model, rows=rows, block_size=size, context=context)
        args = launches.args(rows * (size + 1))
        add("propose", rows * size, work, lambda slots: launches.propose(slots, args))
    for name, multiple in _tiers(size if drafter else 0).items():
        tokens = rows * multiple
        work = ceilings.target_pass(model, config, rows=rows, tokens=tokens, context=context)
        if drafter:
            work += ceilings.inject_pass(drafter[0], tokens=tokens)
        verify = partial(launches.verify, tokens, args=launches.args(tokens), proposal=launches.proposal())
        add(f"verify {name}", tokens, work, verify)
    return measured


def _tiers(block_size: int) -> dict[str, int]:
    """Packed tokens a row: of plain decoding, or of all drafts and of a tier below that, where there is one."""
    if not block_size:
        return {"plain": 1}
    middle = [m for m in (2, 4) if m < block_size + 1]
    return {"middle": middle[-1], "full": block_size + 1} if middle else {"full": block_size + 1}


def _batches(launch: Callable[[Slots], Any], slots: Callable[[], Slots], steps: int) -> list[float]:
    """Seconds a launch in each of several batches of launches one behind the other; compiled before."""
    jax.block_until_ready(launch(slots()))
    seconds = []
    for _ in range(_BATCHES):
        tables = jax.block_until_ready([slots() for _ in range(steps)])
        started = time.perf_counter()
        out = None
        for table in tables:
            out = launch(table)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - started) / steps)
    return seconds


def _dispatch(launches: Launches, tokens: int, drafts: bool) -> float:
    """Seconds in which the host hands the programs of one step to an idle device; median."""
    args, seconds = launches.args(tokens), []
    for _ in range(_BATCHES):
        slots = jax.block_until_ready(launches.slots())
        started = time.perf_counter()
        proposal = launches.propose(slots, args) if drafts else None
        packet = launches.verify(tokens, slots, args, proposal)
        seconds.append(time.perf_counter() - started)
        jax.block_until_ready(packet)
    return statistics.median(seconds)


def _random_like(x: jax.Array) -> jax.Array:
    make = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=x.sharding)
    return make(jax.random.key(x.size), x.shape, x.dtype)


def show(results: report.Record) -> None:
    """Prints the results."""
    report.show(
        f"{results['model']}, {results['dtype']}, context {results['context']}, γ {results['block_size']}",
        ("program", "R", "T", "ms", "floor ms", "times floor", "bound by"),
        [
            (
                p["program"],
                str(p["rows"]),
                str(p["tokens"]),
                f"{p['ms']:.3f}",
                f"{p['floor_ms']:.3f}",
                f"{p['ratio']:.2f}",
                p["floor_bound"],
            )
            for p in results["programs"]
        ],
        (
            f"Measured here: {results['ceilings']['read_bytes_per_second'] / 1e9:.1f} GB/s read, "
            f"{results['ceilings']['matmul_flops_per_second'] / 1e12:.3g} TFLOP/s.",
            "",
        ),
    )
    report.show(
        "Whole engine step",
        ("algorithm", "R", "step ms", "programs ms", "dispatch ms", "floor ms", "compile s"),
        [
            (
                e["algorithm"],
                str(e["rows"]),
                f"{e['step_ms']:.3f}",
                f"{e['programs_ms']:.3f}",
                f"{e['dispatch_ms']:.3f}",
                f"{e['floor_ms']:.3f}",
                f"{e['compile_seconds']:.1f}",
            )
            for e in results["engine"]
        ],
        (),
    )


def draw(results: report.Record, axes: Axes) -> None:
    """A bar for every program, its floor inside it."""
    programs = results["programs"]
    labels = [f"{p['program']}\nR {p['rows']}, T {p['tokens']}" for p in programs]
    axes.barh(labels, [p["ms"] for p in programs], color="#2a6f97", label="measured")
    axes.barh(labels, [p["floor_ms"] for p in programs], height=0.4, color="#d1495b", label="floor")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("ms a launch (log scale)")
    axes.set_title(f"Programs of {results['model']}, {results['dtype']}, context {results['context']}", loc="left")
    axes.legend(frameon=False)
