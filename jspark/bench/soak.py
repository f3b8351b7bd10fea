"""`jspark bench soak`: hundreds of streams on an engine in this process, some given up, and what is left behind.

Knows: how requests are made up, what a right answer is, and how memory and pages are watched.
Does not know: flags (cli_bench_engine.py), speed (engine.py measures that).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspark import weights
from jspark.bench import report
from jspark.budget import BatchState, Plan
from jspark.config import DecoderConfig, EngineConfig, RopeConfig
from jspark.engine import Engine
from jspark.errors import UserError
from jspark.loading import find_drafter, load_drafter, load_target
from jspark.programs import use_compilation_cache
from jspark.request import Request, SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A target small enough for hundreds of streams on a CPU, with room for long prompts.
TINY = DecoderConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position=2048,
    rope=RopeConfig(theta=10_000.0),
    tie_embeddings=True,
)
#: Looks at memory and pages in a run, about.
_LOOKS = 400
#: A first difference is excused where plain decoding's own two best log-probabilities are closer.
_TIE = 1e-4


@dataclass(frozen=True)
class Settings:
    """What is run. model_path: None is the tiny target with random weights, and an untrained drafter.

    streams: requests at a time. longest_prompt: prompts have from 1 to so many tokens, evenly by logarithm.
    aborted: share of requests that are given up. checked: answers compared with plain decoding. memory_share: of
    the pages that all slots could need, how many there are; below 1, requests are preempted. limit: seconds after
    which no further request begins.
    """

    model_path: str | None
    streams: int
    requests: int
    longest_prompt: int
    new_tokens: int
    aborted: float
    checked: int
    chunk: int
    memory_share: float
    seed: int
    limit: float


@dataclass(frozen=True)
class Restless:
    """Another budget every few steps: nothing, one tier or the other, whole blocks."""

    chance: random.Random

    def plan(self, state: BatchState) -> Plan:
        """A random tier's budget."""
        budgets = [0, *(t - state.rows for t in state.tiers if t >= state.rows)]
        budget = self.chance.choice(budgets)
        return Plan(budget, drafts=budget > 0)


@dataclass(frozen=True)
class Look:
    """Bytes and pages at one moment. request: how many had ended."""

    seconds: float
    request: int
    resident_bytes: int
    array_bytes: int
    pages_in_use: int
    pages_idle: int
    programs: int


def measure(settings: Settings, mesh: Mesh, tell: Callable[[int, int, str], None]) -> report.Record:
    """Everything that the record's `results` holds (benchmarks/README.md).

    tell: called with how many requests have ended, of how many, and what is going on. Raises UserError for
    settings that cannot be run.
    """
    for name in ("streams", "requests", "longest_prompt", "new_tokens", "chunk"):
        if getattr(settings, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(settings, name)}; it must be at least 1")
    if not 0 <= settings.aborted <= 1 or not 0 < settings.memory_share <= 1:
        raise UserError("--aborted and --memory-share are shares, the latter above 0; correct the one that is not")
    use_compilation_cache()
    name, target, drafter, dtype = _models(settings.model_path, mesh)
    context = -(-(settings.longest_prompt + settings.new_tokens) // 64) * 64
    if context > target[1].max_position:
        raise UserError(
            f"prompts of {settings.longest_prompt} tokens and {settings.new_tokens} more do not fit in the "
            f"{target[1].max_position} positions of this model; lower one of them"
        )
    tokens = settings.streams * (context + drafter[1].block_size)
    config = EngineConfig(
        max_running_requests=settings.streams,
        context_length=context,
        max_total_tokens=max(int(tokens * settings.memory_share), 2 * context),
        chunked_prefill_size=settings.chunk,
        dtype=dtype,
        single_shapes=True,
    )
    policy = Restless(random.Random(settings.seed))
    engine = Engine(config, target, drafter, policy=policy, mesh=mesh)
    requests = _requests(settings, target[1].vocab_size)
    run = _Run(engine, requests, settings, tell)
    run.all()
    sample = run.whole()[: settings.checked]
    tell(len(sample), len(requests), "plain decoding")
    plain_config = replace(config, max_running_requests=8, row_buckets=(8,), max_total_tokens=8 * context)
    wrong, excused = _compare(Engine(plain_config, target, mesh=mesh), requests, run.answers, sample)
    return (
        {"model": name, "dtype": dtype, "settings": asdict(settings)}
        | run.results()
        | {
            "compared_with_plain": len(sample),
            "compared_greedy": sum(requests[i].params.temperature == 0 for i in sample),
            "wrong": wrong,
            "ties_excused": excused,
            "attention": asdict(engine.programs.spec.attention),
            "pool_bytes": engine.kv_bytes,
        }
    )


def _models(path: str | None, mesh: Mesh):
    if path is None:
        target = weights.random_decoder(TINY, jnp.float32, mesh), TINY
        config = weights.untrained_drafter_config(TINY)
        return (
            "tiny (random weights)",
            target,
            (weights.random_drafter(config, jnp.float32, mesh), config),
            "float32",
        )
    found = find_drafter(None, "DSPARK", target=path)
    assert found is not None
    loaded = load_target(path, mesh=mesh, draft=found)
    return loaded.name, (loaded.model, loaded.config), load_drafter(found, loaded), loaded.dtype


def _requests(settings: Settings, vocabulary: int) -> list[Request]:
    """Greedy and seeded requests in turn; every eighth prompt begins as another one does.

    The last ones are all seeded, so that programs with sampling serve the run to its end.
    """
    rng = np.random.default_rng(settings.seed)
    made: list[Request] = []
    for i in range(settings.requests):
        size = round(settings.longest_prompt ** rng.uniform())
        prompt = tuple(rng.integers(vocabulary, size=size).tolist())
        if i % 8 == 7:
            prompt = (made[-4].prompt + prompt)[: settings.longest_prompt]
        sampled = i % 2 == 1 or i >= settings.requests - settings.streams
        params = SamplingParams(
            temperature=1.0 if sampled else 0.0, seed=i if sampled else None, max_tokens=settings.new_tokens
        )
        made.append(Request(i, prompt, params))
    return made


class _Run:
    """The engine's loop with its clients."""

    def __init__(self, engine: Engine, requests: Sequence[Request], settings: Settings, tell):
        self._engine, self._requests, self._settings, self._tell = engine, requests, settings, tell
        chance = random.Random(settings.seed)
        #: How many tokens of it a client waits for before it leaves; 0 leaves while the request waits.
        self._leave = {
            r.id: chance.randrange(settings.new_tokens) for r in requests if chance.random() < settings.aborted
        }
        self.answers: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.looks: list[Look] = []
        self._left: set[int] = set()
        self._started, self._steps = time.perf_counter(), 0

    def all(self) -> None:
        """Runs every request, or those that begin within the limit, to its end."""
        s, every = self._settings, max(1, len(self._requests) // _LOOKS)
        queue, going, seen = iter(self._requests), 0, -1
        self._look()
        while True:
            while going < s.streams and time.perf_counter() - self._started < s.limit:
                request = next(queue, None)
                if request is None:
                    break
                self._engine.add(request)
                self.answers[request.id] = []
                if self._leave.get(request.id) == 0:
                    self._abort(request.id)
                else:
                    going += 1
            if self._engine.idle:
                break
            for update in self._engine.step():
                answer = self.answers[update.id]
                answer += update.tokens
                if update.finish_reason:
                    self.reasons[update.id] = update.finish_reason
                    going -= 1
                elif len(answer) >= self._leave.get(update.id, 1 << 30):
                    self._abort(update.id)
                    going -= 1
            self._steps += 1
            ended = len(self.reasons) + len(self._left)
            if ended // every > seen:
                seen = ended // every
                self._look()
                self._tell(ended, len(self._requests), "streams")
        self._seconds = time.perf_counter() - self._started
        self._look()

    def whole(self) -> list[int]:
        """Requests that nobody gave up."""
        return [i for i in self.answers if i not in self._left]

    def results(self) -> report.Record:
        """Figures of the run."""
        allocator, scheduler = self._engine.scheduler.allocator, self._engine.scheduler
        whole = self.whole()
        complete = [
            i
            for i in whole
            if self.reasons.get(i) == "length" and len(self.answers[i]) == self._settings.new_tokens
        ]
        half = [k for k in self.looks if k.request >= len(self._requests) / 2]
        tokens = sum(map(len, self.answers.values()))
        return {
            "seconds": self._seconds,
            "steps": self._steps,
            "begun": len(self.answers),
            "aborted": len(self._left),
            "whole": len(whole),
            "complete": len(complete),
            "tokens": tokens,
            "tokens_per_second": tokens / self._seconds,
            "prompt_tokens": sum(len(self._requests[i].prompt) for i in self.answers),
            "preemptions": scheduler.preemptions,
            "leaked_pages": allocator.in_use,
            "leaked_slots": len(scheduler.running) + len(scheduler.waiting),
            "programs": self._engine.programs.report.programs,
            "programs_in_second_half": half[-1].programs - half[0].programs if half else None,
            "resident_growth_bytes_second_half": _growth(half, "resident_bytes"),
            "array_growth_bytes_second_half": _growth(half, "array_bytes"),
            "looks": [asdict(look) for look in self.looks],
        }

    def _abort(self, request: int) -> None:
        self._engine.abort(request)
        self._left.add(request)

    def _look(self) -> None:
        allocator = self._engine.scheduler.allocator
        self.looks.append(
            Look(
                time.perf_counter() - self._started,
                len(self.reasons) + len(self._left),
                report.resident_bytes("self") or 0,
                sum(x.nbytes for x in jax.live_arrays()),
                allocator.in_use,
                allocator.idle,
                self._engine.programs.report.programs,
            )
        )


def _growth(looks: Sequence[Look], field: str) -> int | None:
    """Median of the last fifth of the looks less that of the first fifth."""
    values = [getattr(look, field) for look in looks]
    fifth = len(values) // 5
    return int(np.median(values[-fifth:]) - np.median(values[:fifth])) if fifth else None


def _compare(
    plain: Engine, requests: Sequence[Request], answers: dict[int, list[int]], sample: Sequence[int]
) -> tuple[list[int], int]:
    """Requests whose answers are not plain decoding's, and how many of these a near tie excuses."""
    expected: dict[int, list[int]] = {i: [] for i in sample}
    margins: dict[int, list[float]] = {i: [] for i in sample}
    for i in sample:
        params = requests[i].params
        # The margin between the two best is known of greedy rows only.
        plain.add(replace(requests[i], params=replace(params, logprobs=5 if params.temperature == 0 else None)))
    while not plain.idle:
        for update in plain.step():
            expected[update.id] += update.tokens
            margins[update.id] += [t.top[0][1] - t.top[1][1] for t in update.logprobs]
    wrong, excused = [], 0
    for i in sample:
        pairs = zip(answers[i], expected[i], strict=False)
        first = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if first is None and len(answers[i]) == len(expected[i]):
            continue
        if first is not None and first < len(margins[i]) and margins[i][first] < _TIE:
            excused += 1
        else:
            wrong.append(i)
    return wrong, excused


def passed(results: report.Record) -> bool:
    """Whether everything that began ended as it should and nothing was left behind."""
    return (
        results["begun"] == results["settings"]["requests"]
        and results["complete"] == results["whole"]
        and not results["wrong"]
        and not results["leaked_pages"]
        and not results["leaked_slots"]
    )


def show(results: report.Record) -> None:
    """The figures as a table."""
    r, s = results, results["settings"]

    def mb(value: int | None) -> str:
        return "–" if value is None else f"{value / 1e6:+.1f} MB"

    rows = [
        ("requests", f"{r['begun']} of {s['requests']}: {r['complete']} complete, {r['aborted']} given up"),
        ("equal to plain decoding", f"{r['compared_with_plain'] - len(r['wrong'])} of {r['compared_with_plain']}"),
        ("excused by a near tie", str(r["ties_excused"])),
        ("leaked pages, slots", f"{r['leaked_pages']}, {r['leaked_slots']}"),
        ("preemptions", str(r["preemptions"])),
        ("resident memory, second half", mb(r["resident_growth_bytes_second_half"])),
        ("arrays, second half", mb(r["array_growth_bytes_second_half"])),
        ("tokens/s", f"{r['tokens_per_second']:.0f} in {r['steps']} steps, {r['seconds']:.0f} s"),
    ]
    report.show(f"{s['streams']} streams on {r['model']}", ("", ""), rows, ())


def draw(results: report.Record, figure: Figure) -> None:
    """Memory and pages over the run."""
    looks: list[dict[str, Any]] = results["looks"]
    upper, lower = figure.subplots(2, 1, sharex=True)
    at = [look["request"] for look in looks]
    upper.plot(at, [look["resident_bytes"] / 1e6 for look in looks], label="resident memory of the process")
    upper.plot(at, [look["array_bytes"] / 1e6 for look in looks], label="JAX arrays")
    upper.set_ylabel("MB")
    upper.set_ylim(bottom=0)
    lower.plot(at, [look["pages_in_use"] for look in looks], label="pages in use")
    lower.plot(at, [look["pages_idle"] for look in looks], label="pages kept by the prefix cache")
    lower.set_ylabel("pages")
    lower.set_xlabel("requests that have ended")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    upper.set_title(f"{results['settings']['streams']} streams on {results['model']}", loc="left")
