"""`jspark bench engine`: an engine under load, several arms in turns, at one concurrency after another.

Knows: arms, models and sizes, the order of turns, and which figures a cell has.
Does not know: how load is made (closed_loop.py), tables and pictures (engine_report.py), flags.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from jspark.arguments import TILE
from jspark.bench import report
from jspark.bench.closed_loop import Load, Prompt, Steps, Turn, WatchedEngine, rates, step_seconds, turn
from jspark.bench.device_trace import DeviceTime
from jspark.bench.workloads import WORKLOADS
from jspark.budget import Fixed, Full, GlobalArgmax, Policy
from jspark.calibration import read_temperatures
from jspark.config import DType, EngineConfig
from jspark.cost import CostTable
from jspark.errors import UserError
from jspark.evaluate.accept_length import Counts, Figure
from jspark.loading import UNTRAINED, Target, find_drafter, load_drafter, load_target
from jspark.programs import use_compilation_cache

#: Turns of an arm in which something compiled are repeated so often.
_REPEATS = 3
#: Most pauses of a device that a record lists.
_GAPS = 5
#: Steps of a turn that only warms up, and seconds after which measuring the cost begins no further program.
_WARM_STEPS, _PROFILE_SECONDS = 3, 60
#: Arms that are repeated in the other loop, and traced.
_ENDS = ("none", "full", "compact")


@dataclass(frozen=True)
class Settings:
    """What is measured. seconds: of full load, of every arm at every concurrency and temperature, in all rounds.

    fixed: windows of the fixed arms. alone: an arm on an engine without drafter. audit: a cap-accept arm.
    overlap: repeats none, full and compact in a loop that waits for every step. device_trace: looks at the
    device's own trace of none, full and compact. cost: a table for the compact arm; None: the engine's own.
    limit: seconds after which no further cell begins.
    """

    model_path: str
    draft: str | None
    dtype: DType | None
    workload: str
    concurrency: tuple[int, ...]
    temperatures: tuple[float, ...]
    fixed: tuple[int, ...]
    new_tokens: int
    seconds: float
    rounds: int
    alone: bool = True
    audit: bool = True
    overlap: bool = False
    device_trace: bool = False
    cost: CostTable | None = None
    seed: int | None = None
    limit: float = math.inf


@dataclass(frozen=True)
class Arm:
    """A policy on one of the engines. overlap: None: the device's default. drafts: whether requests may draft."""

    name: str
    engine: str
    policy: Policy
    overlap: bool | None = None
    drafts: bool = True


#: What is told while it runs: done, of how many, what is next.
Tell = Callable[[int, int, str], None]


def measure(settings: Settings, tell: Tell) -> Iterator[report.Record]:
    """Yields the record's `results` (benchmarks/README.md) after every cell, a concurrency at a temperature.

    Raises UserError for sizes that do not fit.
    """
    started = time.perf_counter()
    _check(settings)
    use_compilation_cache()
    bench = _Bench(settings)
    cells = [(t, c) for t in settings.temperatures for c in settings.concurrency]
    turns = len(bench.arms) * (settings.rounds + 1) + len(bench.traced)
    results: report.Record = bench.head() | {"cells": [], "complete": False}
    for i, (temperature, concurrency) in enumerate(cells):
        if time.perf_counter() - started > settings.limit:
            break

        def tell_cell(turn: int, what: str, i: int = i, name: str = f"{concurrency} at T {temperature:g}") -> None:
            tell(i * turns + turn, len(cells) * turns, f"{name}: {what}")

        results["cells"].append(bench.cell(temperature, concurrency, tell_cell))
        results["complete"] = i + 1 == len(cells)
        yield results


def _check(settings: Settings) -> None:
    for name, values, least in (
        ("concurrency", settings.concurrency, 1),
        ("fixed", settings.fixed, 1),
        ("rounds", (settings.rounds,), 1),
        ("new-tokens", (settings.new_tokens,), 4),
    ):
        if min(values, default=least) < least:
            raise UserError(f"--{name} is {min(values)}; it must be at least {least}")
    if not settings.concurrency or not settings.temperatures:
        raise UserError("--concurrency and --temperature name nothing to measure; give at least one of each")
    if min(settings.temperatures) < 0 or settings.seconds <= 0:
        raise UserError(
            "--temperature must not be negative and --seconds must be above 0; correct the one that is not"
        )
    if settings.workload not in WORKLOADS:
        raise UserError(f"--workload {settings.workload!r} is unknown; there are {', '.join(WORKLOADS)}")


class _Bench:
    """Models, engines and arms; engines are made when the first arm needs them."""

    def __init__(self, settings: Settings):
        self._settings = settings
        algorithm = "DSPARK" if settings.draft is None else None
        found = find_drafter(settings.draft, algorithm, target=settings.model_path)
        assert found is not None
        self.target = load_target(settings.model_path, settings.dtype, draft=found)
        self._drafter = load_drafter(found, self.target)
        self._sts = read_temperatures(found.calibration) if found.calibration else None
        if settings.draft == UNTRAINED:
            self._drafter_name = UNTRAINED
        else:
            self._drafter_name = "shipped" if settings.draft is None else settings.draft
        self._prompts = load_prompts(self.target, settings.workload)
        slots = max(settings.concurrency)
        gpu = self.target.mesh.devices.flat[0].platform != "cpu"
        reach = max(len(p.tokens) for p in self._prompts) + settings.new_tokens
        context = -(-reach // 64) * 64
        if context > self.target.config.max_position:
            raise UserError(
                f"--new-tokens {settings.new_tokens} do not fit in this model's {self.target.config.max_position} "
                "positions; ask for fewer"
            )
        page, size = EngineConfig.page_size, self._drafter[1].block_size
        rows = sorted({max(c, min(8, slots)) if gpu else c for c in settings.concurrency})
        self._config = EngineConfig(
            max_running_requests=slots,
            context_length=context,
            # Room for every row's last window, so that nobody is preempted.
            max_total_tokens=slots * (context + page * (2 + 2 * size // page)),
            # A chunk of one tile: prompts of any number then run the same program.
            chunked_prefill_size=256 if gpu else TILE,
            dtype=self.target.dtype,
            # Few programs: one page count, one chunk; rows as they are used.
            single_shapes=True,
            row_buckets=tuple(rows),
            # Two drafted tokens cost a CPU what four do.
            token_tiers=() if gpu else tuple(sorted({r * m for r in rows for m in (1, 4, size + 1)})),
            prefix_cache=False,
        )
        self._engines: dict[str, WatchedEngine] = {}
        self._cost = settings.cost
        self.arms = self._arms()
        self.traced = [a for a in self.arms if a.name in _ENDS] if settings.device_trace else []

    def _arms(self) -> list[Arm]:
        size, s = self._drafter[1].block_size, self._settings
        if bad := [k for k in s.fixed if k >= size]:
            raise UserError(
                f"--fixed {bad[0]} is no window below the block of {size}, which full verifies; lower it"
            )
        compact = GlobalArgmax(s.cost)
        # Requests decline to draft: a policy that drafts nothing would try again every so often.
        arms = [
            Arm("none", "drafter", Full(), drafts=False),
            *(Arm(f"fixed {k}", "drafter", Fixed(k)) for k in s.fixed),
        ]
        arms += [Arm("full", "drafter", Full()), Arm("compact", "drafter", compact)]
        if s.overlap:
            arms = [replace(a, overlap=True) for a in arms]
            arms += [replace(a, name=f"{a.name}, no overlap", overlap=False) for a in arms if a.name in _ENDS]
        if s.alone:
            arms.append(Arm("no drafter", "alone", Full()))
        if s.audit:
            arms.append(Arm("cap-accept", "cap-accept", compact))
        return arms

    def head(self) -> report.Record:
        """What all cells share."""
        s = self._settings
        return {
            "model": self.target.name,
            "drafter": self._drafter_name,
            "dtype": self.target.dtype,
            "block_size": self._drafter[1].block_size,
            "workload": s.workload,
            "prompts": len(self._prompts),
            "new_tokens": s.new_tokens,
            "seconds_per_arm": s.seconds,
            "rounds": s.rounds,
            "sampler": "coupled" if s.seed is not None else "rejection",
            "cost_table": None if s.cost is None else s.cost.to_dict(),
        }

    def engine(self, arm: Arm) -> WatchedEngine:
        """The arm's engine, in the arm's loop."""
        if arm.engine not in self._engines:
            target = self.target.model, self.target.config
            alone, mode = arm.engine == "alone", "cap-accept" if arm.engine == "cap-accept" else "compact"
            drafter = () if alone else (self._drafter,)
            engine = WatchedEngine(
                replace(self._config, verify_mode=mode),
                target,
                *drafter,
                mesh=self.target.mesh,
                sts=None if alone else self._sts,
                cost=None if alone else self._cost,
            )
            self._engines[arm.engine] = engine
        return self._engines[arm.engine]

    def cell(self, temperature: float, concurrency: int, tell: Callable[[int, str], None]) -> report.Record:
        """All arms in turns: one that only warms up, then `rounds` that count."""
        s = self._settings
        load = Load(concurrency, s.new_tokens, temperature, s.seed)
        self._warm(load, tell)
        turns: dict[str, list[Turn]] = {arm.name: [] for arm in self.arms}
        done = len(self.arms)
        for number in range(s.rounds):
            shift = number % len(self.arms)
            for arm in (*self.arms[shift:], *self.arms[:shift]):
                tell(done, f"{arm.name}, round {number + 1}")
                turns[arm.name].append(self._timed(arm, load, s.seconds / s.rounds, number))
                done += 1
        device = {}
        for arm in self.traced:
            tell(done, f"{arm.name}, device's trace")
            device[arm.name] = self._timed(arm, load, min(1.0, s.seconds), 0, profile=True).device
            done += 1
        figures = {
            arm.name: summary(own, self._accepts(arm), device.get(arm.name))
            for arm, own in zip(self.arms, turns.values(), strict=False)
        }
        for arm in self.arms:
            own = figures[arm.name]
            own["over_none"] = own["tokens_per_second"] / figures["none"]["tokens_per_second"]
        return {"temperature": temperature, "concurrency": concurrency, "arms": figures}

    def _warm(self, load: Load, tell: Callable[[int, str], None]) -> None:
        """Compiles what the cell's turns run, side by side, and runs each arm for a few steps."""
        for i, arm in enumerate(self.arms):
            tell(i, f"{arm.name}, compiling")
            engine = self.engine(arm)
            engine.compile(load.concurrency, load.temperature > 0, load.seed is not None)
            if arm.policy == GlobalArgmax() and engine.cost is None:
                tell(i, "measuring the cost of a step")
                self._cost = engine.profile(limit=_PROFILE_SECONDS).table
            own = replace(load, speculative=arm.drafts)
            turn(engine, arm.policy, self._prompts, own, 1e9, most_steps=_WARM_STEPS)

    def _timed(self, arm: Arm, load: Load, seconds: float, number: int, *, profile: bool = False) -> Turn:
        engine = self.engine(arm)
        if arm.overlap is not None:
            engine.switch_overlap(arm.overlap)
        # Every arm of a round has the same prompts.
        first, load = number * (len(self._prompts) // 3 + 1), replace(load, speculative=arm.drafts)
        for _ in range(_REPEATS):
            t = turn(engine, arm.policy, self._prompts, load, seconds, first_id=first, profile=profile)
            if not t.compiled:
                break
        return t

    def _accepts(self, arm: Arm) -> bool:
        """Whether the arm knows what the whole block would have got."""
        return arm.engine == "cap-accept" or (
            arm.engine == "drafter" and arm.drafts and isinstance(arm.policy, Full)
        )


def load_prompts(target: Target, workload: str) -> list[Prompt]:
    """A workload's prompts as token ids: chats where the model has a template, else texts, else random ids.

    UserError for an unknown workload.
    """
    if workload not in WORKLOADS:
        raise UserError(f"--workload {workload!r} is unknown; there are {', '.join(WORKLOADS)}")
    kinds = {text: name for name, texts in WORKLOADS.items() if name != "mixed" for text in texts}
    rng = np.random.default_rng(0)

    def ids(text: str) -> list[int]:
        if target.tokenizer is None:
            return rng.integers(target.config.vocab_size, size=max(4, len(text) // 4)).tolist()
        if target.tokenizer.chat_template is None:
            return target.text_ids(text)
        return target.chat_ids([{"role": "user", "content": text}])

    return [Prompt(tuple(ids(text)), kinds[text]) for text in WORKLOADS[workload]]


def summary(turns: Sequence[Turn], whole: bool, device: DeviceTime | None) -> report.Record:
    """Figures of an arm in a cell. whole: the turns know acceptance of the whole block."""
    steps = Steps.of(turns)
    seconds = sum(t.seconds for t in turns)
    pure = [pair for t in turns for pair in step_seconds(t)]
    speeds = [speed for t in turns for speed in rates(t)]
    counts = Counts.of(steps.request, steps.count, int(steps.request.max(initial=-1)) + 1)
    tau = Figure.of(counts.tau(), counts.resampled(0)) if len(steps.request) else None
    by_kind = {}
    for kind in sorted(set(steps.kind.tolist())):
        own = steps.kind == kind
        by_kind[kind] = {
            "accept_length": float(np.mean(steps.count[own])),
            "mean_window": float(np.mean(steps.window[own])),
        }
    committed = sum(int(r.count.sum()) for t in turns for r in t.records)
    return {
        "tokens_per_second": committed / seconds,
        "tokens_per_second_of_turns": [sum(int(r.count.sum()) for r in t.records) / t.seconds for t in turns],
        "request_tokens_per_second": statistics.median(speeds) if speeds else None,
        "accept_length": None if tau is None else asdict(tau),
        "mean_window": float(np.mean(steps.window)) if len(steps.window) else None,
        "window_histogram": np.bincount(steps.window).tolist(),
        "tiers": dict(sorted(Counter(r.verify_tokens for t in turns for r in t.records).items())),
        "utilisation": utilisation(steps) if whole else None,
        "step_ms": statistics.median(s for _, s in pure) * 1e3 if pure else None,
        "steps": sum(len(t.records) for t in turns),
        "steps_with_prompts": sum(r.prefill_tokens > 0 for t in turns for r in t.records),
        "host_share": sum(t.host for t in turns) / seconds,
        "prefill_tokens_per_second": sum(t.prompt_tokens for t in turns) / sum(t.prefill for t in turns),
        "by_kind": by_kind,
        "compiled_within": sum(t.compiled for t in turns),
        "device": None
        if device is None
        else {
            "span_seconds": device.span,
            "idle_share": device.idle_share,
            "between_launches_share": device.between_share,
            "longest_pauses_ms": [g * 1e3 for g in device.gaps[:_GAPS]],
        },
    }


def utilisation(steps: Steps) -> float | None:
    """Drafts accepted within the windows over those accepted in whole blocks; None where nothing was accepted."""
    everything = int(steps.block_accepted.sum())
    return int(steps.accepted.sum()) / everything if everything else None
