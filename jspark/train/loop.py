"""A training run from text to a drafter's folder: what `jspark train` does.

Knows: how data, step, checkpoints and metrics fit together; when the device is waited for (once every few steps).
Does not know: flags (cli_train.py), losses, or file formats.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jspark.errors import UserError
from jspark.landing import fetch
from jspark.loading import Target
from jspark.train import arms
from jspark.train.config import TrainConfig
from jspark.train.pipeline import Batch, Packed, batches
from jspark.train.state_files import StateFiles
from jspark.train.step import TrainState, first_state, make_step, optimiser, place_batch
from jspark.train.text import Text


@dataclass(frozen=True)
class Run:
    """Where a run lives and how often it says something. Nothing here changes what is learnt.

    folder: gets `run.json`, `state/`, `metrics.jsonl`, `tensorboard/` and in the end `drafter/`. seconds: the run
    stops there, with a checkpoint, to be gone on with. peak: the device's rate in FLOP/s, for utilisation.
    """

    folder: Path
    resume: bool = False
    log_every: int = 10
    save_every: int = 500
    seconds: float = 0.0
    peak: float | None = None


def train(target: Target, text: Text, config: TrainConfig, run: Run, mesh: Mesh) -> dict[str, Any]:
    """Trains a drafter and exports it; returns the summary that `summary.json` holds.

    Raises UserError: text of another target, too little of it, memory too small, a folder of another run.
    """
    _check_text(target, text)
    packed = Packed(text, config.sequence_length, config.seed)
    steps = config.steps or max(1, round(config.epochs * len(packed) / config.batch_size))
    if config.batch_size % mesh.shape["data"]:
        raise UserError(
            f"a batch of {config.batch_size} cannot be spread over {mesh.shape['data']} devices; change the size"
        )
    arm = arms.make(config, target, mesh)
    record = {
        "target": target.name,
        "conversations": len(text),
        "text_tokens": packed.tokens,
        "steps": steps,
        **config.as_record(),
    }
    files = StateFiles(run.folder, record, resume=run.resume)
    transform = optimiser(config, steps)
    state = files.restore(first_state(arm.trainee.initial, transform, mesh))
    step = compiled_step(arm, config, target, transform, state, mesh)
    started, done = time.perf_counter(), int(state.step)
    stream = batches(packed, config.batch_size, config.seed, done)
    meter = Meter(run, config, done, arm.flops)
    saved = done
    with meter, _progress(steps, done) as progress:
        task = progress.task_ids[0]
        for number, batch in zip(range(done, steps), stream, strict=False):
            try:
                state, figures = step(state, target.model, place_batch(batch, mesh))
                if (number + 1) % run.log_every == 0 or number + 1 == steps:
                    shown = meter.read(number + 1, figures)
                    progress.update(task, completed=number + 1, **shown)
            except jax.errors.JaxRuntimeError as e:
                raise _memory(e) from None
            over = bool(run.seconds) and time.perf_counter() - started > run.seconds
            if (number + 1) % run.save_every == 0 or over:
                files.save(state)
                saved = number + 1
            if over:
                break
    done = int(state.step)
    if saved != done:
        files.save(state)
    files.close()
    summary = record | meter.summary() | {"steps_done": done, "finished": done >= steps}
    # Of a run that stopped early too: it drafts, only not as well as it will.
    arm.export(arm.trainee.module(state.params, jnp.bfloat16), run.folder / "drafter")
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def compiled_step(
    arm: arms.Arm, config: TrainConfig, target: Target, transform: Any, state: TrainState, mesh: Mesh
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Any]]]:
    """The step as a program; its state is donated."""
    shape = (config.batch_size, config.sequence_length)
    dtypes: dict[str, Any] = {"tokens": np.int32, "positions": np.int32, "segments": np.int32, "mask": bool}
    blank: dict[str, Any] = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    example = place_batch(Batch(**blank), mesh)
    exact = config.dtype == "float32"
    gpu = mesh.devices.flat[0].platform != "cpu"
    with jax.default_matmul_precision("highest" if exact else None):
        program = jax.jit(
            make_step(config, arm.trainee, arm.loss, transform),
            donate_argnums=(0,),
            out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
        )
        options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False} if gpu else {}
        try:
            return program.lower(state, target.model, example).compile(options)
        except jax.errors.JaxRuntimeError as e:
            raise _memory(e) from None


class Meter:
    """Figures of steps to a JSONL file and TensorBoard, and the rates between two readings.

    A resumed run's file loses the lines of steps that will be made again.
    """

    def __init__(self, run: Run, config: TrainConfig, done: int, flops: float):
        self._run, self._flops, self._done = run, flops, done
        self._tokens = config.batch_size * config.sequence_length
        self._path = run.folder / "metrics.jsonl"
        self._last: tuple[float, int] | None = None
        self._rates: list[float] = []
        self._newest: dict[str, Any] = {}

    def __enter__(self) -> Meter:
        from tensorboardX import SummaryWriter

        held = _lines(self._path, self._done)
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(held), encoding="utf-8")
        partial.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(self._run.folder / "tensorboard"), purge_step=self._done)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._board.close()

    def read(self, step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Waits for the step's figures and keeps them; what the progress bar shows."""
        values = {k: fetch(v).tolist() for k, v in figures.items()}
        now = time.perf_counter()
        line: dict[str, Any] = {"step": step, **values}
        if self._last is not None:
            rate = (step - self._last[1]) / (now - self._last[0])
            self._rates.append(rate)
            line |= {"steps_per_second": rate, "tokens_per_second": rate * self._tokens}
            if self._run.peak:
                line["model_flop_utilisation"] = rate * self._flops / self._run.peak
        self._last = (now, step)
        if not np.isfinite(line["loss"]):
            raise UserError(f"the loss of step {step} is {line['loss']}; lower --learning-rate and go on")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in line.items():
            for key, number in _scalars(name, value):
                self._board.add_scalar(key, number, step)
        self._newest = line
        return {"loss": line["loss"], "tau": line["accept_length"], "rate": line.get("tokens_per_second", 0.0)}

    def summary(self) -> dict[str, Any]:
        """The last figures, and the median rate."""
        rate = float(np.median(self._rates)) if self._rates else 0.0
        out = {"last": self._newest, "tokens_per_second": rate * self._tokens, "flops_per_step": self._flops}
        if self._run.peak:
            out["model_flop_utilisation"] = rate * self._flops / self._run.peak
        return out


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list):
        yield from ((f"{name}/{k}", float(v)) for k, v in enumerate(value, 1))
    elif name != "step":
        yield name, float(value)


def _lines(path: Path, upto: int) -> Sequence[str]:
    """Whole lines of a metrics file whose step is not beyond `upto`."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)

    def good(line: str) -> bool:
        try:
            return json.loads(line)["step"] <= upto
        except (ValueError, KeyError):  # the last line of a killed run
            return False

    return list(itertools.takewhile(good, lines))


def _check_text(target: Target, text: Text) -> None:
    for meta in text.meta:
        if meta.get("target") != target.name or meta.get("vocab_size") != target.config.vocab_size:
            raise UserError(
                f"the text was written for {meta.get('target')} (vocabulary {meta.get('vocab_size')}), not for "
                f"{target.name} ({target.config.vocab_size}); write text with this target"
            )


def _memory(e: Exception) -> Exception:
    if "RESOURCE_EXHAUSTED" not in str(e):
        return e
    return UserError(
        "the device's memory does not hold a training step; lower --batch-size or raise --accumulate, or lower "
        "--anchors or --chunk, or add --remat"
    )


def _progress(steps: int, done: int) -> Progress:
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}  τ {task.fields[tau]:.2f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task("training", total=steps, completed=done, loss=float("nan"), tau=1.0, rate=0.0)
    return progress
