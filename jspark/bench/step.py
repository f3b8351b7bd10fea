"""`jspark bench step`: time of the engine's own compiled programs, and of a whole engine step around them.

Knows: which programs and tiers are timed, and how to time launches that are asynchronous.
Does not know: how they are called (warm_engine.py), what they cost at least (ceilings.py), flags, records.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspark import weights
from jspark.bench import ceilings, report
from jspark.bench.ceilings import Ceilings, Work
from jspark.bench.warm_engine import Launches, WarmEngine
from jspark.config import AttentionBackend, DecoderConfig, DrafterConfig, DType, EngineConfig, RopeConfig
from jspark.errors import UserError
from jspark.loading import load_target
from jspark.models.decoder import Decoder
from jspark.models.drafter import Drafter
from jspark.programs import use_compilation_cache
from jspark.request import Request, SamplingParams
from jspark.sizing import least_tokens
from jspark.state import SlotTable

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
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position=8192,
        rope=RopeConfig(theta=100_000.0),
        tie_embeddings=True,
    ),
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
    attention_backend: AttentionBackend


@dataclass(frozen=True)
class Models:
    """The target and its untrained drafter."""

    name: str
    target: tuple[Decoder, DecoderConfig]
    drafter: tuple[Drafter, DrafterConfig]


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
        "attention_backend": settings.attention_backend,
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
    drafter = weights.random_drafter(config, dtype, mesh)
    assert isinstance(drafter, Drafter)
    return Models(name, target, (drafter, config))


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
        attention_backend=settings.attention_backend,
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
        "attention": asdict(engine.programs.spec.attention),
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

    def add(name: str, tokens: int, work: Work, launch: Callable[[SlotTable], Any]) -> None:
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
        tokens = max(rows * multiple, least_tokens(launches.programs.mesh))
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


def _batches(launch: Callable[[SlotTable], Any], slots: Callable[[], SlotTable], steps: int) -> list[float]:
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
    """Each program's time and its floor, on a log scale: the line between them is the factor."""
    programs = results["programs"]
    labels = [f"{p['program']}\nR {p['rows']}, T {p['tokens']}" for p in programs]
    floors, times = ([p[key] for p in programs] for key in ("floor_ms", "ms"))
    axes.hlines(labels, floors, times, color="#a9b4c2", linewidth=3)
    axes.plot(floors, labels, "|", color="#d1495b", markersize=14, markeredgewidth=2, label="floor")
    axes.plot(times, labels, "o", color="#2a6f97", label="measured")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("ms a launch (log scale)")
    axes.set_title(f"Programs of {results['model']}, {results['dtype']}, context {results['context']}", loc="left")
    axes.legend(frameon=False)
