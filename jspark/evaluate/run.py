"""An evaluation: every arm on every data set at every temperature, kept on disk part by part.

Knows: which models are loaded, the order of the runs, and the files that let an interrupted evaluation go on.
Does not know: flags (cli_eval.py), figures (analyse.py), or how they are shown (report.py).

A part is one data set at one temperature with all arms, which run in turns: the speeds of a part belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jspark.calibration import Temperatures
from jspark.config import DType
from jspark.errors import UserError
from jspark.evaluate.analyse import PLAIN, Arm, analyse
from jspark.evaluate.collect import Recorder, Run, answer
from jspark.evaluate.data import DataSet, longest_reach
from jspark.llm import LLM
from jspark.loading import UNTRAINED, Target, find_drafter, load_target
from jspark.request import Request, Sampler, SamplingParams
from jspark.step import Sampling
from jspark.warmup import compile_now, loop_set

#: γ of prompt lookup and oracle where there is no drafter to take it from.
DEFAULT_BLOCK_SIZE = 7
#: Context lengths are rounded up to this, so that similar runs share compiled programs.
CONTEXT_STEP = 256


@dataclass(frozen=True)
class Drafter:
    """A drafter by the name that the record gives it. temperatures: of its confidence, for figures about that."""

    name: str
    path: str
    temperatures: Temperatures | None = None


@dataclass(frozen=True)
class Settings:
    """What is run. concurrency: prompts at a time, 0: the engine's choice. block_size: γ, 0: the drafter's."""

    model_path: str
    drafters: tuple[Drafter, ...]
    temperatures: tuple[float, ...]
    max_new_tokens: int
    seed: int = 0
    speculative_sampling: Sampler = "rejection"
    ignore_eos: bool = False
    block_size: int = 0
    concurrency: int = 0
    context_length: int = 0
    chunked_prefill_size: int = 512
    dtype: DType | None = None
    overlap: bool | None = None


def open_llm(
    target: Target, draft: str | None, context: int, settings: Settings, recorder: Recorder | None = None
) -> LLM:
    """An LLM that verifies whole blocks and is watched; on accelerators with few programs to compile."""
    cpu = target.mesh.devices.flat[0].platform == "cpu"
    return LLM(
        target,
        draft,
        observer=recorder,
        **({"verify_mode": "static", "block_size": settings.block_size} if draft else {}),
        max_running_requests=settings.concurrency,
        context_length=context,
        chunked_prefill_size=settings.chunked_prefill_size,
        single_shapes=not cpu,
        overlap=settings.overlap,
    )


def make_ready(llms: Sequence[LLM], params: Sequence[SamplingParams]) -> None:
    """Compiles what these requests need, side by side. On a CPU that is too much: steps compile as they come."""
    kinds = dict.fromkeys(Sampling.of(Request(0, (0,), own).traits) for own in params)
    engines = [llm.engine for llm in llms if llm.engine.config.single_shapes]
    compile_now(
        (engine, shape)
        for engine in engines
        for kind in kinds
        for shape in loop_set(engine, engine.config.max_running_requests, kind)
    )


def context_for(settings: Settings, data: Sequence[DataSet], target: Target) -> int:
    """The context length that holds every conversation; UserError for one that cannot fit."""
    reach = longest_reach(data, target, settings.max_new_tokens, settings.context_length)
    return min(-(-reach // CONTEXT_STEP) * CONTEXT_STEP, target.config.max_position)


def load_checked(settings: Settings) -> Target:
    """The target, once every drafter's folder is seen to hold one that fits."""
    drafts = [find_drafter(d.path, None) for d in settings.drafters]
    return load_target(settings.model_path, settings.dtype, draft=drafts[0] if drafts else None)


def evaluate(
    settings: Settings, data: Sequence[DataSet], folder: Path, tell: Callable[[str, int, int], None]
) -> tuple[Target, list[dict[str, Any]]]:
    """Runs what is not in `folder` yet and returns (target, figures of every temperature).

    tell: called with what is running, how many answers are ready, and of how many. Raises UserError for input
    that cannot be run, and where `folder` holds parts of another evaluation.
    """
    target = load_checked(settings)
    context = context_for(settings, data, target)
    keys = {d.name: _key(settings, target, d) for d in data}
    for d in data:
        for temperature in settings.temperatures:
            _check(_part(folder, d.name, temperature), keys[d.name] | {"temperature": temperature})
    recorders = [Recorder() for _ in range(len(settings.drafters) + 1)]
    llms = [open_llm(target, None, context, settings, recorders[0])]
    llms += [
        open_llm(target, d.path, context, settings, r)
        for d, r in zip(settings.drafters, recorders[1:], strict=True)
    ]
    arms = [Arm(PLAIN, "NONE", 0)]
    for d, llm in zip(settings.drafters, llms[1:], strict=True):
        if d.temperatures is not None:
            d.temperatures.table(llm.engine.block_size)
        arms.append(Arm(d.name, llm.algorithm, llm.engine.block_size, d.temperatures))
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    ahead = {t for t in settings.temperatures for d in data if not _part(folder, d.name, t).exists()}
    tell("compiling", 0, 1)
    make_ready(llms, [_params(settings, t) for t in sorted(ahead)])
    turns = 0
    for d in data:
        for temperature in settings.temperatures:
            path = _part(folder, d.name, temperature)
            if path.exists():
                continue
            params = _params(settings, temperature)
            runs: dict[str, Run] = {}
            # No arm always runs first.
            order = [(turns + i) % len(arms) for i in range(len(arms))]
            turns += 1
            total = sum(len(c.turns) or 1 for c in d.conversations)
            for i in order:
                what = f"{d.name}, temperature {temperature:g}, {arms[i].name}"
                tell(what, 0, total)
                runs[arms[i].name] = answer(
                    llms[i], recorders[i], d, params, settings.seed, lambda n, w=what, t=total: tell(w, n, t)
                )
            _save(path, runs, keys[d.name] | {"temperature": temperature})
    size = max([a.block_size for a in arms]) or settings.block_size or DEFAULT_BLOCK_SIZE
    prompts = {d.name: len(d.conversations) for d in data}
    results = []
    for temperature in settings.temperatures:
        own = {d.name: _load(_part(folder, d.name, temperature)) for d in data}
        results.append(analyse(temperature, arms, own, prompts, size))
    return target, results


def _params(settings: Settings, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        max_tokens=settings.max_new_tokens,
        ignore_eos=settings.ignore_eos,
        speculative_sampling=settings.speculative_sampling,
    )


# ── parts on disk ───────────────────────────────────────────────────────────────────────────────────────────────


def _part(folder: Path, data_set: str, temperature: float) -> Path:
    return folder / "parts" / f"{data_set}@{temperature:g}.npz"


def _key(settings: Settings, target: Target, data: DataSet) -> dict[str, Any]:
    """Everything that a part's figures depend on."""
    key = asdict(replace(settings, drafters=()))
    for name in ("drafters", "temperatures", "context_length"):
        del key[name]
    key["model_path"] = target.name
    key["dtype"] = target.dtype
    for drafter in settings.drafters:
        key[f"drafter {drafter.name}"] = _digest(drafter.path)
    return key | {"prompts": data.digest}


def _digest(path: str) -> str:
    """Of a drafter's files, since a folder's name says little about what was trained into it."""
    if path == UNTRAINED or not Path(path).is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.suffix in (".json", ".safetensors"):
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def _check(path: Path, key: Mapping[str, Any]) -> None:
    """Raises UserError where `path` is a part of another evaluation, with the first difference."""
    if not path.exists():
        return
    try:
        with np.load(path) as stored:
            there = json.loads(str(stored["key"]))
    except (OSError, ValueError, KeyError):
        raise UserError(f"{path} is no part of an evaluation; remove it, or choose another --output") from None
    for name in sorted(there.keys() | key.keys()):
        if there.get(name) != key.get(name):
            raise UserError(
                f"{path} is part of another evaluation ({name} was {there.get(name)!r} and is {key.get(name)!r}); "
                "choose another --output, or remove that folder"
            )


def _save(path: Path, runs: Mapping[str, Run], key: Mapping[str, Any]) -> None:
    """Written whole or not at all."""
    arrays: dict[str, Any] = {
        f"{arm}/{n}": values for arm, run in runs.items() for n, values in run.arrays().items()
    }
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, key=json.dumps(key), **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _load(path: Path) -> dict[str, Run]:
    fields: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as stored:
        for full in stored.files:
            arm, slash, name = full.rpartition("/")
            if slash:
                fields.setdefault(arm, {})[name] = stored[full]
    return {arm: Run(**values) for arm, values in fields.items()}
