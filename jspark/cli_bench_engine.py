"""`jspark bench soak`: flags of the benchmarks of an engine in this process.

Knows: flags and their defaults.
Does not know: how anything is measured (bench/).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jspark.errors import UserError


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
    limit: float = 400.0
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
