"""`jspark bench engine` and `jspark bench soak`: flags of the benchmarks of an engine in this process.

Knows: flags and their defaults, and how an interrupted run is kept.
Does not know: how anything is measured (bench/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jspark.config import DType
from jspark.errors import UserError


@dataclass(frozen=True)
class EngineLoad:
    """An engine under load: plain decoding, fixed windows, whole blocks and the scheduler, in turns."""

    model_path: str = "smollm2-135m"
    """The target: a Hugging Face folder, a GGUF file, or the built-in model."""
    speculative_draft_model_path: Annotated[
        str | None, arg(metavar="PATH", help_behavior_hint="(default: the model's own)")
    ] = None
    """The drafter's folder, or `untrained` for one of random weights."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of weights and KV cache."""
    workload: str = "mixed"
    """Prompts: math, code, chat, poetry, or mixed."""
    concurrency: Annotated[
        str | None,
        arg(metavar="N,N,…", help_behavior_hint="(default: 1,2,4,8 on the CPU, else 1,2,4,8,16,32,64,128,256)"),
    ] = None
    """Requests at a time."""
    temperature: Annotated[str, arg(metavar="T,T,…")] = "0,1"
    """Temperatures."""
    fixed: Annotated[str, arg(metavar="K,K,…")] = "2,4"
    """Windows of the arms that verify so many drafts of every row."""
    new_tokens: int = 128
    """Tokens of an answer, whatever the model says."""
    seconds: Annotated[float, arg(help_behavior_hint="(default: 4 on the CPU, 2 elsewhere)")] = 0.0
    """Of full load, for each arm at each concurrency and temperature."""
    rounds: int = 2
    """Turns of an arm among which these seconds are shared out."""
    seed: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: none, the rejection sampler)")
    ] = None
    """Of sampled requests; with one the coupled sampler is used."""
    no_alone: bool = False
    """Leaves out the arm on an engine without a drafter."""
    no_audit: bool = False
    """Leaves out the cap-accept arm, and with it the scheduler's utilisation."""
    compare_overlap: bool = False
    """Runs none, full and compact also in a loop that waits for each step."""
    device_trace: bool = False
    """Looks how long the device idles, in a trace of the profiler; GPUs only."""
    limit: Annotated[float, arg(metavar="SECONDS", help_behavior_hint="(default: none)")] = math.inf
    """No further concurrency begins after so long."""
    cost_table: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: measured)")] = None
    """The scheduler's cost table."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The record, ending in .json, rewritten after every concurrency; a picture is put beside it."""

    def run(self) -> int:
        """Measures, shows and saves; what is there when Ctrl-C comes is shown and saved too."""
        from jspark.axes import single_device_mesh
        from jspark.bench import engine, engine_report, report
        from jspark.bench.progress import progress
        from jspark.cost import CostTable

        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        mesh = single_device_mesh()
        cpu = mesh.devices.flat[0].platform == "cpu"
        settings = engine.Settings(
            model_path=self.model_path,
            draft=self.speculative_draft_model_path,
            dtype=self.dtype,
            workload=self.workload,
            concurrency=whole_numbers(
                "concurrency", self.concurrency or ("1,2,4,8" if cpu else "1,2,4,8,16,32,64,128,256")
            ),
            temperatures=numbers("temperature", self.temperature),
            fixed=whole_numbers("fixed", self.fixed),
            new_tokens=self.new_tokens,
            seconds=self.seconds or (4.0 if cpu else 2.0),
            rounds=self.rounds,
            alone=not self.no_alone,
            audit=not self.no_audit,
            overlap=self.compare_overlap,
            device_trace=self.device_trace,
            cost=None if self.cost_table is None else CostTable.from_file(self.cost_table),
            seed=self.seed,
            limit=self.limit,
        )
        record = report.describe("engine", report.command_line("jspark bench engine", self), mesh)
        results: report.Record = {"cells": []}
        try:
            with progress() as tell:
                for results in engine.measure(settings, tell):
                    record["results"] = results
                    if output is not None:
                        report.save_json(record, output)
        finally:
            if results["cells"]:
                engine_report.show(results)
                if output is not None:
                    size = 13, 1 + 3.4 * len({c["temperature"] for c in results["cells"]})
                    report.save_figure(output, lambda figure: engine_report.draw(results, figure), size)
        return 0


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """A list of numbers from a flag; UserError for anything else."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise UserError(f"--{flag} {text!r} is no list of numbers; write 0,1") from None


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """A list of whole numbers from a flag, each once, in increasing order; UserError for anything else."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part}))
    except ValueError:
        raise UserError(f"--{flag} {text!r} is no list of whole numbers; write 1,2,4") from None


@dataclass(frozen=True)
class Soak:
    """Hundreds of streams of which some are given up: all must end right, and nothing may be left behind."""

    model_path: Annotated[
        str | None, arg(metavar="PATH", help_behavior_hint="(default: a tiny one with random weights)")
    ] = None
    """A target that a drafter comes with, such as smollm2-135m."""
    streams: int = 256
    """Requests at a time."""
    requests: int = 2000
    """Requests in all."""
    longest_prompt: int = 1500
    """Prompts have from one to so many random tokens."""
    new_tokens: int = 24
    """Tokens of an answer."""
    aborted: float = 0.1
    """Share of requests that are given up while they wait or run."""
    checked: int = 150
    """Answers compared with plain decoding."""
    chunk: int = 2048
    """Prompt tokens in a step."""
    memory_share: float = 0.12
    """Share of the pages that all streams could need; below 1, some are preempted."""
    seed: int = 0
    """Of prompts, windows and who gives up."""
    limit: float = 480.0
    """Seconds after which no further request begins."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The record, ending in .json; a picture is put beside it."""

    def run(self) -> int:
        """Runs, shows and saves; 1 when something was wrong or left behind."""
        from jspark.axes import single_device_mesh
        from jspark.bench import report, soak
        from jspark.bench.progress import progress

        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        mesh = single_device_mesh()
        names = [f.name for f in fields(soak.Settings)]
        settings = soak.Settings(**{name: getattr(self, name) for name in names})
        record = report.describe("soak", report.command_line("jspark bench soak", self), mesh)
        with progress() as tell:
            record["results"] = results = soak.measure(settings, mesh, tell)
        if output is not None:
            report.save_json(record, output)
            report.save_figure(output, lambda figure: soak.draw(results, figure))
        soak.show(results)
        return 0 if soak.passed(results) else 1
